"""What else carries rows from one process to another: how many a second, and how late at a fixed rate.

    python benchmarks/peers.py [--rows 50000] [--rate 100] [--seconds 10] [--rounds 3] [--only NAME] [--json FILE]

One writer process and one reader process; every row, some 120 bytes as JSON, is read and decoded. ``rows/s``: the
writer has ``--rows`` rows and hands over 500 at a time; the clock runs from just before the first until the reader has
the last. ``delay``: a row is due at fixed times whether or not the one before has ended, and its delay counts from then
until the reader has it. Contenders take turns, each round with fresh processes and names of its own.

``pub/sub``    Redis: PUBLISH, one row a message, pipelined. Keeps nothing: what is not read is lost.
``streams``    Redis Streams: XADD, pipelined; a group's XREADGROUP of 500 and XACK. Redis keeps its rows in memory, and
               without ``appendonly`` loses them when it dies.
``jetstream``  NATS JetStream: a stream in files, publishes acknowledged; a durable pull consumer that fetches 500 and
               acknowledges each. Left out without nats-server and nats-py.
``faststream`` FastStream on Redis: ``broker.publish`` to a channel, pipelined; a subscriber is called with one row at a
               time, as a list. Keeps nothing. Left out without faststream.
``notify``     PostgreSQL: INSERT and NOTIFY in one transaction; the reader is woken by LISTEN and reads the table
               behind the last ID that it had. A row whose transaction ends after one with a higher ID is never seen.
``outbox``     PostgreSQL: INSERT; the reader asks the table every 100 ms. The same rows are never seen.
``busrep``     PostgreSQL and Redis: ``bus.publish`` of 500, or ``bus.write`` of one.

Only the last three write their rows in the transaction of the business write, and only the last one loses none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import attrs
import orjson
import psycopg
import redis.asyncio
import setting
from latency import at_rate
from rows import make_tables

import busrep
from busrep.testing.processes import free_port

BULK = 500
POLL = 0.1
PATIENCE = 10.0  # seconds without a row after which the rest counts as lost
CONNECTIONS = 8
WARM_UP = 1.0  # seconds of each run at a rate whose rows are not counted
TEXT = "x" * 84


@attrs.define
class Row:
    due: float
    text: str
    amount: float
    flag: bool


rows = busrep.Stream("rows", Row)


def row(due: float) -> Row:
    return Row(due, TEXT, 1.5, True)


def encode(due: float) -> bytes:
    return orjson.dumps(attrs.astuple(row(due)))


def decode(text: bytes | str) -> float:
    """The time at which a row was due."""
    due: float = Row(*orjson.loads(text)).due
    return due


@attrs.frozen
class Servers:
    """URLs, and a name of this run's own."""

    redis: str
    postgres: str
    nats: str
    name: str


