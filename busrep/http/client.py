"""Requests to one address over HTTP, and what their failures mean: the one place that knows httpx.

An answer is read whole and never beyond a bound. What may help is tried again within a deadline; everything else
becomes an error of ours, which says what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast
from urllib.parse import unquote

import attrs
import orjson

from busrep.core.backoff import pause_after
from busrep.errors import ConfigError, MissingExtra, Unavailable
from busrep.settings import Settings
from busrep.urls import check_url

try:
    import anyio
    import httpx
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

T = TypeVar("T")

FORM = "http://:SECRET@host:port/prefix or https://..., the secret percent-encoded"

# Largest answer that is read, unpacked: a page's bound on the server (4 MiB of rows) with room for one large fact.
MAX_BYTES = 64 * 2**20
# Asked so often for one answer; after that the reader waits, says that it is stale, and asks again.
TRIES = 4
# A server is not waited for longer than this at a time, whatever its Retry-After says, seconds.
LONGEST_PAUSE = 5.0
# For one connection to be made, seconds; a host that drops packets would take the whole deadline.
CONNECT_TIMEOUT = 5.0
# Of the reader's own deadline for a page, so that what went wrong is told and not only that time was up.
SHARE_OF_DEADLINE = 0.9
# Idle connections are closed before the server does so (75 s), or a proxy on the way (60 s, usually).
KEEP_IDLE = 45.0
# Of a server's own words, in an error.
QUOTED = 200
# Unpacked at a time: what a packed answer can make of one piece in memory.
PIECE = 2**18

_SECRET = re.compile(r"[!-~]+")
_ADDRESS = re.compile(r"(?:\[[0-9A-Za-z:.%]+\]|[^\[\]:,]+)(?::([0-9]+))?")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:([!-~]([\t -~]*[!-~])?)?")
_MOVED = frozenset({301, 302, 303, 307, 308})
_AGAIN = frozenset({408, 429, 502, 503, 504})
_ADVICE = {
    401: "put the server's secret into the URL, or pass secret=",
    403: "something in front of it keeps this client out",
    404: "the prefix of the URL is not where catch_up_app() is mounted, or it gives no snapshots",
    400: "is the server of another version, or without this stream?",
}


class TryAgain(Exception):
    """No answer this time. ``pause``: what Retry-After asks for, seconds."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        self.pause = pause
        super().__init__(reason)


class Misfit(Exception):
    """What came cannot be the answer: why."""


@attrs.frozen
class Refusal:
    """An answer other than 200. ``said``: the JSON object in it; ``words``: the server's, to be quoted."""

    status: int
    said: Mapping[str, Any]

    @property
    def words(self) -> str:
        """What the server says of it, quoted."""
        return repr(str(self.said.get("error", ""))[:QUOTED])

    def __str__(self) -> str:
        return f"{self.status} {self.words}"


Explain = Callable[[Refusal], object]
"""Raises what a refusal means to the one who asked, if that is more than its status says."""


@attrs.frozen(kw_only=True)
class HttpOptions:
    """How a source asks its servers.

    ``secret``: theirs, where the URL does not hold it. ``headers`` are sent along. ``verify``: the certificates that
    vouch for the server, a file's path or an `ssl.SSLContext` (with a client's certificate in it, if need be);
    default: the system's. ``compress``: ask for gzip, for links slower than some 100 Mbit/s. ``max_bytes``: the
    largest answer read, and the largest part of a snapshot.
    """

    secret: str | None = attrs.field(default=None, repr=False)
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)  # they may hold a secret
    verify: str | ssl.SSLContext | None = None
    compress: bool = False
    max_bytes: int = MAX_BYTES


