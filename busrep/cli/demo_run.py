"""The demo's parent: starts writers and readers, does harm in the middle, and compares at the end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
import redis

from busrep.cli.demo_check import Truth
from busrep.cli.demo_processes import Child, DemoFailed, Slot
from busrep.cli.demo_rows import Task, demo_streams
from busrep.cli.demo_summary import summary
from busrep.cli.demo_table import DemoTable, highest_tokens, is_postgres
from busrep.cli.options import check_redis, redis_client
from busrep.stores import open_store
from busrep.stores.interface import AsyncStore
from busrep.streams import Registry
from busrep.testing.servers import RedisServer, start_redis
from busrep.urls import shown_url

# Seconds between two looks at the children's reports.
LOOK = 0.05
# Seconds without a new fact after which the run is given up.
NO_PROGRESS = 60.0
# Seconds a process may take to start, or to end when it was asked to.
PATIENCE = 30.0


@attrs.frozen(kw_only=True)
class DemoPlan:
    """What to run. ``redis`` None: a server of our own; ``store`` None: an SQLite file of our own.

    ``restart_redis`` is a shell command that restarts a given Redis. ``timeout``: seconds that readers may
    take, after the last fact, to reach the end.
    """

    redis: str | None = attrs.field(default=None, repr=False)
    store: str | None = attrs.field(default=None, repr=False)
    facts: int
    writers: int
    readers: int
    restart_redis: str | None = None
    keep: bool = False
    heartbeat: float = 1.0
    timeout: float = 60.0


@attrs.define(eq=False)
class DemoRun:
    """One run. ``on_event`` is called with a sentence, ``on_progress`` with (written, handled by all) facts."""

    plan: DemoPlan
    on_event: Callable[[str], None]
    on_progress: Callable[[int, int], None]
    run_id: str = attrs.field(factory=lambda: secrets.token_hex(4))
    counts: dict[str, int] = attrs.field(
        factory=lambda: dict.fromkeys(("kills", "links_cut", "redis_restarts", "fenced"), 0)
    )
    writers: list[Slot] = attrs.field(factory=list)
    readers: list[Slot] = attrs.field(factory=list)
    folder: Path = attrs.field(factory=lambda: Path(tempfile.mkdtemp(prefix="busrep-demo-")))
    redis_url: str = attrs.field(default="", repr=False)
    store_url: str = attrs.field(default="", repr=False)
    server: RedisServer | None = None
    table: DemoTable = attrs.field(init=False)
    store: AsyncStore = attrs.field(init=False)
    tasks: asyncio.TaskGroup = attrs.field(init=False)

    async def run(self) -> dict[str, Any]:
        """The whole demo; returns the summary. Raises BusrepError when it cannot be run to its end."""
        try:
            async with self._servers(), self._children():
                await self._start()
                started = time.monotonic()
                await self._write()
                truth = await asyncio.to_thread(self.table.truth)
                behind = await self._let_readers_finish(truth)
                seconds = time.monotonic() - started
                await self._stop()
                self.on_event("comparing every reader's record with the table")
                return await asyncio.to_thread(
                    summary,
                    self.table,
                    truth,
                    self.writers,
                    self.readers,
                    seconds=seconds,
                    behind=behind,
                    counts=self.counts,
                )
        finally:
            if not self.plan.keep:
                shutil.rmtree(self.folder, ignore_errors=True)

    # -- setting up and clearing away -------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _servers(self) -> AsyncIterator[None]:
        plan = self.plan
        with self._redis():
            await check_redis(self.redis_url)
            self.store_url = plan.store or f"sqlite:///{self.folder / 'demo.db'}"
            is_postgres(self.store_url)
            self.on_event(f"table: {shown_url(self.store_url)}")
            self.store = open_store(self.store_url, Registry(demo_streams(self.run_id)))
            await self.store.init()
            await self.store.open()
            try:
                with contextlib.closing(DemoTable(self.store_url, self.run_id)) as self.table:
                    self.table.prepare()
                    try:
                        yield
                    finally:
                        if plan.store and not plan.keep:  # a file of our own goes as a whole
                            names = [slot.who for slot in self.writers], [slot.who for slot in self.readers]
                            await asyncio.to_thread(self.table.drop, *names)
            finally:
                await self.store.close()

    @contextlib.contextmanager
    def _redis(self) -> Iterator[None]:
        if self.plan.redis is not None:
            self.redis_url = self.plan.redis
            self.on_event(f"Redis: {shown_url(self.redis_url)}")
            yield
            return
        with start_redis() as self.server:
            self.redis_url = self.server.url
            self.on_event(f"Redis: {Path(self.server.command()[0]).name} started on port {self.server.port}")
            yield

    @contextlib.asynccontextmanager
    async def _children(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as self.tasks:
            try:
                yield
            finally:
                for slot in (*self.writers, *self.readers):
                    await slot.child.kill()

    def _task(self, who: str, life: int, facts: int, record: str | None) -> Task:
        mark = "&" if "?" in self.redis_url else "?"
        return Task(
            # The name tells our links from those of other programs on the same Redis.
            redis=f"{self.redis_url}{mark}client_name={quote(who)}",
            store=self.store_url,
            name=f"demo-{self.run_id}",
            run=self.run_id,
            who=who,
            life=life,
            heartbeat=self.plan.heartbeat,
            facts=facts,
            record=record,
        )

    async def _launch(self, kind: str, task: Task) -> Child:
        child = await Child.start(kind, task, self.folder)
        self.tasks.create_task(child.listen())
        return child

    async def _start(self) -> None:
        plan = self.plan
        for number in range(1, plan.readers + 1):
            who = f"demo-{self.run_id}-reader-{number}"
            # The odd ones save their position with what they did (exactly-once), the others a little later.
            record = None if number % 2 else str(self.folder / f"{who}.record")
            child = await self._launch("reader", self._task(who, 1, 0, record))
            self.readers.append(Slot("reader", who, child, record=record))
        for number in range(1, plan.writers + 1):
            who = f"demo-{self.run_id}-writer-{number}"
            facts = plan.facts * number // plan.writers - plan.facts * (number - 1) // plan.writers
            child = await self._launch("writer", self._task(who, 1, facts, None))
            self.writers.append(Slot("writer", who, child, facts=facts))
        await self._until(self._all_ready, PATIENCE, "the processes to start")
        self.on_event(f"{plan.writers} writer and {plan.readers} reader processes are up")

    def _all_ready(self) -> bool:
        return all(slot.child.has("ready") for slot in (*self.writers, *self.readers))

    async def _until(self, condition: Callable[[], bool], patience: float, what: str) -> None:
        """Wait for reports; patience begins anew with every fact that is written or handled."""
        seen, deadline = -1, time.monotonic() + patience
        while not condition():
            written, handled = sum(slot.written for slot in self.writers), self._handled()
            self.on_progress(written, handled)
            if written + handled != seen:
                seen, deadline = written + handled, time.monotonic() + patience
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {patience:g} s without any progress for {what}")
            await self._replace_fenced()
            await asyncio.sleep(LOOK)

    def _handled(self) -> int:
        return min((slot.total("facts") for slot in self.readers), default=0)

    # -- writing, and the harm done meanwhile -----------------------------------------------------

    async def _write(self) -> None:
        faults = self._faults()
        parts = len(faults) + 1
        for number, fault in enumerate(faults):
            self._allow((number + 1) / parts)
            goal = self.plan.facts * (number + 0.5) / parts
            await self._until(
                lambda goal=goal: sum(slot.written for slot in self.writers) >= goal,  # type: ignore[misc]
                NO_PROGRESS,
                "the writers",
            )
            # The next part too, so that facts are written while the harm is done.
            self._allow((number + 2) / parts)
            await fault()
        self._allow(1)
        await self._until(lambda: all(s.child.has("done") for s in self.writers), NO_PROGRESS, "the writers")

    def _allow(self, part: float) -> None:
        for slot in self.writers:
            slot.allowed = math.ceil(slot.facts * part)
            slot.child.process.tell(allowed=slot.allowed - slot.before)

    def _faults(self) -> list[Callable[[], Awaitable[None]]]:
        faults: list[Callable[[], Awaitable[None]]] = [
            lambda: self._kill(self.writers[0]),
            self._cut_links,
            lambda: self._kill(self.readers[0]),
        ]
        if self.server is not None or self.plan.restart_redis:
            faults.append(self._restart_redis)
        if len(self.readers) > 1:
            faults.append(lambda: self._kill(self.readers[1]))
        faults.append(lambda: self._kill(self.writers[-1]))
        faults.append(self._cut_links)
        return faults

    async def _kill(self, slot: Slot) -> None:
        self.on_event(f"kill -9 {slot.who}, and start it again under the same name")
        await slot.child.kill()
        self.counts["kills"] += 1
        await self._relaunch(slot)

    async def _relaunch(self, slot: Slot) -> None:
        await slot.child.ended.wait()
        slot.past.append(slot.child.latest)
        if slot.kind == "writer":
            # Not its last report: what it committed after that counts, as it does for the readers.
            slot.before = await asyncio.to_thread(self.table.facts_of, slot.who)
        life, left = slot.child.task.life + 1, max(0, slot.facts - slot.before)
        task = self._task(slot.who, life, left, slot.record)
        slot.child = await self._launch(slot.kind, task)
        if slot.kind == "writer":
            slot.child.process.tell(allowed=slot.allowed - slot.before)

    async def _replace_fenced(self) -> None:
        for slot in self.writers:
            if slot.child.fenced:
                self.on_event(f"{slot.who} was taken for dead and fenced; it is started again")
                self.counts["fenced"] += 1
                await self._relaunch(slot)

    async def _cut_links(self) -> None:
        ours = {slot.who for slot in self.readers}
        client = redis_client(self.redis_url)
        try:
            links = [one for one in await client.client_list(_type="pubsub") if one.get("name") in ours]
            for link in links:
                await client.client_kill_filter(_id=link["id"])
        except redis.RedisError as error:
            self.on_event(f"the readers' links could not be cut: {error}")
            return
        finally:
            await client.aclose()
        self.counts["links_cut"] += len(links)
        self.on_event(f"cut {len(links)} links of readers")

    async def _restart_redis(self) -> None:
        self.on_event("restart Redis")
        if self.plan.restart_redis:
            shell = await asyncio.create_subprocess_shell(
                self.plan.restart_redis,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await shell.communicate()
            if shell.returncode != 0:
                raise DemoFailed(f"--restart-redis ended with status {shell.returncode}: {errors.decode()[-500:]}")
        elif self.server is not None:
            self.server.restart()
        self.counts["redis_restarts"] += 1

    # -- the end ----------------------------------------------------------------------------------

    async def _let_readers_finish(self, truth: Truth) -> list[str]:
        finals = highest_tokens(truth)
        for known in await self.store.known():
            if known.stream in finals:
                writers = finals[known.stream]
                writers[known.writer] = max(known.position, writers.get(known.writer, 0))
        self.on_event("all facts are written; waiting for the readers")
        for slot in self.readers:
            slot.child.process.tell(finish=finals, timeout=self.plan.timeout)
        await self._until(self._all_finished, self.plan.timeout + PATIENCE, "the readers")
        self.on_progress(sum(slot.written for slot in self.writers), self._handled())
        return [f"{slot.who}: {text}" for slot in self.readers for text in slot.child.latest["behind"]]

    def _all_finished(self) -> bool:
        return all(slot.child.has("finished") for slot in self.readers)

    async def _stop(self) -> None:
        for slot in (*self.writers, *self.readers):
            slot.child.process.tell(stop=True)
        try:
            async with asyncio.timeout(PATIENCE):
                for slot in (*self.writers, *self.readers):
                    await slot.child.ended.wait()
        except TimeoutError:
            stuck = [s.who for s in (*self.writers, *self.readers) if not s.child.ended.is_set()]
            raise DemoFailed(f"{', '.join(stuck)} did not end within {PATIENCE:g} s of being asked to") from None
