"""Snapshots in Parquet files: what is written is what is read, and what is not believed of a directory."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import attrs
import orjson
import pyarrow
import pytest
from pyarrow import fs as arrow_fs
from pyarrow import parquet as arrow_parquet

from busrep.core.snapshots import Agreement, PartRange, SnapshotSource, encode_rows
from busrep.errors import ConfigError, SnapshotGone, Unavailable
from busrep.http.source import HttpSource
from busrep.snapshots import parquet
from busrep.snapshots.parquet import ParquetSource, write_snapshot
from busrep.snapshots.parquet_manifest import NAME, read_manifest
from busrep.snapshots.sources import open_source
from tests.blocked import DEPENDED_ON, run_blocked
from tests.http.test_server import memory_store, orders
from tests.http.test_source import ROWS as ODD_ROWS
from tests.stores.store_conformance import sync

EPOCH = "0123456789abcdef" * 2
ROWS = [
    (3, "w1", b'["a",1]'),
    (3, "w1", b'"\\\\ \\" \xc3\xbc \\u2028"'),
    (4, "wü2", b"null"),
    (7, "w1", b"{}"),
    (9, "w1", b"1.0"),
]
AGREED = Agreement(
    "orders",
    EPOCH,
    {"w1": 12, "wü2": 5},
    {"w1": 2},
    (PartRange(0, 4, 3), PartRange(4, 8, -1), PartRange(8, 9, 1), PartRange(9, 12, 0)),
    "elsewhere",
)


@attrs.define(eq=False)
class Rows:
    """A source of ``rows``, that can fail in the middle of one part."""

    agreement: Agreement = AGREED
    rows: Any = attrs.field(factory=lambda: list(ROWS))
    failing: int | None = None
    error: BaseException = attrs.field(factory=lambda: Unavailable("the store", "gone"))
    held: int = 0

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        self.held += 1
        return self.agreement

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        text = self.text(number)
        yield text[:5]
        if number == self.failing:
            raise self.error
        yield text[5:]

    def text(self, number: int) -> bytes:
        part = self.agreement.parts[number]
        found = [row for row in self.rows if part.after < row[0] <= part.upto]
        return encode_rows(*zip(*found, strict=True)) if found else b""

    async def leave(self, agreement: Agreement) -> None:
        self.held -= 1


async def text_of(source: SnapshotSource, agreement: Agreement, number: int) -> bytes:
    return b"".join([piece async for piece in source.load(agreement, number)])


async def written(folder: Path, source: Any = None) -> ParquetSource:
    await write_snapshot(source or Rows(), "orders", folder.as_uri())
    opened = ParquetSource(folder.as_uri())
    await opened.open()
    return opened


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads((folder / NAME).read_bytes())
    return found


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- what passes ----------------------------------------------------------------------------------------------


@sync
async def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    folder, rows = tmp_path / "a b" / "snäpshot", Rows()
    source = await written(folder, rows)
    assert rows.held == 0
    agreement = await source.agree("orders", part_rows=1)
    assert agreement.same(AGREED)
    assert [part.rows for part in agreement.parts] == [3, 1, 1, 0]
    assert (agreement.source, agreement.id) == (folder.as_uri(), agreement.digest)
    for number in range(4):
        assert await text_of(source, agreement, number) == rows.text(number)
    assert (await source.agree("orders", part_rows=1, again=agreement)) == agreement
    await source.leave(agreement)
    await source.close()
    assert await text_of(ParquetSource(folder.as_uri()), AGREED, 0) == rows.text(0), "one that was agreed on before"


@sync
async def test_odd_rows_come_back_byte_for_byte(tmp_path: Path) -> None:
    payloads = [orjson.dumps(row) for row in ODD_ROWS]
    rows = [(number, "w1", payload) for number, payload in enumerate(payloads, 1)]
    agreement = Agreement("orders", EPOCH, {"w1": 10_000}, {}, (PartRange(0, 10_000, -1),))
    given = Rows(agreement, rows)
    source = await written(tmp_path, given)
    assert await text_of(source, agreement, 0) == given.text(0)


@sync
async def test_a_snapshot_of_a_store_through_files(tmp_path: Path) -> None:
    async with memory_store() as store:
        agreement = await write_snapshot(store, "orders", tmp_path.as_uri(), part_rows=2)
        source = open_source(tmp_path.as_uri(), [orders])
        await source.open()
        own = await store.agree("orders", part_rows=2)
        assert (await source.agree("orders", part_rows=2, again=own)).same(own)
        assert agreement.same(own)
        for number in range(len(own.parts)):
            assert await text_of(source, agreement, number) == await text_of(store, own, number)
        await store.leave(own)


@sync
async def test_the_layout(tmp_path: Path) -> None:
    """As docs/bootstrap.md has it: other programs write it too."""
    await written(tmp_path)
    found = manifest_of(tmp_path)
    assert {name: found[name] for name in ("version", "stream", "epoch", "positions", "floors")} == {
        "version": 1, "stream": "orders", "epoch": EPOCH, "positions": {"w1": 12, "wü2": 5}, "floors": {"w1": 2},
    }  # fmt: skip
    assert [(part["after"], part["upto"], part["rows"]) for part in found["parts"]] == [
        (0, 4, 3), (4, 8, 1), (8, 9, 1), (9, 12, 0),
    ]  # fmt: skip
    assert [part["sha256"] for part in found["parts"]] == [
        hashlib.sha256(Rows().text(number)).hexdigest() for number in range(4)
    ]
    assert files_of(tmp_path) == {NAME, *(part["file"] for part in found["parts"])}
    table = arrow_parquet.read_table(tmp_path / found["parts"][0]["file"])
    assert table.schema.equals(
        pyarrow.schema([("token", pyarrow.int64()), ("writer", pyarrow.string()), ("row", pyarrow.string())])
    )
    assert table.column("row").to_pylist() == [row[2].decode() for row in ROWS[:3]]


@sync
async def test_files_that_another_program_has_written(tmp_path: Path) -> None:
    """Spark's names, its own order of columns, some more of them, large strings, dictionaries."""
    rows, name = Rows(), "stream=orders/part-00000-tid-1_2-c000.snappy.parquet"
    columns = {
        "row": pyarrow.array([row[2].decode() for row in ROWS[:3]], pyarrow.large_string()),
        "when": pyarrow.array([1, 2, 3]),
        "token": pyarrow.array([row[0] for row in ROWS[:3]], pyarrow.int64()),
        "writer": pyarrow.array([row[1] for row in ROWS[:3]], pyarrow.string()),
    }
    (tmp_path / "stream=orders").mkdir()
    arrow_parquet.write_table(pyarrow.table(columns), tmp_path / name, compression="snappy")
    manifest = {
        "version": 1, "stream": "orders", "epoch": EPOCH, "positions": {"w1": 12, "wü2": 5}, "floors": {"w1": 2},
        "by": "a job",
        "parts": [{"file": name, "after": 0, "upto": 4, "rows": 3, "sha256": hashlib.sha256(rows.text(0)).hexdigest()}],
    }  # fmt: skip
    (tmp_path / NAME).write_bytes(orjson.dumps(manifest))
    source = ParquetSource(tmp_path.as_uri())
    agreement = await source.agree("orders", part_rows=1)
    assert await text_of(source, agreement, 0) == rows.text(0)


