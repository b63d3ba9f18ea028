"""Real traffic of the reference system as a table, archived: several streams of several writers in one run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from busrep import Stream
from busrep.spark import job
from busrep.spark.archive_store import Root, streams_of
from busrep.spark.jobs import archive, audit
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests.asyncio.test_captures import expected, messages
from tests.spark.archives import NOON, rows_of, sqlite_rows
from tests.spark.long import long

# Of nineteen; each is a query of its own, which takes seconds to start.
SOME = ("events", "receipts", "to_device")


def facts_of_capture() -> dict[str, list[tuple[str, int, int, str]]]:
    """{stream: rows (writer, token, index, row)}, as a reader takes them: no token twice, a reset stream's anew."""
    at: dict[tuple[str, str], int] = {}
    held: dict[tuple[str, str], list[str]] = {}
    found: dict[str, dict[tuple[str, int], list[str]]] = {}
    for message in messages():
        name, _, rest = message["data"].partition(" ")
        if name != "RDATA":
            continue
        stream, writer, token, row = rest.split(" ", 3)
        rows = held.setdefault((stream, writer), [])
        rows.append(row)
        if token != "batch":
            if int(token) > at.get((stream, writer), 0):
                at[stream, writer] = int(token)
                found.setdefault(stream, {})[writer, int(token)] = list(rows)
            rows.clear()
    return {
        stream: [(*key, index, row) for key, rows in facts.items() for index, row in enumerate(rows)]
        for stream, facts in found.items()
    }


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table: everything that was sent, and where each writer ended."""
    path = tmp_path_factory.mktemp("capture") / "table.db"
    store = open_blocking_store(f"sqlite:///{path}", Registry([Stream(name) for name in expected()]))
    store.init()
    store.close()
    facts = facts_of_capture()
    rows = [(name, *row, NOON.timestamp() + row[1] / 1000) for name, its in facts.items() for row in its]
    insert = "INSERT INTO busrep_facts (stream, writer, id, idx, row, committed_at) VALUES (?, ?, ?, ?, ?, ?)"
    sqlite_rows(path, insert, rows)
    ends = {(name, writer): at for name, its in expected().items() for writer, at in its.items()}
    for name, its in facts.items():
        for writer, token, _, _ in its:
            ends[name, writer] = max(ends.get((name, writer), 0), token)
    insert = (
        "INSERT INTO busrep_positions (stream, writer, position, floor, registered, seen_at) VALUES (?, ?, ?, 0, 1, 0)"
    )
    sqlite_rows(path, insert, [(*key, at) for key, at in ends.items()])
    return path


def test_the_capture_is_what_it_says() -> None:
    assert sum(message["data"].startswith("RDATA ") for message in messages()) == 12_022
    assert len(expected()) == 19
    assert len(facts_of_capture()) == 14  # the others were quiet


def test_real_traffic(spark: SparkSession, capture: Path, tmp_path: Path) -> None:
    archived_and_identical(spark, capture, tmp_path, SOME)


@long
@pytest.mark.timeout(600)
def test_real_traffic_of_all_streams(spark: SparkSession, capture: Path, tmp_path: Path) -> None:
    """Fourteen of them have rows, and five are quiet; no stream is named."""
    archived_and_identical(spark, capture, tmp_path, ())


def archived_and_identical(spark: SparkSession, capture: Path, tmp_path: Path, chosen: tuple[str, ...]) -> None:
    told = {"store": f"sqlite:///{capture}", "archive": str(tmp_path / "archive"), "stream": chosen}
    report = archive.run(spark, archive.Options(**told, available_now=True, file_rows=500), job.silent)
    facts = facts_of_capture()
    names = chosen or tuple(expected())
    assert {name: one["rows"] for name, one in report["streams"].items()} == {
        name: len(facts.get(name, ())) for name in names
    }
    root = Root(str(tmp_path / "archive"))
    assert streams_of(root) == sorted(names)
    for name in names:
        assert rows_of(root, name) == sorted(facts.get(name, ()), key=lambda row: (row[1], row[2], row[0]))
    told["stream"] = tuple(name for name in names if name in facts)
    found = audit.run(spark, audit.Options(**told), job.silent)
    assert found["ok"], json.dumps(found, indent=1)
    counted = Counter(row[0] for row in facts["events"])
    assert {name: one["archive_rows"] for name, one in found["streams"]["events"]["writers"].items()} == dict(counted)
