"""Real traffic of the reference system, through a real Redis."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
import redis.asyncio

import busrep
from busrep.core.application_commands import UserIp
from busrep.core.framing import parse_frame
from tests import DATA

CHANNEL = "example.test"


def messages() -> list[dict[str, Any]]:
    with gzip.open(DATA / "synapse-1.163.2.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def expected() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads((DATA / "synapse-1.163.2.positions.json").read_text())["positions"]
    return found


@pytest.mark.servers
def test_a_reader_of_the_capture_ends_where_its_database_did(redis_url: str) -> None:
    sent = messages()
    # The capture's own channel, so that the lines are exactly those of the wire; this database has no other use of it.
    typed = {"typing": busrep.Stream("typing", resettable=True)}

    async def main() -> dict[str, Any]:
        async with busrep.connect(redis_url, name=CHANNEL, undeclared=True, streams=typed.values()) as bus:
            rows: list[Any] = []
            resets: list[tuple[str, str, int]] = []
            bus.subscribe(typed["typing"])(lambda batch: rows.extend(batch.rows))
            bus.on_reset()(lambda *args: resets.append(args))
            bus.on(UserIp)(lambda _: None)
            client = redis.asyncio.Redis.from_url(redis_url)
            async with asyncio.timeout(60):
                while len(await client.pubsub_numsub(CHANNEL, f"{CHANNEL}/USER_IP")) != 2 or not all(
                    count for _, count in await client.pubsub_numsub(CHANNEL, f"{CHANNEL}/USER_IP")
                ):
                    await asyncio.sleep(0.01)
                before = bus.statistics()["reader"]["frames_received"]
                for start in range(0, len(sent), 500):
                    async with client.pipeline(transaction=False) as pipe:
                        for message in sent[start : start + 500]:
                            pipe.publish(message["channel"], message["data"])
                        await pipe.execute()
                while bus.statistics()["reader"]["frames_received"] < before + len(sent):
                    await asyncio.sleep(0.01)
                while bus.positions() != expected():
                    await asyncio.sleep(0.01)
            await client.aclose()
            assert bus.positions() == expected()
            assert len(rows) == sum(message["data"].startswith("RDATA typing ") for message in sent)
            return {"statistics": bus.statistics()["reader"], "resets": resets}

    found = asyncio.run(main())
    statistics = found["statistics"]
    assert statistics["parse_errors"] == statistics["unknown_lines"] == 0
    assert statistics["rows_unregistered"] == 0
    # Of sticky_events 46, 48, 47, 48: one row comes late, all others are the same once more.
    assert (statistics["late_rows"], statistics["duplicates_dropped"]) == (1, repeated(sent) - 1)
    assert [reset for reset in found["resets"] if reset[0] == "typing"] == [("typing", "stream_writer1", 0)]
    assert statistics["needed_catch_up"] == would_need_catch_up(sent)


def repeated(sent: list[dict[str, Any]]) -> int:
    """By brute force: rows at or below the position of their writer, once that is known."""
    at: dict[tuple[str, str], int] = {}
    found = 0
    for message in sent:
        words = message["data"].split(" ", 5)
        if words[0] == "POSITION":
            at[words[1], words[2]] = int(words[4])
        elif words[0] == "RDATA" and words[3] != "batch" and (words[1], words[2]) in at:
            found += int(words[3]) <= at[words[1], words[2]]
            at[words[1], words[2]] = max(at[words[1], words[2]], int(words[3]))
    return found


def would_need_catch_up(sent: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By brute force, straight from the text: whose POSITION ever stood ahead of what had been seen of it."""
    at: dict[tuple[str, str], int] = {}
    found: dict[str, set[str]] = {}
    for message in sent:
        words = message["data"].split(" ")
        if words[0] == "RDATA" and words[3] != "batch" and (words[1], words[2]) in at:
            at[words[1], words[2]] = max(at[words[1], words[2]], int(words[3]))
        elif words[0] == "POSITION":
            key, prev, new = (words[1], words[2]), int(words[3]), int(words[4])
            if prev > at.get(key, 0):
                found.setdefault(key[0], set()).add(key[1])
            at[key] = new
    return {stream: sorted(writers) for stream, writers in sorted(found.items())}


def test_every_line_of_the_capture_parses_and_formats_back() -> None:
    for message in messages():
        frame = parse_frame(message["data"].encode(), 2**20)
        assert not frame.errors
        assert len(frame.items) == 1
