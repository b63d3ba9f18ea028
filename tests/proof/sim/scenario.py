"""What is to happen in a run: who takes part, and when what is done to whom. Drawn from a seed, and JSON-able.

A scenario holds everything that the dice decide about the course of events, so that one that fails can be shrunk: an
event left out leaves the others as they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from .strangers import KINDS

Args = Mapping[str, Any]

WRITER, LOOSE, STRICT, LIVE, REPLICA = "writer", "loose", "strict", "live", "replica"
MEMORY = "memory"


@attrs.frozen
class Role:
    """One that takes part. ``kind``: a writer; or a reader that is durable and handles at least once ("loose"), exactly
    once ("strict"), keeps no positions ("live"), or catches up from a lagging replica ("replica"); or a writer of the
    stream in memory alone, which has no claim ("memory")."""

    name: str
    kind: str
    options: Args = attrs.field(factory=dict)

    @property
    def reads(self) -> bool:
        """Whether it has handlers."""
        return self.kind not in (WRITER, MEMORY) or bool(self.options.get("reads"))


@attrs.frozen
class Event:
    """At ``at`` seconds ``kind`` (a method of `World`) is done to ``who``."""

    at: float
    kind: str
    who: str
    args: Args = attrs.field(factory=dict)

    def __str__(self) -> str:
        args = ", ".join(f"{key}={value}" for key, value in self.args.items())
        return f"{self.at:7.3f} {self.kind} {self.who} {args}".rstrip()


@attrs.frozen
class Scenario:
    """A run: after ``seconds`` all faults end, and everybody has to come to the same. ``together``: whether the writers
    beat at one moment; ``rests``: whether they leave beats out, as many writers do, with no stream in memory (9.27)."""

    seed: int
    seconds: float
    roles: tuple[Role, ...]
    settings: Args
    events: tuple[Event, ...]
    together: bool = False
    rests: bool = False

    def without(self, events: Iterable[Event], roles: Iterable[Role] = ()) -> Scenario:
        """The same without these."""
        left_out, gone = set(map(id, events)), {role.name for role in roles}
        return attrs.evolve(
            self,
            events=tuple(one for one in self.events if id(one) not in left_out and one.who not in gone),
            roles=tuple(role for role in self.roles if role.name not in gone),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Scenario:
        """The scenario that `as_json` gave."""
        return cls(
            value["seed"],
            value["seconds"],
            tuple(Role(**role) for role in value["roles"]),
            value["settings"],
            tuple(Event(**event) for event in value["events"]),
            value.get("together", False),
            value.get("rests", False),
        )


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    return _Draw(seed).scenario()


class _Draw:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(f"scenario {seed}")
        self.seconds = self.dice.choice([3.0, 4.0, 6.0, 9.0])
        self.events: list[Event] = []
        self._window: tuple[float, float] | None = None  # in which faults come; None: at any time

    def scenario(self) -> Scenario:
        dice = self.dice
        writers = [
            Role(f"w{n + 1}", WRITER, {"reads": dice.random() < 0.25, "late": self._late()})
            for n in range(dice.choice([1, 2, 2, 3]))
        ]
        kinds = dice.choice(
            [(LOOSE,), (STRICT,), (LOOSE, STRICT), (LOOSE, LIVE), (STRICT, LIVE), (STRICT, REPLICA), (LOOSE, REPLICA)]
        )
        readers = [Role(f"r{n + 1}", kind, self._reader(kind)) for n, kind in enumerate(kinds)]
        self.writers, self.readers = [role.name for role in writers], [role.name for role in readers]
        self._work()
        for _ in range(dice.choice([0, 1, 2, 3, 4, 6, 8])):
            self._fault()
        self._strangers(random.Random(f"strangers {self.seed}"))
        self._outages()
        self._failovers(random.Random(f"failovers {self.seed}"))
        reading = [role.name for role in writers if role.reads]
        self._restored_at_beginning(random.Random(f"restored at beginning {self.seed}"), reading)
        self._bursts(random.Random(f"bursts {self.seed}"))
        self._flushes(random.Random(f"flushes {self.seed}"))
        memory = self._clocks(random.Random(f"clocks {self.seed}"))
        self._database_clocks(random.Random(f"database clocks {self.seed}"))
        self._sequences_set(random.Random(f"sequences set {self.seed}"))
        together = random.Random(f"together {self.seed}").random() < 0.5
        settings, rests = self._settings(), random.Random(f"rests {self.seed}")
        if resting := rests.random() < 0.5:
            self._rest(rests)
            writers = [attrs.evolve(role, options={**role.options, "tables": True}) for role in writers]
        events = tuple(sorted(self.events, key=lambda event: event.at))
        return Scenario(self.seed, self.seconds, (*writers, *readers, *memory), settings, events, together, resting)

    def _rest(self, dice: random.Random) -> None:
        """A time in which nobody writes, so that writers come to rest, and something fails; and no rows in memory of
        writers of tables. With dice of its own: all else stays what it is."""
        since, lasting = 0.3 + dice.random() * (self.seconds - 0.3), dice.choice([3.0, 5.0, 8.0])
        moved = [attrs.evolve(one, at=round(one.at + lasting * (one.at >= since), 4)) for one in self.events]
        self.events = [one for one in moved if one.kind != "presence" or one.who not in self.writers]
        self.seconds += lasting
        self.dice, self._window = dice, (since + 2.5, since + lasting)
        for _ in range(dice.choice([0, 1, 1, 2, 3])):
            self._fault()

    def _outages(self) -> None:
        """Of what handlers need. With dice of their own: the other draws stay what they were."""
        dice = random.Random(f"outages {self.seed}")
        for _ in range(dice.choice([0, 0, 0, 1, 2])):
            at = 0.3 + dice.random() * (self.seconds - 0.3)
            self._add(at, "handler_outage", dice.choice(self.readers), lasting=round(dice.choice([0.1, 1.0, 3.0]), 3))

    def _strangers(self, dice: random.Random) -> None:
        """With dice of their own: what else happens in the scenario of a seed stays as it is."""
        for _ in range(dice.choice([0, 0, 1, 1, 2, 4])):
            at = 0.3 + dice.random() * (self.seconds - 0.3)
            times, every = dice.choice([1, 3, 20]), dice.choice([0.001, 0.05, 0.3])
            seed = dice.randrange(10**6)
            self._add(at, "stranger", "", says=dice.choice(KINDS), times=times, every=every, seed=seed)

    def _clocks(self, dice: random.Random) -> list[Role]:
        """Clocks that are behind, of processes that begin anew under them. Incarnations come from the clock alone where
        no stream has a table, so one who writes only such a stream may join. With dice of their own."""
        memory = [Role("m1", MEMORY)] if dice.random() < 0.2 else []
        for _ in range(dice.choice([4, 8, 16]) if memory else 0):
            self._add(0.3 + dice.random() * (self.seconds - 0.3), "presence", "m1", rows=dice.choice([1, 1, 3]))
        for _ in range(dice.choice([1, 2, 3]) if memory else dice.choice([0, 0, 0, 0, 0, 1])):
            who, at = "m1" if memory else dice.choice(self.writers), 0.3 + dice.random() * (self.seconds - 0.3)
            self._add(at, "clock", who, behind=dice.choice([0.0, 0.5, 60.0, 3600.0]))
            if dice.random() < 0.5:
                self._add(at + 0.001, "kill", who, zombie=0.0, linger=0.0, back=dice.choice([0.0, 0.3, 2.0]))
            else:
                self._add(at + 0.001, "restart", who, away=dice.choice([0.0, 0.5, 2.0]))
        return memory

    def _database_clocks(self, dice: random.Random) -> None:
        """The database's clock is set back. With dice of their own."""
        for _ in range(dice.choice([0] * 9 + [1])):
            at = 0.3 + dice.random() * (self.seconds - 0.3)
            self._add(at, "database_clock", "", behind=dice.choice([0.5, 60.0, 3600.0]))

    def _sequences_set(self, dice: random.Random) -> None:
        """Somebody sets a sequence forward (finding 194). With dice of their own."""
        for _ in range(dice.choice([0] * 9 + [1])):
            at = 0.3 + dice.random() * (self.seconds - 0.3)
            self._add(at, "sequence_set", "", stream=dice.choice(["orders", "payments"]), by=dice.choice([0, 1, 1000]))

    def _failovers(self, dice: random.Random) -> None:
        """Of the database, some of which lose commits. With dice of their own."""
        for _ in range(dice.choice([0] * 8 + [1, 1, 2])):
            at = 0.3 + dice.random() * (self.seconds - 0.3)
            behind = dice.choice([0.0, 0.0, 0.05, 0.3, 1.0, 2.0])
            self._add(at, "failover", "", behind=behind, lasting=dice.choice([0.1, 1.0]))

    def _restored_at_beginning(self, dice: random.Random, names: Sequence[str]) -> None:
        """A process that reads claims its name in one log, and finds another when it begins to read (finding 131). With
        dice of their own."""
        if names and dice.random() < 0.1:
            at = 0.3 + dice.random() * (self.seconds - 0.3)
            self._add(at, "restored_at_beginning", dice.choice(names), back=dice.choice([0.0, 0.5]), lasting=0.3)

    def _flushes(self, dice: random.Random) -> None:
        """Times in which COMMIT takes long, in some of which a writer claims its name, and learns of it late (finding
        138). With dice of their own."""
        for _ in range(dice.choice([0, 0, 0, 1, 1, 2])):
            at = 0.3 + dice.random() * (self.seconds - 0.3)
            slow, lasting = dice.choice([0.0, 0.0, 0.01, 0.3, 2.5]), dice.choice([0.1, 1.0, 3.0, 4.5])
            self._add(at, "database_flush", "", slow=slow, lasting=lasting)
            if dice.random() < 0.3:
                who, since = dice.choice(self.writers), at + dice.choice([0.5, 1.5, 2.5])
                self._add(at - 0.05, "restart", who, away=dice.choice([0.0, 0.1]))
                self._add(since, "database_slow", who, slow=dice.choice([0.3, 1.5]), lasting=lasting)

    def _bursts(self, dice: random.Random) -> None:
        """Facts of one writer that begin and end together. Some are cancelled, some run statements, some have a row
        that the database refuses. The answer to one COMMIT of theirs may be lost. With dice of their own."""
        for _ in range(dice.choice([0, 1, 1, 2, 3])):
            who, at = dice.choice(self.writers), 0.3 + dice.random() * (self.seconds - 0.3)
            within = dice.choice([0.0, 0.001, 0.004])
            if dice.random() < 0.4:
                fate, zombie = dice.choice(["now", "late", "never"]), dice.choice([0.05, 0.3, 3.0])
                linger = dice.choice([0.0, 0.5, 4.0])
                self._add(at + dice.random() * 0.005, "commit_cut", who, fate=fate, zombie=zombie, linger=linger)
            for _ in range(dice.choice([3, 6, 16])):
                self._add(
                    at + dice.random() * within,
                    "write",
                    who,
                    rows=dice.choice([0, 1, 1, 1, 2]),
                    both=dice.random() < 0.2,
                    hold=dice.choice([0.0, 0.0, 0.0, 0.002, 0.02]),
                    end=dice.choices(["commit", "rollback", "cancel"], [8, 1, 3])[0],
                    cancel=round(dice.random() * dice.choice([0.02, 0.1]), 4),
                    poison=False,
                    big=dice.random() < 0.03,
                    refused=dice.random() < 0.03,
                    statement=dice.choices(["", "one", "two", "left"], [8, 1, 1, 1])[0],
                )

    def _late(self) -> float:
        """When a role joins."""
        return round(self.dice.random() * self.seconds / 2, 3) if self.dice.random() < 0.2 else 0.0

    def _reader(self, kind: str) -> dict[str, Any]:
        dice = self.dice
        # One that iterates gets the error of a pruned range whenever it begins: a person would have to act.
        loop = kind in (LOOSE, LIVE) and dice.random() < 0.2
        return {
            "start": dice.choice(["now", "earliest"]) if kind == LIVE else "earliest",
            "slow": dice.choice([0.0, 0.0, 0.005, 0.2]),
            "fails": dice.choice([0.0, 0.0, 0.05]),
            "on_poison": dice.choice(["stop", "dead_letter"]),
            "on_too_old": "stop" if kind != LIVE else "skip" if loop else dice.choice(["stop", "skip"]),
            "late": self._late(),
            "loop": loop,
            "own": random.Random(f"own {self.seed}").random() < 0.5,  # of strict ones: batch.transaction()
        }

    def _settings(self) -> dict[str, Any]:
        """Small bounds, so that a few rows meet them."""
        pick = self.dice.choice
        handling = random.Random(f"handling {self.seed}")  # of its own: the other draws stay what they were
        return {
            "heartbeat": 1.0,
            "silent_after_beats": pick([2, 3]),
            "retry_min": 0.05,
            "retry_max": pick([0.2, 1.0]),
            "redis_timeout": 1.0,
            "fetch_timeout": 2.0,
            "claim_timeout": 2.0,
            "shutdown_timeout": 1.0,
            "stuck_after": 5.0,
            "save_every": pick([0.0, 0.2, 1.0]),
            "page_rows": pick([1, 2, 3, 10]),
            "fetches": pick([1, 2, 4]),
            "stale_after": pick([1, 3]),
            "frame_rows": pick([1, 3, 10]),
            "publish_in_flight": pick([1, 2, 16]),
            "handler_batch_rows": pick([1, 3, 20]),
            "handler_retries": pick([0, 1, 3]),
            "poison_after": handling.choice([0.0, 0.5]),
            "receive_queue_bytes": pick([0, 500, 2_000, 100_000]),
            "held_bytes": pick([300, 1_000, 100_000]),
            "publish_queue_bytes": pick([0, 600, 100_000]),
            "quiet_streams": handling.choice([1, 1, 8]),
        }

    def _add(self, at: float, kind: str, who: str, **args: Any) -> None:
        self.events.append(Event(round(at, 4), kind, who, args))

    def _at(self) -> float:
        since, until = self._window or (0.3, self.seconds)
        return since + self.dice.random() * (until - since)

    def _work(self) -> None:
        dice = self.dice
        for _ in range(dice.choice([4, 8, 12, 20, 30])):
            who = dice.choice(self.writers)
            at = self._at()
            # Together: what races is what goes wrong.
            for _ in range(dice.choice([1, 1, 1, 2, 4])):
                self._write(at + dice.random() * 0.005, who if dice.random() < 0.7 else dice.choice(self.writers))
        for _ in range(dice.choice([0, 2, 4])):
            self._add(self._at(), "wait", dice.choice(self.readers), writer=dice.choice(self.writers))

    def _write(self, at: float, who: str) -> None:
        dice = self.dice
        kind = dice.choices(["write", "publish", "joined", "presence"], [7, 6, 1, 2])[0]
        if kind == "publish":
            refused = dice.random() < 0.05
            self._add(at, kind, who, rows=dice.choice([1, 1, 1, 2, 3, 12]), **({"refused": True} if refused else {}))
        elif kind == "presence":
            self._add(at, kind, who, rows=dice.choice([1, 1, 3]))
        else:
            self._add(
                at,
                kind,
                who,
                rows=dice.choice([0, 1, 1, 1, 2, 4]),
                both=dice.random() < 0.2,
                hold=dice.choice([0.0, 0.0, 0.002, 0.05, 0.5, 3.0 if dice.random() < 0.3 else 0.0]),
                end=dice.choices(["commit", "rollback", "cancel"], [8, 2, 1])[0],
                cancel=round(dice.random() * 0.02, 4),
                poison=dice.random() < 0.02,
                big=dice.random() < 0.03,
            )

    def _fault(self) -> None:
        dice, at = self.dice, self._at()
        everybody = [*self.writers, *self.readers]
        who, writer, reader = dice.choice(everybody), dice.choice(self.writers), dice.choice(self.readers)
        lasting = round(dice.choice([0.05, 0.5, 2.0, 4.0]) * (0.5 + dice.random()), 3)
        zombie = dice.choice([0.0, 0.0, 0.3, 3.0])
        linger = dice.choice([0.0, 0.0, 0.5, 4.0])
        add = self._add
        kind = dice.choices(
            [
                "redis_cut", "redis_hole", "redis_refuse", "redis_bad", "redis_clients", "redis_down", "redis_failover",
                "redis_denied", "database_cut", "commit_cut", "database_hole", "database_refuse", "database_slow",
                "database_crash", "restore", "kill", "pause", "restart", "second", "prune",
            ],
            [4, 3, 2, 4, 2, 2, 2, 1, 4, 6, 2, 1, 2, 2, 1, 8, 4, 3, 2, 3],
        )[0]  # fmt: skip
        if kind == "redis_cut":
            add(at, kind, who, pubsub=dice.choice([None, True, False]))
        elif kind == "redis_hole":
            add(at, kind, who, way=dice.choice(["in", "out", "both"]), lasting=lasting)
        elif kind in ("redis_refuse", "database_hole", "database_refuse"):
            add(at, kind, who, lasting=lasting)
        elif kind == "redis_bad":
            drop, double, reorder = (dice.choice([0.0, 0.1, 0.4]) for _ in range(3))
            add(at, kind, who, drop=drop, double=double, reorder=reorder, lasting=lasting)
        elif kind == "redis_clients":
            add(at, kind, "", pubsub=dice.random() < 0.7)
        elif kind == "redis_down":
            add(at, kind, "", lasting=lasting)
        elif kind == "redis_failover":
            add(at, kind, "", stay=[name for name in everybody if dice.random() < 0.4], lasting=lasting)
        elif kind == "redis_denied":
            add(at, kind, "", command=dice.choice(["PUBLISH", "SUBSCRIBE"]), lasting=lasting)
        elif kind == "database_cut":
            add(at, kind, who, zombie=zombie, linger=linger)
        elif kind == "commit_cut":
            victim = writer if dice.random() < 0.7 else who
            add(at, kind, victim, fate=dice.choice(["now", "late", "never"]), zombie=zombie or 0.05, linger=linger)
        elif kind == "database_slow":
            add(at, kind, who, slow=dice.choice([0.02, 0.3, 1.5]), lasting=lasting)
        elif kind == "database_crash":
            add(at, kind, "", lasting=dice.choice([0.1, 1.0]))
        elif kind == "restore":
            add(at, kind, "", back=dice.choice([0.0, 0.5, 2.0]), lasting=0.3, declared=dice.random() < 0.8)
        elif kind == "kill":
            victim = writer if dice.random() < 0.6 else who
            # None: it never comes back.
            back = None if dice.random() < 0.2 and victim in self.writers else dice.choice([0.0, 0.3, lasting])
            add(at, kind, victim, zombie=zombie, linger=linger, back=back)
        elif kind == "pause":
            add(at, kind, writer if dice.random() < 0.6 else who, lasting=lasting)
        elif kind == "restart":
            add(at, kind, who, away=dice.choice([0.0, 0.5, lasting]))
        elif kind == "second":
            begin = random.Random(f"begin {self.seed} {at}").random() < 0.5  # of its own: the other draws stay
            add(at, kind, writer if dice.random() < 0.7 else reader, lasting=lasting, begin=begin)
        else:
            add(at, kind, "", keep=dice.choice([1, 3, 8]))
