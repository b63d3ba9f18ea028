"""What a person sees of a job that is running."""

from __future__ import annotations

import threading

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class StageScreen:
    """A bar for each stage of a job, on standard error, where that is a terminal. It is a job's ``progress``."""

    def __init__(self, job: str, *, quiet: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:,.0f}{task.fields[of]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._job = job
        self._lock = threading.Lock()  # Spark calls back in threads of its own
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> StageScreen:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """So much of the stage is done."""
        of = "" if total is None else f" of {total:,}"
        with self._lock:
            task = self._stages.get(stage)
            if task is None:
                for before in self._stages.values():  # what comes before is over
                    self._progress.stop_task(before)
                task = self._progress.add_task(f"{self._job}: {stage}", total=total, completed=done, of=of)
                self._stages[stage] = task
            else:
                self._progress.update(task, completed=done, total=total, of=of)
