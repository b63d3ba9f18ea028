"""Row classes that do not fit the stored rows are refused: their values would fill the wrong fields without a word."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import attrs
import psycopg
import pytest

import busrep
import busrep.sync
from busrep import Stream
from busrep.errors import RowClassMismatch, Unavailable
from busrep.row_types import Field, type_of
from busrep.shapes import dump, includes, load, merged
from busrep.stores import open_store
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests.shop import QUICK
from tests.stores.store_conformance import sync


def row_class(*fields: tuple[str, Any] | tuple[str, Any, Any], name: str = "Order") -> Any:
    made = {one[0]: attrs.field(type=one[1], **({"default": one[2]} if one[2:] else {})) for one in fields}
    return attrs.make_class(name, made, frozen=True)


Order = row_class(("number", int), ("state", str))
Longer = row_class(("number", int), ("state", str), ("note", str, ""))
Longest = row_class(("number", int), ("state", str), ("note", str, ""), ("tags", list[str], attrs.Factory(list)))
Swapped = row_class(("state", str), ("number", int))
Renamed = row_class(("number", int), ("status", str))
Retyped = row_class(("number", int), ("state", int))
Shorter = row_class(("number", int))
Required = row_class(("number", int), ("state", str), ("note", str))
OtherAddition = row_class(("number", int), ("state", str), ("price", str, ""))
REFUSED = pytest.mark.parametrize("other", [Swapped, Renamed, Retyped, Shorter, Required], ids=lambda _: "")


def shop(*classes: Any) -> Registry:
    return Registry([Stream("orders", one) for one in classes] or [Stream("orders")])


# -- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"), (int | None, "int | null"), (None | str | int, "int | null | str"), (Any, "any"),
        (None | list[int], "array[int] | null"), (tuple[int, ...], "array[int]"), (list, "array"),
        (tuple[int, str], "tuple[int, str]"), (dict[str, float], "object[float]"), (dict, "object"),
        (datetime.datetime, "datetime"), (object, "any"), (list[int | None], "array[int | null]"),
    ],
)  # fmt: skip
def test_a_type_has_one_text(annotation: Any, text: str) -> None:
    assert type_of(annotation).text == text


@pytest.mark.parametrize(
    ("wider", "narrower"),
    [
        ("int", "int"), ("float", "int"), ("any", "array[int]"), ("int | null", "null"), ("array", "array[str]"),
        ("array[int | null]", "array[int]"), ("object[array[float]]", "object[array[int]]"),
        ("tuple[float, str]", "tuple[int, str]"), ("int | null", "int | null"),
    ],
)  # fmt: skip
def test_a_wider_type_includes_a_narrower_one(wider: str, narrower: str) -> None:
    assert includes(wider, narrower)
    assert includes(narrower, wider) == (wider == narrower)


@pytest.mark.parametrize(
    ("one", "other"),
    [("int", "str"), ("int", "bool"), ("array[int]", "array[str]"), ("tuple[int, str]", "tuple[int]"),
     ("array[int]", "tuple[int]"), ("array[int]", "object[int]"), ("int", "datetime"), ("str", "datetime")],
)  # fmt: skip
def test_types_that_do_not_include_each_other(one: str, other: str) -> None:
    assert not includes(one, other)
    assert not includes(other, one)


def test_fields_are_read_from_the_class_and_kept_as_text() -> None:
    @attrs.frozen
    class Row:
        number: int
        when: datetime.datetime = attrs.field(converter=datetime.datetime.fromisoformat)
        note: str | None = None
        made: int = attrs.field(init=False, default=0)

    fields = Stream("orders", Row).fields
    assert fields == (Field("number", "int", False), Field("when", "any", False), Field("note", "null | str", True))
    assert load(dump(fields)) == fields
    assert Stream("orders").fields is None
    assert load(None) is None


def fields(made: Any) -> Any:
    return Stream("orders", made).fields


@REFUSED
def test_what_does_not_fit_is_refused_with_both_shapes(other: Any) -> None:
    for declared, stored in ((other, Order), (Order, other)):
        with pytest.raises(RowClassMismatch) as error:
            merged("orders", fields(declared), fields(stored))
        for one in (*fields(declared), *fields(stored)):
            assert str(one) in str(error.value)
        assert "busrep db init --store URL --streams MODULE:NAME --redefine orders" in str(error.value)


def test_what_fits_is_merged() -> None:
    longer = fields(Longer)
    assert merged("orders", fields(Order), None) == fields(Order)
    assert merged("orders", fields(Order), longer) == longer
    assert merged("orders", longer, fields(Order)) == longer
    with pytest.raises(RowClassMismatch, match="field 3 is another one"):
        merged("orders", fields(OtherAddition), longer)
    wide = fields(row_class(("number", float), ("state", str | None)))
    assert merged("orders", wide, fields(Order)) == merged("orders", fields(Order), wide) == wide
    anything = fields(row_class(("number", Any), ("state", str, "new")))
    assert merged("orders", anything, fields(Order)) == (Field("number", "int", False), Field("state", "str", True))
    assert merged("orders", fields(Order), anything) == (Field("number", "int", False), Field("state", "str", True))


# -- the stores -------------------------------------------------------------------------------------------------------


@attrs.frozen
class Table:
    """A store's URL, and what can be done with the store in either runtime."""

    url: str
    blocking: bool

    async def do(self, streams: Registry, *work: str, **options: Any) -> None:
        if self.blocking:
            await asyncio.to_thread(self._do_blocking, streams, *work, **options)
            return
        store = open_store(self.url, streams)
        try:
            for one in work:
                await self._done(store, one, **options)
        finally:
            await store.close()

    def _do_blocking(self, streams: Registry, *work: str, **options: Any) -> None:
        store = open_blocking_store(self.url, streams)
        try:
            for one in work:
                self._done(store, one, **options)
        finally:
            store.close()

    def _done(self, store: Any, what: str, **options: Any) -> Any:
        return store.claim("w1", ["orders"], timeout=5.0) if what == "claim" else getattr(store, what)(**options)


