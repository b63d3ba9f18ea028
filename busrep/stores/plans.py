"""How SQL is run: plans ask for statements, executors run them, on busrep's connections or the caller's.

A *plan* is a generator. It yields steps (SQL with parameters, or the bounds of a transaction), one or several at a
time, and receives the rows of each SQL statement among them; it returns the operation's result. It does no I/O, so
the same plan runs on sqlite3, on psycopg sync and async, in busrep's transaction or in the caller's. Steps yielded
together go to the server in one round trip, where the driver can.

Texts use ``?`` for parameters and contain neither ``?`` nor ``%`` otherwise; executors translate.
Driver errors that a plan may want to act on reach it as the signals below; connection trouble as Unavailable.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, ParamSpec, TypeVar

import attrs

from busrep.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")
Row = tuple[Any, ...]
Answers = list[list[Row]]
"""The rows of each SQL statement of the steps that were asked, in order."""


@attrs.frozen
class Sql:
    """One statement; with ``many``, ``params`` is a sequence of parameter rows and there is no answer.

    ``repeated``: this text is run again and again, so that a server may keep its plan. Not where something is lost if
    it finds no rows: PostgreSQL's EXECUTE takes its snapshot before it waits for the lock of a table, and one that an
    ALTER TABLE has rewritten meanwhile is empty in it (PostgreSQL's documentation, MVCC caveats).
    """

    text: str
    params: Sequence[Any] = ()
    many: bool = False
    repeated: bool = False


class Control(enum.Enum):
    """Bounds of a transaction that the plan owns."""

    BEGIN = "begin"  # a writing transaction; READ COMMITTED on PostgreSQL, IMMEDIATE on SQLite
    SNAPSHOT = "snapshot"  # a reading transaction, all statements of which see one state
    COMMIT = "commit"
    ROLLBACK = "rollback"


Step = Sql | Control
Steps = Step | tuple[Step, ...]
Plan = Generator[Steps, Answers, T]


class Signal(Exception):
    """A driver error that a plan may act on; ``cause`` is the driver's exception."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause
        super().__init__(f"{type(cause).__name__}: {cause}")


class Unanswered(Unavailable):
    """It is not known whether the last steps were executed."""


class Locked(Signal):
    """A lock was not granted within its timeout."""


class SerializationFailed(Signal):
    """The transaction's snapshot is older than a row it wanted to lock."""


class NoSuchTable(Signal):
    """A table, column or sequence does not exist."""


def only(*steps: Step) -> Plan[Answers]:
    """These steps and nothing else; the result is their answers."""
    return (yield steps)


def in_transaction(body: Plan[T]) -> Plan[T]:
    """Run ``body``, which yields BEGIN with its first steps and COMMIT with its last; roll back if it fails."""
    try:
        return (yield from body)
    except GeneratorExit:
        raise
    except BaseException:
        # What went wrong first is told; that this failed too shows in the connection's state.
        with contextlib.suppress(Exception):
            yield Control.ROLLBACK
        raise


def transaction(plan: Callable[P, Plan[T]]) -> Callable[P, Plan[T]]:
    """Make of a plan one that runs `in_transaction`."""

    @functools.wraps(plan)
    def whole(*args: P.args, **kwargs: P.kwargs) -> Plan[T]:
        return in_transaction(plan(*args, **kwargs))

    return whole


async def run_async(plan: Plan[T], execute: Callable[[tuple[Step, ...]], Awaitable[Answers]]) -> T:
    """Run a plan with an asyncio executor. Cancelled: the plan is closed, the connection's owner rolls back."""
    try:
        steps = next(plan)
        while True:
            problem = None
            try:
                answers = await execute(steps if isinstance(steps, tuple) else (steps,))
            except Exception as error:  # thrown into the plan, which raises it again unless it acts on it
                problem = error
            # Not while it is being handled here: it would be the context of all that the plan raises by itself.
            try:
                steps = plan.send(answers) if problem is None else plan.throw(problem)
            finally:
                problem = None  # its traceback leads to this frame
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        plan.close()


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("a blocking store waited for an event loop")


def run_sync(plan: Plan[T], execute: Callable[[tuple[Step, ...]], Answers]) -> T:
    """Run a plan with a blocking executor."""

    async def at_once(steps: tuple[Step, ...]) -> Answers:
        return execute(steps)

    return complete(run_async(plan, at_once))
