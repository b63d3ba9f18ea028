"""What one incarnation of a writer knows of its facts. It waits for nothing and locks nothing.

`WriterSession` holds the pure parts of a writer together: the frames to publish (`Writer`), one ID generator per
stream, and the transactions in doubt. `busrep.runtime.fact` is the life of one fact in it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import attrs

from busrep.caches.cache import is_invalidations
from busrep.caches.freshness import Commits
from busrep.core.ids import IdGenerator
from busrep.core.retained import RetainedRows
from busrep.core.writer import Writer
from busrep.errors import BusrepError, CommitUnknown, ConfigError, NotAWriter, WriterFenced
from busrep.stores.interface import AsyncTransaction, Claim, FactLog, Registered
from busrep.streams import Stream

from .committed import LastCommits
from .config import WriterConfig
from .deferred import DeferredTransaction
from .late_ids import LateIds, asked_above
from .open_facts import InDoubt, OpenFacts
from .other_writers import OtherWriters

log = logging.getLogger("busrep.writer")


@attrs.frozen
class Beat:
    """What a beat stores, by stream: ``positions``, of these streams; ``noted``, how far they may follow other writers.

    ``whole``: of all streams, and the registry is to be read; else of what has changed, or of one stream.
    ``unexplained``: see `OtherWriters.beat_stored`.
    """

    positions: dict[str, int]
    noted: dict[str, int]
    whole: bool
    unexplained: int


class WriterSession:
    """What one incarnation of a writer knows of its facts: a ``Writer`` core, and one ID generator per stream.

    ``claim``: the name, won in the store; None without a store. ``listens``: see `Writer`. ``torn``: bookkeeping was
    interrupted half-way, and the session is not to be used any more. Not thread-safe.
    """

    def __init__(self, config: WriterConfig, claim: Claim | None, incarnation: int, *, listens: bool = True) -> None:
        self.name, self.store, self._settings = config.name, config.store, config.settings
        self.incarnation, self.claim = incarnation, claim
        self.epoch = None if claim is None else claim.epoch
        self.torn = False
        # Of invalidations: since when facts may be committed that are not applied here.
        self.commits = {stream.name: Commits() for stream in config.streams if is_invalidations(stream)}
        # Called with what was committed to them, before whoever wrote it goes on: so a process reads its own writes.
        self.on_invalidations: Callable[[str, Sequence[bytes]], object] | None = None
        self.core = Writer(
            config.server, self.name, incarnation=incarnation, epoch=self.epoch, settings=self._settings,
            listens=listens,
        )  # fmt: skip
        self.core.announcements.in_turns &= config.hears
        self._hears = config.hears
        self.generators = {stream.name: self._generator(stream) for stream in config.streams}
        self._last: dict[str, int] = {}
        self._own_tables = {stream.name for stream in config.streams if stream.table is not None}
        self._durable = {stream.name: stream for stream in config.streams if not stream.resettable}
        self.others = OtherWriters(config, incarnation, claim, self.generators)
        self.doubts: list[InDoubt] = []
        self.late_ids = LateIds(self.generators)
        self.kept: dict[str, RetainedRows] = {}  # of resettable streams whose rows outlive their publication
        self.fenced: WriterFenced | None = None
        self.won = 0  # under which incarnation the name was won in place of this one, and finished: ask above it
        self.committed = LastCommits()
        self.facts = 0
        self.rows = 0
        self._connection: object = None  # the one that was published on last
        self._stored: dict[str, int] = {}  # the own positions as the last beats stored them
        self._beats_left = 0  # that store what has changed alone, before the next one that stores and reads everything

    def _generator(self, stream: Stream[Any]) -> IdGenerator:
        """The ID generator of a stream, which the core announces from where its own facts begin."""
        start = highest = 0
        if not stream.resettable:
            _, claim = self.log
            start, highest = claim.starts[stream.name], claim.highest[stream.name]
        self.core.add_stream(stream, start)
        return IdGenerator(
            stream.name,
            position=start,
            highest=highest,
            negative=stream.negative,
            stuck_after=self._settings.stuck_after,
            on_moved=functools.partial(self.position_moved, stream.name),
        )

    def clock(self) -> float:
        """The time that `stuck` is asked by, in seconds."""
        return time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether nothing more may be done under this incarnation."""
        return self.torn or self.fenced is not None

    def transaction(self, connection: Any) -> AsyncTransaction:
        """A transaction on busrep's connection or the caller's. Raises ConfigError."""
        store, claim = self.log
        if connection is not None:
            return store.transaction(claim, connection)
        return DeferredTransaction(store, claim, self._own_tables)

    @property
    def log(self) -> tuple[FactLog, Claim]:
        """Where the facts go, and the name won there. Raises ConfigError for a writer of streams in memory alone."""
        if self.store is None or self.claim is None:  # connect() has refused streams with a table and no store
            raise ConfigError("pass store= to connect()")
        return self.store, self.claim

    def generator_of(self, stream: str) -> IdGenerator:
        """The IDs of a stream that this process writes. Raises NotAWriter."""
        if (generator := self.generators.get(stream)) is None:
            raise NotAWriter(stream, self.name)
        return generator

    def ask(self, opened: dict[str, OpenFacts], stream: Stream[Any], count: int, owner: str, *, late: bool) -> None:
        """Ask the generator for IDs, for facts in ``opened``.

        ``late``: they may come as the rows are written, in busrep's table. Not while it is not known of others what
        they got, for these are told from them by their IDs.
        """
        name = stream.name
        late = (
            late and name in self._durable and name not in self._own_tables and not any(map(asked_above, self.doubts))
        )
        ticket = self.generators[name].ask(count, now=self.clock(), owner=owner)
        opened[name] = self.late_ids.asked(stream, ticket, late=late)

    def reserved_in_memory(self, one: OpenFacts, count: int) -> None:
        """Open new IDs of a stream that has no table."""
        last = self._last.get(one.stream.name, 0)
        self._last[one.stream.name] = last + count
        self.late_ids.reserved(one, range(last + 1, last + count + 1))

    def tear(self) -> None:
        """The bookkeeping cannot go on: as after a crash the name is to be claimed anew, and what was committed is in
        the table."""
        self.torn = True

    def book(self, opened: Iterable[OpenFacts], marker: object = None) -> bool:
        """Hand what a transaction left to the writer core; an ID without rows is completed all the same. False: the
        session has ended, and nothing is published under it any more. ``marker``: the transaction's."""
        try:
            return self._book(list(opened), marker)
        except BaseException as error:
            self.tear()  # half-way; what is committed whoever claims the name next finds in the table
            if isinstance(error, BusrepError):
                raise CommitUnknown(None, error) from error
            raise

    def _book(self, opened: Sequence[OpenFacts], marker: object) -> bool:
        for one in opened:
            if (commits := self.commits.get(one.stream.name)) is not None:
                commits.ended(one)
        if self.ended:
            return False
        for one in opened:
            self.late_ids.redeem(one)
            if self.fenced is None and one.stream.name in self._durable and one.stream.table is None:
                self.committed.note(one, marker)
            facts, rows = one.complete(self.core)
            self.facts += facts
            self.rows += rows
            if (kept := self.kept.get(one.stream.name)) is not None:
                one.complete(kept)
        for one in opened:
            generator = self.generators[one.stream.name]
            # The facts are queued: the position may move past them.
            (generator.complete_many if one.claimed else generator.abandon)(one.ids)
        return True

    def position_moved(self, stream: str, position: int) -> None:
        """The ID generator moved the own position, by whatever event: what is complete up to there is published."""
        if (kept := self.kept.get(stream)) is not None:
            kept.position_moved(stream, position)
        self.core.position_moved(stream, position)

    def resolve(self, doubt: InDoubt) -> None:
        """Book what `decide` found: the facts are in doubt no more."""
        self.doubts.remove(doubt)
        self.book(doubt.opened, doubt.marker)

    def commit_sent(self, opened: Iterable[OpenFacts]) -> None:
        """COMMIT goes out now, or is the caller's to send from now on."""
        for one in opened:
            if (commits := self.commits.get(one.stream.name)) is not None:
                commits.sent(one, time.monotonic())

    def still_open(self, doubts: Iterable[InDoubt], asked: float) -> None:
        """The table said so, in answer to a question asked then (`time.monotonic`)."""
        for doubt in doubts:
            for one in doubt.opened:
                if (commits := self.commits.get(one.stream.name)) is not None:
                    commits.still_open(one, asked)

    def apply_invalidations(self, opened: Iterable[OpenFacts]) -> None:
        """Apply the invalidations among these facts in this process. It comes before `book`: interrupted, the facts are
        in doubt, and it is done again."""
        if self.on_invalidations is None:
            return
        for one in opened:
            if one.stream.name in self.commits and (payloads := one.written()):
                self.on_invalidations(one.stream.name, payloads)

    def applied_as_of(self, stream: str) -> float:
        """As of when this process has applied all that it committed to a stream of invalidations (`time.monotonic`)."""
        return self.commits[stream].as_of(time.monotonic())

    def in_doubt_of(self, doubt: InDoubt) -> list[tuple[str, int]]:
        """The facts that the table has to tell of."""
        return [(one.stream.name, id) for one in doubt.opened if one.stream.name in self._durable for id in one.ids]

    def ended_with(self, doubt: InDoubt) -> list[InDoubt]:
        """What is in doubt of a transaction that has ended: all at once, so that the next ones have nothing left to
        ask. The others also when this one has been asked after meanwhile, perhaps before they were noted."""
        same = [one for one in self.doubts if one.marker == doubt.marker]
        return same if doubt.marker is not None or doubt in same else []

    def frames_to_publish(self, connection: object, now: float) -> list[Any]:
        """The frames to publish next, on this connection. On a new one they begin with the own positions: other
        processes cannot see that this one came back."""
        if connection != self._connection:
            self.core.connected(now)
            self._connection = connection
        return self.core.frames_to_publish()

    def published(self, frames: Iterable[Any]) -> None:
        """Redis has taken these frames."""
        for frame in frames:
            self.core.published(frame)

    def written(self, stream: str) -> tuple[int, bool] | None:
        """Up to where all facts of a stream are finished, and whether others are under way; None if it is not written
        here."""
        generator = self.generators.get(stream)
        return None if generator is None else (generator.position, bool(generator.open or generator.asked))

    @property
    def unfinished(self) -> bool:
        """Whether a fact is open, or in doubt."""
        return bool(self.doubts) or any(one.open or one.asked for one in self.generators.values())

    def is_told_by_no_row(self, doubt: InDoubt) -> bool:
        """Whether it has rows of streams in memory alone, which are to be published if it was committed."""
        durable = {one.stream.name in self._durable for one in doubt.opened if one.written() or one.void}
        return doubt.sent and durable == {False}

    def decide(self, doubt: InDoubt, found: Mapping[tuple[str, int], list[bytes]], *, rolled_back: bool = True) -> None:
        """The transaction has ended and left what was ``found``: that, and nothing else, is what the facts were.
        ``rolled_back``: it was, if no row tells."""
        durable = [one for one in doubt.opened if one.stream.name in self._durable]
        for one in durable:
            if not self.late_ids.find(one, found):
                self.tear()
            rows = {id: found[one.stream.name, id] for id in one.ids if (one.stream.name, id) in found}
            rows = {id: payloads for id, payloads in rows.items() if one.may_have_written(id, payloads)}
            one.each, one.payloads = None, rows
        if rolled_back and not any(one.payloads for one in durable):
            for one in doubt.opened:
                one.forget()

    def beat_begins(self) -> Beat:
        """What the next beat stores, noted before the claim is read (9.27)."""
        self.core.announcements.stored = False
        whole = not self._hears or self.others.registry_doubted or self._beats_left <= 0
        positions = {name: self.generators[name].position for name in self._durable}
        noted = {name: self.generators[name].follows_to for name in self._durable}
        for name in [*positions] if not whole else ():
            behind = self._durable[name].follows and noted[name] > positions[name]
            if len(positions) > 1 and not behind and positions[name] == self._stored.get(name):
                del positions[name], noted[name]  # one stays, for the sign of life
        return Beat(positions, noted, whole, self.others.unexplained)

    def beat_stored(self, beat: Beat, registry: Registered) -> None:
        """A beat was stored, and this is what the database told."""
        self._beats_left = self._settings.silent_after_beats - 1 if beat.whole else self._beats_left - 1
        self._stored.update(beat.positions)
        self.others.beat_stored(beat.noted, registry, beat.unexplained)
        self.core.announcements.quiet_beats += 1
        self.core.announcements.stored = True
        if registry.read:
            writers = {writer for _, writer in registry.claims}
            self.core.announcements.writers = len(writers)
            self.core.announcements.rank = sum(writer < self.name for writer in writers)
        if registry.clock is not None:
            number = crc32(self.name.encode(errors="surrogatepass"))
            self.core.announcements.join(number, self.clock(), registry.clock)

    def is_successors(self, stream: str, token: int) -> bool:
        """Whether a fact under the own name is none of this process's, which is fenced: it may be a successor's."""
        if self.fenced is None:
            return False
        generator = self.generators.get(stream)
        return generator is None or token > max(generator.position, generator.own_highest)

    def fence(self, error: WriterFenced) -> None:
        """Another process has the name: nothing more is written or published under it."""
        if self.fenced is None:
            log.error("%s", error)
            self.fenced = error
            self.core.fenced()
            for generator in self.generators.values():
                generator.fenced(error)

    def stuck(self, now: float) -> list[dict[str, Any]]:
        """Facts open for longer than ``stuck_after``, JSON-able."""
        return [attrs.asdict(fact) for generator in self.generators.values() for fact in generator.stuck(now)]

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able."""
        own = {"facts": self.facts, "rows": self.rows, "in_doubt": len(self.doubts), "incarnation": self.incarnation}
        return {**self.core.statistics(), **own}