@pytest.fixture(params=["sqlite", "postgres", "memory", "sqlite-blocking", "postgres-blocking", "memory-blocking"])
def table(request: pytest.FixtureRequest, bus_name: str) -> Table:
    kind, _, blocking = request.param.partition("-")
    url = f"memory://{bus_name}" if kind == "memory" else request.getfixturevalue(f"{kind}_url")
    return Table(url, bool(blocking))


@pytest.mark.servers
@sync
async def test_open_refuses_another_class_and_takes_a_rolling_upgrade(table: Table) -> None:
    await table.do(shop(Order), "init")
    for other in (Swapped, Renamed, Retyped, Shorter, Required):
        for work in (("open",), ("init",)):
            with pytest.raises(RowClassMismatch) as error:
                await table.do(shop(other), *work)
            assert "number: int" in error.value.stored
    for fits in (Order, Longer, Longest, row_class(("number", int), ("state", str | None))):
        await table.do(shop(fits), "open")
    await table.do(shop(), "open")  # rows of any kind are not checked
    await table.do(shop(Longer), "init")
    for fits in (Order, Longer, Longest):
        await table.do(shop(fits), "open", "claim")
    for other in (OtherAddition, Swapped):
        with pytest.raises(RowClassMismatch):
            await table.do(shop(other), "open")


@pytest.mark.servers
@sync
async def test_fields_stay_when_tables_are_made_again(table: Table) -> None:
    await table.do(shop(Longer), "init")
    for again in (shop(), shop(Order), Registry([*shop(Order), Stream("payments")])):
        await table.do(again, "init")
        with pytest.raises(RowClassMismatch, match="note"):
            await table.do(shop(OtherAddition), "open")
    await table.do(shop(Swapped), "init", redefine=["orders"])
    await table.do(shop(Swapped), "open")
    with pytest.raises(RowClassMismatch):
        await table.do(shop(Order), "open")


