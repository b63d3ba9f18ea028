"""A writer whose messages are single lines, for readers that take a message for one line, as the reference system."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import attrs
import pytest
import redis as redis_py

from busrep import Settings, Stream
from busrep.core.framing import parse_frame
from busrep.core.received import Followed
from busrep.core.writer import Writer
from busrep.errors import ConfigError
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from busrep.sync import connect
from tests.asyncio.bus_conformance import AsyncioBus, Deployment, Seen, until, write
from tests.shop import QUICK, Order
from tests.support.reader import Reader

ONE_LINE = attrs.evolve(QUICK, one_line_messages=True)
RUNTIMES = {"asyncio": AsyncioBus, "threads": connect}
orders = Stream("orders", Order, foreign_writers=True)


def frames_of(settings: Settings) -> list[Any]:
    """What a writer publishes: an announcement, two facts in one frame, and a step without rows."""
    writer = Writer("test", "w1", incarnation=7, epoch="0" * 32, settings=settings)
    writer.add_stream(orders, 10)
    writer.connected(0.0)
    frames = []
    for token, rows in ((11, ["[1]"]), (12, ["[2]", "[3]"]), (13, [])):
        writer.fact_completed("orders", token, [row.encode() for row in rows])
    writer.position_moved("orders", 13)
    while found := writer.frames_to_publish():
        frames += found
        for frame in found:
            writer.published(frame)
    return frames


def test_each_line_is_a_message_without_server_and_name() -> None:
    lines = [frame.messages for frame in frames_of(Settings(one_line_messages=True))]
    assert lines == [
        [b"POSITION orders w1 10 10"],
        [
            b"POSITION orders w1 10 10",
            b"RDATA orders w1 11 [1]",
            b"RDATA orders w1 batch [2]",
            b"RDATA orders w1 12 [3]",
            b"POSITION orders w1 12 13",
        ],
    ]


def test_messages_are_whole_frames_unless_told_otherwise() -> None:
    frames = frames_of(Settings())
    assert [list(frame.messages) for frame in frames] == [[frame.data] for frame in frames]
    assert [frame.data.split(b"\n")[-2] for frame in frames] == [b"NAME w1 7", b"RDATA orders w1 12 [3]"]


def test_a_frame_that_is_lost_or_comes_twice_is_noticed_by_its_head() -> None:
    """The chain holds from frame to frame: a head is a message of its own, and goes first."""
    messages = list(frames_of(Settings(one_line_messages=True))[1].messages)

    def received(*sent: bytes) -> tuple[list[Any], list[Any]]:
        reader = Reader([Followed("orders", foreign_writers=True)])
        reader.start_at("orders", "w1", 10)
        for message in sent:
            reader.receive(message, 0.0)
        batch = reader.take("orders", "w1")
        return list(getattr(batch, "payloads", [])), reader.fetches(0.0)

    rows = [b"[1]", b"[2]", b"[3]"]
    assert received(*messages) == (rows, [])
    assert received(*messages[:3], *messages) == (rows, [])  # PUBLISH had an unknown outcome in the midst of a fact
    _, asked = received(messages[0], b"POSITION orders w1 13 13", b"RDATA orders w1 14 [4]")
    assert [(one.after, one.upto) for one in asked] == [(10, 13)]


def test_a_writer_of_single_lines_needs_streams_whose_readers_believe_it() -> None:
    writer = Writer("test", "w1", incarnation=7, epoch=None, settings=Settings(one_line_messages=True))
    for stream in (Stream("orders", Order), Stream("typing", resettable=True)):
        with pytest.raises(ConfigError, match=r"declare Stream\('\w+', ..., foreign_writers=True\)"):
            writer.add_stream(stream, 0)


def test_a_writer_of_single_lines_refuses_streams_in_memory() -> None:
    """Of those a step back is a reset: a frame that arrived, and goes out again, would void its own rows."""
    typing = Stream("typing", resettable=True, foreign_writers=True)
    writer = Writer("test", "w1", incarnation=7, epoch=None, settings=Settings(one_line_messages=True))
    with pytest.raises(ConfigError, match="'typing', which is in memory, would take a repeated message for a reset"):
        writer.add_stream(typing, 0)
    Writer("test", "w1", incarnation=7, epoch=None, settings=Settings()).add_stream(typing, 0)


@pytest.mark.servers
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_bus_of_single_lines_refuses_streams_in_memory(runtime: str, redis_url: str, bus_name: str) -> None:
    typing = Stream("typing", resettable=True, foreign_writers=True)
    bus = RUNTIMES[runtime](redis_url, name=bus_name, streams=[typing], writer="w1", settings=ONE_LINE)
    with pytest.raises(ConfigError, match="'typing', which is in memory"), bus:
        bus.publish(typing, [[1]])


def test_unnamed_lines_of_a_registered_writer_count_where_foreign_writers_are_declared() -> None:
    """And only as long as it has never said its name: one that does may be spoken for by nobody else."""

    def counted(*messages: bytes, **options: Any) -> int:
        reader = Reader([Followed("s", **options)], epoch="0" * 32)
        reader.admission.registered({("s", "w1"): 7})
        reader.start_at("s", "w1", 5)
        for message in messages:
            reader.receive(message, 0.0)
        return reader.progress["s", "w1"].position

    step, named = b"POSITION s w1 5 9", b"SERVER test " + b"0" * 32 + b"\nNAME w1 7\nPOSITION s w1 5 5"
    assert counted(step, foreign_writers=True) == 9
    assert counted(step) == 5
    assert counted(named, step, foreign_writers=True) == 5


class FirstLines:
    """Hears a channel as the reference system does: of each message the first line, if it is one of a stream's."""

    def __init__(self, redis: str, channel: str) -> None:
        self.lines: list[str] = []
        self.others: list[bytes] = []
        self._client = redis_py.Redis.from_url(redis)
        self._pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(channel)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> FirstLines:
        assert self._pubsub.get_message(timeout=5.0) is None  # the subscription's own
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._pubsub.close()
        self._client.close()

    def _listen(self) -> None:
        while not self._end.is_set():
            message = self._pubsub.get_message(timeout=0.05)
            if message is None:
                continue
            first, more, _ = message["data"].partition(b"\n")
            if more or not first.startswith((b"RDATA ", b"POSITION ", b"REPLICATE")):
                self.others.append(message["data"])
            else:
                self.lines.append(first.decode())


