"""The arguments of `busrep.connect` and `busrep.sync.connect`: declared, explained and checked here, once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict, get_args

import attrs

from busrep.core.commands import Position
from busrep.core.failures import Transient, predicate_of
from busrep.core.fields import NAME_BYTES, refuse_name
from busrep.errors import BusrepError, ConfigError
from busrep.settings import Settings
from busrep.stores.interface import FactLog, FactSource, ReaderPositions, provides
from busrep.streams import Registry, Stream

Start = Literal["now", "earliest"] | Mapping[str, Mapping[str, int]]
"""Where a reader without saved positions begins: at the positions that are proven now, at the oldest row of each
writer, or at given positions {stream: {writer: position}} (writers that are not named there: at their oldest row)."""

OnPoison = Literal["stop", "dead_letter"]
OnEpochChange = Literal["rebootstrap", "stop"]
OnTooOld = Literal["stop", "skip"]
OnFailure = Callable[[BusrepError], Awaitable[None] | None]


class Options(TypedDict, total=False):
    """The keyword arguments of `busrep.connect` that few programs need. `BusOptions` explains them."""

    reader_store: Any
    start: Start | None
    on_poison: OnPoison
    on_epoch_change: OnEpochChange
    on_too_old: OnTooOld
    own: bool
    undeclared: bool
    require_redis: bool
    snapshot_source: Any
    transient: Transient
    on_failure: OnFailure | None


class ThreadOptions(Options, total=False):
    """The same for `busrep.sync.connect`."""

    beats: bool


def _registry(streams: Iterable[Stream[Any]]) -> Registry:
    return streams if isinstance(streams, Registry) else Registry(streams)


def _settings(settings: Settings | None) -> Settings:
    return Settings() if settings is None else settings


@attrs.frozen(kw_only=True)
class BusOptions:
    """What a bus is to be, beside the server it talks to.

    Args:
        name: The deployment's name. It is also the name of its channel.
        streams: The streams that this process writes or reads.
        store: Where facts are kept: a URL (``postgresql://``, ``sqlite:///file.db``, ``memory://name``, or
            ``http://:secret@host/prefix`` of a process that has the table, for readers), a store of ``busrep.stores``,
            or None if no stream has a table.
        writer: The name under which this process writes. No other live process may have it. None: it only reads.
        reader: The name under which positions are saved, so that a restart goes on where it was. None: none are saved.
        reader_store: Where positions are saved if not in ``store``.
        start: Where a reader without saved positions begins. The default is "earliest" with ``reader``, else "now".
        settings: Bounds and periods.
        on_poison: What becomes of a (stream, writer) whose handler keeps failing. "stop" stops it; "dead_letter" keeps
            the fact as a dead letter and goes on behind it.
        on_epoch_change: What a reader does when the fact log was restored or replaced. "rebootstrap" begins anew,
            with a snapshot where the bus has a function for one, else from the oldest rows; "stop" raises EpochChanged.
        on_too_old: What a reader does when rows were pruned before it read them. "stop" stops the (stream, writer);
            "skip" goes on behind them and calls the ``on_missed`` handlers.
        own: Whether this process's own facts are delivered to its handlers, too.
        undeclared: Whether streams that are not in ``streams`` are followed as well, positions only.
        require_redis: Whether opening fails while Redis is away. False: it is tried again while facts are committed.
        snapshot_source: Where snapshots for ``bus.snapshot`` come from if not from ``store``: a URL
            (``http://:secret@host/prefix``, ``file:///directory``, ``s3://bucket/directory``) or a
            `busrep.core.snapshots.SnapshotSource`.
        transient: Which errors of a handler are an outage, beside those of connections (`busrep.core.failures`):
            exception classes, or a function of the exception. During an outage a handler is called again, however long
            it lasts.
        on_failure: Called with the error when something stops for good: a (stream, writer), a bootstrap, all reading,
            or the writer because another process has claimed its name. What it raises is logged.
        beats: In threads only: whether threads of the bus announce the writer. See `busrep.sync.connect`.

    Raises:
        ConfigError: For values that cannot work.
    """

    name: str
    streams: Registry = attrs.field(converter=_registry, factory=lambda: Registry(()))
    store: Any = None
    writer: str | None = None
    reader: str | None = None
    reader_store: Any = None
    start: Start | None = None
    settings: Settings = attrs.field(converter=_settings, default=None)
    on_poison: OnPoison = "stop"
    on_epoch_change: OnEpochChange = "rebootstrap"
    on_too_old: OnTooOld = "stop"
    own: bool = False
    undeclared: bool = False
    require_redis: bool = True
    snapshot_source: Any = None
    transient: Transient = attrs.field(converter=predicate_of, default=None)
    on_failure: OnFailure | None = None
    beats: bool = True

    def __attrs_post_init__(self) -> None:
        """Check what can be checked before anything is opened."""
        for what, allowed in (("on_poison", OnPoison), ("on_epoch_change", OnEpochChange), ("on_too_old", OnTooOld)):
            if (value := getattr(self, what)) not in get_args(allowed):
                raise ConfigError(f"{what}={value!r}: one of {', '.join(map(repr, get_args(allowed)))}")
        _check_name("name", self.name)
        for what, name in (("writer", self.writer), ("reader", self.reader)):
            if name is not None:
                _check_name(what, name)
        if self.on_failure is not None and not callable(self.on_failure):
            raise ConfigError(f"on_failure={self.on_failure!r}: pass a function of an exception")
        _check_start(self.start)
        for store in (self.store, self.reader_store):
            made = isinstance(store, str | None) or provides(store, FactSource) or provides(store, ReaderPositions)
            if not made:
                raise ConfigError(f"store={store!r} is no store: pass a URL, or one of busrep.stores")
        if self.reader is not None and self.positions_store is None:
            raise ConfigError(f"reader={self.reader!r} saves its positions in a store: pass store= or reader_store=")
        if self.durable and self.store is None:
            raise ConfigError(
                f"streams {', '.join(self.durable)} are kept in a table: pass store=, or make them resettable"
            )
        self._check_roles()

    def _check_roles(self) -> None:
        """Refuse a store that lacks what is asked of it, such as one that can only be read."""
        if isinstance(self.store, str) or isinstance(self.reader_store, str):
            return  # looked at once they are opened
        if self.writer is not None and self.durable and not provides(self.store, FactLog):
            raise ConfigError(
                f"writer={self.writer!r} writes, and {self.store!r} can only be read: writers need the database "
                "itself, pass its URL as store="
            )
        if self.positions_store is None or provides(self.positions_store, ReaderPositions):
            return
        if self.reader is not None or self.on_poison == "dead_letter":
            what = "on_poison" if self.reader is None else f"reader={self.reader!r}"
            raise ConfigError(
                f"{what} writes, and {self.positions_store!r} can only be read: pass reader_store= as well"
            )

    @property
    def durable(self) -> list[str]:
        """The names of the streams that are kept in a table."""
        return [stream.name for stream in self.streams if not stream.resettable]

    @property
    def positions_store(self) -> Any:
        """Where this reader saves its positions, and its dead letters."""
        return self.store if self.reader_store is None else self.reader_store

    def opened(self) -> BusOptions:
        """Return the same options with stores and a source for asyncio in place of their URLs; none is connected.

        Raises:
            ConfigError: For a URL of another form.
            MissingExtra: If what the URL needs is not installed.
        """
        from .snapshots.sources import open_source

        source = self.snapshot_source
        if isinstance(source, str):
            source = open_source(source, self.streams, self.settings)
        return attrs.evolve(
            self,
            store=self._opened_store(self.store),
            reader_store=self._opened_store(self.reader_store),
            snapshot_source=source,
        )

    def _opened_store(self, store: Any) -> Any:
        if not isinstance(store, str):
            return store
        if store.startswith(("http://", "https://")):
            from .http.source import HttpSource

            return HttpSource(store, self.streams, self.settings)
        from .stores import open_store

        return open_store(store, self.streams, settings=self.settings)


def _check_name(what: str, value: str) -> None:
    if not value or any(character.isspace() for character in value):
        raise ConfigError(f"{what}={value!r}: a name holds at least one character and no white space")
    if (reason := refuse_name(value)) is not None:
        raise ConfigError(f"{what}={value[:NAME_BYTES]!r}: a name that {reason}")


def _check_start(start: Start | None) -> None:
    if not (start is None or isinstance(start, Mapping) or start in ("now", "earliest")):
        raise ConfigError(f"start={start!r}: 'now', 'earliest' or {{stream: {{writer: position}}}}")
    for stream, writers in start.items() if isinstance(start, Mapping) else ():
        for writer, position in writers.items():
            try:
                Position(stream, writer, 0, position)  # no line can say, and no store keep, what this refuses
            except ConfigError as error:
                raise ConfigError(f"start= for {writer!r} of {stream!r} is {position!r}: {error}") from None
