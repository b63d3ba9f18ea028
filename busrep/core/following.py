"""What a line or a page does to the position and the state of one (stream, writer)."""

from __future__ import annotations

import attrs

from .backoff import Retry
from .catchup import FetchUpdates, UpdatesPage
from .commands import Position
from .delivery import Reset
from .framing import ROW_OVERHEAD, Rows
from .received import HeldLines, ReceivedRows, end_of
from .states import TRANSITIONS, Event, State


@attrs.define(eq=False)
class Following(ReceivedRows):
    """One (stream, writer) as its lines and pages move it: its position, and its state."""

    held: HeldLines = attrs.field(init=False)
    retry: Retry = attrs.field(init=False)  # of fetching
    state: State = State.UNSYNCED
    heard: bool = False  # a POSITION that tells came since the link is up: rows after it can be trusted
    target: int = 0  # the end of the gap that is being fetched
    later: int = 0  # what is to be fetched once everything held has passed
    asked: FetchUpdates | None = None
    incarnation: int | None = None
    starts_here: bool = False  # its first POSITION tells where it begins
    began: int = 0  # the position at which it was taken up, by the first process under a reader's name
    lower_since: float | None = None  # lines of lower incarnations alone have come since then

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.held = HeldLines(self._intake)
        self.retry = Retry(self._intake.settings, self._intake.jitter)

    @property
    def catching_up(self) -> bool:
        """Whether a gap is being fetched."""
        return self.state is State.CATCHING_UP or self.state is State.STALE

    @property
    def holding(self) -> bool:
        """Whether lines are held until what is before them has passed."""
        return self.state is State.BOOTSTRAPPING or self.catching_up or bool(self.held)

    def _move(self, event: Event) -> None:
        # An event that the table does not list for this state is a bug here, and raises KeyError.
        self.state = TRANSITIONS[self.state][event]
        if self.catching_up:
            self._intake.catching[self.key] = None
        else:
            self._intake.catching.pop(self.key, None)

    def line(self, item: Rows | Position, incarnation: int | None) -> None:
        """Take in what counts of a message: rows, or a position."""
        self.native = incarnation is not None
        if self.holding:
            self._hold(item, incarnation)
        elif isinstance(item, Rows):
            self._rows(item)
        else:
            self._position(item.prev, item.new)

    def _hold(self, item: Rows | Position, incarnation: int | None) -> None:
        """Hold in order; when full drop the newest, and all after it."""
        if self.held.overflows(item):
            self._intake.counters.rows_dropped += len(item.payloads) if isinstance(item, Rows) else 0
            # What is dropped still tells how far the writer is: there is no need to hear it again to fetch it.
            self.later = max(self.later, end_of(item))
            return
        # Unknown what came before these rows: once caught up they would pass for live ones.
        if isinstance(item, Rows) and not (self.heard or self.held):
            self._intake.counters.rows_dropped += len(item.payloads)
            return
        self.held.append(item, incarnation)

    def _rows(self, rows: Rows) -> None:
        if self.state is not State.LIVE:
            self._intake.counters.rows_dropped += len(rows.payloads)
            return
        if lacking := self._take_rows(rows.tokens, rows.payloads):
            self._gap(lacking)  # fetched when there is room
        if rows.open:
            self.open += rows.open
            self.open_size += sum(map(len, rows.open)) + ROW_OVERHEAD * len(rows.open)
            if self.open_size > self._intake.settings.held_bytes:  # an endless batch
                self._intake.counters.overflows += 1
                self.lose()

    def _position(self, prev: int, new: int) -> None:
        self._close_batch()
        if self.starts_here:
            self.starts_here, self.began = False, new
            self.restart(new)
        if new < self.position:
            self._step_back(new)
            return
        self.heard = True
        if prev <= self.position:
            self._move(Event.UP_TO_DATE)
            if new > self.position:
                self._take_in([], [], new, fetched=False)
        else:
            self._intake.counters.gaps_found += 1
            self._gap(new)

    def _step_back(self, new: int) -> None:
        stream, native = self.stream, self.native
        foreign = not native and (self.incarnation is None or stream.foreign_writers)
        if stream.resettable and foreign:
            self.reset(0 if stream.fetchable else new)
            self.heard = True
            if stream.fetchable and new > 0:
                self._gap(new)
            else:
                self._move(Event.UP_TO_DATE)
            return
        self._intake.counters.old_positions += 1
        if stream.durable:
            self._intake.stepped_back[self.key] = None
        # Each frame of a native writer proves by its head what precedes it, so it can be followed from any head.
        # Of a foreign one it is unknown what was sent between this old line and now: wait for a newer.
        if native:
            self.heard = True
            self._move(Event.UP_TO_DATE)

    def _gap(self, upto: int) -> None:
        self._intake.needed_catch_up.add(self.key)
        if not self.stream.fetchable:
            self._miss(upto)
            self._move(Event.UP_TO_DATE)
            return
        self.target = upto
        self._move(Event.GAP)

    def ask(self) -> FetchUpdates:
        """The page to fetch next."""
        rows, (stream, writer) = self._intake.settings.page_rows, self.key
        self.asked = FetchUpdates(stream, writer, self.position, self.target, rows, self.incarnation)
        self._intake.fetching += 1
        return self.asked

    def page(self, asked: FetchUpdates, page: UpdatesPage, now: float) -> None:
        """Take in the answer to ``asked``."""
        # A page of a foreign writer names no incarnation, whatever was said of one on the channel.
        lives = self.stream.resettable and not self.stream.foreign_writers
        if lives and page.incarnation != self.incarnation:
            self.failed(None, now)
            return
        self._answered()
        if page.upto > self.position:
            self.retry.clear(self.retry.at)
            self._move(Event.PAGE)
            self._intake.counters.rows_fetched += len(page.tokens)
            self._take_in(list(page.tokens), list(page.payloads), page.upto, fetched=True)
        if self.position >= self.target:
            self._caught_up()
        elif page.upto <= asked.after or (page.upto < asked.upto and not page.limited):
            # Asked of a source that cannot prove more yet: not an error, but no reason to hurry either.
            self._intake.counters.pages_unproven += 1
            # Nobody may ever have written that far. A foreign writer's next row would not show what it left out.
            if self.stream.durable and self.native:
                self._intake.unproven[self.key] = None
            self._retry_later(self.retry.error, now)

    def _answered(self) -> None:
        self.asked = None
        self._intake.fetching -= 1

    def failed(self, error: BaseException | None, now: float) -> None:
        """The page that was asked for did not come: ask again after a pause."""
        self._intake.counters.fetches_failed += 1
        self._answered()
        self._retry_later(error, now)

    def _retry_later(self, error: BaseException | str | None, now: float) -> None:
        self.retry.failed(error, now)
        if self.retry.failures >= self._intake.settings.stale_after:
            self._move(Event.KEEPS_FAILING)

    def abandon(self) -> None:
        """Forget the page that was asked for, and how often that failed."""
        if self.asked is not None:
            self._answered()
        self.retry.clear()

    def _caught_up(self) -> None:
        self._intake.counters.gaps_filled += 1
        if self.state is State.STALE:
            self._move(Event.PAGE)
        self._move(Event.CAUGHT_UP if self.heard else Event.CAUGHT_UP_UNHEARD)
        self.release()

    def release(self) -> None:
        """Pass on what is held, through the usual rules: up to a new gap, or until its rows have no room."""
        intake, rest = self._intake, self.held.take_out()
        intake.waiting.pop(self.key, None)
        limit = intake.settings.receive_queue_bytes
        # Where nothing of its own waits, a queue that is full of others' rows does not keep it: it drops to catch-up.
        while rest and not self.catching_up and (intake.queue_bytes <= limit or not self.queue.size):
            self.line(*rest.popleft())
        if rest or self.catching_up:
            self.held.put_back(rest)
            if not self.catching_up:
                intake.waiting[self.key] = None
            return
        later, self.later, self.held.buffered = self.later, 0, False
        if rest.overflowed:  # what came after the held lines is unknown
            self.lose()
        if later > self.position:
            self._gap(later)

    def lose(self) -> None:
        """The link is gone, or what came over it cannot be trusted."""
        self._move(Event.LOST)
        self._forget()

    def _forget(self) -> None:
        # Held batch rows go on any disconnect, held lines too: what follows them may be lost.
        self.heard = False
        self.lower_since = None
        self._close_batch()
        waits = self.state is State.BOOTSTRAPPING
        # What was held of a log is known to be due all the same: its writer may never be heard again.
        self.later = max(self.later, self.held.end) if waits else 0
        self.held.clear()
        self._intake.waiting.pop(self.key, None)
        self.held.buffered = waits
        self.abandon()

    def restart(self, position: int) -> None:
        """Go on from ``position``, whatever was taken in or handled."""
        self._forget()
        self._empty()
        self._recent = None
        self.position = self.queue.delivered = position

    def reset(self, position: int) -> None:
        """The stream of this writer began anew, at ``position``."""
        self._intake.counters.resets += 1
        self.began, self.starts_here = position, False
        self._move(Event.RESET)
        # Rows of the former life that nobody handled yet are void: the handler is told before it gets new ones. And the
        # delivered position is another at once: what was handled was of the former life, and must not be saved, or
        # waited for, as if it were of this one.
        self.restart(position)
        self.target = self.later = 0
        self._intake.draining.pop(self.key, None)
        self._notice(Reset(self.stream.name, self.writer, position))
