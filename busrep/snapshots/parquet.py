"""Snapshots in Parquet files, in a directory or an object store: a source for readers, and what writes them.

pyarrow blocks, so all that it does runs in threads. A part is read as a whole, and given only if it is what the
manifest says.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit

import attrs

from busrep.core.snapshots import Agreement, PartRows, SnapshotSource, encode_rows
from busrep.errors import ConfigError, MissingExtra, SnapshotGone, Unavailable
from busrep.private_files import create_file, make_folders, open_successor
from busrep.settings import Settings
from busrep.urls import check_url

from ..runtime.tasks import in_thread
from .parquet_manifest import NAME, Manifest, PartFile, read_manifest, write_manifest
from .sources import checked_part, refused_part

try:
    import pyarrow
    from pyarrow import fs as arrow_fs
    from pyarrow import parquet
except ImportError:
    raise MissingExtra("parquet", "a snapshot in Parquet files") from None

FORM = "file:///directory, s3://bucket/prefix?region=..., gs://bucket/prefix or another one that pyarrow.fs knows"

DEFAULTS = Settings()
# Largest file that is read, and largest text of a part: it is kept in memory as a whole.
MAX_BYTES = 256 * 2**20
# Of a part, at a time: what is decoded is let go of in between.
BATCH_ROWS = 2_000
# Of a manifest: some 500,000 parts.
MANIFEST_BYTES = 64 * 2**20
# Stores in which a file appears whole, when it is complete, and directories are made up.
OBJECT_STORES = ("s3", "gcs", "abfs")

_SCHEMA = pyarrow.schema([("token", pyarrow.int64()), ("writer", pyarrow.string()), ("row", pyarrow.string())])
_TEXTS = ("string", "large_string", "string_view")


class _Corrupt(Exception):
    """What is in a file is not what it should be."""


class _Missing(ConfigError):
    """A file is not there."""


class ParquetSource:
    """A `SnapshotSource`: the snapshot in a directory, which ``busrep bootstrap --to`` or a job has written.

    ``url``: of the directory, in one of the forms that pyarrow.fs knows. ``filesystem``: a ``pyarrow.fs.FileSystem`` to
    use instead, ``url`` is then a path in it. ``max_bytes``: the largest part. Snapshots there may be replaced while
    they are read. Raises ConfigError, MissingExtra.
    """

    def __init__(self, url: str, *, filesystem: Any = None, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._place = Directory(url, filesystem)
        self._known: Manifest | None = None

    def __repr__(self) -> str:
        return f"ParquetSource({self._place.shown!r})"

    async def open(self) -> None:
        """Find the manifest: ConfigError when there is none, Unavailable."""
        await self._manifest()

    async def close(self) -> None:
        """See `SnapshotSource`: nothing is kept open."""

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:  # noqa: ARG002
        """See `SnapshotSource`: the one that is there, in the parts that it is written in. ConfigError when it is of
        another stream."""
        agreement = (await self._manifest()).agreement
        if agreement.stream != stream:
            raise ConfigError(f"the snapshot at {self._place.shown} is of stream {agreement.stream!r}, not {stream!r}")
        return attrs.evolve(agreement, source=self._place.shown, id=agreement.digest)

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """See `SnapshotSource`. ConfigError when a file is missing or is not what the manifest says, twice."""
        manifest = self._known
        if manifest is None or not manifest.agreement.same(agreement):
            manifest = await self._still(agreement)
        try:
            pieces = await self._part(manifest, number)
        except (_Corrupt, _Missing):  # it may have been replaced; or be read badly, once
            manifest = await self._still(agreement)
            try:
                pieces = await self._part(manifest, number)
            except (_Corrupt, _Missing) as error:
                why = f": {error}" if isinstance(error, _Corrupt) else " is missing"
                place = f"{self._place.shown}/{manifest.files[number].file}"
                raise ConfigError(f"{place}{why}: write the snapshot anew") from None
        pieces.reverse()
        while pieces:  # not kept here any longer than needed
            yield pieces.pop()

    async def leave(self, agreement: Agreement) -> None:
        """See `SnapshotSource`: nothing is held."""

    async def _manifest(self) -> Manifest:
        try:
            text = await in_thread(self._place.read, NAME, MANIFEST_BYTES)
            self._known = read_manifest(text)
        except _Missing:
            raise ConfigError(
                f"there is no {NAME} at {self._place.shown}: no snapshot, or one that is not whole yet"
            ) from None
        except (_Corrupt, ValueError) as error:
            raise ConfigError(f"{self._place.shown}/{NAME} cannot be used: {error}") from None
        return self._known

    async def _still(self, agreement: Agreement) -> Manifest:
        """The manifest, if it is still that of this agreement: SnapshotGone."""
        manifest = await self._manifest()
        if not manifest.agreement.same(agreement):
            raise SnapshotGone(agreement.stream, f"another snapshot is at {self._place.shown} by now")
        return manifest

    async def _part(self, manifest: Manifest, number: int) -> list[bytes]:
        content = await in_thread(self._place.read, manifest.files[number].file, self._max_bytes)
        return await asyncio.to_thread(_decoded, content, manifest, number, self._max_bytes)


# -- writing --------------------------------------------------------------------------------------------------


class CopyProgress(Protocol):
    """Is told how a copy gets on."""

    def begin(self, agreement: Agreement) -> None:
        """This is what is copied."""

    def write(self, piece: bytes) -> None:
        """More of the text of the part that is under way."""

    def part_ended(self, rows: int) -> None:
        """The part is written."""


async def write_snapshot(
    source: SnapshotSource,
    stream: str,
    url: str,
    *,
    part_rows: int = DEFAULTS.snapshot_part_rows,
    tally: CopyProgress | None = None,
    filesystem: Any = None,
) -> Agreement:
    """Copy a snapshot of ``stream`` from ``source`` (open already) into Parquet files at ``url``; see `ParquetSource`.

    The manifest is written last: until then, and if this fails, there is no snapshot. Raises ConfigError when there is
    one already, or it cannot be written there, and whatever ``source`` raises.
    """
    place = Directory(url, filesystem)
    await in_thread(place.make)
    await in_thread(place.refuse_another)
    agreement = await source.agree(stream, part_rows=part_rows)
    run = secrets.token_hex(4)  # so that what another run has left is not mixed up with it
    names = [f"part-{number:06d}-{run}.parquet" for number in range(len(agreement.parts))]
    try:
        if tally is not None:
            tally.begin(agreement)
        parts, files = [], []
        for number, name in enumerate(names):
            rows, digest = await _write_part(source, agreement, number, place, name, tally)
            parts.append(attrs.evolve(agreement.parts[number], rows=rows))
            files.append(PartFile(name, digest))
        whole = attrs.evolve(agreement, parts=tuple(parts))
        await in_thread(place.refuse_another)  # also one that was written meanwhile
        names.insert(0, NAME)
        await in_thread(place.write_last, NAME, write_manifest(Manifest(whole, tuple(files))))
    except BaseException:
        await in_thread(place.remove, names)
        raise
    finally:
        await source.leave(agreement)
    return attrs.evolve(whole, source=place.shown, id=whole.digest)


async def _write_part(
    source: SnapshotSource, agreement: Agreement, number: int, place: Directory, name: str, tally: CopyProgress | None
) -> tuple[int, str]:
    """How many rows, and the SHA-256 of their text."""
    hashed, pieces = hashlib.sha256(), []
    async with contextlib.aclosing(source.load(agreement, number)) as loading:
        async for piece in loading:
            hashed.update(piece)
            pieces.append(piece)
            if tally is not None:
                tally.write(piece)
    rows = await checked_part(agreement, number, b"".join(pieces))
    try:
        content = await asyncio.to_thread(_encoded, rows)
    except ValueError as error:
        raise refused_part(agreement, number, error) from None
    await in_thread(place.write, name, content)
    if tally is not None:
        tally.part_ended(len(rows.tokens))
    return len(rows.tokens), hashed.hexdigest()


# -- files ----------------------------------------------------------------------------------------------------


class Directory:
    """A directory, wherever it is. ``shown``: its URL without what may be secret.

    Its methods block, also where they find the file system: object stores ask the network. Each may raise Unavailable
    and ConfigError.
    """

    def __init__(self, url: str, filesystem: Any = None) -> None:
        self._url, self._fs, self._path = url, filesystem, url.rstrip("/")
        self.shown = url if filesystem is not None else _shown(url)

    @contextlib.contextmanager
    def _used(self) -> Iterator[tuple[Any, str]]:
        """The file system, and the path in it; the one place where the driver's errors become ours."""
        try:
            if self._fs is None:
                self._fs, self._path = _opened(self._url, self.shown)
            yield self._fs, self._path
        except FileNotFoundError:
            raise _Missing(f"{self.shown} is not there (any more): nothing can be written there") from None
        except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
            raise ConfigError(f"{self.shown} cannot be used: {error.strerror or error}") from None
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(f"{self.shown} cannot be used: {error}") from None
        except (OSError, pyarrow.ArrowException) as error:
            raise Unavailable(self.shown, error) from None

    def make(self) -> None:
        """Make the directory, where there is such a thing."""
        with self._used() as (fs, path):
            if fs.type_name == "local":
                make_folders(path)
            elif fs.type_name not in OBJECT_STORES:
                fs.create_dir(path, recursive=True)

    def refuse_another(self) -> None:
        """Raise ConfigError when there is a snapshot."""
        with self._used() as (fs, path):
            found = fs.get_file_info(f"{path}/{NAME}").type
        if found != arrow_fs.FileType.NotFound:
            raise ConfigError(
                f"there is a snapshot at {self.shown} already: name another directory, or remove that one"
            )

    def read(self, name: str, most: int) -> bytes:
        """All of a file. Raises _Missing, _Corrupt when it is longer than ``most`` bytes."""
        with self._used() as (fs, path), fs.open_input_file(f"{path}/{name}") as file:
            if file.size() > most:
                raise _Corrupt(f"it is longer than {most} bytes")
            return bytes(file.read())

    def write(self, name: str, content: bytes) -> None:
        """Write a file."""
        with self._used() as (fs, path):
            if fs.type_name == "local":
                create_file(f"{path}/{name}")
            with fs.open_output_stream(f"{path}/{name}", compression=None) as file:
                file.write(content)

    def write_last(self, name: str, content: bytes) -> None:
        """Write a file that is there as a whole, or not at all."""
        with self._used() as (fs, path):
            target = f"{path}/{name}"
            beside = target if fs.type_name in OBJECT_STORES else f"{target}.{secrets.token_hex(4)}.tmp"
            try:
                if fs.type_name == "local":
                    os.close(open_successor(beside, target))
                with fs.open_output_stream(beside, compression=None) as file:
                    file.write(content)
                if beside != target:
                    fs.move(beside, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    fs.delete_file(beside)
                raise

    def remove(self, names: list[str]) -> None:
        """Remove files, those that are there; never raises."""
        with contextlib.suppress(Unavailable, ConfigError), self._used() as (fs, path):
            for name in names:
                with contextlib.suppress(OSError):
                    fs.delete_file(f"{path}/{name}")


def _opened(url: str, shown: str) -> tuple[Any, str]:
    try:
        filesystem, path = arrow_fs.FileSystem.from_uri(url)
    except pyarrow.ArrowInvalid as error:
        # It quotes what it could not read, and a secret with it.
        parameter = re.fullmatch(r"Unexpected query parameter in [A-Z0-9]+ URI: '[a-z_]{1,40}'", str(error))
        why = f" ({error})" if parameter else ""
        raise ConfigError(f"the URL {shown!r} does not work, these forms do: {FORM}{why}") from None
    return filesystem, path


def _shown(url: str) -> str:
    """The URL without a key, a secret, or parameters. Raises ConfigError without showing it."""
    check_url(url, "the URL of a snapshot in Parquet files", FORM)
    parts = urlsplit(url)
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", parts.scheme) or not (parts.netloc or parts.path.strip("/")):
        raise ConfigError(f"the URL of a snapshot in Parquet files does not work, these forms do: {FORM}")
    if ":" in parts.netloc and "@" not in parts.netloc and "@" in url and parts.scheme not in ("hdfs", "viewfs"):
        # Half of a secret would be taken for a port, and the rest for a path.
        raise ConfigError(f"a secret in the URL of a snapshot is to be percent-encoded ('/' is %2F); the form: {FORM}")
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl().rstrip("/")


# -- one part -------------------------------------------------------------------------------------------------


def _encoded(rows: PartRows) -> bytes:
    """A Parquet file with these rows. Raises ValueError for a row that is no UTF-8."""
    payloads = pyarrow.array(rows.payloads, pyarrow.binary()).cast(pyarrow.string())
    columns = [pyarrow.array(rows.tokens, pyarrow.int64()), pyarrow.array(rows.writers, pyarrow.string()), payloads]
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_arrays(columns, schema=_SCHEMA), sink, compression="zstd")
    return bytes(sink.getvalue())


