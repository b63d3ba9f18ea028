"""The reading process of tests/core/bootstrap_model.py: it drives the two cores as a runtime does."""

from __future__ import annotations

import random

from busrep.core.bootstrap import Bootstrap
from busrep.core.bootstrap_work import Agree, Apply, Begin, Drain, Leave, Load, Work
from busrep.core.catchup import FetchUpdates, Key
from busrep.core.delivery import RawBatch
from busrep.core.received import Followed
from busrep.core.snapshots import PartRows
from busrep.core.states import BootstrapState
from busrep.errors import PositionTooOld, ReaderMoved, SnapshotBusy, SnapshotGone, Unavailable
from busrep.settings import Settings
from tests.support.reader import Reader

from .bootstrap_log import Log, Saved

AWAY = Unavailable("the source", "away")


class Process:
    """The reading process: drives the two cores as a runtime does, and at a time of the model's choice."""

    reader_class, bootstrap_class = Reader, Bootstrap

    def __init__(self, log: Log, saved: Saved, settings: Settings, now: float) -> None:
        self.log, self.saved, self.settings = log, saved, settings
        self.reader = self.reader_class([Followed("s")], settings=settings, epoch=log.epoch, jitter=lambda: 0.5)
        self.bootstrap = self.bootstrap_class("s", settings=settings, jitter=lambda: 0.5)
        self.pages: list[FetchUpdates] = []
        self.works: list[Work] = []
        self.late: list[Work] = []  # given up, and answered all the same
        self.at_work: dict[Key, tuple[RawBatch, str]] = {}
        if saved.epoch != log.epoch:
            self.bootstrap.request("another epoch", now)
        else:
            for writer, position in saved.positions.items():
                self.reader.start_at("s", writer, position)
            if saved.bootstrap is not None and saved.loading:
                self.bootstrap.restore(saved.bootstrap, now)
        self.pump(now)

    def pump(self, now: float) -> None:
        reader, bootstrap = self.reader, self.bootstrap
        if reader.new_epoch is not None:
            self.change_epoch(now)
        self.follow_states()
        if (
            bootstrap.state is BootstrapState.DRAINING
            and reader.drained("s")
            and any(isinstance(w, Drain) for w in self.works)
        ):
            bootstrap.drained(now)
        for work in bootstrap.work(now):
            if isinstance(work, Leave):
                self.log.held.remove(work.agreement)
            elif isinstance(work, Drain):
                positions = work.agreement.positions
                # Where a twin was faster it may have gone on already.
                positions = {**positions, **self.saved.positions} if self.saved.epoch == reader.epoch else positions
                reader.bootstrapped("s", positions)
                self.works.append(work)
            else:
                self.works.append(work)
        self.late += [work for work in self.works if work not in bootstrap.under_way and isinstance(work, Agree | Load)]
        self.works = [work for work in self.works if work in bootstrap.under_way]
        self.pages += reader.fetches(now)
        self.check()

    def follow_states(self) -> None:
        for _, after in self.bootstrap.changes:
            if after is BootstrapState.REQUESTED:
                self.reader.bootstrap("s")
        self.bootstrap.changes.clear()

    def change_epoch(self, now: float) -> None:
        reader = self.reader
        if self.log.epoch == reader.epoch:
            reader.keep_epoch(now)
            return
        # What is saved stays that of the former log until the new agreement is: a restart finds out again.
        reader.rebase(self.log.epoch, {("s", writer): floor for writer, floor in self.log.floors.items()})
        self.bootstrap.gone("another epoch", now)
        self.bootstrap.request("another epoch", now)
        self.follow_states()

    def check(self) -> None:
        reader, settings, bootstrap = self.reader, self.settings, self.bootstrap
        held = {key: sum(size for _, _, size in one.held.lines) for key, one in reader.progress.items()}
        assert held == {key: one.held.size for key, one in reader.progress.items()}
        assert reader.intake.buffer_bytes == sum(held[key] for key, one in reader.progress.items() if one.held.buffered)
        assert reader.intake.buffer_bytes_peak <= settings.full_sync_buffer_limit, "the buffer is bounded"
        loads = {work.number for work in bootstrap.under_way if isinstance(work, Load)}
        ahead = bootstrap.parts.ahead
        assert not loads & ahead.keys(), "nothing is loaded twice"
        assert len(loads | ahead.keys()) <= settings.snapshot_connections, "what is loaded ahead is bounded"
        assert sum(isinstance(work, Apply) for work in bootstrap.under_way) <= 1, "one part at a time"
        assert len(bootstrap.held) <= 1
        if bootstrap.state in (BootstrapState.REQUESTED, BootstrapState.AGREED, BootstrapState.LOADING):
            assert reader.bootstrapping
            assert not any(isinstance(one.queue.handling, RawBatch) for one in reader.progress.values())

    # -- what it waits for

    def answer_page(self, rng: random.Random, now: float, trouble: float) -> None:
        asked = self.pages.pop(rng.randrange(len(self.pages)))
        try:
            if rng.random() < trouble:
                raise AWAY
            self.reader.receive_page(asked, self.log.page(asked, self.settings.page_rows), now)
        except PositionTooOld as error:
            self.reader.fetch_failed(asked, error, now)
            if self.reader.progress["s", asked.writer].position < error.floor:
                self.bootstrap.request(str(error), now)
        except Unavailable as error:
            self.reader.fetch_failed(asked, error, now)
        self.pump(now)

    def take(self, rng: random.Random) -> None:
        ready = [key for key in self.reader.ready if key not in self.at_work]
        if ready:
            key = rng.choice(ready)
            taken = self.reader.take(*key, rng.choice([1, 3, 1000]))
            if isinstance(taken, RawBatch):
                assert not self.reader.bootstrapping, "no row before the snapshot is applied"
                self.at_work[key] = (taken, self.reader.epoch or "")
            else:
                self.reader.done(*key)

    def end_handler(self, key: Key, now: float) -> None:
        batch, epoch = self.at_work.pop(key)
        in_hand = self.reader.progress[key].queue.handling is batch
        if self.saved.handle(batch, epoch):
            if in_hand:
                self.reader.done(*key)
        else:
            self.look_at_saved(now)
            if in_hand and not self.reader.bootstrapping:
                self.reader.progress[key].go_on_from(self.saved.positions.get(key[1], 0))
        self.pump(now)

    def look_at_saved(self, now: float) -> None:
        """It is not what was expected: somebody else works under this name."""
        saved, state = self.saved, self.bootstrap.state
        self.reader.doubt(saved.epoch)
        if saved.epoch != self.reader.epoch:
            return
        if saved.bootstrap is not None and (
            saved.loading or state in (BootstrapState.AGREED, BootstrapState.LOADING, BootstrapState.REQUESTED)
        ):
            self.bootstrap.restore(saved.bootstrap, now)
        self.follow_states()

    def answer(self, work: Work, rng: random.Random, now: float, trouble: float) -> None:
        if isinstance(work, Drain) or (isinstance(work, Begin | Apply) and self.at_work):
            return  # it is the reader that says so; and handlers' transactions of the time before end first
        bootstrap = self.bootstrap
        try:
            if rng.random() < trouble:
                raise SnapshotBusy("the source", 1) if rng.random() < 0.3 else AWAY
            if isinstance(work, Agree):
                agreement = self.log.agree(work.again)
                if agreement.epoch == self.reader.epoch:
                    bootstrap.agreed(work, agreement, now)
                else:
                    self.log.held.remove(agreement)
                    # Pages may all be below the floors of the new log, and tell nothing.
                    self.reader.new_epoch = agreement.epoch
                    raise AWAY
            elif isinstance(work, Begin):
                bootstrap.begun(work, now, self.saved.begin(work.agreement, work.syncs))
            elif isinstance(work, Load):
                bootstrap.loaded(work, self.log.load(work.agreement, work.number), now)
            elif isinstance(work, Apply):
                assert self.reader.bootstrapping
                bootstrap.applied(work, self.saved.apply(work), now)
        except ReaderMoved as error:
            self.look_at_saved(now)
            bootstrap.failed(work, error, now)
        except (Unavailable, SnapshotGone) as error:
            bootstrap.failed(work, error, now)
        self.pump(now)

    def answer_late(self, work: Work, now: float) -> None:
        if isinstance(work, Agree):
            self.bootstrap.agreed(work, self.log.agree(work.again), now)
        elif isinstance(work, Load):
            self.bootstrap.loaded(work, PartRows((), (), ()), now)
        self.pump(now)
