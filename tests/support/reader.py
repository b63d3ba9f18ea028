"""A reader core that is given messages as bytes."""

from __future__ import annotations

from busrep.core import reader
from busrep.core.framing import parse_message


class Reader(reader.Reader):
    """A reader core, and the parsing that the runtime does before it."""

    def receive(self, data: bytes, now: float) -> None:
        """Take in one message."""
        self.receive_frame(parse_message(data, self.settings), now)
