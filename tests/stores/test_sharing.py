"""What facts share, when the task that serves them is cancelled: nobody waits for ever, and nobody is told wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from busrep.errors import CommitUnknown, StatementRefused, Unavailable
from busrep.stores import sharing
from busrep.stores.interface import Appended, Claim, Group
from busrep.stores.sharing import Appends, Outcomes, Reservations

CLAIM = Claim("w1", 1, "e", {}, {}, {})
LAST = Appended({"last": ()})
Batch = Sequence[Appended]

WHEN = pytest.mark.parametrize("when", ["under way", "not begun"])


def names_of(batch: Batch) -> list[str]:
    return [name for appended in batch for name in appended.facts]


async def cancelled_slowly() -> None:
    """As psycopg does, which waits for the answer to its request to cancel."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0)
        raise


async def cancel_all() -> None:
    """As an application at its end does."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others)


@WHEN
def test_whoever_appends_next_is_served(when: str) -> None:
    async def write(_claim: Claim, _group: Group, batch: Batch) -> None:
        if LAST not in batch:
            await cancelled_slowly()

    async def main() -> None:
        appends = Appends(write)
        first = asyncio.create_task(appends.append(CLAIM, Appended({})))
        for _ in range(1 if when == "not begun" else 3):
            await asyncio.sleep(0)
        await cancel_all()
        with pytest.raises(asyncio.CancelledError if when == "not begun" else CommitUnknown):
            await first
        await asyncio.wait_for(appends.append(CLAIM, LAST), 30)

    asyncio.run(main())


@WHEN
def test_whoever_reserves_next_is_served(when: str) -> None:
    async def ask(_stream: str, count: int, _held: Claim | None) -> list[int]:
        if count == 1:
            await cancelled_slowly()
        return [1, 2]

    async def main() -> None:
        reservations = Reservations(ask)
        first = asyncio.create_task(reservations.reserve("orders", 1, CLAIM))
        for _ in range(1 if when == "not begun" else 3):
            await asyncio.sleep(0)
        await cancel_all()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await asyncio.wait_for(reservations.reserve("orders", 2, CLAIM), 30) == [1, 2]

    asyncio.run(main())


@pytest.mark.parametrize("alone", [True, False])
def test_whoever_waits_when_the_task_alone_is_cancelled_is_told(alone: bool) -> None:
    """Those whose rows were sent do not know what became of them; those that wait are sent with the next."""
    sent: list[Sequence[str]] = []

    async def write(_claim: Claim, _group: Group, batch: Batch) -> None:
        sent.append(names_of(batch))
        if "first" in names_of(batch):
            await cancelled_slowly()

    async def main() -> None:
        appends = Appends(write)
        callers = [asyncio.create_task(appends.append(CLAIM, Appended({"first": ()})))]
        while not sent:
            await asyncio.sleep(0)
        if not alone:
            callers.append(asyncio.create_task(appends.append(CLAIM, Appended({"second": ()}))))
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task(), *callers}:
            task.cancel()
        ended = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 30)
        assert isinstance(ended[0], CommitUnknown)
        assert ended[1:] == ([] if alone else [None])
        assert sent == [["first"], *([] if alone else [["second"]])]

    asyncio.run(main())


def test_a_caller_who_gives_up_while_it_waits_is_not_sent() -> None:
    sent: list[Sequence[str]] = []
    go_on = asyncio.Event()

    async def write(_claim: Claim, group: Group, batch: Batch) -> None:
        assert group.under_way
        sent.append(names_of(batch))
        await go_on.wait()

    async def main() -> None:
        appends = Appends(write)
        names = ("first", "second", "third")
        items = {name: Appended({name: ()}) for name in names}
        callers = {name: asyncio.create_task(appends.append(CLAIM, items[name])) for name in names[:1]}
        while not sent:
            await asyncio.sleep(0)
        callers |= {name: asyncio.create_task(appends.append(CLAIM, items[name])) for name in names[1:]}
        await asyncio.sleep(0)
        callers["first"].cancel()
        callers["second"].cancel()
        with pytest.raises(CommitUnknown) as unknown:
            await callers["first"]
        with pytest.raises(asyncio.CancelledError):
            await callers["second"]
        group = items["first"].group
        assert group is not None
        assert unknown.value.marker is group
        assert group.under_way
        go_on.set()
        await asyncio.wait_for(callers["third"], 30)
        assert sent == [["first"], ["third"]]
        assert not group.under_way

    asyncio.run(main())


def test_of_a_refused_group_the_one_at_fault_is_found_by_halves() -> None:
    sent: list[int] = []

    async def write(_claim: Claim, _group: Group, batch: Batch) -> None:
        sent.append(len(batch))
        if "bad" in names_of(batch):
            raise StatementRefused("the table", ValueError("bad"))

    async def main() -> None:
        appends = Appends(write)
        names = [*map(str, range(63)), "bad"]
        asked = [asyncio.create_task(appends.append(CLAIM, Appended({name: ()}))) for name in names]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert [name for name, one in zip(names, ended, strict=True) if one is not None] == ["bad"]
        assert len(sent) == 1 + 2 * 6

    asyncio.run(main())


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_what_the_server_did_not_say_is_no_refusal(names: list[str]) -> None:
    """A signal handler raises while the answer is waited for. Sent once more, the rows would be there already."""
    sent: list[Sequence[str]] = []

    async def write(_claim: Claim, _group: Group, batch: Batch) -> None:
        sent.append(names_of(batch))
        raise ValueError("it has been too long")

    async def main() -> None:
        appends, items = Appends(write), [Appended({name: ()}) for name in names]
        ended = await asyncio.gather(*(appends.append(CLAIM, one) for one in items), return_exceptions=True)
        assert [type(one) for one in ended] == [CommitUnknown] * len(names)
        assert sent == [names]
        assert [one.group is not None and one.group.settled for one in items] == [False] * len(names)

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="since Python 3.12")
def test_tasks_that_begin_at_once() -> None:
    async def ask(_stream: str, _count: int, _held: Claim | None) -> list[int]:
        return [1]

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        reservations = Reservations(ask)
        for _ in range(3):
            assert await asyncio.wait_for(reservations.reserve("orders", 1, CLAIM), 30) == [1]

    asyncio.run(main())


def test_whoever_was_not_sent_yet_when_the_task_was_cancelled_is_told() -> None:
    """While a group is halved."""

    async def write(_claim: Claim, _group: Group, batch: Batch) -> None:
        if len(batch) > 1:
            raise StatementRefused("the table", ValueError("bad"))
        sent.set()
        await asyncio.Event().wait()

    sent = asyncio.Event()

    async def main() -> None:
        appends = Appends(write)
        callers = [asyncio.create_task(appends.append(CLAIM, Appended({name: ()}))) for name in ("a", "b")]
        await sent.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task(), *callers}:
            task.cancel()
        ended = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 30)
        assert [type(one) for one in ended] == [CommitUnknown, Unavailable]

    asyncio.run(main())


def test_a_late_answer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link may stand with nobody at its other end. Beside so many as may be late the others wait."""
    monkeypatch.setattr(sharing, "LATE", 0.01)
    sent: list[Batch] = []
    healed = asyncio.Event()

    async def write(_claim: Claim, _group: Group, batch: Batch) -> None:
        sent.append(batch)
        if LAST not in batch:
            await healed.wait()

    async def main() -> None:
        appends = Appends(write)
        late: list[asyncio.Task[None]] = []
        for count in range(1, sharing.MOST_LATE):
            late.append(asyncio.create_task(appends.append(CLAIM, Appended({}))))
            while len(sent) < count:
                await asyncio.sleep(0)
            await asyncio.wait_for(appends.append(CLAIM, LAST), 30)
            sent.remove([LAST])
        late.append(asyncio.create_task(appends.append(CLAIM, Appended({}))))
        while len(sent) < sharing.MOST_LATE:
            await asyncio.sleep(0)
        last = asyncio.create_task(appends.append(CLAIM, LAST))
        await asyncio.wait([last], timeout=20 * sharing.LATE)
        assert not last.done()
        healed.set()
        await asyncio.wait_for(asyncio.gather(last, *late), 30)
        assert sent[-1] == [LAST]
        # When all have answered there is one at a time again.
        sent.clear()
        healed.clear()
        monkeypatch.setattr(sharing, "LATE", 600.0)
        waiting = [asyncio.create_task(appends.append(CLAIM, Appended({}))) for _ in range(9)]
        while not sent:
            await asyncio.sleep(0)
        waiting += [asyncio.create_task(appends.append(CLAIM, Appended({}))) for _ in range(9)]
        await asyncio.sleep(0)
        healed.set()
        await asyncio.wait_for(asyncio.gather(*waiting), 30)
        assert [len(batch) for batch in sent] == [9, 9]

    asyncio.run(main())


