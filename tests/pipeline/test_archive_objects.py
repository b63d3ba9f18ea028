"""Archives in an object store, and as Delta tables, without Spark."""

from __future__ import annotations

import datetime as dt
import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from busrep import ConfigError, Unavailable
from busrep.errors import MissingExtra
from busrep.spark import archive_delta, compacting
from busrep.spark.archive_objects import options_of, plain
from busrep.spark.archive_rows import RowFiles, read_rows
from busrep.spark.archive_store import Root, load, put_manifest
from busrep.spark.archived import Manifest
from tests.pipeline.objects import Objects, object_store
from tests.pipeline.test_archiving import NOON, Archives, rows


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with object_store() as running:
        yield running


class Remote(Archives):
    """An archive of which the rest is elsewhere."""

    def __init__(self, url: str) -> None:
        self.root = Root(url)


def tokens(root: Root) -> list[int]:
    return [token for batch in read_rows(root, load(root, "orders")) for token in batch.column("token").to_pylist()]


# -- an object store ------------------------------------------------------------------------------------------


def test_an_archive_in_an_object_store(objects: Objects) -> None:
    """Written, listed, read, compacted; nothing of it is on a disk."""
    archive = Remote(objects.url("lake/archives/one"))
    archive.batch(0, 0, 5)
    archive.batch(1, 5, 10, at=NOON + dt.timedelta(days=1))
    archive.batch(2, 10, 15)
    assert {path.partition("/stream")[0].partition("/_busrep")[0] for path in objects.objects} == {"/lake/archives/one"}
    assert load(archive.root, "orders").checked().upto == {"w": 15}
    assert tokens(archive.root) == list(range(1, 16))
    manifest = archive.compact(ago=10)
    compacting.clean(archive.root, "orders", 0)
    assert archive.manifests() == [manifest.name]
    assert archive.files() == {file.file for file in manifest.files}
    assert sorted(tokens(archive.root)) == list(range(1, 16))
    files = RowFiles(archive.root, "orders", "", 3, 0, 10**6)
    files.add(rows(range(16, 20)))
    files.abandon()
    assert archive.files() == {file.file for file in manifest.files}


def test_a_manifest_is_put_once_in_an_object_store(objects: Objects) -> None:
    """By many at once."""
    won: list[int] = []
    start = threading.Barrier(6)

    def put(number: int) -> None:
        root = Root(objects.url("lake/one"))
        start.wait()
        if root.put("x/y.json", b"%d" % number):
            won.append(number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(put, range(6)))
    assert [objects.objects["/lake/one/x/y.json"]] == [b"%d" % number for number in won]


def test_a_put_whose_answer_is_lost(objects: Objects) -> None:
    """The client asks again, and is told that there is one, which is its own."""
    failed: list[str] = []

    def lose(method: str, path: str) -> int | None:
        if method == "PUT" and not failed:
            failed.append(path)
            objects.objects[path] = b"mine"
            return 500
        return None

    objects.before = lose
    assert Root(objects.url("lake/one")).put("x/y.json", b"mine")
    assert failed == ["/lake/one/x/y.json"]
    assert not Root(objects.url("lake/one")).put("x/y.json", b"other")


def test_an_object_store_that_refuses(objects: Objects) -> None:
    objects.before = lambda method, path: 403 if method == "PUT" else None
    with pytest.raises((ConfigError, Unavailable)) as found:
        Root(objects.url("lake/one")).put("x/y.json", b"mine")
    assert "s3://lake/one" in str(found.value)
    assert "secret" not in str(found.value)


