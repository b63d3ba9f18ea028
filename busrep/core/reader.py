"""The reader: frames in; fetches to do, and batches to handle, out. No I/O, no clock.

For each (stream, writer) it knows one position: every row up to it has been taken in, in order. The states:

``unsynced``
    Nothing heard from this writer since the link came up. Rows are dropped, for it is unknown what came before
    them; the next POSITION tells.
``catching_up``
    A POSITION showed a gap. The rows in it are being fetched, page by page; lines of this (stream, writer) are held
    in order meanwhile and pass through the same rules afterwards.
``stale``
    Fetching keeps failing. As ``catching_up``, and still trying; a state of its own so that people see it.
``live``
    Every row arrives on the wire; each frame's first POSITION proves that none was lost before it.

``stopped``
    Its handler failed for good, or its rows are gone below the retention floor. Nothing is taken in until
    ``resume``; the others go on.
``bootstrapping``
    A snapshot of the whole stream is being loaded: all its writers are in this state, also those first heard meanwhile.
    Nothing is fetched or handed out; lines are held in order as while catching up, bounded by
    ``full_sync_buffer_limit`` over all streams together. A lost link costs what is held, not the state. Once the
    snapshot is applied each goes on from its position in it, through what is held, and the rest by catch-up.

Held lines pass on as there is room for their rows in the receive queue; until the last has, later ones wait behind.

How to drive it: after each of ``connected``, ``receive``, ``receive_page``, ``fetch_failed``, ``learned``, ``done`` and
``bootstrapped``, and when ``next_retry`` says so, call ``fetches()`` and do what it returns; whatever ``ready`` names
has something to ``take``, and then ``done``.
"""

from __future__ import annotations

import enum
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import attrs

from ..errors import ConfigError, ParseError
from ..settings import Settings
from .backoff import pause_after
from .catchup import FetchUpdates, UpdatesPage
from .commands import Command, Name, Position, Server
from .delivery import DeliveryQueue, Missed, RawBatch, RecentTokens, Reset
from .framing import MOST_ERRORS, Frame, Rows, parse_message
from .senders import SenderTracker


class State(enum.Enum):
    """Where one (stream, writer) stands."""

    UNSYNCED = "unsynced"
    CATCHING_UP = "catching_up"
    STALE = "stale"
    LIVE = "live"
    STOPPED = "stopped"
    BOOTSTRAPPING = "bootstrapping"


class Event(enum.Enum):
    """What moves a (stream, writer) from one state to another."""

    UP_TO_DATE = "POSITION without a gap"
    GAP = "a gap"
    CAUGHT_UP = "caught up, link heard"
    CAUGHT_UP_UNHEARD = "caught up, link not heard"
    KEEPS_FAILING = "fetch keeps failing"
    PAGE = "a page arrived"
    LOST = "link lost, or queue full"
    RESET = "reset"
    GIVEN_UP = "handler failed, or rows pruned"
    RESUMED = "resumed"
    BOOTSTRAP = "a bootstrap begins"
    BOOTSTRAPPED = "snapshot applied, or given up"


_S, _E = State, Event

TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    _S.UNSYNCED: {
        _E.UP_TO_DATE: _S.LIVE,
        _E.GAP: _S.CATCHING_UP,
        _E.LOST: _S.UNSYNCED,
        _E.RESET: _S.UNSYNCED,
        _E.GIVEN_UP: _S.STOPPED,
        _E.BOOTSTRAP: _S.BOOTSTRAPPING,
    },
    _S.CATCHING_UP: {
        _E.CAUGHT_UP: _S.LIVE,
        _E.CAUGHT_UP_UNHEARD: _S.UNSYNCED,
        _E.KEEPS_FAILING: _S.STALE,
        _E.PAGE: _S.CATCHING_UP,
        _E.LOST: _S.UNSYNCED,
        _E.RESET: _S.UNSYNCED,
        _E.GIVEN_UP: _S.STOPPED,
        _E.BOOTSTRAP: _S.BOOTSTRAPPING,
    },
    _S.STALE: {
        _E.PAGE: _S.CATCHING_UP,
        _E.KEEPS_FAILING: _S.STALE,
        _E.LOST: _S.UNSYNCED,
        _E.RESET: _S.UNSYNCED,
        _E.GIVEN_UP: _S.STOPPED,
        _E.BOOTSTRAP: _S.BOOTSTRAPPING,
    },
    _S.LIVE: {
        _E.UP_TO_DATE: _S.LIVE,
        _E.GAP: _S.CATCHING_UP,
        _E.LOST: _S.UNSYNCED,
        _E.RESET: _S.UNSYNCED,
        _E.GIVEN_UP: _S.STOPPED,
        _E.BOOTSTRAP: _S.BOOTSTRAPPING,
    },
    _S.STOPPED: {
        _E.LOST: _S.STOPPED,
        _E.RESET: _S.STOPPED,
        _E.GIVEN_UP: _S.STOPPED,
        _E.RESUMED: _S.UNSYNCED,
        _E.BOOTSTRAP: _S.BOOTSTRAPPING,
    },
    _S.BOOTSTRAPPING: {
        _E.LOST: _S.BOOTSTRAPPING,
        _E.RESET: _S.BOOTSTRAPPING,
        _E.BOOTSTRAPPED: _S.UNSYNCED,
    },
}

Key = tuple[str, str]
Life = tuple[str, str, int | None]
"""(stream, writer, incarnation)."""

# (stream, writer) pairs noted at a time that the registry does not list yet; what is not noted waits for its next line.
MOST_UNCONFIRMED = 1_000

# Epochs of other deployments that are reported; each is reported once.
MOST_REFUTED = 16


@attrs.frozen
class Followed:
    """How one stream is followed. ``fetchable``: a source exists that can answer for it. ``from_now``: a writer first
    heard begins at the position that it tells, not at 0. ``foreign_writers``: it is declared to have writers that no
    registry lists, and that never say an incarnation (9.18)."""

    name: str
    resettable: bool = False
    fetchable: bool = True
    from_now: bool = False
    foreign_writers: bool = False

    @property
    def durable(self) -> bool:
        """Whether its positions are of a log, and can be saved."""
        return self.fetchable and not self.resettable


