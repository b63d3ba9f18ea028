"""docs/http.md."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator

from busrep.stores import open_store
from busrep.streams import Registry
from tests import DATA
from tests.docs.markdown import Scope


async def source(at: Scope) -> AsyncGenerator[None, None]:
    from shop import orders

    at.orders, at.secret = orders, "hush"
    shutil.copy(DATA / "tls.crt", "our-authority.pem")
    yield
    try:
        assert at.source.url == "https://facts.example/busrep"
    finally:
        await at.source.close()


async def limits(at: Scope) -> AsyncGenerator[None, None]:
    from shop import orders

    at.streams, at.secret = Registry([orders]), "hush"
    at.store = open_store("sqlite:///shop.db", at.streams)
    yield
    assert at.limits.snapshots.downloads == 8
    assert at.app.state.catch_up.statistics()["requests"] == 0
    await at.app.state.catch_up.close()


async def reference(at: Scope) -> AsyncGenerator[None, None]:
    at.secret = "hush"
    yield
    assert at.source.foreign_writers
    await at.source.close()
