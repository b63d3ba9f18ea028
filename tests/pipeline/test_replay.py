"""A replay's pace, and its writing half: what is due when, and that a kill at any step loses and doubles nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests import ROOT

pytest.importorskip("pyspark")

import busrep
from busrep import sync
from busrep.core.catchup import FetchUpdates
from busrep.errors import CommitUnknown, ConfigError, Unavailable, WriterFenced
from busrep.spark import replay_pace, replay_target
from busrep.spark.replay_pace import CHUNK_BYTES, CHUNK_ROWS, Chunks, OutOfOrder, Pace, facts_of, grouped
from busrep.spark.replay_target import Target, Verbatim, mark_name, target_stream
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from busrep.sync.session import Publishing
from tests.pipeline.replay_child import EPOCH, QUICK, STEPS, Task, fact, replayed
from tests.shop import Order
from tests.transactions import Method, patch_transactions, surrounded

SECOND = 1_000_000
STREAMS: list[busrep.Stream[Any]] = [busrep.Stream("orders"), busrep.Stream("payments")]


# -- pace --------------------------------------------------------------------------------------------------------


def test_rows_become_facts() -> None:
    rows = [("orders", "w1", 1, 5, "[1]"), ("orders", "w2", 2, 5, "[2]"), ("orders", "w2", 2, 5, "[3]")]
    assert list(facts_of(rows)) == [
        fact("orders", "w1", 1, "[1]", time=5),
        fact("orders", "w2", 2, "[2]", "[3]", time=5),
    ]


@pytest.mark.parametrize("second", [1, 0])
def test_rows_that_do_not_ascend_are_not_replayed(second: int) -> None:
    rows = [("orders", "w1", 1, None, "[1]"), ("orders", "w2", 9, None, "[1]"), ("orders", "w1", second, None, "[1]")]
    found = facts_of(rows)
    next(found), next(found)
    with pytest.raises(OutOfOrder, match="w1") as caught:
        next(found)
    assert (caught.value.last, caught.value.fact.token) == (1, second)


@attrs.define
class Clock:
    """Waiting is all that takes time."""

    now: float = 100.0
    waits: list[float] = attrs.field(factory=list)

    def wait(self, seconds: float) -> None:
        self.waits.append(round(seconds, 6))
        self.now += seconds


def chunks(pace: Pace, *facts: Any, clock: Clock | None = None) -> tuple[list[list[int]], Clock, Chunks]:
    clock = clock or Clock()
    made = Chunks(pace, lambda: clock.now, clock.wait)
    return [[one.token for one in chunk] for chunk in made.of(facts)], clock, made


def at(token: int, seconds: float | None, rows: int = 1) -> Any:
    return fact("orders", "w1", token, *["[1]"] * rows, time=None if seconds is None else round(seconds * SECOND))


def test_by_the_times_of_the_commits_ten_times_as_fast() -> None:
    found, clock, made = chunks(Pace(speed=10), at(1, 50), at(2, 60), at(3, 60), at(4, 55), at(5, 61))
    assert found == [[1], [2, 3, 4], [5]]  # 4 was committed before, and comes behind what was
    assert (clock.waits, made.late) == ([1.0, 0.1], 0.0)


def test_a_pause_is_cut_and_what_comes_behind_follows() -> None:
    found, clock, _ = chunks(Pace(speed=2, longest_pause=5), at(1, 0), at(2, 3600), at(3, 3602))
    assert found == [[1], [2], [3]]
    assert clock.waits == [5.0, 1.0]


def test_so_many_rows_a_second() -> None:
    found, clock, _ = chunks(Pace(rate=4), at(1, None, 2), at(2, None), at(3, None))
    assert found == [[1], [2], [3]]
    assert clock.waits == [0.5, 0.25]


def test_flat_out_waits_for_nothing_and_bounds_what_is_written_together() -> None:
    facts = [at(token, token) for token in range(1, CHUNK_ROWS + 11)]
    found, clock, made = chunks(Pace(), *facts)
    assert [len(one) for one in found] == [CHUNK_ROWS, 10]
    assert (clock.waits, made.late) == ([], 0.0)
    large = [fact("orders", "w1", token, "x" * (CHUNK_BYTES // 2 + 1)) for token in (1, 2, 3)]
    assert chunks(Pace(), *large)[0] == [[1], [2], [3]]


def test_a_transaction_has_so_many_rows_and_bytes_and_whole_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_pace, "GROUP_ROWS", 5)
    monkeypatch.setattr(replay_pace, "GROUP_BYTES", 100)

    def groups(*facts: Any) -> list[list[int]]:
        return [[one.token for one in group] for group in grouped(facts)]

    sizes = [2, 3, 1, 7, 1, 4, 5]
    assert groups(*[at(token, None, rows) for token, rows in enumerate(sizes)]) == [[0, 1], [2], [3], [4, 5], [6]]
    lengths = [60, 40, 1, 101, 50, 50]
    large = [fact("orders", "w1", token, "x" * length) for token, length in enumerate(lengths)]
    assert groups(*large) == [[0, 1], [2], [3], [4, 5]]
    assert groups() == []


def test_late_facts_come_together() -> None:
    clock = Clock()
    made = Chunks(Pace(speed=1), lambda: clock.now, clock.wait)
    found = []
    for chunk in made.of([at(1, 0), at(2, 1), at(3, 2), at(4, 3), at(5, 9)]):
        found.append([one.token for one in chunk])
        clock.now += 2.5  # what writing takes
    assert found == [[1], [2, 3], [4], [5]]
    assert made.late == 2.0  # 4 came at 5 s, when 2 and 3 were written


def test_rows_without_times_have_no_pace_of_their_own() -> None:
    with pytest.raises(ConfigError, match="--rate"):
        chunks(Pace(speed=1), at(1, None))


# -- what is written to ------------------------------------------------------------------------------------------


def test_rows_stay_as_they_are() -> None:
    stream = Verbatim("orders")
    assert stream.encode(b'["a", 1.50]') == b'["a", 1.50]'
    text = '["ä𝄞",\n12345678901234567890123, 1.50]'
    assert stream.encode(text.encode()) == b'["\\u00e4\\ud834\\udd1e", 12345678901234567890123, 1.50]'
    assert json.loads(stream.encode(text.encode())) == json.loads(text)


def test_the_target_is_published_where_the_stream_is_declared() -> None:
    made = target_stream("orders", busrep.Stream("orders", Order, channel="shop", follows=False), in_memory=True)
    assert (made.channel, made.follows, made.resettable, made.row_type) == ("shop", False, True, None)
    own = busrep.Stream("orders", Order, table=busrep.Table("orders"))
    assert target_stream("orders", own, in_memory=False) is own
    with pytest.raises(ConfigError, match="--to-store"):
        target_stream("orders", own, in_memory=True)


def some_rows(count: int = 60) -> list[Any]:
    """Of two streams and three writers; each fifth fact has three rows."""
    found = []
    for token in range(1, count + 1):
        stream, writer = ("payments", "w3") if token % 4 == 0 else ("orders", f"w{1 + token % 2}")
        for row in range(3 if token % 5 == 0 else 1):
            found.append((stream, writer, token, token * SECOND, f"[{token},{row}]"))
    return found


def expected(rows: list[Any]) -> dict[tuple[str, str], list[list[bytes]]]:
    found: dict[tuple[str, str], list[list[bytes]]] = {}
    for one in facts_of(rows):
        found.setdefault((one.stream, f"r-{one.writer}"), []).append(list(one.rows))
    return found


def in_table(url: str) -> dict[tuple[str, str], list[list[bytes]]]:
    """The facts of each writer, in order, their tokens rising and proven."""
    store = open_blocking_store(url, Registry(STREAMS))
    store.open()
    found: dict[tuple[str, str], list[list[bytes]]] = {}
    try:
        for known in store.known():
            page = store.fetch(FetchUpdates(known.stream, known.writer, 0, 2**62, limit=10**6))
            facts: dict[int, list[bytes]] = {}
            for token, payload in zip(page.tokens, page.payloads, strict=True):
                facts.setdefault(token, []).append(payload)
            if facts:
                assert list(facts) == sorted(facts)
                found[known.stream, known.writer] = list(facts.values())
    finally:
        store.close()
    return found


def made_store(url: str) -> str:
    store = open_blocking_store(url, Registry(STREAMS))
    store.init()
    store.close()
    return url


@pytest.fixture
def url(tmp_path: Path) -> str:
    return made_store(f"sqlite:///{tmp_path}/target.db")


def killed(task: Task) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.replay_child"], input=json.dumps(attrs.asdict(task)).encode(),
        capture_output=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_killed_at_each_step(kind: str, request: pytest.FixtureRequest, redis_url: str, bus_name: str) -> None:
    """Process after process is killed, at another step and another fact. In the end each fact is there once, in the
    table and on the bus, and its writer's facts in order."""
    url, rows = made_store(request.getfixturevalue(f"{kind}_url")), some_rows(120)
    task = Task(rows, redis_url, bus_name, url)
    seen: dict[tuple[str, str], list[bytes]] = {}

    async def run() -> dict[Any, int]:
        # From the first row: "now" is some moment after subscribe(), and may lie behind rows written at once.
        common = {"streams": STREAMS, "store": url, "settings": QUICK}
        async with busrep.connect(redis_url, name=bus_name, start="earliest", **common) as bus:

            @bus.subscribe(*STREAMS)
            async def handle(batch: busrep.Batch[Any]) -> None:
                its = seen.setdefault((batch.stream.name, batch.writer), [])
                its.extend(f"[{row[0]},{row[1]}]".encode() for row in batch.rows)

            for number, step in enumerate(STEPS):
                if step != "closed":
                    await asyncio.to_thread(killed, attrs.evolve(task, step=step, passes=1 + number % 3))
                    assert await asyncio.to_thread(left_whole, url, rows), step
            marks = await asyncio.to_thread(replayed, task)
            await asyncio.to_thread(killed, attrs.evolve(task, step="closed"))
            for stream, writer in expected(rows):
                last = max(bus.positions()[stream].get(writer, 0), newest(url, stream, writer))
                await bus.wait_for(bus.streams[stream], writer, last, timeout=20)
        return marks

    marks = asyncio.run(run())
    assert 0 < max(marks.values()) < 120, "the kills came in the middle"
    assert in_table(url) == expected(rows)
    assert seen == {key: [row for fact in facts for row in fact] for key, facts in expected(rows).items()}


