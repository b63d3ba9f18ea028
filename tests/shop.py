"""What the tests' buses carry: streams of a shop, and settings under which nobody waits for long."""

from __future__ import annotations

import attrs

from busrep import Settings, Stream

QUICK = Settings(heartbeat=0.1, retry_min=0.02, retry_max=0.2, save_every=0.05, redis_timeout=2.0, shutdown_timeout=2.0)


@attrs.frozen
class Order:
    number: int
    status: str


orders = Stream("orders", Order)
payments = Stream("payments", Order)
typing = Stream("typing", resettable=True)
STREAMS = [orders, payments, typing]
