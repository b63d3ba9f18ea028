"""'busrep publish' commits no row that a reader could not decode."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from busrep.cli.publish import BATCH, Published, RowForms, batches, parse_line, read_facts
from busrep.core.catchup import FetchUpdates
from busrep.errors import ConfigError
from busrep.row_types import Field, type_named
from busrep.shapes import row_of
from busrep.stores import open_store
from busrep.stores.interface import StoredStream
from busrep.streams import Registry, Stream
from tests.cli.test_streams import SHOP, busrep, execute, module, store_url

__all__ = ["module", "store_url"]

CLASSES = """
import datetime
import attrs
from busrep import Stream, Table

@attrs.frozen(kw_only=True)
class Sale:
    number: int
    note: str = attrs.field(factory=lambda: "nothing")
    sold: datetime.datetime | None = None
    _secret: int = 7

sales = Stream("sales", Sale)

@attrs.frozen
class Log:
    what: str

log = Stream("log", Log, table=Table("app_log"))
"""

MEASURES = """
import attrs
from typing import Any
from busrep import Stream

@attrs.frozen
class Measure:
    value: float = attrs.field(converter=float)
    more: Any = None

measures = Stream("measures", Measure)
"""

Publish = Callable[..., Any]


@pytest.fixture
def publish(redis_url: str, bus_name: str, sqlite_url: str) -> Publish:
    def run(*lines: object, options: tuple[str, ...] = (), status: int = 0) -> str:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        found = busrep("publish", "--redis", redis_url, "--name", bus_name, "--store", sqlite_url, *options, stdin=text)
        assert found.exit_code == status, found.output
        return str(found.output)

    return run


def payloads(url: str, stream: str) -> list[bytes]:
    async def main() -> list[bytes]:
        store = open_store(url, Registry([Stream(stream)]))
        await store.open()
        try:
            return list((await store.fetch(FetchUpdates(stream, "busrep-publish", 0, 10**6, 10**6))).payloads)
        finally:
            await store.close()

    return asyncio.run(main())


def published_before(said: str) -> int:
    """The facts of earlier transactions: lines are written as they come. All are before the line that it names."""
    found = re.search(r"nothing from line (\d+) on is published; facts published before it: (\d+)", said)
    assert found is not None
    assert int(found[2]) == int(found[1]) - 1
    return int(found[2])


# -- without --streams: the fields that the store keeps ----------------------------------------------------------------

FIELDS = (Field("number", "int", False), Field("state", "str", True), Field("tags", "array[str] | null", True))


@pytest.mark.parametrize(
    ("value", "row"),
    [
        ([1], [1]), ([1, "new", ["a"]], [1, "new", ["a"]]), ({"number": 1}, [1]),
        ({"state": "x", "number": 1}, [1, "x"]),
        ({"number": 1, "state": "x", "tags": None}, [1, "x", None]),
    ],
)  # fmt: skip
def test_a_row_is_an_array_or_an_object(value: Any, row: list[Any]) -> None:
    assert row_of(FIELDS, value) == row


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "it has 0 values for the fields (number: int, state: str = default"),
        ([1, "new", [], 5], "it has 4 values"), ("text", "an array, or an object"), (["1"], "field 'number': int"),
        ([True], "field 'number'"), ([1, None], "field 'state': str is needed, not None"), ([1, "x", [1]], "'tags'"),
        ({}, "field 'number' is missing"), ({"number": 1, "tags": []}, "'state' is missing: its default is in the row"),
        ({"number": 1, "status": "x"}, "there is no field 'status' (there are: number, state, tags)"),
    ],
)  # fmt: skip
def test_what_no_reader_could_decode(value: Any, reason: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the reason is compared
        row_of(FIELDS, value)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("kind", "fits", "not_"),
    [
        ("int", 5, 5.0), ("float", 5, "5"), ("bool", True, 1), ("null", None, 0), ("any", object(), None),
        ("str", "", 5),
        ("array", [1, "x"], {}), ("array[int]", [1], ["x"]), ("object[float]", {"a": 1}, {"a": "1"}),
        ("object", {}, []),
        ("tuple[int, str]", [1, "x"], [1]), ("datetime", "2026-01-31T12:00:00+00:00", "yesterday"),
        ("array[int | null] | str", [None], [True]),
    ],
)  # fmt: skip
def test_values_of_types(kind: str, fits: Any, not_: Any) -> None:
    assert type_named(kind).admits(fits)
    assert type_named(kind).admits(not_) == (kind == "any")


@pytest.mark.servers
@pytest.mark.usefixtures("module")
def test_rows_are_checked_against_the_stored_fields(publish: Publish, sqlite_url: str) -> None:
    assert busrep("db", "init", "--store", sqlite_url, "--streams", "shop_streams").exit_code == 0
    good = [{"stream": "orders", "row": [1, "new"]}, {"stream": "orders", "rows": [{"state": "x", "number": 2}]}]
    publish(*good)
    assert payloads(sqlite_url, "orders") == [b'[1,"new"]', b'[2,"x"]']
    count = 2
    for bad in (["new", 1], [1], {"number": 1}, "text", {"number": 1, "state": "x", "y": 1}, [1, "new", "more"]):
        said = publish(*good, {"stream": "orders", "row": bad}, *good, status=2)
        assert "line 3: stream 'orders': " in said
        count += published_before(said)
        said = publish([3, "new"], bad, options=("--stream", "orders"), status=2)
        assert "line 2: " in said
        count += published_before(said)
        publish({"stream": "orders", "rows": [[4, "x"], bad]}, status=2)
    assert len(payloads(sqlite_url, "orders")) == count


@pytest.mark.servers
def test_rows_of_a_stream_without_a_class_are_any_json(publish: Publish, sqlite_url: str) -> None:
    assert busrep("db", "init", "--store", sqlite_url, "--stream", "raw").exit_code == 0
    publish([1], {"a": 1}, "text", options=("--stream", "raw"))
    assert payloads(sqlite_url, "raw") == [b"[1]", b'{"a":1}', b'"text"']


# -- with --streams ----------------------------------------------------------------------------------------------------


@pytest.mark.servers
def test_objects_are_mapped_by_field_name(
    module: Callable[[str, str], None], publish: Publish, sqlite_url: str
) -> None:
    module("sales", CLASSES.partition("@attrs.frozen\nclass Log")[0])
    several = ("--streams", "sales", "--streams", "shop_streams:orders")
    assert busrep("db", "init", "--store", sqlite_url, *several).exit_code == 0
    row = {"sold": "2026-01-31T12:00:00+01:00", "number": 1}
    publish(row, [2, "x"], {"number": 3, "_secret": 8}, options=("--stream", "sales", *several))
    assert payloads(sqlite_url, "sales") == [
        b'[1,"nothing","2026-01-31T11:00:00+00:00",7]', b'[2,"x",null,7]', b'[3,"nothing",null,8]',
    ]  # fmt: skip
    count = 3
    for bad, reason in (
        ({"note": "x"}, "field 'number': is missing"),
        ({"number": "1"}, "field 'number': int is needed"),
        ({"number": 1, "sold": "yesterday"}, "field 'sold': Invalid isoformat"),
        ({"number": 1, "x": 1}, "field 'x': is none of number, note, sold, _secret"),
        (["x"], "field 'number': int is needed"),
    ):
        said = publish([9], bad, options=("--stream", "sales", *several), status=2)
        assert "line 2: stream 'sales', " in said
        assert reason in said
        count += published_before(said)
    said = publish([9], options=("--stream", "payments", *several), status=2)
    assert "line 1: stream 'payments' is not among those of --streams" in said
    assert len(payloads(sqlite_url, "sales")) == count


@pytest.mark.servers
def test_a_stream_with_a_table_of_its_own_has_to_be_declared(
    module: Callable[[str, str], None], publish: Publish, sqlite_url: str
) -> None:
    """Its readers look into that table: they would never see what lies in busrep's own."""
    module("classes", CLASSES)
    execute(sqlite_url, "CREATE TABLE app_log (id bigint, writer text, what text)")
    assert busrep("db", "init", "--store", sqlite_url, "--streams", "classes").exit_code == 0
    said = publish(["x"], options=("--stream", "log"), status=2)
    assert 'it is kept in the table "app_log"' in said
    publish({"what": "x"}, options=("--stream", "log", "--streams", "classes:log"))
    assert execute(sqlite_url, "SELECT writer, what FROM app_log") == [("busrep-publish", "x")]
    assert execute(sqlite_url, "SELECT count(*) FROM busrep_facts") == [(0,)]


