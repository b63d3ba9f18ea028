"""Who is syncing where: two buses on a clock of their own, and real processes."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import attrs
import pytest
import redis.asyncio as aioredis

import busrep
from busrep import ConfigError, LockReleased, Unavailable, UserSync
from busrep.asyncio import messages as publisher_module
from busrep.commands.presence import (
    DEVICE_BYTES,
    MOST_WAITING,
    SLICE,
    SLICE_PAUSE,
    TOLD_AGAIN,
    Presence,
    PresenceChange,
)
from busrep.core.application_commands import ClearUserSync
from busrep.core.commands import Replicate
from busrep.core.fields import NAME_BYTES
from busrep.errors import Closed
from busrep.testing import MemoryRedis, virtual
from busrep.testing.pair import QUICK
from tests.commands.commands_child import Child
from tests.stores.store_conformance import sync

# Hours pass here: a beat every 0.1 s of them would be all that the machine does.
CALM = attrs.evolve(QUICK, heartbeat=10.0)


def virtually(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """An async test in which hours pass at once."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(24 * 3600):
                await test(*args, **kwargs)

        virtual.run(bounded())

    return run


class Lossy(MemoryRedis):
    """Loses the lines that hold ``lose``."""

    lose: bytes | None = None

    def publish(self, channel: str, data: bytes) -> int:
        if self.lose is not None and self.lose in data:
            self.published.append((channel, b"LOST " + data))
            return 0
        return super().publish(channel, data)

    def lines(self, name: bytes = b"") -> list[bytes]:
        return [data for _, data in self.published if b"USER_SYNC" in data and name in data]


@asynccontextmanager
async def bus_of(server: MemoryRedis) -> AsyncIterator[busrep.Bus]:
    async with busrep.connect(server.client(), name="shop", settings=CALM) as bus:
        yield bus


def watched(presence: Presence) -> list[tuple[str, str, bool]]:
    """The changes that it tells, in order."""
    seen: list[tuple[str, str, bool]] = []
    presence.on_change(lambda change: seen.append((change.user, change.instance, change.is_syncing)))
    return seen


def who(presence: Presence) -> dict[str, list[str]]:
    return {user: sorted(instances) for user, instances in presence.syncing().items()}


@virtually
async def test_a_user_syncs_from_the_first_start_to_the_last_stop() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        mine, theirs = watched(here), watched(there)
        await asyncio.sleep(5)
        before = int(time.time() * 1000)
        for device in ("PHONE", "PHONE", None):
            await here.start("@a", device)
        await asyncio.sleep(1)
        await there.start("@a")
        await asyncio.sleep(1)
        assert who(here) == who(there) == {"@a": ["p1", "p2"]}
        assert before <= there.syncing()["@a"]["p1"] <= time.time() * 1000
        await here.stop("@a", "PHONE")
        await here.stop("@a", "PHONE")
        await asyncio.sleep(1)
        assert who(there) == {"@a": ["p1", "p2"]}
        await here.stop("@a")
        await asyncio.sleep(1)
        assert who(here) == who(there) == {"@a": ["p2"]}
        assert mine == theirs == [("@a", "p1", True), ("@a", "p2", True), ("@a", "p1", False)]
        told = server.lines(b" p1 ")
        assert [line.split()[3:5] for line in told if not line.startswith(b"CLEAR")][:2] == [
            [b"PHONE", b"start"],
            [b"None", b"start"],
        ]


@virtually
async def test_bad_input_is_refused() -> None:
    async with bus_of(MemoryRedis()) as bus:
        for bad in ({"refresh": 0}, {"refresh": -1}, {"refresh": 200.0}, {"timeout": 0}):
            with pytest.raises(ConfigError, match="twice"):
                Presence(bus, "p1", **bad)
        with pytest.raises(ConfigError):
            Presence(bus, "p 1")
        presence = Presence(bus, "p1", users=1)
        bad_names: list[Any] = [("", None), ("a b", None), (7, None), (None, None)]
        bad_names += [("@a", device) for device in ("None", "", 7)]
        for user, device in bad_names:
            with pytest.raises(ConfigError):
                await presence.start(user, device)
        with pytest.raises(ConfigError, match="did not start"):
            await presence.stop("@a")
        await presence.start("@a")
        with pytest.raises(ConfigError, match="users="):
            await presence.start("@b")
        with pytest.raises(ConfigError, match="users="):
            await presence.start("@a", "PHONE")
        await presence.start("@a")
        assert presence.statistics() == {"own": 1, "others": {}, "refused": 0}


