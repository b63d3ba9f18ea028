"""The name under which a process writes: claimed, kept, won back (rules 9.5, 9.19, 9.24), in both runtimes.

The coroutines are awaited on an event loop. A thread runs them to their end where it is: there nothing that they await
waits for a loop (`busrep.stores.plans.complete`).
"""

from __future__ import annotations

import enum
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from busrep.errors import CommitsLost, Unavailable, WriterFenced
from busrep.settings import Settings
from busrep.stores.interface import Claim, FactLog, KnownWriter, provides

from .config import WriterConfig
from .fact import check_renewals
from .session import WriterSession

log = logging.getLogger("busrep.writer")

SessionT = TypeVar("SessionT", bound=WriterSession)


async def claim_name(
    config: WriterConfig, *, again: int | None = None, former: WriterSession | None = None
) -> tuple[Claim | None, int]:
    """Claim the name for the streams that have a table. Gives the claim and its incarnation.

    ``again``, ``former``: the name is won back, from this incarnation on, for what goes on in place of that session.
    Without them a claim that was finished for its silence before its end is won back here: the database may have been
    slower than the lease. Raises what `FactLog.claim` raises.
    """
    store, streams = config.store, config.durable
    if store is None or not streams:
        listed: list[KnownWriter] = []
        if former is None and provides(store, FactLog):  # else it may be a source of pages, which cannot tell
            listed = [one for one in await store.known() if one.writer == config.name]
        if store is None or not any(one.registered for one in listed):
            # Without a table the clock makes incarnations that rise and differ (9.11).
            return None, max([time.time_ns(), (again or 0) + 1, *(one.incarnation + 1 for one in listed)])
    for fenced in itertools.count(1):
        try:
            claim = await store.claim(config.name, streams, timeout=config.settings.claim_timeout, again=again)
            break
        except WriterFenced as error:
            if former is not None or error.incarnation <= (again or 0):
                raise  # `win_back` goes on; or another process has the name
            again = error.incarnation
            check_renewals(config.name, fenced)
    if not streams:  # it was claimed for nothing but to give up what a predecessor wrote, and to be above it
        return None, claim.incarnation
    return claim if former is None else claim.resumed(former.epoch, former.core.positions()), claim.incarnation


async def win_back(former: WriterSession, outdone: int, begin: Callable[[int], Awaitable[SessionT]]) -> SessionT:
    """The session that goes on in place of one that has ended, if no other process has claimed the name.

    A reader finishes a writer that is silent, and the name is no other process's then: its process may win it back.
    ``outdone``: the highest incarnation heard of a predecessor. ``begin(again)``: claims the name again, after
    that incarnation. Raises WriterFenced when another process has the name, CommitsLost, ClaimBlocked, Unavailable.
    """
    former.won, tried = max(former.incarnation, outdone, former.won), False
    while True:
        if former.kept:  # rows that are kept for consumers are of the incarnation that wrote them
            raise WriterFenced(former.name, former.incarnation)
        try:
            session = await begin(former.won)
            await _check_committed(former, session)
            break
        except CommitsLost as error:
            log.error("%s", error)
            raise
        except WriterFenced as error:
            if error.incarnation <= former.won:
                raise WriterFenced(former.name, former.incarnation) from None
            former.won = error.incarnation  # and finished for its silence before that was known here
        except Unavailable:
            # It may be won all the same, and the next fact may be long in coming: so it is tried once more, now.
            if tried:
                raise
            tried = True
    ended = "interrupted" if former.torn else "fenced"
    log.warning("writer %s was %s; it goes on as incarnation %d", former.name, ended, session.incarnation)
    session.committed, session.facts, session.rows = former.committed, former.facts, former.rows
    return session


async def _check_committed(former: WriterSession, won: WriterSession) -> None:
    """Whether what was committed is still there: PostgreSQL may have failed over (9.23). Raises CommitsLost, and
    WriterFenced when what was won is fenced already."""
    if won.claim is not None and former.claim is not None and (noted := former.committed.facts()):
        store, claim = won.log
        found = await store.outcome(claim, None, noted)
        former.committed.check(former.claim, found, await store.known())


class Hint(enum.Enum):
    """What follows when the own name is heard."""

    NOTHING = enum.auto()
    ASK = enum.auto()  # the claim is to be read now
    OUTDONE = enum.auto()  # by a predecessor whose clock was ahead: go on above it
    LOST = enum.auto()  # to a successor


class NameWatch:
    """Judges what is heard of the own name. ``since``: when the first incarnation began. Pure; times of one clock."""

    def __init__(self, settings: Settings, since: float) -> None:
        self.since = since
        self._settings = settings
        self._asked_at = -math.inf

    def heard(self, session: WriterSession, incarnation: int, now: float, *, has_log: bool) -> Hint:
        """Another process speaks under this name: a successor, or, just after the start, a predecessor.

        Where no stream has a table no claim tells which. Above a predecessor, whose clock was ahead, it goes on (9.24).
        ``has_log``: the other one writes to a log, so it has a claim, and the name.
        """
        if incarnation <= session.incarnation:
            return Hint.NOTHING
        if session.claim is not None:  # a hint: the claim decides (9.19)
            return self.may_ask(session, now)
        bound = self._settings.heartbeat * self._settings.silent_after_beats
        if session.kept or now - self.since > bound or has_log:
            return Hint.LOST
        log.warning("writer %s is heard under a higher incarnation, %d: a clock is behind", session.name, incarnation)
        return Hint.OUTDONE

    def may_ask(self, session: WriterSession, now: float) -> Hint:
        """ASK the database whether the claim stands. Once a beat at most, whatever is said: the beat looks, too."""
        if session.fenced is not None or now - self._asked_at < self._settings.heartbeat:
            return Hint.NOTHING
        self._asked_at = now
        return Hint.ASK
