"""What a replay refuses, so that a target never has a hole or somebody else's facts; and servers that go away."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("pyspark")

import busrep
from busrep import sync
from busrep.errors import ConfigError, Unavailable
from busrep.spark import replay_target
from busrep.spark.jobs import replay
from busrep.spark.replay_pace import SLICE, Chunks, Pace, facts_of
from busrep.spark.replay_target import Target, Verbatim, mark_name
from busrep.spark.replaying import one_source, pace_of, target_redis
from busrep.testing.servers import start_postgres, start_redis
from tests.pipeline.replay_child import EPOCH, QUICK, Task, fact, replayed
from tests.pipeline.test_replay import expected, in_table, made_store, some_rows

ORDERS = {"orders": Verbatim("orders")}
W1 = ("orders", "w1")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return made_store(f"sqlite:///{tmp_path}/target.db")


def target(redis_url: str, bus_name: str, url: str | None, prefix: str = "r-", **more: Any) -> Target:
    return Target(
        redis_url, bus_name, ORDERS, {"orders": EPOCH}, **{"store": url, "prefix": prefix, "settings": QUICK, **more}
    )


def facts(*tokens: int) -> list[Any]:
    return [fact("orders", "w1", token, f"[{token}]") for token in tokens]


def written(url: str, writer: str = "r-w1") -> list[bytes]:
    return [row for its in in_table(url).get(("orders", writer), []) for row in its]


# -- ranges ------------------------------------------------------------------------------------------------------


@pytest.mark.servers
def test_a_range_that_is_not_connected_to_what_is_there_is_refused(url: str, redis_url: str, bus_name: str) -> None:
    first = target(redis_url, bus_name, url)
    assert first.open({W1: 20}) == {W1: 20}
    first.write(facts(21, 22, 23))
    first.close()
    for start in (0, 19, 24):
        wrong = target(redis_url, bus_name, url)
        with pytest.raises(ConfigError, match="from 20 to 23.*--to-writer"):
            wrong.open({W1: start})
        wrong.close()
    again = target(redis_url, bus_name, url)
    assert again.open({W1: 21}) == {W1: 23}, "what is there is not written again"
    again.write(facts(24))
    again.finish({W1: 30})  # nothing is between 24 and 30, and now that is known
    again.close()
    later = target(redis_url, bus_name, url)
    assert later.open({W1: 30}) == {W1: 30}
    later.write(facts(31))
    later.close()
    wrong = target(redis_url, bus_name, url)
    with pytest.raises(ConfigError, match="from 20 to 31"):
        wrong.open({W1: 0})
    wrong.close()
    assert written(url) == [b"[21]", b"[22]", b"[23]", b"[24]", b"[31]"]


@pytest.mark.servers
def test_a_writer_of_somebody_else_is_left_alone(url: str, redis_url: str, bus_name: str) -> None:
    """It is alive, and goes on: its name was not claimed."""
    orders = ORDERS["orders"]
    with sync.connect(redis_url, name=bus_name, streams=[orders], store=url, writer="w1", settings=QUICK) as bus:
        bus.publish(orders, [b"[1]"])
        wrong = target(redis_url, bus_name, url, prefix="")
        with pytest.raises(ConfigError, match="no replay has written"):
            wrong.open({W1: 0})
        wrong.close()
        bus.publish(orders, [b"[2]"])
    assert written(url, "w1") == [b"[1]", b"[2]"]


def test_a_mark_is_of_one_writer_of_one_stream() -> None:
    assert len({mark_name("a:b", "c"), mark_name("a", "b:c")}) == 2


# -- many writers ------------------------------------------------------------------------------------------------


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_more_writers_than_can_be_open(
    kind: str, request: pytest.FixtureRequest, redis_url: str, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their buses take turns; and what another replay has written meanwhile is not written again."""
    monkeypatch.setattr(replay_target, "MOST_OPEN", 2)
    url = made_store(request.getfixturevalue(f"{kind}_url"))
    rows = [("orders", f"w{token % 5}", token, None, f"[{token}]") for token in range(1, 61)]
    its = list(facts_of(rows))
    one = target(redis_url, bus_name, url)
    one.open({("orders", f"w{at}"): 0 for at in range(5)})
    for chunk in itertools.batched(its[:30], 7) if hasattr(itertools, "batched") else [its[:7], its[7:20], its[20:30]]:
        one.write(chunk)
        assert len(one._buses) <= 2
    closed = next(f"w{at}" for at in range(5) if f"w{at}" not in one._buses)
    other = target(redis_url, bus_name, url)
    other.open({("orders", closed): 0})
    other.write([fact for fact in its[30:50] if fact.writer == closed])
    other.close()
    one.write(its[30:])
    one.finish({("orders", f"w{at}"): 60 for at in range(5)})
    one.close()
    assert in_table(url) == expected(rows)


@pytest.mark.servers
def test_in_memory_there_are_not_so_many(redis_url: str, bus_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_target, "MOST_IN_MEMORY", 2)
    many = target(redis_url, bus_name, None)
    with pytest.raises(ConfigError, match="3 writers.*--to-store"):
        many.open({("orders", f"w{at}"): 0 for at in range(3)})
    many.close()


# -- servers that go away ----------------------------------------------------------------------------------------


