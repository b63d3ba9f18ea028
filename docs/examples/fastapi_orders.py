"""A service that writes facts, and follows those of all its processes: ``uvicorn fastapi_orders:app``."""

import contextlib
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI, HTTPException
from orders import OrderChanged, orders

import busrep

bus: busrep.Bus  # of this process, while the application runs
states: dict[int, tuple[int, str]] = {}


def follow(batch: busrep.Batch[OrderChanged]) -> None:
    """Keep the state of each order that the fact of the highest ID says: so all processes agree in the end."""
    for token, rows in batch.facts():
        for row in rows:
            states[row.order] = max(states.get(row.order, (0, "")), (token, row.state))


@contextlib.asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Open the bus before requests come, close it after the last: what was committed is published by then."""
    global bus
    async with busrep.connect(
        os.environ["BUSREP_REDIS"],
        name=os.environ["BUSREP_NAME"],
        store=os.environ["BUSREP_STORE"],
        writer=os.environ.get("ORDERS_WRITER", "web-1"),  # each process its own
        streams=[orders],
        start="earliest",  # `states` is in memory: it is filled anew after each start
        own=True,  # `follow` sees what this process writes, too
    ) as bus:
        bus.subscribe(orders)(follow)
        yield


app = FastAPI(lifespan=lifespan)


@app.put("/orders/{number}/{state}")
async def change(number: int, state: str) -> dict[str, str | int | None]:
    """Write; the answer says what to wait for, at whichever process."""
    async with bus.write(orders) as fact:
        fact.add(OrderChanged(number, state))
    return {"writer": bus.writer, "fact": fact.id}


@app.get("/orders/{number}")
async def show(number: int, writer: str | None = None, fact: int = 0) -> str:
    """The order's state; with the answer of a PUT not before that is known here."""
    if writer is not None:
        try:
            await bus.wait_for(orders, writer, fact, timeout=5.0)
        except busrep.WaitTimeout:
            raise HTTPException(503, "not known here yet") from None
    if number not in states:
        raise HTTPException(404)
    return states[number][1]
