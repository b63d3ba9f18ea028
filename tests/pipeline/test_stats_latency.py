"""Latencies and percentiles against the same by the plain definition; and a subscription that does not come about."""

from __future__ import annotations

import random
from array import array

import pytest

pytest.importorskip("pyspark")

from busrep.errors import ConfigError
from busrep.spark.stats.job import sample_table
from busrep.spark.stats.listen import Handled, Heard, Recorder, latencies
from busrep.spark.stats.tables import percentiles
from tests.pipeline.replay_child import QUICK


@pytest.mark.parametrize("count", [1, 2, 3, 9, 10, 99, 100, 101, 999, 1000, 1001])
def test_percentiles_are_nearest_ranks(count: int) -> None:
    values = random.Random(count).sample(range(10 * count), count)
    (whole, one) = percentiles({("heard", "s", "w", ""): array("d", values)})
    assert (whole["stream"], one["stream"], whole["count"]) == ("", "s", count)
    for name, per_mille in (("p50", 500), ("p90", 900), ("p99", 990), ("p999", 999), ("most", 1000)):
        plain = min(at for at in values if sum(other <= at for other in values) * 1000 >= per_mille * count)
        assert whole[name] == one[name] == plain, name


def test_a_saved_position_covers_the_facts_up_to_it() -> None:
    rng = random.Random(1)
    committed = {("s", f"w{token % 3}", token): float(token) for token in rng.sample(range(1, 400), 200)}
    spans = [("r", "s", f"w{at % 3}", at, at + rng.randint(0, 50), 1000.0 + at) for at in range(0, 390, 7)]
    spans += [("r", "s", "unknown", 0, 10, 1.0)]
    expected = sorted(
        ("saved", stream, writer, reader, saved - at)
        for reader, stream, writer, after, upto, saved in spans
        for (_, its, token), at in committed.items()
        if its == writer and after < token <= upto
    )
    found = latencies({}, spans, committed, 5.0)
    assert sorted((*key, value) for key, values in found.items() for value in values) == expected
    heard = {("s", "w1", 1): 10.0, ("s", "w9", 9): 1.0}
    assert latencies(heard, [], {("s", "w1", 1): 9.0}, 0.5) == {("heard", "s", "w1", ""): array("d", [1.5])}


def test_samples_are_written_and_counted_as_they_were_measured() -> None:
    rng = random.Random(7)
    keys = [("heard", "s", "w1", ""), ("saved", "s", "w1", "r"), ("saved", "s", "w2", "r"), ("saved", "t", "w1", "q")]
    samples = {key: array("d", (rng.random() for _ in range(rng.randint(1, 300)))) for key in keys}
    rows = [(*key, value) for key in keys for value in samples[key]]
    written = sample_table(samples)
    assert [tuple(row.values()) for row in written.to_pylist()] == rows
    assert written.schema == sample_table({}).schema
    assert percentiles({}) == []
    found = {(one["measure"], one["stream"], one["writer"], one["reader"]): one for one in percentiles(samples)}
    assert {key: one["count"] for key, one in found.items() if key[1]} == {key: len(samples[key]) for key in keys}
    saved = sorted(row[4] for row in rows if row[0] == "saved")
    assert found["saved", "", "", ""]["count"] == len(saved)
    assert found["saved", "", "", ""]["most"] == saved[-1]
    assert found["saved", "", "", ""]["p50"] == saved[(len(saved) + 1) // 2 - 1]


def test_positions_as_they_move() -> None:
    handled = Handled()
    handled.look([("r", "s", "w", 5, 1.0)])
    handled.look([("r", "s", "w", 5, 1.5), ("new", "s", "w", 3, 1.6)])
    handled.look([("r", "s", "w", 9, 2.0)])
    assert handled.spans == [("new", "s", "w", 0, 3, 1.6), ("r", "s", "w", 5, 9, 2.0)]


def test_what_is_no_frame_is_not_heard_and_does_no_harm() -> None:
    heard = Heard(["s"], bound=2)
    heard.receive(b"\xff\xfe", 1.0, 10**6)
    heard.receive(b"RDATA s w x [1]\n", 1.0, 10**6)
    heard.receive(b"RDATA s w 1 [1]\nRDATA s w 2 [1]\nRDATA s w 2 [1]\nRDATA s w 3 [1]\n", 2.0, 10**6)
    assert (heard.times, heard.left_out) == ({("s", "w", 1): 2.0, ("s", "w", 2): 2.0}, 1)


def test_a_redis_that_does_not_answer_is_named() -> None:
    recorder = Recorder("redis://127.0.0.1:1", ["s"], Heard(["s"]), QUICK)
    try:
        assert not recorder.linked.wait(0.3)
    finally:
        recorder.close()
    assert recorder.cuts
    assert "Connection" in recorder.reason
    with pytest.raises(ConfigError, match="Redis URL"):
        Recorder("http://host", ["s"], Heard(["s"]), QUICK)
