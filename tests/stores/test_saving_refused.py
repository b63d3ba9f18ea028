"""One position that the database refuses holds up no other, and only busrep's errors leave the API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import attrs
import pytest

from busrep.errors import BusrepError, StatementRefused
from busrep.stores.blocking import open_blocking_store
from busrep.stores.interface import AsyncStore
from busrep.streams import Registry
from tests.asyncio.test_bus import QUICK, STREAMS, Seen, deployment, on_postgres, orders, run, write

__all__ = ["deployment", "on_postgres"]  # fixtures

BAD = "w\0"  # PostgreSQL stores no NUL; no line brings one, but a table of other software's may


@contextlib.asynccontextmanager
async def opened(place: Any) -> AsyncIterator[AsyncStore]:
    """A store that is closed when the test fails, too: its connections keep the event loop waiting."""
    store = await place.store_of()
    try:
        yield store
    finally:
        await store.close()


@pytest.mark.servers
@pytest.mark.parametrize("registered", [False, True])
def test_one_position_that_cannot_be_saved_holds_up_no_other(on_postgres: Any, *, registered: bool) -> None:
    async def main() -> None:
        # All keys are saved together, and none by the worker that has just handled its rows.
        rarely = attrs.evolve(QUICK, save_every=1e9)
        async with on_postgres.bus(writer="w1") as writer, on_postgres.bus(reader="billing", settings=rarely) as reader:
            reader.subscribe(orders)(Seen())
            await reader.wait_for(orders, "w1", await write(writer, 1))
            reading = reader.reading
            reading.core.start_at("orders", BAD, 0)
            reading.core.progress["orders", BAD].queue.delivered = 5
            if registered:
                reading.saved.at["orders", BAD] = 0
            last = await write(writer, 2, 3)
            await reader.wait_for(orders, "w1", last)
            await reading.saver.save()
            assert list(reader.statistics()["reader"]["unsavable"]) == [f"orders {BAD}"]
            await reader.wait_for(orders, "w1", last := await write(writer, 4))
            await reading.saver.save()
        async with opened(on_postgres) as store:
            assert (await store.load_reader("billing")).positions["orders", "w1"] == last

    run(main())


@pytest.mark.servers
def test_only_busrep_s_errors_leave_a_store(on_postgres: Any) -> None:
    async def main() -> None:
        async with opened(on_postgres) as store:
            epoch = await store.epoch()
            for work in (
                partial(store.register_reader, "billing", {("orders", BAD): 1}, epoch),
                partial(store.load_reader, BAD),
                partial(store.finish, BAD, 1, timeout=1),
            ):
                with pytest.raises(StatementRefused, match="PostgreSQL at .* refuses a statement") as caught:
                    await work()
                assert isinstance(caught.value, BusrepError)

    run(main())
    blocking = open_blocking_store(on_postgres.store, Registry(STREAMS))
    blocking.open()
    with contextlib.closing(blocking), pytest.raises(StatementRefused):
        blocking.finish(BAD, 1, timeout=1)
