"""A writer without a table that restarts under a clock that is behind is heard all the same (rule 9.24)."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any
from unittest import mock

import pytest

import busrep
from busrep import sync
from busrep.core.delivery import Reset
from busrep.core.received import Followed
from busrep.runtime.config import WriterConfig
from busrep.runtime.own_name import claim_name
from busrep.settings import Settings
from busrep.stores import open_store
from busrep.streams import Registry
from tests.core.test_reader import Driver, announce, position, rdata
from tests.shop import QUICK, STREAMS, typing

from .test_bus import run, until

ROUNDS = int(os.environ.get("BUSREP_ROUNDS", "2"))
BEATS = Settings(heartbeat=1.0, silent_after_beats=5)


def driver() -> Driver:
    d = Driver(stream=Followed("s", resettable=True, fetchable=False), settings=BEATS)
    d.send(*announce("w", 7, position("w", 0, 0)), rdata("w", 1))
    return d


def test_lower_incarnations_alone_for_five_beats_are_a_reset() -> None:
    d = driver()
    for beat in range(5):
        d.now = 10.0 + beat
        d.send(*announce("w", 3, position("w", 1, 1)))
    assert d.reader.counters.old_incarnations == 5
    assert d.at("w") == 1
    assert not d.reader.errors
    d.now = 15.0
    d.send(*announce("w", 3, position("w", 1, 1)), rdata("w", 2))
    assert Reset("s", "w", 0) in d.notices
    assert d.tokens("w") == [1, 2]
    assert d.reader.counters.incarnations_outlived == 1
    assert "its clock is behind" in str(d.reader.errors[-1])
    assert d.reader.last_heard["w"] == 15.0


def test_not_while_the_higher_one_is_heard_as_well() -> None:
    d = driver()
    for beat in range(20):
        d.now = 10.0 + beat
        d.send(*announce("w", 3, position("w", 9, 9)))
        d.send(*announce("w", 7, position("w", 1, 1)))
    assert d.at("w") == 1
    assert d.reader.counters.incarnations_outlived == 0


def test_what_was_heard_before_a_lost_link_counts_no_more() -> None:
    d = driver()
    d.now = 10.0
    d.send(*announce("w", 3, position("w", 9, 9)))
    d.reader.connected(20.0)
    d.now = 20.0
    d.send(*announce("w", 3, position("w", 9, 9)))
    assert d.reader.counters.incarnations_outlived == 0


def test_the_next_life_may_be_higher_again() -> None:
    d = driver()
    for at in (10.0, 15.0):
        d.now = at
        d.send(*announce("w", 3, position("w", 0, 0)))
    d.send(*announce("w", 8, position("w", 0, 0)), rdata("w", 1))
    assert d.tokens("w") == [1, 1]


def ahead(seconds: float) -> Any:
    """The clock that incarnations are taken from."""
    shifted = mock.Mock(wraps=time)
    shifted.time_ns = lambda: time.time_ns() + int(seconds * 1e9)
    return mock.patch.multiple("busrep.runtime.own_name", time=shifted)


@pytest.mark.servers
@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_reader_is_not_deaf_to_a_writer_whose_clock_is_behind(redis_url: str, bus_name: str, number: int) -> None:
    async def work() -> None:
        options: dict[str, Any] = {"name": f"{bus_name}-{number}", "streams": [typing], "settings": QUICK}
        async with busrep.connect(redis_url, **options) as reader:
            seen: list[list[str]] = []
            resets: list[str] = []
            missed: list[tuple[int, int]] = []
            reader.subscribe(typing)(lambda batch: seen.extend(batch.rows))
            reader.on_reset(typing)(lambda _stream, writer, _position: resets.append(writer))
            reader.on_missed(typing)(lambda _stream, _writer, after, upto: missed.append((after, upto)))
            with ahead(3600.0):
                first = busrep.connect(redis_url, writer="w", **options)
                await first.open()
            await first.publish(typing, [["ann"]])
            await until(lambda: seen == [["ann"]])
            await first.close()
            async with busrep.connect(redis_url, writer="w", **options) as second:
                sent = 0

                async def heard() -> bool:
                    nonlocal sent
                    sent += 1
                    await second.publish(typing, [[f"bob {sent}"]])
                    return len(seen) > 1

                while not await heard():
                    await asyncio.sleep(QUICK.heartbeat)
                await second.publish(typing, [["last"]])
                await until(lambda: seen[-1] == ["last"])
            assert "w" in resets
            told = sum(upto - after for after, upto in missed)
            assert told + len(seen) - 1 == sent + 1  # each row was handled, or told to be missed
            assert reader.statistics()["reader"]["incarnations_outlived"] == 1

    run(work(), 60)


@pytest.mark.parametrize("registered", [True, False])
def test_a_writer_without_a_table_is_above_a_claim_of_its_name(sqlite_url: str, registered: bool) -> None:
    """Behind a restore claims are above the clock, for a day."""

    async def work() -> None:
        store = open_store(sqlite_url, Registry(STREAMS))
        await store.init()
        await store.open()
        await store.restored()
        claim = await store.claim("w", ["orders"], timeout=5)
        if not registered:
            await store.finish("w", claim.incarnation, timeout=5)
        config = WriterConfig("w", "shop", Registry([typing]), QUICK, store)
        no_claim, incarnation = await claim_name(config)
        assert no_claim is None
        assert not any(one.registered for one in await store.known())
        assert incarnation > claim.incarnation + (not registered)  # a name that is finished has the number behind that
        await store.close()

    run(work(), 60)


@pytest.mark.servers
@pytest.mark.parametrize("runtime", ["asyncio", "threads"])
def test_a_writer_goes_on_above_a_predecessor_that_it_hears(redis_url: str, bus_name: str, runtime: str) -> None:
    options: dict[str, Any] = {"name": bus_name, "streams": [typing], "settings": QUICK}

    async def work() -> None:
        async with busrep.connect(redis_url, **options) as reader:
            seen: list[list[str]] = []
            reader.subscribe(typing)(lambda batch: seen.extend(batch.rows))
            with ahead(3600.0):
                first = busrep.connect(redis_url, writer="w", **options)
                await first.open()
            await first.publish(typing, [["ann"]])
            await until(lambda: seen == [["ann"]])
            first.own_name.watch.since -= 3600.0  # it has started long ago
            if runtime == "asyncio":
                async with busrep.connect(redis_url, writer="w", **options) as second:
                    await until(lambda: second.statistics()["writer"]["incarnation"] > time.time_ns() + 1800 * 10**9)
                    await until(lambda: first.statistics()["writer"]["lost"])
                    await second.publish(typing, [["bob"]])
                    await until(lambda: seen[-1] == ["bob"])
            else:
                await asyncio.to_thread(threads)
            await until(lambda: first.statistics()["writer"]["lost"])
            await first.close()

    def threads() -> None:
        with sync.connect(redis_url, writer="w", **options) as second:
            second.subscribe(typing)(lambda batch: None)
            deadline = time.monotonic() + 20
            while second.statistics()["writer"]["incarnation"] < time.time_ns() + 1800 * 10**9:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    run(work(), 60)
