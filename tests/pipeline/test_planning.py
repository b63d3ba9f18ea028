from __future__ import annotations

import random

import pytest

from busrep.spark.planning import LEAST_IDS, PARTITIONS, Span, admitted, clipped, partitions, ranges, upto


def test_ranges_are_what_lies_between() -> None:
    found = ranges({"a": 3, "b": 9}, {"a": 5, "b": 9, "c": 2}, {})
    assert found.spans == [("a", 3, 5), ("c", 0, 2)]
    assert found.lost == []


@pytest.mark.parametrize(
    ("after", "end", "floor", "spans", "lost"),
    [
        (3, 9, 2, [("a", 3, 9)], []),
        (3, 9, 3, [("a", 3, 9)], []),
        (3, 9, 5, [("a", 5, 9)], [("a", 3, 5)]),
        (3, 9, 9, [], [("a", 3, 9)]),
        (3, 9, 20, [], [("a", 3, 9)]),
        (9, 9, 20, [], []),
        (9, 3, 0, [], []),
    ],
)
def test_what_is_below_the_floor_is_lost(after: int, end: int, floor: int, spans: list[Span], lost: list[Span]) -> None:
    found = ranges({"a": after}, {"a": end}, {"a": floor})
    assert (found.spans, found.lost) == (spans, lost)


def ids(spans: list[Span]) -> list[tuple[str, int]]:
    return [(writer, token) for writer, after, high in spans for token in range(after + 1, high + 1)]


def test_partitions_hold_each_id_once_and_cut_at_tokens_alone() -> None:
    rng = random.Random(2)
    for _ in range(500):
        spans = []
        for writer in "abcd"[: rng.randrange(5)]:
            after = rng.randrange(40)
            spans.append((writer, after, after + rng.randrange(40)))
        count = rng.randrange(1, 12)
        found = partitions(spans, count)
        assert sorted(ids([span for one in found for span in one])) == sorted(ids(spans))
        assert len(found) == min(count, len({token for _, token in ids(spans)}))
        assert all(found)
        # In order, and one after the other on the axis: what a token has is in one partition, whichever writer's it is.
        highest = [max(high for _, _, high in one) for one in found]
        lowest = [min(low for _, low, _ in one) for one in found]
        assert all(low >= high for high, low in zip(highest, lowest[1:], strict=False))


def test_partitions_are_of_equal_numbers_of_ids() -> None:
    assert partitions([("a", 0, 100)], 4) == [[("a", at, at + 25)] for at in (0, 25, 50, 75)]
    assert partitions([("a", 0, 3)], 8) == [[("a", 0, 1)], [("a", 1, 2)], [("a", 2, 3)]]
    # One writer left long ago; IDs that nobody reads count for nothing.
    assert partitions([("a", 0, 10), ("b", 90, 100)], 2) == [[("a", 0, 10)], [("b", 90, 100)]]
    assert partitions([("a", 0, 10), ("b", 0, 10)], 2) == [[("a", 0, 5), ("b", 0, 5)], [("a", 5, 10), ("b", 5, 10)]]
    assert partitions([], 3) == []


def test_little_is_not_cut_unless_that_is_asked_for() -> None:
    assert len(partitions([("a", 0, 10)], None)) == 1
    assert len(partitions([("a", 0, LEAST_IDS + 1)], None)) == 2
    assert len(partitions([("a", 0, LEAST_IDS * 1000)], None)) == PARTITIONS


def test_there_are_as_many_partitions_as_are_asked_for_at_least() -> None:
    assert len(partitions([("a", 0, 9)], least=4)) == 4
    assert len(partitions([("a", 0, 3), ("b", 1, 3)], least=4)) == 3
    assert len(partitions([("a", 0, LEAST_IDS * 3)], least=2)) == 3
    assert len(partitions([("a", 0, 9)], 5, 4)) == 5


def batch(facts: dict[int, tuple[str, int]], spans: list[Span], most: int) -> int | None:
    """`admitted`, asked as the table asks it; facts: {token: (writer, rows)}."""
    rows = [
        token
        for token, (writer, count) in sorted(facts.items())
        if any(name == writer and after < token <= high for name, after, high in spans)
        for _ in range(count)
    ]
    return admitted(spans, rows[0] if rows else None, rows[most] if len(rows) > most else None)


@pytest.mark.parametrize(
    ("most", "ceiling"), [(1, 4), (2, 4), (3, 4), (4, 5), (5, 6), (6, 6), (7, 8), (8, None), (100, None)]
)
def test_the_oldest_facts_are_admitted_and_none_is_cut(most: int, ceiling: int | None) -> None:
    facts = {4: ("a", 4), 6: ("b", 1), 7: ("a", 2), 9: ("b", 1)}
    # Token 4 alone has four rows: with a limit below, it is read whole all the same.
    assert batch(facts, [("a", 0, 9), ("b", 0, 9)], most) == ceiling


def test_batches_come_to_the_end_without_cut_loss_or_excess() -> None:
    rng = random.Random(3)
    for _ in range(300):
        facts = {t: (rng.choice("ab"), rng.randrange(1, 6)) for t in range(1, 30) if rng.random() < 0.7}
        end = {"a": rng.randrange(30), "b": rng.randrange(30)}
        most, at, seen = rng.randrange(1, 9), {}, []
        for _ in range(40):
            spans = list(ranges(at, end, {}).spans)
            to = upto(at, end, batch(facts, spans, most))
            got = [t for t, (w, _) in sorted(facts.items()) if at.get(w, 0) < t <= to[w]]
            assert sum(facts[t][1] for t in got) <= most or len(got) == 1
            if not got:
                break
            seen += got
            at = to
        assert sorted(seen) == [t for t, (w, _) in sorted(facts.items()) if t <= end[w]]


def test_no_position_goes_back() -> None:
    assert upto({"a": 9}, {"a": 5, "b": 7}, None) == {"a": 9, "b": 7}
    assert upto({"a": 9}, {"a": 20, "b": 7}, 5) == {"a": 9, "b": 5}
    assert upto({"gone": 4}, {"a": 20}, 5) == {"a": 5, "gone": 4}
    assert admitted([], None, None) is None


def test_spans_are_clipped_by_tokens() -> None:
    spans = [("a", 0, 10), ("b", 8, 20)]
    assert clipped(spans, 5, 9) == [("a", 4, 9), ("b", 8, 9)]
    assert clipped(spans, 11, None) == [("b", 10, 20)]
    assert clipped(spans, None, 3) == [("a", 0, 3)]
    assert clipped(spans, 7, 6) == []
    assert clipped(spans, -5, -1) == []
