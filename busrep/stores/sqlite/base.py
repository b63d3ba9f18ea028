"""What the SQLite stores for asyncio and for threads have in common: one file, a turn to write, and a transaction.

A store has two connections: reads never wait behind an open write transaction. Inside one process write transactions
wait for the `Turn`; between processes SQLite's busy timeout decides.
"""

from __future__ import annotations

import abc
import contextlib
import os
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from busrep.errors import BusrepError, ClaimBlocked, CommitUnknown, ConfigError, Unavailable
from busrep.settings import Settings
from busrep.stores import schema
from busrep.stores.interface import Claim
from busrep.stores.planned import PlannedStore, PlannedTransaction
from busrep.stores.plans import Control, Plan, T, only
from busrep.stores.sqlite import files
from busrep.stores.sqlite.dialect import SqliteDialect, check_fields
from busrep.stores.transaction import ENDED_INSIDE
from busrep.streams import Registry

IN_TRANSACTION = (
    "the connection is in a transaction already: on SQLite begin with bus.write(), the fact's ID must be reserved "
    "before the one write lock is taken"
)

# The two connections.
WRITE, READ = 0, 1


class Holder:
    """What a turn is taken for: one transaction. ``over``: it has ended, whether or not that could be told. ``owner``:
    the task or thread that took it, and would wait for itself; None: it may wait."""

    over = False
    owner: object = None


class Turn(abc.ABC):
    """The turn to write, in this process. Its holder lets it go by name, so that an interrupted thread leaves nothing
    locked that is not written down somewhere."""

    asker: str  # who waits: for a person
    owner: Callable[[], object]  # the task or thread that asks

    def __init__(self, path: str) -> None:
        self._path = path
        self._holder: Holder | None = None

    @abc.abstractmethod
    async def take(self, holder: Holder, wait: float) -> None:
        """Wait for the turn. Raises ConfigError where who asks has it, Unavailable after ``wait`` seconds."""

    @abc.abstractmethod
    def leave(self, holder: Holder) -> None:
        """Let the next one write; nothing if it is not that one's turn (any more)."""

    def of(self, holder: Holder) -> bool:
        """Whether it is that one's turn."""
        return self._holder is holder

    def check_not_nested(self) -> None:
        """Raise ConfigError in a task or thread whose turn it is."""
        holder = self._holder
        if holder is not None and not holder.over and holder.owner is not None and holder.owner == self.owner():
            raise ConfigError(
                f"SQLite has one write lock, and this {self.asker} holds it in an open fact: reserve, write and save "
                "before it or after it, or use PostgreSQL"
            )

    def _late(self, wait: float) -> Unavailable:
        reason = f"a fact of this process has been open for more than {wait:g} s"
        return Unavailable(f"SQLite database {self._path}", reason)