@sync
async def test_on_another_file_system() -> None:
    """As an object store, but for the network; what a URL says of a region or a key is not shown."""
    remote, rows = arrow_fs._MockFileSystem(), Rows()
    await write_snapshot(rows, "orders", "bucket/prefix/", filesystem=remote)
    source = ParquetSource("bucket/prefix", filesystem=remote)
    agreement = await source.agree("orders", part_rows=1)
    assert await text_of(source, agreement, 1) == rows.text(1)
    names = [info.base_name for info in remote.get_file_info(arrow_fs.FileSelector("bucket/prefix"))]
    assert len(names) == 5
    assert not [name for name in names if name.endswith(".tmp")]


URLS = {
    "s3://key:secret@bucket/prefix/?region=eu-west-1&endpoint_override=localhost:1": "s3://bucket/prefix",
    "s3://bucket": "s3://bucket",
    "gs://anonymous@bucket/some/prefix": "gs://bucket/some/prefix",
    "file:///some/directory/": "file:///some/directory",
}


@pytest.mark.parametrize("url", URLS)
def test_object_stores_are_named_without_their_secrets(url: str) -> None:
    source = open_source(url, [orders])
    assert isinstance(source, ParquetSource)
    assert repr(source) == f"ParquetSource({URLS[url]!r})"


