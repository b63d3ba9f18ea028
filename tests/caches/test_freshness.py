"""As of when invalidations are known: of the own facts, of the table, of what was heard; and all against a model."""

from __future__ import annotations

import random
import threading
from typing import Any

import attrs
import pytest

from busrep import Settings
from busrep.caches.cache import Caches, Invalidation, invalidations
from busrep.caches.cached import wrap
from busrep.caches.freshness import PENDING, Commits, HeardProof, Own, TableProof
from busrep.stores.interface import KnownWriter

BEAT = 2.0


# -- the own facts --------------------------------------------------------------------------------------------


def test_a_writer_with_nothing_open_has_applied_everything() -> None:
    assert Commits().as_of(100.0) == 100.0


def test_a_commit_without_an_answer_holds_the_time_at_the_moment_it_was_sent() -> None:
    commits = Commits()
    commits.sent("a", 10.0)
    commits.sent("a", 11.0)  # in doubt: it is the first moment that counts
    commits.sent("b", 12.0)
    assert commits.as_of(100.0) == 10.0
    commits.ended("a")  # rolled back
    assert commits.as_of(100.0) == 12.0
    commits.ended("b")
    commits.ended("never sent")
    assert commits.as_of(100.0) == 100.0


def test_a_joined_fact_is_as_old_as_the_last_answer_that_it_is_open() -> None:
    commits = Commits()
    commits.sent("joined", 10.0)
    commits.still_open("joined", 30.0)
    commits.still_open("joined", 20.0)  # an answer that came late
    commits.still_open("another's", 50.0)
    assert commits.as_of(100.0) == 30.0
    commits.ended("joined")
    commits.still_open("joined", 60.0)  # later still: it has ended
    assert commits.as_of(100.0) == 100.0


# -- the table ------------------------------------------------------------------------------------------------


def registered(*writers: str, incarnation: int = 1) -> list[KnownWriter]:
    return [KnownWriter("caches", writer, 0, 0, True, incarnation, 0.0) for writer in writers]


@attrs.define
class Asked:
    """A proof, and what was delivered of each writer."""

    proof: TableProof = attrs.field(factory=TableProof)
    delivered: dict[str, int] = attrs.field(factory=dict)
    own: Own | None = None

    @property
    def as_of(self) -> float | None:
        return self.proof.as_of(lambda writer: self.delivered.get(writer, 0), self.own)


def test_what_the_table_has_proves_it_once_it_is_applied() -> None:
    world = Asked()
    assert world.as_of is None
    world.proof.looked(98.0, {"w1": 5, "w2": 0})
    assert world.as_of is None
    assert world.proof.waiting
    world.delivered["w1"] = 4
    assert world.as_of is None
    world.delivered["w1"] = 5
    assert world.as_of == 98.0
    assert not world.proof.waiting
    world.proof.looked(100.0, {"w1": 5, "w2": 7})
    world.proof.looked(102.0, {"w1": 9, "w2": 7})
    world.delivered["w2"] = 8
    assert world.as_of == 100.0
    world.delivered["w1"] = 9
    assert world.as_of == 102.0


def test_without_writers_the_table_proves_it() -> None:
    world = Asked()
    world.proof.looked(98.0, {})
    assert world.as_of == 98.0


def test_rows_of_a_writer_that_nobody_heard_of_are_missed() -> None:
    world = Asked()
    world.proof.looked(98.0, {"new": 1})
    assert world.as_of is None


def test_what_waits_for_rows_of_the_table_is_bounded() -> None:
    world = Asked()
    for at in range(10 * PENDING):
        world.proof.looked(float(at), {"w1": at})
    world.delivered["w1"] = 9 * PENDING + 1
    assert world.as_of == 9 * PENDING + 1
    assert len(world.proof.looks) == PENDING - 2


def test_own_rows_need_not_be_delivered_unless_the_name_is_another_s() -> None:
    world = Asked(own=Own("me", 3, 200.0))
    world.proof.registered(registered("me", incarnation=3))
    world.proof.looked(98.0, {"me": 5})
    assert world.as_of == 98.0
    world.own = Own("me", 3, 90.0)  # one that may be committed, and is not applied
    assert world.as_of == 90.0
    world.own = Own("me", 3, 200.0)
    # Finished for its silence, and claimed by another process: what that one writes is not applied here by itself.
    world.proof.registered(registered("me", incarnation=5))
    world.proof.looked(101.0, {"me": 6})
    assert world.as_of == 98.0
    world.own = None
    world.delivered["me"] = 6
    assert world.as_of == 101.0


