"""The Celery tasks of docs/examples, in a real prefork worker whose processes are killed; the Redis is its broker."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery

import busrep.sync
from busrep import Stream
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="Celery's prefork pool needs fork"),
]

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"

# Beside the tasks of the example, some that die where it hurts.
DYING = """
from celery_orders import *
import celery_orders, os, signal

def die():
    os.kill(os.getpid(), signal.SIGKILL)

@app.task(acks_late=False)
def pay_and_die_before_publishing(order):
    celery_orders.bus._writing.publish = lambda **_: die()
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
def worker(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """A worker with two processes; it ends well when it is told to."""
    command = [sys.executable, "-m", "celery", "-A", "dying", "worker", "-P", "prefork", "-c", "2", "-l", "info"]
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


def test_nothing_is_lost_when_processes_are_killed(
    redis_url: str, bus_name: str, postgres_url: str, tmp_path: Path
) -> None:
    streams = [Stream("orders")]
    store = open_blocking_store(postgres_url, Registry(streams))
    store.init()
    store.close()
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE paid (number int PRIMARY KEY)")
    environment = {
        **os.environ, "BUSREP_REDIS": redis_url, "BUSREP_NAME": bus_name, "BUSREP_STORE": postgres_url,
        "CELERY_BROKER": redis_url, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent.parent)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    seen: list[tuple[str, Any]] = []
    changed = threading.Condition()
    wanted = {*range(40), 100, 101, 102}
    with busrep.sync.connect(
        redis_url, name=bus_name, streams=streams, store=postgres_url, start="earliest"
    ) as reading, Celery(broker=redis_url) as sender:  # fmt: skip

        @reading.subscribe(*streams)
        def handle(batch: busrep.Batch[Any]) -> None:
            with changed:
                seen.extend((batch.writer, row) for row in batch.rows)
                changed.notify_all()

        with worker(tmp_path, environment):
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
            with changed:
                complete = changed.wait_for(lambda: {row[0] for _, row in seen} >= wanted, 60)
            assert complete, seen
        sender.control.purge()
    assert sorted(row for _, row in seen) == sorted([number, "paid"] for number in wanted)
    assert {writer for writer, _ in seen} <= {f"{socket.gethostname()}-celery-{index}" for index in (0, 1)}
    with psycopg.connect(postgres_url) as connection:
        assert {row[0] for row in connection.execute("SELECT number FROM paid")} == wanted
