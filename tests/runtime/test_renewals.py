"""A writer that is finished for its silence again and again while one fact begins: a machine that is too slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from busrep.errors import Unavailable, WriterFenced
from busrep.runtime.config import WriterConfig
from busrep.runtime.fact import RENEWALS, FactBase
from busrep.runtime.own_name import claim_name
from busrep.runtime.session import WriterSession
from busrep.settings import Settings
from busrep.stores import claims
from busrep.stores.blocking import BlockingStore
from busrep.stores.plans import complete
from busrep.streams import Registry
from tests.asyncio import test_bus as with_asyncio
from tests.shop import QUICK, Order, opened_store, orders, typing
from tests.sync import test_writing as with_threads

CALM = attrs.evolve(QUICK, heartbeat=30.0)  # no beat finds out by itself


@pytest.fixture
def deployment(redis_url: str, bus_name: str, sqlite_url: str) -> with_threads.Deployment:
    with opened_store(sqlite_url):
        return with_threads.Deployment(redis_url, bus_name, sqlite_url)


@pytest.mark.servers
@pytest.mark.parametrize("times", [2, RENEWALS])
def test_9_19_a_fact_begins_however_often_its_writer_was_finished(
    deployment: with_threads.Deployment, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    finish(monkeypatch, deployment.store, times)
    with deployment.bus(settings=CALM, beats=False) as bus:
        with bus.write(orders) as fact:
            fact.add(Order(1, "late"))
        assert list(deployment.rows()) == [fact.id]
        assert not bus.statistics()["writer"]["fenced"]


@pytest.mark.servers
def test_who_is_finished_for_ever_is_told_that_it_is_too_slow(
    deployment: with_threads.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(monkeypatch, deployment.store, RENEWALS + 1)
    with deployment.bus(settings=CALM, beats=False) as bus:
        with pytest.raises(Unavailable, match="again and again: is Settings.heartbeat too short"):
            with bus.write(orders) as fact:
                fact.add(Order(1, "slow"))
        with bus.write(orders) as fact:  # the name is its own as before
            fact.add(Order(2, "quick"))
        assert list(deployment.rows()) == [fact.id]


@pytest.mark.servers
@pytest.mark.parametrize("times", [2, RENEWALS, RENEWALS + 1])
def test_9_19_the_same_on_an_event_loop(
    deployment: with_threads.Deployment, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    async def main() -> None:
        buses = with_asyncio.Deployment(deployment.redis, deployment.name, deployment.store, CALM)
        async with buses.bus(writer="w1") as bus:
            finish(monkeypatch, deployment.store, times)
            if times > RENEWALS:
                with pytest.raises(Unavailable, match="again and again"):
                    async with bus.write(orders) as fact:
                        fact.add(Order(1, "slow"))
            async with bus.write(orders) as fact:
                fact.add(Order(1, "late"))
            assert list(deployment.rows()) == [fact.id]
            assert not bus.statistics()["writer"]["fenced"]

    with_asyncio.run(main())


@pytest.mark.servers
@pytest.mark.parametrize("times", [2, RENEWALS])
def test_9_5_a_process_begins_whose_claim_was_finished_before_it_knew(
    deployment: with_threads.Deployment, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    while_claiming(monkeypatch, deployment.store, times, finish_it)
    with deployment.bus(settings=CALM, beats=False) as bus:
        with bus.write(orders) as fact:
            fact.add(Order(1, "late"))
        assert list(deployment.rows()) == [fact.id]


@pytest.mark.servers
def test_a_process_whose_claims_are_finished_for_ever_is_told_that_it_is_too_slow(
    deployment: with_threads.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_claiming(monkeypatch, deployment.store, RENEWALS + 1, finish_it)
    bus = deployment.bus(settings=CALM, beats=False)
    with pytest.raises(Unavailable, match="again and again: is Settings.heartbeat too short"):
        bus.open()
    with bus, bus.write(orders):  # opening was undone, and is tried again
        pass


@pytest.mark.servers
def test_9_5_a_process_does_not_take_the_name_of_a_later_one(
    deployment: with_threads.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim_it(table: BlockingStore, writer: str, _: int) -> None:
        table.claim(writer, [orders.name], timeout=10)

    while_claiming(monkeypatch, deployment.store, 1, claim_it)
    with pytest.raises(WriterFenced):
        deployment.bus(settings=CALM, beats=False).open()


@pytest.mark.servers
def test_what_was_won_is_remembered_over_an_outage(
    deployment: with_threads.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Won, finished before that was known, won once more, and the database is away before it answers."""
    real, happens = claims.held_state, []

    def held_state(writer: str, incarnation: int, *rest: Any) -> Any:
        what = happens.pop(0) if happens else ""
        if what == "finished":
            with opened_store(deployment.store) as table:
                table.finish(writer, incarnation, timeout=10)
        elif what == "away":
            raise Unavailable("the store", "away")
        return real(writer, incarnation, *rest)

    monkeypatch.setattr(claims, "held_state", held_state)
    with deployment.bus(settings=CALM, beats=False) as bus:
        with bus.write(orders) as fact:
            fact.add(Order(1, "before"))
        with opened_store(deployment.store) as table:
            table.finish(bus.writer, bus.statistics()["writer"]["incarnation"], timeout=10)
        happens[:] = ["finished", "away", "away"]
        with pytest.raises(Unavailable), bus.write(orders):
            pass
        assert not happens
        with bus.write(orders) as fact:
            fact.add(Order(2, "after"))


def finish_it(table: BlockingStore, writer: str, incarnation: int) -> None:
    table.finish(writer, incarnation, timeout=10)


def while_claiming(
    monkeypatch: pytest.MonkeyPatch, store: str, times: int, happens: Callable[[BlockingStore, str, int], None]
) -> None:
    """Let something happen to each claim after it was committed, before it is answered, so many times."""
    held_state, left = claims.held_state, iter(range(times))

    def late(writer: str, incarnation: int, *rest: Any) -> Any:
        if next(left, None) is not None:
            with opened_store(store) as table:
                happens(table, writer, incarnation)
        return held_state(writer, incarnation, *rest)

    monkeypatch.setattr(claims, "held_state", late)


def finish(monkeypatch: pytest.MonkeyPatch, store: str, times: int) -> None:
    """Finish each incarnation that is about to begin a fact, so many times."""
    begin, left = FactBase._begin, iter(range(times))

    async def late(fact: FactBase[Any], session: WriterSession) -> None:
        if next(left, None) is not None:
            with opened_store(store) as table:
                table.finish(session.name, session.incarnation, timeout=10)
        await begin(fact, session)

    monkeypatch.setattr(FactBase, "_begin", late)


def test_9_11_two_lives_of_a_writer_without_a_table_differ_within_a_millisecond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a clock that was set back by the length of the first one: readers would know no reset."""
    times = iter([1_700_000_000_000_000_000, 1_700_000_000_000_100_000])
    monkeypatch.setattr("time.time_ns", lambda: next(times))
    unused: Any = object()
    config = WriterConfig("w", "shop", Registry([typing]), Settings(), unused)
    lives = [complete(claim_name(config))[1] for _ in range(2)]
    assert lives == sorted(set(lives))
