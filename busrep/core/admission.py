"""Whose lines count for a reader: of this log, of a registered writer, of its present life.

After a restore the database gives out IDs again that writers from before the restore hold for theirs. Such a writer
goes on publishing until it learns that it is fenced, and what it publishes is true of a log that is gone: a reader of
the new log would step over facts. Therefore every message of a native writer begins with ``NAME writer incarnation``,
and its announcements name the epoch before that (rule 9.16). A message counts only if the epoch of its incarnation is
known and is that of the process that hears it. Hearing one incarnation revokes no other of the same name: anybody can
publish a line, and the claim in the database decides who holds the name.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ParseError
from .catchup import Key
from .commands import Name, Position, Server
from .followed import FollowedWriters
from .framing import Rows
from .progress import Progress
from .received import Followed, end_of

Life = tuple[str, str, int | None]  # stream, writer, incarnation

# How many incarnations of one name have their epoch remembered: some lives of the writer, and some of other deployments
# on the same channel. Beyond that the one with the oldest announcement is forgotten until it announces again.
INCARNATIONS = 16


class SenderTracker:
    """The senders that one process hears. ``most`` bounds how many names are remembered. Beyond that the name that was
    heard least recently is forgotten, and is trusted again from its next announcement on."""

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
        A writer that never named its incarnation is trusted: it is foreign, and its streams decide about it."""
        incarnation = self.incarnation_of(writer)
        if incarnation is None:
            return writer not in self._senders
        return epoch is None or self._senders[writer].get(incarnation) == epoch

    def is_alive(self, writer: str, epoch: str | None) -> bool:
        """Return whether the current message is a sign of life of native ``writer``: of no log, or of the one with
        ``epoch`` (None: any). One of another log may come from a process that lost the name in a restore."""
        return self.incarnation_of(writer) is not None and (epoch is None or self.epoch_of(writer) in (None, epoch))


# (stream, writer) pairs noted at a time that the registry does not list yet; what is not noted waits for its next line.
MOST_UNCONFIRMED = 1_000


