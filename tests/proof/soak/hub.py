"""The TCP server of a soak that goes over TCP: a relay in front of the Redis that Sentinel names."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from redis.asyncio.sentinel import Sentinel

from busrep.errors import ConfigError, Unavailable
from busrep.links.tcp_server import TcpServer
from tests.proof.soak.task import NAME, SETTINGS, STREAMS
from tests.support.children import Parent, run_child

REPORT_EVERY = 0.5


async def serve(parent: Parent, task: dict[str, Any]) -> None:
    """Listen on the port that the task names (0: any), and say so; until told to stop."""
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [("127.0.0.1", task["sentinel"])],
        sentinel_kwargs={"socket_timeout": 1.0},
        username=task["user"],
        password=task["password"],
    )
    stop = asyncio.create_task(parent.hear())
    while not stop.done():
        redis = sentinel.master_for(task["service"])
        server = TcpServer(NAME, port=task["port"], redis=redis, streams=STREAMS, settings=SETTINGS)
        try:
            await server.open()
        except (Unavailable, ConfigError) as error:  # Redis is away, or refuses this user for now
            logging.getLogger("soak").info("cannot open yet: %s", error)
            await server.close()
            await asyncio.wait([stop], timeout=0.2)
            continue
        while not stop.done():
            parent.tell(port=server.port, statistics={"tcp": server.statistics()}, ready=True)
            await asyncio.wait([stop], timeout=REPORT_EVERY)
        await server.close()
    for one in sentinel.sentinels:
        await one.aclose()


if __name__ == "__main__":
    run_child("soak", serve)