class Interrupt(BaseException):
    """A signal handler's."""


def test_whoever_was_interrupted_before_it_waited_is_in_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told that nothing was written, so nothing may be written later."""
    sent: list[Sequence[str]] = []

    async def write(_claim: Claim, _group: Group, batch: Batch) -> None:
        sent.append(names_of(batch))

    async def main() -> None:
        appends, loop = Appends(write), asyncio.get_running_loop()
        create = loop.create_task

        def interrupted(*arguments: Any, **options: Any) -> Any:
            create(*arguments, **options)
            monkeypatch.undo()
            raise Interrupt

        first = appends.append(CLAIM, Appended({"first": ()}))
        monkeypatch.setattr(loop, "create_task", interrupted)
        with pytest.raises(Interrupt):
            await first
        await asyncio.wait_for(appends.append(CLAIM, LAST), 30)
        assert sent == [["last"]]

    asyncio.run(main())


def test_of_a_group_that_was_written_all_are_told_though_the_telling_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Answer(asyncio.Future[Any]):
        def set_result(self, result: Any) -> None:
            if self is made[1]:
                raise ValueError("it has been too long")
            super().set_result(result)

    def answer() -> Answer:
        made.append(Answer())
        return made[-1]

    async def write(_claim: Claim, _group: Group, _batch: Batch) -> None: ...

    made: list[Answer] = []

    async def main() -> None:
        appends, items = Appends(write), [Appended({name: ()}) for name in ("a", "b", "c")]
        monkeypatch.setattr(asyncio.get_running_loop(), "create_future", answer)
        asked = [asyncio.create_task(appends.append(CLAIM, one)) for one in items]
        await asyncio.sleep(0)
        monkeypatch.undo()
        ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
        assert [type(one) for one in ended] == [type(None), CommitUnknown, CommitUnknown]
        assert not any(one.group is None or one.group.under_way for one in items)

    asyncio.run(main())


def test_of_a_refused_question_all_are_told_though_one_of_them_is_cancelled() -> None:
    """One transaction that the server does not know has each asked after alone."""

    async def ask(_claim: Claim, asked: Sequence[tuple[object, Any]]) -> Any:
        if len(asked) > 1:
            raise StatementRefused("the table", ValueError("in the future"))
        alone.set()
        await asyncio.Event().wait()

    alone = asyncio.Event()

    async def main() -> None:
        outcomes = Outcomes(ask)
        callers = [asyncio.create_task(outcomes.outcome(CLAIM, str(at), [("orders", at)])) for at in range(3)]
        await alone.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task(), *callers}:
            task.cancel()
        ended = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 30)
        assert [type(one) for one in ended] == [Unavailable] * 3

    asyncio.run(main())
