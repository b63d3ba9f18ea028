"""The sink's two halves as Spark calls them, without Spark: attempts, batches that come again, fences, lost answers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import attrs
import pytest

import busrep
from busrep import Settings
from busrep.errors import ConfigError, StagedRowsGone, Unavailable, WriterFenced
from busrep.spark.staging_store import StagingStore
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry, Table
from tests.shop import QUICK

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql.types import StructType

from busrep.spark import sink, sink_commit
from tests.pipeline import sinks
from tests.pipeline.sinks import ROW, WRITER, Query, ask, facts, opened, rows, texts, without_password, written

pytestmark = pytest.mark.servers

orders, url, quick, staged = sinks.orders, sinks.url, sinks.quick, sinks.staged


def test_rows_become_facts_in_the_order_of_partitions(url: str) -> None:
    query = Query(url)
    query.commit(0, query.stage(0, [[1, 2, 3], [], [4, 5]])[::-1])  # the order of the messages says nothing
    assert rows(url) == [1, 2, 3, 4, 5]
    query.batch(1, [[6], [7]])
    query.batch(2, [[], []])
    query.batch(3, [range(8, 5000)])
    assert rows(url) == list(range(1, 5000))
    assert staged(url) == 0
    store = opened(url)
    done = store.status()["sinks"]["c1"]
    store.close()
    assert (done["stream"], done["writer"], done["batch"], done["rows"]) == ("orders", WRITER, 3, 4992)


def test_a_batch_that_comes_again_writes_nothing(url: str) -> None:
    """As after the death of a driver: in a new run, and perhaps partitioned otherwise."""
    query = Query(url)
    query.batch(0, [[1, 2], [3]])
    query.batch(0, [[1], [2], [3]])
    query = query.restarted()
    query.batch(0, [[3], [1, 2]])
    assert (rows(url), staged(url)) == ([1, 2, 3], 0)
    query.batch(1, [[4]])
    assert rows(url) == [1, 2, 3, 4]


def test_attempts_that_nobody_names_leave_nothing(url: str) -> None:
    """A task that was killed, one that ran twice, and one that a dead driver's stage left in another batch's number."""
    query = Query(url)

    def killed() -> Any:
        yield texts([1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        query.sink(0, 0).write(killed())
    query.task(0, 0, texts([1, 2]))
    assert staged(url) > 0
    query.batch(0, [[1, 2], [3]])
    assert (rows(url), staged(url)) == ([1, 2, 3], 0)


def test_what_is_staged_for_the_next_batch_stays(url: str) -> None:
    """A driver that hangs, and commits what its successor has committed, takes nothing from it."""
    zombie, query = Query(url), Query(url).restarted()
    late = zombie.stage(0, [[1]])
    query.batch(0, [[1]])
    soon = query.stage(1, [[2]])
    zombie.commit(0, late)
    query.commit(1, soon)
    assert rows(url) == [1, 2]


def test_missing_rows_are_noticed(url: str) -> None:
    query = Query(url)
    query.batch(0, [[1]])
    messages = query.stage(1, [[2], [3]])
    ask(url, "DELETE FROM busrep_staged WHERE part = 1 RETURNING 1")
    with pytest.raises(StagedRowsGone, match="1 of 2 staged rows") as caught:
        query.commit(1, messages)
    assert (caught.value.found, caught.value.expected) == (1, 2)
    assert rows(url) == [1]
    query.batch(1, [[2], [3]])
    assert rows(url) == [1, 2, 3]


def test_numbers_that_mean_another_batch_are_refused(url: str) -> None:
    query = Query(url, options={"query": "q"})
    for number in range(3):
        query.batch(number, [[number]])
    with pytest.raises(ConfigError, match="batch 1 of query 'q' comes after batch 2: its checkpoint is an older"):
        query.batch(1, [[1]])
    with pytest.raises(ConfigError, match="batch 4 of query 'q' comes after batch 2: those between are not"):
        query.batch(4, [[4]])
    with pytest.raises(ConfigError, match="checkpoint c1, and this is c2"):
        attrs.evolve(query, checkpoint="c2").batch(0, [[0]])
    assert rows(url) == [0, 1, 2]
    attrs.evolve(query, checkpoint="c2", options={"query": "q2", "firstBatch": "7"}).batch(7, [[3]])
    assert rows(url) == [0, 1, 2, 3]


def test_two_queries_of_one_name_at_once(url: str) -> None:
    """Both have staged; the second is not the first's, whichever writer it has."""
    first, second = (
        Query(url, options={"query": "q"}),
        Query(url, checkpoint="c2", options={"query": "q", "writer": "b"}),
    )
    ours, theirs = first.stage(0, [[1]]), second.stage(0, [[1]])
    first.commit(0, ours)
    with pytest.raises(ConfigError, match="c2"):
        second.commit(0, theirs)
    assert (rows(url), facts(url, "b")) == ([1], [])


