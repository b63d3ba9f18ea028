"""Committed rows of writers that have died: reported, warned of, finished, a finding of the audit. No Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from busrep.cli.app import cli
from busrep.spark import audit_log, job, waiting
from busrep.spark.archive_store import Root, put_manifest
from busrep.spark.archived import Archive, Manifest
from busrep.spark.audit_behind import behind, proven_and_not_archived
from busrep.spark.jobs import archive, audit, backfill, replay, snapshot, stats
from busrep.spark.stats.job import archive_lag
from busrep.spark.table import Table
from busrep.spark.waiting import TableWriter, WaitingRows, described
from busrep.stores.snapshots import LogState as TableLog
from tests.spark.archives import Bench, Local, orders
from tests.spark.source_facts import Item, Log, items, opened_log, trade, trades

DECLARED = "tests.spark.source_facts:STREAMS"
AGO = {"sqlite": "seen_at - {seconds}", "postgresql": "seen_at - interval '{seconds} seconds'"}


@pytest.fixture(params=["sqlite", "postgresql"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    """A live writer "live", and "dead", which was killed between a COMMIT and its next heartbeat. Both have three
    facts, of which the first one is proven; "dead" has another one in the application's table."""
    server = request.getfixturevalue("postgres_server") if request.param == "postgresql" else None
    with opened_log(request.param, server, tmp_path) as made:
        for writer in ("live", "dead"):
            first = made.write(writer, [trade(1)])
            made.prove(**{writer: first})
            made.write(writer, [trade(2), trade(3)])
            made.write(writer, [trade(4)])
        made.write("dead", [Item(1, "one", True)], stream=items)
        yield made


def sleep(log: Log, writer: str, seconds: float) -> None:
    """Nothing is seen of that writer for so long."""
    ago = AGO["sqlite" if log.url.startswith("sqlite") else "postgresql"].format(seconds=seconds)
    log.sql(f"UPDATE busrep_positions SET seen_at = {ago} WHERE writer = '{writer}'")


def rows_of(log: Log, *names: str, finish: bool = False) -> WaitingRows:
    return WaitingRows(log.url, DECLARED, names or ("trades", "items"), job.LEASE, finish)


