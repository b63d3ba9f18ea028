"""What every store must do. test_stores.py runs this class over each of them; the names carry the rules' numbers."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import attrs
import pytest

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.snapshots import Agreement, AppliedParts, PartRange
from busrep.errors import (
    ClaimBlocked,
    ConfigError,
    PositionsAheadOfTable,
    PositionTooOld,
    ReaderMoved,
    SchemaError,
    SequenceWentBack,
    SnapshotGone,
    Unavailable,
    UnknownStream,
    WriterFenced,
)
from busrep.stores import AsyncStore, Claim, CommitUnknown, open_store
from busrep.stores.interface import MIXED, Appended, Group, Unnumbered
from busrep.stores.schema import VERSION
from busrep.streams import Registry, Stream, Table

# Long enough for a loaded machine; nothing here takes a second unless it fails.
PATIENCE = 30.0
SHORT = 0.2


@attrs.frozen
class Order:
    customer: str
    amount: float
    paid: bool
    tags: list[str]
    note: str | None = None


OWN_TABLES = [
    "CREATE TABLE shop_orders (fact_id bigint, by_writer text, n int, customer text, amount double precision, "
    "paid boolean, tags {json}, note text, PRIMARY KEY (fact_id, n))",
    "CREATE TABLE history (id bigint PRIMARY KEY, writer text, what text)",
]


def streams() -> Registry:
    return Registry(
        [
            Stream("orders"),
            Stream("payments"),
            Stream("typing", resettable=True),
            Stream("own", Order, table=Table("shop_orders", id="fact_id", writer="by_writer", index="n")),
            Stream("backfill", negative=True, table=Table("history", columns=("what",))),
        ]
    )


def generic() -> Registry:
    return Registry([Stream("orders"), Stream("payments"), Stream("typing", resettable=True)])


def sync(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """An async test as pytest runs it."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(3 * PATIENCE):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


