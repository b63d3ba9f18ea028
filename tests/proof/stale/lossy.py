"""A link to Redis that loses messages, one by one, on connections that are otherwise well.

Redis itself does so when a subscriber's output buffer overflows, or when a message is published while a failover is
under way; here it is done by dice, and counted.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable
from typing import Any

from busrep.testing.links import FaultyLink
from busrep.testing.pipes import Ending, Pipe

CRLF = b"\r\n"
# How a pushed message begins, in RESP2 and in RESP3.
MESSAGES = (b"*3\r\n$7\r\nmessage\r\n", b">3\r\n$7\r\nmessage\r\n")


def reply_end(data: bytes | bytearray, start: int = 0) -> int | None:
    """Where the RESP reply that begins at ``start`` ends; None: it is not whole yet."""
    line = data.find(CRLF, start)
    if line < 0:
        return None
    kind, at = data[start : start + 1], line + len(CRLF)
    if kind in (b"$", b"=", b"!"):
        length = int(data[start + 1 : line])
        at += length + len(CRLF) if length >= 0 else 0
        return at if at <= len(data) else None
    if kind in (b"*", b">", b"~", b"%"):
        left = int(data[start + 1 : line]) * (2 if kind == b"%" else 1)
        while left > 0:
            end = reply_end(data, at)
            if end is None:
                return None
            at, left = end, left - 1
    return at


class LossyPipe(Pipe):
    """What comes from the server, reply by reply, without the messages that are lost."""

    def __init__(self, loses: Callable[[], bool], *of: Any) -> None:
        super().__init__(*of)
        self._loses, self._rest = loses, bytearray()

    def take(self, what: bytes | Ending) -> None:
        """See `Pipe`."""
        if not isinstance(what, bytes):
            super().take(what)
            return
        self._rest += what
        start, passing = 0, bytearray()
        while start < len(self._rest) and (end := reply_end(self._rest, start)) is not None:
            reply = self._rest[start:end]
            if not (reply.startswith(MESSAGES) and self._loses()):
                passing += reply
            start = end
        del self._rest[:start]
        if passing:
            super().take(bytes(passing))


class LossyLink(FaultyLink):
    """``lost`` is the part of the messages, from 0 to 1, that does not arrive; ``counts["messages_lost"]`` counts."""

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None, seed: int | None = None) -> None:
        super().__init__(url, tls=tls, seed=seed)
        self.lost = 0.0
        self._dice = random.Random(None if seed is None else f"{seed} messages")

    def loses(self) -> bool:
        """Whether the message that is passing now is lost."""
        lost = self._dice.random() < self.lost
        self.counts["messages_lost"] += lost
        return lost

    def pipe(self, *of: Any) -> Pipe:
        """One that loses messages, if they come from the server."""
        pipe = super().pipe(*of)
        return pipe if pipe.direction == "to_server" else LossyPipe(self.loses, *of)
