"""The archive's driver, and what compaction deletes, without Spark: batches are given by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import orjson
import pyarrow
import pytest

from busrep import ConfigError, Stream, Unavailable
from busrep.spark import archive_rows, archiving, compacting, job
from busrep.spark.archive_driver import StreamArchive
from busrep.spark.archive_rows import SCHEMA, RowFiles
from busrep.spark.archive_store import Root, load, put_manifest
from busrep.spark.archived import Archive, Manifest, data_name
from busrep.spark.jobs import archive
from busrep.spark.offsets import Offset
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry

NOON = datetime(2026, 5, 11, 12, tzinfo=UTC)


def rows(tokens: range, at: datetime = NOON) -> Any:
    """A row each."""
    return pyarrow.RecordBatch.from_pylist(
        [{"writer": "w", "token": token, "index": 0, "row": "1", "committed_at": at} for token in tokens], SCHEMA
    )


class Archives:
    """Batches and compactions put by hand."""

    def __init__(self, folder: Path) -> None:
        self.root = Root(str(folder / "archive"))

    def batch(self, number: int, after: int, upto: int, *, at: datetime = NOON) -> Manifest:
        files = RowFiles(self.root, "orders", "", number, 0, 10**6)
        files.add(rows(range(after + 1, upto + 1), at))
        manifest = Manifest(
            stream="orders", query="q", batch=number, epoch="e", after={"w": after}, upto={"w": upto},
            files=tuple(files.close()),
        )  # fmt: skip
        assert put_manifest(self.root, manifest)
        return manifest

    def compact(self, *, ago: float) -> Manifest:
        """All files become one, some seconds ago."""
        before = load(self.root, "orders").checked()
        groups = compacting.plan(before, 10**6)
        made = [
            compacting.merged(self.root, "orders", before.compactions + 1, at, group, 10**6)
            for at, group in enumerate(groups)
        ]
        written = (datetime.now(UTC) - timedelta(seconds=ago)).isoformat()
        manifest = attrs.evolve(compacting.replacement(before, groups, made), written_at=written)
        assert put_manifest(self.root, manifest)
        return manifest

    def files(self) -> set[str]:
        return set(self.root.names("stream=orders", deep=True))

    def manifests(self) -> list[str]:
        return [name for name in self.root.names("_busrep/orders") if name.endswith(".json")]


@pytest.fixture
def archives(tmp_path: Path) -> Archives:
    return Archives(tmp_path)


# -- what compaction deletes ----------------------------------------------------------------------------------


def test_what_was_replaced_goes_although_a_newer_compaction_is_there(archives: Archives) -> None:
    """Compaction every half hour, with a grace period of an hour: nothing would be deleted if the newest counted."""
    archives.batch(0, 0, 5)
    archives.batch(1, 5, 10)
    first = archives.compact(ago=4000)
    archives.batch(2, 10, 15)
    second = archives.compact(ago=2000)
    archives.batch(3, 15, 20)
    third = archives.compact(ago=10)
    compacting.clean(archives.root, "orders", 3600)
    # Who has listed the archive less than an hour ago has found the first compaction, or a later one.
    assert archives.manifests() == ["0000000002.json", "0000000003.json", first.name, second.name, third.name]
    kept = {file.file for one in (first, second, third, *load_named(archives, 2, 3)) for file in one.files}
    assert archives.files() == kept
    compacting.clean(archives.root, "orders", 1000)
    assert archives.manifests() == ["0000000003.json", second.name, third.name]
    compacting.clean(archives.root, "orders", 0)
    assert archives.manifests() == [third.name]
    assert archives.files() == {file.file for file in third.files}
    assert load(archives.root, "orders").checked().rows == 20


def load_named(archives: Archives, *numbers: int) -> list[Manifest]:
    from busrep.spark.archived import manifest_name, read_manifest

    return [read_manifest(archives.root.read(f"_busrep/orders/{manifest_name(number)}")) for number in numbers]


def test_a_compaction_deletes_nothing_that_is_young(archives: Archives) -> None:
    archives.batch(0, 0, 5)
    archives.batch(1, 5, 10)
    archives.compact(ago=10)
    before = archives.files()
    assert compacting.clean(archives.root, "orders", 3600) == 0
    assert archives.files() == before


def test_a_compaction_deletes_nothing_that_is_being_written(archives: Archives) -> None:
    """By an archive job, or another compaction; what killed ones have left goes."""
    archives.batch(0, 0, 5)
    archives.batch(1, 5, 10)
    archives.compact(ago=10)
    names = [data_name(kind, number, 0, "0badcafe") for kind, number in (("", 1), ("", 2), ("c", 1), ("c", 2))]
    for name in names:
        archives.root.create(f"stream=orders/date=2026-05-11/{name}").close()
    compacting.clean(archives.root, "orders", 0)
    left = {name.rpartition("/")[2] for name in archives.files() if "0badcafe" in name}
    assert left == {names[1], names[3]}


def test_a_compaction_names_what_it_replaces_and_no_more(archives: Archives) -> None:
    """Else the manifest would grow with all that the archive has ever been."""
    archives.batch(0, 0, 5)
    archives.batch(1, 5, 10)
    assert archives.compact(ago=0).replaces == (0, 1)
    archives.batch(2, 10, 15)
    again = archives.compact(ago=0)
    assert (again.number, again.batch, again.replaces) == (2, 2, (2,))


def test_a_time_without_a_zone_is_utc(archives: Archives) -> None:
    archives.batch(0, 0, 5)
    archives.batch(1, 5, 10)
    manifest = archives.compact(ago=0)
    text = orjson.loads(archives.root.read(f"_busrep/orders/{manifest.name}"))
    archives.root.replace(
        f"_busrep/orders/{manifest.name}", orjson.dumps({**text, "written_at": "2026-05-11T08:00:00"})
    )
    assert compacting.clean(archives.root, "orders", 0) == 4


def test_what_was_to_be_merged_was_merged_by_another(archives: Archives, monkeypatch: pytest.MonkeyPatch) -> None:
    """And deleted: that is no damage."""
    archives.batch(0, 0, 5)
    archives.batch(1, 5, 10)
    turns: list[int] = []

    def merge(_: Any, root: Root, archive: Archive, groups: Any, file_rows: int) -> Any:
        turns.append(len(groups))
        if len(turns) == 1:
            archives.compact(ago=10)
            compacting.clean(root, "orders", 0)
            archives.batch(2, 10, 15)
        return [compacting.merged(root, "orders", archive.compactions + 1, 0, group, file_rows) for group in groups]

    monkeypatch.setattr(compacting, "merge", merge)
    none: Any = None
    assert compacting.compact(none, archives.root, "orders", 10**6, 0)["files"] == 1
    assert load(archives.root, "orders").checked().rows == 15
    assert turns == [1, 1]
    archives.batch(3, 15, 20)
    archives.root.remove([f"stream=orders/{file.file}" for file in load(archives.root, "orders").manifests[-1].files])
    with pytest.raises(ConfigError, match="is missing. Nothing was changed"):
        compacting.compact(none, archives.root, "orders", 10**6, 0)


# -- files ----------------------------------------------------------------------------------------------------


def test_a_manifest_that_is_there_already_is_ours(archives: Archives) -> None:
    """A network file system, and an object store's client, may do a request twice whose answer is lost."""
    assert archives.root.put("x/y.json", b"one")
    assert archives.root.put("x/y.json", b"one")
    assert not archives.root.put("x/y.json", b"two")