UNREADABLE = {
    "s3://key:HID/DEN@bucket/prefix?region=eu-west-1": "percent-encoded",
    "s3://key:12/HIDDEN@bucket/prefix?region=eu-west-1": "percent-encoded",
    "s3://key:HID?DEN@bucket/prefix": "percent-encoded",
    "s3://key:HID DEN@bucket/prefix": "these forms do",
    "gs://key:HIDDEN@bucket/prefix": "these forms do",
    "gopher://key:HIDDEN@bucket/prefix": "these forms do",
    "s3://key:HIDDEN@bucket/prefix?region=eu-west-1&secrets=DEN": r"query parameter in S3 URI: 'secrets'",
}


@pytest.mark.parametrize("url", UNREADABLE)
@sync
async def test_a_url_that_is_not_understood_is_not_shown(url: str) -> None:
    """What pyarrow says of it quotes the whole."""
    with pytest.raises(ConfigError, match=UNREADABLE[url]) as caught:
        await open_source(url, [orders]).open()
    assert "DEN" not in str(caught.value)
    assert "HID" not in str(caught.value)


def test_an_s3_url_is_understood_as_it_is() -> None:
    """Without asking the network for anything: the region is in it."""
    url = "s3://key:secret@bucket/prefix?region=eu-west-1"
    filesystem, path = arrow_fs.FileSystem.from_uri(url)
    assert (filesystem.type_name, filesystem.region, path) == ("s3", "eu-west-1", "bucket/prefix")


@pytest.mark.parametrize("url", ["", "nothing", "/some/directory", "file:", "file://", "sqlite:///x.db", "memory://x"])
def test_urls_that_name_no_source(url: str) -> None:
    with pytest.raises(ConfigError, match=r"these forms do: .*file:///directory"):
        open_source(url, [orders])


def test_a_server_s_url() -> None:
    source = open_source("https://:secret@host/prefix", [orders])
    assert isinstance(source, HttpSource)
    assert source.url == "https://host/prefix"


@sync
async def test_a_scheme_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match="these forms do"):
        await open_source("gopher://somewhere/x", [orders]).open()


def test_without_the_extra() -> None:
    done = run_blocked(
        """
        import busrep
        from busrep.snapshots.sources import open_source
        for url in ("file:///x", "http://localhost"):
            try:
                open_source(url, [])
            except busrep.ConfigError as error:
                print(error)
        """,
        *DEPENDED_ON,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "a snapshot in Parquet files needs an extra that is not installed: pip install 'busrep[parquet]'",
        "catch-up over HTTP needs an extra that is not installed: pip install 'busrep[http]'",
    ]


# -- writing it -----------------------------------------------------------------------------------------------


@attrs.define
class Told:
    said: list[Any] = attrs.field(factory=list)

    def begin(self, agreement: Agreement) -> None:
        self.said.append(agreement.stream)

    def write(self, piece: bytes) -> None:
        self.said.append(len(piece))

    def part_ended(self, rows: int) -> None:
        self.said.append(f"{rows} rows")


@sync
async def test_how_it_gets_on_is_told(tmp_path: Path) -> None:
    told, rows = Told(), Rows()
    await write_snapshot(rows, "orders", tmp_path.as_uri(), tally=told)
    assert told.said[:4] == ["orders", 5, len(rows.text(0)) - 5, "3 rows"]
    assert [one for one in told.said if isinstance(one, str)] == ["orders", "3 rows", "1 rows", "1 rows", "0 rows"]


@pytest.mark.parametrize("kind", ["fails", "is cancelled"])
@sync
async def test_a_copy_that_ends_in_the_middle_is_no_snapshot(tmp_path: Path, kind: str) -> None:
    error: BaseException = asyncio.CancelledError() if kind == "is cancelled" else Unavailable("the store", "gone")
    rows = Rows(failing=2, error=error)
    with pytest.raises(type(error)):
        await write_snapshot(rows, "orders", tmp_path.as_uri())
    assert (files_of(tmp_path), rows.held) == (set(), 0)
    with pytest.raises(ConfigError, match="no snapshot, or one that is not whole yet"):
        await ParquetSource(tmp_path.as_uri()).open()
    assert await text_of(await written(tmp_path), AGREED, 0) == rows.text(0)


@sync
async def test_what_a_killed_copy_left_is_not_mixed_up(tmp_path: Path) -> None:
    (tmp_path / "part-000000-00000000.parquet").write_bytes(b"PAR1 and half of a file")
    (tmp_path / (NAME + ".0000.tmp")).write_bytes(b'{"version":1')
    source = await written(tmp_path)
    assert await text_of(source, AGREED, 0) == Rows().text(0)


