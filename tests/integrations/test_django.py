"""Facts in Django's transactions, on real PostgreSQL and SQLite; and the bus of a process that forks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import django
import psycopg
import pytest
from django.conf import settings

import busrep
from busrep import Settings
from busrep.errors import ConfigError, StatementRefused
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from busrep.sync.writing import SharedWriter
from tests import ROOT
from tests.integrations.test_sqlalchemy import savepoints
from tests.sync.test_writing import STREAMS, Deployment, Order, Wire, orders, payments

if not settings.configured:
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "unused"}},
        SECRET_KEY="test",
        ALLOWED_HOSTS=["testserver"],
        ROOT_URLCONF=__name__,
        USE_TZ=True,
    )
    django.setup()

from django.core.signals import request_finished, request_started
from django.db import DatabaseError, Error, IntegrityError, connection, connections, models, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, TestCase, override_settings
from django.urls import path

from busrep.integrations import django as integration
from busrep.integrations.django import write

pytestmark = pytest.mark.servers

HERE = ROOT
# No heartbeat in the time of a test. The bus still asks after facts in doubt, every 10 ms at first.
SLOW_LOOK = Settings(heartbeat=60.0, redis_timeout=2.0, shutdown_timeout=2.0)


class Sale(models.Model):
    number = models.IntegerField(primary_key=True)
    state = models.TextField()

    class Meta:
        app_label = "shop"


class Part(models.Model):
    """Its foreign key is looked at only at COMMIT."""

    sale = models.ForeignKey(Sale, on_delete=models.DO_NOTHING)

    class Meta:
        app_label = "shop"


def sell(number: int, **options: Any) -> int:
    with write(orders, **options) as fact:
        Sale.objects.create(number=number, state="new")
        fact.add(Order(number, "new"))
    return fact.id


def sales() -> list[int]:
    return list(Sale.objects.order_by("number").values_list("number", flat=True))


def positions() -> int:
    return integration.bus().positions()["orders"]["w1"]


def database_of(store: str) -> dict[str, Any]:
    if store.startswith("sqlite"):
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": store.removeprefix("sqlite:///")}
    url = urlsplit(store)
    return {
        "ENGINE": "django.db.backends.postgresql", "NAME": url.path[1:], "USER": url.username,
        "PASSWORD": unquote(url.password or ""), "HOST": url.hostname, "PORT": url.port,
    }  # fmt: skip


def use(database: dict[str, Any]) -> None:
    """Make it Django's default database."""
    connection.close()
    connections.settings["default"] = connections.configure_settings({"default": database})["default"]
    del connections["default"]


@pytest.fixture(params=["postgresql", "sqlite"])
def shop(request: pytest.FixtureRequest, redis_url: str, bus_name: str) -> Iterator[Deployment]:
    """A deployment whose database is Django's, and whose bus ``settings.BUSREP`` says."""
    store = request.getfixturevalue("postgres_url" if request.param == "postgresql" else "sqlite_url")
    use(database_of(store))
    given = {"redis": redis_url, "name": bus_name, "streams": STREAMS, "writer": "w1", "settings": SLOW_LOOK}
    with override_settings(BUSREP=given):
        integration.create_tables()
        with connection.schema_editor() as editor:
            editor.create_model(Sale)
            editor.create_model(Part)
        if request.param == "sqlite":
            integration.open_bus()
        try:
            yield Deployment(redis_url, bus_name, store)
        finally:
            connection.close()
    assert integration._process.bus is None  # closed when the setting went


@pytest.fixture
def wire(shop: Deployment) -> Iterator[Wire]:
    with Wire(shop.redis, shop.name) as found:
        yield found


def test_a_block_is_a_transaction(shop: Deployment, wire: Wire) -> None:
    first = sell(1)
    assert positions() == first
    with pytest.raises(KeyError), write(orders) as fact:
        Sale.objects.create(number=2, state="never")
        fact.add(Order(2, "never"))
        raise KeyError
    with pytest.raises(IntegrityError):
        sell(1)
    last = sell(3)
    assert positions() == last
    assert wire.tokens(last) == [first, last]
    assert wire.chained()
    assert integration.bus().statistics()["writer"]["in_doubt"] == 0
    assert list(shop.rows()) == [first, last]
    assert sales() == [1, 3]


