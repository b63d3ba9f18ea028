"""The asyncio runtime: thin loops round the core. ``busrep.connect`` makes a ``Bus``."""

from .bus import Bus
from .link import RedisLink
from .parts import SnapshotPart
from .reading import Batch, Start
from .tcp import TcpAddress
from .tcp_server import TcpServer, server_tls
from .writing import Fact

__all__ = ["Batch", "Bus", "Fact", "RedisLink", "SnapshotPart", "Start", "TcpAddress", "TcpServer", "server_tls"]