class Peer(Protocol):
    """Both sides of one contender, each opened in its own process."""

    def __init__(self, servers: Servers) -> None: ...

    async def prepare(self) -> None:
        """In the writer's process, before the reader begins."""

    def writer(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Gives what writes rows that are due at these times."""

    def reader(self) -> AsyncIterator[list[float]]:
        """The rows as they come, by when they were due. First an empty list, when it is ready."""


class PubSub:
    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    async def prepare(self) -> None: ...

    @contextlib.asynccontextmanager
    async def writer(self) -> AsyncIterator[Any]:
        async with redis.asyncio.Redis.from_url(self.servers.redis) as client:

            async def write(dues: Sequence[float]) -> None:
                async with client.pipeline(transaction=False) as pipe:
                    for due in dues:
                        pipe.publish(self.servers.name, encode(due))
                    await pipe.execute()

            yield write

    async def reader(self) -> AsyncIterator[list[float]]:
        async with redis.asyncio.Redis.from_url(self.servers.redis) as client, client.pubsub() as pubsub:
            await pubsub.subscribe(self.servers.name)
            async for message in pubsub.listen():
                yield [] if message["type"] == "subscribe" else [decode(message["data"])]


class Streams:
    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    async def prepare(self) -> None:
        async with redis.asyncio.Redis.from_url(self.servers.redis) as client:
            await client.xgroup_create(self.servers.name, "group", mkstream=True)

    @contextlib.asynccontextmanager
    async def writer(self) -> AsyncIterator[Any]:
        async with redis.asyncio.Redis.from_url(self.servers.redis) as client:

            async def write(dues: Sequence[float]) -> None:
                async with client.pipeline(transaction=False) as pipe:
                    for due in dues:
                        pipe.xadd(self.servers.name, {b"row": encode(due)})
                    await pipe.execute()

            yield write

    async def reader(self) -> AsyncIterator[list[float]]:
        async with redis.asyncio.Redis.from_url(self.servers.redis) as client:
            yield []
            while True:
                asked = {self.servers.name: ">"}
                answer = await client.xreadgroup("group", "reader", asked, count=BULK, block=5_000)
                for _, entries in answer or ():
                    yield [decode(fields[b"row"]) for _, fields in entries]
                    await client.xack(self.servers.name, "group", *[number for number, _ in entries])


class JetStream:
    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.subject = servers.name.replace(".", "-")

    async def prepare(self) -> None:
        import nats

        client = await nats.connect(self.servers.nats)
        await client.jetstream().add_stream(name=self.subject, subjects=[self.subject])
        await client.close()

    @contextlib.asynccontextmanager
    async def writer(self) -> AsyncIterator[Any]:
        import nats

        client = await nats.connect(self.servers.nats)
        stream = client.jetstream(publish_async_max_pending=2 * BULK)

        async def write(dues: Sequence[float]) -> None:
            await asyncio.gather(*[await stream.publish_async(self.subject, encode(due)) for due in dues])

        yield write
        await client.close()

    async def reader(self) -> AsyncIterator[list[float]]:
        import nats
        import nats.errors

        client = await nats.connect(self.servers.nats)
        consumer = await client.jetstream().pull_subscribe(self.subject, durable="reader")
        yield []
        while True:
            with contextlib.suppress(TimeoutError, nats.errors.TimeoutError):
                messages = await consumer.fetch(BULK, timeout=0.5)
                yield [decode(message.data) for message in messages]
                for message in messages:
                    await message.ack()


class FastStream:
    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    async def prepare(self) -> None: ...

    @contextlib.asynccontextmanager
    async def writer(self) -> AsyncIterator[Any]:
        from faststream.redis import RedisBroker

        async with (
            RedisBroker(self.servers.redis) as broker,
            redis.asyncio.Redis.from_url(self.servers.redis) as client,
        ):

            async def write(dues: Sequence[float]) -> None:
                async with client.pipeline(transaction=False) as pipe:
                    for due in dues:
                        await broker.publish(attrs.astuple(row(due)), self.servers.name, pipeline=pipe)
                    await pipe.execute()

            yield write

    async def reader(self) -> AsyncIterator[list[float]]:
        from faststream.redis import RedisBroker

        got = asyncio.Queue[list[float]]()
        async with RedisBroker(self.servers.redis, logger=None) as broker:

            @broker.subscriber(self.servers.name)
            async def handle(message: list[Any]) -> None:
                got.put_nowait([Row(*message).due])

            await broker.start()
            yield []
            while True:
                yield await got.get()


class Table:
    """A table of rows that a reader looks into, woken or not."""

    statement = "INSERT INTO outbox (row) SELECT unnest(%s::text[])"

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    async def prepare(self) -> None:
        async with await psycopg.AsyncConnection.connect(self.servers.postgres, autocommit=True) as connection:
            await connection.execute("DROP TABLE IF EXISTS outbox")
            await connection.execute("CREATE TABLE outbox (id bigserial PRIMARY KEY, row text NOT NULL)")

    @contextlib.asynccontextmanager
    async def writer(self) -> AsyncIterator[Any]:
        free = asyncio.Queue[psycopg.AsyncConnection[Any]]()
        made = [
            await psycopg.AsyncConnection.connect(self.servers.postgres, autocommit=True) for _ in range(CONNECTIONS)
        ]
        for connection in made:
            free.put_nowait(connection)

        async def write(dues: Sequence[float]) -> None:
            connection = await free.get()
            await self.insert(connection, [encode(due).decode() for due in dues])
            free.put_nowait(connection)

        yield write
        for connection in made:
            await connection.close()

    async def insert(self, connection: psycopg.AsyncConnection[Any], texts: list[str]) -> None:
        await connection.execute(self.statement, (texts,))

    async def wait(self, _: psycopg.AsyncConnection[Any]) -> None:
        await asyncio.sleep(POLL)

    async def reader(self) -> AsyncIterator[list[float]]:
        async with await psycopg.AsyncConnection.connect(self.servers.postgres, autocommit=True) as connection:
            await connection.execute("LISTEN outbox")
            yield []
            last = 0
            while True:
                asked = await connection.execute(
                    "SELECT id, row FROM outbox WHERE id > %s ORDER BY id LIMIT %s", (last, 5_000)
                )
                if found := await asked.fetchall():
                    last = found[-1][0]
                    yield [decode(text) for _, text in found]
                else:
                    await self.wait(connection)


class Notify(Table):
    async def insert(self, connection: psycopg.AsyncConnection[Any], texts: list[str]) -> None:
        async with connection.transaction():
            await connection.execute(self.statement, (texts,))
            await connection.execute("NOTIFY outbox")

    async def wait(self, connection: psycopg.AsyncConnection[Any]) -> None:
        async for _ in connection.notifies(timeout=5.0, stop_after=1):
            pass


class Busrep:
    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    async def prepare(self) -> None:
        await make_tables(self.servers.postgres, rows)

    def _bus(self, **options: Any) -> busrep.Bus:
        servers = self.servers
        return busrep.connect(servers.redis, name=servers.name, streams=[rows], store=servers.postgres, **options)

    @contextlib.asynccontextmanager
    async def writer(self) -> AsyncIterator[Any]:
        async with self._bus(writer="w1") as bus:

            async def write(dues: Sequence[float]) -> None:
                if len(dues) > 1:
                    await bus.publish(rows, [row(due) for due in dues])
                    return
                async with bus.write(rows) as fact:
                    fact.add(row(dues[0]))

            yield write

    async def reader(self) -> AsyncIterator[list[float]]:
        async with self._bus() as bus:
            got = asyncio.Queue[list[float]]()
            bus.subscribe(rows)(lambda batch: got.put_nowait([one.due for one in batch.rows]))
            while not bus.statistics()["link"]["connected"] or "rows" not in bus.reading.core.followed:
                await asyncio.sleep(0.01)
            yield []
            while True:
                yield await got.get()


PEERS: dict[str, type[Peer]] = {
    "pub/sub": PubSub, "streams": Streams, "jetstream": JetStream, "faststream": FastStream, "notify": Notify,
    "outbox": Table, "busrep": Busrep,
}  # fmt: skip


async def written(peer: Peer, rate: float, count: int) -> None:
    async with peer.writer() as write:
        if rate:
            await at_rate(lambda due: write([due]), rate, count / rate - WARM_UP)
            return
        await write([time.monotonic()])  # connected, prepared; the reader leaves it out
        started = time.monotonic()
        for _ in range(count // BULK):
            await write([started] * BULK)


async def read(peer: Peer, rate: float, count: int) -> tuple[list[float], int]:
    """Delays at a rate, else how long all took, seconds; and how many rows never came."""
    found: list[tuple[float, float]] = []
    expected = count if rate else count + 1
    async with contextlib.aclosing(peer.reader()) as reader:  # type: ignore[type-var]
        await anext(reader)
        print("ready", flush=True)
        while len(found) < expected:
            try:
                dues = await asyncio.wait_for(anext(reader), PATIENCE)
            except TimeoutError:
                break
            now = time.monotonic()
            found += [(due, now - due) for due in dues]
    lost = expected - len(found)
    if not rate:
        return [found[-1][1]], lost
    first = min(due for due, _ in found) + WARM_UP
    return [delay for due, delay in found if due >= first], lost


def child(role: str, kind: str, servers: dict[str, str], rate: float, count: int) -> None:
    peer = PEERS[kind](Servers(**servers))
    if role == "writer":
        asyncio.run(written(peer, rate, count))
    else:
        print(json.dumps(asyncio.run(read(peer, rate, count))))


def run(kind: str, servers: Servers, rate: float, count: int) -> tuple[list[float], int]:
    spec = {"kind": kind, "servers": attrs.asdict(servers), "rate": rate, "count": count}

    def start(role: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, __file__, "--child", json.dumps({"role": role, **spec})]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)

    asyncio.run(PEERS[kind](servers).prepare())
    with start("reader") as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline().strip() == "ready"
        with start("writer") as writer:
            if writer.wait():
                reader.kill()
                raise SystemExit(f"{kind}: the writer failed")
        answer = reader.stdout.read()
    if reader.returncode:
        raise SystemExit(f"{kind}: the reader failed")
    delays, lost = json.loads(answer)
    return delays, lost


@contextlib.contextmanager
def nats_server() -> Any:
    """Its URL; None where there is none."""
    program = shutil.which("nats-server", path="/usr/sbin:/usr/local/bin:/usr/bin")
    if program is None or importlib.util.find_spec("nats") is None:
        yield None
        return
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="busrep-bench-") as folder:
        command = [program, "--jetstream", "--store_dir", folder, "--addr", "127.0.0.1", "--port", str(port)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            try:
                setting.tell(subprocess.check_output([program, "--version"], text=True).strip())
                yield f"nats://127.0.0.1:{port}"
            finally:
                server.terminate()


@attrs.define
class Found:
    """Of one contender, by round: seconds for all rows, and the delays at the rate. ``lost``: rows of all rounds."""

    seconds: list[float] = attrs.field(factory=list)
    delays: list[list[float]] = attrs.field(factory=list)
    lost: int = 0


def report(found: dict[str, Found], count: int) -> None:
    print(f"{'':12}{'rows/s':>10}{'delay p50':>12}{'p99':>10}{'longest':>10}{'lost':>8}   (ms; medians of the rounds)")
    for kind, those in found.items():
        cuts = setting.percentiles(those.delays)
        rate, longest = count / statistics.median(those.seconds), 1000 * max(map(max, those.delays))
        print(f"{kind:12}{rate:10,.0f}{cuts[49]:12.2f}{cuts[98]:10.2f}{longest:10.2f}{those.lost:8,}")


def measure(given: argparse.Namespace, servers: Callable[[str], Servers]) -> dict[str, Found]:
    kinds = [kind for kind in PEERS if not given.only or kind in given.only]
    if not servers("").nats and "jetstream" in kinds:
        print("jetstream is left out: it needs nats-server and nats-py")
        kinds.remove("jetstream")
    if importlib.util.find_spec("faststream") is None and "faststream" in kinds:
        print("faststream is left out: it needs faststream[redis]")
        kinds.remove("faststream")
    found = {kind: Found() for kind in kinds}
    for number in range(given.rounds):
        for kind, those in found.items():
            (seconds,), lost = run(kind, servers(f"{kind}-all-{number}"), 0, given.rows)
            those.seconds.append(seconds)
            those.lost += lost
            count = int(given.rate * (given.seconds + WARM_UP))
            delays, lost = run(kind, servers(f"{kind}-rate-{number}"), given.rate, count)
            those.delays.append(delays)
            those.lost += lost
            print(f"round {number + 1}: {kind}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rate", type=float, default=100.0, help="rows a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run at that rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=PEERS, help="this contender; may be repeated")
    setting.add_json(parser)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(**given.child)
        return
    with contextlib.ExitStack() as stack:
        server, postgres = setting.servers(stack)
        nats = stack.enter_context(nats_server())
        found = measure(given, lambda name: Servers(server.url, postgres.url, nats or "", f"bench-{name}"))
    report(found, given.rows)
    setting.write(given, {kind: attrs.asdict(one) for kind, one in found.items()})


if __name__ == "__main__":
    main()
