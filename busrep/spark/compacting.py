"""What the job ``compact`` does.

Files of less than half the size wanted that lie beside each other are merged, date by date; the others are taken over
as they are. Then one manifest says what the archive is up to its last batch. Until it is there nothing has changed, and
from then on everything has: killed at any moment this leaves the archive whole, and files that nobody names, which a
later run deletes. What is merged is checked against the old manifests, so damage does not spread.

An archive job that runs meanwhile adds batches behind the last one, which is no business of ours; another compaction
that is faster takes the number that ours would have, and ours begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from busrep.errors import ConfigError, Unavailable
from busrep.spark import archived, job
from busrep.spark.archive_delta import follow, is_delta
from busrep.spark.archive_store import Root, data_path, load, put_manifest, streams_of
from busrep.spark.archived import Archive, DataFile, Manifest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from busrep.spark.jobs.compact import Options

# With so many batches their manifests are put into one even if there is nothing to merge: readers read them all.
MANIFESTS = 100
# One task merges files of so many times the size wanted, so that a long backlog is merged in parallel.
GROUP_FILES = 8
ATTEMPTS = 5
# A manifest that is half written is under its temporary name for some milliseconds.
TEMPORARY_AGE = 60.0


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """See `busrep.spark.jobs.compact.run`."""
    root = Root(options.archive)
    names = options.stream or tuple(streams_of(root))
    reports = {}
    for at, name in enumerate(names):
        progress("compacted streams", at, len(names))
        reports[name] = compact(spark, root, name, options.file_rows, options.grace)
    progress("compacted streams", len(names), len(names))
    return {"archive": root.shown, "streams": reports}


def compact(spark: SparkSession, root: Root, stream: str, file_rows: int, grace: float) -> dict[str, Any]:
    """Compact the archive of one stream, then delete what is not needed any more."""
    before = load(root, stream).checked()
    merged_rows = merged_files = 0
    for _ in range(ATTEMPTS):
        archive = load(root, stream).checked()
        groups = plan(archive, file_rows)
        if not groups and len(archive.manifests) <= MANIFESTS:
            break
        try:
            made = merge(spark, root, archive, groups, file_rows)
        except Exception:
            if load(root, stream).compactions != archive.compactions:
                continue  # another compaction was faster, and has deleted what was to be merged
            raise
        if put_manifest(root, replacement(archive, groups, made)):
            merged_rows = sum(file.rows for group in groups for file in group)
            merged_files = sum(map(len, groups))
            break
        root.remove([data_path(stream, file.file) for files in made for file in files])
    else:
        raise Unavailable(root.shown, f"other compactions of stream {stream!r} were faster, {ATTEMPTS} times")
    if is_delta(root, stream):
        follow(root, stream)  # before anything is deleted that its log names
    deleted = clean(root, stream, grace)
    return {
        "files_before": len(list(before.files)), "files": len(list(load(root, stream).files)),
        "merged_files": merged_files, "merged_rows": merged_rows, "deleted": deleted,
    }  # fmt: skip


def plan(archive: Archive, file_rows: int) -> list[list[DataFile]]:
    """Which files to merge: at least two of less than half the size, of one date, with no bigger one of that date
    between them. Pure."""
    groups: list[list[DataFile]] = []
    current: dict[str, list[DataFile]] = {}
    for _, file in archive.files:
        group = current.setdefault(file.date, [])
        if file.rows * 2 >= file_rows or sum(one.rows for one in group) >= GROUP_FILES * file_rows:
            groups.append(current.pop(file.date))
        if file.rows * 2 < file_rows:
            current.setdefault(file.date, []).append(file)
    return [group for group in [*groups, *current.values()] if len(group) > 1]


def replacement(archive: Archive, groups: Sequence[Sequence[DataFile]], made: Sequence[Sequence[DataFile]]) -> Manifest:
    """The manifest in which ``made`` stands for ``groups``, and which replaces all of the archive. Pure.

    Raises ConfigError when there are not as many rows.
    """
    instead: dict[str, Sequence[DataFile]] = {}
    for group, files in zip(groups, made, strict=True):
        if sum(file.rows for file in group) != sum(file.rows for file in files):
            raise ConfigError(f"merging {group[0].file} and others lost rows: the archive stays as it was")
        instead |= {file.file: () for file in group} | {group[0].file: files}
    first, last = archive.manifests[0], archive.manifests[-1]
    return Manifest(
        stream=archive.stream, query=last.query, batch=last.batch, epoch=last.epoch, after=first.after, upto=last.upto,
        files=tuple(new for _, file in archive.files for new in instead.get(file.file, (file,))),
        replaces=tuple(one.batch for one in archive.manifests if not one.number), number=archive.compactions + 1,
    )  # fmt: skip


# -- on executors ---------------------------------------------------------------------------------------------


def merge(
    spark: SparkSession, root: Root, archive: Archive, groups: Sequence[Sequence[DataFile]], file_rows: int
) -> list[list[DataFile]]:
    """Write the rows of each group into new files. Raises what `merged` raises, as Spark tells it."""
    if not groups:
        return []
    stream, number = archive.stream, archive.compactions + 1
    tasks = list(enumerate(groups))

    def work(task: tuple[int, Sequence[DataFile]]) -> tuple[int, list[DataFile]]:
        return task[0], merged(root, stream, number, task[0], task[1], file_rows)

    found = dict(spark.sparkContext.parallelize(tasks, len(tasks)).map(work).collect())
    return [found[at] for at, _ in tasks]


def merged(
    root: Root, stream: str, number: int, task: int, group: Sequence[DataFile], file_rows: int
) -> list[DataFile]:
    """Merge one group; files of different versions of a row class stay apart. Raises ConfigError for a file that is not
    what its manifest says."""
    from busrep.spark.archive_rows import DamagedFile, RowFiles, read_file

    files: list[RowFiles] = []
    schema: Any = None
    try:
        for file in group:
            try:
                for batch in read_file(root, stream, file):
                    if schema is None or schema != batch.schema:
                        schema = batch.schema
                        files.append(RowFiles(root, stream, "c", number, task, file_rows, schema))
                    files[-1].add(batch)
            except (DamagedFile, FileNotFoundError) as error:
                raise ConfigError(
                    f"{root.shown}, stream {stream!r}: {file.file}: {error}. Nothing was changed; 'busrep pipeline "
                    "audit' says what is lost"
                ) from None
        return [done for one in files for done in one.close()]
    except BaseException:
        for one in files:
            one.abandon()
        raise


# -- what is left over ----------------------------------------------------------------------------------------


def clean(root: Root, stream: str, grace: float) -> int:
    """Delete what no manifest names that anybody may be reading by; how many files that were.

    Since the newest compaction that is older than ``grace`` is there, readers have listed that one, or a later one:
    what it has replaced is not needed any more, however many have come after it.
    """
    archive = load(root, stream).checked()
    folder = archived.folder_of(stream)
    retained, gone = _by_age(root, stream, archive, grace)
    # Manifests first: whoever lists them from now on does not look for what is deleted next.
    deleted = root.remove([f"{folder}/{name}" for name in gone])
    named = {file.file for manifest in retained for file in manifest.files}
    unnamed = [name for name in root.names(archived.data_folder(stream), deep=True) if name not in named]
    deleted += root.remove([data_path(stream, name) for name in unnamed if _is_garbage(archive, name)])
    temporary = [f"{folder}/{name}" for name in root.names(folder) if name.startswith(".") and name.endswith(".tmp")]
    return deleted + root.remove([name for name in temporary if root.age(name) > max(grace, TEMPORARY_AGE)])


def _by_age(root: Root, stream: str, archive: Archive, grace: float) -> tuple[list[Manifest], list[str]]:
    """The manifests that readers may have found, and the names of those that they cannot have found any more."""
    kept = {one.name: one for one in archive.manifests}
    for name in reversed(archive.superseded):  # compactions first, the newest before the others
        try:
            one = _superseded(root, stream, name)
        except FileNotFoundError:
            continue  # another compaction has deleted it
        newer = [other for other in kept.values() if other.number and other.batch >= one.batch and _old(other, grace)]
        if not any(other.number > one.number for other in newer):
            kept[name] = one
    return list(kept.values()), [name for name in archive.superseded if name not in kept]


def _superseded(root: Root, stream: str, name: str) -> Manifest:
    try:
        return archived.read_manifest(root.read(f"{archived.folder_of(stream)}/{name}"))
    except ValueError as error:
        raise ConfigError(f"{root.shown}, stream {stream!r}: the manifest {name} cannot be used: {error}") from None


def _is_garbage(archive: Archive, name: str) -> bool:
    """Whether this file, which no manifest names, may be deleted: of batches and compactions that are there; files of
    later ones may be named any moment."""
    maker = archived.maker_of(name)
    return maker is not None and maker[1] <= (archive.compactions if maker[0] == "c" else archive.last)


def _old(manifest: Manifest, grace: float) -> bool:
    return (datetime.now(UTC) - datetime.fromisoformat(manifest.written_at)).total_seconds() >= grace
