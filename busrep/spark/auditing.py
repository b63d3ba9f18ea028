"""What the job ``audit`` does, stream by stream.

Where the archive ends is read first, then the table's positions and floors, so that what is compared is proven by the
table, and does not change any more. Both sides add up the hashes of their rows in parallel; the rows of ranges whose
sums differ are then looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from busrep.errors import Unavailable
from busrep.spark import archived, job, secrets
from busrep.spark.archive_store import Root, load, streams_of
from busrep.spark.archived import Archive
from busrep.spark.audit_files import picking, summing
from busrep.spark.audit_sums import Key, Row, Sums, differences, differing, hashes_of, merged
from busrep.spark.mapped import map_in_arrow
from busrep.spark.options import declared_stream
from busrep.spark.table import Table
from busrep.stores.plans import Plan, Sql
from busrep.stores.snapshots import Log, in_snapshot
from busrep.streams import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from busrep.spark.jobs.audit import Options

# The table may be pruned while it is read: then it is compared again, above the new floor.
ATTEMPTS = 3
# So many differing ranges are looked at, row by row.
RANGES = 10


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """See `busrep.spark.jobs.audit.run`."""
    root = Root(options.archive)
    url = secrets.resolve(options.store, options.password_file)
    names = options.stream or tuple(streams_of(root))
    reports = {}
    for at, name in enumerate(names):
        progress("audited streams", at, len(names))
        reports[name] = Audit(spark, root, name, options, url).run()
    progress("audited streams", len(names), len(names))
    return {
        "ok": bool(reports) and all(one["ok"] for one in reports.values()),
        "archive": root.shown,
        "compared_rows": sum(at["table_rows"] for one in reports.values() for at in one["writers"].values()),
        "streams": reports,
    }


@attrs.frozen
class Found:
    """What tasks found in the archive's files."""

    sums: Mapping[Key, tuple[int, int]]
    outside: int
    findings: Sequence[dict[str, Any]]


