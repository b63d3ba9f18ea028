"""Rule 9.21: a writer that closes leaves the registry with its final position, and no reader has to find it silent."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import psycopg
import pytest

from busrep.caches.cache import invalidations
from busrep.stores.blocking import BlockingStore
from busrep.sync import connect
from busrep.testing.links import FaultyLink
from tests.shop import QUICK, Order, orders, payments, typing

from .bus_conformance import AsyncioBus, Deployment, Seen, until, write
from .test_stray_lines import channel

pytestmark = pytest.mark.servers

RUNTIMES = {"asyncio": AsyncioBus, "threads": connect}
SILENT = attrs.evolve(QUICK, silent_after_beats=5)


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return RUNTIMES[request.param]


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def store_url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def deployment(redis_url: str, bus_name: str, store_url: str, runtime: Callable[..., Any]) -> Deployment:
    return Deployment(redis_url, bus_name, store_url, runtime)


@contextlib.contextmanager
def reading(deployment: Deployment, **options: Any) -> Iterator[tuple[Any, Seen]]:
    """A reader of all streams, and what it has handled."""
    with deployment.bus(settings=SILENT, **options) as reader:
        seen = Seen()
        reader.subscribe(orders, payments)(seen)
        reader.subscribe(typing)(lambda _: None)
        yield reader, seen


def core(reader: Any) -> Any:
    """Of either runtime."""
    bus = reader.bus if isinstance(reader, AsyncioBus) else reader.reading.made
    return bus.reading.core


def until_silent(reader: Any, writer: str = "w1") -> None:
    """Until the reader has found that it does not hear that writer any more, and has looked into the table for it."""
    until(lambda: writer not in core(reader).last_heard, timeout=30)


def registered(store: BlockingStore, writer: str = "w1") -> dict[str, tuple[int, bool]]:
    return {one.stream: (one.position, one.registered) for one in store.known() if one.writer == writer}


def warnings(caplog: pytest.LogCaptureFixture, writer: str = "w1") -> list[str]:
    """What was logged of that writer for somebody to look at."""
    loud = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    return [text for text in loud if writer in text]


@pytest.mark.parametrize("link", ["redis", "tcp"])
def test_nobody_warns_of_a_writer_that_closed(
    deployment: Deployment, link: str, caplog: pytest.LogCaptureFixture
) -> None:
    with channel(link, deployment.redis, deployment.name) as (address, _), deployment.table() as store:
        # A writer in threads needs a Redis.
        writing = attrs.evolve(deployment, make=AsyncioBus) if link == "tcp" else deployment
        with reading(deployment, redis=address) as (reader, seen):
            with writing.bus(redis=address, writer="w1") as writer:
                last = write(writer, 1, 2)
                write(writer, 3, stream=payments)
                with writer.write(typing) as fact:
                    fact.add(["ann"])
                reader.wait_for(orders, "w1", last, timeout=20)
            assert registered(store) == {"orders": (last, False), "payments": (1, False)}
            until_silent(reader)
            assert reader.linear_position(orders) == last
            assert sorted(seen.numbers) == [1, 2, 3]
    assert warnings(caplog) == []


def test_the_final_position_is_behind_what_others_were_given(deployment: Deployment) -> None:
    """A linear consumer need not wait for a writer that has left."""
    with deployment.table() as store, reading(deployment) as (reader, _), deployment.bus(writer="w2") as other:
        with deployment.bus(writer="w1") as writer:
            reader.wait_for(orders, "w1", write(writer, 1), timeout=20)
            given = write(other, 2, 3)
        final, still = registered(store)["orders"]
        assert (final >= given, still) == (True, False)
        last = write(other, 4)
        reader.wait_for(orders, "w2", last, timeout=20)
        until(lambda: reader.linear_position(orders) >= last, timeout=30)


def test_the_table_tells_a_reader_that_did_not_hear_the_goodbye(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    with deployment.table(), FaultyLink.in_thread(deployment.redis) as link:
        with reading(deployment, redis=link.url) as (reader, seen):
            with deployment.bus(writer="w1") as writer:
                reader.wait_for(orders, "w1", write(writer, 1), timeout=20)
                link.refuse = True
                link.cut()
                last = write(writer, 2)
            reader.wait_for(orders, "w1", last, timeout=30)
            link.refuse = False
            until_silent(reader)
            assert seen.numbers == [1, 2]
    assert [text for text in warnings(caplog) if "silent" in text or "finished" in text] == []


def test_a_name_comes_back_after_its_goodbye(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    with deployment.table() as store, reading(deployment) as (reader, seen):
        lives = []
        for number in range(1, 4):
            with deployment.bus(writer="w1") as writer:
                reader.wait_for(orders, "w1", write(writer, number), timeout=20)
                assert registered(store)["orders"][1]
                lives.append(writer.statistics()["writer"]["incarnation"])
        until_silent(reader)
        assert seen.numbers == [1, 2, 3]
        assert lives == sorted(set(lives))
    assert warnings(caplog) == []


def test_a_writer_that_crashed_is_warned_of(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    with deployment.table() as store, reading(deployment):
        store.claim("w1", ["orders"], timeout=5)
        until(lambda: any("w1 was silent" in text for text in warnings(caplog)), timeout=30)
        assert not registered(store)["orders"][1]


def test_nobody_warns_of_a_closed_writer_of_invalidations_in_memory(
    redis_url: str, bus_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All that is cached is dropped, for a crash would look the same."""
    options = {"name": bus_name, "streams": [invalidations("in_memory", resettable=True)], "settings": SILENT}
    with connect(redis_url, **options) as reader:

        @reader.cached(name="item")
        def item(key: int) -> int:
            return key

        def of_stream() -> dict[str, Any]:
            found: dict[str, Any] = reader.statistics()["caches"]["streams"]["in_memory"]
            return found

        with connect(redis_url, writer="w1", **options):
            until(lambda: of_stream()["trusted"], timeout=20)
            item(1)
            before = of_stream()["clears"]
        until(lambda: of_stream()["clears"] > before, timeout=20)
    assert warnings(caplog) == []


