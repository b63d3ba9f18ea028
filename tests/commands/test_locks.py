"""Waiting for a released lock, and for a remote server that is back; USER_IP. In one process, and over two."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from busrep import ConfigError, LockReleased, RemoteServerUp, Unavailable
from busrep.commands import remote_servers
from busrep.commands.locks import Locks
from busrep.commands.news import Waiters
from busrep.commands.remote_servers import RemoteServers
from busrep.core.application_commands import UserIp
from busrep.errors import Closed
from busrep.testing import MemoryRedis
from tests.commands.commands_child import Child
from tests.commands.test_presence import Lossy, bus_of, virtually
from tests.stores.store_conformance import sync

HOUR = 3600.0


class Free:
    """A lock in this process's memory."""

    def __init__(self) -> None:
        self.holder: object = None
        self.tries = 0

    def take(self) -> object:
        self.tries += 1
        if self.holder is not None:
            return None
        self.holder = object()
        return self.holder

    def give_back(self, held: object) -> None:
        assert held is self.holder
        self.holder = None


async def until_waiting(locks: Locks | RemoteServers, count: int) -> None:
    while locks.waiting < count:
        await asyncio.sleep(0.01)


# -- waiters --------------------------------------------------------------------------------------------------


@sync
async def test_waiters_leave_nothing_behind_and_are_bounded() -> None:
    waiters = Waiters[str](2)
    assert not await waiters.wait("a", 0.001)
    tasks = [asyncio.create_task(waiters.wait(key, HOUR)) for key in ("a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(ConfigError, match="2 wait already"):
        await waiters.wait("a", 1)
    waiters.wake("nobody")
    waiters.wake("a")
    assert await tasks[0]
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert waiters.count == 0
    tasks.clear()
    gc.collect()
    assert not waiters.events


# -- locks ----------------------------------------------------------------------------------------------------


@virtually
async def test_a_release_wakes_all_who_wait_for_that_lock_and_nobody_else() -> None:
    server = MemoryRedis()
    async with bus_of(server) as one, bus_of(server) as two:
        here, there = Locks(one, "p1"), Locks(two)
        await asyncio.sleep(1)
        waits = [asyncio.create_task(locks.wait("room", "!a", HOUR)) for locks in (here, there, there)]
        others = [asyncio.create_task(there.wait(*lock, 60)) for lock in (("room", "!b"), ("user", "!a"))]
        await asyncio.sleep(1)
        await here.released("room", "!a")
        assert await asyncio.gather(*waits) == [True, True, True]
        assert await asyncio.gather(*others) == [False, False]
        assert (server.published.count(("shop", b'LOCK_RELEASED ["p1","room","!a"]'))) == 1
        assert there.waiting == 0


@virtually
async def test_a_lock_is_held_by_one_at_a_time() -> None:
    server, lock, inside = MemoryRedis(), Free(), list[int]()
    async with bus_of(server) as one, bus_of(server) as two:
        all_locks = [Locks(one), Locks(two)]
        await asyncio.sleep(1)
        begun = asyncio.get_running_loop().time()

        async def work(number: int) -> None:
            locks = all_locks[number % 2]
            async with locks.acquire("room", "!a", lock.take, release=lock.give_back, poll=HOUR) as held:
                assert held is lock.holder
                inside.append(number)
                await asyncio.sleep(1)

        await asyncio.gather(*(work(number) for number in range(10)))
        assert sorted(inside) == list(range(10))
        assert asyncio.get_running_loop().time() - begun < 20, "each was woken, none had to poll"


@virtually
async def test_a_lost_release_delays_and_does_not_block() -> None:
    server, lock = Lossy(), Free()
    async with bus_of(server) as one, bus_of(server) as two:
        here, there = Locks(one), Locks(two)
        await asyncio.sleep(1)
        server.lose = b"LOCK_RELEASED"
        clock = asyncio.get_running_loop().time
        got = []

        async def second() -> None:
            async with there.acquire("room", "!a", lock.take, release=lock.give_back, poll=10):
                got.append(clock())

        async with here.acquire("room", "!a", lock.take, release=lock.give_back):
            task = asyncio.create_task(second())
            await asyncio.sleep(100)
            assert 10 <= lock.tries <= 22, "the pause is 5 to 10 s, and then it is tried again"
        released = clock()
        await task
        assert got[0] - released <= 10


@virtually
async def test_a_release_while_it_is_tried_is_not_missed() -> None:
    """Tried, freed, and only then waited for: who began to listen after the try would wait for the poll."""
    async with bus_of(MemoryRedis()) as bus:
        locks, tries = Locks(bus), list[bool]()
        await asyncio.sleep(1)
        begun = asyncio.get_running_loop().time()

        async def try_acquire() -> bool:
            tries.append(bool(tries))
            if len(tries) == 1:
                await locks.released("room", "!a")
                await asyncio.sleep(1)  # its answer, "no", is late
            return tries[-1]

        async with locks.acquire("room", "!a", try_acquire, poll=HOUR) as held:
            assert held is True
        assert asyncio.get_running_loop().time() - begun < 5


@virtually
async def test_a_reconnect_wakes_for_the_release_may_have_passed_meanwhile() -> None:
    server = Lossy()
    async with bus_of(server) as bus:
        locks = Locks(bus)
        await asyncio.sleep(1)
        waiting = asyncio.create_task(locks.wait("room", "!a", HOUR))
        await asyncio.sleep(1)
        server.cut()
        assert await waiting
        assert asyncio.get_running_loop().time() < 1_010


@virtually
async def test_a_lock_that_stays_taken_ends_in_a_timeout() -> None:
    async with bus_of(MemoryRedis()) as bus:
        locks, lock = Locks(bus), Free()
        lock.take()
        for timeout in (0, 25.0):
            with pytest.raises(TimeoutError, match="'room' of '!a' was not free within"):
                async with locks.acquire("room", "!a", lock.take, timeout=timeout):
                    pytest.fail("nobody released it")
        assert lock.tries >= 4
        assert locks.waiting == 0
        with pytest.raises(ConfigError, match="poll"):
            async with locks.acquire("room", "!a", lock.take, poll=0):
                pytest.fail("unreachable")


@virtually
async def test_what_fails_leaves_the_lock_free_and_is_told() -> None:
    server = MemoryRedis()
    async with bus_of(server) as bus:
        locks, lock = Locks(bus), Free()

        def told() -> int:
            return sum(data.startswith(b"LOCK_RELEASED") for _, data in server.published)

        def broken() -> bool:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            async with locks.acquire("room", "!a", broken):
                pytest.fail("it was not taken")
        with pytest.raises(KeyError):
            async with locks.acquire("room", "!a", lock.take, release=lock.give_back):
                raise KeyError
        assert lock.holder is None
        await asyncio.sleep(1)
        assert told() == 1, "only what was taken is released"

        async def fail(_: object) -> None:
            raise OSError("release")

        with pytest.raises(OSError, match="release"):
            async with locks.acquire("room", "!a", lock.take, release=fail):
                pass
        await asyncio.sleep(1)
        assert told() == 2

        def fail_at_once(_: object) -> None:
            raise OSError("release")

        with pytest.raises(OSError, match="release"):
            async with locks.acquire("room", "!a", lambda: True, release=fail_at_once):
                pass
        await asyncio.sleep(1)
        assert told() == 3

        async def hold() -> None:
            async with locks.acquire("room", "!b", lambda: True, release=lambda _: gone.set()):
                await asyncio.Event().wait()

        gone = asyncio.Event()
        task = asyncio.create_task(hold())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        assert gone.is_set()
        assert locks.waiting == 0


@virtually
async def test_who_is_cancelled_while_it_is_tried_leaves_no_lock_behind() -> None:
    """The table has said yes, and its answer is on the way: nobody would ever release what nobody knows that he has."""
    async with bus_of(MemoryRedis()) as bus:
        locks, lock, asked, answer = Locks(bus), Free(), asyncio.Event(), asyncio.Event()

        async def try_acquire() -> object:
            held = lock.take()
            asked.set()
            await answer.wait()
            return held

        async def hold() -> None:
            async with locks.acquire("room", "!a", try_acquire, release=lock.give_back):
                pytest.fail("it was cancelled before")

        task = asyncio.create_task(hold())
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        waiting = asyncio.create_task(locks.wait("room", "!a", HOUR))
        await until_waiting(locks, 1)
        answer.set()
        assert await waiting, "and who waits is told"
        assert lock.holder is None


@virtually
async def test_a_try_that_got_nothing_after_its_cancellation_releases_nothing() -> None:
    server = MemoryRedis()
    async with bus_of(server) as bus:
        locks, asked, answer, done = Locks(bus), asyncio.Event(), asyncio.Event(), list[object]()

        async def try_acquire() -> bool:
            asked.set()
            await answer.wait()
            return False

        task = asyncio.create_task(locks.acquire("room", "!a", try_acquire, release=done.append).__aenter__())
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answer.set()
        await asyncio.sleep(1)
        assert done == []
        assert not any(data.startswith(b"LOCK_RELEASED") for _, data in server.published)


@virtually
async def test_a_try_that_fails_after_its_cancellation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with bus_of(MemoryRedis()) as bus:
        locks, asked, answer = Locks(bus), asyncio.Event(), asyncio.Event()

        async def try_acquire() -> bool:
            asked.set()
            await answer.wait()
            raise OSError("the table is gone")

        task = asyncio.create_task(locks.acquire("room", "!a", try_acquire, release=print).__aenter__())
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answer.set()
        await asyncio.sleep(1)
        told = [record for record in caplog.records if record.name.startswith("busrep")]
        assert [str(record.exc_info[1]) for record in told if record.exc_info] == ["the table is gone"]


@virtually
async def test_who_is_cancelled_while_it_releases_has_released() -> None:
    async with bus_of(MemoryRedis()) as bus:
        locks, lock, asked, answer = Locks(bus), Free(), asyncio.Event(), asyncio.Event()

        async def release(held: object) -> None:
            asked.set()
            await answer.wait()
            lock.give_back(held)

        async def hold() -> None:
            async with locks.acquire("room", "!a", lock.take, release=release):
                pass

        task = asyncio.create_task(hold())
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        waiting = asyncio.create_task(locks.wait("room", "!a", HOUR))
        await until_waiting(locks, 1)
        answer.set()
        assert await waiting
        assert lock.holder is None


@virtually
async def test_a_name_that_cannot_be_told_is_refused_before_the_lock_is_taken() -> None:
    async with bus_of(MemoryRedis()) as bus:
        with pytest.raises(ConfigError):
            Locks(bus, "\ud800")
        locks, lock = Locks(bus), Free()
        for name, key in (("\ud800", "a"), ("a", "\ud800")):
            with pytest.raises(ConfigError):
                async with locks.acquire(name, key, lock.take, release=lock.give_back):
                    pytest.fail("it cannot be told")
        assert lock.tries == 0


@virtually
async def test_waits_without_time_end_at_once() -> None:
    async with bus_of(MemoryRedis()) as bus:
        locks, servers = Locks(bus), RemoteServers(bus)
        before = asyncio.get_running_loop().time()
        for timeout in (0, -5.0):
            assert await locks.wait("room", "!a", timeout) is False
            assert await servers.wait("example.org", timeout) is False
            taken = Free()
            taken.take()
            with pytest.raises(TimeoutError):
                async with locks.acquire("room", "!a", taken.take, timeout=timeout):
                    pytest.fail("it is taken")
            assert taken.tries == 2, "once, all the same"
        assert asyncio.get_running_loop().time() - before < 0.1
        for poll in (0, -1, float("nan")):
            with pytest.raises(ConfigError, match="poll"):
                async with locks.acquire("room", "!a", Free().take, poll=poll):
                    pytest.fail("unreachable")


@virtually
async def test_a_lock_is_free_also_when_nobody_can_be_told() -> None:
    async with bus_of(MemoryRedis()) as bus:
        locks, lock = Locks(bus), Free()
        with mock.patch.object(bus, "send", side_effect=Unavailable("Redis", "too many wait")):
            async with locks.acquire("room", "!a", lock.take, release=lock.give_back):
                waiting = asyncio.create_task(locks.wait("room", "!a", HOUR))
                await until_waiting(locks, 1)
            assert lock.holder is None
            assert await waiting, "this process's own are woken all the same"
            with pytest.raises(Unavailable):
                await locks.released("room", "!a")
        with pytest.raises(ConfigError):
            await locks.released("room", "\ud800")


@virtually
async def test_nobody_waits_for_a_bus_that_closes() -> None:
    lock = Free()
    lock.take()
    async with bus_of(MemoryRedis()) as bus:
        locks, servers = Locks(bus), RemoteServers(bus)

        async def acquire() -> None:
            async with locks.acquire("room", "!a", lock.take):
                pytest.fail("nobody released it")

        tasks = [
            asyncio.create_task(work)
            for work in (acquire(), locks.wait("room", "!a", HOUR), servers.wait("example.org", HOUR))
        ]
        await until_waiting(locks, 2)
        await until_waiting(servers, 1)
    for task in tasks:
        with pytest.raises(Closed):
            await task
    with pytest.raises(Closed):
        await locks.wait("room", "!a", 1)


@pytest.mark.servers
@sync
async def test_a_table_lock_passes_from_process_to_process(redis_url: str, bus_name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "locks.db")
    async with Child.start("p1", redis_url, bus_name) as one, Child.start("p2", redis_url, bus_name) as two:
        for child in (one, two):
            await child.call("deeds.open_table", path)
        await one.call("deeds.hold", 600)
        waiting = two.begin("deeds.hold", 600)
        await two.until("tried", False)
        await one.call("deeds.let_go")
        await waiting  # ten minutes from its next try: it was woken
        await two.until("tried", True)
        await two.call("deeds.let_go")
        await two.until("let go")


@pytest.mark.servers
@sync
async def test_a_table_lock_excludes_over_two_processes(redis_url: str, bus_name: str, tmp_path: Path) -> None:
    path, counter = str(tmp_path / "locks.db"), tmp_path / "counter"
    counter.write_text("0")
    async with Child.start("p1", redis_url, bus_name) as one, Child.start("p2", redis_url, bus_name) as two:
        for child in (one, two):
            await child.call("deeds.open_table", path)
        counting = [child.begin("deeds.count_up", str(counter), 50) for child in (one, two)]
        await asyncio.gather(*counting)
    assert counter.read_text() == "100"


@pytest.mark.servers
@sync
async def test_the_lock_of_a_killed_holder_is_had_once_it_expired(
    redis_url: str, bus_name: str, tmp_path: Path
) -> None:
    """A killed process sends no LOCK_RELEASED: the poll finds what the expiry freed."""
    path = str(tmp_path / "locks.db")
    async with Child.start("p2", redis_url, bus_name) as two:
        await two.call("deeds.open_table", path)
        async with Child.start("p1", redis_url, bus_name) as one:
            await one.call("deeds.open_table", path)
            await one.call("deeds.hold", 600)
            waiting = two.begin("deeds.hold", 0.05)
            await two.until("tried", False)
            await one.kill()
        await two.until("tried", False)
        expire(path)
        await waiting


def expire(path: str) -> None:
    with sqlite3.connect(path, timeout=10) as db:
        db.execute("DELETE FROM locks")
    db.close()


# -- remote servers -------------------------------------------------------------------------------------------


@virtually
async def test_a_server_that_is_back_wakes_retries_everywhere_and_is_passed_on_once() -> None:
    server = Lossy()
    async with bus_of(server) as one, bus_of(server) as two:
        here, there = RemoteServers(one), RemoteServers(two)
        seen: list[tuple[str, str]] = []
        here.on_up()(lambda name: seen.append(("here", name)))
        there.on_up()(lambda name: seen.append(("there", name)))
        there.on_up("example.org")(lambda name: seen.append(("that one", name)))
        await asyncio.sleep(1)
        waits = [asyncio.create_task(servers.wait("example.org", HOUR)) for servers in (here, there, there)]
        other = asyncio.create_task(there.wait("example.com", 5))
        await asyncio.sleep(1)
        for _ in range(100):
            await here.up("example.org")
        assert await asyncio.gather(*waits) == [True, True, True]
        assert await other is False
        await there.up("example.org")  # it has heard: nothing is sent
        await asyncio.sleep(1)
        waiting = asyncio.create_task(there.wait("example.org", HOUR))
        await asyncio.sleep(1)
        await there.up("example.org")  # within the period: only this process's own are woken
        assert await waiting
        sent = [data for _, data in server.published if b"REMOTE" in data]
        assert sent == [b"REMOTE_SERVER_UP example.org"]
        assert seen == [("here", "example.org"), ("there", "example.org"), ("that one", "example.org")]
        await asyncio.sleep(10)
        await there.up("example.org")
        await asyncio.sleep(1)
        assert len(seen) == 6


@virtually
async def test_who_failed_again_within_the_period_is_woken_again() -> None:
    async with bus_of(MemoryRedis()) as one:
        servers, calls = RemoteServers(one), list[str]()
        servers.on_up()(calls.append)
        await asyncio.sleep(1)
        for _ in range(3):
            waiting = asyncio.create_task(servers.wait("example.org", 5))
            await until_waiting(servers, 1)
            await one.send(RemoteServerUp("example.org"))
            assert await waiting
        assert calls == ["example.org"]


@virtually
async def test_a_server_is_told_again_when_it_could_not_be() -> None:
    server = Lossy()
    async with bus_of(server) as bus:
        servers, calls = RemoteServers(bus), list[str]()
        servers.on_up()(calls.append)
        with mock.patch.object(bus, "send", side_effect=Unavailable("Redis", "too many wait")):
            with pytest.raises(Unavailable):
                await servers.up("example.org")
        assert calls == ["example.org"], "this process knows all the same"
        await servers.up("example.org")
        await asyncio.sleep(1)
        assert ("shop", b"REMOTE_SERVER_UP example.org") in server.published


@virtually
async def test_servers_handlers_may_fail_and_bad_input_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with bus_of(MemoryRedis()) as bus:
        with pytest.raises(ConfigError, match="period"):
            RemoteServers(bus, period=-1)
        servers, calls = RemoteServers(bus), list[str]()

        @servers.on_up()
        async def fail(_: str) -> None:
            raise ValueError

        servers.on_up()(calls.append)
        for bad in ("", "a b"):
            with pytest.raises(ConfigError):
                await servers.up(bad)
        await servers.up("example.org")
        assert calls == ["example.org"]
        assert "a handler of the remote server example.org failed" in caplog.text
        await asyncio.sleep(1)  # its own message has come back
        await asyncio.sleep(1)  # its own message has come back
        assert await servers.wait("example.org", 1) is False


@virtually
async def test_who_is_cancelled_keeps_the_news_from_no_handler() -> None:
    """It would not come again within the period."""
    async with bus_of(MemoryRedis()) as bus:
        servers, calls, begun, go_on = RemoteServers(bus), list[str](), asyncio.Event(), asyncio.Event()

        @servers.on_up()
        async def slow(_: str) -> None:
            begun.set()
            await go_on.wait()

        servers.on_up()(calls.append)
        task = asyncio.create_task(servers.up("example.org"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await asyncio.sleep(1)
        assert calls == ["example.org"]


@virtually
async def test_a_name_that_no_server_has_fills_no_memory() -> None:
    server = MemoryRedis()
    async with bus_of(server) as one:
        servers, calls = RemoteServers(one), list[str]()
        servers.on_up()(calls.append)
        for length in (256, 100_000):
            with pytest.raises(ConfigError, match="255"):
                RemoteServerUp("x" * length)
            server.publish("shop", b"REMOTE_SERVER_UP " + b"x" * length)
        await asyncio.sleep(1)
        assert one.statistics()["reader"]["parse_errors"] == 2
        assert calls == []
        assert servers.told.at == {}
        with pytest.raises(ConfigError, match="255"):
            await servers.up("x" * 256)
        await servers.up("x" * 255)
        assert len(calls) == 1


@virtually
async def test_the_servers_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_servers, "SERVERS", 2)
    async with bus_of(MemoryRedis()) as bus:
        servers, calls = RemoteServers(bus), list[str]()
        servers.on_up()(calls.append)
        for name in ("a", "b", "a", "c", "b", "a"):
            await servers.up(name)
        assert calls == ["a", "b", "c", "a"]
        assert len(servers.told.at) == len(servers.passed_on.at) == 2


@pytest.mark.servers
@sync
async def test_a_server_that_is_back_is_known_in_two_processes(redis_url: str, bus_name: str) -> None:
    async with Child.start("p1", redis_url, bus_name) as one, Child.start("p2", redis_url, bus_name) as two:
        waiting = two.begin("servers.wait", "example.org", 600)
        await one.call("servers.up", "example.org")
        await two.until("up", "example.org")
        await one.until("up", "example.org")
        # It may have begun to wait behind the first one: who waits is woken by any.
        while not waiting.done():
            await one.call("deeds.send_up", "example.org")
            await asyncio.wait([waiting], timeout=0.1)
        assert await waiting is True


# -- addresses of users ---------------------------------------------------------------------------------------


@pytest.mark.servers
@sync
async def test_addresses_of_users_pass_between_processes_on_their_own_channel(redis_url: str, bus_name: str) -> None:
    heard: list[Any] = []
    async with Child.start("p1", redis_url, bus_name) as one, Child.start("p2", redis_url, bus_name) as two:
        await one.call("deeds.user_ip", "@a", "token", "::1", "an agent, \N{SNOWMAN}\n", None, 5)
        await one.call("deeds.user_ip", "@b", "", "127.0.0.1", "", "PHONE", 6)
        heard += [await two.event(), await two.event()]
    assert heard == [["ip", "@a", "::1", None], ["ip", "@b", "127.0.0.1", "PHONE"]]


@virtually
async def test_addresses_of_users_are_not_on_the_main_channel() -> None:
    server, heard = MemoryRedis(), list[str]()
    async with bus_of(server) as one, bus_of(server) as two:
        two.on(UserIp)(lambda command: heard.append(command.user_id))
        two.on(LockReleased)(lambda command: heard.append(command.key))
        await asyncio.sleep(1)
        await one.send(UserIp("@a", "token", "::1", "agent", None, 5))
        await asyncio.sleep(1)
    assert heard == ["@a"]
    assert [channel for channel, data in server.published if data.startswith(b"USER_IP")] == ["shop/USER_IP"]
