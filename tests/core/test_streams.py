from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any

import attrs
import pytest
from attrs.validators import ge
from hypothesis import given
from hypothesis import strategies as st

from busrep.errors import ConfigError, RowError, UnknownStream
from busrep.fast_rows import values_reader
from busrep.streams import Registry, Stream, Table


@pytest.fixture(scope="module", autouse=True, params=["msgspec", "orjson"])
def _reading(request: pytest.FixtureRequest) -> Iterator[None]:
    """All of it with what the extra ``fast`` brings, and without."""
    with pytest.MonkeyPatch.context() as without:
        if request.param == "orjson":
            without.setitem(sys.modules, "msgspec", None)
        assert (values_reader(["int", "null | str"]) is None) is (request.param == "orjson")
        yield


@attrs.define
class Plain:
    a: int
    b: str
    c: float = 0.5


@attrs.frozen
class Frozen:
    a: int
    b: str
    c: float = 0.5


@attrs.define(slots=False)
class Unslotted:
    a: int
    b: str
    c: float = 0.5


@attrs.frozen(kw_only=True)
class Keywords:
    a: int
    _b: str
    c: float = 0.5


@attrs.frozen(cache_hash=True)
class Hashed:
    a: int
    b: str
    c: float = 0.5


@attrs.frozen
class Base:
    a: int


@attrs.frozen
class Inherited(Base):
    b: str
    c: float = 0.5


class Announced:
    __slots__ = ()
    subclasses = 0

    def __init_subclass__(cls) -> None:
        Announced.subclasses += 1


@attrs.frozen
class Subclassed(Announced):
    a: int
    b: str
    c: float = 0.5


@attrs.frozen
class Own:
    a: int
    b: str
    c: float = 0.5

    def __init__(self, a: int, b: str, c: float = 0.5) -> None:
        self.__attrs_init__(a, b, c)


class Colour(Enum):
    RED = "red"


@attrs.frozen
class Checked:
    n: int = attrs.field(validator=ge(0))
    colour: Colour = attrs.field(converter=Colour, default=Colour.RED)
    double: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "double", 2 * self.n)


@attrs.frozen
class Single:
    value: str | None = None


@attrs.frozen
class Rich:
    maybe: int | None
    number: int | float
    at: datetime | None
    names: list[str]
    points: tuple[tuple[int, float], ...]
    counts: dict[str, list[int]]
    anything: Any
    things: list[Any]
    pair: tuple[int, str | None]
    either: Any | int = None
    raw: dict = attrs.field(factory=dict)  # type: ignore[type-arg]


ALIKE: list[type[Any]] = [Plain, Frozen, Unslotted, Keywords, Hashed, Inherited, Subclassed, Own]


@pytest.mark.parametrize("row_type", ALIKE)
def test_both_ways(row_type: type[Any]) -> None:
    stream = Stream("s", row_type)
    rows = [row_type(a=1, b="x"), row_type(a=-(2**63), b="ä\n😀", c=2.5)]
    payloads = [stream.encode(row) for row in rows]
    assert payloads == [b'[1,"x",0.5]', b'[-9223372036854775808,"\\u00e4\\n\\ud83d\\ude00",2.5]']
    decoded = stream.decode(payloads)
    assert decoded == rows
    assert [type(row) for row in decoded] == [row_type, row_type]


@pytest.mark.parametrize("row_type", ALIKE)
def test_evolution_both_ways_and_mixed(row_type: type[Any]) -> None:
    stream = Stream("s", row_type)
    assert stream.decode([b'[1,"x"]', b'[2,"y"]']) == [row_type(a=1, b="x"), row_type(a=2, b="y")]
    assert stream.decode([b'[1,"x",1.5,"new"]']) == [row_type(a=1, b="x", c=1.5)]
    mixed = [b'[1,"x",1.5,"new"]', b'[2,"y"]', b'[3,"z",1.5,"new",0]', b'[4,"w",0.25]']
    assert [(row.a, row.c) for row in stream.decode(mixed)] == [(1, 1.5), (2, 0.5), (3, 1.5), (4, 0.25)]


