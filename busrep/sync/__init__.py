"""The runtime for threads: Django, Flask, Celery, scripts. ``busrep.sync.connect`` makes a ``Bus``.

Writing takes place in the calling thread; reading in a background thread with an event loop of its own, which runs
`busrep.asyncio`. docs/threads.md says how it goes with processes that fork.
"""

from .batch import Batch, SnapshotPart
from .bus import Bus, connect
from .writing import Fact

__all__ = ["Batch", "Bus", "Fact", "SnapshotPart", "connect"]
