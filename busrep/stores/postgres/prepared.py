"""Statements of which the server keeps the plan, on connections that busrep alone uses.

To parse and plan the statements of one fact costs the server more than to execute them. They are prepared as text, with
PREPARE and EXECUTE: so several statements still go out in one round trip. The driver's own prepared statements need its
pipeline mode for that.

A name belongs to a session of the server. Behind a pooler (PgBouncer) each transaction may be in another session: there
nothing is prepared. Nor is it where the application runs statements, for one may be DEALLOCATE ALL.
"""

from __future__ import annotations

import itertools
import secrets

from busrep.errors import StatementRefused
from busrep.stores.plans import Plan, Signal, Sql

# Of one connection: the server holds some 20 kB for each. None makes room for another: where more come in turn than
# there is room for, all would be prepared anew each time.
MOST = 100
# SQLSTATEs: there is no such name, or there is already. Somebody else uses the session.
SHARED_SESSION = frozenset({"26000", "42P05"})


class Prepared:
    """What the server has prepared for one connection.

    ``process``: the server's, as the driver was told. A pooler tells its clients numbers of its own. ``tag``: in all
    names, so that in a session which others use nobody executes another one's statement for his own.
    """

    def __init__(self, process: int) -> None:
        self._process, self.tag = process, secrets.token_hex(4)
        self._allowed: bool | None = None  # None: not known yet
        self._calls: dict[str, str] = {}
        self._seen: set[str] = set()  # once
        self._due: dict[str, None] = {}
        self._numbers = itertools.count(1)

    @property
    def due(self) -> bool:
        """Whether `prepare` has something to do."""
        return bool(self._due)

    def call(self, text: str) -> str | None:
        """The statement that executes this one, with ``%s`` for each parameter; None if this one is not prepared. Then
        it is noted: it is worth it when it comes a second time."""
        found = self._calls.get(text)
        if found is None and self._allowed is not False and len(self._calls) + len(self._due) < MOST:
            if text in self._seen:
                self._due[text] = None
            elif len(self._seen) < MOST:
                self._seen.add(text)
            else:
                self._seen = {text}
        return found

    def prepare(self) -> Plan[None]:
        """Prepare what is due. What the server refuses to prepare it refuses to execute, too, and whoever asks is told
        then. Raises Unavailable."""
        if self._allowed is None:
            (((process,),),) = yield Sql("SELECT pg_backend_pid()")
            if process != self._process:
                self.give_up()
                return
            self._allowed = True
        while self._due:
            text, _ = self._due.popitem()
            self._seen.discard(text)
            name = f"busrep_{self.tag}_{next(self._numbers)}"  # of an older one the answer may be missing
            first, *others = text.split("?")
            numbered = "".join([first, *(f"${at}{piece}" for at, piece in enumerate(others, 1))])
            try:
                yield Sql(f"PREPARE {name} AS {numbered}")
            except (Signal, StatementRefused):
                continue
            self._calls[text] = f"EXECUTE {name}({', '.join(['%s'] * len(others))})" if others else f"EXECUTE {name}"

    def give_up(self) -> None:
        """Prepare nothing any more: the session is not this connection's alone."""
        self._allowed = False
        self._calls.clear()
        self._due.clear()
