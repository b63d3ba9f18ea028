"""The asyncio bus that reads for a process whose threads write its facts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import attrs

from busrep import asyncio as runtime
from busrep.caches.cache import Caches
from busrep.caches.freshness import Own
from busrep.core.commands import Name, Replicate
from busrep.core.snapshots import AppliedParts
from busrep.errors import ConfigError
from busrep.options import BusOptions
from busrep.stores.plans import complete

from .loop_thread import ThreadBoundConnection
from .writing import SharedWriter


class ReadingBus(runtime.Bus):
    """An asyncio bus that reads for a process whose facts are written elsewhere, by ``writing``: they count as handled
    here, and their positions as its own."""

    def __init__(self, redis: Any, options: BusOptions, writing: SharedWriter | None, caches: Caches) -> None:
        self._beside = writing
        if options.reader is not None:
            options = attrs.evolve(options, reader_store=_ThreadSavingStore(options.positions_store))
        super().__init__(redis, options, caches=caches)
        if writing is not None:
            self.reading.own.starts = writing.starts

    def _own_name(self) -> str | None:
        return None if self._beside is None else self._beside.name

    async def open(self) -> None:
        """As the asyncio bus, and answer for the writer beside it."""
        await super().open()
        if (writing := self._beside) is not None:
            self.on(Replicate)(lambda _: writing.publishing.replicate_received())
            self.on(Name)(lambda name: self._name(writing, name))

    def _name(self, writing: SharedWriter, name: Name) -> None:
        if name.instance == writing.name and name.incarnation is not None:
            senders = self.reading.core.admission.senders
            writing.heard_name(name.incarnation, has_log=senders.has_log(name.instance, name.incarnation))

    def _own_positions(self) -> Mapping[str, int]:
        return {} if self._beside is None or self._own else self._beside.positions()

    def _own_written(self, stream: str) -> tuple[int, bool] | None:
        return None if self._beside is None or self._own else self._beside.written(stream)

    def own_applied(self, stream: str) -> Own | None:
        """As the asyncio bus."""
        return None if self._beside is None else self._beside.own_applied(stream)

    def _epoch_changed(self, epoch: str) -> None:
        if (writing := self._beside) is not None:
            writing.epoch_changed(epoch)
            if writing.lost is not None:  # now, before anything is saved in the new log
                self.reading.disown()

    def positions(self) -> dict[str, dict[str, int]]:
        """As the asyncio bus, and the own positions of the writer beside it."""
        found = super().positions()
        if (writing := self._beside) is not None and writing.lost is None:
            for stream, position in self._own_positions().items():
                if self.reading.own_counts(stream):
                    found.setdefault(stream, {})[writing.name] = position
        return found


class _ThreadSavingStore:
    """A reader's store, on the loop, that saves on a connection of another thread there."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def save_reader(
        self,
        reader: str,
        changes: Sequence[tuple[str, str, int, int]],
        epoch: str,
        connection: Any = None,
        **known: Any,
    ) -> None:
        """See `AsyncStore`."""
        await self._there(lambda on: self._store.save_reader(reader, changes, epoch, on, **known), connection)

    async def save_bootstrap(
        self, reader: str, stream: str, bootstrap_id: str, step: AppliedParts, connection: Any = None
    ) -> None:
        """See `AsyncStore`."""
        save = self._store.save_bootstrap
        await self._there(lambda on: save(reader, stream, bootstrap_id, step, on), connection)

    async def _there(self, save: Callable[[Any], Coroutine[Any, Any, None]], connection: Any) -> None:
        if not isinstance(connection, ThreadBoundConnection):
            await save(connection)
            return
        there = connection.connection
        if inspect.iscoroutinefunction(getattr(there, "execute", None)):
            raise ConfigError(f"a blocking connection is needed, not {type(there).__name__}")
        # On a blocking connection the store's coroutine waits for nothing.
        await connection.jobs.call(lambda: complete(save(there)))
