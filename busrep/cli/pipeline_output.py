"""What a job on Spark shows: its progress on a terminal, and its report, for a person and in a file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from rich.progress import TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from busrep.cli.output import progress_bars
from busrep.errors import ConfigError
from busrep.private_files import replacing


@contextlib.contextmanager
def stage_bars(job: str, *, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each stage of a job, on standard error, where that is a terminal. Yields a job's ``progress``."""
    shown = TextColumn("{task.completed:,.0f}{task.fields[of]}")
    lock = threading.Lock()  # Spark calls back in threads of its own
    stages: dict[str, TaskID] = {}

    def progress(stage: str, done: int, total: int | None) -> None:
        of = "" if total is None else f" of {total:,}"
        with lock:
            if stage in stages:
                bars.update(stages[stage], completed=done, total=total, of=of)
                return
            for before in stages.values():  # what comes before is over
                bars.stop_task(before)
            stages[stage] = bars.add_task(f"{job}: {stage}", total=total, completed=done, of=of)

    with progress_bars(shown, TimeElapsedColumn(), TimeRemainingColumn(), quiet=quiet) as bars:
        yield progress


def check_report_file(file: Path | None) -> None:
    """Raises ConfigError for one that cannot be written."""
    if file is not None and not os.access(file if _is_special(file) else file.resolve().parent, os.W_OK):
        raise ConfigError(f"--report {file}: its folder is not there, or cannot be written to")


def write_report(file: Path | None, found: Mapping[str, Any]) -> None:
    """Write it as JSON: whoever waits for the file finds it whole. Raises OSError."""
    if file is None:
        return
    content = orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if _is_special(file):
        file.write_bytes(content)
        return
    with replacing(file.resolve()) as written:
        written.write(content)


def _is_special(file: Path) -> bool:
    # A pipe, a terminal, /dev/null: to be written into, and not to be replaced.
    return file.exists() and not file.is_file()


def describe(report: Mapping[str, Any]) -> str:
    """A report for a person: a line for each value, nested ones indented."""
    return "\n".join(_lines(report, ""))


def _lines(report: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    width = max(map(len, report), default=0)
    for name, value in report.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{name}", *_lines(value, indent + "  ")]
        else:
            shown = f"{value:,}" if type(value) in (int, float) else str(value)
            lines.append(f"{indent}{name:<{width}}  {shown}")
    return lines
