"""The ledgers of a reader's lives compared with the table. Pure.

What must hold, per (stream, writer), in the order of IDs:

- a batch holds exactly the facts that the table has in (after, position], with the same bytes;
- within a life nothing is skipped between two batches, and nothing comes again that was handled; what a life wrote
  itself counts as handled, until it loses its name: then its own facts come to it like any others;
- a reader that saves its positions begins a life no later than where its earlier lives got;
- at the end it has handled everything. A reader that saves none ("now") begins each life where it likes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import attrs

from tests.proof.soak.ledger import Anew, Committed, Entry, Gone, Handled, RolledBack, Started

Key = tuple[str, str]
"""(stream, writer)."""

Content = tuple[int, str]
"""Number of rows of a fact, and the digest of its rows."""

Truth = Mapping[Key, Mapping[int, Content]]
"""All facts that were ever committed: token -> content, ascending."""

Authors = Mapping[str, Mapping[int, int]]
"""The own facts of a writer that reads: stream -> token -> the number of the life that wrote it."""

# Lines of a ledger that a violation shows before and after its own.
CONTEXT = 3


@attrs.define
class Verdict:
    """What is wrong with one process's ledgers; ``violations`` is empty when nothing is.

    ``facts`` and ``rows`` were handled; ``lost`` counts rows that never were, or were skipped in a life;
    ``redeliveries`` facts that were handled again, which at-least-once allows after a life's end; ``out_of_order``
    facts handled again or backwards within one; ``extra`` facts that the table does not hold; ``torn`` facts with other
    rows than the table's.
    """

    facts: int = 0
    rows: int = 0
    redeliveries: int = 0
    lost: int = 0
    out_of_order: int = 0
    extra: int = 0
    torn: int = 0
    violations: list[str] = attrs.field(factory=list)


class _Life:
    """Where one life is with one (stream, writer)."""

    def __init__(self) -> None:
        self.handled: int | None = None
        # What came since then: more than one where the handler failed, or its COMMIT got no answer.
        self.started: list[Started] = []

    def committed(self, upto: int) -> Started | None:
        """The last batch that may have been handled without a word of it, and ends by ``upto``."""
        found = [one for one in self.started if (self.handled or 0) < one.position <= upto]
        return max(found, key=lambda one: one.position, default=None)


def _describe(entries: Sequence[Entry], at: int) -> str:
    """The ledger around an entry."""
    around = range(max(0, at - CONTEXT), min(len(entries), at + CONTEXT + 1))
    return "\n".join(f"    {'>' if number == at else ' '} {number}: {_short(entries[number])}" for number in around)


def _short(entry: Entry) -> str:
    if isinstance(entry, Started):
        tokens = _ends([fact[0] for fact in entry.facts])
        return f"Started({entry.stream}, {entry.writer}, after={entry.after}, position={entry.position}, {tokens})"
    if isinstance(entry, Committed | RolledBack):
        return f"{type(entry).__name__}({_ends([f'{fact[0]} {fact[1]}' for fact in entry.facts])})"
    return str(entry)


def _ends(items: Sequence[object]) -> str:
    return f"{list(items[:5])}...{list(items[-5:])}" if len(items) > 12 else str(list(items))


class _Judge:
    """Goes through the lives of one reader."""

    def __init__(self, who: str, truth: Truth, *, durable: bool, exact: bool, authors: Authors) -> None:
        self.who, self.truth, self.durable, self.exact, self.authors = who, truth, durable, exact, authors
        self.tokens = {key: list(facts) for key, facts in truth.items()}
        self.reached: dict[Key, int] = {}
        self.verdict = Verdict()
        self.seen: set[tuple[Key, int]] = set()

    def between(self, key: Key, after: int, upto: int) -> list[int]:
        """The table's facts in (after, upto]."""
        tokens = self.tokens.get(key, [])
        return tokens[bisect_right(tokens, after) : bisect_right(tokens, upto)]

    def complain(self, life: int, entries: Sequence[Entry], at: int, what: str) -> None:
        self.verdict.violations.append(f"{self.who}, life {life}: {what}\n{_describe(entries, at)}")

    def rows_lost(self, key: Key, tokens: Iterable[int]) -> None:
        self.verdict.lost += sum(self.truth[key][token][0] for token in tokens)

    def life(self, number: int, entries: Sequence[Entry]) -> None:
        """One ledger, from its start."""
        lives: dict[Key, _Life] = {}
        for at, entry in enumerate(entries):
            if isinstance(entry, Committed | RolledBack):
                continue
            key = entry.stream, entry.writer
            now = lives.setdefault(key, _Life())
            if isinstance(entry, Started):
                self.content(number, entries, at, entry)
                self.continues(number, entries, at, entry, now)
                now.started.append(entry)
            elif isinstance(entry, Handled):
                self.handled(number, entries, at, entry, now)
            elif isinstance(entry, Gone):
                self.gone(number, entries, at, entry, now)
            elif isinstance(entry, Anew):
                self.complain(number, entries, at, "a stream with a table began anew")
        for key, now in lives.items():
            # Killed on the way: its COMMIT may have been the last thing it did. The effects tell.
            maybe = [one.position for one in now.started] if self.exact else []
            self.reached[key] = max(self.reached.get(key, 0), now.handled or 0, *maybe)

    def content(self, life: int, entries: Sequence[Entry], at: int, entry: Started) -> None:
        """Whether the batch is what the table holds in its span."""
        key = entry.stream, entry.writer
        expected = self.between(key, entry.after, entry.position)
        facts = self.truth.get(key, {})
        found = [token for token, _, _ in entry.facts]
        if found == expected and all(facts[token] == (rows, content) for token, rows, content in entry.facts):
            return
        skipped = sorted(set(expected) - set(found))
        extra = [token for token in found if token not in facts]
        torn = [token for token, rows, content in entry.facts if token in facts and facts[token] != (rows, content)]
        self.rows_lost(key, skipped)
        self.verdict.extra += len(extra)
        self.verdict.torn += len(torn)
        self.verdict.out_of_order += sum(second <= first for first, second in pairwise(found))
        self.complain(
            life,
            entries,
            at,
            f"not what the table holds: missing {skipped}, not there {extra}, torn {torn}, or disorder",
        )

    def continues(self, life: int, entries: Sequence[Entry], at: int, entry: Started, now: _Life) -> None:
        """Whether the batch begins where this life was, or a new life where the earlier ones were."""
        key = entry.stream, entry.writer
        begins = now.handled is None
        handled = self.reached.get(key, 0) if now.handled is None else now.handled
        if self.exact and (committed := now.committed(entry.after)) is not None:
            # Its COMMIT got no answer, and was found to have happened, then or later.
            self.count(key, committed)
            handled = now.handled = committed.position
        elif begins and (not self.durable or key[1] == self.who):
            return  # what a writer published itself in an earlier life counts as handled
        elif not begins and entry.after < handled and (again := self.between(key, entry.after, handled)):
            self.verdict.out_of_order += len(again)
            self.complain(life, entries, at, f"facts {again[:20]} again, or backwards, within a life")
            return
        skipped = self.between(key, handled, entry.after)
        if key[1] == self.who:
            written = self.authors.get(key[0], {})
            skipped = [token for token in skipped if written.get(token) != life]
        if skipped:
            self.rows_lost(key, skipped)
            self.complain(life, entries, at, f"{len(skipped)} facts were skipped: {skipped[:20]}")

    def gone(self, life: int, entries: Sequence[Entry], at: int, entry: Gone, now: _Life) -> None:
        """Rows pruned before they were read: nothing that a reader with saved positions may meet."""
        key = entry.stream, entry.writer
        since = entry.after if now.handled is None else min(now.handled, entry.after)
        pruned, skipped = self.between(key, entry.after, entry.upto), self.between(key, since, entry.after)
        if skipped or (pruned and self.durable):
            self.rows_lost(key, skipped + pruned)
            self.complain(life, entries, at, f"pruned before it had read them: {pruned[:20]}; skipped: {skipped[:20]}")
        now.handled = max(entry.upto, now.handled or 0)

    def handled(self, life: int, entries: Sequence[Entry], at: int, entry: Handled, now: _Life) -> None:
        """The batch that came last was handled."""
        if not now.started or now.started[-1].position != entry.position:
            self.complain(life, entries, at, "the end of a batch that was not begun")
            return
        self.count((entry.stream, entry.writer), now.started[-1])
        now.handled, now.started = entry.position, []

    def count(self, key: Key, started: Started) -> None:
        """The facts of a batch were handled."""
        for token, rows, _ in started.facts:
            if (key, token) in self.seen:
                self.verdict.redeliveries += 1
            else:
                self.seen.add((key, token))
                self.verdict.facts += 1
                self.verdict.rows += rows

    def end(self) -> None:
        """Whether it got to the end."""
        for key, tokens in self.tokens.items():
            if key[1] != self.who and (missing := self.between(key, self.reached.get(key, 0), tokens[-1])):
                self.rows_lost(key, missing)
                self.verdict.violations.append(
                    f"{self.who} never handled {len(missing)} facts of {key}: {missing[:20]}"
                )


