"""The backfill job: each row once, in the order of its writer, whatever is killed."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import busrep
from busrep.errors import ConfigError, EpochChanged
from busrep.spark import job, secrets
from busrep.spark.backfilling import Backfill
from busrep.spark.failures import reason
from busrep.spark.jobs import backfill
from busrep.spark.ranged import FromTable
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests.pipeline.sinks import ask, facts, without_password
from tests.shop import QUICK
from tests.spark import backfill_functions
from tests.spark.archives import Bench, orders
from tests.spark.backfill_functions import STREAMS, Change, changes
from tests.spark.drivers import killed_when
from tests.spark.long import long
from tests.spark.test_docs_archive import blocks

HERE = "tests.spark.backfill_functions"
WRITER = "backfill"
# What a task raises comes as one of these, depending on how it dies.
SPARKS = (PySparkException, Py4JError)
_, _, derived_stream = STREAMS


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Bench:
    """Orders of two writers, beyond what they have proven, too; one fact is of three rows."""
    made = Bench(spark, tmp_path)
    open_blocking_store(made.url, Registry(STREAMS)).init()
    made.write("w1", [*orders(range(1, 1000, 2)), (501, '[5010,"more"]'), (501, '[5011,"more"]')], upto=990)
    made.write("w2", orders(range(2, 1001, 2)), upto=800)
    return made


def told(bench: Bench, **options: Any) -> dict[str, Any]:
    return {
        "store": bench.url, "stream": ("orders",), "streams": f"{HERE}:STREAMS", "function": f"{HERE}:changes",
        "into": "changes", "writer": WRITER, "checkpoint": str(bench.folder / "checkpoint"), "batch_ids": 300,
        "partitions": 3, **options,
    }  # fmt: skip


def run(bench: Bench, **options: Any) -> dict[str, Any]:
    report = backfill.run(bench.spark, backfill.Options(**told(bench, **options)), job.silent)
    assert json.dumps(report)
    assert "changes" in backfill.describe(report)
    return report


def wanted(
    rows: Bench | list[tuple[str, int, int, str]], upto: Mapping[str, int], function: Callable[..., Any] = changes
) -> list[tuple[Any, ...]]:
    """What the function makes of the rows, in order of their tokens."""
    found = []
    for writer, token, _, row in rows.table() if isinstance(rows, Bench) else rows:
        if token <= upto.get(writer, 0):
            (order,) = STREAMS[0].decode([row.encode()])
            found += list(function(order, "orders", writer, token))
    return [tuple(getattr(one, name) for name in ("number", "status", "source", "token", "copy")) for one in found]


def written(bench: Bench, writer: str = WRITER) -> list[tuple[Any, ...]]:
    return [tuple(json.loads(payload)) for payload in facts(bench.url, writer, derived_stream)]


UPTO = {"w1": 990, "w2": 800}


def test_of_the_table(bench: Bench) -> None:
    report = run(bench)
    assert written(bench) == wanted(bench, UPTO)
    assert (report["rows"], report["batches"], report["batches_before"]) == (len(wanted(bench, UPTO)), 4, 0)
    assert report["upto"] == {"orders": UPTO}
    assert report["table_writers"]["orders"].keys() >= UPTO.keys()
    # Once more: nothing is done again, and what came later is no part of it.
    bench.write("w2", [(2000, '[1,"late"]')], upto=2000)
    assert run(bench)["batches"] == 0
    assert written(bench) == wanted(bench, UPTO)
    assert ask(bench.url, "SELECT count(*) FROM busrep_staged") == 0


def test_of_an_archive_and_the_table_behind_it(bench: Bench) -> None:
    bench.archived_by_hand(batch_rows=150)
    bench.write("w1", [(1500, '[1,"not archived"]')], upto=1500)
    bench.write("w2", [], upto=1000)
    rows = bench.table()
    # Not all that is archived is in the table any more.
    bench.sql("UPDATE busrep_positions SET floor = 790")
    bench.sql("DELETE FROM busrep_facts WHERE id <= 790")
    run(bench, archive=bench.root.url)
    assert written(bench) == wanted(rows, {"w1": 1500, "w2": 1000})
    alone = {"archive": bench.root.url, "table": False, "writer": "alone", "checkpoint": str(bench.folder / "alone")}
    assert run(bench, **alone)["upto"] == {"orders": UPTO}
    assert written(bench, "alone") == wanted(rows, UPTO)


def test_of_several_streams_into_another_store(
    bench: Bench, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL, and rows without a class."""
    mixed = busrep.Stream[Any]("mixed")
    open_blocking_store(postgres_url, Registry([mixed])).init()
    monkeypatch.setenv("BUSREP_STORE_PASSWORD", secrets.split(postgres_url)[1] or "")
    bench.sql(
        "INSERT INTO busrep_positions (stream, writer, position, floor, registered, seen_at) "
        "VALUES ('payments', 'w9', 20, 0, 1, 0)"
    )
    bench.sql(
        "INSERT INTO busrep_facts (stream, writer, id, idx, row, committed_at) VALUES ('payments', 'w9', ?, 0, ?, 0)",
        [(token, f'{{"paid":{token}}}') for token in (3, 7)],
    )
    options = {
        "stream": ("payments", "orders"), "streams": None, "function": f"{HERE}:plain", "into": "mixed",
        "to_store": without_password(postgres_url), "partitions": None,
    }  # fmt: skip
    report = backfill.run(bench.spark, backfill.Options(**told(bench, **options)), job.silent)
    found = [json.loads(payload) for payload in facts(postgres_url, WRITER, mixed)]
    rows = [[token, json.loads(row)] for writer, token, _, row in bench.table() if token <= UPTO.get(writer, 0)]
    assert found == [[3, {"paid": 3}], [7, {"paid": 7}], *rows]
    assert report["rows"] == len(found)


