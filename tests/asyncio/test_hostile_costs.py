"""Rule 9.20: the worst messages of 16 MiB cost what benchmarks/hostile_message.py says, and no multiple of it."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from benchmarks.hostile_message import MESSAGES, receiver

SIZE = 1 << 24


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_hostile_message_is_cheap(kind: str) -> None:
    data = MESSAGES[kind](SIZE)
    receive = receiver()
    begun = time.thread_time()
    receive(data)
    # Ten times the target, for slow machines; without the bounds it takes 3 s to 20 s.
    assert time.thread_time() - begun < 5.0
    receive = receiver()
    tracemalloc.start()
    try:
        receive(data)
        assert tracemalloc.get_traced_memory()[1] < 4 * SIZE
    finally:
        tracemalloc.stop()
