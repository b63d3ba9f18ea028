"""The (stream, writer)s that a reader follows: where each stands, what waits for its handlers, and their log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from ..errors import ConfigError
from .catchup import FetchUpdates, Key
from .delivery import Missed, RawBatch, Reset
from .intake import Intake
from .progress import Progress
from .received import Followed
from .states import State

# Epochs of other deployments that are reported; each is reported once.
MOST_REFUTED = 16
BYTES = ("queue_bytes", "queue_bytes_peak", "buffer_bytes", "buffer_bytes_peak")  # of `Intake`, as statistics tell them


class FollowedWriters:
    """{(stream, writer): its progress}. ``followed``: the streams, by name. ``catching_up``: the (stream, writer) of
    which a gap is being fetched. ``bootstrapping``: the streams of which a snapshot is being loaded; what is delivered
    there is what was so before it.

    ``epoch``: of the fact log that the positions belong to, None until one is known. Anybody may announce another
    epoch on the channel. That is a hint. A page, read from the log itself, decides: it names the epoch of the log.
    ``new_epoch``: the log is proven to be this other one; answer with ``rebase`` or ``keep_epoch``.
    ``other_deployments``: epochs that were announced and are of other logs, for the runtime to report.
    """

    def __init__(self, streams: Iterable[Followed], intake: Intake, epoch: str | None) -> None:
        self.intake, self.settings, self.ready = intake, intake.settings, intake.ready
        self.counters, self.bootstrapping, self.catching_up = intake.counters, intake.bootstrapping, intake.catching
        self.progress: dict[Key, Progress] = {}
        self.followed = {stream.name: stream for stream in streams}
        self.epoch = epoch
        self.new_epoch: str | None = None
        self.other_deployments: list[str] = []
        self._doubted: str | None = None
        self._question: FetchUpdates | None = None  # the page that was asked for because the epoch is in doubt
        self._doubt_at = 0.0  # when it may be asked for again
        self._refuted: set[str] = set()

    def doubt(self, announced: str | None) -> None:
        """Somebody says that the log is of this epoch: a page, read from the log itself, decides."""
        if announced not in (None, self.epoch) and self.epoch is not None:
            self._doubted = announced

    def begins_in(self, epoch: str) -> bool:
        """Whether the log of this epoch, which a server told, is the one that is read here, or the first one.

        Else a page tells whether that server has seen a restore, or has not. Where nothing was read there is no page to
        ask for: then the runtime looks once more (``new_epoch``).
        """
        if self.epoch is None:
            self.epoch = epoch
        if self.is_another_log(epoch):
            self.doubt(epoch)
        elif epoch != self.epoch:
            self.new_epoch = epoch
        return self.epoch == epoch

    def log_question(self, now: float) -> FetchUpdates | None:
        """The page to fetch now because the epoch is in doubt, if it is, and no other such page was asked for."""
        if self._doubted is None or self._question is not None or self._doubt_at > now:
            return None
        for progress in self.progress.values():
            if progress.stream.durable:
                # Below the floor nothing is answered, and that may be why there is a bootstrap.
                at = progress.due if progress.state is State.BOOTSTRAPPING else progress.position
                self._question = FetchUpdates(*progress.key, at, at, 1)
                return self._question
        self._doubted = None  # nothing followed here belongs to a fact log
        return None

    def is_another_log(self, epoch: str | None) -> bool:
        """Whether a message of this epoch (None: it names none) is of another log than the one that is read here: of
        another deployment, or of the time before a restore. Without a log to read nothing tells them apart."""
        if epoch is None or self.epoch is None or epoch == self.epoch:
            return False
        return any(one.stream.durable for one in self.progress.values())

    def proves(self, asked: FetchUpdates, found: str, now: float) -> bool:
        """Whether a page of a stream with a table counts: it is of this log, and brings more than that answer."""
        if self.epoch is None:
            self.epoch = found
        if found != self.epoch:
            if self.new_epoch is None:
                self.counters.epoch_changes += 1
            self.new_epoch = found
            return False
        if asked is not self._question:
            return self.new_epoch is None
        # It may have been asked of a replica that lags: whoever says so again is believed enough to ask again.
        self._settle_doubt(now)
        refuted, self._doubted = self._doubted, None
        if refuted is not None and refuted not in self._refuted and len(self._refuted) < MOST_REFUTED:
            self._refuted.add(refuted)
            self.other_deployments.append(refuted)
        return False

    def _settle_doubt(self, now: float) -> None:
        self._question, self._doubt_at = None, now + self.settings.retry_max

    def disconnected(self) -> None:
        """The link is gone, or what came over it cannot be trusted: nothing is live any more."""
        for progress in self.progress.values():
            progress.lose()

    def _add(self, stream: Followed, writer: str, position: int) -> Progress:
        progress = Progress(self.intake, stream, writer, position)
        self.progress[progress.key] = progress
        if stream.name in self.intake.bootstrapping:  # whatever is said of it now comes after the snapshot
            progress.begin_bootstrap()
        return progress

    def follow(self, stream: Followed) -> None:
        """Follow one more stream. Its lines are ignored until then."""
        self.followed[stream.name] = stream

    def start_at(self, stream: str, writer: str, position: int, began: int | None = None) -> None:
        """Positions known at the start: saved ones, or proven ones for a reader that starts from now. ``began``: where
        all began that was handled up to a saved one; else there."""
        self._add(self.followed[stream], writer, position).began = position if began is None else began

    def learned(self, stream: str, writer: str, position: int) -> None:
        """See `Progress.learned`."""
        progress = self.progress.get((stream, writer)) or self._add(self.followed[stream], writer, 0)
        progress.learned(position)

    def bootstrap(self, stream: str) -> None:
        """A snapshot of ``stream`` will be loaded: hold the lines of all its writers, also of one that was stopped, and
        drop what waits unhandled. Raises ConfigError for a stream without a table."""
        if not self.followed[stream].durable:
            raise ConfigError(f"stream {stream!r} is not kept in a table: there is no snapshot of it")
        if stream not in self.intake.bootstrapping:
            self.intake.bootstrapping[stream] = None
            for progress in self._all_of(stream):
                progress.begin_bootstrap()

    def bootstrapped(self, stream: str, positions: Mapping[str, int]) -> None:
        """The snapshot at ``positions`` ({writer: position}; who is not in it is at 0) is applied: go on behind it."""
        for writer in positions:
            if (stream, writer) not in self.progress:
                self._add(self.followed[stream], writer, 0)
        del self.intake.bootstrapping[stream]
        for progress in self._all_of(stream):
            progress.bootstrapped(positions.get(progress.writer, 0))

    def drained(self, stream: str) -> bool:
        """Whether a bootstrap is over: all that was known when its snapshot was applied is delivered, of every writer
        that is not stopped, and nothing is held for it since. Ask after every input."""
        draining = self.intake.draining
        for key, due in list(draining.items()):
            progress = self.progress[key]
            done = not progress.holding and progress.queue.delivered >= due
            if key[0] == stream and (done or progress.state is State.STOPPED):
                del draining[key]
        return stream not in self.intake.bootstrapping and not any(key[0] == stream for key in draining)

    def _all_of(self, stream: str) -> list[Progress]:
        return [progress for key, progress in self.progress.items() if key[0] == stream]

    def take(self, stream: str, writer: str, most_rows: int | None = None) -> RawBatch | Reset | Missed | None:
        """The next thing to handle of one (stream, writer); answer with ``done``, or ``reject``."""
        key = (stream, writer)
        taken = self.progress[key].queue.take(most_rows or self.settings.handler_batch_rows)
        self.ready.pop(key, None)
        return taken

    def put_back(self, stream: str, writer: str) -> None:
        """Undo the last ``take``: it could not be handled as a whole."""
        self.progress[stream, writer].queue.put_back()
        self.ready[stream, writer] = None

    def in_hand(self, key: Key, batch: RawBatch) -> bool:
        """Whether a batch is still to be handled: its writer has not stopped or begun anew, and its log is not gone."""
        return self.progress[key].queue.handling is batch

    def done(self, stream: str, writer: str) -> int:
        """What was taken has been handled; return the position now delivered."""
        self.progress[stream, writer].done()
        return self.delivered(stream, writer)

    def delivered(self, stream: str, writer: str) -> int:
        """Every row of this writer up to here has been handled."""
        progress = self.progress.get((stream, writer))
        return 0 if progress is None else progress.queue.delivered

    def positions(self) -> dict[str, dict[str, int]]:
        """Delivered positions, {stream: {writer: position}}."""
        found: dict[str, dict[str, int]] = {}
        for (stream, writer), progress in sorted(self.progress.items()):
            found.setdefault(stream, {})[writer] = progress.queue.delivered
        return found

    def statistics(self) -> dict[str, object]:
        """Counters and states, JSON-able."""
        intake = self.intake
        states: dict[str, dict[str, str]] = {}
        for (stream, writer), progress in sorted(self.progress.items()):
            states.setdefault(stream, {})[writer] = progress.state.value
        # Why what is catching up got no page.
        errors = {" ".join(key): self.progress[key].retry.error for key in intake.catching}
        needed: dict[str, list[str]] = {}
        for stream, writer in sorted(intake.needed_catch_up):
            needed.setdefault(stream, []).append(writer)
        return {
            **attrs.asdict(intake.counters),
            **{name: getattr(intake, name) for name in BYTES},
            "states": states,
            "trouble": {about: repr(error) for about, error in errors.items() if error is not None},
            "needed_catch_up": needed,
        }
