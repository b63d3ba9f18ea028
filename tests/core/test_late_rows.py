"""Rows of a foreign writer below its position: some are repeated, and some come late."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis.asyncio

import busrep
from busrep import Stream
from busrep.core.catchup import UpdatesPage
from busrep.core.delivery import RECENT_TOKENS, Missed, RecentTokens
from busrep.core.received import Followed
from tests.asyncio.bootstraps import until
from tests.http.test_reference import QUICK
from tests.stores.store_conformance import sync
from tests.support.reader import Reader

OPENING = b"SERVER test " + b"0" * 32 + b"\nNAME w 7\n"


def following(*lines: bytes, **options: Any) -> Reader:
    reader = Reader([Followed("s", resettable=True, fetchable=False)], **options)
    for line in lines:
        reader.receive(line, 0.0)
    return reader


def rdata(*tokens: int) -> list[bytes]:
    return [b"RDATA s w %d [%d]" % (token, token) for token in tokens]


def counted(reader: Reader) -> tuple[int, int]:
    return reader.counters.late_rows, reader.counters.duplicates_dropped


def test_a_late_row_is_told_from_a_repeated_one() -> None:
    reader = following(b"POSITION s w 0 35", *rdata(36, 38, 39, 40, 37, 39, 36))
    assert counted(reader) == (1, 2)
    assert reader.positions() == {"s": {"w": 35}}
    batch = reader.take("s", "w")
    assert list(getattr(batch, "tokens", [])) == [36, 38, 39, 40]  # in order, and no other
    assert [str(error) for error in reader.errors] == [
        "bad row: came late, below the position, and is not delivered: see late_rows in statistics(): b'RDATA s w 37'"
    ]


def test_what_was_before_it_was_heard_is_not_late() -> None:
    assert counted(following(b"POSITION s w 35 35", *rdata(36, 34, 35))) == (0, 2)


def test_what_was_reported_missed_is_not_late_as_well() -> None:
    reader = following(b"POSITION s w 0 35", *rdata(36), b"POSITION s w 39 40", *rdata(38, 41))
    assert counted(reader) == (0, 1)
    assert reader.counters.missed == 1


def test_what_a_native_writer_repeats_is_not_late_though_it_was_first_heard_of_as_any() -> None:
    reader = Reader([Followed("s")], epoch="0" * 32)
    reader.admission.registered({("s", "w"): 7})
    reader.start_at("s", "w", 35)
    reader.learned("s", "w", 38)
    (asked,) = reader.fetches(0.0)
    reader.receive_page(asked, UpdatesPage("s", "w", 35, 38, [36, 38], [b"1", b"1"], False, "0" * 32), 0.0)
    for line in (b"POSITION s w 38 38", *rdata(39, 40, 40)):
        reader.receive(OPENING + line, 0.0)
    assert counted(reader) == (0, 1)


def test_after_a_reset_tokens_are_of_another_life() -> None:
    assert counted(following(b"POSITION s w 0 35", *rdata(36, 38), b"POSITION s w 0 0", *rdata(37, 37))) == (0, 1)


def test_a_native_writer_has_no_late_rows() -> None:
    """Its frames prove their order: below the position there are repetitions only."""
    reader = following(OPENING + b"POSITION s w 0 35")
    for token in (36, 38, 37):
        reader.receive(b"NAME w 7\n" + rdata(token)[0], 0.0)
    assert counted(reader) == (0, 1)


def test_a_bounded_number_of_tokens_is_remembered() -> None:
    recent = RecentTokens(5)
    recent.add([7])
    recent.add(range(10, 10 + 4 * RECENT_TOKENS, 2))
    first = 10 + 2 * RECENT_TOKENS
    assert recent.late([6, 8, first - 2, first - 1, first, first + 1]) == [first - 1, first + 1]
    recent.add([10**6])
    assert recent.late([first - 1, first, first + 1, 10**6 - 1]) == [first + 1, 10**6 - 1]


def test_rows_of_a_foreign_writer_may_have_been_missed() -> None:
    """Its tokens skip: one sequence numbers the rows of several writers, so a gap may hold none of its own."""

    def notice(reader: Reader) -> Any:
        while (found := reader.take("s", "w")) is not None and not isinstance(found, Missed):
            reader.done("s", "w")
        return found

    foreign = notice(following(b"POSITION s w 0 35", b"POSITION s w 39 40"))
    native = notice(following(OPENING + b"POSITION s w 0 35", OPENING + b"POSITION s w 39 40"))
    assert (foreign.certain, native.certain) == (False, True)
    assert (native.after, native.upto) == (35, 40)


@pytest.mark.servers
@sync
async def test_both_are_seen_by_who_runs_it(redis_url: str, bus_name: str, caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream("s", resettable=True)
    caplog.set_level(logging.INFO, logger="busrep")
    async with busrep.connect(redis_url, name=bus_name, streams=[stream], settings=QUICK) as bus:
        tokens: list[int] = []
        bus.subscribe(stream)(lambda batch: tokens.extend(batch.tokens))
        await until(lambda: bus.statistics()["link"]["connected"])
        client = redis.asyncio.Redis.from_url(redis_url)
        for line in [b"POSITION s w 0 35", *rdata(36, 38, 39, 40, 37), b"POSITION s w 45 45", *rdata(46)]:
            await client.publish(bus_name, line)
        await client.aclose()
        await until(lambda: tokens == [36, 38, 39, 40, 46])
        assert bus.statistics()["reader"]["late_rows"] == 1
    assert "(s, w): rows in (40, 45] may have been missed" in caplog.text
    assert "b'RDATA s w 37'" in caplog.text
