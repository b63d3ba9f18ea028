"""A large table is archived while it is written to and the job is killed; then the audit compares.

``python -m tests.proof.archive --rows 10000000 --kills 5`` starts a PostgreSQL and a Redis, makes a table of
several writers with rolled back facts and facts of several rows, has real writers go on, and runs ``busrep pipeline
archive`` as its own process, which is killed: the driver with SIGKILL, alone or with all that it started, at any
moment, and processes of its executors. Then it archives what is left, merges small files, and audits. Needs the extras
``spark``, ``cli`` and ``postgres``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from busrep.errors import BusrepError, ConfigError
from busrep.testing.servers import PostgresServer, RedisServer, start_postgres, start_redis
from tests.proof.archive_table import fill, writers
from tests.support.load import Log

# What tells the executors of one run from others, and what they are.
MARK = "BUSREP_ARCHIVE_RUN"
EXECUTOR, WORKER = b"org.apache.spark.executor.CoarseGrainedExecutorBackend", b"pyspark.worker"
DRIVER_KILLS, EXECUTOR_KILL = ("driver alone", "driver and all of its processes"), "executor"


@attrs.frozen(kw_only=True)
class Options:
    """``rows``: IDs that the table begins with. ``kills``: of drivers, and half as many of executors' processes.
    ``pause``: up to so many seconds of work between two kills, from the first batch on."""

    rows: int = 100_000
    kills: int = 5
    seed: int = 0
    pause: float = 10.0
    master: str = "local[2]"
    batch_rows: int = 500_000
    folder: str | None = None
    on_event: Callable[[str], None] = lambda _: None


@attrs.define(eq=False)
class Run:
    """One run; see the module."""

    options: Options
    folder: Path
    redis: RedisServer
    postgres: PostgresServer
    dice: random.Random
    logs: list[Log] = attrs.field(factory=list)
    killed: dict[str, int] = attrs.field(factory=dict)
    started: int = 0

    @property
    def archive(self) -> Path:
        """The folder of the archive."""
        return self.folder / "archive"

    def tell(self, text: str) -> None:
        """What happens."""
        self.options.on_event(text)

    # -- the jobs ---------------------------------------------------------------------------------------------

    async def start(self, job: str, *arguments: str) -> asyncio.subprocess.Process:
        """Start a job as a process with a session of its own; what it says goes into a file."""
        self.started += 1
        command = [sys.executable, "-m", "busrep.cli", "pipeline", job, "--master", self.options.master]
        command += ["--conf", f"spark.executorEnv.{MARK}={self.folder.name}"]
        command += ["--archive", str(self.archive), "--stream", "events", *arguments]
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with self.log(self.started).open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "BUSREP_STORE": self.postgres.url, "PYTHONPATH": path},
            )  # fmt: skip

    def log(self, number: int) -> Path:
        """What the process of that number said."""
        return self.folder / f"job-{number}.log"

    def batches(self) -> int:
        """How many manifests there are."""
        return len(list((self.archive / "_busrep" / "events").glob("*.json")))

    async def finish(self, job: str, *arguments: str) -> dict[str, Any]:
        """Run a job to its end; its report. Raises ConfigError with what it said when there is none."""
        report = self.folder / f"{job}-{self.started}.json"
        process = await self.start(job, *arguments, "--report", str(report))
        try:
            await process.wait()
        finally:
            end(process)
        if not report.exists():
            raise ConfigError(f"{job} failed with {process.returncode}:\n{self.log(self.started).read_text()[-4000:]}")
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    async def killing(self) -> None:
        """The archive job, killed again and again, each time after it has begun to write, until so many living drivers
        were killed. Raises ConfigError when it ends by itself all the time."""
        turns = 0
        while sum(self.killed.get(how, 0) for how in DRIVER_KILLS) < self.options.kills:
            turns += 1
            if turns > 4 * self.options.kills:
                raise ConfigError(f"the archive job ends by itself: {self.log(self.started).read_text()[-4000:]}")
            before = self.batches()
            process = await self.start("archive", "--every", "1s", "--batch-rows", str(self.options.batch_rows))
            try:
                while self.batches() == before and process.returncode is None:
                    await asyncio.sleep(0.05)
                await asyncio.sleep(self.dice.uniform(0, self.options.pause))
                if self.killed.get(EXECUTOR_KILL, 0) < self.options.kills // 2:
                    await self._kill_executor()
                await self._kill_driver(process)
            finally:
                end(process)
                await process.wait()
            self.tell(f"killed so far: {self.killed}; {self.batches()} batches")

    async def _kill_executor(self) -> None:
        """Where there is one now; a local session gives up then, a cluster starts another."""
        if found := executors(self.folder.name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.dice.choice(found), signal.SIGKILL)
                self._count(EXECUTOR_KILL)
            await asyncio.sleep(self.dice.uniform(0, self.options.pause))

    async def _kill_driver(self, process: asyncio.subprocess.Process) -> None:
        """Alone, or with its JVM and all."""
        if process.returncode is not None:
            self._count("driver had given up")
        elif self.dice.random() < 0.5:
            process.kill()
            self._count(DRIVER_KILLS[0])
            await process.wait()
            # The JVM notices that its driver is gone; what it still does must do no harm.
            await asyncio.sleep(self.dice.uniform(0, 2))
        else:
            os.killpg(process.pid, signal.SIGKILL)
            self._count(DRIVER_KILLS[1])

    def _count(self, what: str) -> None:
        self.killed[what] = self.killed.get(what, 0) + 1

    async def run(self) -> dict[str, Any]:
        """All of it; the report."""
        began = time.monotonic()
        filled = await fill(self.postgres.url, self.options.rows)
        self.tell(f"the table has {filled:,} rows ({time.monotonic() - began:.0f} s)")
        async with writers(self.postgres.url, self.redis.url, self.options.seed, self.logs):
            killed = time.monotonic()
            await self.killing()
            self.tell(f"killed {self.killed} ({time.monotonic() - killed:.0f} s)")
            archived = await self.finish("archive", "--available-now", "--batch-rows", str(self.options.batch_rows))
            self.tell(f"archived the last {archived['rows']:,} rows in {archived['seconds']:.0f} s")
            compacted = await self.finish("compact", "--grace", "0s")
            self.tell(f"compacted: {compacted['streams']['events']}")
            audited = await self.finish("audit")
        found = audited["streams"]["events"]
        written = sum(len(facts) for log in self.logs for facts in log.committed.values())
        return {
            "ok": audited["ok"] and found["archive_rows"] >= filled,
            "rows_at_first": filled, "facts_written_meanwhile": written, "rows_archived": found["archive_rows"],
            "rows_compared": audited["compared_rows"], "killed": self.killed, "batches": found["batch"] + 1,
            "compacted": compacted["streams"]["events"], "audit_seconds": audited["seconds"],
            "last_archive": {name: archived[name] for name in ("rows", "seconds")},
            "lost_or_extra": found["differences"], "findings": found["findings"],
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip


def end(process: asyncio.subprocess.Process) -> None:
    """Whatever is left of a job."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def executors(mark: str) -> list[int]:
    """The executors whose environment has this mark; of a local session, which has none of its own, the Python
    processes in which its tasks run."""
    found: dict[bytes, list[int]] = {EXECUTOR: [], WORKER: []}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            kind = next(iter(found.keys() & (entry / "cmdline").read_bytes().split(b"\0")), None)
            if kind is not None and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[kind].append(int(entry.name))
    return sorted(found[EXECUTOR] or found[WORKER])


