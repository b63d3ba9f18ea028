"""``busrep bootstrap``: it loads what the table holds, goes on where it was cut off, and says what is wrong."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner, Result

import busrep.cli.bootstrap as command
from busrep.cli.app import cli
from busrep.core.snapshots import Agreement, AppliedParts, BootstrapProgress, PartRange
from busrep.errors import Unavailable
from busrep.stores import open_store
from busrep.streams import Registry, Stream
from tests import ROOT

orders = Stream[Any]("orders")
PART, PARTS = 30, 7


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def store_url(request: pytest.FixtureRequest) -> str:
    url = str(request.getfixturevalue(f"{request.param}_url"))
    asyncio.run(fill(url, PART * PARTS))
    return url


@pytest.fixture
def filled(sqlite_url: str) -> str:
    asyncio.run(fill(sqlite_url, PART * PARTS))
    return sqlite_url


async def fill(url: str, count: int) -> None:
    """Two writers' facts, by turns."""
    store = open_store(url, Registry([orders]))
    await store.init()
    await store.open()
    try:
        for writer in ("w1", "w2"):
            claim = await store.claim(writer, ["orders"], timeout=10)
            tokens = await store.reserve("orders", count // 2)
            transaction = store.transaction(claim)
            await transaction.begin()
            rows = [[token, 'odd "\\ \u00e9'] for token in tokens]
            facts = [(token, [row], [orjson.dumps(row)]) for token, row in zip(tokens, rows, strict=True)]
            await transaction.insert("orders", facts)
            await transaction.commit()
            await store.heartbeat(claim, {"orders": tokens[-1]})
    finally:
        await store.close()


def lines(count: int = PART * PARTS) -> bytes:
    """What a snapshot of them is."""
    half = count // 2
    text = b'%d w%d [%d,"odd \\"\\\\ \xc3\xa9"]\n'
    return b"".join(text % (token, 1 + (token > half), token) for token in range(1, count + 1))


def busrep(*args: object) -> Result:
    return CliRunner().invoke(cli, ["bootstrap", *map(str, args)])


def loaded(*args: object) -> Any:
    result = busrep(*args, "--json")
    assert result.exit_code == 0, result.output
    return orjson.loads(result.stdout)


def error(*args: object) -> str:
    result = busrep(*args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def cutting(monkeypatch: pytest.MonkeyPatch, number: int, keep: Callable[[bytes], bytes] = lambda piece: piece) -> None:
    """The source's connection is lost in part ``number``, behind its first piece; ``keep`` changes the pieces."""
    opened = command.with_all_streams

    @asynccontextmanager
    async def opened_to_be_cut(*args: Any) -> AsyncIterator[Any]:
        async with opened(*args) as store:
            load = store.load

            async def cut(agreement: Agreement, part: int) -> AsyncGenerator[bytes, None]:
                async for piece in load(agreement, part):
                    yield keep(piece)
                    if part == number:
                        raise Unavailable("the database", "the link was cut")

            store.load = cut  # type: ignore[method-assign]
            yield store

    monkeypatch.setattr(command, "with_all_streams", opened_to_be_cut)


# -- loading ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_what_the_table_holds(store_url: str, tmp_path: Path) -> None:
    out = tmp_path / "orders.txt"
    found = loaded("--store", store_url, "--stream", "orders", "--out", out, "--part-rows", PART)
    assert out.read_bytes() == lines()
    half = PART * PARTS // 2
    assert found["positions"] == {"w1": half, "w2": 2 * half}
    assert (found["rows"], found["parts"], found["bytes"]) == (2 * half, PARTS, len(lines()))
    assert found["sha256"] == hashlib.sha256(lines()).hexdigest()
    # The hash is of the rows, however they are cut, and kept nowhere.
    again = loaded("--store", store_url, "--stream", "orders")
    assert (again["sha256"], again["parts"], again["out"]) == (found["sha256"], 1, None)


def test_what_a_person_is_told(filled: str, tmp_path: Path) -> None:
    result = busrep("--store", filled, "--stream", "orders", "--out", tmp_path / "orders.txt")
    assert result.exit_code == 0
    assert hashlib.sha256(lines()).hexdigest() in result.stdout
    assert f"orders: {PART * PARTS} rows" in result.stdout
    assert "w2" in result.stdout
    assert result.stderr == ""  # no bar where nobody looks


def test_on_a_terminal_there_is_a_progress_bar(filled: str) -> None:
    arguments = ["bootstrap", "--store", filled, "--stream", "orders", "--part-rows", str(PART)]
    result = CliRunner().invoke(cli, arguments, env={"FORCE_COLOR": "1", "COLUMNS": "120"})
    assert result.exit_code == 0
    shown = re.sub("\x1b.*?[a-zA-Z]", "", result.stderr)
    assert re.search(rf"orders .* {PART * PARTS} rows, 0\.0 MB, [\d,]+ rows/s 0:00:00", shown), shown


def test_a_stream_without_rows(sqlite_url: str, tmp_path: Path) -> None:
    asyncio.run(open_store(sqlite_url, Registry([orders])).init())
    found = loaded("--store", sqlite_url, "--stream", "orders", "--out", tmp_path / "none")
    assert (found["rows"], found["parts"], found["positions"]) == (0, 0, {})
    assert found["sha256"] == hashlib.sha256().hexdigest()
    assert (tmp_path / "none").read_bytes() == b""


def test_the_stream_that_a_module_declares(filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop_of_one.py").write_text("import busrep\norders = busrep.Stream('orders')\n")
    found = loaded("--store", filled, "--streams", "shop_of_one:orders")
    assert found["stream"] == "orders"


@pytest.mark.parametrize("number", [0, PARTS - 1])
def test_a_run_that_was_cut_off_leaves_no_file(
    number: int, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "orders.txt"
    out.parent.mkdir()
    options = ("--store", store_url, "--stream", "orders", "--out", out, "--part-rows", PART)
    with monkeypatch.context() as patched:
        cutting(patched, number)
        assert "the link was cut" in error(*options)
    assert list(out.parent.iterdir()) == []
    found = loaded(*options)
    assert (out.read_bytes(), found["parts"]) == (lines(), PARTS)
    with monkeypatch.context() as patched:
        cutting(patched, number)
        assert "the link was cut" in error(*options, "--overwrite")
    assert out.read_bytes() == lines(), "what was there stays until the new one is whole"


def test_parquet_and_http_give_the_same_rows(filled: str, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/parquet"
    written = loaded("--store", filled, "--stream", "orders", "--to", place, "--part-rows", PART)
    assert (written["to"], written["parts"], written["rows"]) == (place, PARTS, PART * PARTS)
    expected = hashlib.sha256(lines()).hexdigest()
    read = loaded("--source", place, "--stream", "orders", "--out", tmp_path / "orders.txt")
    assert (tmp_path / "orders.txt").read_bytes() == lines()
    assert {written["sha256"], read["sha256"]} == {expected}
    assert "already" in error("--store", filled, "--stream", "orders", "--to", place)
    (tmp_path / "secret").write_text("s")
    serve = ["serve", "--http", "127.0.0.1:0", "--store", filled, "--secret-file", str(tmp_path / "secret"), "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "busrep.cli", *serve],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["listening"]["http"].replace("://", "://:s@")
            found = loaded("--source", url, "--stream", "orders")
        finally:
            server.terminate()
    assert (found["sha256"], found["positions"]) == (expected, written["positions"])


def test_a_part_that_lacks_rows_is_refused(filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cutting(monkeypatch, -1, keep=lambda piece: piece.split(b"\n", 1)[1])
    out = tmp_path / "orders.txt"
    said = error("--store", filled, "--stream", "orders", "--out", out, "--part-rows", PART)
    assert f"{PART - 1} rows of part 0, which has {PART}" in said
    assert not out.exists()


# -- the file --------------------------------------------------------------------------------------------------------


def test_what_is_there_is_replaced_only_on_demand(filled: str, tmp_path: Path) -> None:
    out = tmp_path / "orders.txt"
    out.write_bytes(b"mine, and longer than a snapshot\n" * 1_000)
    options = ("--store", filled, "--stream", "orders", "--out", out)
    assert "name another file" in error(*options)
    assert out.read_bytes().startswith(b"mine")
    loaded(*options, "--overwrite")
    assert out.read_bytes() == lines()


def test_what_is_no_plain_file_is_never_replaced(filled: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "a plain file" in error("--store", filled, "--stream", "orders", "--out", pipe, "--overwrite")
    assert pipe.is_fifo()


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--store or --source"),
        (("--store", "STORE"), "--stream NAME"),
        (("--store", "STORE", "--stream", "nothing"), "no stream 'nothing' is known here (there are: orders)"),
        (("--store", "STORE", "--source", "file:///x", "--stream", "orders"), "one is enough"),
        (("--store", "STORE", "--stream", "orders", "--out", "x", "--to", "file:///x"), "one at a time"),
        (("--store", "STORE", "--stream", "orders", "--overwrite"), "for --out"),
        (("--store", "STORE", "--stream", "orders", "--part-rows", "0"), "--part-rows"),
        (("--store", "STORE", "--stream", "orders", "--reader", "billing"), "--reader does not go with"),
        (("--store", "STORE", "--stream", "orders", "--out", "/no/such/folder/x"), "No such file or directory"),
        (("--store", "nonsense", "--stream", "orders"), "these forms do"),
        (("--source", "nonsense", "--stream", "orders"), "these forms do"),
        (("--source", "sqlite:///x.db", "--stream", "orders"), "these forms do"),
        (("--source", "file:///no/such/folder", "--stream", "orders"), "no manifest.json"),
        (("--source", "http://127.0.0.1:1/x", "--stream", "orders"), "127.0.0.1:1"),
        (("--store", "STORE", "--stream", "orders", "--to", "nonsense"), "these forms do"),
        (("--source", "ftp://here/x", "--stream", "orders"), "ftp"),
        (("--status",), "--status needs --store"),
        (("--status", "--store", "STORE", "--out", "x"), "--out does not go with --status"),
        (("--status", "--store", "STORE", "--source", "x"), "--source does not go with --status"),
        (("--status", "--store", "STORE", "--reader", "nobody"), "'nobody'"),
    ],
)
def test_bad_input_is_told_in_a_line(options: Sequence[str], says: str, filled: str) -> None:
    assert says in error(*[filled if option == "STORE" else option for option in options])


def test_the_environment_names_the_store_and_a_source_comes_before_it(
    filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUSREP_STORE", filled)
    assert loaded("--stream", "orders")["rows"] == PART * PARTS
    assert "ftp" in error("--stream", "orders", "--source", "ftp://here/x")


# -- status ----------------------------------------------------------------------------------------------------------


async def save(url: str, reader: str, parts: int, syncs: int) -> None:
    store = open_store(url, Registry([orders]))
    await store.open()
    try:
        agreement = await store.agree("orders", part_rows=PART)
        await store.leave(agreement)
        id = await store.begin_bootstrap(reader, agreement, syncs=syncs, reason="no saved positions")
        if parts:
            state = "loading" if parts < PARTS else "draining"
            step = AppliedParts(parts=0, applied=parts, rows=parts * PART, bytes=1_000, state=state)
            await store.save_bootstrap(reader, "orders", id, step)
    finally:
        await store.close()


def test_status_shows_what_readers_have_saved(store_url: str) -> None:
    assert "no reader" in busrep("--status", "--store", store_url).stdout
    asyncio.run(save(store_url, "billing", 3, 1))
    asyncio.run(save(store_url, "search", PARTS, 4))
    found = {one["reader"]: one for one in loaded("--status", "--store", store_url)["bootstraps"]}
    assert found.keys() == {"billing", "search"}
    billing, search = found["billing"], found["search"]
    assert (billing["state"], billing["parts"], billing["parts_total"]) == ("loading", 3, PARTS)
    assert (billing["percent"], billing["alarm"]) == (pytest.approx(100 * 3 / PARTS, abs=0.1), False)
    assert (search["state"], search["percent"], search["alarm"]) == ("draining", 100.0, True)
    shown = busrep("--status", "--store", store_url).stdout
    for text in (f"3 of {PARTS}", f"90 of {PART * PARTS}", "42.9 %", "4 ALARM", "no saved positions", " s ago"):
        assert text in shown
    only = busrep("--status", "--store", store_url, "--reader", "search").stdout
    assert "search" in only
    assert "billing" not in only
    assert "no reader" in busrep("--status", "--store", store_url, "--stream", "payments").stdout


def test_percents_where_rows_or_parts_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = Agreement("orders", "e", {}, {}, [PartRange(0, 5), PartRange(5, 9)])
    half = BootstrapProgress("r", unknown, "loading", parts=1, rows=7).asdict()
    assert command.percent(half) == 50.0
    assert command.percent(BootstrapProgress("r", Agreement("orders", "e", {}, {}, []), "online").asdict()) == 100.0
    command.print_bootstraps([half | {"saved_ago": 0.0}])
    assert " 7 " in capsys.readouterr().out
