"""What a writer publishes: its frames, each until it is confirmed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import attrs


@attrs.frozen
class OutgoingFrame:
    """One message to PUBLISH on the deployment's channel."""

    channel_suffix: str  # of the sub-channel, unless ""
    data: bytes
    number: int  # rises by one per frame
    ends: Mapping[str, int] = attrs.field(factory=dict)  # stream -> the end of its chain, once this frame is out
    rows: int = 0
    announcement: bool = False
    one_line: bool = False  # each line is a message; after a PUBLISH with unknown outcome all of them go out again

    @property
    def messages(self) -> Sequence[bytes]:
        """What to PUBLISH, in this order."""
        return self.data.split(b"\n") if self.one_line else (self.data,)


class OutgoingFrames:
    """The frames that Redis has not confirmed, in the order in which they were composed. ``most`` of them may be in
    flight: handed out, and neither confirmed nor failed."""

    def __init__(self, most: int, *, one_line: bool) -> None:
        self._most, self._one_line = most, one_line
        self.unconfirmed: deque[OutgoingFrame] = deque()
        self._in_flight = 0  # how many of them, from the left, were handed out since the last failure
        self._counts = dict.fromkeys(("frames", "announcements", "rows", "bytes", "publish_failures"), 0)

    def new(
        self, channel: str, lines: list[bytes], ends: Mapping[str, int], *, rows: int = 0, announcement: bool = False
    ) -> OutgoingFrame:
        """A new frame of these lines, numbered and counted."""
        data, counts = b"\n".join(lines), self._counts
        counts["frames"] += 1
        counts["announcements"] += announcement
        counts["rows"] += rows
        counts["bytes"] += len(data)
        return OutgoingFrame(channel, data, counts["frames"], ends, rows, announcement, self._one_line)

    def hand_out(self, compose: Callable[[], OutgoingFrame | None]) -> list[OutgoingFrame]:
        """What to PUBLISH now: those that failed, then new ones, as long as ``compose`` gives one."""
        frames: list[OutgoingFrame] = []
        while self._in_flight < self._most:
            if self._in_flight == len(self.unconfirmed):
                if (frame := compose()) is None:
                    break
                self.unconfirmed.append(frame)
            frames.append(self.unconfirmed[self._in_flight])
            self._in_flight += 1
        return frames

    def confirmed(self, frame: OutgoingFrame) -> bool:
        """Take in that Redis has ``frame``; whether it waited for that. Raises ValueError if an earlier one does."""
        if not self.unconfirmed or frame.number < self.unconfirmed[0].number:
            return False  # a late confirmation from a connection that was given up; it went out again and arrived
        if frame.number > self.unconfirmed[0].number:
            raise ValueError(f"frame {frame.number} confirmed before frame {self.unconfirmed[0].number}")
        self.unconfirmed.popleft()
        self._in_flight = max(0, self._in_flight - 1)
        return True

    def restart(self, *, failed: bool = False) -> None:
        """What was handed out goes out again: it ``failed``, or there is another connection."""
        self._counts["publish_failures"] += failed
        self._in_flight = 0

    def statistics(self) -> dict[str, int]:
        """Counters since the start, and what is on its way."""
        unconfirmed = sum(len(frame.data) for frame in self.unconfirmed)
        return {**self._counts, "unconfirmed_bytes": unconfirmed, "in_flight": self._in_flight}
