"""Who speaks (rule 9.16): which incarnation, of which log, and whether a listener of a log may believe it."""

from __future__ import annotations

import pytest

from busrep.core.admission import INCARNATIONS, SenderTracker
from busrep.core.commands import Name, Server

ONE, OTHER = "0" * 31 + "1", "0" * 31 + "2"


def hear(senders: SenderTracker, *lines: Server | Name) -> None:
    """One message that opens with these lines."""
    senders.begin()
    for line in lines:
        senders.observe(line)


def test_a_writer_is_believed_once_it_announced_the_listener_s_log() -> None:
    senders = SenderTracker(10)
    hear(senders, Name("w", 3))  # rows before its first announcement
    assert not senders.is_trusted("w", ONE)
    hear(senders, Server("bus", ONE), Name("w", 3))
    assert senders.is_trusted("w", ONE)
    assert not senders.is_trusted("w", OTHER)
    hear(senders, Name("w", 3))  # its rows need not say the epoch again
    assert senders.is_trusted("w", ONE)


def test_the_epoch_of_a_message_is_of_that_message_alone() -> None:
    senders = SenderTracker(10)
    hear(senders, Server("bus", ONE))
    hear(senders, Name("w", 3))
    assert not senders.is_trusted("w", ONE)
    assert senders.incarnation_of("w") == 3
    hear(senders)
    assert senders.incarnation_of("w") is None


def test_an_epoch_said_anew_by_the_same_incarnation_counts() -> None:
    senders = SenderTracker(10)
    hear(senders, Server("bus", ONE), Name("w", 3))
    assert not senders.is_trusted("w", OTHER)
    hear(senders, Server("bus", OTHER), Name("w", 3))
    assert senders.is_trusted("w", OTHER)


def test_a_higher_incarnation_has_to_announce_its_log_itself() -> None:
    senders = SenderTracker(10)
    hear(senders, Server("bus", ONE), Name("w", 3))
    hear(senders, Name("w", 4))
    assert not senders.is_trusted("w", ONE)
    hear(senders, Server("bus", OTHER), Name("w", 4))
    assert not senders.is_trusted("w", ONE)
    hear(senders, Server("bus", ONE), Name("w", 4))
    assert senders.is_trusted("w", ONE)
    hear(senders, Name("w", 3))  # which says nothing of the other one: the claim tells which of them holds the name
    assert senders.is_trusted("w", ONE)


def test_a_lower_incarnation_counts_when_it_alone_announced_the_listener_s_log() -> None:
    """Whatever a process of another log calls itself: a table made anew, or a clock set back, knows nothing of it."""
    senders = SenderTracker(10)
    hear(senders, Server("bus", OTHER), Name("w", 9))
    hear(senders, Server("bus", ONE), Name("w", 3))
    assert senders.is_trusted("w", ONE)
    hear(senders, Name("w", 9))
    assert not senders.is_trusted("w", ONE)
    hear(senders, Server("bus", OTHER), Name("w", 9))
    assert not senders.is_trusted("w", ONE)
    assert senders.is_trusted("w", OTHER)
    hear(senders, Name("w", 3))
    assert senders.is_trusted("w", ONE)


def test_as_many_incarnations_are_remembered_as_were_announced_last() -> None:
    senders = SenderTracker(10)
    for number in (*range(INCARNATIONS), 0, INCARNATIONS):
        hear(senders, Server("bus", ONE), Name("w", number))
    believed = []
    for number in range(INCARNATIONS + 1):
        hear(senders, Name("w", number))
        believed.append(senders.is_trusted("w", ONE))
    assert believed == [True, False] + [True] * (INCARNATIONS - 1)
    hear(senders, Server("bus", ONE), Name("w", 1))
    assert senders.is_trusted("w", ONE)


