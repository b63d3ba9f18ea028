"""Functions that a bus calls when its link stands (again), and before it closes."""

from __future__ import annotations

import asyncio

import pytest

import busrep
from busrep import RemoteServerUp
from busrep.testing import MemoryRedis
from busrep.testing.pair import QUICK
from tests.stores.store_conformance import sync


@sync
async def test_a_function_is_called_at_each_connect() -> None:
    server, connects = MemoryRedis(), asyncio.Queue[int]()
    bus = busrep.connect(server.client(), name="shop", settings=QUICK)
    bus.on_connect(lambda: connects.put_nowait(1))
    async with bus:
        assert await connects.get() == 1
        server.cut()
        assert await connects.get() == 1


@sync
async def test_what_is_sent_before_the_close_arrives() -> None:
    server, heard = MemoryRedis(), asyncio.Queue[str]()
    async with busrep.connect(server.client(), name="shop", settings=QUICK) as other:
        other.on(RemoteServerUp)(lambda command: heard.put_nowait(command.server))
        async with busrep.connect(server.client(), name="shop", settings=QUICK) as bus:

            @bus.before_close
            async def goodbye() -> None:
                await bus.send(RemoteServerUp("last-words"))
                with pytest.raises(busrep.errors.Closed):
                    bus.subscribe()

        assert await heard.get() == "last-words"
        with pytest.raises(busrep.errors.Closed):
            await bus.send(RemoteServerUp("too-late"))


@sync
async def test_one_that_fails_or_hangs_keeps_nothing_from_closing(caplog: pytest.LogCaptureFixture) -> None:
    server = MemoryRedis()
    bus = busrep.connect(server.client(), name="shop", settings=busrep.Settings(shutdown_timeout=0.05))
    called: list[str] = []
    async with bus:

        @bus.before_close
        def fail() -> None:
            called.append("fail")
            raise ValueError

        @bus.before_close
        async def hang() -> None:
            called.append("hang")
            await asyncio.Event().wait()

    assert called == ["fail", "hang"]
    assert caplog.text.count("a handler of before_close failed") == 2
