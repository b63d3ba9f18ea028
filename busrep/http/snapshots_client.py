"""Loading the parts of a snapshot over HTTP: gone on with where a download was cut, and refused when it does not fit.

The server names a part's SHA-256 before the first byte. A download that was cut goes on behind what has come (Range),
as long as the server has the text of that hash. What has another at its end ends with an error: whoever loads it throws
it away, and asks again after a pause.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import zlib
from collections.abc import Awaitable, Callable

from busrep.errors import ConfigError, MissingExtra, Unavailable
from busrep.settings import Settings

try:
    import httpx
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

# Failures in a row after which a part is given up for this time.
TRIES = 4
# Bytes that must have come for a download that was cut to count as getting on: else a peer could drip for ever.
PROGRESS = 65_536
# A server is not waited for longer than this at a time, whatever its Retry-After says, seconds.
LONGEST_PAUSE = 5.0

_HASH = re.compile(r"[0-9a-f]{64}")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


class TryAgain(Exception):
    """No answer this time. ``pause``: what Retry-After asks for, seconds."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        self.pause = pause
        super().__init__(reason)


class Unknown(Exception):
    """The server does not know the agreement (any more)."""


class Misfit(Exception):
    """What came cannot be the part: why."""


Take = Callable[["httpx.Response"], Awaitable[None]]
Ask = Callable[[dict[str, str], Take], Awaitable[None]]
"""Ask for the part with these headers, and hand a good answer (200, 206) on while it comes. Raises TryAgain, Misfit,
and what ends it all."""


class PartDownload:
    """One part on its way. ``most_bytes``: of its text; ``give`` gets the pieces."""

    def __init__(self, most_bytes: int, give: Callable[[bytes], None]) -> None:
        self._most, self._give = most_bytes, give
        self.size, self._hash, self._expected = 0, hashlib.sha256(), ""
        self._skip = 0  # bytes that have come before
        self._noted = 0

    def headers(self) -> dict[str, str]:
        """Of the next request."""
        if not self.size:
            return {}
        # Ranges are of the text as it is: of a packed one nobody knows where it was cut.
        return {"range": f"bytes={self.size}-", "if-range": f'"{self._expected}"', "accept-encoding": "identity"}

    async def take(self, response: httpx.Response) -> None:
        """Read an answer. Raises Misfit, TryAgain, httpx's errors; what has come until then is kept."""
        self._begin(response)
        coding = response.headers.get("content-encoding", "identity").lower()
        if coding not in ("identity", "gzip"):
            raise Misfit(f"content-encoding {coding[:100]!r} was not asked for")
        unpacker = zlib.decompressobj(31) if coding == "gzip" else None
        async for raw in response.aiter_raw():
            if unpacker is None:
                self._add(raw)
                continue
            try:
                self._add(unpacker.decompress(raw, self._skip + self._most + 1 - self.size))
            except zlib.error as error:
                raise Misfit(f"the compressed text is damaged: {error}") from None
            if unpacker.unused_data:
                raise Misfit("something follows the compressed text")
        if unpacker is not None and not unpacker.eof:
            raise TryAgain("the compressed text is cut off")
        if self._skip:
            raise Misfit("it is shorter than what has come before")

    def _begin(self, response: httpx.Response) -> None:
        expected = response.headers.get("busrep-sha256", "")
        if not _HASH.fullmatch(expected):
            raise Misfit("the answer names no SHA-256: does a proxy drop headers?")
        if self._expected not in ("", expected):
            raise Misfit("the server has another text for it by now")
        self._expected, self._skip = expected, 0
        if response.status_code == 200:
            self._skip = self.size  # no ranges here
            length = response.headers.get("content-length", "")
            if "content-encoding" not in response.headers and length.isdecimal() and int(length[:19]) > self._most:
                raise self._too_long()
            return
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if found is None or int(found[1]) != self.size or not self.size or "content-encoding" in response.headers:
            raise Misfit("it goes on elsewhere than where it was cut")

    def _add(self, piece: bytes) -> None:
        if self._skip:
            skipped = min(self._skip, len(piece))
            piece, self._skip = piece[skipped:], self._skip - skipped
        self.size += len(piece)
        if self.size > self._most:
            raise self._too_long()
        self._hash.update(piece)
        if piece:
            self._give(piece)

    def _too_long(self) -> ConfigError:
        # It will be as long the next time: to be mended, not tried again.
        return ConfigError(
            f"a part of the snapshot is longer than {self._most} bytes: raise max_bytes= of HttpSource, or lower "
            "Settings.snapshot_part_rows before a snapshot is agreed on"
        )

    def progressed(self) -> bool:
        """Whether it has got on since the last time this was true."""
        if self.size < self._noted + PROGRESS:
            return False
        self._noted = self.size
        return True

    def whole(self) -> bool:
        """Whether all of it has come."""
        return self._hash.hexdigest() == self._expected

    def check(self) -> None:
        """Raise Misfit unless all of it has come."""
        if not self.whole():
            raise Misfit("it does not have the SHA-256 that was announced: it was changed on its way, or on disk")


async def load_part(ask: Ask, download: PartDownload, settings: Settings, what: str) -> None:
    """Download all of it. Raises Unavailable, ConfigError, and what ``ask`` raises. ``what``: for people."""
    failures = 0
    while True:
        reason, pause = "no answer in time", 0.0
        try:
            # One request: the server has a deadline of its own (20 s), so a slow link needs several of them.
            async with asyncio.timeout(settings.fetch_timeout):
                await ask(download.headers(), download.take)
            download.check()
            return
        except Misfit as misfit:
            raise Unavailable(what, f"refused: {misfit}") from None
        except TryAgain as trouble:
            reason, pause = str(trouble), min(trouble.pause, LONGEST_PAUSE)
        except TimeoutError:
            pass
        if download.whole():  # only what marks the end of a packed text was cut off
            return
        failures = 0 if download.progressed() else failures + 1
        if failures >= TRIES:
            raise Unavailable(what, reason)
        slowest = min(settings.retry_max, settings.retry_min * 2 ** max(failures - 1, 0))
        await asyncio.sleep(max(pause, slowest) * (1 + random.random() / 2))
