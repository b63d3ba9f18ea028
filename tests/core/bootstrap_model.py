"""A model of bootstrapping: writer cores and a reader core with a fake link between them, a bootstrap core with a fake
source, and the store in which the reader saves. At random the link loses, repeats and cuts; the source fails, is busy,
hangs, lags; rows are pruned; the log is restored; the process is killed; a twin under its name does part of its work.

What is checked all along: each row is handled once, in order, and none while a snapshot is being loaded; parts are
applied in order; nothing is above its bound. And once all is well again: what was applied and handled is the table.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

from busrep.core.bootstrap_work import Apply
from busrep.core.delivery import RawBatch
from busrep.core.snapshots import PartRows
from busrep.core.states import BootstrapState
from busrep.core.writer import Writer
from busrep.errors import SnapshotGone
from busrep.settings import Settings
from busrep.streams import Stream

from .bootstrap_log import Log, Saved
from .bootstrap_process import AWAY, Process


class World:
    """Everything, and what may happen to it."""

    process_class: type[Process] = Process

    def __init__(self, seed: int, process_class: type[Process] = Process, trials: Sequence[str] = ()) -> None:
        self.rng = rng = random.Random(seed)
        self.process_class = process_class
        self.settings = Settings(
            full_sync_buffer_limit=rng.choice([1_000, 5_000, 10**6]),
            held_bytes=rng.choice([800, 10**6]),
            receive_queue_bytes=rng.choice([1_000, 10**6]),
            page_rows=rng.choice([2, 5, 1000]),
            snapshot_connections=rng.choice([1, 2, 3]),
            frame_rows=rng.choice([3, 1000]),
        )
        self.now, self.connected, self.trouble, self.loss = 0.0, False, 0.1, rng.choice([0.0, 0.1, 0.3])
        self.log = Log(rng, rng.choice([2, 5, 20]))
        self.writers: dict[str, Writer] = {}
        self.incarnation = 0
        self.channel: list[bytes] = []
        # One that says where it is now and then, and not in every frame: on a live link nothing of it is lost.
        self.foreign = rng.random() < 0.5 or bool(trials)
        self.start_writer("a")
        for _ in range(rng.randrange(60)):
            self.write()
        self.saved = Saved(self.log)
        self.process = process_class(self.log, self.saved, self.settings, self.now)
        # Each walk has its own mixture: what everything at once would bury comes to light where little else happens.
        slow, often = self.rng.choice([1, 2, 6]), self.rng.choice([1, 2])
        self.often = [self.write, self.deliver, self.deliver, self.page] + [self.handler] * often + [self.work] * slow
        self.trials = trials or rng.sample(self.SELDOM, rng.randint(2, len(self.SELDOM)))
        self.seldom = rng.choice([0.02, 0.05])

    def start_writer(self, name: str) -> None:
        self.incarnation += 1
        writer = Writer("s", name, incarnation=self.incarnation, epoch=self.log.epoch, settings=self.settings)
        writer.add_stream(Stream("s"), self.log.proven.setdefault(name, 0))
        writer.connected(self.now)
        self.writers[name] = writer
        self.publish(writer)

    def publish(self, writer: Writer) -> None:
        while frames := writer.frames_to_publish():
            for frame in frames:
                writer.published(frame)
                if self.connected and self.rng.random() >= self.loss:
                    self.channel += [frame.data] * (2 if self.rng.random() < 0.1 else 1)

    # -- what may happen

    def write(self) -> None:
        name = self.rng.choice([*self.writers, "f"] if self.foreign else list(self.writers))
        if name == "f":
            rows = self.log.write("f")
            tokens = ["batch"] * (len(rows) - 1) + [str(self.log.sequence)]
            lines = [f"RDATA s f {token} ".encode() + row for token, row in zip(tokens, rows, strict=False)]
            self.say(b"\n".join(lines) if rows else b"POSITION s f %d %d" % (self.log.sequence, self.log.sequence))
            return
        for _ in range(self.rng.randrange(1, 5)):
            rows = self.log.write(name)
            self.writers[name].fact_completed("s", self.log.sequence, rows)
            self.writers[name].position_moved("s", self.log.sequence)
        self.publish(self.writers[name])

    def say(self, message: bytes) -> None:
        if self.connected:
            self.channel.append(message)

    def join(self) -> None:
        name = self.rng.choice("abcd")
        if name not in self.writers or self.rng.random() < 0.3:
            self.start_writer(name)

    def beat(self) -> None:
        for writer in self.writers.values():
            writer.tick(self.now)
            self.publish(writer)
        if "f" in self.log.proven:
            self.say(b"POSITION s f %d %d" % (self.log.proven["f"], self.log.proven["f"]))

    def cut(self) -> None:
        self.connected = False
        self.channel.clear()
        self.process.reader.disconnected()
        self.process.pump(self.now)

    def connect(self) -> None:
        if not self.connected:
            self.connected = True
            self.process.reader.connected(self.now)
            for writer in self.writers.values():
                writer.replicate_received(self.now)
                self.publish(writer)
            self.process.pump(self.now)

    def deliver(self) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            if self.channel:
                self.process.reader.receive(self.channel.pop(0), self.now)
                if self.rng.random() < 0.7:
                    self.process.pump(self.now)

    def learn(self, *, late: bool = False) -> None:
        """Of what is proven. ``late``: it may have been read some time ago."""
        proven = self.rng.choice([*self.log.before, self.log.proven]) if late else self.log.proven
        for writer, position in proven.items():
            if self.process.reader.epoch == self.log.epoch:
                self.process.reader.learned("s", writer, position)
        self.process.pump(self.now)

    def learn_late(self) -> None:
        self.learn(late=True)

    def page(self) -> None:
        if self.process.pages:
            self.process.answer_page(self.rng, self.now, self.trouble)

    def handler(self) -> None:
        process = self.process
        if process.at_work and self.rng.random() < 0.6:
            process.end_handler(self.rng.choice(list(process.at_work)), self.now)
        else:
            process.take(self.rng)

    def work(self) -> None:
        process = self.process
        if process.late and self.rng.random() < 0.3:
            process.answer_late(process.late.pop(), self.now)
        elif process.works:
            process.answer(self.rng.choice(process.works), self.rng, self.now, self.trouble)

    def ask(self) -> None:
        self.process.bootstrap.request("asked for", self.now)
        self.process.pump(self.now)

    def source_dies(self) -> None:
        self.process.bootstrap.failed(None, AWAY, self.now)
        self.process.pump(self.now)

    def prune(self) -> None:
        self.log.prune(self.rng.choice(list(self.log.proven)))

    def copy(self) -> None:
        self.log.before.append(dict(self.log.proven))

    def restore_backup(self) -> None:
        self.log.restore_backup()
        self.channel = [message for message in self.channel if b" s f " not in message]
        zombies, self.writers = self.writers, {}
        for name in zombies:
            self.start_writer(name)
        for zombie in zombies.values():  # it does not know yet, and says what is in no table
            token = zombie.positions()["s"] + 1
            zombie.fact_completed("s", token, [b'"of the log before"'])
            zombie.position_moved("s", token)
            self.publish(zombie)

    def kill(self) -> None:
        self.log.held.clear()
        self.connected = False
        self.channel.clear()
        self.process = self.process_class(self.log, self.saved, self.settings, self.now)

    def twin(self) -> None:
        """Another process under this reader's name does a piece of work, and saves it."""
        saved, log = self.saved, self.log
        if saved.epoch != log.epoch:
            return
        if self.rng.random() < 0.2:
            agreement = log.agree(None)
            log.held.remove(agreement)
            with contextlib.suppress(SnapshotGone):
                saved.begin(agreement, 1)
        elif saved.bootstrap is not None and saved.loading:
            begun, agreement, number = saved.bootstrap, saved.bootstrap.agreement, saved.bootstrap.parts
            with contextlib.suppress(SnapshotGone):
                part = log.load(agreement, number) if agreement.parts else PartRows((), (), ())
                saved.apply(Apply(agreement, number, part, begun.rows, begun.bytes, begun.id))
        else:
            writer = self.rng.choice(list(log.proven))
            after, upto = saved.positions.get(writer, 0), self.rng.randint(0, log.proven[writer])
            if log.floors.get(writer, 0) <= after < upto:
                rows = log.between(writer, after, upto)
                tokens, payloads = [token for token, _ in rows], [row for _, row in rows]
                saved.handle(RawBatch("s", writer, after, upto, tokens, payloads, True, 0), log.epoch)

    SOMETIMES = ("beat", "connect", "join", "learn", "learn_late", "copy")
    SELDOM = ("cut", "prune", "ask", "source_dies", "restore_backup", "kill", "twin")

    def step(self) -> None:
        """Something happens."""
        chance = self.rng.random()
        self.now += self.rng.random() * self.rng.choice([0.01, 0.1, 3])
        if chance < self.seldom:
            getattr(self, self.rng.choice(self.trials))()
        elif chance < 0.15:
            getattr(self, self.rng.choice(self.SOMETIMES))()
        else:
            self.rng.choice(self.often)()

    def heal(self) -> None:
        """Nothing fails any more; all there is to do is done."""
        self.trouble = self.loss = 0.0
        process = self.process
        for _ in range(1_000):
            self.now += 50
            self.connect()
            self.beat()
            self.learn()
            while self.channel:
                self.deliver()
            for work in [*process.works]:
                process.answer(work, self.rng, self.now, 0.0)
            while process.pages:
                self.page()
            while process.at_work or process.reader.ready:
                self.handler()
            process.pump(self.now)
            if self.quiet:
                return
        raise AssertionError(f"never quiet: {process.bootstrap.statistics(self.now)} {process.reader.statistics()}")

    @property
    def quiet(self) -> bool:
        process, reader = self.process, self.process.reader
        over = process.bootstrap.state in (None, BootstrapState.ONLINE) and not process.works and not process.pages
        there = all(reader.delivered("s", writer) == position for writer, position in self.log.proven.items())
        return over and there and reader.epoch == self.log.epoch == self.saved.epoch and not reader.intake.buffer_bytes

    def compare(self) -> None:
        """What was applied and handled is the table."""
        base, target = self.saved.base, self.saved.target
        table = {
            writer: [row for row in rows if row[0] > base.get(writer, 0)] for writer, rows in self.log.rows.items()
        }
        assert {writer: rows for writer, rows in target.items() if rows} == {
            writer: rows for writer, rows in table.items() if rows
        }
        assert self.log.held == [], "nothing is held at the source"


def walk(seed: int, steps: int, process_class: type[Process] = Process, trials: Sequence[str] = ()) -> World:
    """One random walk, and the comparison at its end. ``trials``: what is to go wrong, by default this and that."""
    world = World(seed, process_class, trials)
    for _ in range(steps):
        world.step()
    world.heal()
    world.compare()
    return world
