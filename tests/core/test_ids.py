"""protocol.md section 5, cases G1 to G19; the rules of section 9 that concern IDs; a model that knows all."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import attrs
import pytest

from busrep.core.ids import IdGenerator, Noted, ReservedIds, Start, StuckFact, Ticket, plan_start
from busrep.errors import NotAWriter, PositionsAheadOfTable, SequenceWentBack, WriterFenced

FENCED = WriterFenced("w", 2)


def generator(writer: str | None = "w", **start: int) -> IdGenerator:
    """A generator of stream "s" that starts at these positions, nothing above them known."""
    return IdGenerator("s", writer, start=start, highest=max(start.values(), default=0))


def read_registry(ids: IdGenerator) -> None:
    """Read a registry that holds the writers known already."""
    ids.registry_read(ids.noted(), dict.fromkeys(ids.positions(), 0))


def take(ids: IdGenerator, *tokens: int) -> None:
    """Reserve exactly these IDs."""
    ids.answer(ids.ask(len(tokens), now=0.0), tokens)


def giving(*tokens: int) -> Callable[[int], Sequence[int]]:
    """A sequence that gives these IDs, in this order."""
    left = iter(tokens)
    return lambda count: list(itertools.islice(left, count))


# --- G cases: start positions, then lines of `process: step; step; ...`


class Processes:
    """The processes of one case by name; a name without a start position only watches. Steps are the methods."""

    def __init__(self, start: Mapping[str, int]) -> None:
        self.start = start
        self.generators: dict[str, IdGenerator] = {}
        self.tickets: dict[str, Ticket] = {}

    def of(self, name: str) -> IdGenerator:
        if name not in self.generators:
            self.generators[name] = generator(name if name in self.start else None, **self.start)
        return self.generators[name]

    def reserve(self, name: str, *tokens: str) -> None:
        take(self.of(name), *map(int, tokens))

    def ask(self, name: str) -> None:
        self.tickets[name] = self.of(name).ask(now=0.0)

    def answer(self, name: str, *tokens: str) -> None:
        self.of(name).answer(self.tickets[name], list(map(int, tokens)))

    def finish(self, name: str, *tokens: str) -> None:
        for token in tokens:
            self.of(name).complete(int(token))
        read_registry(self.of(name))

    def row(self, name: str, writer: str, *tokens: str) -> None:
        for token in tokens:
            self.of(name).row_seen(writer, int(token))
        read_registry(self.of(name))

    def announced(self, name: str, writer: str, position: str) -> None:
        self.of(name).announced(writer, int(position))
        read_registry(self.of(name))

    def follow(self, name: str) -> None:
        self.of(name).follow(self.of(name).followable())

    def at(self, name: str, position: str) -> None:
        assert self.of(name).position == int(position)

    def upto(self, name: str, position: str) -> None:
        assert self.of(name).persisted_upto == int(position)

    def sees(self, name: str, *positions: str) -> None:
        assert [f"{writer}={at}" for writer, at in sorted(self.of(name).positions().items())] == list(positions)

    def sees_at(self, name: str, writer: str, position: str) -> None:
        assert self.of(name).position_of(writer) == int(position)


FINISHED_IN_DISORDER = "finish 9; at 7; finish 8; at 9; finish 11; at 9; finish 10; at 11"
CASES: dict[str, tuple[dict[str, int], str]] = {
    "G2": ({"w": 7}, "w: at 7; reserve 8; at 7; finish 8; at 8"),
    "G3": ({"w": 7}, f"w: reserve 8; reserve 9; reserve 10; reserve 11; {FINISHED_IN_DISORDER}"),
    "G3-in-bulk": ({"w": 7}, f"w: reserve 8 9 10 11; {FINISHED_IN_DISORDER}"),
    "G4": (
        {"w": 1},
        """w: reserve 2; reserve 3; finish 3; at 1; finish 2; at 3
        w: reserve 4; reserve 5; reserve 6; finish 5; at 3; finish 4; at 5; finish 6; at 6""",
    ),
    "G5": ({"w": 7}, "w: reserve 8; reserve 9; finish 8; at 8; finish 9; at 9"),
    "G7": (
        {"w": 7},
        """w: reserve 8; reserve 9; finish 9
        second: sees_at w 7
        w: finish 8
        second: row w 9; sees_at w 9""",
    ),
    "G8": (
        {"first": 3, "second": 5},
        """x: upto 3; row first 6; upto 6; row second 7; upto 7; row second 9; upto 7; row first 8; upto 9
        x: row first 11; row second 15; upto 11; sees first=11 second=15""",
    ),
    "G9": (
        {"first": 11, "second": 15},
        "x: upto 11; announced second 9; row second 9; upto 11; sees first=11 second=15",
    ),
    "G10": (
        {"first": 0, "second": 0},
        """first: reserve 1 2 3; finish 1 2 3
        second: row first 1 2 3; reserve 4 5 6 7; finish 4 5 6 7; sees first=3 second=7; upto 7
        first: row second 4 5 6 7; sees first=3 second=7; upto 7
        first: reserve 8; sees first=3 second=7; upto 7; finish 8; sees first=8 second=7; upto 8
        second: row first 8; reserve 9; finish 9; sees first=8 second=9; upto 9""",
    ),
    "G11": (
        {"first": 3, "second": 7, "third": 7},
        """third: row second 4 5 6 7; sees first=3 second=7 third=7; upto 7
        third: reserve 8; sees first=3 second=7 third=7; upto 7; finish 8; sees first=3 second=7 third=8
        first: upto 7; sees_at first 7""",
    ),
    "G14": (
        {"w1": 10, "w2": 10},
        "w1: ask; row w2 12; upto 10; at 10; answer 11; finish 11; sees w1=11 w2=12; upto 12",
    ),
    "G15": (
        {"w1": 6, "w2": 9, "w3": 9},
        """w3: reserve 10; row w1 14; row w2 17; upto 9; follow; at 9
        w3: finish 10; upto 14; sees_at w3 14; follow; at 17""",
    ),
    "G19": (
        {"w": 7},
        """w: reserve 8; reserve 9; reserve 10; reserve 11; reserve 12; reserve 13
        w: finish 10; at 7; finish 9; at 7; finish 13 12 11; at 7; upto 7""",
    ),
}


@pytest.mark.parametrize(("start", "script"), CASES.values(), ids=CASES)
def test_case(start: Mapping[str, int], script: str) -> None:
    processes = Processes(start)
    for line in script.splitlines():
        name, _, steps = line.strip().partition(": ")
        for step in steps.split("; "):
            verb, *arguments = step.split()
            getattr(processes, verb)(name, *arguments)


# --- G cases of the start: what the store read, what it has to do


@attrs.frozen
class Plan:
    """One start; ``upto``: persisted_upto of the generator made of it."""

    name: str
    expected: Start
    upto: int
    rows: Mapping[str, int] = attrs.field(factory=dict)
    positions: Mapping[str, int] = attrs.field(factory=dict)
    sequence: int = 0
    writers: Sequence[str] = ()
    own: str | None = None
    negative: bool = False

    def start(self) -> Start:
        return plan_start(
            stream="s",
            rows=self.rows,
            positions=self.positions,
            sequence=self.sequence,
            writers=self.writers,
            own=self.own,
            negative=self.negative,
        )


ROWS_3_5 = {"first": 3, "second": 5}
ROWS_3_5_6 = {"first": 3, "second": 5, "third": 6}
NEGATIVE_ROWS = {"a": -1, "b": -10}
PLANS = [
    Plan("G1", Start({"w": 0}, 0, None, ()), 0, writers=["w"], own="w"),
    Plan("G1-told-to-start-at-100", Start({"w": 0}, 0, None, ()), 0, sequence=99, writers=["w"], own="w"),
    Plan("G1-nobody-writes", Start({}, 0, None, ()), 0),
    Plan("G2", Start({"w": 7}, 7, None, ()), 7, {"w": 7}, {"w": 0}, 7, ["w"], "w"),
    # The row 9 is visible, and 8 is still open: only the proven position counts for another process.
    Plan("G7-second-process", Start({"w": 7}, 9, None, ()), 7, {"w": 9}, {"w": 7}, 9, ["w"]),
    Plan("G12-first-second", Start(ROWS_3_5, 5, None, ()), 3, ROWS_3_5, ROWS_3_5, 5, ["first", "second"]),
    Plan(
        "G12-second",
        Start({"second": 5}, 5, None, ("first",)),
        5,
        ROWS_3_5,
        ROWS_3_5,
        5,
        ["second"],
        "second",
    ),
    Plan(
        "G12-third",
        Start({"third": 5}, 5, None, ("first", "second")),
        5,
        ROWS_3_5,
        ROWS_3_5,
        5,
        ["third"],
        "third",
    ),
    Plan(
        "G12-first-third",
        Start({"first": 6, "third": 6}, 6, None, ()),
        6,
        ROWS_3_5_6,
        {"third": 6},
        6,
        ["first", "third"],
        "first",
    ),
    Plan(
        "G12-first-third-seen-by-a-reader",
        Start({"first": 6, "third": 6}, 6, None, ()),
        6,
        ROWS_3_5_6,
        {"first": 6, "third": 6},
        6,
        ["first", "third"],
    ),
    Plan("G13", Start({"w": 26}, 26, 26, ()), 26, {"w": 26}, {"w": 3}, 3, ["w"], "w"),
    Plan("G17", Start({"w": 1}, 1, None, ()), 1, {"w": -1}, {"w": -1}, 1, ["w"], "w", True),
    Plan("G17-reload", Start({"w": 4}, 4, None, ()), 4, {"w": -4}, {"w": -1}, 4, ["w"], "w", True),
    Plan(
        "G18",
        Start({"a": 1, "b": 10}, 10, None, ()),
        1,
        NEGATIVE_ROWS,
        NEGATIVE_ROWS,
        10,
        ["a", "b"],
        "b",
        True,
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_start(plan: Plan) -> None:
    start = plan.start()
    assert start == plan.expected
    ids = IdGenerator("s", plan.own, start=start.positions, highest=start.highest, negative=plan.negative)
    assert ids.persisted_upto == plan.upto
    assert ids.highest == start.highest
    assert ids.positions() == start.positions


def test_start_g1_first_id_is_1_and_the_position_before_it_0() -> None:
    start = PLANS[0].start()
    ids = IdGenerator("s", "w", start=start.positions, highest=start.highest)
    with ids.reserve(giving(1)) as reserved:
        assert (list(reserved), ids.position) == ([1], 0)
    assert ids.position == 1


def test_start_g13_sequence_behind_the_rows_that_is_not_repaired_is_never_used() -> None:
    ids = IdGenerator("s", "w", start={"w": 26}, highest=26)
    with pytest.raises(SequenceWentBack), ids.reserve(giving(4)):
        pass
    take(ids, 27)


def test_start_g17_g18_negative_streams_count_down_outside() -> None:
    ids = IdGenerator("s", "w", start={"w": 1}, highest=1, negative=True)
    with ids.reserve(giving(2, 3, 4), 3) as reserved:
        assert [ids.table_id(token) for token in reserved] == [-2, -3, -4]
    assert (ids.position, ids.table_id(ids.position)) == (4, -4)
    assert generator().table_id(4) == 4


def test_start_refuses_positions_ahead_of_rows_and_sequence() -> None:
    with pytest.raises(PositionsAheadOfTable, match="busrep db restored") as caught:
        plan_start(stream="s", rows={"w": 5}, positions={"w": 9}, sequence=7, writers=["w"])
    assert (caught.value.stream, caught.value.position, caught.value.highest) == ("s", 9, 7)
    # IDs without rows: the sequence reaches them.
    assert plan_start(stream="s", rows={"w": 5}, positions={"w": 9}, sequence=9, writers=["w"]).highest == 9


def test_start_refuses_an_own_name_that_is_not_registered() -> None:
    with pytest.raises(NotAWriter):
        plan_start(stream="s", rows={}, positions={}, sequence=0, writers=["v"], own="w")


# --- G5, G6, G16, G19: the context managers, refusals, the report


def test_g5_a_failed_fact_completes_and_the_exception_propagates() -> None:
    ids = generator(w=7)

    def take_9_and_fail() -> None:
        take(ids, 9)
        raise KeyError

    with pytest.raises(KeyError), ids.reserve(giving(8)):
        take_9_and_fail()
    assert (ids.position, ids.open) == (8, 1)
    ids.complete(9)
    assert ids.position == 9


def test_g6_reserved_together_and_a_nested_one_finishes_first() -> None:
    ids = generator(w=7)
    next_ids = giving(8, 9, 10, 11)
    with ids.reserve(next_ids, 3) as outer:
        assert list(outer) == [8, 9, 10]
        with ids.reserve(next_ids) as inner:
            assert list(inner) == [11]
        assert (ids.position, ids.open) == (7, 3)
    assert (ids.position, ids.persisted_upto, ids.open) == (11, 11, 0)


def test_ids_of_one_bulk_may_complete_one_by_one() -> None:
    ids = generator(w=7)
    with ids.reserve(giving(12, 8, 9, 11), 4) as reserved:
        assert list(reserved) == [8, 9, 11, 12]
        ids.complete(8)
        ids.complete(12)
        assert (ids.position, ids.open) == (8, 2)
    assert (ids.position, ids.open, ids.persisted_upto) == (12, 0, 9)


@pytest.mark.parametrize("writer", [None, "stranger"], ids=["G16-no-writer", "G16-not-registered"])
def test_g16_reserving_where_one_does_not_write(writer: str | None) -> None:
    ids = generator(writer, w=7)
    with pytest.raises(NotAWriter) as caught, ids.reserve(giving(8)):
        pass
    assert (caught.value.stream, caught.value.writer) == ("s", writer)


def test_g19_a_fact_that_never_finishes_is_reported_and_costs_no_memory() -> None:
    ids = IdGenerator("s", "w", start={"w": 7, "v": 7}, highest=7, stuck_after=60.0, max_known_runs=50)
    ids.answer(ids.ask(2, now=100.0, owner="GET /slow"), [8, 9])
    unanswered = ids.ask(now=110.0, owner="asking")
    for token in range(11, 20_000, 2):  # those between are another writer's, never heard of
        ids.answer(ids.ask(now=120.0), [token])
        ids.complete(token)
    assert (ids.position, ids.persisted_upto, ids.open, ids.asked) == (7, 7, 2, 1)
    assert len(ids._barriers) == len(ids._keys) == 2
    assert len(ids._complete.starts) <= 50
    assert len(ids._late.starts) <= 50
    assert ids.stuck(159.9) == []
    stuck = [StuckFact("s", 8, 75.0, "GET /slow", 9), StuckFact("s", None, 65.0, "asking")]
    assert ids.stuck(175.0) == stuck
    assert ids.open_floor == 7
    ids.give_up(unanswered)
    ids.complete_many([8, 9])
    assert ids.position == 19_999
    assert ids.stuck(1e9) == []


# --- section 9: each test fails when its rule is left out


def concerns(number: str) -> pytest.MarkDecorator:
    """Puts the rule's number into the test's ID."""
    return pytest.mark.parametrize("number", [pytest.param(number, id=f"rule {number}")])


def commit_and_lose_the_connection(reserved: ReservedIds, known: bool = False) -> None:
    reserved.commit_sent()
    if known:
        reserved.outcome_known()
    raise ConnectionError


@concerns("9.1")
def test_an_exception_after_commit_was_sent_leaves_the_fact_open(number: str) -> None:
    ids = generator(w=7)
    with pytest.raises(ConnectionError), ids.reserve(giving(8, 9), 2) as reserved:
        commit_and_lose_the_connection(reserved)
    assert (ids.position, ids.persisted_upto, ids.open) == (7, 7, 2)
    ids.complete_many(reserved)  # the transaction is known to have ended
    assert (ids.position, ids.persisted_upto) == (9, 9)


@concerns("9.1")
def test_a_cancellation_after_commit_was_sent_leaves_the_fact_open(number: str) -> None:
    async def write(ids: IdGenerator, inside: asyncio.Event) -> None:
        async def next_ids(count: int) -> list[int]:
            return [8]

        async with ids.reserve_async(next_ids) as reserved:
            reserved.commit_sent()
            inside.set()
            await asyncio.Event().wait()

    async def main() -> None:
        ids, inside = generator(w=7), asyncio.Event()
        task = asyncio.create_task(write(ids, inside))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (ids.position, ids.open) == (7, 1)

    asyncio.run(main())


def test_a_commit_that_certainly_failed_completes_and_one_that_succeeded_too() -> None:
    ids = generator(w=7)
    with pytest.raises(ConnectionError), ids.reserve(giving(8)) as reserved:
        commit_and_lose_the_connection(reserved, known=True)
    assert ids.position == 8
    with ids.reserve(giving(9)) as reserved:
        reserved.commit_sent()
    assert ids.position == 9


@concerns("9.2")
def test_following_goes_to_what_was_noted_before_the_claim_was_read(number: str) -> None:
    ids = generator(w=7, v=7)
    ids.announced("v", 20)
    noted = ids.followable()
    assert (noted, ids.position) == (20, 7)  # not before the claim was read
    ids.announced("v", 30)
    ids.follow(noted)
    assert ids.position == 20


@concerns("9.2")
def test_following_never_passes_the_open_floor(number: str) -> None:
    ids = generator(w=7, v=7)
    ids.announced("v", 20)
    take(ids, 21)
    ids.announced("v", 25)
    noted = ids.followable()
    assert (noted, ids.open_floor) == (20, 20)
    ids.follow(25)
    assert ids.position == 20
    ticket = ids.ask(now=0.0)
    ids.complete(21)
    ids.announced("v", 30)
    assert ids.followable() == 25
    ids.follow(30)
    assert ids.position == 25
    ids.give_up(ticket)
    ids.follow(3)
    assert ids.position == 25


def test_whoever_wants_to_hears_where_the_own_position_moves() -> None:
    moved: list[int] = []
    ids = IdGenerator("s", "w", start={"w": 7}, highest=7, on_moved=moved.append)
    ticket = ids.ask(now=0.0)
    take(ids, 9)
    ids.complete(9)
    assert moved == [], "the answer may be 8"
    ids.give_up(ticket)
    assert moved == [9]
    take(ids, 10)
    ids.abandon([10])
    assert moved == [9]
    ids.follow(ids.followable())
    ids.follow(3)
    assert moved == [9, 10]


@concerns("9.2")
def test_an_abandoned_id_holds_nothing_up_and_moves_nothing(number: str) -> None:
    ids = generator(w=7, v=7)
    take(ids, 8, 9, 10)
    ids.abandon([9])
    ids.complete(8)
    assert (ids.position, ids.open) == (8, 1)
    ids.abandon([10])
    assert (ids.position, ids.persisted_upto, ids.open) == (8, 10, 0)
    ids.follow(ids.followable())  # the claim stands
    assert ids.position == 10
    take(ids, 11)
    take(ids, 12)
    ids.complete(12)
    ids.abandon([11])
    assert ids.position == 12, "a later fact of this process was begun: no successor was there before"
    with pytest.raises(KeyError), ids.reserve(giving(13)) as reserved:
        reserved.unclaimed = True
        raise KeyError
    assert (ids.position, ids.open) == (12, 0)
    take(ids, 14)
    ids.fenced(FENCED)
    ids.abandon([14])
    assert (ids.position, ids.open) == (12, 1)


@concerns("9.2")
def test_writer_fenced_completes_nothing_and_ends_everything(number: str) -> None:
    ids = generator(w=7, v=7)
    take(ids, 8)
    take(ids, 9)
    with pytest.raises(WriterFenced), ids.reserve(giving(10)):
        raise FENCED
    ids.complete(8)
    ids.complete_many([9, 10])
    ids.announced("v", 30)
    ids.follow(30)
    assert (ids.position, ids.open) == (7, 3)
    idle = generator(w=7, v=7)
    idle.fenced(FENCED)
    idle.announced("v", 30)
    idle.follow(30)
    assert idle.position == 7
    with pytest.raises(WriterFenced) as caught:
        ids.ask(now=0.0)
    assert (caught.value.writer, caught.value.incarnation) == ("w", 2)


@concerns("9.2")
def test_a_fenced_writer_counts_at_what_its_successor_announces(number: str) -> None:
    ids = generator(w=7, v=7)
    ids.fenced(FENCED)
    ids.fenced(FENCED)
    ids.announced("v", 30)
    read_registry(ids)
    assert ids.persisted_upto == 7  # the successor may hold 8
    ids.row_seen("w", 8)
    assert ids.persisted_upto == 8
    assert ids.positions() == {"w": 8, "v": 30}
    assert ids.position == 7


@concerns("9.3")
def test_rows_prove_no_position_of_another_writer(number: str) -> None:
    start = plan_start(stream="s", rows={"w": 9, "v": 12}, positions={"w": 7}, sequence=12, writers=["w", "v"])
    assert start.positions == {"w": 7, "v": 0}  # 8 may be open, and all of v's


@concerns("9.3")
def test_rows_prove_the_own_position_once_the_claim_is_won(number: str) -> None:
    read = {"rows": {"w": 9, "v": 12}, "positions": {"w": 7, "v": 11}, "sequence": 12, "writers": ["w", "v"]}
    assert plan_start(stream="s", own="w", **read).positions == {"w": 9, "v": 11}  # type: ignore[arg-type]
    assert plan_start(stream="s", **read).positions == {"w": 7, "v": 11}  # type: ignore[arg-type]


@concerns("9.7")
def test_no_reservation_before_registration(number: str) -> None:
    ids = generator("w", v=7)
    with pytest.raises(NotAWriter):
        ids.ask(now=0.0)
    ids.register("w", 7)
    take(ids, 8)


@concerns("9.7")
def test_persisted_upto_moves_only_over_positions_known_before_the_registry_was_read(number: str) -> None:
    ids = generator(None, w=7)
    noted = ids.noted()
    # The registry is read here, without v; then v registers and reserves 8, w writes 9.
    ids.announced("w", 9)
    assert ids.persisted_upto == 7
    ids.registry_read(noted, {"w": 7})
    assert ids.persisted_upto == 7
    ids.registry_read(ids.noted(), {"w": 7, "v": 7})
    assert ids.persisted_upto == 7
    ids.announced("v", 9)
    ids.registry_read(ids.noted(), {"w": 7, "v": 7})
    assert ids.persisted_upto == 9


@concerns("9.7")
def test_a_writer_counts_as_soon_as_it_is_read_in_the_registry(number: str) -> None:
    ids = generator(None, w=7)
    ids.registry_read(ids.noted(), {"w": 7, "v": 3})
    assert ids.positions() == {"w": 7, "v": 3}
    ids.announced("w", 9)
    ids.registry_read(ids.noted(), {"w": 7, "v": 3})
    assert ids.persisted_upto == 7  # as before: nothing moves back, and v holds it there


@concerns("9.7")
def test_a_registered_writer_counts_until_the_registry_is_without_it(number: str) -> None:
    ids = generator(None, w=7, v=5)
    ids.announced("w", 12)
    read_registry(ids)
    assert ids.persisted_upto == 5
    ids.registry_read(ids.noted(), {"w": 7})  # v was fenced and finished
    assert ids.persisted_upto == 12
    assert ids.positions() == {"w": 12}
    ids.leave("w")
    ids.leave("w")
    assert ids.positions() == {}
    assert ids.position_of("w") == 12


@concerns("9.7")
def test_with_nobody_registered_all_that_was_noted_is_complete(number: str) -> None:
    ids = generator(None, w=7)
    ids.announced("w", 9)
    noted = ids.noted()
    ids.announced("w", 12)
    ids.registry_read(noted, {})
    assert ids.persisted_upto == 9


@concerns("9.8")
def test_a_bare_position_says_nothing_of_single_ids(number: str) -> None:
    ids = generator(None, first=3, second=5)
    ids.announced("first", 4)
    ids.announced("second", 5)
    read_registry(ids)
    assert ids.persisted_upto == 4  # 5 may be open: `POSITION second 5 5` may be a follower's
    ids.row_seen("second", 5)
    assert ids.persisted_upto == 5


@concerns("9.8")
def test_own_completed_ids_and_row_tokens_extend_persisted_upto_at_once(number: str) -> None:
    ids = generator(w=7, v=7)
    take(ids, 8, 10)
    ids.rows_seen("v", [9, 11, 12, 14, 14])
    assert ids.persisted_upto == 7
    ids.complete(10)
    assert ids.persisted_upto == 7
    ids.complete(8)
    assert ids.persisted_upto == 12
    ids.rows_seen("v", [])
    ids.row_seen("v", 11)
    assert ids.persisted_upto == 12


@concerns("9.8")
def test_the_highest_id_comes_from_reservations_rows_and_announcements_never_from_the_sequence(
    number: str,
) -> None:
    assert plan_start(stream="s", rows={"w": 5}, positions={"w": 5}, sequence=40, writers=["w"]).highest == 5
    ids = generator(w=5, v=0)
    take(ids, 6)
    assert ids.highest == 6
    ids.row_seen("v", 8)
    assert ids.highest == 8
    ids.announced("v", 11)
    assert ids.highest == 11


def test_own_echoes_say_nothing() -> None:
    ids = generator(w=7)
    ids.row_seen("w", 20)
    ids.announced("w", 21)
    assert (ids.positions(), ids.highest, ids.persisted_upto) == ({"w": 7}, 7, 7)


WENT_BACK: list[tuple[str, list[int], int, int]] = [
    ("rule 9.15 at the known one", [12], 12, 12),
    ("rule 9.15 below", [9], 9, 12),
    ("rule 9.15 the lowest of several", [14, 11], 11, 12),
    ("rule 9.15 twice in one answer", [15, 15], 15, 15),
    ("rule 9.15 open here", [13], 13, 13),
    ("rule 9.15 a run over an open one", [13, 14, 15], 13, 15),
    ("rule 9.15 another writer's row since", [17], 17, 17),
]


@pytest.mark.parametrize(("ids_given", "got", "known"), [c[1:] for c in WENT_BACK], ids=[c[0] for c in WENT_BACK])
def test_an_id_that_is_not_new_is_never_used(ids_given: list[int], got: int, known: int) -> None:
    ids = generator(w=7, v=7)
    ids.announced("v", 12)
    ticket, other = ids.ask(len(ids_given), now=0.0), ids.ask(now=0.0)
    ids.answer(other, [13])
    ids.row_seen("v", 17)
    with pytest.raises(SequenceWentBack) as caught:
        ids.answer(ticket, ids_given)
    assert (caught.value.got, caught.value.known) == (got, known)
    assert (ids.open, ids.asked, ids.position) == (1, 0, 7)


@concerns("9.15")
def test_an_id_finished_here_since_is_never_used_again(number: str) -> None:
    ids = generator(w=7)
    ticket, other = ids.ask(now=0.0), ids.ask(now=0.0)
    ids.answer(other, [8])
    ids.complete(8)
    with pytest.raises(SequenceWentBack):
        ids.answer(ticket, [8])
    assert ids.position == 8


@concerns("9.15")
def test_a_lower_answer_than_one_known_since_is_used(number: str) -> None:
    ids = generator(w=7, v=7)
    ticket = ids.ask(now=0.0)
    ids.row_seen("v", 12)
    ids.answer(ticket, [8])
    assert ids.open == 1


@concerns("9.15")
def test_ids_reserved_ahead_are_open_until_used_or_given_up(number: str) -> None:
    ids = generator(w=7)
    take(ids, *range(8, 508))
    ids.complete(507)
    assert (ids.position, ids.open) == (7, 499)
    ids.complete(8)
    assert ids.position == 8
    ids.complete_many(range(9, 300))
    assert ids.position == 299
    ids.complete_many(range(8, 508))
    assert (ids.position, ids.open) == (507, 0)


# --- tickets


def test_an_unanswered_ticket_keeps_the_position_back() -> None:
    ids = generator(w=7)
    ticket = ids.ask(now=0.0)
    for token in (9, 10):
        take(ids, token)
        ids.complete(token)
    ids.complete(9)
    assert (ids.position, ids.open_floor, ids.asked) == (7, 7, 1)
    ids.give_up(ticket)
    ids.give_up(ticket)
    assert (ids.position, ids.open_floor, ids.asked) == (10, 10, 0)
    with pytest.raises(ValueError, match="given up"):
        ids.answer(ticket, [11])


def test_an_answer_between_finished_ids_finds_the_position_below_it() -> None:
    ids = generator(w=10)
    late = ids.ask(now=0.0)
    for token in (11, 13, 15):
        take(ids, token)
        ids.complete(token)
    assert ids.position == 10
    ids.answer(late, [14])
    assert ids.position == 13
    ids.complete(14)
    assert ids.position == 15
    late = ids.ask(now=0.0)
    take(ids, 18)
    ids.complete(18)
    ids.answer(late, [17])
    assert ids.position == 15
    ids.complete(17)
    assert ids.position == 18


def test_tickets_of_different_times_fall_in_any_order() -> None:
    ids = generator(w=10)
    first = ids.ask(now=0.0)
    take(ids, 12)
    second = ids.ask(now=0.0)
    take(ids, 14)
    ids.complete_many([12, 14])
    ids.give_up(first)
    assert ids.position == 12
    ids.answer(second, [13])
    assert ids.position == 12
    ids.complete(13)
    assert ids.position == 14


def test_a_bulk_over_another_tickets_mark_is_split_there() -> None:
    # Only a foreign writer can announce a position inside what this one was given.
    ids = generator(w=8, v=8)
    early = ids.ask(4, now=0.0)
    ids.announced("v", 10)
    late = ids.ask(now=0.0)
    ids.answer(early, [9, 10, 11, 12])
    ids.complete_many([9, 10, 11, 12])
    assert ids.position == 10
    ids.answer(late, [13])
    assert ids.position == 12
    ids.complete(13)
    assert ids.position == 13


@pytest.mark.parametrize("given", [[], [8], [8, 9, 10]], ids=len)
def test_an_answer_of_the_wrong_length_is_refused_whole(given: list[int]) -> None:
    ids = generator(w=7)
    with pytest.raises(ValueError, match="asked for 2"):
        ids.answer(ids.ask(2, now=0.0), given)
    assert (ids.open, ids.asked) == (0, 0)


def test_wrong_calls() -> None:
    ids = generator(w=7)
    with pytest.raises(ValueError, match="at least 1"):
        ids.ask(0, now=0.0)
    take(ids, 8)
    with pytest.raises(ValueError, match="never reserved"):
        ids.complete(9)
    with pytest.raises(ValueError, match="never reserved"):
        ids.complete_many([8, 9])
    assert ids.open == 1
    ids.complete_many([])
    ids.complete(8)
    ids.complete(8)
    ids.complete(5)
    assert (ids.position, ids.open) == (8, 0)
    watching = generator(None, w=7)
    watching.fenced(FENCED)
    assert watching.position == 0


# --- context managers: failures and cancellation while asking


def test_a_sequence_that_fails_leaves_nothing_asked() -> None:
    def next_ids(count: int) -> Sequence[int]:
        raise ConnectionError

    ids = generator(w=7)
    with pytest.raises(ConnectionError), ids.reserve(next_ids):
        pass
    assert ids.asked == 0


def test_async_reserves_and_completes() -> None:
    async def main() -> None:
        ids = generator(w=7)

        async def next_ids(count: int) -> Sequence[int]:
            assert ids.asked == 1
            return range(ids.highest + 1, ids.highest + 1 + count)

        async with ids.reserve_async(next_ids, 3, clock=lambda: 5.0, owner="me") as reserved:
            assert list(reserved) == [8, 9, 10]
            assert ids.stuck(100.0) == [StuckFact("s", 8, 95.0, "me", 10)]
        assert ids.position == 10
        with pytest.raises(KeyError):
            async with ids.reserve_async(next_ids):
                raise KeyError
        assert ids.position == 11

    asyncio.run(main())


class FakeSequence:
    """Answers when told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()

    async def next_ids(self, count: int) -> Sequence[int]:
        self.asked.set()
        return await self.answer


