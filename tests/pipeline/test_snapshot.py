"""What the snapshot job's tasks do, without Spark: keys, parts, and what tells one snapshot from another."""

from __future__ import annotations

import asyncio
from enum import Enum
from pathlib import Path
from typing import Any

import attrs
import pyarrow
import pytest

import busrep
from busrep.core.snapshots import Agreement, PartRange
from busrep.errors import ConfigError, RowError, SnapshotGone
from busrep.snapshots import parquet
from busrep.snapshots.parquet import ParquetSource
from busrep.snapshots.parquet_manifest import NAME, Manifest, PartFile, read_manifest, write_manifest
from busrep.spark import snapshot_tasks
from busrep.spark.archive_store import Root
from busrep.spark.snapshot_tasks import PARTS, Keys, Part, PartFiles, keyed, read_keys, same_key
from busrep.spark.snapshotting import Writing, content_of, ranges_of

# -- parts ----------------------------------------------------------------------------------------------------


def batch(tokens: list[int], rows: list[str] | None = None) -> Any:
    arrays = [pyarrow.array(tokens), pyarrow.array(["w"] * len(tokens)), pyarrow.array(rows or ["1"] * len(tokens))]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=PARTS)


def test_facts_are_not_cut(tmp_path: Path) -> None:
    """Wherever batches of rows end."""
    tokens = [1, 2, 2, 2, 3, 5, 5, 8, 9, 9]
    for size in range(1, 11):
        files = PartFiles(Root(str(tmp_path / str(size))), "orders", "run", 0, 2)
        for at in range(0, len(tokens), size):
            files.add(batch(tokens[at : at + size]))
        files.flush()
        assert [(part.first, part.last, part.rows) for part in files.done] == [(1, 2, 4), (3, 5, 3), (8, 9, 3)]
    broken = PartFiles(Root(str(tmp_path)), "orders", "run", 0, 2)
    broken.add(batch([1], ["[\n]"]))
    with pytest.raises(RowError, match="line break"):
        broken.flush()


