"""A TCP proxy on loopback that cuts and swallows, for links that fail in ways a server does not."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from types import TracebackType
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """``async with Proxy(url) as proxy``: use ``proxy.url`` in place of ``url``."""

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._target = urlsplit(url)
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.open_for_traffic = asyncio.Event()
        self.open_for_traffic.set()
        self.refuse = False
        self.connections = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        user, at, _ = self._target.netloc.rpartition("@")
        self.url = urlunsplit(self._target._replace(netloc=f"{user}{at}127.0.0.1:{port}"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def black_hole(self) -> None:
        """Take everything and pass on nothing, as a network that lost its route does."""
        self.open_for_traffic.clear()

    def cut(self) -> None:
        """Reset all connections."""
        for pair in list(self._pairs):
            for writer in pair:
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        self.connections += 1
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        pair = (writer, back)
        self._pairs.add(pair)
        tasks = [asyncio.create_task(self._pump(reader, back)), asyncio.create_task(self._pump(there, writer))]
        self._tasks.update(tasks)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pairs.discard(pair)
            for task in tasks:
                task.cancel()
            for one in pair:
                one.transport.abort()
            self._tasks.difference_update(tasks)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                await self.open_for_traffic.wait()
                target.write(data)
                await target.drain()
