"""When a writer announces its positions, and which streams fit one message.

It announces at each beat, when publishing has begun to work, for a REPLICATE, and for the last time when it leaves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import attrs

from busrep.settings import Settings

from .chain import Chain

# What a message opens with at most: SERVER, NAME.
OPENING_ITEMS = 2


@attrs.define
class Roll:
    """The streams that are announced in one message."""

    channel: str
    room: int
    chains: list[Chain] = attrs.field(factory=list)


class Announcements:
    """What is to be announced, and when the next beat is. ``room``: bytes that a message has for lines.

    ``next_beat``: infinity while publishing does not work. ``last``: the announcement that is due is the last one.
    """

    def __init__(self, settings: Settings, room: int, jitter: Callable[[], float]) -> None:
        self.next_beat = math.inf
        self.last = False
        self._settings, self._room, self._jitter = settings, room, jitter
        self._rolls: list[Roll] = []
        self._asked = False  # for one that has not begun
        self._waits, self._answer_from = False, -math.inf  # a REPLICATE, until then
        self._begun: deque[Roll] = deque()

    def add(self, chain: Chain) -> None:
        """Announce one stream more, at once."""
        for roll in self._rolls:
            fits = roll.room >= chain.line_bytes and len(roll.chains) < self._settings.message_items - OPENING_ITEMS
            if roll.channel == chain.stream.channel and fits:
                break
        else:
            roll = Roll(chain.stream.channel, self._room)
            self._rolls.append(roll)
        roll.chains.append(chain)
        roll.room -= chain.line_bytes
        self._asked = True

    def request(self, now: float) -> None:
        """Somebody asks for the positions: answered now, or at the end of ``answer_interval`` since the last time."""
        if self._asked:
            return
        if now >= self._answer_from:
            self.begin(now)
        else:
            self._waits = True

    def begin(self, now: float) -> None:
        """Announce all streams."""
        self._asked, self._waits = True, False
        self._answer_from = now + self._settings.answer_interval

    def farewell(self) -> None:
        """Announce all streams for the last time."""
        self._asked = self.last = True

    def stop(self) -> None:
        """Publishing does not work, until `begin` and `schedule_beat`."""
        self._begun.clear()
        self._waits = False
        self.next_beat = math.inf

    def schedule_beat(self, now: float) -> None:
        """Count the time to the next beat from now."""
        # Jittered by 10 % either way, so that the writers of a deployment do not all speak at once.
        self.next_beat = now + self._settings.heartbeat * (0.9 + 0.2 * self._jitter())

    @property
    def next_answer(self) -> float:
        """When a REPLICATE that came too soon is answered; infinity when none waits."""
        return self._answer_from if self._waits else math.inf

    @property
    def next_deadline(self) -> float:
        """When to call ``tick``; infinity while there is nothing to wait for."""
        return min(self.next_beat, self.next_answer)

    def tick(self, now: float) -> bool:
        """Begin what is due; whether that is a beat."""
        beat = now >= self.next_beat
        if beat:
            self.schedule_beat(now)
        if beat or now >= self.next_answer:
            self.begin(now)
        return beat

    def next(self, *, unconfirmed: bool) -> Roll | None:
        """The streams to announce now. ``unconfirmed``: whether an announcement is on its way. Then none begins: of a
        burst of REPLICATE the first gets an answer, all others one together."""
        if self._asked and not self._begun and not unconfirmed:
            self._asked = False
            self._begun.extend(self._rolls)
        if not self._begun:
            return None
        roll = self._begun.popleft()
        self.last = self.last and (self._asked or bool(self._begun))
        return roll
