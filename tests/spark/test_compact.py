"""Compaction: the same rows in fewer files, whatever happens meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from pyspark.sql import SparkSession

from busrep import ConfigError
from busrep.spark import archived, compacting
from busrep.spark.archive_rows import read_file
from busrep.spark.archive_store import Root, load
from tests.spark.archives import Bench, orders


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Bench:
    """An archive of six batches of ten rows."""
    made = Bench(spark, tmp_path)
    for batch in range(2):
        low = 1 + 30 * batch
        made.write("w1", orders(range(low, low + 30)), upto=low + 29)
        made.archived_by_hand(10)
    assert len(made.files()) == len(made.manifests()) == 6
    return made


def test_small_files_become_one(bench: Bench) -> None:
    before = bench.archived()
    report = bench.compact()
    assert (report["files_before"], report["files"], report["merged_rows"], report["deleted"]) == (6, 1, 60, 0)
    assert bench.archived() == before
    # What is replaced stays for who is reading it.
    assert len(bench.files()) == 7
    assert bench.compact(grace=0.0)["deleted"] == 12
    assert len(bench.files()) == 1
    assert bench.manifests() == ["c0000000001.json"]
    assert bench.archived() == before
    assert bench.audit()["ok"]


def test_the_archive_goes_on_behind_it(bench: Bench) -> None:
    bench.compact(grace=0.0)
    bench.write("w1", orders(range(61, 70)), upto=70)
    bench.archived_by_hand()
    assert bench.manifests() == ["0000000006.json", "c0000000001.json"]
    assert bench.compact(grace=0.0)["files"] == 1
    assert bench.manifests() == ["c0000000002.json"]
    assert bench.archived() == bench.table()
    assert bench.audit()["ok"]
    assert load(bench.root, "orders").checked().upto == {"w1": 70}


def test_files_of_full_size_stay(bench: Bench) -> None:
    before = set(bench.files())
    report = bench.compact(file_rows=20, grace=0.0)
    assert report["merged_files"] == 0
    assert set(bench.files()) == before
    report = bench.compact(file_rows=25, grace=0.0)
    assert report["files"] == 3  # of 25, 25 and 10
    assert bench.archived() == bench.table()


class Death(Exception):
    """As a kill."""


def steps(bench: Bench, patch: pytest.MonkeyPatch) -> Any:
    """Has compaction die after a number of steps; the function returns whether it did."""
    left = [0]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                raise Death
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    def remove(self: Root, names: list[str]) -> int:
        return sum(one(self, [name]) for name in names)

    one = counted(Root.remove)
    patch.setattr(Root, "remove", remove)
    patch.setattr(compacting, "merge", counted(compacting.merge))
    patch.setattr(compacting, "put_manifest", counted(compacting.put_manifest))
    patch.setattr(compacting, "clean", counted(compacting.clean))

    def run(after: int) -> bool:
        left[0] = after
        try:
            bench.compact(grace=0.0)
        except Death:
            return True
        return False

    return run


def test_killed_at_every_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bench.archived()
    with monkeypatch.context() as patch:
        run = steps(bench, patch)
        for after in range(20):
            died = run(after)
            assert bench.archived() == before, f"after {after} steps"
            if not died:
                break
            assert load(bench.root, "orders").checked().rows == 60
        assert 3 < after < 20
    bench.compact(grace=0.0)
    assert len(bench.files()) == 1


def test_a_reader_that_listed_before(bench: Bench) -> None:
    listed = load(bench.root, "orders")
    bench.compact(grace=3600.0)
    assert sum(batch.num_rows for _, file in listed.files for batch in read_file(bench.root, "orders", file)) == 60
    bench.compact(grace=0.0)
    with pytest.raises(FileNotFoundError):
        list(read_file(bench.root, "orders", next(listed.files)[1]))


def test_another_compaction_is_faster(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    put, once = compacting.put_manifest, [True]

    def late(root: Root, manifest: archived.Manifest) -> bool:
        if once:
            once.clear()
            assert bench.compact(grace=0.0)["merged_files"] == 6  # by the time ours is put, all of it is deleted
            bench.write("w1", orders(range(61, 63)), upto=62)
            bench.archived_by_hand()
        return put(root, manifest)

    monkeypatch.setattr(compacting, "put_manifest", late)
    bench.compact(grace=0.0)
    assert bench.archived() == bench.table()
    assert bench.manifests() == ["c0000000002.json"]
    assert len(bench.files()) == 1


def test_an_archive_job_adds_batches_meanwhile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    put = compacting.put_manifest

    def late(root: Root, manifest: archived.Manifest) -> bool:
        bench.write("w1", orders(range(61, 70)), upto=70)
        bench.archived_by_hand()
        return put(root, manifest)

    monkeypatch.setattr(compacting, "put_manifest", late)
    bench.compact(grace=0.0)
    assert bench.archived() == bench.table()
    assert bench.manifests() == ["0000000006.json", "c0000000001.json"]
    # Its files, which no manifest named while it wrote them, are left alone.
    folder = Path(bench.root.path("stream=orders/date=2026-05-11"))
    (folder / archived.data_name("", 7, 0, "0badcafe")).write_bytes(b"half")
    (folder / archived.data_name("", 6, 0, "0badcafe")).write_bytes(b"left by a driver that was killed")
    compacting.clean(bench.root, "orders", 3600.0)
    assert [path.name for path in folder.glob("*0badcafe*")] == ["0000000007-00000-0badcafe.parquet"]


def test_damage_does_not_spread(bench: Bench) -> None:
    victim = bench.files()[2]
    victim.write_bytes(victim.read_bytes()[:-100])
    names = bench.manifests()
    with pytest.raises(Exception, match="cannot be read.*Nothing was changed"):
        bench.compact(grace=0.0)
    assert bench.manifests() == names
    Path(bench.root.path("_busrep/orders/0000000003.json")).unlink()
    with pytest.raises(ConfigError, match=r"manifest 0000000003.json is missing"):
        bench.compact(grace=0.0)


def test_many_manifests_become_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compacting, "MANIFESTS", 5)
    assert bench.compact(file_rows=20)["merged_files"] == 0
    assert [len(one.files) for one in load(bench.root, "orders").manifests] == [6]
    assert bench.archived() == bench.table()


def test_the_plan_keeps_dates_and_big_files_apart() -> None:
    def file(name: str, date: str, rows: int) -> archived.DataFile:
        return archived.DataFile(name, date, rows, 1, 1, 1, "0" * 64)

    files = [
        file("a", "1", 10), file("b", "2", 10), file("c", "1", 10), file("d", "1", 60), file("e", "2", 10),
        file("f", "1", 10), file("g", "1", 49),
    ]  # fmt: skip
    manifest = archived.Manifest(stream="s", query="q", batch=0, epoch="e", after={}, upto={"w": 9}, files=tuple(files))
    groups = compacting.plan(archived.Archive("s", (manifest,)), 100)
    assert sorted("".join(one.file for one in group) for group in groups) == ["ac", "be", "fg"]
    made = [[attrs.evolve(group[0], file=group[0].file.upper(), rows=sum(f.rows for f in group))] for group in groups]
    replaced = compacting.replacement(archived.Archive("s", (manifest,)), groups, made)
    assert "".join(one.file for one in replaced.files) == "ABdF"
    with pytest.raises(ConfigError, match="lost rows"):
        compacting.replacement(archived.Archive("s", (manifest,)), groups, [[], [], []])