@sync
async def test_a_snapshot_is_not_overwritten(tmp_path: Path) -> None:
    await written(tmp_path)
    before = files_of(tmp_path)
    rows = Rows()
    with pytest.raises(ConfigError, match="already: name another directory"):
        await write_snapshot(rows, "orders", tmp_path.as_uri())
    assert (files_of(tmp_path), rows.held) == (before, 0)


@pytest.mark.parametrize("text", [b"3 w1 1\n", b"9 w1 1\n" * 3, b"3 w1 1\n3 w1 \xff\n4 w1 1\n", b"x\n", b"3 w1 1"])
@sync
async def test_a_source_that_gives_something_else_is_not_copied(tmp_path: Path, text: bytes) -> None:
    class Lying(Rows):
        def text(self, number: int) -> bytes:
            return text

    rows = Lying()
    with pytest.raises(Unavailable, match="part 0 is refused"):
        await write_snapshot(rows, "orders", tmp_path.as_uri())
    assert (files_of(tmp_path), rows.held) == (set(), 0)


@sync
async def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises((ConfigError, Unavailable)):
        await write_snapshot(Rows(), "orders", (tmp_path / "file" / "below").as_uri())


@sync
async def test_a_directory_that_goes_while_it_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"

    class Removing(Rows):
        async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
            shutil.rmtree(folder, ignore_errors=True)
            yield self.text(number)

    rows = Removing()
    with pytest.raises(ConfigError, match="is not there"):
        await write_snapshot(rows, "orders", folder.as_uri())
    assert rows.held == 0


@sync
async def test_a_manifest_that_cannot_be_written_whole_is_not_there(tmp_path: Path) -> None:
    def failing(*_: Any) -> None:
        raise OSError("disk full")

    local = arrow_fs.LocalFileSystem()
    wrapped = Failing(local, move=failing)
    rows = Rows()
    with pytest.raises(Unavailable, match="disk full"):
        await write_snapshot(rows, "orders", str(tmp_path), filesystem=wrapped)
    assert (files_of(tmp_path), rows.held) == (set(), 0)


@sync
async def test_a_copy_that_is_cancelled_at_its_manifest_leaves_none(tmp_path: Path) -> None:
    """Its parts go: a manifest that comes after that would be one of nothing."""
    local, begun, go_on = arrow_fs.LocalFileSystem(), threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        begun.set()
        assert go_on.wait(30)
        local.move(*args)

    rows = Rows()
    copying = asyncio.create_task(write_snapshot(rows, "orders", str(tmp_path), filesystem=Failing(local, move=slow)))
    assert await asyncio.to_thread(begun.wait, 30)
    copying.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert (files_of(tmp_path), rows.held) == (set(), 0)


@sync
async def test_a_snapshot_that_was_written_meanwhile_stays(tmp_path: Path) -> None:
    begun, done = asyncio.Event(), asyncio.Event()

    class Waiting(Rows):
        async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
            if number == 3:
                begun.set()
                await done.wait()
            yield self.text(number)

    copying = asyncio.create_task(write_snapshot(Waiting(), "orders", tmp_path.as_uri()))
    await begun.wait()
    first = await written(tmp_path)
    before = manifest_of(tmp_path)
    done.set()
    with pytest.raises(ConfigError, match="already"):
        await copying
    assert manifest_of(tmp_path) == before
    assert len(files_of(tmp_path)) == 5
    assert await text_of(first, AGREED, 0) == Rows().text(0)


class Failing:
    """A file system of which some methods are others."""

    def __init__(self, inner: Any, **others: Any) -> None:
        self._inner, self._others = inner, others

    def __getattr__(self, name: str) -> Any:
        return self._others.get(name) or getattr(self._inner, name)


# -- what is not believed -------------------------------------------------------------------------------------


def changed(change: Any) -> bytes:
    found: dict[str, Any] = {
        "version": 1, "stream": "orders", "epoch": EPOCH, "positions": {"w1": 9}, "floors": {},
        "parts": [
            {"file": "a.parquet", "after": 0, "upto": 5, "rows": 1, "sha256": "0" * 64},
            {"file": "b.parquet", "after": 5, "upto": 9, "rows": 1, "sha256": "0" * 64},
        ],
    }  # fmt: skip
    change(found)
    return orjson.dumps(found)


def part(**fields: Any) -> Any:
    return lambda found: found["parts"][1].update(fields)


