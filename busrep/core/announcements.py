"""When a writer announces its positions.

It announces all of them when publishing has begun to work, for a REPLICATE, and for the last time when it leaves. A
beat announces those of the streams that have moved since the last one, and of some others in turn (9.27). Of many
writers with nothing to tell most leave it out.
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
# Writers that beat together, on average: others are woken once for all. Few, for rows wait behind what they say.
TOGETHER = 16
# With more writers, those that publish nothing answer a REPLICATE with their beat: the table tells where they are.
FEW = 2
# Of the writers at rest at least so many speak at each beat, and each of them at one in sixteen beats at least.
SPEAKERS, REST = 4, 16


def turns_of(writers: int) -> int:
    """Over how many beats so many writers take turns to speak while they rest; 1: none of them rests."""
    return max(1, min(REST, writers // SPEAKERS))


@attrs.define
class Roll:
    """The streams that are announced in one message."""

    channel: str
    room: int
    chains: list[Chain] = attrs.field(factory=list)
    turn: int = 0  # of ``chains``, whose turn it is at the next beat

    def at_beat(self, quiet: int) -> list[Chain]:
        """The streams that a beat announces: those that have moved since the last one, those in memory, and the next
        ``quiet`` of all, in turns."""
        chains, count = self.chains, min(quiet, len(self.chains))
        found = {chain for chain in chains if chain.moved or chain.stream.resettable}
        found.update(chains[(self.turn + at) % len(chains)] for at in range(count))
        self.turn = (self.turn + count) % len(chains)
        for chain in found:
            chain.moved = False
        return [chain for chain in chains if chain in found]


class Announcements:
    """What is to be announced, and when the next beat is. ``room``: bytes that a message has for lines."""

    def __init__(self, settings: Settings, room: int, jitter: Callable[[], float]) -> None:
        self.next_beat = math.inf  # while publishing does not work
        self.last = False  # whether the announcement that is due is the last one
        # Whether a beat leaves quiet streams out. Messages of one line do not say who speaks: each of their positions
        # is the only sign of life. And who hears no REPLICATE tells those who asked with the next beat.
        self.in_turns = not settings.one_line_messages
        self._settings, self._room, self._jitter = settings, room, jitter
        self._rolls: list[Roll] = []
        self._in_memory = False  # whether one of these is kept in no table
        self.writers = self.rank = 0  # those in the registry, and how many of them are before this one
        self.quiet_beats = 0  # stored since this one published a fact
        self.rests = self.stored = False  # whether the last beat was left out, and whether the table has the next one
        self.beats = self._unsaid = 0  # all, and those since it announced
        self._awake = 0  # beats until it may rest
        self._asked = self._all = False  # for one that has not begun; for one of all streams
        self._turns: set[Chain] = set()  # of beats whose announcement has not begun
        self._waits, self._answer_from = False, -math.inf  # a REPLICATE, until then
        self._interval = settings.answer_interval  # to the next answer
        self._calm_from = -math.inf  # if nobody asks until then, the interval is set back
        self._begun: deque[Roll] = deque()
        self._moment: float | None = None  # of one beat: the others are whole heartbeats from it

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
        self._in_memory = self._in_memory or chain.stream.resettable
        self._asked = self._all = True

    def request(self, now: float) -> None:
        """Somebody asks for the positions: answered now, or when the interval since the last time is over, or with the
        next beat. One answer serves all requests that arrive before it is composed."""
        self._awake = turns_of(self.writers)  # for somebody may hear too little
        if self._asked:
            self._all = True
        elif now >= self._answer_from and not self._answers_with_beats:
            self._all = True
            self._begin(now, answers=True)
        else:
            self._waits = True

    def fact_published(self) -> None:
        """Rows go out. Who waits for the beat is answered before: it may not have heard the writer yet (9.16)."""
        if self._waits and self._answers_with_beats:
            self._asked, self._all, self._waits = True, True, False
        self.quiet_beats = 0

    def start(self, now: float) -> None:
        """Publishing has begun to work: announce all streams, and count the time to the next beat from now."""
        self.next_beat, self._all = now, True
        self.tick(now)

    def _begin(self, now: float, *, answers: bool) -> None:
        """``answers``: a REPLICATE. Each answer doubles the interval to the next, up to a heartbeat: when all processes
        of a deployment are restarted, what they ask costs no more than the beats do. A pause sets it back."""
        settings = self._settings
        self._asked, self._waits = True, False
        if answers:
            interval = self._interval if now < self._calm_from else settings.answer_interval
            self._answer_from, self._calm_from = now + interval, now + 2 * interval
            self._interval = min(2 * interval, max(settings.heartbeat, settings.answer_interval))
        else:
            self._answer_from = max(self._answer_from, now + settings.answer_interval)

    def join(self, number: int, now: float, clock: float) -> None:
        """Beat together with some of the writers, by a clock that all see, in seconds. ``number`` picks them."""
        groups = self.writers // TOGETHER + 1
        self._moment = now - clock + number % groups / groups * self._settings.heartbeat

    def farewell(self) -> None:
        """Announce all streams for the last time."""
        self._asked = self._all = self.last = True

    def stop(self) -> None:
        """Publishing does not work, until `start`."""
        self._begun.clear()
        self._waits = self.rests = False
        self.next_beat = math.inf

    @property
    def _answers_with_beats(self) -> bool:
        return self.writers > FEW and self.quiet_beats > 1 and self.in_turns and not self._in_memory

    @property
    def next_answer(self) -> float:
        """When a REPLICATE that came too soon is answered; infinity when none waits, or it waits for the beat."""
        return self._answer_from if self._waits and not self._answers_with_beats else math.inf

    @property
    def next_deadline(self) -> float:
        """When to call ``tick``; infinity while there is nothing to wait for."""
        return min(self.next_beat, self.next_answer)

    def _may_rest(self, now: float) -> bool:
        """Whether a beat may be left out: the table has it, nothing is to be told, and it is other writers' turn."""
        turn = self.beats if self._moment is None else round((now - self._moment) / self._settings.heartbeat)
        speaks = (turn + self.rank) % turns_of(self.writers) == 0
        if speaks or self._awake or not self.stored or not self._answers_with_beats:
            return False
        return not any(chain.moved for roll in self._rolls for chain in roll.chains)

    def tick(self, now: float, *, hears: bool = False) -> bool:
        """Begin what is due; whether that is a beat. ``hears``: there are others to be heard, so it may be left out."""
        beat = now >= self.next_beat
        if beat:
            # Jittered by 10 % either way, so that writers do not all speak at once; or with those that it has joined.
            period = self._settings.heartbeat
            rest = period * (0.9 + 0.2 * self._jitter()) if self._moment is None else (self._moment - now) % period
            self.next_beat = now + rest + (period if rest < period / 10 else 0)  # a timer may be early
            self.rests = hears and self._may_rest(now)
            self.beats, self._unsaid, self._awake = self.beats + 1, self._unsaid + 1, max(0, self._awake - 1)
        if (beat and not self.rests) or now >= self.next_answer:
            self._all = self._all or self._waits or not self.in_turns
            if not self._all:
                quiet = self._settings.quiet_streams * self._unsaid  # as if no beat had been left out
                self._turns.update(*(roll.at_beat(quiet) for roll in self._rolls))
            self._unsaid = 0
            self._begin(now, answers=self._waits)
        return beat

    def next(self, *, unconfirmed: bool) -> Roll | None:
        """The streams to announce now. None begins while one is ``unconfirmed``: of a burst of REPLICATE the first gets
        an answer, all others one together."""
        if self._asked and not self._begun and not unconfirmed:
            turns = None if self._all else self._turns
            for roll in self._rolls:
                chains = [chain for chain in roll.chains if turns is None or chain in turns]
                self._begun.append(Roll(roll.channel, 0, chains))
            self._asked = self._all = False
            self._turns = set()
        if not self._begun:
            return None
        roll = self._begun.popleft()
        self.last = self.last and (self._asked or bool(self._begun))
        return roll
