"""Committed rows that no job reads yet, because their writer has not proven them.

Jobs read up to the proven positions. A writer that is killed leaves committed rows above its last proven position, and
they stay there until another process finishes the writer (docs/protocol.md). Each job reports these rows, warns when
their writer is silent for longer than its lease, and with ``--finish-silent`` finishes the writer first.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from busrep.errors import ClaimBlocked, Unavailable
from busrep.spark import secrets
from busrep.spark.options import declared_stream, stream_of
from busrep.spark.table import Table, seconds_of
from busrep.stores import schema
from busrep.stores.blocking import open_blocking_store
from busrep.stores.dialect import Backing, Dialect, backing_of
from busrep.stores.plans import Plan, Sql
from busrep.streams import Registry, Stream

log = logging.getLogger("busrep.spark")

# Seconds that --finish-silent waits for the last transaction of a dead writer to end.
FINISH_WAIT = 5.0
ADVICE = (
    "No job reads these rows before the writer has proven them. Start the writer again, or pass --finish-silent if it "
    "is dead"
)


@attrs.frozen
class TableWriter:
    """A writer of a stream as the table has it.

    ``waiting_rows``: committed rows above ``position``, which is proven. ``waiting_for``: seconds since the first of
    them was committed; None without one, and for a table of the application's, which has no times. ``silent_for``:
    seconds since the writer's last sign of life in any stream, by the database's clock.
    """

    stream: str
    writer: str
    position: int
    registered: bool
    incarnation: int
    silent_for: float
    waiting_rows: int
    waiting_for: float | None

    def is_silent(self, lease: float) -> bool:
        """Whether rows wait for a writer that was not seen for longer than its lease."""
        return self.waiting_rows > 0 and self.silent_for > lease


def table_writers(dialect: Dialect, backing: Backing) -> Plan[list[TableWriter]]:
    """Read the writers of one stream. Positions and rows are of one state of the database."""
    above = f"f.{backing.id} < -p.position" if backing.negative else f"f.{backing.id} > p.position"
    same = "" if backing.own else "f.stream = p.stream AND "
    rows = f"FROM {backing.table} f WHERE {same}f.{backing.writer} = p.writer AND {above}"
    age = "NULL" if backing.own else f"(SELECT {dialect.age('f.committed_at')} {rows} ORDER BY f.id, f.idx LIMIT 1)"
    seen = "(SELECT max(q.seen_at) FROM busrep_positions q WHERE q.writer = p.writer)"
    answers = yield Sql(
        f"SELECT p.writer, p.position, p.registered, coalesce(w.incarnation, 0), {dialect.age(seen)}, "
        f"(SELECT count(*) {rows}), {age} FROM busrep_positions p LEFT JOIN busrep_writers w ON w.writer = p.writer "
        "WHERE p.stream = ? ORDER BY p.writer",
        (backing.stream,),
    )
    return [
        TableWriter(
            backing.stream, writer, position, bool(registered), incarnation, max(0.0, float(silent)), waiting,
            seconds_of(age),
        )
        for writer, position, registered, incarnation, silent, waiting, age in answers[0]
    ]  # fmt: skip


def waiting_rows(options: Any, names: Iterable[str]) -> WaitingRows:
    """The waiting rows of these streams, for a job with the options ``store``, ``password_file``, ``streams`` and
    ``lease``, and perhaps ``finish_silent``. Without a store, and without names, there are none."""
    known = tuple(dict.fromkeys(names)) if options.store is not None else ()
    url = secrets.resolve(options.store, options.password_file) if known else ""
    return WaitingRows(url, options.streams, known, options.lease, getattr(options, "finish_silent", False))


@attrs.define(eq=False)
class WaitingRows:
    """The waiting rows of the streams that one job reads.

    ``url``: the store with its password. ``streams``: MODULE:NAME or None. ``names``: the streams. ``lease``: seconds.
    ``finish``: whether writers that are silent for longer are finished.
    """

    url: str = attrs.field(repr=False)
    streams: str | None
    names: Sequence[str]
    lease: float
    finish: bool = False
    finished: dict[str, dict[str, int]] = attrs.field(factory=dict, init=False)
    _warned: set[tuple[str, str]] = attrs.field(factory=set, init=False)

    def look(self) -> list[TableWriter]:
        """Read the writers, finish silent ones if that was asked for, and warn of those that stay.

        Raises ConfigError, SchemaError, Unavailable.
        """
        found = self._read()
        silent = [one for one in found if one.is_silent(self.lease)]
        if silent and self.finish:
            self._finish(silent)
            found = self._read()
        self._warn(found)
        return found

    def _warn(self, found: Iterable[TableWriter]) -> None:
        """Log each writer that is silent with waiting rows, once."""
        for one in found:
            if one.is_silent(self.lease) and (one.stream, one.writer) not in self._warned:
                self._warned.add((one.stream, one.writer))
                log.warning("%s. %s", sentence(one.stream, one.writer, shown(one)), ADVICE)

    def look_again(self) -> None:
        """As `look`, of a job that goes on while the database is away."""
        with contextlib.suppress(Unavailable):
            self.look()

    def report(self, found: Sequence[TableWriter] | None = None) -> dict[str, Any]:
        """What a job's report says: the writers of each stream, and those that were finished. ``found``: what `look`
        has found; None reads the writers now, and finishes none: the job has no use of their rows any more."""
        if found is None:
            found = self._read()
            self._warn(found)
        writers: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        for one in found:
            writers[one.stream][one.writer] = shown(one)
        return {"table_writers": writers, "finished": self.finished, "lease": self.lease}

    def _read(self) -> list[TableWriter]:
        if not self.names:
            return []
        backings = [backing_of(stream_of(self.streams, name)) for name in self.names]
        with Table(self.url, stream_of(self.streams, self.names[0])) as table:

            def body() -> Plan[list[TableWriter]]:
                yield from schema.check(table.dialect)
                found: list[TableWriter] = []
                for backing in backings:
                    found += yield from table_writers(table.dialect, backing)
                return found

            return table.ask(body)

    def _finish(self, silent: Iterable[TableWriter]) -> None:
        """Finish these writers, those that are seen again meanwhile excepted."""
        store = open_blocking_store(self.url, Registry(self._known_streams()))
        store.open()
        try:
            for writer in dict.fromkeys(one.writer for one in silent if one.registered):
                now = [one for one in store.known() if one.writer == writer]
                if min(one.silent_for for one in now) <= self.lease:
                    continue
                try:
                    finals = store.finish(writer, now[0].incarnation, timeout=FINISH_WAIT)
                except ClaimBlocked as blocked:
                    log.warning("writer %s is silent, and cannot be finished yet: %s", writer, blocked)
                    continue
                if finals:
                    self.finished[writer] = dict(finals)
                    log.warning("writer %s was silent; finished at %s", writer, dict(finals))
        finally:
            store.close()

    def _known_streams(self) -> list[Stream[Any]]:
        """All streams whose rows can be looked at: a writer is finished in each stream that it writes."""
        with Table(self.url, stream_of(self.streams, self.names[0])) as table:

            def body() -> Plan[list[tuple[str, str | None]]]:
                answers = yield Sql("SELECT stream, backing FROM busrep_streams ORDER BY stream")
                return [(name, backing) for name, backing in answers[0]]

            listed = table.ask(body)
        found: list[Stream[Any]] = []
        for name, backing in listed:
            if backing is None:
                found.append(Stream(name))
            elif self.streams is not None and name in self.names:
                found.append(declared_stream(self.streams, name))
        return found


def shown(one: TableWriter) -> dict[str, Any]:
    """A writer, for the report."""
    return {
        "position": one.position, "waiting_rows": one.waiting_rows, "silent_for": round(one.silent_for, 3),
        "waiting_for": None if one.waiting_for is None else round(one.waiting_for, 3),
    }  # fmt: skip


def sentence(stream: str, writer: str, one: Mapping[str, Any]) -> str:
    """What a person is told of a writer with waiting rows."""
    return (
        f"stream {stream!r}, writer {writer!r}: {one['waiting_rows']:,} committed rows above its proven position "
        f"{one['position']}, and it was last seen {one['silent_for']:,.0f} s ago"
    )


def described(report: Mapping[str, Any]) -> list[str]:
    """The lines of a job's report on waiting rows. A live writer has some now and then, and is not worth a line."""
    lines = [
        f"finished: writer {writer!r}, {stream!r} at {at}"
        for writer, finals in report.get("finished", {}).items() for stream, at in finals.items()
    ]  # fmt: skip
    for stream, writers in report.get("table_writers", {}).items():
        lines += [
            f"WAITING: {sentence(stream, writer, one)}"
            for writer, one in writers.items() if one["waiting_rows"] and one["silent_for"] > report["lease"]
        ]  # fmt: skip
    return lines
