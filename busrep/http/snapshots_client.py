"""Loading the parts of a snapshot over HTTP: gone on with where a download was cut, and refused when it does not fit.

The server names a part's SHA-256 before the first byte. A download that was cut goes on behind what has come (Range),
as long as the server has the text of that hash. What has another at its end ends with an error: whoever loads it throws
it away, and asks again after a pause.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable

from busrep.core.backoff import pause_after
from busrep.core.snapshots import Agreement
from busrep.errors import ConfigError, MissingExtra, SnapshotGone, Unavailable

from .client import TRIES, Explain, HttpClient, Misfit, Refusal, TryAgain, unpacked
from .pages import PART_PATH

try:
    import httpx
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

# Bytes that must have come for a download that was cut to count as getting on: else a peer could drip for ever.
PROGRESS = 65_536

_HASH = re.compile(r"[0-9a-f]{64}")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


class PartDownload:
    """One part of a snapshot on its way; ``give`` gets the pieces."""

    def __init__(self, client: HttpClient, agreement: Agreement, number: int, give: Callable[[bytes], None]) -> None:
        self._client, self._agreement, self._number, self._give = client, agreement, number, give
        self._along = b""  # the agreement, for a server that does not know it
        self._size, self._hash, self._expected = 0, hashlib.sha256(), ""
        self._noted = 0

    async def run(self, explain: Explain) -> None:
        """Download all of it, in several requests if need be. Raises Unavailable, ConfigError, SnapshotGone, and what
        ``explain`` raises of a refusal."""

        def explained(refusal: Refusal) -> None:
            self._explain(refusal)
            explain(refusal)

        async def use(response: httpx.Response) -> None:
            if response.status_code not in (200, 206):
                await self._client.refuse(response, explained)
            await self._take(response)

        settings, failures = self._client.settings, 0
        what, path = f"part {self._number} at {self._client.url}", f"{PART_PATH}{self._agreement.digest}/{self._number}"
        while True:
            reason, pause = "no answer in time", 0.0
            try:
                # One request: the server has a deadline of its own (20 s), so a slow link needs several of them.
                async with asyncio.timeout(settings.fetch_timeout):
                    await self._client.exchange(use, path, headers=self._headers(), content=self._along)
                return
            except Misfit as misfit:
                raise Unavailable(what, f"refused: {misfit}") from None
            except TryAgain as trouble:
                reason, pause = str(trouble), trouble.pause
            except TimeoutError:
                pass
            if self._whole():  # only what marks the end of the answer was cut off
                return
            failures = 0 if self._progressed() else failures + 1
            if failures >= TRIES:
                raise Unavailable(what, reason)
            await asyncio.sleep(pause + pause_after(failures + 1, settings))

    def _explain(self, refusal: Refusal) -> None:
        if refusal.status == 416:
            raise Misfit("the server's text of it is shorter than what has come")
        match refusal.said.get("code"):
            case "snapshot_unknown":
                self._along = self._agreement.to_json()  # with the next try: that may come to yet another server
                raise TryAgain("the server does not know the snapshot")
            case "snapshot_gone":
                raise SnapshotGone(self._agreement.stream, f"{self._client.where} says {refusal.words}")

    def _headers(self) -> dict[str, str]:
        """Of the next request."""
        if not self._size:
            return {}
        # Ranges are of the text as it is: of a packed one nobody knows where it was cut.
        return {"range": f"bytes={self._size}-", "if-range": f'"{self._expected}"', "accept-encoding": "identity"}

    async def _take(self, response: httpx.Response) -> None:
        """Read an answer. Raises Misfit, TryAgain, httpx's errors; what has come until then is kept."""
        self._begin(response)
        async for piece in unpacked(response):
            self._size += len(piece)
            if self._size > (
                most := self._client.max_bytes
            ):  # it will be as long the next time: to be mended, not tried again
                raise ConfigError(
                    f"a part of the snapshot is longer than {most} bytes: raise max_bytes= of HttpSource, or "
                    "lower Settings.snapshot_part_rows before a snapshot is agreed on"
                )
            self._hash.update(piece)
            if piece:
                self._give(piece)
        if not self._whole():
            raise Misfit("it does not have the SHA-256 that was announced: it was changed on its way, or on disk")

    def _begin(self, response: httpx.Response) -> None:
        expected = response.headers.get("busrep-sha256", "")
        if not _HASH.fullmatch(expected):
            raise Misfit("the answer names no SHA-256: does a proxy drop headers?")
        if self._expected not in ("", expected):
            raise Misfit("the server has another text for it by now")
        self._expected = expected
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        begin = int(found[1]) if found is not None and response.status_code == 206 else 0
        if begin != self._size or (begin and "content-encoding" in response.headers):
            raise Misfit("it goes on elsewhere than where it was cut: does a proxy drop ranges?")

    def _progressed(self) -> bool:
        """Whether it has got on since the last time this was true."""
        if self._size < self._noted + PROGRESS:
            return False
        self._noted = self._size
        return True

    def _whole(self) -> bool:
        """Whether all of it has come."""
        return self._hash.hexdigest() == self._expected
