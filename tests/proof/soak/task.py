"""What the processes of a soak share: rows, streams, settings, and what a child is told."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import attrs

from busrep.settings import Settings
from busrep.streams import Stream

# The deployment's name on Redis.
NAME = "soak"
# A fact whose rows carry this kind was rolled back on purpose: it must appear nowhere.
ABORTED = "aborted"
# Rows of this kind came by publish(), without a row of the application.
BULK = "bulk"
# A writer's last fact of a stream.
FINAL = "final"

# Everything quick, so that minutes hold what otherwise takes hours, and every bound small enough to be reached. The
# beat is not shorter, for a machine that is busy must not take its live writers for dead all the time.
SETTINGS = Settings(
    heartbeat=0.3,
    silent_after_beats=5,
    frame_rows=50,
    publish_queue_bytes=300_000,
    receive_queue_bytes=400_000,
    held_bytes=50_000,
    page_rows=200,
    fetch_timeout=5.0,
    retry_max=0.5,
    redis_timeout=1.5,
    claim_timeout=3.0,
    handler_retries=8,
    handler_batch_rows=200,
    save_every=0.2,
    shutdown_timeout=5.0,
)
# Seconds after which a silent writer may be finished by others.
LEASE = SETTINGS.heartbeat * SETTINGS.silent_after_beats


@attrs.frozen
class Row:
    """One row: ``index`` of ``of`` rows of one fact. ``fact`` is a name no other fact of the run has."""

    fact: str
    index: int
    of: int
    kind: str
    text: str


ORDERS, PAYMENTS, AUDIT = (Stream(name, Row) for name in ("orders", "payments", "audit"))
STREAMS = (ORDERS, PAYMENTS, AUDIT)


@attrs.frozen(kw_only=True)
class Role:
    """One name of the deployment: what it writes and how it reads.

    ``reads``: "" not at all, "loose" at-least-once, "exact" exactly-once (effects and position in one transaction),
    "now" without saved positions, from wherever the others are.
    """

    who: str
    writes: tuple[str, ...] = ()
    reads: str = ""
    replica: bool = False
    """Whether it reads the table from a replica that lags."""

    @property
    def durable(self) -> bool:
        """Whether its positions are saved."""
        return self.reads in ("loose", "exact")


# Two writers share "orders", the third writes all streams and reads those of the others.
ROLES = (
    Role(who="w1", writes=("orders", "payments")),
    Role(who="w2", writes=("orders", "audit")),
    Role(who="w3", writes=("orders", "payments", "audit"), reads="loose"),
    Role(who="loose", reads="loose"),
    Role(who="exact", reads="exact"),
    Role(who="now", reads="now"),
    Role(who="replica", reads="loose", replica=True),
)


@attrs.frozen(kw_only=True)
class Task:
    """What one process is told, in its first message.

    ``routes``: (host:port) of each Redis server -> the process's own link to it; Sentinel names the former. ``tcp``:
    the process's link to the TCP server in front of Redis, when it is to go over that.
    ``store``, ``reader_store``: PostgreSQL through the process's own links. ``ledger``: the file it notes in.
    ``beats``: None for `busrep.asyncio`; for `busrep.sync` whether it has them.
    """

    who: str
    life: int
    seed: int
    writes: list[str]
    reads: str
    sentinel: int
    service: str
    routes: dict[str, str]
    tcp: str | None
    user: str
    password: str
    store: str
    reader_store: str
    ledger: str
    beats: bool | None = None

    @property
    def streams(self) -> list[Stream[Row]]:
        """The streams that it reads or writes."""
        return [stream for stream in STREAMS if self.reads or stream.name in self.writes]


def digest(payloads: Iterable[bytes]) -> str:
    """Tells whether two facts hold the same rows, byte for byte, in the same order."""
    return hashlib.blake2b(b"\n".join(payloads), digest_size=8).hexdigest()
