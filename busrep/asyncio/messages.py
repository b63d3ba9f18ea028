"""The messages of an asyncio process: what it takes in from its channels, and what it publishes there.

It publishes REPLICATE, commands of the application, and the frames of its writer. It takes in lines for the reader and
for the own writer, and commands for their handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from busrep.core.application_commands import UserIp
from busrep.core.backoff import LogLimiter, pause_after
from busrep.core.commands import Command, Name, Replicate, Server
from busrep.core.framing import COMMAND_BYTES, parse_message
from busrep.errors import ConfigError, ParseError, Unavailable
from busrep.options import BusOptions

from ..runtime.tasks import call
from .writing import Writing

if TYPE_CHECKING:
    from .bus_life import BusLife

log = logging.getLogger("busrep")

LineSeen = Callable[[str, str, bytes], None]

# Other commands (presence, locks...) waiting for Redis, and their bytes. They are news, not facts: beyond this, send()
# says no.
COMMAND_QUEUE, COMMAND_QUEUE_BYTES = 10_000, 16 * 2**20

# Commands that share a pipeline with frames, for each frame that may be in flight.
COMMANDS_IN_FLIGHT = 16

# Calls of command handlers under way. Handlers may be slower than commands come: beyond this they are dropped, counted.
COMMAND_CALLS = 10_000

_NUMBER = re.compile(r"\b\d+\b")


def channel_of(deployment: str, suffix: str) -> str:
    """The channel of a deployment with this suffix."""
    return f"{deployment}/{suffix}" if suffix else deployment


def channels_of(options: BusOptions) -> list[str]:
    """The channels that a process listens to."""
    channels = [channel_of(options.name, stream.channel) for stream in options.streams]
    if options.writer is not None or options.undeclared or not channels:
        channels.insert(0, options.name)
    return channels


class ChannelPublisher:
    """Publishes in one task, in order."""

    def __init__(self, bus: BusLife) -> None:
        self.commands: deque[tuple[str, bytes]] = deque()
        """(channel, line), oldest first, waiting to be published."""
        self._commands_bytes = 0
        self._bus, self._name, self._settings = bus, bus.name, bus.settings
        heard = channels_of(bus.options)
        # Writers hear the first; this process hears itself on the last.
        asking = (self._name, self._name if self._name in heard else heard[0])
        self._asking_channels = tuple(dict.fromkeys(asking))
        self.lines: list[LineSeen] = []
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._ask = False

    def wake(self) -> None:
        """There may be something to publish."""
        self._wake.set()

    def ask_for_positions(self) -> None:
        """Publish REPLICATE."""
        self._ask = True
        self._wake.set()

    def show(self, direction: str, channel: str, data: bytes) -> None:
        """Call the handlers of lines, ``lines``, with each of a message that was received ("<") or sent (">")."""
        for line in data.split(b"\n") if self.lines else ():
            for handler in self.lines:
                try:
                    handler(direction, channel, line)
                except Exception:  # who looks on must not stop the traffic
                    log.exception("the handler of a line failed")

    def send(self, command: Command) -> None:
        """Publish a command. Raises Unavailable when too many wait, and what `format_command` raises."""
        line = format_command(command)
        if len(self.commands) >= COMMAND_QUEUE or self._commands_bytes + len(line) > COMMAND_QUEUE_BYTES:
            raise Unavailable("Redis", f"{len(self.commands)} commands are waiting for it")
        self.commands.append((channel_of(self._name, "USER_IP" if isinstance(command, UserIp) else ""), line))
        self._commands_bytes += len(line)
        self._wake.set()

    async def flush(self, timeout: float) -> None:
        """Wait until nothing waits any more, the link is gone, or ``timeout`` seconds have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._bus.link.connected and self._unsent():
                    self._flushed.clear()
                    self._wake.set()
                    await self._flushed.wait()

    def _unsent(self) -> bool:
        writing = self._bus.writing
        return bool(self.commands) or (writing is not None and writing.fenced is None and writing.core.unsent)

    async def run(self) -> None:
        """Publish whatever there is, each time somebody wakes this."""
        failures = 0
        self._wake.set()  # a task before this one may have ended with something in hand
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._publish_all()
                failures = 0
            except Exception as error:
                if not isinstance(error, Unavailable):  # a bug; what is not published is lost to whoever waits for it
                    log.exception("publishing failed")
                failures += 1
                if (writing := self._bus.writing) is not None:
                    writing.publishing = False
                    writing.drained()
                log.debug("publishing: %s", error)
                await asyncio.sleep(pause_after(failures, self._settings))
                self._wake.set()
            self._flushed.set()

    async def _publish_all(self) -> None:
        link, writing = self._bus.link, self._bus.writing
        while True:
            if await link.open_publisher() and writing is not None:
                # Others cannot see that we came back: say where we are.
                writing.core.connected(asyncio.get_running_loop().time())
            frames = writing.core.frames_to_publish() if writing is not None else []
            asked, self._ask = self._ask, False
            commands = list(self.commands)[: self._settings.publish_in_flight * COMMANDS_IN_FLIGHT]
            messages = [(channel, Replicate().format()) for channel in self._asking_channels] if asked else []
            messages += commands
            for frame in frames:
                messages += [(channel_of(self._name, frame.channel_suffix), data) for data in frame.messages]
            if not messages:
                return
            try:
                await link.publish(messages)
            except BaseException:
                # Unknown which arrived: the same frames go out again, byte for byte (9.6).
                self._ask = self._ask or asked
                if writing is not None:
                    writing.core.publish_failed()
                raise
            if asked:
                self._bus.watch.asked_at = asyncio.get_running_loop().time()
            for _ in commands:
                self._commands_bytes -= len(self.commands.popleft()[1])
            if writing is not None:
                writing.published(frames)
                writing.publishing = True
                writing.drained()
            for channel, data in messages:
                self.show(">", channel, data)


def format_command(command: Any) -> bytes:
    """The line of what ``send()`` was given. Raises ConfigError for what is no command, or longer than readers take."""
    if not isinstance(command, Command):
        raise ConfigError(f"send() takes a command of busrep.commands, not {command!r}")
    line = command.format()
    if len(line) > COMMAND_BYTES:
        raise ConfigError(f"a {type(command).__name__} of {len(line)} bytes: {COMMAND_BYTES} are taken by readers")
    return line


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
        self._publisher.show("<", channel, data)
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
                self._bus.tasks.spawn(partial(call, handler, command), "command")
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
