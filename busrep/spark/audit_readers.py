"""The audit of readers' reports of one stream: what is compared, up to where, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from busrep.spark import audit_files, audit_handled, audit_table
from busrep.spark.archive_store import Root
from busrep.spark.archived import Archive
from busrep.spark.audit_files import Finding
from busrep.spark.audit_handled import NOTHING, Comparison, Reader, Truth
from busrep.spark.audit_log import Saved, ahead, caught_up
from busrep.spark.audit_reports import RANGE, Reports
from busrep.spark.databases import Question
from busrep.stores.snapshots import LogState

Key = tuple[str, str]
"""(reader, writer)."""


@attrs.frozen
class Known:
    """Of which tokens of a writer it is known what there should be: those of the archive, and of the table above it."""

    archived: tuple[int, int]
    table: tuple[int, int]

    @classmethod
    def of(cls, writer: str, archive: Archive, log: LogState) -> Known:
        """What both have. An archive of another epoch is none."""
        mine = archive.epoch == log.epoch
        after, upto = (positions.get(writer, 0) if mine else 0 for positions in (archive.after, archive.upto))
        upto = max(after, min(upto, log.positions.get(writer, 0)))
        above = max(upto, log.floors.get(writer, 0))
        return cls((after, upto), (above, max(above, log.positions.get(writer, 0))))

    def __contains__(self, token: int) -> bool:
        return any(after < token <= upto for after, upto in (self.archived, self.table))


@attrs.define(eq=False)
class HandledAudit:
    """``each``: has a function run on executors; ``look``: asks the table; ``check``: raises Unavailable when files
    are not there because they were compacted; ``most``: how many rows to name of each reader and writer."""

    root: Root
    stream: str
    reports: Reports
    question: Question
    each: Callable[[Sequence[Any], Callable[[Any], Any]], list[Any]]
    look: Callable[[], tuple[LogState, Saved]]
    check: Callable[[Iterable[str]], None]
    most: int
    once: bool

    def run(self, archive: Archive) -> tuple[dict[str, Any], list[Finding]]:
        """The readers, and what is wrong. Raises as the audit's tasks."""
        _, saved = self.look()
        self.reports.scan()  # after it, so that a report is not behind what was saved
        covered = self.reports.covered(self.stream)
        due = [
            (reader, writer, one.upto, epoch)
            for (reader, writer), epochs in covered.items()
            for epoch, one in epochs.items() if epoch is not None
        ]  # fmt: skip
        log, _ = caught_up(lambda: (self.look()[0], due), archive)
        findings = [*ahead({}, due, log), *self._epochs(log)]
        at = {(reader, writer): position for reader, writer, position, epoch in saved if epoch == log.epoch}
        readers: dict[Key, Reader] = {}
        for key, epochs in covered.items():
            if log.epoch in epochs:
                one = epochs[log.epoch]
                upto = min(max(one.upto, at.get(key, 0)), log.positions.get(key[1], 0))
                readers[key] = Reader(one.after, max(one.after, upto), self.most)
        if readers:
            self._compare(archive, log, readers)
        for (reader, writer), counted in sorted(readers.items()):
            findings += audit_handled.findings_of(reader, writer, counted, once=self.once)
        return self._shown(log, readers), findings

    def _epochs(self, log: LogState) -> Iterable[Finding]:
        """Lines of another epoch, unless they are of one before."""
        for (reader, writer), epochs in self.reports.covered(self.stream).items():
            first = epochs[log.epoch].first if log.epoch in epochs else 0
            for epoch, one in epochs.items():
                if epoch != log.epoch and one.last > first:
                    text = f"reader {reader}, writer {writer}: {one.lines} lines are of epoch {epoch}, the table is of "
                    yield {"kind": "epoch", "text": text + log.epoch, "reader": reader, "writer": writer}

    def _compare(self, archive: Archive, log: LogState, readers: Mapping[Key, Reader]) -> None:
        known = {writer: Known.of(writer, archive, log) for _, writer in readers}
        first = min(one.after for one in readers.values()) + 1
        last = max(self.reports.covered(self.stream)[key][log.epoch].upto for key in readers)
        last = max(last, *(one.upto for one in readers.values()))
        files = [entry for group in audit_files.planned(archive.files, RANGE, 1).groups for entry in group]
        for start, end in audit_handled.parts(first, last, self.reports.rows(self.stream, log.epoch)):
            low, high = start * RANGE, (end + 1) * RANGE - 1
            truth = self._truth(log, files, known, low, high)
            comparisons = {
                key: Comparison(one, truth.get(key[1], NOTHING), truth, known[key[1]].__contains__)
                for key, one in readers.items()
            }
            for span, reached in self.reports.spans(self.stream, log.epoch, start, end):
                comparisons[span.reader, span.writer].add(span, reached, low, high)
            for one in comparisons.values():
                one.end()

    def _truth(
        self, log: LogState, files: Sequence[audit_files.Entry], known: Mapping[str, Known], low: int, high: int
    ) -> dict[str, Truth]:
        """The rows that have these tokens."""

        def between(spans: Mapping[str, tuple[int, int]]) -> tuple[dict[str, int], dict[str, int]]:
            cut = {writer: (max(after, low - 1), min(upto, high)) for writer, (after, upto) in spans.items()}
            cut = {writer: span for writer, span in cut.items() if span[0] < span[1]}
            return {writer: after for writer, (after, _) in cut.items()}, {w: upto for w, (_, upto) in cut.items()}

        found = []
        after, upto = between({writer: one.archived for writer, one in known.items()})
        if upto:
            some = [entry for entry in files if entry.file.min_token <= high and entry.file.max_token >= low]
            found = self.each(some, audit_handled.of_archive(self.root, self.stream, after, upto))
            self.check(name for _, name in found if name is not None)
        after, upto = between({writer: one.table for writer, one in known.items()})
        slices = audit_table.slices(after, upto, RANGE, None)
        found += self.each(slices, audit_handled.of_table(self.question, log.epoch))
        return audit_handled.truths(rows for rows, _ in found)

    def _shown(self, log: LogState, readers: Mapping[Key, Reader]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for (reader, writer), one in sorted(readers.items()):
            writers = found.setdefault(reader, {"writers": {}, "not_reported": []})["writers"]
            wrong = {kind: one.counts[kind] for kind in ("lost", "extra", "changed")}
            writers[writer] = {
                "after": one.after, "upto": one.upto, "rows": one.rows, "repeated": one.repeated, **wrong,
                "out_of_order": one.counts["order"], "not_compared": one.rows - one.compared,
                "same": not one.counts and not (self.once and one.repeated),
            }  # fmt: skip
        for one in found.values():
            one["not_reported"] = sorted(writer for writer in log.positions if writer not in one["writers"])
        return found
