"""Who speaks (rule 9.16): which incarnation, of which log, and whether a listener of a log may believe it."""

from __future__ import annotations

import pytest

from busrep.commands import Name, Server
from busrep.speakers import Speakers

ONE, OTHER = "0" * 31 + "1", "0" * 31 + "2"


def hear(speakers: Speakers, *lines: Server | Name) -> list[bool]:
    """One message that opens with these lines; what ``listen`` said of each."""
    speakers.begin()
    return [speakers.listen(line) for line in lines]


def test_a_writer_is_believed_once_it_announced_the_listener_s_log() -> None:
    speakers = Speakers(10)
    assert hear(speakers, Name("w", 3)) == [True]  # rows before its first announcement
    assert not speakers.trusted("w", ONE)
    assert hear(speakers, Server("bus", ONE), Name("w", 3)) == [False, True]
    assert speakers.trusted("w", ONE)
    assert not speakers.trusted("w", OTHER)
    hear(speakers, Name("w", 3))  # its rows need not say the epoch again
    assert speakers.trusted("w", ONE)


def test_the_epoch_of_a_message_is_of_that_message_alone() -> None:
    speakers = Speakers(10)
    hear(speakers, Server("bus", ONE))
    hear(speakers, Name("w", 3))
    assert not speakers.trusted("w", ONE)
    assert speakers.speaking("w") == 3
    hear(speakers)
    assert speakers.speaking("w") is None


def test_an_epoch_said_anew_by_the_same_incarnation_counts() -> None:
    speakers = Speakers(10)
    hear(speakers, Server("bus", ONE), Name("w", 3))
    hear(speakers, Server("bus", OTHER), Name("w", 3))
    assert not speakers.trusted("w", ONE)
    assert speakers.trusted("w", OTHER)


def test_a_higher_incarnation_has_to_announce_its_log_itself() -> None:
    speakers = Speakers(10)
    hear(speakers, Server("bus", ONE), Name("w", 3))
    assert hear(speakers, Name("w", 4)) == [True]
    assert not speakers.trusted("w", ONE)
    hear(speakers, Server("bus", ONE), Name("w", 4))
    assert speakers.trusted("w", ONE)


@pytest.mark.parametrize("epoch", [ONE, None], ids=["of a log", "of any"])
def test_a_former_life_of_a_writer_is_not_believed(epoch: str | None) -> None:
    speakers = Speakers(10)
    hear(speakers, Server("bus", ONE), Name("w", 4))
    assert hear(speakers, Server("bus", ONE), Name("w", 3)) == [False, False]
    assert speakers.speaking("w") == 3
    assert not speakers.trusted("w", epoch)
    hear(speakers, Name("w", 4))  # and has changed nothing of its successor's
    assert speakers.trusted("w", epoch)


def test_lines_of_a_writer_in_another_s_message_count_by_its_own_announcement() -> None:
    speakers = Speakers(10)
    hear(speakers, Server("bus", ONE), Name("w", 3))
    hear(speakers, Server("bus", OTHER), Name("v", 9))
    assert speakers.speaking("w") is None
    assert speakers.trusted("w", ONE)
    assert not speakers.trusted("v", ONE)


def test_who_never_names_an_incarnation_is_foreign_and_believed() -> None:
    speakers = Speakers(10)
    assert hear(speakers, Name("some client")) == [False]
    assert not speakers.native("w")
    assert speakers.trusted("w", ONE)
    hear(speakers, Name("w", 3))
    assert speakers.native("w")
    assert not speakers.trusted("w", ONE)


def test_a_listener_without_a_log_believes_all_but_former_lives() -> None:
    speakers = Speakers(10)
    hear(speakers, Name("w", 3))
    assert speakers.trusted("w", None)


def test_of_more_names_the_one_not_heard_of_for_longest_is_forgotten() -> None:
    speakers = Speakers(2)
    hear(speakers, Server("bus", ONE), Name("u", 3))
    hear(speakers, Server("bus", ONE), Name("v", 3))
    hear(speakers, Name("u", 3))
    assert hear(speakers, Server("bus", ONE), Name("w", 1)) == [False, True]
    assert [speakers.native(name) for name in "uvw"] == [True, False, True]
    assert speakers.trusted("u", ONE)
    hear(speakers, Name("v", 3))  # a frame of rows, then an announcement
    assert not speakers.trusted("v", ONE)
    hear(speakers, Server("bus", ONE), Name("v", 3))
    assert speakers.trusted("v", ONE)