def test_without_the_package_it_is_asked_first(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    root = Root(objects.url("lake/one"))
    assert root.put("x/y.json", b"mine")
    assert root.put("x/y.json", b"mine")
    assert not root.put("x/y.json", b"other")
    assert objects.objects["/lake/one/x/y.json"] == b"mine"


def test_what_a_url_says() -> None:
    url = "s3://key:se%2Fcret@lake/a/b?endpoint_override=127.0.0.1:99&scheme=http&region=eu"
    assert plain(url) == "s3://lake/a/b"
    assert options_of(url) == {
        "aws_access_key_id": "key", "aws_secret_access_key": "se/cret", "aws_region": "eu",
        "aws_endpoint": "http://127.0.0.1:99", "aws_allow_http": "true",
    }  # fmt: skip
    assert options_of("gs://lake/a") == {}
    root = Root(url)
    assert (
        root.below("x/y").url == "s3://key:se%2Fcret@lake/a/b/x/y?endpoint_override=127.0.0.1:99&scheme=http&region=eu"
    )
    # What Spark is told has neither credentials nor parameters.
    assert root.spark_path("c") == "s3a://lake/a/b/c"
    assert Root("/tmp/what?").below("c").url == "/tmp/what?/c"


# -- Delta ----------------------------------------------------------------------------------------------------


@pytest.fixture
def archives(tmp_path: Path) -> Archives:
    return Archives(tmp_path)


def delta(root: Root) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(*_place(root))


def _place(root: Root) -> tuple[Any, ...]:
    url = root.below("stream=orders").url
    return (url,) if root.local else (plain(url), None, options_of(url))


def delta_tokens(root: Root) -> list[int]:
    """As whoever knows Delta, and nothing of manifests, reads it."""
    found = pyarrow.table(delta(root).to_pyarrow_table(columns=["token"]))
    return sorted(found.column("token").to_pylist())


def test_a_delta_log_follows_the_manifests(archives: Archives) -> None:
    root = archives.root
    assert archive_delta.follow(root, "orders") == 0
    assert not archive_delta.is_delta(root, "orders")
    archives.batch(0, 0, 5)
    assert archive_delta.follow(root, "orders") == 1
    archives.batch(1, 5, 10, at=NOON + dt.timedelta(days=1))
    archives.batch(2, 10, 12)
    # A driver that was killed between the manifest and the log: the next one finds it, once.
    assert [archive_delta.follow(root, "orders") for _ in range(3)] == [2, 0, 0]
    assert delta(root).version() == 1
    assert delta_tokens(root) == list(range(1, 13))
    by_date = delta(root).to_pyarrow_table(filters=[("date", "=", dt.date(2026, 5, 12))], columns=["token"])
    assert pyarrow.table(by_date).column("token").to_pylist() == list(range(6, 11))


def test_a_compaction_is_no_change_of_a_delta_table(archives: Archives) -> None:
    for number in range(3):
        archives.batch(number, number * 5, number * 5 + 5)
    archive_delta.follow(archives.root, "orders")
    archives.compact(ago=10)
    assert archive_delta.follow(archives.root, "orders") == 4
    assert delta_tokens(archives.root) == list(range(1, 16))
    log = sorted(Path(archives.root.path("stream=orders/_delta_log")).glob("*.json"))[-1].read_text()
    actions = [json.loads(line) for line in log.splitlines()]
    changes = [one.get("add", one.get("remove"))["dataChange"] for one in actions if {"add", "remove"} & one.keys()]
    assert changes == [False] * 4
    compacting.clean(archives.root, "orders", 0)
    assert archive_delta.is_delta(archives.root, "orders")  # the log is no garbage
    assert delta_tokens(archives.root) == list(range(1, 16))


def test_a_delta_table_of_a_row_class_that_grows(archives: Archives) -> None:
    def batch(number: int, fields: list[tuple[str, Any]]) -> None:
        struct = pyarrow.struct(fields)
        plain_rows = rows(range(number * 5 + 1, number * 5 + 6))
        column = pyarrow.array([{name: 1 for name, _ in fields}] * 5, struct)
        schema = plain_rows.schema.append(pyarrow.field("fields", struct))
        files = RowFiles(archives.root, "orders", "", number, 0, 10**6, schema)
        files.add(pyarrow.RecordBatch.from_arrays([*plain_rows.columns, column], schema=schema))
        ends = {"after": {"w": number * 5}, "upto": {"w": number * 5 + 5}, "files": tuple(files.close())}
        assert put_manifest(archives.root, Manifest(stream="orders", query="q", batch=number, epoch="e", **ends))

    batch(0, [("a", pyarrow.int64())])
    archive_delta.follow(archives.root, "orders")
    batch(1, [("a", pyarrow.int64()), ("b", pyarrow.float64())])
    assert archive_delta.follow(archives.root, "orders") == 1
    found = pyarrow.table(delta(archives.root).to_pyarrow_table(columns=["token", "fields"])).to_pylist()
    assert {row["token"]: row["fields"] for row in found} == {
        token: {"a": 1, "b": None if token <= 5 else 1.0} for token in range(1, 11)
    }
    batch(2, [("a", pyarrow.float64())])
    with pytest.raises(ConfigError, match="cannot be in one Delta table.*a was int64, and is double"):
        archive_delta.follow(archives.root, "orders")


def test_two_jobs_follow_at_once(archives: Archives) -> None:
    """The archive's, and compaction: the log ends with what the manifests say."""
    archives.batch(0, 0, 5)
    archive_delta.follow(archives.root, "orders")
    errors: list[BaseException] = []

    def work(*numbers: int) -> None:
        try:
            for _ in numbers:
                archive_delta.follow(archives.root, "orders")
        except BaseException as error:
            errors.append(error)

    for number in range(1, 6):
        archives.batch(number, number * 5, number * 5 + 5)
        if number % 2:
            archives.compact(ago=10)
        threads = [threading.Thread(target=work, args=(1, 2)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert delta_tokens(archives.root) == list(range(1, 31))
    assert archive_delta.follow(archives.root, "orders") == 0


def test_a_delta_table_in_an_object_store(objects: Objects) -> None:
    archive = Remote(objects.url("lake/one"))
    archive.batch(0, 0, 5)
    assert archive_delta.follow(archive.root, "orders") == 1
    archive.batch(1, 5, 10)
    assert archive_delta.follow(archive.root, "orders") == 1
    assert delta_tokens(archive.root) == list(range(1, 11))


def test_delta_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(MissingExtra, match=r"busrep\[delta\]"):
        archive_delta.check_delta()
