"""The writer core: completed facts in, chained frames out (protocol.md, sections 2, 4 and 9).

Pure: no socket, clock or task. Each stream of the writer has one chain of frames, and a fact moves along it::

    fact_completed     -> held       its transaction ended; an earlier fact of this writer may still be open
    position_moved     -> ready      every earlier fact has ended too; waits, in order, for room in a frame
    frames_to_publish  -> composed   in a frame that Redis has not confirmed
    published          -> sent

``composed`` is the end of the chain. The next frame opens with ``POSITION stream writer composed composed``:
a reader elsewhere knows that it missed something. Frames leave in the order in which they were composed, and
if the outcome of a PUBLISH is unknown the same bytes go out again, before anything new.

Rows that will not be published (the queue was full, the fact is larger than a frame) are stepped over with
``POSITION stream writer new new``. It makes readers fetch them, where ``prev new`` would say there are none.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

import attrs

from busrep.core.commands import Name, Position, Rdata, Server
from busrep.errors import ConfigError, UnknownStream
from busrep.settings import Settings
from busrep.streams import Stream

# What a waiting fact costs beside its bytes: tuple, number, bytes header, its places in dict, heap and deque.
FACT_BYTES = 250

# Digits of the largest 64-bit number: how much a number may take up in a line whose space is set aside.
DIGITS = 19

# What a message opens with at most: SERVER, NAME.
OPENING_ITEMS = 2

# token, its RDATA lines joined (None: more than a frame holds), how many rows (0: the fact wrote none).
_Fact = tuple[int, bytes | None, int]


@attrs.frozen
class OutgoingFrame:
    """One message to PUBLISH on the deployment's channel, or on its sub-channel ``channel_suffix`` unless "".

    ``number`` rises by one per frame. ``ends``: stream -> the end of its chain, once this frame is out.
    ``one_line``: each line is a message by itself; after a PUBLISH with unknown outcome all of them go out again.
    """

    channel_suffix: str
    data: bytes
    number: int
    ends: Mapping[str, int] = attrs.field(factory=dict)
    rows: int = 0
    announcement: bool = False
    one_line: bool = False

    @property
    def messages(self) -> Sequence[bytes]:
        """What to PUBLISH, in this order."""
        return self.data.split(b"\n") if self.one_line else (self.data,)


@attrs.define
class _Draft:
    """A frame being composed: what it holds, and the bytes and rows it has room for."""

    room: int
    rows_left: int
    heads_left: int
    lines: list[bytes] = attrs.field(factory=list)
    ends: dict[str, int] = attrs.field(factory=dict)
    full: bool = False


@attrs.define(eq=False)
class _Chain:
    """One stream of this writer: facts on their way, and how far the chain of frames reaches."""

    stream: Stream[Any]
    line: bytes  # "POSITION stream writer "
    rdata: bytes  # "RDATA stream writer "
    largest: int  # bytes of the largest fact that a frame can hold
    most_rows: int
    composed: int
    sent: int
    position: int  # as the ID generator proved it
    own: int  # highest ID of an own completed fact at or below position
    dropped: int  # no row at or below it that is not composed yet will be published
    may_follow: bool = True
    held: dict[int, _Fact] = attrs.field(factory=dict)
    tokens: list[int] = attrs.field(factory=list)  # the keys of held, as a heap
    runs: list[tuple[int, list[_Fact]]] = attrs.field(factory=list)  # a heap; facts numbered without a gap
    ready: deque[_Fact] = attrs.field(factory=deque)
    queued_bytes: int = 0
    rows_dropped: int = 0
    facts_too_large: int = 0

    @property
    def line_bytes(self) -> int:
        return len(self.line) + 2 * DIGITS + 2

    @property
    def goal(self) -> int:
        """Where the chain may end now. Others' progress counts only on a stream that follows (W6)."""
        if self.stream.follows or self.dropped > self.position:
            return self.position
        return max(self.own, self.composed)

    def due(self) -> bool:
        """Whether there is something to publish. Others' progress alone is told once a beat."""
        if self.ready or self.composed < self.own:
            return True
        return self.composed < self.goal and (self.may_follow or self.composed < self.dropped)

    def hold(self, token: int, payloads: Sequence[bytes]) -> int:
        """Take over a completed fact; gives the bytes it occupies."""
        if token <= self.position or token in self.held:
            # Readers may be past it already: carried now or not, it would be lost without anyone noticing.
            name = self.stream.name
            raise ValueError(f"stream {name!r}: {token} completed twice, or after position {self.position}")
        rows = len(payloads)
        if token <= self.dropped:
            self.rows_dropped += rows
            return 0
        lines: bytes | None = b""
        if rows == 1:
            lines = b"%b%d %b" % (self.rdata, token, payloads[0])
        elif rows > self.most_rows:
            lines = None
        elif rows:
            batch = b"\n%bbatch " % self.rdata
            lines = b"%b\n%b%d %b" % (batch[1:] + batch.join(payloads[:-1]), self.rdata, token, payloads[-1])
        if lines is None or len(lines) > self.largest:
            lines = None
            self.facts_too_large += 1
        self.held[token] = (token, lines, rows)
        heappush(self.tokens, token)
        cost = FACT_BYTES + len(lines or b"")
        self.queued_bytes += cost
        return cost

    def hold_run(self, first: int, payloads: Sequence[bytes]) -> int:
        """Take over facts of one row each, numbered from ``first`` on without a gap; gives the bytes they occupy."""
        rdata = self.rdata
        lines = [b"%b%d %b" % (rdata, token, payload) for token, payload in enumerate(payloads, first)]
        facts: list[_Fact] = [(token, line, 1) for token, line in enumerate(lines, first)]
        heappush(self.runs, (first, facts))
        cost = FACT_BYTES * len(facts) + sum(map(len, lines))
        self.queued_bytes += cost
        return cost

    def _next(self, position: int) -> list[_Fact]:
        """The lowest of the held facts, with what follows it without a gap, as far as ``position`` reaches."""
        if self.runs and (not self.tokens or self.runs[0][0] < self.tokens[0]):
            first, facts = self.runs[0]
            if first > position:
                return []
            heappop(self.runs)
            if facts[-1][0] > position:
                heappush(self.runs, (position + 1, facts[position + 1 - first :]))
                return facts[: position + 1 - first]
            return facts
        if self.tokens and self.tokens[0] <= position:
            return [self.held.pop(heappop(self.tokens))]
        return []

    def move(self, position: int) -> int:
        """Every fact up to ``position`` has ended: line them up. Gives the bytes set free."""
        self.position = position
        freed = 0
        while facts := self._next(position):
            self.own = facts[-1][0]
            if facts[0][2]:
                self.ready.extend(facts)
            else:
                freed += FACT_BYTES
        if self.own < self.dropped <= position:
            self.own = self.dropped
        self.queued_bytes -= freed
        return freed

    def drop(self) -> int:
        """Forget all waiting facts; readers will be told to fetch them. Gives the bytes set free."""
        facts = [*self.ready, *self.held.values(), *[fact for _, run in self.runs for fact in run]]
        self.dropped = max((fact[0] for fact in facts), default=self.dropped)
        self.rows_dropped += sum(fact[2] for fact in facts)
        self.ready.clear()
        self.held.clear()
        self.tokens.clear()
        self.runs.clear()
        freed, self.queued_bytes = self.queued_bytes, 0
        return freed

    def take(self, draft: _Draft) -> int:
        """Move what fits into the draft, each run of rows behind its own head. Gives the bytes set free."""
        room = draft.room - 2 * self.line_bytes  # set aside for the first head and the last line
        if room < 0 or draft.heads_left <= 0:
            draft.full = True
            return 0
        lines, ready, at, freed, headed = draft.lines, self.ready, self.composed, 0, False
        stepped_over = at < self.dropped
        at = max(at, self.dropped)
        while ready:
            token, rdata, rows = ready[0]
            if rdata is None:
                stepped_over, headed = True, False
                room -= self.line_bytes  # another head
                freed += FACT_BYTES
            else:
                size = len(rdata) + 1
                if size > room or rows > draft.rows_left or (not headed and draft.heads_left <= 0):
                    draft.full = True
                    break
                if not headed:
                    draft.heads_left -= 1
                    lines.append(b"%b%d %d" % (self.line, at, at))
                    stepped_over, headed = False, True
                lines.append(rdata)
                room -= size
                draft.rows_left -= rows
                freed += FACT_BYTES + size - 1
            ready.popleft()
            at = token
        draft.room = room
        self._end(draft, at, stepped_over)
        self.queued_bytes -= freed
        return freed

    def _end(self, draft: _Draft, at: int, stepped_over: bool) -> None:
        """Close this stream's part of the draft, now at ``at``, with the progress beyond its last row."""
        end = at if self.ready else self.goal
        if stepped_over:
            draft.lines.append(b"%b%d %d" % (self.line, end, end))
        elif end > at:
            draft.lines.append(b"%b%d %d" % (self.line, at, end))
        if end > self.composed:
            draft.ends[self.stream.name] = end
        if self.composed >= self.own:
            self.may_follow = False
        self.composed = end