@pytest.mark.servers
def test_a_class_that_does_not_fit_is_refused(
    module: Callable[[str, str], None], publish: Publish, sqlite_url: str
) -> None:
    module("swapped", SHOP.replace("number: int\n    state: str", "state: str\n    number: int"))
    assert busrep("db", "init", "--store", sqlite_url, "--streams", "shop_streams").exit_code == 0
    said = publish(["x", 1], options=("--stream", "orders", "--streams", "swapped"), status=2)
    assert "does not fit the rows that are stored" in said
    assert payloads(sqlite_url, "orders") == []


# -- what cannot be written, and input that ends badly -----------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.servers
@pytest.mark.parametrize("bad", [["nan"], {"value": "inf"}, [1, nested(260)], {"value": 1, "more": nested(600)}])
def test_what_has_no_form_in_json_is_found_before_anything_is_written(
    bad: Any, module: Callable[[str, str], None], publish: Publish, sqlite_url: str
) -> None:
    """It used to be found when the lines before it had been committed, and nothing said which line it was."""
    module("measures", MEASURES)
    options = ("--streams", "measures", "--streams", "shop_streams:orders")
    assert busrep("db", "init", "--store", sqlite_url, *options).exit_code == 0
    good = [{"stream": "measures", "row": ["1"]}, {"stream": "orders", "row": [1, "new"]}]
    said = publish(*good, {"stream": "measures", "row": bad}, options=options, status=2)
    assert "line 3: stream 'measures', row: " in said
    count = published_before(said)
    assert len(payloads(sqlite_url, "measures")) + len(payloads(sqlite_url, "orders")) == count