@attrs.define(eq=False)
class Progress:
    """One (stream, writer): position, state, and what is held for it."""

    stream: Followed
    writer: str
    position: int
    queue: DeliveryQueue
    state: State = State.UNSYNCED
    heard: bool = False  # a POSITION that tells came since the link is up: rows after it can be trusted
    open: list[bytes] = attrs.field(factory=list)  # `batch` rows whose number has not come yet
    open_size: int = 0
    held: deque[tuple[Rows | Position, int | None, int]] = attrs.field(factory=deque)  # the last: bytes
    held_size: int = 0
    buffered: bool = False  # held for a bootstrap: it counts towards full_sync_buffer_limit
    overflowed: bool = False
    target: int = 0  # the end of the gap that is being fetched
    later: int = 0  # what is to be fetched once everything held has passed
    stops: bool = False  # stopped while bootstrapping: takes effect after it
    asked: FetchUpdates | None = None
    failures: int = 0
    retry_at: float = 0.0
    error: BaseException | None = None
    incarnation: int | None = None
    native: bool = False  # whether the last line that counted said an incarnation
    starts_here: bool = False  # its first POSITION tells where it begins
    began: int = 0  # the position at which it was taken up, by the first process under a reader's name
    lower_since: float | None = None  # lines of lower incarnations alone have come since then
    recent: RecentTokens | None = None  # of a foreign writer

    @property
    def catching_up(self) -> bool:
        """Whether a gap is being fetched."""
        return self.state is State.CATCHING_UP or self.state is State.STALE

    @property
    def holding(self) -> bool:
        """Whether lines are held until what is before them has passed."""
        return self.state is State.BOOTSTRAPPING or self.catching_up or bool(self.held)


@attrs.define
class Counters:
    """What a reader has seen; ``statistics()`` shows it."""

    frames_received: int = 0
    rows_received: int = 0
    rows_fetched: int = 0
    rows_unregistered: int = 0
    writers_refused: int = 0
    rows_dropped: int = 0
    duplicates_dropped: int = 0
    late_rows: int = 0
    parse_errors: int = 0
    unknown_lines: int = 0
    messages_cut: int = 0
    gaps_found: int = 0
    gaps_filled: int = 0
    old_positions: int = 0
    old_incarnations: int = 0
    incarnations_outlived: int = 0
    other_logs: int = 0
    unregistered_lines: int = 0
    unnamed_lines: int = 0
    resets: int = 0
    missed: int = 0
    overflows: int = 0
    fetches: int = 0
    fetches_failed: int = 0
    pages_ignored: int = 0
    pages_unproven: int = 0
    rejected: int = 0
    epoch_changes: int = 0


def _end(item: Rows | Position) -> int:
    """How far a line says that its writer is; 0 when it does not."""
    return item.new if isinstance(item, Position) else item.tokens[-1] if item.tokens else 0


def _end_of_held(progress: Progress) -> int:
    return max((_end(item) for item, _, _ in progress.held), default=0)


def _due(progress: Progress) -> int:
    """How far rows are known to be due."""
    return max(progress.position, progress.target, progress.later)


