"""The life of a fact: wherever it fails, it is booked, or in doubt until the table has told. No loop, no thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from busrep.errors import (
    BusrepError,
    CommitUnknown,
    ConfigError,
    NotAWriter,
    SequenceWentBack,
    Unavailable,
    WriterFenced,
)
from busrep.runtime.config import WriterConfig
from busrep.runtime.contents import FactState
from busrep.runtime.fact import SETTLE_FIRST, SETTLE_SLOWEST, FactBase, ReenteredError, next_look, settle
from busrep.runtime.open_facts import InDoubt, OpenFacts
from busrep.runtime.session import WriterSession
from busrep.settings import Settings
from busrep.stores.interface import Appended, Claim, Group
from busrep.stores.plans import complete
from busrep.streams import Registry
from tests.shop import Order, orders, typing

CLAIM = Claim("w", 1, "e" * 32, starts={"orders": 0}, known={"orders": {}}, highest={"orders": 0})
AWAY, FENCED = Unavailable("the database", OSError("away")), WriterFenced("w", 1)
UNKNOWN = CommitUnknown("mark", OSError("no answer"))


class Log:
    """A store that gives IDs, and a transaction whose steps fail as the test says."""

    exclusive = False
    claimed = True

    def __init__(
        self, fails: dict[str, BaseException], *, known: bool = True, joined: bool = False, reserves: bool = False
    ) -> None:
        self.fails, self.known, self.joined, self.reserves = fails, known, joined or reserves, reserves
        self.marker: object = None
        self.connection = None
        self.last = 0
        self.steps: list[str] = []
        self.found: dict[tuple[str, int], list[bytes]] | None = {}

    def step(self, name: str) -> None:
        self.steps.append(name)
        if error := self.fails.pop(name, None):
            raise error

    async def reserve(self, stream: str, count: int, held: Claim | None = None) -> list[int]:
        self.step("reserve")
        self.last += count
        return list(range(self.last - count + 1, self.last + 1))

    def transaction(self, claim: Claim, connection: Any = None) -> Log:
        self.step("transaction")
        return self

    async def append(self, claim: Claim, appended: Appended) -> None:
        appended.group = Group()
        self.step("append")

    async def begin(self, ids: Mapping[str, int] = {}) -> Mapping[str, Sequence[int]]:
        self.step("begin")
        self.marker = f"mark {len(self.steps)}"
        found = {}
        for stream, count in ids.items():
            self.last += count
            found[stream] = range(self.last - count + 1, self.last + 1)
        return found

    async def insert(self, stream: str, facts: Sequence[Any]) -> None:
        self.step("insert")

    async def commit(self) -> None:
        self.step("commit")

    async def rollback(self) -> bool:
        self.step("rollback")
        return self.known

    async def outcome(
        self, claim: Claim, marker: object, facts: Any, above: Any
    ) -> dict[tuple[str, int], list[bytes]] | None:
        self.step("outcome")
        return self.found


class Life(FactBase[Order]):
    """A fact that notes what it asks of its runtime. ``appended``: its block runs no statement, and it has no
    transaction; else it begins one at once, on a connection of the caller's."""

    def __init__(self, session: WriterSession, *, interrupts: bool = True, appended: bool = False) -> None:
        super().__init__(None, (orders,), None if appended else "the caller's")
        self.session, self.interrupts = session, interrupts
        self.told: list[str] = []
        self.reentered = False

    def run(self) -> None:
        """Its life, as `bus.write()` does it."""
        self._begin_once()
        complete(self._begin(self.session))
        self._state = FactState.OPEN
        self.add(Order(1, "new"))
        self._state = FactState.ENDED
        complete(self._end(self.session, None))

    def _guarded(self, session: WriterSession, step: Callable[[], object]) -> None:
        if self.reentered:
            raise ReenteredError
        step()

    def _leaves_doubt(self, error: BaseException) -> bool:
        return super()._leaves_doubt(error) or (self.interrupts and not isinstance(error, BusrepError))

    async def _live(self) -> WriterSession:
        raise NotImplementedError

    async def _look_at_claim(self, session: WriterSession, error: SequenceWentBack) -> None:
        raise NotImplementedError

    def _fence(self, session: WriterSession, error: WriterFenced) -> None:
        session.fence(error)

    def _publish(self) -> None:
        self.told.append("published")

    def _doubted(self, doubt: InDoubt) -> None:
        self.told.append("in doubt")


