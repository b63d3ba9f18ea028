"""Drivers in processes of their own, to be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.spark.cluster import ROOT, end_session


def killed_when(
    module: str, task: object, enough: Callable[[], bool], log: Path, seconds: float = 200, *, may_fail: bool = False
) -> bool:
    """Run ``python -m module``, its task as JSON on its standard input; killed with all that it has started when
    ``enough()``. Whether it came to its end before; ``may_fail``: it need not. ``log``: its standard error."""
    with (
        log.open("a") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr, text=True,
            cwd=ROOT, start_new_session=True,
        ) as driver,
    ):  # fmt: skip
        try:
            assert driver.stdin is not None
            driver.stdin.write(json.dumps(task))
            driver.stdin.close()
            late = time.monotonic() + seconds
            while driver.poll() is None and not enough():
                assert time.monotonic() < late, log.read_text()
                time.sleep(0.002)
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                assert driver.wait(20) == -signal.SIGKILL
                return False
            assert driver.returncode == 0 or may_fail, log.read_text()
            return driver.returncode == 0
        finally:
            end_session(driver.pid)
