"""``on_failure=``: the application is told when something stops for good."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from busrep.errors import BusrepError, ConfigError

from ..runtime.tasks import call

log = logging.getLogger("busrep")

OnFailure = Callable[[BusrepError], Awaitable[None] | None]


def checked_callback(on_failure: object) -> None:
    """Raise ConfigError for what cannot be called."""
    if on_failure is not None and not callable(on_failure):
        raise ConfigError(f"on_failure={on_failure!r}: pass a function of an exception")


async def tell(on_failure: OnFailure, error: BusrepError) -> None:
    """Call it. Never raises."""
    try:
        await call(on_failure, error)
    except Exception:  # what stopped is in the log already
        log.exception("on_failure= failed")
