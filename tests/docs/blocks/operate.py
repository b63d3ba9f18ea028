"""docs/guides/operate.md."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace

from busrep.core.health import Health, HealthReason
from tests.docs.blocks.writing import on_sqlite
from tests.docs.markdown import Scope


async def probes(at: Scope) -> AsyncGenerator[None, None]:
    await on_sqlite(at)
    yield
    assert (at.ready(), at.alive()) == ((200, []), 200)
    await at.bus.close()
    assert (at.ready()[0], at.alive()) == (503, 200)
    fenced = Health(False, (HealthReason("fenced", "web-1", "somebody else"),))
    at.bus = SimpleNamespace(health=lambda: fenced)
    assert (at.ready(), at.alive()) == ((503, ["fenced: somebody else"]), 503)
