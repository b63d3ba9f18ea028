"""The writer core: completed facts in, chained frames out (protocol.md, sections 2, 4 and 9).

Each stream of the writer has one chain of frames, and a fact moves along it::

    fact_completed     -> held       its transaction ended; an earlier fact of this writer may still be open
    position_moved     -> ready      every earlier fact has ended too; waits, in order, for room in a frame
    frames_to_publish  -> composed   in a frame that Redis has not confirmed
    published          -> sent

``composed`` is the end of the chain. The next frame opens with ``POSITION stream writer composed composed``: a reader
elsewhere knows that it missed something. Frames leave in the order in which they were composed, and if the outcome of a
PUBLISH is unknown the same bytes go out again, before anything new (rule 9.6).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from busrep.core.commands import Name, Server
from busrep.errors import ConfigError, UnknownStream
from busrep.settings import Settings
from busrep.streams import Stream

from .announcements import OPENING_ITEMS, Announcements
from .chain import Chain, Draft
from .outgoing import OutgoingFrame, OutgoingFrames


class Writer:
    """All streams that one process writes under one name.

    After each input take what is to be published from ``frames_to_publish()``, PUBLISH it in that order on one
    connection, and report each outcome with ``published`` or ``publish_failed``. Call ``tick`` at
    ``announcements.next_deadline``. ``queued_bytes``: memory of facts that are in no frame yet, bounded by
    ``publish_queue_bytes``.

    ``server``, ``epoch`` (None for one that writes to no log), ``name`` and ``incarnation`` (rising per name) open
    every announcement. With ``listens=False`` they open every frame: nobody answers REPLICATE, so a reader that
    subscribed after the last announcement would believe no frame before the next. ``jitter`` gives numbers in [0, 1).
    Raises ConfigError for names that do not fit a line.
    """

    def __init__(
        self, server: str, name: str, *, incarnation: int, epoch: str | None, settings: Settings, listens: bool = True,
        jitter: Callable[[], float] = random.random,
    ) -> None:  # fmt: skip
        self._name_line = Name(name, incarnation).format()
        self._opening = Server(server, epoch).format() + b"\n" + self._name_line
        self._head = self._name_line if listens else self._opening
        self._name, self._settings = name, settings
        self._chains: dict[str, Chain] = {}
        self._due: dict[Chain, None] = {}  # in the order in which they get their turn
        self.announcements = Announcements(settings, settings.frame_bytes - len(self._opening), jitter)
        self._outgoing = OutgoingFrames(settings.publish_in_flight, one_line=settings.one_line_messages)
        self.queued_bytes = 0
        self._connected = self._fenced = False

    def add_stream(self, stream: Stream[Any], start: int) -> None:
        """Write ``stream`` too, announced as ``start start``: the own proven position at start. Raises ConfigError for
        a second one of that name, names too long for ``frame_bytes``, and what ``one_line_messages`` does not suit."""
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
        bound = self._settings.frame_bytes
        room, most_rows = bound - len(self._head) - 1, self._settings.frame_rows
        chain = Chain(stream, self._name, start, room=room, most_rows=most_rows)
        if chain.largest < 0 or len(self._opening) + chain.line_bytes >= bound:
            raise ConfigError(f"the names of stream {stream.name!r} do not fit frame_bytes={bound}: raise it")
        self._chains[stream.name] = chain
        self.announcements.add(chain)

    def fact_completed(self, stream: str, token: int, payloads: Sequence[bytes]) -> None:
        """A fact's transaction has ended: its rows as JSON, or none. To be called once per ID, in any order.

        Over ``publish_queue_bytes`` the stream with the most waiting rows drops them: its readers will fetch them.
        Raises UnknownStream, and ValueError for an ID that is completed already or that the position has passed.
        """
        if self._fenced:
            return
        self.queued_bytes += self._chain(stream).hold(token, payloads)
        self._bound()

    def rows_completed(self, stream: str, tokens: Sequence[int], payloads: Sequence[bytes]) -> None:
        """As ``fact_completed`` for many facts of one row each, ``tokens`` ascending: at a third of the cost."""
        chain, count = self._chain(stream), len(tokens)
        if self._fenced or not count:
            return
        if tokens[-1] - tokens[0] == count - 1 and (cost := chain.hold_run(tokens[0], payloads)):
            self.queued_bytes += cost
            self._bound()
            return
        for token, payload in zip(tokens, payloads, strict=True):
            self.fact_completed(stream, token, (payload,))

    def _bound(self) -> None:
        if self.queued_bytes > self._settings.publish_queue_bytes:
            # The largest, not the last: a stream behind an open fact must not keep the others off the wire.
            largest = max(self._chains.values(), key=lambda each: each.queued_bytes)
            self.queued_bytes -= largest.drop()
            self._mark(largest)

    def position_moved(self, stream: str, position: int) -> None:
        """The ID generator proved ``position``: all own facts up to it have ended, and were told here before. Beyond
        them it may lie by the progress of others; that is published once a beat at most, or along with rows, and not at
        all on a stream that does not follow (W6). A lower one is ignored."""
        chain = self._chain(stream)
        if position > chain.position and not self._fenced:
            own = chain.own
            self.queued_bytes -= chain.move(position)
            if chain.own > own:
                self.announcements.fact_published()
            self._mark(chain)

    def replicate_received(self, now: float) -> None:
        """Somebody asks for the positions, see `Announcements.request`."""
        if self._connected and not self._fenced:
            self.announcements.request(now)

    def farewell(self) -> None:
        """Announce the positions for the last time; call when everything else is published."""
        if not self._fenced:
            self.announcements.farewell()

    def connected(self, now: float) -> None:
        """A connection was (re-)established and publishing works: announce, others cannot see it."""
        self._connected = True
        if not self._fenced:
            self.announcements.start(now)

    def disconnected(self, now: float) -> None:  # noqa: ARG002 (all inputs that are about time carry it)
        """Publishing is impossible until ``connected``. Frames in flight count as ``publish_failed``."""
        self._connected = False
        self.announcements.stop()
        self._outgoing.restart()

    def tick(self, now: float, *, hears: bool = False) -> bool:
        """Queue the answer to a REPLICATE that waited; True if a beat was due: the announcement, unless it is left out
        because others are heard (``hears``), and their progress are queued."""
        if not self.announcements.tick(now, hears=hears):
            return False
        for chain in self._chains.values():
            chain.may_follow = True
            self._mark(chain)
        return True

    def frames_to_publish(self) -> list[OutgoingFrame]:
        """What to PUBLISH now, in this order; in flight from here. Empty while not connected, or fenced."""
        if not self._connected or self._fenced:
            return []
        return self._outgoing.hand_out(self._compose)

    def published(self, frame: OutgoingFrame) -> None:
        """Redis confirmed ``frame``: ``positions()`` move. Raises ValueError if an earlier one was not."""
        if self._outgoing.confirmed(frame):
            for stream, end in frame.ends.items():
                self._chains[stream].sent = end

    def publish_failed(self) -> None:
        """Whether the frames in flight arrived is unknown: they go out again first, byte for byte."""
        self._outgoing.restart(failed=True)

    def fenced(self) -> None:
        """Another process has the name: nothing is completed or published any more."""
        self._fenced = True
        self.announcements.stop()
        self._due.clear()
        for chain in self._chains.values():
            self.queued_bytes -= chain.drop()

    @property
    def unsent(self) -> bool:
        """Whether something is to be published, or not confirmed yet. What waits for an open fact does not count."""
        due = any(chain.due() for chain in self._chains.values())
        return due or self.announcements.last or bool(self._outgoing.unconfirmed)

    def positions(self) -> dict[str, int]:
        """Stream -> the position up to which Redis confirmed its frames."""
        return {name: chain.sent for name, chain in self._chains.items()}

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, levels now, and per stream where its chain stands."""
        return {
            **self._outgoing.statistics(),
            "rows_dropped": sum(chain.rows_dropped for chain in self._chains.values()),
            "facts_too_large": sum(chain.facts_too_large for chain in self._chains.values()),
            "queued_bytes": self.queued_bytes,
            "connected": self._connected,
            "fenced": self._fenced,
            "streams": {name: chain.statistics() for name, chain in self._chains.items()},
        }

    def _chain(self, stream: str) -> Chain:
        chain = self._chains.get(stream)
        if chain is None:
            raise UnknownStream(stream, tuple(self._chains))
        return chain

    def _mark(self, chain: Chain) -> None:
        if chain.due():
            self._due[chain] = None

    def _compose(self) -> OutgoingFrame | None:
        """The next new frame. An announcement goes first: under a load without end it would never go."""
        outgoing, one_line = self._outgoing, self._settings.one_line_messages
        unconfirmed = any(frame.announcement for frame in outgoing.unconfirmed)
        if (roll := self.announcements.next(unconfirmed=unconfirmed)) is not None:
            lines = [b"%b%d %d" % (chain.line, chain.composed, chain.composed) for chain in roll.chains]
            return outgoing.new(roll.channel, lines if one_line else [self._opening, *lines], {}, announcement=True)
        if not self._due:
            return None
        channel, settings = next(iter(self._due)).stream.channel, self._settings
        # Each head and its run are two items; a stream's part of the frame may end with one more.
        heads = (settings.message_items - OPENING_ITEMS) // 3
        draft = Draft(settings.frame_bytes - len(self._head) - 1, settings.frame_rows, heads)
        for chain in [each for each in self._due if each.stream.channel == channel]:
            self.queued_bytes -= chain.take(draft)
            del self._due[chain]
            self._mark(chain)  # behind the others
            if draft.full:
                break
        lines = draft.lines if one_line else [self._head, *draft.lines]
        return outgoing.new(channel, lines, draft.ends, rows=settings.frame_rows - draft.rows_left)
