"""A reader that bootstraps, in a process of its own: it stops where it is told to, and goes on when it is told to.

For test_bootstrap_kills.py, where it, or one of its channels, dies meanwhile. What it gets it keeps in the database of
its own positions, every row once: rows of the snapshot and later ones in the table ``got``, whose key no row may break,
and each part that it committed in ``parts``, in the order of the commits.

Where it can stop (``holds``)::

    agree        before it asks for an agreement
    begin        the agreement is there, and not saved yet
    load N       before it asks for the text of part N
    apply N      in the transaction that applies part N, before its COMMIT
    committed N  part N is committed, and its function has not returned
    handle       in the transaction of the first rows after the snapshot
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Protocol

import attrs
import psycopg

import busrep
from busrep.core.snapshots import Agreement, SnapshotSource
from busrep.http.source import HttpSource
from busrep.stores import open_store
from busrep.streams import Registry
from tests import ROOT
from tests.shop import QUICK, Order, orders
from tests.support.children import Parent

READER = "mirror"
PART_ROWS = 50
# One part at a time, so that what is applied when a part is held is known. Beats that a busy machine can keep up with.
SETTINGS = attrs.evolve(QUICK, snapshot_part_rows=PART_ROWS, snapshot_connections=1, heartbeat=0.3)
TABLES = (
    "CREATE TABLE IF NOT EXISTS got (number bigint PRIMARY KEY, token bigint, writer text, status text, via text)",
    "CREATE TABLE IF NOT EXISTS parts (at integer PRIMARY KEY, number integer, process bigint, agreement text)",
)


class Target(Protocol):
    """The reader's own database, one transaction at a time; both kinds take ``%s`` for parameters here."""

    connection: Any

    def transaction(self) -> contextlib.AbstractAsyncContextManager[None]: ...
    async def execute(self, sql: str, rows: Sequence[Sequence[Any]] = ((),)) -> None: ...


class SqliteTarget:
    def __init__(self, path: str) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None, timeout=10)
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        async with self._turn:
            self.connection.execute("BEGIN IMMEDIATE")
            with self.connection:
                yield

    async def execute(self, sql: str, rows: Sequence[Sequence[Any]] = ((),)) -> None:
        self.connection.executemany(sql.replace("%s", "?"), rows)


class PostgresTarget:
    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self.connection = connection
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        async with self._turn, self.connection.transaction():
            yield

    async def execute(self, sql: str, rows: Sequence[Sequence[Any]] = ((),)) -> None:
        async with self.connection.cursor() as cursor:
            await cursor.executemany(sql.encode(), rows)


async def open_target(url: str, stack: contextlib.AsyncExitStack) -> Target:
    if url.startswith("sqlite:///"):
        sqlite = SqliteTarget(url.removeprefix("sqlite:///"))
        stack.callback(sqlite.connection.close)
        return sqlite
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    return PostgresTarget(await stack.enter_async_context(connection))


class Holds:
    """Where to stop, once each."""

    def __init__(self, parent: Parent, where: Sequence[str]) -> None:
        self._parent = parent
        self._gates = {name: asyncio.Event() for name in where}

    async def at(self, name: str) -> None:
        gate = self._gates.get(name)
        if gate is not None and not gate.is_set():
            self._parent.tell(event=["held", name])
            await gate.wait()

    def go(self, name: str) -> None:
        self._gates[name].set()


class HeldSource:
    """A source of snapshots that stops where it is told to."""

    def __init__(self, inner: SnapshotSource, holds: Holds) -> None:
        self._inner, self._holds = inner, holds

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        await self._holds.at("agree")
        return await self._inner.agree(stream, part_rows=part_rows, again=again)

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        await self._holds.at(f"load {number}")
        async with contextlib.aclosing(self._inner.load(agreement, number)) as pieces:
            async for piece in pieces:
                yield piece

    async def leave(self, agreement: Agreement) -> None:
        await self._inner.leave(agreement)

    async def open(self) -> None:
        await self._inner.open()

    async def close(self) -> None:
        await self._inner.close()


class HeldStore:
    """A store of saved positions that stops where it is told to; in all else the store itself."""

    def __init__(self, inner: Any, holds: Holds) -> None:
        self._inner, self._holds = inner, holds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def begin_bootstrap(self, reader: str, agreement: Agreement, **options: Any) -> Any:
        await self._holds.at("begin")
        return await self._inner.begin_bootstrap(reader, agreement, **options)


def open_source(url: str, settings: busrep.Settings) -> Any:
    if url.startswith("http"):
        return HttpSource(url, [orders], settings)
    return open_store(url, Registry([orders]), settings=settings)