@pytest.mark.servers
@sync
async def test_a_writer_keeps_its_fields_before_its_first_row(table: Table) -> None:
    """Two writers that add different fields must not both write: a reader of the one misreads the other's rows."""
    await table.do(shop(), "init")  # not known
    await table.do(shop(Order), "open", "claim")
    with pytest.raises(RowClassMismatch):
        await table.do(shop(Swapped), "open")
    await table.do(shop(Longer), "open")  # a reader stores nothing
    await table.do(shop(OtherAddition), "open", "claim")
    with pytest.raises(RowClassMismatch):
        await table.do(shop(Longer), "open")


@pytest.mark.servers
@sync
async def test_writers_that_were_opened_at_once_do_not_both_write(table: Table) -> None:
    if table.blocking:
        pytest.skip("the plan is the same")
    await table.do(shop(Order), "init")
    stores = [open_store(table.url, shop(made)) for made in (Longer, OtherAddition)]
    for store in stores:
        await store.open()
    await stores[0].claim("w1", ["orders"], timeout=5)
    with pytest.raises(RowClassMismatch):
        await stores[1].claim("w2", ["orders"], timeout=5)
    assert [one.writer for one in await stores[0].known()] == ["w1"]
    for store in stores:
        await store.close()


@pytest.mark.servers
@pytest.mark.parametrize("database", ["sqlite_url", "postgres_url"])
def test_buses_of_both_runtimes_refuse_another_class(
    request: pytest.FixtureRequest, redis_url: str, bus_name: str, database: str
) -> None:
    url = request.getfixturevalue(database)

    async def main() -> None:
        store = open_store(url, shop(Order))
        await store.init()
        options: dict[str, Any] = {"name": bus_name, "store": url, "settings": QUICK}
        for who in ({"writer": "w2"}, {"reader": "r1"}, {}):
            with pytest.raises(RowClassMismatch):
                async with busrep.connect(redis_url, streams=shop(Swapped), **options, **who):
                    pass
            with pytest.raises(RowClassMismatch):
                await asyncio.to_thread(opened_in_threads, options | who)
        old, new = Stream("orders", Order), Stream("orders", Longer)
        async with (
            busrep.connect(redis_url, streams=[new], **options, writer="new") as newer,
            busrep.connect(redis_url, streams=[old], **options, writer="old", start="earliest") as older,
        ):
            found = older.follow(old)
            async with newer.write(new) as fact:
                fact.add(Longer(1, "new", "more"))
            async for batch in found:
                assert batch.rows == [Order(1, "new")]
                break

    def opened_in_threads(options: dict[str, Any]) -> None:
        with busrep.sync.connect(redis_url, streams=shop(Swapped), **options) as bus:
            bus.wait_for(bus.streams["orders"], "w1", 0, 5.0)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.servers
def test_rights_in_postgresql(postgres_url: str) -> None:
    """Processes with a row class need SELECT on busrep_streams, and to ship new fields before 'db init' has, UPDATE."""

    async def main() -> None:
        await open_store(postgres_url, shop(Order)).init()
        role = f"role_{postgres_url.rpartition('/')[2]}"
        host = postgres_url.rpartition("/")[0].rpartition("@")[2]
        url = f"postgresql://{role}:x@{host}/{postgres_url.rpartition('/')[2]}"
        with psycopg.connect(postgres_url, autocommit=True) as owner:
            owner.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'".encode())
            try:
                owner.execute(
                    f"GRANT ALL ON busrep_meta, busrep_writers, busrep_positions, busrep_facts TO {role}; "
                    f"GRANT ALL ON SEQUENCE busrep_seq_orders TO {role}".encode()
                )
                with pytest.raises(Unavailable, match="permission denied for table busrep_streams"):
                    await Table(url, blocking=False).do(shop(Order), "open")
                owner.execute(f"GRANT SELECT ON busrep_streams TO {role}".encode())
                await Table(url, blocking=False).do(shop(Order), "open", "claim")
                with pytest.raises(Unavailable, match="permission denied for table busrep_streams"):
                    await Table(url, blocking=False).do(shop(Longer), "open", "claim")
                owner.execute(f"GRANT UPDATE ON busrep_streams TO {role}".encode())
                await Table(url, blocking=False).do(shop(Longer), "open", "claim")
            finally:
                owner.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())

    asyncio.run(main())
