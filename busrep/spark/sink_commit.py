"""Making facts of a batch that was staged: on the driver, in a process that may not be there for the next batch.

Spark asks some Python process to commit a batch, and perhaps another one the next time. So nothing is kept between two
batches but what is in the database: a query's row in busrep_sinks says which batch was the last, and under which
incarnation of the writer's name. Each commit claims the name anew. While the query's run is the same one it claims it
*again*: only if nobody else has had it since; a run that has just begun takes it, as every writer does at its start.

::

    look         is the batch done already? Is it of this checkpoint, of this database? (`is_done`)
    claim        wait until no transaction of a predecessor can commit any more
    commit       facts, mark and staged rows in one transaction; a batch that is done is found done here as well
    prove        the position goes into the table
    publish      and onto the bus
    leave        nobody is there until the next batch: the name leaves the registry (9.5)

A process killed after any of these steps leaves a state that the same steps, taken again, bring to the same end. An
answer that does not come is no answer: the name is claimed again, which waits for the transaction's end (9.4), and then
the mark tells.
"""

from __future__ import annotations

import logging
import time

from busrep.core.backoff import pause_after
from busrep.errors import BusrepError, Unavailable, WriterFenced
from busrep.settings import Settings
from busrep.spark.sink_options import SinkOptions
from busrep.spark.sink_publish import publish, rows_to_publish
from busrep.spark.staging import Done, StagedBatch, is_done
from busrep.spark.staging_store import StagingStore, open_staging_store
from busrep.stores.interface import Claim
from busrep.streams import Registry

log = logging.getLogger("busrep.spark")

# Times a commit is tried whose answer did not come; Spark's next try comes when somebody starts the query again.
TRIES = 4


def commit(options: SinkOptions, batch: StagedBatch, settings: Settings | None = None) -> Done:
    """Make facts of a batch, once, and tell the bus. Gives what is in the table, also when that was done before: no
    rows of a batch before the query's first one, which is not written.

    Raises WriterFenced when another process has the writer's name, ConfigError for a batch whose number means another
    one, StagedRowsGone, ClaimBlocked, SequenceWentBack, Unavailable. Then the batch is not written, or the next try
    finds that it is.
    """
    settings = settings or Settings()
    stream = options.definition()
    store = open_staging_store(options.store, Registry([stream]), settings=settings)
    store.open()
    try:
        store.check_backing(stream.name)
        found = store.done(batch.query)
        if found is None and batch.number < batch.first:
            log.warning("batch %d of query %s: not written, for firstBatch=%d", batch.number, batch.query, batch.first)
            store.clear(batch.query, batch.attempts)
            return Done(batch.query, batch.checkpoint, batch.number, batch.run, stream.name, options.writer, 0, 0, 0, 0)
        if is_done(batch, found):
            log.info("batch %d of query %s was written before; it is not written again", batch.number, batch.query)
        if found is not None and (found.run, found.writer) == (batch.run, options.writer):
            again: int | None = found.incarnation
        else:
            again = None
            store.clean()
        made = _write(store, options, batch, again, settings)
        if batch.once:
            store.forget(batch.query)
        return made
    finally:
        store.close()


def _write(
    store: StagingStore, options: SinkOptions, batch: StagedBatch, again: int | None, settings: Settings
) -> Done:
    for failures in range(1, TRIES + 1):
        try:
            claim = store.claim(options.writer, [options.stream], timeout=settings.claim_timeout, again=again)
            again = claim.incarnation
            made = _commit(store, claim, options, batch)
            if made is not None:
                _tell(store, claim, options, made, settings)
                _leave(store, claim, settings)
                return made
        except WriterFenced as error:
            if again is not None and error.incarnation <= again:
                raise
            again = error.incarnation  # won, and finished for its silence before that was known here
        except Unavailable as error:
            if failures == TRIES:
                raise
            log.warning("batch %d of query %s: %s; looking again", batch.number, batch.query, error)
            time.sleep(pause_after(failures, settings))
    raise WriterFenced(options.writer, again or 0)


def _commit(store: StagingStore, claim: Claim, options: SinkOptions, batch: StagedBatch) -> Done | None:
    """None: fenced, perhaps for the name's silence alone; claiming it again tells."""
    try:
        return store.commit(claim, options.stream, batch)
    except WriterFenced as error:
        log.warning("batch %d of query %s: %s", batch.number, batch.query, error)
        return None


def _tell(store: StagingStore, claim: Claim, options: SinkOptions, made: Done, settings: Settings) -> None:
    """Store the proven position, and publish. Raises Unavailable for the database alone."""
    written = (made.writer, made.incarnation) == (claim.writer, claim.incarnation)  # not before, by somebody else
    position = claim.starts[options.stream]
    facts = None
    if written and made.rows:
        position = made.last
        if options.redis is not None:
            facts = rows_to_publish(store, claim, made, settings)
    try:
        store.heartbeat(claim, {options.stream: position})
    except WriterFenced as error:
        # Whoever has the name, or has finished it, begins behind these facts. Nothing more is said under it here.
        log.warning("batch %d of query %s is written; %s", made.number, made.query, error)
        return
    publish(options, claim, position, facts, settings)


def _leave(store: StagingStore, claim: Claim, settings: Settings) -> None:
    """Nobody beats for this name until the next batch, which may be long. Registered it would hold back all linear
    positions, and be taken for dead; and where it is the only one heard, readers would take their link for dead."""
    try:
        store.finish(claim.writer, claim.incarnation, timeout=settings.heartbeat)
    except BusrepError as error:  # whoever finds it silent does it
        log.info("writer %s stays in the registry for now: %s", claim.writer, error)
