"""The driver's part of an archive: what a stream's batches become.

A batch, as Spark numbers it, is written so:

1. its end comes from Spark's offset log, where it was put before the batch began; its beginning is the end of the
   batch before, by that one's manifest, and has to be so by Spark's log, too;
2. each task writes files of its own, under names that nobody else has;
3. the driver writes the manifest, if there is none of that number.

Killed before 3, there is no batch: Spark does it again with the same end, and what had been written is removed. Killed
after, before Spark has noted it: the manifest is found, and nothing is done. Two drivers at once, one of which has been
given up for dead, write two sets of files, of which one gets a manifest. A checkpoint need not outlive anything: when
it is lost a new one goes on behind the last manifest, and one that stands elsewhere is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from busrep.errors import BusrepError, ConfigError, EpochChanged
from busrep.private_files import make_folders
from busrep.spark import archived
from busrep.spark.archive_start import Start, checkpoint_of, end_of, nonzero, read_start, write_start
from busrep.spark.archive_store import Root, data_path, load, put_manifest
from busrep.spark.archive_tasks import writing
from busrep.spark.archived import Archive, DataFile, Manifest
from busrep.spark.mapped import map_in_arrow
from busrep.spark.offsets import Offset, by_writer, positions_in
from busrep.spark.options import given_to, stream_of
from busrep.spark.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from busrep.spark.jobs.archive import Options

GENERIC = ("writer", "token", "index", "row", "committed_at")


@attrs.define(eq=False)
class StreamArchive:
    """The archive of one stream, as the driver that writes it knows it. ``told`` is called after each batch."""

    root: Root
    stream: str
    options: Options
    told: Callable[[], None] = lambda: None
    rows: int = 0
    batches: int = 0
    files: int = 0
    bytes: int = 0
    error: BusrepError | None = None
    _start: Start | None = None
    _last: int = -1
    _upto: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def folder(self) -> str:
        """Of the manifests."""
        return archived.folder_of(self.stream)

    @property
    def checkpoint(self) -> Root:
        """Spark's."""
        return checkpoint_of(self.root, self.stream, self.options.checkpoint or "")

    def report(self) -> dict[str, Any]:
        """What was done, and where the archive ends."""
        return {
            "rows": self.rows, "batches": self.batches, "files": self.files, "bytes": self.bytes,
            "batch": self._last, "upto": dict(self._upto),
        }  # fmt: skip

    # -- before the first batch -------------------------------------------------------------------------------

    def prepare(self, url: str) -> Start:
        """Find out where to go on. Raises ConfigError, EpochChanged, and what the store raises."""
        archive = load(self.root, self.stream).checked()
        self._last, self._upto = archive.last, archive.upto
        note = self._noted()
        where = "" if self.options.checkpoint is None else self.options.checkpoint
        if self.checkpoint.names("offsets"):
            if note is None or note.checkpoint != where:
                raise ConfigError(
                    f"the checkpoint at {self.checkpoint.shown} has been used, but not for the archive at "
                    f"{self.root.shown} as it is now: name that archive's checkpoint with --checkpoint, or a new one "
                    "to go on where the archive ends"
                )
        else:
            note = self._begin(archive, note, url, where)
        if not archive.manifests:
            self._upto = nonzero(note.positions)
        self._start = note
        self._follow()
        return note

    def _noted(self) -> Start | None:
        try:
            return read_start(self.root, self.stream)
        except ValueError as error:
            raise ConfigError(f"{self.root.shown}/{self.folder}/{archived.START} cannot be used: {error}") from None

    def start_of(self) -> Start:
        """Where the query begins; `prepare` has been called."""
        assert self._start is not None  # noqa: S101 - see above
        return self._start

    def _begin(self, archive: Archive, before: Start | None, url: str, where: str) -> Start:
        """A new checkpoint: of a new archive, or one that goes on behind the last batch."""
        with Table(url, stream_of(self.options.streams, self.stream)) as table:
            log = table.log()
        if archive.epoch not in (None, log.epoch):
            raise EpochChanged(str(archive.epoch), log.epoch)
        if archive.manifests:
            positions = archive.upto
        elif self.options.start == "earliest":
            positions = log.floors
        elif self.options.start == "latest":
            # Of a query that was killed before its first batch: what has come since is not skipped.
            again = before is not None and (before.start, before.epoch) == ("latest", log.epoch)
            positions = before.positions if before is not None and again else log.positions
        else:
            positions = positions_of(self.options.start)
        start = Start(where, archive.last + 1, log.epoch, by_writer(positions), self.options.start)
        write_start(self.root, self.stream, start)
        return start

    # -- the query --------------------------------------------------------------------------------------------

    def start(self, spark: SparkSession) -> StreamingQuery:
        """Start the query; `prepare` has been called."""
        told, begin = self.options, self.start_of()
        given = {
            "store": told.store, "stream": self.stream,
            "startingPositions": orjson.dumps(begin.positions).decode(),
            "maxRowsPerTrigger": str(told.batch_rows), "passwordFile": told.password_file,
            "redisPasswordFile": told.redis_password_file, "streams": told.streams,
            "typed": "false", "partitions": told.partitions, "redis": told.redis, "name": told.name,
        }  # fmt: skip
        if self.checkpoint.local:
            make_folders(self.checkpoint.path("").rstrip("/"))  # Spark would make it for everybody
        reader = given_to(spark.readStream.format("busrep"), given)
        writer = reader.load().writeStream.queryName(f"archive {self.stream}").foreachBatch(self.on_batch)
        writer = writer.option("checkpointLocation", self.checkpoint.spark_path("").rstrip("/"))
        if told.available_now:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{told.every * 1000:.0f} milliseconds").start()

    def on_batch(self, frame: DataFrame, batch: int) -> None:
        """Spark's batch, which may have been done before."""
        try:
            self.write(frame, batch, end_of(self.checkpoint, batch), self._query())
        except BusrepError as error:
            self.error = error
            raise
        self.told()

    def _query(self) -> str:
        return str(orjson.loads(self.checkpoint.read("metadata"))["id"])

    # -- a batch ----------------------------------------------------------------------------------------------

    def write(self, frame: DataFrame, batch: int, end: Offset, query: str) -> None:
        """Make the rows of ``frame`` a batch of the archive, unless they are one already. Raises ConfigError when the
        checkpoint and the archive do not fit together."""
        start = self.start_of()
        number = start.base + batch
        if end.epoch != start.epoch:
            raise EpochChanged(start.epoch, end.epoch)
        if number <= self._last:
            self._found(number, end)
            return
        if number > self._last + 1:
            raise ConfigError(
                f"the checkpoint goes on with batch {number} of stream {self.stream!r}, and the archive at "
                f"{self.root.shown} ends with {self._last}: manifests are missing. Put them back, or remove the "
                f"checkpoint at {self.checkpoint.shown} to archive again what is behind the last one"
            )
        begin = end_of(self.checkpoint, batch - 1).positions if batch else start.positions
        if nonzero(begin) != nonzero(self._upto):
            raise self._elsewhere(f"ends elsewhere than where batch {number} of the checkpoint begins")
        manifest = Manifest(
            stream=self.stream, query=query, batch=number, epoch=end.epoch, after=self._upto, upto=end.positions,
            files=tuple(self._write_files(frame, number)),
        )  # fmt: skip
        if not put_manifest(self.root, manifest):
            # Another driver has done it, which was thought to be dead: its files are the batch.
            self.root.remove([data_path(self.stream, file.file) for file in manifest.files])
            self._found(number, end)
        else:
            self._remove_others(manifest)
            self.rows, self.batches = self.rows + manifest.rows, self.batches + 1
            self.files, self.bytes = self.files + len(manifest.files), self.bytes + sum(f.bytes for f in manifest.files)
        self._last, self._upto = number, manifest.upto
        self._follow()

    def _follow(self) -> None:
        """With --format delta, the Delta log says what the manifests say."""
        if self.options.format == "delta":
            from busrep.spark.archive_delta import follow

            follow(self.root, self.stream)

    def _found(self, number: int, end: Offset) -> None:
        """That batch is there: is it the same?"""
        archive = load(self.root, self.stream).checked()
        same = [one for one in archive.manifests if one.batch == number]
        if same and same[0].upto == nonzero(end.positions):
            return
        raise self._elsewhere(f"has a batch {number} already, which ends elsewhere than the checkpoint's")

    def _elsewhere(self, how: str) -> ConfigError:
        return ConfigError(
            f"the archive of stream {self.stream!r} at {self.root.shown} {how}: is the checkpoint at "
            f"{self.checkpoint.shown} an old copy, or of another archive, or does another job write to this one? "
            "Remove it to go on where the archive ends"
        )

    def _write_files(self, frame: DataFrame, number: int) -> list[DataFile]:
        task = writing(self.root, self.stream, number, self.options.file_rows, self.options.streams)
        rows = map_in_arrow(frame.select(*(f"`{name}`" for name in GENERIC)), task, "files string").collect()
        return [DataFile(**file) for row in rows for file in orjson.loads(row[0])]

    def _remove_others(self, manifest: Manifest) -> None:
        """Files of this batch that no manifest will ever name: of a driver or a task that was killed."""
        ours = {file.file for file in manifest.files}
        for day in {file.date for file in manifest.files}:
            names = self.root.names(f"{archived.data_folder(self.stream)}/date={day}") if self.batches == 0 else []
            others = [f"date={day}/{name}" for name in names if archived.maker_of(name) == ("", manifest.batch)]
            self.root.remove([data_path(self.stream, name) for name in others if name not in ours])


def positions_of(text: str) -> dict[str, int]:
    """A map of positions as JSON. Raises ConfigError."""
    try:
        return positions_in(orjson.loads(text))
    except ValueError:
        raise ConfigError(f'--start is {text!r}: earliest, latest, or a map like {{"writer": 55}} is needed') from None
