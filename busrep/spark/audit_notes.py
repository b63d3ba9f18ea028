"""What an archive says of itself: its manifests, and beside them the notes of whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator

from busrep.errors import ConfigError
from busrep.spark import archived
from busrep.spark.archive_start import Start, checkpoint_of, end_of, nonzero, read_start
from busrep.spark.archive_store import Root, load
from busrep.spark.archived import Archive
from busrep.spark.audit_files import Finding


def notes_of(root: Root, stream: str) -> tuple[Archive, list[Finding]]:
    """The archive of a stream, and in what its manifests and notes do not fit together. Raises ConfigError,
    Unavailable."""
    # Before the manifests: of what is noted there is one.
    start, damage = _start(root, stream)
    noted, place = (-1, root) if start is None else _noted_by_spark(root, stream, start)
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


def _start(root: Root, stream: str) -> tuple[Start | None, list[Finding]]:
    try:
        return read_start(root, stream), []
    except ValueError as error:
        return None, [{"kind": "damaged", "text": f"{archived.START} cannot be used: {error}"}]


def _noted_by_spark(root: Root, stream: str, start: Start) -> tuple[int, Root]:
    """The last batch that the checkpoint has noted as done, -1 where there is none; and the checkpoint."""
    place = checkpoint_of(root, stream, start.checkpoint)
    done = [int(name) for name in place.names("commits") if name.isdecimal()]
    return (max(done) + start.base if done else -1), place


def _ends(archive: Archive, start: Start, checkpoint: Root) -> Iterator[Finding]:
    """Whether the archive begins and ends where the job and Spark have noted it."""
    begun = nonzero(start.positions)
    if start.base == 0 and begun != archive.after:
        text = f"the first manifest begins at {dict(archive.after)}, {archived.START} says {begun}"
        yield {"kind": "positions", "text": text}
    try:
        at = nonzero(end_of(checkpoint, archive.last - start.base).positions)
    except (FileNotFoundError, ValueError, ConfigError):
        return  # of another checkpoint, or half written: it counts with the job alone
    if at != archive.upto:
        text = f"the last manifest ends at {dict(archive.upto)}, by Spark's log the batch {archive.last} ends at {at}"
        yield {"kind": "positions", "text": text}