@attrs.define
class _Roll:
    """The streams that are announced in one message."""

    channel: str
    room: int
    chains: list[_Chain] = attrs.field(factory=list)


class Writer:
    """All streams that one process writes under one name.

    Inputs are methods; after each of them take what is to be published from ``frames_to_publish()``, PUBLISH
    it in that order on one connection, and report each outcome with ``published`` or ``publish_failed``.

    ``server``, ``epoch``, ``name`` and ``incarnation`` (rising per name, 9.11) open every announcement. ``epoch``: None
    for one that writes to no log. With ``listens=False`` they open every frame: nobody answers REPLICATE, so a reader
    that subscribed after the last announcement would believe no frame before the next (9.16).
    ``jitter`` gives numbers in [0, 1). Raises ConfigError for names that do not fit a line.
    """

    def __init__(
        self,
        server: str,
        name: str,
        *,
        incarnation: int,
        epoch: str | None,
        settings: Settings,
        listens: bool = True,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._name_line = Name(name, incarnation).format()
        self._opening = Server(server, epoch).format() + b"\n" + self._name_line
        self._head = self._name_line if listens else self._opening
        self._name, self._settings, self._jitter = name, settings, jitter
        self._chains: dict[str, _Chain] = {}
        self._due: dict[_Chain, None] = {}  # in the order in which they get their turn
        self._rolls: list[_Roll] = []
        self._announce = False  # asked for, not begun
        self._asked, self._answer_from = False, -math.inf  # to announce again, and not before this time
        self._last = False  # whether the announcement that is due is the last one
        self._to_announce: deque[_Roll] = deque()  # begun
        self._unconfirmed: deque[OutgoingFrame] = deque()
        self._in_flight = 0  # how many of them, from the left, were handed out since the last failure
        self._queued_bytes = 0
        self._next_beat = math.inf
        self._connected = self._fenced = False
        self._counts = dict.fromkeys(("frames", "announcements", "rows", "bytes", "publish_failures"), 0)

    def add_stream(self, stream: Stream[Any], start: int) -> None:
        """Write ``stream`` too, announced as ``start start``: the own proven position at start (9.6).

        Raises ConfigError for a second stream of that name, for names too long for ``frame_bytes``, and for a stream
        that ``one_line_messages`` does not suit.
        """
        if stream.name in self._chains:
            raise ConfigError(f"stream {stream.name!r} was added to writer {self._name!r} twice")
        if self._settings.one_line_messages and not stream.foreign_writers:
            raise ConfigError(
                f"with one_line_messages writer {self._name!r} does not say its name, and readers of stream "
                f"{stream.name!r} would not believe it: declare Stream({stream.name!r}, ..., foreign_writers=True)"
            )
        if self._settings.one_line_messages and stream.resettable:
            # A frame that goes out again begins below where it ended, and nothing tells that from a new beginning.
            raise ConfigError(
                f"with one_line_messages writer {self._name!r} does not say its incarnation, and readers of stream "
                f"{stream.name!r}, which is in memory, would take a repeated message for a reset: give it a table"
            )
        line = Position(stream.name, self._name, 0, 0).format().removesuffix(b"0 0")
        rdata = Rdata(stream.name, self._name, 0, None).format().removesuffix(b"0 null")
        bound, line_bytes = self._settings.frame_bytes, len(line) + 2 * DIGITS + 2
        largest = bound - len(self._head) - 1 - 2 * line_bytes
        if min(largest, bound - len(self._opening) - line_bytes) <= 0:
            raise ConfigError(f"the names of stream {stream.name!r} do not fit frame_bytes={bound}: raise it")
        most_rows = self._settings.frame_rows
        chain = _Chain(stream, line, rdata, largest - 1, most_rows, start, start, start, start, start)
        self._chains[stream.name] = chain
        for roll in self._rolls:
            fits = roll.room >= line_bytes and len(roll.chains) < self._settings.message_items - OPENING_ITEMS
            if roll.channel == stream.channel and fits:
                break
        else:
            roll = _Roll(stream.channel, bound - len(self._opening))
            self._rolls.append(roll)
        roll.chains.append(chain)
        roll.room -= line_bytes
        self._announce = True

    def fact_completed(self, stream: str, token: int, payloads: Sequence[bytes]) -> None:
        """A fact's transaction has ended: its rows as JSON, or none. To be called once per ID, in any order.

        Call ``position_moved`` when the ID generator's position moves over it. Over ``publish_queue_bytes``
        the stream with the most waiting rows drops them: its readers will fetch them. Raises UnknownStream,
        and ValueError for an ID that is completed already or that the position has passed.
        """
        if self._fenced:
            return
        chain = self._chain(stream)
        self._queued_bytes += chain.hold(token, payloads)
        self._bound()

    def rows_completed(self, stream: str, tokens: Sequence[int], payloads: Sequence[bytes]) -> None:
        """As ``fact_completed`` for many facts of one row each, ``tokens`` ascending: at a third of the cost."""
        chain, count = self._chain(stream), len(tokens)
        if self._fenced or not count:
            return
        if (
            tokens[-1] - tokens[0] == count - 1
            and tokens[0] > max(chain.position, chain.dropped)
            and max(map(len, payloads)) + len(chain.rdata) + DIGITS + 1 <= chain.largest
        ):
            self._queued_bytes += chain.hold_run(tokens[0], payloads)
            self._bound()
            return
        for token, payload in zip(tokens, payloads, strict=True):
            self.fact_completed(stream, token, (payload,))

    def _bound(self) -> None:
        if self._queued_bytes > self._settings.publish_queue_bytes:
            # The largest, not the last: a stream behind an open fact must not keep the others off the wire.
            largest = max(self._chains.values(), key=lambda each: each.queued_bytes)
            self._queued_bytes -= largest.drop()
            self._mark(largest)

    def position_moved(self, stream: str, position: int) -> None:
        """The ID generator proved ``position``: all own facts up to it have ended, and were told here before.

        Beyond the own facts it may lie only by 9.2, others' progress; that is published once a beat at most,
        or along with rows, and not at all on a stream that does not follow (W6). A lower one is ignored.
        """
        chain = self._chain(stream)
        if position > chain.position and not self._fenced:
            self._queued_bytes -= chain.move(position)
            self._mark(chain)

    def replicate_received(self, now: float) -> None:
        """Somebody asks for the positions. One answer serves all requests that arrive before it is composed.

        A request within ``answer_interval`` of the last announcement is answered at its end: see ``next_deadline``.
        """
        if self._announce:
            return
        if now >= self._answer_from:
            self._begin_announcement(now)
        else:
            self._asked = True

    def farewell(self) -> None:
        """Announce the positions for the last time; call when everything else is published (9.21)."""
        if not self._fenced:
            self._announce = self._last = True

    def _begin_announcement(self, now: float) -> None:
        self._announce, self._asked = True, False
        self._answer_from = now + self._settings.answer_interval

    def connected(self, now: float) -> None:
        """A connection was (re-)established and publishing works: announce, others cannot see it."""
        self._connected = True
        self._begin_announcement(now)
        self._schedule_beat(now)

    def disconnected(self, now: float) -> None:  # noqa: ARG002 (all inputs that are about time carry it)
        """Publishing is impossible until ``connected``. Frames in flight count as ``publish_failed``."""
        self._connected = False
        self._to_announce.clear()
        self._next_beat = math.inf
        self._in_flight = 0

    def tick(self, now: float) -> bool:
        """It is ``now``. Queue the answer to a REPLICATE that waited; True if a beat was due: the announcement, and
        others' progress, are queued."""
        if now >= self.next_answer:
            self._begin_announcement(now)
        if now < self._next_beat:
            return False
        self._begin_announcement(now)
        self._schedule_beat(now)
        for chain in self._chains.values():
            chain.may_follow = True
            self._mark(chain)
        return True

    def next_deadline(self) -> float:
        """When to call ``tick``; infinity while not connected, or fenced."""
        return min(self._next_beat, self.next_answer)

    @property
    def next_beat(self) -> float:
        """When the next beat is due; infinity while not connected, or fenced."""
        return self._next_beat

    @property
    def next_answer(self) -> float:
        """When a REPLICATE that came too soon is answered; infinity when none waits."""
        return self._answer_from if self._asked and self._connected and not self._fenced else math.inf

    def frames_to_publish(self) -> list[OutgoingFrame]:
        """What to PUBLISH now, in this order; in flight from here. Empty while not connected, or fenced."""
        frames: list[OutgoingFrame] = []
        if not self._connected or self._fenced:
            return frames
        while self._in_flight < self._settings.publish_in_flight:
            if self._in_flight == len(self._unconfirmed):
                frame = self._compose()
                if frame is None:
                    break
                self._unconfirmed.append(frame)
            frames.append(self._unconfirmed[self._in_flight])
            self._in_flight += 1
        return frames

    def published(self, frame: OutgoingFrame) -> None:
        """Redis confirmed ``frame``: ``positions()`` move. Raises ValueError if an earlier one was not."""
        if not self._unconfirmed or frame.number < self._unconfirmed[0].number:
            return  # a late confirmation from a connection that was given up; it went out again and arrived
        if frame.number > self._unconfirmed[0].number:
            raise ValueError(f"frame {frame.number} confirmed before frame {self._unconfirmed[0].number}")
        self._unconfirmed.popleft()
        self._in_flight = max(0, self._in_flight - 1)
        for stream, end in frame.ends.items():
            self._chains[stream].sent = end

    def publish_failed(self) -> None:
        """Whether the frames in flight arrived is unknown: they go out again first, byte for byte (9.6)."""
        self._in_flight = 0
        self._counts["publish_failures"] += 1

    def fenced(self) -> None:
        """Another process has the name: nothing is completed or published any more (9.2)."""
        self._fenced = True
        self._next_beat = math.inf
        self._due.clear()
        for chain in self._chains.values():
            self._queued_bytes -= chain.drop()

    @property
    def unsent(self) -> bool:
        """Whether something is to be published, or not confirmed yet. What waits for an open fact does not count."""
        return bool(self._unconfirmed) or self._last or any(chain.due() for chain in self._chains.values())

    @property
    def queued_bytes(self) -> int:
        """Memory that facts occupy which are in no frame yet, bounded by ``publish_queue_bytes``."""
        return self._queued_bytes

    def positions(self) -> dict[str, int]:
        """Stream -> the position up to which Redis confirmed its frames."""
        return {name: chain.sent for name, chain in self._chains.items()}

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, levels now, and per stream where its chain stands."""
        chains = self._chains
        return {
            **self._counts,
            "rows_dropped": sum(chain.rows_dropped for chain in chains.values()),
            "facts_too_large": sum(chain.facts_too_large for chain in chains.values()),
            "queued_bytes": self._queued_bytes,
            "unconfirmed_bytes": sum(len(frame.data) for frame in self._unconfirmed),
            "in_flight": self._in_flight,
            "connected": self._connected,
            "fenced": self._fenced,
            "streams": {
                name: {
                    "sent": chain.sent,
                    "composed": chain.composed,
                    "position": chain.position,
                    "ready": len(chain.ready),
                    "held": len(chain.held) + sum(len(run) for _, run in chain.runs),
                }
                for name, chain in chains.items()
            },
        }

    def _chain(self, stream: str) -> _Chain:
        chain = self._chains.get(stream)
        if chain is None:
            raise UnknownStream(stream, tuple(self._chains))
        return chain

    def _mark(self, chain: _Chain) -> None:
        if chain.due():
            self._due[chain] = None

    def _schedule_beat(self, now: float) -> None:
        # Jittered by 10 % either way, so that the writers of a deployment do not all speak at once.
        if not self._fenced:
            self._next_beat = now + self._settings.heartbeat * (0.9 + 0.2 * self._jitter())

    def _compose(self) -> OutgoingFrame | None:
        """The next new frame. An announcement goes first: under a load without end it would never go."""
        if self._announce and not self._to_announce and not any(f.announcement for f in self._unconfirmed):
            # None while one is unconfirmed: of a burst the first gets an answer, all others one together.
            self._announce = False
            self._to_announce.extend(self._rolls)
        if self._to_announce:
            roll = self._to_announce.popleft()
            self._last = self._last and (self._announce or bool(self._to_announce))
            lines = [] if self._settings.one_line_messages else [self._opening]
            lines += [b"%b%d %d" % (chain.line, chain.composed, chain.composed) for chain in roll.chains]
            return self._frame(roll.channel, lines, {}, 0, announcement=True)
        if not self._due:
            return None
        channel = next(iter(self._due)).stream.channel
        settings = self._settings
        # Each head and its run are two items; a stream's part of the frame may end with one more.
        heads = (settings.message_items - OPENING_ITEMS) // 3
        draft = _Draft(settings.frame_bytes - len(self._head) - 1, settings.frame_rows, heads)
        for chain in [each for each in self._due if each.stream.channel == channel]:
            self._queued_bytes -= chain.take(draft)
            del self._due[chain]
            self._mark(chain)  # behind the others
            if draft.full:
                break
        lines = [self._head, *draft.lines]
        if self._settings.one_line_messages:
            lines = draft.lines
        return self._frame(channel, lines, draft.ends, self._settings.frame_rows - draft.rows_left)

    def _frame(
        self, channel: str, lines: list[bytes], ends: dict[str, int], rows: int, *, announcement: bool = False
    ) -> OutgoingFrame:
        counts = self._counts
        counts["frames"] += 1
        counts["announcements"] += announcement
        counts["rows"] += rows
        data = b"\n".join(lines)
        counts["bytes"] += len(data)
        one_line = self._settings.one_line_messages
        return OutgoingFrame(channel, data, counts["frames"], ends, rows, announcement, one_line)
