"""What an error of a handler means, and what follows: the classification and the policy, without any I/O."""

from __future__ import annotations

import asyncio
import email.message
import io
import sqlite3
import ssl
import subprocess
import sys
import urllib.error
from typing import Any

import attrs
import django.db.utils
import psycopg
import psycopg_pool
import pytest
import redis
import sqlalchemy.exc

import busrep
from busrep.core.failures import LOG_EVERY, RetryPolicy, Trouble, Verdict, is_outage, predicate_of
from busrep.errors import CommitUnknown, ConfigError, HandlerFailed, ReaderMoved, RowError, Unavailable, WaitTimeout
from busrep.settings import Settings


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def sqlite_error(code: int, text: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


def http_error(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://localhost", status, "", email.message.Message(), None)


@attrs.frozen
class Answer:
    status_code: int


class RequestsHTTPError(OSError):
    """As requests' HTTPError: an OSError that has the answer."""

    def __init__(self, status: int) -> None:
        self.response = Answer(status)


class OwnError(Exception):
    pass


class OwnOperationalError(Exception):
    """Of the application, which happens to call it so."""


OwnOperationalError.__name__ = "OperationalError"
LOST = psycopg.OperationalError("the connection is closed")

OUTAGES = [
    LOST,
    psycopg.InterfaceError("the cursor is closed"),
    psycopg.errors.AdminShutdown("terminating connection"),
    psycopg.errors.CannotConnectNow("starting up"),
    psycopg.errors.DeadlockDetected("deadlock"),
    psycopg.errors.IdleInTransactionSessionTimeout("ended"),
    psycopg.errors.ReadOnlySqlTransaction("a replica by now"),
    psycopg_pool.PoolTimeout("none came"),
    ConnectionRefusedError(111, "refused"),
    BrokenPipeError(32, "pipe"),
    OSError(28, "no space left"),
    ssl.SSLCertVerificationError(1, "certificate has expired"),
    TimeoutError(),
    TimeoutError(),
    Unavailable("PostgreSQL", "away"),
    CommitUnknown(1, LOST),
    WaitTimeout("orders", "w", 2, 1, 5.0),
    redis.ConnectionError("away"),
    redis.BusyLoadingError("loading"),
    redis.TimeoutError("late"),
    sqlite_error(sqlite3.SQLITE_BUSY, "database is locked"),
    sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT, "database is locked"),
    sqlite_error(sqlite3.SQLITE_FULL, "disk is full"),
    raised_from(sqlalchemy.exc.OperationalError("SELECT 1", None, LOST), LOST),
    sqlalchemy.exc.DBAPIError("SELECT 1", None, OwnError(), connection_invalidated=True),
    raised_from(django.db.utils.OperationalError("away"), LOST),
    raised_from(OwnError("the stock is not to be had"), raised_from(OwnError(), TimeoutError())),
    http_error(503),
    http_error(429),
    RequestsHTTPError(502),
    ExceptionGroup("a task group", [LOST, TimeoutError()]),
]

SUSPICIONS = [
    ValueError("a row"),
    OwnError(),
    OwnOperationalError("not a driver's"),
    psycopg.errors.UniqueViolation("there already"),
    psycopg.errors.InvalidTextRepresentation("not a number"),
    psycopg.errors.ProgramLimitExceeded("index row size 2816 exceeds maximum 2704"),
    psycopg.ProgrammingError("no result"),
    sqlite_error(sqlite3.SQLITE_ERROR, "no such table: bills"),
    sqlite3.IntegrityError("there already"),
    raised_from(django.db.utils.OperationalError("no such table"), sqlite_error(1, "no such table")),
    raised_from(sqlalchemy.exc.OperationalError("SELECT", None, OwnError()), sqlite_error(1, "no such table")),
    redis.ResponseError("WRONGTYPE"),
    ReaderMoved("r", "orders", "w", 1),
    HandlerFailed("orders", "w", 1, LOST),
    RowError("orders", "number", "not an int"),
    ConfigError("a name is missing"),
    FileExistsError(17, "there"),
    IsADirectoryError(21, "a directory"),
    io.UnsupportedOperation("not readable"),
    http_error(422),
    RequestsHTTPError(404),
    ExceptionGroup("a task group", [LOST, ValueError("a row")]),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize("error", OUTAGES, ids=repr)
def test_errors_of_connections_are_an_outage(error: BaseException) -> None:
    assert is_outage(error)


@pytest.mark.parametrize("error", SUSPICIONS, ids=repr)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_outage(error)


def test_a_context_that_was_not_given_as_the_cause_says_nothing() -> None:
    error = ValueError("while cleaning up")
    error.__context__ = TimeoutError()
    assert not is_outage(error)


def test_causes_that_go_round_in_a_circle_end() -> None:
    one, other = OwnError(), OwnError()
    one.__cause__, other.__cause__ = other, one
    assert not is_outage(one)


@pytest.mark.parametrize("transient", [OwnError, (OwnError, KeyError), [OwnError], lambda e: isinstance(e, OwnError)])
def test_the_application_adds_its_own(transient: Any) -> None:
    more = predicate_of(transient)
    assert is_outage(OwnError(), more)
    assert is_outage(raised_from(ValueError(), OwnError()), more)
    assert is_outage(LOST, more)
    assert not is_outage(ValueError(), more)


def test_a_predicate_that_fails_knows_nothing_of_the_error() -> None:
    more = predicate_of(lambda error: error.status == 503)  # type: ignore[attr-defined]
    assert not is_outage(ValueError(), more)
    assert is_outage(LOST, more)


@pytest.mark.parametrize("transient", [1, [1], ("OwnError",), int])
def test_something_else_is_refused(transient: Any) -> None:
    with pytest.raises(ConfigError, match="transient="):
        predicate_of(transient)


def test_connect_refuses_it_too() -> None:
    with pytest.raises(ConfigError, match="transient="):
        busrep.connect("redis://localhost", name="shop", transient=3)  # type: ignore[arg-type]


def test_no_driver_is_imported_for_it() -> None:
    code = (
        "import sys; from busrep.core.failures import is_outage; assert is_outage(TimeoutError());"
        "assert not {'psycopg', 'sqlite3', 'sqlalchemy', 'django'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the policy

QUICK = Settings(retry_min=1.0, retry_max=5.0, handler_retries=2, poison_after=60.0)


def policy(**changes: Any) -> RetryPolicy:
    return RetryPolicy(attrs.evolve(QUICK, **changes), jitter=lambda: 1.0)


def test_an_outage_lasts_as_long_as_it_lasts() -> None:
    judge, trouble = policy(), Trouble(7, 0.0)
    for hour in range(1000):
        assert judge.judge(trouble, LOST, 3600.0 * hour, facts=1) is Verdict.OUTAGE
    assert judge.pause(trouble) == 5.0
    assert (trouble.calls, trouble.since, trouble.outage) == (1000, 0.0, True)


def test_a_fact_is_poison_after_the_retries_and_the_time() -> None:
    judge, trouble = policy(), Trouble(7, 100.0)
    verdicts = [judge.judge(trouble, ValueError(), now, facts=1) for now in (100.0, 101.0, 110.0, 159.9, 160.0)]
    assert verdicts == [Verdict.AGAIN] * 4 + [Verdict.POISON]


def test_the_time_alone_is_not_enough() -> None:
    judge, trouble = policy(), Trouble(7, 0.0)
    verdicts = [judge.judge(trouble, ValueError(), now, facts=1) for now in (0.0, 1000.0, 1001.0)]
    assert verdicts == [Verdict.AGAIN, Verdict.AGAIN, Verdict.POISON]


def test_a_batch_is_taken_apart_at_once_and_its_facts_have_a_time_of_their_own() -> None:
    judge, trouble = policy(), Trouble(7, 0.0)
    assert [judge.judge(trouble, ValueError(), now, facts=9) for now in (0.0, 1.0, 2.0)][-1] is Verdict.NARROW
    assert judge.judge(trouble, ValueError(), 70.0, facts=1) is Verdict.AGAIN
    assert judge.judge(trouble, ValueError(), 71.0, facts=1) is Verdict.AGAIN
    assert judge.judge(trouble, ValueError(), 129.0, facts=1) is Verdict.AGAIN
    assert judge.judge(trouble, ValueError(), 130.0, facts=1) is Verdict.POISON


def test_an_outage_between_them_begins_the_count_anew() -> None:
    judge, trouble = policy(), Trouble(7, 0.0)
    for now in (0.0, 30.0):
        judge.judge(trouble, ValueError(), now, facts=1)
    assert judge.judge(trouble, LOST, 50.0, facts=1) is Verdict.OUTAGE
    assert [judge.judge(trouble, ValueError(), now, facts=1) for now in (70.0, 71.0, 72.0)] == [Verdict.AGAIN] * 3
    assert judge.judge(trouble, ValueError(), 130.0, facts=1) is Verdict.POISON


def test_an_impatient_one_counts_the_retries_alone() -> None:
    judge, trouble = policy(), Trouble(7, 0.0)
    verdicts = [judge.judge(trouble, error, 0.0, facts=1, patient=False) for error in (LOST, LOST, ValueError())]
    assert verdicts == [Verdict.AGAIN, Verdict.AGAIN, Verdict.POISON]


def test_pauses_double_up_to_the_longest_and_are_jittered() -> None:
    judge, trouble, pauses = policy(), Trouble(7, 0.0), []
    for now in range(5):
        judge.judge(trouble, LOST, float(now), facts=1)
        pauses.append(judge.pause(trouble))
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    judge.judge(trouble, ValueError(), 6.0, facts=1)
    assert judge.pause(trouble) == 1.0
    assert RetryPolicy(QUICK, jitter=lambda: 0.0).pause(trouble) == 0.5


def test_one_line_then_one_now_and_then() -> None:
    judge, trouble = policy(), Trouble(7, 0.0)
    told = [now for now in range(0, 100, 5) if judge.to_log(trouble, float(now))]
    assert told == [0, int(LOG_EVERY), 2 * int(LOG_EVERY), 3 * int(LOG_EVERY)]
