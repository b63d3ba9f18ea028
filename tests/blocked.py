"""Run code in a process that can import only some packages."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent

BLOCKED = """
import importlib.abc, sys

ALLOWED = {allowed!r}

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ALLOWED:
            raise ModuleNotFoundError(f"No module named {{top!r}} (blocked)", name=top)

sys.meta_path.insert(0, Block())
"""


def run_blocked(code: str, *allowed: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which only the standard library, busrep and ``allowed`` can be imported."""
    program = BLOCKED.format(allowed={"busrep", *allowed}) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


# attrs is imported as attr and attrs; typing_extensions and async_timeout are redis-py's own on older Pythons.
DEPENDED_ON = ("redis", "attr", "attrs", "orjson", "typing_extensions", "async_timeout")