def _decoded(content: bytes, manifest: Manifest, number: int, most: int) -> list[bytes]:
    """The text of a part, in pieces. Raises _Corrupt unless it is what the manifest says."""
    hashed, pieces, size = hashlib.sha256(), [], 0
    expected = manifest.agreement.parts[number].rows
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(content))
        _check_schema(file.schema_arrow)
        if file.metadata.num_rows != expected:
            raise _Corrupt(f"it has {file.metadata.num_rows} rows, the manifest says {expected}")
        for batch in file.iter_batches(BATCH_ROWS, columns=_SCHEMA.names):
            piece = _text(batch)
            size += len(piece)
            if size > most:
                raise _Corrupt(f"its text is longer than {most} bytes")
            hashed.update(piece)
            pieces.append(piece)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _Corrupt(f"it is damaged, or no Parquet file ({error})") from None
    if hashed.hexdigest() != manifest.files[number].sha256:
        raise _Corrupt("its rows do not have the SHA-256 that the manifest says")
    return pieces


def _check_schema(schema: Any) -> None:
    for field in _SCHEMA:
        at = schema.get_field_index(field.name)
        found = "missing" if at < 0 else str(schema.field(at).type)
        if found not in (_TEXTS if field.type == pyarrow.string() else (str(field.type),)):
            raise _Corrupt(f"column {field.name} is {found}, it should be {field.type}")


def _text(batch: Any) -> bytes:
    columns = [batch.column(batch.schema.get_field_index(name)) for name in _SCHEMA.names]
    if any(column.null_count for column in columns):
        raise _Corrupt("it has nulls")
    tokens, writers, rows = columns
    return encode_rows(tokens.to_pylist(), writers.to_pylist(), rows.cast(pyarrow.binary()).to_pylist())
