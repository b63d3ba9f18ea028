"""Random rows of any row class, by its annotations: what a stream must carry, and a test would not think of."""

from __future__ import annotations

import random
import types
import typing
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, TypeVar, cast

import attrs

from busrep.errors import ConfigError

RowT = TypeVar("RowT")

# No NUL: PostgreSQL's text has none. No lone surrogates: they are no Unicode text.
TEXTS = (
    "", " ", "a b", "\n", "\r\n\t", '"\\/', "null", "RDATA s w 1 []", "ß", "İı", "日本語", "e\u0301", "\u2028\u2029",
    "\ufeff", "\u202eabc", "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0010ffff", "\x01\x1f\x7f\x80", "%s %(a)s {} $1 ?",
    "'; DROP TABLE facts; --", "../..", "1e309",
)  # fmt: skip
INTEGERS = (
    0, 1, -1, 255, 256, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1,
    -(2**63),
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.1, 1 / 3, 1e16, -1e-7, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 123456789.125)

# Characters of the largest texts, and how often one comes: over the default bound of one frame, 64 KiB.
HUGE, HUGE_SHARE = 70_000, 0.004
# Of lists and objects: how many items at most, and how deep a value of no particular type is nested.
ITEMS, DEPTH = 4, 3
# Validators may refuse many values; a class that refuses so many in a row is given up.
ATTEMPTS = 200

Make = Callable[[random.Random], Any]


def random_rows(row_type: type[RowT] | None, seed: int) -> Iterator[RowT]:
    """Rows without end, the same ones for the same seed; ``row_type``: as of the stream, None for any JSON.

    Full of what breaks things: empty and huge texts of all scripts, the extreme integers and floats, None wherever
    the annotation admits it, nested and empty lists and objects; fields with defaults are left out now and then. All of
    them can be encoded. Values that a validator refuses (ValueError, TypeError) are drawn again. Raises ConfigError for
    an annotation that a stream does not take, and for a class that refuses everything.
    """
    dice = random.Random(f"rows {seed}")
    if row_type is None:
        while True:
            yield cast(RowT, _anything(dice))
    made: Any = row_type
    fields = _fields(made)
    while True:
        yield _row(made, fields, dice)


def _fields(row_type: Any) -> list[tuple[str, bool, Make]]:
    if not attrs.has(row_type):
        raise ConfigError(f"the row type {row_type!r} is not an attrs class")
    hints = typing.get_type_hints(row_type)
    found = []
    for field in attrs.fields(row_type):
        if not field.init:
            continue
        try:
            make = _maker(hints.get(field.name, Any))
        except KeyError:
            raise ConfigError(
                f"field {field.name!r} of {row_type.__name__} is annotated {hints[field.name]!r}: "
                "no random values are known for it"
            ) from None
        found.append((field.alias or field.name, field.default is not attrs.NOTHING, make))
    return found


def _row(row_type: Any, fields: list[tuple[str, bool, Make]], dice: random.Random) -> Any:
    for _ in range(ATTEMPTS):
        values = {name: make(dice) for name, optional, make in fields if not optional or dice.random() < 0.8}
        try:
            return row_type(**values)
        except (ValueError, TypeError) as error:
            refused = error
    raise ConfigError(f"{row_type.__name__} refuses random values, {ATTEMPTS} times in a row: {refused}") from refused


def _maker(annotation: Any) -> Make:
    """What makes values of an annotation; raises KeyError for one that rows do not have."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        makers = [_maker(argument) for argument in arguments]
        return lambda dice: dice.choice(makers)(dice)
    if origin in (list, tuple) and (origin is list or arguments[1:] == (...,)):
        item = _maker(arguments[0])
        return lambda dice: origin(item(dice) for _ in range(dice.randint(0, ITEMS)))
    if origin is tuple:
        parts = [_maker(argument) for argument in arguments]
        return lambda dice: tuple(part(dice) for part in parts)
    if origin is dict and arguments[0] is str:
        value = _maker(arguments[1])
        return lambda dice: {_text(dice, huge=False): value(dice) for _ in range(dice.randint(0, ITEMS))}
    return _SIMPLE[annotation]


def _text(dice: random.Random, *, huge: bool = True) -> str:
    if huge and dice.random() < HUGE_SHARE:
        return dice.choice("x\u00e4\U0001f600") * HUGE
    if dice.random() < 0.5:
        return "".join(dice.choice(TEXTS) for _ in range(dice.randint(1, 3)))
    return "".join(
        chr(dice.choice((dice.randint(32, 126), dice.randint(0xA0, 0xD7FF)))) for _ in range(dice.randint(0, 20))
    )


def _integer(dice: random.Random) -> int:
    return (
        dice.choice(INTEGERS)
        if dice.random() < 0.5
        else dice.randint(-(2 ** dice.randint(1, 63)), 2 ** dice.randint(1, 62))
    )


def _float(dice: random.Random) -> float:
    number = dice.choice(FLOATS) if dice.random() < 0.5 else dice.uniform(-1, 1) * 10.0 ** dice.randint(-300, 300)
    return number * dice.choice((1, -1))


def _boolean(dice: random.Random) -> bool:
    return dice.random() < 0.5


def _datetime(dice: random.Random) -> datetime:
    at = datetime(1970, 1, 1) + timedelta(microseconds=dice.randint(0, 4 * 10**15))
    zone = dice.choice((None, UTC, timezone(timedelta(minutes=dice.randint(-840, 840)))))
    return at.replace(tzinfo=zone)


def _list(dice: random.Random) -> list[Any]:
    return [_anything(dice, 1) for _ in range(dice.randint(0, ITEMS))]


def _object(dice: random.Random) -> dict[str, Any]:
    return {_text(dice, huge=False): _anything(dice, 1) for _ in range(dice.randint(0, ITEMS))}


def _nothing(_: random.Random) -> None:
    return None


def _anything(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.randint(0, 4 if depth >= DEPTH else 6)
    if kind == 5:
        return [_anything(dice, depth + 1) for _ in range(dice.randint(0, ITEMS))]
    if kind == 6:
        return {_text(dice, huge=False): _anything(dice, depth + 1) for _ in range(dice.randint(0, ITEMS))}
    return (_nothing, _boolean, _integer, _float, _text)[kind](dice)


_SIMPLE: dict[Any, Make] = {
    Any: _anything,
    object: _anything,
    int: _integer,
    str: _text,
    bool: _boolean,
    float: _float,
    list: _list,
    dict: _object,
    datetime: _datetime,
    type(None): _nothing,
}