class HttpClient:
    """Requests to ``url``, on ``connections`` at most.

    Raises ConfigError for a URL, a secret or a header of another form.
    """

    def __init__(self, url: str, settings: Settings, options: HttpOptions, connections: int) -> None:
        self.url, given = _split_url(url)
        if given is not None and options.secret is not None:
            raise ConfigError("the secret is in the URL and in secret=: once is enough")
        secret = options.secret if options.secret is not None else given
        if secret is not None and not _SECRET.fullmatch(secret):
            raise ConfigError("the secret of an HTTP source holds visible ASCII characters only, and at least one")
        self.settings, self.max_bytes = settings, options.max_bytes
        # Packed answers only if they are wanted: on a fast link packing costs more time than it saves.
        self.headers = {
            "user-agent": "busrep",
            **_checked_headers(options.headers),
            "accept-encoding": "gzip" if options.compress else "identity",
        }
        if secret is not None and "authorization" in self.headers:
            raise ConfigError("there is a secret, and an authorization in headers=: one is enough")
        if secret is not None:
            self.headers["authorization"] = f"Bearer {secret}"
        self._verify, self._connections = options.verify, connections
        self.transport: httpx.AsyncHTTPTransport | None = None
        self.where = f"catch-up at {self.url}"

    def open(self, context: ssl.SSLContext | None = None) -> ssl.SSLContext:
        """Make connections from now on. Returns the context, for further clients with the same options: to read the
        system's certificates takes 15 ms. Raises ConfigError for certificates that cannot be read."""
        context = context or _context(self._verify)
        # Without httpx's client around it: that would follow redirects with the secret, keep cookies, take proxies from
        # the environment, and log the address of every page.
        limits = httpx.Limits(
            max_connections=self._connections, max_keepalive_connections=self._connections, keepalive_expiry=KEEP_IDLE
        )
        self.transport = httpx.AsyncHTTPTransport(verify=context, limits=limits, trust_env=False)
        return context

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        transport, self.transport = self.transport, None
        if transport is not None:
            await transport.aclose()

    def distrust(self, reason: object) -> Unavailable:
        """The error for an answer that cannot be an honest one."""
        return Unavailable(self.where, f"its answer is refused: {reason}")

    async def ask(
        self,
        path: str,
        params: Mapping[str, Any],
        read: Callable[[bytes], T],
        explain: Explain = lambda _: None,
        content: bytes = b"",
    ) -> T:
        """What ``read`` makes of the body of the answer; a ValueError of it means that the answer is none. Tried again
        within the deadline where that may help. Raises Unavailable, ConfigError, and what ``explain`` raises."""

        async def use(response: httpx.Response) -> T:
            if response.status_code != 200:
                await self.refuse(response, explain)
            body = await self._read(response)
            try:
                return read(body)
            except (ValueError, OverflowError) as error:
                raise Misfit(str(error)) from None

        within = SHARE_OF_DEADLINE * self.settings.fetch_timeout
        return await self.exchange(use, path, params=params, content=content, within=within)

    async def exchange(
        self,
        use: Callable[[httpx.Response], Awaitable[T]],
        path: str,
        *,
        params: Mapping[str, Any] = {},
        content: bytes = b"",
        within: float | None = None,
    ) -> T:
        """Do a request, and ``use`` its answer; `TRIES` times where that may help, ``within`` so many seconds. Raises
        Unavailable, ConfigError, and what ``use`` raises."""
        reason = "no answer in time"
        try:
            async with asyncio.timeout(within):
                for failures in range(1, TRIES + 1):
                    try:
                        return await self._once(use, path, params, content)
                    except TryAgain as trouble:
                        reason = str(trouble)
                        if failures < TRIES:
                            await asyncio.sleep(trouble.pause + pause_after(failures + 1, self.settings))
        except TimeoutError:
            pass
        except Misfit as misfit:
            raise self.distrust(misfit) from None
        raise Unavailable(self.where, reason)

    async def _once(
        self, use: Callable[[httpx.Response], Awaitable[T]], path: str, params: Mapping[str, Any], content: bytes
    ) -> T:
        """The one place where the driver's errors become ours."""
        transport = self.transport
        if transport is None:
            raise Unavailable(self.where, "the source is not open")
        timeout = httpx.Timeout(self.settings.fetch_timeout, connect=CONNECT_TIMEOUT).as_dict()

        async def exchanged() -> T:
            request = httpx.Request(
                "POST" if content else "GET",
                self.url + path,
                params=params,
                headers=self.headers,
                content=content or None,
                extensions={"timeout": timeout},
            )
            async with contextlib.aclosing(await transport.handle_async_request(request)) as response:
                return await use(response)

        try:
            return await _whole(exchanged)
        except httpx.TransportError as error:
            if isinstance(cause := _tls_trouble(error), ssl.SSLCertVerificationError):
                raise ConfigError(
                    f"{self.where}: its certificate is not trusted ({cause.verify_message}): pass verify="
                ) from None
            raise TryAgain(f"{type(error).__name__}: {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.distrust(f"{type(error).__name__}: {error}") from None

    async def _read(self, response: httpx.Response) -> bytes:
        """The body, unpacked; never more than ``max_bytes``, however small it comes."""
        pieces, size = [], 0
        async for piece in unpacked(response):
            pieces.append(piece)
            size += len(piece)
            if size > self.max_bytes:
                raise Misfit(f"longer than {self.max_bytes} bytes: raise max_bytes= of HttpSource")
        return b"".join(pieces)

    async def refuse(self, response: httpx.Response, explain: Explain) -> NoReturn:
        """Raise what an answer other than 200 means: what ``explain`` says of it, or else its status."""
        refusal = Refusal(response.status_code, _said(await self._read(response)))
        explain(refusal)
        status = refusal.status
        if status in _AGAIN:
            pause = response.headers.get("retry-after", "")
            seconds = min(float(pause), LONGEST_PAUSE) if re.fullmatch(r"[0-9]{1,9}", pause) else 0.0
            raise TryAgain(str(refusal), seconds)
        if status >= 500:
            raise Unavailable(self.where, str(refusal))
        if status in _MOVED:  # not followed: the secret is for this address
            to = re.sub(r"//[^/]*@", "//", response.headers.get("location", "")).partition("?")[0][:QUOTED]
            raise ConfigError(f"{self.where} answers {status}, go to {to!r}: put the right address into the URL")
        raise ConfigError(f"{self.where} answers {refusal}: {_ADVICE.get(status, 'is that the address of a bus?')}")


async def unpacked(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The body of an answer, as it comes, in pieces of bounded size. Raises Misfit, TryAgain, httpx's errors."""
    coding = response.headers.get("content-encoding", "identity").lower()
    if coding == "identity":
        async for raw in response.aiter_raw():
            yield raw
        return
    if coding != "gzip":
        raise Misfit(f"content-encoding {coding[:100]!r} was not asked for")
    unpacker = zlib.decompressobj(31)
    try:
        async for raw in response.aiter_raw():
            packed = raw
            while packed:
                yield unpacker.decompress(packed, PIECE)
                packed = unpacker.unconsumed_tail
            if unpacker.unused_data:  # of which any amount may come, and be kept
                raise Misfit("something follows the compressed text")
    except zlib.error as error:
        raise Misfit(f"the compressed text is damaged: {error}") from None
    if not unpacker.eof:
        raise TryAgain("the compressed text is cut off")


def _split_url(url: str) -> tuple[str, str | None]:
    """The URL without its secret and without a slash at its end, and the secret. Raises ConfigError without showing
    it."""
    parts = check_url(url, "the URL of an HTTP source", FORM)
    address = _ADDRESS.fullmatch(parts.hosts)
    right = parts.scheme in ("http", "https") and address is not None and 0 < int(address[1] or 80) <= 65_535
    if not right or parts.user or parts.query is not None:
        raise ConfigError(
            f"the URL of an HTTP source does not work, this form does: {FORM} (no user, no query: they end up in logs)"
        )
    secret = None if parts.password is None else unquote(parts.password)
    return f"{parts.scheme}://{parts.hosts}/{parts.path or ''}".rstrip("/"), secret


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """In small letters, so that none is sent twice. Raises ConfigError, without showing what may be a secret."""
    for name, value in headers.items():
        texts = isinstance(name, str) and isinstance(value, str)
        if not texts or not _HEADER.fullmatch(f"{name}:{value}"):
            raise ConfigError(
                f"headers={{{name!r}: ...}}: a header holds one line of ASCII text (is there a line break at its end?)"
            )
    return {name.lower(): value for name, value in headers.items()}


async def _whole(work: Callable[[], Awaitable[T]]) -> T:
    """Await ``work()``; when cancelled, let it end first.

    What httpx is made of knows anyio's cancellation. asyncio's own comes through at points where it leaves a connection
    behind, which counts among the few that there may be for ever: after some of those no question is asked any more.
    """
    scope = anyio.CancelScope()

    async def scoped() -> T | None:
        with scope:
            return await work()
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
