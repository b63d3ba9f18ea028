"""Which incarnation of a writer sent the current message, and which epoch that incarnation belongs to (rule 9.16).

After a restore the database gives out IDs again that writers from before the restore hold for theirs. Such a writer
goes on publishing until it learns that it is fenced, and what it publishes is true of a log that is gone: a reader of
the new log would step over facts. Therefore every message of a native writer begins with ``NAME writer incarnation``,
and its announcements name the epoch before that. A message counts only if the epoch of its incarnation is known and is
the epoch of the process that hears it.

Hearing one incarnation revokes no other incarnation of the same name. Any process can publish a line on the channel;
the claim in the database decides which incarnation holds the name.
"""

from __future__ import annotations

from .commands import Name, Server

# How many incarnations of one name have their epoch remembered: some lives of the writer, and some of other deployments
# on the same channel. Beyond that the one with the oldest announcement is forgotten until it announces again.
INCARNATIONS = 16


class SenderTracker:
    """The senders that one process hears.

    ``most`` bounds how many names are remembered. Beyond that the name that was heard least recently is forgotten, and
    is trusted again from its next announcement on.
    """

    __slots__ = ("_epoch", "_incarnation", "_most", "_name", "_senders")

    def __init__(self, most: int) -> None:
        self._senders: dict[str, dict[int, str]] = {}  # the epoch that each incarnation of a name announced last
        self._most = most
        self.begin()

    def begin(self) -> None:
        """Begin a new message. Its sender is unknown until a NAME line is observed."""
        self._epoch: str | None = None
        self._name: str | None = None
        self._incarnation: int | None = None

    def observe(self, line: Server | Name) -> None:
        """Take in a line of the current message that identifies its sender."""
        if isinstance(line, Server):
            self._epoch = line.epoch
            return
        if line.incarnation is None:
            return
        self._name, self._incarnation = line.instance, line.incarnation
        announced = self._senders.pop(line.instance, {})
        self._senders[line.instance] = announced  # the dict is ordered: the name heard last stands last
        if len(self._senders) > self._most:
            del self._senders[next(iter(self._senders))]
        if self._epoch is not None:
            announced.pop(line.incarnation, None)
            announced[line.incarnation] = self._epoch
            if len(announced) > INCARNATIONS:
                del announced[next(iter(announced))]

    def incarnation_of(self, writer: str) -> int | None:
        """Return the incarnation under which ``writer`` sent the current message; None if the message does not say."""
        return self._incarnation if self._name == writer else None

    def epoch_of(self, writer: str) -> str | None:
        """Return the epoch of what ``writer`` says in the current message, None if it is unknown."""
        incarnation = self.incarnation_of(writer)
        announced = None if incarnation is None else self._senders[writer].get(incarnation)
        return self._epoch if announced is None else announced

    def has_log(self, writer: str, incarnation: int) -> bool:
        """Return whether this incarnation of ``writer`` has announced an epoch, as one with a claim does."""
        return writer in self._senders and incarnation in self._senders[writer]

    def is_native(self, writer: str) -> bool:
        """Return whether ``writer`` ever named its incarnation. Foreign writers never do."""
        return writer in self._senders

    def is_trusted(self, writer: str, epoch: str | None) -> bool:
        """Return whether the current message names ``writer`` as its sender, of the log with this epoch (None: of any).

        A writer that never named its incarnation is trusted: it is foreign, and its streams decide about it.
        """
        incarnation = self.incarnation_of(writer)
        if incarnation is None:
            return writer not in self._senders
        return epoch is None or self._senders[writer].get(incarnation) == epoch

    def is_alive(self, writer: str, epoch: str | None) -> bool:
        """Return whether the current message is a sign of life of native ``writer``.

        It is one if the writer has no log, or the log with ``epoch`` (None: any). A message of another log may come
        from a process that lost the name in a restore.
        """
        return self.incarnation_of(writer) is not None and (epoch is None or self.epoch_of(writer) in (None, epoch))
