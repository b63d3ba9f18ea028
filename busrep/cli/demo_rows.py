"""What the demo's processes share: streams, rows, what a child is told and how it ends."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Coroutine, Iterable
from typing import Any

import attrs

from busrep.cli.options import first_error
from busrep.errors import BusrepError, WriterFenced
from busrep.settings import Settings
from busrep.streams import Stream

# A fact whose rows carry this kind was rolled back on purpose: it must appear nowhere.
ABORTED = "aborted"
# Rows of this kind came by publish(), without a row of the application.
BULK = "bulk"
# Exit status of a writer whose name was claimed by another process: a supervisor starts it again.
FENCED = 3
# Seconds between two progress lines of a child.
REPORT_EVERY = 0.1


@attrs.frozen
class DemoRow:
    """One row: ``index`` of ``of`` rows of one fact. ``fact`` is a name no other fact of the run has."""

    fact: str
    index: int
    of: int
    kind: str
    text: str


@attrs.frozen(kw_only=True)
class Task:
    """What a child process is told, in its first message: URLs hold passwords, so not on its command line.

    ``who`` is the writer's or the reader's name, ``life`` counts its processes from 1. A writer writes ``facts``
    facts. A reader records what it handled in ``record``, a file, or without one in the store, in the
    transaction that saves its position.
    """

    redis: str = attrs.field(repr=False)
    store: str = attrs.field(repr=False)
    name: str
    run: str
    who: str
    life: int
    heartbeat: float
    facts: int = 0
    record: str | None = None

    @property
    def settings(self) -> Settings:
        """The bus's settings in a child."""
        return Settings(heartbeat=self.heartbeat)


def demo_streams(run: str) -> list[Stream[DemoRow]]:
    """The two streams of one run, under names that no other run has."""
    return [Stream(f"demo-{run}-{what}", DemoRow) for what in ("orders", "payments")]


def fact_digest(payloads: Iterable[bytes]) -> str:
    """Tells whether two facts hold the same rows in the same order."""
    return hashlib.blake2b(b"\n".join(payloads), digest_size=8).hexdigest()


def run_child(work: Coroutine[Any, Any, None]) -> None:
    """Run a child process to its end. Errors that are not bugs end it with one line and status 2, or FENCED."""
    try:
        asyncio.run(work)
    except* WriterFenced as fenced:
        sys.stderr.write(f"{first_error(fenced)}\n")
        sys.exit(FENCED)
    except* BusrepError as failed:
        sys.stderr.write(f"{first_error(failed)}\n")
        sys.exit(2)
