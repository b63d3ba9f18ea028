"""What a source of snapshots says is held against the log that its reader goes on with: nothing is lost in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest

from busrep.core.snapshots import Agreement, PartRange, PartRows, decode_part, encode_rows
from busrep.errors import Unavailable
from busrep.snapshots import parts
from busrep.snapshots import sources as snapshot_sources
from busrep.snapshots.sources import check_log, checked_part
from tests.asyncio.bootstraps import SMALL, Source, Target, deployment, online, write
from tests.http.test_server import memory_store
from tests.stores.store_conformance import sync
from tests.stores.store_conformance import write as write_facts


def moved(field: str, by: int) -> Callable[[Agreement], Agreement]:
    def change(found: Agreement) -> Agreement:
        before: Mapping[str, int] = getattr(found, field)
        return attrs.evolve(found, **{field: {"w1": before.get("w1", 0) + by}})

    return change


LIES: dict[str, tuple[Callable[[Agreement], Agreement], str]] = {
    "above what is proven": (moved("positions", 50), "has proven no more than"),
    "a writer that nobody knows": (
        lambda found: attrs.evolve(found, positions={**found.positions, "w9": 5}),
        "'w9', of which the log has proven no more than 0",
    ),
    "above the log's floor": (moved("floors", 20), "leaves out rows up to 20 of 'w1'"),
    "its last part is missing": (lambda found: attrs.evolve(found, parts=found.parts[:-1]), "its parts end at"),
    "no part at all": (lambda found: attrs.evolve(found, parts=()), "its parts end at 0"),
}


@pytest.mark.parametrize("case", LIES)
@sync
async def test_a_reader_loses_nothing_to_a_source_that_is_wrong(case: str, caplog: pytest.LogCaptureFixture) -> None:
    change, told = LIES[case]
    async with deployment(attrs.evolve(SMALL, fetch_timeout=0.3)) as shop, shop.bus(writer="w1") as writer:
        await write(writer, 95)
        await writer.writing.beat()
        source = Source(writer.store)

        def once(found: Agreement) -> Agreement:
            source.change = None
            return change(found)

        source.change = once
        async with shop.bus(reader="billing", start=None, snapshot_source=source) as reader:
            target = Target().of(reader)
            await online(reader)
            last = await write(writer, 5, first=95)
            await reader.wait_for(shop.streams[0], "w1", last)
            assert target.numbers == list(range(100))
    assert told in caplog.text
    assert len(source.agrees) == 2
    assert source.held == []


@sync
async def test_a_log_that_lags_is_waited_for() -> None:
    """That of a replica: a new snapshot would be ahead of it as well."""
    async with memory_store() as store:
        claim = await store.claim("w1", ["orders"], timeout=1)
        agreement = await store.agree("orders", part_rows=2)
        await check_log(agreement, store, patience=0)
        (token,) = await write_facts(store, claim, 1)
        ahead = attrs.evolve(agreement, positions={**agreement.positions, "w1": token}, parts=agreement.parts)
        with pytest.raises(Unavailable, match="has proven no more than"):
            await check_log(ahead, store, patience=0)
        await store.leave(agreement)
        looks = 0

        async def known(epoch: str | None = None) -> object:
            nonlocal looks
            looks += 1
            if looks == 2:
                await store.heartbeat(claim, {"orders": token})
            return await type(store).known(store, epoch)

        store.known = known  # type: ignore[method-assign, assignment]
        with pytest.raises(Unavailable, match="its parts end at"):  # there is a row by now
            await check_log(ahead, store, patience=30)
        assert looks == 2


# -- parts, of many pieces ------------------------------------------------------------------------------------

ROWS = 500
PART = Agreement("orders", "e" * 32, {"w1": ROWS, "w2": ROWS}, {}, (PartRange(0, ROWS, ROWS),))


def text_of(tokens: list[int], size: int = 0) -> bytes:
    writers = [f"w{1 + token % 2}" for token in tokens]
    return encode_rows(tokens, writers, [b'[%d,"%s"]' % (token, b"x" * size) for token in tokens])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of what is decoded at a time."""
    decoded: list[int] = []

    def counted(text: bytes, **options: Any) -> PartRows:
        decoded.append(len(text))
        return decode_part(text, **options)

    monkeypatch.setattr(snapshot_sources, "DECODED_AT_ONCE", 100)
    for module in (snapshot_sources, parts):
        monkeypatch.setattr(module, "decode_part", counted, raising=False)
    return decoded


@pytest.mark.parametrize("size", [0, 40, 99, 300])
@sync
async def test_a_part_is_decoded_once_and_others_have_their_turns(small_pieces: list[int], size: int) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    text = text_of(list(range(1, ROWS + 1)), size)
    counting = asyncio.create_task(count())
    found = await checked_part(PART, 0, text)
    counting.cancel()
    whole = decode_part(text)
    assert (list(found.tokens), list(found.writers), list(found.payloads), found.size) == (
        list(whole.tokens), list(whole.writers), list(whole.payloads), len(text),
    )  # fmt: skip
    assert sum(small_pieces) == len(text)
    assert max(small_pieces) <= 100 + len(text) // ROWS + 10
    assert turns >= len(small_pieces)


@sync
async def test_a_bootstrap_decodes_each_part_once(small_pieces: list[int]) -> None:
    async with deployment(SMALL) as shop, shop.bus(writer="w1") as writer:
        await write(writer, 35)
        await writer.writing.beat()
        async with shop.bus(reader="billing", start=None) as reader:
            target = Target().of(reader)
            await online(reader)
            assert target.numbers == list(range(35))
            assert reader.statistics()["bootstrap"]["orders"]["bytes"] == sum(small_pieces)


@pytest.mark.parametrize("at", range(1, 30))
@sync
async def test_two_rows_out_of_order_are_found_wherever_pieces_end(small_pieces: list[int], at: int) -> None:
    tokens = list(range(1, ROWS + 1))
    tokens[at - 1 : at + 1] = tokens[at], tokens[at - 1]
    with pytest.raises(Unavailable, match="not ordered by token"):
        await checked_part(PART, 0, text_of(tokens))
    assert len(small_pieces) <= 1 + at // 5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (text_of([*range(1, ROWS), ROWS + 1]), "outside of"),
        (text_of(list(range(1, ROWS))), f"has {ROWS - 1} rows, and {ROWS}"),
        (text_of(list(range(1, ROWS + 1)))[:-1], "cut off"),
        (b"", f"has 0 rows, and {ROWS}"),
    ],
)
@sync
async def test_what_is_wrong_at_its_end_is_found(small_pieces: list[int], text: bytes, told: str) -> None:
    with pytest.raises(Unavailable, match=told):
        await checked_part(PART, 0, text)
    assert sum(small_pieces) == len(text)
