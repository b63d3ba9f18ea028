"""The manifests of an archive, one by one: names, and text, both directions. Pure; see archived.py for the layout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any
from urllib.parse import quote, unquote

import attrs
import orjson

# Another one means that this library has to be updated.
VERSION = 1

FOLDER = "_busrep"
START = "archive.json"
# As Spark and Hive name the partition of rows without a date: those of application tables that have no time.
NO_DATE = "__HIVE_DEFAULT_PARTITION__"

BATCH = re.compile(r"(\d{10})\.json")
COMPACTION = re.compile(r"c(\d{10})\.json")
_DATA = re.compile(r"(c?)(\d{10})-\d{5}-[0-9a-f]{8}\.parquet")
_PATH = re.compile(rf"date=(\d{{4}}-\d\d-\d\d|{NO_DATE})/c?\d{{10}}-\d{{5}}-[0-9a-f]{{8}}\.parquet")
_HASH = re.compile(r"[0-9a-f]{64}")


# -- names ----------------------------------------------------------------------------------------------------


def folder_of(stream: str) -> str:
    """Where the stream's manifests are, below the root."""
    return f"{FOLDER}/{quote(stream, safe='')}"


def data_folder(stream: str) -> str:
    """Where its data files are, below the root; their names in manifests are below this."""
    return f"stream={quote(stream, safe='')}"


def streams_in(folders: Iterable[str]) -> list[str]:
    """The streams whose folders these are, of those below ``_busrep``."""
    return sorted(map(unquote, folders))


def manifest_name(batch: int) -> str:
    """The manifest of a batch."""
    return f"{batch:010d}.json"


def compaction_name(number: int) -> str:
    """The manifest of a compaction."""
    return f"c{number:010d}.json"


def data_name(kind: str, batch: int, number: int, made: str) -> str:
    """A data file: ``kind`` is "" for a batch and "c" for a compaction, ``made`` 8 hexadecimal digits at random."""
    return f"{kind}{batch:010d}-{number % 100_000:05d}-{made}.parquet"


def maker_of(name: str) -> tuple[str, int] | None:
    """("" or "c", number) of the batch or the compaction that a data file is named for; None for another file."""
    found = _DATA.fullmatch(name.rpartition("/")[2])
    return (found[1], int(found[2])) if found else None


def date_of(microseconds: int | None) -> str:
    """The date, in UTC, of a time since 1970; `NO_DATE` for None."""
    if microseconds is None:
        return NO_DATE
    return (date(1970, 1, 1) + timedelta(days=microseconds // 86_400_000_000)).isoformat()


# -- manifests ------------------------------------------------------------------------------------------------


@attrs.frozen
class DataFile:
    """A data file: ``file`` below the stream's folder, ``bytes`` long; ``sha256`` of the lines
    ``token index writer row``, in the file's order."""

    file: str
    date: str
    rows: int
    bytes: int
    min_token: int
    max_token: int
    sha256: str


def _sorted(positions: Mapping[str, int]) -> dict[str, int]:
    """Zeros left out: a writer that is not named is at 0."""
    return {writer: positions[writer] for writer in sorted(positions) if positions[writer]}


@attrs.frozen(kw_only=True)
class Manifest:
    """What a batch holds: all rows of the stream with after < token <= upto, per writer.

    ``query``: of Spark, that wrote it. Of a compaction: ``number`` is its own, ``batch`` the last of those that it
    ``replaces``.
    """

    stream: str
    query: str
    batch: int
    epoch: str
    after: Mapping[str, int] = attrs.field(converter=_sorted)
    upto: Mapping[str, int] = attrs.field(converter=_sorted)
    files: tuple[DataFile, ...] = ()
    replaces: tuple[int, ...] = ()
    number: int = 0
    written_at: str = attrs.field(factory=lambda: datetime.now(UTC).isoformat())

    @property
    def name(self) -> str:
        """Its file's."""
        return compaction_name(self.number) if self.number else manifest_name(self.batch)

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(file.rows for file in self.files)


def write_manifest(manifest: Manifest) -> bytes:
    """Its text."""
    found = {"version": VERSION, **attrs.asdict(manifest)}
    if not manifest.number:
        del found["replaces"], found["number"]
    return orjson.dumps(found, option=orjson.OPT_INDENT_2)


def read_manifest(text: bytes) -> Manifest:
    """The other way round. Raises ValueError for whatever is wrong."""
    try:
        found = orjson.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        version = found.get("version") if isinstance(found, dict) else None
        raise ValueError(f"it is of version {version!r}, this busrep reads {VERSION}")
    for name, kind in (("stream", str), ("query", str), ("epoch", str), ("written_at", str), ("files", list)):
        if not isinstance(found.get(name), kind):
            raise ValueError(f"{name} is missing, or of the wrong type")
    replaces = found.get("replaces", [])
    if not isinstance(replaces, list) or any(type(one) is not int for one in replaces):
        raise ValueError("replaces is no list of integers")
    written = datetime.fromisoformat(found["written_at"])
    return Manifest(
        stream=found["stream"],
        query=found["query"],
        batch=_number(found, "batch"),
        epoch=found["epoch"],
        after=_positions(found, "after"),
        upto=_positions(found, "upto"),
        files=tuple(map(_file, found["files"])),
        replaces=tuple(replaces),
        number=_number(found, "number", 0),
        written_at=(written if written.tzinfo else written.replace(tzinfo=UTC)).isoformat(),
    )


def _number(found: Mapping[str, Any], name: str, default: int | None = None) -> int:
    number = found.get(name, default)
    if type(number) is not int or number < 0:
        raise ValueError(f"{name} is no integer from 0 on")
    return number


def _positions(found: Mapping[str, Any], name: str) -> dict[str, int]:
    positions = found.get(name)
    if not isinstance(positions, dict):
        raise ValueError(f"{name} is no object")
    return {writer: _number(positions, writer) for writer in positions}


def _file(found: Any) -> DataFile:
    if not isinstance(found, dict) or not isinstance(found.get("file"), str) or not _PATH.fullmatch(found["file"]):
        raise ValueError("a file is not named as one of an archive")
    if not isinstance(found.get("sha256"), str) or not _HASH.fullmatch(found["sha256"]):
        raise ValueError(f"sha256 of {found['file']} is not 64 hexadecimal digits")
    numbers = {name: _number(found, name) for name in ("rows", "bytes", "min_token", "max_token")}
    day = found["file"].partition("/")[0].removeprefix("date=")
    return DataFile(file=found["file"], date=day, sha256=found["sha256"], **numbers)
