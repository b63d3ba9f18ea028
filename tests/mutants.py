"""Known bugs of this kind of system, each as edits of the source: every rule of protocol.md, section 9, left out, and
every loss of the reference system brought back. Each room has its own, beside its tests.

The suite must catch all of them; ``python -m tests.mutation`` applies them one at a time and says which check did.
"""

from __future__ import annotations

from importlib import import_module

from .mutant import Mutant

ROOMS = (
    "asyncio",
    "caches",
    "cli",
    "commands",
    "core",
    "http",
    "links",
    "pipeline",
    "runtime",
    "snapshots",
    "stores",
    "sync",
)

ALL: tuple[Mutant, ...] = tuple(one for room in ROOMS for one in import_module(f"tests.{room}.mutants").MUTANTS)
