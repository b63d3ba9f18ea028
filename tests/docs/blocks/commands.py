"""The short example of the other commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import busrep
from tests.docs.markdown import Scope


async def news(at: Scope) -> AsyncGenerator[None, None]:
    at.busrep = busrep
    at.bus = await at.open()
    other = await at.open()
    heard = asyncio.Event()
    servers: list[str] = []
    yield
    other.on(busrep.RemoteServerUp)(lambda command: (servers.append(command.server), heard.set()))
    await at.bus.send(busrep.RemoteServerUp("again.example.org"))
    await asyncio.wait_for(heard.wait(), 5)
    assert servers[-1] == "again.example.org"
