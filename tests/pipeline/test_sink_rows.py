"""Arrow batches as rows of a stream, their keys, and the sink's options; without a server and without Spark."""

from __future__ import annotations

import json
import math
import pickle
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest

import busrep
from busrep.errors import ConfigError, RowError
from busrep.streams import Table

pytest.importorskip("pyspark")

import pyarrow as pa

from busrep.spark.secrets import with_redis_password
from busrep.spark.sink_options import read_options
from busrep.spark.sink_rows import Encoder, check_columns, compact


@attrs.frozen
class Reading:
    number: int
    value: float
    at: datetime
    tags: list[str]
    extra: dict[str, Any]
    note: str | None = None


plain: busrep.Stream[Any] = busrep.Stream("plain")
readings = busrep.Stream("readings", Reading)
OPTIONS = {"store": "sqlite:////tmp/x.db", "stream": "plain", "writer": "w"}


def payloads(encoder: Encoder, **columns: Any) -> list[bytes]:
    return [payload for _, payload in encoder.encode(pa.record_batch(list(columns.values()), list(columns)))]


@pytest.mark.parametrize(
    ("text", "payload"),
    [
        ('["a",1]', b'["a",1]'),
        (' [ "a" , 1.50 ]\n', b'["a",1.5]'),
        ('["\u00e4\\n"]', b'["\\u00e4\\n"]'),
        ("null", b"null"),
        ("18446744073709551615", b"18446744073709551615"),
        ('{"a":1,"a":2}', b'{"a":2}'),
    ],
)
def test_generic_rows_are_compact(text: str, payload: bytes) -> None:
    assert compact("plain", text) == payload
    assert payloads(Encoder(plain, True), row=pa.array([text])) == [payload]


@pytest.mark.parametrize("text", [None, "", "[1", "NaN", "[1e999]", "18446744073709551616", '"\\ud800"', "[1]\n[2]"])
def test_what_is_no_row_is_refused_and_not_changed(text: str | None) -> None:
    with pytest.raises(RowError, match="row"):
        compact("plain", text)


def test_typed_rows_pass_through_their_class() -> None:
    at = datetime(2026, 1, 31, 12, 0, 0, 1, tzinfo=UTC)
    columns = {
        "number": pa.array([1]),
        "value": pa.array([0.5]),
        "at": pa.array([at], pa.timestamp("us", "Etc/UTC")),
        "tags": pa.array([["a", "b"]]),
        "extra": pa.array([[("k", "[1]")]], pa.map_(pa.string(), pa.string())),
    }
    made = payloads(Encoder(readings, False), **columns)
    assert made == [b'[1,0.5,"2026-01-31T12:00:00.000001+00:00",["a","b"],{"k":[1]},null]']
    assert readings.decode(made) == [Reading(1, 0.5, at, ["a", "b"], {"k": [1]})]
    with pytest.raises(RowError, match="number"):
        payloads(Encoder(readings, False), **{**columns, "number": pa.array(["one"])})
    with pytest.raises(RowError, match="NaN"):
        payloads(Encoder(readings, False), **{**columns, "value": pa.array([math.nan])})


def test_columns_without_a_class_are_an_array() -> None:
    made = payloads(
        Encoder(plain, False),
        a=pa.array([1, None]), b=pa.array([date(2026, 1, 31), None]),
        c=pa.array([{"x": datetime(2026, 1, 31), "y": True}, None]), d=pa.array([[date(2026, 1, 31)], None]),
    )  # fmt: skip
    assert list(map(json.loads, made)) == [
        [1, "2026-01-31", {"x": "2026-01-31T00:00:00", "y": True}, ["2026-01-31"]],
        [None, None, None, None],
    ]


@pytest.mark.parametrize("column", [pa.array([b"x"]), pa.array([timedelta(1)]), pa.array([[b"x"]])])
def test_types_without_a_form_in_json(column: Any) -> None:
    with pytest.raises(ConfigError, match="column 'a' is .* has no form in JSON: cast it"):
        payloads(Encoder(plain, False), a=column)


def test_columns_are_the_fields_in_order() -> None:
    names = ["number", "value", "at", "tags", "extra", "note"]
    assert not check_columns(readings, names, ["at"])
    assert not check_columns(readings, names[:-1], [])
    assert check_columns(readings, ["row"], [])
    assert check_columns(plain, ["stream", "writer", "token", "index", "row", "committed_at"], ["token"])
    assert not check_columns(plain, ["a", "b"], [])
    for wrong in (names[:-2], names[::-1], [*names, "more"], []):
        with pytest.raises(ConfigError, match="which are, in this order: number, value, at, tags, extra, note"):
            check_columns(readings, wrong, [])
    with pytest.raises(ConfigError, match="'more', which would be lost"):
        check_columns(plain, ["row", "more"], [])


