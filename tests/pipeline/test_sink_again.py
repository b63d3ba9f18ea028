"""What the sink makes of a past that is not as it was: another database, an older checkpoint, a job that runs again;
and of the time between two batches, in which none of its processes lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from busrep.errors import ConfigError, SchemaError, Unavailable
from busrep.spark.staging_store import StagingStore

pytest.importorskip("pyspark")

import pyarrow as pa

from busrep.spark import secrets, sink
from tests.pipeline import sinks
from tests.pipeline.sinks import ROW, WRITER, Query, ask, opened, rows, texts, written

pytestmark = pytest.mark.servers

orders, url, quick, staged = sinks.orders, sinks.url, sinks.quick, sinks.staged


def restored(url: str) -> None:
    """The database is as it was before the query began."""
    for table in ("busrep_sinks", "busrep_facts", "busrep_staged"):
        ask(url, f"DELETE FROM {table} RETURNING 1")


# -- another database, an older checkpoint ---------------------------------------------------------------------------


@pytest.mark.parametrize("named", [{}, {"query": "q"}])
def test_a_database_that_knows_nothing_of_the_batches_before(url: str, named: dict[str, str]) -> None:
    """It was restored, or the option store names another one: what was written before is not there."""
    query = Query(url, options=named)
    for number in range(3):
        query.batch(number, [[number]])
    restored(url)
    query = query.restarted()
    with pytest.raises(ConfigError, match=r"the batches before 3 are not in this database.* firstBatch=3"):
        query.batch(3, [[3]])
    assert rows(url) == []
    told = attrs.evolve(query, options={**named, "firstBatch": "3"})
    told.batch(3, [[3]])
    told.batch(3, [[3]])
    query.batch(4, [[4]])
    assert (rows(url), staged(url)) == ([3, 4], 0)
    restored(url)  # once more: what was said of the first time is not said of the second
    with pytest.raises(ConfigError, match="firstBatch=5"):
        told.restarted().batch(5, [[5]])


def test_a_checkpoint_older_than_the_database(url: str) -> None:
    """Its next batch has the number of one that is written, and other rows: those that came meanwhile as well."""
    query = Query(url)
    query.batch(0, [[1, 2]])
    copy = query.restarted()
    with pytest.raises(
        ConfigError, match=r"batch 0 of query 'c1' was written with 2 rows, and has 3 now.* firstBatch=1"
    ):
        copy.batch(0, [[1, 2], [3]])
    assert rows(url) == [1, 2]
    told = attrs.evolve(copy, options={"query": "q2", "firstBatch": "1"})
    told.batch(0, [[1, 2], [3]])  # it stands as it was written
    assert ask(url, "SELECT count(*) FROM busrep_staged WHERE query = 'q2'") == 0
    assert rows(url) == [1, 2]
    told.batch(1, [[4]])
    told.batch(2, [[5]])
    assert rows(url) == [1, 2, 4, 5]


def test_the_first_batch_is_a_number_and_of_a_stream(sqlite_url: str) -> None:
    with pytest.raises(ConfigError, match="'firstBatch' is '-1'"):
        Query(sqlite_url, options={"firstBatch": "-1"}).sink(0, 0)
    given = {"store": sqlite_url, "stream": "orders", "writer": WRITER, "firstBatch": "1"}
    with pytest.raises(ConfigError, match=r"'firstBatch' is not for df\.write"):
        sink.batch_writer(given, ROW, False)


def test_what_a_redis_url_lacks_is_told_before_anything_is_written(sqlite_url: str) -> None:
    with pytest.raises(ConfigError, match="the Redis URL .* does not work"):
        Query(sqlite_url, options={"redis": "localhost:6379", "name": "shop"}).sink(0, 0)


# -- jobs of one batch that run again --------------------------------------------------------------------------------


def test_a_job_that_is_done_is_found_so_whoever_had_the_name_since(url: str) -> None:
    written(url, [1, 2], batch="monday")
    written(url, [3], batch="tuesday")
    written(url, [1, 2], batch="monday")
    written(url, [3], batch="tuesday")
    assert (rows(url), staged(url)) == ([1, 2, 3], 0)


def test_a_job_of_the_same_name_with_other_rows(url: str) -> None:
    written(url, [1, 2], batch="monday")
    with pytest.raises(
        ConfigError, match=r"^'batch:monday' was written with 2 rows, and has 3 now.*another name \(option"
    ):
        written(url, [1, 2, 3], batch="monday")
    assert rows(url) == [1, 2]


# -- between two batches ---------------------------------------------------------------------------------------------


def test_between_batches_nobody_waits_for_the_writer(url: str) -> None:
    """It has left the registry, so linear positions do not wait for it, and no reader has to find it dead; and it wins
    its name back as if it had been there."""
    query = Query(url)
    store = opened(url)
    other = store.claim("web", ["orders"], timeout=5)
    for number in range(3):
        query.batch(number, [[number]])
        (id,) = store.reserve("orders", 1)
        store.heartbeat(other, {"orders": id})
        found = {known.writer: known for known in store.known()}
        assert (found[WRITER].registered, found["web"].registered) == (False, True)
        assert found[WRITER].position < id
    store.close()
    assert rows(url) == [0, 1, 2]


def test_a_writer_that_cannot_leave_has_written_all_the_same(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*args: Any, **more: Any) -> Any:
        raise Unavailable("the database", "cut")

    query = Query(url)
    with monkeypatch.context() as patched:
        patched.setattr(StagingStore, "finish", away)
        query.batch(0, [[0]])
    query.batch(1, [[1]])
    assert rows(url) == [0, 1]


def test_rows_are_staged_whatever_their_size(url: str) -> None:
    """Many in one row of the staging table, and not too many bytes."""
    query, large = Query(url), "x" * 3_000_000
    batch = pa.record_batch([pa.array([f'["{large}"]'] * 3 + ["[1]"] * 1200)], ["row"])
    messages = [query.task(0, 0, batch, texts([2]))]
    if url.startswith("postgres"):
        assert ask(url, "SELECT max(length(rows)) FROM busrep_staged") < 4 * 2**20
    query.commit(0, messages)
    assert ask(url, "SELECT count(*) FROM busrep_facts") == 1204
    assert ask(url, "SELECT row FROM busrep_facts ORDER BY id DESC LIMIT 1") == "[2]"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_tables_that_are_not_there(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task says so, and not with a driver's words."""
    url: str = request.getfixturevalue(f"{kind}_url")
    monkeypatch.setenv("BUSREP_STORE_PASSWORD", secrets.split(url)[1] or "")
    if kind == "sqlite":
        with pytest.raises(Unavailable, match="unable to open database file"):
            Query(url).stage(0, [[1]])
        (tmp_path / "busrep.db").touch()
    with pytest.raises(SchemaError, match="busrep db init"):
        Query(url).stage(0, [[1]])
