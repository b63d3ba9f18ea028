"""A process of a deployment, for the tests of the other commands: `Child` starts one, and calls its helpers.

One JSON object a line, both ways: {"call": "presence.start", "args": ["@a"]} is answered with {"gives": ...} or
{"raises": "ConfigError"}, and what happens meanwhile comes as {"event": [...]}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import busrep
from busrep.commands.acks import Acknowledgements, Retained
from busrep.commands.locks import Locks
from busrep.commands.presence import Presence
from busrep.commands.remote_servers import RemoteServers
from busrep.core.application_commands import RemoteServerUp, UserIp
from tests import ROOT
from tests.support.children import Parent

sending = busrep.Stream[Any]("sending", resettable=True)

SETTINGS = busrep.Settings(heartbeat=0.2, retry_min=0.01, retry_max=0.1, shutdown_timeout=2.0)


class TableLock:
    """A lock in a table of SQLite: whoever inserts its row has it."""

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, timeout=10, isolation_level=None)
        self._db.execute("CREATE TABLE IF NOT EXISTS locks (key TEXT PRIMARY KEY, holder INTEGER)")

    def take(self) -> bool:
        return self._db.execute("INSERT INTO locks VALUES ('k', ?) ON CONFLICT DO NOTHING", [os.getpid()]).rowcount == 1

    def give_back(self, _: object = True) -> None:
        self._db.execute("DELETE FROM locks WHERE key = 'k' AND holder = ?", [os.getpid()])

    def close(self) -> None:
        self._db.close()


def read_number(path: str) -> int:
    return int(Path(path).read_text())


def write_number(path: str, number: int) -> None:
    Path(path).write_text(str(number))


class Deeds:
    """What the parent may call besides the helpers' own methods."""

    def __init__(self, bus: busrep.Bus, parent: Parent, locks: Locks, stack: contextlib.AsyncExitStack) -> None:
        self._bus, self._parent, self._locks, self._stack = bus, parent, locks, stack
        self._retained: Retained | None = None
        self._table: TableLock | None = None
        self._until: asyncio.Event | None = None

    async def write(self, row: Any) -> int:
        async with self._bus.write(sending) as fact:
            fact.add(row)
        return fact.id

    async def user_ip(self, *fields: Any) -> None:
        await self._bus.send(UserIp(*fields))

    async def send_up(self, server: str) -> None:
        await self._bus.send(RemoteServerUp(server))

    async def retain(self, *expected: str) -> None:
        self._retained = Retained(self._bus, sending, expected=expected)

    async def retained(self) -> dict[str, Any]:
        assert self._retained is not None
        return self._retained.statistics()

    async def open_table(self, path: str) -> None:
        self._table = TableLock(path)
        self._stack.callback(self._table.close)

    async def hold(self, poll: float, timeout: float | None = None) -> None:
        """Take the lock of the table, and keep it until ``let_go``."""
        assert self._table is not None
        table, got, until = self._table, asyncio.get_running_loop().create_future(), asyncio.Event()

        async def hold() -> None:
            def try_acquire() -> bool:
                taken = table.take()
                self._parent.tell(event=["tried", taken])
                return taken

            try:
                options: dict[str, Any] = {"poll": poll, "timeout": timeout, "release": table.give_back}
                async with self._locks.acquire("lock", "k", try_acquire, **options):
                    got.set_result(None)
                    await until.wait()
            except Exception as error:
                got.set_exception(error)
            self._parent.tell(event=["let go"])

        self._until = until
        self._holding = asyncio.create_task(hold())
        await got

    async def let_go(self) -> None:
        assert self._until is not None
        self._until.set()

    async def count_up(self, path: str, times: int) -> None:
        """Read a number and write it back one higher, each time under the lock: without it counts get lost."""
        assert self._table is not None
        for _ in range(times):
            async with self._locks.acquire("lock", "k", self._table.take, release=self._table.give_back, poll=0.2):
                found = read_number(path)
                await asyncio.sleep(0.001)
                write_number(path, found + 1)


