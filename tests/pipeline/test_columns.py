from __future__ import annotations

import decimal
import pickle
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import attrs
import pyarrow
import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import EqualNullSafe, EqualTo, GreaterThan, In, IsNotNull, LessThan, LessThanOrEqual, Not
from pyspark.sql.pandas.types import to_arrow_schema

from busrep.errors import ConfigError, RowError
from busrep.spark.archive_rows import SCHEMA
from busrep.spark.archive_typed import Fields
from busrep.spark.columns import arrow_column, decode, fields_of, generic_shape, typed_shape
from busrep.spark.filters import Pushed
from busrep.spark.kinds import Kind, kind_of
from busrep.streams import Stream

INT, TEXT, JSON = Kind("int"), Kind("str"), Kind("json", nullable=True)


@pytest.mark.parametrize(
    ("annotation", "kind", "spark"),
    [
        (int, INT, "bigint"),
        (float, Kind("float"), "double"),
        (str, TEXT, "string"),
        (bool, Kind("bool"), "boolean"),
        (datetime, Kind("datetime"), "timestamp"),
        (int | None, Kind("int", nullable=True), "bigint"),
        (list[int], Kind("list", inner=INT), "array<bigint>"),
        (tuple[str, ...], Kind("list", inner=TEXT), "array<string>"),
        (list[list[int] | None], Kind("list", inner=Kind("list", True, INT)), "array<array<bigint>>"),
        (dict[str, float] | None, Kind("dict", True, Kind("float")), "map<string,double>"),
        (dict[str, list[int]], Kind("dict", inner=Kind("list", inner=INT)), "map<string,array<bigint>>"),
        (int | str, JSON, "string"),
        (int | str | None, JSON, "string"),
        (tuple[int, str], JSON, "string"),
        (list, JSON, "string"),
        (dict, JSON, "string"),
        (dict[int, str], JSON, "string"),
        (Any, JSON, "string"),
        (object, JSON, "string"),
        (decimal.Decimal, Kind("decimal"), "decimal(38,18)"),
    ],
)
def test_kinds_of_annotations(annotation: Any, kind: Kind, spark: str) -> None:
    assert kind_of(annotation) == kind
    assert kind.spark_type().simpleString() == spark


@attrs.frozen
class Row:
    number: int
    price: float
    at: datetime
    note: str | None = None
    tags: list[str] = attrs.field(factory=lambda: ["new"])
    times: dict[str, datetime] = attrs.field(factory=dict)
    amount: decimal.Decimal = attrs.field(default=decimal.Decimal(1), converter=decimal.Decimal)
    since: datetime = datetime(2020, 1, 1, tzinfo=UTC)


ROWS = Stream("rows", Row)
FULL = '[1,2.5,"2026-01-31T12:00:00+00:00","n",["a"],{"t":"2026-01-31T12:00:00.5+01:00"},"1.50","2021-01-01T00:00:00Z"]'


def columns(rows: Sequence[str]) -> dict[str, list[Any]]:
    shape = typed_shape(ROWS, metadata=False)
    schema = to_arrow_schema(shape.schema(), timezone="UTC")
    tokens = pyarrow.array(range(1, len(rows) + 1), pyarrow.int64())
    values = decode("rows", shape.fields, range(8), tokens, pyarrow.array(rows, pyarrow.string()))
    found = {}
    for field, column in zip(shape.fields, values, strict=True):
        array = arrow_column("rows", field, column, schema.field(field.name).type)
        assert array.type == schema.field(field.name).type
        found[field.name] = array.to_pylist()
    return found


NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_rows_become_columns() -> None:
    assert columns([FULL]) == {
        "number": [1], "price": [2.5], "at": [NOON], "note": ["n"], "tags": [["a"]],
        "times": [[("t", datetime(2026, 1, 31, 12, 0, 0, 500_000, timezone(timedelta(hours=1))))]],
        "amount": [decimal.Decimal("1.50")], "since": [datetime(2021, 1, 1, tzinfo=UTC)],
    }  # fmt: skip


@pytest.mark.parametrize("others", [[], [FULL], [FULL[:-1] + ',"of a later version",5]']])
def test_rows_of_other_versions_have_defaults_and_lose_what_is_unknown(others: list[str]) -> None:
    short = '[1,2,"2026-01-31T12:00:00"]'
    found = columns([short, short, *others])
    assert {name: column[1] for name, column in found.items()} == {
        "number": 1, "price": 2.0, "at": NOON, "note": None, "tags": ["new"], "times": [], "amount": decimal.Decimal(1),
        "since": datetime(2020, 1, 1, tzinfo=UTC),
    }  # fmt: skip
    assert len(found["number"]) == 2 + len(others)


