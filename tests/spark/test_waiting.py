"""Committed rows of a writer that was killed, from the archive job to the audit."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from busrep.spark import job
from busrep.spark.jobs import archive, audit
from tests.spark.source_facts import Log, trade


def test_rows_of_a_dead_writer_are_told_and_archived_with_finish_silent(
    spark: SparkSession, one_log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = one_log.write("dead", [trade(1)])
    one_log.prove(dead=first)
    one_log.write("dead", [trade(2), trade(3)])
    one_log.sql("UPDATE busrep_positions SET seen_at = seen_at - 60")
    place = str(tmp_path / "archive")

    def archived(*, finish: bool) -> job.Report:
        told = archive.Options(
            store=one_log.url, archive=place, stream=("trades",), available_now=True, finish_silent=finish
        )
        return archive.run(spark, told, job.silent)

    def audited() -> job.Report:
        told = audit.Options(store=one_log.url, archive=place, stream=("trades",), max_behind=30.0)
        return audit.run(spark, told, job.silent)

    report = archived(finish=False)
    assert report["rows"] == 1
    assert report["table_writers"]["trades"]["dead"]["waiting_rows"] == 2
    assert "2 committed rows above its proven position 1" in caplog.text
    one_log.sql("UPDATE busrep_facts SET committed_at = committed_at - 60 WHERE id > 1")
    report = audited()
    assert not report["ok"]
    assert [one["kind"] for one in report["streams"]["trades"]["findings"]] == ["waiting"]
    report = archived(finish=True)
    assert report["rows"] == 2
    assert report["finished"]["dead"]["trades"] >= 2
    assert report["table_writers"]["trades"]["dead"]["waiting_rows"] == 0
    report = audited()
    assert report["ok"], report
    assert report["compared_rows"] == 3
