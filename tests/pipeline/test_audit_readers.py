"""Readers' reports in the audit, without Spark: nothing planted, nothing found; whatever is planted is named."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

import busrep
from busrep import ReaderReport, Settings, Stream
from busrep.cli.app import cli
from busrep.errors import ConfigError
from busrep.reports import HASH, line_of
from busrep.spark import audit_handled, audit_log, audit_reports, job
from busrep.spark.audit_reports import Reports, read_span
from busrep.spark.jobs import audit
from tests import ROOT
from tests.spark.archives import Bench, Local, orders

Line = dict[str, Any]


@attrs.define
class Handled:
    """In a batch's place."""

    writer: str
    after: int
    position: int
    tokens: Sequence[int]
    payloads: Sequence[bytes]
    epoch: str | None
    reader: str | None = "search"
    stream: Stream[Any] = attrs.field(factory=lambda: Stream("orders"))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An archive up to 300, and a table that goes on to 400; a fact of two rows in each."""
    monkeypatch.setattr(audit_log, "WAIT", 0.0)
    made = Bench(Local(), tmp_path)
    both = [*orders(range(2, 200, 2)), (200, "[200]"), (200, "[2001]"), *orders(range(202, 300, 2))]
    made.write("w1", orders(range(1, 300, 2)), upto=299)
    made.write("w2", both, upto=299)
    made.archived_by_hand(120)
    made.write("w1", orders(range(301, 400, 2)), upto=399)
    made.write("w2", [*orders(range(300, 400, 2)), (400, "[400]"), (400, "[4001]")], upto=400)
    write_report(made, batches(made))
    return made


def epoch_of(bench: Bench) -> str:
    with contextlib.closing(sqlite3.connect(bench.path)) as connection:
        return str(connection.execute("SELECT value FROM busrep_meta WHERE key = 'epoch'").fetchone()[0])


def batches(bench: Bench, size: int = 20) -> list[Handled]:
    """All rows of the table as a reader gets them: by writer in turn, in batches of tokens."""
    rows, epoch, made = bench.table(), epoch_of(bench), []
    for start in range(0, 401, size):
        for writer in ("w1", "w2"):
            some = [row for row in rows if row[0] == writer and start <= row[1] < start + size]
            if some:
                end = min(start + size - 1, 399 if writer == "w1" else 400)
                texts = [row[3].encode() for row in some]
                made.append(Handled(writer, max(0, start - 1), end, [row[1] for row in some], texts, epoch))
    return made


def path_of(bench: Bench) -> Path:
    return bench.folder / "handled.jsonl"


def write_report(bench: Bench, found: Iterable[Handled]) -> None:
    path_of(bench).unlink(missing_ok=True)
    with ReaderReport(path_of(bench)) as report:
        for batch in found:
            report.add(batch)


def lines(bench: Bench) -> list[Line]:
    return [json.loads(line) for line in path_of(bench).read_text().splitlines()]


def put_lines(bench: Bench, found: Iterable[Line]) -> None:
    path_of(bench).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in found))


def run(bench: Bench, *paths: Path, **options: Any) -> job.Report:
    handled = tuple(map(str, paths or [path_of(bench)]))
    told = audit.Options(store=bench.url, archive=bench.root.url, bucket=100, handled=handled, **options)
    report = audit.run(bench.spark, told, job.silent)
    json.dumps(report)
    text = audit.describe(report)
    wrong = [*report["findings"], *(one for found in report["streams"].values() for one in found["findings"])]
    assert report["ok"] == (not wrong and all(not one["differences"] for one in report["streams"].values()))
    assert all(one["text"] in text for one in wrong)
    return report


def named(report: job.Report) -> list[tuple[str, str, int]]:
    """(kind, writer, token) of what is wrong, in order."""
    found = report["streams"]["orders"]["findings"]
    return [(one["kind"].removeprefix("handled: "), one["writer"], one.get("token", 0)) for one in found]


def counted(report: job.Report, writer: str, reader: str = "search") -> dict[str, Any]:
    found: dict[str, Any] = report["streams"]["orders"]["handled"][reader]["writers"][writer]
    return found


# -- nothing is wrong -----------------------------------------------------------------------------------------


def test_identical(bench: Bench) -> None:
    report = run(bench)
    assert report["ok"]
    nothing = {"repeated": 0, "lost": 0, "extra": 0, "changed": 0, "out_of_order": 0, "not_compared": 0, "same": True}
    assert counted(report, "w1") == {"after": 0, "upto": 399, "rows": 200, **nothing}
    assert counted(report, "w2") == {"after": 0, "upto": 400, "rows": 202, **nothing}
    assert report["torn_lines"] == report["unusable_lines"] == {}
    assert report["streams"]["orders"]["handled"]["search"]["not_reported"] == []


def test_the_hash_is_of_the_line_that_manifests_hash(bench: Bench) -> None:
    from hashlib import sha256

    first = lines(bench)[0]
    assert b64decode(first["hashes"])[:HASH] == sha256(b'1 0 w1 [1,"new"]\n').digest()[:HASH]
    assert (first["facts"], first["rows"], first["tokens"][:3]) == (10, 10, [1, 2, 2])
    two = next(line for line in lines(bench) if line["facts"] != line["rows"])
    assert (two["facts"], two["rows"], two["tokens"][:2]) == (10, 11, [1, 0])


def test_not_archived_at_all(bench: Bench, tmp_path: Path) -> None:
    """Then it is held against the table; without a report, nothing to compare is an error."""
    told = audit.Options(store=bench.url, archive=str(tmp_path / "no"), handled=(str(path_of(bench)),))
    report = audit.run(bench.spark, told, job.silent)
    assert report["ok"]
    assert counted(report, "w2")["rows"] == 202
    bench.sql("DELETE FROM busrep_facts WHERE id = 8")
    assert named(audit.run(bench.spark, told, job.silent)) == [("extra", "w2", 8)]


def test_a_reader_that_began_later_and_is_not_at_the_end(bench: Bench) -> None:
    put_lines(bench, [line for line in lines(bench) if line["writer"] == "w1"][3:-3])
    report = run(bench)
    assert report["ok"]
    assert (counted(report, "w1")["after"], counted(report, "w1")["upto"]) == (59, 339)
    assert report["streams"]["orders"]["handled"]["search"]["not_reported"] == ["w2"]


def test_pruned_and_never_archived(bench: Bench) -> None:
    bench.sql("DELETE FROM busrep_facts WHERE writer = 'w1' AND id <= 321")
    bench.sql("UPDATE busrep_positions SET floor = 321 WHERE writer = 'w1'")
    report = run(bench)
    assert report["ok"]
    assert (counted(report, "w1")["not_compared"], counted(report, "w2")["not_compared"]) == (11, 0)
    put_lines(bench, [line for line in lines(bench) if line["after"] not in (19, 359)])
    assert [(kind, token) for kind, who, token in named(run(bench)) if who == "w1"][:2] == [("lost", 21), ("lost", 23)]


# -- planted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [1, 155, 299, 301, 399])
def test_a_row_that_is_lost(bench: Bench, token: int) -> None:
    found = batches(bench)
    for one in found:
        if token in one.tokens:
            at = list(one.tokens).index(token)
            one.tokens = [*one.tokens[:at], *one.tokens[at + 1 :]]
            one.payloads = [*one.payloads[:at], *one.payloads[at + 1 :]]
    write_report(bench, found)
    report = run(bench)
    assert named(report) == [("lost", "w1", token)]
    assert counted(report, "w1")["lost"] == 1


def test_a_row_of_a_fact_that_is_lost(bench: Bench) -> None:
    found = batches(bench)
    for one in found:
        if 400 in one.tokens:
            one.tokens, one.payloads = one.tokens[:-1], one.payloads[:-1]
    write_report(bench, found)
    finding = run(bench)["streams"]["orders"]["findings"]
    assert [(one["token"], one["index"], one["kind"]) for one in finding] == [(400, 1, "handled: lost")]


def test_a_span_that_is_lost(bench: Bench) -> None:
    put_lines(bench, [line for line in lines(bench) if not (line["writer"] == "w2" and 99 <= line["after"] <= 139)])
    report = run(bench, differences=4)
    assert named(report) == [("lost", "w2", token) for token in (100, 102, 104, 106)]
    assert counted(report, "w2")["lost"] == 30


def test_the_last_span_is_lost_and_its_position_was_saved(bench: Bench) -> None:
    insert = "INSERT INTO busrep_readers (reader, stream, writer, position, epoch, saved_at) SELECT ?, 'orders', ?, ?, "
    bench.sql(insert + "value, 0 FROM busrep_meta WHERE key = 'epoch'", [("search", "w1", 399), ("search", "w2", 340)])
    put_lines(bench, [line for line in lines(bench) if line["upto"] < 380])
    assert named(run(bench))[0] == ("lost", "w1", 381)
    assert counted(run(bench), "w1")["lost"] == 10
    assert counted(run(bench), "w2")["lost"] == 0


def test_a_row_twice(bench: Bench) -> None:
    found = batches(bench)
    one = found[4]
    one.tokens, one.payloads = [one.tokens[0], *one.tokens], [one.payloads[0], *one.payloads]
    write_report(bench, found)
    assert named(run(bench)) == [("extra", one.writer, one.tokens[0])]


@pytest.mark.parametrize("back", [1, 2, 5])
def test_spans_again_after_a_crash(bench: Bench, back: int) -> None:
    """At least once: that is told, and wrong only when asked."""
    found = lines(bench)
    put_lines(bench, found[:20] + found[20 - 2 * back :])
    report = run(bench)
    assert report["ok"]
    assert counted(report, "w1")["repeated"] == 10 * back
    again = run(bench, once=True)
    assert named(again) == [
        ("again", who, found[20 - 2 * back]["after"] + 1 + at) for at, who in ((1, "w1"), (0, "w2"))
    ]
    one = found[19]
    put_lines(bench, [*found[:20], spoiled(one), *found[20:]])  # the second time it was another row
    assert named(run(bench)) == [("changed", one["writer"], first_of(one))]


def first_of(line: Line) -> int:
    return int(line["after"] + line["tokens"][0])


def spoiled(line: Line) -> Line:
    hashes = bytearray(b64decode(line["hashes"]))
    hashes[0] ^= 1
    return {**line, "hashes": b64encode(hashes).decode()}


def test_batches_cut_otherwise_after_a_crash(bench: Bench) -> None:
    put_lines(bench, lines(bench)[:20])
    with ReaderReport(path_of(bench)) as report:
        for batch in batches(bench, 33)[8:]:
            report.add(batch)
    found = run(bench)
    assert found["ok"]
    assert counted(found, "w1")["repeated"] > 0


def test_swapped_rows(bench: Bench) -> None:
    found = batches(bench)
    one = found[7]
    order = [0, 2, 1, *range(3, len(one.tokens))]
    one.tokens, one.payloads = ([values[at] for at in order] for values in (one.tokens, one.payloads))
    write_report(bench, found)
    assert named(run(bench)) == [("order", one.writer, one.tokens[2])]


def test_swapped_spans(bench: Bench) -> None:
    found = lines(bench)
    found[6], found[8] = found[8], found[6]
    put_lines(bench, found)
    report = run(bench)
    assert named(report)[0] == ("order", "w1", 61)
    assert {kind for kind, *_ in named(report)} == {"order"}
    assert counted(report, "w1")["out_of_order"] == 10
    assert counted(report, "w1")["lost"] == 0


@pytest.mark.parametrize("token", [3, 200, 260, 301, 400])
def test_a_changed_byte(bench: Bench, token: int) -> None:
    found = batches(bench)
    for one in found:
        if token in one.tokens:
            at = list(one.tokens).index(token)
            one.payloads = [*one.payloads[:at], one.payloads[at].replace(b"]", b" ]"), *one.payloads[at + 1 :]]
    write_report(bench, found)
    assert named(run(bench)) == [("changed", "w1" if token % 2 else "w2", token)]


def test_another_writers_row(bench: Bench) -> None:
    found = batches(bench)
    one, other = found[2:4]
    assert (one.writer, other.writer, other.tokens[0]) == ("w1", "w2", 20)
    one.tokens, one.payloads = [20, *one.tokens], [other.payloads[0], *one.payloads]
    other.tokens, other.payloads = other.tokens[1:], other.payloads[1:]
    write_report(bench, found)
    report = run(bench)
    assert named(report) == [("extra", "w1", 20), ("lost", "w2", 20)]
    assert "it is of writer w2" in report["streams"]["orders"]["findings"][0]["text"]


def test_a_torn_line(bench: Bench) -> None:
    content = path_of(bench).read_bytes()
    path_of(bench).write_bytes(content[:-30])
    report = run(bench)
    assert report["ok"]
    assert report["torn_lines"] == {str(path_of(bench)): 1}
    assert counted(report, "w2")["rows"] == 200
    with ReaderReport(path_of(bench)) as again:  # a reader goes on behind it, with the batch that was not noted
        again.add(batches(bench)[-1])
    report = run(bench)
    assert report["ok"]
    assert report["torn_lines"] == {str(path_of(bench)): 1}
    assert counted(report, "w2")["rows"] == 202


@pytest.mark.parametrize("cut", [1, 5, 12, 60, -2, -1])
def test_a_line_torn_in_the_middle(bench: Bench, cut: int) -> None:
    found = path_of(bench).read_bytes().splitlines(keepends=True)
    path_of(bench).write_bytes(b"".join([*found[:5], found[5].rstrip()[:cut] + b"\n", *found[6:]]))
    report = run(bench)
    assert report["torn_lines"] == {str(path_of(bench)): 1}
    assert report["unusable_lines"] == {}
    assert {kind for kind, *_ in named(report)} == {"lost"}  # it was not handled again


@pytest.mark.parametrize("where", ["first", "middle", "last", "all"])
def test_a_foreign_epoch(bench: Bench, where: str) -> None:
    found = lines(bench)
    at = {"first": [0], "middle": [10], "last": [len(found) - 1], "all": range(len(found))}[where]
    for number in at:
        found[number]["epoch"] = "another"
    put_lines(bench, found)
    report = run(bench)
    if where == "first":  # of the log before: the reader begins where that of this one does
        assert report["ok"]
        assert counted(report, "w1")["after"] == 19
    else:
        assert "epoch" in {kind for kind, *_ in named(report)}
    assert ("lost" in {kind for kind, *_ in named(report)}) == (where == "middle")


@pytest.mark.parametrize(
    "garbage",
    [
        "", "nonsense", "{}", "[]", "null", "\x00\xff", '{"version":2}', '{"version":1}', "{",
        '{"version":1,"reader":null,"epoch":"e","stream":"orders","writer":"w1","after":0,"upto":1,"facts":1,"rows":1,'
        '"tokens":["1"],"hashes":"AAAAAAAAAAA="}',
        '{"version":1,"reader":null,"epoch":"e","stream":"orders","writer":"w1","after":0,"upto":1,"facts":1,"rows":1,'
        '"tokens":[1],"hashes":"AAAA"}',
        '{"version":1,"reader":7,"epoch":"e","stream":"orders","writer":"w1","after":0,"upto":1,"facts":1,"rows":1,'
        '"tokens":[1],"hashes":"AAAAAAAAAAA="}',
        '{"version":1,"reader":"r","epoch":"e","stream":"orders","writer":"w1","after":0,"upto":1,"facts":1,"rows":1,'
        '"tokens":[99999999999999999999],"hashes":"AAAAAAAAAAA="}',
    ],
)  # fmt: skip
def test_garbage(bench: Bench, garbage: str) -> None:
    found = path_of(bench).read_text().splitlines()
    path_of(bench).write_text("\n".join([*found[:5], garbage, *found[5:], ""]), encoding="latin-1")
    report = run(bench)
    if garbage in ("", "{"):  # what is left of a line when it was torn
        assert report["ok"]
        assert report["torn_lines"] == {str(path_of(bench)): 1}
        return
    assert [one["kind"] for one in report["findings"]] == ["report"]
    assert "line 6" in report["findings"][0]["text"]
    assert counted(report, "w1")["rows"] == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [("after", 21), ("upto", 30), ("rows", 9), ("facts", 9), ("tokens", [1, 2]), ("version", 2), ("writer", None)],
)
def test_a_line_that_was_changed(bench: Bench, name: str, value: Any) -> None:
    found = lines(bench)
    found[2][name] = value
    put_lines(bench, found)
    report = run(bench)
    assert not report["ok"]
    assert ("lost", "w1", 21) in named(report)


def test_a_report_that_is_ahead_of_the_table(bench: Bench) -> None:
    bench.sql("UPDATE busrep_positions SET position = 350 WHERE writer = 'w1'")
    assert named(run(bench)) == [("reader", "w1", 0)]
    assert counted(run(bench), "w1")["not_compared"] == 25


def test_no_file_and_no_report(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--handled .*nothing: No such file"):
        run(bench, tmp_path / "nothing")
    empty = tmp_path / "empty"
    empty.touch()
    assert run(bench, empty)["ok"]


def test_a_line_without_an_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_reports, "MOST_BYTES", 1000)
    path_of(bench).write_text("x" * 2000)
    with pytest.raises(ConfigError, match="a line does not end"):
        run(bench)


def test_several_readers_in_several_files(bench: Bench) -> None:
    """Of one reader the files follow on one another."""
    found = lines(bench)
    first, second, mail = (bench.folder / name for name in ("first", "second", "mail"))
    for path, some in ((first, found[:20]), (second, found[18:]), (mail, [{**one, "reader": "mail"} for one in found])):
        path.write_text("".join(json.dumps(line) + "\n" for line in some))
    report = run(bench, first, second, mail)
    assert report["ok"]
    assert counted(report, "w1")["repeated"] == 10
    assert counted(report, "w1", "mail")["rows"] == 200
    assert named(run(bench, second, first, mail))[0] == ("order", "w1", 1)


def test_the_archive_job_goes_on_and_the_reader_too(bench: Bench) -> None:
    """Handled and saved after the report was first read: the rest of it is read then."""
    found = path_of(bench).read_bytes()
    path_of(bench).write_bytes(found[:3000])
    insert = "INSERT INTO busrep_readers (reader, stream, writer, position, epoch, saved_at) SELECT ?, 'orders', ?, ?, "
    insert += "value, 0 FROM busrep_meta WHERE key = 'epoch'"

    def handle() -> None:
        path_of(bench).write_bytes(found)
        bench.sql(insert, [("search", "w1", 399), ("search", "w2", 400)])

    bench.spark.meanwhile.append(handle)
    report = run(bench)
    assert report["ok"]
    assert counted(report, "w2")["rows"] == 202


def test_a_compaction_and_pruning_meanwhile(bench: Bench) -> None:
    def prune() -> None:
        bench.sql("DELETE FROM busrep_facts WHERE writer = 'w1' AND id <= 341")
        bench.sql("UPDATE busrep_positions SET floor = 341 WHERE writer = 'w1'")

    for number in range(4):
        bench.spark.meanwhile[:] = [*[lambda: None] * number, prune]
        assert run(bench)["ok"]
        bench.spark.meanwhile.clear()


# -- without a table ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_however_it_is_cut(bench: Bench, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of any size, crashes anywhere, ranges of any size: nothing is found, but the row that was spoiled."""
    dice = random.Random(seed)
    size = dice.choice([7, 50, 1000])
    for module in (audit_reports, audit_handled):
        monkeypatch.setattr(module, "RANGE", size)
    monkeypatch.setattr("busrep.spark.audit_readers.RANGE", size)
    monkeypatch.setattr(audit_handled, "ROWS", dice.choice([1, 10, 1000]))
    monkeypatch.setattr(audit_handled, "TOKENS", size * dice.choice([1, 3]))
    found = batches(bench, dice.choice([1, 3, 20, 500]))
    handled, at = list[Handled](), 0
    while at < len(found):
        at = max(0, at - dice.randint(0, 3))
        count = dice.randint(3, 20)
        handled += found[at : at + count]
        at += count
    write_report(bench, handled)
    assert run(bench)["ok"]
    one = dice.choice(handled)
    at = dice.randrange(len(one.tokens))
    one.payloads = [*one.payloads[:at], one.payloads[at] + b" ", *one.payloads[at + 1 :]]
    write_report(bench, handled)
    assert ("changed", one.writer, one.tokens[at]) in named(run(bench, differences=1000))