class Reader:
    """The state of one reading process, all streams and writers together.

    ``streams``: the registered ones. ``own``: writer names whose lines are ignored (own echoes). ``undeclared``:
    follow any other stream too, as resettable and without a source. ``epoch``: of the positions held.
    """

    def __init__(
        self,
        streams: Iterable[Followed],
        *,
        settings: Settings | None = None,
        own: Iterable[str] = (),
        undeclared: bool = False,
        epoch: str | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.settings = settings or Settings()
        self.epoch = epoch
        self.counters = Counters()
        self.needed_catch_up: set[Key] = set()
        self.commands: list[Command] = []  # other commands, for the runtime to drain after each receive()
        self.errors: list[ParseError] = []  # likewise
        self.ready: dict[Key, None] = {}  # what has something to take()
        self.asks = False  # somebody has to publish REPLICATE: POSITIONs of foreign writers are due
        self.stepped_back: dict[Key, None] = {}  # whose writer was heard below its position: look at the sequence
        self.unproven: dict[Key, None] = {}  # whose writer said more than a page proves: likewise
        self.new_epoch: str | None = None  # set when the log is proven to be another: see rebase()
        self.registry: Mapping[Key, int] | None = None  # see `registered`
        self.other_deployments: list[str] = []  # epochs found to be of other logs, for the runtime to report
        self.queue_bytes = 0
        self.queue_bytes_peak = 0
        self.buffer_bytes = 0  # held by bootstraps, all streams together
        self.buffer_bytes_peak = 0
        self.progress: dict[Key, Progress] = {}
        self.last_heard: dict[str, float] = {}  # native writers only
        self._streams = {stream.name: stream for stream in streams}
        self._own = frozenset(own)
        self._undeclared = undeclared
        self._jitter = jitter
        self._fetching = 0  # pages asked for and not answered
        self._catching: dict[Key, Progress] = {}  # what is catching up; the next to ask for a page stands first
        self._waiting: dict[Key, Progress] = {}  # what holds lines only for want of room
        self._bootstrapping: dict[str, None] = {}
        self._draining: dict[Key, int] = {}  # bootstrapped, and not delivered yet up to here
        self._senders = SenderTracker(self.settings.followed)
        self._claims: dict[str, int] = {}  # writer -> incarnation, of the registry
        # (stream, writer, incarnation) that the registry did not list so when it was read: how far it said to be, and
        # how many answers have come since.
        self._unconfirmed: dict[Life, tuple[int, int]] = {}
        self._refuted: dict[str, None] = {}  # epochs announced that are of other logs than the one that is read
        self._doubted: str | None = None
        self._epoch_check: FetchUpdates | None = None
        self._epoch_retry_at = 0.0

    # -- the link ---------------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """The subscription is confirmed. Publish REPLICATE next."""
        self.disconnected()
        silent = set(self.silent(now))
        for writer in self.last_heard:  # silence is counted from here, but not of who was silent before
            if writer not in silent:
                self.last_heard[writer] = now

    def disown(self) -> None:
        """The own names are another process's now: their lines count like anybody's."""
        self._own = frozenset()

    def disconnected(self) -> None:
        """The link is gone, or what came over it cannot be trusted: nothing is live any more."""
        for progress in self.progress.values():
            self._lose(progress)

    def _move(self, progress: Progress, event: Event) -> None:
        # An event that the table does not list for this state is a bug here, and raises KeyError.
        progress.state = TRANSITIONS[progress.state][event]
        if progress.catching_up:
            self._catching[progress.stream.name, progress.writer] = progress
        else:
            self._catching.pop((progress.stream.name, progress.writer), None)

    def _lose(self, progress: Progress) -> None:
        self._move(progress, Event.LOST)
        self._forget(progress)

    def _forget(self, progress: Progress) -> None:
        # Held batch rows go on any disconnect (9.14), held lines too: what follows them may be lost.
        progress.heard = False
        progress.lower_since = None
        self._close_batch(progress)
        waits = progress.state is State.BOOTSTRAPPING
        # What was held of a log is known to be due all the same: its writer may never be heard again.
        progress.later = max(progress.later, _end_of_held(progress)) if waits else 0
        self._drop_held(progress)
        progress.buffered = waits
        self._abandon(progress)

    def _drop_held(self, progress: Progress) -> None:
        self._hold_size(progress, 0)
        progress.held, progress.overflowed = deque(), False
        self._waiting.pop((progress.stream.name, progress.writer), None)

    def _hold_size(self, progress: Progress, size: int) -> None:
        if progress.buffered:
            self.buffer_bytes += size - progress.held_size
            self.buffer_bytes_peak = max(self.buffer_bytes_peak, self.buffer_bytes)
        progress.held_size = size

    def _close_batch(self, progress: Progress) -> None:
        if progress.open:
            self.counters.rows_dropped += len(progress.open)
            progress.open, progress.open_size = [], 0

    def _abandon(self, progress: Progress) -> None:
        if progress.asked is not None:
            progress.asked, self._fetching = None, self._fetching - 1
        progress.failures, progress.retry_at, progress.error = 0, 0.0, None

    # -- what came over it ------------------------------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> None:
        """Take in one message. Then drain ``commands`` and ``errors``, do ``fetches()``, look at ``ready``."""
        self.receive_frame(parse_message(data, self.settings), now)

    def receive_frame(self, frame: Frame, now: float) -> None:
        """As ``receive``, of a message that is parsed already."""
        self.counters.frames_received += 1
        if frame.errors:
            self.counters.parse_errors += frame.malformed
            self.counters.unknown_lines += frame.unknown
            self.errors.extend(frame.errors)
        senders = self._senders
        senders.begin()
        for item in frame.items:
            if isinstance(item, Rows | Position):
                progress = self._progress_of(item)
                if progress is None or progress.state is State.STOPPED:
                    continue
                incarnation = senders.incarnation_of(item.writer)
                if self._current(progress, item, incarnation, now):
                    if item.writer in self.last_heard:
                        self.last_heard[item.writer] = now
                    self._line(progress, item, incarnation)
                continue
            if isinstance(item, Name):
                senders.observe(item)
                if item.instance not in self._own and self._lives(item):
                    self.last_heard.pop(item.instance, None)
                    self.last_heard[item.instance] = now  # the last heard stands last
                    if len(self.last_heard) > self.settings.followed:
                        del self.last_heard[next(iter(self.last_heard))]
            elif isinstance(item, Server):
                senders.observe(item)
                self.doubt(item.epoch)
            self.commands.append(item)
        if frame.cut:
            self._cut()

    def _cut(self) -> None:
        """A message, or the rest of it, was dropped, and rows with it (9.20). A native writer's next frame shows by its
        head what was in it. A foreign writer's next row shows nothing: its rows count again from its next POSITION on.
        Of who was not heard no row counts as it is, and its catch-up goes on."""
        self.counters.messages_cut += 1
        for progress in self.progress.values():
            if progress.native or progress.state is State.STOPPED:
                continue
            self.asks = True
            if progress.heard or progress.held:
                self._lose(progress)

    def _progress_of(self, item: Rows | Position) -> Progress | None:
        """The progress a line concerns; None for own echoes and streams nobody registered."""
        key = (item.stream, item.writer)
        progress = self.progress.get(key)
        if progress is None and item.writer not in self._own:
            stream = self._streams.get(item.stream)
            if stream is None and self._undeclared:
                stream = Followed(item.stream, resettable=True, fetchable=False)
            if stream is None:
                self.counters.rows_unregistered += len(item.tokens) if isinstance(item, Rows) else 0
            elif not self._registered(stream, item):
                pass
            elif len(self.progress) < self.settings.followed:
                self._streams[item.stream] = stream
                progress = self._add(stream, item.writer, 0)
                progress.starts_here = stream.from_now
                return progress
            else:
                self.counters.writers_refused += 1
                if len(self.errors) < MOST_ERRORS:
                    reason = f"{self.settings.followed} (stream, writer) are followed already: raise Settings.followed"
                    self.errors.append(ParseError(f"{item.stream} {item.writer}".encode(), "writer", reason))
        return progress if item.writer not in self._own else None

    def _add(self, stream: Followed, writer: str, position: int) -> Progress:
        progress = Progress(stream, writer, position, DeliveryQueue(stream.name, writer, position))
        self.progress[stream.name, writer] = progress
        if stream.name in self._bootstrapping:  # whatever is said of it now comes after the snapshot
            self._begin_bootstrap(progress)
        return progress

    def _registered(self, stream: Followed, item: Rows | Position) -> bool:
        """Rule 9.18: whether the registry lists who says this, or need not."""
        if stream.resettable or self.registry is None or (stream.name, item.writer) in self.registry:
            return True
        incarnation = self._senders.incarnation_of(item.writer)
        if stream.foreign_writers and incarnation is None:
            return True
        self.counters.unregistered_lines += 1
        if incarnation is not None and self._senders.is_trusted(item.writer, self.epoch):
            self._doubt_registry(item)
        return False

    def _doubt_registry(self, item: Rows | Position) -> None:
        # Noted for this incarnation alone: what a forged one said of the same writer is no word of its own.
        said = (item.stream, item.writer, self._senders.incarnation_of(item.writer))
        if said in self._unconfirmed or len(self._unconfirmed) < MOST_UNCONFIRMED:
            before, _ = self._unconfirmed.get(said, (0, 0))
            self._unconfirmed[said] = max(before, _end(item)), 0

    def _current(self, progress: Progress, item: Rows | Position, incarnation: int | None, now: float) -> bool:
        """Whether what is said of a stream is of this log, and of a writer's present life (9.11, 9.16, 9.19)."""
        stream, writer, senders = progress.stream, progress.writer, self._senders
        if stream.resettable:
            return self._present_life(progress, incarnation, now)
        if not self._registered(stream, item):
            return False
        claim = None if self.registry is None else self.registry.get((stream.name, writer))
        if claim is None and self.registry is not None:
            return True  # a declared foreign writer: no other passes here
        if not senders.is_trusted(writer, self.epoch):
            self._uncounted(incarnation)
            return False
        if claim is None or incarnation == claim:
            return True
        # One that is registered, and has never said an incarnation: its messages are single lines.
        if incarnation is None and stream.foreign_writers:
            return True
        self.counters.old_incarnations += 1
        if incarnation is not None and incarnation > claim:  # a hint: the claim decides
            self._doubt_registry(item)
        return False

    def _uncounted(self, incarnation: int | None) -> None:
        """A line counts for nothing: of a native writer without its NAME, or of another log."""
        if incarnation is None:
            self.counters.unnamed_lines += 1
        else:
            self.counters.other_logs += 1

    def _present_life(self, progress: Progress, incarnation: int | None, now: float) -> bool:
        """Rule 9.11: of a resettable stream only the highest incarnation counts, and a higher one is a reset; so is a
        lower one that has outlived it (9.24)."""
        if self._of_another_log(progress.writer):
            self.counters.other_logs += 1
            return False
        if incarnation is None:
            if self._senders.is_native(progress.writer) and not progress.stream.foreign_writers:
                self._uncounted(None)
                return False
            return True
        known = progress.incarnation
        if known is not None and incarnation < known and not self._outlived(progress, known, incarnation, now):
            self.counters.old_incarnations += 1
            return False
        progress.lower_since = None
        if known != incarnation:
            if known is not None or progress.position:
                self._reset(progress, 0)
            progress.incarnation = incarnation
        return True

    def _outlived(self, progress: Progress, known: int, incarnation: int, now: float) -> bool:
        """Rule 9.24: whether nothing but lower incarnations was heard for as long as makes a writer silent."""
        if progress.lower_since is None:
            progress.lower_since = now
        bound = self.settings.silent_after_beats * self.settings.heartbeat
        if now - progress.lower_since < bound:
            return False
        self.counters.incarnations_outlived += 1
        reason = (
            f"is below {known}, of which nothing was heard for {bound:g} s: stream {progress.stream.name!r} is taken "
            "to have begun anew. If the writer restarted, its clock is behind: set it"
        )
        self.errors.append(ParseError(f"NAME {progress.writer} {incarnation}".encode(), "incarnation", reason))
        return True

    def _of_another_log(self, writer: str) -> bool:
        """Whether this message is of another log than the one that is read here: of another deployment, or of the time
        before a restore. Without a log to read nothing tells them apart."""
        epoch = self._senders.epoch_of(writer)
        if epoch is None or self.epoch is None or epoch == self.epoch:
            return False
        return any(one.stream.durable for one in self.progress.values())

    def _lives(self, name: Name) -> bool:
        """Whether a NAME is a sign of life of a writer: of one with a claim, when it is of that claim."""
        if not self._senders.is_alive(name.instance, self.epoch):
            return False
        return self._claims.get(name.instance, name.incarnation) == name.incarnation

    def _reset(self, progress: Progress, position: int) -> None:
        self.counters.resets += 1
        progress.began, progress.starts_here = position, False
        self._move(progress, Event.RESET)
        # Rows of the former life that nobody handled yet are void: the handler is told before it gets new ones. And the
        # delivered position is another at once: what was handled was of the former life, and must not be saved, or
        # waited for, as if it were of this one.
        self._move_to(progress, position)
        progress.target = progress.later = 0
        self._draining.pop((progress.stream.name, progress.writer), None)
        self._notice(progress, Reset(progress.stream.name, progress.writer, position))

    def _notice(self, progress: Progress, notice: Reset | Missed) -> None:
        progress.queue.notice(notice)
        self.ready[progress.stream.name, progress.writer] = None

    def has_log(self, writer: str, incarnation: int) -> bool:
        """Whether this incarnation of ``writer`` has announced an epoch, as one that has a claim does."""
        return self._senders.has_log(writer, incarnation)

    def _line(self, progress: Progress, item: Rows | Position, incarnation: int | None) -> None:
        progress.native = incarnation is not None
        if progress.holding:
            self._hold(progress, item, incarnation)
        elif isinstance(item, Rows):
            self._rows(progress, item)
        else:
            self._position(progress, item.prev, item.new)

    def _hold(self, progress: Progress, item: Rows | Position, incarnation: int | None) -> None:
        """Rule 9.13: hold in order; when full drop the newest, and all after it."""
        size = item.size if isinstance(item, Rows) else 0
        cost = size + 200  # the line object itself
        if progress.buffered:
            full = self.buffer_bytes + cost > self.settings.full_sync_buffer_limit
        else:
            full = progress.held_size + size > self.settings.held_bytes
        if progress.overflowed or full:
            if not progress.overflowed:
                progress.overflowed = True
                self.counters.overflows += 1
            self.counters.rows_dropped += len(item.payloads) if isinstance(item, Rows) else 0
            # What is dropped still tells how far the writer is: there is no need to hear it again to fetch it.
            progress.later = max(progress.later, _end(item))
            return
        # Unknown what came before these rows: once caught up they would pass for live ones.
        if isinstance(item, Rows) and not (progress.heard or progress.held):
            self.counters.rows_dropped += len(item.payloads)
            return
        # Heartbeats of a catch-up that lasts for hours must not pile up: a repeated POSITION says nothing new.
        if isinstance(item, Position) and progress.held and progress.held[-1][0] == item:
            return
        progress.held.append((item, incarnation, cost))
        self._hold_size(progress, progress.held_size + cost)

    def _rows(self, progress: Progress, rows: Rows) -> None:
        if progress.state is not State.LIVE:
            self.counters.rows_dropped += len(rows.payloads)
            return
        tokens, payloads = rows.tokens, rows.payloads
        if progress.open and tokens:
            tokens = [tokens[0]] * len(progress.open) + tokens
            payloads = progress.open + payloads
            progress.open, progress.open_size = [], 0
        if rows.open:
            self._open_batch(progress, rows.open)
        if not tokens:
            return
        if tokens[0] <= progress.position:
            fresh = bisect_right(tokens, progress.position)
            self._below(progress, tokens[:fresh])
            tokens, payloads = tokens[fresh:], payloads[fresh:]
            if not tokens:
                return
        if self.queue_bytes > self.settings.receive_queue_bytes:
            self.counters.overflows += 1
            self.counters.rows_dropped += len(tokens)
            self._gap(progress, tokens[-1])  # fetched when there is room
            return
        self.counters.rows_received += len(tokens)
        self._take_in(progress, tokens, payloads, tokens[-1], fetched=False)

    def _below(self, progress: Progress, tokens: list[int]) -> None:
        """Rows at or below the position: repeated ones, or late ones of a foreign writer, whose order nothing proves.
        A late one is not delivered: its place has passed, and the position says that it was handled."""
        late = [] if progress.recent is None else progress.recent.late(tokens)
        self.counters.late_rows += len(late)
        self.counters.duplicates_dropped += len(tokens) - len(late)
        if late and len(self.errors) < MOST_ERRORS:
            line = f"RDATA {progress.stream.name} {progress.writer} {late[0]}".encode()
            reason = "came late, below the position, and is not delivered: see late_rows in statistics()"
            self.errors.append(ParseError(line, "row", reason))

    def _open_batch(self, progress: Progress, rows: list[bytes]) -> None:
        progress.open += rows
        progress.open_size += sum(map(len, rows)) + 100 * len(rows)
        if progress.open_size > self.settings.held_bytes:  # an endless batch: its rows come by fetch, or not at all
            self.counters.overflows += 1
            self._lose(progress)

    def _take_in(
        self, progress: Progress, tokens: list[int], payloads: list[bytes], upto: int, *, fetched: bool
    ) -> None:
        if progress.native:
            progress.recent = None
        elif tokens:
            if progress.recent is None:
                progress.recent = RecentTokens(progress.position)
            progress.recent.add(tokens)
        progress.position = upto
        self.queue_bytes += progress.queue.put(tokens, payloads, upto, fetched=fetched)
        if self.queue_bytes > self.queue_bytes_peak:
            self.queue_bytes_peak = self.queue_bytes
        if progress.queue:
            self.ready[progress.stream.name, progress.writer] = None

    def _position(self, progress: Progress, prev: int, new: int) -> None:
        self._close_batch(progress)  # rule 9.14
        if progress.starts_here:
            progress.starts_here, progress.began = False, new
            self._move_to(progress, new)
        if new < progress.position:
            self._step_back(progress, new)
            return
        progress.heard = True
        if prev <= progress.position:
            self._move(progress, Event.UP_TO_DATE)
            if new > progress.position:
                self._take_in(progress, [], [], new, fetched=False)
        else:
            self.counters.gaps_found += 1
            self._gap(progress, new)

    def _step_back(self, progress: Progress, new: int) -> None:
        stream, native = progress.stream, progress.native
        foreign = not native and (progress.incarnation is None or stream.foreign_writers)
        if stream.resettable and foreign:
            self._reset(progress, 0 if stream.fetchable else new)
            progress.heard = True
            if stream.fetchable and new > 0:
                self._gap(progress, new)
            else:
                self._move(progress, Event.UP_TO_DATE)
            return
        self.counters.old_positions += 1
        if stream.durable:
            self.stepped_back[stream.name, progress.writer] = None
        # Each frame of a native writer proves by its head what precedes it, so it can be followed from any head.
        # Of a foreign one it is unknown what was sent between this old line and now: wait for a newer.
        if native:
            progress.heard = True
            self._move(progress, Event.UP_TO_DATE)

    def _gap(self, progress: Progress, upto: int) -> None:
        self.needed_catch_up.add((progress.stream.name, progress.writer))
        if not progress.stream.fetchable:
            self._miss(progress, upto)
            self._move(progress, Event.UP_TO_DATE)
            return
        progress.target = upto
        self._move(progress, Event.GAP)

    def _miss(self, progress: Progress, upto: int) -> None:
        self.counters.missed += 1
        certain = progress.stream.durable or progress.native
        missed = Missed(progress.stream.name, progress.writer, progress.position, upto, certain)
        self._notice(progress, missed)
        progress.position, progress.recent = upto, None

    # -- catch-up ---------------------------------------------------------------------------------------------

    def follow(self, stream: Followed) -> None:
        """Follow one more stream. Its lines are ignored until then."""
        self._streams[stream.name] = stream

    @property
    def followed(self) -> Mapping[str, Followed]:
        """The streams followed."""
        return self._streams

    def start_at(self, stream: str, writer: str, position: int, began: int | None = None) -> None:
        """Positions known at the start: saved ones, or proven ones for a reader that starts from now. ``began``: where
        all began that was handled up to a saved one; else there."""
        self._add(self._streams[stream], writer, position).began = position if began is None else began

    def registered(self, claims: Mapping[Key, int]) -> None:
        """The registry: the incarnation of each registered (stream, writer). From then on a line of a stream with a
        table counts only from one of those (9.18)."""
        self.registry, self._claims = dict(claims), {writer: claim for (_, writer), claim in claims.items()}

    @property
    def registry_doubted(self) -> bool:
        """Whether to read the registry: a line was heard that it does not explain as it is known."""
        return bool(self._unconfirmed)

    def joined(self) -> dict[Life, int]:
        """To be asked after each answer of the registry. The (stream, writer, incarnation) that it lists, and of which
        lines were heard before it did, with how far these said that the writer is. Answer with ``confirmed``.

        An answer may be older than such a line: the question was, or a replica gave it. So what an answer does not
        explain, or nobody confirmed, is kept for ``silent_after_beats`` answers.
        """
        assert self.registry is not None  # noqa: S101 - without a registry nothing is doubted
        found = {}
        for said, (end, answers) in list(self._unconfirmed.items()):
            if self.registry.get(said[:2]) == said[2]:
                found[said] = end
            if answers + 1 < self.settings.silent_after_beats:
                self._unconfirmed[said] = end, answers + 1
            else:
                del self._unconfirmed[said]
        return found

    def confirmed(self, life: Life) -> None:
        """What was heard of it before the registry listed it has been asked for."""
        self._unconfirmed.pop(life, None)

    def learned(self, stream: str, writer: str, position: int) -> None:
        """A proven position that was not heard on the wire: from the positions table, or of a finished writer."""
        progress = self.progress.get((stream, writer)) or self._add(self._streams[stream], writer, 0)
        if (progress.catching_up and not progress.held) or progress.state is State.STOPPED:
            progress.target = max(progress.target, position)
        elif progress.holding:  # what is held may bring it
            progress.later = max(progress.later, position)
        elif position > progress.position:
            self._gap(progress, position)

    def fetches(self, now: float) -> list[FetchUpdates]:
        """Pages to fetch now. Answer each with ``receive_page`` or ``fetch_failed``.

        While the receive queue is more than half full only those get a page that have nothing waiting: a slow
        handler is not helped by more, but it must not keep the others from their rows.
        """
        for progress in list(self._waiting.values()):
            self._release(progress)
        wanted = []
        if self._doubted is not None and self._epoch_check is None and self._epoch_retry_at <= now:
            wanted += self._check_epoch()
        if self.new_epoch is not None:
            return wanted
        full = self.queue_bytes > self.settings.receive_queue_bytes // 2
        for key, progress in list(self._catching.items()):
            if self._fetching >= self.settings.fetches:
                break
            if progress.asked is None and progress.retry_at <= now and not (full and progress.queue.size):
                self._catching[key] = self._catching.pop(key)  # to the end of the line
                progress.asked = FetchUpdates(
                    progress.stream.name,
                    progress.writer,
                    progress.position,
                    progress.target,
                    self.settings.page_rows,
                    progress.incarnation,
                )
                self._fetching += 1
                wanted.append(progress.asked)
        self.counters.fetches += len(wanted)
        return wanted

    def receive_page(self, asked: FetchUpdates, page: UpdatesPage, now: float) -> None:
        """The answer to ``asked``."""
        progress = self.progress[asked.stream, asked.writer]
        # Given up meanwhile (a disconnect, a reset), it may even be of the log before: it proves nothing.
        if progress.asked is not asked and self._epoch_check is not asked:
            self.counters.pages_ignored += 1
            return
        if not self._verify_epoch(asked, page.epoch, now):
            return
        # A page of a foreign writer names no incarnation, whatever was said of one on the channel.
        lives = progress.stream.resettable and not progress.stream.foreign_writers
        if lives and page.incarnation != progress.incarnation:
            self.fetch_failed(asked, None, now)
            return
        self._fetching -= 1
        progress.asked = None
        if page.upto > progress.position:
            progress.failures, progress.error = 0, None
            self._move(progress, Event.PAGE)
            self.counters.rows_fetched += len(page.tokens)
            self._take_in(progress, list(page.tokens), list(page.payloads), page.upto, fetched=True)
        if progress.position >= progress.target:
            self._caught_up(progress)
        elif page.upto <= asked.after or (page.upto < asked.upto and not page.limited):
            # Asked of a source that cannot prove more yet (9.9): not an error, but no reason to hurry either.
            self.counters.pages_unproven += 1
            # Nobody may ever have written that far (9.17). A foreign writer's next row would not show what it left out.
            if progress.stream.durable and progress.native:
                self.unproven[asked.stream, asked.writer] = None
            self._retry_later(progress, now)

    def nothing_above(self, stream: str, writer: str, asked: int, highest: int) -> None:
        """No row is due above ``highest``, which is all that the sequence gave (9.17), though lines said that the
        writer is at ``asked``. Where it is later its next head, or beat, shows a gap again."""
        progress = self.progress[stream, writer]
        if not progress.catching_up or progress.target != asked or asked <= highest:
            return
        progress.target = max(progress.position, highest)
        if progress.asked is None and progress.position >= progress.target:
            self._caught_up(progress)

    def _caught_up(self, progress: Progress) -> None:
        self.counters.gaps_filled += 1
        if progress.state is State.STALE:
            self._move(progress, Event.PAGE)
        self._move(progress, Event.CAUGHT_UP if progress.heard else Event.CAUGHT_UP_UNHEARD)
        self._release(progress)

    def _release(self, progress: Progress) -> None:
        """Pass on what is held, through the usual rules: up to a new gap, or until its rows have no room."""
        held, size, overflowed = progress.held, progress.held_size, progress.overflowed
        self._drop_held(progress)  # for what is passed on must not be held again
        limit = self.settings.receive_queue_bytes
        # Where nothing of its own waits, a queue that is full of others' rows does not keep it: it drops to catch-up.
        while held and not progress.catching_up and (self.queue_bytes <= limit or not progress.queue.size):
            item, incarnation, cost = held.popleft()
            size -= cost
            self._line(progress, item, incarnation)
        if held or progress.catching_up:
            self._hold_size(progress, size)
            progress.held, progress.overflowed = held, overflowed
            if not progress.catching_up:
                self._waiting[progress.stream.name, progress.writer] = progress
            return
        later, progress.later, progress.buffered = progress.later, 0, False
        if overflowed:  # what came after the held lines is unknown
            self._lose(progress)
        if later > progress.position:
            self._gap(progress, later)

    def fetch_failed(self, asked: FetchUpdates, error: BaseException | None, now: float) -> None:
        """``asked`` got no answer; it is asked again after a pause."""
        if asked is self._epoch_check:
            self._epoch_check, self._epoch_retry_at = None, now + self.settings.retry_max
            return
        progress = self.progress.get((asked.stream, asked.writer))
        if progress is None or progress.asked is not asked:
            self.counters.pages_ignored += 1
            return
        self.counters.fetches_failed += 1
        progress.asked, self._fetching, progress.error = None, self._fetching - 1, error
        self._retry_later(progress, now)

    def _retry_later(self, progress: Progress, now: float) -> None:
        progress.failures += 1
        progress.retry_at = now + pause_after(progress.failures, self.settings, jitter=self._jitter)
        if progress.failures >= self.settings.stale_after:
            self._move(progress, Event.KEEPS_FAILING)

    def skip(self, stream: str, writer: str, upto: int) -> None:
        """Give up the rows up to ``upto`` (a pruned range, when the policy allows): they are reported missed. While
        bootstrapping nothing is given up: a snapshot comes in place of them."""
        progress = self.progress[stream, writer]
        if progress.state is State.BOOTSTRAPPING:
            return
        self._abandon(progress)
        if upto > progress.position:
            self._miss(progress, upto)
        if progress.catching_up and progress.position >= progress.target:
            self._caught_up(progress)

    def stop(self, stream: str, writer: str) -> None:
        """Take in nothing more of this (stream, writer), and drop what waits, until ``resume``. While bootstrapping
        that waits until the snapshot is applied."""
        progress = self.progress[stream, writer]
        if progress.state is State.BOOTSTRAPPING:
            progress.stops = True
            return
        target = _due(progress)
        self._move(progress, Event.GIVEN_UP)
        self._move_to(progress, progress.queue.delivered)
        progress.target = target

    def resume(self, stream: str, writer: str) -> None:
        """Go on behind what was handled; what was dropped comes by catch-up."""
        progress = self.progress[stream, writer]
        progress.stops = False
        if progress.state is State.STOPPED:
            self._move(progress, Event.RESUMED)
            if progress.queue:
                self.ready[stream, writer] = None
            # Not only at the next POSITION: its writer may be dead.
            self.learned(stream, writer, progress.target)

    def move_to(self, stream: str, writer: str, position: int, most: int | None = None) -> None:
        """The saved position turned out to be this one: go on from there, whatever was taken in already. ``most``:
        nothing above it is due, whatever was said."""
        progress = self.progress[stream, writer]
        target = _due(progress) if most is None else min(most, _due(progress))
        self._lose(progress)
        self._move_to(progress, position)
        self.learned(stream, writer, target)

    def _move_to(self, progress: Progress, position: int) -> None:
        self._forget(progress)
        self._empty(progress)
        progress.recent = None
        progress.position = progress.queue.delivered = position

    def next_retry(self, now: float) -> float | None:
        """When ``fetches()`` may next return something by the passing of time alone."""
        due = [p.retry_at for p in self._catching.values() if p.asked is None and p.retry_at > now]
        if self._doubted is not None and self._epoch_retry_at > now:
            due.append(self._epoch_retry_at)
        return min(due, default=None)

    @property
    def catching_up(self) -> Collection[Key]:
        """The (stream, writer) of which a gap is being fetched."""
        return self._catching.keys()

    # -- bootstrap --------------------------------------------------------------------------------------------

    @property
    def bootstrapping(self) -> Collection[str]:
        """The streams of which a snapshot is being loaded. What is delivered there is what was so before it."""
        return self._bootstrapping.keys()

    def bootstrap(self, stream: str) -> None:
        """A snapshot of ``stream`` will be loaded: hold the lines of all its writers, and drop what waits unhandled.

        One that is stopped is not any more: the snapshot comes in place of what stopped it. Raises ConfigError for a
        stream without a table.
        """
        followed = self._streams[stream]
        if not followed.durable:
            raise ConfigError(f"stream {stream!r} is not kept in a table: there is no snapshot of it")
        if stream not in self._bootstrapping:
            self._bootstrapping[stream] = None
            for progress in self._all_of(stream):
                self._begin_bootstrap(progress)

    def _begin_bootstrap(self, progress: Progress) -> None:
        # The snapshot may be older than what was taken in already: the rows up to there come again behind it.
        progress.later = _due(progress)
        self._move(progress, Event.BOOTSTRAP)
        self._move_to(progress, progress.queue.delivered)

    def bootstrapped(self, stream: str, positions: Mapping[str, int]) -> None:
        """The snapshot at ``positions`` ({writer: position}; who is not in it is at 0) is applied: go on behind it.

        What is held passes through the usual rules, the rest comes by catch-up.
        """
        for writer in positions:
            if (stream, writer) not in self.progress:
                self._add(self._streams[stream], writer, 0)
        del self._bootstrapping[stream]
        for progress in self._all_of(stream):
            progress.position = progress.queue.delivered = positions.get(progress.writer, 0)
            progress.began = progress.position
            self._draining[stream, progress.writer] = max(progress.later, _end_of_held(progress))
            self._end_bootstrap(progress)

    def _end_bootstrap(self, progress: Progress) -> None:
        self._move(progress, Event.BOOTSTRAPPED)
        if progress.stops:
            progress.stops, progress.later = False, max(progress.later, _end_of_held(progress))
            self.stop(progress.stream.name, progress.writer)
        else:
            # What is held begins with a POSITION: it tells whether it follows.
            self._release(progress)

    def drained(self, stream: str) -> bool:
        """Whether a bootstrap is over: all that was known when its snapshot was applied is delivered, of every writer
        that is not stopped, and nothing is held for it since. Ask after every input."""
        for key, due in list(self._draining.items()):
            progress = self.progress[key]
            done = not progress.holding and progress.queue.delivered >= due
            if key[0] == stream and (done or progress.state is State.STOPPED):
                del self._draining[key]
        return stream not in self._bootstrapping and not any(key[0] == stream for key in self._draining)

    def _all_of(self, stream: str) -> list[Progress]:
        return [progress for key, progress in self.progress.items() if key[0] == stream]

    # -- delivery ---------------------------------------------------------------------------------------------

    def take(self, stream: str, writer: str, most_rows: int | None = None) -> RawBatch | Reset | Missed | None:
        """The next thing to handle of one (stream, writer); answer with ``done``, or ``reject``."""
        key = (stream, writer)
        taken = self.progress[key].queue.take(most_rows or self.settings.handler_batch_rows)
        self.ready.pop(key, None)
        return taken

    def put_back(self, stream: str, writer: str) -> None:
        """Undo the last ``take``: it could not be handled as a whole."""
        self.progress[stream, writer].queue.put_back()
        self.ready[stream, writer] = None

    def done(self, stream: str, writer: str) -> int:
        """What was taken has been handled; return the position now delivered."""
        progress = self.progress[stream, writer]
        self._freed(progress.queue.done())
        if progress.queue:
            self.ready[stream, writer] = None
        return progress.queue.delivered

    def reject(self, batch: RawBatch) -> None:
        """Rows that came over the wire do not decode: drop them and what waits behind, and fetch them."""
        progress = self.progress[batch.stream, batch.writer]
        if progress.queue.handling is not batch:  # a reset came between
            return
        self.counters.rejected += 1
        if not progress.stream.fetchable:
            self.counters.missed += 1
            self.done(batch.stream, batch.writer)
            return
        received = progress.position
        self._empty(progress)
        progress.position = progress.queue.delivered
        if progress.catching_up:
            progress.target = max(progress.target, received)
            self._abandon(progress)
        else:
            self.counters.gaps_found += 1
            self._gap(progress, received)

    def _empty(self, progress: Progress) -> None:
        self._freed(progress.queue.clear())
        if not progress.queue:
            self.ready.pop((progress.stream.name, progress.writer), None)

    def _freed(self, size: int) -> None:
        self.queue_bytes -= size

    def delivered(self, stream: str, writer: str) -> int:
        """Every row of this writer up to here has been handled."""
        progress = self.progress.get((stream, writer))
        return 0 if progress is None else progress.queue.delivered

    def positions(self) -> dict[str, dict[str, int]]:
        """Delivered positions, {stream: {writer: position}}."""
        found: dict[str, dict[str, int]] = {}
        for (stream, writer), progress in sorted(self.progress.items()):
            found.setdefault(stream, {})[writer] = progress.queue.delivered
        return found

    def silent(self, now: float) -> list[str]:
        """Writers that announced themselves once and have not been heard for ``silent_after_beats`` beats."""
        bound = self.settings.heartbeat * self.settings.silent_after_beats
        return [writer for writer, heard in self.last_heard.items() if now - heard > bound]

    # -- the epoch --------------------------------------------------------------------------------------------

    def doubt(self, announced: str | None) -> None:
        """Somebody says that the log is of this epoch. A hint: a page, read from the log itself, decides."""
        if announced not in (None, self.epoch) and self.epoch is not None:
            self._doubted = announced

    def _check_epoch(self) -> list[FetchUpdates]:
        for progress in self.progress.values():
            if progress.stream.durable:
                # Below the floor nothing is answered, and that may be why there is a bootstrap.
                at = _due(progress) if progress.state is State.BOOTSTRAPPING else progress.position
                self._epoch_check = FetchUpdates(progress.stream.name, progress.writer, at, at, 1)
                return [self._epoch_check]
        self._doubted = None  # nothing followed here belongs to a fact log
        return []

    def _verify_epoch(self, asked: FetchUpdates, found: str, now: float) -> bool:
        """Whether a page is of the log that our positions belong to."""
        stream = self._streams.get(asked.stream)
        if stream is not None and stream.resettable:
            return True
        if self.epoch is None:
            self.epoch = found
        if found == self.epoch:
            if asked is self._epoch_check:
                # It may have been asked of a replica that lags: whoever says so again is believed enough to ask again.
                self._refute(self._doubted)
                self._doubted = self._epoch_check = None
                self._epoch_retry_at = now + self.settings.retry_max
                return False
            return self.new_epoch is None
        if self.new_epoch is None:
            self.counters.epoch_changes += 1
        self.new_epoch = found
        return False

    def _refute(self, announced: str | None) -> None:
        if announced is not None and announced not in self._refuted and len(self._refuted) < MOST_REFUTED:
            self._refuted[announced] = None
            self.other_deployments.append(announced)

    def keep_epoch(self, now: float) -> None:
        """It turned out to be this log all the same: ask again for what was refused as another's."""
        self.new_epoch = self._epoch_check = None
        self._epoch_retry_at = now + self.settings.retry_max
        for progress in self._catching.values():
            self._abandon(progress)

    def rebase(self, epoch: str, positions: Mapping[Key, int]) -> None:
        """Another fact log: all positions are void. Those given are where to go on; the rest starts at 0."""
        self.epoch, self.new_epoch = epoch, None
        self._doubted = self._epoch_check = None
        self._refuted.pop(epoch, None)
        self._unconfirmed.clear()  # how far they said to be is of the log before
        for key in dict.fromkeys((*self.progress, *positions)):
            progress = self.progress.get(key) or self._add(self._streams[key[0]], key[1], 0)
            if progress.stream.durable:
                self._reset(progress, positions.get(key, 0))

    def statistics(self) -> dict[str, object]:
        """Counters and states, JSON-able."""
        states: dict[str, dict[str, str]] = {}
        for (stream, writer), progress in sorted(self.progress.items()):
            states.setdefault(stream, {})[writer] = progress.state.value
        # Why what is catching up got no page, for whoever wonders about a stale one.
        trouble = {
            f"{stream} {writer}": repr(one.error) for (stream, writer), one in self._catching.items() if one.error
        }
        needed: dict[str, list[str]] = {}
        for stream, writer in sorted(self.needed_catch_up):
            needed.setdefault(stream, []).append(writer)
        return {
            **attrs.asdict(self.counters),
            "queue_bytes": self.queue_bytes,
            "queue_bytes_peak": self.queue_bytes_peak,
            "buffer_bytes": self.buffer_bytes,
            "buffer_bytes_peak": self.buffer_bytes_peak,
            "states": states,
            "trouble": trouble,
            "needed_catch_up": needed,
        }
