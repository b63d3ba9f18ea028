"""The runtime for threads: Django, Flask, Celery, scripts. ``busrep.sync.connect`` makes a ``Bus``.

Writing takes place in the calling thread; reading in a background thread with an event loop of its own, which runs
`busrep.asyncio`. docs/threads.md says how it goes with processes that fork. For applications the classes have the names
of their counterparts in `busrep.asyncio`; in the modules they have names of their own.
"""

from .batch import BlockingBatch as Batch
from .batch import BlockingSnapshotPart as SnapshotPart
from .bus import BlockingBus as Bus
from .bus import connect
from .writing import BlockingFact as Fact

__all__ = ["Batch", "Bus", "Fact", "SnapshotPart", "connect"]
