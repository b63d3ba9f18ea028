"""The soak of real processes, short; its judge, on ledgers made up to be wrong; and the Sentinel it runs under."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import redis
import redis.sentinel
from redis.asyncio.sentinel import Sentinel

import busrep
import busrep.sync
from busrep.errors import ConfigError
from busrep.settings import Settings
from busrep.streams import Stream
from busrep.testing.servers import RedisServer, start_redis
from tests import ROOT
from tests.proof.soak.faults import FAULTS
from tests.proof.soak.ledger import Anew, Committed, Entry, Gone, Handled, Ledger, RolledBack, Started, read_ledger
from tests.proof.soak.run import Options, Soak, draws
from tests.proof.soak.verdict import Content, Key, Verdict, judge_effects, judge_reader, judge_writer
from tests.support.servers import SentinelServer, start_sentinel

# -- the judge ------------------------------------------------------------------------------------

KEY = ("s", "a")
FACTS: dict[int, Content] = {1: (1, "x"), 4: (2, "y"), 5: (1, "z"), 9: (3, "u")}
TRUTH: dict[Key, dict[int, Content]] = {KEY: FACTS}


def begun(after: int, position: int, *tokens: int) -> Started:
    """A batch with the contents that the table has."""
    return Started(*KEY, after, position, tuple((token, *FACTS.get(token, (1, "?"))) for token in tokens))


def done(position: int) -> Handled:
    return Handled(*KEY, position)


def batch(after: int, position: int, *tokens: int) -> list[Entry]:
    return [begun(after, position, *tokens), done(position)]


ALL = batch(0, 9, 1, 4, 5, 9)
TORN = Started(*KEY, 0, 9, ((1, 1, "x"), (4, 1, "y"), (5, 1, "z"), (9, 3, "u")))


@pytest.mark.parametrize(
    ("lives", "wrong"),
    [
        pytest.param([ALL], {}, id="all at once"),
        pytest.param([[*batch(0, 4, 1, 4), *batch(4, 7, 5), *batch(8, 9, 9)]], {}, id="in parts, a step without rows"),
        pytest.param([[begun(0, 4, 1, 4), *ALL]], {}, id="the handler failed, and was called again"),
        pytest.param([[begun(0, 4, 1, 4)], ALL], {}, id="killed in the handler"),
        pytest.param(
            [batch(0, 5, 1, 4, 5), [*batch(1, 5, 4, 5), *batch(5, 9, 9)]], {"redeliveries": 2}, id="again in a new life"
        ),
        pytest.param([batch(0, 5, 1, 4, 5), [], batch(5, 9, 9)], {}, id="a life without a batch"),
        pytest.param([batch(0, 5, 1, 4, 5)], {"facts": 3, "rows": 4, "lost": 3}, id="the end never came"),
        pytest.param([], {"facts": 0, "rows": 0, "lost": 7}, id="nothing at all"),
        pytest.param([batch(0, 9, 1, 5, 9)], {"facts": 3, "rows": 5, "lost": 2}, id="one missing in a batch"),
        pytest.param(
            [[*batch(0, 1, 1), *batch(4, 9, 5, 9)]], {"facts": 3, "rows": 5, "lost": 2}, id="one skipped between two"
        ),
        pytest.param(
            [batch(0, 1, 1), batch(5, 9, 9)], {"facts": 2, "rows": 4, "lost": 3}, id="a new life begins too late"
        ),
        pytest.param([[begun(0, 4, 1, 4)], batch(4, 9, 5, 9)], {"facts": 2, "rows": 4, "lost": 3}, id="saved too soon"),
        pytest.param(
            [[*batch(0, 5, 1, 4, 5), *batch(4, 9, 5, 9)]], {"redeliveries": 1, "out_of_order": 1}, id="again in a life"
        ),
        pytest.param(
            [[*batch(0, 9, 4, 1, 5, 9)]], {"out_of_order": 1}, id="disorder in a batch"
        ),
        pytest.param([batch(0, 9, 1, 4, 5, 7, 9)], {"facts": 5, "rows": 8, "extra": 1}, id="a fact that is not there"),
        pytest.param([[TORN, done(9)]], {"rows": 6, "torn": 1}, id="other rows"),
        pytest.param([[*ALL, done(9)]], {}, id="an end without a beginning"),
        pytest.param(
            [[Gone(*KEY, 0, 4), *batch(4, 9, 5, 9)]], {"facts": 2, "rows": 4, "lost": 3}, id="pruned before it was read"
        ),
        pytest.param([[*ALL, Anew(*KEY, 0)]], {}, id="began anew"),
    ],
)  # fmt: skip
def test_judge_of_a_durable_reader(lives: list[list[Entry]], wrong: dict[str, int], request: Any) -> None:
    verdict = judge_reader("r", TRUTH, enumerate(lives, 1), durable=True)
    expected = Verdict(**{"facts": 4, "rows": 7, **wrong})
    assert attrs.evolve(verdict, violations=[]) == expected
    silent = {"an end without a beginning", "began anew"}  # wrong, though no row is
    bad = set(wrong) & {"lost", "out_of_order", "extra", "torn"} or request.node.callspec.id in silent
    assert bool(verdict.violations) is bool(bad)


def test_judge_shows_the_ledger_around_a_violation() -> None:
    verdict = judge_reader("r", TRUTH, [(3, [*batch(0, 1, 1), *batch(4, 9, 5, 9)])], durable=True)
    (violation,) = verdict.violations
    assert violation.startswith("r, life 3: 1 facts were skipped: [4]\n")
    assert "    > 2: Started(s, a, after=4, position=9, [5, 9])" in violation


def test_judge_of_a_reader_without_saved_positions() -> None:
    """Each life begins where it likes, and is whole from there."""
    lives = [(1, batch(1, 4, 4)), (2, [Gone(*KEY, 4, 5), *batch(5, 9, 9)])]
    assert judge_reader("r", TRUTH, lives, durable=False).violations == []
    verdict = judge_reader("r", TRUTH, [(1, [*batch(0, 1, 1), *batch(4, 9, 5, 9)])], durable=False)
    assert (verdict.lost, len(verdict.violations)) == (2, 1)


def test_judge_of_the_own_rows_of_a_writer_that_reads() -> None:
    """What it published counts as handled, and what a life before left behind comes all the same."""
    assert judge_reader("a", TRUTH, [(2, batch(4, 5, 5))], durable=True).violations == []
    lives = [(2, [*batch(0, 1, 1), *batch(5, 9, 9)])]
    assert judge_reader("a", TRUTH, lives, durable=True).lost == 3
    # Fenced in between: it wrote 4 and 5 itself, and hears of the rest from then on. Another life's 5 it owes.
    assert judge_reader("a", TRUTH, lives, durable=True, authors={"s": {4: 2, 5: 2}}).violations == []
    assert judge_reader("a", TRUTH, lives, durable=True, authors={"s": {4: 2, 5: 1}}).lost == 1


def test_judge_of_an_exactly_once_reader() -> None:
    """Its ledger may lack the end of what was committed; its effects may lack nothing."""
    lives = [(1, [begun(0, 4, 1, 4), *batch(4, 5, 5), begun(5, 9, 9)]), (2, [])]
    assert judge_reader("r", TRUTH, lives, durable=True, exact=True).violations == []
    assert judge_effects("r", TRUTH, {KEY: list(FACTS.items())}) == Verdict(facts=4, rows=7)


@pytest.mark.parametrize(
    ("done", "wrong"),
    [
        ([1, 4, 9], {"lost": 1}),
        ([1, 4, 5, 5, 9], {"out_of_order": 1}),
        ([1, 5, 4, 9], {"out_of_order": 1}),
        ([1, 4, 5, 7, 9], {"extra": 1}),
        ([], {"lost": 7}),
    ],
)
def test_judge_of_effects(done: list[int], wrong: dict[str, int]) -> None:
    effects = [(token, FACTS.get(token, (1, "?"))) for token in done]
    verdict = judge_effects("r", TRUTH, {KEY: effects})
    numbers = attrs.asdict(verdict)
    assert {name: numbers[name] for name in ("lost", "extra", "torn", "out_of_order") if numbers[name]} == wrong
    assert len(verdict.violations) == 1
    assert judge_effects("r", TRUTH, {KEY: [*list(FACTS.items())[:3], (9, (3, "v"))]}).torn == 1
    assert judge_effects("r", TRUTH, {KEY: list(FACTS.items()), ("s", "b"): [(2, (1, "x"))]}).extra == 1


def test_judge_of_a_writer() -> None:
    entries = [
        Committed((("s", 1, 1, "x"), ("s", 4, 2, "y"))),
        Committed((("s", 5, 1, "other"),)),
        Committed((("s", 6, 1, "x"),)),
        RolledBack((("s", 9), ("s", 7))),
        done(9),
    ]
    assert judge_writer("a", TRUTH, entries) == [
        "a committed s 5, and the table does not hold it so",
        "a committed s 6, and the table does not hold it so",
        "a rolled s 9 back, and the table holds it",
    ]


def test_a_ledger_is_read_back_but_for_a_line_cut_short(tmp_path: Path) -> None:
    entries: list[Entry] = [
        *ALL, Gone(*KEY, 1, 2), Anew(*KEY, 3), Committed((("s", 1, 1, "x"),)), RolledBack((("s", 2),)),
    ]  # fmt: skip
    ledger = Ledger(str(tmp_path / "r.1.ledger"))
    for entry in entries:
        ledger.note(entry)
    path = tmp_path / "r.1.ledger"
    assert read_ledger(path) == entries
    path.write_bytes(path.read_bytes()[:-3])
    assert read_ledger(path) == entries[:-1]
    assert read_ledger(tmp_path / "r.2.ledger") == []


def test_faults_come_in_an_order_of_the_seed() -> None:
    def first(seed: int, count: int) -> list[tuple[str, float]]:
        return [(kind, dice.random()) for (kind, dice), _ in zip(draws(seed, list(FAULTS)), range(count), strict=False)]

    assert first(1, 100) == first(1, 100)
    assert first(1, 100) != first(2, 100)
    assert {kind for kind, _ in first(1, 2 * len(FAULTS))} == set(FAULTS)
    with pytest.raises(ConfigError, match="no such faults: earthquake"):
        Soak(Options(seconds=1, seed=1, kinds=["cut", "earthquake"]))
    with pytest.raises(ConfigError, match="TCP server SIGSTOP"):
        Soak(Options(seconds=1, seed=1, kinds=["TCP server SIGSTOP"]))


# -- the real thing -------------------------------------------------------------------------------

# Of the short run: each kind once, if it has an effect. The long one is `python -m tests.proof.soak`.
SECONDS = 60.0


def assert_well(report: dict[str, Any], enough: dict[str, int]) -> None:
    """Nothing was lost, and what must have happened for that to mean something has happened."""
    assert report["violations"] == []
    assert report["ok"]
    assert {name: report[name] for name in enough if report[name] < enough[name]} == {}
    assert (report["lost"], report["extra"], report["torn"], report["out_of_order"]) == (0, 0, 0, 0)


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_soak() -> None:
    seed = int(os.environ.get("BUSREP_SEED", "0")) or 11
    report = asyncio.run(Soak(Options(seconds=SECONDS, seed=seed, most=len(FAULTS), on_event=print)).run())
    assert_well(report, {"faults": 10, "facts": 301, "gaps_found": 1, "gaps_filled": 1})
    assert set(report["faults_by_kind"]) | set(report["without_effect"]) <= set(FAULTS)
    assert all(numbers["facts"] > 100 for numbers in report["by_reader"].values())
    assert report["folder"] is None


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_soak_over_tcp() -> None:
    kinds = [
        "TCP server SIGKILL and restart",
        "TCP server SIGSTOP",
        "black hole",
        "cut",
        "CLIENT KILL TYPE pubsub",
        "SIGKILL",
    ]
    enough = {"faults": 6, "gaps_filled": 1, "reconnects": 11}
    options = Options(seconds=20.0, seed=3, over="tcp", kinds=kinds, enough=enough, on_event=print)
    assert_well(asyncio.run(Soak(options).run()), enough)


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_soak_over_sync() -> None:
    kinds = [
        "SIGKILL",
        "SIGSTOP longer than the lease",
        "one name twice",
        "answer to COMMIT lost",
        "black hole",
        "cut",
        "failover by Sentinel",
    ]
    enough = {"faults": 6, "gaps_filled": 1, "reconnects": 1, "names_won_back": 1}
    options = Options(seconds=20.0, seed=108, over="sync", kinds=kinds, enough=enough, on_event=print)
    report = asyncio.run(Soak(options).run())
    assert_well(report, enough)
    assert report["transactions"].keys() >= {"bulk", "empty", "held", "joined", "rolled back", "several streams"}


def processes_with(text: str) -> list[str]:
    """Command lines of processes that hold a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_interrupted_soak_leaves_nothing() -> None:
    # Not below pytest's own folder, which PostgreSQL, that does not run as root, could not reach.
    folder = Path(tempfile.mkdtemp(prefix="interrupted-"))
    folder.chmod(0o755)
    soak = subprocess.Popen(
        [sys.executable, "-m", "tests.proof.soak", "--minutes", "5", "--seed", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        cwd=ROOT,
    )
    assert soak.stderr is not None
    try:
        for line in soak.stderr:
            if "begin" in line:
                break
        assert processes_with(str(folder))
        soak.terminate()
        _, errors = soak.communicate(timeout=60)
    finally:
        soak.kill()
        soak.wait()
    assert soak.returncode == 130
    assert errors.endswith("interrupted\n")
    assert processes_with(str(folder)) == []
    folder.rmdir()  # which is refused when something is left in it


# -- Sentinel -------------------------------------------------------------------------------------

numbers = Stream("numbers", resettable=True)
QUICK = Settings(heartbeat=0.1, silent_after_beats=5, retry_min=0.02, retry_max=0.1, redis_timeout=1.0)


@attrs.frozen
class Watched:
    """A master, its replica, and the Sentinel that watches them."""

    master: RedisServer
    replica: RedisServer
    sentinel: SentinelServer

    def ask(self, server: RedisServer, *words: str | int) -> Any:
        with redis.Redis(port=server.port, decode_responses=True, socket_timeout=5) as client:
            return client.execute_command(*words)  # type: ignore[no-untyped-call]

    def address(self) -> int:
        return int(self.ask(self.sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.sentinel.service)[1])


@pytest.fixture
def watched() -> Iterator[Watched]:
    config = {"repl-diskless-sync-delay": 0}
    with (
        start_redis(config=config) as master,
        start_redis(config={**config, "replicaof": ["127.0.0.1", master.port]}) as replica,
    ):
        with start_sentinel(master, down_after=0.5) as sentinel:
            found = Watched(master, replica, sentinel)
            with contextlib.suppress(redis.ResponseError):  # since Redis 7: what it otherwise learns every ten seconds
                found.ask(sentinel, "SENTINEL", "DEBUG", "INFO-PERIOD", 200)
            yield found


def until_blocking(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def until(true: Callable[[], Any], seconds: float = 150.0) -> None:
    # A Sentinel on a machine that stood still does nothing for 30 s (its TILT), and a failover may want a second try.
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.02)


async def follows_to(watched: Watched, change: Callable[[], None]) -> None:
    """Two buses on a Sentinel's master, before and after it is another one."""
    sentinel = Sentinel([("127.0.0.1", watched.sentinel.port)], socket_timeout=1.0)  # type: ignore[no-untyped-call]

    def bus(**options: Any) -> busrep.Bus:
        # Nobody keeps the client, though the driver's connections refer to its pool weakly.
        client = sentinel.master_for(watched.sentinel.service)
        return busrep.connect(client, name="sentinel", streams=[numbers], settings=QUICK, **options)

    seen: list[int] = []
    async with bus(writer="w") as writer, bus() as reader:
        reader.subscribe(numbers)(lambda batch: seen.extend(batch.rows))
        await until(lambda: reader.positions().get("numbers") == {"w": 0})
        (token,) = await writer.publish(numbers, [1])
        await reader.wait_for(numbers, "w", token)
        change()
        await until(lambda: watched.address() == watched.replica.port)
        await until(lambda: dict([watched.ask(watched.replica, "PUBSUB", "NUMSUB", "sentinel")]) == {"sentinel": 2})
        await until(lambda: writer.statistics()["link"]["publisher_connects"] > 1)
        (token,) = await writer.publish(numbers, [2])
        await reader.wait_for(numbers, "w", token)
    assert seen[0] == 1
    assert seen[-1] == 2
    for one in sentinel.sentinels:
        await one.aclose()


@pytest.mark.servers
@pytest.mark.timeout(400)
def test_a_bus_follows_sentinel_when_the_master_dies(watched: Watched) -> None:
    asyncio.run(follows_to(watched, watched.master.kill))


@pytest.mark.servers
@pytest.mark.timeout(400)
def test_a_bus_follows_sentinel_when_it_changes_the_master(watched: Watched) -> None:
    """The old master lives on, as a replica that takes messages and passes them to nobody."""

    def change() -> None:
        deadline = time.monotonic() + 60
        while True:  # until Sentinel has found the replica
            try:
                watched.ask(watched.sentinel, "SENTINEL", "FAILOVER", watched.sentinel.service)
            except redis.ResponseError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            else:
                return

    asyncio.run(follows_to(watched, change))


@pytest.mark.servers
def test_connections_that_ended_up_on_two_masters_find_together(redis_server: RedisServer) -> None:
    """The publishing one on the old master, which Sentinel could not reach yet to throw it out."""

    class Torn(Sentinel):
        """Names the old master once, to the second who asks."""

        asked = 0

        async def discover_master(self, service_name: str) -> tuple[str, int]:
            self.asked += 1
            return "127.0.0.1", old.port if self.asked == 2 else redis_server.port

    async def main() -> None:
        sentinel = Torn([("127.0.0.1", 1)])  # type: ignore[no-untyped-call]
        client = sentinel.master_for("mymaster")
        async with busrep.connect(client, name="torn", streams=[numbers], writer="w", settings=QUICK) as bus:
            await until(lambda: bus.statistics()["link"]["publisher_connects"] == 1)
            assert sentinel.asked == 2
            # Below the test's own limit: a bus that never does it must fail here, and not run out of time.
            await until(lambda: bus.statistics()["link"]["publisher_connects"] == 2, seconds=60.0)
            assert bus.statistics()["link"]["last_error"] == "own announcements are not heard back"
            reconnects = bus.statistics()["link"]["reconnects"]
            await asyncio.sleep(2 * QUICK.heartbeat * QUICK.silent_after_beats)
            assert bus.statistics()["link"]["reconnects"] == reconnects

    redis_server.start()
    with start_redis() as old:
        asyncio.run(main())


@pytest.mark.servers
def test_a_bus_for_threads_follows_to_another_master(watched: Watched) -> None:
    sentinel = redis.sentinel.Sentinel(  # type: ignore[no-untyped-call]
        [("127.0.0.1", watched.sentinel.port)], socket_timeout=1.0
    )

    def bus(**options: Any) -> busrep.sync.Bus:
        # Nobody keeps the client.
        client = sentinel.master_for(watched.sentinel.service)  # type: ignore[no-untyped-call]
        return busrep.sync.connect(client, name="sentinel", streams=[numbers], settings=QUICK, **options)

    seen: list[int] = []
    with contextlib.closing(sentinel), bus(writer="w") as writer, bus() as reader:
        reader.subscribe(numbers)(lambda batch: seen.extend(batch.rows))
        until_blocking(lambda: reader.positions().get("numbers") == {"w": 0})
        (token,) = writer.publish(numbers, [1])
        reader.wait_for(numbers, "w", token)
        watched.master.kill()
        until_blocking(lambda: watched.address() == watched.replica.port)
        # Of the reader alone: a process that only writes does not listen.
        until_blocking(lambda: dict([watched.ask(watched.replica, "PUBSUB", "NUMSUB", "sentinel")]) == {"sentinel": 1})
        until_blocking(lambda: writer.statistics()["link"]["publisher_connects"] > 1)
        (token,) = writer.publish(numbers, [2])
        reader.wait_for(numbers, "w", token, timeout=60)
        assert seen == [1, 2]


@pytest.mark.servers
def test_a_writer_in_threads_does_not_stay_with_an_old_master(redis_server: RedisServer) -> None:
    """Which takes its messages and passes them on to nobody; it does not listen itself, and would not notice."""

    class Torn(redis.sentinel.Sentinel):
        """Names the old master to the first who asks."""

        asked = 0

        def discover_master(self, service_name: str) -> tuple[str, int]:
            self.asked += 1
            return "127.0.0.1", old.port if self.asked == 1 else redis_server.port

    redis_server.start()
    with start_redis() as old:
        sentinel = Torn([("127.0.0.1", 1)])  # type: ignore[no-untyped-call]
        client = sentinel.master_for("mymaster")  # type: ignore[no-untyped-call]
        options: dict[str, Any] = {"name": "torn", "streams": [numbers], "settings": QUICK}
        with (
            busrep.sync.connect(redis_server.url, **options) as reader,
            busrep.sync.connect(client, writer="w", **options) as writer,
        ):
            assert sentinel.asked == 1
            (token,) = writer.publish(numbers, [1])
            reader.wait_for(numbers, "w", token, timeout=60)
            assert sentinel.asked == 2
            connects = writer.statistics()["link"]["publisher_connects"]
            assert connects == 2
            with redis.Redis.from_url(redis_server.url, socket_timeout=60) as client, client.pubsub() as listener:
                listener.subscribe("torn")
                for _ in range(2 * QUICK.silent_after_beats):  # for longer than it was deaf
                    assert listener.get_message(timeout=60) is not None
            assert writer.statistics()["link"]["publisher_connects"] == connects


@pytest.mark.servers
def test_a_sentinel_that_does_not_answer_holds_up_no_end(redis_server: RedisServer) -> None:
    asked, release = threading.Event(), threading.Event()

    class Mute(redis.sentinel.Sentinel):
        """Answers the publisher, and keeps the reader waiting."""

        def discover_master(self, service_name: str) -> tuple[str, int]:
            if threading.current_thread().name == "busrep-sentinel":
                asked.set()
                release.wait()
            return "127.0.0.1", redis_server.port

    redis_server.start()
    client = Mute([("127.0.0.1", 1)]).master_for("mymaster")  # type: ignore[no-untyped-call]
    settings = attrs.evolve(QUICK, redis_timeout=60.0)
    try:
        with busrep.sync.connect(client, name="mute", settings=settings, require_redis=False) as bus:
            bus.subscribe()(lambda batch: None)
            assert asked.wait(60)
        assert not release.is_set()
    finally:
        release.set()


def test_a_client_of_sentinel_s_replicas_is_refused() -> None:
    client = redis.sentinel.Sentinel([("127.0.0.1", 1)]).slave_for("mymaster")  # type: ignore[no-untyped-call]
    with (
        busrep.sync.connect(client, name="replicas", streams=[numbers]) as bus,
        pytest.raises(ConfigError, match="master_for"),
    ):
        bus.subscribe(numbers)
