"""The load generators: random rows, mixed operations and what they write down."""

from __future__ import annotations

import asyncio
import collections
import itertools
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs
import pytest

import busrep
from busrep.errors import ConfigError, NotAWriter
from busrep.stores import open_store
from busrep.streams import Registry, Stream
from busrep.testing import virtual
from busrep.testing.pair import MemoryDeployment, bus_pair
from tests.support.load import Ledger, Log, mixed
from tests.support.rows import HUGE, random_rows


@attrs.frozen
class Order:
    number: int
    note: str | None = None
    tags: list[str] = attrs.field(factory=list)


@attrs.define(kw_only=True)
class Everything:
    integer: int
    text: str
    flag: bool
    amount: float
    anything: Any
    at: datetime
    nothing: None
    plain_list: list
    plain_dict: dict
    words: list[str]
    pair: tuple[int, str]
    many: tuple[float, ...]
    table: dict[str, dict[str, list[int]]]
    either: int | str | None
    number: int | float
    positive: int = attrs.field(validator=attrs.validators.gt(0))
    other_name: int = attrs.field(default=7, alias="renamed")
    upper: str = attrs.field(default="", converter=str.upper)
    made: int = attrs.field(init=False, default=1)


orders = busrep.Stream("orders", Order)
everything = busrep.Stream("everything", Everything)
anything = busrep.Stream("anything")
typing = busrep.Stream("typing", resettable=True)
backfill = busrep.Stream("backfill", Order, negative=True)


# -- rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [orders, everything, anything], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_random_rows_survive_the_wire(stream: Stream[Any], seed: int) -> None:
    rows = list(itertools.islice(random_rows(stream.row_type, seed), 100))
    again = stream.decode(stream.encode_all(rows))
    for row, back in zip(rows, again, strict=True):
        if stream is everything:  # an instant comes back in UTC
            assert (back.at.tzinfo is None) == (row.at.tzinfo is None)
        assert back == row
        assert stream.encode(back) == stream.encode(row)


def test_random_rows_are_the_same_for_a_seed() -> None:
    one, two, other = (list(itertools.islice(random_rows(Everything, seed), 20)) for seed in (1, 1, 2))
    assert one == two != other


def test_random_rows_hold_the_extremes() -> None:
    rows = list(itertools.islice(random_rows(Everything, 1), 2000))
    texts = [row.text for row in rows]
    assert "" in texts
    assert any(len(text) >= HUGE for text in texts)
    assert not any("\0" in text for text in texts)
    assert not all(text.isascii() for text in texts)
    integers = [row.integer for row in rows]
    assert (min(integers), max(integers)) == (-(2**63), 2**63 - 1)
    assert {type(row.either) for row in rows} == {int, str, type(None)}
    assert {type(row.anything) for row in rows} == {int, str, float, bool, type(None), list, dict}
    assert {row.words == [] for row in rows} == {True, False}
    assert collections.Counter(row.other_name == 7 for row in rows)[True] > 100  # left out now and then


def test_row_classes_that_cannot_be_filled() -> None:
    @attrs.frozen
    class Odd:
        field: complex

    @attrs.frozen
    class Never:
        number: int = attrs.field(validator=attrs.validators.in_([]))

    with pytest.raises(ConfigError, match="not an attrs class"):
        next(random_rows(int, 1))
    with pytest.raises(ConfigError, match="'field' of Odd is annotated"):
        next(random_rows(Odd, 1))
    with pytest.raises(ConfigError, match="Never refuses random values"):
        next(random_rows(Never, 1))


# -- mixed operations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_mixed_operations_in_memory(seed: int) -> None:
    streams = [orders, everything, anything, backfill]

    async def main() -> None:
        async with bus_pair(*streams) as (writer, reader):
            ledger = Ledger()
            reader.subscribe(*streams)(ledger)
            log = await mixed(writer, streams, operations=300, seed=seed)
            await log.reached(reader)
            log.check(ledger)
            assert set(log.done) == {"fact", "several", "bulk", "rollback", "held", "cancelled"}
            assert log.done.total() == 300
            assert not log.failures
            assert all(len(log.rows(stream)) > 50 for stream in streams)
            assert log.rows(typing) == []

    virtual.run(main())


def test_mixed_operations_on_a_table_with_trouble(tmp_path: Path) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders, typing) as deployment:
            store = f"sqlite:///{tmp_path / 'x.db'}"

            def opened() -> Any:
                return open_store(store, Registry(deployment.streams), settings=deployment.settings)

            await opened().init()
            ledger = Ledger()
            async with (
                deployment.bus(writer="w1", store=opened()) as writer,
                deployment.bus(store=opened()) as reader,
            ):
                reader.subscribe(orders)(ledger)
                log = Log("w1")
                for part in range(5):
                    log.add(await mixed(writer, [orders], operations=20, seed=part, hold=0.005))
                    deployment.redis.cut()
                await log.reached(reader)
                log.check(ledger)
                assert log.done.total() == 100

    asyncio.run(asyncio.wait_for(main(), 60))


def test_mixed_operations_need_a_writer() -> None:
    async def main() -> None:
        async with bus_pair(orders) as (_, reader):
            with pytest.raises(NotAWriter):
                await mixed(reader, [orders], operations=1, seed=1)

    virtual.run(main())


def test_a_log_finds_what_is_wrong() -> None:
    log = Log("w1", committed={"orders": {1: ["a"], 2: ["b"], 5: ["e"]}}, doubtful={"orders": {3: ["c"], 4: ["d"]}})
    good = {"orders": {1: ["a"], 2: ["b"], 3: ["c"], 5: ["e"]}}
    log.check(Ledger({"w1": good, "w2": {"orders": {9: ["x"]}}}))
    bad = {"orders": {1: ["a"], 2: ["x"], 4: ["y"], 6: ["z"]}, "payments": {1: ["p"]}}
    with pytest.raises(AssertionError) as caught:
        log.check(Ledger({"w1": bad}, ["orders w1 1 came after 2"]))
    assert str(caught.value).splitlines() == [
        "facts of w1:",
        "orders w1 1 came after 2",
        "orders 5: lost",
        "orders 6: never written",
        "orders 2: other rows",
        "orders 4: other rows",
        "payments 1: never written",
    ]
    many = Log("w1", committed={"orders": {id: ["a"] for id in range(50)}})
    with pytest.raises(AssertionError, match="and 30 more"):
        many.check(Ledger())
