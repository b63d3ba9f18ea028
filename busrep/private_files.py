"""Files and folders that hold rows: made for the user who runs the process, and for a group that is let in on purpose.

A new file gets the mode 0600 and a new folder 0700. In a folder with the set-group-ID bit (``chmod g+s``), which is how
Unix says that a folder is shared with its group, they get the folder's rights of the group besides, less those that the
umask takes away. What is there already keeps its mode, and so does a file that is replaced.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

FILE, FOLDER = 0o600, 0o700


def create_file(path: str | os.PathLike[str]) -> None:
    """Create an empty file where there is none, for a driver that would create one for everybody. Raises OSError.

    One that exists is not opened: closing it would drop the process's locks on it, SQLite's too (POSIX, fcntl).
    """
    with contextlib.suppress(FileExistsError):
        os.close(open_file(os.path.realpath(path), os.O_RDONLY | os.O_EXCL))


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file by ``os.open``, and create it where there is none. Returns the descriptor. Raises OSError."""
    return os.open(path, flags | os.O_CREAT, FILE | (_rights_of_group(path) & 0o060))


def open_successor(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """Open a file for writing that will replace ``target``: it gets the mode of the target if there is one. Returns the
    descriptor. Raises OSError."""
    handle = open_file(path, os.O_WRONLY | os.O_TRUNC)
    try:
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(os.stat(target).st_mode)
            if mode != stat.S_IMODE(os.fstat(handle).st_mode):
                os.fchmod(handle, mode)
    except BaseException:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside ``path`` that takes its place once it is whole and on the disk. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(open_successor(beside, path), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make one folder; the one above it is there. Raises OSError, FileExistsError too."""
    os.mkdir(path, FOLDER | _rights_of_group(path))


def make_folders(path: str | os.PathLike[str]) -> None:
    """Make a folder and those above it, those that are not there. Raises OSError."""
    if not os.path.isdir(path):
        make_folders(os.path.dirname(os.path.abspath(path)))
        with contextlib.suppress(FileExistsError):
            make_folder(path)


def _rights_of_group(path: str | os.PathLike[str]) -> int:
    try:
        mode = os.stat(os.path.dirname(os.path.abspath(path))).st_mode
    except OSError:  # what comes next says so
        return 0
    return mode & 0o070 if mode & stat.S_ISGID else 0