def session_on(log: Log) -> WriterSession:
    store: Any = log
    streams = Registry([orders, typing])
    session = WriterSession(WriterConfig("w", "shop", streams, Settings(), store), CLAIM, 1)
    session.core.connected(0.0)
    return session


def published(session: WriterSession) -> list[str]:
    lines: list[str] = []
    while frames := session.core.frames_to_publish():
        for frame in frames:
            lines += [line for line in frame.data.decode().split("\n") if line.startswith("RDATA orders")]
            session.core.published(frame)
    return lines


def test_a_fact_is_booked_and_published() -> None:
    log = Log({})
    session = session_on(log)
    fact = Life(session)
    fact.run()
    assert log.steps == ["transaction", "reserve", "begin", "insert", "commit"]
    assert fact.told == ["published"]
    assert (session.generators["orders"].position, session.generators["orders"].open) == (1, 0)
    assert (session.facts, session.rows, session.doubts) == (1, 1, [])
    assert len(published(session)) == 1


BOOKED, IN_DOUBT, NOTHING = "booked", "in doubt", "nothing"

FAULTS = [
    # where it fails, how, whether the rollback knows what was committed, joined, what the fact is then
    ("transaction", AWAY, True, False, BOOKED),
    ("reserve", AWAY, True, False, NOTHING),
    ("reserve", KeyboardInterrupt(), True, False, NOTHING),
    ("begin", AWAY, True, False, BOOKED),
    ("begin", KeyboardInterrupt(), True, False, BOOKED),
    ("insert", AWAY, True, False, BOOKED),
    ("insert", KeyboardInterrupt(), True, False, BOOKED),
    ("insert", AWAY, False, False, IN_DOUBT),
    ("insert", AWAY, True, True, IN_DOUBT),
    ("commit", AWAY, True, False, BOOKED),
    ("commit", AWAY, False, False, IN_DOUBT),
    ("commit", UNKNOWN, True, False, IN_DOUBT),
    ("commit", KeyboardInterrupt(), True, False, IN_DOUBT),
    ("commit", ValueError("of a notice handler of the application's"), True, False, IN_DOUBT),
]


@pytest.mark.parametrize(("where", "error", "known", "joined", "then"), FAULTS)
def test_9_1_wherever_it_fails_it_is_booked_or_in_doubt(
    where: str, error: BaseException, known: bool, joined: bool, then: str
) -> None:
    log = Log({where: error}, known=known, joined=joined)
    session = session_on(log)
    fact = Life(session)
    with pytest.raises(type(error)):
        fact.run()
    ids = session.generators["orders"]
    assert ids.asked == 0
    if then == IN_DOUBT:
        assert (fact.told, len(session.doubts), ids.open, ids.position) == (["in doubt"], 1, 1, 0)
        assert session.doubts[0].opened[0].written(), "the rows are known as long as the table may have them"
    else:
        assert (session.doubts, ids.open) == ([], 0)
        # Where it did not begin nobody has looked at the claim since the ID was given (9.2).
        assert ids.position == (1 if where in ("insert", "commit") else 0)
    assert published(session) == []
    assert session.facts == 0


