"""Tasks that write facts: ``celery -A celery_orders worker -P prefork -c 2``."""

import os
import socket
import time

from billiard import current_process
from celery import Celery
from celery.signals import worker_process_init, worker_process_shutdown
from orders import OrderChanged, orders

import busrep.sync

app = Celery("orders", broker=os.environ["CELERY_BROKER"])
# A task counts as done when it has ended: that of a process that is killed runs again, in another one.
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)
bus: busrep.sync.Bus


@worker_process_init.connect
def begin(**_: object) -> None:
    """In each process of the pool, after the fork. Who replaces a killed process has its index, and so its name: what
    that one had committed and not published is published now."""
    global bus
    bus = busrep.sync.connect(
        os.environ["BUSREP_REDIS"],
        name=os.environ["BUSREP_NAME"],
        store=os.environ["BUSREP_STORE"],
        writer=f"{socket.gethostname()}-celery-{getattr(current_process(), 'index', 0)}",  # 0 with -P solo
        streams=[orders],
    )
    try:
        bus.open()
    except busrep.BusrepError as error:
        # Celery would log it, and go on with a process whose tasks fail. So: another process, which tries again.
        time.sleep(1)
        raise SystemExit(f"no bus: {error}") from error


@worker_process_shutdown.connect
def end(**_: object) -> None:
    """Publish what is due; without it the next process of that name does."""
    bus.close()


@app.task
def pay(order: int) -> None:
    """Runs perhaps twice, and pays once: what shows that it was done is in the fact's own transaction."""
    with bus.write(orders) as fact:
        if fact.execute("INSERT INTO paid VALUES (%s) ON CONFLICT DO NOTHING RETURNING number", [order]):
            fact.add(OrderChanged(order, "paid"))
