"""The audit's side of the archive: which task reads which files, and what it does with them, on executors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from busrep.errors import MissingExtra
from busrep.spark.archive_rows import SCHEMA, DamagedFile, read_file
from busrep.spark.archive_store import Root
from busrep.spark.archived import DataFile, Manifest, date_of
from busrep.spark.audit_sums import Row, Spans, Sums, hashes_of
from busrep.spark.batches import strangers, within

try:
    import pyarrow
    import pyarrow.compute as pc
except ImportError:
    raise MissingExtra("spark", "the audit of an archive") from None

# A task reads about so many rows at most, and at least so many ranges: of ranges at either end of it, which other tasks
# have rows of as well, each row is hashed by itself.
MOST_ROWS = 2_000_000
LEAST_RANGES = 20

Finding = dict[str, Any]
Made = TypeVar("Made")


@attrs.frozen
class Entry:
    """A file, and what the manifest that names it says of it: ``name``, ``after`` and ``upto``. Not the manifest, which
    a task would be sent with all of its files."""

    file: DataFile
    name: str
    after: Mapping[str, int]
    upto: Mapping[str, int]


@attrs.frozen
class Plan:
    """``groups``: files that one task reads one after another, by token; ``mixed``: ranges that several tasks have rows
    of, or that lie in several files whose tokens are not one behind the other."""

    groups: Sequence[Sequence[Entry]]
    mixed: Spans


def planned(files: Iterable[tuple[Manifest, DataFile]], size: int, tasks: int) -> Plan:
    """Which task reads which files; ``size``: tokens of a range, ``tasks``: so many would do. Pure."""
    entries = [Entry(file, manifest.name, manifest.after, manifest.upto) for manifest, file in files]
    entries.sort(key=lambda entry: (entry.file.min_token, entry.file.max_token, entry.file.file))
    rows = sum(entry.file.rows for entry in entries)
    each = min(MOST_ROWS, max(rows // tasks, LEAST_RANGES * size))
    groups: list[list[Entry]] = []
    mixed: list[tuple[int, int]] = []
    room, highest, holder = 0, -1, 0  # holder: of the group that has the highest token so far
    for entry in entries:
        file = entry.file
        if room <= 0:
            groups.append([])
            room = each
        groups[-1].append(entry)
        room -= file.rows
        first = file.min_token // size
        if file.min_token <= highest or (holder != len(groups) and first == highest // size):
            _join(mixed, first, max(first, min(file.max_token, highest) // size))
        if file.max_token > highest:
            highest, holder = file.max_token, len(groups)
    return Plan(groups, mixed)


def _join(mixed: list[tuple[int, int]], first: int, last: int) -> None:
    """Add ranges that do not begin before those that were added last."""
    if mixed and first <= mixed[-1][1] + 1:
        first, last = mixed[-1][0], max(last, mixed.pop()[1])
    mixed.append((first, last))


def summing(
    root: Root, stream: str, size: int, start: Mapping[str, int], end: Mapping[str, int], mixed: Spans
) -> Callable[[Sequence[Entry]], tuple[list[Any], int, list[Finding]]]:
    """The sums of files, how many of their rows were left out, and what is wrong with them."""

    def work(entries: Sequence[Entry]) -> tuple[list[Any], int, list[Finding]]:
        sums = Sums(size, start, end, mixed)
        findings: list[Finding] = []
        for entry in entries:
            try:
                findings += _added(root, stream, entry, sums)
            except FileNotFoundError as error:
                findings.append({"kind": "no file", "file": entry.file.file, "text": str(error)})
            except DamagedFile as error:
                text = f"{entry.file.file}: {error}"
                findings.append({"kind": "file", "file": entry.file.file, "text": text})
        return sums.result(), sums.outside, findings

    return work


def read_typed(root: Root, stream: str, file: DataFile) -> Iterator[Any]:
    """As `read_file`, which takes columns of any type. All of them are read, for the pages of `fields` may be damaged
    as well as others."""
    for batch in read_file(root, stream, file):
        for field in SCHEMA:
            kind = batch.schema.field(field.name).type
            if kind != field.type:
                raise DamagedFile(f"its column {field.name} is {kind}, not {field.type}")
        yield batch


def _added(root: Root, stream: str, entry: Entry, sums: Sums) -> Iterator[Finding]:
    """Add the rows of a file; gives what is wrong with their positions. Raises as `read_file`, and DamagedFile for what
    the manifest tells of the file by which others choose what to read."""
    file, told = entry.file, False
    least, most, days = 2**63, 0, set[str]()
    for batch in read_typed(root, stream, file):
        sums.add(batch)
        found = strangers(batch, entry.after, entry.upto)
        if found and not told:
            told = True
            writer, token = found[0]
            text = f"{file.file}: row of writer {writer}, token {token}, is not in what {entry.name} says"
            yield {"kind": "positions", "file": file.file, "text": text}
        ends = pc.min_max(batch.column("token")).as_py()
        least, most = min(least, ends["min"]), max(most, ends["max"])
        days |= _days(batch)
    if days and (least, most) != (file.min_token, file.max_token):
        raise DamagedFile(f"its tokens are {least} to {most}, the manifest says {file.min_token} to {file.max_token}")
    if days - {file.date}:
        raise DamagedFile(f"it has rows of {', '.join(sorted(days - {file.date}))} in the folder of {file.date}")


def _days(batch: Any) -> set[str]:
    """The dates of the first and of the last commit, and that of rows without one. Raises DamagedFile."""
    times = batch.column("committed_at").cast(pyarrow.int64())
    try:
        found = set(map(date_of, pc.min_max(times).as_py().values())) if times.null_count < len(times) else set()
    except OverflowError:
        raise DamagedFile("it has times that there are not") from None
    return found | ({date_of(None)} if times.null_count else set())


def picking(
    root: Root, stream: str, low: Mapping[str, int], high: Mapping[str, int], made: Callable[[Any], Iterable[Made]]
) -> Callable[[Entry], tuple[list[Made], str | None]]:
    """What ``made`` makes of the rows of one file that are of these writers and tokens, what can be read of it; and its
    name if it is not there."""

    def work(entry: Entry) -> tuple[list[Made], str | None]:
        found: list[Made] = []
        try:
            for batch in read_typed(root, stream, entry.file):
                found += made(within(batch, low, high))
        except FileNotFoundError:
            return found, entry.file.file
        except DamagedFile:
            pass  # it is among the findings
        return found, None

    return work


def rows_of(batch: Any) -> Iterator[Row]:
    """The rows of a batch, each with its hash."""
    columns = (batch.column(name).to_pylist() for name in ("writer", "token", "index"))
    return zip(*columns, hashes_of(batch), strict=True)
