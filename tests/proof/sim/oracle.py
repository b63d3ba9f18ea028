"""What must be true of every run, checked against the log that the database committed.

The log of an epoch is every fact committed in it, also those that a restore took away later; who handled what, what
was said on the wire and what was promised are held against it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import orjson

from .record import Handled, Key, Life, Record, Violation
from .scenario import LIVE, STRICT, WRITER, Role

Fact = tuple[str, str, str, int, tuple[bytes, ...], float, int]  # epoch, stream, writer, id, payloads, at, incarnation


@attrs.define
class Log:
    """The facts of one (stream, writer) in one epoch: IDs ascending, payloads and the time of COMMIT of each.

    ``lost``: when a failover took it away. Until then it was as good as any other; from then on nobody is owed it.
    """

    facts: dict[int, tuple[tuple[bytes, ...], float]] = attrs.field(factory=dict)
    ids: list[int] = attrs.field(factory=list)
    lost: dict[int, float] = attrs.field(factory=dict)

    def within(self, after: int, upto: int, at: float = 0.0) -> list[int]:
        """The IDs in (after, upto], but for those that were lost at that time."""
        found = self.ids[bisect_right(self.ids, after) : bisect_right(self.ids, upto)]
        return [id for id in found if self.lost.get(id, math.inf) > at] if self.lost else found


Logs = dict[tuple[str, Key], Log]


def logs_of(record: Record, history: Sequence[Fact], began: float) -> Logs:
    """{(epoch, (stream, writer)): its log}; times since the run began."""
    logs: Logs = {}
    for epoch, base in record.logs.items():
        for key, facts in base.items():
            log = logs.setdefault((epoch, key), Log())
            log.facts.update({id: (payloads, 0.0) for id, payloads in facts.items()})
    for epoch, stream, writer, id, payloads, at, _ in history:
        logs.setdefault((epoch, (stream, writer)), Log()).facts[id] = (payloads, at - began)
    for (epoch, stream, writer, id), at in record.lost.items():
        logs[epoch, (stream, writer)].lost[id] = at
    for log in logs.values():
        log.ids = sorted(log.facts)
    return logs


@attrs.define
class Oracle:
    """Looks at one run.

    ``gone``: roles that never came back. ``last``: the number of each role's last life. ``floors``: what was pruned in
    the end, {key: highest deleted ID}. ``calm``: nothing went wrong, and nothing was ever full.
    """

    record: Record
    roles: Mapping[str, Role]
    gone: Collection[str]
    last: Mapping[str, int]
    history: Sequence[Fact]
    began: float
    epoch: str
    floors: Mapping[Key, int]
    effects: Sequence[tuple[str, str, str, str, int, str]]
    database: Sequence[str]
    calm: bool = False
    logs: Logs = attrs.field(init=False)
    found: list[Violation] = attrs.field(factory=list, init=False)
    # What each role handled, or each life of one that keeps no positions: {(role, life or 0, epoch, key): {token: at}}
    done: dict[tuple[str, int, str, Key], dict[int, float]] = attrs.field(factory=dict, init=False)

    def look(self) -> list[Violation]:
        """All invariants; what does not hold."""
        self.logs = logs_of(self.record, self.history, self.began)
        record, void = self.record, self.record.void
        record.claimed = [one for one in record.claimed if one.epoch not in void]
        record.handled = [one for one in record.handled if one.epoch not in void]
        record.samples = [one for one in record.samples if one.epoch not in void]
        record.upto = [one for one in record.upto if one.epoch not in void]
        self.found = [Violation(*one) for one in self.record.broken]
        self.found += [Violation("one live incarnation per writer", text) for text in self.database]
        self._ids()
        self._refused()
        self._wire()
        self._effects()  # first: what was committed without an answer was handled, and nobody noted it
        self._handled()
        self._positions()
        self._complete()
        self._upto()
        self._presence()
        return self.found

    def _breaks(self, invariant: str, text: str) -> None:
        self.found.append(Violation(invariant, text))

    def _log(self, epoch: str, key: Key) -> Log:
        return self.logs.get((epoch, key)) or Log()

    def _ids(self) -> None:
        """No ID of a log is given twice, though the database may have lost who had it (9.15, 9.23)."""
        given: dict[tuple[str, str, int], str] = {}
        for epoch, stream, writer, id, *_ in self.history:
            if epoch not in self.record.void and given.setdefault((epoch, stream, id), writer) != writer:
                self._breaks("no ID is given twice", f"{stream} {id}: {given[epoch, stream, id]}, {writer}")
        facts = [one[:4] for one in self.history if one[0] not in self.record.void]
        for (epoch, stream, writer, id), times in Counter(facts).items():
            if times > 1:
                self._breaks("no ID is given twice", f"{stream} {id}: {writer}, in {epoch} {times} times")

    def _refused(self) -> None:
        """What its writer was told to be not written never is: not later either."""
        for epoch, stream, writer, id in self.record.refused:
            if epoch not in self.record.void and id in self._log(epoch, (stream, writer)).facts:
                self._breaks("what is refused is not written", f"{stream} {writer}: {id}")
        seen: set[int] = set()
        for epoch, stream, writer, id, payloads, *_ in self.history:
            for number, *_ in map(orjson.loads, payloads if epoch not in self.record.void else ()):
                if number in self.record.refused_rows:
                    self._breaks("what is refused is not written", f"row {number}: {stream} {writer} {id}")
                if number in seen:
                    self._breaks("a row is written once", f"row {number}: {stream} {writer} {id}")
                seen.add(number)

    # -- the wire ---------------------------------------------------------------------------------------------

    def _wire(self) -> None:
        """What writers said of themselves was true, then and for ever (9.1 to 9.6)."""
        for one in self.record.claimed:
            log = self._log(one.epoch, one.key)
            where = f"{one.at:.3f} {one.key[0]} {one.key[1]}"
            if one.rows is None:
                if between := log.within(one.after, one.upto, one.at):
                    self._breaks("no row in a POSITION's span", f"{where} ({one.after}, {one.upto}]: {between}")
                late = [id for id in log.within(0, one.upto) if log.facts[id][1] > one.at]
                if late:
                    self._breaks("what is announced is complete", f"{where} at {one.upto}: {late} committed later")
                continue
            tokens = list(dict.fromkeys(token for token, _ in one.rows))
            there = log.within(one.after, one.upto, one.at)
            if there != [token for token in tokens if log.lost.get(token, math.inf) > one.at]:
                self._breaks("a frame carries every row of its span", f"{where}: {tokens} sent, {there} in the log")
            for token in tokens:
                sent = tuple(payload for at, payload in one.rows if at == token)
                if token in log.facts and log.facts[token][0] != sent:
                    self._breaks("the same bytes everywhere", f"{where} {token}: {sent!r} sent")
                if token in log.facts and log.facts[token][1] > one.at:
                    self._breaks("no row before its COMMIT", f"{where} {token}")

    # -- what was handled -------------------------------------------------------------------------------------

    def _who(self, role: str, life: int) -> tuple[str, int]:
        return (role, life if role and self.roles[role].kind == LIVE else 0)

    def _handled(self) -> None:
        """In order, nothing skipped, nothing that was not committed."""
        last: dict[tuple[int, str, Key], int] = {}
        for one in self.record.handled:
            log, tokens = self._log(one.epoch, one.key), list(dict.fromkeys(token for token, _ in one.rows))
            where = f"{one.at:.3f} {one.role}#{one.life} {one.key[0]} {one.key[1]}"
            done = self.done.setdefault((*self._who(one.role, one.life), one.epoch, one.key), {})
            self._bytes(one, log, where)
            start = self._start(one.role, one.life, one.epoch, one.key)
            at = last.get((one.life, one.epoch, one.key))
            own = self.roles[one.role].kind == WRITER and one.key[1] == one.role
            for token in tokens:
                if at is not None and token <= at and not self._may_repeat(one):
                    self._breaks("no inversion", f"{where}: {token} after {at}")
                # Of its own name it gets what it has not written, or not published, itself.
                after = token - 1 if own else start if at is None else at
                skipped = [id for id in log.within(after, token - 1, one.at) if id not in done]
                if skipped and not self._excused(one.role, one.life, one.epoch, one.key, skipped, one.at):
                    self._breaks("no skip", f"{where}: {token} came, {skipped} did not")
                at = token
                done.setdefault(token, one.at)
            if at is not None:
                last[one.life, one.epoch, one.key] = at

    def _may_repeat(self, one: Handled) -> bool:
        """Whether rows may come again within one life."""
        kind = self.roles[one.role].kind
        # A transaction without an answer is tried again, and what counts are its effects. A restore puts saved
        # positions back, and a reader follows them: the new epoch, which begins all anew, it may notice later. So does
        # a failover that loses them.
        back = min(self.record.ended.get(one.epoch, 1e9), self.record.failovers.get(one.epoch, 1e9))
        return kind == STRICT or (kind != LIVE and one.at > back)

    def _start(self, role: str, number: int, epoch: str, key: Key) -> int:
        """Behind which ID this life owes its handlers all of this epoch; a durable reader's first life counts."""
        lives = [life for life in self.record.lives if life.role == role]
        live = self.roles[role].kind == LIVE
        began = next(life for life in lives if not live or life.number == number)
        if began.epochs.get(key[0]) == epoch:
            return began.starts.get(key, 0)
        floor = self.record.floors.get(epoch, self.floors).get(key, 0)  # began again, at the floor there was
        return max(floor, self.record.begun.get((role, epoch, key), 0))

    def _bytes(self, one: Handled, log: Log, where: str) -> None:
        rows: dict[int, list[bytes]] = {}
        for token, payload in one.rows:
            rows.setdefault(token, []).append(payload)
        for token, payloads in rows.items():
            if token not in log.facts:
                self._breaks("nothing that was not committed", f"{where}: {token}")
            elif log.facts[token][0] != tuple(payloads):
                self._breaks("the same bytes everywhere", f"{where}: {token} as {payloads!r}")
            elif log.facts[token][1] > one.at:
                self._breaks("no row before its COMMIT", f"{where}: {token}")

    def _excused(self, role: str, life: int, epoch: str, key: Key, tokens: Sequence[int], until: float) -> bool:
        """Whether this reader was told that it would not get these."""
        # A dead letter of a reader without a name is of any of them.
        whose = [
            (role, life if self.roles[role].kind == LIVE else 0),
            ("" if self.roles[role].kind == LIVE else role, 0),
        ]
        told = [
            one
            for one in self.record.reported
            if (one.epoch, one.key) == (epoch, key) and one.at <= until and self._who(one.role, one.life) in whose
        ]
        return all(any(one.after < token <= one.upto for one in told) for token in tokens)

    def _effects(self) -> None:
        """Exactly once: the effects of a reader that saves with them are the log, in its order, at each restore too."""
        for at, effects in (*self.record.effects, (1e9, self.effects)):
            self._effects_at_a_time(at, effects)

    def _effects_at_a_time(self, at: float, effects: Sequence[tuple[str, str, str, str, int, str]]) -> None:
        found: dict[tuple[str, str, Key], list[tuple[int, bytes]]] = {}
        for reader, epoch, stream, writer, token, row in effects:
            if epoch in self.record.void:
                continue
            found.setdefault((reader, epoch, (stream, writer)), []).append((token, row.encode()))
        for (reader, epoch, key), rows in found.items():
            log = self._log(epoch, key)
            tokens = [token for token, _ in rows]
            # A dead letter may be handled all the same: it is kept before the position that says so.
            aside = {id for id in log.ids if id not in tokens and self._excused(reader, 0, epoch, key, [id], 1e9)}
            expected = [
                (id, payload)
                for id in log.ids
                for payload in log.facts[id][0]
                if tokens[0] <= id <= max(tokens) and id not in aside
                if log.lost.get(id, math.inf) > at or id in tokens
            ]
            if rows != expected:
                there = [token for token, _ in expected]
                self._breaks("exactly once, in order", f"{reader} {key}: {tokens}, not {there}")
            done = self.done.setdefault((reader, 0, epoch, key), {})
            for token in tokens:
                done.setdefault(token, 0.0)

    # -- what was promised ------------------------------------------------------------------------------------

    def _positions(self) -> None:
        """Whoever says that it is at a position has handled everything up to it."""
        for one in self.record.samples:
            role = self.roles[one.role]
            if not role.reads or (role.kind == WRITER and one.key[1] == one.role):
                continue
            done = self.done.get((*self._who(one.role, one.life), one.epoch, one.key), {})
            start = self._start(one.role, one.life, one.epoch, one.key)
            missing = [
                id
                for id in self._log(one.epoch, one.key).within(start, one.position, one.at)
                if done.get(id, 1e9) > one.at
            ]
            if missing and not self._excused(one.role, one.life, one.epoch, one.key, missing, one.at):
                what = f"{one.at:.3f} {one.role}#{one.life} {one.key}"
                self._breaks(f"{one.why} means handled", f"{what} at {one.position}: {missing} were not")

    def _complete(self) -> None:
        """In the end every fact of the log was handled by every reader, or reported; what is handled exactly once has
        left its effects, also where a failover took them back meanwhile."""
        effects = {(reader, epoch, (stream, writer), token) for reader, epoch, stream, writer, token, _ in self.effects}
        for role, life in self._readers():
            for (epoch, key), log in self.logs.items():
                if epoch != self.epoch:
                    continue
                # Of its own name it is owed what a restored log began with: it begins anew there.
                own = self.roles[role].kind == WRITER and key[1] == role
                owed = self.record.logs[epoch].get(key, {}) if own else log.facts
                done = self.done.get((*self._who(role, life.number), epoch, key), {})
                start = self._start(role, life.number, epoch, key)
                strict = self.roles[role].kind == STRICT
                missing = [
                    id
                    for id in log.within(start, 2**62, 1e9)
                    if id in owed and ((role, epoch, key, id) not in effects if strict else id not in done)
                ]
                if missing and not self._excused(role, life.number, epoch, key, missing, 1e9):
                    self._breaks("nothing lost", f"{role}#{life.number} {key}: {missing} of {log.ids} never came")

    def _readers(self) -> Iterator[tuple[str, Life]]:
        """Every durable reader with its first life, every other with its last."""
        for name, role in self.roles.items():
            lives = [life for life in self.record.lives if life.role == name]
            if not lives or name in self.gone or not role.reads:
                continue
            yield name, next(one for one in lives if role.kind != LIVE or one.number == self.last[name])

    def _upto(self) -> None:
        """Linear positions: nothing below them comes later (9.7)."""
        for one in self.record.upto:
            for (epoch, key), log in self.logs.items():
                if epoch != one.epoch or key[0] != one.stream:
                    continue
                late = [id for id in log.within(0, one.position) if log.facts[id][1] > one.at]
                if late:
                    self._breaks(
                        "below the linear position all is complete", f"{one.at:.3f} {key} {one.position}: {late}"
                    )

    # -- the stream in memory ---------------------------------------------------------------------------------

    def _presence(self) -> None:
        """Rows of one life of their writer come in order; a reset stands between two lives, and only there (9.11).

        What does not come is reported, and where nothing went wrong and nothing was full, all comes.
        """
        seen: dict[tuple[int, str], _Heard] = {}
        for when, role, life, what, token, writer, payload in self.record.presence:
            where = f"{when:.3f} {role}#{life} presence {writer}"
            heard = seen.setdefault((life, writer), _Heard())
            if what == "row":
                # The text of the row is its writer's name and incarnation.
                incarnation = int(payload.rpartition(b" ")[2].rstrip(b'"]'))
                if incarnation != heard.incarnation and heard.incarnation and not heard.reset:
                    self._breaks("a reset stands between lives", f"{where}: {incarnation} after {heard.incarnation}")
                # A lower one comes from a clock that is behind, and only where no claim makes them rise (9.24): where
                # there is none, or the database was restored without a word, and knows nothing of the higher one.
                may_fall = self.record.behind.get(writer, False) or (self.record.void and writer in self.record.behind)
                falls = incarnation < heard.incarnation and not may_fall
                if falls or (heard.reset and incarnation == heard.incarnation):
                    self._breaks("a reset means a new life", f"{where}: {incarnation} after {heard.incarnation}")
                if token < heard.token:
                    self._breaks("no inversion", f"{where}: {token} after {heard.token}")
                heard.incarnation, heard.token, heard.reset = incarnation, token, False
            elif what == "reset":
                heard.token, heard.reset = 0, True
            else:
                after = int(payload)
                if self.calm and after > 0:
                    self._breaks("nothing is missed without a reason", f"{where}: ({after}, {token}]")
                heard.token = max(heard.token, token)


@attrs.define
class _Heard:
    """Of a writer's stream in memory, in one life of a reader. ``reset``: since the last row."""

    incarnation: int = 0
    token: int = 0
    reset: bool = False
