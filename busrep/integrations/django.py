"""Facts in Django's transactions, and the bus of a Django process.

A fact joins the transaction of Django's own connection, PostgreSQL's (psycopg 3) or SQLite's; nested in an `atomic`
block it is a savepoint, as another `atomic` would be. Django tells of the outermost COMMIT (`on_commit`), and the table
then tells what was committed. Of a ROLLBACK further out Django does not tell: the bus finds out by itself.

The bus of the process is made from ``settings.BUSREP`` when it is first used, so after a server has forked its
workers, and closes when the interpreter ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, overload
from urllib.parse import quote, urlencode

import busrep.sync
from busrep.errors import ConfigError, MissingExtra
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry, Stream

try:
    from django import conf  # type: ignore[import-untyped]
    from django.core.signals import setting_changed  # type: ignore[import-untyped]
    from django.db import DEFAULT_DB_ALIAS, connections, transaction  # type: ignore[import-untyped]
    from django.utils.module_loading import import_string  # type: ignore[import-untyped]
except ImportError as missing:
    raise MissingExtra("django", "facts in Django's transactions") from missing

__all__ = ["bus", "close", "create_tables", "open_bus", "write"]

RowT = TypeVar("RowT")


class _ProcessBus:
    """The process's bus."""

    lock = threading.RLock()
    bus: busrep.sync.Bus | None = None
    database: str | None = None  # the alias of the database that is its store, if it is one of Django's
    named = False  # for this process, by a function: so another process gets another name


_process = _ProcessBus()


# -- facts ----------------------------------------------------------------------------------------------------


@overload
def write(
    stream: Stream[RowT], /, *streams: Stream[Any], using: str | None = None, bus: busrep.sync.Bus | None = None
) -> AbstractContextManager[busrep.sync.Fact[RowT]]: ...
@overload
def write(
    *streams: Stream[Any], using: str | None = None, bus: busrep.sync.Bus | None = None
) -> AbstractContextManager[busrep.sync.Fact[Any]]: ...
@contextmanager
def write(
    *streams: Stream[Any], using: str | None = None, bus: busrep.sync.Bus | None = None
) -> Iterator[busrep.sync.Fact[Any]]:
    """A fact of ``streams`` in the transaction of a Django connection: ``with write(orders) as fact``.

    Outside of `atomic` the block is a transaction, and its fact is published when it ends. In an `atomic` block it is a
    savepoint, and its fact is published when the outermost block commits. ``using``: the database's alias (default:
    that of ``settings.BUSREP``); ``bus``: one of `busrep.sync.connect`, else the process's. Raises what ``bus.write``
    raises, and ConfigError for a database that busrep cannot join, or that is not the bus's.
    """
    writer = _of_process() if bus is None else bus
    database = _process.database if bus is None else None
    connection = connections[using or database or DEFAULT_DB_ALIAS]
    if database is not None and connection.alias != database:
        _check_the_same(connection, database)
    _open_before_the_lock(writer, connection)
    fact: busrep.sync.Fact[Any] | None = None

    def ended() -> None:
        if fact is not None:
            fact.ended()

    outermost = not connection.in_atomic_block and connection.get_autocommit()
    if connection.in_atomic_block:
        # Before the savepoint: if that is rolled back this must be heard of all the same.
        transaction.on_commit(ended, using=connection.alias)
    elif not outermost and connection.vendor == "sqlite" and not connection.connection.in_transaction:
        # Without autocommit this driver begins with the first change, not with SAVEPOINT, whose end would be a COMMIT.
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")
    try:
        with transaction.atomic(using=connection.alias):
            fact = writer.write(*streams, connection=_begun(connection))
            with connection.wrap_database_errors, fact:
                yield fact
    finally:
        if outermost:
            ended()


def _open_before_the_lock(writer: busrep.sync.Bus, connection: Any) -> None:
    """Open the bus if it is not. On SQLite that takes the one write lock, on another connection."""
    driver = connection.connection if connection.vendor == "sqlite" else None
    if writer.state == "new" and driver is not None and (connection.in_atomic_block or driver.in_transaction):
        raise ConfigError(
            "on SQLite the bus must be open before the transaction begins: call busrep.integrations.django.open_bus(), "
            "with ATOMIC_REQUESTS as a receiver of django.core.signals.request_started"
        )
    writer.ensure_open()


def _check_the_same(connection: Any, database: str) -> None:
    """A fact in another database than the bus's nobody would find; and as its claim is not there, the bus would take
    itself for fenced."""
    if _store_of(connection) != _store_of(connections[database]):
        raise ConfigError(
            f"the bus of settings.BUSREP has its facts in the database {database!r}, and {connection.alias!r} is "
            f"another one: write(using={database!r}), or write(bus=) with a bus of that database"
        )