class FileStore(PlannedStore):
    """An `AsyncStore` on an SQLite file, whichever runtime it is for."""

    transactions: type[SqliteTransaction]
    # In a transaction that the caller has begun; None: there are none.
    joining: type[SqliteTransaction] | None = None

    def __init__(self, path: str, streams: Registry, settings: Settings, turn: Turn) -> None:
        super().__init__(streams, settings, SqliteDialect(f"sqlite:///{path}"))
        self.path, self.turn = path, turn
        for backing in self.dialect.backings.values():
            check_fields(backing, backing.definition.fields or ())
        self._connections: list[sqlite3.Connection] = []
        self._files: dict[str, tuple[int, int] | None] = {}
        self._folder = ""  # of the log
        self._names: tuple[int, int, int] | None = None  # `names_in` it, when all files were there

    @abc.abstractmethod
    async def in_thread(self, role: int, work: Callable[[], T]) -> T:
        """Do what needs the connection of that role, where no one else uses it."""

    async def open(self) -> None:
        """See `AsyncStore`; a missing file is a missing schema, and is not created."""
        try:
            self._files = {self.path: files.file_at(self.path)}
            if self._files[self.path] is None:
                raise schema.missing(self.dialect)
            for role in (WRITE, READ):
                self._connections.append(await self.in_thread(role, lambda: files.connect(self.path, "rw")))
            await self.read(schema.check(self.dialect))
            kept = await self.read(schema.stored_streams(self.dialect))
            for name, backing in self.dialect.backings.items():
                check_fields(backing, (kept[name].fields if name in kept else None) or ())
            if log := files.file_at(wal := files.wal_of(self.path)):  # in WAL mode alone
                self._files[wal] = log
            self._folder = os.path.dirname(wal)
        except BaseException:
            await self.close()
            raise

    @abc.abstractmethod
    async def close(self) -> None:
        """See `AsyncStore`. Open transactions are rolled back."""

    def make_tables(self, redefine: Collection[str]) -> None:
        """Create or migrate the tables, in this thread. See `AsyncStore.init`."""
        with contextlib.closing(files.connect(self.path, "rwc")) as connection:
            self.run(connection, schema.init(self.dialect, redefine))

    def role(self, role: int) -> sqlite3.Connection:
        """The connection of that role. Raises Unavailable."""
        if not self._connections:
            raise Unavailable(f"SQLite database {self.path}", "the store is not open")
        return self._connections[role]

    def check_file(self) -> None:
        """Raise Unavailable when a file is another than the one that was opened: no other process sees that one."""
        # Not the log itself at each write: Linux since 6.13 would give it new times each time (multigrain timestamps),
        # which made a commit a third longer.
        names = files.names_in(self._folder)
        looked_at = [self.path] if names is not None and names == self._names else self._files
        for path in looked_at if self._connections else ():
            if files.file_at(path) != self._files[path]:
                lost = f"{path} was moved away, deleted or replaced since it was opened: restart this process"
                raise Unavailable(f"SQLite database {self.path}", lost)
        self._names = names

    def check_open(self) -> None:
        self.role(WRITE)
        self.check_file()

    def run(self, connection: sqlite3.Connection, plan: Plan[T]) -> T:
        """Run a plan; must be called in the connection's thread."""
        return files.run(plan, connection, self.path)

    async def read(self, plan: Plan[T], wait: float = 0.0) -> T:  # noqa: ARG002 - no server
        self.check_open()
        connection = self.role(READ)
        return await self.in_thread(READ, lambda: self.run(self._cleared(connection), plan))

    def writing(self) -> sqlite3.Connection:
        """The connection that writes, for whose turn it is. Raises Unavailable."""
        self.check_open()
        return self._cleared(self.role(WRITE))

    def _cleared(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        """The connection, in no transaction any more: a thread may have been interrupted in one."""
        with files.translating(self.path):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        return connection

    async def take_turn(self, holder: Holder, wait: float | None) -> None:
        """Take the turn for one plan; ``wait`` as `write` has it. Raises ClaimBlocked, Unavailable, ConfigError."""
        try:
            await self.turn.take(holder, files.BUSY if wait is None else wait)
        except Unavailable as late:
            if wait is None:
                raise
            raise ClaimBlocked("*", [str(late.reason)]) from late

    def write_on(self, connection: sqlite3.Connection, plan: Plan[T], wait: float | None) -> T:
        """Run a plan that writes; ``wait``: for other processes, seconds. Must be called in the connection's thread."""
        if wait is None:
            return self.run(connection, plan)
        with files.translating(self.path):
            try:
                connection.execute(f"PRAGMA busy_timeout = {int(wait * 1000)}")
                return self.run(connection, plan)
            finally:
                connection.execute(f"PRAGMA busy_timeout = {int(files.BUSY * 1000)}")

    async def _on(self, connection: Any, plan: Plan[T]) -> T:
        return self.run(checked(connection), plan)

    def transaction(self, claim: Claim, connection: Any = None) -> SqliteTransaction:
        """See `AsyncStore`. ConfigError inside an open fact of the same task or thread."""
        self.turn.check_not_nested()
        made = self.transactions
        if connection is not None:
            if files.in_transaction(checked(connection)):
                if self.joining is None:
                    raise ConfigError(IN_TRANSACTION)
                made = self.joining
            files.require_durable(connection, self.path)
        return made(self, claim, connection)


def checked(connection: Any) -> sqlite3.Connection:
    """The caller's connection; ConfigError when it is none of sqlite3, or gives no texts."""
    if not isinstance(connection, sqlite3.Connection):
        raise ConfigError(f"a sqlite3.Connection is needed, not {type(connection).__name__}")
    made = connection.text_factory
    if made is not str and not isinstance(made(b""), str):
        raise ConfigError(f"connection= has text_factory = {made!r}, and busrep reads texts on it: leave it at str")
    return connection


class SqliteTransaction(PlannedTransaction, Holder):
    """An `AsyncTransaction`: on the store's writing connection, in its thread, or on the caller's, in the caller's
    thread (which is the event loop's)."""

    store: FileStore

    def __init__(self, store: FileStore, claim: Claim, connection: sqlite3.Connection | None) -> None:
        super().__init__(store, claim, connection)
        self._mark: files.Mark | None = None  # on the caller's connection

    async def still_open(self) -> bool:
        return self.store.turn.of(self)

    @property
    def ended(self) -> bool:
        try:
            return self.connection is not None and not self.connection.in_transaction
        except sqlite3.ProgrammingError:  # it is closed
            return False

    async def _run(self, plan: Plan[T]) -> T:
        connection = self.connection
        if self._callers:
            return self.store.run(connection, plan)
        return await self.store.in_thread(WRITE, lambda: self.store.run(connection, plan))

    async def begin(self, ids: Mapping[str, int] = {}) -> Mapping[str, Sequence[int]]:  # noqa: ARG002
        """See `AsyncTransaction`. The write lock itself keeps any successor from claiming meanwhile."""
        ours = False
        try:
            self.store.check_file()
            await self.store.turn.take(self, files.BUSY)
            if self.connection is None:
                self.connection = self.store.writing()
            ours = not files.in_transaction(self.connection)
            await self._run(self.hold(Control.BEGIN))
            if self._callers:
                self._mark = files.Mark(self.connection, self.store.path)
        except BaseException:
            if ours:  # in the same thread: BEGIN may be under way still, or done, and what came behind it failed
                await self._end()
            else:
                self.store.turn.leave(self)
            raise
        return {}

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        self._handed_out = True
        return await self._run(files.callers(sql, params, self._take_pending()))

    async def commit(self) -> None:
        pending = self._take_pending()
        if not files.in_transaction(self.connection) or (self._mark is not None and not self._mark.stands):
            await self._end()
            raise CommitUnknown(self, ConfigError(ENDED_INSIDE))
        try:
            if self._mark is not None:
                self._mark.clear()
            last = files.last_steps(self.store.dialect, self.claim, pending, Control.COMMIT, again=self._handed_out)
            await self._commit(last)
        except CommitUnknown:
            raise
        except self.failures as error:
            if files.in_transaction(self.connection):
                raise  # nothing was committed; rollback() is due
            self.store.turn.leave(self)
            raise CommitUnknown(self, error) from error
        self.store.turn.leave(self)

    async def _commit(self, last: Plan[None]) -> None:
        await self._run(last)

    async def rollback(self) -> bool:
        self._take_pending()
        if not self.store.turn.of(self):
            return True
        open_still = files.in_transaction(self.connection)  # of one that is closed it is not known how that came
        await self._end()
        return open_still and not (self._handed_out if self._mark is None else self._mark.stands)

    async def _end(self) -> None:
        """Roll back what is open, and let the next one write."""
        if not self.store.turn.of(self):
            return
        try:
            if self.connection is not None:
                with contextlib.suppress(BusrepError):
                    await self._run(only(Control.ROLLBACK))
        finally:
            self.store.turn.leave(self)
