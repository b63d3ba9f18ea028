"""How far a query is behind: what the table counts, and what Spark's progress and the listener make of it. No Spark."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from busrep.spark import table as questions
from busrep.spark.lag import Lag, LagListener, lags_of, shown
from busrep.spark.table import Table, Unread
from tests.spark.source_facts import NOON, Item, Log, items, opened_log, trade, trades


@pytest.fixture(params=["sqlite", "postgresql"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    server = request.getfixturevalue("postgres_server") if request.param == "postgresql" else None
    with opened_log(request.param, server, tmp_path) as made:
        yield made


def test_rows_behind_the_batch_are_counted_and_the_oldest_row_has_an_age(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.fill()
    for token, seconds in ((1, 500), (3, 300), (4, 0), (6, 0)):
        log.committed(token, NOON + timedelta(seconds=seconds))
    began = time.monotonic()
    with Table(log.url, trades) as table:
        found = table.unread([("w1", 0, 18), ("w2", 2, 18), ("w3", 0, 18)], [("w1", 13, 18)])
        took = time.monotonic() - began
        assert {writer: one.rows for writer, one in found.items()} == {"w1": 3, "w2": 0}, "14, 16 and 17 are w1's"
        first, second = found["w1"].seconds, found["w2"].seconds
        assert first is not None
        assert second is not None
        # Of the first row by its ID, 1 and 3, although 4 and 6 look older.
        assert 199.9 < second - first < 200.1 + took
        assert table.unread([], []) == {}
        monkeypatch.setattr(questions, "MOST_COUNTED", 2)
        assert table.unread([("w1", 0, 18)], [("w1", 0, 18)])["w1"].rows == 2


def test_a_clock_that_was_set_back_makes_no_negative_age(log: Log) -> None:
    log.write("w1", [trade(1)])
    log.committed(1, NOON + timedelta(days=36_500))
    with Table(log.url, trades) as table:
        assert table.unread([("w1", 0, 1)], []) == {"w1": Unread(0, 0.0)}


def test_a_table_of_the_applications_has_rows_and_no_times(log: Log) -> None:
    for number in range(3):
        log.write("w1", [Item(number, "one", True)], stream=items)
    with Table(log.url, items) as table:
        assert table.unread([("w1", 0, 3)], [("w1", 1, 3)]) == {"w1": Unread(2, None)}


LATEST = {"epoch": "1" * 32, "positions": {"w1": 5, "w2": 9}, "stream": "trades"}
UNREAD = {"w2": Unread(2, None), "w1": Unread(3, 1.23456)}


def progress(*latest: str | None, name: str | None = "copies") -> Any:
    """As Spark's of a query with these sources."""
    return SimpleNamespace(id="q1", name=name, sources=[SimpleNamespace(latestOffset=one) for one in latest])


def test_the_progress_is_read_back_and_that_of_other_sources_is_passed_over() -> None:
    ours = json.dumps({**LATEST, "lag": shown(UNREAD)})
    others = ("7", '{"orders":{"0":55}}', "not JSON", "", None, "[1]", json.dumps(LATEST))
    found = lags_of(progress(*others, ours))
    assert found == [Lag("copies", "trades", {"w1": 3, "w2": 2}, {"w1": 1.235})]
    assert lags_of(progress(ours, name=None))[0].query == "q1", "a query without a name has its ID"


@pytest.mark.parametrize("end", ["onQueryIdle", "onQueryTerminated"])
def test_the_listener_tells_each_lag_and_in_the_end_that_there_is_none(end: str) -> None:
    told: list[Lag] = []
    listener = LagListener(told.append)
    ended = SimpleNamespace(id="q1")
    listener.onQueryStarted(ended)  # type: ignore[arg-type]
    for unread in (UNREAD, {}):
        text = json.dumps({**LATEST, "lag": shown(unread)})
        listener.onQueryProgress(SimpleNamespace(progress=progress(text)))  # type: ignore[arg-type]
    listener.onQueryProgress(SimpleNamespace(progress=progress("7")))  # type: ignore[arg-type]
    assert [dict(one.rows) for one in told] == [{"w1": 3, "w2": 2}, {}]
    getattr(listener, end)(ended)
    getattr(listener, end)(ended)
    getattr(listener, end)(SimpleNamespace(id="another"))
    assert told[2:] == [Lag("copies", "trades", {}, {})]