@pytest.mark.parametrize(
    ("where", "error", "then"),
    [
        ("reserve", AWAY, NOTHING),
        ("append", AWAY, BOOKED),
        ("append", UNKNOWN, IN_DOUBT),
        ("append", KeyboardInterrupt(), IN_DOUBT),
    ],
)
def test_9_26_wherever_it_fails_it_is_booked_or_in_doubt(where: str, error: BaseException, then: str) -> None:
    log = Log({where: error})
    session = session_on(log)
    fact = Life(session, appended=True)
    with pytest.raises(type(error)):
        fact.run()
    ids = session.generators["orders"]
    assert (ids.asked, ids.position, session.facts, published(session)) == (0, 0, 0, [])
    if then == IN_DOUBT:
        assert (fact.told, len(session.doubts), ids.open) == (["in doubt"], 1, 1)
        marker = session.doubts[0].marker
        assert isinstance(marker, Group)
    else:
        assert (session.doubts, ids.open) == ([], 0)


def test_9_26_a_fact_without_a_statement_is_appended() -> None:
    log = Log({})
    session = session_on(log)
    fact = Life(session, appended=True)
    fact.run()
    assert log.steps == ["reserve", "append"]
    assert fact.told == ["published"]
    assert (session.generators["orders"].position, session.generators["orders"].open) == (1, 0)
    assert len(published(session)) == 1


def test_without_interrupts_what_is_no_doubt_of_busrep_s_is_a_refusal() -> None:
    log = Log({"commit": ValueError("a deferred constraint")})
    session = session_on(log)
    with pytest.raises(ValueError, match="constraint"):
        Life(session, interrupts=False).run()
    assert log.steps[-1] == "rollback"
    assert (session.doubts, session.generators["orders"].position) == ([], 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AWAY])
def test_9_1_a_rollback_that_is_interrupted_leaves_a_doubt(error: BaseException) -> None:
    log = Log({"insert": AWAY, "rollback": error})
    session = session_on(log)
    fact = Life(session)
    with pytest.raises(type(error)):
        fact.run()
    assert (fact.told, len(session.doubts), session.generators["orders"].open) == (["in doubt"], 1, 1)


def test_9_1_a_fact_that_ends_in_the_middle_of_bookkeeping_is_in_doubt() -> None:
    session = session_on(Log({}))
    fact = Life(session)
    commit = fact._commit

    async def committed_by_the_garbage_collector(session: WriterSession) -> None:
        fact.reentered = True
        await commit(session)

    fact._commit = committed_by_the_garbage_collector  # type: ignore[method-assign]
    fact.run()
    assert (fact.told, len(session.doubts), published(session)) == (["in doubt"], 1, [])


def test_rows_that_the_application_inserts_come_last() -> None:
    """Rows and payloads are inserted by their places in the fact."""
    facts = OpenFacts(orders, [7])
    facts.add(Order(1, "a"), insert=True)
    facts.add(Order(2, "b"), insert=False)
    with pytest.raises(ConfigError, match="insert=False come last"):
        facts.add(Order(3, "c"), insert=True)
    assert facts.to_insert() == [(7, [Order(1, "a")], [b'[1,"a"]'])]
    assert facts.written() == [b'[1,"a"]', b'[2,"b"]']


def test_a_joined_fact_waits_for_its_caller() -> None:
    session = session_on(Log({}, joined=True))
    fact = Life(session)
    fact.run()
    assert (fact.told, len(session.doubts), session.generators["orders"].position) == (["in doubt"], 1, 0)


def test_facts_in_doubt_are_asked_after_ever_more_rarely_while_none_has_ended() -> None:
    pauses: list[float | None] = [None]
    for before, left in ((0, 2), (2, 2), (2, 2), (2, 1), (1, 1), *[(1, 1)] * 9, (1, 0)):
        pauses.append(next_look(pauses[-1], before, left))
    assert pauses[1:6] == [SETTLE_FIRST, 2 * SETTLE_FIRST, 4 * SETTLE_FIRST, SETTLE_FIRST, 2 * SETTLE_FIRST]
    assert pauses[-2:] == [SETTLE_SLOWEST, None]


