"""Parts of snapshots on disk: written once, read by many, private, bounded, gone with the process.

A folder of this process in the temporary directory, with a file a part. The folder is locked as long as the process
lives: a folder that can be locked was left behind by one that was killed, and is removed by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from ..runtime.tasks import in_thread

log = logging.getLogger("busrep.http")

PREFIX = "busrep-spool-"
# Read and sent at a time: what one client costs in memory.
PIECE = 65_536
# Written at a time: there are few who write.
WRITTEN = 2**18


class SpoolTrouble(Exception):
    """A part cannot be kept on disk; the text is for clients, and names no path."""


class PartTooLong(Exception):
    """A part that is larger than any may be."""


class SpoolChanged(Exception):
    """A part on disk is not what was written there; it is removed, and loaded again for who asks again."""


@attrs.define(eq=False)
class SpooledPart:
    """One part's file. ``digest``: SHA-256 of its text, in hexadecimal. ``removed``: from the folder; who has it open
    still reads it."""

    folder: _Folder
    name: str
    size: int = 0
    digest: str = ""
    readers: int = 0
    removed: bool = False

    @property
    def path(self) -> Path:
        """Where it is, for people."""
        return self.folder.path / self.name

    def open(self, flags: int) -> int:
        """Its file, open. Raises OSError."""
        name, folder = self.folder.at(self.name)
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o600, dir_fd=folder)

    def unlink(self) -> None:
        """Remove the file, if it is there."""
        with contextlib.suppress(OSError):
            name, folder = self.folder.at(self.name)
            os.unlink(name, dir_fd=folder)


@attrs.define(eq=False)
class PartReading:
    """A part that is open for one client; `close` it."""

    part: SpooledPart
    _spool: Spool
    _fd: int

    async def pieces(self, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """The text from ``offset``. Raises SpoolChanged when it is not what was written, which is known at its end at
        the latest; of a text that is not read from its beginning only the length is known."""
        hashed, at = hashlib.sha256(), offset
        while at < self.part.size:
            try:
                piece = await in_thread(os.pread, self._fd, min(PIECE, self.part.size - at), at)
            except OSError as error:
                self._spool.remove(self.part)
                raise SpoolChanged(f"a part of a snapshot cannot be read from disk: {error.strerror}") from None
            hashed.update(piece)
            at += len(piece)
            if not piece or (at == self.part.size and offset == 0 and hashed.hexdigest() != self.part.digest):
                self._spool.remove(self.part)
                raise SpoolChanged("a part of a snapshot was changed on disk")
            yield piece

    def close(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._spool.closed(self.part)


class Spool:
    """The folder. ``most_bytes``: of all files together; the least recently used go first. ``base``: where to put it,
    None: the system's temporary directory. ``part_bytes``: of one file."""

    def __init__(self, most_bytes: int, base: str | None = None, *, part_bytes: int = 2**28) -> None:
        self.most_bytes, self._base, self._part_bytes = most_bytes, Path(base or tempfile.gettempdir()), part_bytes
        self.bytes = 0
        self._parts: dict[SpooledPart, None] = {}  # the least recently used first
        self._folder: _Folder | None = None
        self._making, self._numbers = asyncio.Lock(), 0

    @property
    def parts(self) -> int:
        """Files that are kept."""
        return len(self._parts)

    async def write(self, pieces: AsyncIterable[bytes]) -> SpooledPart:
        """Keep a part. Raises SpoolTrouble, PartTooLong, and whatever ``pieces`` raises; nothing is left of it then."""
        hashed, waiting = hashlib.sha256(), bytearray()
        part, file = await self._create()
        try:
            async for piece in pieces:
                waiting += piece
                while len(waiting) >= WRITTEN:
                    head = bytes(waiting[:WRITTEN])
                    del waiting[:WRITTEN]
                    await self._append(part, file, hashed, head)
            await self._append(part, file, hashed, bytes(waiting))
        except BaseException:
            part.removed = True
            self.bytes -= part.size
            part.unlink()
            raise
        finally:
            os.close(file)
        part.digest = hashed.hexdigest()
        self._parts[part] = None
        return part

    async def _append(self, part: SpooledPart, file: int, hashed: Any, piece: bytes) -> None:
        if part.size + len(piece) > self._part_bytes:  # before others have to make room
            raise PartTooLong(
                f"a part of the snapshot is longer than {self._part_bytes} bytes: lower Settings.snapshot_part_rows "
                "before a snapshot is agreed on, or raise SnapshotLimits.part_bytes"
            )
        self._make_room(len(piece))
        part.size += len(piece)
        self.bytes += len(piece)
        hashed.update(piece)
        with _translated():
            await in_thread(_write_all, file, piece)

    def _make_room(self, needed: int) -> None:
        for old in list(self._parts):
            if self.bytes + needed <= self.most_bytes:
                return
            if not old.readers:  # else nothing would come free
                self.remove(old)
        if self.bytes + needed > self.most_bytes:
            raise SpoolTrouble(
                f"the parts of snapshots that are needed at a time take more than {self.most_bytes} bytes of disk, "
                "which is the limit: raise SnapshotLimits.spool_bytes"
            )

    async def _create(self) -> tuple[SpooledPart, int]:
        with _translated():
            async with self._making:
                if self._folder is None or not self._folder.there():  # some clean up the temporary directory
                    self._folder = await in_thread(_Folder, self._base)
                self._numbers += 1
            part = SpooledPart(self._folder, f"{self._numbers}.part")
            return part, part.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def open(self, part: SpooledPart) -> PartReading | None:
        """The part for one more client; None when it is gone, or cannot be read: load it again."""
        if part.removed:
            return None
        try:
            file = part.open(os.O_RDONLY)
        except OSError as error:
            log.warning("a part of a snapshot is gone from the disk: %s", error.strerror)
            self.remove(part)
            return None
        self._parts.pop(part)
        self._parts[part] = None
        part.readers += 1
        return PartReading(part, self, file)

    def closed(self, part: SpooledPart) -> None:
        """One reader fewer."""
        part.readers -= 1
        if part.removed and not part.readers:
            self.bytes -= part.size

    def remove(self, part: SpooledPart) -> None:
        """Remove the file; may be called twice."""
        if part.removed:
            return
        part.removed = True
        del self._parts[part]
        if not part.readers:
            self.bytes -= part.size
        part.unlink()

    def close(self) -> None:
        """Remove everything; may be called twice."""
        for part in list(self._parts):
            self.remove(part)
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()


