"""Where an archive's query began and where its batches end, as the job and Spark have noted it beside the archive."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import orjson

from busrep.spark import archived
from busrep.spark.archive_store import Root
from busrep.spark.offsets import Offset, positions_in


@attrs.frozen
class Start:
    """What ``archive.json`` says: the batch that the checkpoint's batch 0 is, and the positions where that begins.
    ``checkpoint``: where it is, "" beside the manifests. ``start``: what --start said."""

    checkpoint: str = attrs.field(validator=attrs.validators.instance_of(str))
    base: int = attrs.field(validator=attrs.validators.instance_of(int))
    epoch: str = attrs.field(validator=attrs.validators.instance_of(str))
    positions: Mapping[str, int] = attrs.field(converter=positions_in)
    start: str = ""


def write_start(root: Root, stream: str, start: Start) -> None:
    """Note it. Raises Unavailable."""
    root.replace(_path(stream), orjson.dumps(attrs.asdict(start)))


def read_start(root: Root, stream: str) -> Start | None:
    """What is noted, None without. Raises ValueError for a note that cannot be used, Unavailable."""
    try:
        return Start(**orjson.loads(root.read(_path(stream))))
    except FileNotFoundError:
        return None
    except TypeError as error:  # attrs' has more to say
        raise ValueError(str(error.args[0])) from None


def _path(stream: str) -> str:
    return f"{archived.folder_of(stream)}/{archived.START}"


def checkpoint_of(root: Root, stream: str, place: str) -> Root:
    """Spark's checkpoint of a stream's query; ``place``: as `Start.checkpoint`."""
    folder = archived.folder_of(stream)
    return Root(place).below(folder.rpartition("/")[2]) if place else root.below(f"{folder}/checkpoint")


def end_of(checkpoint: Root, batch: int) -> Offset:
    """Where a batch ends: the last line of its entry in Spark's log, which was there before the batch began. Raises
    FileNotFoundError, ValueError, ConfigError, Unavailable."""
    return Offset.from_dict(orjson.loads(checkpoint.read(f"offsets/{batch}").rstrip().rpartition(b"\n")[2]))


def nonzero(positions: Mapping[str, int]) -> dict[str, int]:
    """Positions as they compare: a writer at 0 is as one that is not there."""
    return {writer: at for writer, at in positions.items() if at}
