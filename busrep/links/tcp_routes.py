"""Which of Redis's channels the lines of a client of a TCP server belong to (protocol.md, section 7). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from busrep.core.application_commands import UserIp
from busrep.core.commands import Name, Ping, Position, Replicate, Server
from busrep.core.fields import NAME_BYTES
from busrep.core.framing import Frame, Rows

# The head of a row or a position, up to its stream.
HEAD_BYTES = len(b"POSITION ") + NAME_BYTES + 1

# The suffix of the channel of USER_IP, which few want to hear (protocol.md, section 2).
USER_IP = "USER_IP"


@attrs.frozen
class Routes:
    """The channels of a deployment: ``name``, and a sub-channel for each other suffix of ``suffixes``, {stream: suffix
    or ""}."""

    name: str
    suffixes: Mapping[str, str]

    def channel(self, suffix: str) -> str:
        """The channel of a suffix."""
        return f"{self.name}/{suffix}" if suffix else self.name

    def channels(self) -> list[str]:
        """All of them."""
        return [self.channel(suffix) for suffix in dict.fromkeys(("", USER_IP, *self.suffixes.values()))]

    def parts(self, message: bytes, frame: Frame) -> Iterator[tuple[str, bytes]]:
        """What is to be passed on of a client's message: (channel, message). ``frame``: the message, parsed."""
        for item in frame.items:
            if not isinstance(item, Server | Name | Replicate | Ping | Rows | Position):
                yield self.channel(USER_IP if isinstance(item, UserIp) else ""), item.format()
        yield from self._facts(message, frame)
        if any(isinstance(item, Replicate) for item in frame.items):
            yield self.name, b"REPLICATE"  # one question is answered as well as many

    def _facts(self, message: bytes, frame: Frame) -> Iterator[tuple[str, bytes]]:
        """Rows, positions and announcements, under the NAME they came with, for each channel."""
        streams = dict.fromkeys(item.stream for item in frame.items if isinstance(item, Rows | Position))
        if not streams and not any(isinstance(item, Server) for item in frame.items):
            return
        suffixes = dict.fromkeys(self.suffixes.get(stream, "") for stream in streams) or {"": None}
        if len(suffixes) == 1 and all(isinstance(item, Server | Name | Position | Rows) for item in frame.items):
            yield self.channel(next(iter(suffixes))), message
            return
        wanted = {
            (command, stream.encode()): self.suffixes.get(stream, "")
            for stream in streams
            for command in (b"POSITION", b"RDATA")
        }
        kept: dict[str, list[bytes]] = {suffix: [] for suffix in suffixes}
        for line in message.split(b"\n"):
            command, *stream = line[:HEAD_BYTES].split(b" ", 2)[:2]
            if command in (b"SERVER", b"NAME"):
                for lines in kept.values():
                    lines.append(line)
            elif stream and (suffix := wanted.get((command, stream[0]))) is not None:
                kept[suffix].append(line)
        for suffix, lines in kept.items():
            yield self.channel(suffix), b"\n".join(lines)