def test_the_size_of_a_report(tmp_path: Path) -> None:
    """A row in a batch of many takes 13 bytes, one that comes alone 200."""
    tokens = range(1, 1001)
    line = line_of(Handled("w1", 0, 1000, tokens, [b"[1]"] * 1000, "e" * 32))
    assert len(line) < 13_000
    alone = line_of(Handled("w1", 9_999_998, 9_999_999, [9_999_999], [b"[1]"], "e" * 32))
    assert len(alone) < 205
    assert read_span(alone).tokens[0] == 9_999_999


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler fails, and nothing of the line counts."""
    real, room = os.write, [300]

    def write(file: int, data: Any) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        count: int = real(file, bytes(data)[: room[0]])
        room[0] -= count
        return count

    path = tmp_path / "handled"
    one = Handled("w1", 0, 3, [1, 2, 3], [b"[1]"] * 3, "e")
    with ReaderReport(path) as report:
        monkeypatch.setattr(os, "write", write)
        report.add(one)
        with pytest.raises(OSError, match="No space"):
            report.add(one)
        monkeypatch.undo()
        report.add(one)
    with contextlib.closing(Reports([str(path)])) as found:
        found.scan()
        assert (found.unfinished(), found.findings) == ({str(path): 1}, [])
        assert len(list(found.spans("orders", "e", 0, 0))) == 2


# -- a real reader --------------------------------------------------------------------------------------------

TAIL = "from busrep.cli import main; main()"
THREADS = """
import sys, time, busrep, busrep.sync
_, redis, name, store, path = sys.argv
orders = busrep.Stream("orders")
with busrep.ReaderReport(path) as report:
    with busrep.sync.connect(redis, name=name, streams=[orders], store=store, reader="search") as bus:
        bus.subscribe(orders)(report.add)
        time.sleep(60)
