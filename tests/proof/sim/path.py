"""The way from one simulated process to the database, and what can go wrong on it; the client's end of a connection."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from busrep.stores.plans import Answers, Control, Row, Sql, Step
from tests.proof.sim.tables import SimError

if TYPE_CHECKING:
    from tests.proof.sim.database import Server, Session

# What happens on the server or under way belongs to no simulated process: these callbacks run whoever is dead.
SERVER = contextvars.Context()

# Between two messages of one connection, seconds: they never overtake each other.
AFTER = 1e-9

IDLE, OPEN, FAILED = "idle", "in transaction", "in a failed transaction"


def lost() -> SimError:
    """What a client gets on a connection that is gone."""
    return SimError(None, "the server closed the connection unexpectedly")


class Request:
    """One round trip of a connection: steps on their way, and the future of the answer."""

    __slots__ = ("arrival", "changed", "connection", "done", "future", "steps")

    def __init__(self, connection: SimConnection, steps: tuple[Step, ...], future: asyncio.Future[Answers]) -> None:
        self.connection, self.steps, self.future = connection, steps, future
        self.arrival: asyncio.TimerHandle | None = None  # until it has arrived
        self.done = False  # executed
        self.changed = False  # a transaction was committed by it that changed something


class SimConnection:
    """A connection to the simulated database, as a driver's in autocommit mode. `Path.connect` makes it.

    Its errors are `SimError`. ``closed``: it is of no use any more, and has told so; ``gone``: it broke, which the next
    use will find out.
    """

    autocommit = True

    def __init__(self, path: Path, session: Session) -> None:
        self.path, self.session = path, session
        self.closed = self.gone = False
        self.status = IDLE
        self.due = 0.0
        self.request: Request | None = None

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, a failed one included."""
        return self.status is not IDLE

    async def run(self, steps: Sequence[Step]) -> Answers:
        """All steps in one round trip; the rows of each SQL statement. Cancelled, the connection is closed."""
        if self.closed or self.gone:
            self.closed = True
            raise lost()
        path = self.path
        path.requests += 1
        request = self.request = Request(self, tuple(steps), path.loop.create_future())
        path.send(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            # The server is told, as by a driver that cancels: it gives up waiting, and rolls back. A COMMIT that is
            # under way arrives before.
            self.discard()
            raise

    async def execute(self, text: str, params: Sequence[Any] = ()) -> list[Row]:
        """One statement, with ``?`` for parameters."""
        answers = await self.run((Sql(text, tuple(params)),))
        return answers[0]

    async def begin(self) -> None:
        """BEGIN, under READ COMMITTED."""
        await self.run((Control.BEGIN,))

    async def commit(self) -> None:
        """COMMIT; an error when the transaction had failed, or when no answer came."""
        await self.run((Control.COMMIT,))

    async def rollback(self) -> None:
        """ROLLBACK."""
        await self.run((Control.ROLLBACK,))

    async def close(self) -> None:
        """End it; what is open is rolled back."""
        self.discard()

    def discard(self) -> None:
        """As `close`, at once."""
        if not self.closed:
            self.closed = True
            self.path.connections.pop(self, None)
            self.path.carry(self.session.end, connection=self)

    # -- what happens to it

    def answered(self, request: Request, answers: Answers | None, error: Exception | None, status: str) -> None:
        """The answer has arrived."""
        if self.gone or self.closed:
            self.path.lost(request)
            return
        self.status = status
        if not request.future.done():
            if error is None:
                request.future.set_result(answers or [])
            else:
                request.future.set_exception(error)

    def broken(self, zombie: float, linger: float, *, tell: bool) -> None:
        """It breaks for the client now; the server notices ``linger`` seconds after its last request was executed."""
        if self.gone or self.closed:
            return
        request = self.request
        if request is not None and request.arrival is not None and zombie:
            self.path.delay(request, zombie)
        if tell:
            self.reset()
        else:
            self.gone = True
        self.session.orphaned(linger)

    def reset(self) -> None:
        """The client learns that it is gone: at once if it waits, else with its next request."""
        self.gone = True
        request = self.request
        if request is not None and not request.future.done():
            self.closed = True
            request.future.set_exception(lost())


class Path:
    """The way from one simulated process to a server: a `SimDatabase` or a replica of it.

    ``others``: further servers behind the same address; each connection is to any of them.
    ``latency``: bounds of one way's time, seconds. ``tcp_timeout``: how long an answer is waited for that does not come
    because nothing passes. The fields may be set at any time: ``refuse``, no new connections; ``kept_out``, the same,
    by who keeps the server, until it says otherwise; ``slow``, seconds added to each way; ``hole``, nothing passes. All
    that happened is counted.
    """

    def __init__(
        self,
        server: Server,
        dice: random.Random,
        latency: tuple[float, float] = (0.0005, 0.003),
        *,
        others: Sequence[Server] = (),
        tcp_timeout: float = 10.0,
    ) -> None:
        self.servers = (server, *others)
        self.server, self.dice, self.latency, self.tcp_timeout = server, dice, latency, tcp_timeout
        self.refuse = self.kept_out = False
        self.slow = 0.0
        self.connections: dict[SimConnection, None] = {}
        self.connects = self.requests = self.commits = self.rollbacks = 0
        self.lost_replies = self.zombie_commits = 0
        self._connecting: dict[asyncio.Future[SimConnection], None] = {}
        self._hole = False
        self._holes = 0
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @functools.cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that everything runs on."""
        return self.server.loop

    # -- faults

    def cut(self, zombie: float = 0.0, linger: float = 0.0) -> None:
        """All connections break now. A request under way still arrives, ``zombie`` seconds later than it would have;
        the server rolls back what is open ``linger`` seconds after it executed the last request."""
        self._break(zombie, linger, tell=True)

    def kill(self, zombie: float = 0.0, linger: float = 0.0) -> None:
        """As `cut`, for a client that is dead: it is told nothing."""
        self._break(zombie, linger, tell=False)

    def _break(self, zombie: float, linger: float, *, tell: bool) -> None:
        for connection in list(self.connections):
            connection.broken(zombie, linger, tell=tell)
        self.connections.clear()
        for future in self._connecting:
            if tell and not future.done():
                future.set_exception(lost())
        self._connecting.clear()

    @property
    def hole(self) -> bool:
        """Whether everything sent, either way, is held back. When it is cleared, what was held goes on."""
        return self._hole

    @hole.setter
    def hole(self, on: bool) -> None:
        if on == self._hole:
            return
        self._hole = on
        if on:
            self._holes += 1
            for connection in self.connections:
                if connection.request is not None and not connection.request.future.done():
                    self._watch(connection, connection.request)
        else:
            held, self._held = self._held, []
            for at, (function, args) in enumerate(held):
                self.loop.call_later(self.latency[0] + at * AFTER, self._arrived, function, args, context=SERVER)

    def _watch(self, connection: SimConnection, request: Request) -> None:
        self.loop.call_later(
            self.tcp_timeout, self._given_up, self._holes, connection, request, context=SERVER
        )  # fmt: skip

    def _given_up(self, hole: int, connection: SimConnection, request: Request) -> None:
        if self._hole and hole == self._holes and not request.future.done():
            self.connections.pop(connection, None)
            connection.broken(0.0, 0.0, tell=True)

    # -- carrying

    def carry(self, function: Callable[..., None], *args: Any, connection: SimConnection) -> asyncio.TimerHandle:
        """Send something of a connection, either way: ``function`` is called when it has arrived."""
        loop = self.loop
        least, most = self.latency
        when = loop.time() + self.slow + least + (most - least) * self.dice.random()
        soonest = connection.due + AFTER
        connection.due = when = when if when > soonest else soonest
        return loop.call_at(when, self._arrived, function, args, context=SERVER)

    def _arrived(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._hole:
            self._held.append((function, args))
        else:
            function(*args)

    def send(self, request: Request) -> None:
        """A request sets out."""
        connection = request.connection
        request.arrival = self.carry(connection.session.receive, request, connection=connection)
        if self._hole:
            self._watch(connection, request)

    def delay(self, request: Request, seconds: float) -> None:
        """A request under way takes longer."""
        handle = request.arrival
        assert handle is not None
        if handle.when() <= self.loop.time():
            return  # it is about to arrive, or is held in the hole
        handle.cancel()
        connection = request.connection
        connection.due = handle.when() + seconds
        request.arrival = self.loop.call_at(
            connection.due, self._arrived, connection.session.receive, (request,), context=SERVER
        )

    def reply(self, request: Request, answers: Answers | None, error: Exception | None, status: str) -> None:
        """The server has executed a request."""
        connection = request.connection
        if connection.gone or connection.closed:
            self.lost(request)
        else:
            self.carry(connection.answered, request, answers, error, status, connection=connection)

    def lost(self, request: Request) -> None:
        """A request was executed, and its client will not hear of it."""
        self.lost_replies += 1
        if request.changed:
            self.zombie_commits += 1

    async def connect(self) -> SimConnection:
        """A new connection. Raises SimError when it is refused or takes too long."""
        self.connects += 1
        future: asyncio.Future[SimConnection] = self.loop.create_future()
        self._connecting[future] = None
        least, most = self.latency
        delay = 2 * (self.slow + least + (most - least) * self.dice.random())
        self.loop.call_later(delay, self._arrived, self._accepted, (future,), context=SERVER)
        if self._hole:
            self.loop.call_later(self.tcp_timeout, self._late, future, context=SERVER)
        try:
            return await future
        finally:
            self._connecting.pop(future, None)

    def _late(self, future: asyncio.Future[SimConnection]) -> None:
        if not future.done():
            future.set_exception(SimError(None, "connection timeout expired"))

    def _accepted(self, future: asyncio.Future[SimConnection]) -> None:
        if future.done() or future not in self._connecting:
            return
        server = self.servers[0] if len(self.servers) == 1 else self.dice.choice(self.servers)
        if self.refuse or self.kept_out or server.down:
            future.set_exception(SimError(None, "connection refused"))
            return
        connection = SimConnection(self, server.session())
        connection.session.connection = connection
        self.connections[connection] = None
        future.set_result(connection)
