"""The server is killed, as a machine's crash does it, between staging and COMMIT, and behind COMMIT.

What is staged is in an UNLOGGED table, which a crash empties: that must be found, and never lost without a word.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import busrep
from busrep.errors import StagedRowsGone, Unavailable
from busrep.spark.staging_store import StagingStore
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from busrep.testing.servers import PostgresServer, start_postgres
from tests.shop import QUICK

pytest.importorskip("pyspark")

from busrep.spark import secrets, sink_commit
from tests.pipeline.sinks import Query, ask, rows, texts

pytestmark = [
    pytest.mark.servers,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the server's processes in /proc"),
]

orders: busrep.Stream[Any] = busrep.Stream("orders")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresServer]:
    """A server of this test's own: it is killed."""
    with start_postgres() as server:
        open_blocking_store(server.url, Registry([orders])).init()
        monkeypatch.setenv("BUSREP_STORE_PASSWORD", secrets.split(server.url)[1] or "")
        monkeypatch.setattr(sink_commit, "Settings", lambda: QUICK)
        yield server


def crash(server: PostgresServer) -> None:
    """SIGKILL for all of its processes, and a new start."""
    postmaster = server.process.pid
    os.kill(postmaster, signal.SIGSTOP)  # it starts no more of them
    family = [postmaster]
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(entry.read_text().rpartition(")")[2].split()[1]) == postmaster:
                family.append(int(entry.parent.name))
    with contextlib.ExitStack() as stack:
        ends = []
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                ends.append(os.pidfd_open(pid))
                stack.callback(os.close, ends[-1])
                os.kill(pid, signal.SIGKILL)
        for end in ends:  # PostgreSQL refuses to start while one of them still has its shared memory
            assert select.select([end], [], [], 30)[0]
    server.end(signal.SIGKILL)
    server.start()
    assert "was interrupted" in server.log  # so the server calls it as well


def test_staged_rows_that_a_crash_took(server: PostgresServer) -> None:
    query = Query(server.url)
    query.batch(0, [[1], [2]])
    crash(server)
    assert rows(server.url) == [1, 2]
    messages = query.stage(1, [[3], [4, 5]])
    crash(server)
    with pytest.raises(StagedRowsGone, match="0 of 3 staged rows are there. Did the database server crash"):
        query.commit(1, messages)
    messages = query.stage(1, [[3]])
    crash(server)
    messages += [query.task(1, 1, texts([4, 5]))]
    with pytest.raises(StagedRowsGone, match="2 of 3 staged rows"):
        query.commit(1, messages)
    assert rows(server.url) == [1, 2]
    query.restarted().batch(1, [[3], [4, 5]])
    assert rows(server.url) == [1, 2, 3, 4, 5]
    assert ask(server.url, "SELECT count(*) FROM busrep_staged") == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_round_the_commit(server: PostgresServer, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it the batch is found done, in the same process. Before it the rows are gone, and the query fails."""
    query, real, calls = Query(server.url), StagingStore.commit, []
    query.batch(0, [[1]])

    def commit(self: StagingStore, *args: Any) -> Any:
        if calls:
            return real(self, *args)
        calls.append(args)
        if when == "after":
            real(self, *args)
        crash(server)
        raise Unavailable("PostgreSQL", "crashed")

    messages = query.stage(1, [[2], [3]])
    monkeypatch.setattr(StagingStore, "commit", commit)
    if when == "before":
        with pytest.raises(StagedRowsGone):
            query.commit(1, messages)
        query = query.restarted()
        messages = query.stage(1, [[2], [3]])
    query.commit(1, messages)
    query.batch(2, [[4]])
    assert rows(server.url) == [1, 2, 3, 4]
