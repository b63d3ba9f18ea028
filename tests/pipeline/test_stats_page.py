"""The statistics' page and its charts: complete in one file, escaped, and right about what it says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from array import array
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("plotly")

from busrep.spark.stats import charts
from busrep.spark.stats import page as page_module
from busrep.spark.stats.charts import COLOURS, Charts, bars, columns, heat, hides, over_time, palette
from busrep.spark.stats.page import page
from busrep.spark.stats.sections import windows
from busrep.spark.stats.words import duration, label, number, part_of, seconds, share, shortened, size
from tests.blocked import DEPENDED_ON, run_blocked

NASTY = "</script><b>x</b>\"&'%{y}"
SAMPLES = {("heard", NASTY, NASTY, ""): array("d", (-0.001, 0.004, 0.005, 0.02))}
START = 1_778_500_800  # 11 May 2026 12:00


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the library's 5 MB."""
    monkeypatch.setattr(page_module, "plotly_js", lambda: "/* the library */")


small = pytest.mark.usefixtures("_small")


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (number, 0, "0"), (number, 0.25, "0.25"), (number, 7.5, "7.5"), (number, 1234, "1,234"),
        (number, 45_600, "45.6 k"), (number, 1_200_000, "1.2 M"), (number, 3e9, "3 G"), (number, 123.4, "123"),
        (number, 1.0002, "1.0"), (number, 0.9999, "1.0"),
        (size, 0, "0 B"), (size, 1023, "1023 B"), (size, 1536, "1.5 KiB"), (size, 3 * 2**30, "3 GiB"),
        (seconds, 0.00085, "850 µs"), (seconds, 0.012, "12 ms"), (seconds, 60, "60 s"), (seconds, 300, "5 min"),
        (seconds, -0.002, "-2 ms"), (seconds, 3 * 86_400, "3 d"),
        (duration, 42, "42 s"), (duration, 297.4, "4 min 57 s"), (duration, 11_100, "3 h 5 min"),
        (duration, 7200, "2 h"),
    ],
)  # fmt: skip
def test_numbers_for_a_person(function: Any, value: float, text: str) -> None:
    assert function(value) == text


def test_long_labels_lose_what_they_have_in_common() -> None:
    long = [f"@user_of_a_long_name_{number}:a.server.example.test" for number in "abc"]
    assert shortened([*long, "short"], 26) == ["…a…", "…b…", "…c…", "short"]
    assert shortened(["x" * 40, "short"], 26) == ["x" * 12 + "…" + "x" * 13, "short"]
    assert shortened(["x" * 40, "x" * 41], 26)[0] == "…"  # the shorter is all in common


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "0 %"), (0, 7, "0 %"), (1, 1, "100 %"), (1, 3, "33 %"), (1, 1000, "0.1 %"), (95, 1000, "10 %"),
        (1, 10_000, "<0.1 %"), (1, 10**15, "<0.1 %"), (9_999, 10_000, ">99.9 %"), (10**15 - 1, 10**15, ">99.9 %"),
        (9_994, 10_000, "99.9 %"), (996, 1000, "99.6 %"), (99, 100, "99 %"), (9_930, 10_000, "99 %"),
    ],
)  # fmt: skip
def test_only_nothing_is_0_per_cent_and_only_all_is_100(part: int, whole: int, text: str) -> None:
    assert share(part, whole) == text
    if whole:
        assert part_of(part, whole, "fact").endswith(f" fact{'' if whole == 1 else 's'} ({text})")


def test_a_share_is_counted_exactly() -> None:
    assert part_of(1_234_567, 1_234_568, "row") == "1,234,567 of 1,234,568 rows (>99.9 %)"


