"""The asyncio runtime: thin loops round the core. ``busrep.connect`` makes a ``Bus``."""

from typing import TYPE_CHECKING, Any

from ..links.redis import RedisLink
from ..links.tcp import TcpAddress
from ..links.tcp_server import TcpServer, server_tls
from ..runtime.batch import Batch
from ..snapshots.parts import SnapshotPart
from .bus import Bus
from .writing import Fact

if TYPE_CHECKING:
    from ..http.reference import ReferenceSource

__all__ = [
    "Batch",
    "Bus",
    "Fact",
    "RedisLink",
    "ReferenceSource",
    "SnapshotPart",
    "TcpAddress",
    "TcpServer",
    "server_tls",
]

if not TYPE_CHECKING:  # a type checker would take any misspelt name for one of these

    def __getattr__(name: str) -> Any:
        if name == "ReferenceSource":  # needs the extra "http"
            from ..http.reference import ReferenceSource

            return ReferenceSource
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
