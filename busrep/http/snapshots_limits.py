"""The bounds of snapshots over HTTP, each with its default and its reason."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt


@attrs.frozen(kw_only=True)
class SnapshotLimits:
    """Bounds of one application's snapshots, whatever its clients ask for. Bytes are bytes, times are seconds."""

    snapshots: int = attrs.field(default=2, validator=ge(1))
    """Agreements that are made at a time; further readers are told to come back (`SnapshotBusy`). With ``loads`` as
    many as `Settings.snapshots`. Readers that ask for the same at about the same time count once."""

    loads: int = attrs.field(default=2, validator=ge(1))
    """Parts that are loaded from the source at a time, as many as one reader with the database loads
    (`Settings.snapshot_connections`); further ones wait."""

    load_timeout: float = attrs.field(default=600.0, validator=gt(0))
    """For the source to agree, and for it to give one part. Clients wait for it in several requests."""

    shared_for: float = attrs.field(default=60.0, validator=gt(0))
    """For how long an agreement is given to readers that come new, and a part is kept for others. What came
    after an agreement its readers have to catch up with: at 2,000 facts/s that is as much as six parts."""

    part_rows: int = attrs.field(default=100_000, validator=ge(1))
    """Most rows of one part of an agreement made here (`Settings.snapshot_part_rows`), whatever is asked for."""

    part_bytes: int = attrs.field(default=2**26, validator=ge(65_536))
    """Largest part. An `HttpSource` keeps it in memory as a whole, and reads no larger one by default."""

    memory: int = attrs.field(default=2**28, validator=ge(0))
    """Of parts. While those that are being sent are larger than this together, no further one is loaded: readers are
    told to come back (503). Those that are kept for others make room."""

    downloads: int = attrs.field(default=32, validator=ge(1))
    """Parts that are sent at a time; the others wait."""