def top(**fields: Any) -> Any:
    return lambda found: found.update(fields)


HOSTILE: dict[str, tuple[Any, str]] = {
    "the parent": (part(file="../b.parquet"), "not a name below"),
    "the parent, within": (part(file="x/../../b.parquet"), "not a name below"),
    "a root": (part(file="/etc/passwd"), "not a name below"),
    "a URL": (part(file="s3://other/b.parquet"), "not a name below"),
    "a Windows path": (part(file="..\\b.parquet"), "not a name below"),
    "hidden": (part(file=".b.parquet"), "not a name below"),
    "a zero byte": (part(file="b\0.parquet"), "not a name below"),
    "no name": (part(file=""), "not a name below"),
    "no text": (part(file=5), "not a name below"),
    "twice": (part(file="a.parquet"), "named twice"),
    "another version": (top(version=2), "of version 2, this busrep reads 1"),
    "no version": (lambda found: found.pop("version"), "no version"),
    "overlapping": (part(after=4), "does not begin where"),
    "a gap": (part(after=6), "does not begin where"),
    "empty": (part(upto=5), "no range"),
    "negative rows": (part(rows=-1), "negative number"),
    "no number": (part(rows="1"), "no integer"),
    "a boolean": (part(rows=True), "no integer"),
    "no hash": (part(sha256="0"), "64 hexadecimal"),
    "no part": (top(parts=[5]), "no integer"),
    "no parts": (top(parts=None), "parts no list"),
    "no stream": (top(stream=None), "no text"),
    "no epoch": (top(epoch="x"), "epoch"),
    "positions": (top(positions=["w1"]), "no map of integers"),
    "a float": (top(positions={"w1": 1.5}), "no map of integers"),
    "a floor": (top(floors={"w1": 10}), "above its position"),
    "a hole": (lambda found: found["parts"].pop(0), "rows of writer 'w1' above 0 are in none"),
}


@pytest.mark.parametrize("case", HOSTILE)
@sync
async def test_manifests_that_are_not_believed(tmp_path: Path, case: str) -> None:
    change, reason = HOSTILE[case]
    read_manifest(changed(lambda _: None))
    (tmp_path / NAME).write_bytes(changed(change))
    source = ParquetSource(tmp_path.as_uri())
    with pytest.raises(ConfigError, match=reason):
        await source.open()
    with pytest.raises(ConfigError, match="manifest.json cannot be used"):
        await source.agree("orders", part_rows=1)


@pytest.mark.parametrize("text", [b"", b"[", b"[]", b"5", b'{"version":1'])
@sync
async def test_manifests_that_are_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / NAME).write_bytes(text)
    with pytest.raises(ConfigError, match="manifest.json cannot be used"):
        await ParquetSource(tmp_path.as_uri()).open()


@sync
async def test_a_manifest_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MANIFEST_BYTES", 100)
    (tmp_path / NAME).write_bytes(changed(lambda _: None))
    with pytest.raises(ConfigError, match="longer than 100 bytes"):
        await ParquetSource(tmp_path.as_uri()).open()


@sync
async def test_a_snapshot_of_another_stream(tmp_path: Path) -> None:
    source = await written(tmp_path)
    with pytest.raises(ConfigError, match="of stream 'orders', not 'payments'"):
        await source.agree("payments", part_rows=1)


def other_table(**columns: Any) -> bytes:
    given = {"token": [3, 3, 4], "writer": ["w1", "w1", "wü2"], "row": [row[2].decode() for row in ROWS[:3]], **columns}
    sink = pyarrow.BufferOutputStream()
    arrow_parquet.write_table(
        pyarrow.table({name: values for name, values in given.items() if values is not None}), sink
    )
    return bytes(sink.getvalue())


FILES: dict[str, tuple[bytes, str]] = {
    "no Parquet": (b"nothing of it", "damaged, or no Parquet file"),
    "empty": (b"", "damaged, or no Parquet file"),
    "another token": (other_table(token=[3, 4, 4]), "SHA-256"),
    "another order": (other_table(token=[4, 3, 3]), "SHA-256"),
    "another row": (other_table(row=["1", "2", "3"]), "SHA-256"),
    "a line break": (other_table(row=["1\n3 w1 2", "3", "4"]), "SHA-256"),
    "fewer rows": (other_table(token=[3], writer=["w1"], row=["1"]), "1 rows, the manifest says 3"),
    "no token": (other_table(token=None), "column token is missing"),
    "tokens that are texts": (other_table(token=["3", "3", "4"]), "column token is string, it should be int64"),
    "rows that are numbers": (other_table(row=[1, 2, 3]), "column row is int64, it should be string"),
    "nulls": (other_table(writer=["w1", None, "w1"]), "nulls"),
    "large": (other_table(row=["x" * 3_000] * 3), "longer than 2000 bytes"),
}


