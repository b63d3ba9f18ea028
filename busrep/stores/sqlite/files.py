"""An SQLite file: connections to it, what runs on them, and what its errors mean."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from busrep.errors import BusrepError, ConfigError, SchemaError, StatementRefused, Unavailable
from busrep.private_files import create_file
from busrep.stores import claims, plans, schema
from busrep.stores.dialect import Dialect
from busrep.stores.interface import Claim
from busrep.stores.plans import Answers, Control, Plan, Row, Signal, Sql, Step, T, only, run_sync

# How long a write waits for another process's transaction, seconds; then Unavailable, and it may be tried again.
BUSY = 30.0

CONTROLS = {
    Control.BEGIN: "BEGIN IMMEDIATE",  # takes the write lock now: upgrading later can fail with BUSY at once
    Control.SNAPSHOT: "BEGIN",
    Control.COMMIT: "COMMIT",
    Control.ROLLBACK: "ROLLBACK",
}

# What sqlite3 raises: of an integer beyond 64 bits, and of text that has no UTF-8, Python's own.
DRIVER_ERRORS = (sqlite3.Error, OverflowError, UnicodeEncodeError)

# A file system, a disk or a memory that does not do it now, or another connection that is in the way.
OUTAGES = frozenset(
    {
        sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_READONLY,
    }
)  # fmt: skip


def translated(error: Exception, path: str) -> Exception:
    """The signal or error of busrep that this driver error is: StatementRefused when it is the statement's fault."""
    where = f"SQLite database {path}"
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return plans.Locked(error)
    if "no such table" in str(error) or "no such column" in str(error):
        return plans.NoSuchTable(error)
    if code == sqlite3.SQLITE_NOTADB:
        return ConfigError(f"{path} is not an SQLite database")
    # Of a closed connection sqlite3 says "Cannot operate on a closed database", without a code.
    if code in OUTAGES or (isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error)):
        return Unavailable(where, error)
    return StatementRefused(where, error)


@contextlib.contextmanager
def translating(path: str) -> Iterator[None]:
    """Raise the driver's errors as busrep's."""
    try:
        yield
    except DRIVER_ERRORS as error:
        problem = translated(error, path)
        raise (final(problem, path) if isinstance(problem, Signal) else problem) from error


def in_transaction(connection: sqlite3.Connection | None) -> bool:
    """Whether a transaction is open on the connection; of one that is closed, none is."""
    with contextlib.suppress(sqlite3.ProgrammingError):
        return connection is not None and connection.in_transaction
    return False


def _run_steps(cursor: sqlite3.Cursor, steps: tuple[Step, ...]) -> Answers:
    answers: Answers = []
    for step in steps:
        if isinstance(step, Control):
            if step is Control.COMMIT:
                _commit(cursor)
            elif step is not Control.ROLLBACK or cursor.connection.in_transaction:
                cursor.execute(CONTROLS[step])
        elif step.many:
            cursor.executemany(step.text, step.params)
            answers.append([])
        else:
            answers.append(cursor.execute(step.text, step.params).fetchall())
    return answers


def _commit(cursor: sqlite3.Cursor) -> None:
    try:
        cursor.execute(CONTROLS[Control.COMMIT])
    except DRIVER_ERRORS as error:
        if cursor.connection.in_transaction:
            raise
        raise plans.Unanswered("the SQLite database", error) from error


def final(error: Signal, path: str) -> Exception:
    """What a signal that no plan wanted is to the caller."""
    if isinstance(error, plans.Locked):
        return Unavailable(f"SQLite database {path}", "another process holds its write lock")
    if isinstance(error, plans.NoSuchTable) and "busrep_" in str(error.cause):
        return SchemaError(None, schema.VERSION)
    return StatementRefused(f"SQLite database {path}", error.cause)


def run(plan: Plan[T], connection: sqlite3.Connection, path: str) -> T:
    """Run a plan on a connection, in the connection's thread, and turn the signals that are left into errors."""

    def execute(steps: tuple[Step, ...]) -> Answers:
        try:
            with contextlib.closing(connection.cursor()) as cursor:
                cursor.row_factory = None  # plain tuples, also on the caller's connection
                return _run_steps(cursor, steps)
        except DRIVER_ERRORS as error:
            raise translated(error, path) from error

    try:
        return run_sync(plan, execute)
    except Signal as signal:
        raise final(signal, path) from signal.cause


