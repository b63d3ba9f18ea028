"""Files with rows in them are for the user who runs busrep, and for a group that is let in on purpose."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from busrep.cli.app import cli
from busrep.cli.pipeline import write_report
from busrep.private_files import create_file, make_folders, open_file, open_successor
from busrep.reports import ReaderReport
from busrep.spark.archive_store import Root
from busrep.stores import open_store
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry, Stream

from .store_conformance import sync

orders = Stream("orders")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes of files are a matter of Unix")


@pytest.fixture(autouse=True, params=[0o000, 0o022], ids=["umask-000", "umask-022"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that a group shares."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o2770)
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): mode(path) for path in sorted(folder.rglob("*"))}


def private(folder: Path) -> None:
    """Whatever there is in it, nobody else can read it."""
    found = modes(folder)
    assert found
    assert {name: oct(bits) for name, bits in found.items() if bits & 0o077} == {}


# -- the policy ------------------------------------------------------------------------------------------------------


def test_new_files_and_folders_are_private_and_old_ones_as_they_were(tmp_path: Path) -> None:
    create_file(tmp_path / "new")
    make_folders(tmp_path / "a" / "b")
    private(tmp_path)
    assert mode(tmp_path / "a" / "b") == 0o700
    old = tmp_path / "old"
    old.touch()
    old.chmod(0o644)
    create_file(old)
    os.close(open_file(old, os.O_RDWR))
    assert mode(old) == 0o644
    (tmp_path / "a").chmod(0o755)
    make_folders(tmp_path / "a" / "b")
    assert mode(tmp_path / "a") == 0o755


def test_what_replaces_a_file_has_its_mode(tmp_path: Path) -> None:
    target = tmp_path / "target"
    os.close(open_successor(tmp_path / "first", target))
    assert mode(tmp_path / "first") == 0o600
    target.touch()
    target.chmod(0o664)
    os.close(open_successor(tmp_path / "second", target))
    assert mode(tmp_path / "second") == 0o664


def test_a_folder_of_a_group_gives_the_group_its_rights(shared: Path, umask: int) -> None:
    create_file(shared / "file")
    make_folders(shared / "a" / "b")
    create_file(shared / "a" / "b" / "file")
    assert mode(shared / "file") == mode(shared / "a" / "b" / "file") == 0o660 & ~umask
    if os.uname().sysname == "Linux":  # which hands the bit on to folders in it
        assert mode(shared / "a") == mode(shared / "a" / "b") == 0o2770 & ~umask
    shared.chmod(0o2750)
    create_file(shared / "another")
    assert mode(shared / "another") == 0o640


# -- what is made ----------------------------------------------------------------------------------------------------


@sync
async def test_a_table_in_sqlite(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'x.db'}", Registry([orders]))
    await store.init()
    await store.open()
    try:
        assert {"x.db", "x.db-wal", "x.db-shm"} <= modes(tmp_path).keys()
        private(tmp_path)
    finally:
        await store.close()


def test_a_table_in_sqlite_of_threads(tmp_path: Path) -> None:
    store = open_blocking_store(f"sqlite:///{tmp_path / 'x.db'}", Registry([orders]))
    store.init()
    store.open()
    try:
        assert {"x.db", "x.db-wal", "x.db-shm"} <= modes(tmp_path).keys()
        private(tmp_path)
    finally:
        store.close()


OTHER_PROCESS = """
import contextlib, sqlite3, sys
with contextlib.closing(sqlite3.connect(sys.argv[1])) as connection:
    print(connection.execute("SELECT count(*) FROM mine").fetchone()[0])
"""


def test_init_leaves_the_locks_of_a_connection_that_this_process_has(tmp_path: Path) -> None:
    """Without them the next process that closes the file takes itself for the last one: it deletes the -wal file, and
    what is committed to that from then on is in no file that anyone else sees."""
    path = tmp_path / "x.db"

    def seen_by_another_process() -> int:
        done = subprocess.run([sys.executable, "-c", OTHER_PROCESS, path], capture_output=True, text=True, check=True)
        return int(done.stdout)

    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as ours:
        ours.execute("PRAGMA journal_mode = WAL")
        ours.execute("CREATE TABLE mine (row)")
        open_blocking_store(f"sqlite:///{path}", Registry([orders])).init()
        assert seen_by_another_process() == 0
        ours.execute("INSERT INTO mine VALUES (1)")
        assert seen_by_another_process() == 1


def test_a_table_behind_a_link_to_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "x.db")
    open_blocking_store(f"sqlite:///{tmp_path / 'link.db'}", Registry([orders])).init()
    assert mode(tmp_path / "x.db") == 0o600


@sync
async def test_a_table_that_was_made_for_a_group_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.touch()
    path.chmod(0o660)
    store = open_store(f"sqlite:///{path}", Registry([orders]))
    await store.init()
    await store.open()
    try:
        assert set(modes(tmp_path).values()) == {0o660}
    finally:
        await store.close()


def run(*arguments: str) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output


def filled(folder: Path) -> str:
    """A store with a few rows."""
    url = f"sqlite:///{folder / 'x.db'}"
    run("db", "init", "--store", url, "--stream", "orders")
    with contextlib.closing(sqlite3.connect(folder / "x.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    return url


def test_snapshots(tmp_path: Path) -> None:
    url = filled(tmp_path)
    run("bootstrap", "--store", url, "--stream", "orders", "--out", str(tmp_path / "snapshot.jsonl"))
    target = tmp_path / "deep" / "snapshot"
    run("bootstrap", "--store", url, "--stream", "orders", "--to", f"file://{target}")
    assert list(target.iterdir())
    private(tmp_path)


def test_the_files_of_an_archive(tmp_path: Path) -> None:
    root = Root(str(tmp_path / "archive"))
    assert root.put("_busrep/orders/archive.json", b"{}")
    root.replace("_busrep/orders/note.json", b"{}")
    with root.create("orders/part.parquet") as file:
        file.write(b"x")
    private(tmp_path)
    (tmp_path / "archive" / "_busrep" / "orders" / "note.json").chmod(0o644)
    root.replace("_busrep/orders/note.json", b"{1}")
    assert mode(tmp_path / "archive" / "_busrep" / "orders" / "note.json") == 0o644


def test_an_archive_in_the_folder_of_a_group(shared: Path, umask: int) -> None:
    root = Root(str(shared / "archive"))
    root.put("_busrep/orders/archive.json", b"{}")
    with root.create("orders/part.parquet") as file:
        file.write(b"x")
    found = modes(shared)
    assert {bits & 0o777 for name, bits in found.items() if "." in name} == {0o660 & ~umask}
    assert {bits & 0o777 for name, bits in found.items() if "." not in name} == {0o770 & ~umask}


def test_reports(tmp_path: Path) -> None:
    ReaderReport(tmp_path / "handled.jsonl").close()
    write_report(tmp_path / "report.json", {"ok": True})
    private(tmp_path)
    (tmp_path / "report.json").chmod(0o640)
    write_report(tmp_path / "report.json", {"ok": False})
    assert (mode(tmp_path / "report.json"), json.loads((tmp_path / "report.json").read_text())) == (
        0o640,
        {"ok": False},
    )