def test_a_sign_of_life_is_what_is_believed_or_of_a_writer_without_a_log() -> None:
    senders = SenderTracker(10)
    hear(senders, Name("some client"))
    assert not senders.is_alive("some client", ONE)
    hear(senders, Name("w", 3))  # of streams in memory alone, or not announced yet
    assert senders.is_alive("w", ONE)
    assert not senders.is_alive("v", ONE)
    hear(senders, Server("bus", ONE), Name("w", 3))
    assert senders.is_alive("w", ONE)
    hear(senders, Server("bus", OTHER), Name("w", 9))  # left of it in a log that is gone
    assert not senders.is_alive("w", ONE)
    hear(senders, Name("v", 1))
    assert not senders.is_alive("w", ONE)  # does not speak in this message
    hear(senders, Name("w", 3))
    assert senders.is_alive("w", ONE)


@pytest.mark.parametrize("forged", [2, 4], ids=["lower", "higher"])
def test_an_incarnation_that_is_heard_takes_nothing_from_another(forged: int) -> None:
    senders = SenderTracker(10)
    hear(senders, Server("bus", ONE), Name("w", 3))
    for opening in (
        (Name("w", forged),),
        (Server("bus", OTHER), Name("w", forged)),
        (Server("bus", ONE), Name("w", forged)),
    ):
        hear(senders, *opening)
        hear(senders, Name("w", 3))
        assert senders.is_trusted("w", ONE)
        assert senders.is_alive("w", ONE)


@pytest.mark.parametrize("epoch", [ONE, None], ids=["of a log", "of any"])
def test_lines_of_a_native_writer_count_in_its_own_messages_alone(epoch: str | None) -> None:
    senders = SenderTracker(10)
    hear(senders, Server("bus", ONE), Name("w", 3))
    hear(senders)
    assert not senders.is_trusted("w", epoch)
    hear(senders, Server("bus", ONE))
    assert not senders.is_trusted("w", epoch)
    hear(senders, Server("bus", ONE), Name("v", 9))
    assert senders.incarnation_of("w") is None
    assert not senders.is_trusted("w", epoch)
    assert senders.is_trusted("v", ONE)


def test_the_epoch_of_a_message_is_that_of_who_speaks_or_of_the_message() -> None:
    senders = SenderTracker(10)
    hear(senders)
    assert senders.epoch_of("w") is None
    hear(senders, Server("bus", OTHER))
    assert senders.epoch_of("w") == OTHER
    hear(senders, Server("bus", ONE), Name("w", 3))
    hear(senders, Name("w", 3))
    assert senders.epoch_of("w") == ONE
    hear(senders, Name("w", 4))
    assert senders.epoch_of("w") is None


def test_who_never_names_an_incarnation_is_foreign_and_believed() -> None:
    senders = SenderTracker(10)
    hear(senders, Name("some client"))
    assert not senders.is_native("some client")
    assert not senders.is_native("w")
    assert senders.is_trusted("w", ONE)
    hear(senders, Name("w", 3))
    assert senders.is_native("w")
    assert not senders.is_trusted("w", ONE)


def test_a_listener_without_a_log_believes_every_incarnation() -> None:
    senders = SenderTracker(10)
    hear(senders, Name("w", 3))
    assert senders.is_trusted("w", None)


def test_of_more_names_the_one_not_heard_of_for_longest_is_forgotten() -> None:
    senders = SenderTracker(2)
    hear(senders, Server("bus", ONE), Name("u", 3))
    hear(senders, Server("bus", ONE), Name("v", 3))
    hear(senders, Name("u", 3))
    hear(senders, Server("bus", ONE), Name("w", 1))
    assert [senders.is_native(name) for name in "uvw"] == [True, False, True]
    hear(senders, Name("u", 3))
    assert senders.is_trusted("u", ONE)
    hear(senders, Name("v", 3))  # a frame of rows, then an announcement
    assert not senders.is_trusted("v", ONE)
    hear(senders, Server("bus", ONE), Name("v", 3))
    assert senders.is_trusted("v", ONE)
