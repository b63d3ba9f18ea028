"""The verdict of the demo: what a reader handled, compared with the table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

FactContent = tuple[int, str]
"""Number of rows of a fact, and the digest of its rows."""

Truth = Mapping[tuple[str, str], Mapping[int, FactContent]]
"""(stream, writer) -> token -> content: all facts that the table holds."""


@attrs.frozen
class Handled:
    """One fact as a reader handled it, in its ``life``-th process."""

    life: int
    stream: str
    writer: str
    token: int
    content: FactContent


@attrs.define
class ReaderVerdict:
    """What is wrong with one reader's record; all zero but the first three when nothing is.

    ``lost``: rows of the table it never handled. ``extra``: facts it handled that the table does not hold, such
    as rolled back ones. ``torn``: facts with other rows than the table's, or only a part of them.
    ``out_of_order``: facts handled after a later one of the same writer, or twice, in one process.
    ``redeliveries``: facts handled again by the process after a kill, which at-least-once allows.
    """

    facts: int = 0
    rows: int = 0
    redeliveries: int = 0
    lost: int = 0
    extra: int = 0
    torn: int = 0
    out_of_order: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.extra or self.torn or self.out_of_order)


def judge(truth: Truth, record: Iterable[Handled], *, exactly_once: bool) -> ReaderVerdict:
    """Compare one reader's record, in the order in which it was written, with the table."""
    verdict = ReaderVerdict()
    seen: dict[tuple[str, str], set[int]] = {key: set() for key in truth}
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for one in record:
        key = one.stream, one.writer
        life, token = last.get(key, (0, 0))
        if token >= one.token and (life == one.life or exactly_once):
            verdict.out_of_order += 1
        last[key] = one.life, one.token
        content = truth.get(key, {}).get(one.token)
        if content is None:
            verdict.extra += 1
        elif content != one.content:
            verdict.torn += 1
        if one.token in seen.setdefault(key, set()):
            verdict.redeliveries += 1
            continue
        seen[key].add(one.token)
        verdict.facts += 1
        verdict.rows += one.content[0]
    for key, facts in truth.items():
        verdict.lost += sum(content[0] for token, content in facts.items() if token not in seen[key])
    return verdict
