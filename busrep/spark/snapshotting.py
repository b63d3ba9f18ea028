"""What the job ``snapshot`` does: rows at a map of positions, brought into the order of their tokens, cut into parts.

The positions are read first, from one state of the table, or from an archive's manifests; what lies up to them does not
change any more, so it may be read at any time after, in as many tasks as there are. Each task reads in a snapshot of
its own, and looks there whether the log is still this one and has these rows still.

A writer's facts above another one's position are in it. It is not a state that the table had at one moment; it is a
state from which a reader gets to the table's, with what follows the positions, as it does live.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import orjson

from busrep.core.snapshots import Agreement, PartRange
from busrep.errors import BusrepError, ConfigError, EpochChanged
from busrep.snapshots.parquet_manifest import NAME, Manifest, PartFile, read_manifest, write_manifest
from busrep.spark import job
from busrep.spark.archive_store import Root, existing
from busrep.spark.mapped import map_in_arrow
from busrep.spark.ranged import FromTable, rows_of_archive
from busrep.spark.snapshot_tasks import Keys, Part, PartFiles, keyed, parting, read_keys
from busrep.spark.waiting import waiting_rows
from busrep.spark.watching import watched
from busrep.stores.snapshots import MOST_PARTS, LogState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from busrep.spark.jobs.snapshot import Options

# About so many rows for a task that sorts and writes parts: what it does not get into memory it puts on the disk.
TASK_ROWS = 200_000
MOST_TASKS = 1000
# The table may be pruned while it is read: then it is read again, from the new floor.
ATTEMPTS = 3

_PART = re.compile(r"part-\d{5,}-[0-9a-f-]+\.parquet")
_TEMPORARY = re.compile(rf"\.{re.escape(NAME)}\.[0-9a-f]+\.tmp")


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """See `busrep.spark.jobs.snapshot.run`."""
    keys = keys_of(options)
    target = Root(options.to)
    replaced = present(target, options.stream)
    waiting = waiting_rows(options, [options.stream] if options.archive is None else [])
    waiting.look()
    work = Writing(spark, options, keys, target, progress)
    agreement, parts = work.of_table() if options.archive is None else work.of_archive(options.archive)
    manifest = Manifest(agreement, tuple(PartFile(part.file, part.sha256) for part in parts))
    work.publish(manifest, replaced)
    now = present(target, options.stream)  # perhaps somebody else's by now, who was told not to
    kept = {file.file for one in (manifest, replaced, now) if one is not None for file in one.files}
    removed = clean(target, kept, options.grace)
    return {
        "stream": options.stream, "to": target.shown, "from": "table" if options.archive is None else "archive",
        "kept": "all rows" if keys is None else keys.kept(),
        "epoch": agreement.epoch, "positions": dict(agreement.positions), "floors": dict(agreement.floors),
        "rows": agreement.rows, "parts": len(parts), "bytes": sum(part.bytes for part in parts),
        "replaced": replaced is not None, "removed_files": removed, **waiting.report(),
    }  # fmt: skip


def keys_of(options: Options) -> Keys | None:
    """What --key and --tombstone say; None with --all. Raises ConfigError."""
    if (options.key is None) != options.all:
        raise ConfigError("either --key FIELD[,FIELD], the latest row of each key, or --all is needed")
    if options.store is None and options.archive is None:
        raise ConfigError("--store URL is needed, the table, or --archive PATH")
    if options.key is None:
        if options.tombstone is not None:
            raise ConfigError("--tombstone goes with --key: a log of all rows has them as well")
        return None
    if options.streams is None:
        raise ConfigError("--key needs --streams MODULE:NAME, where the stream's row class is: its fields make the key")
    return read_keys(options.stream, options.streams, options.key, options.tombstone)


def present(target: Root, stream: str) -> Manifest | None:
    """The snapshot that is there and will be replaced. Raises ConfigError for one of another stream, or none."""
    try:
        found = read_manifest(target.read(NAME))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(
            f"{target.shown}/{NAME} is no manifest of a snapshot ({error}): name another directory, or remove it"
        ) from None
    if found.agreement.stream != stream:
        raise ConfigError(
            f"the snapshot at {target.shown} is of stream {found.agreement.stream!r}, not {stream!r}: give each stream "
            "a directory of its own"
        )
    return found


# -- rows, in parts -------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Writing:
    """One run. Its files have ``name`` in theirs."""

    spark: SparkSession
    options: Options
    keys: Keys | None
    target: Root
    progress: job.Progress
    name: str = attrs.field(factory=lambda: secrets.token_hex(4))

    def of_table(self) -> tuple[Agreement, list[Part]]:
        """The table's rows up to what is proven now. Raises EpochChanged when it is replaced meanwhile."""
        options = self.options
        assert options.store is not None  # noqa: S101 - `keys_of` has looked
        source = FromTable(
            store=options.store, password_file=options.password_file, streams=options.streams, stream=options.stream
        )
        with source.table() as table:
            for attempt in range(ATTEMPTS):
                log = table.log()
                rows = source.rows(self.spark, log.floors, log.positions)
                try:
                    found = self.write(rows, log.epoch, log.positions, log.floors)
                except Exception:
                    if attempt == ATTEMPTS - 1 or not _pruned(log, table.log()):
                        raise
                    continue
                now = table.log()
                if now.epoch != log.epoch:  # the rows may be of either
                    self.abandon()
                    raise EpochChanged(log.epoch, now.epoch)
                return found
            raise AssertionError("unreachable")

    def of_archive(self, path: str) -> tuple[Agreement, list[Part]]:
        """An archive's rows. Raises ConfigError when it is damaged, or there is none."""
        root = Root(path)
        archive, epoch = existing(root, self.options.stream)
        rows = rows_of_archive(self.spark, root, archive, archive.after, archive.upto)
        return self.write(rows, epoch, archive.upto, archive.after)

    def write(
        self, rows: DataFrame, epoch: str, positions: Mapping[str, int], floors: Mapping[str, int]
    ) -> tuple[Agreement, list[Part]]:
        """Files of these rows, which are all up to the positions; nobody knows of them yet. What Spark raises; then
        they are removed."""
        try:
            parts = self._parts(rows, positions)
        except BaseException:
            self.abandon()
            raise
        lowest = {writer: at for writer, at in sorted(floors.items()) if at and writer in positions}
        ranges = ranges_of(parts, max(positions.values(), default=0))
        content = "" if self.keys is None else content_of(self.keys.kept(), parts)
        ends = dict(sorted(positions.items()))
        return Agreement(self.options.stream, epoch, ends, lowest, ranges, content=content), parts

    def _parts(self, rows: DataFrame, positions: Mapping[str, int]) -> list[Part]:
        from pyspark import StorageLevel

        if not max(positions.values(), default=0):
            return []
        with contextlib.ExitStack() as stack:
            # Read once, though looked at three times: how many there are, where to cut, then to cut.
            kept = self._kept(rows).persist(StorageLevel.DISK_ONLY)
            stack.callback(kept.unpersist)
            stack.enter_context(watched(self.spark, self.progress, "tasks"))
            count = kept.count()
            found = self._cut(kept, count) if count else []
        parts = sorted(found, key=lambda part: part.first)
        self.progress("parts", len(parts), len(parts))
        if sum(part.rows for part in parts) != count:
            raise ConfigError(f"{count} rows were read, and {sum(part.rows for part in parts)} written: nothing counts")
        if parts:
            return parts
        nothing = PartFiles(self.target, self.options.stream, self.name, 0, 1)
        nothing.flush(empty=True)
        return nothing.done

    def _kept(self, rows: DataFrame) -> DataFrame:
        """All rows, or the latest of each key."""
        from pyspark.sql import functions as F  # noqa: N812 - as everybody has it

        if self.keys is None:
            return rows
        found = map_in_arrow(rows, keyed(self.keys), self.keys.schema())
        latest = F.max(F.struct("token", "index", "gone", "writer", "row")).alias("latest")
        found = found.groupBy(*self.keys.columns()).agg(latest).select("latest.*")
        return found.where("NOT gone").drop("gone")

    def _cut(self, kept: DataFrame, count: int) -> list[Part]:
        tasks = self.options.partitions or max(1, min(MOST_TASKS, -(-count // TASK_ROWS)))
        limit = max(self.options.part_rows, -(-count // MOST_PARTS))
        # By ranges as they are found in the rows themselves: the latest of each key are mostly young ones.
        ordered = kept.repartitionByRange(tasks, "token").sortWithinPartitions("token", "index")
        task = parting(self.target, self.options.stream, self.name, limit)
        found = map_in_arrow(ordered.select("token", "writer", "row"), task, "part string").collect()
        return [Part(**orjson.loads(row[0])) for row in found]

    # -- the manifest -----------------------------------------------------------------------------------------

    def publish(self, manifest: Manifest, replaced: Manifest | None) -> None:
        """Make it the snapshot that is there, in one step, in the place of the one that was there at the start. Raises
        ConfigError when files of it are gone, or another job was there meanwhile."""
        text = write_manifest(manifest)
        read_manifest(text)  # as readers will
        missing = [file.file for file in manifest.files if self.target.size(file.file) is None]
        if missing:
            self.abandon()
            raise ConfigError(
                f"{self.target.shown} has lost {missing[0]} while the snapshot was written: is another job writing "
                "there? Give each a directory of its own. Or is it a folder that not all executors share?"
            )
        if present(self.target, self.options.stream) != replaced:
            self.abandon()
            raise ConfigError(
                f"another job has written a snapshot to {self.target.shown} meanwhile. That one stays, this one "
                "is dropped: give each job a directory of its own"
            )
        self.target.replace(NAME, text)  # its files stay, whatever happens: it may be there although this failed

    def abandon(self) -> None:
        """Remove what was written. What tasks write that still run is removed by a later run."""
        with contextlib.suppress(BusrepError):
            names = self.target.names("")
            self.target.remove([name for name in names if _PART.fullmatch(name) and f"-{self.name}-" in name])


def _pruned(before: LogState, now: LogState) -> bool:
    """Whether that is why reading failed."""
    return now.epoch == before.epoch and any(
        floor > before.floors.get(writer, 0) for writer, floor in now.floors.items() if writer in before.positions
    )


def content_of(kept: str, parts: Sequence[Part]) -> str:
    """What tells a snapshot of some rows from one of others, at the same positions and cut in the same way. Pure."""
    hashed = hashlib.sha256("\n".join([kept, *(part.sha256 for part in parts)]).encode())
    return f"{kept}: {hashed.hexdigest()}"


def ranges_of(parts: Sequence[Part], end: int) -> list[PartRange]:
    """The ranges of tokens of parts, in order: each from where the one before ends, the first from 0, so that nothing
    seems to be left out between them, and the last up to ``end``, the highest position. Pure.

    Raises ValueError for parts that overlap, which would cut a fact.
    """
    found: list[PartRange] = []
    after = 0
    for number, part in enumerate(parts, 1):
        if part.rows and part.first <= after:
            raise ValueError(f"{part.file} begins at {part.first}, the one before ends at {after}")
        upto = end if number == len(parts) else part.last
        found.append(PartRange(after, upto, part.rows))
        after = upto
    return found


def clean(target: Root, kept: Collection[str], grace: float) -> int:
    """Delete parts that are of no snapshot any more, older than ``grace`` seconds; how many there were.

    Those of the snapshot that was just replaced are among ``kept``: whoever reads it gets to its end.
    """
    unnamed = [name for name in target.names("") if name not in kept]
    old = [name for name in unnamed if _PART.fullmatch(name) or _TEMPORARY.fullmatch(name)]
    return target.remove([name for name in old if target.age(name) >= grace])
