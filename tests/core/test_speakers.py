"""Who speaks (rule 9.16): which incarnation, of which log, and whether a listener of a log may believe it."""

from __future__ import annotations

import pytest

from busrep.core.commands import Name, Server
from busrep.core.speakers import INCARNATIONS, Speakers

ONE, OTHER = "0" * 31 + "1", "0" * 31 + "2"


def hear(speakers: Speakers, *lines: Server | Name) -> None:
    """One message that opens with these lines."""
    speakers.begin()
    for line in lines:
        speakers.listen(line)


def test_a_writer_is_believed_once_it_announced_the_listener_s_log() -> None:
    speakers = Speakers(10)
    hear(speakers, Name("w", 3))  # rows before its first announcement
    assert not speakers.trusted("w", ONE)
    hear(speakers, Server("bus", ONE), Name("w", 3))
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
    assert not speakers.trusted("w", OTHER)
    hear(speakers, Server("bus", OTHER), Name("w", 3))
    assert speakers.trusted("w", OTHER)


def test_a_higher_incarnation_has_to_announce_its_log_itself() -> None:
    speakers = Speakers(10)
    hear(speakers, Server("bus", ONE), Name("w", 3))
    hear(speakers, Name("w", 4))
    assert not speakers.trusted("w", ONE)
    hear(speakers, Server("bus", OTHER), Name("w", 4))
    assert not speakers.trusted("w", ONE)
    hear(speakers, Server("bus", ONE), Name("w", 4))
    assert speakers.trusted("w", ONE)
    hear(speakers, Name("w", 3))  # which says nothing of the other one: the claim tells which of them holds the name
    assert speakers.trusted("w", ONE)


def test_a_lower_incarnation_counts_when_it_alone_announced_the_listener_s_log() -> None:
    """Whatever a process of another log calls itself: a table made anew, or a clock set back, knows nothing of it."""
    speakers = Speakers(10)
    hear(speakers, Server("bus", OTHER), Name("w", 9))
    hear(speakers, Server("bus", ONE), Name("w", 3))
    assert speakers.trusted("w", ONE)
    hear(speakers, Name("w", 9))
    assert not speakers.trusted("w", ONE)
    hear(speakers, Server("bus", OTHER), Name("w", 9))
    assert not speakers.trusted("w", ONE)
    assert speakers.trusted("w", OTHER)
    hear(speakers, Name("w", 3))
    assert speakers.trusted("w", ONE)


def test_as_many_incarnations_are_remembered_as_were_announced_last() -> None:
    speakers = Speakers(10)
    for number in (*range(INCARNATIONS), 0, INCARNATIONS):
        hear(speakers, Server("bus", ONE), Name("w", number))
    believed = []
    for number in range(INCARNATIONS + 1):
        hear(speakers, Name("w", number))
        believed.append(speakers.trusted("w", ONE))
    assert believed == [True, False] + [True] * (INCARNATIONS - 1)
    hear(speakers, Server("bus", ONE), Name("w", 1))
    assert speakers.trusted("w", ONE)


def test_a_sign_of_life_is_what_is_believed_or_of_a_writer_without_a_log() -> None:
    speakers = Speakers(10)
    hear(speakers, Name("some client"))
    assert not speakers.lives("some client", ONE)
    hear(speakers, Name("w", 3))  # of streams in memory alone, or not announced yet
    assert speakers.lives("w", ONE)
    assert not speakers.lives("v", ONE)
    hear(speakers, Server("bus", ONE), Name("w", 3))
    assert speakers.lives("w", ONE)
    hear(speakers, Server("bus", OTHER), Name("w", 9))  # left of it in a log that is gone
    assert not speakers.lives("w", ONE)
    hear(speakers, Name("v", 1))
    assert not speakers.lives("w", ONE)  # does not speak in this message
    hear(speakers, Name("w", 3))
    assert speakers.lives("w", ONE)


@pytest.mark.parametrize("forged", [2, 4], ids=["lower", "higher"])
def test_an_incarnation_that_is_heard_takes_nothing_from_another(forged: int) -> None:
    speakers = Speakers(10)
    hear(speakers, Server("bus", ONE), Name("w", 3))
    for opening in (
        (Name("w", forged),),
        (Server("bus", OTHER), Name("w", forged)),
        (Server("bus", ONE), Name("w", forged)),
    ):
        hear(speakers, *opening)
        hear(speakers, Name("w", 3))
        assert speakers.trusted("w", ONE)
        assert speakers.lives("w", ONE)


@pytest.mark.parametrize("epoch", [ONE, None], ids=["of a log", "of any"])
def test_lines_of_a_native_writer_count_in_its_own_messages_alone(epoch: str | None) -> None:
    speakers = Speakers(10)
    hear(speakers, Server("bus", ONE), Name("w", 3))
    hear(speakers)
    assert not speakers.trusted("w", epoch)
    hear(speakers, Server("bus", ONE))
    assert not speakers.trusted("w", epoch)
    hear(speakers, Server("bus", ONE), Name("v", 9))
    assert speakers.speaking("w") is None
    assert not speakers.trusted("w", epoch)
    assert speakers.trusted("v", ONE)


def test_the_epoch_of_a_message_is_that_of_who_speaks_or_of_the_message() -> None:
    speakers = Speakers(10)
    hear(speakers)
    assert speakers.epoch_of("w") is None
    hear(speakers, Server("bus", OTHER))
    assert speakers.epoch_of("w") == OTHER
    hear(speakers, Server("bus", ONE), Name("w", 3))
    hear(speakers, Name("w", 3))
    assert speakers.epoch_of("w") == ONE
    hear(speakers, Name("w", 4))
    assert speakers.epoch_of("w") is None


def test_who_never_names_an_incarnation_is_foreign_and_believed() -> None:
    speakers = Speakers(10)
    hear(speakers, Name("some client"))
    assert not speakers.native("some client")
    assert not speakers.native("w")
    assert speakers.trusted("w", ONE)
    hear(speakers, Name("w", 3))
    assert speakers.native("w")
    assert not speakers.trusted("w", ONE)


def test_a_listener_without_a_log_believes_every_incarnation() -> None:
    speakers = Speakers(10)
    hear(speakers, Name("w", 3))
    assert speakers.trusted("w", None)


def test_of_more_names_the_one_not_heard_of_for_longest_is_forgotten() -> None:
    speakers = Speakers(2)
    hear(speakers, Server("bus", ONE), Name("u", 3))
    hear(speakers, Server("bus", ONE), Name("v", 3))
    hear(speakers, Name("u", 3))
    hear(speakers, Server("bus", ONE), Name("w", 1))
    assert [speakers.native(name) for name in "uvw"] == [True, False, True]
    hear(speakers, Name("u", 3))
    assert speakers.trusted("u", ONE)
    hear(speakers, Name("v", 3))  # a frame of rows, then an announcement
    assert not speakers.trusted("v", ONE)
    hear(speakers, Server("bus", ONE), Name("v", 3))
    assert speakers.trusted("v", ONE)
