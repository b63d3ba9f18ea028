"""The lag of a query that follows a stream, in Spark's progress of the query.

The source reports it with the latest offset of each batch::

    {"epoch": ..., "positions": ..., "stream": "orders", "lag": {"w1": {"rows": 120, "seconds": 2.5}}}

Both numbers are of the moment in which the batch was planned. ``rows`` are proven rows that the batch leaves unread;
they grow when the query is slower than its writer. ``seconds`` is the age of the first row that was unread before the
batch. A writer of which all was read is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from busrep.errors import MissingExtra
from busrep.spark.table import Unread

try:
    from pyspark.sql.streaming.listener import StreamingQueryListener
except ImportError as missing:
    raise MissingExtra("spark", "busrep on Spark") from missing

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        StreamingQueryProgress,
    )


@attrs.frozen
class Lag:
    """How far a query is behind one stream. ``query``: the query's name, or its ID where it has none.

    ``rows``: {writer: rows left unread}. ``seconds``: {writer: age of the first unread row}. Both have the writers of
    which something was unread; those of a table of the application's, which has no times, are not in ``seconds``.
    """

    query: str
    stream: str
    rows: Mapping[str, int]
    seconds: Mapping[str, float]


def shown(unread: Mapping[str, Unread]) -> dict[str, Any]:
    """What a query's progress says of it."""
    return {
        writer: {"rows": one.rows, "seconds": None if one.seconds is None else round(one.seconds, 3)}
        for writer, one in sorted(unread.items())
    }


def lags_of(progress: StreamingQueryProgress) -> list[Lag]:
    """The lag of each busrep stream that a query reads, from one progress of the query; none of other sources."""
    found = []
    for source in progress.sources:
        latest = _object(source.latestOffset)
        if not {"epoch", "stream", "lag"} <= latest.keys():
            continue  # another source
        writers = latest["lag"].items()
        rows = {writer: one["rows"] for writer, one in writers}
        seconds = {writer: one["seconds"] for writer, one in writers if one["seconds"] is not None}
        found.append(Lag(progress.name or str(progress.id), latest["stream"], rows, seconds))
    return found


def _object(text: str | None) -> dict[str, Any]:
    """The JSON object of an offset, empty for what is none: the offsets of other sources have forms of their own."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class LagListener(StreamingQueryListener):
    """Tells the lag of all queries of a session, whenever Spark reports the progress of one.

    ::

        def tell(lag):
            gauge.labels(lag.query, lag.stream).set(sum(lag.rows.values()))

        spark.streams.addListener(LagListener(tell))

    ``tell`` is called with each `Lag` in a thread of Spark's; a query that has come to rest, and one that has ended,
    get a last `Lag` with nothing in it, so that no gauge keeps an old value. What ``tell`` raises is logged by Spark.
    """

    def __init__(self, tell: Callable[[Lag], object]) -> None:
        self._tell = tell
        self._streams: dict[str, dict[str, Lag]] = {}  # {ID of a query: {stream: what was told last}}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Nothing is known of it yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """A batch has ended."""
        for lag in lags_of(event.progress):
            self._streams.setdefault(str(event.progress.id), {})[lag.stream] = lag
            self._tell(lag)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """There was nothing to read for a while."""
        self._tell_end(str(event.id))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """It has ended."""
        self._tell_end(str(event.id))

    def _tell_end(self, query: str) -> None:
        for lag in self._streams.pop(query, {}).values():
            self._tell(attrs.evolve(lag, rows={}, seconds={}))