@pytest.mark.parametrize(
    ("found", "position", "rows"),
    [(None, 0, 0), ({}, 1, 0), ({("orders", 1): [b'[1,"new"]']}, 1, 1)],
    ids=["open", "aborted", "landed"],
)
def test_9_1_the_table_decides(found: Any, position: int, rows: int) -> None:
    log = Log({"commit": UNKNOWN})
    session = session_on(log)
    with pytest.raises(CommitUnknown):
        Life(session).run()
    log.found = found
    ended = complete(settle(session, list(session.doubts), lambda step: step()))
    assert ended == (found is not None)
    assert session.generators["orders"].position == position
    assert len(published(session)) == session.rows == rows
    assert bool(session.doubts) == (found is None)


def test_9_1_what_is_interrupted_while_the_outcome_is_booked_is_asked_after_again() -> None:
    """Its invalidations are applied first: whatever raises there, the fact stays in doubt."""
    log = Log({"commit": UNKNOWN})
    session = session_on(log)
    with pytest.raises(CommitUnknown):
        Life(session).run()
    log.found = {("orders", 1): [b'[1,"new"]']}
    steps = iter([None, KeyboardInterrupt()])

    def interrupted(step: Callable[[], object]) -> None:
        if error := next(steps, None):
            raise error
        step()

    with pytest.raises(KeyboardInterrupt):
        complete(settle(session, list(session.doubts), interrupted))
    assert len(session.doubts) == 1
    assert complete(settle(session, list(session.doubts), interrupted))
    assert (session.doubts, len(published(session))) == ([], 1)


