"""What an error of a handler means, and what follows: call again, look for the fact, or give it up.

An *outage*: a connection failed, or a server said that it cannot work now. The rows are not at fault. The handler is
called again, with backoff, for as long as it lasts. A *suspicion* is anything else. The rows may be at fault. A batch
of several facts is taken apart, to find the fact that is; a single fact counts as poison only after ``handler_retries``
further calls and ``poison_after`` seconds, for the cause may be an outage that looks like something else.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from busrep.errors import CommitUnknown, ConfigError, Unavailable
from busrep.settings import Settings

from .backoff import pause_after

Transient = type[BaseException] | Iterable[type[BaseException]] | Callable[[BaseException], bool] | None
"""What else is an outage: classes of exceptions, or a predicate. It adds to what busrep knows, and takes nothing away.
"""

# Errors of connections: matched by name in the class's bases, so that no driver has to be installed.
DRIVERS = frozenset({"psycopg", "psycopg2", "redis"})
CONNECTION_ERRORS = frozenset({"OperationalError", "InterfaceError", "ConnectionError", "TimeoutError"})
# SQLSTATEs of other classes of psycopg's that say the same: the session was ended (25P03, 25P04), or the server is a
# replica by now (25006).
OUTAGE_STATES = frozenset({"25P03", "25P04", "25006"})
# And of an OperationalError that is the rows' fault: 54 is "program limit exceeded", a value too large for an index.
LIMIT_STATES = "54"
# Of sqlite3.OperationalError: BUSY, LOCKED, IOERR, FULL, CANTOPEN. The others are about the statement.
SQLITE_OUTAGES = frozenset({5, 6, 10, 13, 14})
# Errors of the operating system that are an answer about a path, and no outage.
PATH_ERRORS = (FileExistsError, IsADirectoryError, NotADirectoryError)
# Statuses below 500 of an HTTP server that is not to be had now.
BUSY_STATUSES = frozenset({408, 425, 429})
# An exception wraps another, which wraps another: as deep as this is looked.
DEPTH = 10


def is_outage(error: BaseException, more: Callable[[BaseException], bool] = lambda _: False) -> bool:
    """Whether an error of a handler, or what it was explicitly raised from, is that of a connection.

    ``more``: see `predicate_of`. Of a group of exceptions all have to be.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(is_outage(one, more) for one in error.exceptions)
    return any(more(one) or _is_outage(one) for one in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it wraps: SQLAlchemy and Django keep the driver's error as the cause."""
    current: BaseException | None = error
    for _ in range(DEPTH):
        if current is None:
            return
        yield current
        current = current.__cause__


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, Unavailable | CommitUnknown | TimeoutError):
        return True
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    if isinstance(error, OSError):
        # io.UnsupportedOperation, and requests' of an invalid URL, are of a call that was wrong; of ssl's the peer is.
        mistaken = isinstance(error, ValueError) and ("ssl", "SSLError") not in names
        # urllib's HTTPError is an OSError, and so are all of requests': an answer of a server that is there.
        status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
        busy = not isinstance(status, int) or status >= 500 or status in BUSY_STATUSES
        return not mistaken and not isinstance(error, PATH_ERRORS) and busy
    if getattr(error, "connection_invalidated", False):  # SQLAlchemy has thrown the connection away
        return True
    if ("sqlite3", "OperationalError") in names:
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in SQLITE_OUTAGES
    state = getattr(error, "sqlstate", None) or ""
    connection = any(package in DRIVERS and name in CONNECTION_ERRORS for package, name in names)
    return state in OUTAGE_STATES or (connection and not state.startswith(LIMIT_STATES))


def predicate_of(transient: Transient) -> Callable[[BaseException], bool]:
    """``transient=`` of connect() as a predicate. Raises ConfigError for something else."""
    wrong: object = transient
    if transient is None or isinstance(transient, type | Iterable):
        kinds = (transient,) if isinstance(transient, type) else tuple(transient or ())
        others = [kind for kind in kinds if not (isinstance(kind, type) and issubclass(kind, BaseException))]
        if not others:
            return lambda error: isinstance(error, kinds)
        wrong = others[0]
    elif callable(transient):

        def predicate(error: BaseException) -> bool:
            try:
                return bool(transient(error))
            except Exception:  # it does not know this error; the error itself is logged
                return False

        return predicate
    raise ConfigError(f"transient={wrong!r}: pass exception classes, or a function of an exception that says True")


class Verdict(enum.Enum):
    """What follows a failed call."""

    OUTAGE = "outage"  # call again, for as long as it takes
    AGAIN = "again"  # call again
    NARROW = "narrow"  # take the facts one by one, to find the one that is at fault
    POISON = "poison"  # this fact cannot be handled


@attrs.define
class Trouble:
    """Calls that fail at one place of a (stream, writer), until one returns."""

    after: int
    since: float  # of the first
    calls: int = 0  # how many failed
    error: str = ""  # the last
    outage: bool = False
    suspected: int = 0  # how many in a row were no outage
    suspected_since: float = 0.0
    pauses: int = 0  # so far at this kind of error
    logged_at: float | None = None


# A handler that keeps failing is logged once with its traceback, then a line at most so often, in seconds.
LOG_EVERY = 30.0


@attrs.define
class RetryPolicy:
    """Decides what follows the failure of a handler, or of the application's function that applies a snapshot.

    ``more``: see `predicate_of`. ``jitter``: gives numbers in [0, 1).
    """

    settings: Settings
    more: Callable[[BaseException], bool] = lambda _: False
    jitter: Callable[[], float] = random.random

    def judge(self, trouble: Trouble, error: BaseException, now: float, *, facts: int, patient: bool = True) -> Verdict:
        """Note a failed call, and say what follows.

        ``facts``: how many the handler was called with. ``patient``: whether outages last as long as they do, and
        poison takes ``poison_after`` seconds; else ``handler_retries`` alone counts.
        """
        outage = patient and is_outage(error, self.more)
        if trouble.calls == 0 or outage != trouble.outage:
            trouble.pauses = trouble.suspected = 0
        trouble.calls, trouble.pauses, trouble.outage = trouble.calls + 1, trouble.pauses + 1, outage
        trouble.error = f"{type(error).__name__}: {error}"
        if outage:
            return Verdict.OUTAGE
        if trouble.suspected == 0:
            trouble.suspected_since = now
        trouble.suspected += 1
        if trouble.suspected <= self.settings.handler_retries:
            return Verdict.AGAIN
        if facts > 1:
            trouble.suspected = trouble.pauses = 0  # the fact that is at fault has yet to be called alone
            return Verdict.NARROW
        late = now - trouble.suspected_since >= self.settings.poison_after
        return Verdict.POISON if late or not patient else Verdict.AGAIN

    def pause(self, trouble: Trouble) -> float:
        """Seconds until the next call, see `pause_after`."""
        return pause_after(trouble.pauses, self.settings, jitter=self.jitter)

    def to_log(self, trouble: Trouble, now: float) -> bool:
        """Whether this failure is to be logged; then it counts as logged."""
        if trouble.logged_at is not None and now - trouble.logged_at < LOG_EVERY:
            return False
        trouble.logged_at = now
        return True


def told(trouble: Trouble, now: float) -> dict[str, Any]:
    """What statistics tell of it, JSON-able."""
    return {
        "for": max(0.0, now - trouble.since),
        "error": trouble.error,
        "calls": trouble.calls,
        "outage": trouble.outage,
    }