def test_pruned_meanwhile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to do; an archive that has the rows helps, and one that begins behind them does not."""
    rows, write = bench.table(), Backfill.write
    bench.archived_by_hand(batch_rows=400)

    def once(self: Backfill, *given: Any) -> int:
        monkeypatch.setattr(Backfill, "write", pruned)
        return write(self, *given)

    def pruned(self: Backfill, *given: Any) -> int:
        monkeypatch.setattr(Backfill, "write", write)
        bench.sql("UPDATE busrep_positions SET floor = 700 WHERE stream = 'orders'")
        bench.sql("DELETE FROM busrep_facts WHERE stream = 'orders' AND id <= 700")
        return write(self, *given)

    monkeypatch.setattr(Backfill, "write", once)
    with pytest.raises(ConfigError, match=r"'w1' from 301 up to 600 were pruned .* pass --archive"):
        run(bench)
    first = Path(bench.root.url, "_busrep", "orders", "0000000000.json")
    whole = first.read_bytes()
    told = orjson.loads(whole)
    first.write_bytes(orjson.dumps({**told, "after": told["upto"], "files": []}))
    with pytest.raises(ConfigError, match=r"'w1' from 301 up to"):
        run(bench, archive=bench.root.url)
    assert written(bench) == [row for row in wanted(rows, UPTO) if row[3] <= 300]
    first.write_bytes(whole)
    run(bench, archive=bench.root.url)
    assert written(bench) == wanted(rows, UPTO)


@pytest.mark.servers
def test_readers_see_it_in_order(bench: Bench, redis_url: str, bus_name: str) -> None:
    seen: list[Change] = []

    async def follow() -> None:
        # From the first row: "now" is some moment after subscribe(), and may lie behind rows written at once.
        common = {"streams": STREAMS, "store": bench.url, "settings": QUICK}
        async with busrep.connect(redis_url, name=bus_name, start="earliest", **common) as bus:
            bus.subscribe(derived_stream)(lambda batch: seen.extend(batch.rows))
            await asyncio.to_thread(run, bench, redis=redis_url, name=bus_name)
            last = await asyncio.to_thread(ask, bench.url, "SELECT max(id) FROM busrep_facts WHERE stream = 'changes'")
            await bus.wait_for(derived_stream, WRITER, last, timeout=20)

    asyncio.run(follow())
    assert [(one.number, one.status, one.source, one.token, one.copy) for one in seen] == wanted(bench, UPTO)


def test_a_task_that_is_killed(bench: Bench, retried: bool) -> None:
    """The process that runs the function dies: the job fails, and the next start does the batch again. On a cluster
    Spark does the task again."""
    flag = bench.folder / "deadly"
    flag.write_text("once")
    bench.sql("UPDATE busrep_facts SET row = json_set(row, '$[1]', ?)", [(str(flag),)])
    if not retried:
        with pytest.raises(SPARKS):
            run(bench, function=f"{HERE}:deadly")
        assert not flag.exists()
        assert 0 < len(written(bench)) < 600
    report = run(bench, function=f"{HERE}:deadly")
    assert (report["batches_before"], report["batches"]) == ((0, 4) if retried else (1, 3))
    assert not flag.exists()
    assert written(bench) == wanted(bench, UPTO, backfill_functions.deadly)
    assert ask(bench.url, "SELECT count(*) FROM busrep_staged") == 0


@long
def test_the_driver_is_killed(bench: Bench) -> None:
    """With SIGKILL, after some batches, in the middle of another; the table goes on meanwhile."""
    scratch = bench.folder / "scratch"
    scratch.mkdir()
    options = told(bench, function=f"{HERE}:slowly", batch_ids=50)
    enough = "SELECT count(*) FROM busrep_sinks WHERE batch >= 3"
    task = {"folder": str(scratch), "options": options}
    assert not killed_when("tests.spark.backfill_job", task, lambda: bool(ask(bench.url, enough)), scratch / "stderr")
    before = written(bench)
    bench.write("w2", [(3000, '[1,"later"]')], upto=3000)
    report = run(bench, function=f"{HERE}:slowly", batch_ids=50)
    assert report["batches_before"] >= 4
    assert report["batches"] > 5
    whole = wanted(bench, UPTO, backfill_functions.slowly)
    assert 0 < len(before) < len(whole)
    assert written(bench) == whole
    assert report["upto"] == {"orders": UPTO}


def test_a_checkpoint_that_is_lost(bench: Bench) -> None:
    """Nothing is written twice without a word."""
    run(bench)
    (bench.folder / "checkpoint" / "backfill.json").unlink()
    with pytest.raises(ConfigError, match="has facts of a backfill 'backfill:changes:backfill' already"):
        run(bench)
    assert written(bench) == wanted(bench, UPTO)


def test_a_database_that_is_replaced_meanwhile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are staged, and become no facts."""
    rows, calls = FromTable.rows, []

    def replaced(self: FromTable, *given: Any) -> DataFrame:
        frame = rows(self, *given).localCheckpoint()
        calls.append(1)
        if len(calls) == 2:
            bench.sql("UPDATE busrep_meta SET value = ? WHERE key = 'epoch'", [("f" * 32,)])
        return frame

    monkeypatch.setattr(FromTable, "rows", replaced)
    with pytest.raises(EpochChanged):
        run(bench)
    assert written(bench) == [row for row in wanted(bench, UPTO) if row[3] <= 300]


