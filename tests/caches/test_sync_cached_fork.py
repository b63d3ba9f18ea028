"""Caches and fork(): what a child process has of its parent's."""

from __future__ import annotations

import os

import pytest

from tests.sync.test_fork import Scenario

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is not of this system"),
]

PREAMBLE = """
from busrep.caches import invalidations
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry

caches = invalidations()
table = open_blocking_store(STORE, Registry([caches]))
table.init()
table.close()
loads = []

def cached(bus):
    @bus.cached(name="item")
    def item(key):
        loads.append(key)
        return len(loads)
    return item

def kept(item):
    while not item.statistics()["hits"]:
        item(1)
        time.sleep(0.01)

long = busrep.Settings(heartbeat=1.0, cache_bound=60.0)
make = bus
def bus(writer=None):
    return make(writer, streams=[caches], settings=long)
"""


@pytest.fixture
def scenario(redis_url: str, bus_name: str, postgres_url: str) -> Scenario:
    return Scenario(redis_url, bus_name, postgres_url)


def test_the_caches_of_an_open_bus_are_the_parent_s_alone(scenario: Scenario) -> None:
    scenario.run(
        PREAMBLE
        + """
with bus("w1") as bus:
    item = cached(bus)
    kept(item)

    def child():
        assert item.statistics()["size"] == 0
        before = len(loads)
        assert [item(1), item(1)] == [before + 1, before + 2]
        assert item.statistics()["size"] == 0
        for call in (lambda: item.invalidate(1), lambda: bus.invalidate("item", (1,)), lambda: bus.cached()(len)):
            refused(call, os.getpid())

    before = len(loads)
    wait(in_child(child))
    assert item(1) == before, "the parent's is still kept"
    item.invalidate(1)
    assert item(1) == before + 1
"""
    )


def test_a_bus_that_was_not_open_yet_caches_in_each_child(scenario: Scenario) -> None:
    scenario.run(
        PREAMBLE
        + """
bus = bus()
item = cached(bus)
assert [item(1), item(1)] == [1, 2]

def child():
    bus.open()
    kept(item)

for pid in [in_child(child) for _ in range(2)]:
    wait(pid)
kept_before = item.statistics()["hits"]
assert kept_before == 0
bus.open()
kept(item)
"""
    )


def test_a_bus_of_the_child_s_own(scenario: Scenario) -> None:
    """Beside the one that it inherited, of the same names."""
    scenario.run(
        PREAMBLE
        + """
first = bus("w1")
item = cached(first)
first.open()
kept(item)

def child():
    with bus("w2") as own:
        mine = cached(own)
        kept(mine)
        mine.invalidate(1)
        hits = mine.statistics()["hits"]
        mine(1)
        assert mine.statistics()["hits"] == hits

before = item.statistics()["invalidations"]
wait(in_child(child))
while item.statistics()["invalidations"] == before:
    time.sleep(0.01)
first.close()
"""
    )


def test_a_fork_while_other_threads_are_in_the_caches(scenario: Scenario) -> None:
    """No lock stays taken in the child, and nothing there is half done."""
    scenario.run(
        PREAMBLE
        + """
with bus("w1") as bus:
    small = bus.cached(name="small", maxsize=3)(lambda key: key)
    item = cached(bus)
    kept(item)
    ended = threading.Event()

    def work():
        turn = 0
        while not ended.is_set():
            turn += 1
            assert small(turn % 7) == turn % 7

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()

    def child():
        for key in range(20):
            assert small(key % 7) == key % 7
        item(1)

    for _ in range(8):
        wait(in_child(child))
    ended.set()
    for thread in threads:
        thread.join()
"""
    )
