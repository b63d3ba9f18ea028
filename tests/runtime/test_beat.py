"""Rule 9.27: what a beat stores, and when it reads the registry."""

from __future__ import annotations

import time
from typing import Any
from zlib import crc32

from busrep.core.framing import parse_frame
from busrep.runtime.config import WriterConfig
from busrep.runtime.session import WriterSession
from busrep.settings import Settings
from busrep.stores.interface import Claim, Registered
from busrep.streams import Registry, Stream

EPOCH, NAMES = "e" * 32, ("a", "b", "c")
CLAIMS = {("a", "w"): 1, ("a", "v"): 4}


class Beating:
    """Writer w of three streams at 5, of which others write the first, and what its beats store and read. ``clock``:
    the server's, where there is one."""

    clock: float | None = None

    def __init__(self, *, hears: bool = True) -> None:
        streams = Registry([Stream(name) for name in NAMES])
        at = dict.fromkeys(NAMES, 5)
        claim = Claim("w", 1, EPOCH, at, {name: {} for name in NAMES}, at, claims=CLAIMS)
        unused: Any = object()
        config = WriterConfig("w", "shop", streams, Settings(silent_after_beats=3), unused, hears)
        self.session = WriterSession(config, claim, 1)

    def beat(self, *heard: str, fails: bool = False) -> tuple[dict[str, int], bool]:
        """``heard``: lines that come while it is on its way."""
        beat = self.session.beat_begins()
        self.hear(*heard)
        if not fails:
            rows = [(stream, writer, 5, incarnation) for (stream, writer), incarnation in CLAIMS.items()]
            rows += [(name, "w", 5, 1) for name in ("b", "c")]
            registry = Registered(rows if beat.whole else (), dict.fromkeys(beat.positions, 100), read=beat.whole)
            registry.clock = self.clock if beat.whole else None
            self.session.beat_stored(beat, registry)
        return beat.positions, beat.whole

    def hear(self, *lines: str) -> None:
        self.session.others.heard(parse_frame("\n".join(lines).encode(), 1_000))


EVERYTHING = dict.fromkeys(NAMES, 5)


def test_9_27_a_beat_with_nothing_to_tell_stores_one_position_for_the_sign_of_life() -> None:
    beating = Beating()
    assert [beating.beat() for _ in range(7)] == [
        (EVERYTHING, True),
        ({"c": 5}, False),
        ({"c": 5}, False),
        (EVERYTHING, True),
        ({"c": 5}, False),
        ({"c": 5}, False),
        (EVERYTHING, True),
    ]


def test_9_27_a_writer_joins_those_whom_the_registry_lists_by_the_server_s_clock() -> None:
    """Not where the store has one turn to write: beats at one moment would wait for one another."""
    beating, joined = Beating(), []
    beating.session.core.announcements.join = lambda *given: joined.append(given)  # type: ignore[method-assign]
    beating.beat()
    assert joined == []
    beating.clock = 1_700_000_000.25
    for _ in range(3):
        beating.beat()
    ((number, now, clock),) = joined  # at the one that reads the registry
    assert (number, clock) == (crc32(b"w"), 1_700_000_000.25)
    assert 0 <= time.monotonic() - now < 60


def test_a_writer_knows_how_many_the_registry_lists_as_it_was_read_last() -> None:
    """Of few each answers a REPLICATE at once; of many at rest each has its turn."""
    beating = Beating()
    announcements = beating.session.core.announcements
    assert (announcements.writers, announcements.rank) == (0, 0)
    for whole in (True, False, False, True):
        assert beating.beat()[1] is whole
        assert (announcements.writers, announcements.rank) == (2, 1)  # v is before w


def test_a_writer_counts_the_beats_that_were_stored_since_it_published_a_fact() -> None:
    """What it has published last is in the table from then on."""
    beating = Beating()
    announcements = beating.session.core.announcements
    for fails, quiet in ((False, 1), (True, 1), (False, 2)):
        beating.beat(fails=fails)
        assert announcements.quiet_beats == quiet
    ticket = beating.session.generators["b"].ask(now=0.0)
    beating.session.generators["b"].answer(ticket, [6])
    beating.session.core.fact_completed("b", 6, [b"1"])
    beating.session.generators["b"].complete_many([6])
    assert announcements.quiet_beats == 0


