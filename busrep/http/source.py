"""The reading half of catch-up over HTTP: what a reader without a database uses as its store.

It asks a `catch_up_app` and gives a reader what a store would: pages, known writers, the epoch. It cannot write:
positions are saved elsewhere (``reader_store=``), writers need the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import ssl
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar, cast
from urllib.parse import quote, unquote, urlsplit

import attrs
import orjson

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.commands import INT64_MAX
from busrep.core.snapshots import Agreement
from busrep.errors import (
    ConfigError,
    MissingExtra,
    NoSnapshots,
    PositionTooOld,
    SnapshotBusy,
    SnapshotGone,
    Unavailable,
)
from busrep.settings import Settings
from busrep.stores.interface import KnownWriter, Newest
from busrep.streams import Registry, Stream
from busrep.urls import check_url

from ..snapshots.sources import check_agreement
from .pages import PART_PATH, SNAPSHOTS_PATH, STATE_PATH, UPDATES_PATH, CatchUpState, is_epoch, read_page, read_state
from .snapshots_client import LONGEST_PAUSE, Ask, Misfit, PartDownload, Take, TryAgain, Unknown, load_part

try:
    import anyio
    import httpx
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

P = ParamSpec("P")
T = TypeVar("T")

FORM = "http://:SECRET@host:port/prefix or https://..., the secret percent-encoded"

# Largest answer that is read, unpacked: a page's bound on the server (4 MiB of rows) with room for one large fact.
MAX_BYTES = 64 * 2**20
# Asked so often for one answer, at most; after that the reader waits, says that it is stale, and asks again.
TRIES = 4
# For one connection to be made, seconds; a host that drops packets would take the whole deadline.
CONNECT_TIMEOUT = 5.0
# Of the reader's own deadline for a page, so that what went wrong is told and not only that time was up.
SHARE_OF_DEADLINE = 0.9
# Idle connections are closed before the server does so (75 s), or a proxy on the way (60 s, usually).
KEEP_IDLE = 45.0
# Of a server's own words, in an error.
QUOTED = 200

_SECRET = re.compile(r"[!-~]+")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:([!-~]([\t -~]*[!-~])?)?")
_MOVED = frozenset({301, 302, 303, 307, 308})
_AGAIN = frozenset({408, 429, 502, 503, 504})


class _AnotherLog(Exception):
    """What was asked for is deleted, in a log of this epoch, and that is not the one that is read."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        super().__init__(epoch)


