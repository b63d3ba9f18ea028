"""A simulated PostgreSQL: as much of its transactions, snapshots and locks as busrep's plans can see, in virtual time.

`SimDatabase` is the primary, `SimDatabase.replica` a server that follows it; processes reach them over a `Path`.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import deque
from collections.abc import Callable, Generator, Mapping

import attrs

from busrep.stores.plans import Answers, Control, Row, Sql, Step
from tests.proof.sim.path import FAILED, IDLE, OPEN, SERVER, Path, Request, SimConnection
from tests.proof.sim.queries import Run
from tests.proof.sim.statements import Statement, known, made
from tests.proof.sim.tables import DEFINITIONS, Checkpoint, SimError, State, Transaction, Wait, blocks, granted, release

__all__ = ["Checkpoint", "Fact", "Path", "Replica", "SimConnection", "SimDatabase", "SimError"]

# PostgreSQL writes so many values of a sequence ahead: a crash loses up to these.
LOGGED_AHEAD = 32
# How long a session waits for a lock before it looks for a cycle, seconds: PostgreSQL's deadlock_timeout.
DEADLOCK_AFTER = 1.0

Fact = tuple[str, str, str, int, tuple[bytes, ...], float, int]
"""(epoch, stream, writer, ID, payloads, when it was committed, incarnation its transaction proved; 0: none)."""

Facts = Mapping[tuple[str, str], Mapping[int, tuple[bytes, ...]]]


@attrs.frozen
class Flush:
    """A COMMIT that waits so many seconds, for a slow disk or for a synchronous standby."""

    seconds: float


Executed = Generator["Wait | Flush", None, Answers]


class Session:
    """The server's end of one connection. ``csn``: the snapshot of a statement under way."""

    __slots__ = ("changed", "connection", "csn", "dead", "linger", "pid", "request", "server", "txn", "wait", "work")

    def __init__(self, server: Server, pid: int) -> None:
        self.server, self.pid = server, pid
        self.connection: SimConnection
        self.txn: Transaction | None = None
        self.work: Executed | None = None
        self.request: Request | None = None
        self.wait: Wait | None = None
        self.csn: int | None = None
        self.linger: float | None = None  # once the client is gone
        self.dead = False
        self.changed = 0.0  # when its state did, for a person

    def receive(self, request: Request) -> None:
        """A request has arrived."""
        request.arrival = None
        if self.dead:
            self.connection.path.carry(self.connection.reset, connection=self.connection)
            return
        self.request = request
        self.work = self.server.perform(self, request)
        self.server.go_on(self)

    def finished(self, answers: Answers | None, error: Exception | None) -> None:
        """The request was executed."""
        request, self.request, self.work, self.csn = self.request, None, None, None
        assert request is not None
        request.done = True
        self.changed = self.server.now()
        status = IDLE if self.txn is None else FAILED if self.txn.failed else OPEN
        self.connection.path.reply(request, answers, error, status)
        if self.linger is not None:
            self._notice()

    def orphaned(self, linger: float) -> None:
        """Its client is gone; that is noticed ``linger`` seconds after all that was sent has been executed."""
        self.linger = linger
        request = self.connection.request
        if request is None or request.done:
            self._notice()

    def _notice(self) -> None:
        self.server.loop.call_later(self.linger or 0.0, self.end, context=SERVER)

    def end(self) -> None:
        """Roll back, and serve no more."""
        if not self.dead:
            self.stop()
            if self.txn is not None:
                self.connection.path.rollbacks += 1
                self.server.roll_back(self)
            self.server.resume()

    def stop(self) -> None:
        """Nothing is executed any more."""
        self.dead = True
        self.server.sessions.pop(self, None)
        self.server.unpark(self)
        if self.work is not None:
            self.work.close()
            self.work = None


