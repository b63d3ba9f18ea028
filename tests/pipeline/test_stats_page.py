"""The statistics' page and its plots: complete, balanced, escaped, and right about what it says."""

from __future__ import annotations

import re
from array import array
from html.parser import HTMLParser
from typing import Any

import pytest

from busrep.spark import stats_svg
from busrep.spark.stats_page import page, windows
from busrep.spark.stats_streams import share, streams_of
from busrep.spark.stats_svg import columns, duration, number, over_time, seconds, shortened, size, ticks, time_ticks

NASTY = "<script>\"&'"
SAMPLES = {("heard", NASTY, NASTY, ""): array("d", (-0.001, 0.004, 0.005, 0.02))}
START = 1_778_500_800  # 11 May 2026 12:00


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (number, 0, "0"), (number, 0.25, "0.25"), (number, 7.5, "7.5"), (number, 1234, "1,234"),
        (number, 45_600, "45.6 k"), (number, 1_200_000, "1.2 M"), (number, 3e9, "3 G"), (number, 123.4, "123"),
        (size, 0, "0 B"), (size, 1023, "1023 B"), (size, 1536, "1.5 KiB"), (size, 3 * 2**30, "3 GiB"),
        (seconds, 0.00085, "850 µs"), (seconds, 0.012, "12 ms"), (seconds, 60, "60 s"), (seconds, 300, "5 min"),
        (seconds, -0.002, "-2 ms"), (seconds, 3 * 86_400, "3 d"),
        (duration, 42, "42 s"), (duration, 297.4, "4 min 57 s"), (duration, 11_100, "3 h 5 min"),
        (duration, 7200, "2 h"),
    ],
)  # fmt: skip
def test_numbers_for_a_person(function: Any, value: float, text: str) -> None:
    assert function(value) == text


