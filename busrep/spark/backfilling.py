"""What the job ``backfill`` does: batch by batch, rows of old streams become facts of a new one.

The plan is settled and noted first. Then each of its batches is read and derived on the executors, which stage the new
rows in the target; the driver makes facts of them, as the sink does. In the transaction that writes them the target
notes the batch's number. So whoever is killed, and whenever, the next start finds there what is done: staged rows of a
batch that is not are nobody's, and go when it is done again.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import attrs

from busrep.errors import ConfigError, EpochChanged
from busrep.spark import job
from busrep.spark.archive_store import Root, existing
from busrep.spark.archived import Archive
from busrep.spark.backfill_plan import (
    Part,
    Plan,
    Slice,
    check_floors,
    check_order,
    of_archive,
    read_plan,
    read_start,
    start_of,
    write_plan,
)
from busrep.spark.backfill_tasks import RESULT, Derived, Staging, deriving
from busrep.spark.mapped import map_in_arrow
from busrep.spark.planning import LEAST_IDS, PARTITIONS
from busrep.spark.ranged import FromTable, rows_of_archive
from busrep.spark.sink_commit import commit
from busrep.spark.sink_options import SinkOptions, read_options
from busrep.spark.staging import Done, StagedBatch
from busrep.spark.staging_store import open_staging_store
from busrep.spark.waiting import waiting_rows
from busrep.stores.snapshots import LogState
from busrep.streams import Registry

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from busrep.spark.jobs.backfill import Options

# The plan, in the checkpoint's folder.
PLAN = "backfill.json"


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """See `busrep.spark.jobs.backfill.run`."""
    work = Backfill(spark, options)
    work.check()
    waiting = waiting_rows(options, options.stream if options.table else ())
    waiting.look()
    plan = work.plan()
    slices = list(plan.slices())
    done = work.done(plan)
    if done is not None:
        work.tell(done)
    before = 0 if done is None else done.number + 1
    rows = 0
    for one in slices[before:]:
        progress("batches", one.number, len(slices))
        rows += work.write(plan, one)
    progress("batches", len(slices), len(slices))
    return {
        "into": options.into, "writer": options.writer, "query": work.sink.query, "rows": rows,
        "batches": len(slices) - before, "batches_before": before,
        "upto": {part.stream: dict(part.upto) for part in plan.parts}, **waiting.report(),
    }  # fmt: skip


def check_options(options: Options) -> None:
    """Check the options, and that the function and the streams can be loaded. Raises ConfigError."""
    Backfill(None, options).check()
    read_start(options.start)


def _sink(options: Options) -> SinkOptions:
    name = f"backfill:{quote(options.into)}:{quote(options.writer)}" if options.query is None else options.query
    own = options.to_store is not None
    given = {
        "store": options.to_store if own else options.store, "stream": options.into, "writer": options.writer,
        "passwordFile": options.to_password_file if own else options.password_file, "streams": options.streams,
        "query": name, "redis": options.redis, "name": options.name,
        "redisPasswordFile": options.redis_password_file,
    }  # fmt: skip
    return read_options({key: value for key, value in given.items() if value is not None}, job=None)


@attrs.define(eq=False)
class Backfill:
    """One run. ``spark``: None where nothing is read."""

    spark: Any
    options: Options
    sink: SinkOptions = attrs.field(init=False)
    run: str = attrs.field(factory=lambda: uuid.uuid4().hex, init=False)

    def __attrs_post_init__(self) -> None:
        self.sink = _sink(self.options)

    def check(self) -> None:
        """Raises ConfigError for options that do not work together."""
        told = self.options
        if not told.stream or len(set(told.stream)) < len(told.stream):
            raise ConfigError("--stream NAME is needed, each once: the streams whose rows are taken")
        if told.into in told.stream and told.to_store in (None, told.store):
            raise ConfigError(f"--into {told.into} is among the streams whose rows are taken: write another one")
        if told.archive is None and not told.table:
            raise ConfigError("--no-table needs --archive: there is nowhere else to take rows from")
        if told.start != "earliest" and (told.archive is not None or len(told.stream) > 1):
            raise ConfigError("--start goes with one stream of the table: an archive's rows begin where it begins")
        for stream in told.stream:
            derived = self._derived(stream)
            derived.load()
            derived.source()

    def _derived(self, stream: str) -> Derived:
        return Derived(self.options.function, stream, self.options.streams, self.options.into)

    def _source(self, stream: str) -> FromTable:
        told = self.options
        return FromTable(store=told.store, password_file=told.password_file, streams=told.streams, stream=stream)

    # -- the plan ---------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What was noted at the first start, which may be this one. Raises ConfigError when it is of another one."""
        root, told = Root(self.options.checkpoint), self._told()
        try:
            text = root.read(PLAN)
        except FileNotFoundError:
            parts = tuple(self._part(stream) for stream in self.options.stream)
            made = Plan(id=uuid.uuid4().hex, width=self.options.batch_ids, parts=parts, told=told)
            root.put(PLAN, write_plan(made))  # or somebody else's, that was faster
            text = root.read(PLAN)
        try:
            plan = read_plan(text)
        except ValueError as error:
            raise ConfigError(f"{root.shown}/{PLAN} cannot be used: {error}") from None
        for name, value in told.items():
            if plan.told.get(name) != value:
                raise ConfigError(
                    f"the checkpoint at {root.shown} is of a backfill with --{name} {plan.told.get(name)}, not {value}"
                    ": go on with the same options, or begin another one with a folder, and a --writer, of its own"
                )
        return plan

    def _told(self) -> dict[str, Any]:
        told = self.options
        return {
            "stream": list(told.stream), "function": told.function, "streams": told.streams, "into": told.into,
            "writer": told.writer, "query": self.sink.query, "start": told.start,
        }  # fmt: skip

    def _part(self, stream: str) -> Part:
        """What there is of a stream now."""
        archive = self._archive(stream)
        log = self._log(stream) if self.options.table else None
        if archive is None:
            assert log is not None  # noqa: S101 - `check` has looked
            after = start_of(self.options.start, log.floors, log.positions)
            return Part(stream=stream, epoch=log.epoch, after=after, upto=log.positions)
        assert archive.epoch is not None  # noqa: S101 - `_archive` has looked
        if log is None:
            return Part(stream=stream, epoch=archive.epoch, after=archive.after, upto=archive.upto)
        if log.epoch != archive.epoch:
            raise EpochChanged(archive.epoch, log.epoch)
        for writer, at in archive.upto.items():
            if at > log.positions.get(writer, 0):
                raise ConfigError(
                    f"the archive of stream {stream!r} goes up to {at} of writer {writer!r}, and the table has proven "
                    f"{log.positions.get(writer, 0)}: is it an older copy? --no-table takes the archive's rows alone"
                )
        return Part(stream=stream, epoch=log.epoch, after=archive.after, upto=log.positions)

    def _archive(self, stream: str) -> Archive | None:
        if self.options.archive is None:
            return None
        return existing(Root(self.options.archive), stream)[0]

    def _log(self, stream: str) -> LogState:
        with self._source(stream).table() as table:
            return table.log()

    # -- batches ----------------------------------------------------------------------------------------------

    def done(self, plan: Plan) -> Done | None:
        """The last batch that became facts. Raises ConfigError when it is another plan's."""
        store = open_staging_store(self.sink.store, Registry([self.sink.definition()]))
        store.open()
        try:
            found = store.done(str(self.sink.query))
        finally:
            store.close()
        if found is not None and found.checkpoint != plan.id:
            raise ConfigError(
                f"stream {found.stream!r} has facts of a backfill {self.sink.query!r} already, which was another one: "
                f"its {PLAN} is not the one at {self.options.checkpoint}. Go on with that one's --checkpoint; or, to "
                "write rows anew beside those, give another --writer, or another --query"
            )
        return found

    def write(self, plan: Plan, one: Slice) -> int:
        """Make facts of one batch; how many. Raises EpochChanged when the table is replaced meanwhile."""
        query = str(self.sink.query)
        tasks = self.staged(one, Staging(self.sink, query, one.number))
        check_order([(task.first, task.last) for task in tasks])
        attempts, rows = [task.attempt for task in tasks if task.rows], sum(task.rows for task in tasks)
        return commit(self.sink, StagedBatch(query, one.number, plan.id, self.run, attempts, rows)).rows

    def tell(self, done: Done) -> None:
        """Prove and announce what is written: whoever wrote the last batch may have been killed before that, and then
        no reader has seen it."""
        commit(self.sink, StagedBatch(done.query, done.number, done.checkpoint, self.run, [], done.rows))

    def staged(self, one: Slice, staging: Staging) -> Sequence[Any]:
        """Stage what the rows of a batch become; what each task says, see `RESULT`."""
        frame, asked = self._rows(one)
        found = map_in_arrow(frame, deriving(self._derived(one.part.stream), staging), RESULT).collect()
        if asked:  # what was staged may be of either, and is no fact yet
            self._source_log(one)
        return found

    def _source_log(self, one: Slice) -> LogState:
        """The table's. Raises EpochChanged when it is not the plan's."""
        log = self._log(one.part.stream)
        if log.epoch != one.part.epoch:
            raise EpochChanged(one.part.epoch, log.epoch)
        return log

    def _rows(self, one: Slice) -> tuple[DataFrame, bool]:
        """Of the archive what it has by now, and of the table the rest, in tasks of ascending tokens, each in order;
        and whether the table was asked."""
        stream, ends = one.part.stream, {}
        frame = None
        archive = self._archive(stream)
        if archive is not None:
            if archive.epoch != one.part.epoch:
                raise EpochChanged(one.part.epoch, str(archive.epoch))
            ends = of_archive(one, archive.after, archive.upto)
            if ends:
                frame = rows_of_archive(self.spark, Root(str(self.options.archive)), archive, one.after, ends)
        start = {writer: max(one.after.get(writer, 0), ends.get(writer, 0)) for writer in one.upto}
        rest = {writer: at for writer, at in one.upto.items() if at > start[writer]}
        if rest:
            if not self.options.table:
                raise ConfigError(
                    f"the archive of stream {stream!r} does not have all rows of the plan: is it an older copy, or "
                    "another one?"
                )
            check_floors(start, rest, self._source_log(one).floors)
            table = self._source(stream).rows(self.spark, start, rest, self.options.partitions)
            frame = table if frame is None else frame.union(table)
        assert frame is not None  # noqa: S101 - a batch has rows in one of them
        if ends:  # the table's tasks are slices of the axis of tokens already
            frame = self._sliced(frame, one)
        return frame.sortWithinPartitions("token", "index"), bool(rest)

    def _sliced(self, frame: DataFrame, one: Slice) -> DataFrame:
        """The rows in slices of the axis of tokens, one a task."""
        low, high = min(one.after.values()), max(one.upto.values())
        tasks = self.options.partitions or min(PARTITIONS, -(-(high - low) // LEAST_IDS))
        width = -(-(high - low) // tasks)
        return frame.repartitionById(tasks, ((frame.token - (low + 1)) / width).cast("int"))