def callers(sql: str, params: Sequence[Any] | Mapping[str, Any], pending: Sequence[Sql]) -> Plan[list[Row]]:
    """A plan of the caller's own statement, behind those of ``pending``: its fault is told by the driver's error."""
    if pending:
        yield tuple(pending)
    try:
        # Steps are ours, this text is the caller's: params may be a mapping here.
        answers = yield Sql(sql, params)  # type: ignore[arg-type]
    except (StatementRefused, plans.NoSuchTable) as refused:
        raise (refused.reason if isinstance(refused, StatementRefused) else refused.cause) from None
    return answers[0]


class Mark:
    """Set in a transaction on the caller's connection; tells what became of that. To be used in the caller's thread.

    Code inside a fact's block may commit, or roll back, and sqlite3 then begins another transaction by itself, which
    looks just like the first one.
    """

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection, self._path = connection, path
        self._number = (random.getrandbits(62),)
        # Temporary: of this connection alone, in no file of the application's, and rolled back like any table.
        self._run(
            Sql("CREATE TEMP TABLE IF NOT EXISTS busrep_marks (mark INTEGER PRIMARY KEY)"),
            Sql("INSERT INTO temp.busrep_marks VALUES (?)", self._number),
        )

    @property
    def stands(self) -> bool:
        """In a transaction: whether none was rolled back since it was set. After a ROLLBACK: whether it was committed
        before."""
        try:
            return bool(self._run(Sql("SELECT 1 FROM temp.busrep_marks WHERE mark = ?", self._number))[0])
        except BusrepError:  # the connection is closed, or the table was rolled back as well
            return False

    def clear(self) -> None:
        """In a transaction: it has told."""
        self._run(Sql("DELETE FROM temp.busrep_marks WHERE mark = ?", self._number))

    def _run(self, *steps: Sql) -> Answers:
        return run(only(*steps), self._connection, self._path)


def last_steps(dialect: Dialect, held: Claim, pending: Sequence[Sql], *last: Control, again: bool) -> Plan[None]:
    """The rows of a fact, and ``last``. ``again``: the claim is locked again first; where others had the connection."""
    if again:  # a transaction may have been committed since. First: no row is written without the claim
        yield from claims.hold(dialect, held)
    if pending:
        yield tuple(pending)
    if last:
        yield last


def file_at(path: str) -> tuple[int, int] | None:
    """Which file is there, (device, inode); None if there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


# No file system's times are coarser, seconds. (Of FAT, 2.)
COARSEST = 3.0


def names_in(folder: str) -> tuple[int, int, int] | None:
    """What stays the same while no name in a folder is made, moved or deleted; None where that might not show."""
    with contextlib.suppress(OSError):
        found = os.stat(folder)
        if time.time() - found.st_ctime > COARSEST:
            return found.st_dev, found.st_ino, found.st_ctime_ns
    return None


def wal_of(path: str) -> str:
    """Where SQLite has the log of a file in WAL mode: beside the file itself, also of a symbolic link to it."""
    return f"{os.path.realpath(path)}-wal"


def _use_wal(connection: sqlite3.Connection, path: str) -> None:
    """Of two that make a file at the same time one finds it locked, at once: SQLite does not wait for this one."""
    late = time.monotonic() + BUSY
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not isinstance(translated(error, path), plans.Locked) or time.monotonic() > late:
                raise
            time.sleep(0.01)


FULL = 2  # of PRAGMA synchronous: each commit is on the disk when it is answered


def require_durable(connection: sqlite3.Connection, path: str) -> None:
    """See to it that what is committed on the caller's connection survives a power cut.

    Sets PRAGMA synchronous on it; ConfigError in a transaction, where SQLite does not let it be set.
    """
    with translating(path), contextlib.closing(connection.cursor()) as cursor:
        cursor.row_factory = None
        (level,) = cursor.execute("PRAGMA synchronous").fetchone()
        if level >= FULL:
            return
        if connection.in_transaction:
            raise ConfigError(
                f"connection= runs with PRAGMA synchronous = {level}, under which a power cut takes back facts that "
                "were published: execute 'PRAGMA synchronous = FULL' on it before its transaction begins"
            )
        cursor.execute(f"PRAGMA synchronous = {FULL}")


def connect(path: str, mode: str) -> sqlite3.Connection:
    """A connection to that file, which any one thread at a time may use. ``mode``: "rwc" makes the file, "rw" not."""
    if mode == "rwc":
        with contextlib.suppress(OSError):  # SQLite says what is wrong
            create_file(path)  # SQLite gives its mode to the files beside it, -wal and -shm
    with translating(path):
        connection = sqlite3.connect(
            f"{Path(path).absolute().as_uri()}?mode={mode}",
            uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY,
        )  # fmt: skip
        try:
            # A fact that was published must survive a power cut: readers would be ahead of the table.
            connection.execute("PRAGMA synchronous = FULL")
            if mode == "rwc":
                _use_wal(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection
