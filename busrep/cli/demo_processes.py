"""The demo's child processes, as their parent sees them."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import orjson

import busrep
from busrep.cli.demo_rows import FENCED, Task
from busrep.errors import BusrepError

# Longest line a child may send: its statistics.
LINE_BYTES = 4 * 2**20
# What an error quotes of a child's log.
LOG_TAIL = 1_500


class DemoFailed(BusrepError):
    """The demo could not be run to its end; not a verdict about lost rows."""


@attrs.define(eq=False)
class Child:
    """One writer or reader process. ``latest`` holds the newest value of everything it reported."""

    kind: str
    task: Task
    process: asyncio.subprocess.Process
    log: Path
    latest: dict[str, Any] = attrs.field(factory=dict)
    ended: asyncio.Event = attrs.field(factory=asyncio.Event)
    may_end: bool = False
    fenced: bool = False

    @classmethod
    async def start(cls, kind: str, task: Task, folder: Path) -> Child:
        """Start ``busrep.cli.demo_<kind>`` and tell it its task; ``listen`` must run from now on."""
        log = folder / f"{task.who}.{task.life}.log"
        root = str(Path(busrep.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"busrep.cli.demo_{kind}",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=LINE_BYTES,
                env={**os.environ, "PYTHONPATH": path},
                # Ctrl-C in the terminal is the parent's: it ends the children itself.
                start_new_session=True,
            )
        child = cls(kind, task, process, log)
        child.tell(**attrs.asdict(task))
        return child

    def has(self, what: str) -> bool:
        """Whether it reported this (``ready``, ``done``, ``finished``)."""
        return bool(self.latest.get(what))

    def tell(self, **what: object) -> None:
        """Send it a message; one that has just died does not read it."""
        assert self.process.stdin is not None  # noqa: S101 - it was started with a pipe
        if not self.process.stdin.is_closing():
            self.process.stdin.write(orjson.dumps(what) + b"\n")

    async def listen(self) -> None:
        """Take in its reports until it ends. Raises DemoFailed when it ends by itself too early."""
        assert self.process.stdout is not None  # noqa: S101 - it was started with a pipe
        async for line in self.process.stdout:
            if line.endswith(b"\n"):  # a killed process may leave half a line
                self.latest.update(orjson.loads(line))
        status = await self.process.wait()
        self.fenced = status == FENCED
        self.ended.set()
        if status != 0 and not self.may_end and not self.fenced:
            tail = self.log.read_text(errors="replace")[-LOG_TAIL:].strip()
            raise DemoFailed(f"{self.task.who} ended with status {status}:\n{tail}")

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.may_end = True
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@attrs.define(eq=False)
class Slot:
    """A writer's or reader's name through all its processes. ``before``: facts of the earlier processes."""

    kind: str
    who: str
    child: Child
    facts: int = 0
    allowed: int = 0
    before: int = 0
    record: str | None = None
    past: list[dict[str, Any]] = attrs.field(factory=list)

    @property
    def written(self) -> int:
        """Facts committed so far, as far as it has reported."""
        return self.before + int(self.child.latest.get("facts", 0))

    def total(self, *path: str) -> int:
        """A number of the reports, summed over all processes of this name."""
        return sum(_dig(reports, path) for reports in (*self.past, self.child.latest))


def _dig(reports: dict[str, Any], path: tuple[str, ...]) -> int:
    value: Any = reports
    for part in path:
        value = value.get(part, {}) if isinstance(value, dict) else {}
    return int(value) if isinstance(value, (int, float)) else 0