async def cancelled_while_asking(ids: IdGenerator, sequence: FakeSequence) -> None:
    async def write() -> None:
        async with ids.reserve_async(sequence.next_ids):
            raise AssertionError("never entered")

    task = asyncio.create_task(write())
    await sequence.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def settled(ids: IdGenerator) -> None:
    if ids._asking:
        await asyncio.wait(ids._asking)


def answered(sequence: FakeSequence) -> None:
    sequence.answer.set_result([9])


def failed(sequence: FakeSequence) -> None:
    sequence.answer.set_exception(ConnectionError())


def went_back(sequence: FakeSequence) -> None:
    sequence.answer.set_result([3])


def lost(sequence: FakeSequence) -> None:
    sequence.answer.cancel()


@pytest.mark.parametrize(("outcome", "upto"), [(answered, 9), (failed, 8), (went_back, 8), (lost, 8)])
def test_cancelled_while_asking_the_question_keeps_the_position_back_until_its_outcome(
    outcome: Callable[[FakeSequence], None], upto: int
) -> None:
    async def main() -> None:
        ids, sequence = generator(w=7), FakeSequence()
        await cancelled_while_asking(ids, sequence)
        take(ids, 8)
        ids.complete(8)
        assert (ids.position, ids.asked) == (7, 1)
        outcome(sequence)
        await settled(ids)
        # Nobody has looked at the claim since the ID was given: the position does not move to it (9.2).
        assert (ids.position, ids.persisted_upto, ids.open) == (8, upto, 0)
        assert not ids._asking

    asyncio.run(main())