def test_in_atomic_it_is_published_after_the_outermost_commit(shop: Deployment, wire: Wire) -> None:
    with transaction.atomic():
        Sale.objects.create(number=0, state="before")  # SQLite's one write lock is taken already
        first = sell(1)
        with transaction.atomic():
            second = sell(2)
        assert positions() < first
    assert positions() == second
    assert wire.tokens(second) == [first, second]


def test_a_rollback_of_the_outermost_block_leaves_nothing(shop: Deployment, wire: Wire) -> None:
    with pytest.raises(KeyError), transaction.atomic():
        sell(1)
        raise KeyError
    with transaction.atomic():
        sell(2)
        transaction.set_rollback(True)
    last = sell(3)
    integration.bus().settle()  # Django does not tell of rollbacks
    assert positions() == last
    assert wire.tokens(last) == [last]
    assert sales() == [3]


def test_a_rollback_that_django_does_not_tell_of_is_found_out_about(shop: Deployment, wire: Wire) -> None:
    with pytest.raises(KeyError), transaction.atomic():
        with transaction.atomic():
            sell(1)
        raise KeyError
    last = sell(2)
    assert wire.tokens(last) == [last]


def test_savepoints_take_their_facts_along(shop: Deployment, wire: Wire) -> None:
    with transaction.atomic():
        kept = [sell(1)]
        with pytest.raises(KeyError), transaction.atomic():
            sell(2)
            with transaction.atomic():
                sell(3)
            raise KeyError
        with pytest.raises(KeyError), write(orders) as fact:
            fact.add(Order(4, "never"))
            Sale.objects.create(number=4, state="never")
            raise KeyError
        with pytest.raises(IntegrityError):
            sell(1)
        kept.append(sell(5))
    integration.bus().settle()
    assert positions() == kept[-1]
    assert wire.tokens(kept[-1]) == kept
    assert list(shop.rows()) == kept
    assert sales() == [1, 5]


@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_is_rolled_back_what_is_published_is_what_the_tables_hold(
    shop: Deployment, wire: Wire, seed: int
) -> None:
    dice, numbers = random.Random(seed), itertools.count()
    for _ in range(50):
        with contextlib.suppress(KeyError), transaction.atomic():
            savepoints(dice, lambda: sell(next(numbers)), transaction.atomic)
            if dice.random() < 0.4:
                raise KeyError
    last = sell(next(numbers))
    integration.bus().settle()
    rows = shop.rows()
    assert wire.tokens(last) == list(rows)
    assert wire.chained()
    assert sorted(json.loads(payload)[0] for (payload,) in rows.values()) == sales()


def test_several_streams_and_a_fact_in_a_fact(shop: Deployment, wire: Wire) -> None:
    with write(orders, payments) as fact:
        fact.add(Order(1, "new"))
        fact.add(Order(1, "paid"), stream=payments)
        with write(orders) as inner:
            inner.add(Order(2, "new"))
        ids, last = fact.ids, inner.id
    assert wire.tokens(last) == [ids["orders"], last]
    assert wire.tokens(ids["payments"], "payments") == [ids["payments"]]


def test_a_commit_that_fails_publishes_nothing(shop: Deployment, wire: Wire) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        sell(1)
        Part.objects.create(sale_id=99)
    with pytest.raises(IntegrityError), write(orders) as fact:
        fact.add(Order(2, "never"))
        Part.objects.create(sale_id=99)
    last = sell(3)
    integration.bus().settle()
    assert positions() == last
    assert wire.tokens(last) == [last]
    assert sales() == [3]


def test_a_caught_database_error_is_djangos_matter(shop: Deployment, wire: Wire) -> None:
    with pytest.raises(transaction.TransactionManagementError), transaction.atomic():
        try:
            with transaction.atomic(savepoint=False):
                sell(1)
                Sale.objects.create(number=1, state="twice")
        except IntegrityError:
            pass
        sell(2)
    last = sell(3)
    integration.bus().settle()
    assert wire.tokens(last) == [last]


