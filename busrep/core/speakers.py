"""Who speaks: under which incarnation, and of which epoch that incarnation said that its log is.

A restored database gives out IDs again that writers from before the restore hold for theirs, and such a writer goes on
talking until it learns that it is fenced. What it says is true of a log that is gone: taken for true of the new one, it
would step over facts. So every message of a writer opens with ``NAME writer incarnation``, its announcements say the
epoch before that, and a message counts only when the epoch of its incarnation is known, and is the listener's own.

An incarnation that is heard takes nothing from another one of the same name: a line on the channel is a hint, and the
claim in the database tells which incarnation holds the name (9.19).
"""

from __future__ import annotations

from .commands import Name, Server

# Incarnations of one name whose epoch is remembered: some lives of the writer, and some of other deployments. Of more,
# the one whose announcement is oldest is forgotten, and believed again from its next announcement on.
INCARNATIONS = 16


class _Voice:
    """One name: the epoch that each of its incarnations announced last."""

    __slots__ = ("announced",)

    def __init__(self) -> None:
        self.announced: dict[int, str] = {}


class Speakers:
    """The voices that one process hears. ``most``: names that are remembered; of more the one not heard of for longest
    is forgotten, and believed again from its next announcement on."""

    __slots__ = ("_epoch", "_most", "_speaking", "_voices", "_who")

    def __init__(self, most: int) -> None:
        self._voices: dict[str, _Voice] = {}
        self._most = most
        self.begin()

    def begin(self) -> None:
        """A new message."""
        self._epoch: str | None = None
        self._who: str | None = None
        self._speaking: int | None = None

    def listen(self, line: Server | Name) -> None:
        """Take in a line that says who speaks."""
        if isinstance(line, Server):
            self._epoch = line.epoch
            return
        if line.incarnation is None:
            return
        self._who, self._speaking = line.instance, line.incarnation
        voice = self._voices.pop(line.instance, None) or _Voice()
        self._voices[line.instance] = voice  # the last heard stands last
        if len(self._voices) > self._most:
            del self._voices[next(iter(self._voices))]
        if self._epoch is not None:
            voice.announced.pop(line.incarnation, None)
            voice.announced[line.incarnation] = self._epoch
            if len(voice.announced) > INCARNATIONS:
                del voice.announced[next(iter(voice.announced))]

    def speaking(self, writer: str) -> int | None:
        """The incarnation under which ``writer`` sent this message, if it says so."""
        return self._speaking if self._who == writer else None

    def epoch_of(self, writer: str) -> str | None:
        """The epoch of what ``writer`` says in this message, as far as it is known."""
        speaking = self.speaking(writer)
        announced = None if speaking is None else self._voices[writer].announced.get(speaking)
        return self._epoch if announced is None else announced

    def has_log(self, writer: str, incarnation: int) -> bool:
        """Whether this incarnation of ``writer`` has announced an epoch, as one that has a claim does."""
        return writer in self._voices and incarnation in self._voices[writer].announced

    def native(self, writer: str) -> bool:
        """Whether ``writer`` has ever named itself with an incarnation, as foreign ones do not."""
        return writer in self._voices

    def trusted(self, writer: str, epoch: str | None) -> bool:
        """Whether ``writer`` said who it is in this message, and is of the log of ``epoch`` (None: of any). Foreign
        writers say it in none."""
        speaking = self.speaking(writer)
        if speaking is None:
            return writer not in self._voices
        return epoch is None or self._voices[writer].announced.get(speaking) == epoch

    def lives(self, writer: str, epoch: str | None) -> bool:
        """Whether this message is a sign of life of a native ``writer`` of the log of ``epoch``, or of one without a
        log. Others may be what is left of it in a log that is gone."""
        return self.speaking(writer) is not None and (epoch is None or self.epoch_of(writer) in (None, epoch))
