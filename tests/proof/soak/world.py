"""What a soak runs on: servers, links that fail, and the processes, each under its name through all its lives."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from busrep.errors import ConfigError
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.links import FaultyLink
from busrep.testing.servers import PostgresServer, RedisServer, start_postgres, start_redis
from tests.proof.soak.children import ChildSlot, Goal, came_true
from tests.proof.soak.database import PREPARE, Database
from tests.proof.soak.task import ROLES, STREAMS, Role, Task
from tests.support.children import FENCED, ChildProcess
from tests.support.servers import SentinelServer, start_replica, start_sentinel

CHILD = "tests.proof.soak.child"
# The rights that busrep's user has on Redis; Sentinel and the soak itself are somebody else.
USER = "busrep"
# Redis's own bound for slow subscribers.
GENEROUS_OUTPUT = "pubsub 32mb 8mb 60"
# Seconds until Sentinel takes its master for dead. A server that is restarted at once comes back sooner.
DOWN_AFTER = 1.0
# Seconds in which the Redis servers must agree who is master, once nothing disturbs them.
REDIS_PATIENCE = 60.0
# A transaction whose process is gone without a word is ended by the server after this.
IDLE_IN_TRANSACTION = "8s"
# What an error quotes of a child's log.
LOG_TAIL = 3_000

POSTGRES = {
    "max_connections": 250,
    "idle_in_transaction_session_timeout": IDLE_IN_TRANSACTION,
    # A replica that lost its primary looks for it again after so many ms.
    "wal_retrieve_retry_interval": 200,
    "shared_buffers": "32MB",
    "checkpoint_timeout": "1min",
}


def ask_redis(server: RedisServer, *words: str | int) -> Any:
    """One command, as the servers' administrator. Raises redis.RedisError."""
    client = redis.Redis(
        port=server.port,
        socket_timeout=2.0,
        socket_connect_timeout=2.0,
        decode_responses=True,
        retry=Retry(NoBackoff(), 0),
    )
    with contextlib.closing(client):
        return client.execute_command(*words)  # type: ignore[no-untyped-call]


@attrs.define(eq=False)
class Slot(ChildSlot):
    """One role through all its lives, and its links."""

    role: Role
    redis: list[FaultyLink]
    postgres: list[FaultyLink]
    ledgers: list[Path] = attrs.field(factory=list)

    @property
    def who(self) -> str:
        """Its name."""
        return self.role.who


