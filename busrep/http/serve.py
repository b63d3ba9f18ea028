"""Runs the catch-up application by itself, on uvicorn and with uvicorn's own limits.

These bound the connections, the pause between two requests, the head of a request and the time that closing takes. A
client that is slow to ask, or to read, is the matter of a proxy in front: docs/guides/deploy.md shows one.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

from busrep.errors import ConfigError, MissingExtra

try:
    import uvicorn
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

# Connections that wait to be accepted.
BACKLOG = 2048
# Largest head of a request, bytes.
HEAD_BYTES = 16_384
# Longest pause between two requests, seconds; more than the 10 s between two looks of a reader at the known writers.
KEEP_ALIVE = 75

_ours = contextvars.ContextVar("busrep_http_serving", default=False)


def _worth_telling(record: logging.LogRecord) -> bool:
    """Of what uvicorn says of a server of ours only failures: paths and writers belong in no log, and clients could
    fill a disk. uvicorn's own switches silence the whole process."""
    failure = record.exc_info is not None and not isinstance(record.exc_info[1], asyncio.CancelledError)
    return failure or not _ours.get()


for _name in ("uvicorn.error", "uvicorn.access"):
    logging.getLogger(_name).addFilter(_worth_telling)


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    """A running server. ``port`` and ``url`` are where it listens."""

    def __init__(self, server: uvicorn.Server, address: tuple[str, int], running: asyncio.Task[None]) -> None:
        self._server, self._running = server, running
        self.host, self.port = address
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{'https' if server.config.ssl else 'http'}://{shown}:{self.port}"

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._server.server_state.connections)

    async def wait(self) -> None:
        """Return when the server has ended, which it does not do by itself."""
        await asyncio.wait([self._running])


@contextlib.asynccontextmanager
async def serve(
    app: Any,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    tls: ssl.SSLContext | None = None,
    connections: int = 200,
    shutdown_timeout: float = 5.0,
) -> AsyncIterator[Serving]:
    """Serve an ASGI application on a TCP port: ``async with serve(app, "0.0.0.0", 8080, tls=context) as serving``.

    ``port`` 0: a free one, in ``serving.port``. ``tls``: a server's context; without it the secret travels in the
    clear. ``connections``: while more are open, requests are told to come back (503). Signals are left to the caller:
    leaving the block ends answers under way, within ``shutdown_timeout`` seconds, and closes every connection. Raises
    ConfigError when the address cannot be listened on.
    """
    config = _config(app, connections, shutdown_timeout)
    config.ssl = tls
    sockets = await _bound(host, port)
    address = sockets[0].getsockname()[:2]
    server, context = _Server(config), contextvars.copy_context()
    context.run(_ours.set, True)
    running = asyncio.create_task(server.serve(sockets), name="busrep-http-serve", context=context)
    try:
        while not server.started and not running.done():  # noqa: ASYNC110 - nothing of uvicorn's tells
            await asyncio.sleep(0.001)
        if running.done():
            await running
        yield Serving(server, address, running)
    finally:
        server.should_exit = True
        await asyncio.shield(_ended(server, running))
        for one in sockets:  # if it did not get so far as to start
            one.close()


def _config(app: Any, connections: int, shutdown_timeout: float) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=connections + 1,  # uvicorn refuses the request that reaches it
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=shutdown_timeout,  # type: ignore[arg-type]  # it is given to asyncio alone
        h11_max_incomplete_event_size=HEAD_BYTES,
        backlog=BACKLOG,
    )
    config.load()
    return config


async def _bound(host: str, port: int) -> list[socket.socket]:
    """The sockets of an address. Raises ConfigError, where uvicorn would end the process."""
    try:
        bound = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
    except (OSError, OverflowError, UnicodeError) as error:  # OverflowError: no port; UnicodeError: no name of a host
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    sockets = [one.dup() for one in bound.sockets]
    bound.close()
    return sockets


async def _ended(server: uvicorn.Server, running: asyncio.Task[None]) -> None:
    """Wait for it, then for what uvicorn leaves: clients that do not read, and answers that it has cancelled."""
    await asyncio.wait([running])
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    await asyncio.sleep(0)  # for their connection_lost
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=server.config.timeout_graceful_shutdown)
