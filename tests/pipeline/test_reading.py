"""Reading partitions, and the driver's questions, on real databases and without Spark's JVM."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pyarrow
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from busrep.errors import (
    ConfigError,
    EpochChanged,
    PositionsAheadOfTable,
    PositionTooOld,
    RowError,
    SchemaError,
    Unavailable,
)
from busrep.spark import databases, reading
from busrep.spark.columns import generic_shape, typed_shape
from busrep.spark.databases import Question, literal
from busrep.spark.reading import read
from busrep.spark.table import Table, absolute
from busrep.streams import Registry, Stream
from busrep.testing.servers import PostgresServer, start_postgres
from tests.asyncio.bus_conformance import until
from tests.shop import opened_store
from tests.spark.source_facts import NOON, STREAMS, Item, Log, items, opened_log, trade, trades
from tests.support.servers import start_replica

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with start_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def log(request: pytest.FixtureRequest, postgres: PostgresServer, tmp_path: Path) -> Iterator[Log]:
    with opened_log(request.param, postgres, tmp_path) as made:
        yield made


def question(log: Log, **changes: Any) -> Question:
    return attrs.evolve(Question(log.url, "trades", None, generic_shape()), **changes)


def rows_of(asked: Question, epoch: str, spans: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    schema = to_arrow_schema(asked.shape.schema(), timezone="UTC")
    # As an executor has it.
    batches = list(read(pickle.loads(pickle.dumps(asked)), schema, epoch, spans))
    assert all(batch.schema.equals(schema) and batch.num_rows for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


def test_spans_are_read_in_order_and_nothing_else(log: Log) -> None:
    log.fill()
    found = rows_of(question(log), log.epoch, [("w1", 4, 13), ("w2", 0, 9), ("w3", 0, 9)])
    wanted = log.rows("(f.writer = 'w1' AND id > 4 AND id <= 13) OR (f.writer = 'w2' AND id <= 9)")
    assert [tuple(row.values()) for row in found] == wanted
    assert len(wanted) == 10


def test_times_are_compared_as_they_are_read(log: Log) -> None:
    for at in range(4):
        log.committed(log.write("w1", [trade(at)]), NOON + timedelta(microseconds=at))
    log.prove(w1=4)
    micros = int((NOON.timestamp() + 0.5) * 10**6) // 10**6 * 10**6 + 5
    for comparison, tokens in [(">=", [2, 3, 4]), (">", [3, 4]), ("<", [1]), ("<=", [1, 2])]:
        asked = question(log, times=[(comparison, micros + 1)])
        found = rows_of(asked, log.epoch, [("w1", 0, 4)])
        assert [row["token"] for row in found] == tokens
    assert [row["committed_at"] for row in found] == [NOON, NOON + timedelta(microseconds=1)]


def test_fields_become_columns(log: Log) -> None:
    rows = [trade(at) for at in range(1, 4)]
    for row in rows:
        log.write("w1", [row])
    log.write("w1", [b'[9,1,"short",true,"2026-01-31T12:00:00"]', b'[9,1,"a","b","c"]'])
    log.prove(w1=4)
    asked = question(log, shape=typed_shape(trades, metadata=True))
    found = rows_of(asked, log.epoch, [("w1", 0, 3)])
    assert [{**row, "counts": dict(row["counts"])} for row in found] == [
        {
            **attrs.asdict(row, recurse=False), "more": f'{{"deep":[{at}]}}', "_stream": "trades", "_writer": "w1",
            "_token": at, "_index": 0, "_committed_at": log.rows()[at - 1][5],
        }
        for at, row in enumerate(rows, 1)
    ]  # fmt: skip
    with pytest.raises(RowError, match=r"'trades', token 4, field 'open': bool is needed, not str.*\"b\",\"c\""):
        rows_of(asked, log.epoch, [("w1", 0, 4)])


def test_a_table_of_the_applications_is_read_through_the_store(log: Log) -> None:
    for at in range(1, 5):
        log.write("w1", [Item(at, f"é\\{at}", at > 2)] * at, stream=items)
    asked = question(log, stream="items", streams="tests.spark.source_facts:STREAMS")
    found = rows_of(asked, log.epoch, [("w1", 1, 3)])
    assert [(row["token"], row["index"], row["row"], row["committed_at"]) for row in found] == [
        (2, 0, '[2,"\\u00e9\\\\2",false]', None), (2, 1, '[2,"\\u00e9\\\\2",false]', None),
        (3, 0, '[3,"\\u00e9\\\\3",true]', None), (3, 1, '[3,"\\u00e9\\\\3",true]', None),
        (3, 2, '[3,"\\u00e9\\\\3",true]', None),
    ]  # fmt: skip
    typed = attrs.evolve(asked, shape=typed_shape(items, metadata=False))
    assert rows_of(typed, log.epoch, [("w1", 3, 4)]) == [{"number": 4, "name": "é\\4", "sold": True}] * 4


def test_another_log_is_not_read(log: Log) -> None:
    log.fill()
    with pytest.raises(EpochChanged, match="restored or replaced"):
        rows_of(question(log), "0" * 32, [("w1", 0, 9)])
    assert rows_of(question(log, fail_on_data_loss=False), "0" * 32, [("w1", 0, 9)]) == []


def test_a_floor_that_has_passed_is_seen_in_the_snapshot_of_the_rows(log: Log) -> None:
    log.fill()
    log.store.prune(keep=3)
    floor = dict(log.sql("SELECT writer, floor FROM busrep_positions WHERE stream = 'trades'"))["w1"]
    assert floor > 0
    with pytest.raises(PositionTooOld, match=f"below the retention floor {floor}"):
        rows_of(question(log), log.epoch, [("w1", 0, 18)])
    assert rows_of(question(log), log.epoch, [("w1", floor, 18)])
    lenient = rows_of(question(log, fail_on_data_loss=False), log.epoch, [("w1", 0, 18)])
    assert [row["token"] for row in lenient] == [row[2] for row in log.rows("f.writer = 'w1'")]


def test_a_table_that_went_back_between_planning_and_reading_is_an_error(log: Log) -> None:
    log.fill()
    batch = question(log, from_table=True)
    assert rows_of(batch, log.epoch, [("w1", 13, 18)])
    # As a server has it that takes over, and lacks the last transactions.
    log.sql("DELETE FROM busrep_facts WHERE id > 16")
    log.sql("UPDATE busrep_positions SET position = 16 WHERE stream = 'trades'")
    with pytest.raises(PositionsAheadOfTable, match="'w1': the query is at 18, .* proven up to 16 alone"):
        rows_of(batch, log.epoch, [("w1", 13, 18)])
    lenient = rows_of(attrs.evolve(batch, fail_on_data_loss=False), log.epoch, [("w1", 13, 18)])
    assert [row["token"] for row in lenient] == [14, 16]
    # What was heard of on the bus need not be in the table's positions yet: of a stream the driver has looked.
    assert rows_of(question(log), log.epoch, [("w1", 13, 18)])


def test_rows_come_in_pieces_and_who_leaves_off_leaves_nothing_open(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "BATCH_BYTES", 300)
    monkeypatch.setattr(databases, "BATCH_ROWS", 2)
    log.fill()
    asked = question(log)
    schema = to_arrow_schema(asked.shape.schema(), timezone="UTC")
    batches = read(asked, schema, log.epoch, [("w1", 0, 18)])
    first = next(batches)
    assert 0 < first.num_rows < 5
    batches.close()  # type: ignore[attr-defined]
    # Nobody holds the table: it can be dropped.
    log.sql("DROP TABLE busrep_facts")


def test_what_is_known_of_a_database_is_asked_once_and_holds_no_connection(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    with opened_log("postgresql", postgres, tmp_path) as log:
        log.fill()
        epoch, others = log.epoch, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        log.store.close()
        databases._database.cache_clear()
        found = [rows_of(question(log), epoch, [("w1", 4, 13)])]
        with psycopg.connect(log.url, autocommit=True) as connection:
            until(lambda: connection.execute(others).fetchone() == (1,))  # itself
        postgres.stop()
        with pytest.raises(Unavailable):
            rows_of(question(log), epoch, [("w1", 4, 13)])
        postgres.start()
        found.append(rows_of(question(log), epoch, [("w1", 4, 13)]))
        assert found[0] == found[1] != []
        info = databases._database.cache_info()
        assert (info.misses, info.hits) == (1, 2)


def test_what_the_database_says_has_no_password(postgres: PostgresServer, tmp_path: Path) -> None:
    with opened_log("postgresql", postgres, tmp_path) as log:
        asked = question(log)
        assert postgres.password not in repr(asked)
        log.sql("DROP TABLE busrep_facts")
        for wrong in (asked, attrs.evolve(asked, url=log.url.replace(postgres.password, "no" + postgres.password))):
            with pytest.raises((Unavailable, SchemaError)) as caught:
                rows_of(wrong, log.epoch, [("w1", 0, 1)])
            assert postgres.password not in str(caught.value)


def test_a_connection_that_is_lost_between_batches_is_an_error(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "BATCH_BYTES", 1000)
    with opened_log("postgresql", postgres, tmp_path) as log:
        log.claim("w1")
        log.sql(
            "INSERT INTO busrep_facts (stream, writer, id, idx, row) SELECT 'trades', 'w1', n, 0, "
            "'[\"' || repeat('x', 1000) || '\"]' FROM generate_series(1, 20000) n"  # more than sockets hold
        )
        log.prove(w1=20000)
        asked = question(log)
        batches = read(asked, to_arrow_schema(asked.shape.schema(), timezone="UTC"), log.epoch, [("w1", 0, 20000)])
        assert next(batches).num_rows
        # It is ours by its name, and a peer that is gone without a word is noticed as on the driver's connections.
        killed = log.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = 'busrep' AND query LIKE '%COPY%'"
        )
        assert killed == [(True,)]
        said = r"PostgreSQL at .* is not available: .*(server closed|terminating connection)"  # whichever comes first
        with pytest.raises(Unavailable, match=said) as caught:
            list(batches)
        assert postgres.password not in str(caught.value)


def test_readers_of_sqlite_wait_for_a_lock_and_signs_in_names_of_files_work(tmp_path: Path) -> None:
    with opened_log("sqlite", None, tmp_path) as log:
        log.fill()
        (tmp_path / "a%20b.db").symlink_to(tmp_path / "log.db")
        asked = question(log, url=absolute(f"sqlite:///{tmp_path}/a%2520b.db"))
        assert [row["token"] for row in rows_of(asked, log.epoch, [("w1", 0, 2)])] == [1, 2]
        with contextlib.closing(databases.database_of(asked)) as database:
            assert isinstance(database, databases.Sqlite)
            database.begin()
            assert database.ask("PRAGMA busy_timeout") == [(30_000,)]


def test_large_rows_come_in_small_batches(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "BATCH_BYTES", 100_000)
    for at in range(1, 60):
        log.write("w1", [b'["%b"]' % (b"x" * (10 if at < 20 else 20_000))] * (1 + at % 3))
    log.prove(w1=59)
    asked = question(log)
    schema = to_arrow_schema(asked.shape.schema(), timezone="UTC")
    batches = list(read(asked, schema, log.epoch, [("w1", 3, 55)]))
    assert [(row["token"], row["index"]) for batch in batches for row in batch.to_pylist()] == [
        row[2:4] for row in log.rows("id > 3 AND id <= 55")
    ]
    assert max(batch.nbytes for batch in batches) < 8 * 100_000
    narrow = question(log, shape=generic_shape().subset(["token"], "a test"))
    found = rows_of(narrow, log.epoch, [("w1", 3, 55)])
    assert [row["token"] for row in found] == [row[2] for row in log.rows("id > 3 AND id <= 55")]


def test_a_replica_that_lags_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_postgres() as primary, opened_log("postgresql", primary, tmp_path) as log:
        log.write("w1", [trade(1)])
        log.prove(w1=1)
        with start_replica(primary) as replica:
            url = replica.database_url(log.url.rpartition("/")[2])
            with contextlib.closing(Table(url, trades)) as table:
                assert table.log().replica
                assert table.log().positions == {"w1": 1}
            with psycopg.connect(url, autocommit=True) as control:
                control.execute("SELECT pg_wal_replay_pause()")
                log.write("w1", [trade(2)])
                log.prove(w1=2)
                asked = question(log, url=url)
                with monkeypatch.context() as patch:
                    patch.setattr(reading, "REPLICA_WAIT", 0.0)
                    with pytest.raises(Unavailable, match="has been behind"):
                        rows_of(asked, log.epoch, [("w1", 0, 2)])
                with monkeypatch.context() as patch:
                    patch.setattr(reading.time, "sleep", lambda _: control.execute("SELECT pg_wal_replay_resume()"))
                    found = rows_of(asked, log.epoch, [("w1", 0, 2)])
                assert [row["token"] for row in found] == [1, 2]


# -- the driver's questions ------------------------------------------------------------------------------------------


def test_the_table_tells_the_log_and_how_far_rows_go(log: Log) -> None:
    log.fill()
    with contextlib.closing(Table(log.url, Stream("trades"))) as table:
        found = table.log()
        assert (found.epoch, found.positions, found.floors) == (log.epoch, {"w1": 18, "w2": 18}, {})
        spans = [("w1", 0, 18), ("w2", 0, 18)]
        tokens = sorted(row[2] for row in log.rows())
        for most in range(1, 20):
            beyond = tokens[most] if most < len(tokens) else None
            assert table.frontier(spans, most) == (1, beyond)
        assert table.frontier([("w2", 4, 6)], None) == (6, None)
        assert table.frontier([("w2", 6, 8)], 5) == (None, None)
        assert table.frontier([], 5) == (None, None)


def test_positions_at_a_time(log: Log) -> None:
    # Committed in another order than that of the IDs.
    for token, second in zip(range(1, 7), [0, 1, 5, 2, 6, 7], strict=True):
        log.committed(log.write("w1" if token < 6 else "w2", [trade(token)]), NOON + timedelta(seconds=second))
    log.prove(w1=5, w2=6)
    with contextlib.closing(Table(log.url, Stream("trades"))) as table:
        state = table.log()
        noon = round(NOON.timestamp() * 10**6)
        for second, positions in [
            (-1, {"w1": 0, "w2": 5}), (0, {"w1": 0, "w2": 5}), (1, {"w1": 1, "w2": 5}), (2, {"w1": 2, "w2": 5}),
            (5, {"w1": 2, "w2": 5}), (6, {"w1": 4, "w2": 5}), (7, {"w1": 5, "w2": 5}), (8, {"w1": 5, "w2": 6}),
        ]:  # fmt: skip
            assert table.at_time(state, noon + second * 10**6) == positions
    with contextlib.closing(Table(log.url, items)) as table, pytest.raises(ConfigError, match="a timestamp does not"):
        table.at_time(state, noon)


def test_a_stream_that_is_not_there_or_elsewhere_is_told(log: Log) -> None:
    for name, reason in [("tradez", r"does not have \(it has: items, trades\)"), ("items", "pass option 'streams'")]:
        with contextlib.closing(Table(log.url, Stream(name))) as table, pytest.raises(ConfigError, match=reason):
            table.log()


def test_a_store_that_cannot_be_asked(tmp_path: Path, postgres: PostgresServer) -> None:
    for url in (f"sqlite:///{tmp_path}/no.db", postgres.url.replace(str(postgres.port), "1")):
        with contextlib.closing(Table(url, trades)) as table, pytest.raises(Unavailable):
            table.log()
    with contextlib.closing(Table(postgres.url, trades)) as table, pytest.raises(SchemaError, match="busrep db init"):
        table.log()


def test_a_lost_connection_is_made_again(tmp_path: Path, postgres: PostgresServer) -> None:
    with opened_log("postgresql", postgres, tmp_path) as log, contextlib.closing(Table(log.url, trades)) as table:
        before = table.log()
        log.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND query LIKE '%busrep_positions%'"
        )
        assert table.log() == before


def test_an_sqlite_file_that_was_replaced_is_seen(tmp_path: Path, postgres: PostgresServer) -> None:
    (tmp_path / "other").mkdir()
    with opened_log("sqlite", postgres, tmp_path) as log, contextlib.closing(Table(log.url, trades)) as table:
        before = table.log().epoch
        with opened_store(f"sqlite:///{tmp_path}/other/log.db", Registry(STREAMS)) as other:
            other.close()
            (tmp_path / "other" / "log.db").replace(tmp_path / "log.db")
        assert table.log().epoch != before


@pytest.mark.parametrize("value", ["", "a'b", "\\", "a\\'b\n", "é", 5, -5])
def test_values_in_statements(postgres: PostgresServer, value: object) -> None:
    with psycopg.connect(postgres.url) as connection:
        text = f"SELECT {literal(value, backslashes=True)}"
        for setting in ("on", "off"):
            connection.execute(f"SET standard_conforming_strings = {setting}".encode())
            assert connection.execute(text.encode()).fetchone() == (value,)


def test_values_that_have_no_form() -> None:
    for value in ("a\0b", None, True, 1.5):
        with pytest.raises(ConfigError, match="no form in SQL"):
            literal(value, backslashes=False)


def test_the_types_of_fields() -> None:
    schema = to_arrow_schema(typed_shape(trades, metadata=False).schema(), timezone="UTC")
    assert [(field.name, field.type, field.nullable) for field in schema][:5] == [
        ("number", pyarrow.int64(), False), ("price", pyarrow.float64(), False), ("name", pyarrow.string(), False),
        ("open", pyarrow.bool_(), False), ("at", pyarrow.timestamp("us", "UTC"), False),
    ]  # fmt: skip
    assert schema.field("note").nullable