def test_9_27_a_beat_counts_as_stored_until_the_next_one_begins() -> None:
    """One that comes late must not let the writer rest at the next beat, which may not be stored."""
    beating = Beating()
    announcements = beating.session.core.announcements
    for fails in (True, False, True):
        beating.beat(fails=fails)
        assert announcements.stored is not fails
    beating.beat()
    beating.session.beat_begins()
    assert announcements.stored is False


def test_9_27_what_has_moved_is_stored_until_a_beat_succeeds() -> None:
    beating = Beating()
    beating.beat()
    ticket = beating.session.generators["b"].ask(now=0.0)
    beating.session.generators["b"].answer(ticket, [6])
    beating.session.generators["b"].complete_many([6])
    assert beating.beat(fails=True) == ({"b": 6}, False)
    assert beating.beat() == ({"b": 6}, False)
    assert beating.beat() == ({"c": 5}, False)


def test_9_27_what_others_wrote_is_followed_at_the_next_beat() -> None:
    beating = Beating()
    beating.beat()
    beating.hear(f"SERVER shop {EPOCH}", "NAME v 4", "POSITION a v 9 9")
    assert beating.beat() == ({"a": 5}, False)
    assert beating.session.generators["a"].position == 9
    assert beating.beat() == ({"a": 9}, False)
    assert beating.beat() == ({**EVERYTHING, "a": 9}, True)


def test_9_27_a_beat_that_fails_is_tried_again_as_a_whole() -> None:
    beating = Beating()
    assert beating.beat(fails=True) == (EVERYTHING, True)
    assert beating.beat() == (EVERYTHING, True)


def test_9_27_a_line_that_the_registry_does_not_explain_has_it_read_at_the_next_beat() -> None:
    for lines, doubted in (
        (["NAME v 4", "POSITION a v 9 9"], False),
        (["NAME v 3", "POSITION a v 9 9"], False),  # a former life
        (["NAME v 5", "POSITION a v 9 9"], True),  # it has begun anew
        (["NAME x 1", "POSITION a x 9 9"], True),  # it has joined
        (["NAME x 1", "RDATA a x 9 [1]"], True),
        (["NAME x 1", "POSITION other x 9 9"], False),  # no stream of this writer's
        (["POSITION a x 9 9"], False),  # it does not say who it is
    ):
        beating = Beating()
        beating.beat()
        beating.hear(f"SERVER shop {EPOCH}", *lines)
        assert beating.beat()[1] is doubted, lines
        assert beating.beat()[1] is False
    beating = Beating()
    beating.beat()
    beating.hear("SERVER shop " + "f" * 32, "NAME x 1", "POSITION a x 9 9")
    assert beating.beat()[1] is False  # another log's


def test_9_27_a_line_that_comes_while_the_registry_is_being_read_has_it_read_again() -> None:
    """The answer may be older than the line."""
    beating = Beating()
    beating.beat()
    joined = (f"SERVER shop {EPOCH}", "NAME x 1", "POSITION a x 9 9")
    beating.hear(*joined)
    assert beating.beat(*joined)[1] is True
    assert beating.beat()[1] is True
    assert beating.beat()[1] is False


def test_9_27_a_writer_of_single_lines_is_followed_through_the_registry_at_every_beat() -> None:
    beating = Beating()
    beating.beat()
    for _ in range(3):
        beating.hear("POSITION a v 9 9")
        assert beating.beat() == (EVERYTHING, True)


def test_9_27_a_writer_that_hears_no_other_stores_and_reads_everything_at_each_beat() -> None:
    beating = Beating(hears=False)
    assert [beating.beat() for _ in range(3)] == [(EVERYTHING, True)] * 3
    assert not beating.session.core.announcements.in_turns
