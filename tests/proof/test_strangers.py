"""The simulator's strangers: what they say is of the kinds that it names, and no scenario drawn before is another."""

from __future__ import annotations

import random

import pytest

from busrep.core.framing import parse_frame
from tests.proof.sim.scenario import draw
from tests.proof.sim.strangers import KINDS, Scene, said

SCENE = Scene("sim", "0" * 32, ("w1", "w2"), {"orders": 7, "payments": 0})


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stranger_says_is_a_message(kind: str) -> None:
    dice = random.Random(1)
    texts = {said(kind, SCENE, dice) for _ in range(200)}
    assert len(texts) > 1
    assert any(parse_frame(text, 10_000).items for text in texts)


def test_strangers_are_drawn_beside_the_rest_of_a_scenario() -> None:
    drawn = [draw(seed) for seed in range(50)]
    assert any(event.kind == "stranger" for one in drawn for event in one.events)
    for one in drawn:
        strangers = [event for event in one.events if event.kind == "stranger"]
        assert all(event.at < one.seconds and event.args["says"] in KINDS for event in strangers)