def test_cancelled_when_the_answer_was_there_already_its_id_is_abandoned() -> None:
    async def main() -> None:
        ids, sequence = generator(w=7), FakeSequence()

        async def write() -> None:
            async with ids.reserve_async(sequence.next_ids):
                raise AssertionError("never entered")

        task = asyncio.create_task(write())
        await sequence.asked.wait()
        sequence.answer.set_result([8])
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(ids)
        assert (ids.position, ids.persisted_upto, ids.open) == (7, 8, 0)

    asyncio.run(main())


def test_cancelled_inside_completes() -> None:
    async def main() -> None:
        ids, inside = generator(w=7), asyncio.Event()

        async def next_ids(count: int) -> Sequence[int]:
            return [8]

        async def write() -> None:
            async with ids.reserve_async(next_ids):
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(write())
        await inside.wait()
        assert ids.position == 7
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (ids.position, ids.open) == (8, 0)

    asyncio.run(main())


def test_an_async_sequence_that_fails_leaves_nothing_asked() -> None:
    async def failing(count: int) -> Sequence[int]:
        raise ConnectionError

    async def stopping(count: int) -> Sequence[int]:
        raise asyncio.CancelledError

    async def main() -> None:
        ids = generator(w=7)
        with pytest.raises(ConnectionError):
            async with ids.reserve_async(failing):
                pass
        with pytest.raises(asyncio.CancelledError):
            async with ids.reserve_async(stopping):
                pass
        with pytest.raises(TypeError):
            async with ids.reserve_async(giving(8)):  # type: ignore[arg-type]
                pass
        with pytest.raises(SequenceWentBack):
            async with ids.reserve_async(FakeBack.next_ids):
                pass
        assert (ids.asked, ids.open) == (0, 0)

    asyncio.run(main())