def test_what_another_log_had_proves_nothing() -> None:
    world = Asked()
    world.proof.looked(98.0, {"w1": 0})
    assert world.as_of == 98.0
    world.proof.looked(99.0, {"w1": 0})
    world.proof.begin_anew()
    assert world.as_of is None


def test_where_a_writer_has_ended_is_known_once_it_has_left() -> None:
    proof = TableProof()
    proof.registered([*registered("w1"), KnownWriter("caches", "dead", 7, 0, False, 2, 99.0)])
    assert proof.final("dead") == 7
    assert proof.final("w1") is proof.final("nobody") is None


# -- what was heard, of a stream without a table --------------------------------------------------------------


@attrs.define
class Heard:
    """The same, of announcements."""

    proof: HeardProof = attrs.field(factory=lambda: HeardProof(10.0))
    delivered: dict[str, int] = attrs.field(factory=dict)
    own: Own | None = None

    def says(self, writer: str, at: float, position: int = 0, incarnation: int | None = 1) -> None:
        self.proof.announced(writer, incarnation, position, at)

    @property
    def as_of(self) -> float | None:
        return self.proof.as_of(lambda writer: self.delivered.get(writer, 0), self.own)


def test_announcements_count_as_of_when_they_came_and_the_earliest_writer_s() -> None:
    world = Heard()
    assert world.as_of is None
    world.says("w1", 100.0)
    assert world.as_of == 100.0
    world.says("w2", 101.0, position=7)
    assert world.as_of is None
    assert world.proof.waiting
    world.says("w2", 103.0, position=9)
    world.delivered["w2"] = 8
    assert world.as_of == 100.0
    world.says("w1", 105.0)
    assert world.as_of == 101.0
    world.delivered["w2"] = 9
    assert world.as_of == 103.0
    world.own = Own("me", 1, 90.0)
    assert world.as_of == 90.0


def test_who_falls_silent_counts_no_more_and_is_told_once() -> None:
    world = Heard()
    world.says("w1", 100.0)
    world.says("w2", 105.0)
    assert world.proof.gone(109.0) == []
    assert world.proof.gone(111.0) == ["w1"]
    assert world.proof.gone(111.0) == []
    assert world.as_of == 105.0


def test_only_the_latest_incarnation_counts() -> None:
    world = Heard()
    world.says("w1", 100.0, incarnation=2)
    world.says("w1", 110.0, incarnation=1)  # the one before, which does not know
    world.says("w1", 111.0, incarnation=None)
    assert world.as_of == 100.0
    world.says("w1", 112.0, position=3, incarnation=3)
    assert world.as_of is None
    world.delivered["w1"] = 3
    assert world.as_of == 112.0


def test_a_foreign_writer_has_no_incarnation() -> None:
    world = Heard()
    world.says("foreign", 90.0, incarnation=None)
    assert world.as_of == 90.0


def test_a_reset_begins_anew() -> None:
    world = Heard()
    world.says("w1", 100.0)
    world.proof.forget("w1")
    assert world.as_of is None


def test_what_waits_for_a_handler_is_bounded() -> None:
    world = Heard()
    for step in range(10 * PENDING):
        world.says("w1", float(step), position=100 + step)
    assert len(world.proof.voices["w1"].pending) == PENDING
    world.delivered["w1"] = 99 + 10 * PENDING
    assert world.as_of == 10 * PENDING - 1


# -- against a model ------------------------------------------------------------------------------------------

KEYS = 3


@attrs.define
class _Fact:
    id: int
    key: int
    phase: str = "open"  # sent, committed (the writer has no answer), ended


