"""The files of an archive, on a local disk or in an object store: listed, read, and written in one step."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from busrep.errors import ConfigError, MissingExtra, Unavailable
from busrep.private_files import create_file, make_folder, open_successor
from busrep.spark import archived
from busrep.spark.archive_objects import plain, put_new
from busrep.spark.archived import Archive, Manifest
from busrep.urls import check_url, has_secret, is_url

try:
    import pyarrow
    from pyarrow import fs as arrow_fs
except ImportError:
    raise MissingExtra("spark", "an archive in Parquet files") from None

FORMS = "a path, file:///directory, s3://bucket/prefix, gs://bucket/prefix"

# Manifests are read by so many at a time: an object store answers each in some 50 ms.
READERS = 16
# A list of manifests may be stale by the time they are read, when a compaction's deletions came between.
ATTEMPTS = 3


class Root:
    """The archive's folder; can be pickled, and opens nothing before it is used. ``url``: a path, or one of the forms
    that pyarrow.fs knows. Raises ConfigError and Unavailable; methods that read, FileNotFoundError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") or url
        self.shown = shown(self.url)
        self._opened: tuple[Any, str] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Root, (self.url,)

    def __repr__(self) -> str:
        return f"Root({self.shown!r})"

    @property
    def local(self) -> bool:
        """Whether it is in this machine's file system."""
        return bool(self._fs()[0].type_name == "local")

    def _fs(self) -> tuple[Any, str]:
        if self._opened is None:
            if "://" not in self.url and not self.url.startswith("file:"):
                self._opened = arrow_fs.LocalFileSystem(), os.path.abspath(self.url)
            else:
                with self._translated():
                    self._opened = arrow_fs.FileSystem.from_uri(self.url)
        return self._opened

    def path(self, name: str) -> str:
        """Of a file, in the file system."""
        return f"{self._fs()[1]}/{name}"

    def below(self, name: str) -> Root:
        """A folder in it."""
        url, mark, parameters = self.url.partition("?" if "://" in self.url else "\0")
        return Root(f"{url.rstrip('/')}/{name}{mark}{parameters}")

    def spark_path(self, name: str) -> str:
        """Of a file, as Spark takes it. Nothing secret: it stands in plans, logs and Spark's pages; what gets Spark
        into an object store is among Hadoop's settings."""
        if self.local:
            return f"file://{self.path(name)}"
        url = f"{plain(self.url)}/{name}"
        return f"s3a{url[2:]}" if url.startswith("s3:") else url

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """The one place where the driver's errors become ours; that a file is not there is for the caller."""
        try:
            yield
        except FileNotFoundError:
            raise
        except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
            raise ConfigError(f"{self.shown} cannot be used: {error.strerror or error}") from None
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(f"{self.shown} cannot be used: {error}") from None
        except (OSError, pyarrow.ArrowException) as error:
            raise Unavailable(self.shown, error) from None

    # -- reading ----------------------------------------------------------------------------------------------

    def names(self, folder: str, *, deep: bool = False, folders: bool = False) -> list[str]:
        """The files in a folder (or the folders), below it, in order; none when it is not there."""
        filesystem, _ = self._fs()
        base = self.path(folder).rstrip("/")
        wanted = arrow_fs.FileType.Directory if folders else arrow_fs.FileType.File
        with self._translated():
            selector = arrow_fs.FileSelector(base, allow_not_found=True, recursive=deep)
            found = filesystem.get_file_info(selector)
        return sorted(one.path[len(base) + 1 :] for one in found if one.type == wanted)

    def read(self, name: str) -> bytes:
        """All of a small file."""
        with self._translated(), self._fs()[0].open_input_file(self.path(name)) as file:
            return bytes(file.read())

    def open(self, name: str) -> Any:
        """A file to read from, by pyarrow."""
        with self._translated():
            return self._fs()[0].open_input_file(self.path(name))

    def size(self, name: str) -> int | None:
        """In bytes; None when it is not there."""
        with self._translated():
            info = self._fs()[0].get_file_info(self.path(name))
        return None if info.type == arrow_fs.FileType.NotFound else int(info.size)

    def age(self, name: str) -> float:
        """Seconds since it was written; 0 when it is not there, or its store does not tell."""
        with self._translated():
            written = self._fs()[0].get_file_info(self.path(name)).mtime
        return time.time() - written.timestamp() if written is not None else 0.0

    # -- writing ----------------------------------------------------------------------------------------------

    def create(self, name: str) -> Any:
        """A file to write to, by pyarrow; its folder is made. Call `settle` when it is closed."""
        filesystem, _ = self._fs()
        with self._translated():
            if self.local:
                _make(os.path.dirname(self.path(name)))
                create_file(self.path(name))
            return filesystem.open_output_stream(self.path(name), compression=None)

    def settle(self, name: str) -> None:
        """What was written there survives a crash of the machine; an object store sees to that by itself."""
        if self.local:
            with self._translated():
                for path in (self.path(name), os.path.dirname(self.path(name))):
                    _sync(path)

    def put(self, name: str, content: bytes) -> bool:
        """Make a file that is there as a whole or not at all; False when another one has that name, which stays.

        Where put-if-absent is not to be had, for pyarrow.fs has none, and `archive_objects.put_new` not everywhere, an
        object store is asked first: two writers at the same moment may both succeed, of which the second one stands.
        """
        done = self._put(name, content)
        # A client, or a network's file system, may have done it twice, when the first answer was lost.
        return done or self.read(name) == content

    def _put(self, name: str, content: bytes) -> bool:
        if not self.local:
            done = put_new(self.url, name, content, self.shown)
            if done is not None:
                return done
            if self.size(name) is not None:
                return False
            self.replace(name, content)
            return True

        def place(beside: str, target: str) -> bool:
            try:
                os.link(beside, target)
            except FileExistsError:
                return False
            return True

        return self._written(name, content, place)

    def replace(self, name: str, content: bytes) -> None:
        """Write a file that is there as a whole, in the place of one that may be there."""
        if not self.local:
            with self._translated(), self._fs()[0].open_output_stream(self.path(name), compression=None) as file:
                file.write(content)
            return

        def place(beside: str, target: str) -> bool:
            os.replace(beside, target)
            return True

        self._written(name, content, place)

    def _written(self, name: str, content: bytes, place: Callable[[str, str], bool]) -> bool:
        target = self.path(name)
        folder, _, last = target.rpartition("/")
        beside = f"{folder}/.{last}.{secrets.token_hex(4)}.tmp"
        with self._translated():
            _make(folder)
            try:
                with os.fdopen(open_successor(beside, target), "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                done = place(beside, target)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(beside)
            _sync(folder)
        return done

    def remove(self, names: Sequence[str]) -> int:
        """Remove files, those that are there; how many there were."""
        count = 0
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._translated():
                self._fs()[0].delete_file(self.path(name))
                count += 1
        return count


def _make(folder: str) -> None:
    """A folder, and those above it, that survive a crash of the machine."""
    if not os.path.isdir(folder):
        above = os.path.dirname(folder)
        _make(above)
        with contextlib.suppress(FileExistsError):
            make_folder(folder)
        _sync(above)


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def shown(url: str) -> str:
    """The URL without a key, a secret, or parameters."""
    if url.startswith(("/", ".")) or not (is_url(url) or has_secret(url)) or re.match("file:/(?!/)", url):
        return url
    check_url(url, "the archive's URL", FORMS)
    return plain(url)


# -- archives -------------------------------------------------------------------------------------------------


def streams_of(root: Root) -> list[str]:
    """The streams that have an archive there."""
    return archived.streams_in(root.names(archived.FOLDER, folders=True))


def load(root: Root, stream: str) -> Archive:
    """The archive of a stream, as its manifests are now; an empty one where there is none. Not checked: see
    `Archive.checked`. Raises ConfigError, Unavailable."""
    folder = archived.folder_of(stream)
    for _ in range(ATTEMPTS):
        names = root.names(folder)
        try:
            wanted = archived.wanted(names)
            with ThreadPoolExecutor(READERS) as pool:
                texts = dict(zip(wanted, pool.map(lambda name: root.read(f"{folder}/{name}"), wanted), strict=True))
        except FileNotFoundError:
            continue  # a compaction has deleted what it replaced
        return archived.assemble(stream, texts, names)
    raise Unavailable(root.shown, "manifests vanish while they are read: is something deleting them?")


def existing(root: Root, stream: str) -> tuple[Archive, str]:
    """The archive of a stream, whole, and its epoch. Raises ConfigError when it is damaged, or there is none,
    Unavailable."""
    archive = load(root, stream).checked()
    if archive.epoch is None:
        raise ConfigError(f"there is no archive of stream {stream!r} at {root.shown}")
    return archive, archive.epoch


def put_manifest(root: Root, manifest: Manifest) -> bool:
    """Make a batch or a compaction exist; False when there is one of that number."""
    return root.put(f"{archived.folder_of(manifest.stream)}/{manifest.name}", archived.write_manifest(manifest))


def data_path(stream: str, file: str) -> str:
    """A data file below the root."""
    return f"{archived.data_folder(stream)}/{file}"
