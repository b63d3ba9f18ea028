"""Who speaks: each native writer's latest incarnation, and of which epoch it said that its log is.

A restored database gives out IDs again that writers from before the restore hold for theirs, and such a writer goes on
talking until it learns that it is fenced. What it says is true of a log that is gone: taken for true of the new one, it
would step over facts. So every message of a writer opens with ``NAME writer incarnation``, its announcements say the
epoch before that, and a message counts only when the epoch of its incarnation is known, and is the listener's own.
"""

from __future__ import annotations

from .commands import Name, Server


class Speakers:
    """The voices that one process hears. ``most``: names that are remembered; of more the one not heard of for longest
    is forgotten, and believed again from its next announcement on."""

    __slots__ = ("_epoch", "_known", "_most", "_speaking", "_who")

    def __init__(self, most: int) -> None:
        self._known: dict[str, tuple[int, str | None]] = {}
        self._most = most
        self.begin()

    def begin(self) -> None:
        """A new message."""
        self._epoch: str | None = None
        self._who: str | None = None
        self._speaking: int | None = None

    def listen(self, line: Server | Name) -> bool:
        """Take in a line that says who speaks; whether it names a writer, and not one of a former life."""
        if isinstance(line, Server):
            self._epoch = line.epoch
            return False
        if line.incarnation is None:
            return False
        self._who, self._speaking = line.instance, line.incarnation
        known = self._known.get(line.instance)
        if known is not None and line.incarnation < known[0]:
            return False
        epoch = self._epoch
        if epoch is None and known is not None and known[0] == line.incarnation:
            epoch = known[1]
        self._known.pop(line.instance, None)
        self._known[line.instance] = (line.incarnation, epoch)  # the last heard stands last
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return True

    def speaking(self, writer: str) -> int | None:
        """The incarnation under which ``writer`` sent this message, if it says so."""
        return self._speaking if self._who == writer else None

    def native(self, writer: str) -> bool:
        """Whether ``writer`` has ever named itself with an incarnation, as foreign ones do not."""
        return writer in self._known

    def trusted(self, writer: str, epoch: str | None) -> bool:
        """Whether what ``writer`` says in this message is of the log of ``epoch`` (None: of any)."""
        known = self._known.get(writer)
        if known is None:
            return self.speaking(writer) is None  # foreign
        speaking = self.speaking(writer)
        if speaking is not None and speaking < known[0]:
            return False
        return epoch is None or known[1] == epoch
