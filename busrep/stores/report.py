"""What ``busrep db status`` shows."""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

from typing import Any

import orjson

from busrep.stores.dialect import Dialect
from busrep.stores.plans import Control, Plan, Row, Sql
from busrep.stores.schema import VERSION

# The fields of each entry, in the order of the queries below.
WRITER = ("position", "floor", "registered", "incarnation", "silent_for")
READER = ("position", "lag", "epoch", "saved_ago", "stopped")
BOOTSTRAP = ("state", "parts", "parts_total", "rows", "rows_total", "bytes", "syncs", "reason", "saved_ago")
SINK = ("stream", "writer", "batch", "rows", "last", "done_ago")


def status(dialect: Dialect) -> Plan[dict[str, Any]]:
    """Everything ``busrep db status`` shows, from one snapshot."""
    answers = yield (Control.SNAPSHOT, *_questions(dialect))
    ((epoch, replica),), listed, writers, readers, ((dead,),), counts, bootstraps, sinks = answers
    # What is staged is in no log of the server's: a replica does not have it.
    staged = None
    if not replica:
        staged = len((yield Sql("SELECT attempt, count(*) FROM busrep_staged GROUP BY attempt"))[0])
    streams: dict[str, Any] = {}
    for name, declared in listed:
        streams[name] = yield from _stream(dialect, name, declared, dict(counts).get(name, 0))
    yield Control.COMMIT
    for stream, writer, *state in writers:
        at = streams.setdefault(stream, {"table": None, "rows": None, "sequence": None, "writers": {}})
        told = dict(zip(WRITER, state, strict=True))
        at["writers"][writer] = told | {"registered": bool(told["registered"]), "silent_for": float(told["silent_for"])}
    return {
        "schema_version": VERSION, "database": dialect.name, "epoch": epoch, "streams": streams,
        "readers": _readers(readers), "dead_letters": dead, "bootstraps": _bootstraps(bootstraps),
        "sinks": {query: dict(zip(SINK, done, strict=True)) for query, *done in sinks}, "staged": staged,
    }  # fmt: skip


def _questions(dialect: Dialect) -> list[Sql]:
    return [
        Sql(f"SELECT value, {dialect.replica} FROM busrep_meta WHERE key = 'epoch'"),
        Sql("SELECT stream, backing FROM busrep_streams ORDER BY stream"),
        Sql(
            "SELECT p.stream, p.writer, p.position, p.floor, p.registered, coalesce(w.incarnation, 0), "
            f"{dialect.age('p.seen_at')} FROM busrep_positions p LEFT JOIN busrep_writers w "
            "ON w.writer = p.writer ORDER BY p.stream, p.writer"
        ),
        Sql(
            "SELECT r.reader, r.stream, r.writer, r.position, coalesce(p.position, 0) - r.position, r.epoch, "
            f"{dialect.age('r.saved_at')}, r.stopped FROM busrep_readers r LEFT JOIN busrep_positions p "
            "ON p.stream = r.stream AND p.writer = r.writer WHERE r.writer <> '' ORDER BY r.reader, r.stream, r.writer"
        ),
        Sql("SELECT count(*) FROM busrep_dead_letters"),
        Sql("SELECT stream, count(*) FROM busrep_facts GROUP BY stream"),
        Sql(
            "SELECT reader, stream, state, parts, parts_total, rows, rows_total, bytes, syncs, reason, "
            f"{dialect.age('saved_at')} FROM busrep_bootstraps ORDER BY reader, stream"
        ),
        Sql(
            f"SELECT query, stream, writer, batch, rows, last, {dialect.age('done_at')} FROM busrep_sinks "
            "WHERE batch >= 0 ORDER BY query"
        ),
    ]


def _stream(dialect: Dialect, name: str, declared: str | None, rows: int | None) -> Plan[dict[str, Any]]:
    backing = dialect.backings.get(name)
    found = (yield dialect.sequence(name))[0]
    if declared is not None:  # counted only if this process declared it: else its name alone is known
        rows = (yield Sql(f"SELECT count(*) FROM {backing.table}"))[0][0][0] if backing else None
    return {
        "table": orjson.loads(declared) if declared else "busrep_facts", "rows": rows,
        "sequence": found[0][0] if found else None, "writers": {},
    }  # fmt: skip


def _readers(found: list[Row]) -> dict[str, Any]:
    readers: dict[str, Any] = {}
    for reader, stream, writer, *state in found:
        told = dict(zip(READER, state, strict=True))
        told |= {"lag": max(0, told["lag"]), "saved_ago": float(told["saved_ago"])}
        readers.setdefault(reader, {}).setdefault(stream, {})[writer] = told
    return readers


def _bootstraps(found: list[Row]) -> dict[str, Any]:
    bootstraps: dict[str, Any] = {}
    for reader, stream, *saved in found:
        bootstraps.setdefault(reader, {})[stream] = dict(zip(BOOTSTRAP, saved, strict=True))
    return bootstraps