@pytest.mark.parametrize("writers", [("spark", "spark"), ("spark", "other")])
def test_two_drivers_commit_one_batch(url: str, writers: tuple[str, str]) -> None:
    """At the same moment, once: whoever is late finds it done, or is fenced."""
    drivers = [Query(url, run=f"run{at}", options={"writer": name}) for at, name in enumerate(writers)]
    messages = [driver.stage(0, [[1, 2], [3]]) for driver in drivers]
    barrier, errors = threading.Barrier(2), []

    def commit(at: int) -> None:
        barrier.wait()
        try:
            drivers[at].commit(0, messages[at])
        except (WriterFenced, StagedRowsGone) as error:
            errors.append(error)

    threads = [threading.Thread(target=commit, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) < 2
    assert sorted(payload for name in {*writers} for payload in facts(url, name)) == [b"[1]", b"[2]", b"[3]"]
    drivers[0].restarted().batch(0, [[1, 2, 3]])
    drivers[0].restarted().batch(1, [[4]])
    assert facts(url, "spark")[-1] == b"[4]"


# -- the writer's name -----------------------------------------------------------------------------------------------


def test_a_fenced_query_fails_and_loses_nothing(url: str) -> None:
    query = Query(url)
    query.batch(0, [[1]])
    store = opened(url)
    store.claim(WRITER, ["orders"], timeout=5)  # somebody else, under the same name
    store.close()
    messages = query.stage(1, [[2]])
    with pytest.raises(WriterFenced, match="give each live process a name of its own"):
        query.commit(1, messages)
    assert rows(url) == [1]
    query = query.restarted()  # whoever starts it takes the name
    query.batch(1, [[2]])
    query.batch(2, [[3]])
    assert (rows(url), staged(url)) == ([1, 2, 3], 0)


def test_two_queries_of_one_writer_fence_each_other(url: str) -> None:
    first, second = Query(url, checkpoint="c1"), Query(url, checkpoint="c2", run="run2")
    first.batch(0, [[1]])
    second.batch(0, [[2]])
    with pytest.raises(WriterFenced):
        first.batch(1, [[3]])
    second.batch(1, [[4]])
    assert rows(url) == [1, 2, 4]


def test_a_name_that_was_finished_for_its_silence_is_won_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query(url)
    with monkeypatch.context() as patched:  # killed before it left
        patched.setattr(StagingStore, "finish", lambda *_, **__: {})
        query.batch(0, [[1]])
    store = opened(url)
    (known,) = store.known()
    store.finish(WRITER, known.incarnation, timeout=5)
    assert [known.registered for known in store.known()] == [False]
    store.close()
    query.batch(1, [[2]])
    assert rows(url) == [1, 2]


@pytest.mark.parametrize("by", ["claim", "finish"])
def test_fenced_between_claim_and_commit(url: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query(url)
    query.batch(0, [[1]])
    real, calls = StagingStore.commit, []

    def commit(self: StagingStore, claim: Any, *args: Any) -> Any:
        if not calls:
            calls.append(claim)
            other = opened(url)
            if by == "claim":
                other.claim(WRITER, ["orders"], timeout=5)
            else:
                other.finish(WRITER, claim.incarnation, timeout=5)
            other.close()
        return real(self, claim, *args)

    monkeypatch.setattr(StagingStore, "commit", commit)
    messages = query.stage(1, [[2]])
    if by == "claim":
        with pytest.raises(WriterFenced):
            query.commit(1, messages)
        assert rows(url) == [1]
        query = query.restarted()
        messages = query.stage(1, [[2]])
    query.commit(1, messages)
    assert rows(url) == [1, 2]
    query.batch(2, [[3]])
    assert rows(url) == [1, 2, 3]


def test_fenced_after_the_commit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are in the table, and whoever has the name begins behind them: the batch is done."""
    real = StagingStore.commit

    def commit(self: StagingStore, *args: Any) -> Any:
        made = real(self, *args)
        other = opened(url)
        other.claim(WRITER, ["orders"], timeout=5)
        other.close()
        return made

    query = Query(url)
    with monkeypatch.context() as patched:
        patched.setattr(StagingStore, "commit", commit)
        query.batch(0, [[1, 2]])
    assert rows(url) == [1, 2]
    with pytest.raises(WriterFenced):
        query.batch(1, [[3]])


def test_streams_that_a_predecessor_wrote_are_given_up(url: str) -> None:
    both = [orders, busrep.Stream("payments")]
    store = open_blocking_store(url, Registry(both))
    store.init()
    store.open()
    store.claim(WRITER, ["orders", "payments"], timeout=5)
    Query(url).batch(0, [[1]])
    assert {known.stream: known.registered for known in store.known()} == {"orders": False, "payments": False}
    store.close()


# -- answers that do not come ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["claim", "commit", "heartbeat", "done"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_answer_that_does_not_come(url: str, lost: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query(url)
    query.batch(0, [[1]])
    real, calls = getattr(StagingStore, lost), []

    def cut(self: StagingStore, *args: Any, **more: Any) -> Any:
        calls.append(lost)
        if len(calls) > 1:
            return real(self, *args, **more)
        if when == "after":
            real(self, *args, **more)
        raise Unavailable("the database", "cut")

    monkeypatch.setattr(StagingStore, lost, cut)
    messages = query.stage(1, [[2], [3]])
    if lost == "done":  # before anything was begun: Spark fails the query, and it is started again
        with pytest.raises(Unavailable):
            query.commit(1, messages)
    query.commit(1, messages)
    assert (rows(url), staged(url)) == ([1, 2, 3], 0)
    query.batch(2, [[4]])
    assert rows(url) == [1, 2, 3, 4]


def test_an_answer_that_does_not_come_to_a_claim_of_a_finished_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query(url)
    query.batch(0, [[1]])
    real, calls = StagingStore.claim, iter(["finished", "cut"])

    def claim(self: StagingStore, *args: Any, **more: Any) -> Any:
        held, happens = real(self, *args, **more), next(calls, None)
        if happens == "finished":  # before it is answered
            self.finish(WRITER, held.incarnation, timeout=5)
            raise WriterFenced(WRITER, held.incarnation)
        if happens == "cut":
            raise Unavailable("the database", "cut")
        return held

    monkeypatch.setattr(StagingStore, "claim", claim)
    query.batch(1, [[2]])
    assert (rows(url), next(calls, None)) == ([1, 2], None)


def test_a_database_that_stays_away_fails_the_query(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*args: Any, **more: Any) -> Any:
        raise Unavailable("the database", "cut")

    query = Query(url)
    messages = query.stage(0, [[1]])
    with monkeypatch.context() as patched:
        patched.setattr(StagingStore, "commit", away)
        with pytest.raises(Unavailable, match="the database is not available: cut"):
            query.commit(0, messages)
    query.restarted().batch(0, [[1]])
    assert rows(url) == [1]


# -- abort -----------------------------------------------------------------------------------------------------------


def test_abort_forgets_what_was_staged_and_no_fact(url: str) -> None:
    query = Query(url)
    messages = query.stage(0, [[1], [2]])
    query.sink(0, 0).abort([messages[0], None], 0)
    assert ask(url, "SELECT count(*) FROM busrep_staged") == 1
    query.commit(0, query.stage(0, [[1], [2]]))
    query.sink(0, 0).abort(list(messages), 0)  # Spark may do so after a commit
    assert (rows(url), staged(url)) == ([1, 2], 0)


def test_abort_hides_no_error(url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def away(*args: Any) -> None:
        raise Unavailable("the database", "cut")

    query = Query(url)
    messages = query.stage(0, [[1]])
    monkeypatch.setattr(StagingStore, "clear", away)
    query.sink(0, 0).abort(list(messages), 0)
    assert "stays for now" in caplog.text


def test_what_queries_left_that_are_gone_is_removed(url: str) -> None:
    Query(url, checkpoint="gone").stage(0, [[1]])
    Query(url, checkpoint="slow").stage(0, [[1]])
    old = "julianday('now') * 0" if url.startswith("sqlite") else "now() - interval '8 days'"
    ask(url, f"UPDATE busrep_staged SET staged_at = {old} WHERE query = 'gone' RETURNING 1")
    Query(url).batch(0, [[2]])
    assert ask(url, "SELECT max(query) FROM busrep_staged WHERE query <> 'slow'") is None
    assert staged(url) == 1


# -- one batch -------------------------------------------------------------------------------------------------------


def test_a_job_writes_anew_unless_it_is_named(url: str) -> None:
    written(url, [1, 2])
    written(url, [1, 2])
    assert rows(url) == [1, 2, 1, 2]
    assert ask(url, "SELECT count(*) FROM busrep_sinks") == 0
    written(url, [3, 4], batch="monday")
    written(url, [3, 4], batch="monday")
    written(url, [5], batch="tuesday")
    assert rows(url) == [1, 2, 1, 2, 3, 4, 5]
    assert ask(url, "SELECT count(*) FROM busrep_sinks") == 2


def test_abort_of_a_job_forgets_all_it_staged(url: str) -> None:
    made = sink.batch_writer({"store": without_password(url), "stream": "orders", "writer": WRITER}, ROW, False)
    made.write(iter([texts([1])]))
    assert staged(url) == 1
    made.abort([None])
    assert staged(url) == 0


@pytest.mark.parametrize("make", [sink.batch_writer, sink.stream_writer])
def test_nothing_is_overwritten(make: Any, sqlite_url: str) -> None:
    with pytest.raises(ConfigError, match="facts are never replaced"):
        make({"store": sqlite_url, "stream": "orders", "writer": WRITER}, ROW, True)


def test_a_task_without_a_message_is_an_error(sqlite_url: str) -> None:
    query = Query(sqlite_url)
    with pytest.raises(ConfigError, match="0 messages of 1 tasks"):
        query.sink(0, 0).commit([None], 0)
    with pytest.raises(ConfigError, match="which query and batch"):
        sink.stream_writer({"store": sqlite_url, "stream": "orders", "writer": WRITER}, ROW, False).write(iter([]))


# -- order, and the bus ----------------------------------------------------------------------------------------------


def test_order_by(url: str) -> None:
    query = Query(url, options={"orderBy": "row"})
    query.commit(0, [query.task(0, 0, texts([3, 9])), query.task(0, 1, texts([1, 4]), texts([2]))])
    assert rows(url) == [1, 2, 3, 4, 9]
    with pytest.raises(ConfigError, match="'orderBy' names 'when'; the columns are: row"):
        attrs.evolve(query, options={"orderBy": "when"}).batch(1, [[1]])


@pytest.mark.parametrize("queue", [Settings().publish_queue_bytes, 500])
def test_readers_on_the_bus_see_all_rows_in_order(
    url: str, redis_url: str, bus_name: str, queue: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few come in frames, many are fetched; a batch that comes again says nothing new."""
    monkeypatch.setattr(sink_commit, "Settings", lambda: attrs.evolve(QUICK, publish_queue_bytes=queue))
    query = Query(url, options={"redis": redis_url, "name": bus_name})
    seen: list[Any] = []

    async def read() -> dict[str, Any]:
        async with busrep.connect(redis_url, name=bus_name, streams=[orders], store=url, settings=QUICK) as bus:

            @bus.subscribe(orders)
            async def handle(batch: busrep.Batch[Any]) -> None:
                seen.extend(row[0] for row in batch.rows)

            await bus.linear_position(orders)  # it follows from here on
            last = 0
            for number in range(3):
                if number == 2:
                    query.run = "run2"
                for _ in range(2):
                    work = asyncio.to_thread(query.batch, number, [[10 * number + at] for at in range(4)])
                    await work
                last = await asyncio.to_thread(ask, url, "SELECT max(id) FROM busrep_facts")
                await bus.wait_for(orders, WRITER, last, timeout=20)
            statistics: dict[str, Any] = bus.statistics()
            return statistics

    asyncio.run(read())
    assert seen == [10 * number + at for number in range(3) for at in range(4)]
    assert rows(url) == seen


def test_a_redis_that_is_away_fails_nothing(url: str, caplog: pytest.LogCaptureFixture) -> None:
    query = Query(url, options={"redis": "redis://127.0.0.1:1", "name": "n"})
    query.batch(0, [[1]])
    assert rows(url) == [1]
    assert "readers fetch from the table up to 1" in caplog.text


# -- typed rows, and tables of the application's ---------------------------------------------------------------------


def test_typed_rows(url: str) -> None:
    schema = StructType().add("number", "long").add("status", "string")
    query = Query(url, options={"streams": "tests.shop:STREAMS"}, schema=schema)
    batch = pa.record_batch([pa.array([1, 2]), pa.array(["new", "\u00e4"])], ["number", "status"])
    query.commit(0, [query.task(0, 0, batch)])
    assert facts(url) == [b'[1,"new"]', b'[2,"\\u00e4"]']
    bad = pa.record_batch([pa.array([1]), pa.array([None], pa.string())], ["number", "status"])
    with pytest.raises(busrep.RowError, match="status"):
        query.task(1, 0, bad)
    with pytest.raises(
        ConfigError, match="not the fields of stream 'orders', which are, in this order: number, status"
    ):
        attrs.evolve(query, schema=StructType().add("status", "string")).sink(0, 0)


@attrs.frozen
class Sale:
    number: int
    price: float | None
    paid: bool
    tags: list[str]


sales = busrep.Stream("sales", Sale, table=Table("sales", index="place"))
refunds = busrep.Stream("refunds", Sale, negative=True, table=Table("sales", index="place"))
SALES = [sales]
REFUNDS = [refunds]


@pytest.mark.parametrize("declared", ["SALES", "REFUNDS"])
def test_a_table_of_the_applications(url: str, declared: str) -> None:
    """Columns come out of the rows as whoever writes through a bus gets them in."""
    stream = {"SALES": sales, "REFUNDS": refunds}[declared]
    json = "jsonb" if url.startswith("postgres") else "text"
    columns = f"place integer, number bigint, price float, paid boolean, tags {json}"
    ask(url, f"CREATE TABLE sales (id bigint, writer text, {columns})")
    open_blocking_store(url, Registry([stream])).init()
    options = {"stream": stream.name, "streams": f"tests.pipeline.test_sink:{declared}"}
    texts = ['[1,0.5,true,["a","\\u00e4"]]', "[2,null,false,[]]", "[9007199254740993,1e-7,true,[]]"]
    query = Query(url, options=options)
    for number in range(2):
        query.commit(number, [query.task(number, 0, pa.record_batch([pa.array(texts)], ["row"]))])
    assert stream.decode(facts(url, stream=stream)) == stream.decode([text.encode() for text in texts]) * 2
    if stream.negative:
        assert ask(url, "SELECT max(id) FROM sales") == -1
    with pytest.raises(ConfigError, match="kept in a table of the application's: pass the option streams"):
        Query(url, checkpoint="c2", options={"stream": stream.name}).batch(0, [[1]])
