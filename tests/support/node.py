"""A Redis node that follows a script: which commands must come, and what it answers to each.

::

    script = [
        expect("SUBSCRIBE", "shop").then(Error("LOADING Redis is loading the dataset in memory")),
        expect("SUBSCRIBE", "shop"),                       # answered as Redis does
        expect("PUBLISH", "shop", ANY).then(Raw(b":1"), CLOSE),
    ]
    async with FakeNode(*script) as node:
        ...  # a client of node.url
        await node.finished()

For what a real server will not do when asked: refuse, stammer, break off in the middle of a reply. Speaks RESP2. A
command that is not the next one of the script gets an error, and on leaving the block AssertionError shows the script
beside what came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import attrs

Argument = str | bytes | Callable[[bytes], bool]
"""Of a command that is expected: itself, or what tells whether it will do."""

# Characters of an argument that a report shows.
SHOWN = 60


def ANY(_: bytes) -> bool:
    """Stands for one argument, whatever it is."""
    return True


@attrs.frozen
class Error:
    """An error reply: ``Error("NOAUTH Authentication required.")``."""

    text: str


@attrs.frozen
class Raw:
    """Bytes that are sent as they are, RESP or not."""

    data: bytes


@attrs.frozen(repr=False)
class _Mark:
    name: str

    def __repr__(self) -> str:
        return self.name


CLOSE: Final = _Mark("CLOSE")
"""In a reply: close the connection."""

USUAL: Final = _Mark("USUAL")
"""In a reply: what Redis would answer."""


@attrs.frozen
class Expected:
    """A command of a script; made by `expect`."""

    arguments: tuple[Argument, ...]
    more: bool = False
    """Whether further arguments may follow."""
    replies: tuple[Any, ...] = (USUAL,)

    def then(self, *replies: Any) -> Expected:
        """Answer with these, in order; with none of them: not at all.

        A str is a status (``+OK``), bytes a bulk string, an int, list and None themselves; an `Error`; `Raw` bytes;
        an ``asyncio.Event``: go on when it is set; `USUAL`: what Redis would answer; `CLOSE`.
        """
        return attrs.evolve(self, replies=replies)

    def matches(self, command: Sequence[bytes]) -> bool:
        """Whether this is the command."""
        if len(command) < len(self.arguments) or (len(command) > len(self.arguments) and not self.more):
            return False
        for at, (wanted, found) in enumerate(zip(self.arguments, command, strict=False)):
            if callable(wanted):
                if not wanted(found):
                    return False
            elif (wanted.encode() if isinstance(wanted, str) else wanted) != (found.upper() if at == 0 else found):
                return False
        return True

    def __str__(self) -> str:
        shown = [getattr(one, "__name__", "?") if callable(one) else _show(one) for one in self.arguments]
        return " ".join([*shown, *(["..."] if self.more else [])])


def expect(name: str, *arguments: Argument, more: bool = False) -> Expected:
    """A command that comes next. ``more``: further arguments may follow.

    Without ``then(...)`` it is answered as Redis answers it: subscriptions are confirmed and PUBLISH reaches them.
    """
    return Expected((name.upper(), *arguments), more)


# Sent by redis-py on each connect, as settings and version have it, and on the beats of whoever subscribes.
HANDSHAKE = tuple(expect(name, more=True) for name in ("CLIENT", "HELLO", "AUTH", "SELECT", "PING"))


def resp(value: Any) -> bytes:
    """A reply as RESP2: see `Expected.then` for the values. Raises TypeError for what has no form in it."""
    match value:
        case Error(text):
            return b"-%b\r\n" % text.encode()
        case Raw(data):
            return data
        case None:
            return b"$-1\r\n"
        case str():
            return b"+%b\r\n" % value.encode()
        case int():
            return b":%d\r\n" % value
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(value), value)
        case list():
            return b"*%d\r\n%b" % (len(value), b"".join(map(resp, value)))
    raise TypeError(f"{value!r} has no form in RESP2")


def message(channel: str, data: bytes) -> list[bytes]:
    """What a subscriber gets for a message on the channel."""
    return [b"message", channel.encode(), data]


@attrs.define(eq=False)
class _Client:
    number: int
    writer: asyncio.StreamWriter
    channels: dict[bytes, None] = attrs.field(factory=dict)


class FakeNode:
    """``async with FakeNode(expect(...), ...) as node``: a server on loopback at ``node.url``.

    The script is one sequence over all connections. ``always``: what may come at any time, any number of times;
    consulted where the script expects something else, as are the commands of a handshake (AUTH, CLIENT, HELLO,
    SELECT) and PING. On leaving raises AssertionError when anything came that was not expected, or something expected
    did not; a note on the exception instead when the block raised one.
    """

    def __init__(self, *script: Expected, always: Sequence[Expected] = ()) -> None:
        self.script = script
        self.always = (*always, *HANDSHAKE)
        self.url = ""
        self.connections = 0
        """Connections accepted so far."""
        self.received: list[list[bytes]] = []
        """All commands that came, the handshakes' too."""
        self._next = 0
        self._report: list[str] = []
        self._failed = False
        self._finished = asyncio.Event()
        self._clients: dict[_Client, None] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}

    async def __aenter__(self) -> Self:
        if not self.script:
            self._finished.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.close_connections()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        if self._failed or self._next < len(self.script):
            if error is None:
                raise AssertionError(self.report())
            error.add_note(self.report())

    async def finished(self) -> None:
        """Wait until the last command of the script has come and was answered."""
        await self._finished.wait()

    def publish(self, channel: str, data: bytes) -> int:
        """Send a message to all that are subscribed; gives their number."""
        subscribed = [one for one in self._clients if channel.encode() in one.channels]
        for client in subscribed:
            client.writer.write(resp(message(channel, data)))
        return len(subscribed)

    def close_connections(self) -> None:
        """Close all connections; new ones are accepted."""
        for client in self._clients:
            client.writer.transport.abort()

    def report(self) -> str:
        """The script beside what came: a line for each command, ``!`` before those that are wrong."""
        missing = [f"!     never came: {one}" for one in self.script[self._next :]]
        return "\n".join(["the conversation was not as written:", *self._report, *missing])

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        client = _Client(self.connections, writer)
        self._clients[client] = None
        task = asyncio.create_task(self._serve(reader, client), name=f"fake-node-{client.number}")
        self._tasks[task] = None

    async def _serve(self, reader: asyncio.StreamReader, client: _Client) -> None:
        try:
            while command := await _read_command(reader):
                self.received.append(command)
                expected = self._take(client, command)
                going_on = await self._answer(client, command, expected)
                if self._next == len(self.script):
                    self._finished.set()
                if not going_on:
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client broke off
        except ValueError as error:
            self._failed = True
            self._report.append(f"! ({client.number}) no RESP: {error}")
        finally:
            del self._clients[client]
            client.writer.close()

    async def _answer(self, client: _Client, command: list[bytes], expected: Expected) -> bool:
        """Send the replies; False: and close."""
        for reply in expected.replies:
            if reply is CLOSE:
                return False
            if isinstance(reply, asyncio.Event):
                await reply.wait()
                continue
            for one in self._usual(client, command) if reply is USUAL else [reply]:
                client.writer.write(resp(one))
            await client.writer.drain()
        return True

    def _take(self, client: _Client, command: list[bytes]) -> Expected:
        shown = f"({client.number}) {' '.join(map(_show, command))}"
        if self._next < len(self.script) and self.script[self._next].matches(command):
            expected = self.script[self._next]
            self._next += 1
            self._report.append(f"  {shown}")
        else:
            found = next((one for one in self.always if one.matches(command)), None)
            if found is None:
                self._failed = True
                wanted = self.script[self._next] if self._next < len(self.script) else "nothing more"
                self._report += [f"! {shown}", f"!     instead of: {wanted}"]
                return Expected((), replies=(Error("ERR this command is not in the script"),))
            expected = found
        return expected

    def _usual(self, client: _Client, command: list[bytes]) -> Sequence[Any]:
        """What Redis answers."""
        name, arguments = command[0].upper(), command[1:]
        if name == b"SUBSCRIBE":
            return [self._confirm(client, channel) for channel in arguments]
        if name == b"UNSUBSCRIBE":
            return [self._confirm(client, channel, leave=True) for channel in arguments or list(client.channels)]
        if name == b"PUBLISH":
            return [self.publish(arguments[0].decode(), arguments[1])]
        if name == b"PING":
            return [[b"pong", b""] if client.channels else "PONG"]
        if name == b"HELLO":
            return [Error("NOPROTO unsupported protocol version")]
        return ["OK"]

    def _confirm(self, client: _Client, channel: bytes, *, leave: bool = False) -> list[Any]:
        if leave:
            client.channels.pop(channel, None)
        else:
            client.channels[channel] = None
        return [b"unsubscribe" if leave else b"subscribe", channel, len(client.channels)]


async def _read_command(reader: asyncio.StreamReader) -> list[bytes]:
    """The next command, empty at the end. Raises ValueError for what is no array of bulk strings."""
    line = await reader.readline()
    if not line:
        return []
    command = []
    for _ in range(_count(line, b"*")):
        size = _count(await reader.readline(), b"$")
        command.append((await reader.readexactly(size + 2))[:-2])
    return command


def _count(line: bytes, mark: bytes) -> int:
    if line[:1] != mark or not line.endswith(b"\r\n"):
        raise ValueError(f"{line[:SHOWN]!r} where {mark.decode()} and a number are due")
    return int(line[1:])


def _show(argument: str | bytes) -> str:
    text = argument if isinstance(argument, str) else argument.decode("utf-8", "backslashreplace")
    quoted = text if text.isprintable() and text and " " not in text else repr(text)
    return quoted if len(quoted) <= SHOWN else f"{quoted[:SHOWN]}... ({len(text)} characters)"
