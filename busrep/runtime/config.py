"""What a writer is told once."""

from __future__ import annotations

import attrs

from busrep.settings import Settings
from busrep.stores.interface import FactLog
from busrep.streams import Registry


@attrs.frozen
class WriterConfig:
    """What stays the same in every incarnation of a writer.

    ``server``: the name of the deployment, see `busrep.options.BusOptions`. ``store``: where the facts go; None for a
    writer whose streams are all kept in memory. ``hears``: whether the writer is told what others publish. One that is
    not has each beat announce and store all its streams, and read the registry.
    """

    name: str
    server: str
    streams: Registry
    settings: Settings
    store: FactLog | None
    hears: bool = True

    @property
    def durable(self) -> list[str]:
        """The names of the streams that have a table."""
        return [stream.name for stream in self.streams if not stream.resettable]
