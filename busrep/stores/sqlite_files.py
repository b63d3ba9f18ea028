"""An SQLite file: connections to it, what runs on them, and what its errors mean."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from busrep.errors import ConfigError, SchemaError, Unavailable
from busrep.stores import schema
from busrep.stores.plans import Answers, Control, Locked, NoSuchTable, Plan, Signal, Step, T, run_sync

# How long a write waits for another process's transaction, seconds; then Unavailable, and it may be tried again.
BUSY = 30.0

CONTROLS = {
    Control.BEGIN: "BEGIN IMMEDIATE",  # takes the write lock now: upgrading later can fail with BUSY at once
    Control.SNAPSHOT: "BEGIN",
    Control.COMMIT: "COMMIT",
    Control.ROLLBACK: "ROLLBACK",
}

Execute = Callable[[tuple[Step, ...]], Answers]


def translated(error: sqlite3.Error, path: str) -> Exception:
    """The signal or error of busrep that this driver error is; itself when it is the statement's fault."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Locked(error)
    if "no such table" in str(error) or "no such column" in str(error):
        return NoSuchTable(error)
    if code == sqlite3.SQLITE_NOTADB:
        return ConfigError(f"{path} is not an SQLite database")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY):
        return Unavailable(f"SQLite database {path}", error)
    return error


def executor(connection: sqlite3.Connection, path: str) -> Execute:
    """Runs steps on a connection; must be called in the connection's thread."""

    def execute(steps: tuple[Step, ...]) -> Answers:
        answers: Answers = []
        cursor = connection.cursor()
        cursor.row_factory = None  # plain tuples, also on the caller's connection
        try:
            for step in steps:
                if isinstance(step, Control):
                    if step is not Control.ROLLBACK or connection.in_transaction:
                        cursor.execute(CONTROLS[step])
                elif step.many:
                    cursor.executemany(step.text, step.params)
                    answers.append([])
                else:
                    answers.append(cursor.execute(step.text, step.params).fetchall())
        except sqlite3.Error as error:
            raise translated(error, path) from error
        finally:
            cursor.close()
        return answers

    return execute


def final(error: Signal, path: str) -> Exception:
    """What a signal that no plan wanted is to the caller."""
    if isinstance(error, Locked):
        return Unavailable(f"SQLite database {path}", "another process holds its write lock")
    if isinstance(error, NoSuchTable) and "busrep_" in str(error.cause):
        return SchemaError(None, schema.VERSION)
    return error.cause if isinstance(error.cause, Exception) else error


def run(plan: Plan[T], execute: Execute, path: str) -> T:
    """`run_sync`, with the signals that are left turned into errors."""
    try:
        return run_sync(plan, execute)
    except Signal as signal:
        raise final(signal, path) from signal.cause


def file_at(path: str) -> tuple[int, int] | None:
    """Which file is there, (device, inode); None if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def check_file(path: str, opened: tuple[int, int] | None) -> None:
    """Raise Unavailable when the file is another by now: what is in ours, nobody else sees, and it proves nothing."""
    if file_at(path) != opened:
        raise Unavailable(
            f"SQLite database {path}", "its file was moved away, or replaced, since it was opened: restart this process"
        )


def _use_wal(connection: sqlite3.Connection, path: str) -> None:
    """Of two that make a file at the same time one finds it locked, at once: SQLite does not wait for this one."""
    late = time.monotonic() + BUSY
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not isinstance(translated(error, path), Locked) or time.monotonic() > late:
                raise
            time.sleep(0.01)


def connect(path: str, mode: str) -> sqlite3.Connection:
    """A connection to that file, which any one thread at a time may use. ``mode``: "rwc" makes the file, "rw" not."""
    try:
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
    except sqlite3.Error as error:
        problem = translated(error, path)
        raise (final(problem, path) if isinstance(problem, Signal) else problem) from error
    return connection
