"""Direct TCP without the sockets: the same lines, newline-delimited (protocol.md, section 7).

A connection carries no messages, only lines, while readers go by messages: each opens with who speaks. `FrameSplitter`
cuts a stream of bytes into messages again. `PlainView` is what somebody with netcat, or a client of the reference
system, is shown. `Liveness` says when to send a PING and when to give up the other side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs

from busrep.core.fields import NAME_BYTES
from busrep.errors import QUOTED_BYTES, ParseError
from busrep.settings import Settings

_OPENER = re.compile(rb"^(?:SERVER [^\n]*(?:\nNAME )?|NAME |\n)", re.MULTILINE)
# What the rest of a message has to open with, should it come by itself.
_OPENING = re.compile(rb"(?:SERVER [^\n]*\n)?(NAME [^ \n]+ [0-9]+)(?:\n|\Z)|(SERVER [^\n]*)\Z")
_PING = re.compile(rb"^PING ", re.MULTILINE)
_SPEAKER = re.compile(rb"NAME [^ \n]+ [0-9]+(?:\n|\Z)")
_EPOCH = re.compile(rb"SERVER .+ [0-9a-f]{32}\Z")

# What a `PlainView` remembers, bytes: names, and what Python needs for each pair of them. With a thousand clients that
# is 256 MiB. Beyond, it repeats itself, which is harmless.
SAID_BYTES, PAIR_BYTES = 2**18, 300
# The longest number on the wire.
NUMBER_BYTES = 20

# What a client says that leaves, where a connection cannot be closed one way (TLS): the server has then taken all that
# came before it, and closes.
CLOSING = b"ERROR closing\n"


def join_messages(messages: Iterable[bytes]) -> bytes:
    """The bytes that a `FrameSplitter` cuts into the same messages again.

    One that does not open with who speaks is set off by a blank line, which is no command: behind another it would pass
    for a part of it, and share its fate when one of the two is malformed.
    """
    parts: list[bytes] = []
    for message in messages:
        parts += (message, b"\n") if message.startswith((b"SERVER ", b"NAME ")) else (b"\n", message, b"\n")
    return b"".join(parts)


@attrs.define(eq=False)
class FrameSplitter:
    """Cuts what comes over a connection into messages; ``line_bytes``: the longest line that is taken.

    A line SERVER or NAME opens a message, NAME right after SERVER belongs to it; a blank line ends one. What the end of
    a read cuts in two becomes two messages, and the second opens with the same NAME: nothing can be lost between them.
    """

    _line_bytes: int
    _rest: bytearray = attrs.field(factory=bytearray, init=False)
    _opening: bytes = b""  # what a continued message opens with

    @property
    def unfinished(self) -> bool:
        """Whether a line has begun that has not ended yet."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages, or parts of one, that ``data`` completes, without their last newline.

        Raises ParseError for a line that is too long: nothing more can be understood, close the connection.
        """
        end = data.rfind(b"\n")
        self._rest += data if end < 0 else data[:end]
        if len(self._rest) > self._line_bytes:
            self._check_lines()
        if end < 0:
            return []
        lines = bytes(self._rest)
        self._rest = bytearray(data[end + 1 :])
        if len(self._rest) > self._line_bytes:
            self._check_lines()
        return self._cut(lines)

    def _check_lines(self) -> None:
        for line in bytes(self._rest).split(b"\n"):
            if len(line) > self._line_bytes:
                raise ParseError(line[:QUOTED_BYTES], "line", f"over {self._line_bytes} bytes")

    def _cut(self, lines: bytes) -> list[bytes]:
        starts = [found.start() for found in _OPENER.finditer(lines)]
        pieces = [lines[start:end] for start, end in zip([0, *starts], [*starts, len(lines) + 1], strict=True)]
        first = pieces.pop(0).rstrip(b"\n")
        if first:
            pieces.insert(0, self._opening + first)
        elif pieces and self._opening.startswith(b"SERVER ") and pieces[0].startswith(b"NAME "):
            pieces[0] = self._opening + pieces[0]
        pieces = [piece.strip(b"\n") for piece in pieces]
        if not lines or lines.endswith(b"\n"):  # the last line is a blank one
            self._opening = b""
        elif pieces:
            opening = _OPENING.match(pieces[-1])
            self._opening = b"%b\n" % (opening[1] or opening[2]) if opening else b""
        return [piece for piece in pieces if piece]


@attrs.define(eq=False)
class PlainView:
    """What one client that does not name an incarnation is shown of the messages.

    Lines that say who speaks are for native readers, who keep lives of a writer apart, and REPLICATE is for writers. A
    POSITION that repeats what was said last over this connection says nothing where no line can be lost; any other is
    passed on, so that a loss before this server is seen.
    """

    said: dict[tuple[bytes, bytes], bytes] = attrs.field(factory=dict)
    _bytes: int = 0

    def forget(self) -> None:
        """The client asked for all positions (REPLICATE)."""
        self.said.clear()
        self._bytes = 0

    def _remember(self, key: tuple[bytes, bytes], said: bytes) -> None:
        """Of names and numbers that are too long nothing: such a line is malformed."""
        if max(map(len, key)) > NAME_BYTES or len(said) > NUMBER_BYTES:
            return
        if key not in self.said:
            size = PAIR_BYTES + len(key[0]) + len(key[1])
            if self._bytes + size > SAID_BYTES:
                self.forget()
            self._bytes += size
        self.said[key] = said

    def show(self, message: bytes) -> bytes:
        """The lines to send, each with its newline; b"" when there is nothing to show."""
        shown = []
        lines = message.split(b"\n")
        if lines[0].startswith(b"SERVER ") and len(lines) > 1 and _SPEAKER.match(lines[1]):
            timed = len(lines) > 2 and lines[2].startswith(b"PING ")  # as of when: for native readers as well
            del lines[: 3 if timed else 2]
        for line in lines:
            fields = line.split(b" ", 4)
            if fields[0] == b"RDATA" and len(fields) == 5:
                if fields[3] != b"batch":
                    self._remember((fields[1], fields[2]), fields[3])
            elif fields[0] == b"POSITION" and len(fields) == 5:
                key, new = (fields[1], fields[2]), fields[4]
                if fields[3] == new == self.said.get(key):
                    continue
                self._remember(key, new)
            elif _SPEAKER.match(line) or _EPOCH.match(line) or line.rstrip() in (b"", b"REPLICATE"):
                continue
            shown.append(line)
        return b"\n".join([*shown, b""]) if shown else b""


@attrs.define
class Liveness:
    """When to send a PING, and whether the other side is gone. Times are seconds of any one clock.

    The other side is given up only once it has sent a PING: who types lines by hand sends none.
    """

    settings: Settings
    sent_at: float
    heard_at: float
    pings: bool = False
    unfinished_at: float | None = None

    def heard(self, now: float, messages: list[bytes], *, unfinished: bool = False) -> None:
        """Whole lines came; ``unfinished``: and half a line, which is no sign of life: one that never ends could come
        byte by byte for ever."""
        if messages:
            self.heard_at = now
            self.pings = self.pings or any(map(_PING.search, messages))
        if not unfinished:
            self.unfinished_at = None
        elif messages or self.unfinished_at is None:
            self.unfinished_at = now

    def gone(self, now: float) -> bool:
        """Whether nothing was heard for too long."""
        return self.pings and now - self.heard_at > self.settings.tcp_timeout

    def halting(self, now: float) -> bool:
        """Whether the end of a line has not come for too long. Who types lines sends them whole."""
        return self.unfinished_at is not None and now - self.unfinished_at > self.settings.tcp_timeout

    def ping(self, now: float, unix_ms: int) -> bytes:
        """The line to send now, or b""."""
        if now - self.sent_at < self.settings.tcp_ping:
            return b""
        self.sent_at = now
        return b"PING %d\n" % unix_ms