@pytest.mark.servers
def test_redis_is_restarted_in_the_middle(url: str, bus_name: str) -> None:
    """Written meanwhile, it is in the table; a reader gets all of it, once and in order."""
    with start_redis() as server:
        seen: dict[str, list[Any]] = {}
        orders = ORDERS["orders"]
        with sync.connect(server.url, name=bus_name, streams=[orders], store=url, settings=QUICK) as bus:

            @bus.subscribe(orders)
            def handle(batch: sync.Batch[Any]) -> None:
                seen.setdefault(batch.writer, []).extend(row[0] for row in batch.rows)

            one = target(server.url, bus_name, url)
            one.open({W1: 0})
            one.write(facts(*range(1, 11)))
            server.kill()
            one.write(facts(*range(11, 21)))
            server.start()
            one.write(facts(*range(21, 31)))
            one.close()
            last = bus_last(url, "r-w1")
            bus.wait_for(orders, "r-w1", last, timeout=20)
    assert seen == {"r-w1": list(range(1, 31))}


@pytest.mark.servers
def test_redis_is_away_at_the_end(url: str, bus_name: str) -> None:
    with start_redis() as server:
        seen: list[Any] = []
        orders = ORDERS["orders"]
        one = target(server.url, bus_name, url)
        one.open({W1: 0})
        one.write(facts(1, 2))
        server.kill()
        one.write(facts(3, 4))
        one.close()
        server.start()
        with sync.connect(
            server.url, name=bus_name, streams=[orders], store=url, settings=QUICK, start="earliest"
        ) as bus:
            bus.subscribe(orders)(lambda batch: seen.extend(row[0] for row in batch.rows))
            bus.wait_for(orders, "r-w1", bus_last(url, "r-w1"), timeout=20)
    assert seen == [1, 2, 3, 4]


def bus_last(url: str, writer: str) -> int:
    from tests.pipeline.test_replay import newest

    return newest(url, "orders", writer)


@pytest.mark.servers
def test_postgres_is_killed_in_the_middle(redis_url: str, bus_name: str) -> None:
    with start_postgres() as server:
        url = made_store(server.url)
        rows = [row for row in some_rows(40) if row[1] == "w1"]
        its = list(facts_of(rows))
        one = target(redis_url, bus_name, url)
        one.open({W1: 0})
        one.write(its[:5])
        server.kill()
        server.start()
        one.write(its[5:])
        one.close()
        assert in_table(url) == expected(rows)


@pytest.mark.servers
def test_a_database_that_stays_away_ends_it(url: str, redis_url: str, bus_name: str, tmp_path: Path) -> None:
    one = target(redis_url, bus_name, url)
    one.open({W1: 0})
    one.write(facts(1))
    at, attempts = tmp_path / "target.db", []
    kept = at.rename(tmp_path / "away.db")
    monkey = pytest.MonkeyPatch()
    monkey.setattr(replay_target, "pause_after", lambda *args: attempts.append(args) or 0.0)
    with monkey.context(), pytest.raises(busrep.BusrepError):
        one._close("w1")
        one.write(facts(2))
    one.close()
    kept.rename(at)
    monkey.undo()
    assert written(url) == [b"[1]"]


# -- pace and options --------------------------------------------------------------------------------------------


def test_a_pause_of_years_is_waited_for_in_slices_and_told() -> None:
    told: list[float] = []
    now = [0.0]

    def wait(seconds: float) -> None:
        assert seconds <= SLICE
        now[0] += seconds if now[0] < 600 else 1e15  # who would wait?

    its = [fact("orders", "w1", 1, "[1]", time=0), fact("orders", "w1", 2, "[2]", time=30 * 365 * 86_400 * 10**6)]
    made = Chunks(Pace(speed=1e-6), lambda: now[0], wait, told=told.append)
    assert [[one.token for one in chunk] for chunk in made.of(its)] == [[1], [2]]
    assert told[0] == pytest.approx(30 * 365 * 86_400 * 1e6)
    assert told[1] == told[0] - SLICE


GIVEN: dict[str, Any] = {"to_redis": "redis://there", "to_name": "n"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"speed": 0.0}, {"speed": -1.0}, {"speed": math.nan}, {"speed": math.inf}, {"rate": math.inf},
        {"rate": math.nan}, {"rate": 1.0, "longest_pause": 1.0}, {"longest_pause": -1.0}, {"longest_pause": math.nan},
        {"speed": 1.0, "flat_out": True},
    ],
)  # fmt: skip
def test_a_pace_that_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--"):
        pace_of(replay.Options(**GIVEN, **wrong))


def test_one_source_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store beside --archive is a mistake, unless it is the environment's, which is there for other jobs."""
    told = replay.Options(**GIVEN, archive="/a", store="postgresql://u@there/shop")
    monkeypatch.delenv("BUSREP_STORE", raising=False)
    with pytest.raises(ConfigError, match="two sources"):
        one_source(told)
    monkeypatch.setenv("BUSREP_STORE", "postgresql://u:secret@there/shop")
    one_source(told)
    one_source(attrs.evolve(told, archive=None))
    monkeypatch.setenv("BUSREP_STORE", "postgresql://u:secret@there/other")
    with pytest.raises(ConfigError, match="two sources"):
        one_source(told)


def test_the_target_is_not_told_another_redis_s_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BUSREP_REDIS_PASSWORD", "production")
    told = replay.Options(**GIVEN)
    assert target_redis(told) == "redis://there"
    (tmp_path / "p").write_text("its own\n")
    assert target_redis(attrs.evolve(told, to_redis_password_file=str(tmp_path / "p"))) == "redis://:its%20own@there"


@pytest.mark.servers
def test_a_replay_that_did_nothing_can_be_done_again(url: str, redis_url: str, bus_name: str) -> None:
    task = Task(some_rows(20), redis_url, bus_name, url)
    assert set(replayed(task).values()) == {0}
    assert min(replayed(task).values()) > 0
    assert in_table(url) == expected(some_rows(20))


def test_no_redis_is_an_error(url: str, bus_name: str) -> None:
    one = target("redis://127.0.0.1:1", bus_name, url)
    with pytest.raises(Unavailable, match="Redis"):
        one.open({W1: 0})
    one.close()