def test_parts_of_large_rows_are_small_enough_for_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read no part that is larger than they say, however few rows it has."""
    monkeypatch.setattr(snapshot_tasks, "PART_BYTES", 1000)
    monkeypatch.setattr(snapshot_tasks, "MAX_BYTES", 4000)
    files = PartFiles(Root(str(tmp_path)), "orders", "run", 0, 100)
    rows = [(token, f'"{"x" * size}"') for token, size in enumerate([300, 300, 300, 300, 2000, 10, 10, 900, 900], 1)]
    for at in range(0, len(rows), 4):
        tokens, texts = zip(*rows[at : at + 4], strict=True)
        files.add(batch(list(tokens), list(texts)))
    files.flush()
    assert [(part.first, part.last) for part in files.done] == [(1, 3), (4, 4), (5, 5), (6, 8), (9, 9)]
    files.add(batch([10] * 5, [f'"{"x" * 900}"'] * 5))  # one fact
    with pytest.raises(ConfigError, match=r"the rows of token 10, one fact, are too large .* 4,5\d\d bytes"):
        files.flush()


def test_a_part_of_the_largest_size_is_read(tmp_path: Path) -> None:
    """What we call too large is what readers call so."""
    assert snapshot_tasks.MAX_BYTES == parquet.MAX_BYTES
    assert snapshot_tasks.PART_BYTES <= parquet.MAX_BYTES // 2


def test_ranges() -> None:
    def part(first: int, last: int, rows: int = 2) -> Part:
        return Part("x", first, last, rows, 100, "0" * 64)

    assert ranges_of([part(5, 9), part(20, 21)], 30) == [PartRange(0, 9, 2), PartRange(9, 30, 2)]
    assert ranges_of([part(0, 0, 0)], 30) == [PartRange(0, 30, 0)]
    assert ranges_of([], 0) == []
    with pytest.raises(ValueError, match="begins at 9"):
        ranges_of([part(5, 9), part(9, 21)], 30)


# -- keys -----------------------------------------------------------------------------------------------------


class State(Enum):
    NEW = "new"
    GONE = "gone"


@attrs.frozen
class Odd:
    name: str | None
    counts: dict[str, int]
    flag: bool
    price: float = 0.0
    more: Any = None
    kind: str = attrs.field(default="new", converter=str)
    state: State = attrs.field(default=State.GONE, converter=State)


ODD = [busrep.Stream("odd", Odd)]
WHERE = f"{__name__}:ODD"


def test_keys_of_several_kinds() -> None:
    keys = read_keys("odd", WHERE, "name, flag", "flag=true")
    assert keys.schema().startswith("key_0 string, key_1 boolean, gone boolean, writer string")
    assert keys.tombstone == ("flag", True)
    assert read_keys("odd", WHERE, "flag", "name=null").tombstone == ("name", None)
    assert read_keys("odd", WHERE, "flag", "name=true").tombstone == ("name", "true")
    with pytest.raises(ConfigError, match="a map cannot be a key"):
        read_keys("odd", WHERE, "counts", None)


@pytest.mark.parametrize(
    ("tombstone", "message"),
    [
        ("flag=1", "no row has this there: bool is needed, not int"),
        ("flag=null", "no row has this there: bool is needed, not NoneType"),
        ("flag=True", "VALUE is JSON"),
        ("price=true", "no row has this there: float is needed, not bool"),
        ("kind=gone", '"gone" with the quotes'),
        ("state=gone", '"gone" with the quotes'),
        ('state="old"', "no row has this there: its converter refuses 'old'"),
    ],
)
def test_a_tombstone_that_no_row_has_is_refused(tombstone: str, message: str) -> None:
    """It would leave every deleted key in the snapshot."""
    with pytest.raises(ConfigError, match=message):
        read_keys("odd", WHERE, "name", tombstone)


def keys_of(keys: Keys, *rows: str) -> list[tuple[Any, ...]]:
    """The key's columns, and whether the key is gone."""
    columns = {
        "writer": pyarrow.array(["w"] * len(rows)), "token": pyarrow.array(range(len(rows)), pyarrow.int64()),
        "index": pyarrow.array([0] * len(rows), pyarrow.int32()), "row": pyarrow.array(rows),
    }  # fmt: skip
    batch = pyarrow.RecordBatch.from_arrays(list(columns.values()), list(columns))
    (found,) = keyed(keys)(iter([batch]))
    return [tuple(row[name] for name in (*keys.columns(), "gone")) for row in found.to_pylist()]


def test_keys_of_rows() -> None:
    """Null is a key; what is missing in an older row is what the class says."""
    keys = read_keys("odd", WHERE, "name,price", "flag=true")
    assert keys_of(
        keys, '[null,{},true]', '["a",{},false,1]', '["a",{},false,1.0,null,"x"]', '["a",{},true,-0.5]'
    ) == [(None, 0.0, True), ("a", 1.0, False), ("a", 1.0, False), ("a", -0.5, True)]  # fmt: skip
    assert keys_of(read_keys("odd", WHERE, "name", 'kind="gone"'), '["a",{},true]', '["b",{},true,1,2,"gone"]') == [
        ("a", False), ("b", True),
    ]  # fmt: skip
    new = '["b",{},true,0,0,"","new"]'
    assert keys_of(read_keys("odd", WHERE, "state", 'state="gone"'), '["a",{},true]', new) == [
        ("gone", True), ("new", False),
    ]  # fmt: skip
    with pytest.raises(RowError, match=r"field 'name'.*str is needed, not int"):
        keys_of(keys, "[1,{},true]")


def test_keys_that_are_json_are_the_same_when_they_are_equal() -> None:
    """Else a key that is gone would live on under another spelling."""
    keys = read_keys("odd", WHERE, "more", "flag=true")
    one, other, third = keys_of(
        keys,
        '["a",{},false,0,{"x":1,"y":[2]}]',
        '["a",{},true,0,{"y":[2.0],"x":1}]',
        '["a",{},true,0,{"y":[2.5],"x":1}]',
    )
    assert one[0] == other[0] != third[0]
    assert (one[1], other[1]) == (False, True)
    assert same_key([1e300, 2.5, 3.0, True, None, "x"]) == [1e300, 2.5, 3, True, None, "x"]