"""


def reader(kind: str, bench: Bench, redis_url: str, name: str) -> subprocess.Popen[bytes]:
    path = str(path_of(bench))
    if kind == "threads":
        told = [THREADS, redis_url, name, bench.url, path]
    else:
        told = [TAIL, "tail", "--redis", redis_url, "--name", name, "--store", bench.url, "--stream", "orders"]
        told += ["--handled", path, "--reader", "search"]
    return subprocess.Popen([sys.executable, "-c", *told], stdout=subprocess.DEVNULL)


def handled_upto(path: Path) -> int:
    whole = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["upto"] for line in whole if line.endswith(b"}\n")), default=0)


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["tail", "threads"])
def test_a_reader_that_is_killed(
    kind: str, tmp_path: Path, redis_url: str, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 in the middle, three times; started again with the same file it goes on: nothing is lost."""
    monkeypatch.setattr(audit_log, "WAIT", 5.0)
    bench = Bench(Local(), tmp_path)
    asyncio.run(written_and_killed(kind, bench, redis_url, bus_name))
    bench.archived_by_hand(500)
    report = run(bench)
    assert named(report) == []
    found = counted(report, "w1")
    assert found["same"]
    assert found["rows"] - found["repeated"] == 1350
    assert found["not_compared"] == 0
    bench.sql("DELETE FROM busrep_facts")  # what is archived is held against the archive
    assert named(run(bench)) == []