def test_a_writer_with_a_fact_in_doubt_is_not_finished_by_itself(
    redis_url: str, bus_name: str, postgres_url: str, runtime: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transaction has the claim locked, and may do so for long: the table tells, once it has ended (9.1)."""
    deployment = Deployment(redis_url, bus_name, postgres_url, runtime)
    with deployment.table() as store, reading(deployment) as (reader, seen):
        asked: list[Any] = []
        with psycopg.connect(postgres_url) as connection:
            connection.execute("SELECT 1")
            with deployment.bus(writer="w1") as writer:
                reader.wait_for(orders, "w1", write(writer, 1), timeout=20)
                writing = writer.bus.store if isinstance(writer, AsyncioBus) else writer.store
                monkeypatch.setattr(writing, "finish", lambda *args, **_: asked.append(args))
                with writer.write(orders, connection=connection) as fact:
                    fact.add(Order(2, "joined"))
            assert asked == []
            assert registered(store)["orders"] == (1, True)
            connection.commit()
        reader.wait_for(orders, "w1", fact.id, timeout=30)
        assert seen.numbers == [1, 2]


def test_a_fact_in_doubt_that_is_settled_while_the_writer_closes_is_finished_with_it(
    redis_url: str,
    bus_name: str,
    postgres_url: str,
    runtime: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    deployment = Deployment(redis_url, bus_name, postgres_url, runtime)
    with deployment.table() as store, reading(deployment) as (reader, seen):
        with deployment.bus(writer="w1") as writer, psycopg.connect(postgres_url) as connection:
            connection.execute("SELECT 1")
            with writer.write(orders, connection=connection) as fact:
                fact.add(Order(1, "joined"))
            connection.commit()
        assert registered(store)["orders"] == (fact.id, False)
        reader.wait_for(orders, "w1", fact.id, timeout=30)
        until_silent(reader)
        assert seen.numbers == [1]
    assert warnings(caplog) == []
