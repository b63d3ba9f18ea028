"""``busrep serve``: let processes take part that must not reach Redis, or the database."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs
import click

import busrep
from busrep.cli import options as common
from busrep.cli.options import DURATION, Address, address
from busrep.cli.output import print_json
from busrep.cli.servers import declared_streams, run, with_all_streams
from busrep.errors import ConfigError
from busrep.links.tcp_server import TcpServer, server_tls
from busrep.settings import Settings
from busrep.streams import Stream

# Seconds until it must be known where each stream begins.
HELLO = 30.0


@attrs.frozen(kw_only=True)
class ServePlan:
    """What is served, and to whom: the options of the command."""

    tcp: Address | None = None
    http: Address | None = None
    name: str | None = None
    redis_url: str | None = attrs.field(default=None, repr=False)
    store_url: str | None = attrs.field(default=None, repr=False)
    declared: tuple[str, ...] = ()
    secret: str | None = attrs.field(default=None, repr=False)
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    reference_paths: bool = False
    settings: Settings = attrs.field(factory=Settings)

    def tls(self) -> ssl.SSLContext | None:
        """The context of both servers, if they encrypt. Raises ConfigError."""
        if self.tls_cert is not None:
            return server_tls(self.tls_cert, self.tls_key, client_ca=self.client_ca)
        if self.tls_key or self.client_ca:
            raise ConfigError("--tls-key and --client-ca need --tls-cert")
        return None


@click.command()
@click.option("--tcp", callback=address, metavar="[HOST:]PORT", help="Serve lines over TCP here.")
@click.option("--http", callback=address, metavar="[HOST:]PORT", help="Serve catch-up over HTTP here; needs --store.")
@common.name_option(required=False, needed="; needed for --tcp")
@common.redis_option(default=None, help="Relay this Redis's channel [default: stand alone].")
@common.store_option(required=False)
@common.streams_option()
@click.option("--secret-file", type=click.Path(), help="File whose first line clients must know.")
@click.option("--tls-cert", type=click.Path(), help="Certificate file; encrypts both.")
@click.option("--tls-key", type=click.Path(), help="Its key, if in a file of its own.")
@click.option("--client-ca", type=click.Path(), help="Clients must show a certificate of this authority.")
@click.option("--reference-paths", is_flag=True, help="Answer the reference system's own HTTP path too.")
@click.option("--heartbeat", default="2s", show_default=True, type=DURATION, help="The bus's, as of its processes.")
@click.option("--for", "seconds", type=DURATION, help="Stop after this time [default: SIGINT or SIGTERM].")
@common.json_option()
def serve(as_json: bool, seconds: float | None, heartbeat: float, secret_file: str | None, **options: Any) -> None:
    """Serve a bus over TCP, and its table over HTTP.

    Over TCP clients hear and say everything that is said on the bus, as on a Redis channel: that of --redis, or
    without it their own. Over HTTP readers fetch what they missed, and snapshots. Beyond loopback TCP takes TLS, and a
    secret or client certificates; HTTP takes a secret always, and something in front of it may do the TLS. Prints what
    it listens on, and at the end what passed.
    """
    if not heartbeat:
        raise click.UsageError("--heartbeat is not above 0")
    secret = None if secret_file is None else _secret(secret_file)
    plan = ServePlan(**options, secret=secret, settings=Settings(heartbeat=heartbeat))
    if plan.tcp is None and plan.http is None:
        raise click.UsageError("say what to serve: --tcp, --http or both")
    if plan.tcp is not None and not plan.name:
        raise click.UsageError("--tcp needs --name")
    if plan.http is not None and not plan.store_url:
        raise click.UsageError("--http needs --store")
    run(_serve(plan, seconds, as_json))


def _secret(path: str) -> str:
    try:
        secret = Path(path).read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--secret-file {path}: {error}") from None
    if not secret:
        raise ConfigError(f"--secret-file {path}: its first line is empty")
    return secret


async def _serve(plan: ServePlan, seconds: float | None, as_json: bool) -> None:
    """Listen until told to stop."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    tls = plan.tls()
    async with AsyncExitStack() as stack:
        parts: dict[str, Callable[[], dict[str, Any]]] = {}
        where: dict[str, str] = {}
        server: TcpServer | None = None
        if plan.tcp is not None:
            server = TcpServer(
                plan.name or "", host=plan.tcp.host, port=plan.tcp.port, redis=plan.redis_url,
                streams=declared_streams(plan.declared), secret=plan.secret, tls=tls, settings=plan.settings,
            )  # fmt: skip
            await stack.enter_async_context(server)
            parts["tcp"] = server.statistics
            shown = f"[{server.host}]" if ":" in server.host else server.host
            where["tcp"] = f"{'tcps' if tls else 'tcp'}://{shown}:{server.port}"
        if plan.http is not None:
            serving, parts["http"] = await _http(plan, plan.http, tls, server, stack)
            where["http"] = serving.url
        if as_json:
            print_json({"listening": where})
        else:
            for kind, url in where.items():
                click.echo(f"listening on {url} ({kind})")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await stopped.wait()
        found = {kind: statistics() for kind, statistics in parts.items()}
    if as_json:
        print_json(found)
    else:
        for kind, numbers in found.items():
            told = ", ".join(f"{name} {value}" for name, value in numbers.items() if value is not None)
            click.echo(f"{kind}: {told}")


async def _http(
    plan: ServePlan, address: Address, tls: ssl.SSLContext | None, server: TcpServer | None, stack: AsyncExitStack
) -> tuple[Any, Callable[[], dict[str, Any]]]:
    from busrep.http import serve as http_serve  # extra
    from busrep.http import server as http_server

    if plan.secret is None:
        raise ConfigError("--http needs --secret-file: readers show the secret with each request")
    declared = declared_streams(plan.declared)
    store = await stack.enter_async_context(with_all_streams(plan.store_url or "", declared))
    streams = {stream.name: stream for stream in declared}
    for name in (await store.status())["streams"]:
        streams.setdefault(name, Stream(name))
    link = server or plan.redis_url
    if plan.name and link is not None:
        # Readers over HTTP cannot write: who follows the streams here finishes writers that died.
        bus = busrep.connect(link, name=plan.name, streams=streams.values(), store=store, settings=plan.settings)
        await stack.enter_async_context(bus)
        for stream in streams.values():
            if not stream.resettable:
                await bus.wait_for(stream, "nobody", 0, HELLO)
    app = http_server.catch_up_app(store, streams.values(), secret=plan.secret, reference_paths=plan.reference_paths)
    stack.push_async_callback(app.state.catch_up.close)
    serving = await stack.enter_async_context(http_serve.serve(app, address.host, address.port, tls=tls))
    return serving, app.state.catch_up.statistics
