"""Who is believed, and up to where (rules 9.16 to 9.19)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sqlite3
import time
import types
from typing import Any

import attrs
import pytest
import redis.asyncio

import busrep
from busrep.asyncio.table import TableReader
from busrep.core.commands import Name
from busrep.core.received import Followed
from busrep.core.states import State
from busrep.errors import PositionsAheadOfTable, StatementRefused
from busrep.settings import Settings
from busrep.stores import open_store
from busrep.stores.interface import KnownWriter
from busrep.streams import Registry
from tests.core.test_reader import EPOCH, Driver, announce, position, rdata
from tests.shop import QUICK, STREAMS, Order, orders, typing
from tests.support.reader import Reader

from .test_bus import Deployment, deployment, on_postgres, run, until

__all__ = ["deployment", "on_postgres"]  # fixtures

OTHER = "f" * 32


def registered(**claims: int) -> Driver:
    """A reader of stream s; its registry has these writers."""
    made = Driver(at=dict.fromkeys(claims, 0))
    made.reader.admission.registered({("s", writer): claim for writer, claim in claims.items()})
    return made


# --- the core


def test_9_16_lines_of_a_native_writer_without_its_name_count_for_nothing() -> None:
    d = registered(w=7)
    d.table.write("w", *range(1, 31))
    d.send(*announce("w", 7, position("w", 30, 30)))
    for _ in range(100):
        d.send(position("w", 0, 400)).send(rdata("w", 401)).send(*announce("v", 7, position("w", 0, 400)))
    assert d.at("w") == 30
    assert d.reader.counters.unnamed_lines == 300
    d.send(b"NAME w 7", position("w", 30, 30), rdata("w", 31))
    assert d.tokens("w") == [*range(1, 32)]


def test_9_16_also_of_a_stream_without_a_table_once_it_was_heard_natively() -> None:
    d = Driver(stream=Followed("s", resettable=True, fetchable=False))
    d.send(position("w", 0, 3))
    assert d.at("w") == 3  # foreign as yet
    d.send(b"NAME w 7", position("w", 0, 5))
    d.send(position("w", 5, 400))
    assert d.at("w") == 5
    assert d.reader.counters.unnamed_lines == 1


def test_9_16_lines_of_another_deployment_are_ignored_also_of_a_stream_without_a_table() -> None:
    d = registered(w=7)
    d.reader.follow(Followed("t", resettable=True, fetchable=False))
    d.send(*announce("w", 7, position("w", 0, 0), position("w", 3, 3, stream="t")))
    d.send(*announce("w", 9, position("w", 0, 400), position("w", 0, 0, stream="t"), epoch=OTHER))
    d.send(b"NAME w 9", position("w", 0, 400), position("w", 0, 0, stream="t"))
    assert d.reader.positions() == {"s": {"w": 0}, "t": {"w": 3}}
    assert d.reader.counters.other_logs == 4
    assert d.reader.counters.resets == 0
    assert d.reader.other_deployments == [OTHER]  # the page was of the log that is read
    for _ in range(3):
        d.later(10.0).send(*announce("w", 9, epoch=OTHER))
    assert d.reader.other_deployments == [OTHER]


def test_9_18_an_unregistered_writer_moves_nothing() -> None:
    d = registered(w=7)
    for _ in range(100):
        d.send(position("nobody", 2**62, 2**62)).send(rdata("nobody", 5))
        d.send(*announce("somebody", 3, position("somebody", 0, 2**62)))
    assert list(d.reader.progress) == [("s", "w")]
    assert d.asked == []
    assert d.reader.counters.unregistered_lines == 300


def test_9_18_the_registry_is_doubted_for_who_names_itself_in_this_log() -> None:
    d = registered(w=7)
    d.send(position("nobody", 9, 9)).send(b"NAME nobody 3", position("nobody", 9, 9))
    d.send(*announce("nobody", 3, position("nobody", 9, 9), epoch=OTHER))
    assert not d.reader.admission.registry_doubted
    d.send(*announce("new", 3, position("new", 0, 4))).send(b"NAME new 3", position("new", 4, 4), rdata("new", 9))
    assert d.reader.admission.registry_doubted
    d.reader.admission.registered({("s", "w"): 7})
    assert d.reader.admission.joined() == {}
    assert d.reader.admission.registry_doubted  # the answer may be older than the lines
    d.send(b"NAME new 3", position("new", 9, 9), rdata("new", 12))
    d.send(*announce("new", 9, position("new", 0, 400)))  # another incarnation's word
    d.reader.admission.registered({("s", "w"): 7, ("s", "new"): 3})
    assert d.reader.admission.joined() == {("s", "new", 3): 12}
    d.send(b"NAME new 3", position("new", 0, 0), rdata("new", 1))
    assert d.tokens("new") == [1]


def test_9_18_a_sequence_that_cannot_be_read_keeps_no_dead_writer_s_rows_back() -> None:
    """A right that is missing on it, say: whoever is looked after needs no sequence."""
    core = Reader([Followed("s")], epoch=EPOCH)
    core.admission.registered({("s", "dead"): 3})
    core.start_at("s", "dead", 5)
    finished = []

    class Store:
        async def known(self, epoch: str | None = None) -> list[KnownWriter]:
            return [KnownWriter("s", "dead", 9, 0, True, 3, 99.0), KnownWriter("s", "new", 0, 0, True, 3, 0.0)]

        async def sequence(self, stream: str, epoch: str) -> int:
            raise StatementRefused("the store", f"permission denied for sequence busrep_seq_{stream}")

        async def epoch(self) -> str:
            return EPOCH

        async def finish(self, writer: str, incarnation: int, timeout: float) -> dict[str, int]:
            finished.append((writer, incarnation))
            return {}

        def __getattr__(self, name: str) -> Any:
            return None  # the rest of a FactLog, which nobody asks for

    class Process:
        def __init__(self) -> None:
            self.core, self.stopped, self.tasks = core, {}, []  # type: ignore[var-annotated]
            self.settings, self.store = Settings(), Store()

        def pump(self) -> None: ...
        def ask_for_positions(self) -> None: ...
        def spawn(self, work: Any, _name: str, *, once: bool) -> None:
            assert once
            self.tasks.append(asyncio.ensure_future(work()))

    async def main() -> None:
        process: Any = Process()
        core.receive(b"\n".join(announce("new", 3, position("new", 0, 9))), 0.0)
        assert core.admission.registry_doubted
        await TableReader(process).look(None, all_known=True)
        await asyncio.gather(*process.tasks)

    asyncio.run(main())
    assert core.progress["s", "dead"].target == 9
    assert finished == [("dead", 3)]
    assert core.admission.registry_doubted  # and the sequence will be asked for again


def test_9_18_a_log_that_changes_while_the_sequence_is_read_makes_void_what_was_heard() -> None:
    core = Reader([Followed("s")], epoch=EPOCH)
    core.admission.registered({})
    core.receive(b"\n".join(announce("w", 3, position("w", 0, 9))), 0.0)
    core.admission.registered({("s", "w"): 3})

    class Store:
        async def sequence(self, _stream: str, _epoch: str) -> int:
            core.rebase(OTHER, {("s", "w"): 0})
            return 100

    process: Any = types.SimpleNamespace(core=core, ask_for_positions=lambda: None, settings=Settings(), store=Store())
    asyncio.run(TableReader(process)._confirm(core.admission.joined()))
    assert core.progress["s", "w"].target == 0


def test_9_18_a_declared_foreign_writer_is_believed() -> None:
    d = Driver(stream=Followed("s", foreign_writers=True))
    d.reader.admission.registered({("s", "native"): 7})
    d.table.write("foreign", 1, 2)
    d.send(position("foreign", 2, 2)).send(rdata("foreign", 3))
    d.send(b"NAME foreign 9").send(rdata("foreign", 4))  # which is no reason to believe it less
    assert d.tokens("foreign") == [1, 2, 3, 4]
    d.send(*announce("native", 7, position("native", 0, 0))).send(position("native", 0, 400))
    assert d.at("native") == 0  # it has a NAME, and says so


@pytest.mark.parametrize("heard", [1, 9], ids=["lower", "higher"])
def test_9_19_of_a_registered_writer_the_incarnation_of_its_claim_alone_counts(heard: int) -> None:
    d = registered(w=7)
    d.send(*announce("w", 7, position("w", 0, 0)))
    d.send(*announce("w", heard, position("w", 0, 400))).send(b"NAME w %d" % heard, position("w", 0, 400))
    assert d.at("w") == 0
    assert d.reader.admission.registry_doubted is (heard == 9)
    assert d.reader.silent(100.0) == ["w"]
    d.now = 100.0
    d.send(b"NAME w %d" % heard)
    assert d.reader.silent(100.0) == ["w"]  # no sign of life either
    d.send(b"NAME w 7", position("w", 0, 0), rdata("w", 1))
    assert d.tokens("w") == [1]
    assert d.reader.silent(100.0) == []
    assert d.state("w") is State.LIVE


# --- on servers


async def say(deployment: Deployment, *texts: str) -> None:
    client = redis.asyncio.Redis.from_url(deployment.redis)
    for text in texts:
        await client.publish(deployment.name, text)
    await client.aclose()


async def write(bus: Any, count: int = 1) -> int:
    ids = await bus.publish(orders, [Order(number, "ours") for number in range(count)])
    return int(ids[-1])


@pytest.mark.servers
@pytest.mark.parametrize("dies", [False, True], ids=["joins", "joins and dies"])
def test_9_18_a_writer_that_joins_is_followed_once_the_registry_lists_it(deployment: Deployment, dies: bool) -> None:
    async def main() -> None:
        # Not by the look for silent writers, which comes every silent_after_beats beats.
        deployment.settings = attrs.evolve(QUICK, heartbeat=0.5, silent_after_beats=100)
        got: list[Order] = []
        async with deployment.bus() as reader:
            reader.subscribe(orders)(lambda batch: got.extend(batch.rows))
            await until(lambda: reader.reading.core.admission.registry is not None)
            for name in ("w0", "w1"):
                async with deployment.bus(writer=name) as writer:
                    token = await write(writer, 3)
                    if not dies:
                        await reader.wait_for(orders, name, token, timeout=20)
                await reader.wait_for(orders, name, token, timeout=20)
        assert [row.number for row in got] == [0, 1, 2] * 2

    run(main(), timeout=60)


def test_9_18_what_a_writer_said_that_joined_and_crashed_is_fetched_once_the_registry_lists_it() -> None:
    """It was heard, so it is not silent for a while, and its stored position is behind what it published."""
    reader = Driver(at={}).reader
    reader.admission.registered({})
    for lines in (announce("w", 7, position("w", 0, 0)), [b"NAME w 7", position("w", 0, 0), rdata("w", 3)]):
        reader.receive(b"\n".join(lines), time.monotonic())
    assert reader.admission.registry_doubted
    asked: list[str] = []

    class Table:
        """Knows the writer that has joined meanwhile."""

        async def known(self, epoch: str | None = None) -> list[KnownWriter]:
            return [KnownWriter("s", "w", 0, 0, True, 7, 0.0)]

        async def sequence(self, stream: str, epoch: str) -> int:
            return {"s": 3}[stream]

        async def epoch(self) -> str:
            return EPOCH

    reading: Any = types.SimpleNamespace(
        core=reader, ask_for_positions=lambda: asked.append(""), pump=lambda: None, settings=QUICK, store=Table()
    )
    asyncio.run(TableReader(reading).look(None, all_known=True))
    assert [(one.writer, one.after, one.upto) for one in reader.fetches(math.inf)] == [("w", 0, 3)]
    assert asked


@pytest.mark.servers
def test_9_18_a_writer_follows_registered_writers_alone(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w0") as writer, deployment.bus(writer="w1") as other:
            await write(writer, 3)
            await until(lambda: other.positions()["orders"]["w1"] == 3)  # the idle one has followed
            for _ in range(100):
                await say(deployment, f"POSITION orders nobody {2**62} {2**62}", f"POSITION orders w1 0 {2**62}")
                await say(deployment, f"SERVER x {writer.writing.epoch}\nNAME w1 9\nPOSITION orders w1 0 {2**62}")
            await asyncio.sleep(4 * QUICK.heartbeat)
            assert await write(writer) == 4
            assert await write(other) == 5
            store = open_store(deployment.store, Registry(STREAMS))
            await store.open()
            assert max(one.position for one in await store.known()) <= 5
            await store.close()

    run(main())


@pytest.mark.servers
@pytest.mark.parametrize("opening", ["", f"SERVER x {OTHER}\n"], ids=["NAME", "of another deployment"])
def test_9_19_a_higher_incarnation_on_the_wire_fences_nobody(
    deployment: Deployment, opening: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w0") as writer:
            asked: list[float] = []
            store = writer.writing.store
            check = store.check_claim

            async def counted(claim: Any) -> None:
                asked.append(time.monotonic())
                await check(claim)

            store.check_claim = counted
            began = time.monotonic()
            for number in range(100):
                await say(deployment, f"{opening}NAME w0 {2**62 + number}")
            await until(lambda: asked)
            await asyncio.sleep(2 * QUICK.heartbeat)
            assert len(asked) <= 1 + (time.monotonic() - began) / QUICK.heartbeat  # a flood costs a question a beat
            assert not writer.statistics()["writer"]["fenced"]
            await write(writer)

    with caplog.at_level(logging.ERROR):
        run(main())
    told = [one.getMessage() for one in caplog.records if "another deployment uses this channel" in one.getMessage()]
    assert len(told) == bool(opening)
    assert all(OTHER in text and EPOCH not in text and "name" in text for text in told)


@pytest.mark.servers
def test_9_19_a_name_that_is_claimed_anew_fences_at_once(deployment: Deployment) -> None:
    async def main() -> None:
        deployment.settings = attrs.evolve(QUICK, heartbeat=600.0)  # not by a beat
        async with deployment.bus(writer="w0") as former:
            await write(former)
            async with deployment.bus(writer="w0") as writer:
                await until(lambda: former.statistics()["writer"]["fenced"], timeout=20)
                await write(writer)

    run(main(), timeout=60)


@pytest.mark.servers
def test_9_19_a_writer_without_a_claim_has_nothing_but_the_wire(redis_url: str, bus_name: str) -> None:
    async def main() -> None:
        async with busrep.connect(redis_url, name=bus_name, streams=[typing], writer="w0", settings=QUICK) as writer:
            client = redis.asyncio.Redis.from_url(redis_url)
            incarnation = 2**62
            while not writer.statistics()["writer"]["lost"]:  # just after its start it would go on above that (9.24)
                incarnation += 1
                await client.publish(bus_name, Name("w0", incarnation).format())
                await asyncio.sleep(0.05)
            await client.aclose()

    run(main())


@pytest.mark.servers
@pytest.mark.parametrize("where", ["deployment", "on_postgres"])
def test_9_17_a_reader_that_is_above_the_sequence_goes_back_to_what_is_saved(
    request: pytest.FixtureRequest, where: str
) -> None:
    """A line that nothing tells from the writer's own: it moves the reader, but not what is saved."""
    deployed: Deployment = request.getfixturevalue(where)

    async def main() -> None:
        seen: set[int] = set()
        async with deployed.bus(writer="w0") as writer, deployed.bus(reader="r") as reader:

            @reader.subscribe(orders)
            async def handle(batch: Any) -> None:
                seen.update(batch.tokens)

            await reader.wait_for(orders, "w0", await write(writer, 3))
            assert writer.writing is not None
            opening = f"SERVER x {writer.writing.epoch}\nNAME w0 {writer.writing.incarnation}\n"
            await say(deployed, opening + f"POSITION orders w0 0 {2**62}")
            await until(lambda: reader.reading.saver.refused)
            token = await write(writer, 3)
            await until(lambda: seen == set(range(1, token + 1)), timeout=20)
            await reader.wait_for(orders, "w0", token)
            assert not reader.reading.stopped
        store = open_store(deployed.store, Registry(STREAMS))
        await store.open()
        assert (await store.load_reader("r")).positions["orders", "w0"] == token
        await store.close()

    run(main(), timeout=60)


@pytest.mark.servers
def test_9_17_a_poisoned_saved_position_stops_the_reader_with_what_to_run(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w0") as writer:
            async with deployment.bus(reader="r") as reader:
                reader.subscribe(orders)(lambda batch: None)
                await reader.wait_for(orders, "w0", await write(writer, 3))
            path = deployment.store.removeprefix("sqlite:///")
            with contextlib.closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("UPDATE busrep_readers SET position = ? WHERE writer = 'w0'", (2**63 - 1,))
            async with deployment.bus(reader="r") as reader:
                reader.subscribe(orders)(lambda batch: None)
                await until(lambda: ("orders", "w0") in reader.reading.stopped)
                with pytest.raises(PositionsAheadOfTable, match="busrep db restored"):
                    await reader.wait_for(orders, "w0", await write(writer))

    run(main())