class HttpSource:
    """A `FactSource` over HTTP: ``connect(store=HttpSource("https://facts.example/busrep", [orders]))``.

    A `SnapshotSource` as well.

    ``url``: of a `catch_up_app`, its prefix included; the secret stands in it or in ``secret``. ``streams``: those
    that will be read. ``headers`` are sent along. ``verify``: the certificates that vouch for the server, a file's
    path or an `ssl.SSLContext` (with a client's certificate in it, if need be); default: the system's.
    ``compress``: ask for gzip, for links slower than some 100 Mbit/s. ``max_bytes``: the largest answer read, and the
    largest part of a snapshot. ``some``: the server need not serve all of ``streams``. ``reference``: refused, for the
    reference system a `ReferenceSource` knows which writer each address is of.

    Raises ConfigError for a URL or a secret of another form; MissingExtra.
    """

    def __init__(
        self,
        url: str,
        streams: Registry | Iterable[Stream[Any]],
        settings: Settings | None = None,
        *,
        secret: str | None = None,
        headers: Mapping[str, str] | None = None,
        verify: str | ssl.SSLContext | None = None,
        compress: bool = False,
        reference: bool = False,
        max_bytes: int = MAX_BYTES,
        some: bool = False,
    ) -> None:
        if reference:
            raise ConfigError(
                "one address of the reference system is one writer's, and which one it does not tell: in place of "
                "HttpSource(..., reference=True) pass busrep.asyncio.ReferenceSource({writer: url, ...}, streams)"
            )
        self.url, given = _parts(url)
        if given is not None and secret is not None:
            raise ConfigError("the secret is in the URL and in secret=: once is enough")
        secret = secret if secret is not None else given
        if secret is not None and not _SECRET.fullmatch(secret):
            raise ConfigError("the secret of an HTTP source holds visible ASCII characters only, and at least one")
        self.streams = streams if isinstance(streams, Registry) else Registry(streams)
        self.settings = settings or Settings()
        self._max_bytes, self._some = max_bytes, some
        # Packed answers only if they are wanted: on a fast link packing costs more time than it saves.
        self._headers = {
            "user-agent": "busrep",
            **_checked_headers(headers or {}),
            "accept-encoding": "gzip" if compress else "identity",
        }
        if secret is not None and "authorization" in self._headers:
            raise ConfigError("there is a secret, and an authorization in headers=: one is enough")
        if secret is not None:
            self._headers["authorization"] = f"Bearer {secret}"
        self._verify = verify
        self._transport: httpx.AsyncHTTPTransport | None = None
        self._parts: httpx.AsyncHTTPTransport | None = None  # so that long downloads take no connection from pages
        self.where = f"catch-up at {self.url}"
        self._told: str | None = None  # the last epoch that epoch() gave

    def __repr__(self) -> str:
        return f"HttpSource({self.url!r})"

    # -- what a reader asks -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """See `AsyncStore`: make sure that the server answers and serves the streams. ConfigError, Unavailable."""
        if self._transport is not None:
            return
        context = _context(self._verify)
        self._transport = _transport(context, self.settings.fetches + 1)  # pages, and one question about writers
        self._parts = _transport(context, self.settings.snapshots * self.settings.snapshot_connections)
        try:
            await self._check_server()
        except BaseException:
            await self.close()
            raise

    async def _check_server(self) -> None:
        served = (await self._state()).streams
        missing = {stream.name for stream in self.streams if not stream.resettable} - set(served)
        if missing and not self._some:
            raise ConfigError(
                f"{self.where} does not serve {', '.join(sorted(missing))}: pass them to its catch_up_app()"
            )

    async def close(self) -> None:
        """See `AsyncStore`."""
        transports = self._transport, self._parts
        self._transport = self._parts = None
        for transport in transports:
            if transport is not None:
                await transport.aclose()

    async def epoch(self) -> str:
        """See `AsyncStore`."""
        self._told = (await self._state()).epoch
        return self._told

    async def sequence(self, stream: str) -> int | None:
        """See `AsyncStore`: as the server's store knows it."""
        self._check(stream)
        return (await self._state_told(stream)).sequence

    async def known(self) -> list[KnownWriter]:
        """See `AsyncStore`: the writers of the streams that the server serves."""
        return list((await self._state_told()).writers)

    async def newest(self, stream: str) -> Newest | None:
        """See `AsyncStore`: as the server's store knows it; None of an older server."""
        self._check(stream)
        state = await self._state(newest=stream)
        return None if state.newest is None else Newest(state.epoch, state.newest)

    async def fetch(self, question: FetchUpdates) -> UpdatesPage:
        """See `AsyncStore`: what the page proves is what the server's store has proven (9.9)."""
        self._check(question.stream)
        params: dict[str, str | int] = {
            "instance_name": question.writer,
            "from_token": question.after,
            "upto_token": question.upto,
            "limit": question.limit,
        }
        try:
            body = await self._ask(UPDATES_PATH + segment(question.stream), params, question)
        except _AnotherLog as found:  # a page of that log which proves nothing: the reader knows what to do with those
            return nothing_of(question, found.epoch)
        try:
            return read_page(body, question)
        except ValueError as error:
            raise self._distrust(error) from None

    # -- snapshots --------------------------------------------------------------------------------------------

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        """See `SnapshotSource`: what the server agrees on with its store, for all readers at about this time."""
        self._check(stream)
        path, params = SNAPSHOTS_PATH + segment(stream), {"part_rows": part_rows}
        body = await self._ask(path, params, None, b"" if again is None else again.to_json())
        try:
            agreement = Agreement.from_json(body)
            check_agreement(agreement, stream)
        except (ValueError, OverflowError) as error:
            raise self._distrust(error) from None
        return attrs.evolve(agreement, source=self.url, id=agreement.digest)

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """See `SnapshotSource`: as it comes; a text of another hash than the server has announced ends with Unavailable
        instead of its end."""
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()  # what is loaded anyway: not more than ``max_bytes``
        download = PartDownload(self._max_bytes, pieces.put_nowait)
        work = load_part(self._asking_for(agreement, number), download, self.settings, f"part {number} at {self.url}")
        loading = asyncio.create_task(work, name="busrep-http-part")
        loading.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await loading
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def leave(self, agreement: Agreement) -> None:
        """See `SnapshotSource`: the server holds nothing for one reader."""

    def _asking_for(self, agreement: Agreement, number: int) -> Ask:
        path, along = f"{PART_PATH}{agreement.digest}/{number}", b""

        async def ask(headers: dict[str, str], take: Take) -> None:
            nonlocal along

            async def exchange(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> None:
                async with contextlib.aclosing(await transport.handle_async_request(request)) as response:
                    if response.status_code in (200, 206):
                        await take(response)
                        return
                    body = await self._read(response)
                    code = _said(body).get("code")
                if code == "snapshot_unknown":
                    raise Unknown
                if code == "snapshot_gone":
                    why = str(_said(body).get("error"))[:QUOTED]
                    raise SnapshotGone(agreement.stream, f"{self.where} says {why!r}")
                if response.status_code == 416:
                    raise Misfit("the server's text of it is shorter than what has come")
                self._refused(response, body, None)

            try:
                method = "POST" if along else "GET"
                await self._exchanged(exchange, self._parts, method, path, {}, headers, along)
            except Unknown:  # it was restarted, or has forgotten, or is another one behind the same address
                along = agreement.to_json()  # with the next try: that may come to yet another one
                raise TryAgain("the server does not know the snapshot") from None

        return ask

    def _check(self, stream: str) -> None:
        if self.streams[stream].resettable:
            raise ConfigError(f"stream {stream!r} is resettable: it lives in memory, not in the store")

    async def _state_told(self, sequence: str | None = None) -> CatchUpState:
        """The state of the log that `epoch` told of last: whoever asks for both takes them for one.

        They may come from two servers behind one address, of which one has not seen a restore yet: its floors would be
        taken for the other log's, and rows above them left out.
        """
        state = await self._state(sequence=sequence)
        if self._told not in (None, state.epoch):
            self._told = None  # the next time it is taken as it comes
            raise Unavailable(self.where, "it was restored, or servers behind this address are not of one database")
        return state

    async def _state(self, **wanted: str | None) -> CatchUpState:
        params: dict[str, str | int] = {name: stream for name, stream in wanted.items() if stream is not None}
        body = await self._ask(STATE_PATH, params, None)
        try:
            return read_state(body)
        except ValueError as error:
            raise self._distrust(error) from None

    def _distrust(self, reason: object) -> Unavailable:
        return Unavailable(self.where, f"its answer is refused: {reason}")

    # -- requests ---------------------------------------------------------------------------------------------

    async def _ask(
        self, path: str, params: Mapping[str, Any], question: FetchUpdates | None, content: bytes = b""
    ) -> bytes:
        """The body of the answer, tried again within the deadline where that may help."""
        settings, reason = self.settings, "no answer in time"
        try:
            async with asyncio.timeout(SHARE_OF_DEADLINE * settings.fetch_timeout):
                for attempt in range(TRIES):
                    try:
                        return await self._ask_once(path, params, question, content)
                    except TryAgain as trouble:
                        reason = str(trouble)
                        if attempt < TRIES - 1:
                            pause = min(settings.retry_max, settings.retry_min * 2**attempt)
                            asked_for = min(trouble.pause, LONGEST_PAUSE)
                            await asyncio.sleep(max(asked_for, pause) * (1 + random.random() / 2))
        except TimeoutError:
            pass
        raise Unavailable(self.where, reason)

    async def _ask_once(
        self, path: str, params: Mapping[str, Any], question: FetchUpdates | None, content: bytes
    ) -> bytes:
        method = "POST" if content else "GET"
        response, body = await self._exchanged(self._exchange, self._transport, method, path, params, {}, content)
        if response.status_code != 200:
            self._refused(response, body, question)
        return body

    async def _exchanged(
        self,
        exchange: Callable[[httpx.AsyncHTTPTransport, httpx.Request], Awaitable[T]],
        transport: httpx.AsyncHTTPTransport | None,
        method: str,
        path: str,
        params: Mapping[str, Any],
        headers: Mapping[str, str],
        content: bytes = b"",
    ) -> T:
        """Do one request: the one place where the driver's errors become ours."""
        if transport is None:
            raise Unavailable(self.where, "the source is not open")
        timeout = httpx.Timeout(self.settings.fetch_timeout, connect=CONNECT_TIMEOUT).as_dict()
        try:
            request = httpx.Request(
                method,
                self.url + path,
                params=params,
                headers={**self._headers, **headers},
                content=content or None,
                extensions={"timeout": timeout},
            )
            return await _whole(exchange, transport, request)
        except httpx.TransportError as error:
            if isinstance(cause := _tls_trouble(error), ssl.SSLCertVerificationError):
                raise ConfigError(
                    f"{self.where}: its certificate is not trusted ({cause.verify_message}): pass verify="
                ) from None
            raise TryAgain(f"{type(error).__name__}: {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL, zlib.error) as error:
            raise self._distrust(f"{type(error).__name__}: {error}") from None

    async def _exchange(
        self, transport: httpx.AsyncHTTPTransport, request: httpx.Request
    ) -> tuple[httpx.Response, bytes]:
        async with contextlib.aclosing(await transport.handle_async_request(request)) as response:
            return response, await self._read(response)

    async def _read(self, response: httpx.Response) -> bytes:
        """The body, unpacked; never more than ``max_bytes``, however small it comes."""
        coding = response.headers.get("content-encoding", "identity").lower()
        if coding not in ("identity", "gzip"):
            raise self._distrust(f"content-encoding {coding[:QUOTED]!r} was not asked for")
        unpacker = zlib.decompressobj(31) if coding == "gzip" else None
        pieces, size = [], 0
        async for raw in response.aiter_raw():
            piece = unpacker.decompress(raw, self._max_bytes + 1 - size) if unpacker is not None else raw
            size += len(piece)
            if size > self._max_bytes:
                raise self._distrust(f"longer than {self._max_bytes} bytes: raise max_bytes= of HttpSource")
            if unpacker is not None and unpacker.unused_data:  # of which any amount may come, and be kept
                raise self._distrust("something follows the compressed text")
            pieces.append(piece)
        if unpacker is not None and not unpacker.eof:
            raise self._distrust("the compressed text is cut off")
        return b"".join(pieces)

    def _refused(self, response: httpx.Response, body: bytes, question: FetchUpdates | None) -> NoReturn:
        """Raise what an answer other than 200 means: the one place where that is decided."""
        status = response.status_code
        said = _said(body)
        what = f"{status} {str(said.get('error', ''))[:QUOTED]!r}"
        if said.get("code") == "no_snapshots":
            raise NoSnapshots(self.where)
        if said.get("code") == "snapshot_busy" and type(limit := said.get("limit")) is int:
            raise SnapshotBusy(self.where, limit)
        if status in _AGAIN:
            pause = response.headers.get("retry-after", "")
            raise TryAgain(what, float(pause) if re.fullmatch(r"[0-9]{1,9}", pause) else 0.0)
        if status >= 500:
            raise Unavailable(self.where, what)
        if status == 410 and question is not None:
            floor, asked = said.get("floor"), [said.get(name) for name in ("stream", "writer", "position")]
            if asked != [question.stream, question.writer, question.after]:
                raise self._distrust(f"{what} to another question")
            epoch = said.get("epoch")
            if type(floor) is int and question.after < floor <= INT64_MAX and is_epoch(epoch):
                if self._told not in (None, epoch):
                    raise _AnotherLog(epoch)
                raise PositionTooOld(question.stream, question.writer, question.after, floor)
            raise self._distrust(f"{what} without an epoch and a floor above {question.after}")
        if status in _MOVED:  # not followed: the secret is for this address
            to = re.sub(r"//[^/]*@", "//", response.headers.get("location", "")).partition("?")[0][:QUOTED]
            raise ConfigError(f"{self.where} answers {status}, go to {to!r}: put the right address into the URL")
        raise ConfigError(f"{self.where} answers {what}: {_ADVICE.get(status, 'is that the address of a bus?')}")


_ADVICE = {
    401: "put the server's secret into the URL, or pass secret=",
    403: "something in front of it keeps this client out",
    404: "the prefix of the URL is not where catch_up_app() is mounted, or it gives no snapshots",
    400: "is the server of another version, or without this stream?",
}


def _parts(url: str) -> tuple[str, str | None]:
    """The URL without its secret and without a slash at its end, and the secret. Raises ConfigError without showing
    it."""
    check_url(url, "the URL of an HTTP source", FORM)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"the URL of an HTTP source does not work, this form does: {FORM}") from None
    wrong = parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username
    if wrong or port == 0 or any(character.isspace() for character in url):
        raise ConfigError(
            f"the URL of an HTTP source does not work, this form does: {FORM} (no user, no query: they end up in logs)"
        )
    address = parts.netloc.rpartition("@")[2]
    secret = None if parts.password is None else unquote(parts.password)
    return f"{parts.scheme}://{address}{parts.path.rstrip('/')}", secret


def _transport(context: ssl.SSLContext, connections: int) -> httpx.AsyncHTTPTransport:
    # Without httpx's client around it: that would follow redirects with the secret, keep cookies, take proxies from
    # the environment, and log the address of every page.
    limits = httpx.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=KEEP_IDLE
    )
    return httpx.AsyncHTTPTransport(verify=context, limits=limits, trust_env=False)


