"""Every exception busrep raises on purpose.

docs/errors/index.md lists them and draws the tree of their classes. Errors carry their facts as attributes; the class
writes the message, which says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A bad line is quoted up to this many bytes (protocol.md, section 1): enough to find it, not enough to flood a log.
QUOTED_BYTES = 200

# What makes a stream's tables, and keeps the fields of its rows, where the store and the module are not known.
INIT_DECLARED = "busrep db init --store URL --streams MODULE:NAME"


class BusrepError(Exception):
    """Base of all busrep errors. They can be pickled, so they pass between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with the message alone, where most need their fields.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[BusrepError], args: tuple[Any, ...], fields: dict[str, Any]) -> BusrepError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigError(BusrepError):
    """What the caller configured cannot work; the message says what to change."""


class MissingExtra(ConfigError):
    """An optional dependency is needed and not installed."""

    def __init__(self, extra: str, purpose: str) -> None:
        self.extra, self.purpose = extra, purpose
        super().__init__(f"{purpose} needs an extra that is not installed: pip install 'busrep[{extra}]'")


class NoSnapshots(ConfigError):
    """A source that gives pages of rows gives no snapshots. ``source``: which one, as errors name it."""

    def __init__(self, source: str) -> None:
        self.source = source
        super().__init__(f"{source} gives no snapshots: pass snapshot_source= to connect()")


class RowClassMismatch(ConfigError):
    """The row class of a stream has other fields than the rows that are stored.

    ``declared`` and ``stored`` show the fields of each, ``reason`` says what does not fit. ``command``: as it is typed.
    """

    def __init__(self, stream: str, reason: str, declared: str, stored: str, command: str = INIT_DECLARED) -> None:
        self.stream, self.reason, self.declared, self.stored = stream, reason, declared, stored
        super().__init__(
            f"the row class of stream {stream!r} does not fit the rows that are stored: {reason}. Declared: "
            f"{declared}; stored: {stored}. Add fields at the end, with defaults, or give the new class a stream of "
            "its own. If no row of the stored kind is left: "
            f"{command} --redefine {stream}"
        )


class ParseError(BusrepError):
    """A line, or a whole message, that is not of the protocol.

    ``line`` is cut to 200 bytes, ``field`` names the bad field, ``reason`` says what is wrong with it.
    """

    def __init__(self, line: bytes, field: str, reason: str) -> None:
        self.line, self.field, self.reason = line[:QUOTED_BYTES], field, reason
        super().__init__(f"bad {field}: {reason}: {self.line!r}")


class RowError(BusrepError):
    """A row that does not fit the row type of its stream."""

    def __init__(self, stream: str, field: str, reason: str, row: object = None) -> None:
        self.stream, self.field, self.reason, self.row = stream, field, reason, row
        super().__init__(f"stream {stream!r}, {field}: {reason} (row {_quoted(row)})")


def _quoted(row: object) -> str:
    try:
        return repr(row)[:QUOTED_BYTES]
    except RecursionError:  # JSON that is nested deeper than Python's stack
        return f"{type(row).__name__}, nested too deep to show"


class UnknownStream(BusrepError):
    """A stream that is not registered on this bus."""

    def __init__(self, stream: str, known: Sequence[str] = ()) -> None:
        self.stream, self.known = stream, tuple(known)
        listed = ", ".join(sorted(self.known)) or "none"
        super().__init__(f"stream {stream!r} is not registered on this bus ({listed}): pass it in streams=")


class NotAWriter(BusrepError):
    """A write was asked of a process that does not write that stream."""

    def __init__(self, stream: str, writer: str | None = None) -> None:
        self.stream, self.writer = stream, writer
        who = f"writer {writer!r}" if writer else "a bus without a writer name"
        super().__init__(f"{who} cannot write stream {stream!r}: pass writer= and the stream to connect()")


class SequenceWentBack(BusrepError):
    """The sequence gave an ID not above one that was known when it was asked; the ID was not used."""

    def __init__(self, stream: str, got: int, known: int) -> None:
        self.stream, self.got, self.known = stream, got, known
        super().__init__(
            f"the sequence of stream {stream!r} gave {got}, but {known} was known already: was the database "
            "restored? Run 'busrep db restored' and restart the writers"
        )


class WriterFenced(BusrepError):
    """Another process claimed this writer's name, or declared it dead; nothing more may be published under it."""

    def __init__(self, writer: str, incarnation: int) -> None:
        self.writer, self.incarnation = writer, incarnation
        super().__init__(
            f"writer {writer!r} (incarnation {incarnation}) was fenced: its name was claimed anew, or the "
            "database restored. Restart this process; give each live process a name of its own"
        )


class CommitsLost(WriterFenced):
    """Facts that this process committed are not in the table any more: a failover, or a restore, has lost them.

    ``stream``, ``committed``: one of them.
    """

    def __init__(self, writer: str, incarnation: int, stream: str, committed: int) -> None:
        super().__init__(writer, incarnation)
        self.stream, self.committed = stream, committed
        self.args = (
            f"writer {writer!r} had committed fact {committed} of stream {stream!r}, and it is not in the table any "
            "more: the database has lost commits in a failover, or was restored. Run 'busrep db restored', then "
            "restart this process",
        )


class ClaimBlocked(BusrepError):
    """The writer's name cannot be claimed: a transaction of its predecessor still holds it."""

    def __init__(self, writer: str, blockers: Sequence[str]) -> None:
        self.writer, self.blockers = writer, tuple(blockers)
        super().__init__(
            f"writer {writer!r} is still held by {', '.join(self.blockers) or 'an open transaction'}: wait for it "
            "to end, or end it, and start again"
        )