@pytest.mark.parametrize(
    ("values", "log"),
    [
        ([], False), ([0, 0], False), ([7], False), ([50, 1, 1], False), ([50.1, 1, 1], True), ([99.9, 0.1], True),
        ([1000, 0, 0, 0], False), ([1000, 1000, 1], False), ([1000, 1, 1, 0], True),
    ],
)  # fmt: skip
def test_an_axis_is_logarithmic_where_one_value_hides_the_rest(values: list[float], log: bool) -> None:
    assert hides(values) == log
    if values:
        figures = (
            (columns(["a"] * len(values), [("s", "c1", values)], "%", "under"), "yaxis"),
            (over_time([("s", "c1", values)], START, 10, "rows/s"), "yaxis"),
            (bars([("k", value, "") for value in values], "c1", "rows"), "xaxis"),
        )
        for figure, axis in figures:
            assert figure.layout[axis].type == ("log" if log else "linear")
            assert ("log scale" in figure.layout[axis].title.text) == log
        assert ("log scale" in heat([("w", values)], START, 10, "rows/s")[1]) == log


def test_values_on_a_logarithmic_axis_are_not_stacked() -> None:
    """The height of a stack is no sum there."""
    series = [("one", "c1", [900.0, 1.0, 0.0]), ("two", "c2", [100.0, 1.0, 1.0])]
    for figure in (columns(["a", "b", "c"], series, "%", "under"), over_time(series, START, 10, "rows/s")):
        assert [(trace.type, trace.stackgroup) for trace in figure.data] == [("scatter", None)] * 2
        assert list(figure.data[0].y)[:3] == [900.0, 1.0, None]
    stacked = [("one", "c1", [9.0, 1.0, 0.0]), ("two", "c2", [1.0, 1.0, 1.0])]
    assert columns(["a", "b", "c"], stacked, "%", "under").layout.barmode == "stack"
    assert {trace.stackgroup for trace in over_time(stacked, START, 10, "rows/s").data} == {"all"}


def test_rates_over_time_are_steps_whose_last_one_ends_with_its_window() -> None:
    (trace,) = over_time([("one", "c1", [2.0, 4.0])], START, 10, "rows/s").data
    assert [at / 1000 - START for at in trace.x] == [0, 10, 20]
    assert (list(trace.y), trace.line.shape) == ([2.0, 4.0, 4.0], "hv")


class Checked(HTMLParser):
    """Balanced tags, and nothing from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.seen: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        told = dict(attrs)
        assert not {"src", "srcset", "href", "data", "poster", "action", "background"} & told.keys()
        assert not [name for name in told if name.startswith("on")]
        assert not re.search(r"url\(|https?:", " ".join(filter(None, told.values())))
        if told.get("http-equiv") == "Content-Security-Policy":
            self.policy = told["content"] or ""
        if tag == "script":
            self.scripts.append((told, ""))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            told, before = self.scripts[-1]
            self.scripts[-1] = told, before + data
        elif self.open and self.open[-1] == "style":
            assert not re.search(r"https?:|@import|url\(", data)
        else:
            self.text.append(data)

    @property
    def charts(self) -> dict[str, Any]:
        """What the page's script draws."""
        ((_, text),) = [one for one in self.scripts if one[0].get("type") == "application/json"]
        found: dict[str, Any] = json.loads(text)["charts"]
        return found


def checked(text: str) -> Checked:
    found = Checked()
    found.feed(text)
    found.close()
    assert found.open == []
    assert found.seen.count("script") == 3
    return found


