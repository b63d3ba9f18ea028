"""A query that writes, without Spark: its tasks and its driver are called as Spark calls them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from busrep import Stream
from busrep.core.catchup import FetchUpdates
from busrep.spark import secrets, sink, sink_commit
from busrep.spark.sink import Staged, StreamSink, Task
from busrep.stores.blocking import BlockingStore, open_blocking_store
from busrep.stores.plans import Plan, Sql, complete
from busrep.streams import Registry
from tests.shop import QUICK

WRITER = "spark"


# The password goes another way: a fixture of the tests sets BUSREP_STORE_PASSWORD.
def without_password(url: str) -> str:
    """The URL as an option of Spark's."""
    return secrets.split(url)[0]


orders: Stream[Any] = Stream("orders")


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with the stream orders."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    open_blocking_store(found, Registry([orders])).init()
    monkeypatch.setenv("BUSREP_STORE_PASSWORD", secrets.split(found)[1] or "")
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that is tried again does not wait for long."""
    monkeypatch.setattr(sink_commit, "Settings", lambda: QUICK)


def staged(url: str) -> int:
    found: int = ask(url, "SELECT count(*) FROM busrep_staged")
    return found


ROW = StructType().add("row", "string")


def texts(rows: Sequence[object]) -> pa.RecordBatch:
    """Generic rows."""
    return pa.record_batch([pa.array([None if row is None else f"[{row}]" for row in rows], pa.string())], ["row"])


@attrs.define
class Query:
    """A streaming query since its last start."""

    url: str
    run: str = "run1"
    checkpoint: str = "c1"
    options: Mapping[str, str] = attrs.field(factory=dict)
    schema: StructType = ROW

    def sink(self, part: int, number: int) -> StreamSink:
        given = {"store": without_password(self.url), "stream": "orders", "writer": WRITER, **self.options}
        made = sink.stream_writer(given, self.schema, False)
        assert isinstance(made, StreamSink)
        made._task = lambda: Task(part, number, self.checkpoint, self.run)  # type: ignore[method-assign]
        return made

    def task(self, number: int, part: int, *batches: Any) -> Staged:
        """A task, run once."""
        return self.sink(part, number).write(iter(batches))

    def stage(self, number: int, parts: Sequence[Sequence[object]]) -> list[Staged]:
        """All tasks of a batch."""
        return [self.task(number, at, texts(rows)) for at, rows in enumerate(parts)]

    def commit(self, number: int, staged: Sequence[Staged]) -> None:
        self.sink(0, number).commit(list(staged), number)

    def batch(self, number: int, parts: Sequence[Sequence[object]]) -> None:
        """A batch, without trouble."""
        self.commit(number, self.stage(number, parts))

    def restarted(self) -> Query:
        return attrs.evolve(self, run=self.run + "'")


def written(url: str, numbers: Sequence[int], **options: str) -> sink.BatchSink:
    """A job of one batch, of a row a task; it was pickled as Spark pickles it."""
    made = sink.batch_writer(
        {"store": without_password(url), "stream": "orders", "writer": WRITER, **options}, ROW, False
    )
    assert isinstance(made, sink.BatchSink)
    messages = []
    for at, number in enumerate(numbers):
        task = pickle.loads(pickle.dumps(made))
        own = attrs.evolve(task._task(), part=at)
        task._task = lambda own=own: own
        messages.append(task.write(iter([texts([number])])))
    driver: sink.BatchSink = pickle.loads(pickle.dumps(made))
    driver.commit(messages)
    return driver


def opened(url: str, stream: Stream[Any] | None = None) -> BlockingStore:
    store = open_blocking_store(url, Registry([stream or Stream("orders")]))
    store.open()
    return store


def facts(url: str, writer: str = WRITER, stream: Stream[Any] | None = None) -> list[bytes]:
    """The payloads of a writer's facts, in order; one row a fact, their IDs rise, and their position is proven."""
    stream = stream or Stream("orders")
    store = opened(url, stream)
    try:
        page = store.fetch(FetchUpdates(stream.name, writer, 0, 2**62, limit=10**7))
        assert list(page.tokens) == sorted(set(page.tokens))
        proven = [known.position for known in store.known() if (known.stream, known.writer) == (stream.name, writer)]
        assert not page.tokens or proven[0] >= page.tokens[-1]
        return list(page.payloads)
    finally:
        store.close()


def rows(url: str) -> list[Any]:
    """What stands in the rows that `texts` made."""
    return [int(payload.strip(b"[]")) for payload in facts(url)]


def ask(url: str, text: str) -> Any:
    """The answer to a question to the database, one value."""
    store = opened(url)

    def plan() -> Plan[Any]:
        return (yield Sql(text))[0]

    try:
        found: Any = store.wrapped
        answer = complete(found.write(plan()))
        return answer[0][0] if answer else None
    finally:
        store.close()