@pytest.mark.parametrize("case", FILES)
@sync
async def test_files_that_are_not_what_the_manifest_says(tmp_path: Path, case: str) -> None:
    content, reason = FILES[case]
    await written(tmp_path)
    path = tmp_path / manifest_of(tmp_path)["parts"][0]["file"]
    path.write_bytes(content)
    source = ParquetSource(tmp_path.as_uri(), max_bytes=2_000)
    agreement = await source.agree("orders", part_rows=1)
    with pytest.raises(ConfigError, match=reason) as caught:
        await text_of(source, agreement, 0)
    assert path.name in str(caught.value)
    assert await text_of(source, agreement, 1) == Rows().text(1)


@sync
async def test_every_flipped_byte_of_a_file_is_refused_or_does_not_matter(tmp_path: Path) -> None:
    source = await written(tmp_path)
    path = tmp_path / manifest_of(tmp_path)["parts"][0]["file"]
    good, refused = path.read_bytes(), 0
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
        try:
            assert await text_of(source, AGREED, 0) == Rows().text(0)
        except ConfigError:
            refused += 1
    assert refused > 20


@sync
async def test_a_file_that_is_missing_or_longer_than_may_be(tmp_path: Path) -> None:
    source = await written(tmp_path)
    first, second, *_ = (tmp_path / part["file"] for part in manifest_of(tmp_path)["parts"])
    first.unlink()
    with pytest.raises(ConfigError, match="is missing: write the snapshot anew"):
        await text_of(source, AGREED, 0)
    short = ParquetSource(tmp_path.as_uri(), max_bytes=100)
    with pytest.raises(ConfigError, match="longer than 100 bytes"):
        await text_of(short, AGREED, 1)
    assert second.exists()


@sync
async def test_a_directory_that_was_replaced(tmp_path: Path) -> None:
    """By another snapshot: the one that was agreed on is gone; by the same one: it goes on."""
    source = await written(tmp_path)
    for name in files_of(tmp_path):
        (tmp_path / name).unlink()
    await written(tmp_path)
    assert await text_of(source, AGREED, 1) == Rows().text(1)
    for name in files_of(tmp_path):
        (tmp_path / name).unlink()
    other = attrs.evolve(AGREED, positions={"w1": 13, "wü2": 5})
    await written(tmp_path, Rows(other))
    with pytest.raises(SnapshotGone, match="another snapshot"):
        await text_of(source, AGREED, 1)
    with pytest.raises(SnapshotGone, match="another snapshot"):
        await text_of(source, AGREED, 1)
    assert (await source.agree("orders", part_rows=1, again=AGREED)).same(other)


@sync
async def test_a_file_that_is_read_badly_once(tmp_path: Path) -> None:
    await written(tmp_path)
    local, tries = arrow_fs.LocalFileSystem(), []

    def badly(path: str) -> Any:
        tries.append(path)
        if len(tries) == 2:  # the first is the manifest
            return pyarrow.PythonFile(open(os.devnull, "rb"))
        return local.open_input_file(path)

    source = ParquetSource(str(tmp_path), filesystem=Failing(local, open_input_file=badly))
    agreement = await source.agree("orders", part_rows=1)
    assert await text_of(source, agreement, 0) == Rows().text(0)
    assert len(tries) == 4


@sync
async def test_a_store_that_cannot_be_reached(tmp_path: Path) -> None:
    def failing(path: str) -> Any:
        raise OSError("no route to host")

    source = ParquetSource("bucket", filesystem=Failing(arrow_fs.LocalFileSystem(), open_input_file=failing))
    with pytest.raises(Unavailable, match="no route to host"):
        await source.open()
    with pytest.raises(Unavailable, match="no route to host"):
        await text_of(source, AGREED, 0)


@sync
async def test_a_directory_that_may_not_be_read() -> None:
    def failing(path: str) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    source = ParquetSource("folder", filesystem=Failing(arrow_fs.LocalFileSystem(), open_input_file=failing))
    with pytest.raises(ConfigError, match="folder cannot be used: Permission denied"):
        await source.open()
