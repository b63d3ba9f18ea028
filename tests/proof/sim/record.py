"""What a run leaves for the oracle: who handled what when, what was said on the wire, what was promised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

Key = tuple[str, str]  # (stream, writer)


@attrs.frozen
class Handled:
    """A batch whose handler returned. ``rows``: (token, payload) each."""

    at: float
    role: str
    life: int
    epoch: str
    key: Key
    rows: list[tuple[int, bytes]]


@attrs.frozen
class Reported:
    """Rows that a reader was told it does not get, (after, upto] of one (stream, writer); ``why`` is how."""

    at: float
    role: str
    life: int
    epoch: str
    key: Key
    after: int
    upto: int
    why: str


@attrs.frozen
class Sample:
    """Where a reader said it was: everything up to ``position`` is handled."""

    at: float
    role: str
    life: int
    epoch: str
    key: Key
    position: int
    why: str


@attrs.frozen
class Claimed:
    """What a writer said on the wire: all that it wrote in (after, upto] are these tokens, or, with None, no row."""

    at: float
    epoch: str
    key: Key
    after: int
    upto: int
    rows: list[tuple[int, bytes]] | None


@attrs.frozen
class Upto:
    """The linear position of a stream in a process: every fact up to there, of all writers, is handled there."""

    at: float
    epoch: str
    stream: str
    position: int
    role: str
    life: int


@attrs.define
class Life:
    """One process of a role. ``epochs``: by stream, the log in which it began to follow it; ``starts``: where, of those
    that it began behind 0."""

    role: str
    number: int
    began: float
    epochs: dict[str, str] = attrs.field(factory=dict)
    starts: dict[Key, int] = attrs.field(factory=dict)
    ended: float | None = None
    how: str = ""


@attrs.define
class Record:
    """Everything, in the order in which it happened."""

    handled: list[Handled] = attrs.field(factory=list)
    reported: list[Reported] = attrs.field(factory=list)
    samples: list[Sample] = attrs.field(factory=list)
    claimed: list[Claimed] = attrs.field(factory=list)
    upto: list[Upto] = attrs.field(factory=list)
    lives: list[Life] = attrs.field(factory=list)
    presence: list[tuple[float, str, int, str, int, str, bytes]] = attrs.field(factory=list)
    # epoch -> what its log began with (a restore), {key: {id: payloads}}
    logs: dict[str, dict[Key, dict[int, tuple[bytes, ...]]]] = attrs.field(factory=dict)
    # Epochs whose database was restored without a word: the same IDs stand for other facts, nothing holds of them.
    void: dict[str, None] = attrs.field(factory=dict)
    ended: dict[str, float] = attrs.field(factory=dict)  # epoch -> when a restore put another log in its place
    # What a restore or a failover took away: the readers' effects as they were before each, and when; what had been
    # pruned, by epoch; and the facts, (epoch, stream, writer, ID) and when.
    effects: list[tuple[float, Sequence[tuple[str, str, str, str, int, str]]]] = attrs.field(factory=list)
    lost: dict[tuple[str, str, str, int], float] = attrs.field(factory=dict)
    failovers: dict[str, float] = attrs.field(factory=dict)  # epoch -> the first of them
    silent: bool = False  # commits were lost, and nothing has been said yet
    floors: dict[str, Mapping[Key, int]] = attrs.field(factory=dict)
    # (epoch, key) -> the highest floor there ever was, also if a failover took the pruning back.
    pruned: dict[tuple[str, Key], int] = attrs.field(factory=dict)
    # (role, epoch, key) -> where a reader began that log anew, no higher than that.
    begun: dict[tuple[str, str, Key], int] = attrs.field(factory=dict)
    behind: dict[str, bool] = attrs.field(factory=dict)  # writers whose clock ever was; whether without a claim
    # (epoch, stream, writer, ID) of the facts of which their writer was told that nothing of them was written.
    refused: dict[tuple[str, str, str, int], None] = attrs.field(factory=dict)
    refused_rows: set[int] = attrs.field(factory=set)  # the numbers of rows of such facts, whose IDs nobody was told
    broken: list[tuple[str, str]] = attrs.field(factory=list)  # (invariant, text) found on the way
    faults: dict[str, int] = attrs.field(factory=dict)
    note: Callable[[str, str], None] = attrs.field(default=lambda *_: None)  # the trace

    def breaks(self, invariant: str, text: str) -> None:
        """Something that must never be."""
        self.broken.append((invariant, text))
        self.note("!!", f"{invariant}: {text}")

    def refuse(self, epoch: str, writer: str, ids: Mapping[str, int]) -> None:
        """A writer was told that nothing of a fact was written."""
        self.refused.update(dict.fromkeys((epoch, stream, writer, id) for stream, id in ids.items()))

    def count(self, fault: str) -> None:
        """A fault happened."""
        self.faults[fault] = self.faults.get(fault, 0) + 1


@attrs.frozen
class Violation:
    """An invariant that did not hold."""

    invariant: str
    text: str

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return attrs.asdict(self)
