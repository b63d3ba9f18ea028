"""Snapshots out of a PostgreSQL database.

Each part is read in a transaction of its own, on a connection of no pool, so that neither the store's questions nor its
writes wait, and nothing is held between two parts that would keep the server from cleaning up.

An agreement is one of the snapshots that are allowed at a time, by an advisory lock of the connection that agreed on
it, which loads parts afterwards. Nobody cleans up after a process that died: the connection ends, and with it the lock.
A load that fails on that connection ends it as well, and the next one takes a place again.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from busrep.core.snapshots import Agreement
from busrep.errors import ConfigError, SnapshotBusy
from busrep.stores import snapshots
from busrep.stores.dialect import Backing, Span, union
from busrep.stores.plans import Control, Row, Sql, only

if TYPE_CHECKING:
    from psycopg import AsyncConnection

    from busrep.stores.postgres.store import PostgresStore

# The class of the advisory locks, in the space of two numbers: "busr" in hex.
SLOTS = 0x62757372
# A default of the role's must not end these sessions for lying idle, nor for the time that a part takes. Without
# `enable_sort` the planner reads each writer's rows in the order of the index, and merges them. A part takes half the
# time of one that is sorted, by default on the disk, and its first rows come at once. Without `jit` a plan that has to
# sort all the same, and passes for very dear then, is not compiled for a quarter of a second.
SWITCHED_OFF = (
    "SELECT set_config(name, '0', false) FROM pg_settings WHERE name IN ('statement_timeout', 'transaction_timeout', "
    "'idle_session_timeout', 'idle_in_transaction_session_timeout', 'enable_sort', 'jit') AND pg_backend_pid() = ?"
)
# Rows that are fetched at a time: some 100 kB of usual rows, which are in memory four times.
FETCH_ROWS = 800


def lines_of_part(backing: Backing, asked: Sequence[Span]) -> Sql:
    """(line,) of all rows of busrep's own table in these spans, at least one, ordered by token and place in the fact.

    The server makes the text: a part is loaded a third faster so than from three columns (benchmarks/bootstrap.py).
    """
    text, params = union(backing, asked, "id, idx, writer, row", "id, idx")
    return Sql(f"SELECT id || ' ' || writer || ' ' || row || chr(10) FROM ({text}) AS p ORDER BY id, idx", params)


def text_of_lines(stream: str, rows: Sequence[Row]) -> bytes:
    """The text of lines that the server made. Raises RowError for one that breaks its line."""
    text: str = "".join([line for (line,) in rows])
    if text.count("\n") != len(rows):
        tokens, writers, payloads = zip(*(line.split(" ", 2) for (line,) in rows), strict=True)
        return snapshots.lines_of(stream, [*map(int, tokens)], writers, [one[:-1].encode() for one in payloads])
    return text.encode()


class PostgresSnapshots(snapshots.PlannedSnapshots):
    """The agreements of one store, and the loading of their parts."""

    store: PostgresStore

    def __init__(self, store: PostgresStore) -> None:
        super().__init__(store, store.where)
        # Of each agreement: the connection that has its slot, and all connections that load nothing now.
        self._slots: dict[str, AsyncConnection[Any]] = {}
        self._connections: dict[str, list[AsyncConnection[Any]]] = {}

    async def agree(self, backing: Backing, part_rows: int, again: Agreement | None) -> Agreement:
        slot = await self._connected()
        try:
            await self.lock_slot(slot)
            plan = snapshots.agree(self.dialect, backing, part_rows, again, self.where)
            agreement = await self.store.run_on(slot, snapshots.in_snapshot(plan))
            self.store.check_open()  # it may have been closed meanwhile
        except BaseException:
            await slot.close()
            raise
        self._slots[agreement.id], self._connections[agreement.id] = slot, [slot]
        return agreement

    async def _connected(self) -> AsyncConnection[Any]:
        connection = await self.store.connect()
        try:
            found = await self.store.run_on(connection, only(Sql(SWITCHED_OFF, (connection.info.backend_pid,))))
            if not found[0]:  # it would keep the lock of a slot, and these settings, for its next client
                raise ConfigError(
                    f"{self.where}: a snapshot needs a session of the server, and this is a pooler's, such as "
                    "PgBouncer: name the server itself in the store's URL, or read the snapshot over HTTP"
                )
        except BaseException:
            await connection.close()
            raise
        return connection

    async def lock_slot(self, connection: AsyncConnection[Any]) -> None:
        """Take one of the places for agreements, until the connection ends. Raises SnapshotBusy, Unavailable."""
        for number in range(self.most):
            question = Sql("SELECT pg_try_advisory_lock(?, ?)", (SLOTS, number))
            (((mine,),),) = await self.store.run_on(connection, only(question))
            if mine:
                return
        raise SnapshotBusy(self.where, self.most)

    async def load(self, backing: Backing, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """See `SnapshotSource`. In pieces of so many rows: the part as a whole is never in memory."""
        connections, whole = self._connections.get(agreement.id, []), False
        connection = connections.pop() if connections else await self._connected()
        try:
            if agreement.id in self._connections and agreement.id not in self._slots:
                self._slots[agreement.id] = connection
                await self.lock_slot(connection)
            await self.store.run_on(connection, snapshots.checked(self.dialect, backing, agreement, number))
            if asked := snapshots.spans(agreement, number):
                if backing.own:
                    rows = snapshots.part_of(self.dialect, backing, asked)
                    text_of = partial(snapshots.text_of, self.dialect, backing)
                else:
                    rows, text_of = lines_of_part(backing, asked), partial(text_of_lines, backing.stream)
                cursor = Sql(f"DECLARE part NO SCROLL CURSOR FOR {rows.text}", rows.params)
                await self.store.run_on(connection, only(cursor))
                piece = Sql(f"FETCH {FETCH_ROWS} FROM part")
                while (found := await self.store.run_on(connection, only(piece)))[0]:
                    yield text_of(found[0])
            await self.store.run_on(connection, only(Control.COMMIT))
            whole = True
        finally:
            if whole and agreement.id in self._connections:
                connections.append(connection)
            else:
                if self._slots.get(agreement.id) is connection:
                    del self._slots[agreement.id]
                await connection.close()

    async def leave(self, agreement: Agreement) -> None:
        """See `SnapshotSource`. A part that is under way comes to its end, and may have the place until then."""
        self._slots.pop(agreement.id, None)
        for connection in self._connections.pop(agreement.id, ()):
            await connection.close()

    async def leave_all(self) -> None:
        self._slots.clear()
        while self._connections:
            for connection in self._connections.popitem()[1]:
                await connection.close()
