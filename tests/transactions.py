"""What tests put in the place of methods that facts in threads call, coroutines among them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from busrep.stores.postgres.store import PostgresTransaction
from busrep.stores.sqlite.base import SqliteTransaction
from busrep.stores.sqlite.blocking import JoinedSqliteTransaction

Method = Callable[..., Any]

TRANSACTIONS: tuple[type, ...] = (PostgresTransaction, SqliteTransaction, JoinedSqliteTransaction)


def nothing() -> None:
    """Do nothing."""


def surrounded(method: Method, before: Callable[[], None] = nothing, after: Callable[[], None] = nothing) -> Method:
    """The method, or coroutine function, with something called before and after it."""

    def call(*args: Any, **options: Any) -> Any:
        before()
        found = method(*args, **options)
        after()
        return found

    async def call_async(*args: Any, **options: Any) -> Any:
        before()
        found = await method(*args, **options)
        after()
        return found

    return call_async if inspect.iscoroutinefunction(method) else call


def patch_methods(
    monkeypatch: pytest.MonkeyPatch, classes: tuple[type, ...], name: str, replace: Callable[[Method], Method]
) -> None:
    """Replace the method of that name in each class; ``replace`` gets the one before.

    What a class inherits from another of them is replaced there.
    """
    for one in classes:
        if name in vars(one) or not any(issubclass(one, other) for other in classes if other is not one):
            monkeypatch.setattr(one, name, replace(getattr(one, name)))


def patch_transactions(monkeypatch: pytest.MonkeyPatch, name: str, replace: Callable[[Method], Method]) -> None:
    """Replace a method of the transactions that facts in threads run in."""
    patch_methods(monkeypatch, TRANSACTIONS, name, replace)
