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


def open_store(url: str, streams: Registry, *, settings: Settings | None = None) -> AsyncStore:
    """The store of a URL, not connected yet. Raises ConfigError for a URL of another form, MissingExtra."""
    settings = settings or Settings()
    check_url(url, "the store URL", FORMS)
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1 and rest != "/:memory:":
        from busrep.stores.sqlite.store import SqliteStore

        return SqliteStore(unquote(rest[1:]), streams, settings)
    if scheme in ("postgresql", "postgres"):
        from busrep.stores.postgres.store import PostgresStore

        return PostgresStore(url, streams, settings)
    if scheme == "memory" and rest and not set(rest) & {*"/@?"}:
        from busrep.stores.memory.store import MemoryStore

        return MemoryStore(rest, streams, settings)
    raise ConfigError(f"the store URL {shown_url(url)!r} does not work; these forms do: {FORMS}")