def row(*fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


async def write(store: AsyncStore, claim: Claim, *sizes: int, stream: str = "orders", commit: bool = True) -> list[int]:
    """One transaction with facts of these numbers of rows; row k of fact i is [i, k]."""
    transaction = store.transaction(claim)
    ids = await store.reserve(stream, len(sizes))
    await transaction.begin()
    facts = [
        (token, [[token, k] for k in range(size)], [row(token, k) for k in range(size)])
        for token, size in zip(ids, sizes, strict=True)
    ]
    await transaction.insert(stream, facts)
    await (transaction.commit() if commit else transaction.rollback())
    return ids


async def read(
    store: AsyncStore, writer: str, after: int, upto: int, *, limit: int = 1000, stream: str = "orders"
) -> list[tuple[int, bytes]]:
    """All pages."""
    rows: list[tuple[int, bytes]] = []
    while True:
        page = await store.fetch(FetchUpdates(stream, writer, after, upto, limit))
        rows += zip(page.tokens, page.payloads, strict=True)
        if not page.limited:
            return rows
        assert page.upto > after
        after = page.upto


async def page(store: AsyncStore, after: int, upto: int, limit: int = 1000, writer: str = "w1") -> UpdatesPage:
    return await store.fetch(FetchUpdates("orders", writer, after, upto, limit))


class StoreConformance:
    """Subclasses say how to make a store, in `url`."""

    commits_at_once = False  # a commit that nothing can interrupt
    has_clock = False  # of a server, that all processes see

    def server_time(self) -> float:
        """What that clock shows."""
        return time.time()

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    def set_sequence(self, url: str, stream: str, value: int) -> None:
        """Put the sequence of a stream to ``value``, whatever it is at."""
        raise NotImplementedError

    def make(self, url: str, registry: Registry | None = None) -> AsyncStore:
        return open_store(url, registry or generic())

    @asynccontextmanager
    async def opened(self, url: str, registry: Registry | None = None) -> AsyncIterator[AsyncStore]:
        store = self.make(url, registry)
        await store.init()
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    # --- schema

    @sync
    async def test_no_tables_is_a_schema_error(self, url: str) -> None:
        store = self.make(url)
        with pytest.raises(SchemaError) as caught:
            await store.open()
        assert caught.value.found is None
        await store.close()

    @sync
    async def test_init_is_idempotent_and_may_race(self, url: str) -> None:
        await asyncio.gather(*(self.make(url).init() for _ in range(4)))
        async with self.opened(url) as store:
            epoch = await store.epoch()
            await store.init()
            assert await store.epoch() == epoch
            assert len(epoch) == 32
            assert set(epoch) <= set("0123456789abcdef")

    @sync
    async def test_streams_must_be_known_and_kept_in_the_store(self, url: str) -> None:
        async with self.opened(url) as store:
            with pytest.raises(UnknownStream):
                await store.reserve("nonsense", 1)
            with pytest.raises(ConfigError, match="resettable"):
                await store.claim("w1", ["typing"], timeout=1)

    @sync
    async def test_a_stream_added_later_needs_init(self, url: str) -> None:
        async with self.opened(url):
            pass
        store = self.make(url, Registry([Stream("new")]))
        await store.open()
        with pytest.raises(ConfigError, match="db init"):
            await store.claim("w1", ["new"], timeout=1)
        with pytest.raises(
            ConfigError, match="'new' has no sequence yet: run 'busrep db init --store .* --stream new'"
        ):
            await store.reserve("new", 1)
        await store.close()

    # --- facts

    @sync
    async def test_G1_first_id_is_1_and_the_position_before_it_0(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders", "payments"], timeout=1)
            assert claim.starts == {"orders": 0, "payments": 0}
            assert claim.highest == {"orders": 0, "payments": 0}
            assert await store.reserve("orders", 1) == [1]
            assert await store.reserve("payments", 2) == [1, 2]

    @sync
    async def test_racing_reservations_never_share_an_id(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            asked = [s.reserve("orders", n) for n in (1, 3, 2) for s in (store, other) for _ in range(5)]
            answers = await asyncio.gather(*asked)
            assert sorted(i for ids in answers for i in ids) == list(range(1, 61))
            assert all(ids == sorted(ids) for ids in answers)

    @sync
    async def test_a_cancelled_reservation_disturbs_nobody(self, url: str) -> None:
        async with self.opened(url) as store:
            tasks = [asyncio.create_task(store.reserve("orders", 1)) for _ in range(4)]
            await asyncio.sleep(0)
            tasks[0].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            got = [ids for ids in answers if not isinstance(ids, BaseException)]
            assert len({ids[0] for ids in got}) == len(got) >= 3

    @sync
    async def test_racing_writers_and_rollbacks_leave_exactly_what_was_committed(self, url: str) -> None:
        dice = random.Random(5)
        async with self.opened(url) as store, self.opened(url) as other:
            kept: dict[str, list[tuple[int, bytes]]] = {}

            async def work(writer: str, own: AsyncStore, plan: list[tuple[int, bool]]) -> None:
                claim = await own.claim(writer, ["orders"], timeout=PATIENCE)
                for size, commit in plan:
                    for token in await write(own, claim, size, commit=commit):
                        if commit:
                            kept.setdefault(writer, []).extend((token, row(token, k)) for k in range(size))

            plans = [[(dice.randint(0, 3), dice.random() < 0.7) for _ in range(10)] for _ in range(4)]
            await asyncio.gather(*(work(f"w{i}", (store, other)[i % 2], plan) for i, plan in enumerate(plans)))
            for writer, rows in kept.items():
                assert await read(store, writer, 0, 1000, limit=3) == rows

    @sync
    async def test_uncommitted_rows_are_not_seen_and_reads_do_not_wait_for_them(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            ids = await store.reserve("orders", 1)
            await transaction.begin()
            await transaction.insert("orders", [(ids[0], [[1]], [row(1)])])
            assert await read(store, "w1", 0, 9) == []
            assert (await store.known())[0].position == 0
            await store.check_claim(claim)
            await transaction.commit()
            assert await read(store, "w1", 0, 9) == [(1, row(1))]

    @sync
    async def test_a_large_fact_and_many_facts_in_one_transaction(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            ids = await write(store, claim, *([1] * 3000), 2500)
            rows = await read(store, "w1", 0, ids[-1])
            assert [token for token, _ in rows] == [*ids[:-1], *([ids[-1]] * 2500)]
            assert rows[-1][1] == row(ids[-1], 2499)

    @sync
    async def test_payloads_come_back_byte_for_byte(self, url: str) -> None:
        odd = [
            b'"%s ? \\n \\u0000 \\\\ \' \\u00e4"',
            b"null",
            b"[]",
            b'{"a":[1,2.5,null]}',
            b"17",
            b'"' + b"x" * 70_000 + b'"',
        ]
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            for facts in ([(n, [None], [payload]) for n, payload in enumerate(odd, 1)], [(100, odd, odd)]):
                transaction = store.transaction(claim)
                await transaction.begin()
                await transaction.insert("orders", facts)
                await transaction.commit()
            assert [payload for _, payload in await read(store, "w1", 0, 99)] == odd
            assert [payload for _, payload in await read(store, "w1", 99, 100)] == odd
            left = await store.outcome(claim, None, [("orders", 100), ("orders", 1), ("orders", 55)])
            assert left == {("orders", 100): odd, ("orders", 1): odd[:1]}

    # --- 9.1

    @sync
    async def test_9_1_outcome_open_committed_and_rolled_back(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            for commit in (True, False):
                transaction = store.transaction(claim)
                (token,) = await store.reserve("orders", 1)
                await transaction.begin()
                await transaction.insert("orders", [(token, [[1]], [row(1)])])
                assert await store.outcome(claim, transaction.marker, [("orders", token)]) is None
                await (transaction.commit() if commit else transaction.rollback())
                left = await store.outcome(claim, transaction.marker, [("orders", token)])
                assert left == ({("orders", token): [row(1)]} if commit else {})

    @sync
    async def test_9_1_a_cancelled_commit_is_unknown_until_the_table_decides(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            (token,) = await store.reserve("orders", 1)
            await transaction.begin()
            await transaction.insert("orders", [(token, [[1]], [row(1)])])
            task = asyncio.create_task(transaction.commit())
            await asyncio.sleep(0)
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if not self.commits_at_once:
                assert isinstance(outcome, CommitUnknown)  # not CancelledError: COMMIT was on its way
                assert outcome.cancelled
                assert outcome.marker is transaction.marker
                assert outcome.marker is not None
            left = None
            while left is None:
                await asyncio.sleep(0.001)
                left = await store.outcome(claim, transaction.marker, [("orders", token)])
            # Whatever it was, it is final: the name can be claimed, so the transaction has ended.
            again = await store.claim("w1", ["orders"], timeout=PATIENCE)
            assert await store.outcome(again, transaction.marker, [("orders", token)]) == left
            with pytest.raises(WriterFenced):  # the rows may be of a log that was restored since: nothing to publish
                await store.outcome(claim, transaction.marker, [("orders", token)])

    # --- claims: 9.2, 9.3, 9.4, 9.5, 9.7

    @sync
    async def test_9_2_and_9_4_a_fenced_writer_is_told_everywhere(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            old = await store.claim("w1", ["orders"], timeout=1)
            await store.check_claim(old)
            await store.reserve("orders", 3)
            await store.heartbeat(old, {"orders": 3})
            new = await other.claim("w1", ["orders"], timeout=1)
            assert new.incarnation > old.incarnation
            for call in (store.check_claim(old), store.heartbeat(old, {"orders": 9}), store.transaction(old).begin()):
                with pytest.raises(WriterFenced):
                    await call
            assert [w.position for w in await store.known()] == [3]
            await other.check_claim(new)
            await write(other, new, 1)

    @sync
    async def test_9_4_a_claim_waits_for_the_predecessors_transaction_and_starts_behind_it(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            old = await store.claim("w1", ["orders"], timeout=1)
            zombie = store.transaction(old)
            (token,) = await store.reserve("orders", 1)
            await zombie.begin()
            await zombie.insert("orders", [(token, [[1]], [row(1)])])
            claiming = asyncio.create_task(other.claim("w1", ["orders"], timeout=PATIENCE))
            await asyncio.wait([claiming], timeout=SHORT)
            assert not claiming.done(), "a successor must not start before its predecessor's transaction ended"
            await zombie.commit()
            assert (await claiming).starts["orders"] == token

    @sync
    async def test_9_4_a_claim_that_waits_too_long_names_the_blocker(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            old = await store.claim("w1", ["orders"], timeout=1)
            zombie = store.transaction(old)
            await zombie.begin()
            with pytest.raises(ClaimBlocked) as caught:
                await other.claim("w1", ["orders"], timeout=SHORT)
            assert caught.value.writer == "w1"
            assert caught.value.blockers
            with pytest.raises(ClaimBlocked):
                await other.finish("w1", old.incarnation, timeout=SHORT)
            await zombie.rollback()
            await store.check_claim(old)  # who gave up waiting has left nothing
            assert (await other.claim("w1", ["orders"], timeout=1)).incarnation > old.incarnation

    @sync
    async def test_9_3_rows_prove_a_position_only_for_the_own_name(self, url: str) -> None:
        async with self.opened(url) as store:
            first = await store.claim("w1", ["orders"], timeout=1)
            await write(store, first, 1, 1, 1)
            second = await store.claim("w2", ["orders"], timeout=1)
            # Rows 1 to 3 are there, but nothing proves that w1 has no smaller ID open. w2 itself has nothing open.
            assert second.known["orders"] == {"w1": 0, "w2": 3}
            assert second.starts == {"orders": 3}
            assert second.highest == {"orders": 3}
            await store.heartbeat(first, {"orders": 2})
            third = await store.claim("w3", ["orders"], timeout=1)
            assert third.known["orders"] == {"w1": 2, "w2": 3, "w3": 3}
            await write(store, third, 1)
            again = await store.claim("w1", ["orders"], timeout=1)
            assert again.starts == {"orders": 3}  # its own rows; row 4 is another's
            assert again.highest == {"orders": 4}

    @sync
    async def test_9_3_ids_without_rows_are_kept_in_the_positions_table(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders", "payments"], timeout=1)
            await write(store, claim, 1, 0, 0)
            await store.heartbeat(claim, {"orders": 3})
            await store.heartbeat(claim, {"orders": 2})  # late: nothing moves back
            await store.heartbeat(claim, {"orders": 2, "payments": 0})
            again = await store.claim("w1", ["orders", "payments"], timeout=1)
            assert again.starts == {"orders": 3, "payments": 0}
            assert again.highest == {"orders": 3, "payments": 0}

    @sync
    async def test_9_26_rows_are_appended_while_the_claim_stands(self, url: str) -> None:
        """All or none. Once its outcome was asked for, none that was not written comes any more."""
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders", "payments"], timeout=1)
            ids, others = await store.reserve("orders", 3), await store.reserve("payments", 1)
            appended = Appended(
                {
                    "orders": [(ids[0], [[1]], [row(1)]), (ids[2], [[2], [3]], [row(2), row(3)])],
                    "payments": [(others[0], [[4]], [row(4)])],
                }
            )
            await store.append(claim, appended)
            assert [token for token, _ in await read(store, "w1", 0, 3)] == [ids[0], ids[2], ids[2]]
            asked = [("orders", ids[0]), ("orders", ids[1]), ("payments", others[0])]
            found = await store.outcome(claim, appended.group, asked)
            assert found == {("orders", ids[0]): [row(1)], ("payments", others[0]): [row(4)]}
            late = Appended({"orders": [(ids[1], [[5]], [row(5)])]})
            assert await store.outcome(claim, Group(), asked[1:2]) == {}  # of one that got no answer
            await store.append(claim, late)  # which is at the series that has begun
            (last,) = await store.reserve("orders", 1)
            gone = Appended({"orders": [(last, [[6]], [row(6)])]})
            await store.finish("w1", claim.incarnation, timeout=1)
            with pytest.raises(WriterFenced):
                await store.append(claim, gone)
            with pytest.raises(WriterFenced):
                await store.outcome(claim, Group(), [("orders", last)])
            assert [token for token, _ in await read(store, "w1", 0, last)] == [ids[0], ids[1], ids[2], ids[2]]

    @sync
    async def test_9_28_rows_get_their_ids_as_they_are_written(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders", "payments"], timeout=1)
            (token,) = await store.reserve("orders", 1)
            news = Unnumbered(1, [row(2), row(3)]), Unnumbered(0, [row(4)])
            reserved = {"orders": [(token, [[1]], [row(1)])]}
            await store.append(claim, Appended(reserved, {"orders": news[0], "payments": news[1]}))
            assert [list(new.ids) for new in news] == [[2, 3], [1]]
            assert await read(store, "w1", 0, 3) == [(1, row(1)), (2, row(2)), (3, row(3))]
            found = await store.outcome(claim, Group(), [("orders", 1)], {"orders": 2, "payments": 0})
            assert found == {("orders", 1): [row(1)], ("orders", 3): [row(3)], ("payments", 1): [row(4)]}
            # Of several streams one is behind, or another process has the name: nothing of any is written.
            behind = {"orders": Unnumbered(3, [row(5)]), "payments": Unnumbered(2, [row(6)])}
            with pytest.raises(SequenceWentBack, match="gave 2, but 2 was known"):
                await store.append(claim, Appended({}, behind))
            await store.finish("w1", claim.incarnation, timeout=1)
            with pytest.raises(WriterFenced):
                await store.append(claim, Appended({}, {"orders": Unnumbered(3, [row(7)])}))
            assert [token for token, _ in await read(store, "w1", 0, 10)] == [1, 2, 3]
            assert await read(store, "w1", 0, 10, stream="payments") == [(1, row(4))]

    @sync
    async def test_the_newest_rows_of_all_writers(self, url: str) -> None:
        async with self.opened(url) as store:
            newest = await store.newest("orders")
            assert newest is not None
            assert (newest.epoch, newest.rows) == (await store.epoch(), {})
            w1 = await store.claim("w1", ["orders", "payments"], timeout=1)
            w2 = await store.claim("w2", ["orders"], timeout=1)
            await write(store, w1, 1, 2)
            await write(store, w1, 1, stream="payments")
            await write(store, w2, 1, commit=False)
            newest = await store.newest("orders")
            assert newest is not None
            assert newest.rows == {"w1": 2, "w2": 0}
            await write(store, w2, 1)
            await store.heartbeat(w1, {"orders": 2, "payments": 1})
            await store.prune(keep=0)  # those of w2 are not proven
            await store.finish("w1", w1.incarnation, timeout=1)
            newest = await store.newest("orders")
            assert newest is not None
            assert newest.rows == {"w1": 2, "w2": 4}
            await store.restored()
            other = await store.newest("orders")
            assert other is not None
            assert other.epoch == await store.epoch() != newest.epoch

    @sync
    async def test_writers_and_sequences_of_another_log_are_not_told(self, url: str) -> None:
        """Whoever asks reads that log, and another server has answered, which has seen a restore or has not."""
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1)
            before = await store.epoch()
            assert [one.writer for one in await store.known(before)] == ["w1"]
            assert await store.sequence("orders", before) == 1
            await store.restored()
            for _ in range(2):
                with pytest.raises(Unavailable, match=f"not {before}: it was restored"):
                    await store.known(before)
                assert await store.sequence("orders", before) is None
            now = await store.epoch()
            assert [one.writer for one in await store.known(now)] == ["w1"]
            assert (await store.sequence("orders", now) or 0) >= 1

    @sync
    async def test_uncommitted_rows_are_not_among_the_newest(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            ids = await store.reserve("orders", 1)
            await transaction.begin()
            await transaction.insert("orders", [(ids[0], [[1]], [row(1)])])
            before = await store.newest("orders")
            await transaction.commit()
            after = await store.newest("orders")
            assert before is not None
            assert after is not None
            assert (before.rows, after.rows) == ({"w1": 0}, {"w1": ids[0]})

    @sync
    async def test_9_7_a_claim_registers_before_the_first_reservation(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            claim = await store.claim("w1", ["orders", "payments"], timeout=1)
            found = {(w.stream, w.writer): w for w in await other.known()}
            assert set(found) == {("orders", "w1"), ("payments", "w1")}
            for writer in found.values():
                assert writer.registered
                assert (writer.position, writer.floor, writer.incarnation) == (0, 0, claim.incarnation)
                assert 0 <= writer.silent_for < PATIENCE

    @sync
    async def test_9_5_finish_fences_then_takes_the_sequence_as_the_final_position(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            dead = await store.claim("w1", ["orders", "payments"], timeout=1)
            alive = await other.claim("w2", ["orders"], timeout=1)
            await write(store, dead, 1)
            await write(other, alive, 1, 1)
            assert await other.finish("w1", dead.incarnation, timeout=1) == {"orders": 3, "payments": 0}
            with pytest.raises(WriterFenced):
                await store.transaction(dead).begin()
            known = {(w.stream, w.writer): (w.position, w.registered) for w in await other.known()}
            assert known["orders", "w1"] == (3, False)
            assert known["orders", "w2"] == (0, True)
            told = await other.heartbeat(alive, {"orders": 3})
            assert told == {"orders": {"w2": 3}}
            assert told.read
            if self.has_clock:
                assert abs(self.server_time() - (told.clock or 0)) < 60
            else:
                assert told.clock is None
            told = await other.heartbeat(alive, {"orders": 3}, registry=False)
            assert (told, told.claims, told.sequences, told.read) == ({}, {}, {"orders": 3}, False)
            assert told.clock is None
            assert await read(other, "w1", 0, 3) == [(1, row(1, 0))]
            await other.reserve("orders", 5)
            assert await other.finish("w1", dead.incarnation, timeout=1) == {"orders": 3, "payments": 0}
            assert await other.finish("w1", 77, timeout=1) == {}
            assert await other.finish("nobody", 1, timeout=1) == {}
            third = await other.claim("w3", ["orders"], timeout=1)
            assert set(third.known["orders"]) == {"w2", "w3"}  # finished: counts no more
            back = await store.claim("w1", ["orders"], timeout=1)
            assert back.starts == {"orders": 3}
            assert back.incarnation > dead.incarnation + 1
            assert await other.finish("w1", dead.incarnation, timeout=1) == {}
            await store.check_claim(back)

    @sync
    async def test_9_5_several_finishers_agree(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            dead = await store.claim("w1", ["orders"], timeout=1)
            await write(store, dead, 1)
            finals = await asyncio.gather(
                *(s.finish("w1", dead.incarnation, timeout=PATIENCE) for s in (store, other, store, other))
            )
            assert finals == [{"orders": 1}] * 4

    @sync
    async def test_racing_claims_have_incarnations_of_their_own(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            claims = await asyncio.gather(
                *(s.claim("w1", ["payments", "orders"], timeout=PATIENCE) for s in (store, other) * 3),
                return_exceptions=True,
            )
            # Each won; whom the next one overtook before it had read its positions is told so.
            won = [claim for claim in claims if isinstance(claim, Claim)]
            lost = [claim for claim in claims if isinstance(claim, WriterFenced)]
            assert len({claim.incarnation for claim in (*won, *lost)}) == 6
            await store.check_claim(max(won, key=lambda claim: claim.incarnation))

    @sync
    async def test_9_11_an_incarnation_is_the_clock_or_above_its_predecessor_s(self, url: str) -> None:
        async with self.opened(url) as store:

            async def claimed(writer: str, now: int) -> int:
                with mock.patch("time.time_ns", return_value=now):
                    return (await store.claim(writer, ["orders"], timeout=PATIENCE)).incarnation

            # Whatever the table knows: a table made anew knows of none that were given out.
            assert await claimed("w1", 1_000_500) == 1_000_500
            assert await claimed("w2", 1_000_500) == 1_000_500
            assert await claimed("w1", 1_000_500) == 1_000_501
            assert await claimed("w1", 900) == 1_000_502  # a clock that was set back
            assert await claimed("w1", 2_000_000) == 2_000_000

    # --- pages: 9.9 is with the SQL stores

    @sync
    async def test_9_10_pages_end_on_fact_boundaries_and_hold_a_whole_fact(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            ids = await write(store, claim, 3, 1, 5, 2, 1)
            other = await store.claim("w2", ["orders"], timeout=1)
            await write(store, other, 2)
            everything = await read(store, "w1", 0, 6)
            assert len(everything) == 12
            for limit in range(1, 14):
                assert await read(store, "w1", 0, 6, limit=limit) == everything
                after = 0
                while True:
                    found = await page(store, after, 6, limit)
                    sizes = {token: found.tokens.count(token) for token in found.tokens}
                    assert all(
                        sizes[token] == size for token, size in zip(ids, (3, 1, 5, 2, 1), strict=True) if token in sizes
                    )
                    assert len(found.tokens) <= limit or len(sizes) == 1
                    if not found.limited:
                        assert found.upto == 6
                        break
                    assert found.upto == found.tokens[-1]
                    after = found.upto

    @sync
    async def test_pages_are_exclusive_below_and_inclusive_above(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1, 1)
            found = await page(store, 1, 2)
            assert (found.after, found.upto, list(found.tokens), found.limited) == (1, 2, [2], False)
            assert found.epoch == claim.epoch
            empty = await page(store, 2, 2)
            assert (empty.upto, list(empty.tokens), empty.limited) == (2, [], False)
            unknown = await page(store, 0, 2, writer="nobody")
            assert (unknown.upto, list(unknown.tokens)) == (2, [])

    # --- readers: 9.12

    @sync
    async def test_9_12_a_save_hits_the_row_it_left_or_none(self, url: str) -> None:
        async with self.opened(url) as store:
            for stream in ("orders", "payments"):
                self.set_sequence(url, stream, 1000)  # below which all these positions are
            epoch = await store.epoch()
            assert (await store.load_reader("r")).epoch is None
            with pytest.raises(ReaderMoved):  # never registered
                await store.save_reader("r", [("orders", "w1", 0, 5)], epoch)
            await store.register_reader("r", {("orders", "w1"): 3}, epoch)
            await store.register_reader("r", {("orders", "w1"): 0}, epoch)  # leaves the row alone
            await store.register_reader("r", {("orders", "w2"): 7}, epoch)
            await store.save_reader("r", [("orders", "w1", 3, 5), ("orders", "w2", 7, 8)], epoch)
            bad = {
                "stale": ([("orders", "w1", 3, 6)], epoch),
                "ahead": ([("orders", "w1", 9, 10)], epoch),
                "epoch": ([("orders", "w1", 5, 6)], "0" * 32),
                "one of two": ([("orders", "w2", 8, 9), ("orders", "w1", 3, 6)], epoch),
            }
            for changes, of in bad.values():
                with pytest.raises(ReaderMoved):
                    await store.save_reader("r", changes, of)
                state = await store.load_reader("r")
                assert state.positions == {("orders", "w1"): 5, ("orders", "w2"): 8}
            assert state.epoch == epoch
            new = await store.restored()
            await store.reset_reader("r", {("orders", "w1"): 2}, new)
            state = await store.load_reader("r")
            assert (state.epoch, state.positions) == (new, {("orders", "w1"): 2})

    @sync
    async def test_9_12_of_two_that_begin_anew_the_second_keeps_what_the_first_saved(self, url: str) -> None:
        """Two processes under one name notice another epoch, one of them later."""
        async with self.opened(url) as store, self.opened(url) as other:
            for stream in ("orders", "payments"):
                self.set_sequence(url, stream, 1000)  # below which all these positions are
            old = await store.epoch()
            new = await store.restored()
            for writer in ("w1", "w2"):
                await store.register_reader("r", {("orders", writer): 7}, old)
            await store.register_reader("another", {("orders", "w1"): 3}, old)
            await store.reset_reader("r", {("orders", "w1"): 0}, new)
            assert (await store.load_reader("r")).positions == {("orders", "w1"): 0}
            await store.save_reader("r", [("orders", "w1", 0, 5)], new)
            await other.reset_reader("r", {("orders", "w1"): 1, ("orders", "w3"): 1}, new)
            state = await other.load_reader("r")
            assert (state.epoch, state.positions) == (new, {("orders", "w1"): 5, ("orders", "w3"): 1})
            await store.save_reader("r", [("orders", "w1", 5, 6)], new)  # the first goes on as if nothing had been
            assert (await store.load_reader("another")).positions == {("orders", "w1"): 3}

    @sync
    async def test_9_12_positions_of_several_logs_are_of_none(self, url: str) -> None:
        """One process has gone over to a new log, another, that has not noticed it, registers in the old one."""
        for new in ("0" * 32, "f" * 32):  # on either side of the old one in any order of epochs
            async with self.opened(url) as store, self.opened(url) as other:
                old = "8" * 32
                await store.register_reader("r", {("orders", "w1"): 7}, old)
                await store.reset_reader("r", {("orders", "w2"): 0}, new)
                await other.register_reader("r", {("orders", "w1"): 7}, old)
                assert (await store.load_reader("r")).epoch == MIXED
                await store.reset_reader("r", {("orders", "w1"): 0}, new)
                state = await store.load_reader("r")
                assert (state.epoch, state.positions) == (new, {("orders", "w1"): 0, ("orders", "w2"): 0})
                await store.reset_reader("r", {}, old)

    @sync
    async def test_9_12_of_two_savers_one_wins(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            for stream in ("orders", "payments"):
                self.set_sequence(url, stream, 1000)  # below which all these positions are
            epoch = await store.epoch()
            await store.register_reader("r", {("orders", "w1"): 0}, epoch)
            for at in range(10):
                outcomes = await asyncio.gather(
                    *(s.save_reader("r", [("orders", "w1", at, at + 1)], epoch) for s in (store, other) * 2),
                    return_exceptions=True,
                )
                assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType"] + ["ReaderMoved"] * 3

    @sync
    async def test_dead_letters_are_kept_newest_first(self, url: str) -> None:
        async with self.opened(url) as store:
            await store.dead_letter("r", "orders", "w1", [4, 4], [b"[1]", b'"\\u00e4"'], "ValueError: no")
            await store.dead_letter("r", "orders", "w1", [5], [b"\xff\x00{"], "boom\0")
            latest, first = await store.dead_letters(10)
            assert (first.tokens, list(first.payloads), first.error) == (
                [4, 4],
                [b"[1]", b'"\\u00e4"'],
                "ValueError: no",
            )
            assert (latest.reader, latest.stream, latest.writer, latest.tokens) == ("r", "orders", "w1", [5])
            assert 0 <= latest.age < PATIENCE
            assert len(await store.dead_letters(1)) == 1

    # --- retention

    @sync
    async def test_pruning_moves_the_floor_and_a_fetch_below_it_is_told(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 2, 1, 3, 1)
            assert await store.prune(keep=0) == {}  # nothing is proven yet
            await store.heartbeat(claim, {"orders": 4})
            assert await store.prune(keep=3) == {("orders", "w1"): 3}  # the fact of three rows goes whole or not
            assert await store.prune(keep=3) == {}
            with pytest.raises(PositionTooOld) as caught:
                await page(store, 2, 5)
            assert (caught.value.position, caught.value.floor) == (2, 3)
            assert caught.value.epoch == await store.epoch()
            assert [token for token, _ in await read(store, "w1", 3, 5)] == [4, 4, 4, 5]
            assert (await page(store, 1, 1)).upto == 1  # asks for no rows
            assert await store.prune(keep=0) == {("orders", "w1"): 4}  # not 5: not proven
            assert [w.floor for w in await store.known()] == [4]
            assert [token for token, _ in await read(store, "w1", 4, 5)] == [5]
            again = await store.claim("w1", ["orders"], timeout=1)
            assert again.starts == {"orders": 5}

    @sync
    async def test_the_floor_is_the_highest_deleted_row(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1, 0, 0)
            await store.heartbeat(claim, {"orders": 4})
            assert await store.prune(keep=0) == {("orders", "w1"): 2}  # IDs 3 and 4 have no rows
            assert [w.floor for w in await store.known()] == [2]
            assert (await page(store, 2, 4)).upto == 4
            assert await store.prune(keep=0) == {}

    @sync
    async def test_a_reader_that_begins_at_the_oldest_row_begins_where_pruning_got_to(self, url: str) -> None:
        """It looked at the floors before; and what is pruned in this log is no matter to a reader of another one."""
        key, never = ("orders", "w1"), ("orders", "w2")
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1, 1)
            await store.heartbeat(claim, {"orders": 3})
            assert await store.prune(keep=1) == {key: 2}
            await store.register_reader("now", {("orders", ""): 0, key: 1, never: 0}, claim.epoch, oldest=[key, never])
            assert (await store.load_reader("now")).positions == {key: 2, never: 0}
            await store.register_reader("late", {key: 1}, claim.epoch)  # owed all: it is to be told
            assert (await store.load_reader("late")).positions == {key: 1}
            for epoch, floor in (("1" * 32, 0), ("2" * 32, 0), (claim.epoch, 2)):  # two of another database's log
                await store.reset_reader("anew", {key: 0, never: 0}, epoch)
                state = await store.load_reader("anew")
                assert (state.epoch, state.positions) == (epoch, {key: floor, never: 0})

    @sync
    async def test_9_12_positions_of_the_log_that_is_kept_here_are_replaced_by_none_of_another(self, url: str) -> None:
        """A process that a lagging replica has told the epoch before the restore begins anew in that one."""
        async with self.opened(url) as store:
            before = await store.epoch()
            epoch = await store.restored()
            await store.register_reader("r", {("orders", "w1"): 5}, epoch)
            await store.reset_reader("r", {("orders", "w1"): 0, ("payments", ""): 0}, before)
            state = await store.load_reader("r")
            assert (state.epoch, state.positions, state.streams) == (epoch, {("orders", "w1"): 5}, {"orders"})

    @sync
    async def test_9_12_nobody_registers_in_the_log_before_a_restore(self, url: str) -> None:
        """A request of a process that has not noticed the restore, or that was killed since, comes late."""
        key = ("orders", "w1")
        async with self.opened(url) as store:
            before = await store.epoch()
            epoch = await store.restored()
            with pytest.raises(Unavailable, match=f"its epoch is {epoch}, not {before}: it was restored"):
                await store.register_reader("r", {key: 5}, before, beside_log=True)
            await store.reset_reader("r", {key: 5}, before, beside_log=True)
            assert (await store.load_reader("r")).streams == set()
            await store.register_reader("r", {key: 0}, epoch, beside_log=True)
            await store.reset_reader("anew", {key: 0}, epoch, beside_log=True)
            for reader in ("r", "anew"):
                state = await store.load_reader(reader)
                assert (state.epoch, state.positions) == (epoch, {key: 0})
            await store.register_reader("far", {key: 5}, before)  # it reads a log that is kept elsewhere
            assert (await store.load_reader("far")).epoch == before

    @sync
    async def test_pruning_stops_at_registered_readers_up_to_a_cap(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1, 1, 1)
            await store.heartbeat(claim, {"orders": 4})
            await store.register_reader("r", {("orders", "w1"): 2}, claim.epoch)
            await store.register_reader("elsewhere", {("payments", "w1"): 0}, claim.epoch)
            assert await store.prune(keep=0) == {("orders", "w1"): 2}
            assert [token for token, _ in await read(store, "w1", 2, 4)] == [3, 4]
            assert await store.prune(keep=0, reader_cap=PATIENCE) == {}
            await store.register_reader("late", {("orders", "w2"): 0}, claim.epoch)  # will read w1 from 0
            await store.save_reader("r", [("orders", "w1", 2, 4)], claim.epoch)
            assert await store.prune(keep=0) == {}
            await asyncio.sleep(0.02)
            assert await store.prune(keep=0, reader_cap=0.01) == {("orders", "w1"): 4}

    @sync
    async def test_pruning_by_age(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1)
            clock = asyncio.get_running_loop().time
            written = clock() + 0.1  # clocks of databases tick in milliseconds
            await asyncio.sleep(2.0)  # a statement may take as long, before the third row counts as old as well
            await write(store, claim, 1)
            await store.heartbeat(claim, {"orders": 3})
            assert await store.prune(older_than=PATIENCE) == {}
            assert await store.prune(older_than=clock() - written, keep=2) == {("orders", "w1"): 1}
            assert await store.prune(older_than=clock() - written, stream="payments") == {}
            assert await store.prune(older_than=clock() - written, stream="orders") == {("orders", "w1"): 2}
            with pytest.raises(ConfigError):
                await store.prune()

    # --- restore

    @sync
    async def test_restored_changes_the_epoch_and_fences_everybody(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 0)
            await store.heartbeat(claim, {"orders": 2})
            epoch = await store.restored()
            assert epoch == await store.epoch() != claim.epoch
            with pytest.raises(WriterFenced):
                await store.check_claim(claim)
            assert [w.position for w in await store.known()] == [1]
            again = await store.claim("w1", ["orders"], timeout=1)
            assert (again.starts, again.epoch) == ({"orders": 1}, epoch)
            assert (await page(store, 0, 1)).epoch == epoch
            assert (await store.reserve("orders", 1))[0] > 1

    @sync
    async def test_restored_gives_no_incarnation_out_again(self, url: str) -> None:
        """Those given out after the backup was made the database knows nothing of, and their processes may live."""
        async with self.opened(url) as store:
            first = await store.claim("w1", ["orders"], timeout=1)
            day = 86_400 * 10**9
            with mock.patch("time.time_ns", return_value=first.incarnation + day):
                await store.restored()
                zombies = [attrs.evolve(first, incarnation=first.incarnation + later) for later in (0, 1, 2, day - 1)]
                for zombie in zombies:
                    with pytest.raises(WriterFenced):
                        await store.check_claim(zombie)
                for writer in ("w1", "w2"):  # w2 was unknown when the backup was made
                    claims = [await store.claim(writer, ["orders"], timeout=1) for _ in range(2)]
                    for zombie in zombies:
                        with pytest.raises(WriterFenced):
                            await store.check_claim(attrs.evolve(zombie, writer=writer))
                    assert zombies[-1].incarnation < claims[0].incarnation < claims[1].incarnation
                    await store.check_claim(claims[1])

    @sync
    async def test_restored_fences_also_where_the_clock_is_behind(self, url: str) -> None:
        async with self.opened(url) as store:
            first = await store.claim("w1", ["orders"], timeout=1)
            with mock.patch("time.time_ns", return_value=1000):
                await store.restored()
                with pytest.raises(WriterFenced):
                    await store.check_claim(first)
                again = await store.claim("w1", ["orders"], timeout=1)
            assert again.incarnation > first.incarnation + 1

    @sync
    async def test_9_15_positions_ahead_of_table_and_sequence_refuse_to_start(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await store.reserve("orders", 12)
            await store.heartbeat(claim, {"orders": 12})
            self.set_sequence(url, "orders", 1)
            with pytest.raises(PositionsAheadOfTable) as caught:
                await store.claim("w2", ["orders"], timeout=1)
            assert (caught.value.position, caught.value.highest) == (12, 1)
            await store.restored()
            assert (await store.claim("w2", ["orders"], timeout=1)).starts == {"orders": 0}

    @sync
    async def test_9_17_no_position_above_the_sequence_is_stored(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await store.reserve("orders", 3)
            registry = await store.heartbeat(claim, {"orders": 2**62})
            assert registry == {"orders": {"w1": 3}}
            assert (registry.sequences, registry.claims) == ({"orders": 3}, {("orders", "w1"): claim.incarnation})
            await store.heartbeat(claim, {"orders": 2**63 - 1})
            assert [one.position for one in await store.known()] == [3]
            assert await store.finish("w1", claim.incarnation, timeout=1) == {"orders": 3}
            assert (await store.claim("w2", ["orders"], timeout=1)).starts == {"orders": 3}

    @sync
    async def test_9_17_a_page_proves_no_more_than_the_sequence(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            (first,) = await write(store, claim, 1)
            for upto in (2**62, 2**63 - 1):
                page = await store.fetch(FetchUpdates("orders", "w1", 0, upto))
                assert (page.tokens, page.upto, page.limited) == ([first], first, False)
            await store.reserve("orders", 4)
            page = await store.fetch(FetchUpdates("orders", "w1", first, 2**62))
            assert (page.tokens, page.upto) == ([], first + 4)
            assert (await store.fetch(FetchUpdates("orders", "w1", 2**62, 2**63 - 1))).upto == 2**62
            assert (await store.fetch(FetchUpdates("orders", "nobody", 0, 2**62))).upto == first + 4

    @sync
    async def test_9_17_no_reader_s_position_above_the_sequence_is_saved(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await store.reserve("orders", 3)
            key = ("orders", "w1")
            await store.register_reader("r", {key: 0, ("orders", "w2"): 0}, claim.epoch)
            for far in (4, 2**62, 2**63 - 1):
                with pytest.raises(PositionsAheadOfTable) as caught:
                    await store.save_reader("r", [("orders", "w2", 0, 3), (*key, 0, far)], claim.epoch)
                assert (caught.value.stream, caught.value.position, caught.value.highest) == ("orders", far, 3)
            assert (await store.load_reader("r")).positions == {key: 0, ("orders", "w2"): 0}
            await store.save_reader("r", [(*key, 0, 3)], claim.epoch)
            with pytest.raises(ReaderMoved):
                await store.save_reader("r", [(*key, 0, 3)], claim.epoch)
            # Of another log this database cannot know.
            await store.register_reader("far", {key: 0}, "f" * 32)
            await store.save_reader("far", [(*key, 0, 2**62)], "f" * 32)

    @sync
    async def test_9_17_a_final_position_is_not_above_the_sequence(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await store.reserve("orders", 12)
            await store.heartbeat(claim, {"orders": 12})
            self.set_sequence(url, "orders", 7)
            assert await store.finish("w1", claim.incarnation, timeout=1) == {"orders": 7}

    # --- status

    @sync
    async def test_status_is_json_and_tells_all(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 2)
            await store.heartbeat(claim, {"orders": 1})
            await store.register_reader("r", {("orders", "w1"): 0}, claim.epoch)
            status = json.loads(json.dumps(await store.status()))
            assert (status["epoch"], status["dead_letters"], status["schema_version"]) == (claim.epoch, 0, VERSION)
            orders = status["streams"]["orders"]
            assert (orders["rows"], orders["sequence"], orders["table"]) == (2, 1, "busrep_facts")
            assert orders["writers"]["w1"]["position"] == 1
            assert orders["writers"]["w1"]["registered"] is True
            assert status["readers"]["r"]["orders"]["w1"]["lag"] == 1


class BootstrapConformance:
    """What is saved of bootstraps: of stores on an event loop, for threads read through those. What stores give to
    load is in snapshot_conformance.py."""

    opened: Any

    @sync
    async def test_9_12_progress_of_a_bootstrap_is_saved_or_refused(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            ids = await write(store, claim, 1, 1, 1, 1)
            await store.heartbeat(claim, {"orders": ids[-1]})
            await store.register_reader("r", {("orders", "w1"): 1, ("orders", "w0"): 1}, claim.epoch)
            agreement = Agreement("orders", claim.epoch, {"w1": 3}, {}, [PartRange(0, 2, 2), PartRange(2, 3, 1)])
            id = await store.begin_bootstrap("r", agreement, syncs=1, reason="new")
            assert (await store.load_reader("r")).positions == {("orders", "w1"): 3, ("orders", "w0"): 0}
            save = functools.partial(store.save_bootstrap, "r", "orders")
            step = functools.partial(AppliedParts, rows=2, bytes=9, state="loading")
            await save(id, step(parts=0, applied=1))
            for other, parts in ((id, 0), (id, 2), ("0" * 16, 1), (agreement.digest, 1)):
                with pytest.raises(ReaderMoved):
                    await save(other, step(parts=parts, applied=2))
            (progress,) = await store.bootstraps("r")
            assert (progress.agreement, progress.parts, progress.rows) == (agreement, 1, 2)
            assert (await store.status())["bootstraps"]["r"]["orders"]["parts_total"] == 2
            await store.prune(keep=0)
            with pytest.raises(SnapshotGone):  # the reader kept what follows 3, nobody what follows 2
                await store.begin_bootstrap("r", attrs.evolve(agreement, positions={"w1": 2}), syncs=2, reason="old")
            assert [one.parts for one in await store.bootstraps()] == [1]

    @sync
    async def test_9_12_no_position_moves_while_a_snapshot_is_loaded(self, url: str) -> None:
        """What another process of this name handles meanwhile, the target loses."""
        async with self.opened(url) as store:
            for stream in ("orders", "payments"):
                self.set_sequence(url, stream, 1000)  # below which all these positions are
            epoch = await store.epoch()
            at = {("orders", "w1"): 1, ("payments", "w1"): 1}
            for reader in ("r", "other"):
                await store.register_reader(reader, at, epoch)
            agreement = Agreement("orders", epoch, {"w1": 3}, {}, [PartRange(0, 3, 2)])
            id = await store.begin_bootstrap("r", agreement, syncs=1, reason="new")
            at = {("orders", "w1"): 3, ("payments", "w1"): 1}
            saves: list[dict[str, Any]] = [{}, {"bootstraps": {}}, {"bootstraps": {"orders": id}}]
            for applied, state in ((0, "loading"), (0, "requested"), (0, "agreed")):
                for known in saves:
                    for changes in ([("orders", "w1", 3, 4)], [("payments", "w1", 1, 2), ("orders", "w1", 3, 4)]):
                        with pytest.raises(ReaderMoved):
                            await store.save_reader("r", changes, epoch, **known)
                await store.register_reader("r", {("orders", "w1"): 9, ("orders", "w2"): 9}, epoch)
                await store.register_reader("r", {("orders", "w2"): 9}, epoch, oldest=[("orders", "w2")])
                await store.reset_reader("r", {("orders", "w1"): 9, ("orders", "w2"): 9}, epoch)
                found = await store.load_reader("r")
                assert (found.positions, found.epoch) == (at, epoch)
                assert (found.loading, found.bootstraps) == ({"orders"}, {"orders": id})
                await store.save_bootstrap(
                    "r", "orders", id, AppliedParts(parts=0, applied=applied, rows=0, bytes=0, state=state)
                )
            await store.save_reader("r", [("payments", "w1", 1, 2)], epoch, bootstraps={})
            await store.save_reader("other", [("orders", "w1", 1, 2)], epoch, bootstraps={})
            assert (await store.load_reader("other")).loading == frozenset()
            await store.save_bootstrap(
                "r", "orders", id, AppliedParts(parts=0, applied=1, rows=2, bytes=9, state="draining")
            )
            found = await store.load_reader("r")
            assert (found.loading, found.bootstraps) == (frozenset(), {"orders": id})
            for bootstraps in ({}, {"orders": "0" * 16}, {"payments": id}):  # that of before, of which this is the end
                with pytest.raises(ReaderMoved):
                    await store.save_reader("r", [("orders", "w1", 3, 4)], epoch, bootstraps=bootstraps)
            await store.save_reader(
                "r", [("orders", "w1", 3, 4), ("payments", "w1", 2, 3)], epoch, bootstraps={"orders": id}
            )
            await store.save_reader("r", [("orders", "w1", 4, 5)], epoch)
            await store.register_reader("r", {("orders", "w2"): 9}, epoch)
            assert (await store.load_reader("r")).positions == {
                ("orders", "w1"): 5, ("payments", "w1"): 3, ("orders", "w2"): 9,
            }  # fmt: skip
            assert await store.begin_bootstrap("r", agreement, syncs=2, reason="again") != id

    @sync
    async def test_9_12_a_new_log_replaces_the_positions_of_a_snapshot_but_it_stays_unfinished(self, url: str) -> None:
        """The target has a part of what was."""
        async with self.opened(url) as store:
            for stream in ("orders", "payments"):
                self.set_sequence(url, stream, 1000)  # below which all these positions are
            epoch = await store.epoch()
            agreement = Agreement("orders", epoch, {"w1": 3}, {}, [PartRange(0, 3, 2)])
            await store.begin_bootstrap("r", agreement, syncs=1, reason="new")
            new = await store.restored()
            await store.reset_reader("r", {("orders", ""): 0, ("orders", "w1"): 0}, new)
            found = await store.load_reader("r")
            assert (found.epoch, found.positions, found.loading) == (new, {("orders", "w1"): 0}, {"orders"})
            with pytest.raises(ReaderMoved):
                await store.save_reader("r", [("orders", "w1", 0, 1)], new)
            id = await store.begin_bootstrap("r", attrs.evolve(agreement, epoch=new), syncs=2, reason="restored")
            found = await store.load_reader("r")
            assert (found.positions, found.bootstraps) == ({("orders", "w1"): 3}, {"orders": id})

    @sync
    async def test_9_12_two_of_one_name_lose_nothing_whoever_loads_a_snapshot_when(self, url: str) -> None:
        """One follows, and saves now and then what it has handled; the other empties the target and loads it anew."""
        async with self.opened(url) as store, self.opened(url) as other:
            for stream in ("orders", "payments"):
                self.set_sequence(url, stream, 1000)  # below which all these positions are
            epoch, dice, key, last = await store.epoch(), random.Random(5), ("orders", "w1"), 150
            target: set[int] = set()
            await store.register_reader("r", {key: 0}, epoch)

            async def follow() -> None:
                known, at, handled = await store.load_reader("r"), 0, 0
                while at < last:
                    if known.loading:
                        await asyncio.sleep(0)
                        known = await store.load_reader("r")
                        at = handled = known.positions[key]
                        continue
                    handled = min(last, handled + 1)
                    target.add(handled)
                    if dice.random() < 0.1:
                        try:
                            changes = [(*key, at, handled)]
                            await store.save_reader("r", changes, epoch, bootstraps=known.bootstraps)
                            at = handled
                        except ReaderMoved:
                            known = await store.load_reader("r")
                            at = handled = known.positions[key]
                    else:
                        await asyncio.sleep(0.0005)

            async def bootstrap() -> None:
                for _ in range(12):
                    # Often where the other has saved, and always behind what it has handled.
                    position = (await other.load_reader("r")).positions[key]
                    agreement = Agreement("orders", epoch, {"w1": position}, {}, [PartRange(0, max(1, position))])
                    id = await other.begin_bootstrap("r", agreement, syncs=1, reason="again")
                    target.clear()
                    for _ in range(dice.randrange(3)):
                        await asyncio.sleep(0.0005)
                    target.update(range(1, position + 1))
                    await other.save_bootstrap(
                        "r", "orders", id, AppliedParts(parts=0, applied=1, rows=0, bytes=0, state="draining")
                    )

            await asyncio.gather(follow(), bootstrap())
            assert (await store.load_reader("r")).positions == {key: last}
            assert target == set(range(1, last + 1))
