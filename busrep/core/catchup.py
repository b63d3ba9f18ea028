"""The one question and the one answer of catch-up."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

Key = tuple[str, str]  # stream, writer


@attrs.frozen
class FetchUpdates:
    """Asks for the rows of one (stream, writer) with ``after`` < token <= ``upto``; where these are equal for no rows,
    but for the epoch."""

    stream: str
    writer: str
    after: int
    upto: int
    limit: int = 1000  # bounds the rows of the answer, which still holds at least one whole fact
    incarnation: int | None = None  # set for a resettable stream: only that incarnation of the writer can answer


@attrs.frozen
class UpdatesPage:
    """Rows of one (stream, writer), and what they prove: its writer committed no other row in (``after``, ``upto``].

    ``upto`` below the question's without ``limited`` means that the source cannot prove more yet (a lagging replica):
    ask again later.
    """

    stream: str
    writer: str
    after: int
    upto: int
    tokens: Sequence[int]  # one entry a row; rows of one fact repeat its token and always come together
    payloads: Sequence[bytes]  # parallel to these: the rows as JSON
    limited: bool  # more rows may follow above upto, which then is the last whole token: ask again from there
    epoch: str  # of the fact log, read in the same snapshot
    incarnation: int | None = None


def nothing_of(question: FetchUpdates, epoch: str) -> UpdatesPage:
    """An empty page, which proves no more than the reader has."""
    return UpdatesPage(question.stream, question.writer, question.after, question.after, (), (), False, epoch)