class Server:
    """What a primary and a replica have in common: sessions, and running their statements.

    ``down``: connects are refused. ``violations``: what must never happen, as texts. ``flush``: how long a COMMIT that
    changed something takes, seconds: until then nobody sees it, and it keeps its locks. ``standby_at``: no COMMIT
    that changed something ends before, loop time. ``behind``: how far its clock was set back, seconds.
    """

    follows = False
    flush = standby_at = behind = 0.0
    synchronous_commit = "on"
    timeline = 1

    @property
    def identity(self) -> str:
        """The system identifier and the timeline; not of one that follows."""
        return "" if self.follows else f"1/{self.timeline:08X}"

    def wall(self) -> float:
        """What its clock shows."""
        return self.now() - self.behind

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.down = False
        self.violations: list[str] = []
        self.sessions: dict[Session, None] = {}
        self._given = loop
        self._pid = 100
        self._granted: deque[Wait] = deque()

    @functools.cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop whose time is the server's: the one that runs when it is first asked for."""
        return self._given or asyncio.get_running_loop()

    def now(self) -> float:
        """The server's clock."""
        return self.loop.time()

    def session(self) -> Session:
        """Accept a connection."""
        self._pid += 1
        session = Session(self, self._pid)
        self.sessions[session] = None
        return session

    def view(self) -> tuple[State, int]:
        """What a statement that begins now sees."""
        raise NotImplementedError

    def horizon(self) -> int:
        """The oldest snapshot that anybody still looks at."""
        raise NotImplementedError

    # -- statements

    def perform(self, session: Session, request: Request) -> Executed:
        """Execute the steps of one round trip: without BEGIN they are a transaction of their own."""
        answers: Answers = []
        try:
            for step in request.steps:
                if isinstance(step, Sql):
                    txn = session.txn
                    if txn is None:
                        txn = session.txn = Transaction(self.view()[0], self.now(), implicit=True)
                    statement, run = self._statement(session, txn, step)
                    if statement.rows is not None:
                        answers.append(statement.rows(run))
                    else:
                        session.csn = run.csn
                        assert statement.waits is not None
                        answers.append((yield from statement.waits(run)))
                else:
                    if step is Control.COMMIT:
                        yield from self._flushed(session)
                    self._control(session, step, request)
            if session.txn is not None and session.txn.implicit:
                yield from self._flushed(session)
                self._commit(session, session.txn, request)
        except SimError:
            txn = session.txn
            if txn is not None and not txn.failed:
                # Its locks are free from now on, though of an explicit one ROLLBACK is still due.
                self.roll_back(session)
                if not txn.implicit:
                    txn.failed, session.txn = True, txn
            raise
        return answers

    def _statement(self, session: Session, txn: Transaction, step: Sql) -> tuple[Statement, Run]:
        if txn.failed:
            raise SimError("25P02", "current transaction is aborted, commands are ignored until its end")
        statement = known(step.text)
        if statement.writes is not None and (txn.read_only or self.follows):
            raise SimError("25006", f"cannot execute {statement.writes} in a read-only transaction")
        state, csn = self.view()
        if txn.whole:
            if txn.snapshot is None:
                txn.state, txn.snapshot = state, csn
            state, csn = txn.state, txn.snapshot
        run = Run(self, session, state, txn, csn, step.params)
        if statement.tables and not made(run):
            raise SimError("42P01", "relations busrep_... do not exist")
        return statement, run

    def _control(self, session: Session, step: Step, request: Request) -> None:
        txn = session.txn
        if step is Control.ROLLBACK:
            if txn is not None and not txn.failed:
                self.roll_back(session)
            session.txn = None
        elif step is Control.COMMIT:
            if txn is not None and txn.failed:
                session.txn = None
                raise SimError("25P02", "a statement of this transaction had failed: rolled back")
            if txn is not None:
                self._commit(session, txn, request)
        elif txn is None:
            whole = step is Control.SNAPSHOT
            session.txn = Transaction(self.view()[0], self.now(), whole=whole, read_only=whole)
        elif txn.failed:
            raise SimError("25P02", "current transaction is aborted, commands are ignored until its end")
        else:
            txn.implicit = False

    def _flushed(self, session: Session) -> Generator[Flush, None, None]:
        txn, seconds = session.txn, max(self.flush, self.standby_at - self.now())
        if seconds > 0 and txn is not None and not txn.failed and (txn.writes or txn.created):
            yield Flush(seconds)

    def _commit(self, session: Session, txn: Transaction, request: Request) -> None:
        session.txn = None
        if txn.writes or txn.created:
            request.changed = True
            session.connection.path.commits += 1
            self.committing(txn)
            if (txn.synchronous_commit or self.synchronous_commit) != "off":  # the log is on the disk up to here
                for sequence in txn.state.sequences.values():
                    sequence.flushed = sequence.given
        txn.state.commit(txn, self.now(), self.horizon)
        if txn.locks:
            self._granted += release(txn)

    def committing(self, txn: Transaction) -> None:
        """A transaction that changed something is about to commit."""

    def roll_back(self, session: Session) -> None:
        """Undo what is open, and free its locks."""
        txn, session.txn = session.txn, None
        if txn is not None and not txn.failed:
            txn.state.abort(txn)
            if txn.locks:
                self._granted += release(txn)

    # -- waiting

    def go_on(self, session: Session, error: SimError | None = None) -> None:
        """Run a session, and whoever that sets free, as far as it goes."""
        self._step(session, error)
        self.resume()

    def resume(self) -> None:
        """Run the sessions that got the lock they waited for."""
        while self._granted:
            wait = self._granted.popleft()
            session: Session = wait.session
            if session.wait is wait:
                self.unpark(session)
                self._step(session, None)

    def _step(self, session: Session, error: SimError | None) -> None:
        work = session.work
        assert work is not None
        try:
            wait = work.send(None) if error is None else work.throw(error)
        except StopIteration as stop:
            session.finished(stop.value, None)
        except SimError as raised:
            session.finished(None, raised)
        except Exception as raised:  # the simulation itself is at fault: nobody may overlook that
            self.violations.append(f"the simulated database failed: {type(raised).__name__}: {raised}")
            self.roll_back(session)
            session.finished(None, raised)
        else:
            if isinstance(wait, Flush):
                self.loop.call_later(wait.seconds, self._go_on_with, session, work, context=SERVER)
            else:
                self._park(session, wait)

    def _go_on_with(self, session: Session, work: Executed) -> None:
        if session.work is work:
            self.go_on(session)

    def _park(self, session: Session, wait: Wait) -> None:
        wait.session, session.wait = session, wait
        if wait.record.waiting is None:
            wait.record.waiting = []
        wait.record.waiting.append(wait)
        loop, timeout = self.loop, wait.transaction.lock_timeout
        timers = [loop.call_later(DEADLOCK_AFTER, self._look, wait, context=SERVER)]
        if timeout is not None:
            timers.append(loop.call_later(timeout, self._timed_out, wait, context=SERVER))
        wait.timers = timers

    def unpark(self, session: Session) -> None:
        """It waits no longer; who waited behind it may be free to go on."""
        wait, session.wait = session.wait, None
        if wait is not None:
            wait.gone()
            if wait.record.waiting:
                self._granted += granted(wait.transaction.state, wait.record)

    def _timed_out(self, wait: Wait) -> None:
        self._refused(wait, SimError("55P03", "canceling statement due to lock timeout"))

    def _look(self, wait: Wait) -> None:
        waits = {session.txn: session.wait for session in self.sessions if session.wait is not None}
        seen: dict[Transaction, None] = {}
        todo = list(blocks(wait))
        while todo:
            blocker = todo.pop()
            if blocker is wait.transaction:
                self._refused(wait, SimError("40P01", "deadlock detected"))
                return
            further = waits.get(blocker)
            if further is not None and blocker not in seen:
                seen[blocker] = None
                todo += blocks(further)

    def _refused(self, wait: Wait, error: SimError) -> None:
        session: Session = wait.session
        if session.wait is wait:
            self.unpark(session)
            self.go_on(session, error)

    def described(self, txn: Transaction) -> Row:
        """Who a transaction is, for a person: process ID, name, state, its age and that of the state, seconds."""
        for session in self.sessions:
            if session.txn is txn:
                state = "active" if session.work is not None else "idle in transaction"
                return session.pid, "busrep", state, int(self.now() - txn.started), int(self.now() - session.changed)
        return 0, "", "ended", 0, 0

    def snapshots(self, state: State) -> list[int]:
        """The snapshots of this state that sessions look at."""
        found = []
        for session in self.sessions:
            txn = session.txn
            if txn is not None and txn.state is state:
                if txn.snapshot is not None:
                    found.append(txn.snapshot)
                if session.csn is not None:
                    found.append(session.csn)
        return found

    def end_all(self) -> None:
        """As a crash: all sessions are gone, and their clients will notice."""
        sessions = list(self.sessions)
        for session in sessions:
            session.stop()
        for session in sessions:
            self.roll_back(session)
            session.connection.path.carry(session.connection.reset, connection=session.connection)
        self._granted.clear()