@pytest.mark.parametrize(
    "column",
    [
        pa.array([None, -(2**63), -1, 0, 1, 9, 10, 2**63 - 1]),
        pa.array([None, -1.7e308, -1.5, -0.0, 1e-300, 2.0, 10.0, 1.7e308]),
        pa.array([None, "", "a", "a\0", "ab", "b", "\u00e4", "\U0001f600"]),
        pa.array([None, *(datetime(1969 + at, 1, 1, tzinfo=UTC) for at in range(5))], pa.timestamp("us", "UTC")),
        pa.array([None, date(1900, 1, 1), date(1970, 1, 1), date(2026, 1, 1)]),
        pa.array([None, False, True]),
    ],
)
def test_keys_sort_as_values_do(column: Any) -> None:
    """Also before another column, whose values go the other way."""
    back = pa.array(range(len(column), 0, -1))
    batch = pa.record_batch([column, back], ["a", "b"])
    keys = [key for key, _ in Encoder(plain, False, ("a", "b")).encode(batch)]
    assert keys == sorted(keys)
    assert len({*keys}) == len(keys)
    assert all(key.isascii() for key in keys)


def test_what_a_column_would_change_is_refused() -> None:
    """The database makes columns of the JSON, where an integer of 64 bits without a sign would become a float."""
    table = busrep.Stream("own", table=Table("own", columns=("a", "b")))
    assert payloads(Encoder(table, True), row=pa.array(['[1,"x"]'])) == [b'[1,"x"]']
    for text in ('[18446744073709551615,"x"]', '[1,"\\u0000"]', "[1]"):
        with pytest.raises(RowError):
            payloads(Encoder(table, True), row=pa.array([text]))


# -- options ---------------------------------------------------------------------------------------------------------


def test_options_are_read() -> None:
    made = read_options({**OPTIONS, "ORDERBY": "a, b", "queryName": "n", "checkpointLocation": "/c"}, job=None)
    assert (made.stream, made.writer, made.order_by, made.query, made.once) == ("plain", "w", ("a", "b"), None, False)
    assert read_options({**OPTIONS, "query": "q"}, job=None).query == "q"
    assert read_options(OPTIONS, job="j").query == "batch:j"
    assert read_options(OPTIONS, job="j").once
    named = read_options({**OPTIONS, "batch": "monday"}, job="j")
    assert (named.query, named.once) == ("batch:monday", False)


@pytest.mark.parametrize(
    ("more", "job", "told"),
    [
        ({"writr": "w"}, None, "did you mean 'writer'"),
        ({"batch": "b"}, None, "option 'batch' is not for df.writeStream: there 'query'"),
        ({"query": "q"}, "j", "option 'query' is not for df.write: there 'batch'"),
        ({"query": "a b"}, None, "option 'query' is 'a b': a name is needed"),
        ({"query": "batch:b"}, None, "a name is needed"),
        ({"writer": "a b"}, None, "option 'writer' is 'a b': one word"),
        ({"redis": "redis://h"}, None, "'redis' and 'name' go together"),
        ({"redis": "redis://:secret@h", "name": "n"}, None, "'redis' holds a password"),
        ({"store": "postgresql://a:secret@h/d"}, None, "the option store holds a password"),
        ({"store": "memory://x"}, None, "these forms work"),
        ({"streams": "tests.shop:STREAMS"}, None, "declares these: orders, payments, typing"),
    ],
)
def test_options_that_do_not_work(more: dict[str, str], job: str | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        read_options({**OPTIONS, **more}, job=job)
    assert "secret" not in str(caught.value)


def test_passwords_travel_in_the_pickled_options_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").write_text("s3cr/t")
    (tmp_path / "redis").write_text("r3d:s\n")
    given = {
        **OPTIONS, "store": "postgresql://app@db/shop", "passwordFile": str(tmp_path / "store"),
        "redis": "redis://me@cache:6379/1", "name": "shop", "redisPasswordFile": str(tmp_path / "redis"),
    }  # fmt: skip
    made = pickle.loads(pickle.dumps(read_options(given, job=None)))
    assert (made.store, made.redis) == ("postgresql://app:s3cr%2Ft@db/shop", "redis://me:r3d%3As@cache:6379/1")
    assert "s3cr" not in repr(made)
    assert "r3d" not in repr(made)
    monkeypatch.setenv("BUSREP_REDIS_PASSWORD", "e")
    assert with_redis_password("rediss://cache", None) == "rediss://:e@cache"


def test_columns_that_are_not_told_apart() -> None:
    """As a join leaves them: which of two would be written nobody knows."""
    with pytest.raises(ConfigError, match="two columns are named 'row'"):
        check_columns(plain, ["row", "row"], ())
    with pytest.raises(ConfigError, match="column 'Row'.* name it 'row'"):
        check_columns(plain, ["Row"], ())
