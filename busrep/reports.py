"""What a reader has handled, noted in a file, which `busrep pipeline audit --handled FILE` compares with the table.

One line of JSON a batch, appended when the batch was handled::

    {"version":1,"reader":"search","epoch":"...","stream":"orders","writer":"w1","after":0,"upto":9,
     "facts":2,"rows":3,"tokens":[4,0,5],"hashes":"..."}

``tokens``: of each row, in the order in which they were handled, how much its token is above that of the row before, of
the first above ``after``. ``hashes``: of each row the first 8 bytes of the SHA-256 of the line ``token index writer
row``, which is the text that an archive's manifests hash; all of them in base64.

A process that is killed may leave half a line: it counts for nothing, and the next one begins behind it.
"""

from __future__ import annotations

import os
import threading
from base64 import b64encode
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import pairwise
from types import TracebackType
from typing import Any

import orjson

from busrep.private_files import open_file
from busrep.runtime.batch import BatchRows

# Another one means that whoever reads it has to be updated.
VERSION = 1
# Bytes of a row's hash: of 10**10 changed rows none passes for what it was.
HASH = 8


def hash_of(line: bytes) -> bytes:
    """The hash of a row; ``line``: ``token index writer row`` and a newline."""
    return sha256(line).digest()[:HASH]


def indexes_of(tokens: Iterable[int]) -> Iterator[int]:
    """The places of rows in their facts, whose rows come together."""
    last, index = -1, 0
    for token in tokens:
        index = index + 1 if token == last else 0
        last = token
        yield index


def line_of(batch: BatchRows[Any]) -> bytes:
    """The line of a batch. Pure."""
    tokens, writer = list(batch.tokens), batch.writer.encode()
    rows = zip(tokens, indexes_of(tokens), batch.payloads, strict=True)
    hashes = [hash_of(b"%d %d %b %b\n" % (token, index, writer, payload)) for token, index, payload in rows]
    steps = [later - earlier for earlier, later in pairwise([batch.after, *tokens])]
    found = {
        "version": VERSION, "reader": batch.reader, "epoch": batch.epoch, "stream": batch.stream.name,
        "writer": batch.writer, "after": batch.after, "upto": batch.position, "facts": len(set(tokens)),
        "rows": len(tokens), "tokens": steps, "hashes": b64encode(b"".join(hashes)).decode(),
    }  # fmt: skip
    return orjson.dumps(found) + b"\n"


class ReaderReport:
    """A file in which a reader notes what it has handled: ``report.add(batch)`` in its handler.

    Only appended to, so a process that is started again goes on with the file of the one before. May be used by
    several handlers, from tasks and from threads. It is written to before `add` returns, and survives the end of the
    process; not that of the machine, for which it would have to wait for the disk.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open_file(path, os.O_RDWR | os.O_APPEND)
        self._lock = threading.Lock()
        end = os.lseek(self._file, 0, os.SEEK_END)
        os.lseek(self._file, max(0, end - 1), os.SEEK_SET)
        self._torn = os.read(self._file, 1) not in (b"", b"\n")

    def add(self, batch: BatchRows[Any]) -> None:
        """Note that these rows were handled. Raises OSError when the disk is full: the handler fails then, and the
        batch comes again."""
        line = line_of(batch)
        with self._lock:
            rest = memoryview(b"\n" + line if self._torn else line)
            self._torn = True
            while rest:
                rest = rest[os.write(self._file, rest) :]
            self._torn = False

    def close(self) -> None:
        """Close the file; a second time is nothing."""
        with self._lock:
            file, self._file = self._file, -1
            if file >= 0:
                os.close(file)

    def __enter__(self) -> ReaderReport:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