@attrs.frozen
class Replicated:
    """How far a standby server had got: so many commits of that state, which were this."""

    state: State
    commits: int
    checkpoint: Checkpoint


class SimDatabase(Server):
    """The primary. ``loop``: whose time it lives in; else the one that runs when it is first used.

    ``history``: every fact that was ever committed, in order; ``violations``: each fact whose transaction committed
    although the writer's incarnation had been raised before.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(loop)
        self.state = State()
        self.history: list[Fact] = []
        self.states = [self.state]  # one more after each restore
        self.replicas: list[Replica] = []
        self._facts: tuple[object, Facts] | None = None  # made of which rows

    def view(self) -> tuple[State, int]:
        """The newest."""
        return self.state, self.state.csn

    def horizon(self) -> int:
        """The oldest snapshot that anybody still looks at, here or on a replica."""
        state = self.state
        oldest = [state.csn, *self.snapshots(state)]
        for replica in self.replicas:
            if replica.state is state:
                oldest += [replica.csn, *replica.snapshots(state)]
        return min(oldest)

    def committing(self, txn: Transaction) -> None:
        """Note the facts, and whether the writer was still who it took itself for (9.4)."""
        self._check_durable(txn)
        if not txn.facts:
            return
        tables = txn.state.tables
        at = DEFINITIONS["busrep_facts"].columns.index("row")
        rows: dict[tuple[str, str, int], list[tuple[int, bytes]]] = {}
        for record in txn.writes:
            if record.table is tables["busrep_facts"] and record.pending is not None:
                stream, writer, id, place = record.key
                rows.setdefault((stream, writer, id), []).append((place, record.pending[at].encode()))
        epoch = tables["busrep_meta"].committed()[("epoch",)][1]
        incarnations = {key[0]: values[1] for key, values in tables["busrep_writers"].committed().items()}
        for (stream, writer, id), found in rows.items():
            incarnation = txn.claims.get(writer, 0)
            payloads = tuple(payload for _, payload in sorted(found))
            self.history.append((epoch, stream, writer, id, payloads, self.now(), incarnation))
            if incarnation != incarnations.get(writer):
                self.violations.append(
                    f"fact {id} of ({stream}, {writer}) was committed under incarnation {incarnation}, but the "
                    f"writer's is {incarnations.get(writer)}"
                )

    def _check_durable(self, txn: Transaction) -> None:
        """Note as a violation what a crash could take back after it was announced (9.22)."""
        if (txn.synchronous_commit or self.synchronous_commit) != "off":
            return
        writers = txn.state.tables["busrep_writers"]
        if txn.facts or any(record.table is writers for record in txn.writes):
            self.violations.append("facts, or a claim, were committed without synchronous_commit")

    def facts(self) -> Facts:
        """All facts that are committed now, {(stream, writer): {ID: payloads}}."""
        definition = DEFINITIONS["busrep_facts"]
        rows = self.state.tables[definition.name].committed()
        if self._facts is None or self._facts[0] is not rows:
            at = definition.columns.index("row")
            found: dict[tuple[str, str], dict[int, list[bytes]]] = {}
            for (stream, writer, id, _), values in sorted(rows.items()):
                found.setdefault((stream, writer), {}).setdefault(id, []).append(values[at].encode())
            facts = {key: {id: tuple(payloads) for id, payloads in of.items()} for key, of in found.items()}
            self._facts = (rows, facts)
        return self._facts[1]

    def effects(self) -> list[Row]:
        """The rows of the application's table, (reader, epoch, stream, writer, token, row), as they were inserted."""
        return [values[1:] for _, values in sorted(self.state.tables["effects"].committed().items())]

    # -- operators, and faults

    def crash(self, dice: random.Random) -> None:
        """All sessions are gone, what was open is rolled back, late transaction IDs are forgotten. Sequences go back to
        what was on the disk, where that was written before their last values, or jump."""
        self.end_all()
        state = self.state
        for sequence in state.sequences.values():
            if sequence.given and sequence.called:
                sequence.given = dice.randint(sequence.flushed, sequence.given + LOGGED_AHEAD)
        state.next_xid = dice.randint(state.durable_xid, state.next_xid)
        state.statuses = {xid: status for xid, status in state.statuses.items() if xid < state.next_xid}

    def checkpoint(self) -> Checkpoint:
        """All that is committed now, for `restore`."""
        return self.state.checkpoint()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint, sequences and transaction IDs too; all sessions are gone."""
        self.end_all()
        self.state = State.restored(checkpoint, self.now())
        self.states.append(self.state)

    def promote(self, replicated: Replicated, dice: random.Random) -> None:
        """A server that has ``replicated`` so much of this one takes its place: what was committed since is lost. It is
        on another timeline, and its sequences jump as after a crash. A replica that has more than that is made anew."""
        former, timeline = self.state, self.timeline + 1
        self.restore(replicated.checkpoint)
        self.timeline = timeline
        for sequence in self.state.sequences.values():
            if sequence.given and sequence.called:
                sequence.given += dice.randint(0, LOGGED_AHEAD)
        for replica in self.replicas:
            if replica.state is former:
                replica.follow_promoted(replicated.commits)
        del former.commits[replicated.commits :]

    def replicated(self) -> Replicated:
        """What a server has that receives nothing from now on, for `promote`."""
        return Replicated(self.state, len(self.state.commits), self.checkpoint())

    def replica(self, lag: Callable[[], float]) -> Replica:
        """A server that follows this one, ``lag()`` seconds behind; as new as this one is to begin with."""
        replica = Replica(self, lag)
        self.replicas.append(replica)
        return replica


class Replica(Server):
    """A server that shows what the primary had committed some time ago; it never goes back. It cannot be written.

    After a restore of the primary it is made anew from it, as late as it lags.
    """

    follows = True

    def __init__(self, primary: SimDatabase, lag: Callable[[], float]) -> None:
        super().__init__(primary._given)
        self.primary, self.lag = primary, lag
        self.violations = primary.violations
        self.state, self.csn = primary.view()
        self._applied = len(self.state.commits)
        self._states = len(primary.states)

    def view(self) -> tuple[State, int]:
        """What has been replayed."""
        until = self.now() - self.lag()
        states = self.primary.states
        while self._states < len(states) and states[self._states].since <= until:
            self.state, self.csn, self._applied = states[self._states], 1, 0
            self._states += 1
        commits = self.state.commits
        while self._applied < len(commits) and commits[self._applied][0] <= until:
            self.csn = commits[self._applied][1]
            self._applied += 1
        return self.state, self.csn

    def follow_promoted(self, commits: int) -> None:
        """The primary is another, which has so many commits of the former one."""
        if self._applied > commits:
            self.end_all()
            self.state, self.csn, self._applied = self.primary.state, 1, 0
            self._states = len(self.primary.states)

    def horizon(self) -> int:
        """Nothing is committed here."""
        return self.csn

    def crash(self) -> None:
        """All sessions are gone."""
        self.end_all()