async def written_and_killed(kind: str, bench: Bench, redis_url: str, name: str) -> None:
    stream = Stream[Any]("orders")
    quick = Settings(heartbeat=0.2)
    child = reader(kind, bench, redis_url, name)
    try:
        async with busrep.connect(
            redis_url, name=name, streams=[stream], store=bench.url, writer="w1", settings=quick
        ) as bus:
            for number in range(900):
                async with bus.write(stream) as fact:
                    for part in range(1 + number % 2):
                        fact.add([number, "Grüße", part])
                if number % 250 == 249:
                    await reached(bench, fact.id - 100)
                    child.kill()
                    child.wait()
                    child = reader(kind, bench, redis_url, name)
            await reached(bench, fact.id)
    finally:
        child.kill()
        child.wait()


async def reached(bench: Bench, token: int) -> None:
    late = time.monotonic() + 40
    while handled_upto(path_of(bench)) < token:
        assert time.monotonic() < late
        await asyncio.sleep(0.02)


# -- the commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--handled", "x"], "--handled needs --store, --reader and --stream"),
        (
            ["--handled", "x", "--store", "sqlite:///x", "--reader", "r"],
            "--handled needs --store, --reader and --stream",
        ),
        (["--reader", "r"], "--reader goes with --handled"),
    ],
)
def test_tail_says_what_it_needs(given: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUSREP_STORE", raising=False)
    result = CliRunner().invoke(cli, ["tail", "--name", "x", *given])
    assert result.exit_code == 2
    assert said in result.output


def test_the_docs_name_what_there_is() -> None:
    text = (ROOT / "docs" / "pipeline.md").read_text()
    section = text.split("\n## What readers have handled")[1].split("\n## ")[0]
    for code in re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        compile(code, "docs/pipeline.md", "exec")
    known = {field.name for field in attrs.fields(audit.Options)}
    (command,) = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert {one.replace("-", "_") for one in re.findall(r"--([\w-]+)", command)} <= known
    told = set(re.findall(r"^\| handled: (\w+) \|", section, re.MULTILINE))
    assert told == {"lost", "extra", "changed", "order", "again"}
