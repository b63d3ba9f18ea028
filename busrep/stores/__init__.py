"""Where facts are kept: `open_store` makes the store that a URL names; interface.py says what a store promises."""

from __future__ import annotations

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


def open_store(url: str, streams: Registry, *, settings: Settings | None = None) -> AsyncStore:
    """Make the store of a URL, for asyncio; it is not connected yet. Raises ConfigError, MissingExtra."""
    settings = settings or Settings()
    kind, place = split_store_url(url)
    if kind == "sqlite":
        from busrep.stores.sqlite.store import SqliteStore

        return SqliteStore(place, streams, settings)
    if kind == "postgresql":
        from busrep.stores.postgres.store import PostgresStore

        return PostgresStore(place, streams, settings)
    from busrep.stores.memory.store import MemoryStore

    return MemoryStore(place, streams, settings)
