"""What a writer takes from the other writers of its streams, which share its sequences."""

from __future__ import annotations

from collections.abc import Mapping

from busrep.core.admission import SenderTracker
from busrep.core.commands import Name, Position, Server
from busrep.core.framing import Frame, Rows
from busrep.core.ids import IdGenerator
from busrep.stores.interface import Claim, Registered

from .config import WriterConfig


class OtherWriters:
    """Moves the ID generators of one incarnation of a writer, as other writers move the sequences."""

    def __init__(
        self, config: WriterConfig, incarnation: int, claim: Claim | None, generators: Mapping[str, IdGenerator]
    ) -> None:
        self._name, self._generators = config.name, generators
        self._durable = {stream.name: stream for stream in config.streams if not stream.resettable}
        self._epoch = None if claim is None else claim.epoch
        self._claims: Mapping[tuple[str, str], int] = {} if claim is None else claim.claims
        self._one_line_messages = config.settings.one_line_messages
        self._name_on_wire = config.name.encode()
        self._own_opening = b"NAME %b %d\n" % (self._name_on_wire, incarnation)
        self._senders = SenderTracker(config.settings.followed)
        # Lines heard that the registry as it was read does not explain, or that say nothing of their senders; and how
        # many of them had been heard before it was asked for last.
        self.unexplained = self._explained = 0

    @property
    def registry_doubted(self) -> bool:
        """Whether the registry is to be read again."""
        return self.unexplained > self._explained

    def beat_stored(self, noted: Mapping[str, int], registry: Registered, unexplained: int) -> None:
        """The claim stands: follow the others as far as was noted before. ``noted``: by stream; ``unexplained``: as it
        was when the beat began, for the answer may be older than lines that were heard since."""
        if registry.read:
            self._claims, self._explained = registry.claims, unexplained
            for name in self._durable:
                self._generators[name].announced(max(registry[name].values(), default=0))
        for name, highest in noted.items():
            if self._durable[name].follows:  # never above the sequence: what was announced may be forged (9.17)
                self._generators[name].follow(min(highest, registry.sequences[name]))

    def is_echo(self, data: bytes) -> bool:
        """Whether a message is a frame of rows that this process sent: all its lines are its own, none matters here.

        Announcements are not meant: they are looked at, for they may be another process's under the same name. Lines
        that are messages by themselves say no more of their sender than the writer's name: all of them are meant.
        """
        if self._one_line_messages:
            command, _, rest = data.partition(b" ")
            return command in (b"RDATA", b"POSITION") and rest.split(b" ", 2)[1:2] == [self._name_on_wire]
        return data.startswith(self._own_opening)

    def has_log(self, incarnation: int) -> bool:
        """Whether a process with the own name has announced an epoch under this incarnation."""
        return self._senders.has_log(self._name, incarnation)

    def heard(self, frame: Frame) -> None:
        """Other writers' rows and positions move what is known of the shared sequences: those of registered writers, in
        the incarnation that has the claim (9.18, 9.19)."""
        senders = self._senders
        senders.begin()
        for item in frame.items:
            if isinstance(item, Server | Name):
                senders.observe(item)
            elif isinstance(item, Rows | Position) and item.writer != self._name and item.stream in self._durable:
                claim, incarnation = self._claims.get((item.stream, item.writer)), senders.incarnation_of(item.writer)
                trusted = senders.is_trusted(item.writer, self._epoch)
                if incarnation is None or incarnation != claim or not trusted:
                    # It has joined, or begun anew; or its messages are single lines, and it is followed by the table.
                    joined = trusted and incarnation is not None and incarnation > (claim or -1)
                    if joined or (incarnation is None and claim is not None):
                        self.unexplained += 1
                    continue
                if isinstance(item, Rows):
                    self._generators[item.stream].rows_seen(item.tokens)
                else:
                    self._generators[item.stream].announced(item.new)
