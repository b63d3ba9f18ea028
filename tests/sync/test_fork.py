"""Processes that fork, and processes that end: each scenario in an interpreter of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from busrep.core.catchup import FetchUpdates
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests import ROOT
from tests.sync.test_writing import STREAMS, Wire

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is not of this system"),
]

HERE = ROOT

PREAMBLE = """
import gc, logging, multiprocessing, os, signal, sys, threading, time
import busrep, busrep.sync
from busrep.errors import ConfigError
from tests.sync.test_writing import Order, QUICK, STREAMS, orders, write

logging.getLogger("psycopg").setLevel(logging.ERROR)  # it warns of a beat that a busy machine cuts off
REDIS, NAME, STORE = sys.argv[1:4]

def bus(writer="w1", **options):
    given = dict(name=NAME, streams=STREAMS, store=STORE, settings=QUICK, writer=writer) | options
    return busrep.sync.connect(given.pop("redis", REDIS), **given)

def in_child(work):
    # Ends as a process does: buffers flushed, atexit run, everything collected.
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except SystemExit:  # a child of its own
        raise
    except BaseException as error:
        print(f"child failed: {type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    sys.exit(0)

def wait(pid):
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child failed"

def refused(call, *pids):
    try:
        call()
    except ConfigError as error:
        assert all(str(pid) in str(error) for pid in pids) and "after the fork" in str(error), error
    else:
        raise AssertionError(f"{call} went through")
"""


class Scenario:
    def __init__(self, redis: str, name: str, store: str) -> None:
        self.arguments = [redis, name, store]
        with self.table():
            pass

    def table(self):  # type: ignore[no-untyped-def]
        store = open_blocking_store(self.arguments[2], Registry(STREAMS))
        store.init()
        store.open()
        return _closing(store)

    def start(self, program: str) -> subprocess.Popen[str]:
        source = PREAMBLE + textwrap.dedent(program)
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source, *self.arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=HERE, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    @staticmethod
    def kill(process: subprocess.Popen[str]) -> None:
        """With the processes that it forked: they would go on, and hold its pipes open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def run(self, program: str) -> list[str]:
        """What it prints; it must end by itself, in good order, and complain of nothing."""
        with self.start(program) as process:
            try:
                out, complaints = process.communicate(timeout=100)
            finally:
                self.kill(process)
        assert (process.returncode, complaints) == (0, ""), out + complaints
        return out.splitlines()

    def tokens(self, writer: str = "w1") -> list[int]:
        with self.table() as store:
            return list(store.fetch(FetchUpdates("orders", writer, 0, 10**6, 10**6)).tokens)


class _closing:
    def __init__(self, store: object) -> None:
        self.store = store

    def __enter__(self):  # type: ignore[no-untyped-def]
        return self.store

    def __exit__(self, *_: object) -> None:
        self.store.close()  # type: ignore[attr-defined]


@pytest.fixture
def scenario(redis_url: str, bus_name: str, postgres_url: str) -> Scenario:
    return Scenario(redis_url, bus_name, postgres_url)


ALL_CALLS = """
    calls = [
        bus.open, bus.__enter__, lambda: bus.write(orders), lambda: bus.publish(orders, [Order(1, "x")]), bus.settle,
        lambda: bus.subscribe(orders), lambda: bus.follow(orders), lambda: bus.wait_for(orders, "w2", 1), bus.positions,
        lambda: bus.linear_position(orders), lambda: bus.on_reset(orders), lambda: bus.on_missed(orders),
        lambda: bus.send(busrep.RemoteServerUp("a")), lambda: bus.on(busrep.RemoteServerUp),
        lambda: bus.resume(orders, "w2"), bus.statistics,
    ]
"""


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_an_open_bus_is_the_parent_s_alone(scenario: Scenario, how: str) -> None:
    """And the parent notices nothing: the same sessions, the same subscription, whatever the child does and drops."""
    scenario.run(
        f"""
        calm = busrep.Settings(heartbeat=0.4)
        bus, parent = bus(settings=calm), os.getpid()
        seen = []
        bus.open()
        bus.subscribe(orders)(lambda batch: seen.extend(row.number for row in batch.rows))
        following = bus.follow(STREAMS[1])
        made = bus.write(orders)  # and not begun
        first = write(bus, 1)

        def sessions():
            pool = bus.store.wrapped.questions
            with pool._lock:
                return {{one.info.backend_pid for one in [*pool._idle, *pool._out]}}

        before = sessions()

        def child():
            {textwrap.indent(textwrap.dedent(ALL_CALLS), " " * 12).strip()}
            for call in calls + [lambda: next(following), made.__enter__]:
                refused(call, parent, os.getpid())
            bus.close()  # which does nothing
            del calls
            bus.publisher = bus.store = bus.writing = bus.reading = bus.caching = None
            bus.chores = []
            gc.collect()

        if "{how}" == "os.fork":
            wait(in_child(child))
        else:
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            process.join()
            assert process.exitcode == 0
        assert write(bus, 2) == first + 1
        with busrep.sync.connect(REDIS, name=NAME, streams=STREAMS, store=STORE, settings=calm, writer="w2") as other:
            bus.wait_for(orders, "w2", write(other, 3))
            time.sleep(7 * calm.heartbeat)  # longer than a dead link goes unnoticed
            statistics = bus.statistics()
        assert seen == [3]
        assert before <= sessions(), (before, sessions())
        assert statistics["link"]["publisher_connects"] == 1, statistics
        assert statistics["link"]["reading"]["reconnects"] == 0, statistics
        bus.close()
        """
    )
    assert scenario.tokens() == [1, 2]


def test_a_fork_in_the_middle_of_a_fact(scenario: Scenario) -> None:
    """The transaction is the parent's: the child can neither commit nor roll it back."""
    scenario.run(
        """
        with bus() as bus:
            def child():
                refused(lambda: fact.execute("SELECT 1"), os.getpid())
                refused(lambda: fact.connection, os.getpid())
                refused(lambda: fact.__exit__(None, None, None), os.getpid())
                fact.__exit__(KeyError, KeyError(), None)  # nothing, and the caller's exception goes on

            with bus.write(orders) as fact:
                fact.add(Order(1, "parent"))
                wait(in_child(child))
                fact.execute("SELECT 1")
            assert bus.positions()["orders"]["w1"] == fact.id
        """
    )
    assert scenario.tokens() == [1]


def test_prefork_with_a_bus_that_was_not_open_yet(scenario: Scenario) -> None:
    """As gunicorn and Celery do: the module is loaded, buses are made, and then come the workers."""
    with Wire(*scenario.arguments[:2]) as wire:
        out = scenario.run(
            """
            names = [f"web-{number}" for number in range(3)]
            buses = [bus(name, beats=number > 0) for number, name in enumerate(names)]

            def work(number):
                def child():
                    for at in range(5):
                        write(buses[number], at)
                    # no close(): the interpreter's end does it
                return child

            for pid in [in_child(work(number)) for number in range(3)]:
                wait(pid)
            print(sorted(thread.name for thread in threading.enumerate()))
            """
        )
        assert out == ["['MainThread']"]
        for number in range(3):
            tokens = scenario.tokens(f"web-{number}")
            assert len(tokens) == 5
            assert wire.tokens(tokens[-1], writer=f"web-{number}") == tokens


def test_a_worker_that_forks_its_own_children_goes_on(scenario: Scenario) -> None:
    """A grandchild that makes a bus of its own, under its own name, beside the one it inherited."""
    scenario.run(
        """
        first = bus("parent")
        write(first, 1)

        def child():
            refused(lambda: write(first, 2), os.getpid())
            with bus("child") as own:
                write(own, 1)
                wait(in_child(lambda: refused(lambda: write(own, 2), os.getpid())))
                write(own, 2)

        wait(in_child(child))
        write(first, 2)
        """
    )
    assert len(scenario.tokens("parent")) == len(scenario.tokens("child")) == 2


def test_on_sqlite_the_parent_s_file_survives_its_children(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    scenario = Scenario(redis_url, bus_name, sqlite_url)
    scenario.run(
        """
        bus = bus()
        write(bus, 1)
        for _ in range(3):
            wait(in_child(lambda: refused(lambda: write(bus, 2), os.getpid())))
            write(bus, 3)
        """
    )
    assert scenario.tokens() == [1, 2, 3, 4]


# -- the end of an interpreter --------------------------------------------------------------------------------


@pytest.mark.parametrize("beats", [True, False], ids=["beats", "no beats"])
def test_an_interpreter_that_ends_publishes_what_was_committed(scenario: Scenario, beats: bool) -> None:
    with Wire(*scenario.arguments[:2]) as wire:
        scenario.run(
            f"""
            bus = bus(beats={beats})
            bus.subscribe(orders)(print)
            ids = bus.publish(orders, [Order(n, "x") for n in range(100)])
            write(bus, 100)
            """
        )
        assert wire.tokens(101) == list(range(1, 102))


def test_an_interpreter_that_ends_saves_what_was_handled(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    scenario = Scenario(redis_url, bus_name, sqlite_url)
    scenario.run(
        """
        reading = bus("w2", reader="r", settings=busrep.Settings(save_every=600.0))
        seen = []
        reading.subscribe(orders)(lambda batch: seen.extend(batch.rows))
        with bus("w1") as writer:
            reading.wait_for(orders, "w1", write(writer, 1, 2, 3))
        assert len(seen) == 3
        """
    )
    with scenario.table() as store:
        assert store.load_reader("r").positions["orders", "w1"] == 3


def test_an_interpreter_ends_though_redis_is_away_and_a_handler_hangs(scenario: Scenario) -> None:
    out = scenario.run(
        """
        import logging
        logging.disable(logging.CRITICAL)  # it complains, as it should
        entered = threading.Event()
        gone = bus(redis="redis://127.0.0.1:1/0", require_redis=False)
        write(gone, 1)
        hanging = bus("w2")

        @hanging.subscribe(orders)
        def handle(batch):
            entered.set()
            threading.Event().wait()

        with bus("w3") as third:
            write(third, 1)
            entered.wait()
        print("end")
        """
    )
    assert out == ["end"]


def test_ctrl_c_ends_a_process_that_writes_and_reads(scenario: Scenario) -> None:
    with Wire(*scenario.arguments[:2]) as wire:
        with scenario.start(
            """
            with bus() as bus:
                print(write(bus, 1), flush=True)
                while True:
                    write(bus, 2)
            """
        ) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                wire.tokens(20)
                process.send_signal(signal.SIGINT)
                _, complaints = process.communicate(timeout=30)
            finally:
                scenario.kill(process)
        # Behind it Python may name a coroutine that the signal kept from its first step.
        assert "KeyboardInterrupt" in complaints.splitlines()
        assert process.returncode == -signal.SIGINT
        tokens = scenario.tokens()
        last = tokens[-1]
        # All that was committed is on the wire, or announced as there to be fetched.

        def told(line: str) -> bool:
            kind, *fields = line.split(" ", 4)
            at = {"POSITION": 3, "RDATA": 2}.get(kind)
            return (
                at is not None and fields[:2] == ["orders", "w1"] and fields[at].isdigit() and int(fields[at]) >= last
            )

        assert wire.read(lambda lines: any(map(told, lines)))


def test_threads_that_outlive_the_main_one_are_told_that_the_bus_is_closed(scenario: Scenario) -> None:
    out = scenario.run(
        """
        from busrep.errors import Closed
        bus = bus()
        write(bus, 1)

        def work():
            threading.main_thread().join()
            try:
                write(bus, 2)
            except Closed:
                print("closed")

        threading.Thread(target=work).start()
        """
    )
    assert out == ["closed"]
    assert scenario.tokens() == [1]


def test_a_process_forked_while_rows_are_decoded_collects_garbage(scenario: Scenario) -> None:
    """The thread that holds the collector off meanwhile is not in the child."""
    scenario.run(
        """
        import attrs
        decoding, go_on = threading.Event(), threading.Event()

        def slowly(value):
            decoding.set()
            assert go_on.wait(60)
            return value

        @attrs.frozen
        class Slow:
            number: int = attrs.field(converter=slowly)

        def child():
            assert gc.isenabled()

        slow = busrep.Stream("slow", Slow)
        thread = threading.Thread(target=slow.decode, args=([b"[1]"],))
        thread.start()
        assert decoding.wait(60)
        assert not gc.isenabled()
        wait(in_child(child))
        go_on.set()
        thread.join()
        assert gc.isenabled()
        gc.disable()  # the application's own will is kept
        wait(in_child(lambda: sys.exit(gc.isenabled())))
        """
    )