def test_a_connection_that_dies_takes_its_facts_along(shop: Deployment, wire: Wire) -> None:
    if connection.vendor != "postgresql":
        connection.close()
        last = sell(1)  # a file needs no server
    else:
        with pytest.raises(DatabaseError), transaction.atomic():
            sell(1)
            with psycopg.connect(shop.store, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid])
        connection.close()
        last = sell(2)
        integration.bus().settle()
    assert wire.tokens(last) == [last]


def test_a_connection_that_is_lost_between_two_blocks(shop: Deployment, wire: Wire) -> None:
    """As CONN_MAX_AGE has it: Django makes a new one, for the next request."""
    first = sell(1)
    connection.settings_dict["CONN_MAX_AGE"] = 0
    request_started.send(None)
    request_finished.send(None)
    assert connection.connection is None
    connection.settings_dict["CONN_MAX_AGE"] = None
    second = sell(2)
    if connection.vendor == "postgresql":
        with psycopg.connect(shop.store, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid])
        with pytest.raises(DatabaseError):
            sell(3)
        request_finished.send(None)
    last = sell(4)
    assert wire.tokens(last) == [first, second, last]
    assert sales() == [1, 2, 4]


def test_a_connection_that_is_closed_inside_a_transaction(shop: Deployment, wire: Wire) -> None:
    with contextlib.suppress(Error), transaction.atomic():
        sell(1)
        connection.close()
        with pytest.raises(Error):
            sell(2)
    last = sell(3)
    integration.bus().settle()
    assert wire.tokens(last) == [last]
    assert sales() == [3]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no thread asks after facts in doubt: it may do so between COMMIT and the first hook."""
    allowed, look = threading.Event(), SharedWriter.look
    monkeypatch.setattr(SharedWriter, "look", lambda self: look(self) if allowed.is_set() else 0.01)
    return allowed


@pytest.mark.parametrize("robust", [True, False])
def test_hooks_run_in_order_and_one_that_fails_loses_nothing(
    looks: threading.Event, shop: Deployment, wire: Wire, robust: bool
) -> None:
    seen: list[Any] = []

    def fail() -> None:
        raise KeyError("on_commit")

    with contextlib.suppress(KeyError), transaction.atomic():
        transaction.on_commit(lambda: seen.append(positions()))
        first = sell(1)
        transaction.on_commit(lambda: seen.append(positions()))
        transaction.on_commit(fail, robust=robust)
        second = sell(2)
    assert seen[0] == 0
    if connection.vendor == "postgresql":
        assert seen[1] == second, "published with all of the transaction by the first of its hooks"
    looks.set()
    with contextlib.suppress(KeyError), transaction.atomic():
        transaction.on_commit(fail, robust=robust)
        third = sell(3)
    with contextlib.suppress(KeyError), write(orders) as fact:
        transaction.on_commit(fail, robust=robust)
        Sale.objects.create(number=4, state="new")
        fact.add(Order(4, "new"))
    assert wire.tokens(fact.id) == [first, second, third, fact.id]
    assert sales() == [1, 2, 3, 4]


def test_durable_blocks_and_savepoints_by_hand(shop: Deployment, wire: Wire) -> None:
    with transaction.atomic(durable=True):
        first = sell(1)
        sid = transaction.savepoint()
        sell(2)
        transaction.savepoint_rollback(sid)
        last = sell(3)
    with pytest.raises(RuntimeError, match="durable"), write(orders), transaction.atomic(durable=True):
        raise AssertionError
    with pytest.raises((ConfigError, DatabaseError)), transaction.atomic():
        sid = transaction.savepoint()
        with write(orders) as fact:
            transaction.savepoint_rollback(sid)  # and with it the lock of the claim
            fact.add(Order(4, "never"))
    integration.bus().settle()
    assert positions() >= last
    assert wire.tokens(last) == [first, last]
    assert list(shop.rows()) == [first, last]
    assert sales() == [1, 3]


def test_in_a_testcase_nothing_is_published_and_nothing_hangs(shop: Deployment, wire: Wire) -> None:
    class Case(TestCase):
        def runTest(self) -> None:
            with self.captureOnCommitCallbacks(execute=True) as callbacks:
                sell(1)
                with transaction.atomic():
                    sell(2)
            assert len(callbacks) == 2
            assert sales() == [1, 2]
            assert positions() == 0

    result = unittest.TestResult()
    unittest.TestSuite([Case()]).run(result)
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])
    last = sell(3)
    integration.bus().settle()
    assert wire.tokens(last) == [last]
    assert sales() == [3]


@pytest.fixture
def other(shop: Deployment, tmp_path: Path) -> Iterator[str]:
    """A second database of Django's, which has the tables of busrep too."""
    connections.settings["other"] = connections.configure_settings(
        {"default": {}, "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "other.db")}}
    )["other"]
    connections.settings["same"] = connections["default"].settings_dict.copy()
    store = open_blocking_store(f"sqlite:///{tmp_path / 'other.db'}", Registry(STREAMS))
    store.init()
    store.close()
    yield "other"
    for alias in ("other", "same"):
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


def test_a_fact_is_in_the_database_of_its_bus(shop: Deployment, wire: Wire, other: str) -> None:
    """Elsewhere it would pass for one of another process, or be lost with busrep's tables there."""
    first = sell(1)
    with pytest.raises(ConfigError, match="'default'"), write(orders, using=other) as fact:
        fact.add(Order(2, "never"))
    with pytest.raises(ConfigError, match="'default'"), transaction.atomic(using=other), write(orders, using=other):
        raise AssertionError
    with write(orders, using="same") as fact:
        fact.add(Order(3, "new"))
    assert wire.tokens(fact.id) == [first, fact.id]
    assert integration.bus().statistics()["writer"]["lost"] is False


def test_the_database_of_the_setting_is_that_of_the_facts(shop: Deployment, wire: Wire, other: str) -> None:
    with override_settings(BUSREP=settings.BUSREP | {"database": "other"}):
        with write(orders) as fact:
            fact.add(Order(1, "new"))
        assert wire.tokens(fact.id) == [fact.id]
        with pytest.raises(ConfigError, match="'other'"), write(orders, using="default"):
            raise AssertionError
        with connections["other"].cursor() as cursor:
            assert cursor.execute("SELECT row FROM busrep_facts").fetchall() == [('[1,"new"]',)]
    assert shop.rows() == {}


@pytest.mark.parametrize("begun", [False, True])
def test_without_autocommit_the_caller_commits(shop: Deployment, wire: Wire, begun: bool) -> None:
    connection.set_autocommit(False)
    try:
        if begun:
            Sale.objects.create(number=0, state="new")
            connection.rollback()
            Sale.objects.create(number=0, state="new")
        first = sell(1)
        integration.bus().settle()
        assert positions() < first
        connection.commit()
        integration.bus().settle()
        assert positions() == first
        sell(2)
        connection.rollback()
        last = sell(3)
        connection.commit()
    finally:
        connection.set_autocommit(True)
    integration.bus().settle()
    assert wire.tokens(last) == [first, last]
    assert sales() == [0, 1, 3] if begun else [1, 3]


def test_without_autocommit_too_the_bus_is_opened_before_the_lock_is_taken(shop: Deployment, wire: Wire) -> None:
    integration.close()
    connection.set_autocommit(False)
    try:
        if connection.vendor == "sqlite":
            Sale.objects.create(number=1, state="never")
            with pytest.raises(ConfigError, match="open_bus"):
                sell(2)
            connection.rollback()
        last = sell(3)
        connection.commit()
    finally:
        connection.set_autocommit(True)
    integration.bus().settle()
    assert wire.tokens(last) == [last]
    assert sales() == [3]


def pay(request: HttpRequest, number: int) -> HttpResponse:
    fact = sell(number)
    if number % 2:
        raise KeyError(number)
    return HttpResponse(str(fact))


urlpatterns = [path("pay/<int:number>", pay)]


@override_settings(ROOT_URLCONF=__name__)
def test_atomic_requests(shop: Deployment, wire: Wire) -> None:
    connections.settings["default"]["ATOMIC_REQUESTS"] = True
    client = Client(raise_request_exception=False)
    answers = [client.get(f"/pay/{number}") for number in (2, 3, 4)]
    assert [answer.status_code for answer in answers] == [200, 500, 200]
    ids = [int(answer.content) for answer in answers[::2]]
    integration.bus().settle()
    assert wire.tokens(ids[-1]) == ids
    assert list(shop.rows()) == ids
    assert sales() == [2, 4]


def test_requests_of_many_threads(shop: Deployment, wire: Wire) -> None:
    kept: list[int] = []
    errors: list[BaseException] = []

    def work(base: int) -> None:
        try:
            for number in range(base, base + 6):
                try:
                    with transaction.atomic():
                        fact = sell(number)
                        if not number % 3:
                            raise KeyError
                    kept.append(fact)
                except KeyError:
                    pass
        except BaseException as error:
            errors.append(error)
        finally:
            connection.close()

    workers = [threading.Thread(target=work, args=(100 * base,)) for base in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    integration.bus().settle()
    assert wire.tokens(max(kept)) == sorted(kept)
    assert wire.chained()
    assert list(shop.rows()) == sorted(kept)


def test_on_sqlite_the_bus_is_open_before_the_lock_is_taken(shop: Deployment, wire: Wire) -> None:
    integration.close()
    if connection.vendor == "sqlite":
        with pytest.raises(ConfigError, match="open_bus"), transaction.atomic():
            sell(1)
        integration.open_bus()
    integration.open_bus(signal=None, sender=None)
    with transaction.atomic():
        last = sell(2)
    assert wire.tokens(last) == [last]


def test_a_database_error_in_the_facts_rows_is_busreps_and_in_a_statement_djangos(shop: Deployment, wire: Wire) -> None:
    with pytest.raises(IntegrityError), write(orders) as fact:
        for _ in range(2):
            fact.execute(
                f"INSERT INTO busrep_facts (stream, writer, id, idx, row) VALUES ('orders', 'w1', {fact.id}, 0, '[]')"
            )
    with pytest.raises(StatementRefused, match="UniqueViolation|UNIQUE"), write(orders) as fact:
        fact.add(Order(1, "new"))
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO busrep_facts (stream, writer, id, idx, row) VALUES ('orders', 'w1', %s, 0, '[]')",
                [fact.id],
            )
    last = sell(2)
    assert wire.tokens(last) == [last]


def test_a_bus_that_could_not_be_opened_is_tried_again(
    shop: Deployment, wire: Wire, busrep_link: Callable[..., Any]
) -> None:
    link = busrep_link(shop.redis)
    link.black_hole()
    impatient = Settings(heartbeat=60.0, redis_timeout=1.0, shutdown_timeout=2.0)
    with override_settings(BUSREP=settings.BUSREP | {"redis": link.url, "settings": impatient}):
        with pytest.raises(busrep.Unavailable):
            sell(1)
        link.heal()
        last = sell(2)
        assert wire.tokens(last) == [last]
    assert sales() == [2]


def test_who_is_fenced_hears_of_it(shop: Deployment) -> None:
    assert integration.bus().positions()
    with pytest.raises(busrep.WriterFenced), shop.bus():
        sell(1)
    assert sales() == []


def test_the_setting_says_what_is_wrong(shop: Deployment) -> None:
    for wrong in (None, {}, {"redis": shop.redis, "name": shop.name}):
        with override_settings(BUSREP=wrong), pytest.raises(ConfigError, match="BUSREP = "):
            integration.bus()
    given = {"redis": shop.redis, "name": shop.name, "streams": f"{__name__}.STREAMS", "writer": lambda: "w7"}
    with override_settings(BUSREP=given):
        assert integration.bus() is integration.bus()
        assert sell(1, bus=integration.bus(), using="default") == 1
        assert list(integration.bus().positions()["orders"]) == ["w7"]
    settings.BUSREP["database"] = "nowhere"
    with pytest.raises(Exception, match="nowhere"):
        integration.bus()
    del settings.BUSREP["database"]


@pytest.mark.parametrize(
    ("database", "store"),
    [
        ({"ENGINE": "django.db.backends.sqlite3", "NAME": "/var/shop 1.db"}, "sqlite:////var/shop%201.db"),
        (
            {"ENGINE": "django.db.backends.postgresql", "NAME": "shop", "USER": "a@b", "PASSWORD": "p:/", "HOST": "db",
             "PORT": "5433", "OPTIONS": {"sslmode": "require", "pool": True, "prepare_threshold": 3}},
            "postgresql://a%40b:p%3A%2F@db:5433/shop?sslmode=require",
        ),
        ({"ENGINE": "django.db.backends.postgresql", "NAME": "shop", "HOST": "/run/pg"}, "postgresql://%2Frun%2Fpg/shop"),
        ({"ENGINE": "django.db.backends.postgresql", "OPTIONS": {"service": "x"}}, "postgresql:///?service=x"),
    ],
)  # fmt: skip
def test_the_store_is_djangos_database(database: dict[str, Any], store: str) -> None:
    use(database)
    assert integration._store_of(connection) == store


def test_a_database_in_memory_is_refused() -> None:
    use({"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"})
    with pytest.raises(ConfigError, match="in memory"):
        integration._store_of(connection)


FORKING = """
import os, sys
from django.conf import settings
REDIS, NAME, PATH, WRITER = sys.argv[1:]
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": PATH}},
    BUSREP={"redis": REDIS, "name": NAME, "streams": "tests.sync.test_writing.STREAMS",
            "writer": eval(WRITER)},
)
import django
django.setup()
from busrep.errors import ConfigError
from busrep.integrations.django import bus, create_tables, write
from django.db import connection
from tests.sync.test_writing import Order, orders

def sell(number):
    with write(orders) as fact:
        fact.add(Order(number, "new"))
    print(bus().writer.partition("-")[0], fact.id, flush=True)

def in_child(number):
    pid = os.fork()
    if not pid:
        try:
            connection.close()
            sell(number)
        except ConfigError as error:
            print("refused:", "after the fork" in str(error), flush=True)
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

create_tables()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is not of this system")
@pytest.mark.parametrize(
    ("writer", "program", "printed"),
    [
        ("lambda: f'w-{os.getpid()}'", "in_child(1); in_child(2); sell(3)", ["w 1", "w 2", "w 3"]),
        ("lambda: f'w-{os.getpid()}'", "sell(1); connection.close(); in_child(2); sell(3)", ["w 1", "w 2", "w 3"]),
        ("'w'", "bus(); in_child(1); sell(2)", ["w 1", "w 2"]),
        ("'w'", "sell(1); connection.close(); in_child(2); sell(3)", ["w 1", "refused: True", "w 2"]),
    ],
)
def test_each_process_has_a_bus_of_its_own(
    redis_url: str, bus_name: str, tmp_path: Path, writer: str, program: str, printed: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c",
         textwrap.dedent(FORKING) + program, redis_url, bus_name, str(tmp_path / "shop.db"), writer],
        cwd=HERE, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout.splitlines(), done.stderr) == (printed, "")


def test_close_lets_the_next_use_open_another(shop: Deployment, wire: Wire) -> None:
    first = sell(1)
    before = integration.bus()
    integration.close()
    integration.close()
    last = sell(2)
    assert integration.bus() is not before
    assert wire.tokens(last) == [first, last]


def test_the_api_needs_its_framework(busrep_link: Callable[..., Any]) -> None:
    program = (
        "import sys; sys.modules['django'] = sys.modules['sqlalchemy'] = None\n"
        "from busrep.errors import MissingExtra\n"
        "for name in ('django', 'sqlalchemy'):\n"
        "    try:\n        __import__(f'busrep.integrations.{name}')\n"
        "    except MissingExtra as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, timeout=60)
    assert [line.rpartition("pip install ")[2] for line in done.stdout.splitlines()] == [
        "'busrep[django]'", "'busrep[sqlalchemy]'",
    ], done.stderr  # fmt: skip
