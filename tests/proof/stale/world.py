"""What a run is done on: a Redis server, PostgreSQL, links that fail, and the processes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs

from busrep.caches.cache import invalidations
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.links import FaultyLink
from busrep.testing.servers import PostgresServer, RedisServer, start_postgres, start_redis
from tests.proof.soak.children import ChildSlot, Goal
from tests.proof.soak.database import Database, psycopg
from tests.proof.stale.items import ALL, PREPARE, connect
from tests.proof.stale.lossy import LossyLink
from tests.proof.stale.memory import Memory, Shape
from tests.proof.stale.task import KEYS, LIFE_BLOCKS, Role, Task, bound_of
from tests.support.children import FENCED, ChildProcess

CHILD = "tests.proof.stale.child"
# Part of the messages that every link loses always.
LOST_ALWAYS = 0.02
# Seconds between two looks at the table for commits that their writers could not note.
LOOK = 0.2
# What an error quotes of a child's log.
LOG_TAIL = 3_000
POSTGRES = {
    "max_connections": 200,
    # A process that stands still in a transaction holds others up for no longer.
    "idle_in_transaction_session_timeout": "8s",
    "shared_buffers": "32MB",
    "checkpoint_timeout": "1min",
}


@attrs.define(eq=False)
class Slot(ChildSlot):
    """One role through all its lives, and its links."""

    role: Role
    redis: LossyLink
    postgres: FaultyLink


class World:
    """Servers, links and processes of one run. ``violations`` collects what must not happen but stale reads.

    ``task`` holds what the tasks of all processes have in common, by the names of `Task`.
    """

    def __init__(self, folder: Path, seed: int, heartbeat: float, task: dict[str, Any]) -> None:
        self.folder, self.seed, self.heartbeat = folder, seed, heartbeat
        self._task = task
        self.memory = Memory.create(Shape(str(folder / "memory"), KEYS, bound_of(heartbeat)))
        self.slots: dict[str, Slot] = {}
        self.redis: RedisServer
        self.postgres: PostgresServer
        self.database: Database
        self.redis_lock, self.postgres_lock = asyncio.Lock(), asyncio.Lock()
        self.violations: list[str] = []
        self.fenced = self.blocks = 0
        self.stopping = False
        self.goal = Goal()
        self._watchers: dict[asyncio.Task[None], None] = {}

    @contextlib.asynccontextmanager
    async def running(self, roles: tuple[Role, ...]) -> AsyncIterator[None]:
        """Servers and links; afterwards nothing is left of servers, links and processes."""
        async with AsyncExitStack() as stack:
            # Blocking, as all starts of servers here: the kernel ends a server with the thread that started it.
            self.redis = stack.enter_context(start_redis())
            self.postgres = stack.enter_context(start_postgres(config=POSTGRES))
            self.database = Database(self.postgres.url)
            await open_store(self.postgres.url, Registry([invalidations()])).init()
            self.database.run(*(PREPARE % (KEYS - 1)).strip().split(";\n"))
            for number, role in enumerate(roles):
                to_redis = await stack.enter_async_context(LossyLink(self.redis.url, seed=self.seed + number))
                to_redis.lost = LOST_ALWAYS
                to_postgres = await stack.enter_async_context(FaultyLink(self.postgres.url))
                self.slots[role.who] = Slot(role, to_redis, to_postgres)
            looking = asyncio.create_task(self._look_for_commits())
            try:
                yield
            finally:
                looking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await looking
                await self._end_processes()

    async def _end_processes(self) -> None:
        self.stopping = True
        while self._watchers:  # one of them may just be starting the next life
            for slot in self.slots.values():
                if slot.child is not None:
                    slot.child.signal(signal.SIGKILL)
            await asyncio.wait(list(self._watchers), timeout=0.2)
        for name, server in (("redis", self.redis), ("postgres", self.postgres)):
            with contextlib.suppress(OSError):
                shutil.copy(server.directory / "server.log", self.folder / f"{name}.log")

    async def _look_for_commits(self) -> None:
        """Note versions that are in the table, whoever committed them, for as long as the run lasts."""
        while True:
            try:
                async with await connect(self.postgres.url) as connection:
                    while True:
                        rows = await (await connection.execute(ALL)).fetchall()
                        now = time.monotonic_ns()
                        for key, version in rows:
                            self.memory.note(key, version, now)
                        await asyncio.sleep(LOOK)
            except psycopg().Error:  # it is being restarted
                await asyncio.sleep(LOOK)

    # -- processes --------------------------------------------------------------------------------

    async def launch(self, slot: Slot) -> None:
        """Start the next life of a slot."""
        slot.lives += 1
        if slot.child is not None:
            slot.past.append(slot.child.latest)
        role = slot.role
        task = Task(
            who=role.who,
            life=slot.lives,
            seed=self.seed,
            writes=role.writes,
            reads=role.reads,
            threads=role.threads,
            redis=slot.redis.url,
            postgres=slot.postgres.url,
            memory=self.memory.shape.path,
            block=self.blocks,
            heartbeat=self.heartbeat,
            quiet="quiet" in self.goal.said,
            **self._task,
        )
        self.blocks += LIFE_BLOCKS
        name = f"{role.who}.{slot.lives}"
        slot.child = await ChildProcess.start(CHILD, name, attrs.asdict(task), self.folder / f"{name}.log")
        self.goal.tell_new(slot.child)
        watcher = asyncio.create_task(self._watch(slot, slot.child))
        self._watchers[watcher] = None
        watcher.add_done_callback(lambda done: self._watchers.pop(done))

    async def _watch(self, slot: Slot, child: ChildProcess) -> None:
        """What a supervisor does: start a process again, whatever it died of. What should not happen is noted."""
        status = await child.listen()
        if status == FENCED:
            self.fenced += 1
        elif status not in (0, -9):
            tail = child.log.read_text(errors="replace")[-LOG_TAIL:]
            self.violations.append(f"{child.name} ended by itself with status {status}:\n{tail}")
        if not self.stopping:
            await asyncio.sleep(slot.restart_after)
        if not self.stopping:
            await self.launch(slot)

    def tell_all(self, **what: Any) -> None:
        """Tell every process, and every one that is started from now on."""
        self.goal.tell(self.slots.values(), **what)