def cents(value: int | str) -> decimal.Decimal:
    return decimal.Decimal(value) / 100


def plain(value: Any) -> Any:
    return value


@attrs.frozen
class Converted:
    day: date = attrs.field(converter=date.fromisoformat)
    price: decimal.Decimal = attrs.field(converter=cents)
    name: str = attrs.field(converter=str)
    number: int = attrs.field(converter=int)
    days: list[date] = attrs.field(converter=lambda days: [date.fromisoformat(day) for day in days])
    until: date | None = attrs.field(default=None, converter=attrs.converters.optional(date.fromisoformat))
    wrong: decimal.Decimal = attrs.field(default=decimal.Decimal(0), converter=plain)


CONVERTED = Stream("converted", Converted)


def converted(*rows: str) -> dict[str, list[Any]]:
    shape = pickle.loads(cloudpickle.dumps(typed_shape(CONVERTED, metadata=False)))
    schema = to_arrow_schema(shape.schema(), timezone="UTC")
    tokens = pyarrow.array(range(1, len(rows) + 1), pyarrow.int64())
    values = decode("converted", shape.fields, range(7), tokens, pyarrow.array(rows, pyarrow.string()))
    found = {}
    for field, column in zip(shape.fields, values, strict=True):
        found[field.name] = arrow_column("converted", field, column, schema.field(field.name).type).to_pylist()
    return found


def test_a_field_with_a_converter_has_its_declared_type() -> None:
    shape = typed_shape(CONVERTED, metadata=False)
    assert {field.name: field.dataType.simpleString() for field in shape.schema()} == {
        "day": "date", "price": "decimal(38,18)", "name": "string", "number": "string", "days": "array<date>",
        "until": "date", "wrong": "decimal(38,18)",
    }  # fmt: skip
    rows = [
        '["2026-05-11",150,"it\'s \\"é\\"","5",["2026-05-12"],"2027-01-01"]',
        '["2026-05-12","-1",7,5,[],null]',
        '["2026-05-12",null,null,null,null]',
    ]
    assert converted(*rows) == {
        "day": [date(2026, 5, 11), date(2026, 5, 12), date(2026, 5, 12)],
        "price": [decimal.Decimal("1.5"), decimal.Decimal("-0.01"), None],
        "name": ["it's \"é\"", "7", None], "number": ["5", "5", None], "days": [[date(2026, 5, 12)], [], None],
        "until": [date(2027, 1, 1), None, None], "wrong": [decimal.Decimal(0)] * 3,
    }  # fmt: skip


def test_the_fields_of_an_archive_have_the_same_types() -> None:
    row = '["2026-05-11",150,"n","5",[]]'
    batch = pyarrow.RecordBatch.from_pylist([{"writer": "w", "token": 1, "index": 0, "row": row}], SCHEMA)
    (fields,) = Fields(CONVERTED).added(batch).column("fields").to_pylist()
    assert (fields["day"], fields["price"], fields["name"]) == (date(2026, 5, 11), decimal.Decimal("1.5"), "n")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('["11.05.2026",1,"","",[]]', "field 'day': its converter refuses '11.05.2026': ValueError"),
        ('["2026-05-11","x","","",[]]', "field 'price': its converter refuses 'x': InvalidOperation"),
        ('["2026-05-11",1,"","",[],null,5]', "field 'wrong': its converter makes 5 of 5: decimal is needed, not int"),
        ('["2026-05-11",1e30,"","",[]]', "field 'price'"),
    ],
)
def test_a_value_that_its_converter_does_not_take_is_told(row: str, reason: str) -> None:
    with pytest.raises(RowError, match="stream 'converted'") as caught:
        converted(row)
    assert reason in str(caught.value)


