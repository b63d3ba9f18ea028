"""Where facts are kept: `open_store` makes the store that a URL names; interface.py says what a store promises.

Every operation is a plan (plans.py), in the module of what it is about: schema, claims, fencing, facts, readers,
snapshots. planned.py makes a store of them, blocking.py one for threads.

A database is a package: ``dialect.py`` has its pieces of SQL, as dialect.py asks for them (beside ``ON CONFLICT``,
``RETURNING`` and names in double quotes, which the plans use themselves); ``store.py`` and ``blocking.py`` run plans on
its connections, for asyncio, where snapshots are read as well, and in the calling thread. Its classes stand in `KINDS`.
A database server fills in the hooks of server.py, which says what a lost answer and PostgreSQL's SQLSTATEs mean.
"""

from __future__ import annotations

import pkgutil
from urllib.parse import unquote

from busrep.errors import CommitUnknown, ConfigError
from busrep.settings import Settings
from busrep.stores.interface import AsyncStore, AsyncTransaction, Claim, DeadLetter, FactRows, KnownWriter, ReaderState
from busrep.streams import Registry
from busrep.urls import check_url, shown_url

__all__ = [
    "AsyncStore",
    "AsyncTransaction",
    "Claim",
    "CommitUnknown",
    "DeadLetter",
    "FactRows",
    "KnownWriter",
    "ReaderState",
    "open_store",
]

# The class of each kind of store for asyncio, and the one that works in the calling thread.
KINDS = {
    "sqlite": ("sqlite.store:SqliteStore", "sqlite.blocking:BlockingSqliteStore"),
    "postgresql": ("postgres.store:PostgresStore", "postgres.blocking:BlockingPostgresStore"),
    "memory": ("memory:MemoryStore", "memory:BlockingMemoryStore"),
}

FORMS = "sqlite:///relative.db, sqlite:////absolute.db, postgresql://user@host/database, memory://name"


def split_store_url(url: str) -> tuple[str, str]:
    """Split a store's URL into the kind of store ("sqlite", "postgresql", "memory") and where it is.

    Returns:
        For SQLite the file's path, for PostgreSQL the URL itself, for memory the name.

    Raises:
        ConfigError: For a URL of another form.
    """
    check_url(url, "the store URL", FORMS)
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1 and rest != "/:memory:":
        return "sqlite", unquote(rest[1:])
    if scheme in ("postgresql", "postgres"):
        return "postgresql", url
    if scheme == "memory" and rest and not set(rest) & {*"/@?"}:
        return "memory", rest
    raise ConfigError(f"the store URL {shown_url(url)!r} does not work; these forms do: {FORMS}")


def store_of(url: str, streams: Registry, settings: Settings | None, *, blocking: bool) -> AsyncStore:
    """Make the store that a URL names, for asyncio or for the calling thread. Raises ConfigError, MissingExtra.

    The module of a kind of store is imported only now: it may need what is not installed.
    """
    kind, place = split_store_url(url)
    made: AsyncStore = pkgutil.resolve_name(f"busrep.stores.{KINDS[kind][blocking]}")(
        place, streams, settings or Settings()
    )
    return made


def open_store(url: str, streams: Registry, *, settings: Settings | None = None) -> AsyncStore:
    """Make the store of a URL, for asyncio; it is not connected yet. Raises ConfigError, MissingExtra."""
    return store_of(url, streams, settings, blocking=False)