def tables(streams: int = 2, windows_: int = 3, latency: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [NASTY, *(f"stream{at}" for at in range(1, streams))]
    counts = {name: 10 * (streams - at) for at, name in enumerate(names)}
    rows = sum(counts.values())
    summary = {
        "rows": rows, "facts": rows, "bytes": rows * 20, "streams": names, "writers": 1, "first": float(START),
        "last": START + 10.0 * windows_, "span": 10.0 * windows_, "window": 10, "rows_per_second": 1.5,
        "peak_rows_per_second": 3.0, "source": "table", "epochs": ["e" * 32], "listened": 5.0 if latency else 0.0,
        "heard": 4, "heard_left_out": 1, "link_cuts": 1, "clock_ahead": -0.002, "clock_exact": 0.001,
        "made": "2026-05-11T12:00:00+00:00", "latencies": [], "lease": 10.0,
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
        "rates_by_size": [
            {"stream": name, "low": low, "high": high, "window": START + 10 * at, "facts": 1, "rows": high}
            for name in names for at in range(windows_) for low, high in ((1, 1), (5, 8))
        ],
        "row_sizes": [{"stream": name, "low": 16.0, "high": 22.6, "rows": count} for name, count in counts.items()],
        "row_size_percentiles": [{"stream": name, "p50": 20, "p99": 20, "most": 20} for name in names],
        "steps": [
            {"stream": name, "whose": whose, "low": low, "high": high, "steps": 5, "tokens": low}
            for name in names for whose in ("others", "nobody") for low, high in ((0, 0), (4, 7))
        ],
        "unused_ids": [
            {"stream": name, "writer": writer, "writers": 1, "facts": 9, "unused": 1, "share": 0.1}
            for name in names for writer in ("", NASTY)
        ],
        "top_keys": [
            {"stream": name, "rank": rank, "key": key, "rows": 1, "share": 0.1, "keys": 10}
            for name in names for rank, key in enumerate((NASTY, None, ""), 1)
        ],
        "readers": [], "latencies": [],
        "table_writers": [
            {"stream": NASTY, "writer": NASTY, "position": 9, "waiting_rows": 21, "waiting_for": 75.0,
             "silent_for": 70.0},
            {"stream": NASTY, "writer": "w2", "position": 9, "waiting_rows": 0, "waiting_for": None, "silent_for": 1.0},
        ],
        "archive_lag": [
            {"stream": NASTY, "writer": NASTY, "archived": 1, "proven": 9, "rows": 1_234, "seconds": 90.0},
            {"stream": NASTY, "writer": "w2", "archived": 9, "proven": 9, "rows": 0, "seconds": None},
        ],
    }  # fmt: skip
    if latency:
        one = {"measure": "heard", "count": 4, "p50": 0.004, "p90": 0.005, "p99": 0.02, "p999": 0.02, "most": 0.02}
        found["latencies"] = [{**one, "stream": at, "writer": at, "reader": ""} for at in ("", NASTY)]
        summary["latencies"] = found["latencies"][:1]
        found["readers"] = [
            {"reader": NASTY, "stream": NASTY, "writer": "w", "position": 5, "behind": 3, "saved": START * 10**6}
        ]
    return summary, found


def test_the_page_is_complete_in_itself() -> None:
    """It loads nothing, from no host, and a browser runs the library and the page's own script alone."""
    text = page(*tables(), SAMPLES)
    found = checked(text)
    (_, data), (_, library), (_, script) = found.scripts
    assert text.count(charts.plotly_js()) == 1
    assert library == charts.plotly_js()
    told = dict(part.strip().split(" ", 1) for part in found.policy.split(";"))
    assert told == {
        "default-src": "'none'", "style-src": "'unsafe-inline'", "img-src": "data: blob:",
        "script-src": " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in (library, script)
        ),
    }  # fmt: skip
    config = json.loads(data)["config"]
    assert config["plotlyServerURL"] == ""
    assert (config["displaylogo"], config["displayModeBar"], config["showSendToCloud"]) == (False, False, False)
    assert (config["responsive"], config["typesetMath"]) == (True, False)
    kinds = {trace["type"] for chart in found.charts.values() for trace in chart["data"]}
    assert kinds <= {"bar", "scatter", "heatmap"}, "others load maps from hosts"
    assert "https:" not in script + data
    assert "http:" not in script + data


@small
@pytest.mark.parametrize("streams", [1, 2, 7, 8, 20])
@pytest.mark.parametrize("latency", [False, True])
def test_the_page_has_its_parts(streams: int, latency: bool) -> None:
    whole = page(*tables(streams, latency=latency), SAMPLES)
    found = checked(whole)
    text = "".join(found.text)
    assert NASTY in text
    assert ("p99 20 ms" in text) == latency
    assert ("Heard on the bus" in text) == latency
    assert ("other streams" in text) == (streams > COLOURS)
    assert {*found.charts} == {*re.findall(r'<div class="chart" id="(chart\d+)"', whole)}
    assert len(found.charts) >= 7


