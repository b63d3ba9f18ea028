"""busrep: a replication bus over Redis pub/sub that loses nothing.

Start here::

    streams.py     Stream: a named log of typed rows
    connect()      a Bus: write facts, subscribe to streams, wait for positions
    errors.py      the tree of everything that is raised
    settings.py    every bound and period, with its reason
    reports.py     ReaderReport: what a reader has handled, for the audit

The rooms, from the inside out::

    core/          the protocol: commands, frames, the state machines of reader and writer, IDs. No I/O
    stores/        the backing tables: interface.py, the SQL as plans, postgres/, sqlite/, memory/
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
from typing import TYPE_CHECKING, Any

from .asyncio import Batch, Bus, Fact, SnapshotPart, Start
from .asyncio.failing import OnFailure
from .asyncio.reading import OnEpochChange, OnPoison, OnTooOld
from .core.commands import LockReleased, RemoteServerUp, UserSync
from .core.failures import Transient
from .core.health import Health
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
from .reports import ReaderReport
from .settings import Settings
from .streams import Registry, Stream, Table

if TYPE_CHECKING:
    import redis.asyncio

    from .links.tcp import TcpAddress
    from .links.tcp_server import TcpServer

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


def connect(
    redis: str | redis.asyncio.Redis | TcpAddress | TcpServer,
    *,
    name: str,
    streams: Iterable[Stream[Any]] = (),
    store: Any = None,
    writer: str | None = None,
    reader: str | None = None,
    reader_store: Any = None,
    start: Start | None = None,
    settings: Settings | None = None,
    on_poison: OnPoison = "stop",
    on_epoch_change: OnEpochChange = "rebootstrap",
    on_too_old: OnTooOld = "stop",
    own: bool = False,
    undeclared: bool = False,
    require_redis: bool = True,
    snapshot_source: Any = None,
    transient: Transient = None,
    on_failure: OnFailure | None = None,
) -> Bus:
    """A bus for this process: ``async with busrep.connect(...) as bus``.

    ``redis``: a URL (``redis://``, ``rediss://``, ``unix://``; user, password and database as redis-py takes them) or
    a ``redis.asyncio.Redis`` whose settings are used. Without a Redis: the address of a TCP server (``tcp://host:port``,
    ``tcps://:secret@host:port``), or the `TcpServer` of this very process. ``name``: the deployment's name and channel.
    ``streams``: those this process writes or reads. ``store``: where facts are kept, a URL (``postgresql://``,
    ``sqlite:///file.db``, ``memory://name``, or ``http://:secret@host/prefix`` of a process that has the table, for
    mere readers) or a store of ``busrep.stores``.

    ``writer``: this process's name as a writer, unlike any other live process's; None for a mere reader.
    ``reader``: a name under which positions are saved, so that a restart goes on where it was; ``reader_store``:
    where, if not in ``store``. ``start``: where a reader without saved positions begins, "now" (default without
    ``reader``), "earliest" (default with one) or {stream: {writer: position}}.

    ``on_poison``: "stop" a (stream, writer) whose handler keeps failing, or keep the fact as a "dead_letter" and go
    on. ``on_epoch_change``: "rebootstrap" begins again from the oldest rows when the fact log was restored or
    replaced, "stop" raises EpochChanged. ``on_too_old``: "stop", or "skip" rows that were pruned before they
    were read, telling ``on_missed``. ``own``: deliver the own writer's facts to the own handlers too.
    ``undeclared``: also follow streams that are not in ``streams``, positions only. ``require_redis``: fail
    to start when Redis is not there; False keeps trying while business writes go on. ``snapshot_source``: where
    snapshots for ``bus.snapshot`` come from if not from ``store``, a URL (``http://:secret@host/prefix``,
    ``file:///directory``, ``s3://bucket/directory``) or a `busrep.core.snapshots.SnapshotSource`. ``transient``: which
    of a handler's errors are an outage beside those of connections (`busrep.core.failures`): exception classes, or a
    function of the exception that gives True. In an outage a handler is called again for as long as it lasts.
    ``on_failure``: a function (async or not) that is called with the error when something stops for good: a (stream,
    writer), a bootstrap, all reading, or the writer whose name another process has claimed. What it raises is logged.

    Raises ConfigError for arguments that cannot work; opening raises Unavailable, SchemaError, ClaimBlocked,
    PositionsAheadOfTable.
    """
    streams = list(streams)
    settings = settings or Settings()
    registry = Registry(streams)
    return Bus(
        redis,
        name=name,
        streams=streams,
        writer=writer,
        store=_store(store, registry, settings),
        reader=reader,
        reader_store=_store(reader_store, registry, settings),
        start=start,
        settings=settings,
        on_poison=on_poison,
        on_epoch_change=on_epoch_change,
        on_too_old=on_too_old,
        own=own,
        undeclared=undeclared,
        require_redis=require_redis,
        snapshot_source=_source(snapshot_source, registry, settings),
        transient=transient,
        on_failure=on_failure,
    )


def _source(source: Any, registry: Registry, settings: Settings) -> Any:
    if not isinstance(source, str):
        return source
    from .snapshots.sources import open_source

    return open_source(source, registry, settings)


def _store(store: Any, registry: Registry, settings: Settings) -> Any:
    if not isinstance(store, str):
        return store
    if store.startswith(("http://", "https://")):
        from .http.source import HttpSource

        return HttpSource(store, registry, settings)
    from .stores import open_store

    return open_store(store, registry, settings=settings)
