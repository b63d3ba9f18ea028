"""What comes over the link: lines for the reader and for the own writer, and commands for their handlers."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any

from busrep.core.backoff import LogLimiter
from busrep.core.commands import Command, Name, Replicate, Server
from busrep.core.framing import Frame, parse_message
from busrep.core.health import LinkWatch
from busrep.errors import ParseError
from busrep.options import BusOptions

from ..runtime.tasks import call, spawn
from .own_name import OwnName
from .publisher import ChannelPublisher
from .reading import Reading
from .writing import Writing

log = logging.getLogger("busrep")

# Calls of command handlers under way. Handlers may be slower than commands come: beyond this they are dropped, counted.
COMMAND_CALLS = 10_000

_NUMBER = re.compile(r"\b\d+\b")


class Receiver:
    """Takes in the messages of one bus.

    ``heard(frame)`` is called with each, once the reader has taken it in. ``tasks``: of the bus, which ends them.
    """

    def __init__(
        self,
        options: BusOptions,
        reading: Reading,
        own_name: OwnName,
        publisher: ChannelPublisher,
        *,
        watch: LinkWatch,
        heard: Callable[[Frame], None],
        tasks: dict[asyncio.Task[Any], None],
    ) -> None:
        self._settings, self._delivers_own = options.settings, options.own
        self._reading, self._own_name, self._publisher = reading, own_name, publisher
        self._watch, self._heard, self._tasks = watch, heard, tasks
        self._handlers: dict[type[Any], list[Callable[[Any], Awaitable[None] | None]]] = {}
        self._limiter = LogLimiter()  # per reason; all are counted (protocol.md, section 1)
        self._answering: asyncio.TimerHandle | None = None
        self.commands_dropped = 0

    def on(self, kind: type[Any], handler: Callable[[Any], Awaitable[None] | None]) -> None:
        """Call ``handler`` with each command of a class from now on."""
        self._handlers.setdefault(kind, []).append(handler)

    def receive(self, channel: str, data: bytes) -> None:
        """One message."""
        now, writing = asyncio.get_running_loop().time(), self._own_name.writing
        self._watch.heard_at = now
        self._publisher.lines.show("<", channel, data)
        if writing is not None and not writing.lost and writing.others.is_echo(data):
            self._watch.echo_at = now
            if not self._delivers_own:
                return
        frame = parse_message(data, self._settings)
        if writing is not None:
            writing.others.heard(frame)
        self._reading.receive(frame, now)
        self._heard(frame)
        core = self._reading.core
        if core.asks:
            core.asks = False
            self._publisher.ask_for_positions()
        if core.errors:
            for error in core.errors:
                self._log_error(error, now)
            core.errors.clear()
        if core.commands:
            commands, core.commands = core.commands, []
            for command in commands:
                self._command(command, now)

    def _command(self, command: Command, now: float) -> None:
        if isinstance(command, Replicate):
            if self._own_name.writing is not None:
                self._answer(self._own_name.writing, now)
        elif isinstance(command, Name):
            if self._own_name.heard_name(command, now):
                self._watch.echo_at = now
        elif isinstance(command, Server):
            self._own_name.heard_server(command, now)
        for handler in self._handlers.get(type(command), ()):
            if len(self._tasks) < COMMAND_CALLS:
                spawn(self._tasks, call(handler, command), "busrep-command")
                continue
            self.commands_dropped += 1
            self._log_error(ParseError(command.format(), type(command).__name__, "handlers are too slow: dropped"), now)

    def _answer(self, writing: Writing, now: float) -> None:
        writing.core.replicate_received(now)
        self._publisher.wake()
        if self._answering is None and (due := writing.core.announcements.next_answer) < math.inf:

            def answer() -> None:
                self._answering = None
                writing.core.tick(max(due, asyncio.get_running_loop().time()))
                self._publisher.wake()

            self._answering = asyncio.get_running_loop().call_at(due, answer)

    def _log_error(self, error: ParseError, now: float) -> None:
        reason = f"{error.field} {_NUMBER.sub('', error.reason)}"  # else a line with another number is another reason
        if self._limiter.allows(reason, now):
            log.warning("%s", error)

    def close(self) -> None:
        """Answer nothing any more."""
        if self._answering is not None:
            self._answering.cancel()