@small
def test_texts_of_the_data_are_no_markup_in_a_chart() -> None:
    """Plotly reads tags and entities in its texts, and names in braces in its templates."""
    found = checked(page(*tables(latency=True), SAMPLES))
    assert found.charts

    def texts(value: Any, name: str = "") -> list[tuple[str, str]]:
        if isinstance(value, dict):
            return [one for key, inner in value.items() for one in texts(inner, key)]
        if isinstance(value, list):
            return [one for inner in value for one in texts(inner, name)]
        return [(name, value)] if isinstance(value, str) else []

    every = texts(found.charts)
    assert any("&lt;/script&gt;" in text for _, text in every)
    for name, text in every:
        assert not re.sub("<br>|<extra></extra>", "", text).count("<"), text
        assert name != "hovertemplate" or "script" not in text
    assert label(NASTY) == "&lt;/script&gt;&lt;b&gt;x&lt;/b&gt;\"&amp;'%{y}"
    assert label("") == "&nbsp;"
    assert label("a" * 90) == "<br>".join(["a" * 40, "a" * 40, "a" * 10])


def test_charts_cannot_end_their_script() -> None:
    found = Charts()
    assert "<b>" not in found.card(NASTY, bars([(NASTY, 1.0, NASTY)], "c1", NASTY))
    text = found.json()
    assert not {"<", ">", "\u2028", "\u2029"} & set(text)
    assert json.loads(text)["charts"]["chart1"]["data"][0]["meta"] == "c1"


def test_without_plotly_the_extra_is_named() -> None:
    done = run_blocked(
        """
        from busrep.errors import MissingExtra
        try:
            import busrep.spark.stats.charts
        except MissingExtra as error:
            print(error)
        """,
        *DEPENDED_ON,
    )
    assert done.stdout == "the statistics' page needs an extra that is not installed: pip install 'busrep[spark]'\n"


@small
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
    for table, one in (("table_writers", {"waiting_rows": 1}), ("archive_lag", {"rows": 1})):
        found[table] = [{**found[table][0], **one, "writer": name} for name in names]
    text = page(summary, found, SAMPLES)
    checked(text)
    assert len(text) < 500_000
    for name in ("writers", "readers", "latencies", "table_writers", "archive_lag"):
        assert re.search(rf"and [0-9,]+ more, in {name}\.parquet", text), name
    assert "in top_keys.parquet" in text


@small
@pytest.mark.parametrize(("ahead", "text"), [(-0.002, "is 2 ms behind this"), (0.002, "is 2 ms ahead of this")])
def test_whose_clock_is_ahead(ahead: float, text: str) -> None:
    summary, found = tables(latency=True)
    assert text in page({**summary, "clock_ahead": ahead}, found, SAMPLES)


@small
def test_one_fact_alone() -> None:
    summary, found = tables(1)
    one = {"facts": 1, "rows": 1, "bytes": 0}
    summary |= {**one, "last": summary["first"], "span": 0.0, "rows_per_second": None}
    found["writers"] = [{**found["writers"][0], **one}]
    text = page(
        summary,
        {
            **found,
            "rates": found["rates"][:1],
            "rates_by_size": found["rates_by_size"][:1],
            "steps": [],
            "top_keys": found["top_keys"][:1],
        },
        SAMPLES,
    )
    checked(text)
    assert "1 row of 1 stream<" in text


@small
def test_rows_without_times_have_no_rates() -> None:
    summary, found = tables()
    summary |= {"first": None, "last": None, "span": 0.0, "rows_per_second": None, "peak_rows_per_second": 0.0}
    text = page(summary, {**found, "rates": [], "steps": []}, SAMPLES)
    checked(text)
    assert "there are no rates" in text


@small
def test_a_long_span_is_put_together() -> None:
    summary, found = tables(windows_=1000)
    first, window, count = windows(summary, found["rates"])
    assert (first % window, window) == (0, 40)
    assert count <= 320
    assert first + count * window > START + 10 * 999
    checked(page(summary, found, SAMPLES))


