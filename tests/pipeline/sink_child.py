"""A driver and its tasks in one process, killed at a step. Its task is JSON on stdin.

Writes one batch. At the step that it is told it sends itself SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from busrep.core.writer import Writer
from busrep.spark import sink_commit, staging
from busrep.spark.staging_store import StagingStore
from tests.pipeline.sinks import Query, texts


def die(*args: Any, **more: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def after(owner: Any, name: str) -> None:
    real = getattr(owner, name)

    def then_die(*args: Any, **more: Any) -> Any:
        real(*args, **more)
        die()

    setattr(owner, name, then_die)


STEPS = {
    "looked": lambda: after(StagingStore, "done"),
    "claimed": lambda: after(StagingStore, "claim"),
    "inserted, not committed": lambda: setattr(staging, "_clear", die),
    "committed": lambda: after(StagingStore, "commit"),
    "read back": lambda: after(sink_commit, "rows_to_publish"),
    "proven": lambda: after(StagingStore, "heartbeat"),
    "published in part": lambda: after(Writer, "published"),
    "published": lambda: after(sink_commit, "publish"),
}


def main(url: str, options: dict[str, str], run: str, number: int, parts: list[list[int]], step: str) -> None:
    query = Query(url, run=run, options=options)
    messages = query.stage(number, parts)
    if step == "a task":

        def rows() -> Any:
            yield texts(parts[0])
            die()

        query.sink(0, number).write(rows())
    if step == "staged":
        die()
    STEPS[step]()
    query.commit(number, messages)


if __name__ == "__main__":
    main(**json.load(sys.stdin))
