"""``batch.transaction()``: a handler's effects and the saved position in one transaction of the bus's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from busrep.errors import CommitUnknown, ConfigError
from busrep.stores.interface import AsyncTransaction

ENDED = (
    "the transaction of batch.transaction() was ended inside its block: leave COMMIT and ROLLBACK to the block's end, "
    "which saves the position first"
)


@contextlib.asynccontextmanager
async def exactly_once(effects: AsyncTransaction, save: Callable[[Any], Awaitable[None]]) -> AsyncIterator[Any]:
    """Begin, hand out the connection, save the position on it, commit; roll back if anything fails.

    ``save(connection)`` saves the position. Raises what ``save`` and the database raise, CommitUnknown when COMMIT got
    no answer, and ConfigError when the block ended the transaction itself.
    """
    await effects.begin()
    try:
        yield effects.connection
        if effects.ended:
            raise ConfigError(ENDED)
        await save(effects.connection)
        await effects.commit()
    except CommitUnknown:  # it may still be under way; the connection goes back by itself
        raise
    except BaseException:
        # To the end: a connection that is left in the middle would be lost to the pool.
        await asyncio.shield(asyncio.ensure_future(effects.rollback()))
        raise
