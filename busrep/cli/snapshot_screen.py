"""What a person sees of a snapshot that is being copied."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from busrep.cli.snapshot_file import SnapshotDigest
from busrep.core.snapshots import Agreement


class Watched:
    """A tally that a person watches."""

    def __init__(self, tally: SnapshotDigest, screen: SnapshotScreen) -> None:
        self._tally, self._screen = tally, screen
        self._rows = 0  # of the part that is under way

    def begin(self, agreement: Agreement) -> None:
        """What follows are parts of this one."""
        self._tally.begin(agreement)
        self._screen.begin(agreement, self._tally.rows, self._tally.size)

    def write(self, piece: bytes) -> None:
        """More of the part that is under way."""
        self._tally.write(piece)
        self._rows += piece.count(b"\n")
        self._screen.update(self._tally.rows + self._rows, self._tally.size)

    def part_ended(self, rows: int) -> None:
        """The part under way is whole."""
        self._tally.part_ended(rows)
        self._rows = 0


class SnapshotScreen:
    """A progress bar on standard error, where that is a terminal: rows, bytes, rows/s, the time that is left."""

    def __init__(self, *, quiet: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:,.0f} rows, {task.fields[size]}, {task.fields[speed]:,.0f} rows/s"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("agreeing", total=None, size=megabytes(0), speed=0.0)
        self._started, self._before = time.monotonic(), 0

    def __enter__(self) -> SnapshotScreen:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, agreement: Agreement, rows: int, loaded: int) -> None:
        """What is loaded is known now; so many rows and bytes of it are there from an earlier run."""
        total = agreement.rows if agreement.rows >= 0 else None
        self._started, self._before = time.monotonic(), rows
        # Reset: rows of an earlier run say nothing about the speed of this one.
        fields: dict[str, Any] = {"size": megabytes(loaded), "speed": 0.0}
        self._progress.reset(self._task, total=total, completed=rows, description=agreement.stream, **fields)

    def update(self, rows: int, loaded: int) -> None:
        """So many rows and bytes are there."""
        speed = (rows - self._before) / max(time.monotonic() - self._started, 0.001)
        self._progress.update(self._task, completed=rows, size=megabytes(loaded), speed=speed)


def megabytes(count: int) -> str:
    """For a person."""
    return f"{count / 1e6:,.1f} MB"
