"""Who speaks: each native writer's latest incarnation, and of which epoch it said that its log is.

A restored database gives out IDs again that writers from before the restore hold for theirs, and such a writer goes on
talking until it learns that it is fenced. What it says is true of a log that is gone: taken for true of the new one, it
would step over facts. So every message of a writer opens with ``NAME writer incarnation``, its announcements say the
epoch before that, and a message counts only when the epoch of its incarnation is known, and is the listener's own.
"""

from __future__ import annotations

from .commands import Name, Server

# Epochs whose latest incarnation is remembered, per name: those before and after a restore or two.
EPOCHS = 4


class _Voice:
    """One name: the highest incarnation heard, and of each epoch the latest that announced it."""

    __slots__ = ("announced", "latest")

    def __init__(self) -> None:
        self.latest = -1
        self.announced: dict[str, int] = {}


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
        voice.latest = max(voice.latest, line.incarnation)
        if self._epoch is not None and line.incarnation >= voice.announced.get(self._epoch, -1):
            voice.announced.pop(self._epoch, None)
            voice.announced[self._epoch] = line.incarnation
            if len(voice.announced) > EPOCHS:
                del voice.announced[next(iter(voice.announced))]

    def speaking(self, writer: str) -> int | None:
        """The incarnation under which ``writer`` sent this message, if it says so."""
        return self._speaking if self._who == writer else None

    def native(self, writer: str) -> bool:
        """Whether ``writer`` has ever named itself with an incarnation, as foreign ones do not."""
        return writer in self._voices

    def trusted(self, writer: str, epoch: str | None) -> bool:
        """Whether what ``writer`` says in this message is of the log of ``epoch`` (None: of any), and not of a former
        life."""
        voice, speaking = self._voices.get(writer), self.speaking(writer)
        if voice is None:
            return speaking is None  # foreign
        if epoch is None:
            return speaking is None or speaking >= voice.latest
        return epoch in voice.announced if speaking is None else voice.announced.get(epoch) == speaking

    def lives(self, writer: str, epoch: str | None) -> bool:
        """Whether this message is a sign of life of a native ``writer`` of the log of ``epoch``, or of one without a
        log. Others may be what is left of it in a log that is gone."""
        voice = self._voices.get(writer)
        if voice is None or self.speaking(writer) is None:
            return False
        return self.trusted(writer, epoch if voice.announced else None)
