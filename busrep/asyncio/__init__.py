"""The asyncio runtime: thin loops round the core. ``busrep.connect`` makes a ``Bus``."""

from .bus import Bus
from .link import RedisLink
from .reading import Batch, Start
from .writing import Fact

__all__ = ["Batch", "Bus", "Fact", "RedisLink", "Start"]