class PositionsAheadOfTable(BusrepError):
    """Positions were proven that neither the rows nor the sequence reach: the table is an older state."""

    def __init__(self, stream: str, position: int, highest: int) -> None:
        self.stream, self.position, self.highest = stream, position, highest
        super().__init__(
            f"stream {stream!r}: position {position} was proven, but its table and sequence end at {highest}. If "
            "the database was restored to an older state run 'busrep db restored'"
        )


class EpochChanged(BusrepError):
    """The fact log is another one than these positions were taken from (a restore, or another database)."""

    def __init__(self, held: str, found: str) -> None:
        self.held, self.found = held, found
        super().__init__(
            f"positions are of epoch {held}, the fact log is of epoch {found}: it was restored or replaced. Begin "
            "again with on_epoch_change='rebootstrap', or give the reader a new name"
        )


class PositionTooOld(BusrepError):
    """Rows at or below the retention floor were asked for; they have been deleted. ``epoch``: that of the log with this
    floor. Every `FactSource` gives it; it is None in errors from elsewhere."""

    def __init__(self, stream: str, writer: str, position: int, floor: int, epoch: str | None = None) -> None:
        self.stream, self.writer, self.position, self.floor = stream, writer, position, floor
        self.epoch = epoch
        super().__init__(
            f"stream {stream!r}, writer {writer!r}: position {position} is below the retention floor {floor}; the "
            "rows between are gone. Start again from a snapshot, or with start='earliest' under a new reader name"
        )


class SnapshotGone(BusrepError):
    """The snapshot that was agreed cannot be had any more: rows of it were pruned, or the log is another one."""

    def __init__(self, stream: str, reason: str) -> None:
        self.stream, self.reason = stream, reason
        super().__init__(f"the snapshot of stream {stream!r} cannot be had any more: {reason}; it begins anew")


class ReaderMoved(BusrepError):
    """A saved position was not where this process left it: another process reads under the same name."""

    def __init__(self, reader: str, stream: str, writer: str, expected: int) -> None:
        self.reader, self.stream, self.writer, self.expected = reader, stream, writer, expected
        super().__init__(
            f"reader {reader!r}: the saved position of ({stream}, {writer}) is not {expected} any more; roll back. "
            "Does another process read under this name?"
        )


class WaitTimeout(BusrepError, TimeoutError):
    """A position was not reached in time."""

    def __init__(self, stream: str, writer: str, token: int, position: int, timeout: float) -> None:
        self.stream, self.writer, self.token, self.position, self.timeout = stream, writer, token, position, timeout
        super().__init__(f"({stream}, {writer}) did not reach {token} within {timeout:g} s; it is at {position}")


class HandlerFailed(BusrepError):
    """A handler kept raising on the same rows; its (stream, writer) has stopped, the others go on."""

    def __init__(self, stream: str, writer: str, token: int, error: BaseException) -> None:
        self.stream, self.writer, self.token, self.error = stream, writer, token, error
        super().__init__(
            f"the handler of ({stream}, {writer}) failed at {token}: {type(error).__name__}: {error}; mend it, then "
            "call bus.resume() or restart"
        )


class StagedRowsGone(BusrepError):
    """Of the rows that were staged for a batch some are not there. Nothing of it was written."""

    def __init__(self, query: str, batch: int, found: int, expected: int) -> None:
        self.query, self.batch, self.found, self.expected = query, batch, found, expected
        super().__init__(
            f"batch {batch} of query {query!r}: {found} of {expected} staged rows are there. Did the database server "
            "crash, or does a second process run this query? Nothing of it was written; start the query again"
        )


class SchemaError(BusrepError):
    """The tables are missing, or of another version than this library."""

    def __init__(self, found: int | None, expected: int, command: str = "busrep db init") -> None:
        self.found, self.expected = found, expected
        if found is None:
            what = f"the store has no busrep tables: run '{command}'"
        elif found < expected:
            what = f"the store's schema is version {found}, this busrep needs {expected}: run '{command}'"
        else:
            what = f"the store's schema is version {found}, newer than this busrep ({expected}): upgrade busrep"
        super().__init__(what)


class StatementRefused(BusrepError):
    """The database refuses a statement of busrep's own: a value that it cannot store, a constraint that a row or COMMIT
    violates, a damaged file. ``reason``: the driver's error."""

    def __init__(self, where: str, reason: BaseException) -> None:
        self.where, self.reason = where, reason
        super().__init__(f"{where} refuses a statement: {type(reason).__name__}: {str(reason).strip()}")


class CommitUnknown(BusrepError):
    """COMMIT was sent and its outcome is not known; the facts stay open until the table tells.

    ``cancelled``: the task was cancelled while it waited for the answer. ``marker`` is the transaction's.
    """

    def __init__(self, marker: object, reason: BaseException, *, cancelled: bool = False) -> None:
        self.marker, self.reason, self.cancelled = marker, reason, cancelled
        super().__init__(
            f"the outcome of a COMMIT is unknown: {type(reason).__name__}: {reason}. The fact is published if it was "
            "committed; look before you write it again"
        )


class Unavailable(BusrepError):
    """Redis or the store cannot be reached now; the same call may go through later."""

    def __init__(self, what: str, reason: BaseException | str) -> None:
        self.what, self.reason = what, reason
        detail = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        super().__init__(f"{what} is not available: {detail}")


class SnapshotBusy(Unavailable):
    """As many snapshots are being loaded as are allowed at a time; try again when one has ended."""

    def __init__(self, what: str, limit: int) -> None:
        self.limit = limit
        super().__init__(what, f"{limit} snapshots are being loaded already, which is the limit")


class Closed(BusrepError):
    """The bus was closed while, or before, this was asked of it."""

    def __init__(self) -> None:
        super().__init__("the bus is closed")
