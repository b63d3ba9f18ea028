from __future__ import annotations

import json

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


def test_the_stream_is_kept_where_it_is_known() -> None:
    offset = Offset(EPOCH, {"w": 1}, stream="orders")
    assert offset.to_dict() == {"epoch": EPOCH, "positions": {"w": 1}, "stream": "orders"}
    assert Offset.from_dict(offset.to_dict()) == offset
    # An old checkpoint stays the text that it is, or Spark would take it for news.
    assert Offset.from_dict({"epoch": EPOCH, "positions": {"w": 1}}).to_dict() == {
        "epoch": EPOCH,
        "positions": {"w": 1},
    }


def test_the_position_of_a_writer() -> None:
    assert Offset(EPOCH, {"a": 5}).at("a") == 5
    assert Offset(EPOCH, {"a": 5}).at("nobody") == 0


@pytest.mark.parametrize(
    "found",
    [
        None, 5, [], "x", {}, {"epoch": EPOCH}, {"positions": {}}, {"epoch": 5, "positions": {}},
        {"epoch": EPOCH, "positions": [1]}, {"epoch": EPOCH, "positions": {"w": -1}},
        {"epoch": EPOCH, "positions": {"w": True}}, {"epoch": EPOCH, "positions": {"w": 1.0}},
        {"epoch": EPOCH, "positions": {"w": "1"}}, {"epoch": EPOCH, "positions": {"w": 2**63}},
        {"epoch": EPOCH, "positions": {}, "partition": 1}, {"epoch": EPOCH, "positions": {}, "skipped": -1},
        {"epoch": EPOCH, "positions": {}, "stream": 5},
    ],
)  # fmt: skip
def test_another_sources_offset_is_told(found: object) -> None:
    with pytest.raises(ConfigError, match="which is no offset of a busrep stream.*checkpointLocation of its own"):
        Offset.from_dict(found)
