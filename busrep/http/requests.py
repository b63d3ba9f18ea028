"""What a request to the catch-up application says, its turn among others, and the answer of one that is refused."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from busrep.core.fields import json_bytes, read_integer
from busrep.errors import MissingExtra

try:
    from starlette.datastructures import Headers
    from starlette.requests import Request
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

# Of one query; four are known.
MOST_PARAMETERS = 16
# The fastest: rows of a kind shrink to a tenth with it, and the others take three times as long for a little.
GZIP_LEVEL = 1


class Refused(Exception):
    """A request that gets an answer other than 200."""

    def __init__(self, status: int, code: str, text: str, **fields: Any) -> None:
        self.status, self.code = status, code
        self.body = json_bytes({"error": text, "code": code, **fields})
        super().__init__(text)


class Places(asyncio.Semaphore):
    """So many requests at a time; others wait in a queue of bounded length."""

    def __init__(self, most: int, queue: int) -> None:
        super().__init__(most)
        self._queue, self.waiting = queue, 0

    @contextlib.asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Have a place. Raises Refused when the queue is full."""
        if waits := self.locked():
            if self.waiting >= self._queue:
                raise Refused(503, "busy", "too many requests at a time: come back later")
            self.waiting += 1
        try:
            await self.acquire()
        finally:
            self.waiting -= waits
        try:
            yield
        finally:
            self.release()


def params_of(request: Request) -> dict[str, str]:
    """The query. Raises Refused for one that is not UTF-8, or says something twice."""
    try:  # strictly: a name in another encoding is another name, and of that one there would be nothing
        query = request.scope["query_string"].decode("ascii")
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=MOST_PARAMETERS)
    except ValueError:
        raise Refused(400, "bad_parameter", "the query is not percent-encoded UTF-8, or too long") from None
    params = dict(pairs)
    if len(params) != len(pairs):
        raise Refused(400, "bad_parameter", "a parameter is given twice")
    return params


def position_of(params: Mapping[str, str], name: str) -> int:
    """An integer of the query, not negative. Raises Refused."""
    try:
        number = read_integer(params.get(name, "").encode())
    except ValueError as error:
        raise Refused(400, "bad_parameter", f"{name} {error}") from None
    if number < 0:
        raise Refused(400, "bad_parameter", f"{name} is negative")
    return number


def accepts_gzip(headers: Headers) -> bool:
    """Whether the client can unpack it."""
    for part in headers.get("accept-encoding", "").split(","):
        coding, _, weight = part.partition(";")
        if coding.strip().lower() == "gzip":
            return not re.fullmatch(r"\s*q=0(\.0*)?\s*", weight)
    return False
