"""What a store tells of writers: a claim that was won, who is registered, how far each has come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs


@attrs.frozen
class Claim:
    """A writer's name, won. ``starts``, ``known`` and ``highest`` have every claimed stream as a key.

    ``starts``: the own position, read after the claim was committed. ``known``: the proven positions of all registered
    writers, the own one included. ``highest``: the highest ID that rows or positions show, never the sequence's value.
    ``claims``, ``sequences``: as `Registered` has them, read after that.
    """

    writer: str
    incarnation: int
    epoch: str
    starts: Mapping[str, int]
    known: Mapping[str, Mapping[str, int]]
    highest: Mapping[str, int]
    claims: Mapping[tuple[str, str], int] = attrs.field(factory=dict)
    sequences: Mapping[str, int] = attrs.field(factory=dict)

    def resumed(self, epoch: str | None, announced: Mapping[str, int]) -> Claim:
        """The claim of a process that wins its name back, and has announced these positions of that epoch's log.

        It starts no lower. A failover may have lost what was stored of them, but what the process announced stands: it
        has nothing unfinished below, and gets no ID there any more.
        """
        if epoch != self.epoch:
            return self
        return attrs.evolve(
            self,
            starts={
                stream: max(start, min(announced[stream], self.sequences.get(stream, 0)))
                for stream, start in self.starts.items()
            },
        )


class Registered(dict[str, dict[str, int]]):
    """The registry, {stream: {registered writer: proven position}}, read on the primary under a claim's lock.

    ``claims``: {(stream, writer): incarnation}. ``sequences``: the highest ID given out by then, of each stream whose
    position was stored; no position of this log lies above it. ``read``: whether the registry was; else it is empty.
    ``clock``: the server's then, in seconds; None where one transaction at a time writes.
    """

    clock: float | None = None

    def __init__(self, rows: Iterable[tuple[str, str, int, int]], sequences: Mapping[str, int], *, read: bool) -> None:
        super().__init__()
        self.claims: dict[tuple[str, str], int] = {}
        self.sequences, self.read = sequences, read
        for stream, writer, position, incarnation in rows:
            self.setdefault(stream, {})[writer] = position
            self.claims[stream, writer] = incarnation


@attrs.frozen
class KnownWriter:
    """A (stream, writer) of the positions table. ``silent_for``: seconds since its last sign of life in this row,
    by the database's clock (below zero if that was set back): a writer's beat need not touch all of its rows.
    ``incarnation``: of the writer's name now. ``position`` is proven, ``floor`` the highest deleted row ID."""

    stream: str
    writer: str
    position: int
    floor: int
    registered: bool
    incarnation: int
    silent_for: float


def silence_of(rows: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds since each writer's last sign of life, of (writer, seconds) of its rows: the least, for a beat need not
    touch all of them, and a stream that a writer gave up is in no beat."""
    silence: dict[str, float] = {}
    for writer, seconds in rows:
        silence[writer] = min(seconds, silence.get(writer, seconds))
    return silence


def claims_of(known: Iterable[KnownWriter]) -> dict[tuple[str, str], int]:
    """The registry as lines are judged by it: the incarnation of each registered (stream, writer)."""
    return {(one.stream, one.writer): one.incarnation for one in known if one.registered}


@attrs.frozen
class Newest:
    """{writer: its highest row ID, deleted ones counting} of every writer ever registered for a stream, in one snapshot
    of the primary, of the log ``epoch``: what was committed before the question is at or below these."""

    epoch: str
    rows: Mapping[str, int]