def test_9_1_an_outcome_that_is_booked_half_way_tears_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing asks after its facts again."""

    def failing(*_: Any) -> None:
        raise ValueError("twice")

    log = Log({"commit": UNKNOWN})
    session = session_on(log)
    with pytest.raises(CommitUnknown):
        Life(session).run()
    log.found = {("orders", 1): [b'[1,"new"]']}
    monkeypatch.setattr(session.core, "fact_completed", failing)
    with pytest.raises(ValueError, match="twice"):
        complete(settle(session, list(session.doubts), lambda step: step()))
    assert session.ended


def test_9_2_a_fenced_begin_fences_the_session_and_completes_nothing() -> None:
    session = session_on(Log({"begin": FENCED}))
    with pytest.raises(WriterFenced):
        Life(session).run()
    assert session.ended
    assert (session.generators["orders"].position, session.doubts) == (0, [])


def test_9_15_ids_that_were_given_before_are_not_used() -> None:
    log = Log({})
    session = session_on(log)
    Life(session).run()
    log.last = 0
    with pytest.raises(SequenceWentBack):
        Life(session).run()
    assert (session.generators["orders"].asked, session.generators["orders"].open) == (0, 0)


def test_a_stream_that_is_not_written_here() -> None:
    session = session_on(Log({}))
    del session.generators["orders"]
    with pytest.raises(NotAWriter):
        Life(session).run()


# -- IDs that a server gives in the caller's transaction


def ended(session: WriterSession, number: int = 0) -> bool:
    """Ask what became of one transaction in doubt."""
    return complete(settle(session, [session.doubts[number]], lambda step: step()))


def test_9_22_a_joined_fact_s_ids_come_with_its_claim() -> None:
    log = Log({}, reserves=True)
    session, ids = session_on(log), None
    Life(session).run()
    ids = session.generators["orders"]
    assert log.steps == ["transaction", "begin", "insert", "commit"]
    assert (ids.open, ids.highest, ids.position, session.unfinished) == (1, 0, 0, True)
    log.found = {("orders", 1): [b'[1,"new"]']}
    assert ended(session)
    assert (ids.position, ids.highest, len(published(session)), session.unfinished) == (1, 1, 1, False)


def test_9_22_rolled_back_they_are_no_position_before_they_are_on_the_disk() -> None:
    """A crash would take them back, and this writer would be given one that readers have passed."""
    log = Log({}, reserves=True)
    session = session_on(log)
    Life(session).run()
    log.found = {}
    assert ended(session)
    ids = session.generators["orders"]
    assert (ids.position, ids.open, ids.follows_to, session.unfinished) == (0, 0, 1, False)
    assert session.beat_begins().noted == {"orders": 1}
    log.last = 0  # it has crashed
    Life(session).run()
    log.found = {("orders", 1): [b'[1,"new"]']}
    assert ended(session)
    assert (ids.position, len(published(session))) == (1, 1)


@pytest.mark.parametrize("how", ["joined", "reserved"])
def test_9_22_an_id_that_is_given_again_shows_that_its_fact_was_rolled_back(how: str) -> None:
    """Before the database was asked what became of it."""
    log = Log({}, reserves=True)
    session = session_on(log)
    Life(session).run()
    log.last = 0  # it has crashed
    log.found = {("orders", 1): [b'[1,"new"]']}
    if how == "joined":
        Life(session).run()
        assert session.generators["orders"].open == 1
        assert ended(session, 1)
    else:
        log.reserves = log.joined = False
        Life(session).run()
    assert len(published(session)) == session.rows == 1
    assert ended(session)
    assert (session.doubts, published(session), session.rows) == ([], [], 1)
    assert session.generators["orders"].position == 1


def test_9_28_facts_in_doubt_get_no_id_of_a_joined_fact_that_is_not_told_yet() -> None:
    """Its rows may be in the table by now; or it was rolled back, the server has crashed, and the ID is theirs."""
    log = Log({}, reserves=True)
    session = session_on(log)
    Life(session).run()
    late = session.late_ids.asked(orders, session.generators["orders"].ask(now=0.0), late=True)
    late.add_each([Order(1, "new")])
    found = {("orders", 1): [b'[1,"new"]']}
    doubt = InDoubt(Group(), [late])
    assert session.late_ids.may_be_others([doubt], found)
    assert not session.late_ids.may_be_others([doubt], {("orders", 2): [b"[1]"]})
    log.found = {}
    assert ended(session)
    assert not session.late_ids.may_be_others([doubt], found)
    assert session.late_ids.find(late, found)
    assert late.ids == [1]


def test_9_22_rows_of_another_fact_under_its_id_are_not_a_joined_fact_s() -> None:
    """After a crash both its ID and the server's number of its transaction were given again, and that one is committed:
    the row is of a fact whose answer was lost."""
    log = Log({}, reserves=True)
    session = session_on(log)
    Life(session).run()
    late = session.late_ids.asked(orders, session.generators["orders"].ask(now=0.0), late=True)
    late.add_each([Order(2, "other")])
    group = Group()
    group.settled = True
    session.doubts.append(InDoubt(group, [late], sent=True))
    log.found = {("orders", 1): [b'[2,"other"]']}
    assert ended(session)
    assert ended(session)
    assert (late.ids, session.rows, session.doubts, session.torn) == ([1], 1, [], False)
    assert [line.rpartition(" ")[2] for line in published(session)] == ['[2,"other"]']


def test_9_22_an_answer_that_is_taken_in_late_voids_nobody() -> None:
    """A thread was stopped with it, the server has crashed, and another thread was given the ID again."""
    log = Log({}, reserves=True)
    session = session_on(log)
    stopped = session.late_ids.asked(orders, session.generators["orders"].ask(now=0.0), late=False)
    Life(session).run()
    with pytest.raises(SequenceWentBack):
        session.late_ids.lent(stopped, [1])
    session.late_ids.redeem(stopped)
    log.found = {("orders", 1): [b'[1,"new"]']}
    assert ended(session)
    assert (session.rows, len(published(session))) == (1, 1)


def test_9_22_who_has_lost_its_id_is_told_as_it_adds_a_row() -> None:
    log = Log({}, reserves=True)
    session = session_on(log)
    fact = Life(session)
    fact._begin_once()
    complete(fact._begin(session))
    fact._state = FactState.OPEN
    log.last = 0  # it has crashed
    Life(session).run()
    for add in (lambda: fact.add(Order(1, "new")), lambda: fact.add_each([Order(1, "new")])):
        with pytest.raises(Unavailable, match="its ID was given again"):
            add()
