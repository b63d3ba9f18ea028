"""The connections that carry messages between processes: which link leads to a server, by the scheme of its URL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, Unpack

import redis.asyncio as aioredis

from busrep.core.commands import Name
from busrep.errors import ConfigError
from busrep.settings import Settings

from .link import Link, LinkEvents
from .redis import RedisLink
from .tcp import SCHEMES, TcpAddress, TcpLink
from .tcp_relay import LocalLink
from .tcp_server import TcpServer

ServerAddress: TypeAlias = str | aioredis.Redis | TcpAddress | TcpServer


def is_direct(url: str) -> bool:
    """Whether this is the URL of a TCP server, which is reached without Redis."""
    return url.partition("://")[0] in SCHEMES


def make_link(
    server: ServerAddress,
    name: str,
    channels: Sequence[str],
    settings: Settings,
    *,
    identity: Callable[[], Name],
    **events: Unpack[LinkEvents],
) -> Link:
    """The link of the deployment ``name`` to a server; not connected yet. Raises ConfigError for an address that does
    not work.

    ``channels``: those to subscribe to where there is a Redis. ``identity()`` gives who this process is, and its
    incarnation.
    """
    if isinstance(server, TcpServer):
        if server.name != name:
            raise ConfigError(f"the TCP server is of {server.name!r}, this bus of {name!r}")
        return LocalLink(server, channels, **events)
    if isinstance(server, str) and is_direct(server):
        server = TcpAddress.parse(server)
    if isinstance(server, TcpAddress):
        return TcpLink(server, name, settings, identity=identity, **events)
    return RedisLink(server, channels, settings, **events)
