"""What a source of snapshots says is held against the log that its reader goes on with: nothing is lost in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import pytest

from busrep.asyncio.snapshot_sources import check_log
from busrep.errors import Unavailable
from busrep.snapshots import Agreement

from .bootstraps import SMALL, Source, Target, deployment, online, write
from .store_conformance import sync
from .store_conformance import write as write_facts
from .test_http_server import memory_store


def moved(field: str, by: int) -> Callable[[Agreement], Agreement]:
    def change(found: Agreement) -> Agreement:
        before: Mapping[str, int] = getattr(found, field)
        return attrs.evolve(found, **{field: {"w1": before.get("w1", 0) + by}})

    return change


LIES: dict[str, tuple[Callable[[Agreement], Agreement], str]] = {
    "above what is proven": (moved("positions", 50), "has proven no more than"),
    "a writer that nobody knows": (
        lambda found: attrs.evolve(found, positions={**found.positions, "w9": 5}),
        "'w9', of which the log has proven no more than 0",
    ),
    "above the log's floor": (moved("floors", 20), "leaves out rows up to 20 of 'w1'"),
    "its last part is missing": (lambda found: attrs.evolve(found, parts=found.parts[:-1]), "its parts end at"),
    "no part at all": (lambda found: attrs.evolve(found, parts=()), "its parts end at 0"),
}


@pytest.mark.parametrize("case", LIES)
@sync
async def test_a_reader_loses_nothing_to_a_source_that_is_wrong(case: str, caplog: pytest.LogCaptureFixture) -> None:
    change, told = LIES[case]
    async with deployment(attrs.evolve(SMALL, fetch_timeout=0.3)) as shop, shop.bus(writer="w1") as writer:
        await write(writer, 95)
        await writer._writing.beat()
        source = Source(writer._store)

        def once(found: Agreement) -> Agreement:
            source.change = None
            return change(found)

        source.change = once
        async with shop.bus(reader="billing", start=None, snapshot_source=source) as reader:
            target = Target().of(reader)
            await online(reader)
            last = await write(writer, 5, first=95)
            await reader.wait_for(shop.streams[0], "w1", last)
            assert target.numbers == list(range(100))
    assert told in caplog.text
    assert len(source.agrees) == 2
    assert source.held == []


@sync
async def test_a_log_that_lags_is_waited_for() -> None:
    """That of a replica: a new snapshot would be ahead of it as well."""
    async with memory_store() as store:
        claim = await store.claim("w1", ["orders"], timeout=1)
        agreement = await store.agree("orders", part_rows=2)
        await check_log(agreement, store, patience=0)
        (token,) = await write_facts(store, claim, 1)
        ahead = attrs.evolve(agreement, positions={**agreement.positions, "w1": token}, parts=agreement.parts)
        with pytest.raises(Unavailable, match="has proven no more than"):
            await check_log(ahead, store, patience=0)
        await store.leave(agreement)
        looks = 0

        async def known() -> object:
            nonlocal looks
            looks += 1
            if looks == 2:
                await store.heartbeat(claim, {"orders": token})
            return await type(store).known(store)

        store.known = known  # type: ignore[method-assign, assignment]
        with pytest.raises(Unavailable, match="its parts end at"):  # there is a row by now
            await check_log(ahead, store, patience=30)
        assert looks == 2