def _begun(connection: Any) -> Any:
    """The driver's connection, in a transaction. psycopg begins one with the first statement only; before that busrep
    would begin one of its own, and commit it."""
    connection.validate_no_broken_transaction()
    connection.ensure_connection()
    driver = connection.connection
    status = getattr(getattr(driver, "info", None), "transaction_status", None)
    if getattr(status, "name", "") == "IDLE":
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    return driver


# -- the process's bus ----------------------------------------------------------------------------------------


def bus() -> busrep.sync.Bus:
    """The bus of this process, made from ``settings.BUSREP`` at the first call. Raises ConfigError.

    ``BUSREP`` holds the arguments of `busrep.sync.connect`, and these differ: ``streams`` may be a dotted path to a
    list of streams; ``writer`` may be a function, called once in each process, which gives that process's name; without
    ``store`` it is the Django database of alias ``database``, "default" if not given.
    """
    with _process.lock:
        if _process.bus is None or _process.bus.state == "closed":
            options, database = _options()
            named = not isinstance(options.get("writer"), str)
            if callable(options.get("writer")):
                options["writer"] = options["writer"]()
            _process.bus = busrep.sync.connect(options.pop("redis"), **options)
            _process.named, _process.database = named, database
        return _process.bus


_of_process = bus  # its name is an argument's in `write`


def open_bus(**_: Any) -> None:
    """Open the process's bus now, if it is not, instead of at its first use. May be a receiver of signals."""
    _of_process().ensure_open()


def close() -> None:
    """Close the process's bus, if it has one; the next use opens another. For the end of a worker, and for tests."""
    with _process.lock:
        found, _process.bus = _process.bus, None
    if found is not None:
        found.close()


def create_tables() -> None:
    """Create busrep's tables for ``settings.BUSREP``, as ``busrep db init`` does; those that are there stay.

    Not inside a transaction: a receiver of Django's `post_migrate` is the place, then test databases have them too.
    """
    options, _ = _options()
    store = open_blocking_store(options["store"], Registry(options["streams"]))
    store.init()
    store.close()


def _options() -> tuple[dict[str, Any], str | None]:
    """The arguments of `busrep.sync.connect`, and the alias of the database that is the store."""
    given = getattr(conf.settings, "BUSREP", None)
    if not isinstance(given, Mapping) or not {"redis", "name", "streams"} <= set(given):
        raise ConfigError(
            'set BUSREP = {"redis": ..., "name": ..., "streams": ..., "writer": ...} in Django\'s settings'
        )
    options = dict(given)
    if isinstance(options["streams"], str):
        options["streams"] = import_string(options["streams"])
    alias = options.pop("database", DEFAULT_DB_ALIAS)
    if "store" in options:
        return options, None
    options["store"] = _store_of(connections[alias])
    return options, alias


def _store_of(connection: Any) -> str:
    """The URL of Django's database, which in tests is another one than in the settings."""
    if connection.vendor == "sqlite":
        name = str(connection.settings_dict["NAME"])
        if "memory" in name and (name == ":memory:" or name.startswith("file:")):
            raise ConfigError(
                'an SQLite database in memory has no second connection: give a file (for tests "TEST": {"NAME": ...})'
            )
        return f"sqlite:///{quote(os.path.abspath(name))}"
    if connection.vendor != "postgresql":
        raise ConfigError(f"busrep joins PostgreSQL and SQLite, not {connection.vendor}")
    found = dict(connection.get_connection_params())
    user, password = (quote(str(found.pop(key, "") or ""), safe="") for key in ("user", "password"))
    host, port = quote(str(found.pop("host", "") or ""), safe=""), found.pop("port", "")
    name = quote(str(found.pop("dbname", "") or ""), safe="")
    for key in ("client_encoding", "prepare_threshold"):  # not for libpq
        found.pop(key, None)
    # What is left of OPTIONS for libpq: sslmode, service and the like are words and numbers.
    query = urlencode({key: value for key, value in found.items() if type(value) in (str, int)}, quote_via=quote)
    account = f"{user}{':' + password if password else ''}@" if user else ""
    place = f"{host}{f':{port}' if port else ''}"
    return f"postgresql://{account}{place}/{name}{'?' + query if query else ''}"


def _forked() -> None:
    """In the child: a name that a function gave was the parent's."""
    _process.lock = threading.RLock()
    if _process.named:
        _process.bus = None


def _changed(*, setting: str, **_: Any) -> None:
    if setting == "BUSREP":
        close()


os.register_at_fork(after_in_child=_forked)
setting_changed.connect(_changed)
