"""The reader: frames in; fetches to do, and batches to handle, out. No I/O, no clock.

For each (stream, writer) it knows one position: every row up to it has been taken in, in order. The parts:
``followed``, all of them, and which fact log the positions belong to; ``progress``, one (stream, writer), and
``following``, what a line or a page does to its position and its state (``states``); ``received``, lines that have to
wait, and ``delivery``, rows to be handled; ``admission``, whose lines count; ``intake``, what all (stream, writer)
share.

How to drive it: after each of ``connected``, ``receive_frame``, ``receive_page``, ``fetch_failed``, ``learned``,
``done`` and ``bootstrapped``, and when ``next_retry`` says so, call ``fetches()`` and do what it returns; whatever
``ready`` names has something to ``take``, and then ``done``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping

from ..settings import Settings
from .admission import Admission
from .catchup import FetchUpdates, Key, UpdatesPage
from .commands import Command, Name, Position, Server
from .followed import FollowedWriters
from .framing import Frame, Rows
from .intake import Intake
from .progress import Progress
from .received import Followed
from .states import State


class Reader(FollowedWriters):
    """The state of one reading process, all streams and writers together.

    ``streams``: the registered ones. ``own``: writer names whose lines are ignored (own echoes). ``undeclared``:
    follow any other stream too, as resettable and without a source. ``epoch``: of the positions held.

    For the runtime to drain after each input: ``commands`` (commands other than rows and positions), ``errors``,
    ``other_deployments`` (epochs), ``stepped_back`` and ``unproven`` ((stream, writer) whose position is to be compared
    with the sequence), ``asks`` (REPLICATE is to be published: POSITIONs of foreign writers are due). ``admission`` is
    told the registry each time it was read.
    """

    def __init__(
        self, streams: Iterable[Followed], *, settings: Settings | None = None, own: Iterable[str] = (),
        undeclared: bool = False, epoch: str | None = None, jitter: Callable[[], float] = random.random,
    ) -> None:  # fmt: skip
        intake = Intake(settings or Settings(), jitter)
        super().__init__(streams, intake, epoch)
        self.admission = Admission(self)
        self.errors, self.stepped_back, self.unproven = intake.errors, intake.stepped_back, intake.unproven
        self.commands: list[Command] = []
        self.asks = False
        self.last_heard: dict[str, float] = {}  # native writers only
        self._own = frozenset(own)
        self._undeclared = undeclared

    def connected(self, now: float) -> None:
        """The subscription is confirmed. Publish REPLICATE next."""
        self.disconnected()
        silent = set(self.silent(now))
        for writer in self.last_heard:  # silence is counted from here, but not of who was silent before
            if writer not in silent:
                self.last_heard[writer] = now

    def disown(self) -> None:
        """The own names are another process's now: their lines count like anybody's."""
        self._own = frozenset()

    def silent(self, now: float) -> list[str]:
        """Writers that announced themselves once and have not been heard for ``silent_after_beats`` beats."""
        bound = self.settings.heartbeat * self.settings.silent_after_beats
        return [writer for writer, heard in self.last_heard.items() if now - heard > bound]

    def unheard(self, now: float) -> bool:
        """Whether a writer is heard that has not said yet where one of its streams is: it is to be asked again. A beat
        tells of all streams in turns only (9.27)."""
        silent, registry = set(self.silent(now)), self.admission.registry
        return any(
            progress.stream.durable
            and not (progress.heard or progress.held)
            and progress.state not in (State.STOPPED, State.BOOTSTRAPPING)
            and progress.writer in self.last_heard
            and progress.writer not in silent
            and (registry is None or progress.key in registry)
            for progress in self.progress.values()
        )

    def receive_frame(self, frame: Frame, now: float) -> None:
        """Take in one message. Then drain ``commands`` and ``errors``, do ``fetches()``, look at ``ready``."""
        self.counters.frames_received += 1
        if frame.errors:
            self.counters.parse_errors += frame.malformed
            self.counters.unknown_lines += frame.unknown
            self.errors.extend(frame.errors)
        admission = self.admission
        senders = admission.senders
        senders.begin()
        for item in frame.items:
            if isinstance(item, Rows | Position):
                progress = self._progress_of(item)
                if progress is None or progress.state is State.STOPPED:
                    continue
                incarnation = senders.incarnation_of(item.writer)
                if admission.counts(progress, item, incarnation, now):
                    if item.writer in self.last_heard:
                        self.last_heard[item.writer] = now
                    progress.line(item, incarnation)
                continue
            if isinstance(item, Name):
                senders.observe(item)
                if item.instance not in self._own and admission.is_alive(item):
                    self.last_heard.pop(item.instance, None)
                    self.last_heard[item.instance] = now  # the last heard stands last
                    if len(self.last_heard) > self.settings.followed:
                        del self.last_heard[next(iter(self.last_heard))]
            elif isinstance(item, Server):
                senders.observe(item)
                self.doubt(item.epoch)
            self.commands.append(item)
        if frame.cut:
            self._cut()

    def _cut(self) -> None:
        """A message, or the rest of it, was dropped, and rows with it. A native writer's next frame shows by its head
        what was in it. A foreign writer's next row shows nothing: its rows count again from its next POSITION on."""
        self.counters.messages_cut += 1
        for progress in self.progress.values():
            if progress.native or progress.state is State.STOPPED:
                continue
            self.asks = True
            if progress.heard or progress.held:
                progress.lose()

    def _progress_of(self, item: Rows | Position) -> Progress | None:
        """The progress a line concerns; None for own echoes and streams nobody registered."""
        if item.writer in self._own:
            return None
        progress = self.progress.get((item.stream, item.writer))
        if progress is not None:
            return progress
        stream = self.followed.get(item.stream)
        if stream is None and self._undeclared:
            stream = Followed(item.stream, resettable=True, fetchable=False)
        if stream is None:
            self.counters.rows_unregistered += len(item.tokens) if isinstance(item, Rows) else 0
        elif not self.admission.lists(stream, item):
            pass
        elif len(self.progress) < self.settings.followed:
            self.followed[item.stream] = stream
            progress = self._add(stream, item.writer, 0)
            progress.starts_here = stream.from_now
        else:
            self.counters.writers_refused += 1
            reason = f"{self.settings.followed} (stream, writer) are followed already: raise Settings.followed"
            self.intake.report(f"{item.stream} {item.writer}", "writer", reason)
        return progress

    # -- catch-up ---------------------------------------------------------------------------------------------

    def fetches(self, now: float) -> list[FetchUpdates]:
        """Pages to fetch now. Answer each with ``receive_page`` or ``fetch_failed``.

        While the receive queue is more than half full only those get a page that have nothing waiting: a slow
        handler is not helped by more, but it must not keep the others from their rows.
        """
        intake = self.intake
        for key in list(intake.waiting):
            self.progress[key].release()
        question = self.log_question(now)
        wanted = [] if question is None else [question]
        if self.new_epoch is not None:
            return wanted
        full = intake.queue_bytes > self.settings.receive_queue_bytes // 2
        for key in list(intake.catching):
            if intake.fetching >= self.settings.fetches:
                break
            progress = self.progress[key]
            if progress.asked is None and progress.retry.at <= now and not (full and progress.queue.size):
                del intake.catching[key]
                intake.catching[key] = None  # to the end of the line
                wanted.append(progress.ask())
        self.counters.fetches += len(wanted)
        return wanted

    def receive_page(self, asked: FetchUpdates, page: UpdatesPage, now: float) -> None:
        """The answer to ``asked``."""
        progress = self.progress[asked.stream, asked.writer]
        # Given up meanwhile (a disconnect, a reset), it may even be of the log before: it proves nothing.
        if progress.asked is not asked and asked is not self._question:
            self.counters.pages_ignored += 1
        elif progress.stream.resettable or self.proves(asked, page.epoch, now):
            progress.page(asked, page, now)

    def fetch_failed(self, asked: FetchUpdates, error: BaseException | None, now: float) -> None:
        """``asked`` got no answer; it is asked again after a pause."""
        progress = self.progress.get((asked.stream, asked.writer))
        if asked is self._question:
            self._settle_doubt(now)
        elif progress is None or progress.asked is not asked:
            self.counters.pages_ignored += 1
        else:
            progress.failed(error, now)

    def next_retry(self, now: float) -> float | None:
        """When ``fetches()`` may next return something by the passing of time alone."""
        catching = [self.progress[key] for key in self.intake.catching]
        due = [one.retry.at for one in catching if one.asked is None and one.retry.at > now]
        if self._doubted is not None and self._doubt_at > now:
            due.append(self._doubt_at)
        return min(due, default=None)

    def keep_epoch(self, now: float) -> None:
        """It turned out to be this log all the same: ask again for what was refused as another's."""
        self.new_epoch = None
        self._settle_doubt(now)
        for key in self.intake.catching:
            self.progress[key].abandon()

    def rebase(self, epoch: str, positions: Mapping[Key, int]) -> None:
        """Another fact log: all positions are void. Those given are where to go on; the rest starts at 0."""
        self.epoch, self.new_epoch = epoch, None
        self._doubted = self._question = None
        self._refuted.discard(epoch)
        self.admission.forget_unconfirmed()
        for key in dict.fromkeys((*self.progress, *positions)):
            progress = self.progress.get(key) or self._add(self.followed[key[0]], key[1], 0)
            if progress.stream.durable:
                progress.reset(positions.get(key, 0))
