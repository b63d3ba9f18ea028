"""The Celery tasks of docs/examples, in a real prefork worker whose processes are killed; the Redis is its broker."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import psycopg
import pytest
from billiard import current_process
from celery import Celery
from celery.signals import worker_process_init, worker_process_shutdown

import busrep.sync
from busrep import Stream
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests import ROOT

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="Celery's prefork pool needs fork"),
]

EXAMPLES = ROOT / "docs" / "examples"

# Beside the tasks of the example, some that die where it hurts.
DYING = """
from celery_orders import *
import celery_orders, os, signal

def die():
    os.kill(os.getpid(), signal.SIGKILL)

@app.task(acks_late=False)
def pay_and_die_before_publishing(order):
    celery_orders.bus.writing.publishing.publish = lambda now=False: now or die()
    pay(order)

@app.task(acks_late=False)
def die_before_the_commit(order):
    with celery_orders.bus.write(orders) as fact:
        fact.add(OrderChanged(order, "never"))
        die()

@app.task
def die_once(order, path):
    if not os.path.exists(path):
        open(path, "w").close()
        die()
    pay(order)
"""


@contextlib.contextmanager
def worker(folder: Path, environment: dict[str, str], pool: str = "prefork") -> Iterator[None]:
    """A worker, of two processes if it has a pool; it ends well when it is told to."""
    command = [sys.executable, "-m", "celery", "-A", "dying", "worker", "-P", pool, "-c", "2", "-l", "info"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    (folder / "dying.py").write_text(DYING)
    with (folder / "worker.log").open("w+") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
        with process:
            try:
                yield
                process.send_signal(signal.SIGTERM)  # "warm": what is being done is done
                assert process.wait(30) == 0
            except BaseException:
                log.seek(0)
                sys.stderr.write(log.read())
                raise
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@attrs.define
class Shop:
    """A table of what was paid, and what readers of the facts have seen."""

    redis: str
    name: str
    store: str
    seen: list[tuple[str, Any]] = attrs.field(factory=list)
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ, "BUSREP_REDIS": self.redis, "BUSREP_NAME": self.name, "BUSREP_STORE": self.store,
            "CELERY_BROKER": self.redis, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent.parent)]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def wait_for(self, orders: set[int]) -> None:
        """Until each of these orders was seen paid."""
        with self.changed:
            assert self.changed.wait_for(lambda: {row[0] for _, row in self.seen} >= orders, 60), self.seen

    def paid(self) -> set[int]:
        with psycopg.connect(self.store) as connection:
            return {row[0] for row in connection.execute("SELECT number FROM paid")}


@pytest.fixture
def shop(redis_url: str, bus_name: str, postgres_url: str) -> Iterator[Shop]:
    streams = [Stream("orders")]
    store = open_blocking_store(postgres_url, Registry(streams))
    store.init()
    store.close()
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE paid (number int PRIMARY KEY)")
    shop = Shop(redis_url, bus_name, postgres_url)
    with busrep.sync.connect(redis_url, name=bus_name, streams=streams, store=postgres_url, start="earliest") as bus:

        @bus.subscribe(*streams)
        def handle(batch: busrep.Batch[Any]) -> None:
            with shop.changed:
                shop.seen.extend((batch.writer, row) for row in batch.rows)
                shop.changed.notify_all()

        yield shop


@pytest.fixture
def sender(redis_url: str) -> Iterator[Celery]:
    with Celery(broker=redis_url) as sender:
        yield sender
        sender.control.purge()


def test_nothing_is_lost_when_processes_are_killed(shop: Shop, sender: Celery, tmp_path: Path) -> None:
    wanted = {*range(40), 100, 101, 102}
    with worker(tmp_path, shop.environment):
        for number in range(40):
            if number == 10:
                sender.send_task("dying.pay_and_die_before_publishing", [100])
            if number == 20:
                sender.send_task("dying.die_before_the_commit", [666])
            if number == 30:
                sender.send_task("dying.die_once", [101, str(tmp_path / "died")])
            sender.send_task("celery_orders.pay", [number])
            sender.send_task("celery_orders.pay", [number])  # delivered twice: nothing more happens
        sender.send_task("dying.pay_and_die_before_publishing", [102])  # and nobody writes after it
        shop.wait_for(wanted)
    assert sorted(row for _, row in shop.seen) == sorted([number, "paid"] for number in wanted)
    assert {writer for writer, _ in shop.seen} <= {f"{socket.gethostname()}-celery-{index}" for index in (0, 1)}
    assert shop.paid() == wanted


def test_a_worker_without_a_pool_writes_too(shop: Shop, sender: Celery, tmp_path: Path) -> None:
    """Its process has no index: without a default for it no task would have a bus."""
    with worker(tmp_path, shop.environment, "solo"):
        for number in range(5):
            sender.send_task("celery_orders.pay", [number])
        shop.wait_for({*range(5)})
    assert shop.seen == [(f"{socket.gethostname()}-celery-0", [number, "paid"]) for number in range(5)]


def test_the_names_in_the_docs_need_no_pool_either() -> None:
    assert not hasattr(current_process(), "index")
    text = (EXAMPLES.parent / "threads.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "worker_process_init" in code]
    names: list[str] = []
    found: dict[str, Any] = {"shop": SimpleNamespace(connect=lambda writer: names.append(writer)), "socket": socket}
    exec(compile(code, "docs/threads.md", "exec"), found)
    try:
        found["begin"]()
    finally:
        worker_process_init.disconnect(found["begin"])
        worker_process_shutdown.disconnect(found["end"])
    assert names == [f"{socket.gethostname()}-celery-0"]


@pytest.fixture
def late(shop: Shop) -> Iterator[str]:
    """A user of the database that does not exist yet; and the statement that makes it."""
    name = shop.name.replace("-", "_")
    yield f"CREATE ROLE {name} LOGIN SUPERUSER PASSWORD 'late'"
    with psycopg.connect(shop.store, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s", [name])
        connection.execute(f"DROP ROLE IF EXISTS {name}")


def test_a_pool_that_cannot_open_its_bus_tries_again_and_loses_no_task(
    shop: Shop, sender: Celery, tmp_path: Path, late: str
) -> None:
    name = late.split()[2]
    store = re.sub("//[^@]*@", f"//{name}:late@", shop.store)
    with worker(tmp_path, {**shop.environment, "BUSREP_STORE": store}):
        sender.send_task("celery_orders.pay", [1])
        while "no bus" not in (tmp_path / "worker.log").read_text():
            time.sleep(0.1)  # another process says it
        with psycopg.connect(shop.store, autocommit=True) as connection:
            connection.execute(late)
        shop.wait_for({1})
    assert "raised" not in (tmp_path / "worker.log").read_text()


def test_a_worker_without_a_pool_that_cannot_open_its_bus_ends(shop: Shop, sender: Celery, tmp_path: Path) -> None:
    sender.send_task("celery_orders.pay", [1])
    command = [sys.executable, "-m", "celery", "-A", "celery_orders", "worker", "-P", "solo"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**shop.environment, "BUSREP_STORE": re.sub("//[^@]*@", "//nobody@", shop.store)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no bus: PostgreSQL at" in done.stderr
    with worker(tmp_path, shop.environment, "solo"):
        shop.wait_for({1})