def test_frozen_rows_are_frozen_equal_and_hashable() -> None:
    row = Stream("s", Frozen).decode([b'[1,"x",1]'])[0]
    assert row == Frozen(1, "x", 1.0)
    assert hash(row) == hash(Frozen(1, "x", 1.0))
    assert type(row.c) is float
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        row.a = 2  # type: ignore[misc]
    assert hash(Stream("s", Hashed).decode([b'[1,"x",1]'])[0]) == hash(Hashed(1, "x", 1.0))


def test_a_class_that_watches_its_subclasses_gets_none() -> None:
    before = Announced.subclasses
    Stream("s", Subclassed)
    assert Announced.subclasses == before


def test_all_defaults() -> None:
    stream = Stream("s", Single)
    assert stream.decode([b"[]", b"[]"]) == [Single(), Single()]
    assert stream.decode([b'["x"]', b"[]", b"[null,1]"]) == [Single("x"), Single(), Single()]
    assert stream.encode(Single("x")) == b'["x"]'


def test_converters_validators_and_post_init_run() -> None:
    stream = Stream("s", Checked)
    rows = stream.decode([b'[1,"red"]', b'[2,"red"]'])
    assert rows == [Checked(1), Checked(2)]
    assert [row.double for row in rows] == [2, 4]
    assert stream.encode(rows[0]) == b'[1,"red"]'
    with pytest.raises(RowError, match=r"row 1: ValueError: 'n' must be >= 0"):
        stream.decode([b'[1,"red"]', b'[-1,"red"]'])
    with pytest.raises(RowError, match=r"row 0: ValueError: 'blue' is not a valid Colour"):
        stream.decode([b'[1,"blue"]'])


@attrs.frozen
class Place:
    name: str
    height: float = 0.0
    shown: str = attrs.field(init=False, default="")


@attrs.frozen
class Made:
    day: date = attrs.field(converter=lambda day: day if isinstance(day, date) else date.fromisoformat(day))
    price: Decimal = attrs.field(converter=Decimal)
    places: list[Place] = attrs.field(
        converter=lambda places: [Place(**place) if isinstance(place, dict) else place for place in places]
    )


def test_what_converters_make_is_written() -> None:
    stream = Stream("s", Made)
    row = Made(date(2026, 5, 11), Decimal("1.50"), [Place("a", 1.5), Place("b")])
    payload = stream.encode(row)
    assert payload == b'["2026-05-11","1.50",[{"name":"a","height":1.5},{"name":"b","height":0.0}]]'
    assert stream.decode([payload]) == [row]
    with pytest.raises(RowError, match="NaN"):
        stream.encode(attrs.evolve(row, places=[Place("a", math.nan)]))
    with pytest.raises(RowError, match="not JSON serializable: complex"):
        stream.encode(attrs.evolve(row, places=[1j]))


def test_rich_annotations() -> None:
    stream = Stream("s", Rich)
    at = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
    rows = [
        Rich(1, 2, at, ["a"], ((1, 2.0),), {"x": [1, 2]}, {"y": None}, [1, "b"], (1, None), 5, {"k": 1}),
        Rich(None, 2.5, None, [], (), {}, None, [], (2, "z")),
    ]
    assert stream.decode([stream.encode(row) for row in rows]) == rows
    decoded = stream.decode([stream.encode(row) for row in rows])
    assert type(decoded[0].number) is int
    assert decoded[0].points == ((1, 2.0),)