@pytest.mark.parametrize("at_once", [True, False])
@virtually
async def test_what_a_crashed_predecessor_left_ends_before_anything_begins(at_once: bool) -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two:
        there = Presence(two, "p2")
        await asyncio.sleep(5)
        await one.send(UserSync("p1", "@ghost", None, True, 1))
        await asyncio.sleep(1)
        assert who(there) == {"@ghost": ["p1"]}
        here = Presence(one, "p1")
        if at_once:
            await here.start("@a")
        else:
            await asyncio.sleep(1)
            assert who(there) == {}
            await here.start("@a")
        await asyncio.sleep(1)
        assert who(there) == {"@a": ["p1"]}
        told = [line for line in server.lines(b"p1") if b"@ghost" not in line]
        assert told[0] == b"CLEAR_USER_SYNC p1"
        assert b"@a" in told[1]
        assert told.count(b"CLEAR_USER_SYNC p1") == 1


@virtually
async def test_a_process_that_ends_takes_its_users_along() -> None:
    server = Lossy()
    async with bus_of(server) as two:
        there = Presence(two, "p2")
        async with bus_of(server) as one:
            here = Presence(one, "p1")
            await asyncio.sleep(5)
            await here.start("@a")
            await asyncio.sleep(1)
            assert who(there) == {"@a": ["p1"]}
        await asyncio.sleep(1)
        assert who(there) == {}
        assert server.lines(b"p1")[-1] == b"CLEAR_USER_SYNC p1"
        with pytest.raises(Closed):
            await here.start("@b")
        with pytest.raises(Closed):
            await here.stop("@a")
        await asyncio.sleep(1000)
        assert server.lines(b"p1")[-1] == b"CLEAR_USER_SYNC p1", "its timer ended with the bus"


@virtually
async def test_who_is_not_heard_is_forgotten_and_who_is_is_not() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two, bus_of(server) as crashing:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        await here.start("@a")
        await asyncio.sleep(5)
        seen = watched(there)
        await crashing.send(UserSync("p3", "@b", None, True, 7))
        await crashing.send(UserSync("p3", "@b", "PHONE", True, 9))
        await asyncio.sleep(299)
        assert who(there) == {"@a": ["p1"], "@b": ["p3"]}
        assert there.syncing()["@b"] == {"p3": 9}
        await asyncio.sleep(35)
        assert who(there) == who(here) == {"@a": ["p1"]}
        await asyncio.sleep(7200)
        assert who(there) == {"@a": ["p1"]}
        assert seen == [("@b", "p3", True), ("@b", "p3", False)]


@virtually
async def test_a_lost_end_is_found_out_while_the_process_lives_on() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        await here.start("@a")
        await here.start("@b")
        await asyncio.sleep(5)
        server.lose = b" end "
        await here.stop("@a")
        await asyncio.sleep(1)
        server.lose = None
        assert who(there) == {"@a": ["p1"], "@b": ["p1"]}
        await asyncio.sleep(335)
        assert who(there) == {"@b": ["p1"]}


@virtually
async def test_a_lost_start_is_told_again() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        await asyncio.sleep(5)
        server.lose = b" start "
        await here.start("@a")
        await asyncio.sleep(1)
        server.lose = None
        assert who(there) == {}
        await asyncio.sleep(70)
        assert who(there) == {"@a": ["p1"]}


@virtually
async def test_all_is_told_again_after_a_reconnect_that_nobody_asks_after() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        await asyncio.sleep(5)
        server.lose = b" start "
        await here.start("@a")
        await asyncio.sleep(1)
        server.lose = b"REPLICATE"  # a server may not send one its own lines back
        server.cut()
        await asyncio.sleep(5)
        assert who(there) == {"@a": ["p1"]}


@virtually
async def test_many_who_ask_are_answered_together() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as asking:
        here = Presence(one, "p1")
        await here.start("@a")
        await asyncio.sleep(5)
        before = len(server.lines(b"@a"))
        for _ in range(100):
            await asking.send(Replicate())
            await asyncio.sleep(0.01)
        await asyncio.sleep(5)
        assert 1 <= len(server.lines(b"@a")) - before <= 4