def test_the_streams_with_most_rows_have_colours() -> None:
    found = palette("stream", {f"s{at}": at for at in range(9)})
    assert found.shown == ["s8", "s7", "s6", "s5", "s4", "s3"]
    assert (found.colours["s8"], found.colours["s0"]) == ("c1", "co")
    split = found.split(lambda name: [float(name[1:])])
    assert [name for name, _, _ in split][-1] == "3 other streams"
    assert split[-1][2] == [3.0]


def titles(text: str) -> list[str]:
    return [one.replace("&nbsp;", " ") for one in re.findall("<h3>(.*?)</h3>", text)]


@small
def test_titles_do_not_round_to_a_falsehood() -> None:
    """One fact of 100,000 has 40 rows: not all have one."""
    summary, found = tables(1)
    found["rows_per_fact"] = [{"stream": NASTY, "rows": rows, "facts": facts} for rows, facts in ((1, 99_999), (40, 1))]
    found["row_sizes"] = [{"stream": NASTY, "low": 32.0, "high": 45.254833995939045, "rows": 10}]
    told = titles(page(summary, found, SAMPLES))
    assert any(
        one.startswith("99,999 of 100,000 facts (&gt;99.9 %) have one row; the largest has 40 (") for one in told
    )
    assert any(one.startswith("At least half of the rows have at most 45 bytes") for one in told)
    assert not any(re.search(r"(?<![\d.])100 %", one) for one in told if "fact" in one)


@small
def test_a_share_of_rollbacks_is_a_bound_where_a_stream_has_several_writers() -> None:
    summary, found = tables(1)

    def told(*ids: dict[str, Any]) -> tuple[str, list[str]]:
        text = page(summary, {**found, "unused_ids": list(ids)}, SAMPLES)
        places = [one["text"] for chart in checked(text).charts.values() for trace in chart["data"]
                  if trace["type"] == "bar" and trace.get("text") for one in [trace]]  # fmt: skip
        return text, places[0]

    def ids(writer: str, writers: int, facts: int, unused: int) -> dict[str, Any]:
        return {"stream": NASTY, "writer": writer, "writers": writers, "facts": facts, "unused": unused,
                "share": unused / (unused + facts)}  # fmt: skip

    text, shares = told(ids("", 2, 19, 1), ids("w1", 2, 9, 1), ids("w2", 2, 10, 0))
    assert "Rolled back at most: 1 of 20 IDs (5.0 %)" in titles(text)
    assert shares == ["≤ 10 % (1)", "5.0 % (1)", "≤ 0 % (0)"]
    text, shares = told(ids("", 1, 9, 1), ids("w1", 1, 9, 1))
    assert shares == ["10 % (1)"]
    assert "Each ID between" in page(summary, {**found, "unused_ids": [ids("", 1, 9, 0), ids("w1", 1, 9, 0)]}, SAMPLES)


@small
def test_what_waits_and_what_the_archive_lacks() -> None:
    summary, found = tables(1)
    told = titles(page(summary, found, SAMPLES))
    assert "21 committed rows above the proven positions of 1 writer, 1 of them silent for more than 10 s" in told
    assert "The archive lacks 1,234 rows that the table has proven, the oldest 90 s old" in told
    for name in ("table_writers", "archive_lag"):
        found[name] = found[name][1:]
    text = page(summary, found, SAMPLES)
    checked(text)
    assert {"No rows wait for their writer", "The archive has all proven rows that the table has"} <= {*titles(text)}
    assert "1 line, in archive_lag.parquet" in text
    text = page(summary, {**found, "table_writers": [], "archive_lag": []}, SAMPLES)
    assert "Rows that wait</h2>" not in text
    assert "The archive&#x27;s lag</h2>" not in text


@small
def test_rates_by_size_of_fact() -> None:
    summary, found = tables(1)
    text = page(summary, found, SAMPLES)
    assert "Rows per second by size of fact: 24 of 27 rows (89 %) in facts of 5–8 rows" in titles(text)
    assert "Facts per second by size of fact: 3 of 6 facts (50 %) in facts of 5–8 rows" in titles(text)
    assert re.search(r"facts of 5–8 rows</span><span>.*facts of 1 row</span>", text)
