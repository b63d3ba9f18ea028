"""Rows of an archive: written into files of about the same size, and read again, checked on the way."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from busrep.errors import BusrepError, ConfigError, MissingExtra, Unavailable
from busrep.spark import archived
from busrep.spark.archive_store import Root, data_path
from busrep.spark.archived import DataFile
from busrep.spark.batches import pieces, text_in

try:
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import parquet
except ImportError:
    raise MissingExtra("spark", "an archive in Parquet files") from None

SCHEMA = pyarrow.schema(
    [
        ("writer", pyarrow.string()),
        ("token", pyarrow.int64()),
        ("index", pyarrow.int32()),
        ("row", pyarrow.string()),
        ("committed_at", pyarrow.timestamp("us", "UTC")),
    ]
)
# What a task holds in memory of each file that it writes, before it goes to the file as a row group.
GROUP_ROWS = 50_000
# Files that a task has open, one a date: a backlog read in order of its tokens has one, and two around midnight.
OPEN_FILES = 8
# Of a file, at a time: so many rows, unless they have more than so many bytes.
READ_ROWS = 20_000
READ_BYTES = 2**27


class DamagedFile(Exception):
    """A data file that is not what its manifest says; the message says how."""


def text_of(batch: Any) -> Any:
    """The lines ``token index writer row`` of a batch that has these columns, as an array of strings."""
    token, index = (pc.cast(batch.column(name), pyarrow.string()) for name in ("token", "index"))
    writer, row = batch.column("writer"), batch.column("row")
    return pc.binary_join_element_wise(token, " ", index, " ", writer, " ", row, "\n", "")


def hash_into(hasher: Any, batch: Any) -> None:
    """Add the lines of a batch. Raises DamagedFile for a null in it."""
    for lines in map(text_of, pieces(batch)):
        if lines.null_count:
            raise DamagedFile("it has nulls")
        if len(lines):
            at, text = text_in(lines)
            hasher.update(text[at[0] : at[len(lines)]])


def ascending(batch: Any, last: dict[str, tuple[int, int]]) -> int:
    """How many rows at the beginning of the batch follow, per writer, on what was ``last``, which is moved by them."""
    writers, tokens, indexes = (batch.column(name) for name in ("writer", "token", "index"))
    count = batch.num_rows
    if count > 1 and len(pc.unique(writers)) == 1 and pc.all(_follow(tokens, indexes)).as_py():
        writer, first = writers[0].as_py(), (tokens[0].as_py(), indexes[0].as_py())
        if writer not in last or last[writer] < first:
            last[writer] = (tokens[-1].as_py(), indexes[-1].as_py())
            return int(count)
        return 0
    columns = (column.to_pylist() for column in (writers, tokens, indexes))
    for number, (writer, token, index) in enumerate(zip(*columns, strict=True)):
        if writer in last and last[writer] >= (token, index):
            return number
        last[writer] = (token, index)
    return int(count)


def _follow(tokens: Any, indexes: Any) -> Any:
    """Of each row but the first, whether its token and index are above those of the row before."""
    later = pc.and_(pc.equal(tokens[:-1], tokens[1:]), pc.less(indexes[:-1], indexes[1:]))
    return pc.or_(pc.less(tokens[:-1], tokens[1:]), later)


# -- writing --------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Writing:
    """A file that is being written."""

    root: Root
    path: str
    file: str
    date: str
    schema: Any
    rows: int = 0
    least: int = 2**63 - 1
    most: int = 0
    hashed: Any = attrs.field(factory=hashlib.sha256)
    last: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    ended: tuple[str, int] | None = None  # writer and token of the last row
    pending: list[Any] = attrs.field(factory=list)
    sink: Any = None
    writer: Any = None

    def fits(self, batch: Any, limit: int) -> int:
        """How many rows of the batch go into this file: those that ascend, up to ``limit``, and no fact is cut."""
        count = ascending(batch, dict(self.last))
        room = limit - self.rows
        if count <= room:
            return count
        writers, tokens = (batch.column(name) for name in ("writer", "token"))
        for at in range(max(room, 0), count):
            before = self.ended if at == 0 else (writers[at - 1].as_py(), tokens[at - 1].as_py())
            if before != (writers[at].as_py(), tokens[at].as_py()):
                return at
        return count

    def append(self, batch: Any) -> None:
        ascending(batch, self.last)
        hash_into(self.hashed, batch)
        tokens = pc.min_max(batch.column("token")).as_py()
        self.least, self.most = min(self.least, tokens["min"]), max(self.most, tokens["max"])
        self.ended = (batch.column("writer")[-1].as_py(), batch.column("token")[-1].as_py())
        self.rows += batch.num_rows
        self.pending.append(batch)
        if sum(one.num_rows for one in self.pending) >= GROUP_ROWS:
            self.flush()

    def flush(self) -> None:
        if self.writer is None:
            self.sink = self.root.create(self.path)
            self.writer = parquet.ParquetWriter(
                self.sink, self.schema, compression="zstd", use_dictionary=["writer"], write_page_checksum=True
            )
        self.writer.write_table(pyarrow.Table.from_batches(self.pending, self.schema))
        self.pending = []

    def close(self) -> DataFile:
        if self.pending:
            self.flush()
        self.writer.close()
        written = self.sink.tell()
        self.sink.close()
        self.root.settle(self.path)
        size = self.root.size(self.path)
        if size != written:
            raise Unavailable(self.root.shown, f"{self.file} has {size} bytes of {written} that were written")
        return DataFile(
            self.file, self.date, self.rows, written, self.least, self.most, self.hashed.hexdigest()
        )  # fmt: skip

    def abandon(self) -> None:
        for one in (self.writer, self.sink):
            if one is not None:
                with contextlib.suppress(OSError, pyarrow.ArrowException):  # the disk may be full
                    one.close()
        self.root.remove([self.path])


class RowFiles:
    """Writes rows into files of about ``limit`` rows, one date each, in which the tokens of each writer ascend.

    ``kind`` and ``number``: see `archived.data_name`; ``task`` tells its files from those of others. A fact is not cut.
    Memory is bounded by `GROUP_ROWS` and `OPEN_FILES`. What was written is no part of the archive before a manifest
    names it.
    """

    def __init__(
        self, root: Root, stream: str, kind: str, number: int, task: int, limit: int, schema: Any = SCHEMA
    ) -> None:
        self._root, self._stream, self._limit, self._schema = root, stream, limit, schema
        self._named = (kind, number, task)
        self._open: dict[str, _Writing] = {}
        self.done: list[DataFile] = []

    def add(self, batch: Any) -> None:
        """Write these rows, with the columns of the schema."""
        for day, part in _by_date(batch):
            rest = part
            while rest.num_rows:
                file = self._file(day)
                count = file.fits(rest, self._limit)
                if count:
                    file.append(rest.slice(0, count))
                if count < rest.num_rows:
                    self._finish(day)
                rest = rest.slice(count)

    def _file(self, day: str) -> _Writing:
        if day not in self._open:
            if len(self._open) == OPEN_FILES:
                self._finish(next(iter(self._open)))
            kind, number, task = self._named
            file = f"date={day}/{archived.data_name(kind, number, task, secrets.token_hex(4))}"
            self._open[day] = _Writing(self._root, data_path(self._stream, file), file, day, self._schema)
        return self._open[day]

    def _finish(self, day: str) -> None:
        self.done.append(self._open[day].close())
        del self._open[day]

    def close(self) -> list[DataFile]:
        """The files, in order."""
        while self._open:
            self._finish(next(iter(self._open)))
        return self.done

    def abandon(self) -> None:
        """Remove what was written. Raises nothing: there is an error already."""
        for file in self._open.values():
            with contextlib.suppress(BusrepError):
                file.abandon()
        with contextlib.suppress(BusrepError):
            self._root.remove([data_path(self._stream, one.file) for one in self.done])


def _by_date(batch: Any) -> Iterator[tuple[str, Any]]:
    """Slices of a batch whose rows are of one date, in order."""
    if not batch.num_rows:
        return
    times = pc.cast(batch.column("committed_at"), pyarrow.int64())
    ends = pc.min_max(times).as_py()
    if times.null_count in (0, len(times)) and archived.date_of(ends["min"]) == archived.date_of(ends["max"]):
        yield archived.date_of(ends["min"]), batch
        return
    days = list(map(archived.date_of, times.to_pylist()))
    start = 0
    for at in range(1, len(days) + 1):
        if at == len(days) or days[at] != days[start]:
            yield days[start], batch.slice(start, at - start)
            start = at


# -- reading --------------------------------------------------------------------------------------------------


def read_file(root: Root, stream: str, file: DataFile, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """The batches of a data file, all columns or these and those of `SCHEMA`. Raises DamagedFile, at the end at the
    latest, unless it is what its manifest says; FileNotFoundError when it is gone; Unavailable."""
    path = data_path(stream, file.file)
    size = root.size(path)
    if size is None:
        raise FileNotFoundError(f"{file.file} is missing")
    hashed, rows, ordered = hashlib.sha256(), 0, True
    last: dict[str, tuple[int, int]] = {}
    try:
        with root.open(path) as source:
            found = parquet.ParquetFile(source, page_checksum_verification=True)
            wanted = None if columns is None else list(dict.fromkeys([*SCHEMA.names, *columns]))
            for batch in found.iter_batches(_rows_at_a_time(found.metadata), columns=wanted):
                hash_into(hashed, batch)
                rows += batch.num_rows
                ordered = ordered and ascending(batch, last) == batch.num_rows
                yield batch
    except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise DamagedFile(f"it cannot be read: {error}") from None
    if not ordered:
        raise DamagedFile("its rows are not in order")
    if rows != file.rows:
        raise DamagedFile(f"it has {rows} rows, the manifest says {file.rows}")
    if hashed.hexdigest() != file.sha256:
        raise DamagedFile("its rows do not have the SHA-256 that the manifest says")
    if size != file.bytes:
        raise DamagedFile(f"it is {size} bytes long, the manifest says {file.bytes}")


def _rows_at_a_time(metadata: Any) -> int:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    size = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(READ_ROWS, READ_BYTES // max(1, size)))


def read_rows(root: Root, archive: archived.Archive, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """All rows of an archive, file by file in the order of `Archive.files`, each checked. Raises ConfigError for a
    damaged one."""
    for _, file in archive.checked().files:
        try:
            yield from read_file(root, archive.stream, file, columns)
        except (DamagedFile, FileNotFoundError) as error:
            raise ConfigError(f"{root.shown}, stream {archive.stream!r}: {file.file}: {error}") from None