def test_what_does_not_work(bench: Bench) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            run(bench, **options)

    refused("--into orders is among", into="orders")
    refused("--into orders is among", into="orders", to_store=bench.url)
    refused("--no-table needs --archive", table=False)
    refused("--stream NAME is needed", stream=())
    refused("--start goes with one stream", stream=("orders", "payments"), start='{"w1": 5}')
    refused("No module named", function="nowhere:changes")
    refused("has no attribute 'absent'", function=f"{HERE}:absent")
    refused("cannot be called", function=f"{HERE}:nothing")
    refused("declares these", into="unknown")
    refused("there is no archive", archive=str(bench.folder / "nowhere"))
    assert not (bench.folder / "checkpoint" / "backfill.json").exists()
    run(bench, start='{"w1": 980, "w2": 790}')
    assert written(bench) == [
        row for row in wanted(bench, UPTO) if row[3] > 980 or (row[2][-1] == "2" and row[3] > 790)
    ]
    refused("is of a backfill with --start", start="earliest")
    (bench.folder / "checkpoint" / "backfill.json").write_text("[]")
    refused("cannot be used")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("failing", f"token 9: {HERE}:failing failed: ZeroDivisionError"),
        ("scalar", "it gave str: an iterable of rows is needed"),
        ("misfit", "made it of 'orders', token 7"),
    ],
)
def test_a_function_that_fails(function: str, message: str, bench: Bench) -> None:
    with pytest.raises(SPARKS) as caught:
        run(bench, function=f"{HERE}:{function}")
    assert message in reason(caught.value)
    assert written(bench) == []


def test_the_docs_name_options_that_exist() -> None:
    (text,) = blocks("Backfill", "sh")
    commands = [shlex.split(line, comments=True) for line in text.replace("\\\n", "").splitlines()]
    known = {field.name for field in attrs.fields(backfill.Options)}
    mine = [command for command in commands if command[:3] == ["busrep", "pipeline", "backfill"]]
    assert len(mine) == 2
    for command in mine:
        assert {one[2:].replace("-", "_") for one in command if one.startswith("--")} <= known
