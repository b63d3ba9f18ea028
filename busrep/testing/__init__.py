"""What tests of busrep, and of programs on it, need. Nothing but `fixtures` needs pytest, nothing an extra.

Start here::

    pair.py        bus_pair(), MemoryDeployment: real buses over a Redis and a table in memory
    links.py       FaultyLink: a TCP proxy that cuts, delays, swallows, and cuts at COMMIT
    node.py        FakeNode: a Redis that follows a script of commands and replies
    load.py        steady() and mixed() write, Ledger and Log compare; blocking.py: the same for threads
    rows.py        random_rows(): whatever a row class admits, the extremes first
    virtual.py     VirtualLoop, run(): hours pass at once; simulated processes can be killed and paused
    servers.py     start_redis(), start_postgres(): real servers on free ports
    fixtures.py    the pytest plugin with all of it: pytest_plugins = ["busrep.testing.fixtures"]

The names below are imported when they are asked for, so each costs only what it needs itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .blocking import BlockingBus
    from .links import FaultyLink
    from .load import Ledger, Log, Steady, mixed, steady
    from .node import ANY, CLOSE, USUAL, Error, FakeNode, Raw, expect, message
    from .pair import MemoryDeployment, MemoryRedis, bus_pair
    from .rows import random_rows
    from .servers import start_postgres, start_redis
    from .virtual import VirtualLoop

__all__ = [
    "ANY",
    "CLOSE",
    "USUAL",
    "BlockingBus",
    "Error",
    "FakeNode",
    "FaultyLink",
    "Ledger",
    "Log",
    "MemoryDeployment",
    "MemoryRedis",
    "Raw",
    "Steady",
    "VirtualLoop",
    "bus_pair",
    "expect",
    "message",
    "mixed",
    "random_rows",
    "start_postgres",
    "start_redis",
    "steady",
]

_MODULES = {
    "blocking": ("BlockingBus",),
    "links": ("FaultyLink",),
    "load": ("Ledger", "Log", "Steady", "mixed", "steady"),
    "node": ("ANY", "CLOSE", "USUAL", "Error", "FakeNode", "Raw", "expect", "message"),
    "pair": ("MemoryDeployment", "MemoryRedis", "bus_pair"),
    "rows": ("random_rows",),
    "servers": ("start_postgres", "start_redis"),
    "virtual": ("VirtualLoop",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
