"""`bus.health()`, `on_failure=`, and the reason for a stop beside the saved position."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

import busrep
import busrep.sync
from busrep.cli.app import cli
from busrep.core.health import health_of
from busrep.errors import BusrepError, ConfigError, HandlerFailed, WriterFenced
from busrep.testing import virtual
from busrep.testing.pair import QUICK, MemoryDeployment
from tests.asyncio.test_effects import Place, runtime, until, write
from tests.shop import Order, opened_store, orders

__all__ = ["runtime"]  # a fixture

# --- read from the statistics

FINE: dict[str, Any] = {
    "reader": {"stopped": {}, "failure": None, "states": {"orders": {"w": "live"}}, "trouble": {}, "retrying": {}},
    "writer": {"lost": False},
    "link": {"connected": True, "last_error": None},
    "stuck": [],
    "bootstrap": {"orders": {"stopped": None}},
}


def reasons_of(**changes: Any) -> list[tuple[str, str, str]]:
    found = health_of({**FINE, **changes})
    assert found.ok is (not found.reasons)
    return [attrs.astuple(reason) for reason in found.reasons]


def reader(**changes: Any) -> dict[str, Any]:
    return {**FINE["reader"], **changes}


def test_nothing_is_wrong() -> None:
    assert health_of(FINE).ok
    assert reasons_of(reader=None, writer=None) == []


def test_each_reason() -> None:
    assert reasons_of(reader=reader(failure="the log is another")) == [("stopped", "", "the log is another")]
    assert reasons_of(reader=reader(stopped={"orders w": "poison"})) == [("stopped", "orders w", "poison")]
    assert reasons_of(bootstrap={"orders": {"stopped": "poison"}}) == [("stopped", "orders", "poison")]
    assert reasons_of(writer={"lost": True})[0][:2] == ("fenced", "")
    assert reasons_of(link={"connected": False, "last_error": "refused"}) == [("link", "", "refused")]
    stale = reader(states={"orders": {"v": "live", "w": "stale"}}, trouble={"orders w": "away"})
    assert reasons_of(reader=stale) == [("stale", "orders w", "away")]
    assert reasons_of(reader=reader(not_begun={"orders": "away"})) == [("stale", "orders", "away")]
    assert reasons_of(reader=reader(unsavable={"orders w": "refused"})) == [("unsaved", "orders w", "refused")]
    stuck = [{"id": 7, "stream": "orders", "age": 61.2, "owner": "a task"}]
    assert reasons_of(stuck=stuck) == [("stuck", "orders", "fact 7 is open for 61 s (a task)")]
    retrying = {"orders w": {"for": 3.21, "calls": 4, "error": "OSError: away", "outage": True}}
    assert reasons_of(reader=reader(retrying=retrying)) == [
        ("retrying", "orders w", "for 3.2 s, 4 calls: OSError: away")
    ]


def test_the_links_of_a_bus_for_threads() -> None:
    up, down = {"connected": True}, {"connected": False, "last_error": "refused"}
    assert reasons_of(link={**up, "reading": up}) == []
    assert reasons_of(link={**up, "reading": None}) == []
    assert reasons_of(link={**up, "reading": down}) == [("link", "", "refused")]
    assert reasons_of(link={**down, "reading": up}) == [("link", "publishing", "refused")]
    assert reasons_of(link={**down, "reading": up}, writer=None) == []
    assert reasons_of(link={"reading": up}, writer=None) == []


# --- on buses


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def place(runtime: str, redis_url: str, bus_name: str, request: pytest.FixtureRequest) -> Place:
    found = Place(redis_url, bus_name, request.getfixturevalue(request.param), runtime)
    with opened_store(found.url):
        pass
    return found


def asked(*command: str) -> Any:
    done = CliRunner().invoke(cli, [*command, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


@pytest.mark.servers
def test_a_stop_is_told_and_stored_beside_the_position_until_it_moves_on(place: Place) -> None:
    told: list[BusrepError] = []
    poisoned = True

    def check(batch: Any) -> None:
        if poisoned and any(row.number == 2 for row in batch.rows):
            raise ValueError("no order")

    async def handle(batch: Any) -> None:
        check(batch)

    def in_store() -> Any:
        return asked("lag", "--store", place.url)["readers"][0]["stopped"]

    given = check if place.runtime == "threads" else handle
    with place.bus(given, settings=attrs.evolve(QUICK, handler_retries=0), on_failure=told.append) as bus:
        assert bus.health().ok
        write(place, range(5))
        until(lambda: told)
        (error,) = told
        assert isinstance(error, HandlerFailed)
        health = bus.health()
        assert not health.ok
        assert [(reason.code, reason.about) for reason in health.reasons] == [("stopped", "orders w")]
        until(in_store)
        assert "ValueError: no order" in in_store()
        status = asked("db", "status", "--store", place.url)
        assert "ValueError: no order" in status["readers"]["r"]["orders"]["w"]["stopped"]
        for command in (["lag"], ["db", "status"]):
            wide = {"COLUMNS": "300"}
            shown = CliRunner().invoke(cli, [*command, "--store", place.url], env=wide, catch_exceptions=False)
            assert "stopped" in shown.stdout
            assert "the handler of" in shown.stdout
        bus.resume(orders, "w")  # to fail again
        until(lambda: len(told) == 2)
        until(in_store)
    assert not bus.health().ok
    assert "ValueError: no order" in in_store()  # the process is gone
    poisoned = False
    with place.bus(given) as bus:
        until(lambda: saved_position(place) == 5)
        assert in_store() is None
        assert bus.health().ok


def saved_position(place: Place) -> int:
    return int(asked("lag", "--store", place.url)["readers"][0]["position"])


def test_a_reader_that_stops_at_its_start_stores_why() -> None:
    async def main() -> None:
        async with MemoryDeployment(orders, settings=QUICK) as deployment:
            async with deployment.bus(writer="w") as writer, deployment.bus(reader="r") as bus:
                bus.subscribe(orders)(lambda _: None)
                await bus.wait_for(orders, "w", (await writer.publish(orders, [Order(1, "new")]))[-1])
                store: Any = writer.store
                await asyncio.sleep(1.0)
                await store.restored()
            async with deployment.bus(reader="r", on_epoch_change="stop") as bus:
                bus.subscribe(orders)(lambda _: None)
                await asyncio.sleep(5.0)
                assert [reason.code for reason in bus.health().reasons] == ["stopped"]
                readers = (await bus.store.status())["readers"]
            assert "on_epoch_change" in readers["r"]["orders"]["w"]["stopped"]

    virtual.run(main())


@pytest.mark.servers
def test_resuming_clears_the_reason(place: Place) -> None:
    told: list[BusrepError] = []
    poisoned = threading.Event()
    poisoned.set()
    held = threading.Event()

    def check(batch: Any) -> None:
        if poisoned.is_set():
            raise ValueError("no order")
        held.wait(30.0)

    async def handle(batch: Any) -> None:
        await asyncio.to_thread(check, batch)

    def in_store() -> Any:
        return asked("lag", "--store", place.url)["readers"][0]["stopped"]

    given = check if place.runtime == "threads" else handle
    with place.bus(given, settings=attrs.evolve(QUICK, handler_retries=0), on_failure=told.append) as bus:
        write(place, range(1))
        until(lambda: told)
        until(in_store)
        poisoned.clear()
        bus.resume(orders, "w")
        until(lambda: in_store() is None)  # though nothing has been handled yet
        assert saved_position(place) == 0
        held.set()
        until(lambda: saved_position(place) == 1)


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["asyncio", "threads"])
def test_a_writer_whose_name_is_taken_is_told(kind: str, redis_url: str, bus_name: str, sqlite_url: str) -> None:
    told: list[BusrepError] = []
    given: Any = {"name": bus_name, "streams": [orders], "store": sqlite_url, "writer": "w", "settings": QUICK}
    with opened_store(sqlite_url):
        pass

    def take() -> None:
        with busrep.sync.connect(redis_url, **given) as other:
            other.publish(orders, [Order(1, "new")])

    def check(health: Any) -> None:
        assert [reason.code for reason in health.reasons] == ["fenced"]
        assert isinstance(told[0], WriterFenced)
        assert len(told) == 1

    async def main() -> None:
        async def tell(error: BusrepError) -> None:
            await asyncio.sleep(0)
            told.append(error)
            raise RuntimeError("of the application")

        async with busrep.connect(redis_url, on_failure=tell, **given) as bus:
            assert bus.health().ok
            await asyncio.to_thread(take)
            async with asyncio.timeout(60):
                while not told:
                    await asyncio.sleep(0.01)
            check(bus.health())
        assert [reason.code for reason in bus.health().reasons] == ["closed"]

    def tell(error: BusrepError) -> None:
        told.append(error)
        raise RuntimeError("of the application")

    if kind == "asyncio":
        asyncio.run(main())
        return
    bus = busrep.sync.connect(redis_url, on_failure=tell, **given)
    assert [reason.code for reason in bus.health().reasons] == ["closed"]  # it opens nothing
    with bus:
        take()
        until(lambda: told)
        check(bus.health())


def test_what_is_retried_and_a_lost_link_are_reasons() -> None:
    async def main() -> None:
        async with (
            MemoryDeployment(orders, settings=attrs.evolve(QUICK, retry_min=0.05)) as deployment,
            deployment.bus(writer="w") as writer,
            deployment.bus(reader="r") as bus,
        ):
            away = True

            @bus.subscribe(orders)
            def handle(batch: Any) -> None:
                if away:
                    raise TimeoutError("away")

            await writer.publish(orders, [Order(1, "new")])
            async with asyncio.timeout(60):
                while bus.health().ok:
                    await asyncio.sleep(0.01)
                (reason,) = bus.health().reasons
                assert (reason.code, reason.about) == ("retrying", "orders w")
                assert "TimeoutError: away" in reason.text
                away = False
                while not bus.health().ok:
                    await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.parametrize("given", [1, "tell"])
def test_what_cannot_be_called_is_refused(given: Any) -> None:
    for connect in (busrep.connect, busrep.sync.connect):
        with pytest.raises(ConfigError, match="on_failure="):
            connect("redis://localhost", name="shop", on_failure=given)


def test_threads_call_plain_functions() -> None:
    async def tell(error: BusrepError) -> None: ...

    with pytest.raises(ConfigError, match="coroutine function"):
        busrep.sync.connect("redis://localhost", name="shop", on_failure=tell)  # type: ignore[arg-type]
