"""Changes an order every second (or ORDERS_EVERY seconds), ORDERS_COUNT times or for ever."""

import asyncio
import itertools
import os

from orders import OrderChanged, orders

import busrep


async def main() -> None:
    """Write until told to stop."""
    bus = busrep.connect(
        os.environ["BUSREP_REDIS"],
        name=os.environ["BUSREP_NAME"],
        store=os.environ["BUSREP_STORE"],
        writer=os.environ.get("ORDERS_WRITER", "web-1"),
        streams=[orders],
    )
    count = int(os.environ.get("ORDERS_COUNT", "0"))
    async with bus:
        for order in range(1, count + 1) if count else itertools.count(1):
            async with bus.write(orders) as fact:
                # `await fact.execute("UPDATE ...")` puts your own writes into the same transaction.
                fact.add(OrderChanged(order, "paid"))
            print(f"wrote order {order} as fact {fact.id}", flush=True)
            await asyncio.sleep(float(os.environ.get("ORDERS_EVERY", "1")))


if __name__ == "__main__":
    asyncio.run(main())
