from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from busrep.errors import ConfigError
from busrep.settings import Settings
from busrep.spark.listening import Listener
from busrep.spark.secrets import with_redis_password
from busrep.testing.servers import RedisServer, start_redis

pytestmark = pytest.mark.servers

ONE, TWO = "1" * 32, "2" * 32
QUICK = Settings(heartbeat=0.05, retry_min=0.01, retry_max=0.05, redis_timeout=2.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with start_redis() as running:
        yield running


@pytest.fixture
def listener(server: RedisServer) -> Iterator[Listener]:
    with contextlib.closing(Listener(server.url, "shop", "orders", channel="own")) as made:
        linked(made)
        made.announced(ONE)
        made.announced(ONE)
        yield made


def linked(listener: Listener) -> None:
    while not listener.linked:
        listener.wait(5.0)


def frame(*lines: str) -> bytes:
    return "\n".join(lines).encode()


HELLO = ("SERVER shop " + ONE, "NAME w1 3")


def test_a_writer_of_this_log_is_believed(listener: Listener) -> None:
    listener.receive(frame(*HELLO, "POSITION orders w1 7 9", "POSITION payments w1 1 99"))
    assert listener.announced(ONE) == ({"w1": 9}, False)
    listener.receive(
        frame("NAME w1 3", "POSITION orders w1 9 9", "RDATA orders w1 batch [1]", "RDATA orders w1 11 [2]")
    )
    assert listener.announced(ONE) == ({"w1": 11}, False)
    listener.receive(frame("NAME w1 3", "POSITION orders w1 10 10"))  # late: a position does not go back
    assert listener.announced(ONE) == ({"w1": 11}, False)
    # A batch whose number has not come yet proves nothing.
    listener.receive(frame("NAME w1 3", "RDATA orders w1 batch [1]"))
    assert listener.announced(ONE) == ({"w1": 11}, False)


@pytest.mark.parametrize(
    "lines",
    [
        ("POSITION orders w1 9 9",),  # nobody says who speaks
        ("NAME w1 3", "POSITION orders w1 9 9"),  # the epoch was not heard yet
        ("SERVER shop " + TWO, "NAME w1 3", "POSITION orders w1 9 9"),  # another log's
        ("SERVER shop " + ONE, "NAME w1 3", "POSITION orders w2 9 9"),  # of somebody else
        ("SERVER shop", "NAME w1", "POSITION orders w1 9 9"),  # a foreign writer
        ("SERVER shop " + ONE, "NAME w1 3", "SERVER shop " + TWO, "NAME w1 4", "RDATA orders w1 9 [1]"),
    ],
)
def test_all_else_is_a_signal_to_ask_the_table(listener: Listener, lines: tuple[str, ...]) -> None:
    listener.receive(frame(*lines))
    assert listener.announced(ONE)[1]
    assert listener.announced(ONE) == ({}, False)


def test_what_was_said_of_a_log_that_is_gone_does_not_count(listener: Listener) -> None:
    listener.receive(frame(*HELLO, "POSITION orders w1 9 9"))
    assert listener.announced(ONE) == ({"w1": 9}, False)
    assert listener.announced(TWO)[1]
    assert listener.announced(TWO) == ({}, False)
    # A writer from before the restore goes on talking; its successor is believed.
    listener.receive(frame("NAME w1 3", "POSITION orders w1 10 10"))
    assert listener.announced(TWO)[1]
    listener.receive(frame("SERVER shop " + TWO, "NAME w1 4", "POSITION orders w1 2 2"))
    listener.receive(frame("NAME w1 3", "POSITION orders w1 50 50"))
    assert listener.announced(TWO)[1]
    assert listener.announced(TWO) == ({"w1": 2}, False)


def test_noise_disturbs_nothing(listener: Listener) -> None:
    for noise in (b"", b"\n", b"5", b"\xff\xfe", b"RDATA orders", b"POSITION orders w1 x y", b"NAME ", b"REPLICATE"):
        listener.receive(noise)
    listener.receive(frame(*HELLO, "POSITION orders w1 9 9"))
    assert listener.announced(ONE) == ({"w1": 9}, False)


@pytest.mark.parametrize("channel", ["shop", "shop/own"])
def test_it_hears_what_is_published(listener: Listener, server: RedisServer, channel: str) -> None:
    with contextlib.closing(redis.Redis.from_url(server.url)) as client:
        client.publish(channel, frame(*HELLO, "POSITION orders w1 9 9"))
        while listener.announced(ONE)[0] != {"w1": 9}:
            listener.wait(5.0)
    assert listener.linked


def test_a_link_that_is_down_is_a_signal_and_comes_again() -> None:
    with (
        start_redis() as server,
        contextlib.closing(Listener(server.url, "shop", "orders", settings=QUICK)) as listener,
    ):
        linked(listener)
        server.kill()
        while listener.linked:
            listener.wait(0.1)
        assert listener.announced(ONE)[1]
        assert listener.announced(ONE)[1]
        server.start()
        linked(listener)
        assert listener.announced(ONE)[1]  # what was said meanwhile is not known
        assert listener.announced(ONE) == ({}, False)


def test_a_silent_link_is_made_anew(server: RedisServer) -> None:
    with (
        contextlib.closing(redis.Redis.from_url(server.url)) as client,
        contextlib.closing(Listener(server.url, "silence", "orders", settings=QUICK)) as listener,
    ):
        linked(listener)
        before = int(client.info("stats")["total_connections_received"])
        while int(client.info("stats")["total_connections_received"]) == before:
            listener.wait(0.05)
        linked(listener)
        assert listener.announced(ONE)[1]


def test_closing_ends_the_thread(server: RedisServer) -> None:
    before = threading.active_count()
    for url in (server.url, "redis://127.0.0.1:1"):
        listener = Listener(url, "shop", "orders")
        assert threading.active_count() == before + 1
        listener.close()
        assert threading.active_count() == before


def test_the_password_comes_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUSREP_REDIS_PASSWORD", raising=False)
    assert with_redis_password("redis://db:1", None) == "redis://db:1"
    monkeypatch.setenv("BUSREP_REDIS_PASSWORD", "p@ss")
    assert with_redis_password("redis://db:1/2", None) == "redis://:p%40ss@db:1/2"
    (tmp_path / "secret").write_text("other\n")
    assert with_redis_password("redis://me@db:1", str(tmp_path / "secret")) == "redis://me:other@db:1"
    with pytest.raises(ConfigError, match="'redisPasswordFile'.*cannot be read"):
        with_redis_password("redis://db", str(tmp_path / "none"))


def test_a_bad_url_is_told() -> None:
    with pytest.raises(ConfigError, match="the Redis URL"):
        Listener("nonsense", "shop", "orders")