def judge_reader(
    who: str,
    truth: Truth,
    lives: Iterable[tuple[int, Sequence[Entry]]],
    *,
    durable: bool,
    exact: bool = False,
    authors: Authors | None = None,
) -> Verdict:
    """Compare the ledgers of a reader's lives, (number, entries) in their order, with the table.

    ``durable``: it saves its positions. ``exact``: in one transaction with what it did, so that a batch may have been
    handled of which the ledger does not say so; ``judge_effects`` tells whether it was handled once. ``authors``: of
    its own facts, if it writes too.
    """
    judge = _Judge(who, truth, durable=durable, exact=exact, authors=authors or {})
    for number, entries in lives:
        judge.life(number, entries)
    judge.end()
    return judge.verdict


def judge_effects(who: str, truth: Truth, effects: Mapping[Key, Sequence[tuple[int, Content]]]) -> Verdict:
    """Compare what an exactly-once reader did, in its order, with the table: the same facts, each once, in order."""
    verdict = Verdict()
    for key in sorted({*truth, *effects}):
        expected, found = truth.get(key, {}), effects.get(key, ())
        done = dict(found)
        verdict.facts += len(done)
        verdict.rows += sum(rows for rows, _ in done.values())
        missing, extra = sorted(set(expected) - set(done)), sorted(set(done) - set(expected))
        torn = [token for token, content in done.items() if token in expected and expected[token] != content]
        disorder = sum(second[0] <= first[0] for first, second in pairwise(found))
        verdict.lost += sum(expected[token][0] for token in missing)
        verdict.extra += len(extra)
        verdict.torn += len(torn)
        verdict.out_of_order += disorder
        if missing or extra or torn or disorder:
            verdict.violations.append(
                f"effects of {who}, {key}: missing {missing[:20]}, not in the table {extra[:20]}, torn {torn[:20]}, "
                f"twice or out of order {disorder}"
            )
    return verdict


def judge_writer(who: str, truth: Truth, entries: Iterable[Entry]) -> list[str]:
    """What a writer was told against the table: committed facts are there, rolled back ones are not."""
    found: list[str] = []
    for entry in entries:
        if isinstance(entry, Committed):
            for stream, id, rows, content in entry.facts:
                if truth.get((stream, who), {}).get(id) != (rows, content):
                    found.append(f"{who} committed {stream} {id}, and the table does not hold it so")
        elif isinstance(entry, RolledBack):
            found += [
                f"{who} rolled {stream} {id} back, and the table holds it"
                for stream, id in entry.facts
                if id in truth.get((stream, who), {})
            ]
    return found