async def main() -> None:
    parent = Parent()
    task = await parent.hear()
    name = task["process"]
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            busrep.connect(
                task["redis"],
                name=task["name"],
                streams=[sending],
                writer=name if task.get("writes") else None,
                settings=SETTINGS,
            )
        )
        locks, servers = Locks(bus, name), RemoteServers(bus, period=task.get("period", 10.0))
        deeds, heard = Deeds(bus, parent, locks, stack), set[str]()
        helpers: dict[str, Any] = {"bus": bus, "deeds": deeds, "locks": locks, "servers": servers}

        @servers.on_up()
        def back(server: str) -> None:
            if not server.startswith("ready-"):
                parent.tell(event=["up", server])

        @bus.on(UserIp)
        def seen(command: UserIp) -> None:
            heard.add(command.user_id)
            if not command.user_id.startswith("@ready-"):
                parent.tell(event=["ip", command.user_id, command.ip, command.device_id])

        if "presence" in task:
            helpers["presence"] = presence = Presence(bus, name, **task["presence"])

            @presence.on_change
            def changed(change: Any) -> None:
                parent.tell(event=["sync", change.user, change.instance, change.is_syncing])

        if "acknowledges" in task:
            helpers["acks"] = acks = Acknowledgements(bus, sending, task["acknowledges"], name, repeat=0.2)

            @bus.subscribe(sending)
            async def handle(batch: Any) -> None:
                for token, rows in batch.facts():
                    parent.tell(event=["rows", token, rows])
                    await acks.acknowledge(token)

        # Both channels are subscribed when something sent on each has come back.
        bus.on(RemoteServerUp)(lambda command: heard.add(command.server))
        while not heard >= {f"ready-{name}", f"@ready-{name}"}:
            await bus.send(RemoteServerUp(f"ready-{name}"))
            await bus.send(UserIp(f"@ready-{name}", "", "", "", None, 0))
            await asyncio.sleep(0.02)
        parent.tell(event=["ready"])
        while (message := await parent.hear()).get("call") != "end":
            *path, method = message["call"].split(".")
            try:
                gives = getattr(helpers[path[0]], method)(*message["args"])
                if asyncio.iscoroutine(gives):
                    gives = await gives
            except Exception as error:
                parent.tell(raises=type(error).__name__)
            else:
                parent.tell(gives=gives)
        parent.tell(gives=None)


class Child:
    """The parent's end: ``async with Child.start("p1", redis_url, bus_name) as child``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._events: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, process: str, redis: str, name: str, **task: Any) -> AsyncIterator[Child]:
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.commands.commands_child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        child = cls(started)
        listening = asyncio.create_task(child._listen())
        try:
            child._tell(process=process, redis=redis, name=name, **task)
            await child.until("ready")
            yield child
        finally:
            await child.kill()
            await listening

    def _tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            said = json.loads(line)
            if "event" in said:
                self._events.put_nowait(said["event"])
            else:
                self._answers.put_nowait(said)

    async def call(self, what: str, *args: Any) -> Any:
        """Call a method in the child; raises AssertionError with the name of what it raised."""
        self._tell(call=what, args=args)
        answer = await self._answers.get()
        assert "raises" not in answer, answer["raises"]
        return answer["gives"]

    def begin(self, what: str, *args: Any) -> asyncio.Task[Any]:
        """The same as a task; one at a time."""
        return asyncio.create_task(self.call(what, *args))

    async def event(self) -> list[Any]:
        """The next thing that happened there."""
        return await self._events.get()

    async def until(self, *event: Any) -> None:
        """Wait for this to happen there, past other events."""
        while await self.event() != list(event):
            pass

    async def end(self) -> None:
        """Close its bus, and wait until it has ended."""
        await self.call("end")
        await self.process.wait()

    async def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


if __name__ == "__main__":
    asyncio.run(main())
