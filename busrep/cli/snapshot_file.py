"""A snapshot on its way into a file: what of it is whole, whatever happens in the middle.

``FILE`` holds parts, ``FILE.agreement.json`` says of which snapshot, how many are whole, and their hash. A part counts
once its lines are on the disk, and only then the note is moved on (written beside, renamed): what stands in the file
behind the last whole part was left by a run that ended there, and is cut off by the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO, Self

import attrs
import orjson

from busrep.core.snapshots import Agreement
from busrep.errors import ConfigError
from busrep.private_files import open_file, open_successor

# Of the note beside a file.
VERSION = 1
# Bytes that are read at a time to hash what a run before this one has written.
PIECE = 2**20


@attrs.define(eq=False)
class SnapshotDigest:
    """Counts and hashes the parts of a snapshot, in their order; keeps none of it."""

    agreement: Agreement | None = None
    parts: int = 0
    """Whole parts so far; those that another run has loaded count."""
    rows: int = 0
    """In whole parts."""
    size: int = 0
    """Bytes, those of the part under way too."""
    hash: Any = attrs.field(factory=hashlib.sha256)

    def begin(self, agreement: Agreement) -> None:
        """What follows are parts of this one, beginning with ``parts``."""
        self.agreement = agreement

    def write(self, piece: bytes) -> None:
        """More of the part that is under way."""
        self.hash.update(piece)
        self.size += len(piece)

    def part_ended(self, rows: int) -> None:
        """The part under way is whole."""
        self.parts += 1
        self.rows += rows

    def close(self) -> None:
        """Let go of the file, if there is one. May be called twice."""


@attrs.define(eq=False)
class SnapshotFile(SnapshotDigest):
    """The same into a file; a run that was cut off is gone on with."""

    path: Path = attrs.field(kw_only=True)
    file: BinaryIO = attrs.field(kw_only=True)

    @classmethod
    def open(cls, path: Path, stream: str, *, overwrite: bool) -> Self:
        """Open it, after what is whole of it. Raises ConfigError for a file that nothing can be added to, OSError."""
        file = os.fdopen(open_file(path, os.O_RDWR), "r+b")
        made = cls(path=path, file=file)
        try:
            _lock(file, path)
            if not overwrite:
                made._continue(stream)
        except BaseException:
            file.close()
            raise
        return made

    def _continue(self, stream: str) -> None:
        size = self.file.seek(0, os.SEEK_END)
        note = _read_note(self.path, stream, size)
        if note is None:
            return
        self.file.seek(0)
        left = note["bytes"]
        while left and (piece := self.file.read(min(left, PIECE))):
            self.hash.update(piece)
            left -= len(piece)
        if left or self.hash.hexdigest() != note["sha256"]:
            raise ConfigError(
                f"{self.path} is not what {note_path(self.path).name} says: somebody has changed it. Remove both, or "
                "--overwrite it"
            )
        self.file.truncate()
        self.agreement = note["agreement"]
        self.parts, self.rows, self.size = note["parts"], note["rows"], note["bytes"]

    def begin(self, agreement: Agreement) -> None:
        """Parts of another snapshot than the one that was begun take the place of its parts."""
        anew = self.agreement is None or not self.agreement.same(agreement)
        self.agreement = agreement
        if anew:
            self.parts = self.rows = self.size = 0
            self.hash = hashlib.sha256()
        self._save()
        if anew:  # after the note that says that nothing is whole: it fits whatever the file holds
            self.file.seek(0)
            self.file.truncate()

    def write(self, piece: bytes) -> None:
        """More of the part that is under way."""
        self.file.write(piece)
        super().write(piece)

    def part_ended(self, rows: int) -> None:
        """The part under way is whole, and stays so."""
        super().part_ended(rows)
        self._save()

    def _save(self) -> None:
        assert self.agreement is not None  # noqa: S101 - begin() was called
        self.file.flush()
        os.fsync(self.file.fileno())
        note = {
            "version": VERSION,
            "agreement": orjson.Fragment(self.agreement.to_json()),
            "parts": self.parts,
            "rows": self.rows,
            "bytes": self.size,
            "sha256": self.hash.hexdigest(),
        }
        path = note_path(self.path)
        beside = path.with_name(path.name + ".new")
        with os.fdopen(open_successor(beside, path), "wb") as file:
            file.write(orjson.dumps(note) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    def close(self) -> None:
        """Let go of the file."""
        with contextlib.suppress(OSError):  # a full disk: what matters was flushed, and raised there
            self.file.close()


def note_path(path: Path) -> Path:
    """Where the note about a snapshot file stands."""
    return path.with_name(path.name + ".agreement.json")


def _read_note(path: Path, stream: str, size: int) -> dict[str, Any] | None:
    """What is whole of a file of ``size`` bytes; None for a new one. Raises ConfigError when they do not fit."""
    note = note_path(path)
    if not note.exists():
        if size:
            raise ConfigError(f"{path} exists, and no {note.name} tells what it is: name another file, or --overwrite")
        return None
    try:
        found: dict[str, Any] = orjson.loads(note.read_bytes())
        agreement = Agreement.from_json(orjson.dumps(found["agreement"]))
        version, whole, hashed = found["version"], found["parts"], found["sha256"]
        counts = (version, whole, found["rows"], found["bytes"])
        if not isinstance(hashed, str) or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError("its counts are none")
        if version != VERSION or whole > len(agreement.parts):
            raise ValueError(f"version {version}, part {whole} of {len(agreement.parts)}")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{note} is not what this command writes ({error}): remove it, or pass --overwrite") from None
    if agreement.stream != stream:
        raise ConfigError(f"{path} is a snapshot of stream {agreement.stream!r}: name another file, or --overwrite it")
    if whole == len(agreement.parts):
        raise ConfigError(f"{path} is a whole snapshot already: name another file, or --overwrite it")
    return found | {"agreement": agreement}


def _lock(file: BinaryIO, path: Path) -> None:
    """Only one process at a time writes into it; the lock ends with the process."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another process is writing {path}") from None