GOOD = [1, 2, None, ["a"], [[1, 2.0]], {"x": [1]}, 0, [], [1, None]]


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        (0, "1", "maybe"), (0, True, "maybe"), (0, 1.5, "maybe"), (1, None, "number"), (2, "soon", "at"), (2, 5, "at"),
        (3, "a", "names"), (3, [1], "names"), (4, [[1]], "points"), (4, [["a", 1]], "points"),
        (5, {"x": 1}, "counts"),
        (5, {"x": ["y"]}, "counts"), (8, [1], "pair"), (8, None, "pair"),
    ],
)  # fmt: skip
def test_decode_names_row_and_field(place: int, value: object, field: str) -> None:
    stream = Stream("s", Rich)
    bad: list[Any] = [*GOOD]
    bad[place] = value
    payloads = [json.dumps(row).encode() for row in (GOOD, bad, GOOD)]
    with pytest.raises(RowError) as caught:
        stream.decode(payloads)
    assert caught.value.field == f"row 1, field '{field}'"


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        ("maybe", "1", "maybe"), ("maybe", True, "maybe"), ("number", "x", "number"), ("at", "2026", "at"),
        ("names", ("a",), "names"), ("names", [1], "names"), ("points", ((1,),), "points"),
        ("counts", {"x": [""]}, "counts"), ("pair", (1, 2), "pair"),
        ("anything", math.nan, "row"), ("anything", 2**64, "row"), ("number", math.inf, "row"),
        ("anything", object(), "row"), ("raw", {1: 2}, "row"),
    ],
)  # fmt: skip
def test_encode_names_the_field(place: str, value: object, field: str) -> None:
    good = Rich(1, 2, None, ["a"], ((1, 2.0),), {"x": [1]}, 0, [], (1, None))
    with pytest.raises(RowError) as caught:
        Stream("s", Rich).encode(attrs.evolve(good, **{place: value}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("payloads", "field"),
    [
        ([b"[1"], "row 0"),
        ([b'[1,"x"]', b"nonsense"], "row 1"),
        ([b'[1,"x"]', b"{}"], "row 1"),
        ([b'[1,"x"]', b'"ab"'], "row 1"),
        ([b'[1,"x"]', b"[1]"], "row 1, field 'b'"),
        ([b'[1,"x"],[2,"y"]'], "row 0"),
        ([b'[1,"x"],[2', b'"y"]'], "row 0"),
        ([b'[1,"x', b'y"]'], "row 0"),
        ([b""], "row 0"),
        ([b"\xff"], "row 0"),
        ([b"[" * 1000 + b"]" * 1000], "row 0, field 'b'"),  # too deep to be shown, in Python 3.11
    ],
)
def test_bad_payloads(payloads: list[bytes], field: str) -> None:
    with pytest.raises(RowError) as caught:
        Stream("s", Plain).decode(payloads)
    assert caught.value.field == field


def test_a_converter_that_fails_only_in_company_is_given_a_second_chance() -> None:
    calls = []

    def moody(value: int) -> int:
        calls.append(value)
        if len(calls) == 1:
            raise ValueError("not now")
        return value

    row_type = attrs.make_class("Moody", {"a": attrs.field(converter=moody)}, frozen=True)
    assert [row.a for row in Stream("s", row_type).decode([b"[1]", b"[2]"])] == [1, 2]


def test_rows_of_any_json() -> None:
    stream = Stream("typing", resettable=True)
    rows: list[Any] = [None, 1, "x", [1, [2]], {"a": 1.5}]
    assert stream.decode([stream.encode(row) for row in rows]) == rows
    assert stream.decode([]) == []
    with pytest.raises(RowError, match="row 0: not JSON"):
        stream.decode([b"["])
    for bad in (math.nan, {"a": [math.inf]}, 2**64, object(), datetime.now(UTC)):
        with pytest.raises(RowError):
            stream.encode(bad)


@pytest.mark.parametrize("row", [Frozen(1, "x"), None, (1, "x", 0.5)])
def test_encode_wants_the_stream_s_class(row: Any) -> None:
    with pytest.raises(RowError, match="Plain is needed"):
        Stream("s", Plain).encode(row)


plain_rows = st.builds(Plain, st.integers(-(2**63), 2**63 - 1), st.text(st.characters(codec="utf-8")),
                       st.floats(allow_nan=False, allow_infinity=False))  # fmt: skip


@given(st.lists(plain_rows, max_size=20))
def test_decode_of_encode_agrees(rows: list[Plain]) -> None:
    stream = Stream("s", Plain)
    payloads = [stream.encode(row) for row in rows]
    assert all(payload.isascii() and b"\n" not in payload for payload in payloads)
    assert stream.decode(payloads) == rows


@attrs.define
class Four:
    a: int
    b: float
    c: str | None
    d: bool | None = None


VALUES = [
    b"0", b"-0", b"1", b"01", b"1.0", b"-0.0", b"1e3", b"1e400", b"1e-400", b"9007199254740993",
    b"123456789012345678901", b"9223372036854775807", b"9223372036854775808", b"18446744073709551616",
    b"-9223372036854775809", b"NaN", b"true", b"false", b"null", b'"a"', b'"\\ud83d\\ude00"', b'"\\ud800"',
    b'"\\ud800a"', b'"\\ud800\\u0041"', b'"\\/"', b'"a\x01"', b'"\xff"', b'"\xc3\xa4"', b'"\\u0000"', b"[]", b"{}",
    b"[1]", b" 1 ", b"",
]  # fmt: skip
GOOD_ROW = [b"1", b"1.5", b'"x"', b"true"]


@pytest.mark.parametrize("length", [2, 3, 4, 5])
@pytest.mark.parametrize("place", range(4))
def test_what_reads_rows_in_one_step_reads_them_as_the_plain_way_does(place: int, length: int) -> None:
    fast = Stream("s", Four)
    with pytest.MonkeyPatch.context() as without:
        without.setitem(sys.modules, "msgspec", None)
        plain = Stream("s", Four)

    def read(stream: Stream[Four], payloads: list[bytes]) -> str:
        try:
            return repr(stream.decode(payloads))  # tells 1 from 1.0
        except RowError as error:
            return str(error)

    for value in VALUES:
        row = [*GOOD_ROW, b"0"]
        row[place] = value
        payloads = [b"[" + b",".join(one[:length]) + b"]" for one in (GOOD_ROW, row)]
        assert read(fast, payloads) == read(plain, payloads)


def test_the_collector_is_as_it_was_whatever_is_read() -> None:
    stream = Stream("s", Plain)
    for enabled in (True, False):
        try:
            gc.enable() if enabled else gc.disable()
            stream.decode([b'[1,"x"]'])
            with pytest.raises(RowError):
                stream.decode([b"["])
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def one_by_one(stream: Stream[Any], payloads: Sequence[bytes]) -> list[Any]:
    return [row for payload in payloads for row in stream.decode([payload])]


PIECES = [b"[1]", b"[2", b"]", b"[", b",", b'"', b"0", b"null", b'"a"', b"[3,4]", b"\xff"]
pieces = st.lists(st.lists(st.sampled_from(PIECES), max_size=5).map(b"".join) | st.binary(max_size=5), max_size=5)


@given(pieces)
def test_any_bytes_decode_as_one_by_one_or_raise_row_error(payloads: list[bytes]) -> None:
    for stream in (Stream("s"), Stream("t", Single), Stream("u", Plain)):
        try:
            expected = one_by_one(stream, payloads)
        except RowError:
            expected = None
        try:
            found = stream.decode(payloads)
        except RowError:
            found = None
        assert found == expected


# --- what cannot work is refused at once ---


@attrs.define
class NoFields:
    pass


@attrs.define
class Unresolved:
    a: Nowhere  # type: ignore[name-defined]  # noqa: F821


def with_field(annotation: Any) -> type[Any]:
    return attrs.make_class("Row", {"a": attrs.field(type=annotation)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stream(""),
        lambda: Stream("a b"),
        lambda: Stream("a\nb"),
        lambda: Stream(5),
        lambda: Stream("s", channel="a b"),
        lambda: Stream("s", dict),
        lambda: Stream("s", NoFields),
        lambda: Stream("s", Unresolved),
        lambda: Stream("s", with_field(complex)),
        lambda: Stream("s", with_field(set[int])),
        lambda: Stream("s", with_field(dict[int, str])),
        lambda: Stream("s", with_field(list[int] | list[str])),
        lambda: Stream("s", with_field(str | datetime)),
        lambda: Stream("s", Plain, resettable=True, table=Table("t")),
        lambda: Stream("s", table=Table("t")),
        lambda: Stream("s", Plain, table=Table("t", columns=("a", "b"))),
        lambda: Table("t; drop"),
        lambda: Table("t", id="a.b"),
        lambda: Table("t", index="id"),
        lambda: Table("t", columns=("x", "x")),
        lambda: Table(5),
    ],
)  # fmt: skip
def test_config_errors(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_untyped_fields_take_anything() -> None:
    row_type = attrs.make_class("Row", ["a"])
    assert Stream("s", row_type).decode([b"[[1,{}]]"])[0].a == [1, {}]


def test_table_columns_are_the_fields_by_default() -> None:
    assert Stream("s", Plain, table=Table("app.orders")).table == Table("app.orders", columns=("a", "b", "c"))
    columns = ("x", "y", "z")
    stream = Stream("s", Plain, table=Table("t", columns=columns, index="n"))
    assert stream.table == Table("t", columns=columns, index="n")
    assert Stream("s", table=Table("t", columns=["x"])).table == Table("t", columns=("x",))


def test_fields_are_those_of_the_row_class() -> None:
    fields = Stream("s", Plain).fields
    assert fields is not None
    assert [one.name for one in fields] == ["a", "b", "c"]
    assert Stream("s").fields is None


def test_options() -> None:
    stream = Stream("s", Plain, channel="orders", follows=False, negative=True)
    assert (stream.name, stream.row_type, stream.channel) == ("s", Plain, "orders")
    assert (stream.resettable, stream.follows, stream.negative, stream.table) == (False, False, True, None)
    assert repr(stream) == "Stream('s')"


@attrs.frozen
class Number:
    value: int


ALL_PLAIN = [Plain(1, "x"), Plain(2, "y", 1.5)]
MIXED: list[tuple[type[Any] | None, list[Any]]] = [
    (Plain, []),
    (Plain, ALL_PLAIN),
    (Plain, [Plain(1, "\N{SNOWMAN}"), Plain(2, "not ASCII")]),
    (Plain, [Plain(1, "x", 2), Plain(3, "an int is a float too")]),
    (Single, [Single("x"), Single(None)]),
    (Number, [Number(1), Number(2)]),
    (None, [["of", 1], None]),
]


@pytest.mark.parametrize(("row_type", "rows"), MIXED)
def test_encoding_together_is_encoding_one_by_one(row_type: type[Any] | None, rows: list[Any]) -> None:
    stream = Stream("s", row_type)
    assert stream.encode_all(rows) == [stream.encode(row) for row in rows]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (attrs.evolve(ALL_PLAIN[0], a="1"), "a"),
        (Plain(1, "x", math.nan), "row"), (Frozen(1, "x"), "row"), (None, "row"),
        (Plain(2**64, "x"), "row"),
    ],
)  # fmt: skip
def test_encoding_together_names_the_field(bad: Any, field: str) -> None:
    with pytest.raises(RowError) as caught:
        Stream("s", Plain).encode_all([*ALL_PLAIN, bad])
    assert caught.value.field == field


def test_registry_takes_streams_alone() -> None:
    with pytest.raises(ConfigError, match="busrep.Stream objects, not 'orders'"):
        Registry(["orders"])  # type: ignore[list-item]


def test_the_bad_one_among_rows_of_any_shape_is_named() -> None:
    with pytest.raises(RowError, match="row 1: not JSON"):
        Stream("s").decode([b"[1]", b"{bad"])


def test_registry() -> None:
    a, b = Stream("a"), Stream("b", Plain)
    registry = Registry([a, b])
    assert registry["b"] is b
    assert list(registry) == [a, b]
    assert len(registry) == 2
    assert "a" in registry
    assert "c" not in registry
    with pytest.raises(UnknownStream, match=r"registered on this bus \(a, b\)"):
        registry["c"]
    with pytest.raises(ConfigError, match="two streams"):
        Registry([a, Stream("a")])