def test_the_last_field_that_is_required_is_needed() -> None:
    for rows in (["[1,2.5]"], ["[1,2.5]", FULL]):
        with pytest.raises(RowError, match="stream 'rows', field 'at': is missing"):
            columns(rows)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('["1",2.5,"2026-01-31T12:00:00"]', "field 'number': int is needed, not str"),
        ('[true,2.5,"2026-01-31T12:00:00"]', "field 'number': int is needed, not bool"),
        ('[null,2.5,"2026-01-31T12:00:00"]', "field 'number': int is needed, not NoneType"),
        ('[1.0,2.5,"2026-01-31T12:00:00"]', "field 'number': int is needed, not float"),
        ('[9223372036854775808,2.5,"2026-01-31T12:00:00"]', "field 'number'"),
        ('[1,2.5,"yesterday"]', "field 'at'"),
        ('[1,2.5,"2026-01-31T12:00:00",null,[null]]', "field 'tags': str is needed, not NoneType"),
        ('[1,2.5,"2026-01-31T12:00:00",null,{}]', "field 'tags': list is needed, not dict"),
        ('[1,2.5,"2026-01-31T12:00:00",null,[],{"a":5}]', "field 'times': datetime is needed, not int"),
        ('{"number":1}', "token 2: an array is needed"),
        ("5", "token 2: an array is needed"),
        ("[1,2", "token 2: not JSON"),
        ("[1],[2]", "token 2: not JSON"),
    ],
)
def test_a_row_that_does_not_fit_is_told(row: str, reason: str) -> None:
    with pytest.raises(RowError, match="stream 'rows'") as caught:
        columns([FULL, row])
    assert reason in str(caught.value)


def test_the_halves_of_a_row_are_not_taken_for_rows() -> None:
    with pytest.raises(RowError, match="token 1: not JSON"):
        columns(['[1,2.5,"2026-01-31T12:00:00"],[1', '2.5,"2026-01-31T12:00:00"]'])


def test_columns_that_do_not_go() -> None:
    with pytest.raises(ConfigError, match="has no row class.*option 'typed' as false"):
        fields_of(Stream("bare"))
    with pytest.raises(ConfigError, match="option 'columns' names column 'x'; there are: stream, writer"):
        generic_shape().subset(["token", "x"], "option 'columns'")

    @attrs.frozen
    class Clash:
        _token: int = attrs.field(alias="_token")

    with pytest.raises(ConfigError, match="has fields .* of its own"):
        typed_shape(Stream("clash", Clash), metadata=True)


# -- filters ---------------------------------------------------------------------------------------------------------

SPANS = [("a", 0, 10), ("b", 5, 20)]


def pushed(*filters: Any, known: bool = True) -> tuple[Pushed, list[Any]]:
    found = Pushed("rows", generic_shape(), known)
    return found, list(found.push(filters))


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ([EqualTo(("stream",), "rows")], SPANS),
        ([EqualTo(("stream",), "others")], []),
        ([In(("stream",), ("rows", "others"))], SPANS),
        ([EqualTo(("writer",), "b")], [("b", 5, 20)]),
        ([EqualNullSafe(("writer",), "b"), In(("writer",), ("a", "c"))], []),
        ([IsNotNull(("token",)), GreaterThan(("token",), 6)], [("a", 6, 10), ("b", 6, 20)]),
        ([GreaterThan(("token",), 6), LessThan(("token",), 9)], [("a", 6, 8), ("b", 6, 8)]),
        ([LessThanOrEqual(("token",), 5)], [("a", 0, 5)]),
        ([EqualTo(("token",), 7)], [("a", 6, 7), ("b", 6, 7)]),
        ([EqualTo(("token",), 7), EqualTo(("token",), 8)], []),
    ],
)
def test_filters_are_taken_up(filters: list[Any], left: list[Any]) -> None:
    found, rest = pushed(*filters)
    assert rest == []
    assert found.spans(SPANS) == left


def test_times_are_passed_on() -> None:
    found, rest = pushed(GreaterThan(("committed_at",), NOON), EqualTo(("committed_at",), NOON))
    micros = round(NOON.timestamp() * 10**6)
    assert rest == []
    assert found.times == [(">", micros), (">=", micros), ("<=", micros)]


def test_other_filters_are_left_to_spark() -> None:
    others = [
        EqualTo(("row",), "x"), EqualTo(("index",), 1), Not(EqualTo(("writer",), "a")), EqualTo(("token",), "5"),
        In(("token",), (1, 2)), EqualTo(("writer", "deep"), "a"), EqualTo(("writer",), None),
        EqualTo(("committed_at",), datetime(2026, 1, 1)), In(("writer",), ("a", None)),
    ]  # fmt: skip
    found, rest = pushed(*others)
    assert rest == others
    assert found == Pushed("rows", generic_shape(), True)
    _, rest = pushed(IsNotNull(("committed_at",)), GreaterThan(("committed_at",), NOON), known=False)
    assert len(rest) == 2
