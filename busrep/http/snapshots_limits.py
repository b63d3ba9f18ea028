"""The bounds of snapshots over HTTP, each with its default and its reason."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt


@attrs.frozen(kw_only=True)
class SnapshotLimits:
    """Bounds of one application's snapshots, whatever its clients ask for. Bytes are bytes, times are seconds."""

    snapshots: int = attrs.field(default=4, validator=ge(1))
    """Snapshots that are held at the source at a time; further readers are told to come back (`SnapshotBusy`). As
    `Settings.snapshots`. Readers of one agreement count once."""

    loads: int = attrs.field(default=2, validator=ge(1))
    """Parts that are loaded from the source at a time, each on a connection of its own: as many as one reader with the
    database (`Settings.snapshot_connections`), so that a herd of readers is no heavier."""

    load_timeout: float = attrs.field(default=600.0, validator=gt(0))
    """For the source to agree, and for it to give one part. Clients wait for it in several requests."""

    shared_for: float = attrs.field(default=60.0, validator=gt(0))
    """Age up to which an agreement is given to readers that come new. What came after it they have to catch up with:
    at 2,000 facts/s that is as much as six parts."""

    held_for: float = attrs.field(default=10.0, validator=gt(0))
    """After so long without a load a snapshot is let go of at the source."""

    held_at_most: float = attrs.field(default=300.0, validator=gt(0))
    """And after so long in any case: an old database snapshot keeps dead rows from being cleaned up. It is agreed on
    again for the next part."""

    kept: int = attrs.field(default=16, validator=ge(1))
    """Agreements that are remembered, the most recently used ones."""

    unused_after: float = attrs.field(default=600.0, validator=gt(0))
    """After so long without a request an agreement is forgotten, and its parts are removed from disk."""

    kept_at_most: float = attrs.field(default=6 * 3_600.0, validator=gt(0))
    """And after so long in any case."""

    part_rows: int = attrs.field(default=100_000, validator=ge(1))
    """Most rows of one part of an agreement made here (`Settings.snapshot_part_rows`), whatever is asked for."""

    part_bytes: int = attrs.field(default=2**28, validator=ge(65_536))
    """Largest part. Its reader keeps it in memory as a whole, and others' parts may have to make room for it."""

    spool_bytes: int = attrs.field(default=2**30, validator=ge(65_536))
    """Disk for parts; the least recently used are removed first, and loaded again if somebody asks."""

    spool_folder: str | None = None
    """Where to put them: a private folder is made in it. None: in the system's temporary directory. Not in memory
    (a tmpfs) where that is what is scarce."""

    requests: int = attrs.field(default=256, validator=ge(1))
    """Requests about snapshots at a time, waiting ones included; further ones are told to come back (503). One for a
    part has its file open."""

    downloads: int = attrs.field(default=32, validator=ge(1))
    """Parts that are sent at a time; each keeps a piece of 64 KiB in memory. The others wait."""

    agreement_bytes: int = attrs.field(default=4 * 2**20, validator=ge(1_024))
    """Largest agreement, as JSON: some 100,000 parts."""