class Admission:
    """Decides about each line of a message by its sender (rules 9.11, 9.18, 9.19, 9.24)."""

    def __init__(self, log: FollowedWriters) -> None:
        self.registry: Mapping[Key, int] | None = None  # the claim of each (stream, writer); None: not read yet
        self.senders = SenderTracker(log.settings.followed)
        self._intake, self._log = log.intake, log
        self._claims: dict[str, int] = {}  # writer -> incarnation, of the registry
        # Who the registry did not list so when it was read: how far it said to be, and the answers that came since.
        self._unconfirmed: dict[Life, tuple[int, int]] = {}

    def registered(self, claims: Mapping[Key, int]) -> None:
        """The registry as it was read just now: {(stream, writer): incarnation}."""
        self.registry, self._claims = dict(claims), {writer: claim for (_, writer), claim in claims.items()}

    def is_alive(self, name: Name) -> bool:
        """Whether a NAME is a sign of life of a writer: of one with a claim, when it is of that claim."""
        if not self.senders.is_alive(name.instance, self._log.epoch):
            return False
        return self._claims.get(name.instance, name.incarnation) == name.incarnation

    def lists(self, stream: Followed, item: Rows | Position) -> bool:
        """Rule 9.18: whether the registry lists the writer of this line, or need not."""
        if stream.resettable or self.registry is None or (stream.name, item.writer) in self.registry:
            return True
        incarnation = self.senders.incarnation_of(item.writer)
        if stream.foreign_writers and incarnation is None:
            return True
        self._intake.counters.unregistered_lines += 1
        if incarnation is not None and self.senders.is_trusted(item.writer, self._log.epoch):
            self._doubt_registry(item)
        return False

    def counts(self, progress: Progress, item: Rows | Position, incarnation: int | None, now: float) -> bool:
        """Whether a line is of this log, and of its writer's present life."""
        stream, writer = progress.stream, progress.writer
        if stream.resettable:
            return self._present_life(progress, incarnation, now)
        if not self.lists(stream, item):
            return False
        claim = None if self.registry is None else self.registry.get(progress.key)
        if claim is None and self.registry is not None:
            return True  # a declared foreign writer: no other passes here
        if not self.senders.is_trusted(writer, self._log.epoch):
            self._uncounted(incarnation)
            return False
        if claim is None or incarnation == claim:
            return True
        # One that is registered, and has never said an incarnation: its messages are single lines.
        if incarnation is None and stream.foreign_writers:
            return True
        self._intake.counters.old_incarnations += 1
        if incarnation is not None and incarnation > claim:  # a hint: the claim decides
            self._doubt_registry(item)
        return False

    def _uncounted(self, incarnation: int | None) -> None:
        """A line counts for nothing: of a native writer without its NAME, or of another log."""
        if incarnation is None:
            self._intake.counters.unnamed_lines += 1
        else:
            self._intake.counters.other_logs += 1

    def _present_life(self, progress: Progress, incarnation: int | None, now: float) -> bool:
        """Rule 9.11: of a resettable stream only the highest incarnation counts, and a higher one is a reset; so is a
        lower one that has outlived it (9.24)."""
        counters = self._intake.counters
        if self._log.is_another_log(self.senders.epoch_of(progress.writer)):
            counters.other_logs += 1
            return False
        if incarnation is None:
            if self.senders.is_native(progress.writer) and not progress.stream.foreign_writers:
                self._uncounted(None)
                return False
            return True
        known = progress.incarnation
        if known is not None and incarnation < known and not self._outlived(progress, known, incarnation, now):
            counters.old_incarnations += 1
            return False
        progress.lower_since = None
        if known != incarnation:
            if known is not None or progress.position:
                progress.reset(0)
            progress.incarnation = incarnation
        return True

    def _outlived(self, progress: Progress, known: int, incarnation: int, now: float) -> bool:
        """Rule 9.24: whether nothing but lower incarnations was heard for as long as makes a writer silent."""
        if progress.lower_since is None:
            progress.lower_since = now
        settings = self._intake.settings
        bound = settings.silent_after_beats * settings.heartbeat
        if now - progress.lower_since < bound:
            return False
        self._intake.counters.incarnations_outlived += 1
        reason = (
            f"is below {known}, of which nothing was heard for {bound:g} s: stream {progress.stream.name!r} is taken "
            "to have begun anew. If the writer restarted, its clock is behind: set it"
        )
        # However many errors wait: this is said once.
        line = f"NAME {progress.writer} {incarnation}".encode()
        self._intake.errors.append(ParseError(line, "incarnation", reason))
        return True

    @property
    def registry_doubted(self) -> bool:
        """Whether to read the registry: a line was heard that it does not explain as it is known."""
        return bool(self._unconfirmed)

    def _doubt_registry(self, item: Rows | Position) -> None:
        # Noted for this incarnation alone: what a forged one said of the same writer is no word of its own.
        said = (item.stream, item.writer, self.senders.incarnation_of(item.writer))
        if said in self._unconfirmed or len(self._unconfirmed) < MOST_UNCONFIRMED:
            before, _ = self._unconfirmed.get(said, (0, 0))
            self._unconfirmed[said] = max(before, end_of(item)), 0

    def joined(self) -> dict[Life, int]:
        """The lives that the registry lists, and of which lines were heard before it did, with how far these said that
        the writer is. To be asked after each answer of the registry; answer with ``confirmed``.

        An answer may be older than such a line: the question was, or a replica gave it. So what an answer does not
        explain, or nobody confirmed, is kept for ``silent_after_beats`` answers.
        """
        assert self.registry is not None  # noqa: S101 - without a registry nothing is doubted
        found = {}
        for said, (end, answers) in list(self._unconfirmed.items()):
            if self.registry.get(said[:2]) == said[2]:
                found[said] = end
            if answers + 1 < self._intake.settings.silent_after_beats:
                self._unconfirmed[said] = end, answers + 1
            else:
                del self._unconfirmed[said]
        return found

    def confirmed(self, life: Life) -> None:
        """What was heard of it before the registry listed it has been asked for."""
        self._unconfirmed.pop(life, None)

    def forget_unconfirmed(self) -> None:
        """Another log is read: how far they said to be is of the one before."""
        self._unconfirmed.clear()