@pytest.mark.parametrize("depth", [255, 1000])
@pytest.mark.parametrize("fields", [None, (Field("number", "any", False),), (Field("number", "int", False),)])
def test_no_stream_takes_json_that_is_nested_too_deep(depth: int, fields: tuple[Field, ...] | None) -> None:
    forms = RowForms({}, {"raw": StoredStream(None, fields)})
    with pytest.raises(ConfigError, match="line 7: stream 'raw', row: Recursion limit reached"):
        parse_line(7, b"[" * depth + b"]" * depth, "raw", forms)


class Pieces(io.BytesIO):
    """Input that comes in pieces, and ends with an error."""

    def __init__(self, *pieces: bytes | OSError) -> None:
        super().__init__()
        self.pieces = list(pieces)

    def read1(self, _size: int | None = -1) -> bytes:
        piece = self.pieces.pop(0)
        if isinstance(piece, OSError):
            raise piece
        return piece


def test_input_that_fails_ends_after_the_lines_before_it() -> None:
    source = Pieces(b"[1]\n[2]\n[3", OSError(5, "Input/output error"))
    found: list[Any] = []
    with pytest.raises(ConfigError, match=r"cannot be read to its end: Input/output error \(facts published: 2\)"):
        for facts in read_facts(source, "raw", RowForms({}, {}), Published(facts=2)):
            found += facts
    assert found == [("raw", [[1]]), ("raw", [[2]])]


def test_lines_are_taken_as_they_come_and_counted() -> None:
    many = b"[0]\n" * (BATCH + 1)
    found = list(batches(Pieces(b"[1]\n\n[2", b"]\n[3]", b"\n", many, b"[4]", b"")))
    assert [batch[0][0] for batch in found] == [1, 3, 4, 5, 5 + BATCH, 6 + BATCH]
    assert [batch[0][1] for batch in found] == [b"[1]", b"[2]", b"[3]", b"[0]", b"[0]", b"[4]"]
    assert [len(batch) for batch in found] == [1, 1, 1, BATCH, 1, 1]


def test_without_standard_input() -> None:
    command = ("-m", "busrep.cli", "publish", "--store", "sqlite:///none.db", "--name", "b")
    found = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&-', sys.executable, *command], capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stderr) == (2, "busrep: standard input is closed: the lines are read from there\n")