@virtually
async def test_all_is_told_again_after_a_reconnect_and_to_a_newcomer() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two, bus_of(server) as three:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        await asyncio.sleep(5)
        server.lose = b" start "
        await here.start("@a")
        await asyncio.sleep(1)
        server.lose = None
        server.cut()
        await asyncio.sleep(5)
        assert who(there) == {"@a": ["p1"]}
        newcomer = Presence(three, "p3")
        three.publisher.ask_for_positions()  # as a bus does when it connects
        await asyncio.sleep(5)
        assert who(newcomer) == {"@a": ["p1"]}


@virtually
async def test_nobody_is_forgotten_for_what_the_own_link_did_not_bring() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two:
        there = Presence(two, "p2")
        await asyncio.sleep(5)
        await one.send(UserSync("far", "@a", None, True, 1))
        await asyncio.sleep(298)
        server.cut()
        await asyncio.sleep(55)
        assert who(there) == {"@a": ["far"]}
        await asyncio.sleep(40)
        assert who(there) == {}


@virtually
async def test_a_link_that_comes_and_goes_keeps_no_crashed_process_alive() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two, bus_of(server) as three:
        there, lives = Presence(two, "p2"), Presence(three, "p3")
        await lives.start("@b")
        await asyncio.sleep(5)
        await one.send(UserSync("crashed", "@a", None, True, 1))
        await asyncio.sleep(1)
        assert who(there) == {"@a": ["crashed"], "@b": ["p3"]}
        seen = watched(there)
        for _ in range(25):
            await asyncio.sleep(30)
            server.cut()
        assert who(there) == {"@b": ["p3"]}
        assert seen == [("@a", "crashed", False)]


@virtually
async def test_a_predecessor_that_ends_late_does_not_make_users_vanish() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two, bus_of(server) as old:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        await here.start("@a")
        await asyncio.sleep(5)
        await old.send(ClearUserSync("p1"))
        await asyncio.sleep(3)
        assert who(there) == {"@a": ["p1"]}
        assert who(here) == {"@a": ["p1"]}


