"""``busrep bench``: what busrep does on this Redis and this store, measured from here."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import click
import redis as redis_py

import busrep
from busrep.cli.demo_table import own_database
from busrep.cli.options import json_option
from busrep.cli.output import print_json, print_table
from busrep.cli.servers import make_store, opened, run
from busrep.errors import ConfigError, Unavailable
from busrep.links.redis import tls_defaults
from busrep.stores import split_store_url
from busrep.testing.servers import start_redis
from busrep.urls import shown_url

# What decides how long a commit takes.
SETTINGS = {
    "postgresql": {f"PostgreSQL {name}": f"SHOW {name}" for name in ("server_version", "fsync", "synchronous_commit")},
    "sqlite": {f"SQLite {name}": f"PRAGMA {name}" for name in ("journal_mode", "synchronous")},
}
# Facts written at a time, and rows published at a time.
AT_A_TIME, PUBLISHED = (1, 8, 32), (10, 100, 500)
# Facts a second whose delay is measured.
PACE = 100
# Delays that percentiles take, however long that lasts.
FEWEST = 2
# Seconds to wait for what was written, beyond what a round takes.
PATIENCE = 60.0


@attrs.frozen
class Row:
    """Some 120 bytes as JSON."""

    number: int
    text: str
    amount: float
    flag: bool


ROWS = busrep.Stream("bench", Row)


def row(number: int) -> Row:
    """The row of this number."""
    return Row(number, "x" * 90, number / 7, number % 2 == 0)


@attrs.frozen
class Figure:
    """What one measurement found. ``per_second``: facts, or of round trips these; delays in milliseconds."""

    what: str
    per_second: float
    p50_ms: float | None = None
    p99_ms: float | None = None

    @classmethod
    def of(cls, what: str, count: int, seconds: float, delays: Sequence[float] = ()) -> Figure:
        """From a count, the time that it took, and the delay of each in seconds; a few delays have no percentiles."""
        cuts = statistics.quantiles(delays, n=100) if len(delays) >= FEWEST else None
        p50, p99 = (None, None) if cuts is None else (round(1000 * cuts[49], 3), round(1000 * cuts[98], 3))
        return cls(what, round(count / seconds, 1), p50, p99)


@click.command()
@click.option("--redis", metavar="URL", help="Measure this Redis [default: start one].")
@click.option("--store", metavar="URL", help="Measure this server, or file's folder [default: a file of its own].")
@click.option(
    "--seconds", default=2.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds for each figure."
)
@json_option()
def bench(redis: str | None, store: str | None, seconds: float, as_json: bool) -> None:
    """Measure what busrep does on a Redis and a store.

    Writes facts, publishes and reads them, from one process, and prints how many a second there were and how long one
    took. The settings of the servers that decide over that are read back and printed. What it writes is a schema of
    PostgreSQL, or an SQLite file, of its own, and removed; BUSREP_REDIS and BUSREP_STORE are not looked at.
    """
    found = measured(redis, store, seconds)
    if as_json:
        print_json(found)
        return
    for name, value in found["setting"].items():
        click.echo(f"{name}: {value}")
    print_table("busrep bench", ("", "a second", "p50 ms", "p99 ms"), [tuple(one.values()) for one in found["figures"]])


def measured(redis: str | None, store: str | None, seconds: float) -> dict[str, Any]:
    """The setting and all figures, JSON-able. Raises ConfigError, MissingExtra, Unavailable."""
    name = f"bench-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        url, _ = stack.enter_context(own_database(store, name))
        if redis is None:
            redis = stack.enter_context(start_redis()).url
        setting = {
            "busrep": f"{busrep.__version__}, CPython {platform.python_version()}, {platform.machine()}",
            "Redis": f"{shown_url(redis)}, {_version(redis)}",
            "store": shown_url(url),
        }
        found, figures = run(_measure(redis, url, name, seconds))
        return {"setting": setting | found, "figures": [attrs.asdict(one) for one in figures]}


def _version(url: str) -> str:
    """Of the Redis server. Raises ConfigError, Unavailable."""
    try:
        with redis_py.Redis.from_url(url, decode_responses=True, **tls_defaults(url)) as client:
            info = client.info("server")
    except ValueError as error:
        raise ConfigError(f"--redis {shown_url(url)}: {error}") from None
    except redis_py.exceptions.NoPermissionError:
        return "of unknown version: INFO is not allowed"
    except redis_py.RedisError as error:
        raise Unavailable(f"Redis at {shown_url(url)}", error) from None
    return f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}"


async def _measure(redis: str, store: str, name: str, seconds: float) -> tuple[dict[str, Any], list[Figure]]:
    """Settings of the store's, and the figures."""
    asking = make_store(store, [ROWS])
    await asking.init()
    given: dict[str, Any] = {"name": name, "streams": [ROWS], "store": store}
    async with opened(asking), busrep.connect(redis, writer="bench", **given) as writer:
        measuring = BenchRun(writer, seconds)
        async with writer.write(ROWS) as fact:
            asked = SETTINGS.get(split_store_url(store)[0], {})
            setting = {what: (await fact.execute(sql))[0][0] for what, sql in asked.items()}
        figures = [await measuring.question("a question to the store", asking.epoch)]
        figures += [await measuring.written(count) for count in AT_A_TIME]
        figures += [await measuring.published(count) for count in PUBLISHED]
        async with busrep.connect(redis, start="earliest", **given) as reader:
            figures += [await measure(reader) for measure in (measuring.catching_up, measuring.live, measuring.delays)]
    return setting, figures