def test_a_dead_writers_rows_are_counted_and_warned_of_once(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    found = rows_of(log)
    counted = {(one.stream, one.writer): one.waiting_rows for one in found.look()}
    assert counted == {("trades", "dead"): 3, ("trades", "live"): 3, ("items", "dead"): 1, ("items", "live"): 0}
    assert not caplog.messages, "both were seen just now"
    sleep(log, "dead", 60)
    for _ in range(2):
        report = found.report()
    dead, live = (report["table_writers"]["trades"][name] for name in ("dead", "live"))
    assert dead["waiting_rows"] == 3
    assert 60 <= dead["silent_for"] <= 600
    assert dead["waiting_for"] >= 0
    assert live["silent_for"] < 60
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [("'dead'" in text, "'trades'" in text, "'items'" in text) for text in warned] == [
        (True, True, False), (True, False, True),
    ]  # fmt: skip
    assert "--finish-silent" in warned[0]
    assert [line.partition(":")[0] for line in described(report)] == ["WAITING", "WAITING"]
    assert report["finished"] == {}


def test_a_sign_of_life_in_any_stream_counts_for_all(log: Log) -> None:
    sleep(log, "dead", 60)
    now = "strftime('%s', 'now')" if log.url.startswith("sqlite") else "clock_timestamp()"
    log.sql(f"UPDATE busrep_positions SET seen_at = {now} WHERE writer = 'dead' AND stream = 'items'")
    assert not any(one.is_silent(job.LEASE) for one in rows_of(log).look())


def test_finish_silent_finishes_the_dead_writer_alone(log: Log) -> None:
    sleep(log, "dead", 60)
    found = rows_of(log, finish=True)
    after = {(one.stream, one.writer): one for one in found.look()}
    assert after["trades", "dead"].waiting_rows == after["items", "dead"].waiting_rows == 0
    assert (after["trades", "dead"].registered, after["trades", "live"].registered) == (False, True)
    assert after["trades", "live"].waiting_rows == 3
    finals = {"items": after["items", "dead"].position, "trades": after["trades", "dead"].position}
    assert found.report()["finished"] == {"dead": finals}
    # The live one is not fenced, and proves its rows.
    log.prove(live=6)
    assert {one.waiting_rows for one in rows_of(log).look()} == {0}


def test_a_writer_that_is_seen_again_is_not_finished(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the finish it beats."""
    sleep(log, "dead", 60)
    found = rows_of(log, finish=True)
    registry = found._known_streams  # type: ignore[attr-defined]

    def beats() -> Any:
        log.prove(dead=4)
        return registry()

    monkeypatch.setattr(WaitingRows, "_known_streams", lambda _: beats())
    found.look()
    assert found.finished == {}
    log.store.check_claim(log.claims["dead"])


def test_a_dead_writer_with_an_open_transaction_is_told_and_left(
    log: Log, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "FINISH_WAIT", 0.2)
    sleep(log, "dead", 60)
    transaction = log.store.transaction(log.claims["dead"])
    transaction.begin()
    try:
        found = rows_of(log, finish=True)
        found.look()
    finally:
        transaction.rollback()
    assert found.finished == {}
    assert "cannot be finished yet" in caplog.text


def test_nothing_is_asked_without_a_table() -> None:
    options = snapshot.Options(stream="orders", to="x", archive="y")
    found = waiting.waiting_rows(options, ["orders"])
    assert found.look() == []
    assert found.report() == {"table_writers": {}, "finished": {}, "lease": job.LEASE}


def test_every_job_that_reads_a_table_has_the_options() -> None:
    for module in (archive, backfill, replay, snapshot, stats):
        names = {field.name for field in attrs.fields(module.Options)}
        assert names >= {"finish_silent", "lease"}, module.__name__
    assert {field.name for field in attrs.fields(audit.Options)} >= {"max_behind", "lease"}


def test_the_lease_is_not_below_that_of_living_writers() -> None:
    arguments = ["pipeline", "archive", "--store", "sqlite:////x.db", "--archive", "y", "--lease", "9s"]
    found = CliRunner().invoke(cli, arguments)
    assert found.exit_code == 2
    assert "'lease' must be >= 10" in found.output


# -- the audit ------------------------------------------------------------------------------------------------


def writer(name: str, **more: Any) -> TableWriter:
    told: dict[str, Any] = {
        "stream": "orders", "writer": name, "position": 10, "registered": True, "incarnation": 1, "silent_for": 0.0,
        "waiting_rows": 0, "waiting_for": None, **more,
    }  # fmt: skip
    return TableWriter(**told)


def archive_of(**upto: int) -> Archive:
    return Archive("orders", (Manifest(stream="orders", query="q", batch=0, epoch="e", after={}, upto=upto, files=()),))


@pytest.mark.parametrize(
    ("archived", "ages", "writers", "kinds"),
    [
        ({"w": 10}, {}, [], []),
        ({"w": 9}, {"w": 59.0}, [], []),
        ({"w": 9}, {"w": 61.0}, [], ["behind"]),
        ({"w": 9}, {}, [], []),  # IDs without rows
        ({"v": 9}, {"w": 61.0}, [], ["no writer"]),
        ({"w": 9}, {"w": None}, [writer("w", silent_for=59.0)], []),
        ({"w": 9}, {"w": None}, [writer("w", silent_for=61.0)], ["behind"]),
        ({"w": 10}, {}, [writer("w", silent_for=61.0)], []),
        ({"w": 10}, {}, [writer("w", waiting_rows=1, waiting_for=59.0, silent_for=61.0)], []),
        ({"w": 10}, {}, [writer("w", waiting_rows=1, waiting_for=61.0)], ["waiting"]),
        ({"w": 10}, {}, [writer("w", waiting_rows=1, silent_for=61.0)], ["waiting"]),
    ],
)
def test_what_max_behind_finds(
    archived: dict[str, int], ages: dict[str, float | None], writers: list[TableWriter], kinds: list[str]
) -> None:
    found = archive_of(**archived)
    spans = proven_and_not_archived(found, TableLog("e", False, {"w": 10}, {}))
    assert [one["kind"] for one in behind(found, spans, ages, writers, 60.0)] == kinds


def test_pruned_rows_are_no_rows_that_the_archive_lacks() -> None:
    assert proven_and_not_archived(archive_of(w=3), TableLog("e", False, {"w": 10}, {"w": 10})) == []


def test_how_far_an_archive_is_behind(log: Log, tmp_path: Path) -> None:
    """All rows that are proven and not archived, and the oldest of them, which is not always the first."""
    root = Root(str(tmp_path / "archive"))
    told = {"query": "q", "batch": 0, "epoch": log.epoch, "after": {}, "files": ()}
    put_manifest(root, Manifest(stream="trades", upto={"live": 1}, **told))
    log.prove(live=3)
    log.committed(3, datetime.now(UTC) - timedelta(days=1))
    log.store.heartbeat(log.claim("dead"), {"items": 1})
    with Table(log.url, trades) as table, Table(log.url, items) as own:
        dead, live, of_items, none = archive_lag(root, [table, own])
    assert (dead["archived"], dead["proven"], dead["rows"]) == (0, 4, 1)
    assert (live["archived"], live["proven"], live["rows"]) == (1, 3, 3)
    assert 0 <= dead["seconds"] < 86_400 <= live["seconds"] < 90_000
    assert (of_items["stream"], of_items["writer"], of_items["rows"], of_items["seconds"]) == ("items", "dead", 1, None)
    assert (none["writer"], none["rows"], none["seconds"]) == ("live", 0, None)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(audit_log, "WAIT", 0.0)
    made = Bench(Local(), tmp_path)
    made.write("w1", orders(range(1, 50)), upto=49)
    made.archived_by_hand()
    return made


def audited(bench: Bench, **options: Any) -> tuple[bool, list[tuple[str, str]], dict[str, Any]]:
    told = audit.Options(store=bench.url, archive=bench.root.url, stream=("orders",), **options)
    report = audit.run(bench.spark, told, job.silent)
    findings = report["streams"]["orders"]["findings"]
    return report["ok"], [(one["kind"], one["writer"]) for one in findings], report


def test_an_audit_tells_of_waiting_rows_and_max_behind_makes_them_wrong(bench: Bench) -> None:
    bench.write("w1", orders([60, 61]), upto=49)
    ok, findings, report = audited(bench)
    assert (ok, findings) == (True, [])
    assert report["table_writers"]["orders"]["w1"]["waiting_rows"] == 2
    assert audited(bench, max_behind=10.0)[:2] == (False, [("waiting", "w1")])
    assert audited(bench, max_behind=10.0**12)[:2] == (True, [])


def test_an_archive_that_ends_early_or_lacks_a_writer_is_wrong_with_max_behind(bench: Bench) -> None:
    bench.write("w1", orders([60]), upto=60)
    bench.write("w2", orders([62]), upto=62)
    bench.write("w3", [], upto=70)
    assert audited(bench)[:2] == (True, [])
    ok, findings, report = audited(bench, max_behind=3600.0)
    assert (ok, findings) == (False, [("behind", "w1"), ("no writer", "w2")])
    assert "ends at 49" in audit.describe(report)
    bench.archived_by_hand()
    assert audited(bench, max_behind=3600.0)[:2] == (True, [])