@pytest.mark.servers
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_whoever_reads_first_lines_alone_gets_every_row(
    runtime: str, redis_url: str, bus_name: str, sqlite_url: str
) -> None:
    with FirstLines(redis_url, bus_name) as listening, deployment(runtime, redis_url, bus_name, sqlite_url) as make:
        with make(writer="w1", settings=ONE_LINE) as writer, make() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            until(lambda: reader.statistics()["reader"]["states"].get("orders") == {"w1": "live"})
            last = write(writer, *range(20), stream=orders)
            last = writer.publish(orders, [Order(number, "bulk") for number in range(20, 40)])[-1]
            with writer.write(orders) as fact:
                fact.add(Order(40, "a"))
                fact.add(Order(41, "b"))
            reader.wait_for(orders, "w1", fact.id, timeout=20)
            assert fact.id > last
            assert seen.numbers == list(range(42))
            until(lambda: f"POSITION orders w1 {fact.id} {fact.id}" in listening.lines)  # a beat
            counted = reader.statistics()["reader"]
            assert counted["rows_received"] > 0  # not only from the table
            assert counted["unnamed_lines"] == counted["old_incarnations"] == counted["late_rows"] == 0
        found = [line.split(" ", 4) for line in listening.lines if line.startswith("RDATA ")]
        assert len(found) == 42
        assert [words[3] for words in found[-2:]] == ["batch", str(fact.id)]
        assert listening.others == []


@pytest.mark.servers
def test_such_a_writer_hears_itself_and_keeps_its_link(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    """Its echoes carry no NAME: taken for silence, the link would be made anew every few beats."""
    settings = attrs.evolve(ONE_LINE, heartbeat=0.05, silent_after_beats=5)
    with deployment("asyncio", redis_url, bus_name, sqlite_url) as make:
        with make(writer="w1", settings=settings) as writer, FirstLines(redis_url, bus_name) as listening:
            until(lambda: sum(line.startswith("POSITION orders w1 ") for line in listening.lines) > 30)
            assert writer.statistics()["link"]["reconnects"] == 0


@contextlib.contextmanager
def deployment(runtime: str, redis_url: str, name: str, url: str) -> Any:
    store = open_blocking_store(url, Registry([orders]))
    store.init()
    make = Deployment(redis_url, name, url, RUNTIMES[runtime])
    yield lambda **options: make.bus(streams=[orders], **options)


def test_a_line_of_such_a_writer_parses_as_a_message() -> None:
    for frame in frames_of(Settings(one_line_messages=True)):
        for message in frame.messages:
            assert len(parse_frame(message, 2**20).items) == 1