async def run(options: Options) -> dict[str, Any]:
    """Run it; the report, whose ``ok`` says that the audit found nothing. Raises BusrepErrors."""
    folder = Path(options.folder or tempfile.mkdtemp(prefix="busrep-archive-"))
    os.makedirs(folder, exist_ok=True)
    try:
        with contextlib.ExitStack() as stack:
            redis = stack.enter_context(contextlib.closing(start_redis()))
            postgres = stack.enter_context(contextlib.closing(start_postgres(config={"max_wal_size": "4GB"})))
            return await Run(options, folder, redis, postgres, random.Random(options.seed)).run()
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run it; 0 when the audit says identical, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.archive", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="IDs that the table begins with (default 100,000)")
    parser.add_argument("--kills", type=int, default=5, help="how often the job is killed (default 5)")
    parser.add_argument("--seed", type=int, help="of the dice (default: any)")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds between kills, at most (default 10)")
    parser.add_argument("--master", default="local[2]", help="Spark's (default local[2])")
    parser.add_argument("--batch-rows", type=int, default=500_000, help="of the archive job (default 500,000)")
    parser.add_argument("--folder", help="where archive and logs stay (default: a temporary one)")
    given = vars(parser.parse_args())
    seed = given.pop("seed")
    seed = random.randrange(10**6) if seed is None else seed
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        report = asyncio.run(run(Options(**given, seed=seed, on_event=lambda text: print(text, file=sys.stderr))))
    except BusrepError as error:
        print(f"busrep: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"seed": seed, **report}, indent=2))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
