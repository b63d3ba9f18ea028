"""What the job ``audit`` does, stream by stream.

Where the archive ends is read first, then the table's positions and floors, so that what is compared is proven by the
table, and does not change any more. Both sides hash their rows in parallel, the table first, for it may be pruned
meanwhile; the rows of ranges whose hashes differ are then looked at one by one. When something was pruned before it
had been read, or compacted, all of it is done again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from busrep.errors import BusrepError, ConfigError, Unavailable
from busrep.spark import archived, audit_files, audit_table, job, secrets
from busrep.spark.archive_store import Root, load, streams_of
from busrep.spark.archived import Archive
from busrep.spark.archiving import streams_in_store
from busrep.spark.audit_behind import behind_of
from busrep.spark.audit_files import Finding
from busrep.spark.audit_log import Saved, ahead, caught_up, log_of, shown
from busrep.spark.audit_notes import notes_of
from busrep.spark.audit_readers import HandledAudit
from busrep.spark.audit_reports import Reports
from busrep.spark.audit_sums import Key, Row, Sum, differences, differing, merged
from busrep.spark.databases import Question
from busrep.spark.options import stream_of
from busrep.spark.planning import Span
from busrep.spark.table import Ages, Table
from busrep.spark.waiting import TableWriter, waiting_rows
from busrep.stores.snapshots import LogState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from busrep.spark.jobs.audit import Options

# The table may be pruned while it is read, and the archive compacted: then they are compared again.
ATTEMPTS = 3
# So many differing ranges are looked at, row by row.
RANGES = 10
MOST_TASKS = 1000


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """See `busrep.spark.jobs.audit.run`."""
    root = Root(options.archive)
    url = secrets.resolve(options.store, options.password_file)
    with contextlib.closing(Reports(options.handled)) as handled:
        handled.scan()
        return _audited(spark, root, options, url, handled, progress)


def _audited(
    spark: SparkSession, root: Root, options: Options, url: str, handled: Reports, progress: job.Progress
) -> job.Report:
    names = options.stream or sorted({*_streams(root), *handled.streams})
    others: Collection[str] = ()
    if not options.stream:
        with contextlib.suppress(ConfigError):  # the store has none
            others = sorted(set(streams_in_store(url)) - set(names))
    waiting = waiting_rows(options, names)
    writers = waiting.look()
    reports = {}
    for at, name in enumerate(names):
        progress("audited streams", at, len(names))
        of_stream = [one for one in writers if one.stream == name]
        reports[name] = Audit(spark, root, name, options, url, handled, of_stream).run()
    progress("audited streams", len(names), len(names))
    return {
        "ok": bool(reports) and not handled.findings and all(one["ok"] for one in reports.values()),
        "archive": root.shown,
        "compared_rows": sum(at["table_rows"] for one in reports.values() for at in one["writers"].values()),
        "streams": reports, "not_archived": list(others), "findings": handled.findings,
        "torn_lines": handled.unfinished(), "unusable_lines": dict(handled.unusable),
        **waiting.report(writers),
    }  # fmt: skip


def _streams(root: Root) -> list[str]:
    """The streams that have manifests there, or data."""
    data = (name.removeprefix("stream=") for name in root.names("", folders=True) if name.startswith("stream="))
    return sorted({*streams_of(root), *archived.streams_in(data)})


@attrs.define(eq=False)
class Audit:
    """The audit of one stream; ``url``: the store with its password; ``writers``: those of the table."""

    spark: SparkSession
    root: Root
    stream: str
    options: Options
    url: str = attrs.field(repr=False)
    handled: Reports
    writers: Sequence[TableWriter] = ()
    findings: list[Finding] = attrs.field(factory=list, init=False)

    def run(self) -> dict[str, Any]:
        """The report of this stream."""
        for attempt in range(ATTEMPTS):
            archive, self.findings = self._notes()
            log, readers = caught_up(self._log, archive)
            # A writer that the archive does not know is shown, too, with nothing to compare.
            start = {
                writer: max(log.floors.get(writer, 0), archive.after.get(writer, 0))
                for writer in archive.upto.keys() | log.positions.keys()
            }
            try:
                found = self._compared(archive, log, start, readers)
                return self._with_handled(found, archive)
            except Exception:
                if attempt == ATTEMPTS - 1 or not self._moved(archive, log, start):
                    raise
        raise AssertionError("unreachable")

    def _notes(self) -> tuple[Archive, list[Finding]]:
        asked = self.stream in self.options.stream or not self.options.handled
        if asked or self.stream in _streams(self.root):
            return notes_of(self.root, self.stream)
        return Archive(self.stream), []  # a reader reports on it, nobody says that it is archived

    def _with_handled(self, report: dict[str, Any], archive: Archive) -> dict[str, Any]:
        """The report, with what readers say that they have handled."""
        if not self.options.handled:
            return report
        question = self._question()
        handled, findings = HandledAudit(
            self.root, self.stream, self.handled, question, self._each, self._log, self._check_compaction,
            self.options.differences, self.options.once,
        ).run(archive)  # fmt: skip
        findings = report["findings"] + findings
        return {**report, "ok": report["ok"] and not findings, "findings": findings, "handled": handled}

    def _find(self, kind: str, text: str, **more: Any) -> None:
        self.findings.append({"kind": kind, "text": text, **more})

    def _moved(self, archive: Archive, log: LogState, start: Mapping[str, int]) -> bool:
        """Whether what was read is not what is there now: pruned, replaced, or compacted."""
        try:
            now, _ = self._log()
            files = {file.file for _, file in load(self.root, self.stream).files}
        except BusrepError:
            return False
        return (
            now.epoch != log.epoch
            or any(now.floors.get(writer, 0) > at for writer, at in start.items())
            or not {file.file for _, file in archive.files} <= files
        )

    def _log(self) -> tuple[LogState, Saved]:
        return log_of(self.url, stream_of(self.options.streams, self.stream))

    def _ages(self, spans: Sequence[Span]) -> Ages:
        with Table(self.url, stream_of(self.options.streams, self.stream)) as table:
            return table.first_ages(spans)

    def _question(self) -> Question:
        streams = self.options.streams
        return audit_table.question_of(self.url, stream_of(streams, self.stream), streams)

    # -- comparing --------------------------------------------------------------------------------------------

    def _compared(self, archive: Archive, log: LogState, start: Mapping[str, int], readers: Saved) -> dict[str, Any]:
        end = {writer: archive.upto.get(writer, 0) for writer in start}
        if archive.epoch not in (None, log.epoch):
            self._find("epoch", f"the archive is of epoch {archive.epoch}, the table of {log.epoch}")
            end = {}
        self.findings += ahead(end, readers, log)
        end = {writer: max(min(at, log.positions.get(writer, 0)), start[writer]) for writer, at in end.items()}
        parallel = max(1, self.spark.sparkContext.defaultParallelism)
        plan = audit_files.planned(archive.files, self.options.bucket, 4 * parallel)
        theirs = self._of_table(log.epoch, start, end, plan)
        mine, outside = self._of_archive(plan, start, end)
        wrong = differing(mine, theirs)
        named = self._named(archive, log, wrong, start, end)
        if wrong and not named and not self.findings:
            writer, at = wrong[0]
            size = self.options.bucket
            self._find(
                "differs", f"writer {writer}, tokens {at * size} to {(at + 1) * size - 1}: archive and table differed, "
                "and their rows could not be looked at any more", writer=writer,
            )  # fmt: skip
        if self.options.max_behind is not None:
            self.findings += behind_of(archive, log, self._ages, self.writers, self.options.max_behind)
        writers = {
            writer: self._writer(
                writer, (start[writer], end[writer], log.positions.get(writer, 0)), mine, theirs, wrong
            )
            for writer in sorted(end)
        }
        return {
            "ok": not self.findings and not wrong, "archive_rows": archive.rows, "files": len(list(archive.files)),
            "batch": archive.last, "epoch": archive.epoch, "not_compared": outside, "writers": writers,
            "readers": shown(readers, archive), "findings": self.findings, "differences": named,
        }  # fmt: skip

    def _writer(
        self,
        writer: str,
        span: tuple[int, int, int],
        mine: Mapping[Key, Sum],
        theirs: Mapping[Key, Sum],
        wrong: Sequence[Key],
    ) -> dict[str, Any]:
        ranges = sum(who == writer for who, _ in wrong)
        return {
            "after": span[0], "upto": span[1], "table_upto": span[2], "same": not ranges, "differing_buckets": ranges,
            "archive_rows": sum(rows for (who, _), (rows, _) in mine.items() if who == writer),
            "table_rows": sum(rows for (who, _), (rows, _) in theirs.items() if who == writer),
        }  # fmt: skip

    # -- both sides -------------------------------------------------------------------------------------------

    def _of_table(
        self, epoch: str, start: Mapping[str, int], end: Mapping[str, int], plan: audit_files.Plan
    ) -> dict[Key, Sum]:
        size = self.options.bucket
        question = self._question()
        slices = audit_table.slices(start, end, size, self.options.partitions)
        results = self._each(slices, audit_table.summing(question, epoch, size, start, end, plan.mixed))
        return merged(one for sums in results for one in sums)

    def _of_archive(
        self, plan: audit_files.Plan, start: Mapping[str, int], end: Mapping[str, int]
    ) -> tuple[dict[Key, Sum], int]:
        """The sums of the archive's files, and how many rows were left out."""
        task = audit_files.summing(self.root, self.stream, self.options.bucket, start, end, plan.mixed)
        results = self._each(plan.groups, task)
        found = [finding for *_, findings in results for finding in findings]
        self._check_compaction(one["file"] for one in found if one["kind"] == "no file")
        self.findings += found
        return merged(one for sums, *_ in results for one in sums), sum(outside for _, outside, _ in results)

    def _each(self, parts: Sequence[Any], task: Callable[[Any], Any]) -> list[Any]:
        """What the task gives of each part; run on executors."""
        if not parts:
            return []
        found: list[Any] = self.spark.sparkContext.parallelize(parts, min(len(parts), MOST_TASKS)).map(task).collect()
        return found

    def _check_compaction(self, missing: Iterable[str]) -> None:
        """Raise Unavailable when files are not there because a compaction has replaced them."""
        gone = set(missing)
        if gone and not gone <= {file.file for _, file in load(self.root, self.stream).files}:
            raise Unavailable(self.root.shown, "compactions delete files while they are read: run it again")

    # -- where they differ ------------------------------------------------------------------------------------

    def _named(
        self, archive: Archive, log: LogState, wrong: Sequence[Key], start: Mapping[str, int], end: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        """The first rows that differ; of what is pruned meanwhile none."""
        size, found = self.options.bucket, list[dict[str, Any]]()
        for at in sorted({at for _, at in wrong})[:RANGES]:
            writers = [writer for writer, range_ in wrong if range_ == at]
            high = {writer: min(end[writer], (at + 1) * size - 1) for writer in writers}
            low = {writer: max(start[writer], at * size - 1) for writer in writers}
            files = [
                entry for group in audit_files.planned(archive.files, size, 1).groups for entry in group
                if entry.file.min_token < (at + 1) * size and entry.file.max_token >= at * size
            ]  # fmt: skip
            found += self._rows_differing(log.epoch, files, low, high)
            if len(found) >= self.options.differences:
                break
        return found[: self.options.differences]

    def _rows_differing(
        self, epoch: str, files: Sequence[audit_files.Entry], low: Mapping[str, int], high: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        for _ in range(ATTEMPTS):
            try:
                there = self._rows_of_table(epoch, low, high)
                break
            except Exception:
                now, _ = self._log()
                above = {writer: max(at, now.floors.get(writer, 0)) for writer, at in low.items()}
                if now.epoch != epoch or above == low:
                    raise
                low = above
        else:  # not an error, after which they would be compared without these rows, and found to be the same
            return []
        task = audit_files.picking(self.root, self.stream, low, high, audit_files.rows_of)
        picked = self._each(files, task)
        self._check_compaction(name for _, name in picked if name is not None)
        return differences([row for rows, _ in picked for row in rows], there)

    def _rows_of_table(self, epoch: str, low: Mapping[str, int], high: Mapping[str, int]) -> list[Row]:
        question = self._question()
        slices = audit_table.slices(low, high, self.options.bucket, 1)
        return [row for rows in self._each(slices, audit_table.picking(question, epoch)) for row in rows]
