"""What mypy says of a program that uses busrep: `# E: ...` is the error of its line, and no other line has one.

Read by tests/test_typing.py, never run.
"""

from typing import assert_type

import attrs
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import busrep
import busrep.sync
from busrep import Stream
from busrep.integrations import django, sqlalchemy


@attrs.frozen
class Order:
    number: int
    state: str


@attrs.frozen
class Payment:
    amount: float


orders = Stream("orders", Order)
payments = Stream("payments", Payment)
raw = Stream("raw")
more = [orders]


async def asynchronous(bus: busrep.Bus, session: AsyncSession) -> None:
    async with bus.write(orders) as fact:
        assert_type(fact, busrep.Fact[Order])
        fact.add(Order(1, "new"))
        fact.add("not a row")  # E: No overload variant of "add"
        fact.add(Payment(1.0))  # E: No overload variant of "add"
        fact.add(Payment(1.0), stream=payments, at=1)
        fact.add(Order(1, "new"), stream=payments)  # E: Cannot infer value of type parameter "OtherT" of "add"
        fact.add_each([Order(1, "new")])
        fact.add_each([Payment(1.0)])  # E: List item 0 has incompatible type "Payment"
        fact.add_row(Order(1, "new"))  # E: has no attribute "add_row"
    async with bus.write(orders, payments) as several:
        several.add(Order(1, "new"))
        several.add(Payment(1.0))  # E: No overload variant of "add"
        several.add(Payment(1.0), stream=payments)
    async with bus.write(*more) as any_fact:
        any_fact.add(Order(1, "new"))
    async with bus.write(raw) as untyped:
        untyped.add(["any", "row"])
    bus.write("orders")  # E: No overload variant of "write"
    await bus.publish(orders, [Order(1, "new")])
    await bus.publish(orders, ["not a row"])  # E: Cannot infer value of type parameter "RowT" of "publish"

    @bus.subscribe(orders)
    async def handle(batch: busrep.Batch[Order]) -> None:
        print(batch.rows[0].number)
        print(batch.rows[0].nosuch)  # E: "Order" has no attribute "nosuch"
        for _, rows in batch.facts():
            print(rows[0].nosuch)  # E: "Order" has no attribute "nosuch"

    @bus.subscribe(orders)  # E: incompatible type
    async def of_another_class(batch: busrep.Batch[Payment]) -> None:
        print(batch.rows)

    @bus.subscribe(orders, payments)
    def both(batch: busrep.Batch[Order] | busrep.Batch[Payment]) -> None:
        print(batch.rows)

    bus.subscribe("orders")  # E: No overload variant of "subscribe"
    bus.subscribe(orders)(lambda batch: print(batch.rows[0].nosuch))  # E: "Order" has no attribute "nosuch"
    async for batch in bus.follow(orders):
        assert_type(batch, busrep.Batch[Order])
        print(batch.rows[0].nosuch)  # E: "Order" has no attribute "nosuch"
    async for mixed in bus.follow(orders, payments):
        print(mixed.rows[0].amount)

    @bus.snapshot(orders, key=lambda row: row.number)
    async def load(part: busrep.SnapshotPart[Order]) -> None:
        print(part.rows[0].nosuch)  # E: "Order" has no attribute "nosuch"

    bus.snapshot(orders, key=lambda row: row.nosuch)  # E: "Order" has no attribute "nosuch"
    bus.snapshot(orders)(lambda part: print(part.rows[0].nosuch))  # E: "Order" has no attribute "nosuch"
    async with sqlalchemy.write(bus, session, orders) as in_session:
        in_session.add("not a row")  # E: No overload variant of "add"


def in_threads(bus: busrep.sync.Bus, session: Session) -> None:
    with bus.write(orders) as fact:
        assert_type(fact, busrep.sync.Fact[Order])
        fact.add(Order(1, "new"))
        fact.add("not a row")  # E: No overload variant of "add"
    bus.publish(orders, [Order(1, "new")])
    bus.publish(orders, [Payment(1.0)])  # E: Cannot infer value of type parameter "RowT" of "publish"
    bus.write("orders")  # E: No overload variant of "write"

    @bus.subscribe(orders)
    def handle(batch: busrep.sync.Batch[Order]) -> None:
        print(batch.rows[0].nosuch)  # E: "Order" has no attribute "nosuch"

    bus.snapshot(orders)(lambda part: print(part.rows[0].nosuch))  # E: "Order" has no attribute "nosuch"
    for batch in bus.follow(orders):
        print(batch.rows[0].nosuch)  # E: "Order" has no attribute "nosuch"
    with sqlalchemy.write(bus, session, orders) as in_session:
        in_session.add("not a row")  # E: No overload variant of "add"
    with django.write(orders) as in_django:
        in_django.add("not a row")  # E: No overload variant of "add"


def options() -> None:
    busrep.connect("redis://", name="shop", on_poison="dead_letter", on_epoch_change="stop", on_too_old="skip")
    busrep.connect("redis://", name="shop", start="earliest")
    busrep.connect("redis://", name="shop", start={"orders": {"w1": 5}})
    busrep.connect("redis://", name="shop", on_poison="ignore")  # E: expected "Literal['stop', 'dead_letter']"
    busrep.connect("redis://", name="shop", on_epoch_change="go on")  # E: expected "Literal['rebootstrap', 'stop']"
    busrep.connect("redis://", name="shop", on_too_old="stp")  # E: expected "Literal['stop', 'skip']"
    busrep.connect("redis://", name="shop", start="newest")  # E: Argument "start"
    busrep.sync.connect("redis://", name="shop", on_poison="dead_letter", on_epoch_change="stop", on_too_old="skip")
    busrep.sync.connect("redis://", name="shop", on_poison="ignore")  # E: expected "Literal['stop', 'dead_letter']"
    busrep.sync.connect("redis://", name="shop", start="newest")  # E: Argument "start"
