"""``on_failure=``: the application is told when something stops for good."""

from __future__ import annotations

import logging

from busrep.errors import BusrepError
from busrep.options import OnFailure

from ..runtime.tasks import call

log = logging.getLogger("busrep")


async def tell(on_failure: OnFailure, error: BusrepError) -> None:
    """Call it. Never raises."""
    try:
        await call(on_failure, error)
    except Exception:  # what stopped is in the log already
        log.exception("on_failure= failed")