# -- the folder -----------------------------------------------------------------------------------------------

# Whoever starts at the same time may take a new folder for abandoned, before it is locked; hardly so often in a row.
FOLDER_TRIES = 10


class _Folder:
    """A locked folder of this process, removed at exit at the latest. Files in it are named by way of its lock: nobody
    can put another folder, or a link, in its place. Raises OSError."""

    def __init__(self, base: Path) -> None:
        self._closed = False
        _remove_abandoned(base)
        for _ in range(FOLDER_TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # 0700
            try:
                self._lock = _lock(self.path)
            except BaseException:
                shutil.rmtree(self.path, ignore_errors=True)
                raise
            # Between its creation and its lock it looked abandoned to others that start: one may have removed it.
            if sys.platform == "win32" or (self._lock is not None and self.there()):
                break
            _unlock(self._lock)
        else:
            raise OSError(errno.EAGAIN, f"no folder stays in {base}")
        self._remove = weakref.finalize(self, _remove_own, self.path, self._lock, os.getpid())

    def close(self) -> None:
        """Remove it. May be called twice."""
        self._remove()
        self._lock, self._closed = None, True

    def there(self) -> bool:
        """Whether it is in its place, and no other."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
            return self._lock is None or os.path.samestat(found, os.fstat(self._lock))
        except OSError:
            return False

    def at(self, name: str) -> tuple[str, int | None]:
        """What a file in it is called, and from which open folder on. Raises OSError when it is closed."""
        if self._closed:
            raise FileNotFoundError(errno.ENOENT, "the folder is removed")
        return (os.path.join(self.path, name), None) if self._lock is None else (name, self._lock)


def _remove_own(path: Path, lock: int | None, owner: int) -> None:
    if os.getpid() == owner:  # a fork goes through its parent's list at its end
        shutil.rmtree(path, ignore_errors=True)
        _unlock(lock)


def _remove_abandoned(base: Path) -> None:
    """Remove what killed processes left behind."""
    if sys.platform == "win32":
        return
    for path in base.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            lock = _lock(path)
            if lock is not None:
                log.info("removing %s, which a process that was killed has left behind", path)
                shutil.rmtree(path, ignore_errors=True)
                _unlock(lock)


def _lock(folder: Path) -> int | None:
    """The open, locked folder; None when it is another's: a living process's, or another user's. Raises OSError where
    there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


# -- small things ---------------------------------------------------------------------------------------------


def _write_all(file: int, piece: bytes) -> None:
    with memoryview(piece) as view:
        done = 0
        while done < len(view):
            done += os.write(file, view[done:])


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.error("parts of snapshots cannot be written to disk: %s", error)
        raise SpoolTrouble(f"parts of snapshots cannot be written to the server's disk: {error.strerror}") from None
