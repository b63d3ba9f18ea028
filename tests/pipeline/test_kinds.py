"""Columns of SQL's types both ways: rows of a class to Arrow, as the source has them, and back, as the sink writes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrep.errors import ConfigError, RowError
from busrep.streams import Stream

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from busrep.spark.archive_rows import SCHEMA
from busrep.spark.archive_typed import Fields
from busrep.spark.columns import arrow_column, decode, fields_of, typed_shape
from busrep.spark.kinds import kind_of
from busrep.spark.sink_rows import Encoder
from tests.pipeline import sql_types
from tests.pipeline.sql_types import DAY, JUNE, KEY, MAY, ROW, STREAM, Address, Colour, Everything, Level, Mixed

TYPES = {
    "day": "date", "price": "decimal(38,18)", "key": "string", "colour": "string", "level": "bigint",
    "mixed": "string", "home": "struct<street:string,since:date,floor:bigint,more:string>", "until": "date",
    "paid": "decimal(38,18)", "tint": "string", "work": "struct<street:string,since:date,floor:bigint,more:string>",
    "days": "array<date>", "prices": "map<string,decimal(38,18)>",
    "homes": "array<struct<street:string,since:date,floor:bigint,more:string>>",
}  # fmt: skip


def arrow(stream: Stream[Any], payloads: Sequence[bytes]) -> pa.RecordBatch:
    """The columns of rows, as the source has them."""
    shape = typed_shape(stream, metadata=False)
    schema = to_arrow_schema(shape.schema(), timezone="UTC")
    tokens = pa.array(range(1, len(payloads) + 1), pa.int64())
    texts = pa.array([payload.decode() for payload in payloads], pa.string())
    values = decode(stream.name, shape.fields, range(len(shape.fields)), tokens, texts)
    columns = [
        arrow_column(stream.name, field, column, kind)
        for field, column, kind in zip(shape.fields, values, schema.types, strict=True)
    ]
    return pa.record_batch(columns, schema=schema)


def copied(stream: Stream[Any], batch: pa.RecordBatch) -> list[Any]:
    """The rows that the sink makes of columns."""
    return stream.decode([payload for _, payload in Encoder(stream, False).encode(batch)])


def test_a_field_has_the_type_of_its_annotation() -> None:
    schema = typed_shape(STREAM, metadata=False).schema()
    assert {field.name: field.dataType.simpleString() for field in schema} == TYPES
    assert all(field.nullable for field in schema)


@pytest.mark.parametrize(
    ("annotation", "spark"),
    [
        (Colour, "string"), (Level, "bigint"), (Mixed, "string"), (sql_types.Rights, "bigint"),
        (list[Level], "array<bigint>"), (dict[str, uuid.UUID], "map<string,string>"),
        (sql_types.Node, "struct<name:string,below:array<string>>"),
        (date | str, "string"), (attrs.make_class("Empty", []), "string"),
        (list[list[Address]], "array<array<struct<street:string,since:date,floor:bigint,more:string>>>"),
    ],
)  # fmt: skip
def test_kinds_that_need_a_converter(annotation: Any, spark: str) -> None:
    assert kind_of(annotation).spark_type().simpleString() == spark


def test_rows_become_columns_of_these_types() -> None:
    (row,) = arrow(STREAM, [STREAM.encode(ROW)]).to_pylist()
    home = {"street": "a", "since": MAY, "floor": 3, "more": '{"deep":[1]}'}
    assert row == {
        "day": MAY, "price": Decimal("1.5"), "key": str(KEY), "colour": "red", "level": 2, "mixed": '"one"',
        "home": home, "until": JUNE, "paid": Decimal(100), "tint": "blue",
        "work": {"street": "b", "since": JUNE, "floor": None, "more": None}, "days": [MAY, JUNE],
        "prices": [("x", Decimal("-0.000000000000000001"))],
        "homes": [{"street": "c", "since": MAY, "floor": None, "more": None}, None],
    }  # fmt: skip


def test_the_fields_of_an_archive_have_these_types() -> None:
    row = {"writer": "w", "token": 1, "index": 0, "row": STREAM.encode(ROW).decode()}
    fields = Fields(STREAM).added(pa.RecordBatch.from_pylist([row], SCHEMA)).column("fields")
    assert fields.to_pylist() == arrow(STREAM, [STREAM.encode(ROW)]).to_pylist()


amounts = st.decimals(-(10**19), 10**19, places=18).map(lambda value: value.normalize())
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
addresses = st.builds(
    Address, texts, st.dates(), st.none() | st.integers(-(2**63), 2**63 - 1),
    st.recursive(st.none() | st.booleans() | texts, lambda inner: st.lists(inner, max_size=2), max_leaves=3),
)  # fmt: skip
everything = st.builds(
    Everything, st.dates(), amounts, st.uuids(), st.sampled_from(Colour), st.sampled_from(Level),
    st.sampled_from(Mixed), addresses, st.none() | st.dates(), st.none() | amounts,
    st.none() | st.sampled_from(Colour), st.none() | addresses, st.lists(st.dates(), max_size=2),
    st.dictionaries(texts, amounts, max_size=2), st.lists(st.none() | addresses, max_size=2),
)  # fmt: skip


@settings(max_examples=50)
@given(st.lists(everything, min_size=1, max_size=3))
def test_a_copy_by_columns_is_equal(rows: list[Everything]) -> None:
    assert copied(STREAM, arrow(STREAM, STREAM.encode_all(rows))) == rows


def test_a_struct_is_an_object_in_a_row() -> None:
    assert json.loads(STREAM.encode(ROW))[6] == {
        "street": "a",
        "since": "2026-05-11",
        "floor": 3,
        "more": {"deep": [1]},
    }
    with pytest.raises(RowError, match="NaN"):
        STREAM.encode(attrs.evolve(ROW, home=Address("a", MAY, more=[float("nan")])))


@attrs.frozen
class Loose:
    """A class whose converters do too little."""

    home: Address = attrs.field(converter=lambda value: Address(*value) if isinstance(value, list) else value)
    days: list[date] = attrs.field(factory=list, converter=lambda days: [day and DAY(day) for day in days])
    level: Level | None = attrs.field(default=None, converter=lambda value: value)
    key: uuid.UUID | None = attrs.field(default=None, converter=str)


LOOSE = Stream("loose", Loose)


def test_an_array_is_read_as_well_when_the_class_does() -> None:
    (row,) = arrow(LOOSE, [b'[["a","2026-05-11"],[]]'])["home"].to_pylist()
    assert row == {"street": "a", "since": MAY, "floor": None, "more": None}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('[{"street":"a"}]', "field 'home': its converter makes {'street': 'a'} of {'street': 'a'}: Address is needed"),
        ('[[5,"2026-05-11"]]', "[5, '2026-05-11']: street: str is needed, not int"),
        ('[["a","2026-05-11",true]]', "floor: int is needed, not bool"),
        ('[["a",null]]', "since: date is needed, not NoneType"),
        ('[["a","May"]]', "field 'home': its converter refuses ['a', 'May']: ValueError"),
        ('[["a","2026-05-11"],["2026-05-11",null]]', "field 'days': its converter makes"),
        ('[["a","2026-05-11"],[],1]', "field 'level': its converter makes 1 of 1: Level is needed, not int"),
        ('[["a","2026-05-11"],[],null,"x"]', "field 'key': its converter makes 'x' of 'x': uuid is needed, not str"),
        ('[["a","2026-05-11",9223372036854775808]]', "field 'home'"),
    ],
)
def test_a_value_that_does_not_fit_is_told(row: str, reason: str) -> None:
    with pytest.raises(RowError, match="stream 'loose'") as caught:
        arrow(LOOSE, [row.encode()])
    assert reason in str(caught.value)


@attrs.frozen
class Shrunk:
    """Converters that do not take back what is written: an amount is divided again, and an array is needed."""

    price: Decimal = attrs.field(converter=lambda cents: Decimal(cents) / 100)
    home: Address | None = attrs.field(default=None, converter=lambda value: value and Address(value[0], MAY))


def test_what_the_class_would_read_otherwise_is_not_written() -> None:
    shrunk = Stream("shrunk", Shrunk)
    price = pa.array([Decimal("1.50")], pa.decimal128(38, 18))
    with pytest.raises(RowError, match=r"price: its converter makes '0.015' of '1.5', which the column has"):
        Encoder(shrunk, False).encode(pa.record_batch([price], ["price"]))
    home = arrow(STREAM, [STREAM.encode(ROW)])["home"]
    price = pa.array([Decimal(0)], price.type)
    with pytest.raises(RowError, match="KeyError"):
        Encoder(shrunk, False).encode(pa.record_batch([price, home], ["price", "home"]))
    with pytest.raises(RowError, match="home: its converter's value: Address is needed, not dict"):
        Encoder(LOOSE, False).encode(pa.record_batch([home], ["home"]))


def test_columns_of_other_types_are_taken_as_their_json() -> None:
    """A text for a date, a struct without the fields that have defaults: what the class reads is written."""
    batch = arrow(STREAM, [STREAM.encode(ROW)])
    day, home = pa.array(["2026-05-11"]), pa.array([{"street": "a", "since": "2026-05-11"}])
    (row,) = copied(STREAM, batch.set_column(0, "day", day).set_column(6, "home", home))
    assert row == attrs.evolve(ROW, home=Address("a", MAY))
    bad = pa.array([{"street": "a", "since": "2026-05-11", "town": "b"}])
    with pytest.raises(RowError, match="unexpected keyword argument 'town'"):
        copied(STREAM, batch.set_column(6, "home", bad))
    with pytest.raises(ConfigError, match=r"column 'home' is decimal128\(3, 1\), which has no form in JSON"):
        copied(STREAM, batch.set_column(6, "home", pa.array([Decimal("10.5")])))


def test_a_class_that_cannot_be_resolved_is_told_by_its_field() -> None:
    wrong = attrs.make_class("Wrong", {"at": attrs.field(type="Nowhere")})
    made = attrs.make_class("Made", {"one": attrs.field(type=wrong, converter=lambda value: value)})
    with pytest.raises(ConfigError, match="stream 's', field 'one': an annotation of Wrong cannot be resolved"):
        fields_of(Stream("s", made))
