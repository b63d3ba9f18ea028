"""The demo's child processes, as their parent sees them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import attrs

from busrep.cli.demo_rows import FENCED, Task
from busrep.errors import BusrepError
from busrep.testing.children import ChildProcess

# What an error quotes of a child's log.
LOG_TAIL = 1_500


class DemoFailed(BusrepError):
    """The demo could not be run to its end; not a verdict about lost rows."""


@attrs.define(eq=False)
class Child:
    """One writer or reader process, and whether it ended as it should."""

    task: Task
    process: ChildProcess
    ended: asyncio.Event = attrs.field(factory=asyncio.Event)
    may_end: bool = False
    fenced: bool = False

    @classmethod
    async def start(cls, kind: str, task: Task, folder: Path) -> Child:
        """Start ``busrep.cli.demo_<kind>`` and tell it its task; ``listen`` must run from now on."""
        log = folder / f"{task.who}.{task.life}.log"
        return cls(task, await ChildProcess.start(f"busrep.cli.demo_{kind}", task.who, attrs.asdict(task), log))

    @property
    def latest(self) -> dict[str, Any]:
        """The newest value of everything it reported."""
        return self.process.latest

    def has(self, what: str) -> bool:
        """Whether it reported this (``ready``, ``done``, ``finished``)."""
        return bool(self.latest.get(what))

    async def listen(self) -> None:
        """Take in its reports until it ends. Raises DemoFailed when it ends by itself too early."""
        status = await self.process.listen()
        self.fenced = status == FENCED
        self.ended.set()
        if status != 0 and not self.may_end and not self.fenced:
            tail = self.process.log.read_text(errors="replace")[-LOG_TAIL:].strip()
            raise DemoFailed(f"{self.task.who} ended with status {status}:\n{tail}")

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.may_end = True
        await self.process.kill()


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