def newest(url: str, stream: str, writer: str) -> int:
    store = open_blocking_store(url, Registry(STREAMS))
    store.open()
    try:
        page = store.fetch(FetchUpdates(stream, writer, 0, 2**62, limit=10**6))
        return max(page.tokens)
    finally:
        store.close()


def sinks(url: str) -> Any:
    """The marks, by their names."""
    with contextlib.closing(open_blocking_store(url, Registry(STREAMS))) as store:
        store.open()
        return store.status()["sinks"]


def left_whole(url: str, rows: list[Any]) -> bool:
    """Whether the table has all facts up to each writer's mark, and none behind it."""
    marks = {name: mark["batch"] for name, mark in sinks(url).items()}
    return in_table(url) == expected([row for row in rows if row[2] <= marks.get(mark_name(row[0], f"r-{row[1]}"), 0)])


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_facts_of_a_writer_share_a_transaction(
    kind: str, request: pytest.FixtureRequest, redis_url: str, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one row and of more, in their order, and never a part of a fact: one that has more rows than a transaction is
    to have is written alone. At each COMMIT the mark is where the transaction ends."""
    url = made_store(request.getfixturevalue(f"{kind}_url"))
    sizes = [1, 3, 1, 2, 1, 9, 1, 1, 1, 1, 1, 4]
    rows = [("orders", "w1", token + 1, None, f"[{token},{row}]") for token in range(12) for row in range(sizes[token])]
    whole: list[bool] = []
    marks: list[int] = []

    def look() -> None:
        found = sinks(url)
        whole.append(left_whole(url, rows))
        marks.append(found[mark_name("orders", "r-w1")]["batch"])

    monkeypatch.setattr(replay_pace, "GROUP_ROWS", 5)
    patch_transactions(monkeypatch, "commit", lambda commit: surrounded(commit, after=look))
    streams = {"orders": Verbatim("orders")}
    one = Target(redis_url, bus_name, streams, {"orders": EPOCH}, store=url, prefix="r-", settings=QUICK)
    with contextlib.closing(one):
        one.open({("orders", "w1"): 0})
        one.write(list(facts_of(rows)))
    assert marks == [3, 5, 6, 11, 12]
    assert all(whole)
    assert in_table(url) == expected(rows)


@pytest.mark.servers
@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_without_an_answer_is_looked_up(
    committed: bool, url: str, redis_url: str, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = some_rows()
    failing = iter([False, True, False, True])

    def sometimes(real: Method) -> Method:
        async def commit(transaction: Any) -> None:
            fail = next(failing, False)
            if fail and not committed:
                await transaction.rollback()
            else:
                await real(transaction)
            if fail:
                raise CommitUnknown(None, OSError("the answer was lost"))

        return commit

    patch_transactions(monkeypatch, "commit", sometimes)
    replayed(Task(rows, redis_url, bus_name, url))
    assert next(failing, None) is None
    assert in_table(url) == expected(rows)


@pytest.mark.servers
def test_who_replays_next_takes_the_writers(url: str, redis_url: str, bus_name: str) -> None:
    """Two at a time, one of which was given up for dead: it writes nothing behind the marks that the other has read."""
    rows = some_rows()
    facts = [one for one in facts_of(rows) if one.stream == "orders"]
    first = Target(
        redis_url, bus_name, {"orders": Verbatim("orders")}, {"orders": EPOCH}, store=url, prefix="r-", settings=QUICK
    )
    try:
        first.open({("orders", "w1"): 0, ("orders", "w2"): 0})
        first.write(facts[:10])
        marks = replayed(Task(rows, redis_url, bus_name, url))
        assert marks["orders", "w1"] == max(one.token for one in facts[:10] if one.writer == "w1")
        with pytest.raises(WriterFenced):
            first.write(facts[10:])
    finally:
        first.close()
    assert in_table(url) == expected(rows)


@pytest.mark.servers
def test_what_is_not_the_same_replay_is_refused(url: str, redis_url: str, bus_name: str) -> None:
    replayed(Task(some_rows(), redis_url, bus_name, url))
    streams = {"orders": Verbatim("orders")}
    other = Target(redis_url, bus_name, streams, {"orders": "other"}, store=url, prefix="r-", settings=QUICK)
    with pytest.raises(ConfigError, match="another --to-writer"):
        other.open({("orders", "w1"): 0})
    other.close()
    store = open_blocking_store(url, Registry(STREAMS))
    store.open()
    epoch = store.epoch()
    assert store.status()["sinks"][mark_name("orders", "r-w1")]["batch"] == max(
        row[2] for row in some_rows() if row[1] == "w1"
    )
    store.close()
    itself = Target(redis_url, bus_name, streams, {"orders": epoch}, store=url, settings=QUICK)
    with pytest.raises(ConfigError, match="the very log"):
        itself.open({("orders", "w1"): 0})
    itself.close()


@pytest.mark.servers
def test_streams_in_memory(redis_url: str, bus_name: str) -> None:
    """A reader that is there from the beginning sees all of it, and only once."""
    rows = [row for row in some_rows() if row[0] == "orders"]
    orders = busrep.Stream("orders", resettable=True)
    seen: dict[str, list[Any]] = {}
    with sync.connect(redis_url, name=bus_name, streams=[orders], settings=QUICK) as bus:
        last = {one.writer: one.rows[-1] for one in facts_of(rows)}

        @bus.subscribe(orders)
        def handle(batch: sync.Batch[Any]) -> None:
            seen.setdefault(batch.writer, []).extend(f"[{row[0]},{row[1]}]".encode() for row in batch.rows)

        target = Target(
            redis_url, bus_name, {"orders": Verbatim("orders", resettable=True)}, {"orders": EPOCH}, prefix="r-",
            settings=QUICK,
        )  # fmt: skip
        target.open({("orders", "w1"): 0, ("orders", "w2"): 0})
        for writer in last:  # known, so that nothing of it is missed
            bus.wait_for(orders, f"r-{writer}", 0, timeout=20)
        target.write(list(facts_of(rows)))
        for writer in last:
            sent = target._buses[writer].statistics()["writer"]["streams"]["orders"]["sent"]
            bus.wait_for(orders, f"r-{writer}", sent, timeout=20)
        target.close()
    assert seen == {writer: [row for fact in facts for row in fact] for (_, writer), facts in expected(rows).items()}


@pytest.mark.servers
def test_in_memory_nothing_is_lost_silently(
    redis_url: str, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def target() -> Target:
        streams = {"orders": Verbatim("orders", resettable=True)}
        made = Target(redis_url, bus_name, streams, {"orders": EPOCH}, settings=QUICK)
        made.open({("orders", "w1"): 0})
        return made

    large = target()
    with pytest.raises(ConfigError, match="frame_bytes"):
        large.write([fact("orders", "w1", 1, f'["{"x" * QUICK.frame_bytes}"]')])
    large.close()

    among_others = target()
    with pytest.raises(ConfigError, match="frame_bytes"):
        among_others.write([fact("orders", "w1", 1, "[1]"), fact("orders", "w1", 2, *["[2]"] * (QUICK.frame_rows + 1))])
    among_others.close()

    away = target()
    monkeypatch.setattr(replay_target, "pause_after", lambda *args: 0.0)
    monkeypatch.setattr(Publishing, "publish", lambda self, now=False: False)
    with pytest.raises(Unavailable, match="nothing else keeps it"):
        away.write([fact("orders", "w1", 1, "[1]")])
    monkeypatch.undo()
    away.close()
