"""Every bound and period, named, with its default and its reason."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import ge, gt, in_, optional

MESSAGE_ITEMS = 10_000
MESSAGE_ROWS = 100_000
"""Defaults of ``Settings.message_items`` and ``Settings.message_rows``, see there."""


def _holds_a_frame(settings: Any, _attribute: object, rows: int) -> None:
    if rows < settings.frame_rows:
        raise ValueError(f"message_rows={rows} is below frame_rows={settings.frame_rows}: own frames would be cut")


def _above_ping(settings: Any, _attribute: object, timeout: float) -> None:
    if timeout <= settings.tcp_ping:
        raise ValueError(f"tcp_timeout={timeout:g} is no longer than tcp_ping={settings.tcp_ping:g}: nobody would last")


@attrs.frozen(kw_only=True)
class Settings:
    """All bounds and periods of one bus. Bytes are bytes, times are seconds.

    Whatever has a bound here never fills silently: it falls back to catch-up, or raises an error that names the
    setting.
    """

    heartbeat: float = attrs.field(default=2.0, validator=gt(0))
    """Period of a writer's beats, or 10 % more. The loss of a last frame is found within one beat."""

    quiet_streams: int = attrs.field(default=8, validator=ge(1))
    """Streams of a writer that a beat announces although nothing was published in them since the last beat, in turns.
    Those in which something was, and streams in memory, are announced at every beat. With more streams an idle writer
    costs every process less, and the loss of both a frame and the announcement behind it is found later."""

    answer_interval: float = attrs.field(default=0.1, validator=ge(0))
    """Seconds between two announcements of one writer, beats aside: a REPLICATE that comes sooner is answered at their
    end, with all others. The first is answered at once, or with a beat if the table tells the same. Each answer doubles
    the time to the next one, up to a heartbeat, unless none came for twice as long: however many processes start or
    lose their link together, a writer announces no more than twice a heartbeat for long."""

    silent_after_beats: int = attrs.field(default=5, validator=ge(2))
    """Beats without a sign of life before a writer counts as silent and a link as dead: 10 s by default, so that
    a half-open link is noticed within 20 s."""

    frame_bytes: int = attrs.field(default=65_536, validator=ge(1_024))
    """Most bytes of one published message. Rows/s level off above some 16 kB; small enough not to block Redis."""

    frame_rows: int = attrs.field(default=1_000, validator=ge(1))
    """Most rows of one published message: one page of catch-up."""

    one_line_messages: bool = attrs.field(default=False, validator=in_((True, False)))
    """Whether a writer publishes each line as a message of its own, without SERVER and NAME, as the reference system
    does, which reads nothing but the first line of a message. Such a writer is a foreign one to busrep's readers: its
    streams are declared so, ``Stream(..., foreign_writers=True)``, and are not in memory. Protocol.md, section 2, says
    what that costs."""

    publish_queue_bytes: int = attrs.field(default=16 * 2**20, validator=ge(0))
    """Rows waiting for Redis, all streams together; above it a stream's rows are dropped from memory and
    readers are told to fetch them from the table."""

    publish_in_flight: int = attrs.field(default=16, validator=ge(1))
    """Messages sent to Redis without waiting for the reply of the first: one pipeline."""

    receive_queue_bytes: int = attrs.field(default=16 * 2**20, validator=ge(0))
    """Rows received and not handled yet, counted as they are held in memory; above it newer lines are dropped and
    fetched again when there is room. Half of Redis's own default bound for a slow subscriber (32 MB)."""

    held_bytes: int = attrs.field(default=4 * 2**20, validator=ge(0))
    """Lines of one (stream, writer) held while it catches up; above it the newest are dropped (9.13)."""

    followed: int = attrs.field(default=10_000, validator=ge(1))
    """Most (stream, writer) pairs, and writer names, that are taken up from the wire: more is noise, not a
    deployment. Lines of further ones are counted (``writers_refused``), logged and ignored; of streams with a table
    they are still followed through the table."""

    message_bytes: int = attrs.field(default=16 * 2**20, validator=ge(1_024))
    """Largest message that is looked at; a larger one is counted and dropped, and its rows are fetched."""

    message_items: int = attrs.field(default=MESSAGE_ITEMS, validator=ge(100))
    """Most commands, and runs of rows of one (stream, writer), that are taken from one message; the rest is dropped,
    and its rows are fetched. A writer's frame of 1,000 rows has at most 2,000 of them, and more streams than fit are
    announced in several messages. An item costs up to 20 us of processor, all halves of a bus together, and 2 kB of
    memory: 16 MiB of the shortest lines cost 0.2 s instead of half a minute."""

    message_rows: int = attrs.field(default=MESSAGE_ROWS, validator=_holds_a_frame)
    """Most rows that are taken from one message; the rest is dropped and fetched. 100 times ``frame_rows``, and 16 MiB
    of rows of 160 bytes. A short row costs some 300 bytes of memory while it is parsed, so that 16 MiB of them would
    cost 14 times as much."""

    page_rows: int = attrs.field(default=1_000, validator=ge(1))
    """Rows of one page of catch-up (protocol.md, section 3)."""

    fetches: int = attrs.field(default=4, validator=ge(1))
    """Pages fetched at a time by one process, so that a reconnect does not flood the store."""

    fetch_timeout: float = attrs.field(default=30.0, validator=gt(0))
    """Deadline of one page; then the fetch counts as failed and is tried again.

    Of any other answer of PostgreSQL to the asyncio runtime, too, beside what it may wait for locks: a link may stand,
    and nobody be at its other end. A COMMIT without an answer is a CommitUnknown. Not of the caller's statements."""

    retry_min: float = attrs.field(default=0.1, validator=gt(0))
    """First pause after a failed connection or fetch; doubles up to ``retry_max``, jittered."""

    retry_max: float = attrs.field(default=5.0, validator=gt(0))
    """Longest pause between two tries: a returned server is noticed within it."""

    stale_after: int = attrs.field(default=3, validator=ge(1))
    """Failed fetches in a row after which a (stream, writer) is called ``stale``. It still retries."""

    redis_timeout: float = attrs.field(default=5.0, validator=gt(0))
    """Deadline of a connect, a subscription and a PUBLISH; then the link counts as dead."""

    stuck_after: float = attrs.field(default=60.0, validator=gt(0))
    """A fact open for longer is reported: it holds back all later facts of its writer."""

    claim_timeout: float = attrs.field(default=10.0, validator=gt(0))
    """How long to wait for the predecessor's last transaction when claiming a writer's name."""

    handler_retries: int = attrs.field(default=3, validator=ge(0))
    """Times a failed handler is called again with the same rows before they can count as poison. Errors of connections
    do not count: they are retried for as long as they last (``transient=`` of connect())."""

    poison_after: float = attrs.field(default=60.0, validator=ge(0))
    """Seconds for which a handler must have failed on a fact before the fact counts as poison, beside
    ``handler_retries``. An outage that looks like an error of the rows (a dependency that answers nonsense while it
    starts) is over in a minute as a rule; a row that is really poison can wait that long."""

    handler_batch_rows: int = attrs.field(default=1_000, validator=ge(1))
    """Most rows handed to a handler in one batch (more only when one fact has more)."""

    line_bytes: int = attrs.field(default=2**20, validator=ge(1_024))
    """Longest line taken over direct TCP, from either side. A row larger than a frame is never sent at all. A longer
    one of another's, on the Redis that is relayed, makes the clients begin anew, and fetch it."""

    tcp_ping: float = attrs.field(default=5.0, validator=gt(0))
    """Seconds after which a side of a direct TCP connection that has sent nothing sends a PING (protocol.md, 7)."""

    tcp_timeout: float = attrs.field(default=15.0, validator=_above_ping)
    """Seconds of silence after which the other side of a direct TCP connection is given up, once it has sent a PING:
    three PINGs. A server waits no longer for the end of a line either."""

    tcp_clients: int = attrs.field(default=1_000, validator=ge(1))
    """Most clients of one TCP server at a time: each costs a file descriptor, of which a process has 1,024 usually."""

    tcp_queue_commands: int = attrs.field(default=10_000, validator=ge(1))
    """Lines waiting for one client of a TCP server; above it the client is told so and cut off, and comes back
    and catches up (protocol.md, 7)."""

    tcp_queue_bytes: int = attrs.field(default=16 * 2**20, validator=ge(1_024))
    """Bytes waiting for one client of a TCP server; above it as above. Clients that name an incarnation share them, all
    others together have no more either: it is no multiple of the clients. As much may wait for a Redis that is relayed;
    above it a client that says more is cut off."""

    waiters: int = attrs.field(default=10_000, validator=ge(1))
    """Most ``wait_for`` calls at a time."""

    save_every: float = attrs.field(default=1.0, validator=ge(0))
    """How often a durable reader that does not save in its handler's own transaction saves its positions."""

    shutdown_timeout: float = attrs.field(default=5.0, validator=gt(0))
    """How long ``close()`` waits for queued frames to be published and open handlers to end."""

    full_sync_buffer_limit: int = attrs.field(default=64 * 2**20, validator=ge(0))
    """Bytes of live lines that accumulate while a snapshot is loaded, all streams of one bus together; above it nothing
    more is kept, and the rest comes by catch-up. Redis gives its replicas as much by default (its own
    ``replica-full-sync-buffer-limit`` falls back to the replica output buffer's, 256 MB; a process has less room)."""

    snapshot_part_rows: int = attrs.field(default=20_000, validator=ge(1))
    """Rows of one part of a snapshot: what is applied in one transaction, kept in memory at a time, and loaded again
    after a crash. Some 3 MB of rows. Of a table with more than 10,000 times as many the parts are larger, a
    ten-thousandth of it. A snapshot that is being loaded keeps the parts that it has; but one of which nothing is
    applied yet is cut anew at a restart if its parts have more than twice as many rows."""

    transactions: int = attrs.field(default=10, validator=ge(1))
    """Facts on busrep's connections that are open at a time on PostgreSQL; more wait for one to end. On an event loop
    as many handlers with a transaction for their effects come on top, in threads they share these connections. Besides,
    a process has up to ``fetches`` + 4 connections for questions. On an event loop one that nobody needed
    for half a minute is closed, but for the last one for questions. A server allows 100 in all by default."""

    snapshot_connections: int = attrs.field(default=2, validator=ge(1))
    """Parts that one bootstrap loads at a time, each on a connection of its own; they are applied in order. One loads
    while another is applied."""

    snapshot_rate: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Rows a second that one bootstrap applies at most, so that it leaves the machines to others. None: as many as it
    can. It works in bursts of a part, so small parts (``snapshot_part_rows``) make it smooth."""

    snapshots: int = attrs.field(default=4, validator=ge(1))
    """Most bootstraps at a time, of all processes that load from one database, or of one HTTP server; the others wait
    their turn. Each reads as fast as it can, unless ``snapshot_rate`` says less, and so takes up to a processor of the
    database's."""

    bootstrap_lag: int = attrs.field(default=1_000_000, validator=ge(1))
    """IDs by which a stream's reader may be behind at its start, all writers together, before a snapshot is taken
    instead of catching up, where the application has said how (``bus.snapshot``). A page of catch-up holds 1,000 rows,
    a part of a snapshot 20,000."""

    full_sync_alarm: int = attrs.field(default=3, validator=ge(2))
    """Full syncs of one stream within an hour that raise the alarm: a reader that needs so many does not keep up, or
    its rows are pruned sooner than it can load a snapshot."""

    cache_bound: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Seconds after the commit of an invalidation in which a cache may still return the old value, though every message
    about it was lost. None: 1.25 heartbeats, 2.5 s by default: a beat comes within 1.1, the rest is for its way. What
    cannot be proven to be younger is not returned: a bound below 1.1 heartbeats makes caches miss now and then."""

    cache_offline: float = attrs.field(default=0.0, validator=ge(0))
    """While the link is down, seconds since the last proof in which caches go on returning what they hold. 0: no longer
    than ``cache_bound``, then every call goes to the function itself."""

    invalidations_kept: float = attrs.field(default=3_600.0, validator=gt(0))
    """Seconds for which rows of an invalidation stream stay in the table before they are pruned. A process that was cut
    off for longer clears its caches."""
