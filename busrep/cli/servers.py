"""From options to a store and its streams; each command's work is one run of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from busrep.core.snapshots import SnapshotSource
from busrep.errors import BusrepError, ConfigError
from busrep.stores import open_store
from busrep.stores.declared import NOT_THERE, declared_in
from busrep.stores.interface import AsyncStore
from busrep.streams import Registry, Stream

T = TypeVar("T")
SourceT = TypeVar("SourceT", bound=SnapshotSource)


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


def declared_streams(places: Sequence[str]) -> list[Stream[Any]]:
    """The streams of all --streams. Raises ConfigError when they are not there."""
    if not places:
        return []
    where = ",".join(places)
    try:
        return declared_in(where)
    except (ConfigError, *NOT_THERE) as error:
        raise ConfigError(f"--streams {where}: {error}") from None


def make_store(url: str, declared: Iterable[Stream[Any]] = (), names: Iterable[str] = ()) -> AsyncStore:
    """A store of these streams, declared ones first."""
    streams = {stream.name: stream for stream in declared}
    for name in names:
        streams.setdefault(name, Stream(name))
    return open_store(url, Registry(streams.values()))


@contextlib.asynccontextmanager
async def opened(source: SourceT) -> AsyncIterator[SourceT]:
    """Open a store or another source, and close it at the end. Raises SchemaError, Unavailable."""
    try:
        await source.open()
        yield source
    finally:
        await source.close()


@contextlib.asynccontextmanager
async def with_all_streams(
    url: str, declared: Sequence[Stream[Any]], wanted: str | None = None
) -> AsyncIterator[AsyncStore]:
    """An open store that knows every stream its tables list. ConfigError for one whose table it cannot know, and
    when ``wanted`` is none of them."""
    async with opened(make_store(url, declared)) as store:
        listed = (await store.status())["streams"]
    known = {stream.name for stream in declared}
    for name, details in listed.items():
        if name not in known and details["table"] not in (None, "busrep_facts"):
            raise ConfigError(f"stream {name!r} is kept in the table {details['table']}: pass --streams MODULE:NAME")
    if wanted is not None and wanted not in known | set(listed):
        raise ConfigError(f"no stream {wanted!r} is known here (there are: {', '.join(sorted(listed)) or 'none'})")
    async with opened(make_store(url, declared, listed)) as store:
        yield store


def ask(
    opening: contextlib.AbstractAsyncContextManager[AsyncStore], question: Callable[[AsyncStore], Awaitable[T]]
) -> T:
    """What a store answers that is opened for this question."""

    async def work() -> T:
        async with opening as store:
            return await question(store)

    return run(work())
