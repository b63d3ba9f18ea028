"""Processes of a soak, each under its name through all its lives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from busrep.errors import WriterFenced
from tests.support.children import ChildProcess, Parent


@attrs.define(eq=False, kw_only=True)
class ChildSlot:
    """One role through all its lives. ``past`` holds the last reports of the earlier ones, ``restart_after`` is in
    seconds."""

    child: ChildProcess | None = None
    lives: int = 0
    past: list[dict[str, Any]] = attrs.field(factory=list)
    lock: asyncio.Lock = attrs.field(factory=asyncio.Lock)
    restart_after: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether its process is up."""
        return self.child is not None and self.child.running and bool(self.child.latest.get("ready"))

    def latest(self, what: str) -> Any:
        """What its process has reported of this; None: nothing yet."""
        return self.child.latest.get(what) if self.child is not None else None

    def reports(self) -> list[dict[str, Any]]:
        """The last report of each life."""
        return [*self.past, *([self.child.latest] if self.child is not None else [])]


@attrs.define
class Goal:
    """What all processes are told, those that are started later too."""

    said: dict[str, Any] = attrs.field(factory=dict[str, Any])

    def tell(self, slots: Iterable[ChildSlot], **what: Any) -> None:
        """Tell those that are there."""
        self.said |= what
        for slot in slots:
            if slot.child is not None:
                slot.child.tell(**what)

    def tell_new(self, child: ChildProcess) -> None:
        """Tell one that was started what the others were told before."""
        if self.said:
            child.tell(**self.said)


async def came_true(condition: Callable[[], bool], patience: float) -> bool:
    """Wait for what children report; False when it did not come true in ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def report_for_ever(parent: Parent, who: str, report: Callable[[], dict[str, Any]], every: float) -> None:
    """Tell the parent every so many seconds how it goes. Raises WriterFenced when that is what became of the writer."""
    while True:
        await asyncio.sleep(every)
        found = report()
        parent.tell(**found)
        writer = found["statistics"]["writer"]
        if writer is not None and writer["fenced"]:
            raise WriterFenced(who, writer["incarnation"])
