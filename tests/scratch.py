"""Where the tests keep their files: in memory, where there is room for them.

A disk that stands still now and then lets leases run out, and each commit on it costs a write that is waited for.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "bt-"  # short: the path of a Unix socket below it has at most 107 bytes
FREE_BYTES, AVAILABLE_BYTES = 4_000_000_000, 8_000_000_000


def memory_folder() -> Path | None:
    """Make a folder in memory for the files of this run; None where TMPDIR says where they go, or there is no room.

    Removes the folders of runs that were killed.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return None
    for left in MEMORY.glob(f"{PREFIX}*"):
        pid = left.name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)
    if shutil.disk_usage(MEMORY).free < FREE_BYTES or _available_bytes() < AVAILABLE_BYTES:
        return None
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=MEMORY))
    if not _may_execute(folder):
        shutil.rmtree(folder)
        return None
    folder.chmod(0o755)  # PostgreSQL does not run as root, and has to get at its files
    return folder


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def _may_execute(folder: Path) -> bool:
    """Whether programs run from there: Java unpacks libraries, and tests write scripts."""
    probe = folder / "probe"
    probe.write_text("#!/bin/sh\n")
    probe.chmod(probe.stat().st_mode | stat.S_IXUSR)
    try:
        return subprocess.run([probe], check=False).returncode == 0
    except OSError:
        return False
    finally:
        probe.unlink()
