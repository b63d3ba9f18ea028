"""Checks of a job's options that need no Spark: a Java takes seconds to start, and on a busy machine a minute."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from busrep.errors import ConfigError, MissingExtra
from busrep.settings import Settings
from busrep.spark import secrets
from busrep.spark.archive_store import Root, existing, load
from busrep.spark.archiving import streams_in_store
from busrep.spark.options import store_of, stream_of
from busrep.spark.table import Table, sqlite_path
from busrep.stores import schema
from busrep.streams import Stream
from busrep.sync.publisher import redis_pool


def check_table(options: Any, streams: Iterable[str], *, may_be_empty: bool = False) -> None:
    """Check the store, its password file, its driver, and the streams, which the store must have.

    ``options``: with ``store``, ``password_file`` and ``streams``. ``streams``: those named by --stream; without one,
    the store must have some, unless it ``may_be_empty``. Raises ConfigError, MissingExtra, SchemaError, Unavailable.
    """
    url = secrets.resolve(store_of({"store": options.store}), options.password_file)
    driver = "adbc_driver_postgresql" if sqlite_path(url) is None else "adbc_driver_sqlite"
    try:
        importlib.import_module(driver)
    except ImportError as missing:
        raise MissingExtra("spark", "reading a table on Spark") from missing
    names = tuple(streams)
    if not names and may_be_empty:
        with Table(url, Stream("any")) as table:
            table.ask(lambda: schema.check(table.dialect))
        return
    for name in names or streams_in_store(url):
        with Table(url, stream_of(options.streams, name)) as table:
            table.log()


def check_bus(redis: str | None, name: str | None, password_file: str | None = None) -> None:
    """Check the Redis of a bus and the bus's name, which go together. Connects to nothing. Raises ConfigError."""
    if redis is None and password_file is not None:
        raise ConfigError("--redis-password-file needs --redis")
    if (redis is None) != (name is None):
        raise ConfigError("--redis and --name go together: the Redis of a bus, and the bus's name there")
    if redis is not None:
        redis_pool(secrets.with_redis_password(redis, password_file), Settings()).disconnect()


def check_folder(url: str) -> Root:
    """Check that a path, or the URL of an object store, is one. Returns it. Raises ConfigError, Unavailable."""
    root = Root(url)
    root.path("")
    return root


def check_archive(url: str, streams: Iterable[str], *, exists: bool) -> None:
    """Check that the archives of these streams are whole, and with ``exists`` that they are there. Raises ConfigError,
    Unavailable."""
    root = check_folder(url)
    for name in streams:
        if exists:
            existing(root, name)
        else:
            load(root, name).checked()


def check_files(option: str, paths: Iterable[str]) -> None:
    """Check that files can be read. Raises ConfigError."""
    for path in paths:
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{option} {path}: {error.strerror}") from None
