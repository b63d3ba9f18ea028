"""FEDERATION_ACK: a writer keeps rows in memory until every expected instance has said that it handled them.

The writer of a resettable stream has a `Retained`, each consumer an `Acknowledgements`. The command names an instance
and a token, but neither the stream nor the writer: so one instance name acknowledges one stream of one writer, and a
consumer of two takes two names. Nor does it name the writer's incarnation, and the token of a former life would let go
of rows of this one. busrep writes it behind the name, ``FEDERATION_ACK sender-1@1700000000000000000 54``; for a writer
that names no incarnation, and from peers that know none, it is the bare name.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from typing import Any

from busrep.core.application_commands import FederationAck
from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.commands import Name, Replicate
from busrep.core.fields import INT64_MAX
from busrep.core.retained import RetainedRows
from busrep.errors import ConfigError, NotAWriter, Unavailable
from busrep.streams import Stream

from ..asyncio.bus import Bus
from ..runtime.tasks import wait_until_set
from .news import run_until_closed

log = logging.getLogger("busrep.acks")

# What a writer keeps, as ``Settings.publish_queue_bytes``; the rows so that small ones do not cost more than that.
MAX_BYTES, MAX_ROWS = 16 * 2**20, 100_000

# Seconds between two repetitions of the same acknowledgement: a lost one keeps a quiet writer's memory that long.
REPEAT = 10.0

# Least seconds between two acknowledgements. The later one says all that the earlier said.
PAUSE = 0.1

# Seconds between two log lines about rows dropped over the bound.
LOG_EVERY = 10.0

_INSTANCE = re.compile(r"(.+)@(0|[1-9][0-9]{0,18})")


def _check(instance: str) -> None:
    """Raises ConfigError unless acknowledgements of this name have a form on the wire, whatever the incarnation."""
    for name in (instance, f"{instance}@{INT64_MAX}"):
        FederationAck(name, 0)


class Retained:
    """Keeps the rows that this process writes to ``stream`` until all ``expected`` instances have acknowledged them.

    On an open bus, before its first fact; lives as long as the bus. Over ``max_bytes`` or ``max_rows`` the oldest facts
    are dropped: counted, logged, and PositionTooOld for who asks for them. ``kept`` takes what the writing half
    completes. Raises ConfigError, NotAWriter.
    """

    def __init__(
        self,
        bus: Bus,
        stream: Stream[Any],
        *,
        expected: Iterable[str],
        max_bytes: int = MAX_BYTES,
        max_rows: int = MAX_ROWS,
    ) -> None:
        writing = bus.statistics()["writer"]
        if bus.writer is None or writing is None or stream.name not in bus.streams:
            raise NotAWriter(stream.name, bus.writer)
        if not stream.resettable:
            raise ConfigError(f"stream {stream.name!r} is kept in its table: only a resettable one is retained")
        session = bus.own_name.writing
        assert session is not None  # noqa: S101 (it has statistics)
        if stream.name in session.kept:
            raise ConfigError(f"stream {stream.name!r} is retained already: expect() keeps rows for one instance more")
        if isinstance(expected, str):
            raise ConfigError(f"expected={expected!r}: a list of names is needed")
        expected = list(expected)
        for instance in expected:
            _check(instance)
        found = writing["streams"][stream.name]
        if found["position"] or found["held"]:
            raise ConfigError(f"stream {stream.name!r} has rows already: make Retained before the first fact")
        self.kept = RetainedRows(
            stream.name,
            bus.writer,
            incarnation=writing["incarnation"],
            expected=expected,
            max_bytes=max_bytes,
            max_rows=max_rows,
        )
        self._dropped = 0
        session.kept[stream.name] = self.kept
        bus.on(FederationAck)(self._heard)
        run_until_closed(bus, self._keep_looking, "retained", self.log_dropped)

    def _heard(self, command: FederationAck) -> None:
        match = _INSTANCE.fullmatch(command.instance)
        if match is not None and match[1] in self.kept.positions:
            self.kept.acknowledged(match[1], command.token, int(match[2]))
        else:
            self.kept.acknowledged(command.instance, command.token)

    async def fetch(self, question: FetchUpdates) -> UpdatesPage:
        """A page of what is kept, as a store gives one. Raises PositionTooOld, ConfigError."""
        return self.kept.fetch(question)

    def expect(self, instance: str) -> None:
        """Keep rows for one instance more, from now on. Raises ConfigError for a name that has no form on the wire."""
        _check(instance)
        self.kept.expect(instance)

    def give_up(self, instance: str) -> None:
        """Keep nothing for this instance any more: it is gone for good. Raises ConfigError when it is the last one."""
        self.kept.give_up(instance)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOG_EVERY)
            self.log_dropped()

    def log_dropped(self) -> None:
        """Log what was dropped over the bound since the last time, and who is behind."""
        dropped = self.kept.counters.rows_dropped
        if dropped > self._dropped:
            log.warning(
                "stream %s: %d rows were dropped before all had acknowledged them; kept: (%d, %d], acknowledged: %s",
                *(self.kept.stream, dropped - self._dropped, self.kept.floor, self.kept.position, self.kept.positions),
            )
            self._dropped = dropped

    def statistics(self) -> dict[str, object]:
        """Counters since the start and levels now, JSON-able."""
        return self.kept.statistics()


class Acknowledgements:
    """Tells ``writer`` how far this process has handled ``stream``; on an open bus, lives as long as the bus.

    ``instance``: the name that the writer expects; it acknowledges this one (stream, writer) alone. The latest
    acknowledgement is sent again every ``repeat`` seconds, after a reconnect, and when somebody asks with REPLICATE.
    Raises ConfigError, UnknownStream.
    """

    def __init__(self, bus: Bus, stream: Stream[Any], writer: str, instance: str, *, repeat: float = REPEAT) -> None:
        if not repeat > 0:
            raise ConfigError(f"repeat={repeat!r}: a number of seconds above 0")
        _check(instance)
        if _INSTANCE.fullmatch(instance):
            raise ConfigError(f"instance={instance!r} ends like an incarnation: choose another name")
        self._bus, self._stream, self._writer, self._instance = bus, bus.streams[stream.name].name, writer, instance
        self._repeat = repeat
        self._incarnation = self._heard_of()  # of rows that a handler has in hand now
        self.token: int | None = None
        """The latest acknowledged, of this incarnation."""
        self._due = asyncio.Event()
        self.outdated = 0
        """Acknowledgements of an incarnation that is gone."""
        bus.on_reset(stream)(self._reset)
        bus.on(Name)(self._named)
        bus.on(Replicate)(lambda _: self._due.set())
        bus.on_connect(self._due.set)
        run_until_closed(bus, self._keep_telling, "acks", self._tell)

    @property
    def incarnation(self) -> int | None:
        """The incarnation of the writer whose rows are being handed to handlers; None: not known, or it has none."""
        if self._incarnation is None:
            self._incarnation = self._heard_of()
        return self._incarnation

    async def acknowledge(self, token: int, *, incarnation: int | None = None) -> None:
        """Everything of this writer up to ``token`` has been handled here, and need not be kept for this process.

        In the handler of the rows, or, when they are handled later, with the ``incarnation`` that was read there: one
        of an incarnation that is gone is ignored, and so is a lower token. Once the bus closes nobody is told any more:
        a handler that ends then has not failed. Raises ConfigError.
        """
        FederationAck(self._instance, token)  # raises ConfigError
        current = self.incarnation
        if incarnation is not None and incarnation != current:
            self.outdated += 1
            return
        if self.token is None or token > self.token:
            self.token = token
            self._due.set()

    def _heard_of(self) -> int | None:
        progress = self._bus.reading.core.progress.get((self._stream, self._writer))
        return None if progress is None else progress.incarnation

    def _named(self, command: Name) -> None:
        # Known from its first rows on, also when their handler takes its time and the writer restarts meanwhile.
        if command.instance == self._writer and self._incarnation is None:
            self._incarnation = self._heard_of()

    def _reset(self, _stream: str, writer: str, _position: int) -> None:
        # Called in order with the batches: rows handed out from here on are of the incarnation that is known now, for
        # those of any between were dropped by the reset that followed them.
        if writer == self._writer:
            self._incarnation, self.token = self._heard_of(), None

    async def _keep_telling(self) -> None:
        while True:
            await wait_until_set(self._due, self._repeat)
            self._due.clear()
            try:
                await self._tell()
            except Unavailable as error:  # it is news: told again
                log.debug("not acknowledged yet: %s", error)
            await asyncio.sleep(PAUSE)

    async def _tell(self) -> None:
        if self.token is not None:
            life = self.incarnation
            name = self._instance if life is None else f"{self._instance}@{life}"
            await self._bus.send(FederationAck(name, self.token))
