"""The beat of a bus: it announces the writer, looks into the table, and finds out whether the link still carries."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from busrep.core.health import LinkWatch
from busrep.errors import BusrepError
from busrep.settings import Settings

from ..links.link import Link
from ..runtime.tasks import spawn
from .own_name import OwnName
from .publisher import ChannelPublisher
from .reading import Reading
from .writing import Writing

log = logging.getLogger("busrep")


class Beats:
    """Keeps one bus beating. ``tasks``: of the bus, which ends them."""

    def __init__(
        self,
        settings: Settings,
        reading: Reading,
        own_name: OwnName,
        publisher: ChannelPublisher,
        link: Link,
        watch: LinkWatch,
        tasks: dict[asyncio.Task[Any], None],
    ) -> None:
        self._settings, self._reading, self._own_name, self._publisher = settings, reading, own_name, publisher
        self._link, self._watch, self._tasks = link, watch, tasks

    async def run(self) -> None:
        """Beat until cancelled."""
        loop, heartbeat = asyncio.get_running_loop(), self._settings.heartbeat
        beats = 0
        beating: asyncio.Task[None] | None = None
        while True:
            pause = heartbeat * (0.9 + 0.2 * random.random())
            if (writing := self._own_name.writing) is not None:  # the core has jittered its beat already
                pause = max(0.0, min(1.1 * heartbeat, writing.core.announcements.next_beat - loop.time()))
            await asyncio.sleep(pause)
            beats += 1
            if (writing := self._own_name.writing) is not None and (beating is None or beating.done()):
                beating = spawn(self._tasks, self._beat(writing), "busrep-beat")
                # What it finds out is announced at once. But a database that hangs must not keep the announcement
                # back, nor a driver that takes its time to let go of a question (psycopg: up to ten seconds).
                await asyncio.wait({beating}, timeout=heartbeat / 4)
            self._reading.beat(all_known=beats % self._settings.silent_after_beats == 1)
            if (writing := self._own_name.writing) is not None:
                writing.core.tick(loop.time())
                self._publisher.wake()
                for stuck in writing.stuck(loop.time()):
                    log.warning("fact %(id)s of stream %(stream)s is open for %(age).0f s (%(owner)s)", stuck)
            self._check_link(loop.time())

    async def _beat(self, writing: Writing) -> None:
        try:
            async with asyncio.timeout(self._settings.heartbeat):
                if writing.fenced is not None and not writing.lost:
                    writing = await writing.live()
                await writing.beat()
        except (BusrepError, TimeoutError) as error:
            log.warning("beat: %s: %s", type(error).__name__, error)
        except Exception:  # a bug, in a store perhaps; the positions are stored a beat later
            log.exception("beat failed")

    def _check_link(self, now: float) -> None:
        if not self._link.connected:
            return
        writing = self._own_name.writing
        announces = writing is not None and writing.fenced is None
        if (fault := self._watch.fault(now, announces=announces)) is not None:
            self._link.reconnect(fault)
        elif self._watch.asks(now, announces=announces):
            self._publisher.ask_for_positions()
