from __future__ import annotations

import json
import random

import pytest

from busrep.errors import ConfigError
from busrep.spark.offsets import Offset

EPOCH = "0" * 32


def test_an_offset_goes_to_json_and_back_with_its_keys_in_order() -> None:
    one = Offset(EPOCH, {"w2": 7, "w10": 3, "a": 1})
    other = Offset(EPOCH, {"a": 1, "w10": 3, "w2": 7})
    assert one == other
    text = json.dumps(one.to_dict())
    assert text == json.dumps(other.to_dict()) == json.dumps(Offset.from_dict(json.loads(text)).to_dict())
    assert text == f'{{"epoch": "{EPOCH}", "positions": {{"a": 1, "w10": 3, "w2": 7}}}}'
    assert Offset.from_dict(json.loads(text)) == one


def test_what_was_skipped_is_kept() -> None:
    offset = Offset(EPOCH, {"w": 1}, 5)
    assert offset.to_dict() == {"epoch": EPOCH, "positions": {"w": 1}, "skipped": 5}
    assert Offset.from_dict(offset.to_dict()) == offset


@pytest.mark.parametrize(
    "found",
    [
        None, 5, [], "x", {}, {"epoch": EPOCH}, {"positions": {}}, {"epoch": 5, "positions": {}},
        {"epoch": EPOCH, "positions": [1]}, {"epoch": EPOCH, "positions": {"w": -1}},
        {"epoch": EPOCH, "positions": {"w": True}}, {"epoch": EPOCH, "positions": {"w": 1.0}},
        {"epoch": EPOCH, "positions": {"w": "1"}}, {"epoch": EPOCH, "positions": {"w": 2**63}},
        {"epoch": EPOCH, "positions": {}, "partition": 1}, {"epoch": EPOCH, "positions": {}, "skipped": -1},
    ],
)  # fmt: skip
def test_another_sources_offset_is_told(found: object) -> None:
    with pytest.raises(ConfigError, match="which is no offset of a busrep stream.*checkpointLocation of its own"):
        Offset.from_dict(found)


def test_offsets_advance_writer_by_writer_and_never_go_back() -> None:
    one, other = Offset(EPOCH, {"a": 5, "b": 1}, 2), Offset(EPOCH, {"b": 3, "c": 4})
    assert one.advance(other) == other.advance(one) == Offset(EPOCH, {"a": 5, "b": 3, "c": 4}, 2)
    assert one.at("a") == 5
    assert one.at("nobody") == 0
    rng = random.Random(1)
    for _ in range(200):
        left, right = (Offset(EPOCH, {w: rng.randrange(9) for w in "abc" if rng.random() < 0.7}) for _ in range(2))
        further = left.advance(right)
        assert all(further.at(w) >= max(left.at(w), right.at(w)) for w in "abc")
        assert further.advance(left) == further


def test_offsets_of_two_logs_have_no_order() -> None:
    with pytest.raises(ValueError, match="no order"):
        Offset("1" * 32).advance(Offset("2" * 32))