def test_a_full_disk(archives: Archives, monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is no room for is an error, and what was written is removed, whatever else goes wrong."""
    files = RowFiles(archives.root, "orders", "", 0, 0, 10**6)
    monkeypatch.setattr(archive_rows, "GROUP_ROWS", 10)
    files.add(rows(range(1, 20)))
    create = Root.create

    def full(self: Root, name: str) -> Any:
        create(self, name).close()
        return pyarrow.OSFile("/dev/full", "wb")

    monkeypatch.setattr(Root, "create", full)
    with pytest.raises(OSError, match="No space left"):
        files.add(rows(range(20, 40), NOON + timedelta(days=1)))
        files.add(rows(range(40, 60), NOON + timedelta(days=2)))
        files.close()
    assert archives.files()
    files.abandon()
    assert archives.files() == set()


def test_a_file_of_which_a_part_arrived(archives: Archives, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RowFiles(archives.root, "orders", "", 0, 0, 10**6)
    files.add(rows(range(1, 20)))
    monkeypatch.setattr(Root, "size", lambda self, name: 10)
    with pytest.raises(Unavailable, match="has 10 bytes of"):
        files.close()
    files.abandon()
    assert archives.files() == set()


# -- the driver -----------------------------------------------------------------------------------------------


class Driven:
    """A driver whose files are made up; its checkpoint is as Spark's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.root = folder, Root(str(folder / "archive"))
        self.url = f"sqlite:///{folder}/table.db"
        store = open_blocking_store(self.url, Registry([Stream("orders")]))
        store.init()
        store.open()
        claim = store.claim("w", ["orders"], timeout=5)
        store.reserve("orders", 1_000)  # the positions that are made up here lie below it
        self.proves = lambda position: store.heartbeat(claim, {"orders": position})
        self.close = store.close
        monkeypatch.setattr(StreamArchive, "_write_files", lambda self, frame, number: [])

    def driver(self, **options: Any) -> StreamArchive:
        told = archive.Options(store=self.url, archive=self.root.url, **options)
        driver = StreamArchive(self.root, "orders", told)
        driver.prepare(self.url)
        return driver

    def batch(self, driver: StreamArchive, number: int, upto: int) -> None:
        """As Spark does it: the end is noted, then the batch is done."""
        end = Offset(driver.start_of().epoch, {"w": upto})
        log = Path(driver.checkpoint.path("offsets"))
        log.mkdir(parents=True, exist_ok=True)
        (log / str(number)).write_text("v1\n{}\n" + orjson.dumps(end.to_dict()).decode())
        driver.write(None, number, end, "q")  # type: ignore[arg-type]


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Driven(tmp_path, monkeypatch)
    yield made
    made.close()


def test_a_checkpoint_that_stands_elsewhere_than_the_archive(driven: Driven) -> None:
    """The machine that another one has stood in for comes back: its checkpoint is of the same path and number, and its
    batch would begin where the archive has gone on from long ago."""
    here = driven.folder / "here"
    one = driven.driver(checkpoint=str(here))
    driven.batch(one, 0, 10)
    driven.batch(one, 1, 20)
    here.rename(driven.folder / "away")
    other = driven.driver(checkpoint=str(here))  # another machine, where the path is empty
    driven.batch(other, 0, 30)
    driven.batch(other, 1, 40)
    here.rename(driven.folder / "second")
    (driven.folder / "away").rename(here)
    back = driven.driver(checkpoint=str(here))
    with pytest.raises(ConfigError, match="is the checkpoint at .* an old copy"):
        driven.batch(back, 2, 35)
    found = load(driven.root, "orders").checked()
    assert [(one.after, one.upto) for one in found.manifests][-1] == ({"w": 30}, {"w": 40})


def test_an_archive_that_was_moved(driven: Driven) -> None:
    """Its checkpoint is inside, and goes along."""
    driven.batch(driven.driver(), 0, 10)
    Path(driven.root.url).rename(driven.folder / "moved")
    driven.root = Root(str(driven.folder / "moved"))
    again = driven.driver()
    assert again.start_of().base == 0
    driven.batch(again, 0, 10)
    driven.batch(again, 1, 20)
    assert [one.upto for one in load(driven.root, "orders").checked().manifests] == [{"w": 10}, {"w": 20}]


def test_two_jobs_with_checkpoints_of_their_own(driven: Driven) -> None:
    """Who is second to put a batch ends with an error, and the archive is one of the two's."""
    one = driven.driver()
    other = driven.driver(checkpoint=str(driven.folder / "elsewhere"))
    driven.batch(one, 0, 10)
    with pytest.raises(ConfigError, match="has a batch 0 already"):
        driven.batch(other, 0, 12)
    driven.batch(one, 1, 20)
    assert load(driven.root, "orders").checked().upto == {"w": 20}


def test_two_jobs_that_do_the_same_batch(driven: Driven) -> None:
    """With the same checkpoint Spark has them do the same batches: the first manifest stands, the second is not put."""
    one, other = driven.driver(), driven.driver()
    driven.batch(one, 0, 10)
    driven.batch(other, 0, 10)
    driven.batch(other, 1, 20)
    driven.batch(one, 1, 20)
    assert (one.report()["batch"], other.report()["batch"]) == (1, 1)
    assert [one.upto["w"] for one in load(driven.root, "orders").checked().manifests] == [10, 20]


@pytest.mark.parametrize(
    "text",
    [
        "org.apache.spark.SparkConcurrentModificationException: Multiple streaming queries are concurrently using x.",
        "[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple streaming jobs detected for 5.",
    ],
)
def test_two_jobs_with_one_checkpoint(driven: Driven, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Spark notices: what it says is told clearly."""

    class SparkError(Exception):
        __module__ = "py4j.protocol"

    def start(self: StreamArchive, spark: Any) -> Any:
        raise SparkError(text)

    monkeypatch.setattr(StreamArchive, "start", start)
    none: Any = None
    told = archive.Options(store=driven.url, archive=driven.root.url, stream=("orders", "orders"))
    with pytest.raises(ConfigError, match="another job archives into .* with the same checkpoint"):
        archive.run(none, told, job.silent)


class Query:
    """As Spark's: it needs a while until it has its source, then it ends."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def status(self) -> dict[str, Any]:
        self.asked += 1
        return {"message": "Initializing sources" if self.asked < 3 else "Waiting for data to arrive"}

    @property
    def isActive(self) -> bool:
        return self.asked < 3

    def exception(self) -> None:
        """None."""

    def stop(self) -> None:
        """It has."""


def test_queries_are_started_one_by_one(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each starts a process to which Spark gives ten seconds: nineteen at a time do not make it on two cores."""
    started: list[Query] = []

    def start(self: StreamArchive, spark: Any) -> Query:
        assert all(not query.isActive for query in started)
        started.append(Query())
        return started[-1]

    monkeypatch.setattr(StreamArchive, "start", start)
    monkeypatch.setattr(StreamArchive, "prepare", lambda self, url: None)
    monkeypatch.setattr(archiving, "LOOK", 0)
    none: Any = None
    told = archive.Options(store=driven.url, archive=driven.root.url, stream=("one", "two", "three"))
    archive.run(none, told, job.silent)
    assert [query.asked for query in started] == [3, 3, 3]


def test_a_stream_that_is_named_twice(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has one query."""
    started: list[str] = []

    monkeypatch.setattr(StreamArchive, "start", lambda self, spark: started.append(self.stream) or Query())
    monkeypatch.setattr(archiving, "LOOK", 0)
    none: Any = None
    told = archive.Options(store=driven.url, archive=driven.root.url, stream=("orders", "orders"))
    archive.run(none, told, job.silent)
    assert started == ["orders"]


def test_latest_is_when_the_archive_was_begun(driven: Driven) -> None:
    """Killed before the first batch: what was written since is not skipped by the second try."""
    driven.proves(10)
    assert driven.driver(start="latest").start_of().positions == {"w": 10}
    driven.proves(20)
    assert driven.driver(start="latest").start_of().positions == {"w": 10}
    assert driven.driver(start='{"w": 15}').start_of().positions == {"w": 15}
