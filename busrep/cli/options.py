"""What the commands share: options, durations, a look at Redis, and how errors and tables are printed."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import click
import orjson
import redis
import redis.asyncio
from rich.console import Console
from rich.table import Table

from busrep.errors import BusrepError, ConfigError, Unavailable
from busrep.links.redis import FORMS, tls_defaults
from busrep.urls import check_url, shown_url

T = TypeVar("T")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# Seconds that one command waits for a server to accept a connection and answer: a person is waiting.
CONNECT_TIMEOUT = 5.0

# Columns of a table that does not go to a terminal.
PIPE_WIDTH = 200
# Cells of so many characters and fewer are never folded ("113.3 s ago"), and longer ones not below so many.
WHOLE, FOLDED = 11, 6

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "": 1.0}


class Duration(click.ParamType[float]):
    """``500ms``, ``10s``, ``2m``, ``1h``, ``7d``; a bare number is seconds. Converts to seconds, a float."""

    name = "duration"

    def __init__(self, *, above_zero: bool = False) -> None:
        self._above_zero = above_zero

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds, or a usage error."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is not a duration like 500ms, 10s, 2m, 1h or 7d", param, ctx)
        seconds = float(found[1]) * UNITS[found[2]]
        if self._above_zero and not seconds:
            self.fail(f"{value!r} is not above 0", param, ctx)
        return seconds


DURATION = Duration()
DURATION_ABOVE_ZERO = Duration(above_zero=True)


def redis_option(
    *,
    default: str | None = "redis://127.0.0.1:6379",
    help: str = "Redis: redis://, rediss:// (TLS) or unix://.",  # noqa: A002 - as click calls it
) -> Decorator:
    """``--redis URL`` and ``--redis-password-file FILE``; the command gets one URL, with the password in it."""
    url = click.option(
        "--redis",
        "redis_url",
        envvar="BUSREP_REDIS",
        default=default,
        show_default=default is not None,
        show_envvar=True,
        metavar="URL",
        help=help,
        callback=_with_password("--redis", "--redis-password-file", _redis_url),
    )
    return _with_file(url, "--redis-password-file", "Redis", "BUSREP_REDIS_PASSWORD")


def store_option(*, required: bool) -> Decorator:
    """``--store URL`` and ``--password-file FILE``; the command gets one URL, with the password in it."""
    url = click.option(
        "--store",
        "store_url",
        envvar="BUSREP_STORE",
        required=required,
        show_envvar=True,
        metavar="URL",
        help="The table: sqlite:///file.db or postgresql://user@host/database.",
        callback=_with_password("--store", "--password-file", _store_url),
    )
    return _with_file(url, "--password-file", "the store", "BUSREP_STORE_PASSWORD, or libpq's ~/.pgpass")


# The module is no part of Spark, but of the jobs on it, which are loaded on demand.
def _redis_url(url: str, file: str | None, option: str) -> str:
    from busrep.spark import secrets

    return secrets.with_redis_password(url, file, option)


def _store_url(url: str, file: str | None, option: str) -> str:
    from busrep.spark import secrets

    return secrets.with_store_password(url, file, option)


def _with_file(url: Decorator, flag: str, of: str, otherwise: str) -> Decorator:
    def remember(context: click.Context, _option: click.Parameter, value: str | None) -> None:
        context.meta[flag] = value

    # Eager: its value is there when the URL is read, in whatever order they are given.
    told = f"A file whose first line is the password of {of} [default: {otherwise}]."
    file = click.option(flag, type=click.Path(), is_eager=True, expose_value=False, callback=remember, help=told)
    return lambda command: url(file(command))


def _with_password(
    option: str, flag: str, join: Callable[[str, str | None, str], str]
) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    def joined(context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
        file = context.meta.get(flag)
        if value is None:
            if file is not None:
                raise click.UsageError(f"{flag} needs {option}")
            return None
        return join(value, file, flag)

    return joined


def name_option() -> Decorator:
    """``--name NAME``, the channel."""
    return click.option(
        "--name",
        envvar="BUSREP_NAME",
        required=True,
        show_envvar=True,
        help="The bus's name, which is its Redis channel.",
    )


def json_option() -> Decorator:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; of a group of errors the first of ours is raised."""
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as group:
        raise first_error(group) from group


def first_error(error: BaseException) -> BaseException:
    """The first BusrepError inside an exception group, else the first exception."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inside = [first_error(one) for one in error.exceptions]
    return next((one for one in inside if isinstance(one, BusrepError)), inside[0])


def redis_client(url: str) -> redis.asyncio.Redis:
    """A client for a few commands. Raises ConfigError for a URL that is none."""
    check_url(url, "--redis", FORMS)
    options = {"socket_connect_timeout": CONNECT_TIMEOUT, "socket_timeout": CONNECT_TIMEOUT, **tls_defaults(url)}
    try:
        return redis.asyncio.Redis.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(f"--redis {shown_url(url)!r}: {error}; use {FORMS}") from None


async def check_redis(url: str) -> None:
    """Make sure that Redis answers: ConfigError, or Unavailable.

    The bus itself would go on trying for ever, as a service should; a person wants to be told.
    """
    client = redis_client(url)
    try:
        await client.ping()
    except (redis.RedisError, OSError, TimeoutError) as error:
        raise Unavailable(f"Redis at {shown_url(url)}", str(error) or type(error).__name__) from None
    finally:
        await client.aclose()


def print_json(value: object) -> None:
    """One JSON document on one line of standard output."""
    click.echo(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode())


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for a person; numbers are aligned to the right.

    In a narrow terminal headings break at spaces and long names fold, over as many lines as they need; what is
    short stays whole. If that does not fit either, the terminal wraps the lines, which loses nothing.
    """
    found = [["" if cell is None else cell for cell in row] for row in rows]
    numeric = [bool(found) and all(isinstance(row[at], (int, float)) for row in found) for at in range(len(columns))]
    cells = [[f"{cell:,}" if type(cell) is int else str(cell) for cell in row] for row in found]
    # Into a pipe or a file: as wide as it needs, for nobody looks at it through a window.
    room = Console().width if sys.stdout.isatty() else PIPE_WIDTH
    for headings in (list(columns), [column.replace(" ", "\n") for column in columns]):
        parts = [[*heading.split("\n"), *(row[at] for row in cells)] for at, heading in enumerate(headings)]
        widest = [max(map(len, column)) for column in parts]
        whole = [number or width <= WHOLE for number, width in zip(numeric, widest, strict=True)]
        needed = 1 + sum(3 + (width if kept else FOLDED) for width, kept in zip(widest, whole, strict=True))
        if needed <= room:
            break
    table = Table(title=title, title_justify="left")
    for heading, number, kept in zip(headings, numeric, whole, strict=True):
        table.add_column(heading, justify="right" if number else "left", no_wrap=kept, overflow="fold")
    for row in cells:
        table.add_row(*row)
    # Names are shown as they are: "[/b]" is no markup, and ":heart:" no picture.
    Console(width=max(needed, room), markup=False, emoji=False).print(table)


def fail(message: str, status: int = 2) -> NoReturn:
    """End the command with one line on standard error."""
    click.echo(f"busrep: {message}", err=True)
    raise click.exceptions.Exit(status)
