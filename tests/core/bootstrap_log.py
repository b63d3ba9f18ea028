"""What bootstrap_model.py reads and writes: the table, with the source of snapshots over it; what is saved."""

from __future__ import annotations

import random
from collections.abc import Mapping

import attrs

from busrep.core.bootstrap_work import Apply
from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.delivery import RawBatch
from busrep.core.snapshots import Agreement, BootstrapProgress, PartRange, PartRows, decode_part, encode_rows
from busrep.core.states import BootstrapState, unfinished
from busrep.errors import PositionTooOld, ReaderMoved, SnapshotGone


class Log:
    """The table: rows, proven positions, floors, of one epoch after the other; and the source of snapshots over it."""

    def __init__(self, rng: random.Random, part_tokens: int) -> None:
        self.rng, self.part_tokens = rng, part_tokens
        self.number = self.sequence = 0
        self.rows: dict[str, list[tuple[int, bytes]]] = {}  # pruned ones too: they were there
        self.proven: dict[str, int] = {}
        self.floors: dict[str, int] = {}
        self.held: list[Agreement] = []
        self.agreements = 0
        self.before: list[dict[str, int]] = []  # positions of earlier days, at which a copy was made

    @property
    def epoch(self) -> str:
        return f"{self.number:032x}"

    def write(self, writer: str) -> list[bytes]:
        self.sequence += self.rng.choice([1, 1, 2])
        rows = [
            b'["%s",%d,%d,%d]' % (writer.encode(), self.sequence, i, self.number) for i in range(self.rng.randrange(4))
        ]
        self.rows.setdefault(writer, []).extend((self.sequence, row) for row in rows)
        self.proven[writer] = self.sequence
        return rows

    def between(self, writer: str, after: int, upto: int) -> list[tuple[int, bytes]]:
        return [row for row in self.rows.get(writer, ()) if after < row[0] <= upto]

    def page(self, asked: FetchUpdates, rows: int) -> UpdatesPage:
        if asked.after < self.floors.get(asked.writer, 0):
            raise PositionTooOld(asked.stream, asked.writer, asked.after, self.floors[asked.writer], self.epoch)
        upto = max(asked.after, min(asked.upto, self.proven.get(asked.writer, 0)))
        found = self.between(asked.writer, asked.after, upto)
        limited = len(found) > rows
        if limited:
            upto = found[rows - 1][0]
            found = [row for row in found if row[0] <= upto]
        tokens, payloads = [token for token, _ in found], [row for _, row in found]
        return UpdatesPage("s", asked.writer, asked.after, upto, tokens, payloads, limited, self.epoch, None)

    def prune(self, writer: str) -> None:
        floor = self.rng.randint(self.floors.get(writer, 0), self.proven[writer])
        if rows := self.between(writer, 0, floor):  # the highest row deleted
            self.floors[writer] = rows[-1][0]

    def restore_backup(self) -> None:
        self.number += 1
        upto = self.rng.randint(self.sequence // 2, self.sequence)
        self.rows = {
            writer: [(token, row) for token, row in rows if token <= upto] for writer, rows in self.rows.items()
        }
        self.proven = {writer: min(position, upto) for writer, position in self.proven.items()}
        self.floors = {writer: floor for writer, floor in self.floors.items() if floor <= upto}
        self.sequence, self.before = upto, []

    # -- the source of snapshots

    def agree(self, again: Agreement | None) -> Agreement:
        self.agreements += 1
        if again is not None and self.available(again):
            agreement = attrs.evolve(again, id=str(self.agreements))
        else:
            positions = self.rng.choice(self.before) if self.before and self.rng.random() < 0.3 else self.proven
            if self.rng.random() < 0.3:  # what is proven in the table is behind what was heard
                positions = {writer: self.behind(writer, position) for writer, position in positions.items()}
            floors = {writer: floor for writer, floor in self.floors.items() if floor}
            rows = self.content(positions, floors, 0, self.sequence)
            ends = sorted({token for token, _, _ in rows})
            if ends:
                ends = [*ends[self.part_tokens - 1 : -1 : self.part_tokens], ends[-1]]
            parts = [PartRange(after, upto) for after, upto in zip([0, *ends], ends, strict=False)]
            agreement = Agreement("s", self.epoch, dict(positions), floors, parts, id=str(self.agreements))
        self.held.append(agreement)
        return agreement

    def behind(self, writer: str, position: int) -> int:
        tokens = sorted({token for token, _ in self.between(writer, 0, position)})[-3:]
        return self.rng.choice([position, *tokens])

    def available(self, agreement: Agreement) -> bool:
        return agreement.epoch == self.epoch and dict(agreement.floors) == self.floors

    def content(
        self, positions: Mapping[str, int], floors: Mapping[str, int], after: int, upto: int
    ) -> list[tuple[int, str, bytes]]:
        return sorted(
            (
                (token, writer, row)
                for writer, position in positions.items()
                for token, row in self.between(writer, max(after, floors.get(writer, 0)), min(upto, position))
            ),
            key=lambda row: row[0],
        )

    def load(self, agreement: Agreement, number: int) -> PartRows:
        if not self.available(agreement):
            raise SnapshotGone("s", "pruned, or restored")
        part = agreement.parts[number]
        rows = self.content(agreement.positions, agreement.floors, part.after, part.upto)
        return decode_part(encode_rows(*zip(*rows, strict=True)) if rows else b"")


class Saved:
    """The reader's store, and the application's tables beside it: what is saved with what in one transaction."""

    def __init__(self, log: Log) -> None:
        self.log, self.epoch = log, log.epoch
        self.positions: dict[str, int] = {}
        self.bootstrap: BootstrapProgress | None = None
        self.target: dict[str, list[tuple[int, bytes]]] = {}
        self.base: Mapping[str, int] = {}  # pruned rows that the target never saw
        self.finished = self.handled = self.begun = 0

    @property
    def loading(self) -> bool:
        return self.bootstrap is not None and unfinished(self.bootstrap)

    def begin(self, agreement: Agreement, syncs: int) -> str:
        floors = self.log.floors
        if agreement.epoch != self.log.epoch or any(agreement.positions.get(w, 0) < floors[w] for w in floors):
            raise SnapshotGone("s", "a floor is above its position")
        self.epoch, self.positions = agreement.epoch, dict(agreement.positions)
        self.begun += 1
        self.bootstrap = BootstrapProgress(
            "r", agreement, BootstrapState.LOADING.value, syncs=syncs, id=str(self.begun)
        )
        return self.bootstrap.id

    def apply(self, work: Apply) -> int:
        saved = self.bootstrap
        if saved is None or saved.id != work.id or saved.parts != work.number or not self.loading:
            raise ReaderMoved("r", "s", "", work.number)
        if work.first:
            self.target, self.base = {}, work.agreement.floors
        rows = work.part
        for token, writer, row in zip(rows.tokens, rows.writers, rows.payloads, strict=True):
            self.target.setdefault(writer, []).append((token, row))
        state = BootstrapState.DRAINING if work.last else BootstrapState.LOADING
        self.finished += work.last
        self.bootstrap = attrs.evolve(
            saved,
            state=state.value,
            parts=work.parts_after,
            rows=work.rows + len(rows.tokens),
            bytes=work.bytes + rows.size,
        )
        return len(rows.tokens)

    def handle(self, batch: RawBatch, epoch: str) -> bool:
        """A handler's transaction: its rows and the position, or nothing."""
        writer = batch.writer
        if epoch != self.epoch or self.loading or self.positions.get(writer, 0) != batch.after:
            return False
        if epoch == self.log.epoch:
            assert list(zip(batch.tokens, batch.payloads, strict=True)) == self.log.between(
                writer, batch.after, batch.position
            ), "every row once, in order"
        self.target.setdefault(writer, []).extend(zip(batch.tokens, batch.payloads, strict=True))
        self.positions[writer] = batch.position
        self.handled += len(batch.tokens)
        return True
