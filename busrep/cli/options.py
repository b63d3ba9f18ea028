"""The options that commands share, each declared once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "": 1.0}


class Duration(click.ParamType[float]):
    """``500ms``, ``10s``, ``2m``, ``1h``, ``7d``; a bare number is seconds. Converts to seconds, a float."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds, or a usage error."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is not a duration like 500ms, 10s, 2m, 1h or 7d", param, ctx)
        return float(found[1]) * UNITS[found[2]]


DURATION = Duration()


@attrs.frozen
class Address:
    """Where to listen; port 0 means any free one."""

    host: str
    port: int


def address(_context: click.Context, _option: click.Parameter, value: str | None) -> Address | None:
    """Take ``HOST:PORT``, ``[IPv6]:PORT`` or ``PORT`` (on loopback) apart, or raise a usage error."""
    if value is None:
        return None
    host, _, port = value.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535 or (":" in host and not host.startswith("[")):
        raise click.BadParameter(f"{value!r} is no address like 127.0.0.1:8823, [::1]:8823 or 8823")
    return Address(host.strip("[]") or "127.0.0.1", int(port))


def redis_option(
    *,
    default: str | None = "redis://127.0.0.1:6379",
    help: str = "Redis: redis://, rediss:// (TLS) or unix://.",  # noqa: A002 - as click calls it
) -> Decorator:
    """``--redis URL`` and ``--redis-password-file FILE``; the command gets one URL, with the password in it."""
    told = "Redis [default: BUSREP_REDIS_PASSWORD]"
    options = {"envvar": "BUSREP_REDIS", "default": default, "show_default": default is not None, "help": help}
    return _url_with_password("--redis", "--redis-password-file", told, "with_redis_password", options)


def store_option(*, required: bool) -> Decorator:
    """``--store URL`` and ``--password-file FILE``; the command gets one URL, with the password in it."""
    told = "the store [default: BUSREP_STORE_PASSWORD, or libpq's ~/.pgpass]"
    shown = "The table: sqlite:///file.db or postgresql://user@host/database."
    options = {"envvar": "BUSREP_STORE", "required": required, "help": shown}
    return _url_with_password("--store", "--password-file", told, "with_store_password", options)


def _url_with_password(flag: str, file_flag: str, told: str, join: str, options: dict[str, Any]) -> Decorator:
    def remember(context: click.Context, _option: click.Parameter, value: str | None) -> None:
        context.meta[file_flag] = value

    def joined(context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
        # The module is no part of Spark, but of the jobs on it, which are loaded on demand.
        from busrep.spark import secrets

        file = context.meta.get(file_flag)
        if value is None and file is not None:
            raise click.UsageError(f"{file_flag} needs {flag}")
        return None if value is None else getattr(secrets, join)(value, file, file_flag)

    url = click.option(flag, f"{flag[2:]}_url", metavar="URL", show_envvar=True, callback=joined, **options)
    # Eager: its value is there when the URL is read, in whatever order they are given.
    file = click.option(
        file_flag,
        type=click.Path(),
        is_eager=True,
        expose_value=False,
        callback=remember,
        help=f"A file whose first line is the password of {told}.",
    )
    return lambda command: url(file(command))


def name_option(*, required: bool = True, needed: str = "") -> Decorator:
    """``--name NAME``, the channel; ``needed`` is said of it besides."""
    told = f"The bus's name, which is its Redis channel{needed}."
    return click.option("--name", envvar="BUSREP_NAME", required=required, show_envvar=True, help=told)


def streams_option() -> Decorator:
    """``--streams MODULE:NAME`` or ``--streams MODULE``, which may be repeated."""
    return click.option(
        "--streams",
        "declared",
        multiple=True,
        metavar="MODULE[:NAME]",
        help="Where the application declares its streams, with row classes and tables. A module alone means all its "
        "streams. May be repeated.",
    )


def json_option() -> Decorator:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