@pytest.mark.parametrize("most", [1e-6, 0.3, 1, 7, 71.5, 99, 1000, 123_456])
def test_an_axis_ends_above_what_it_shows(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0
    assert most <= found[-1] * (1 + 1e-9) < 2 * most + 1e-9
    assert 3 <= len(found) <= 8


def test_an_axis_of_nothing() -> None:
    assert ticks(0) == [0, 1]


@pytest.mark.parametrize(
    ("span", "first"),
    [(5, "12:00:00"), (300, "12:00"), (7_000, "12:00"), (3 * 86_400, "11 May 12:00"), (40 * 86_400, "13 May")],
)
def test_times_of_an_axis(span: int, first: str) -> None:
    found = time_ticks(START, START + span)
    assert found[0][1] == first
    assert 3 <= len(found) <= 8
    assert all(START <= at <= START + span for at, _ in found)


def test_long_labels_lose_what_they_have_in_common() -> None:
    long = [f"@user_of_a_long_name_{number}:a.server.example.test" for number in "abc"]
    assert shortened([*long, "short"], 26) == ["…a…", "…b…", "…c…", "short"]
    assert shortened(["x" * 40, "short"], 26) == ["x" * 12 + "…" + "x" * 13, "short"]
    assert shortened(["x" * 40, "x" * 41], 26)[0] == "…"  # the shorter is all in common


class Checked(HTMLParser):
    """Balanced tags, and nothing from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not {"src", "href", "onclick", "onload"} & {name for name, _ in attrs}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(text: str) -> Checked:
    found = Checked()
    found.feed(text)
    found.close()
    assert found.open == []
    return found


def rects(svg: str) -> list[tuple[float, float, float]]:
    """(y, height, x) of the columns."""
    found = re.findall(r'<rect class="c\d" x="([\d.]+)" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', svg)
    return [(float(y), float(height), float(x)) for x, y, height in found]


def test_columns_stand_on_one_another() -> None:
    svg = columns("t", ["a", NASTY], [("one", "c1", [1, 3]), ("two", "c2", [1, 0])], "%", "under")
    checked(svg)
    (y1, height1, x1), (y2, height2, x2), (_, height3, x3) = rects(svg)
    assert x1 == x2 < x3
    assert y2 + height2 == pytest.approx(y1, abs=0.2)
    assert height1 == pytest.approx(height2, abs=0.2)
    assert height3 == pytest.approx(3 * height1, abs=0.5)


def test_rates_over_time_are_steps_that_end_on_the_axis() -> None:
    svg = over_time("t", [("one", "c1", [2.0, 4.0])], START, 10, "rows/s")
    checked(svg)
    (path,) = re.findall(r'<path class="c1" d="M([^Z]+)Z"', svg)
    ys = [float(point.split()[1]) for point in path.split("L")]
    assert ys[0] == ys[1] > ys[2] == ys[3]
    assert len(set(ys[4:])) == 1
    assert svg.count('class="hover"') == 2


def tables(streams: int = 2, windows_: int = 3, latency: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [NASTY, *(f"stream{at}" for at in range(1, streams))]
    counts = {name: 10 * (streams - at) for at, name in enumerate(names)}
    rows = sum(counts.values())
    summary = {
        "rows": rows, "facts": rows, "bytes": rows * 20, "streams": names, "writers": 1, "first": float(START),
        "last": START + 10.0 * windows_, "span": 10.0 * windows_, "window": 10, "rows_per_second": 1.5,
        "peak_rows_per_second": 3.0, "source": "table", "epochs": ["e" * 32], "listened": 5.0 if latency else 0.0,
        "heard": 4, "heard_left_out": 1, "link_cuts": 1, "clock_ahead": -0.002, "clock_exact": 0.001,
        "made": "2026-05-11T12:00:00+00:00", "latencies": [],
    }  # fmt: skip
    found: dict[str, Any] = {
        "writers": [
            {"stream": name, "writer": NASTY, "facts": count, "rows": count, "bytes": count * 20, "first_token": 1,
             "last_token": 99}
            for name, count in counts.items()
        ],
        "rates": [
            {"stream": name, "writer": NASTY, "window": START + 10 * at, "rows": count // windows_ or 1}
            for name, count in counts.items() for at in range(windows_)
        ],
        "rows_per_fact": [{"stream": name, "rows": 5, "facts": 1} for name in names],
        "row_sizes": [{"stream": name, "low": 16.0, "high": 22.6, "rows": count} for name, count in counts.items()],
        "row_size_percentiles": [{"stream": name, "p50": 20, "p99": 20, "most": 20} for name in names],
        "steps": [
            {"stream": name, "whose": whose, "low": low, "high": high, "steps": 5, "tokens": low}
            for name in names for whose in ("others", "nobody") for low, high in ((0, 0), (4, 7))
        ],
        "top_keys": [
            {"stream": name, "rank": rank, "key": key, "rows": 1, "share": 0.1, "keys": 10}
            for name in names for rank, key in enumerate((NASTY, None, ""), 1)
        ],
        "readers": [], "latencies": [],
    }  # fmt: skip
    if latency:
        one = {"measure": "heard", "count": 4, "p50": 0.004, "p90": 0.005, "p99": 0.02, "p999": 0.02, "most": 0.02}
        found["latencies"] = [{**one, "stream": at, "writer": at, "reader": ""} for at in ("", NASTY)]
        summary["latencies"] = found["latencies"][:1]
        found["readers"] = [
            {"reader": NASTY, "stream": NASTY, "writer": "w", "position": 5, "behind": 3, "saved": START * 10**6}
        ]
    return summary, found


@pytest.mark.parametrize("streams", [1, 2, 7, 8, 20])
@pytest.mark.parametrize("latency", [False, True])
def test_the_page_is_complete_in_itself(streams: int, latency: bool) -> None:
    text = page(*tables(streams, latency=latency), SAMPLES)
    found = checked(text)
    assert "script" not in found.seen
    assert not re.search(r"https?:|@import|url\(", text)
    assert NASTY in "".join(found.text)
    assert ("p99 20 ms" in text) == latency
    assert ("Heard on the bus" in text) == latency
    assert ("other streams" in text) == (streams > stats_svg.COLOURS)


def test_a_thousand_writers_with_names_from_elsewhere() -> None:
    """The page stays one that can be read: some lines of each table, and where the rest is."""
    summary, found = tables(8, latency=True)
    names = [NASTY, "w" * 5000, "\u202ereversed", *(f"writer-{at}" for at in range(997))]
    stream = summary["streams"][0]
    huge = {"facts": 10**12, "rows": 10**15, "bytes": 10**18, "first_token": 1, "last_token": 2**63 - 1}
    found["writers"] += [{"stream": stream, "writer": name, **huge} for name in names]
    found["readers"] = [{**found["readers"][0], "writer": name} for name in names]
    found["latencies"] += [{**found["latencies"][1], "writer": name} for name in names]
    found["top_keys"] += [{"stream": stream, "rank": 4, "key": "k" * 10**6, "rows": 1, "share": 0.1, "keys": 10}]
    text = page(summary, found, SAMPLES)
    checked(text)
    assert len(text) < 300_000
    for name in ("writers", "readers", "latencies"):
        assert re.search(rf"and [0-9,]+ more, in {name}\.parquet", text), name
    assert "in top_keys.parquet" in text


def test_the_last_time_of_an_axis_is_not_cut_off() -> None:
    svg = over_time("t", [("one", "c1", [1.0, 2.0, 3.0, 4.0])], START, 1, "rows/s")
    assert re.search(r'x="1058" y="277" text-anchor="end">12:00:04<', svg)


@pytest.mark.parametrize(("ahead", "text"), [(-0.002, "is 2 ms behind this"), (0.002, "is 2 ms ahead of this")])
def test_whose_clock_is_ahead(ahead: float, text: str) -> None:
    summary, found = tables(latency=True)
    assert text in page({**summary, "clock_ahead": ahead}, found, SAMPLES)


def test_one_fact_alone() -> None:
    summary, found = tables(1)
    one = {"facts": 1, "rows": 1, "bytes": 0}
    summary |= {**one, "last": summary["first"], "span": 0.0, "rows_per_second": None}
    found["writers"] = [{**found["writers"][0], **one}]
    text = page(
        summary, {**found, "rates": found["rates"][:1], "steps": [], "top_keys": found["top_keys"][:1]}, SAMPLES
    )
    checked(text)
    assert "1 row of 1 stream<" in text


def test_rows_without_times_have_no_rates() -> None:
    summary, found = tables()
    summary |= {"first": None, "last": None, "span": 0.0, "rows_per_second": None, "peak_rows_per_second": 0.0}
    text = page(summary, {**found, "rates": [], "steps": []}, SAMPLES)
    checked(text)
    assert "there are no rates" in text


def test_a_long_span_is_put_together() -> None:
    summary, found = tables(windows_=1000)
    first, window, count = windows(summary, found["rates"])
    assert (first % window, window) == (0, 40)
    assert count <= 320
    assert first + count * window > START + 10 * 999
    checked(page(summary, found, SAMPLES))


def test_the_streams_with_most_rows_have_colours() -> None:
    found = streams_of([{"stream": f"s{at}", "rows": at} for at in range(9)])
    assert found.shown == ["s8", "s7", "s6", "s5", "s4", "s3"]
    assert (found.colours["s8"], found.colours["s0"]) == ("c1", "co")
    split = found.split(lambda name: [float(name[1:])])
    assert [name for name, _, _ in split][-1] == "3 other streams"
    assert split[-1][2] == [3.0]


def test_shares() -> None:
    assert [share(*pair) for pair in ((1, 1), (0, 0), (1, 3), (1, 1000), (95, 1000))] == [
        "100 %", "0 %", "33 %", "0.1 %", "10 %",
    ]  # fmt: skip
