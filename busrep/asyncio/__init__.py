"""The asyncio runtime: thin loops round the core. ``busrep.connect`` makes a ``Bus``."""

from typing import TYPE_CHECKING, Any

from .bus import Bus
from .link import RedisLink
from .parts import SnapshotPart
from .reading import Batch, Start
from .tcp import TcpAddress
from .tcp_server import TcpServer, server_tls
from .writing import Fact

if TYPE_CHECKING:
    from .reference_source import ReferenceSource

__all__ = [
    "Batch",
    "Bus",
    "Fact",
    "RedisLink",
    "ReferenceSource",
    "SnapshotPart",
    "Start",
    "TcpAddress",
    "TcpServer",
    "server_tls",
]


def __getattr__(name: str) -> Any:
    if name == "ReferenceSource":  # needs the extra "http"
        from .reference_source import ReferenceSource

        return ReferenceSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
