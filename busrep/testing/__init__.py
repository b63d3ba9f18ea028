"""What tests of programs on busrep need. Nothing but `fixtures` needs pytest, nothing an extra.

Start here::

    pair.py        bus_pair(), MemoryDeployment: real buses over a Redis and a table in memory
    virtual.py     VirtualLoop, run(): hours pass at once
    links.py       FaultyLink: a TCP proxy that cuts, delays, swallows, and cuts at COMMIT
    servers.py     start_redis(), start_postgres(): real servers on free ports
    fixtures.py    the pytest plugin with all of it: pytest_plugins = ["busrep.testing.fixtures"]
"""

from __future__ import annotations

from .links import FaultyLink
from .pair import MemoryDeployment, MemoryRedis, bus_pair
from .servers import start_postgres, start_redis
from .virtual import VirtualLoop

__all__ = ["FaultyLink", "MemoryDeployment", "MemoryRedis", "VirtualLoop", "bus_pair", "start_postgres", "start_redis"]
