"""What all (stream, writer) of one reader share: bounds on memory, counters, and what the runtime is to do next."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

from ..errors import ParseError
from ..settings import Settings
from .catchup import Key
from .framing import MOST_ERRORS


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


@attrs.define(eq=False)
class Intake:
    """The shared part of a reader.

    The sets of keys are dicts, because these keep their order: what was noted first is done first.
    """

    settings: Settings
    jitter: Callable[[], float] = random.random
    counters: Counters = attrs.field(factory=Counters)
    errors: list[ParseError] = attrs.field(factory=list)
    ready: dict[Key, None] = attrs.field(factory=dict)  # has something to take
    catching: dict[Key, None] = attrs.field(factory=dict)  # is catching up; the next to ask for a page first
    waiting: dict[Key, None] = attrs.field(factory=dict)  # holds lines only because their rows have no room
    draining: dict[Key, int] = attrs.field(factory=dict)  # was bootstrapped, and is not delivered up to here
    bootstrapping: dict[str, None] = attrs.field(factory=dict)  # streams of which a snapshot is loaded
    needed_catch_up: set[Key] = attrs.field(factory=set)
    stepped_back: dict[Key, None] = attrs.field(factory=dict)  # heard below its position: look at the sequence
    unproven: dict[Key, None] = attrs.field(factory=dict)  # said more than a page proves: likewise
    fetching: int = 0  # pages asked for and not answered
    queue_bytes: int = 0
    queue_bytes_peak: int = 0
    buffer_bytes: int = 0  # held by bootstraps, all streams together
    buffer_bytes_peak: int = 0

    def report(self, line: str, field: str, reason: str) -> None:
        """Note an error about a line, unless `MOST_ERRORS` wait already."""
        if len(self.errors) < MOST_ERRORS:
            self.errors.append(ParseError(line.encode(), field, reason))
