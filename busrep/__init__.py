"""busrep: a replication bus over Redis pub/sub that loses nothing.

Start here::

    streams.py     Stream: a named log of typed rows
    connect()      a Bus: write facts, subscribe to streams, wait for positions
    errors.py      everything that is raised
    options.py     the arguments of connect()
    settings.py    every bound and period, with its reason
    reports.py     ReaderReport: what a reader has handled, for the audit

The rooms, from the inside out::

    core/          the protocol: commands, frames, the state machines of reader and writer, IDs. No I/O
    stores/        the backing tables: interface.py, the SQL as plans, postgres/, sqlite/, memory.py
    links/         Redis pub/sub and TCP
    http/          catch-up and snapshots over HTTP
    snapshots/     where a bootstrap's snapshot comes from, Parquet files
    caches/        cached results of functions and their invalidation
    asyncio/       the loops: Bus, reading, writing, bootstraps. sync/: the same for threads
    runtime/       what several rooms with loops use
    commands/      presence, acknowledgements, locks, remote servers
    integrations/  SQLAlchemy, Django
    testing/       what tests of busrep, and of programs on it, need
    cli/           the command. spark/: the pipeline
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

from .errors import (
    BusrepError,
    ClaimBlocked,
    CommitUnknown,
    ConfigError,
    EpochChanged,
    HandlerFailed,
    PositionTooOld,
    ReaderMoved,
    RowError,
    Unavailable,
    WaitTimeout,
    WriterFenced,
)
from .settings import Settings
from .streams import Stream, Table

if TYPE_CHECKING:
    import redis.asyncio

    from .asyncio import Batch, Bus, Fact, SnapshotPart
    from .core.application_commands import LockReleased, RemoteServerUp, UserSync
    from .core.health import Health
    from .links.tcp import TcpAddress
    from .links.tcp_server import TcpServer
    from .options import Options
    from .reports import ReaderReport

__all__ = [
    "Batch",
    "Bus",
    "BusrepError",
    "ClaimBlocked",
    "CommitUnknown",
    "ConfigError",
    "EpochChanged",
    "Fact",
    "HandlerFailed",
    "Health",
    "LockReleased",
    "PositionTooOld",
    "ReaderMoved",
    "ReaderReport",
    "RemoteServerUp",
    "RowError",
    "Settings",
    "SnapshotPart",
    "Stream",
    "Table",
    "Unavailable",
    "UserSync",
    "WaitTimeout",
    "WriterFenced",
    "connect",
]

__version__ = "0.1.0"

# Imported when first used: a bus and redis-py take 0.3 s of the processor. A module of streams, most commands of the
# command line and Spark's workers do without them.
_LATE = {
    **dict.fromkeys(("Batch", "Bus", "Fact", "SnapshotPart"), "asyncio"),
    **dict.fromkeys(("LockReleased", "RemoteServerUp", "UserSync"), "core.application_commands"),
    "Health": "core.health",
    "ReaderReport": "reports",
}
_ROOMS = ("asyncio", "caches", "core", "links", "options", "stores")

if not TYPE_CHECKING:  # a type checker would take any misspelt name for one of these

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return import_module(f"busrep.{name}")
        if name not in _LATE:
            raise AttributeError(f"module 'busrep' has no attribute {name!r}")
        return getattr(import_module(f"busrep.{_LATE[name]}"), name)

    def __dir__() -> list[str]:
        return [*{*globals(), *__all__}]


def connect(
    redis: str | redis.asyncio.Redis | TcpAddress | TcpServer,
    *,
    name: str,
    streams: Iterable[Stream[Any]] = (),
    store: Any = None,
    writer: str | None = None,
    reader: str | None = None,
    settings: Settings | None = None,
    **options: Unpack[Options],
) -> Bus:
    """Make a bus for this process: ``async with busrep.connect(...) as bus``.

    Args:
        redis: A URL (``redis://``, ``rediss://``, ``unix://``; user, password and database as redis-py takes them) or a
            ``redis.asyncio.Redis``, whose settings are used. Without a Redis: the address of a TCP server
            (``tcp://host:port``, ``tcps://:secret@host:port``), or the `TcpServer` of this very process.
        name, streams, store, writer, reader, settings, options: See `busrep.options.BusOptions`.

    Raises:
        ConfigError: For arguments that cannot work. Opening the bus raises Unavailable, SchemaError, ClaimBlocked and
            PositionsAheadOfTable.
    """
    from .asyncio import Bus
    from .options import BusOptions

    given = BusOptions(
        name=name, streams=streams, store=store, writer=writer, reader=reader, settings=settings, **options
    )
    return Bus(redis, given.opened())
