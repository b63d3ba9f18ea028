"""What a beat asks of the database: little, however many streams a writer has, and however many others there are."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from busrep.stores import claims
from busrep.stores.interface import Claim
from busrep.stores.plans import Sql, Step
from busrep.stores.postgres.dialect import PostgresDialect
from tests.shop import opened_store

HELD = Claim("w1", 1, "e" * 32, {}, {}, {})


def steps_of_beat(positions: dict[str, int], given: Iterator[int]) -> list[Step]:
    """All that a beat sends; the sequences have ``given`` so much."""
    plan = claims.heartbeat(PostgresDialect("postgresql://"), HELD, positions)
    first = next(plan)
    assert isinstance(first, tuple)
    asked = [one for one in first[2:] if isinstance(one, Sql)]
    rows = [[tuple(next(given) for _ in range(one.text.count(" END FROM ")))] for one in asked]
    second = plan.send([[("7", "on")], *rows])
    assert isinstance(second, tuple)
    return [*first, *second]


@pytest.mark.parametrize("streams", [1, 2, 250])
def test_a_beat_is_few_statements_however_many_streams_there_are(streams: int) -> None:
    steps = steps_of_beat({f"stream{at}": at for at in range(streams)}, iter(range(streams)))
    assert len([one for one in steps if isinstance(one, Sql)]) == 4 + -(-streams // 100)


def test_a_position_above_its_own_sequence_is_stored_as_that(caplog: pytest.LogCaptureFixture) -> None:
    """Each is held against the answer of its own stream, of three statements."""
    steps = steps_of_beat({f"stream{at}": 5 for at in range(250)}, iter([*range(5, 251), 3, 4, 5, 6]))
    (stored,) = (one for one in steps if isinstance(one, Sql) and one.text.startswith("UPDATE"))
    assert [line.split("'")[1] for line in caplog.messages] == ["stream246", "stream247"]
    assert '["stream245",5,0],["stream246",3,0],["stream247",4,0],["stream248",5,0]' in str(stored.params[0])


@pytest.mark.servers
def test_a_beat_of_one_position_looks_at_no_other_s(postgres_url: str) -> None:
    """Of ten positions the server reads all that there are: it does not know beforehand that they are ten."""
    with opened_store(postgres_url), psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO busrep_positions (stream, writer, position, floor, registered, seen_at) SELECT "
            "'stream' || s, 'writer' || w, 0, 0, TRUE, now() FROM generate_series(1, 10) s, generate_series(1, 300) w"
        )
        connection.execute("ANALYZE busrep_positions")
        for streams, reads_all in ((1, False), (10, True)):
            beat = steps_of_beat({f"stream{at}": at for at in range(streams)}, iter(range(streams)))
            (stored,) = (one for one in beat if isinstance(one, Sql) and one.text.startswith("UPDATE"))
            with psycopg.ClientCursor(connection) as cursor:
                cursor.execute(f"EXPLAIN {stored.text.replace('?', '%s')}".encode(), list(stored.params))
                assert ("Seq Scan on busrep_positions" in str(cursor.fetchall())) is reads_all
