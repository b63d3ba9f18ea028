"""What every store must do as a source of snapshots, and as the keeper of readers' bootstraps.

test_snapshots_store.py runs this class over each of them.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any
from unittest import mock

import attrs
import pytest

from busrep.core.snapshots import Agreement, AppliedParts, PartRange, decode_part, encode_rows, part_hash
from busrep.errors import ConfigError, PositionTooOld, ReaderMoved, RowError, SnapshotBusy, SnapshotGone, UnknownStream
from busrep.settings import Settings
from busrep.stores import snapshots
from busrep.stores.interface import AsyncStore, Claim
from busrep.streams import Registry
from tests.shop import opened_async_store
from tests.stores.store_conformance import PATIENCE, generic, page, read, row, sync, write


async def text_of(store: AsyncStore, agreement: Agreement, number: int) -> bytes:
    """A whole part."""
    async with aclosing(store.load(agreement, number)) as pieces:
        return b"".join([piece async for piece in pieces])


async def whole(store: AsyncStore, agreement: Agreement) -> bytes:
    """All parts, several at a time."""
    return b"".join(await asyncio.gather(*(text_of(store, agreement, at) for at in range(len(agreement.parts)))))


async def fetched(store: AsyncStore, agreement: Agreement) -> bytes:
    """What catch-up gives of the same content."""
    rows: list[tuple[int, str, bytes]] = []
    for writer, position in agreement.positions.items():
        after = agreement.floors.get(writer, 0)
        if after < position:
            found = await read(store, writer, after, position, stream=agreement.stream)
            rows += [(token, writer, payload) for token, payload in found]
    rows.sort(key=lambda one: one[0])
    return encode_rows(*zip(*rows, strict=True)) if rows else b""


def tiles(agreement: Agreement, text: bytes) -> None:
    """The parts have no gap between them, are told their rows, and no fact is in two of them."""
    after = 0
    tokens = list(decode_part(text).tokens)
    assert tokens == sorted(tokens)
    for part in agreement.parts:
        assert part.after == after < part.upto
        assert part.rows == sum(part.after < token <= part.upto for token in tokens) > 0
        after = part.upto
    assert agreement.rows == len(tokens)
    assert after == max(tokens, default=0)


async def some_facts(store: AsyncStore, *sizes: int) -> tuple[Claim, Claim]:
    """By two writers in turns, all of them proven."""
    claims = [await store.claim(name, ["orders"], timeout=1) for name in ("w1", "w2")]
    for at, size in enumerate(sizes):
        ids = await write(store, claims[at % 2], size)
    for claim in claims:
        await store.heartbeat(claim, {"orders": ids[-1]})
    return claims[0], claims[1]


async def insert(store: AsyncStore, claim: Claim, token: int) -> None:
    """A fact of one row, under an ID that is reserved."""
    transaction = store.transaction(claim)
    await transaction.begin()
    await transaction.insert("orders", [(token, [[token, 0]], [row(token, 0)])])
    await transaction.commit()


async def saved(store: AsyncStore, reader: str = "r") -> dict[tuple[str, str], int]:
    return dict((await store.load_reader(reader)).positions)


class SnapshotConformance:
    """Subclasses say how to make a store, in `url`."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @asynccontextmanager
    async def opened(
        self, url: str, registry: Registry | None = None, settings: Settings | None = None
    ) -> AsyncIterator[AsyncStore]:
        async with opened_async_store(url, registry or generic(), settings=settings) as store:
            yield store

    # --- what a snapshot holds

    @sync
    async def test_it_is_all_rows_at_its_positions(self, url: str) -> None:
        async with self.opened(url) as store:
            first, second = await some_facts(store, *(1, 3, 2) * 10)
            await write(store, first, 1, 2, commit=False)
            (late,) = await write(store, first, 2)  # committed, not proven: comes by catch-up
            (later, *_, end) = await store.reserve("orders", 5)
            await store.heartbeat(second, {"orders": end})
            await insert(store, second, later)
            agreement = await store.agree("orders", part_rows=7)
            assert agreement.positions == {"w1": 30, "w2": end}
            assert (agreement.stream, agreement.epoch, agreement.floors) == ("orders", first.epoch, {})
            assert late < later < end == late + 5  # proven without it, as no writer announces it
            text = await whole(store, agreement)
            tiles(agreement, text)
            assert text == await fetched(store, agreement)
            assert set(decode_part(text).tokens) == {*range(1, 31), later}
            assert len(agreement.parts) >= 8
            await store.leave(agreement)

    @sync
    async def test_the_same_content_has_the_same_hash_wherever_it_is(self, url: str) -> None:
        async with self.opened(url) as store:
            await some_facts(store, 2, 1)
            agreement = await store.agree("orders", part_rows=100)
            assert [attrs.astuple(part) for part in agreement.parts] == [(0, 2, 3)]
            text = await text_of(store, agreement, 0)
            assert text == b"1 w1 [1,0]\n1 w1 [1,1]\n2 w2 [2,0]\n"
            assert part_hash(text) == "e691dd870b8c59a5b86ec4a98de51387e42f687d802f189ebfd3a182294ff5e9"
            await store.leave(agreement)

    @pytest.mark.parametrize("part_rows", [1, 2, 5, 13, 1000])
    @sync
    async def test_a_fact_goes_whole_whatever_its_size(self, url: str, part_rows: int) -> None:
        async with self.opened(url) as store:
            await some_facts(store, 1, 20, 1, 1, 5, 5, 1, 30, 2)
            agreement = await store.agree("orders", part_rows=part_rows)
            text = await whole(store, agreement)
            tiles(agreement, text)
            sizes = {1: 1, 2: 20, 3: 1, 4: 1, 5: 5, 6: 5, 7: 1, 8: 30, 9: 2}
            for part in agreement.parts:
                assert part.rows < part_rows + sizes[part.upto]
            assert len(decode_part(text).tokens) == 66
            await store.leave(agreement)

    @pytest.mark.parametrize("heavy", [1, 600])
    @sync
    async def test_parts_are_of_about_the_size_asked_for(self, url: str, heavy: int) -> None:
        """Also where some facts have far more rows than others."""
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, *(1,) * 1500)
            await write(store, claim, *(heavy,) * 5)
            ids = await write(store, claim, *(1,) * 1500)
            await store.heartbeat(claim, {"orders": ids[-1]})
            agreement = await store.agree("orders", part_rows=500)
            tiles(agreement, await whole(store, agreement))
            assert max(part.rows for part in agreement.parts) <= 500 + max(heavy, 125)
            assert min(part.rows for part in agreement.parts[:-1]) >= 375
            await store.leave(agreement)

    @sync
    async def test_a_stream_without_rows(self, url: str) -> None:
        async with self.opened(url) as store:
            agreement = await store.agree("orders", part_rows=10)
            assert (agreement.positions, agreement.parts, agreement.rows) == ({}, [], 0)
            await store.begin_bootstrap("r", agreement, syncs=1, reason="new")
            assert (await store.load_reader("r")).streams == {"orders"}
            await store.leave(agreement)
            claim = await store.claim("w1", ["orders"], timeout=1)
            await store.reserve("orders", 4)  # facts that were given up: no rows
            await store.heartbeat(claim, {"orders": 4})
            agreement = await store.agree("orders", part_rows=10, again=agreement)
            assert agreement.parts == []  # the same content: nothing
            await store.leave(agreement)
            agreement = await store.agree("orders", part_rows=10)
            assert (agreement.positions, agreement.parts) == ({"w1": 4}, [])
            await store.leave(agreement)

    @sync
    async def test_pruned_rows_are_no_part_of_it(self, url: str) -> None:
        async with self.opened(url) as store:
            await some_facts(store, *(1,) * 10)
            await store.prune(keep=2)
            agreement = await store.agree("orders", part_rows=3)
            assert agreement.floors == {"w1": 5, "w2": 6}
            text = await whole(store, agreement)
            tiles(agreement, text)
            assert list(decode_part(text).tokens) == [7, 8, 9, 10]
            await store.leave(agreement)

    @sync
    async def test_streams_must_be_known_and_kept_in_the_store(self, url: str) -> None:
        async with self.opened(url) as store:
            with pytest.raises(UnknownStream):
                await store.agree("nonsense", part_rows=1)
            with pytest.raises(ConfigError, match="resettable"):
                await store.agree("typing", part_rows=1)
            with pytest.raises(ConfigError, match="at least one row"):
                await store.agree("orders", part_rows=0)

    # --- loading

    @sync
    async def test_parts_are_loaded_in_pieces(self, url: str) -> None:
        async with self.opened(url) as store:
            await some_facts(store, *(1000,) * 10)
            agreement = await store.agree("orders", part_rows=20_000)
            async with aclosing(store.load(agreement, 0)) as found:
                pieces = [piece async for piece in found]
            assert sum(piece.count(b"\n") for piece in pieces) == 10_000
            assert max(map(len, pieces)) < 70_000
            await store.leave(agreement)

    @sync
    async def test_a_load_that_is_given_up_leaves_nothing_behind(self, url: str) -> None:
        async with self.opened(url) as store:
            await some_facts(store, *(300,) * 20)
            agreement = await store.agree("orders", part_rows=3000)
            for _ in range(5):
                async with aclosing(store.load(agreement, 0)) as pieces:
                    async for _piece in pieces:
                        break
                waiting = asyncio.create_task(whole(store, agreement))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            tiles(agreement, await whole(store, agreement))
            await store.leave(agreement)

    @sync
    async def test_only_so_many_at_a_time(self, url: str) -> None:
        settings = Settings(snapshots=2)
        async with self.opened(url, settings=settings) as store, self.opened(url, settings=settings) as other:
            held = [await store.agree("orders", part_rows=9), await other.agree("payments", part_rows=9)]
            for one in (store, other):
                with pytest.raises(SnapshotBusy) as caught:
                    await one.agree("orders", part_rows=9)
                assert caught.value.limit == 2
            await store.leave(held[0])
            await store.leave(held[0])  # once more does no harm
            held[0] = await other.agree("orders", part_rows=9)
            with pytest.raises(SnapshotBusy):
                await store.agree("orders", part_rows=9)
            await other.close()  # lets go of both; a server may take a moment to notice
            for _ in range(2):
                async with asyncio.timeout(PATIENCE):
                    while True:
                        with suppress(SnapshotBusy):
                            await store.agree("orders", part_rows=9)
                            break
                        await asyncio.sleep(0.01)

    @sync
    async def test_an_agreement_that_fails_takes_no_place(self, url: str) -> None:
        async with self.opened(url, settings=Settings(snapshots=1)) as store:
            for _ in range(3):
                with pytest.raises(ConfigError):
                    await store.agree("orders", part_rows=0)
                asking = asyncio.create_task(store.agree("orders", part_rows=1))
                await asyncio.sleep(0)
                asking.cancel()
                if not asking.cancelled() and await asyncio.wait([asking]) and not asking.cancelled():
                    await store.leave(asking.result())  # memory has nothing to wait for
            while True:
                try:
                    await store.leave(await store.agree("orders", part_rows=1))
                    return
                except SnapshotBusy:  # what was cancelled has not ended on the server yet
                    await asyncio.sleep(0.01)

    # --- the same snapshot again

    @sync
    async def test_the_same_again_after_more_was_written(self, url: str) -> None:
        async with self.opened(url) as store:
            first, second = await some_facts(store, *(2, 1) * 6)
            agreement = await store.agree("orders", part_rows=4)
            before = [await text_of(store, agreement, at) for at in range(len(agreement.parts))]
            await store.leave(agreement)
            for claim in (first, second):
                ids = await write(store, claim, 3)
                await store.heartbeat(claim, {"orders": ids[-1]})
            again = await store.agree("orders", part_rows=999, again=agreement)
            assert again.same(agreement)
            assert again.digest == agreement.digest
            assert [await text_of(store, again, at) for at in range(len(again.parts))] == before
            await store.leave(again)
            fresh = await store.agree("orders", part_rows=4)
            assert not fresh.same(agreement)
            assert fresh.digest != agreement.digest
            await store.leave(fresh)

    @sync
    async def test_of_what_is_pruned_meanwhile_only_the_parts_that_lost_rows_are_gone(self, url: str) -> None:
        async with self.opened(url) as store:
            await some_facts(store, *(1,) * 12)
            agreement = await store.agree("orders", part_rows=4)
            texts = [await text_of(store, agreement, at) for at in range(3)]
            await store.leave(agreement)
            await store.prune(keep=3)  # up to 6 of each
            again = await store.agree("orders", part_rows=4, again=agreement)
            assert again.same(agreement)
            for at in (0, 1):
                with pytest.raises(SnapshotGone, match="pruned"):
                    await text_of(store, again, at)
            assert await text_of(store, again, 2) == texts[2]
            await store.leave(again)

    @sync
    async def test_pruned_beyond_its_end_it_is_another(self, url: str) -> None:
        async with self.opened(url) as store:
            first, second = await some_facts(store, *(1,) * 6)
            agreement = await store.agree("orders", part_rows=4)
            await store.leave(agreement)
            for claim in (first, second):
                ids = await write(store, claim, 1)
                await store.heartbeat(claim, {"orders": ids[-1]})
            await store.prune(keep=0)
            again = await store.agree("orders", part_rows=4, again=agreement)
            assert not again.same(agreement)
            assert (again.parts, again.floors) == ([], {"w1": 7, "w2": 8})
            await store.leave(again)

    @sync
    async def test_pruned_behind_the_end_of_a_writer_it_does_not_know(self, url: str) -> None:
        async with self.opened(url) as store:
            await some_facts(store, 1, 1)
            agreement = await store.agree("orders", part_rows=4)
            await store.leave(agreement)
            third = await store.claim("w3", ["orders"], timeout=1)
            ids = await write(store, third, 1)
            await store.heartbeat(third, {"orders": ids[-1]})
            await store.prune(keep=0)
            again = await store.agree("orders", part_rows=4, again=agreement)
            assert not again.same(agreement)
            with pytest.raises(SnapshotGone, match="w3"):
                await store.begin_bootstrap("r", agreement, syncs=1, reason="late")
            await store.leave(again)

    @sync
    async def test_after_a_restore_it_is_another(self, url: str) -> None:
        async with self.opened(url) as store:
            await some_facts(store, 1, 1, 1)
            agreement = await store.agree("orders", part_rows=2)
            await store.begin_bootstrap("r", agreement, syncs=1, reason="new")
            await store.leave(agreement)
            epoch = await store.restored()
            again = await store.agree("orders", part_rows=2, again=agreement)
            assert again.epoch == epoch != agreement.epoch
            assert not again.same(agreement)
            await store.begin_bootstrap("r", again, syncs=2, reason="restored")
            with pytest.raises(SnapshotGone, match="another log"):  # a process that has not heard of it yet
                await store.begin_bootstrap("r", agreement, syncs=2, reason="late")
            assert (await store.load_reader("r")).epoch == epoch
            await store.leave(again)

    # --- what a reader saves

    @sync
    async def test_a_bootstrap_begins(self, url: str) -> None:
        async with self.opened(url) as store:
            first, _ = await some_facts(store, *(2,) * 6)
            before = {("orders", "w1"): 3, ("orders", "gone"): 9, ("payments", "w1"): 5}
            await store.register_reader("r", before, first.epoch)
            await store.register_reader("other", before, first.epoch)
            agreement = await store.agree("orders", part_rows=4)
            first_id = await store.begin_bootstrap("r", agreement, syncs=2, reason="too old")
            (progress,) = await store.bootstraps()
            assert progress.id == first_id
            assert progress.agreement.same(agreement)
            assert progress.agreement == agreement
            assert (progress.reader, progress.state, progress.parts, progress.rows, progress.bytes) == (
                "r", "agreed", 0, 0, 0,
            )  # fmt: skip
            assert (progress.syncs, progress.reason) == (2, "too old")
            assert 0 <= progress.age < 60
            end = {("orders", "w1"): 6, ("orders", "w2"): 6, ("orders", "gone"): 0}
            assert await saved(store) == end | {("payments", "w1"): 5}
            assert await saved(store, "other") == before
            await store.save_bootstrap(
                "r", "orders", first_id, AppliedParts(parts=0, applied=1, rows=4, bytes=44, state="loading")
            )
            await store.begin_bootstrap("r", agreement, syncs=3, reason="again")
            (progress,) = await store.bootstraps("r")
            assert (progress.parts, progress.rows, progress.bytes, progress.state) == (0, 0, 0, "agreed")
            assert progress.id != first_id
            await store.leave(agreement)

    @pytest.mark.parametrize(("part_rows", "most"), [(1, 10), (1, 66), (1, 1), (3, 7), (400, 4), (2**62, 4)])
    @sync
    async def test_the_number_of_parts_is_bounded(self, url: str, part_rows: int, most: int) -> None:
        """An agreement is saved, sent and compared as a whole: its parts are larger than asked for, then."""
        async with self.opened(url) as store:
            await some_facts(store, *(1,) * 60, 5, 1)
            with mock.patch.object(snapshots, "MOST_PARTS", most):
                agreement = await store.agree("orders", part_rows=part_rows)
            tiles(agreement, await whole(store, agreement))
            assert len(agreement.parts) <= most
            assert len(agreement.parts) >= min(most, 66 // part_rows) / 2, "no larger than they must be"
            assert max(part.rows for part in agreement.parts) < max(part_rows, -(-66 // most)) + 5
            await store.leave(agreement)

    @sync
    async def test_a_part_of_a_bootstrap_that_was_begun_anew_is_not_saved(self, url: str) -> None:
        """Also where the snapshot is the very same: the target was emptied of that part since."""
        async with self.opened(url) as store:
            await some_facts(store, *(1,) * 6)
            agreement = await store.agree("orders", part_rows=2)
            save = functools.partial(store.save_bootstrap, "r", "orders")
            step = functools.partial(AppliedParts, rows=2, bytes=20)
            first = await store.begin_bootstrap("r", agreement, syncs=1, reason="new")
            await save(first, step(parts=0, applied=1, state="loading"))
            second = await store.begin_bootstrap("r", agreement, syncs=2, reason="again")
            for parts, applied, state in ((0, 1, "loading"), (0, 0, "online")):
                with pytest.raises(ReaderMoved):
                    await save(first, step(parts=parts, applied=applied, state=state))
            await save(second, step(parts=0, applied=1, state="loading"))
            with pytest.raises(ReaderMoved):
                await save(first, step(parts=1, applied=2, state="loading"))
            (progress,) = await store.bootstraps("r")
            assert (progress.id, progress.parts, progress.state) == (second, 1, "loading")
            await store.leave(agreement)

    @sync
    async def test_pruning_keeps_what_follows_the_snapshot(self, url: str) -> None:
        async with self.opened(url) as store:
            first, second = await some_facts(store, *(1,) * 6)
            agreement = await store.agree("orders", part_rows=4)
            await store.begin_bootstrap("r", agreement, syncs=1, reason="new")
            for claim in (first, second):
                ids = await write(store, claim, 1)
                await store.heartbeat(claim, {"orders": ids[-1]})
            third = await store.claim("w3", ["orders"], timeout=1)  # joined since: it begins at 0
            (token,) = await write(store, third, 1)
            await store.heartbeat(third, {"orders": token})
            await store.prune(keep=0)
            assert [one.floor for one in await store.known()] == [5, 6, 0]
            assert [t for t, _ in await read(store, "w1", 6, 9)] == [7]
            with pytest.raises(PositionTooOld):
                await page(store, 4, 9)
            await store.leave(agreement)

    @sync
    async def test_it_does_not_begin_when_what_follows_is_pruned(self, url: str) -> None:
        async with self.opened(url) as store:
            first, second = await some_facts(store, *(1,) * 6)
            await store.register_reader("r", {("payments", "w1"): 5}, first.epoch)
            agreement = await store.agree("orders", part_rows=4)
            for claim in (first, second):
                ids = await write(store, claim, 1)
                await store.heartbeat(claim, {"orders": ids[-1]})
            await store.prune(keep=0)
            with pytest.raises(SnapshotGone, match="'w1'"):
                await store.begin_bootstrap("r", agreement, syncs=1, reason="new")
            assert await store.bootstraps() == []
            assert await saved(store) == {("payments", "w1"): 5}
            # In a store that keeps another log its floors say nothing.
            elsewhere = attrs.evolve(agreement, epoch="0" * 32)
            await store.begin_bootstrap("new", elsewhere, syncs=1, reason="new")
            assert (await store.load_reader("new")).epoch == "0" * 32
            await store.leave(agreement)

    @sync
    async def test_parts_are_saved_one_after_the_other(self, url: str) -> None:
        async with self.opened(url) as store:
            await some_facts(store, *(1,) * 6)
            agreement = await store.agree("orders", part_rows=2)
            begun = await store.begin_bootstrap("r", agreement, syncs=1, reason="new")

            async def save(parts: int, applied: int, *, id: str = begun, reader: str = "r") -> None:
                state = "draining" if applied == 3 else "loading"
                step = AppliedParts(parts=parts, applied=applied, rows=applied * 2, bytes=applied * 20, state=state)
                await store.save_bootstrap(reader, "orders", id, step)

            await save(0, 1)
            for wrong in (save(0, 1), save(2, 3), save(1, 2, id="0" * 16), save(1, 2, reader="other")):
                with pytest.raises(ReaderMoved):
                    await wrong
            (progress,) = await store.bootstraps()
            assert (progress.parts, progress.rows, progress.bytes, progress.state) == (1, 2, 20, "loading")
            outcomes = await asyncio.gather(*(save(1, 2) for _ in range(4)), return_exceptions=True)
            assert sorted(map(type, outcomes), key=str) == [type(None)] + [ReaderMoved] * 3
            await save(2, 3)
            await store.save_bootstrap(
                "r", "orders", begun, AppliedParts(parts=3, applied=3, rows=6, bytes=60, state="online")
            )
            (progress,) = await store.bootstraps()
            assert (progress.parts, progress.rows, progress.bytes, progress.state) == (3, 6, 60, "online")
            await store.leave(agreement)

    @sync
    async def test_several_are_told_the_latest_first(self, url: str) -> None:
        async with self.opened(url) as store:
            agreements = [await store.agree(stream, part_rows=2) for stream in ("orders", "payments")]
            ids = [
                await store.begin_bootstrap(reader, agreement, syncs=1, reason="weiß \0")
                for reader in ("a", "b")
                for agreement in agreements
            ]
            await asyncio.sleep(0.01)  # SQLite's clock ticks in milliseconds
            await store.save_bootstrap(
                "a", "payments", ids[1], AppliedParts(parts=0, applied=0, rows=0, bytes=0, state="online")
            )
            found = [(one.reader, one.agreement.stream) for one in await store.bootstraps()]
            assert len(found) == 4
            assert found[0] == ("a", "payments")
            assert [one.agreement.stream for one in await store.bootstraps("a")] == ["payments", "orders"]
            assert await store.bootstraps("nobody") == []
            status: Any = json.loads(json.dumps((await store.status())["bootstraps"]))
            assert {reader: set(streams) for reader, streams in status.items()} == {
                "a": {"orders", "payments"}, "b": {"orders", "payments"},
            }  # fmt: skip
            told = status["a"]["payments"]
            assert (told["state"], told["parts"], told["parts_total"], told["rows_total"]) == ("online", 0, 0, 0)
            assert told["saved_ago"] < 60
            for agreement in agreements:
                await store.leave(agreement)

    # --- rows as they are

    @sync
    async def test_rows_come_byte_by_byte(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("wü/1", ["orders"], timeout=1)
            payloads = [json.dumps(one, separators=(",", ":")).encode() for one in HOSTILE]
            payloads += [json.dumps(one, separators=(",", ":"), ensure_ascii=False).encode() for one in HOSTILE]
            payloads += [b"[]", b" [ 1 ]  ", rb'["\\.",\\N]', b'["\x7f"]', row("x" * 200_000)]
            transaction = store.transaction(claim)
            ids = await store.reserve("orders", len(payloads))
            await transaction.begin()
            await transaction.insert("orders", [(t, [t], [p]) for t, p in zip(ids, payloads, strict=True)])
            await transaction.commit()
            await store.heartbeat(claim, {"orders": ids[-1]})
            agreement = await store.agree("orders", part_rows=7)
            text = await whole(store, agreement)
            assert text == encode_rows(ids, ["wü/1"] * len(ids), payloads)
            assert list(decode_part(text).payloads) == payloads
            await store.leave(agreement)

    @sync
    async def test_a_row_that_breaks_its_line_is_no_row(self, url: str) -> None:
        """busrep writes none, somebody's own INSERT may. Never are they taken for two."""
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            ids = await store.reserve("orders", 2)
            transaction = store.transaction(claim)
            await transaction.begin()
            await transaction.insert("orders", [(ids[0], [[1]], [b"[1]"])])
            await transaction.insert("orders", [(ids[1], [[1]], [b"[1]\n2 w1 [2]"])])
            await transaction.commit()
            await store.heartbeat(claim, {"orders": ids[-1]})
            agreement = await store.agree("orders", part_rows=7)
            with pytest.raises(RowError):
                decode_part(await whole(store, agreement), stream="orders")
            await store.leave(agreement)


HOSTILE = (
    ["\\"], ["\\\\n\\N\\."], ['"', "'", "''", '""'], ["a\tb\nc\rd"], ["\x01\x02\x00\x1f"], ["ä€😀\u2028\u0085"],
    ["%s %d %% ? $1 :x"], ["\\."], [",;|"], [""], [None, True, 1.5e300, -(2**63)], ["  leading and trailing  "],
)  # fmt: skip


def test_an_agreement_and_its_json() -> None:
    agreement = Agreement("orders", "e" * 32, {"wü": 5, "a": 2**62}, {"a": 1}, [PartRange(0, 9, 3)], "here", "x")
    assert Agreement.from_json(agreement.to_json()) == agreement
    turned = attrs.evolve(agreement, positions={"a": 2**62, "wü": 5}, source="there", id="y", parts=[PartRange(0, 9)])
    assert turned.same(agreement)
    assert turned.digest == agreement.digest
    for change in (
        {"stream": "o"}, {"epoch": "f"}, {"positions": {"a": 1}}, {"floors": {}}, {"parts": [PartRange(0, 8, 3)]},
    ):  # fmt: skip
        other = attrs.evolve(agreement, **change)
        assert not other.same(agreement)
        assert other.digest != agreement.digest
    for text in (b"", b"[]", b"{}", b"7", agreement.to_json().replace(b'"parts":[[0', b'"parts":[[null')):
        with pytest.raises(ValueError, match="no agreement"):
            Agreement.from_json(text)
