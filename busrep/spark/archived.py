"""The archive of a stream in Parquet files: how it is laid out, and what its manifests say together. Pure.

::

    <root>/stream=orders/date=2026-05-11/0000000017-00003-9f01c2ab.parquet
    <root>/_busrep/orders/archive.json          which checkpoint the archive goes on from
    <root>/_busrep/orders/0000000017.json       the manifest of batch 17
    <root>/_busrep/orders/c0000000002.json      the second compaction

A batch exists when its manifest does, which is written last and in one step, and never changed. Data files that no
manifest names are no part of the archive. The manifest of a compaction replaces those of all batches up to its own
``batch``, and all compactions before it; what it no longer names is deleted later, so that who listed the manifests
before has time to read. Compactions are numbered, and a number is given once: two at a time cannot both be valid.

`assemble` puts manifests together, whatever was lost or damaged: `Archive.problems` tells. What uses an archive calls
`Archive.checked` first, the audit reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from busrep.errors import ConfigError
from busrep.spark.archive_manifest import (
    BATCH,
    COMPACTION,
    FOLDER,
    NO_DATE,
    START,
    VERSION,
    DataFile,
    Manifest,
    compaction_name,
    data_folder,
    data_name,
    date_of,
    folder_of,
    maker_of,
    manifest_name,
    read_manifest,
    streams_in,
    write_manifest,
)  # fmt: skip

__all__ = [
    "FOLDER", "NO_DATE", "START", "VERSION", "Archive", "DataFile", "Manifest", "Problem", "assemble",
    "compaction_name", "data_folder", "data_name", "date_of", "folder_of", "maker_of", "manifest_name",
    "read_manifest", "streams_in", "wanted", "write_manifest",
]  # fmt: skip


@attrs.frozen
class Problem:
    """What is wrong with an archive's manifests: ``kind`` (missing, damaged, positions, epoch, file twice), and a
    sentence."""

    kind: str
    text: str


@attrs.frozen
class Archive:
    """The manifests that count, in order, and what is wrong with them.

    ``superseded``: names of manifests that a compaction has replaced.
    """

    stream: str
    manifests: tuple[Manifest, ...] = ()
    problems: tuple[Problem, ...] = ()
    superseded: tuple[str, ...] = ()

    @property
    def last(self) -> int:
        """The last batch; -1 when there is none."""
        return self.manifests[-1].batch if self.manifests else -1

    @property
    def compactions(self) -> int:
        """The number of the last compaction; 0 when there is none."""
        return max((manifest.number for manifest in self.manifests), default=0)

    @property
    def epoch(self) -> str | None:
        """Of the log; None when it is empty."""
        return self.manifests[-1].epoch if self.manifests else None

    @property
    def after(self) -> Mapping[str, int]:
        """Where it begins: it has the rows above these positions."""
        return self.manifests[0].after if self.manifests else {}

    @property
    def upto(self) -> Mapping[str, int]:
        """Where it ends."""
        return self.manifests[-1].upto if self.manifests else {}

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(manifest.rows for manifest in self.manifests)

    @property
    def files(self) -> Iterator[tuple[Manifest, DataFile]]:
        """Its files, each with the manifest that names it. The tokens of a writer ascend within a file; from file to
        file they may go back, for there is one file a date, and compactions merge."""
        return ((manifest, file) for manifest in self.manifests for file in manifest.files)

    def checked(self) -> Archive:
        """Itself. Raises ConfigError when its manifests are not all there and right."""
        if self.problems:
            raise ConfigError(
                f"the archive of stream {self.stream!r} is damaged: {self.problems[0].text}. 'busrep pipeline audit' "
                "says what is lost"
            )
        return self


def wanted(names: Iterable[str]) -> list[str]:
    """The manifests among these files that have to be read: the last compaction, and the batches."""
    found = list(names)
    compactions = sorted(name for name in found if COMPACTION.fullmatch(name))
    return [*compactions[-1:], *sorted(name for name in found if BATCH.fullmatch(name))]


def assemble(stream: str, texts: Mapping[str, bytes], names: Sequence[str] = ()) -> Archive:
    """The archive that these manifests make; ``texts``: by name, those that are `wanted`; ``names``: all there are."""
    found, problems = _read(stream, texts)
    compaction = next((manifest for manifest in found if manifest.number), None)
    done = compaction.batch if compaction else -1
    batches = sorted((one for one in found if not one.number and one.batch > done), key=lambda one: one.batch)
    live = [*([compaction] if compaction else []), *batches]
    problems += _chain(live)
    counted = {manifest.name for manifest in live}
    manifests = [name for name in names or texts if BATCH.fullmatch(name) or COMPACTION.fullmatch(name)]
    unread = {name for name in texts if name not in {one.name for one in found}}
    superseded = sorted(set(manifests) - counted - unread)
    return Archive(stream, tuple(live), tuple(problems), tuple(superseded))


def _read(stream: str, texts: Mapping[str, bytes]) -> tuple[list[Manifest], list[Problem]]:
    found: list[Manifest] = []
    problems: list[Problem] = []
    for name, text in texts.items():
        try:
            manifest = read_manifest(text)
            if manifest.name != name or manifest.stream != stream:
                raise ValueError(f"it is {manifest.name} of stream {manifest.stream!r}")
            found.append(manifest)
        except ValueError as error:
            problems.append(Problem("damaged", f"the manifest {name} cannot be used: {error}"))
    return found, problems


def _chain(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Each begins where the one before ends."""
    last, position, epoch = -1, None, None
    seen: set[str] = set()
    for one in manifests:
        first = 0 if one.number else one.batch
        if first > last + 1:
            gone = (
                manifest_name(last + 1)
                if first == last + 2
                else f"{manifest_name(last + 1)} and those up to {first - 1}"
            )
            yield Problem("missing", f"the manifest {gone} is missing")
        elif position is not None and position != one.after:
            yield Problem(
                "positions", f"{one.name} begins at {dict(one.after)}, the one before ends at {dict(position)}"
            )
        if epoch not in (None, one.epoch):
            yield Problem("epoch", f"{one.name} is of epoch {one.epoch}, those before of {epoch}")
        if any(one.upto.get(writer, 0) < at for writer, at in one.after.items()):
            yield Problem("positions", f"{one.name} ends before it begins")
        again = seen.intersection(file.file for file in one.files)
        if again:
            yield Problem("file twice", f"{one.name} names {sorted(again)[0]}, which another manifest has")
        seen.update(file.file for file in one.files)
        last, position, epoch = one.batch, one.upto, one.epoch
