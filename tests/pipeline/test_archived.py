"""The archive's manifests, and its files, without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest

from busrep import ConfigError
from busrep.spark import archived
from busrep.spark.archive_start import Start, read_start, write_start
from busrep.spark.archive_store import Root, load, put_manifest, shown, streams_of
from busrep.spark.archived import DataFile, Manifest, assemble, read_manifest, wanted, write_manifest

FILE = DataFile("date=2026-05-11/0000000000-00003-9f01c2ab.parquet", "2026-05-11", 5, 900, 1, 5, "0" * 64)
FIRST = Manifest(
    stream="orders", query="q", batch=0, epoch="e", after={}, upto={"w1": 5}, files=(FILE,), written_at="2026-05-11"
)


def batch(number: int, after: int, upto: int, **more: Any) -> Manifest:
    return attrs.evolve(FIRST, batch=number, after={"w1": after}, upto={"w1": upto}, files=(), **more)


def texts(*manifests: Manifest) -> dict[str, bytes]:
    return {one.name: write_manifest(one) for one in manifests}


def test_a_manifest_there_and_back() -> None:
    compaction = attrs.evolve(FIRST, number=3, batch=7, replaces=tuple(range(8)))
    for one in (FIRST, compaction):
        read = read_manifest(write_manifest(one))
        assert attrs.evolve(read, written_at=one.written_at) == one
    assert (FIRST.name, compaction.name) == ("0000000000.json", "c0000000003.json")
    assert orjson.loads(write_manifest(FIRST))["files"][0]["sha256"] == "0" * 64


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "version 2"),
        ({"stream": 5}, "stream is missing"),
        ({"files": None}, "files is missing"),
        ({"batch": -1}, "batch is no integer"),
        ({"batch": True}, "batch is no integer"),
        ({"upto": {"w1": "5"}}, "w1 is no integer"),
        ({"after": []}, "after is no object"),
        ({"files": [{"file": "../../etc/passwd"}]}, "not named as one of an archive"),
        ({"files": [{**attrs.asdict(FILE), "sha256": "x"}]}, "64 hexadecimal digits"),
        ({"files": [{**attrs.asdict(FILE), "rows": None}]}, "rows is no integer"),
        ({"replaces": ["1"]}, "replaces is no list"),
        ({"written_at": "today"}, "isoformat"),
    ],
)
def test_what_a_manifest_must_not_say(change: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_manifest(orjson.dumps({**orjson.loads(write_manifest(FIRST)), **change}))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"5", b"null"])
def test_what_is_no_manifest(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|version"):
        read_manifest(text)


def test_manifests_together() -> None:
    found = assemble("orders", texts(FIRST, batch(1, 5, 9), batch(2, 9, 9)))
    assert found.problems == ()
    assert (found.last, found.upto, found.after, found.rows) == (2, {"w1": 9}, {}, 5)
    assert [file for _, file in found.files] == [FILE]
    assert assemble("orders", {}).last == -1


def test_a_compaction_stands_for_what_is_before_it() -> None:
    compaction = attrs.evolve(FIRST, number=2, batch=1, upto={"w1": 9})
    given = texts(FIRST, batch(1, 5, 9), compaction, batch(2, 9, 12))
    names = [*given, "c0000000001.json", "archive.json", "checkpoint"]
    assert wanted(names) == ["c0000000002.json", "0000000000.json", "0000000001.json", "0000000002.json"]
    found = assemble("orders", given, names)
    assert found.problems == ()
    assert [one.name for one in found.manifests] == ["c0000000002.json", "0000000002.json"]
    assert found.superseded == ("0000000000.json", "0000000001.json", "c0000000001.json")
    # A batch that a driver, thought to be dead, puts after the compaction has replaced it: no part of the archive.
    assert assemble("orders", texts(compaction, batch(1, 5, 9), batch(2, 9, 12))).problems == ()


@pytest.mark.parametrize(
    ("manifests", "kind", "text"),
    [
        ([FIRST, batch(2, 5, 9)], "missing", "0000000001.json is missing"),
        ([FIRST, batch(4, 5, 9)], "missing", "0000000001.json and those up to 3 is missing"),
        ([batch(1, 5, 9)], "missing", "0000000000.json is missing"),
        ([FIRST, batch(1, 6, 9)], "positions", "begins at {'w1': 6}"),
        ([FIRST, batch(1, 5, 4)], "positions", "ends before it begins"),
        ([FIRST, batch(1, 5, 9, epoch="f")], "epoch", "of epoch f"),
        ([FIRST, attrs.evolve(batch(1, 5, 9), files=(FILE,))], "file twice", "9f01c2ab"),
        ([attrs.evolve(FIRST, stream="other")], "damaged", "of stream 'other'"),
    ],
)
def test_what_is_wrong_with_them(manifests: list[Manifest], kind: str, text: str) -> None:
    found = assemble("orders", texts(*manifests))
    assert found.problems[0].kind == kind
    assert text in found.problems[0].text
    with pytest.raises(ConfigError, match="is damaged"):
        found.checked()


def test_names() -> None:
    assert archived.data_folder("a/b=c") == "stream=a%2Fb%3Dc"
    assert archived.streams_in(["a%2Fb%3Dc", "orders"]) == ["a/b=c", "orders"]
    assert archived.maker_of(FILE.file) == ("", 0)
    assert archived.maker_of(archived.data_name("c", 12, 100_001, "0badcafe")) == ("c", 12)
    assert archived.maker_of("part-000.parquet") is None
    assert archived.date_of(1_778_457_600_000_000) == "2026-05-11"
    assert archived.date_of(-1) == "1969-12-31"
    assert archived.date_of(None) == archived.NO_DATE


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"base": "0"}, "'base' must be <class 'int'>"),
        ({"checkpoint": None}, "'checkpoint' must be <class 'str'>"),
        ({"positions": {"w": -1}}, "-1 is no position"),
        ({"positions": [1]}, "no object of tokens"),
        ({"epoc": "x"}, "unexpected keyword argument 'epoc'"),
    ],
)
def test_a_note_that_cannot_be_used(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    root = Root(str(tmp_path))
    assert read_start(root, "orders") is None
    start = Start("", 3, "e1", {"w": 1})
    write_start(root, "orders", start)
    assert read_start(root, "orders") == start
    root.replace("_busrep/orders/archive.json", orjson.dumps({**attrs.asdict(start), **changed}))
    with pytest.raises(ValueError, match=told):
        read_start(root, "orders")


def test_a_file_is_put_once(tmp_path: Path) -> None:
    root = pickle.loads(pickle.dumps(Root(str(tmp_path / "archive"))))
    won: list[int] = []

    def put(number: int) -> None:
        if root.put("x/y.json", b"%d" % number):
            won.append(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(8)))
    assert [root.read("x/y.json")] == [b"%d" % number for number in won]
    assert root.names("x") == ["y.json"]
    root.replace("x/y.json", b"other")
    assert root.read("x/y.json") == b"other"
    assert root.remove(["x/y.json", "x/z.json"]) == 1
    assert root.size("x/y.json") is None
    assert root.names("nowhere") == []
    with pytest.raises(FileNotFoundError):
        root.read("x/y.json")


def test_manifests_on_a_disk(tmp_path: Path) -> None:
    root = Root(f"file://{tmp_path}/archive")
    assert put_manifest(root, FIRST)
    assert not put_manifest(root, attrs.evolve(FIRST, query="another"))
    assert streams_of(root) == ["orders"]
    assert load(root, "orders").manifests[0].query == "q"
    assert load(root, "payments").manifests == ()


def test_manifests_that_vanish_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction has deleted them: the list is read again."""
    root = Root(str(tmp_path))
    put_manifest(root, FIRST)
    put_manifest(root, batch(1, 5, 9))
    read = Root.read

    def compacting(self: Root, name: str) -> bytes:
        monkeypatch.setattr(Root, "read", read)
        put_manifest(root, attrs.evolve(FIRST, number=1, batch=1, upto={"w1": 9}))
        root.remove(["_busrep/orders/0000000000.json", "_busrep/orders/0000000001.json"])
        return read(self, name)

    monkeypatch.setattr(Root, "read", compacting)
    assert [one.name for one in load(root, "orders").checked().manifests] == ["c0000000001.json"]


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        Root(str(tmp_path / "file")).put("x/y", b"")
    with pytest.raises(ConfigError, match="cannot be used"):
        Root("nonsense://x").names("")
    assert shown("s3://key:secret@bucket/x?region=eu") == "s3://bucket/x"
    with pytest.raises(ConfigError, match="percent-encoded"):
        shown("s3://key:sec/ret@bucket/x")
