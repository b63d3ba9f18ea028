"""A row class with a field of each type that has one in SQL; its stream can be imported by executors."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from typing import Any

import attrs

from busrep.streams import Stream


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(Enum):
    NUMBER = 1
    TEXT = "one"


class Rights(Flag):
    READ = 1
    WRITE = 2


def taken(made: type[Any], read: Callable[[Any], Any]) -> Any:
    """A converter that takes what is written, and what the class is made with."""
    return lambda value: value if value is None or isinstance(value, made) else read(value)


DAY, MONEY = taken(date, date.fromisoformat), taken(Decimal, Decimal)


@attrs.frozen
class Address:
    street: str
    since: date = attrs.field(converter=DAY)
    floor: int | None = None
    more: Any = None


ADDRESS = taken(Address, lambda value: Address(**value))


@attrs.frozen
class Node:
    name: str
    below: list[Node] = attrs.field(factory=list, converter=lambda nodes: [NODE(node) for node in nodes])


NODE = taken(Node, lambda value: Node(**value))


@attrs.frozen
class Everything:
    day: date = attrs.field(converter=DAY)
    price: Decimal = attrs.field(converter=MONEY)
    key: uuid.UUID = attrs.field(converter=taken(uuid.UUID, uuid.UUID))
    colour: Colour = attrs.field(converter=Colour)
    level: Level = attrs.field(converter=Level)
    mixed: Mixed = attrs.field(converter=Mixed)
    home: Address = attrs.field(converter=ADDRESS)
    until: date | None = attrs.field(default=None, converter=DAY)
    paid: Decimal | None = attrs.field(default=None, converter=MONEY)
    tint: Colour | None = attrs.field(default=None, converter=taken(Colour, Colour))
    work: Address | None = attrs.field(default=None, converter=ADDRESS)
    days: list[date] = attrs.field(factory=list, converter=lambda days: [DAY(day) for day in days])
    prices: dict[str, Decimal] = attrs.field(
        factory=dict, converter=lambda prices: {name: MONEY(price) for name, price in prices.items()}
    )
    homes: list[Address | None] = attrs.field(factory=list, converter=lambda homes: [ADDRESS(home) for home in homes])


STREAM = Stream("everything", Everything)
STREAMS = [STREAM]
MAY, JUNE = date(2026, 5, 11), date(2026, 6, 1)
KEY = uuid.UUID(int=7)
ROW = Everything(
    MAY, Decimal("1.50"), KEY, Colour.RED, Level.HIGH, Mixed.TEXT, Address("a", MAY, 3, {"deep": [1]}), JUNE,
    Decimal(100), Colour.BLUE, Address("b", JUNE), [MAY, JUNE], {"x": Decimal("-0.000000000000000001")},
    [Address("c", MAY), None],
)  # fmt: skip