class _Node:
    """A writer: reserves IDs, commits, gets the answer or not, announces; what it says may be late, or lost."""

    def __init__(self, model: _Model, name: str) -> None:
        self.model, self.name, self.position = model, name, 0
        self.begin()

    def begin(self) -> None:
        self.facts = list[_Fact]()
        self.queue: list[tuple[float, str, Any]] = []  # to the reader: when it arrives at the earliest, in order
        self.sent_upto = self.position

    def step(self) -> None:
        model, random = self.model, self.model.random
        choice = random.choice(["open", "send", "commit", "answer", "answer", "roll back", "publish", "announce"])
        phase = {"send": "open", "commit": "sent", "answer": "committed"}.get(choice, "open")
        candidates = [one for one in self.facts if one.phase == phase]
        fact = random.choice(candidates) if candidates else None
        if choice == "open":
            model.sequence += 1
            self.facts.append(_Fact(model.sequence, random.randrange(KEYS)))
        elif choice == "send" and fact:
            fact.phase = "sent"
        elif choice == "commit" and fact:
            fact.phase = "committed"
            model.commit(self.name, fact)
        elif choice == "answer" and fact:
            fact.phase = "ended"
        elif choice == "roll back" and fact:
            self.facts.remove(fact)
        elif choice == "publish":
            self.publish()
        elif choice == "announce":
            self.say("announcement", (self.sent_upto,))

    def publish(self) -> None:
        unfinished = [one.id for one in self.facts if one.phase != "ended"]
        done = [one for one in self.facts if one.phase == "ended" and one.id < min(unfinished, default=10**9)]
        if done:
            rows = [(one.id, one.key) for one in sorted(done, key=lambda one: one.id)]
            self.facts = [one for one in self.facts if one not in done]
            self.say("rows", (self.sent_upto, rows))
            self.sent_upto = rows[-1][0]

    def say(self, kind: str, what: Any) -> None:
        random = self.model.random
        if random.random() < 0.25:
            return  # lost
        late = 0.001 if random.random() < 0.7 else random.uniform(0, 3 * BEAT)
        earliest = max([self.model.now + late, *(when for when, _, _ in self.queue)])
        self.queue.append((earliest, kind, what))

    def crash(self) -> None:
        """As kill -9 does; what the database was told to commit it may commit yet, before the name can be claimed."""
        for fact in self.facts:
            if fact.phase == "sent" and self.model.random.random() < 0.5:
                self.model.commit(self.name, fact)
        self.position = max((id for name, id, _ in self.model.rows if name == self.name), default=self.position)
        self.begin()