def nothing_of(question: FetchUpdates, epoch: str) -> UpdatesPage:
    """An empty page, which proves no more than the reader has."""
    return UpdatesPage(question.stream, question.writer, question.after, question.after, (), (), False, epoch)


def segment(stream: str) -> str:
    """A stream's name as a part of a path."""
    # Names of dots alone would be taken for steps up the path.
    return quote(stream, safe="") if stream.strip(".") else stream.replace(".", "%2E")


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """In small letters, so that none is sent twice. Raises ConfigError, without showing what may be a secret."""
    for name, value in headers.items():
        texts = isinstance(name, str) and isinstance(value, str)
        if not texts or not _HEADER.fullmatch(f"{name}:{value}"):
            raise ConfigError(
                f"headers={{{name!r}: ...}}: a header holds one line of ASCII text (is there a line break at its end?)"
            )
    return {name.lower(): value for name, value in headers.items()}


async def _whole(work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Await ``work(...)``; when cancelled, let it end first.

    What httpx is made of knows anyio's cancellation. asyncio's own comes through at points where it leaves a connection
    behind, which counts among the few that there may be for ever: after some of those no question is asked any more.
    """
    scope = anyio.CancelScope()

    async def scoped() -> T | None:
        with scope:
            return await work(*args, **kwargs)
        return None

    task = asyncio.create_task(scoped(), name="busrep-http-question")
    try:
        return cast(T, await asyncio.shield(task))  # nobody else cancels the scope
    except asyncio.CancelledError:
        scope.cancel()
        await asyncio.wait([task])
        raise


def _context(verify: str | ssl.SSLContext | None) -> ssl.SSLContext:
    if isinstance(verify, ssl.SSLContext):
        return verify
    try:
        return ssl.create_default_context(cafile=verify)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"verify={verify!r}: no certificates can be read there: {error}") from None


def _tls_trouble(error: BaseException | None) -> BaseException | None:
    """The TLS library's own error behind a driver's."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def _said(body: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
