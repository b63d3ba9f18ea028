"""What comes over the link: lines for the reader and for the own writer, and commands for their handlers."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from busrep.core.backoff import LogLimiter
from busrep.core.commands import Command, Name, Replicate, Server
from busrep.core.framing import parse_message
from busrep.errors import ParseError

from ..runtime.tasks import call, spawn
from .writing import Writing

if TYPE_CHECKING:
    from .bus_life import BusLife

log = logging.getLogger("busrep")

# Calls of command handlers under way. Handlers may be slower than commands come: beyond this they are dropped, counted.
COMMAND_CALLS = 10_000

_NUMBER = re.compile(r"\b\d+\b")


class Receiver:
    """Takes in the messages of one bus."""

    def __init__(self, bus: BusLife) -> None:
        self._bus, self._reading, self._publisher = bus, bus.reading, bus.publisher
        self._handlers: dict[type[Any], list[Callable[[Any], Awaitable[None] | None]]] = {}
        self._limiter = LogLimiter()  # per reason; all are counted (protocol.md, section 1)
        self._answering: asyncio.TimerHandle | None = None
        self.commands_dropped = 0

    def on(self, kind: type[Any], handler: Callable[[Any], Awaitable[None] | None]) -> None:
        """Call ``handler`` with each command of a class from now on."""
        self._handlers.setdefault(kind, []).append(handler)

    def receive(self, channel: str, data: bytes) -> None:
        """One message."""
        bus, now, writing = self._bus, asyncio.get_running_loop().time(), self._bus.writing
        bus.watch.heard_at = now
        self._publisher.lines.show("<", channel, data)
        if writing is not None and not writing.lost and writing.others.is_echo(data):
            bus.watch.echo_at = now
            if not bus.options.own:
                return
        frame = parse_message(data, bus.settings)
        if writing is not None:
            writing.others.heard(frame)
        self._reading.receive(frame, now)
        bus.caching.heard(frame)
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
            if self._bus.writing is not None:
                self._answer(self._bus.writing, now)
        elif isinstance(command, Name):
            if self._bus.own_name.heard_name(command, now):
                self._bus.watch.echo_at = now
        elif isinstance(command, Server):
            self._bus.own_name.heard_server(command, now)
        for handler in self._handlers.get(type(command), ()):
            if len(self._bus.tasks) < COMMAND_CALLS:
                spawn(self._bus.tasks, call(handler, command), "busrep-command")
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