class BenchRun:
    """Measurements by one writer."""

    def __init__(self, writer: busrep.Bus, seconds: float) -> None:
        self.writer, self.seconds = writer, seconds
        self.next = self.last = 0
        self.handled: dict[int, float] = {}  # number of a row -> when it was handled

    async def question(self, what: str, ask: Callable[[], Awaitable[Any]]) -> Figure:
        """Round trips, one after the other."""
        delays: list[float] = []
        started = time.monotonic()
        while (began := time.monotonic()) < started + self.seconds or len(delays) < FEWEST:
            await ask()
            delays.append(time.monotonic() - began)
        return Figure.of(what, len(delays), time.monotonic() - started, delays)

    async def _write(self) -> int:
        """One fact; the number of its row."""
        self.next = number = self.next + 1
        async with self.writer.write(ROWS) as fact:
            fact.add(row(number))
        self.last = max(self.last, fact.id)
        return number

    async def written(self, at_a_time: int) -> Figure:
        """Single facts; how long one took, until its block was left."""
        delays: list[float] = []
        started = time.monotonic()

        async def loop() -> None:
            while (began := time.monotonic()) < started + self.seconds or len(delays) < FEWEST:
                await self._write()
                delays.append(time.monotonic() - began)

        await asyncio.gather(*(loop() for _ in range(at_a_time)))
        return Figure.of(f"write, {at_a_time} at a time", len(delays), time.monotonic() - started, delays)

    async def _keep_publishing(self, count: int) -> tuple[int, float]:
        """So many rows a call, for as long as a figure takes; the number of the last row before, and when it began."""
        first, started = self.next, time.monotonic()
        while time.monotonic() < started + self.seconds:
            ids = await self.writer.publish(ROWS, [row(self.next + at) for at in range(1, count + 1)])
            self.next, self.last = self.next + count, ids[-1]
        return first, started

    async def published(self, count: int) -> Figure:
        """Facts that are written many at a time, one call after the other."""
        first, started = await self._keep_publishing(count)
        return Figure.of(f"publish, {count} at a time", self.next - first, time.monotonic() - started)

    async def catching_up(self, reader: busrep.Bus) -> Figure:
        """A reader without a position takes all from the table that was written before."""

        @reader.subscribe(ROWS)
        async def handle(batch: busrep.Batch[Row]) -> None:
            now = time.monotonic()
            self.handled.update((one.number, now) for one in batch.rows)

        started = time.monotonic()
        return Figure.of("catch up", self.next, await self._until_handled(reader) - started)

    async def _until_handled(self, reader: busrep.Bus) -> float:
        """When the reader had handled all that was written."""
        await reader.wait_for(ROWS, "bench", self.last, timeout=PATIENCE + self.seconds)
        return time.monotonic()

    async def live(self, reader: busrep.Bus) -> Figure:
        """Rows that are handled while they are published."""
        first, started = await self._keep_publishing(PUBLISHED[1])
        return Figure.of("publish and handle", self.next - first, await self._until_handled(reader) - started)

    async def delays(self, reader: busrep.Bus) -> Figure:
        """From the beginning of a fact's block to the call of a reader's handler."""
        begun: dict[int, float] = {}
        started = time.monotonic()
        for at in range(max(FEWEST, int(PACE * self.seconds))):
            await asyncio.sleep(max(0.0, started + at / PACE - time.monotonic()))
            began = time.monotonic()
            begun[await self._write()] = began
        seconds = await self._until_handled(reader) - started
        delays = [self.handled[number] - began for number, began in begun.items()]
        return Figure.of(f"write to handler, {PACE} a second", len(begun), seconds, delays)
