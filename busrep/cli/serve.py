"""``busrep serve``: let processes take part that must not reach Redis, or the database."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs
import click

import busrep
from busrep.cli.db import declared_streams, open_with_all_streams, streams_option
from busrep.cli.options import DURATION, DURATION_ABOVE_ZERO, json_option, print_json, redis_option, run, store_option
from busrep.errors import ConfigError
from busrep.links.tcp_server import TcpServer, server_tls
from busrep.settings import Settings
from busrep.streams import Stream

# Seconds until it must be known where each stream begins.
HELLO = 30.0


@attrs.frozen
class Address:
    """Where to listen; port 0 means any free one."""

    host: str
    port: int


class AddressType(click.ParamType[Address]):
    """``HOST:PORT``, ``[IPv6]:PORT`` or ``PORT`` (on loopback)."""

    name = "address"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        """The address, or a usage error."""
        host, _, port = str(value).rpartition(":")
        if not port.isdecimal() or int(port) > 65_535 or (":" in host and not host.startswith("[")):
            self.fail(f"{value!r} is no address like 127.0.0.1:8823, [::1]:8823 or 8823", param, ctx)
        return Address(host.strip("[]") or "127.0.0.1", int(port))


ADDRESS = AddressType()


@attrs.frozen(kw_only=True)
class ServePlan:
    """What is served, and to whom."""

    name: str | None
    tcp: Address | None
    http: Address | None
    redis: str | None = attrs.field(repr=False)
    store: str | None = attrs.field(repr=False)
    declared: tuple[str, ...]
    secret: str | None = attrs.field(repr=False)
    cert: str | None
    key: str | None
    client_ca: str | None
    reference: bool
    spool: str | None = None
    heartbeat: float

    @property
    def settings(self) -> Settings:
        """What the servers, and the bus beside them, go by."""
        return Settings(heartbeat=self.heartbeat)


@click.command()
@click.option("--tcp", type=ADDRESS, metavar="[HOST:]PORT", help="Serve lines over TCP here.")
@click.option("--http", type=ADDRESS, metavar="[HOST:]PORT", help="Serve catch-up over HTTP here; needs --store.")
@click.option("--name", envvar="BUSREP_NAME", show_envvar=True, help="The bus's name; needed for --tcp.")
@redis_option(default=None, help="Relay this Redis's channel [default: stand alone].")
@store_option(required=False)
@streams_option()
@click.option("--secret-file", type=click.Path(), help="File whose first line clients must know.")
@click.option("--tls-cert", type=click.Path(), help="Certificate file; encrypts both.")
@click.option("--tls-key", type=click.Path(), help="Its key, if in a file of its own.")
@click.option("--client-ca", type=click.Path(), help="Clients must show a certificate of this authority.")
@click.option("--reference-paths", is_flag=True, help="Answer the reference system's own HTTP path too.")
@click.option(
    "--spool",
    type=click.Path(exists=True, file_okay=False, writable=True),
    metavar="DIRECTORY",
    help="Where parts of snapshots are kept for readers, up to 1 GiB [default: the system's temporary directory].",
)
@click.option(
    "--heartbeat",
    default="2s",
    show_default=True,
    type=DURATION_ABOVE_ZERO,
    help="The bus's, as its processes have it.",
)
@click.option("--for", "seconds", type=DURATION, help="Stop after this time [default: SIGINT or SIGTERM].")
@json_option()
def serve(as_json: bool, seconds: float | None, secret_file: str | None, **options: Any) -> None:
    """Serve a bus over TCP, and its table over HTTP.

    Over TCP clients hear and say everything that is said on the bus, as on a Redis channel: that of --redis, or
    without it their own. Over HTTP readers fetch what they missed, and snapshots. Beyond loopback TCP takes TLS, and a
    secret or client certificates; HTTP takes a secret always, and something in front of it may do the TLS. Prints what
    it listens on, and at the end what passed.
    """
    plan = ServePlan(
        name=options["name"],
        tcp=options["tcp"],
        http=options["http"],
        redis=options["redis_url"],
        store=options["store_url"],
        declared=options["declared"],
        secret=None if secret_file is None else _secret(secret_file),
        cert=options["tls_cert"],
        key=options["tls_key"],
        client_ca=options["client_ca"],
        reference=options["reference_paths"],
        spool=options["spool"],
        heartbeat=options["heartbeat"],
    )
    if plan.tcp is None and plan.http is None:
        raise click.UsageError("say what to serve: --tcp, --http or both")
    if plan.tcp is not None and not plan.name:
        raise click.UsageError("--tcp needs --name")
    if plan.http is not None and not plan.store:
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
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as stack:
        tls = None if plan.cert is None else server_tls(plan.cert, plan.key, client_ca=plan.client_ca)
        if tls is None and (plan.key or plan.client_ca):
            raise ConfigError("--tls-key and --client-ca need --tls-cert")
        parts: dict[str, Any] = {}
        where: dict[str, str] = {}
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(stopped.wait())]
        stack.callback(ends[0].cancel)
        server: TcpServer | None = None
        if plan.tcp is not None:
            server = await stack.enter_async_context(_tcp(plan, plan.tcp, tls))
            parts["tcp"] = server.statistics
            shown = f"[{server.host}]" if ":" in server.host else server.host
            where["tcp"] = f"{'tcps' if tls else 'tcp'}://{shown}:{server.port}"
        if plan.http is not None:
            serving, parts["http"] = await _http(plan, plan.http, tls, server, stack)
            where["http"] = serving.url
            ends.append(asyncio.create_task(serving.wait()))
            stack.callback(ends[1].cancel)
        if as_json:
            print_json({"listening": where})
        else:
            for kind, url in where.items():
                click.echo(f"listening on {url} ({kind})")
        ended, _ = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # a server that fails ends the process: what does not serve must not look as if it did
        found = {kind: statistics() for kind, statistics in parts.items()}
    if as_json:
        print_json(found)
    else:
        for kind, numbers in found.items():
            click.echo(
                f"{kind}: " + ", ".join(f"{name} {value}" for name, value in numbers.items() if value is not None)
            )


def _tcp(plan: ServePlan, address: Address, tls: Any) -> TcpServer:
    return TcpServer(
        plan.name or "",
        host=address.host,
        port=address.port,
        redis=plan.redis,
        streams=declared_streams(plan.declared),
        secret=plan.secret,
        tls=tls,
        settings=plan.settings,
    )


async def _http(
    plan: ServePlan, address: Address, tls: Any, server: TcpServer | None, stack: AsyncExitStack
) -> tuple[Any, Any]:
    from busrep.http import serve as http_serve  # extra
    from busrep.http import server as http_server
    from busrep.http import snapshots_limits as http_snapshots_limits

    if plan.secret is None:
        raise ConfigError("--http needs --secret-file: readers show the secret with each request")
    declared = declared_streams(plan.declared)
    store = await open_with_all_streams(plan.store or "", declared)
    stack.push_async_callback(store.close)
    streams = {stream.name: stream for stream in declared}
    for name in (await store.status())["streams"]:
        streams.setdefault(name, Stream(name))
    if plan.name and (server is not None or plan.redis is not None):
        # Readers over HTTP cannot write: who follows the streams here finishes writers that died.
        settings, all_streams = plan.settings, streams.values()
        bus = busrep.connect(
            server or plan.redis or "", name=plan.name, streams=all_streams, store=store, settings=settings
        )
        await stack.enter_async_context(bus)
        for stream in streams.values():
            if not stream.resettable:
                await bus.wait_for(stream, "nobody", 0, HELLO)
    limits = http_server.CatchUpLimits(snapshots=http_snapshots_limits.SnapshotLimits(spool_folder=plan.spool))
    app = http_server.catch_up_app(
        store, streams.values(), secret=plan.secret, limits=limits, reference_paths=plan.reference
    )
    stack.push_async_callback(app.state.catch_up.close)
    serving = await stack.enter_async_context(http_serve.serve(app, address.host, address.port, tls=tls))
    return serving, lambda: {**app.state.catch_up.statistics(), "server": serving.statistics()}
