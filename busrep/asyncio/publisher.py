"""What an asyncio process publishes: REPLICATE, commands of the application, and the frames of its writer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from busrep.core.application_commands import UserIp
from busrep.core.backoff import pause_after
from busrep.core.commands import Command, Replicate
from busrep.core.framing import COMMAND_BYTES
from busrep.errors import ConfigError, Unavailable
from busrep.options import BusOptions

if TYPE_CHECKING:
    from .bus_life import BusLife

log = logging.getLogger("busrep")

LineSeen = Callable[[str, str, bytes], None]

# Other commands (presence, locks...) waiting for Redis, and their bytes. They are news, not facts: beyond this, send()
# says no.
COMMAND_QUEUE, COMMAND_QUEUE_BYTES = 10_000, 16 * 2**20

# Commands that share a pipeline with frames, for each frame that may be in flight.
COMMANDS_IN_FLIGHT = 16


class LineHandlers(list[LineSeen]):
    """Functions called with (direction, channel, line) for every line received ("<") and sent (">")."""

    def show(self, direction: str, channel: str, data: bytes) -> None:
        """Call them with each line of a message."""
        for line in data.split(b"\n") if self else ():
            for handler in self:
                try:
                    handler(direction, channel, line)
                except Exception:  # who looks on must not stop the traffic
                    log.exception("the handler of a line failed")


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
        self.lines = LineHandlers()
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
                for frame in frames:
                    writing.core.published(frame)
                writing.publishing = True
                writing.drained()
            for channel, data in messages if self.lines else ():
                self.lines.show(">", channel, data)


def format_command(command: Any) -> bytes:
    """The line of what ``send()`` was given. Raises ConfigError for what is no command, or longer than readers take."""
    if not isinstance(command, Command):
        raise ConfigError(f"send() takes a command of busrep.commands, not {command!r}")
    line = command.format()
    if len(line) > COMMAND_BYTES:
        raise ConfigError(f"a {type(command).__name__} of {len(line)} bytes: {COMMAND_BYTES} are taken by readers")
    return line
