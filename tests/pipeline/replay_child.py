"""A replay without Spark, killed at a step: `python -m tests.pipeline.replay_child`, its task as JSON on stdin.

At the given number of passes of the step that it is told it sends itself SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from busrep import Settings
from busrep.spark.replay_pace import Chunks, Fact, Pace, facts_of
from busrep.spark.replay_target import Target, target_stream
from busrep.stores.sqlite.base import SqliteTransaction
from busrep.sync.session import Publishing
from busrep.sync.writing import BlockingFact as OpenFact
from tests.transactions import TRANSACTIONS, surrounded

EPOCH = "e" * 32
# Facts that are written at a time: few enough for all kills, and of each writer several, so that one transaction has
# facts of one row and of more.
AT_A_TIME = 14
QUICK = Settings(heartbeat=0.1, retry_min=0.02, retry_max=0.2, redis_timeout=2.0, shutdown_timeout=2.0)


@attrs.frozen
class Task:
    """Rows as the source gives them, and where they go."""

    rows: Sequence[Any]
    redis: str
    name: str
    store: str | None
    step: str | None = None
    passes: int = 1


def replayed(task: Task) -> dict[tuple[str, str], int]:
    """Do it; gives where it began."""
    facts = list(facts_of(map(tuple, task.rows)))  # type: ignore[arg-type]
    streams = {fact.stream: target_stream(fact.stream, None, in_memory=task.store is None) for fact in facts}
    target = Target(
        task.redis, task.name, streams, dict.fromkeys(streams, EPOCH), store=task.store, prefix="r-", settings=QUICK
    )
    try:
        marks = target.open({(fact.stream, fact.writer): 0 for fact in facts})
        left = [fact for fact in facts if fact.token > marks[fact.stream, fact.writer]]
        for chunk in Chunks(Pace(), lambda: 0.0, never).of(left):
            for at in range(0, len(chunk), AT_A_TIME):
                target.write(chunk[at : at + AT_A_TIME])
        return marks
    finally:
        target.close()


def never(seconds: float) -> None:
    raise AssertionError(f"a replay flat out waits {seconds} s")


def die(*args: Any, **more: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def at_pass(owner: Any, name: str, passes: int, *, before: bool) -> None:
    real, seen = getattr(owner, name), iter(range(1, passes + 1))

    def pass_by() -> None:
        if next(seen) == passes:
            die()

    setattr(owner, name, surrounded(real, before=pass_by) if before else surrounded(real, after=pass_by))


def at_commit(passes: int, *, before: bool) -> None:
    for transaction in TRANSACTIONS:
        if "commit" in vars(transaction) or not issubclass(transaction, SqliteTransaction):
            at_pass(transaction, "commit", passes, before=before)


STEPS = {
    "opened": lambda n: at_pass(Target, "open", 1, before=False),
    "a fact begun": lambda n: at_pass(OpenFact, "__enter__", n, before=False),
    "marked, not committed": lambda n: at_pass(OpenFact, "execute", n, before=False),
    "before COMMIT": lambda n: at_commit(n, before=True),
    "committed": lambda n: at_commit(n, before=False),
    "published": lambda n: at_pass(Publishing, "publish", n, before=False),
    "written": lambda n: at_pass(Target, "write", n, before=False),
    "closed": lambda n: at_pass(Target, "close", 1, before=False),
}


def fact(stream: str, writer: str, token: int, *rows: str, time: int | None = None) -> Fact:
    return Fact(stream, writer, token, time, tuple(row.encode() for row in rows))


def main() -> None:
    task = Task(**json.load(sys.stdin))
    if task.step is not None:
        STEPS[task.step](task.passes)
    replayed(task)


if __name__ == "__main__":
    main()
