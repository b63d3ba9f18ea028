"""What an archive says of itself: its manifests, and beside them the notes of whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from busrep.errors import ConfigError
from busrep.spark import archived
from busrep.spark.archive_driver import checkpoint_of
from busrep.spark.archive_store import Root, load
from busrep.spark.archived import Archive
from busrep.spark.audit_files import Finding
from busrep.spark.offsets import Offset


def notes_of(root: Root, stream: str) -> tuple[Archive, list[Finding]]:
    """The archive of a stream, and in what its manifests and notes do not fit together. Raises ConfigError,
    Unavailable."""
    # Before the manifests: of what is noted there is one.
    start, damage = _start(root, stream)
    noted, place = (-1, root) if start is None else _noted_by_spark(root, stream, *start[:2])
    archive = load(root, stream)
    findings = [*damage, *({"kind": one.kind, "text": one.text} for one in archive.problems)]
    if noted > archive.last:
        text = f"Spark has noted batch {noted} as done, and the last manifest is of {archive.last}"
        findings.append({"kind": "missing", "text": text})
    if not archive.manifests and not findings:
        findings.append({"kind": "missing", "text": "there is no archive of this stream"})
    if start is not None and archive.manifests:
        findings += _ends(archive, start, place)
    return archive, findings


def _start(root: Root, stream: str) -> tuple[tuple[str, int, dict[str, int]] | None, list[Finding]]:
    """(checkpoint, its first batch, positions where that begins), as the archive job has noted them."""
    try:
        found = orjson.loads(root.read(f"{archived.folder_of(stream)}/{archived.START}"))
        positions = {str(writer): int(at) for writer, at in found["positions"].items()}
        return (str(found["checkpoint"]), int(found["base"]), positions), []
    except FileNotFoundError:
        return None, []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return None, [{"kind": "damaged", "text": f"{archived.START} cannot be used: {error}"}]


def _noted_by_spark(root: Root, stream: str, checkpoint: str, base: int) -> tuple[int, Root]:
    """The last batch that the checkpoint has noted as done, -1 where there is none; and the checkpoint."""
    place = checkpoint_of(root, stream, checkpoint)
    done = [int(name) for name in place.names("commits") if name.isdecimal()]
    return (max(done) + base if done else -1), place


def _ends(archive: Archive, start: tuple[str, int, dict[str, int]], checkpoint: Root) -> Iterator[Finding]:
    """Whether the archive begins and ends where the job and Spark have noted it."""
    _, base, positions = start
    begun = {writer: at for writer, at in positions.items() if at}
    if base == 0 and begun != archive.after:
        text = f"the first manifest begins at {dict(archive.after)}, {archived.START} says {begun}"
        yield {"kind": "positions", "text": text}
    try:
        line = checkpoint.read(f"offsets/{archive.last - base}").rstrip().rpartition(b"\n")[2]
        end = Offset.from_dict(orjson.loads(line))
    except (
        FileNotFoundError,
        ValueError,
        ConfigError,
    ):  # of another checkpoint, or half written: it counts with the job alone
        return
    at = {writer: position for writer, position in end.positions.items() if position}
    if at != archive.upto:
        text = f"the last manifest ends at {dict(archive.upto)}, by Spark's log the batch {archive.last} ends at {at}"
        yield {"kind": "positions", "text": text}