def mirror(bus: busrep.Bus, target: Target, holds: Holds, parent: Parent, process: int) -> None:
    """The application: it keeps what it gets."""
    insert = "INSERT INTO got VALUES (%s, %s, %s, %s, %s)"

    @bus.snapshot(orders)
    async def apply(part: busrep.SnapshotPart[Order]) -> None:
        async with target.transaction():
            if part.first:
                await target.execute("DELETE FROM got")
            rows = zip(part.tokens, part.writers, part.rows, strict=True)
            await target.execute(insert, [(row.number, token, who, row.status, "part") for token, who, row in rows])
            await target.execute(
                "INSERT INTO parts SELECT count(*), %s, %s, %s FROM parts",
                [(part.number, process, json.dumps(dict(part.agreement.positions)))],
            )
            await part.save(target.connection)
            await holds.at(f"apply {part.number}")
        await holds.at(f"committed {part.number}")
        parent.tell(event=["applied", part.number])

    @bus.subscribe(orders)
    async def handle(batch: busrep.Batch[Order]) -> None:
        async with target.transaction():
            rows = zip(batch.tokens, batch.rows, strict=True)
            await target.execute(
                insert, [(row.number, token, batch.writer, row.status, "batch") for token, row in rows]
            )
            await batch.save(target.connection)
            await holds.at("handle")


async def watch(bus: busrep.Bus, parent: Parent) -> None:
    """Tell of each state, and of the first failure of the source."""
    state, failed = None, False
    while True:
        now = bus.statistics()["bootstrap"].get("orders", {})
        if now.get("state") != state:
            state = now["state"]
            parent.tell(event=["state", state])
        if not failed and now.get("attempts", 0) > 1:
            failed = True
            parent.tell(event=["failed"])
        await asyncio.sleep(0.005)


def note_token(heard: dict[str, int], line: bytes) -> None:
    """Note how far the writer of a line of rows has been heard."""
    command, _, rest = line.partition(b" ")
    if command == b"RDATA" and (token := rest.split(b" ", 3)[2]).isdigit():  # "batch": a later line has the token
        heard[rest.split(b" ", 2)[1].decode()] = int(token)


async def main() -> None:
    parent = Parent()
    task = await parent.hear()
    holds = Holds(parent, task["holds"])
    settings = attrs.evolve(SETTINGS, fetch_timeout=task["patience"])
    async with contextlib.AsyncExitStack() as stack:
        target = await open_target(task["target"], stack)
        source = HeldSource(open_source(task["source"], settings), holds)
        bus = await stack.enter_async_context(
            busrep.connect(
                task["redis"],
                name=task["name"],
                streams=[orders],
                store=open_source(task["store"], settings),
                reader_store=HeldStore(open_source(task["target"], settings), holds),
                reader=READER,
                snapshot_source=source,
                settings=settings,
                require_redis=False,
            )
        )
        mirror(bus, target, holds, parent, task["process"])
        heard: dict[str, int] = {}
        bus.on_line(lambda direction, _, line: note_token(heard, line) if direction == "<" else None)
        watching = asyncio.create_task(watch(bus, parent))
        stack.callback(watching.cancel)
        while (message := await parent.hear()) != {"end": True}:
            if "go" in message:
                holds.go(message["go"])
            elif "hear" in message:
                while any(heard.get(writer, 0) < token for writer, token in message["hear"].items()):
                    await asyncio.sleep(0.005)
                parent.tell(event=["heard"])
            elif "reach" in message:
                for writer, token in message["reach"].items():
                    await bus.wait_for(orders, writer, token, 30.0)
                while bus.statistics()["bootstrap"]["orders"]["state"] != "online":
                    await asyncio.sleep(0.005)
                parent.tell(event=["reached"])


class ReaderProcess:
    """The parent's end: ``async with ReaderProcess.start(task) as reader``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._events: asyncio.Queue[list[Any] | None] = asyncio.Queue()
        self.seen: list[list[Any]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, **task: Any) -> AsyncIterator[ReaderProcess]:
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.proof.bootstrap_child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        reader = cls(started)
        listening = asyncio.create_task(reader._listen())
        try:
            reader.tell(**task)
            yield reader
        finally:
            await reader.kill()
            await listening

    @property
    def state(self) -> str:
        """The last one that it told of, of what was looked at."""
        return str(next(event[1] for event in reversed(self.seen) if event[0] == "state"))

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if line.endswith(b"\n"):  # a killed process may leave half a line
                self._events.put_nowait(json.loads(line)["event"])
        self._events.put_nowait(None)

    async def until(self, *event: Any) -> None:
        """Wait until this has happened there; it may have been some time ago."""
        while list(event) not in self.seen:
            try:
                self.seen.append(await self.next())
            except asyncio.CancelledError as error:
                error.add_note(f"waited for {event}; the reader told of {self.seen}")
                raise

    async def next(self) -> list[Any]:
        """What happens next."""
        found = await self._events.get()
        assert found is not None, f"the reader ended by itself; it told of {self.seen}"
        return found

    async def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


if __name__ == "__main__":
    asyncio.run(main())
