"""Telling the bus of a batch that was made facts.

The process that commits a batch has nothing else under way, so all its facts up to the batch's last ID are complete:
what is left to do is what every writer does after a start. Rows go out in frames while they are few; of more than a
publishing queue holds the position alone is announced, and readers fetch them.
"""

from __future__ import annotations

import logging
import time

from busrep.core.catchup import FetchUpdates
from busrep.core.chain import FACT_BYTES
from busrep.core.writer import Writer
from busrep.errors import PositionTooOld, Unavailable
from busrep.settings import Settings
from busrep.spark.sink_options import SinkOptions
from busrep.spark.staging import Done
from busrep.spark.staging_store import StagingStore
from busrep.stores.interface import Claim
from busrep.sync.publisher import Publisher

log = logging.getLogger("busrep.spark")

# Connections to Redis that a batch may use up; then its readers learn from the table.
TRIES = 2
# Rows read back at a time.
PAGE = 10_000

Facts = tuple[list[int], list[bytes]]
"""Tokens and payloads, one row a fact."""


def rows_to_publish(store: StagingStore, claim: Claim, made: Done, settings: Settings) -> Facts | None:
    """The facts of a batch that was written under this claim; None when they are too many for the queue, or pruned
    already. Raises Unavailable."""
    bound = settings.publish_queue_bytes
    tokens: list[int] = []
    payloads: list[bytes] = []
    size, at = made.rows * FACT_BYTES, claim.starts[made.stream]
    while size <= bound:
        try:
            page = store.fetch(FetchUpdates(made.stream, made.writer, at, made.last, limit=PAGE))
        except PositionTooOld:
            return None
        tokens += page.tokens
        payloads += page.payloads
        size += sum(map(len, page.payloads))
        at = page.upto
        if not page.limited:
            return (tokens, payloads) if size <= bound else None
    return None


def publish(options: SinkOptions, claim: Claim, position: int, facts: Facts | None, settings: Settings) -> bool:
    """Announce the writer at ``position``, with the ``facts`` up to it where they are given. False when Redis cannot be
    reached: then readers learn from the table."""
    if options.redis is None or options.name is None:
        return False
    stream = options.definition()
    core = Writer(options.name, claim.writer, incarnation=claim.incarnation, epoch=claim.epoch, settings=settings)
    core.add_stream(stream, position if facts is None else claim.starts[stream.name])
    if facts is not None:
        core.rows_completed(stream.name, *facts)
        core.position_moved(stream.name, position)
    publisher = Publisher(options.redis, settings)
    try:
        for _ in range(TRIES):
            try:
                _send(core, publisher, options.name)
            except Unavailable as error:
                # Unknown which frames arrived: the same go out again, byte for byte.
                core.publish_failed()
                log.warning("stream %s: %s; its readers fetch from the table up to %d", stream.name, error, position)
            else:
                return True
        return False
    finally:
        publisher.close()


def _send(core: Writer, publisher: Publisher, name: str) -> None:
    publisher.open()
    core.connected(time.monotonic())
    while frames := core.frames_to_publish():
        publisher.publish(
            [
                (f"{name}/{frame.channel_suffix}" if frame.channel_suffix else name, data)
                for frame in frames
                for data in frame.messages
            ]
        )
        for frame in frames:
            core.published(frame)