class _Model:
    """Writers, a table, a lossy channel in order, and one reader with the real caches, feed and proof."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.sequence = 1000.0, 0
        self.rows: list[tuple[str, int, int]] = []  # committed: writer, ID, key
        self.version = dict.fromkeys(range(KEYS), 0)
        self.changed: dict[int, list[float]] = {key: [] for key in range(KEYS)}  # when each version was replaced
        self.nodes = [_Node(self, f"w{number}") for number in range(2)]
        stream = invalidations()
        bound = 1.25 * BEAT
        self.bound = bound
        self.caches = Caches([stream], Settings(heartbeat=BEAT), clock=lambda: self.now, lock=threading.RLock)
        self.feed = self.caches.feed_of()
        self.feed.follow()
        self.proof = TableProof()
        self.delivered = {node.name: 0 for node in self.nodes}
        self.behind: dict[str, int] = {}  # a gap: writer -> up to where
        self.loads: list[Any] = []
        cache = self.caches.add(self.read, name="item")
        self.cache, self.item = cache, wrap(cache, self.read, self.caches.clock)
        self.hits = self.reads = 0
        self.answers: list[tuple[float, float, dict[str, int]]] = []  # of the table: when they arrive, of what is asked

    def read(self, key: int) -> int:
        self.reads += 1
        return self.version[key]

    def commit(self, name: str, fact: _Fact) -> None:
        self.rows.append((name, fact.id, fact.key))
        self.changed[fact.key].append(self.now)
        self.version[fact.key] += 1

    def apply(self, name: str, rows: list[tuple[int, int]]) -> None:
        self.feed.apply([Invalidation("item", [key], 0) for id, key in rows if id > self.delivered[name]])
        self.delivered[name] = max([self.delivered[name], *(id for id, _ in rows)])

    def gap(self, name: str, upto: int) -> None:
        self.feed.gap()
        self.behind[name] = max(upto, self.behind.get(name, 0))

    def hear(self, node: _Node) -> None:
        while node.queue and node.queue[0][0] <= self.now:
            _, kind, (head, *more) = node.queue.pop(0)
            if head > self.delivered[node.name]:
                self.gap(node.name, head)
            elif kind == "rows" and node.name not in self.behind:
                self.apply(node.name, more[0])
            elif kind == "rows":
                self.gap(node.name, more[0][-1][0])

    def mend(self) -> None:
        """Catch up from the table: the rows of a proven prefix, which are all there."""
        if self.behind:
            name, upto = self.random.choice(list(self.behind.items()))
            self.apply(name, sorted((id, key) for writer, id, key in self.rows if writer == name and id <= upto))
            self.delivered[name] = max(self.delivered[name], upto)
            del self.behind[name]
        if not self.behind:
            self.feed.mended()

    def call(self) -> None:
        """The oracle: what a call returned was not replaced, by a commit, longer ago than the bound."""
        key, before = self.random.randrange(KEYS), self.reads
        found = self.item(key)
        self.hits += self.reads == before
        if found < self.version[key]:
            age = self.now - self.changed[key][found]
            assert age <= self.bound + 1e-6, f"{age:.3f} s old: version {found} of {self.version[key]}"

    def begin_load(self) -> None:
        key = (self.random.randrange(KEYS),)
        self.loads.append((self.cache.begin(key, self.feed.number, self.now), self.version[key[0]]))

    def end_load(self) -> None:
        if self.loads:
            self.cache.end(*self.loads.pop(self.random.randrange(len(self.loads))))

    def step(self) -> None:
        random = self.random
        self.now += random.choice([0.0, 0.001, 0.01, 0.1, 0.3])
        if random.random() < 0.005:
            self.now += random.uniform(0, 20)  # everybody stood still, the reader for instance
        for node in self.nodes:
            self.hear(node)
        while self.answers and self.answers[0][0] <= self.now:  # late perhaps, but one after the other
            self.proof.looked(*self.answers.pop(0)[1:])
        action = random.random()
        if action < 0.5:
            random.choice(self.nodes).step()
        elif action < 0.6:
            self.mend()
        elif action < 0.7:
            newest = {node.name: 0 for node in self.nodes}
            newest |= {name: max(id for one, id, _ in self.rows if one == name) for name, _, _ in self.rows}
            self.answers.append((self.now + random.choice([0.0, 0.01, 1.0, 5.0]), self.now, newest))
        elif action < 0.75:
            self.begin_load()
        elif action < 0.8:
            self.end_load()
        elif action < 0.802:
            random.choice(self.nodes).crash()
        elif action < 0.803 and len(self.nodes) < 4:
            self.nodes.append(_Node(self, f"w{len(self.nodes)}"))
            self.delivered[self.nodes[-1].name] = 0
        as_of = self.proof.as_of(lambda writer: self.delivered.get(writer, 0), None)
        if as_of is not None:
            assert as_of <= self.now
            self.feed.prove(as_of)
        for _ in range(2):
            self.call()


@pytest.mark.parametrize("block", range(8))
def test_nothing_older_than_the_bound_is_ever_returned(block: int) -> None:
    hits = proofs = 0
    for seed in range(25 * block, 25 * block + 25):
        model = _Model(seed)
        try:
            for _ in range(800):
                model.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        hits += model.hits
        proofs += model.feed.proof > 1000
    assert hits > 5_000
    assert proofs > 15


def _as_of_the_answer(model: _Model) -> None:
    looked = model.proof.looked
    model.proof.looked = lambda asked, newest: looked(model.now, newest)  # type: ignore[method-assign]


def _without_its_rows(model: _Model) -> None:
    looked = model.proof.looked
    model.proof.looked = lambda asked, newest: looked(asked, {})  # type: ignore[method-assign]


@pytest.mark.parametrize("leave_out", [_as_of_the_answer, _without_its_rows], ids=lambda one: one.__name__)
def test_the_model_finds_what_is_left_out(leave_out: Any) -> None:
    with pytest.raises(AssertionError, match="s old: version"):
        for seed in range(200):
            model = _Model(seed)
            leave_out(model)
            for _ in range(800):
                model.step()