class World:
    """Servers, links and processes. ``log`` is told what happens; ``violations`` collects what must not."""

    def __init__(self, folder: Path, seed: int, log: Callable[[str], None], over: str = "redis") -> None:
        self.folder, self.seed, self.log, self.over = folder, seed, log, over
        self.password = secrets.token_hex(8)
        self.slots: dict[str, Slot] = {}
        self.redis: list[RedisServer] = []
        self.sentinel: SentinelServer
        self.postgres: PostgresServer
        self.replica: PostgresServer | None = None
        self.hub: ChildProcess | None = None
        self.hub_reports: list[dict[str, Any]] = []
        self._hub_port = 0
        self.database: Database
        self.postgres_lock, self.redis_lock, self.hub_lock = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self.violations: list[str] = []
        self.fenced = 0
        self.goal = Goal()
        self.stopping = False
        self._watchers: dict[asyncio.Task[None], None] = {}
        self._stack = AsyncExitStack()
        self._all: list[ChildProcess] = []

    # -- setting up and clearing away -------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Servers and links; afterwards nothing is left of servers, links and processes."""
        async with self._stack as stack:
            self._start_servers(stack)
            self.database = Database(self.postgres.url)
            await open_store(self.postgres.url, Registry(STREAMS)).init()
            self.database.run(PREPARE)
            try:
                if self.over == "tcp":
                    await self.start_hub()
                for role in ROLES:
                    self.slots[role.who] = await self._slot(role, stack)
                yield
            finally:
                await self._end_processes()

    def _start_servers(self, stack: AsyncExitStack) -> None:
        # Blocking, as all starts of servers here: the kernel ends a server with the thread that started it.
        # Without the delay a new replica waits five seconds for others to come along.
        config = {"user": [USER, *self.rights()], "repl-diskless-sync-delay": 0}
        for _ in range(2):
            self.redis.append(stack.enter_context(start_redis(config=config)))
        ask_redis(self.redis[1], "REPLICAOF", "127.0.0.1", self.redis[0].port)
        self.sentinel = stack.enter_context(start_sentinel(self.redis[0], down_after=DOWN_AFTER, failover_timeout=3.0))
        with contextlib.suppress(redis.ResponseError):  # since Redis 7; before, everything there takes ten seconds
            ask_redis(self.sentinel, "SENTINEL", "DEBUG", "INFO-PERIOD", 300, "PUBLISH-PERIOD", 300)
        self.postgres = stack.enter_context(start_postgres(config=POSTGRES))
        try:
            self.replica = stack.enter_context(start_replica(self.postgres))
        except ConfigError as error:
            if "pg_basebackup" not in str(error):
                raise
            self.log(f"no replica: {error}")

    def rights(self) -> list[str]:
        """What busrep's user may do: all that docs/guides/deploy.md says it needs, and no more."""
        return ["on", f">{self.password}", "+subscribe", "+publish", "+ping", "&soak", "&soak/*"]

    async def _slot(self, role: Role, stack: AsyncExitStack) -> Slot:
        async def link(url: str) -> FaultyLink:
            return await stack.enter_async_context(FaultyLink(url))

        if self.over == "tcp":
            to_redis = [await link(f"tcp://127.0.0.1:{self._hub_port}")]
        else:
            to_redis = [await link(server.url) for server in self.redis]
        to_postgres = [await link(self.postgres.url)]
        if role.replica and self.replica is not None:
            to_postgres.insert(0, await link(self.replica.url))
        return Slot(role, to_redis, to_postgres)

    async def _end_processes(self) -> None:
        self.stopping = True
        while self._watchers:  # one of them may just be starting the next life
            for child in list(self._all):
                child.signal(signal.SIGKILL)
            await asyncio.wait(list(self._watchers), timeout=0.2)
        for number, server in enumerate([*self.redis, self.sentinel, self.postgres, *filter(None, [self.replica])]):
            with contextlib.suppress(OSError):
                shutil.copy(server.directory / "server.log", self.folder / f"server-{number}.log")

    # -- processes --------------------------------------------------------------------------------

    async def launch(self, slot: Slot) -> ChildProcess:
        """Start the next life of a slot; an earlier one may live still."""
        slot.lives += 1
        ledger = self.folder / f"{slot.who}.{slot.lives}.ledger"
        slot.ledgers.append(ledger)
        if slot.child is not None:
            slot.past.append(slot.child.latest)
        routes = {
            f"127.0.0.1:{server.port}": urlsplit(link.url).netloc.rpartition("@")[2]
            for server, link in zip(self.redis, slot.redis, strict=self.over != "tcp")
        }
        task = Task(
            who=slot.who,
            life=slot.lives,
            seed=self.seed,
            writes=list(slot.role.writes),
            reads=slot.role.reads,
            sentinel=self.sentinel.port,
            service=self.sentinel.service,
            routes=routes,
            tcp=slot.redis[0].url if self.over == "tcp" else None,
            user=USER,
            password=self.password,
            store=slot.postgres[0].url,
            reader_store=slot.postgres[-1].url,
            ledger=str(ledger),
            beats=self._beats(slot),
        )
        log = self.folder / f"{slot.who}.{slot.lives}.log"
        slot.child = child = await ChildProcess.start(CHILD, f"{slot.who}.{slot.lives}", attrs.asdict(task), log)
        self._all.append(child)
        self.goal.tell_new(child)
        watcher = asyncio.create_task(self._watch(slot, child))
        self._watchers[watcher] = None
        watcher.add_done_callback(lambda done: self._watchers.pop(done))
        return child

    def _beats(self, slot: Slot) -> bool | None:
        """Of a process with threads: half of them have beats, and every name has them in every other life."""
        return (list(self.slots).index(slot.who) + slot.lives) % 2 == 1 if self.over == "sync" else None

    async def _watch(self, slot: Slot, child: ChildProcess) -> None:
        """What a supervisor does: start a process again, whatever it died of. What should not happen is noted."""
        status = await child.listen()
        self._all.remove(child)
        if status == FENCED:
            self.fenced += 1
            self.log(f"{child.name} lost its name to another process")
            if self.over == "sync" and slot.child is child:
                # In threads a name that was finished for its silence is won back.
                self.violations.append(f"{child.name} lost its name, and no other process was started under it")
        elif status not in (0, -9):
            tail = child.log.read_text(errors="replace")[-LOG_TAIL:]
            self.violations.append(f"{child.name} ended by itself with status {status}:\n{tail}")
        for trouble in child.latest.get("trouble") or ():
            self.violations.append(f"{child.name} stopped reading: {trouble}")
        if self.stopping or slot.child is not child:
            return
        await asyncio.sleep(slot.restart_after)
        if not self.stopping and slot.child is child:
            await self.launch(slot)

    async def start_hub(self) -> None:
        """Start the TCP server, on the port that it had, and wait until it serves."""
        task = {
            "port": self._hub_port, "sentinel": self.sentinel.port, "service": self.sentinel.service,
            "user": USER, "password": self.password,
        }  # fmt: skip
        log = self.folder / f"hub.{len(self.hub_reports)}.log"
        self.hub = hub = await ChildProcess.start("tests.proof.soak.hub", "hub", task, log)
        self.hub_reports.append(hub.latest)
        self._all.append(hub)
        watcher = asyncio.create_task(self._watch_hub(hub))
        self._watchers[watcher] = None
        watcher.add_done_callback(lambda done: self._watchers.pop(done))
        if not await came_true(lambda: "port" in hub.latest or not hub.running, REDIS_PATIENCE):
            self.violations.append("the TCP server does not come up")
        self._hub_port = hub.latest.get("port", self._hub_port)

    async def _watch_hub(self, hub: ChildProcess) -> None:
        status = await hub.listen()
        self._all.remove(hub)
        if status not in (0, -9):
            tail = hub.log.read_text(errors="replace")[-LOG_TAIL:]
            self.violations.append(f"the TCP server ended by itself with status {status}:\n{tail}")

    def tell_all(self, **what: Any) -> None:
        """Tell every process, and every one that is started from now on."""
        self.goal.tell(self.slots.values(), **what)

    # -- Redis ------------------------------------------------------------------------------------

    def master(self) -> RedisServer:
        """Who is master, as Sentinel sees it. Raises redis.RedisError."""
        _, port = ask_redis(self.sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.sentinel.service)
        return next(server for server in self.redis if server.port == int(port))

    def other(self, server: RedisServer) -> RedisServer:
        """The one that is not this one."""
        return self.redis[1] if server is self.redis[0] else self.redis[0]

    def redis_agrees(self) -> bool:
        """Whether one server is master and the other follows it, in everybody's opinion."""
        try:
            master = self.master()
            follower = self.other(master)
            return (
                ask_redis(master, "ROLE")[0] == "master"
                and ask_redis(follower, "ROLE")[:4] == ["slave", "127.0.0.1", master.port, "connected"]
                and self._replicas_known() >= 1
            )
        except (redis.RedisError, StopIteration):
            return False

    def _replicas_known(self) -> int:
        (replica,) = ask_redis(self.sentinel, "SENTINEL", "REPLICAS", self.sentinel.service) or [()]
        fields = dict(zip(replica[::2], replica[1::2], strict=False)) if isinstance(replica, list) else dict(replica)
        return int(fields.get("flags") == "slave" and fields.get("role-reported") == "slave")

    async def redis_settled(self) -> bool:
        """Wait until the Redis servers agree; an operator's hand helps one that Sentinel leaves alone."""
        deadline = time.monotonic() + REDIS_PATIENCE
        while not await asyncio.to_thread(self.redis_agrees):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)
        return True

    async def allow_everything_on_redis(self) -> None:
        """Take back what faults did to the servers' settings, as far as they answer."""
        for server in self.redis:
            with contextlib.suppress(redis.RedisError):
                await asyncio.to_thread(ask_redis, server, "ACL", "SETUSER", USER, "reset", *self.rights())
                await asyncio.to_thread(
                    ask_redis, server, "CONFIG", "SET", "client-output-buffer-limit", GENEROUS_OUTPUT
                )

    # -- everything -------------------------------------------------------------------------------

    def links(self) -> Iterator[FaultyLink]:
        """Every link of every process."""
        for slot in self.slots.values():
            yield from slot.redis
            yield from slot.postgres