# -- which snapshot it is -------------------------------------------------------------------------------------

EPOCH = "0" * 31 + "1"


def written(root: Root, runs: dict[str, list[int]], kept: str | None) -> Agreement:
    """A snapshot of two parts with these tokens, by hand; ``kept``: which rows they are."""
    parts: list[Part] = []
    for number, (run, tokens) in enumerate(runs.items()):
        files = PartFiles(root, "orders", run, number, 100)
        files.add(batch(tokens))
        files.flush()
        parts += files.done
    content = "" if kept is None else content_of(kept, parts)
    agreement = Agreement("orders", EPOCH, {"w": 20}, {}, tuple(ranges_of(parts, 20)), content=content)
    root.replace(NAME, write_manifest(Manifest(agreement, tuple(PartFile(part.file, part.sha256) for part in parts))))
    return agreement


def test_snapshots_of_other_keys_are_not_the_same(tmp_path: Path) -> None:
    """At the same positions, cut at the same tokens: who is half through one does not go on with the other."""
    root = Root(str(tmp_path))
    first = written(root, {"a": [1, 5], "b": [9]}, "the latest row of each number")
    source = ParquetSource(tmp_path.as_uri())

    async def follow() -> None:
        await source.open()
        held = await source.agree("orders", part_rows=10)
        assert held.same(first)
        assert Agreement.from_json(held.to_json()).same(held)
        assert [piece async for piece in source.load(held, 0)] == [b"1 w 1\n5 w 1\n"]
        for runs, kept in (
            ({"c": [2, 5], "d": [9]}, "the latest row of each number"),  # other rows
            ({"e": [1, 5], "f": [9]}, "the latest row of each status"),  # by another key
            ({"g": [1, 5], "h": [9]}, None),  # all
        ):
            other = written(root, runs, kept)
            assert [(part.after, part.upto) for part in other.parts] == [(0, 5), (5, 20)]
            assert (other.same(first), other.digest == first.digest) == (False, False)
            with pytest.raises(SnapshotGone):
                [piece async for piece in ParquetSource(tmp_path.as_uri()).load(held, 1)]
            assert not (await source.agree("orders", part_rows=10, again=held)).same(held)
        again = written(root, {"i": [1, 5], "j": [9]}, "the latest row of each number")  # the same, written anew
        assert again.same(first)
        assert [piece async for piece in ParquetSource(tmp_path.as_uri()).load(held, 1)] == [b"9 w 1\n"]

    asyncio.run(follow())


def test_manifests_with_a_content() -> None:
    agreement = Agreement("orders", EPOCH, {"w": 20}, {}, (PartRange(0, 20, 1),), content="some")
    text = write_manifest(Manifest(agreement, (PartFile("x", "0" * 64),)))
    assert read_manifest(text).agreement == agreement
    assert b"content" not in write_manifest(Manifest(attrs.evolve(agreement, content=""), (PartFile("x", "0" * 64),)))
    with pytest.raises(ValueError, match="content is no text"):
        read_manifest(text.replace(b'"some"', b"5"))


def test_two_jobs_in_one_directory(tmp_path: Path) -> None:
    """The second one to end is told, and leaves nothing."""
    root = Root(str(tmp_path))
    job: Any = Writing(None, attrs.make_class("Told", {"stream": attrs.field(default="orders")})(), None, root, None)
    written(root, {"a": [1]}, None)
    before = read_manifest(root.read(NAME))
    files = PartFiles(root, "orders", job.name, 0, 10)
    files.add(batch([1, 7]))
    files.flush()
    ours = Manifest(
        Agreement("orders", EPOCH, {"w": 20}, {}, tuple(ranges_of(files.done, 20))),
        tuple(PartFile(part.file, part.sha256) for part in files.done),
    )
    written(root, {"other": [1, 5]}, None)
    theirs = root.read(NAME)
    with pytest.raises(ConfigError, match="another job has written a snapshot"):
        job.publish(ours, before)
    with pytest.raises(ConfigError, match="another job has written a snapshot"):
        job.publish(attrs.evolve(ours, files=before.files), None)
    assert root.read(NAME) == theirs
    assert not [name for name in root.names("") if job.name in name]