@attrs.define(eq=False)
class Audit:
    """The audit of one stream; ``url``: the store with its password."""

    spark: SparkSession
    root: Root
    stream: str
    options: Options
    url: str
    findings: list[dict[str, Any]] = attrs.field(factory=list)

    def run(self) -> dict[str, Any]:
        """The report of this stream."""
        noted = self._noted_by_spark()  # before the manifests: of what is noted there is one
        archive = load(self.root, self.stream)
        self.findings += [{"kind": one.kind, "text": one.text} for one in archive.problems]
        if noted > archive.last:
            self._find("missing", f"Spark has noted batch {noted} as done, and the last manifest is of {archive.last}")
        if not archive.manifests and not self.findings:
            self._find("missing", "there is no archive of this stream")
        for attempt in range(ATTEMPTS):
            log, readers = self._log()
            start = {key: max(log.floors.get(key, 0), archive.after.get(key, 0)) for key in archive.upto}
            try:
                return self._compared(archive, log, start, readers)
            except Exception:
                # Was it because of what was pruned meanwhile?
                now, _ = self._log()
                if attempt == ATTEMPTS - 1 or all(now.floors.get(key, 0) <= at for key, at in start.items()):
                    raise
        raise AssertionError("unreachable")

    def _find(self, kind: str, text: str, **more: Any) -> None:
        self.findings.append({"kind": kind, "text": text, **more})

    def _noted_by_spark(self) -> int:
        """The last batch that the archive's own checkpoint has noted as done; -1 where it has none."""
        folder = archived.folder_of(self.stream)
        try:
            start = orjson.loads(self.root.read(f"{folder}/{archived.START}"))
            place = Root(f"{self.root.url}/{folder}/checkpoint")
            if start["checkpoint"]:
                place = Root(f"{start['checkpoint'].rstrip('/')}/{folder.rpartition('/')[2]}")
            done = [int(name) for name in place.names("commits") if name.isdecimal()]
            return max(done, default=-1) + int(start["base"]) if done else -1
        except FileNotFoundError:
            return -1
        except (ValueError, KeyError, TypeError) as error:
            self._find("damaged", f"{archived.START} cannot be used: {error}")
            return -1

    def _definition(self) -> Stream[Any]:
        if self.options.streams is None:
            return Stream(self.stream)
        return declared_stream(self.options.streams, self.stream)

    def _log(self) -> tuple[Log, list[tuple[str, str, int, str]]]:
        """The log, and readers' saved positions (reader, writer, position, epoch), not older than it."""
        table = Table(self.url, self._definition())

        def saved() -> Plan[list[tuple[Any, ...]]]:
            answers = yield Sql(
                "SELECT reader, writer, position, epoch FROM busrep_readers WHERE stream = ? AND writer <> '' "
                "ORDER BY reader, writer",
                (self.stream,),
            )
            return list(answers[0])

        try:
            # Readers first: what they have handled was proven before.
            readers = table._database.ask(lambda: in_snapshot(saved()))
            return table.log(), readers
        finally:
            table.close()

    # -- comparing --------------------------------------------------------------------------------------------

    def _compared(
        self, archive: Archive, log: Log, start: Mapping[str, int], readers: Sequence[tuple[str, str, int, str]]
    ) -> dict[str, Any]:
        before = list(self.findings)
        end = dict(archive.upto)
        if archive.epoch not in (None, log.epoch):
            self._find("epoch", f"the archive is of epoch {archive.epoch}, the table of {log.epoch}")
            end = {}
        for writer, at in end.items():
            if at > log.positions.get(writer, 0):
                self._find(
                    "ahead", f"the archive of writer {writer} goes up to {at}, and the table has proven "
                    f"{log.positions.get(writer, 0)}: is it an older copy?", writer=writer,
                )  # fmt: skip
        end = {writer: max(min(at, log.positions.get(writer, 0)), start[writer]) for writer, at in end.items()}
        try:
            mine = self._of_archive(archive, start, end)
            theirs = self._of_table(start, end)
            wrong = differing(mine.sums, theirs)
            named = self._named(archive, wrong, start, end)
        except BaseException:
            self.findings = before  # if it is tried again
            raise
        self.findings += mine.findings
        saved = self._readers(readers, log, archive)
        writers = {
            writer: self._writer(writer, (start[writer], end[writer]), mine.sums, theirs, wrong)
            for writer in sorted(end)
        }
        return {
            "ok": not self.findings and not wrong, "archive_rows": archive.rows, "files": len(list(archive.files)),
            "batch": archive.last, "epoch": archive.epoch, "not_compared": mine.outside, "writers": writers,
            "readers": saved, "findings": self.findings, "differences": named,
        }  # fmt: skip

    def _writer(
        self,
        writer: str,
        span: tuple[int, int],
        mine: Mapping[Key, Any],
        theirs: Mapping[Key, Any],
        wrong: Sequence[Key],
    ) -> dict[str, Any]:
        buckets = [at for who, at in wrong if who == writer]
        return {
            "after": span[0], "upto": span[1], "same": not buckets, "differing_buckets": len(buckets),
            "archive_rows": sum(rows for (who, _), (rows, _) in mine.items() if who == writer),
            "table_rows": sum(rows for (who, _), (rows, _) in theirs.items() if who == writer),
        }  # fmt: skip

    def _readers(
        self, saved: Sequence[tuple[str, str, int, str]], log: Log, archive: Archive
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """Where readers are; a finding for one that is further than the table."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for reader, writer, position, epoch in saved:
            if epoch == log.epoch and position > log.positions.get(writer, 0):
                self._find(
                    "reader", f"reader {reader} has handled writer {writer} up to {position}, and the table has proven "
                    f"{log.positions.get(writer, 0)}", reader=reader, writer=writer,
                )  # fmt: skip
            found.setdefault(reader, {})[writer] = {
                "position": position, "epoch": epoch,
                "behind_archive": max(0, archive.upto.get(writer, 0) - position) if epoch == archive.epoch else None,
            }  # fmt: skip
        return {
            reader: {writer: {**at, "behind_archive": at["behind_archive"] or 0} for writer, at in one.items()}
            for reader, one in found.items()
        }

    # -- both sides -------------------------------------------------------------------------------------------

    def _of_archive(self, archive: Archive, start: Mapping[str, int], end: Mapping[str, int]) -> Found:
        files = list(archive.files)
        if not files:
            return Found({}, 0, [])
        task = summing(self.root, self.stream, Sums(self.options.bucket, start, end))
        parallel = self.spark.sparkContext.parallelize(files, min(len(files), 1000))
        results = parallel.map(task).collect()
        findings = [finding for _, _, found in results for finding in found]
        if any(one["kind"] == "no file" for one in findings):
            now = {file.file for _, file in load(self.root, self.stream).files}
            if not {one["file"] for one in findings if one["kind"] == "no file"} <= now:
                raise Unavailable(self.root.shown, "a compaction has deleted files that were being read: run it again")
        return Found(merged(one for sums, _, _ in results for one in sums), sum(one for _, one, _ in results), findings)

    def _of_table(self, start: Mapping[str, int], end: Mapping[str, int]) -> dict[Key, tuple[int, int]]:
        if all(end[writer] <= start[writer] for writer in end):
            return {}
        size = self.options.bucket

        def add(batches: Iterator[Any]) -> Iterator[Any]:
            import pyarrow

            sums = Sums(size, start, end)
            for batch in batches:
                sums.add(batch)
            columns = list(zip(*sums.result(), strict=True)) or [()] * 4
            types = (pyarrow.string(), pyarrow.int64(), pyarrow.int64(), pyarrow.string())
            arrays = [pyarrow.array(column, kind) for column, kind in zip(columns, types, strict=True)]
            yield pyarrow.RecordBatch.from_arrays(arrays, ["writer", "range", "rows", "total"])

        schema = "writer string, range bigint, rows bigint, total string"
        return merged(tuple(row) for row in map_in_arrow(self._table(start, end), add, schema).collect())

    def _table(self, start: Mapping[str, int], end: Mapping[str, int]) -> DataFrame:
        # Only what there is to read: a writer that the table does not know is an error there, and a finding here.
        end = {writer: at for writer, at in end.items() if at > start[writer]}
        start = {writer: start[writer] for writer in end}
        reader = self.spark.read.format("busrep").option("store", self.options.store).option("stream", self.stream)
        given = {
            "passwordFile": self.options.password_file, "streams": self.options.streams, "typed": "false",
            "partitions": self.options.partitions, "writers": ",".join(end),
            "startingPositions": orjson.dumps(dict(start)).decode(),
            "endingPositions": orjson.dumps(dict(end)).decode(),
        }  # fmt: skip
        for name, value in given.items():
            if value is not None:
                reader = reader.option(name, value)
        return reader.load()

    # -- where they differ ------------------------------------------------------------------------------------

    def _named(
        self, archive: Archive, wrong: Sequence[Key], start: Mapping[str, int], end: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        """The first rows that differ."""
        size, found = self.options.bucket, []
        for at in sorted({at for _, at in wrong})[:RANGES]:
            writers = [writer for writer, bucket in wrong if bucket == at]
            low = {writer: max(start[writer], at * size - 1) for writer in writers}
            high = {writer: min(end[writer], (at + 1) * size - 1) for writer in writers}
            files = [
                one for one in archive.files if one[1].min_token < (at + 1) * size and one[1].max_token >= at * size
            ]
            here: list[Row] = []
            if files:
                parallel = self.spark.sparkContext.parallelize(files, min(len(files), 1000))
                here = parallel.flatMap(picking(self.root, self.stream, low, high)).collect()
            found += differences(here, self._rows_of_table(low, high))
            if len(found) >= self.options.differences:
                break
        return found[: self.options.differences]

    def _rows_of_table(self, low: Mapping[str, int], high: Mapping[str, int]) -> list[Row]:
        if all(high[writer] <= low[writer] for writer in high):
            return []

        def hashed(batches: Iterator[Any]) -> Iterator[Any]:
            import pyarrow

            for batch in batches:
                columns = [batch.column(name) for name in ("writer", "token", "index")]
                hashes = pyarrow.array(hashes_of(batch), pyarrow.binary())
                yield pyarrow.RecordBatch.from_arrays([*columns, hashes], ["writer", "token", "index", "hash"])

        rows = map_in_arrow(self._table(low, high), hashed, "writer string, token bigint, index int, hash binary")
        return [(row[0], row[1], row[2], bytes(row[3])) for row in rows.collect()]
