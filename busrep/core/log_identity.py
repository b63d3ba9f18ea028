"""Which fact log the positions of a reader belong to, and whether there is another now."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .catchup import FetchUpdates, Key
from .intake import Intake
from .progress import Progress
from .states import State

# Epochs of other deployments that are reported; each is reported once.
MOST_REFUTED = 16


@attrs.define(eq=False)
class LogIdentity:
    """The epoch of the positions held.

    Anybody may announce another epoch on the channel. That is a hint. A page, read from the log itself, decides: it
    names the epoch of the log. ``new``: the log is proven to be this other one. ``other_deployments``: epochs that were
    announced and are of other logs, for the runtime to report.
    """

    _intake: Intake
    _followed: Mapping[Key, Progress]
    epoch: str | None
    new: str | None = None
    other_deployments: list[str] = attrs.field(factory=list)
    _doubted: str | None = None
    _question: FetchUpdates | None = None
    _retry_at: float = 0.0
    _refuted: dict[str, None] = attrs.field(factory=dict)

    def doubt(self, announced: str | None) -> None:
        """Take in that a line names this epoch."""
        if announced not in (None, self.epoch) and self.epoch is not None:
            self._doubted = announced

    def question(self, now: float) -> FetchUpdates | None:
        """The page to fetch now because the epoch is in doubt, if it is, and no other such page was asked for."""
        if self._doubted is None or self._question is not None or self._retry_at > now:
            return None
        for progress in self._followed.values():
            if not progress.stream.durable:
                continue
            # Below the floor nothing is answered, and that may be why there is a bootstrap.
            at = progress.due if progress.state is State.BOOTSTRAPPING else progress.position
            self._question = FetchUpdates(progress.stream.name, progress.writer, at, at, 1)
            return self._question
        self._doubted = None  # nothing followed here belongs to a fact log
        return None

    def is_another(self, epoch: str | None) -> bool:
        """Whether a message of this epoch (None: it names none) is of another log than the one that is read here: of
        another deployment, or of the time before a restore. Without a log to read nothing tells them apart."""
        if epoch is None or self.epoch is None or epoch == self.epoch:
            return False
        return any(one.stream.durable for one in self._followed.values())

    def asked(self, page: FetchUpdates) -> bool:
        """Whether this page was asked for because the epoch was in doubt."""
        return page is self._question

    def failed(self, now: float) -> None:
        """That page did not come."""
        self._question, self._retry_at = None, now + self._intake.settings.retry_max

    def retry_at(self, now: float) -> list[float]:
        """When such a page may be asked for again, if that is in the future."""
        return [self._retry_at] if self._doubted is not None and self._retry_at > now else []

    def verify(self, asked: FetchUpdates, found: str, now: float) -> bool:
        """Whether a page of a stream with a table counts: it is of this log, and brings more than that answer."""
        if self.epoch is None:
            self.epoch = found
        if found == self.epoch:
            if asked is self._question:
                # It may have been asked of a replica that lags: whoever says so again is believed enough to ask again.
                self._refute(self._doubted)
                self._doubted = self._question = None
                self._retry_at = now + self._intake.settings.retry_max
                return False
            return self.new is None
        if self.new is None:
            self._intake.counters.epoch_changes += 1
        self.new = found
        return False

    def _refute(self, announced: str | None) -> None:
        if announced is not None and announced not in self._refuted and len(self._refuted) < MOST_REFUTED:
            self._refuted[announced] = None
            self.other_deployments.append(announced)

    def keep(self, now: float) -> None:
        """It turned out to be this log all the same."""
        self.new = self._question = None
        self._retry_at = now + self._intake.settings.retry_max

    def replace(self, epoch: str) -> None:
        """The positions are of this log from now on."""
        self.epoch, self.new = epoch, None
        self._doubted = self._question = None
        self._refuted.pop(epoch, None)
