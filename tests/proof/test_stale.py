"""The fault test of the caches, short; its oracle and its judge, on made-up figures; the links that lose messages."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import redis.asyncio as aioredis

import busrep
from busrep.caches.cache import Invalidation, invalidations
from busrep.errors import ConfigError, MissingExtra
from busrep.streams import Registry
from busrep.testing.links import FaultyLink
from busrep.testing.servers import RedisServer
from tests import ROOT
from tests.proof.soak.children import came_true
from tests.proof.stale import memory as oracle
from tests.proof.stale.__main__ import text_of
from tests.proof.stale.faults import FAULTS
from tests.proof.stale.lossy import LossyLink, reply_end
from tests.proof.stale.memory import NANO, VERSIONS, Memory, Shape, Stale, Sum
from tests.proof.stale.ordinary import EVERYTHING, Ordinary, OrdinaryCache
from tests.proof.stale.reads import Reads, draw
from tests.proof.stale.run import Options, Run, judge
from tests.proof.stale.task import BUSREP, CAREFUL, KEYS, LIFE_BLOCKS, PUBSUB, ROLES, WAYS, bound_of, settings_of
from tests.shop import QUICK, opened_store

# -- the oracle -----------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    """Of three keys, with a bound of two seconds."""
    return Memory.create(Shape(str(tmp_path / "memory"), 3, 2.0))


@pytest.mark.parametrize(
    ("began", "version", "stale"),
    [
        (9.0, 0, None),  # before version 1 was committed
        (10.0, 0, None),
        (11.5, 0, None),  # replaced, within the bound
        (12.0, 0, None),
        (12.1, 0, 2.1),
        (12.1, 1, None),
        (23.0, 1, 3.0),
        (23.0, 2, 3.0),  # nobody noted 2, but 3 came behind it
        (99.0, 3, None),  # the newest
    ],
)
def test_a_read_is_stale_when_it_was_replaced_before_the_bound(
    memory: Memory, began: float, version: int, stale: float | None
) -> None:
    memory.note(1, 1, 10 * NANO)
    memory.note(1, 3, 20 * NANO)
    tally = memory.tally(0)
    if stale is None:
        tally.judge(1, version, int(began * NANO))
    else:
        with pytest.raises(Stale, match=f"key 1: version {version} was returned {stale:.3f} s after") as caught:
            tally.judge(1, version, int(began * NANO))
        assert caught.value.age == pytest.approx(stale)
    total = Sum()
    total.add(tally)
    assert (total.reads, total.stale, sum(total.ages)) == (1, int(stale is not None), 1)


def test_what_is_noted_first_stands_and_holes_are_filled(memory: Memory) -> None:
    memory.note(0, 2, 200)
    memory.note(0, 2, 300)
    memory.note(0, 1, 400)  # late: 2 says that 1 was committed before it
    memory.note(0, 4, 500)
    assert list(memory.times[:6]) == [1, 200, 200, 500, 500, 0]
    assert [memory.latest(key) for key in range(3)] == [4, 0, 0]
    with pytest.raises(ConfigError, match="make the run shorter"):
        memory.note(0, VERSIONS - 1, 600)


def test_counters_are_everybody_s_and_outlive_who_counts(memory: Memory) -> None:
    memory.note(2, 1, NANO)
    tally = Memory(memory.shape).tally(7)
    tally.judge(2, 1, 5 * NANO)
    tally.judge(2, 0, int(1.01 * NANO))
    tally.loaded()
    tally.failed()
    with contextlib.suppress(Stale):
        tally.judge(2, 0, 100 * NANO)
    total = Sum()
    for block in range(10):
        total.add(memory.tally(block))
    assert (total.reads, total.loads, total.failed, total.stale, total.oldest) == (3, 1, 1, 1, 99 * NANO)
    assert total.ages == [1, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    with pytest.raises(ConfigError, match="started too often"):
        memory.tally(oracle.BLOCKS)


def test_a_stale_read_is_counted_and_described(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    memory.note(0, 1, 1)
    asked = []

    async def old(key: int) -> int:
        asked.append(key)
        if len(asked) == 3:
            reads.ending = True
        return 0

    async def fresh(key: int) -> int:
        return memory.latest(key)

    reads = Reads(memory, 20, asyncio.sleep, lambda: "what it thought")
    keys = draw_of_one_key()
    asyncio.run(reads.lane({BUSREP: old, PUBSUB: fresh}, 0, keys))
    sums = [Sum(), Sum()]
    for total, block in zip(sums, range(2), strict=True):
        total.add(memory.tally(block))
    assert [(total.reads, total.stale) for total in sums] == [(3, 3), (3, 0)]
    assert caplog.text.count("key 0: version 0 was returned") == 3
    assert "what it thought" in caplog.text
    behind = asyncio.run(reads.entries_behind({BUSREP: old, PUBSUB: fresh}, [1, 0, 0], 0))
    assert behind == {BUSREP: 1, PUBSUB: 0}


def draw_of_one_key() -> random.Random:
    """Dice that always fall on key 0."""

    class Loaded(random.Random):
        def choices(self, population: Any, weights: Any = None, *, cum_weights: Any = None, k: int = 1) -> list[Any]:
            return [population[0]] * k

    return Loaded()


def test_keys_are_drawn_with_skew() -> None:
    keys = draw(random.Random(1), 20_000)
    assert 0.03 < keys.count(0) / len(keys) < 0.15
    assert len(set(keys)) > KEYS * 0.9
    assert keys == draw(random.Random(1), 20_000)


def test_settings_are_the_defaults_at_the_default_beat() -> None:
    given, default = settings_of(2.0), busrep.Settings()
    names = ("heartbeat", "redis_timeout", "retry_max", "claim_timeout", "fetch_timeout", "cache_bound")
    assert [getattr(given, name) for name in names] == [getattr(default, name) for name in names]
    assert settings_of(0.4, broken=True).cache_bound == 3_600
    assert bound_of(2.0) == 2.5


# -- the judge ------------------------------------------------------------------------------------


def report_of(**changes: Any) -> dict[str, Any]:
    """Of a run that went well."""
    numbers = {
        "reads": 1_000,
        "hits": 900,
        "loads": 100,
        "failed": 0,
        "stale": 0,
        "oldest": 1.2,
        "ages": {"current": 7},
    }
    ways = {way: {**numbers, "behind_at_the_end": 0} for way in WAYS}
    report: dict[str, Any] = {"ways": ways, "messages_lost": 5, "gaps_found": 3, "kills": 2}
    ways[BUSREP].update({name: changes.pop(name) for name in list(changes) if name in ways[BUSREP]})
    return {**report, **changes}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"stale": 1, "oldest": 2.6}, "1 reads were older than the bound"),
        ({"behind_at_the_end": 2}, "2 entries were stale at the end"),
        ({"messages_lost": 0}, "no messages lost"),
        ({"gaps_found": 0}, "no gaps found"),
        ({"kills": 0}, "no kills"),
        ({"hits": 500}, "only 500 of 1000 reads"),
    ],
)
def test_verdict(changes: dict[str, Any], why: str | None) -> None:
    failed = judge(report_of(**changes))
    assert len(failed) == (why is not None)
    assert why is None or failed[0].startswith(why)


def test_what_is_stale_on_the_ordinary_way_is_no_fault_of_ours() -> None:
    report = report_of()
    report["ways"][PUBSUB] = {**report["ways"][PUBSUB], "stale": 400, "behind_at_the_end": 9, "hits": 0}
    assert judge(report) == []
    shown = copy.deepcopy(report) | {
        "ok": True, "seed": 1, "seconds_of_faults": 2.0, "bound": 2.5, "transactions": {"one": 4}, "fenced": 0,
        "processes": {"a": 1}, "caches": {"hits": 9}, "faults": 1, "faults_by_kind": {"cut": 1}, "failed": [],
        "folder": None,
    }  # fmt: skip
    text = text_of(shown)
    (stale,) = (line for line in text.splitlines() if "older than the bound" in line)
    assert stale.split()[-3:] == ["0", "400", "0"]
    assert text.startswith("ok: seed 1")


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such faults: earthquake"):
        Run(Options(seconds=1, seed=1, kinds=["cut", "earthquake"]))


@pytest.mark.parametrize("module", ["tests.proof.stale", "tests.proof.soak"])
def test_a_command_that_cannot_be_run_says_why_in_one_line(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--faults", "earthquake"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "no such faults: earthquake" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# -- the links ------------------------------------------------------------------------------------

REPLIES = [
    b"+OK\r\n", b"-ERR no\r\n", b":42\r\n", b"$-1\r\n", b"$5\r\nab\r\nc\r\n", b"*0\r\n", b"*-1\r\n", b"_\r\n",
    b"#t\r\n",
    b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$0\r\n\r\n", b">2\r\n*1\r\n:1\r\n+x\r\n", b"%1\r\n+k\r\n*2\r\n:1\r\n:2\r\n",
    b"=7\r\ntxt:abc\r\n",
]  # fmt: skip


@pytest.mark.parametrize("reply", REPLIES)
def test_the_end_of_a_reply_is_found(reply: bytes) -> None:
    assert [reply_end(reply[:size]) for size in range(len(reply))] == [None] * len(reply)
    assert reply_end(reply) == len(reply)
    assert reply_end(b"+OK\r\n" + reply + b":1\r\n", 5) == 5 + len(reply)


@pytest.mark.servers
@pytest.mark.parametrize("protocol", [2, 3])
def test_a_link_loses_messages_and_nothing_else(redis_server: RedisServer, protocol: int) -> None:
    redis_server.start()

    async def main() -> None:
        async with LossyLink(redis_server.url, seed=1) as link:
            listener, publisher = (aioredis.Redis.from_url(link.url, protocol=protocol) for _ in range(2))
            async with listener, publisher, listener.pubsub() as subscription:
                await subscription.subscribe("c")
                heard = subscription.listen()
                assert (await anext(heard))["type"] == "subscribe"
                link.lost = 1.0
                for number in range(20):
                    assert await publisher.publish("c", number) == 1
                await subscription.ping()  # whose answer comes behind them all
                assert (await anext(heard))["type"] == "pong"
                assert link.counts["messages_lost"] == 20
                link.lost = 0.0
                await publisher.publish("c", b"a" * 200_000)  # in pieces
                assert (await anext(heard))["data"] == b"a" * 200_000
            assert link.connections == 2

    asyncio.run(main())


# -- the ordinary way -----------------------------------------------------------------------------


def loads(*versions: int) -> Callable[[int], Awaitable[int]]:
    given = iter(versions)

    async def load(key: int) -> int:
        return next(given)

    return load


def test_an_ordinary_cache() -> None:
    cache, load = OrdinaryCache(careful=False), loads(1, 2, 3)
    got = [asyncio.run(cache.get(7, load)) for _ in range(2)]
    cache.delete("8")
    got.append(asyncio.run(cache.get(7, load)))
    cache.delete("7")
    got.append(asyncio.run(cache.get(7, load)))
    cache.delete(EVERYTHING)
    got.append(asyncio.run(cache.get(7, load)))
    assert got == [1, 1, 1, 2, 3]


def test_an_ordinary_cache_needs_cachetools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cachetools", None)
    with pytest.raises(MissingExtra, match=r"busrep\[caches\]"):
        OrdinaryCache(careful=True)


@pytest.mark.servers
def test_ordinary_caches_hear_of_each_other_and_the_careful_one_forgets_when_cut(redis_server: RedisServer) -> None:
    redis_server.start()

    def until(true: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 30
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def held(cache: OrdinaryCache) -> int:
        return asyncio.run(cache.get(1, loads(99)))

    with LossyLink.in_thread(redis_server.url, seed=1) as link:
        here, there = Ordinary(link.url), Ordinary(redis_server.url)
        try:
            until(lambda: here.subscribed == 1 and there.subscribed == 1)
            there.publish([5])
            until(lambda: here.received == 1)
            for cache in (here.plain, here.careful):
                assert asyncio.run(cache.get(1, loads(1))) == 1
            link.cut()
            until(lambda: here.subscribed == 2)
            assert (held(here.plain), held(here.careful)) == (1, 99)
            there.publish([1])
            until(lambda: here.received == 2)
            assert held(here.plain) == 99
        finally:
            here.close()
            there.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ordinary"]


# -- what a run found -------------------------------------------------------------------------------


@pytest.mark.servers
def test_a_link_that_is_slow_all_the_time_makes_nothing_older_than_the_bound(
    redis_url: str, bus_name: str, tmp_path: Path
) -> None:
    """Every announcement is late by the same time, three bounds: to who knows nothing else they look fresh."""
    stream, versions = invalidations(), [1]
    settings = attrs.evolve(QUICK, heartbeat=0.2, redis_timeout=10.0)
    bound = bound_of(settings.heartbeat)
    url = f"sqlite:///{tmp_path / 'facts.db'}"

    async def main() -> None:
        async with FaultyLink(redis_url) as link:
            link.delay(3 * bound, "from_server")
            options: dict[str, Any] = {"name": bus_name, "streams": [stream], "store": url, "settings": settings}
            async with (
                busrep.connect(link.url, **options) as reader,
                busrep.connect(redis_url, writer="w", **options) as writer,
            ):

                @reader.cached(name="item")
                async def item(key: int) -> int:
                    return versions[0]

                # Now announcements have come, and agree about the clocks.
                await reader.wait_for(stream, "w", (await writer.publish(stream, [Invalidation("x", [1], 0)]))[0])
                async with asyncio.timeout(30):
                    while not reader.statistics()["caches"]["streams"]["caches"]["trusted"]:
                        await asyncio.sleep(0.01)
                assert await item(1) == 1
                versions[0] = 2
                await writer.invalidate("item", (1,))
                committed = time.monotonic()
                while True:
                    began = time.monotonic()
                    if await item(1) == 2:
                        break
                    assert began <= committed + bound
                    await asyncio.sleep(0.01)

    with opened_store(url, Registry([stream])):
        asyncio.run(main())


# -- the real thing -------------------------------------------------------------------------------

# Of the short run; the long one is `python -m tests.proof.stale --reads 10000000`.
SECONDS, HEARTBEAT, RATE = 16.0, 0.4, 600.0


class StartedLate(Run):
    """A writer is killed, and started again, when all were told to be quiet."""

    async def last_look(self) -> None:
        slot = next(slot for slot in self.world.slots.values() if slot.role.writes)
        before = slot.child
        assert before is not None
        await before.kill()
        assert await came_true(lambda: slot.child is not before and bool(slot.latest("quiet")), 60.0)
        await super().last_look()


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_who_is_started_again_at_the_end_writes_no_more() -> None:
    """One that was fenced, say. What it wrote passed for entries that stay stale."""
    options = Options(seconds=1.0, seed=5, heartbeat=HEARTBEAT, rate=RATE, kinds=["CLIENT KILL"])
    report = asyncio.run(StartedLate(options).run())
    shutil.rmtree(report["folder"])  # kept, for a run that is too short to kill anybody shows nothing
    assert [one for one in report["failed"] if not one.startswith(("no ", "only "))] == []
    assert sum(report["processes"].values()) == len(ROLES) + 1


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_no_read_is_older_than_the_bound() -> None:
    seed = int(os.environ.get("BUSREP_SEED", "0")) or 5
    options = Options(seconds=SECONDS, seed=seed, heartbeat=HEARTBEAT, rate=RATE, on_event=print)
    report = asyncio.run(Run(options).run())
    print(text_of(report))
    assert report["failed"] == []
    assert report["ok"]
    assert set(report["faults_by_kind"]) | set(report["without_effect"]) <= set(FAULTS)
    assert report["faults"] >= 10
    ours = report["ways"][BUSREP]
    assert (ours["stale"], ours["behind_at_the_end"]) == (0, 0)
    assert ours["reads"] > 20_000
    assert ours["oldest"] <= bound_of(HEARTBEAT)
    # The same faults were there for the others, in the same processes.
    assert report["ways"][PUBSUB]["stale"] > 0
    assert report["ways"][CAREFUL]["reads"] > 20_000
    assert report["folder"] is None


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_cache_that_ignores_its_bound_is_found_out() -> None:
    options = Options(
        seconds=120.0,  # the first one that is found ends it
        seed=1,
        heartbeat=HEARTBEAT,
        rate=RATE,
        pause=0.05,
        roles=(ROLES[0], ROLES[-1]),
        # What no beat repairs in time: the loop that would follow the table stands still.
        kinds=["event loop blocked", "SIGSTOP"],
        broken=True,
        on_event=print,
    )
    report = asyncio.run(Run(options).run())
    try:
        assert not report["ok"]
        assert report["ways"][BUSREP]["stale"] > 0
        assert report["ways"][BUSREP]["oldest"] > bound_of(HEARTBEAT)
        assert any("were older than the bound" in why for why in report["failed"])
        logs = "".join(path.read_text() for path in Path(report["folder"]).glob("*.log"))
        assert "STALE at" in logs
    finally:
        remove(Path(report["folder"]))


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_interrupted_run_leaves_nothing() -> None:
    # Not below pytest's own folder, which PostgreSQL, that does not run as root, could not reach.
    folder = Path(tempfile.mkdtemp(prefix="interrupted-"))
    folder.chmod(0o755)
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.proof.stale", "--minutes", "5", "--seed", "1", "--heartbeat", "0.4"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        cwd=ROOT,
    )
    assert run.stderr is not None
    try:
        for line in run.stderr:
            if "begin" in line:
                break
        assert processes_with(str(folder))
        run.terminate()
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130
    assert errors.endswith("interrupted\n")
    assert processes_with(str(folder)) == []
    folder.rmdir()  # which is refused when something is left in it


def processes_with(text: str) -> list[str]:
    """Command lines of processes that hold a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in command:
                found.append(command)
    return found


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_command_prints_both_sides_and_exits_by_the_verdict() -> None:
    """A run in which nobody is killed proves nothing, whatever it counts."""
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.proof.stale", "--minutes", "0.05", "--seed", "1", "--heartbeat", "0.4",
            "--rate", "200", "--faults", "messages lost", "--json", "--quiet",
        ],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert "no kills" in report["failed"]
    assert list(report["ways"]) == list(WAYS)
    remove(Path(report["folder"]))
    assert LIFE_BLOCKS % len(WAYS) == 0
