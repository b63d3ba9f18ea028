"""Snapshots out of a PostgreSQL database.

An agreement is a transaction on a connection of its own, the coordinator's, that has exported its snapshot: parts are
loaded by COPY on further connections that import it, several at a time, and pruning takes nothing away under them. Many
readers share one: who has exported a snapshot says so in busrep_snapshots, and whoever comes soon after imports it
(and exports it again, so that it lasts as long as they need it), instead of counting the rows of the table once more.

What a reader takes from there it checks in the snapshot itself, so that a row that is left over, or a name that the
server has used again, does no harm. Nobody cleans up after a process that died: its connections end, and with them
its snapshot and its advisory locks, one of which is its place among the snapshots that are allowed at a time.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import attrs

from busrep.core.snapshots import Agreement
from busrep.errors import BusrepError, MissingExtra, SnapshotBusy, Unavailable
from busrep.stores import snapshots
from busrep.stores.backing import Backing, Span, union
from busrep.stores.plans import Control, Plan, Sql
from busrep.stores.postgres.copy import copy_out

try:
    import psycopg
except ImportError as missing:
    raise MissingExtra("postgres", "the PostgreSQL store") from missing

if TYPE_CHECKING:
    from busrep.stores.postgres.store import PostgresStore

Connection = psycopg.AsyncConnection[Any]

# Classes of advisory locks, in the space of two numbers: "busr" in hex, and the next one.
SLOTS, STREAMS = 0x62757372, 0x62757373
# For how long others join a snapshot after it was exported, seconds: what was committed since comes by catch-up.
SHARED_FOR = 60.0
# How long to wait for another who is agreeing on the same stream, to share what he finds, seconds; then without.
SHARE_WAIT = 60.0
# Not to be ended for lying idle between two parts, nor for the time that a part takes, by a default of the role's.
TIMEOUTS = (
    "SELECT set_config(name, '0', false) FROM pg_settings WHERE name IN ('statement_timeout', 'transaction_timeout', "
    "'idle_session_timeout', 'idle_in_transaction_session_timeout')"
)
# A field is never quoted or escaped unless it holds one of these, or a line break: JSON holds none of them.
EXACT = "(FORMAT csv, QUOTE E'\\x01', DELIMITER E'\\x02')"


@attrs.define(eq=False)
class _Held:
    """What is held for an agreement. ``name``: of the exported snapshot; ``log``: what it shows."""

    coordinator: Connection
    name: str
    log: snapshots.LogState
    gate: asyncio.Semaphore
    idle: list[Connection] = attrs.field(factory=list)
    left: bool = False


class PostgresSnapshots:
    """The agreements of one store, and the loading of their parts."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self._held: dict[str, _Held] = {}

    # -- agreeing

    async def agree(self, backing: Backing, part_rows: int, again: Agreement | None) -> Agreement:
        """See `SnapshotSource`."""
        coordinator = await self._connected()
        try:
            await self._take_slot(coordinator)
            joined = None
            if again is None:
                agreement, log, joined = await self._shared(coordinator, backing, part_rows)
            else:
                agreement, log = await self._fresh(coordinator, backing, part_rows, again)
            name = (await self._ask(coordinator, "SELECT pg_export_snapshot()"))[0][0]
            if again is None:
                await self._share(coordinator, agreement, part_rows, name, log, joined)
        except BaseException:
            await coordinator.close()
            raise
        if self.store.questions is None:  # closed meanwhile
            await coordinator.close()
            raise Unavailable(self.store.where, "the store is not open")
        gate = asyncio.Semaphore(self.store.settings.snapshot_connections)
        self._held[agreement.id] = _Held(coordinator, name, log, gate)
        return agreement

    async def _connected(self) -> Connection:
        connection = await self.store.connect(client_encoding="utf8")
        try:
            await self._ask(connection, TIMEOUTS)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _take_slot(self, connection: Connection) -> None:
        """One of the snapshots that are allowed at a time; the connection has it until it ends. Raises SnapshotBusy."""
        most = self.store.settings.snapshots
        for number in range(most):
            if (await self._ask(connection, "SELECT pg_try_advisory_lock(?, ?)", SLOTS, number))[0][0]:
                return
        raise SnapshotBusy(self.store.where, most)

    async def _fresh(
        self, connection: Connection, backing: Backing, part_rows: int, again: Agreement | None
    ) -> tuple[Agreement, snapshots.LogState]:
        def plan() -> Plan[tuple[Agreement, snapshots.LogState]]:
            yield Control.SNAPSHOT
            return (yield from snapshots.agree(self.store.dialect, backing, part_rows, again, self.store.where))

        return await self.store._run(connection, plan())

    async def _shared(
        self, connection: Connection, backing: Backing, part_rows: int
    ) -> tuple[Agreement, snapshots.LogState, str | None]:
        """Another's, exported not long ago under that name, or a fresh one.

        Only one at a time looks, and makes one if there is none: `_share` lets the lock go, or the connection's end.
        """
        await self._ask(connection, f"SET lock_timeout = {int(SHARE_WAIT * 1000)}")
        try:
            await self._ask(connection, "SELECT pg_advisory_lock(?, ?)", STREAMS, _number(backing.stream))
        except Unavailable:
            if connection.closed:
                raise
            # He takes his time: so do we.
        for name, agreement in await self._offered(connection, backing.stream, part_rows):
            with contextlib.suppress(BusrepError, psycopg.Error):
                await self._import(connection, name)
                log = await self._log(connection, backing.stream)
                if log.floors == agreement.floors and snapshots.still(agreement, log):
                    return snapshots.named(agreement, self.store.where), log, name
            if connection.closed:
                raise Unavailable(self.store.where, "the connection was lost")
            await self._ask(connection, "ROLLBACK")
        return *await self._fresh(connection, backing, part_rows, None), None

    async def _log(self, connection: Connection, stream: str) -> snapshots.LogState:
        return await self.store._run(connection, snapshots.read_log(self.store.dialect, stream))

    async def _offered(self, connection: Connection, stream: str, part_rows: int) -> list[tuple[str, Agreement]]:
        """(snapshot, agreement) that another shares, if it is of the log as it is now, and not pruned behind its end.

        Whoever may not read the table does without.
        """
        try:
            found = await self._ask(
                connection,
                "SELECT snapshot, agreement FROM busrep_snapshots WHERE stream = ? AND part_rows = ? AND exported_at > "
                + self.store.dialect.ago(),
                stream,
                part_rows,
                SHARED_FOR,
            )
            log = await self._log(connection, stream)
            offered = [(name, Agreement.from_json(text)) for name, text in found]
            return [(name, one) for name, one in offered if one.stream == stream and snapshots.still(one, log)]
        except (Unavailable, ValueError):
            if connection.closed:
                raise
            return []

    async def _share(
        self,
        coordinator: Connection,
        agreement: Agreement,
        part_rows: int,
        name: str,
        log: snapshots.LogState,
        joined: str | None,
    ) -> None:
        """Say that it is there; of another's that was joined, that it is here too, and no younger for that.

        Where this may not be written, nobody is told.
        """
        pid = coordinator.info.backend_pid
        statement = Sql(
            "INSERT INTO busrep_snapshots (stream, part_rows, snapshot, agreement, pid, exported_at) "
            f"VALUES (?, ?, ?, ?, ?, {self.store.dialect.now}) ON CONFLICT (stream, part_rows) DO UPDATE SET "
            "snapshot = excluded.snapshot, agreement = excluded.agreement, pid = excluded.pid, "
            "exported_at = excluded.exported_at",
            (agreement.stream, part_rows, name, agreement.to_json().decode(), pid),
        )
        if joined is not None:
            statement = Sql(
                "UPDATE busrep_snapshots SET snapshot = ?, pid = ? WHERE stream = ? AND part_rows = ? AND snapshot = ?",
                (name, pid, agreement.stream, part_rows, joined),
            )

        def plan() -> Plan[None]:
            yield statement

        if not log.replica:
            with contextlib.suppress(Unavailable):
                await self.store._write(plan())
        await self._ask(coordinator, "SELECT pg_advisory_unlock(?, ?)", STREAMS, _number(agreement.stream))

    # -- loading

    async def load(self, backing: Backing, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """See `SnapshotSource`."""
        held = self._held.get(agreement.id)
        if held is None:
            raise Unavailable(self.store.where, "no snapshot is held for that agreement: agree again")
        snapshots.check_part(agreement, number, held.log)
        rows = snapshots.spans(agreement, number)
        if not rows:
            return
        async with held.gate:
            connection, whole = await self._loader(held), False
            try:
                pieces = self._rows(connection, backing, rows) if backing.own else self._copy(connection, backing, rows)
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        yield piece
                whole = True
            except psycopg.Error as error:
                raise self.store.told(error) from error
            finally:
                if whole and not held.left:
                    held.idle.append(connection)
                else:
                    await connection.close()

    async def _loader(self, held: _Held) -> Connection:
        """A connection in the snapshot. Those that have it keep it, also when the coordinator's has ended."""
        if held.idle:
            return held.idle.pop()
        connection = await self._connected()
        try:
            await self._import(connection, held.name)
        except BaseException as error:
            await connection.close()
            if isinstance(error, psycopg.Error):
                raise Unavailable(self.store.where, "the connection that held the snapshot was lost") from error
            raise
        return connection

    async def _import(self, connection: Connection, name: str) -> None:
        """Begin a transaction in the snapshot of that name. Raises psycopg.Error when it has ended."""
        await connection.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await connection.execute(psycopg.sql.SQL("SET TRANSACTION SNAPSHOT {}").format(psycopg.sql.Literal(name)))

    async def _copy(self, connection: Connection, backing: Backing, rows: list[Span]) -> AsyncGenerator[bytes, None]:
        """Of busrep's own table: as the rows stand there, byte by byte."""
        text, params = union(backing, rows, "id, idx, writer, row")
        lines = f"SELECT id || ' ' || writer || ' ' || row FROM ({text}) AS p ORDER BY id, idx"
        statement = _quoted(connection, Sql(f"COPY ({lines}) TO STDOUT WITH {EXACT}", params))
        async with contextlib.aclosing(copy_out(connection, statement.encode())) as pieces:
            async for piece in pieces:
                yield piece

    async def _rows(self, connection: Connection, backing: Backing, rows: list[Span]) -> AsyncGenerator[bytes, None]:
        """Of an application's table: its columns are made rows of the stream here, as fetch() does."""
        question = self.store.dialect.part(backing, rows)
        assert question is not None  # noqa: S101 - there are spans
        async with connection.cursor("busrep_part") as cursor:
            await cursor.execute(_quoted(connection, question).encode())
            while found := await cursor.fetchmany(snapshots.PIECE_ROWS):
                yield snapshots.text_of(self.store.dialect, backing, found)

    # -- leaving

    async def leave(self, agreement: Agreement) -> None:
        """See `SnapshotSource`. A part that is under way comes to its end."""
        held = self._held.pop(agreement.id, None)
        if held is not None:
            await self._let_go(held)

    async def leave_all(self) -> None:
        """The store is closed."""
        while self._held:
            await self._let_go(self._held.pop(next(iter(self._held))))

    async def _let_go(self, held: _Held) -> None:
        held.left = True
        for connection in (held.coordinator, *held.idle):
            await connection.close()
        held.idle.clear()

    async def _ask(self, connection: Connection, text: str, *params: Any) -> list[tuple[Any, ...]]:
        def plan() -> Plan[list[tuple[Any, ...]]]:
            return (yield Sql(text, params))[0]

        return await self.store._run(connection, plan())


def _number(stream: str) -> int:
    """The number of a stream's lock: 31 bits of its name's hash. Two of the same number only wait for each other."""
    return int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=4).digest()) >> 1


def _quoted(connection: Connection, statement: Sql) -> str:
    """A statement with its parameters in it: COPY and cursors take none."""
    return psycopg.AsyncClientCursor(connection).mogrify(statement.text.replace("?", "%s"), list(statement.params))