@virtually
async def test_what_names_on_the_wire_cost_is_bounded() -> None:
    server = Lossy()
    size = DEVICE_BYTES + NAME_BYTES
    async with bus_of(server) as one, bus_of(server) as two:
        there = Presence(two, "p2", max_bytes=10 * size)
        await asyncio.sleep(5)
        names = [f"@{number:0>{NAME_BYTES - 1}}" for number in range(16)]
        for number, name in enumerate(names):
            await one.send(UserSync("ab"[number % 2], name, None, True, 1))
        await asyncio.sleep(1)
        assert there.statistics() == {"own": 0, "others": {"a": 5, "b": 5}, "refused": 6}
        for name in names[:2]:  # one of each ends, and gives its room to another
            for instance in "ab":
                await one.send(UserSync(instance, name, None, False, 1))
        for name in names[10:]:
            await one.send(UserSync("c", name, None, True, 1))
        await asyncio.sleep(1)
        assert there.statistics() == {"own": 0, "others": {"a": 4, "b": 4, "c": 2}, "refused": 10}
        await one.send(ClearUserSync("a"))
        await one.send(UserSync("b", "é" * (NAME_BYTES // 2), None, True, 1))
        await asyncio.sleep(1)
        assert there.statistics() == {"own": 0, "others": {"b": 5, "c": 2}, "refused": 10}


@virtually
async def test_commands_that_wait_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Lossy()
    async with bus_of(server) as bus:
        line = LockReleased("p1", "room", "x" * 1_000)
        monkeypatch.setattr(publisher_module, "COMMAND_QUEUE_BYTES", 3 * len(line.format()))
        for _ in range(3):  # what has been published counts no more
            for _ in range(3):
                await bus.send(line)
            with pytest.raises(Unavailable, match="3 commands are waiting"):
                await bus.send(line)
            await asyncio.sleep(5)
            assert bus.statistics()["link"]["commands_waiting"] == 0


@virtually
async def test_what_is_on_the_wire_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two:
        there = Presence(two, "p2", users=2, instances=2)
        await asyncio.sleep(5)
        for instance in ("a", "b", "c", "d"):
            for user in ("@1", "@2", "@3"):
                await one.send(UserSync(instance, user, None, True, 1))
        await asyncio.sleep(1)
        assert there.statistics() == {"own": 0, "others": {"a": 2, "b": 2}, "refused": 8}
        assert caplog.text.count("no room for presence") == 1
        await one.send(ClearUserSync("a"))
        await one.send(ClearUserSync("nobody"))
        await one.send(UserSync("b", "@nobody", None, False, 1))
        await one.send(UserSync("nobody", "@1", None, False, 1))
        await one.send(UserSync("d", "@1", None, True, 1))
        await asyncio.sleep(1)
        assert there.statistics()["others"] == {"b": 2, "d": 1}


@virtually
async def test_a_handler_that_fails_keeps_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async with bus_of(MemoryRedis()) as bus:
        presence, seen = Presence(bus, "p1"), list[PresenceChange]()

        @presence.on_change
        def fail(_: PresenceChange) -> None:
            raise ValueError

        @presence.on_change
        async def see(change: PresenceChange) -> None:
            seen.append(change)

        await presence.start("@a")
        await presence.stop("@a")
        assert [(change.user, change.is_syncing) for change in seen] == [("@a", True), ("@a", False)]
        assert caplog.text.count("a handler of presence failed") == 2


@virtually
async def test_what_could_not_be_sent_is_told_later() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        with mock.patch.object(one, "send", side_effect=Unavailable("Redis", "too many wait")):
            await asyncio.sleep(5)
            await here.start("@a")
            server.cut()
            await asyncio.sleep(5)
        assert who(here) == {"@a": ["p1"]}
        assert who(there) == {}
        await asyncio.sleep(70)
        assert who(there) == {"@a": ["p1"]}
        assert server.lines(b"p1")[0] == b"CLEAR_USER_SYNC p1"


@virtually
async def test_many_users_are_told_again_in_slices() -> None:
    server, count = Lossy(), 2 * SLICE + 10
    async with bus_of(server) as one, bus_of(server) as two:
        here = Presence(one, "p1")
        await asyncio.sleep(5)
        server.lose = b" start "
        for number in range(count):
            await here.start(f"@{number}")
        await asyncio.sleep(1)
        server.lose = None
        there, at = Presence(two, "p2"), list[float]()
        two.on(UserSync)(lambda _: at.append(asyncio.get_running_loop().time()))
        server.cut()
        await asyncio.sleep(0.2)
        for number in range(count - 5, count):  # ends while it is being told: it must not begin again
            await here.stop(f"@{number}")
        await asyncio.sleep(5)
        assert len(there.syncing()) == count - 5
        assert at[-1] - at[0] >= 2 * SLICE_PAUSE, "with room for others between"


@virtually
async def test_a_flood_of_questions_costs_so_many_lines_a_second() -> None:
    server = Lossy()
    async with bus_of(server) as one:
        here = Presence(one, "p1", refresh=1000.0, timeout=3000.0)
        for number in range(4000):
            await here.start(f"@{number}")
            if number % 1000 == 0:
                await asyncio.sleep(1)
        await asyncio.sleep(10)
        server.published.clear()
        for _ in range(200):
            server.publish("shop", b"REPLICATE")
            await asyncio.sleep(0.2)
        assert len(server.lines(b"start")) <= 4000 + 40 * TOLD_AGAIN
        await asyncio.sleep(10)
        server.published.clear()
        server.publish("shop", b"REPLICATE")
        await asyncio.sleep(2)
        assert len(server.lines(b"start")) == 4000, "after a pause all are told at once"


@virtually
async def test_a_handler_that_hangs_keeps_nobody_from_being_told() -> None:
    """What it is told of may be the end of a crashed process's users, in the middle of this process's own work."""
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two, bus_of(server) as crashing:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        hanging = asyncio.Event()

        @here.on_change
        async def hang(change: PresenceChange) -> None:
            if not change.is_syncing:
                hanging.set()
                await asyncio.Event().wait()

        await here.start("@a")
        await asyncio.sleep(5)
        await crashing.send(UserSync("p3", "@b", None, True, 7))
        await asyncio.sleep(1200)
        assert hanging.is_set()
        assert who(here) == {"@a": ["p1"]}
        assert who(there) == {"@a": ["p1"]}


@pytest.mark.parametrize("what", ["start", "stop"])
@virtually
async def test_who_is_cancelled_in_a_handler_leaves_no_user_behind(what: str) -> None:
    """A start that was cancelled has no stop."""
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        begun, go_on, seen = asyncio.Event(), asyncio.Event(), list[bool]()
        if what == "stop":
            await here.start("@a")

        @here.on_change
        async def slow(_: PresenceChange) -> None:
            begun.set()
            await go_on.wait()

        here.on_change(lambda change: seen.append(change.is_syncing))
        await asyncio.sleep(1)
        task = asyncio.create_task(getattr(here, what)("@a"))
        await begun.wait()
        task.cancel()
        await asyncio.wait([task], timeout=1)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(1)
        assert who(here) == who(there) == {}
        assert seen == ([True, False] if what == "start" else [False]), "and the other handlers know"
        assert here.statistics()["own"] == 0


@virtually
async def test_a_start_that_somebody_else_stopped_is_cancelled_all_the_same() -> None:
    async with bus_of(MemoryRedis()) as bus:
        presence, begun = Presence(bus, "p1"), asyncio.Event()

        @presence.on_change
        async def slow(change: PresenceChange) -> None:
            if change.is_syncing:
                begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(presence.start("@a"))
        await begun.wait()
        await presence.stop("@a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert presence.statistics()["own"] == 0


@virtually
async def test_nothing_piles_up_while_redis_does_not_take_it() -> None:
    """What is told again and again would keep others' commands out."""
    server, count = Lossy(), 2 * SLICE + 10
    async with bus_of(server) as one, bus_of(server) as two:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        for number in range(count):
            await here.start(f"@{number}")
        await asyncio.sleep(5)
        with mock.patch.object(one.link, "publish", side_effect=Unavailable("Redis", "away")):
            await asyncio.sleep(700)
            assert one.statistics()["link"]["commands_waiting"] <= 2 * SLICE
            assert who(there) == {}
            for _ in range(3 * count):
                await here.start("@often")
                await here.stop("@often")
            assert one.statistics()["link"]["commands_waiting"] == MOST_WAITING
            await one.send(LockReleased("p1", "others", "news"))
        await asyncio.sleep(70)
        assert len(there.syncing()) == count


@virtually
async def test_long_names_do_not_fill_memory() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two:
        here, there = Presence(one, "p1"), Presence(two, "p2")
        await asyncio.sleep(5)
        long = "x" * (NAME_BYTES + 1)
        for user, device in ((long, None), ("@a", long)):
            with pytest.raises(ConfigError, match="longer than"):
                await here.start(user, device)
        for names in (f"p3 {long} None", f"p3 @a {long}", f"{long} @a None"):
            server.publish("shop", f"USER_SYNC {names} start 1".encode())
        await asyncio.sleep(1)
        assert two.statistics()["reader"]["parse_errors"] == 3
        assert there.statistics() == {"own": 0, "others": {}, "refused": 0}
        with pytest.raises(ConfigError, match="longer than"):
            Presence(one, long)
        await here.start(long[1:], long[1:])
        await asyncio.sleep(1)
        assert who(there) == {long[1:]: ["p1"]}


# -- real processes -------------------------------------------------------------------------------------------

FAST = {"refresh": 0.2, "timeout": 2.0}


@pytest.mark.servers
@sync
async def test_two_processes_know_of_each_other_until_one_crashes(redis_url: str, bus_name: str) -> None:
    async with Child.start("p2", redis_url, bus_name, presence=FAST) as there:
        async with Child.start("p1", redis_url, bus_name, presence=FAST) as here:
            await here.call("presence.start", "@a", "PHONE")
            await there.until("sync", "@a", "p1", True)
            await here.call("presence.start", "@b")
            await there.until("sync", "@b", "p1", True)
            await here.call("presence.stop", "@b")
            await there.until("sync", "@b", "p1", False)
            async with aioredis.Redis.from_url(redis_url) as admin:
                await admin.client_kill_filter(_type="pubsub")
                await admin.client_kill_filter(_type="normal", skipme=True)
            await here.call("presence.start", "@c")
            await there.until("sync", "@c", "p1", True)
            await here.kill()
        await there.until("sync", "@c", "p1", False)
        assert await there.call("presence.syncing") == {}


@pytest.mark.servers
@sync
async def test_a_successor_clears_what_a_killed_process_left(redis_url: str, bus_name: str) -> None:
    slow = {"refresh": 60.0, "timeout": 300.0}  # only CLEAR_USER_SYNC can end it in time
    async with Child.start("p2", redis_url, bus_name, presence=slow) as there:
        async with Child.start("p1", redis_url, bus_name, presence=slow) as killed:
            await killed.call("presence.start", "@a")
            await there.until("sync", "@a", "p1", True)
            await killed.kill()
        async with Child.start("p1", redis_url, bus_name, presence=slow) as successor:
            await there.until("sync", "@a", "p1", False)
            await successor.call("presence.start", "@b")
            await there.until("sync", "@b", "p1", True)
            await successor.end()
            await there.until("sync", "@b", "p1", False)
