"""Facts that get their IDs as they are written: which are told from those in doubt."""

from __future__ import annotations

from busrep.core.ids import IdGenerator
from busrep.runtime.late_ids import LateIds
from busrep.runtime.open_facts import InDoubt, OpenFacts
from tests.shop import Order, orders


class Late:
    """Such facts of a process that has written nothing yet."""

    def __init__(self) -> None:
        self.generator = IdGenerator("orders", position=0, highest=0)
        self.ids = LateIds({"orders": self.generator})

    def opened(self, *rows: Order, count: int = 1) -> OpenFacts:
        one = self.ids.asked(orders, self.generator.ask(count, now=0.0, owner=""), late=True)
        if rows:
            one.add_each(rows)
        return one


def test_9_28_facts_that_have_no_rows_yet_are_coming() -> None:
    """In threads: a moment later they may be written, and would be taken for those in doubt."""
    late = Late()
    assert not late.ids.are_coming([])
    doubt = InDoubt(None, [late.opened(Order(1, "a"))])
    assert not late.ids.are_coming([doubt])
    late.opened()
    assert late.ids.are_coming([doubt])


def test_9_28_facts_that_were_answered_are_found_again() -> None:
    """An interrupt came between the answer and the bookkeeping: their own IDs are promised to nobody else."""
    late = Late()
    one = late.opened(Order(1, "a"), Order(2, "b"), count=2)
    one.given([1, 2])
    assert late.ids.find(one, [("orders", 1), ("orders", 2)])
    assert one.ids == [1, 2]


def test_9_28_where_finished_ids_were_forgotten_nothing_is_found() -> None:
    """One of them would be taken for the fact in doubt, and its row published a second time."""
    late = Late()
    late.generator.most_runs = 1
    one = late.opened(Order(1, "in doubt"))
    for id in (2, 4, 6):
        ticket = late.generator.ask(now=0.0)
        late.generator.answer(ticket, [id])
        late.generator.complete_many([id])
    assert late.generator.thinned
    assert not late.ids.find(one, {("orders", id): [b"[1]"] for id in (1, 2, 4, 6)})
