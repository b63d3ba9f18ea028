"""What ``manifest.json`` of a snapshot in Parquet files says (docs/bootstrap.md has the layout). Pure, both directions.

It is written last, so where it is missing there is no whole snapshot. Nothing that it says is believed without a look:
whatever is wrong raises ValueError, which says what.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
import orjson

from busrep.core.snapshots import Agreement, PartRange

from .sources import check_agreement

NAME = "manifest.json"
# Another one means that this library has to be updated.
VERSION = 1

# Names below the manifest's own directory: as Spark gives them too, and nothing that leads out of it.
_SEGMENT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")
_HASH = re.compile(r"[0-9a-f]{64}")


@attrs.frozen
class PartFile:
    """Where a part is: ``file``, relative to the manifest, and the ``sha256`` of its text."""

    file: str
    sha256: str


@attrs.frozen
class Manifest:
    """A snapshot, and the files of its parts, one each."""

    agreement: Agreement
    files: tuple[PartFile, ...]


def write_manifest(manifest: Manifest) -> bytes:
    """Its text."""
    agreement = manifest.agreement
    parts = [
        {"file": file.file, **attrs.asdict(part), "sha256": file.sha256}
        for part, file in zip(agreement.parts, manifest.files, strict=True)
    ]
    found: dict[str, Any] = {
        "version": VERSION,
        "stream": agreement.stream,
        "epoch": agreement.epoch,
        "positions": dict(agreement.positions),
        "floors": dict(agreement.floors),
        "parts": parts,
    }
    if agreement.content:
        found["content"] = agreement.content
    return orjson.dumps(found, option=orjson.OPT_INDENT_2)


def read_manifest(text: bytes) -> Manifest:
    """The other way round. Raises ValueError."""
    try:
        found = orjson.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict) or "version" not in found:
        raise ValueError("it has no version")
    if found["version"] != VERSION:
        raise ValueError(f"it is of version {found['version']!r}, this busrep reads {VERSION}")
    stream, parts, content = found.get("stream"), found.get("parts"), found.get("content", "")
    if not isinstance(stream, str) or not isinstance(found.get("epoch"), str) or not isinstance(parts, list):
        raise ValueError("stream or epoch is no text, or parts no list")
    if not isinstance(content, str):
        raise ValueError("content is no text")
    agreement = Agreement(
        stream,
        found["epoch"],
        _numbers(found, "positions"),
        _numbers(found, "floors"),
        tuple(_range(part) for part in parts),
        content=content,
    )
    check_agreement(agreement, stream)
    files = tuple(_file(part) for part in parts)
    if len({file.file for file in files}) != len(files):
        raise ValueError("a file is named twice")
    return Manifest(agreement, files)


def _numbers(found: Mapping[str, Any], name: str) -> dict[str, int]:
    numbers = found.get(name)
    if not isinstance(numbers, dict) or set(map(type, numbers.values())) - {int}:
        raise ValueError(f"{name} is no map of integers")
    return numbers


def _range(part: Any) -> PartRange:
    names = ("after", "upto", "rows")
    if not isinstance(part, dict) or any(type(part.get(name)) is not int for name in names):
        raise ValueError(f"a part has no integer {', '.join(names)}")
    if part["rows"] < 0:
        raise ValueError("a part has a negative number of rows")
    return PartRange(*(part[name] for name in names))


def _file(part: Mapping[str, Any]) -> PartFile:
    file, digest = part.get("file"), part.get("sha256")
    if not isinstance(file, str) or not all(map(_SEGMENT.fullmatch, file.split("/"))):
        raise ValueError(f"file {file!r} is not a name below the manifest's directory")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise ValueError(f"sha256 of {file} is not 64 hexadecimal digits")
    return PartFile(file, digest)
