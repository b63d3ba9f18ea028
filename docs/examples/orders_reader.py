"""Prints every change of an order, in its writer's order, going on where it stopped last time."""

import asyncio
import os

from orders import orders

import busrep


async def main() -> None:
    """Read until told to stop."""
    bus = busrep.connect(
        os.environ["BUSREP_REDIS"],
        name=os.environ["BUSREP_NAME"],
        store=os.environ["BUSREP_STORE"],
        reader=os.environ.get("ORDERS_READER", "billing"),
        streams=[orders],
    )
    async with bus:
        async for batch in bus.follow(orders):
            for token, row in zip(batch.tokens, batch.rows, strict=True):
                print(f"order {row.order} is {row.state} ({batch.writer} {token})", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