class FakeBack:
    @staticmethod
    async def next_ids(count: int) -> Sequence[int]:
        return [7]


# --- the model: an oracle that knows each ID of each writer

WRITERS = ("a", "b", "c")
FEW = 4  # runs remembered by c: forgetting is part of the model
STEPS = 400


@attrs.define
class Process:
    """One live process, and what the oracle knows of it that nobody else does."""

    ids: IdGenerator
    exact: bool
    followed: int
    heard: dict[str, int]  # how far it heard each writer
    tickets: list[tuple[Ticket, list[int]]] = attrs.field(factory=list)  # with what the sequence has given
    open: set[int] = attrs.field(factory=set)
    finished: set[int] = attrs.field(factory=set)
    noting: tuple[Noted, int] | None = None
    registry: dict[str, int] | None = None
    last: tuple[int, int] = (0, 0)


class Model:
    """Writers come, write, die, return and leave; news is late, partial or lost; reading a registry takes time."""

    def __init__(self, seed: int, reached: Counter[str]) -> None:
        self.random, self.reached = random.Random(seed), reached
        self.rows = {token: self.random.choice(WRITERS) for token in range(1, self.random.randint(1, 6))}
        self.sequence = len(self.rows)
        self.stored: dict[str, int] = {}  # the positions table, and the registry
        self.open: dict[int, str] = {}  # allocated and neither finished nor dead: ID -> writer
        self.writers: dict[str, Process] = {}
        self.reader = self.process(None)
        self.starts()

    def process(self, name: str | None) -> Process:
        rows: dict[str, int] = {}
        for token, writer in self.rows.items():
            rows[writer] = max(rows.get(writer, 0), token)
        writers = self.stored.keys() | ({name} if name else set())
        start = plan_start(
            stream="s", rows=rows, positions=self.stored, sequence=self.sequence, writers=writers, own=name
        )
        assert start.repair_sequence_to is None
        if name is not None:
            self.stored[name] = start.positions[name]
        limit = FEW if name == "c" else 10_000
        ids = IdGenerator("s", name, start=start.positions, highest=start.highest, max_known_runs=limit)
        return Process(ids, name != "c", ids.position, dict(start.positions))

    def processes(self) -> list[Process]:
        return [*self.writers.values(), self.reader]

    def writer(self) -> tuple[str, Process]:
        return self.random.choice(list(self.writers.items()))

    def starts(self) -> None:
        """Claim a name: a predecessor's open facts have ended, committed or not; its reservations are lost."""
        name = self.random.choice(WRITERS)
        dead = self.writers.pop(name, None)
        if dead is not None:
            self.reached["restart with open facts"] += bool(dead.open)
            self.rows.update({token: name for token in dead.open if self.random.random() < 0.5})
        self.open = {token: writer for token, writer in self.open.items() if writer != name}
        self.writers[name] = self.process(name)

    def leaves(self) -> None:
        """Fenced and finished: what was open aborts."""
        if len(self.writers) > 1 and self.random.random() < 0.5:
            name, _ = self.writer()
            self.open = {token: writer for token, writer in self.open.items() if writer != name}
            del self.writers[name], self.stored[name]

    def asks(self) -> None:
        _, process = self.writer()
        if len(process.tickets) < 5:
            process.tickets.append((process.ids.ask(self.random.choice([1, 1, 2, 3]), now=0.0), []))

    def sequence_gives(self) -> None:
        waiting = [(name, *entry) for name, p in self.writers.items() for entry in p.tickets if not entry[1]]
        if waiting:
            name, ticket, given = self.random.choice(waiting)
            given.extend(range(self.sequence + 1, self.sequence + ticket.count + 1))
            self.sequence += ticket.count
            self.open.update(dict.fromkeys(given, name))

    def answer_comes(self) -> None:
        waiting = [(p, entry) for p in self.writers.values() for entry in p.tickets if entry[1]]
        if waiting:
            process, entry = self.random.choice(waiting)
            process.tickets.remove(entry)
            self.reached["answer below a finished ID"] += any(token > entry[1][0] for token in process.finished)
            process.ids.answer(*entry)
            process.open.update(entry[1])

    def gives_up(self) -> None:
        _, process = self.writer()
        if process.tickets and self.random.random() < 0.3:
            entry = self.random.choice(process.tickets)
            process.tickets.remove(entry)
            process.ids.give_up(entry[0])
            for token in entry[1]:
                del self.open[token]

    def finishes(self) -> None:
        name, process = self.writer()
        if process.open:
            chosen = set(self.random.sample(sorted(process.open), self.random.randint(1, len(process.open))))
            self.reached["finished above an open ID"] += min(process.open) not in chosen
            committed = self.random.random() < 0.7
            for token in chosen:
                del self.open[token]
                if committed:
                    self.rows[token] = name
            process.open -= chosen
            process.finished |= chosen
            if self.random.random() < 0.5:
                process.ids.complete_many(chosen)
            else:
                for token in chosen:
                    process.ids.complete(token)

    def publishes(self) -> None:
        """Some process hears a writer: its rows in order, or (they were lost) only its position."""
        name, process = self.writer()
        listener = self.random.choice([other for other in self.processes() if other is not process])
        position, after = process.ids.position, listener.heard.get(name, 0)
        tokens = sorted(token for token, of in self.rows.items() if of == name and after < token <= position)
        before = listener.ids.persisted_upto
        if tokens and self.random.random() < 0.7:
            listener.ids.rows_seen(name, tokens)
        if not tokens or tokens[-1] < position or self.random.random() < 0.5:
            listener.ids.announced(name, position)
        listener.heard[name] = max(position, after)
        self.reached["rows moved persisted_upto"] += listener.ids.persisted_upto > before

    def stores_its_position(self) -> None:
        name, process = self.writer()
        self.stored[name] = max(self.stored[name], process.ids.position)

    def notes(self) -> None:
        process = self.random.choice(self.processes())
        process.noting, process.registry = (process.ids.noted(), process.ids.followable()), None

    def reads_the_registry(self) -> None:
        noting = [process for process in self.processes() if process.noting is not None]
        if noting:
            self.random.choice(noting).registry = dict(self.stored)

    def takes_the_registry_in(self) -> None:
        reading = [process for process in self.processes() if process.registry is not None]
        if reading:
            process = self.random.choice(reading)
            assert process.noting is not None
            assert process.registry is not None
            before = process.ids.persisted_upto
            process.ids.registry_read(process.noting[0], process.registry)
            self.reached["the minimum moved persisted_upto"] += process.ids.persisted_upto > before
            if process is not self.reader and self.random.random() < 0.8:
                goal = min(process.noting[1], self.floor(process))
                self.reached["followed"] += goal > process.ids.position
                process.followed = max(process.followed, goal)
                process.ids.follow(process.noting[1])
            process.noting = process.registry = None

    def floor(self, process: Process) -> int:
        """Brute force: the largest ID below all that the process has open or asked for."""
        unfinished = [*process.open, *(ticket.known + 1 for ticket, _ in process.tickets)]
        return min(unfinished, default=process.ids.highest + 1) - 1

    def check(self) -> None:
        for name, process in self.writers.items():
            ids, floor = process.ids, self.floor(process)
            exact = max([token for token in process.finished if token <= floor] + [process.followed])
            assert ids.open_floor == floor
            assert ids.position == exact if process.exact else ids.position <= exact
            assert all(ids.position < token for token, of in self.open.items() if of == name)
            assert ids.open == len(process.open)
            assert len(ids._keys) == len(ids._barriers) <= len(process.open) + len(process.tickets)
            assert ids._keys == sorted(set(ids._keys))
            assert process.exact or max(len(ids._late.starts), len(ids._complete.starts)) <= FEW
            assert process.tickets or not ids._late.starts
        for process in self.processes():
            assert process.ids.persisted_upto <= self.sequence
            assert all(process.ids.persisted_upto < token for token in self.open)
            for writer, position in process.ids.positions().items():
                assert position <= self.sequence
                assert all(position < token for token, of in self.open.items() if of == writer)
            now = (process.ids.position, process.ids.persisted_upto)
            assert now[0] >= process.last[0]
            assert now[1] >= process.last[1]
            process.last = now

    def ends(self) -> None:
        """All facts end and all news arrives: then everybody knows that everything is complete."""
        for process in self.writers.values():
            for ticket, _ in process.tickets:
                process.ids.give_up(ticket)
            process.ids.complete_many(process.open)
        for _ in range(2):  # first the highest ID comes round, then the positions
            for name, process in self.writers.items():
                process.ids.follow(process.ids.followable())
                for listener in self.processes():
                    listener.ids.announced(name, process.ids.position)
        top = max(process.ids.highest for process in self.writers.values())
        for process in self.processes():
            process.ids.registry_read(process.ids.noted(), self.stored)
            assert process.ids.persisted_upto >= top
            assert process.ids.open == process.ids.asked == 0

    WEIGHTS: ClassVar[dict[Callable[[Model], None], int]] = {
        starts: 2,
        leaves: 1,
        asks: 12,
        sequence_gives: 20,
        answer_comes: 20,
        gives_up: 2,
        finishes: 20,
        publishes: 20,
        stores_its_position: 6,
        notes: 14,
        reads_the_registry: 16,
        takes_the_registry_in: 16,
    }

    def run(self) -> None:
        for step in self.random.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()), k=STEPS):
            step(self)
            self.check()
        self.ends()


def test_model() -> None:
    reached: Counter[str] = Counter()
    for seed in range(5000, 5080):  # with these each of the rules 9.2, 9.3, 9.7, 9.8 left out is noticed here too
        try:
            Model(seed, reached).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    # A model that never gets where it hurts proves nothing.
    assert len(reached) == 6
    assert min(reached.values()) > 50, reached
