"""Reading the SQL that busrep's plans are made of: text to a tree of tuples. Far from all of SQL; the rest is an error.

An expression is a tuple that begins with its kind: ("param", 0), ("const", 5), ("column", alias or None, name),
("call", name, args), ("op", sign, left, right), ("and", left, right), ("or", left, right), ("in", left, select),
("scalar", select), ("cast", type, value), ("json", value, index), ("case", ((condition, then), ...), otherwise).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import attrs

Expression = tuple[Any, ...]

TOKEN = re.compile(
    r"""\s*(?:(?P<name>"[^"]*"|[A-Za-z_][A-Za-z_0-9]*)|(?P<number>\d+)|(?P<text>'(?:[^']|'')*')
    |(?P<sign>->>|::|<=|>=|<>|\[\]|[-+*<>=(),.?]))""",
    re.VERBOSE,
)
AGGREGATES = ("max", "min", "count")
# Names that are no alias of the table before them.
KEYWORDS = {
    "AS", "CONFLICT", "DO", "FETCH", "FOR", "FROM", "GROUP", "HAVING", "JOIN", "LEFT", "LIMIT", "OFFSET", "ON",
    "ORDER", "RETURNING", "SELECT", "SET", "UPDATE", "VALUES", "WHERE",
}  # fmt: skip


class Unknown(Exception):
    """The text is beyond this reader."""


@attrs.frozen
class Source:
    """One item of FROM: a table, a function of arguments, or a query, under a name. ``outer``: LEFT JOIN."""

    alias: str
    table: str | None = None
    call: tuple[str, tuple[Expression, ...]] | None = None
    query: Select | None = None
    columns: tuple[str, ...] | None = None
    on: Expression | None = None
    outer: bool = False


@attrs.define
class Select:
    """A SELECT."""

    items: list[tuple[Expression, str]]
    sources: list[Source] = attrs.field(factory=list)
    where: Expression | None = None
    group: list[Expression] = attrs.field(factory=list)
    having: Expression | None = None
    order: list[tuple[Expression, bool]] = attrs.field(factory=list)
    limit: Expression | None = None
    offset: Expression | None = None
    ties: bool = False
    lock: str | None = None


@attrs.define
class Insert:
    """An INSERT. ``update``: the SET of ON CONFLICT; ``nothing``: ON CONFLICT DO NOTHING."""

    table: str
    columns: list[str]
    values: list[Expression] | None = None
    query: Select | None = None
    conflict: list[str] | None = None
    update: list[tuple[str, Expression]] | None = None
    returning: list[tuple[Expression, str]] = attrs.field(factory=list)


@attrs.define
class Update:
    """An UPDATE of one table. ``other``: what it is joined with."""

    table: str
    alias: str
    changes: list[tuple[str, Expression]]
    other: Source | None
    where: Expression | None
    returning: list[tuple[Expression, str]]


@attrs.define
class Delete:
    """A DELETE."""

    table: str
    where: Expression | None


def parse(text: str) -> Select | Insert | Update | Delete:
    """The tree of a statement. Raises Unknown."""
    return _Parser(text).statement()


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            found = TOKEN.match(text, at)
            if found is None:
                raise Unknown(text[at : at + 20])
            self.tokens.append(found.group().strip())
            at = found.end()
        self.at = self.params = 0

    # -- tokens

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def accept(self, *words: str) -> bool:
        """Whether these come next; then they are passed."""
        if tuple(token.upper() for token in self.tokens[self.at : self.at + len(words)]) == words:
            self.at += len(words)
            return True
        return False

    def expect(self, *words: str) -> None:
        if not self.accept(*words):
            raise Unknown(f"{' '.join(words)} instead of {self.peek()!r}")

    def name(self) -> str:
        token = self.next()
        if not re.match(r'["A-Za-z_]', token):
            raise Unknown(f"a name instead of {token!r}")
        return token.strip('"')

    def names(self) -> list[str]:
        self.expect("(")
        found = [self.name()]
        while self.accept(","):
            found.append(self.name())
        self.expect(")")
        return found

    # -- statements

    def statement(self) -> Select | Insert | Update | Delete:
        found: Select | Insert | Update | Delete
        if self.accept("INSERT", "INTO"):
            found = self.insert()
        elif self.accept("UPDATE"):
            table = self.name()
            alias = self.alias() or table
            self.expect("SET")
            changes = self.changes()
            other = self.source() if self.accept("FROM") else None
            found = Update(table, alias, changes, other, self.condition(), self.returning())
        elif self.accept("DELETE", "FROM"):
            found = Delete(self.name(), self.condition())
        else:
            found = self.select()
        if self.peek():
            raise Unknown(f"the end instead of {self.peek()!r}")
        return found

    def insert(self) -> Insert:
        made = Insert(self.name(), self.names())
        if self.accept("VALUES"):
            self.expect("(")
            made.values = self.expressions()
            self.expect(")")
        else:
            made.query = self.select()
        if self.accept("ON", "CONFLICT"):
            made.conflict = self.names()
            self.expect("DO")
            if not self.accept("NOTHING"):
                self.expect("UPDATE", "SET")
                made.update = self.changes()
        made.returning = self.returning()
        return made

    def changes(self) -> list[tuple[str, Expression]]:
        found = []
        while True:
            column = self.name()
            self.expect("=")
            found.append((column, self.expression()))
            if not self.accept(","):
                return found

    def condition(self) -> Expression | None:
        return self.expression() if self.accept("WHERE") else None

    def returning(self) -> list[tuple[Expression, str]]:
        return self.items() if self.accept("RETURNING") else []

    def select(self) -> Select:
        self.expect("SELECT")
        made = Select(self.items())
        if self.accept("FROM"):
            made.sources.append(self.source())
            while True:
                outer = self.accept("LEFT", "JOIN")
                if not outer and not self.accept("JOIN"):
                    break
                joined = self.source()
                self.expect("ON")
                made.sources.append(attrs.evolve(joined, on=self.expression(), outer=outer))
        made.where = self.condition()
        if self.accept("GROUP", "BY"):
            made.group = self.expressions()
        if self.accept("HAVING"):
            made.having = self.expression()
        if self.accept("ORDER", "BY"):
            while True:
                key = self.expression()
                made.order.append((key, self.accept("DESC")))
                if not self.accept(","):
                    break
        while self.peek().upper() in ("LIMIT", "OFFSET", "FETCH", "FOR"):
            self.tail(made)
        return made

    def tail(self, made: Select) -> None:
        if self.accept("LIMIT"):
            made.limit = self.expression()
        elif self.accept("OFFSET"):
            made.offset = self.expression()
        elif self.accept("FETCH", "FIRST"):
            made.limit = self.expression()
            made.ties = not self.accept("ROWS", "ONLY")
            if made.ties:
                self.expect("ROWS", "WITH", "TIES")
        else:
            self.expect("FOR")
            made.lock = self.next().upper()
            if made.lock not in ("SHARE", "UPDATE"):
                raise Unknown(f"FOR {made.lock}")

    def items(self) -> list[tuple[Expression, str]]:
        found = []
        while True:
            value = self.expression()
            name = value[2] if value[0] == "column" else value[1] if value[0] == "call" else "?column?"
            if self.accept("AS"):
                name = self.name()
            found.append((value, name))
            if not self.accept(","):
                return found

    def source(self) -> Source:
        if self.accept("("):
            query = self.select()
            self.expect(")")
            return Source(self.alias() or "", query=query)
        name = self.name()
        if self.accept("("):
            args = tuple(self.expressions())
            self.expect(")")
            alias = self.alias() or name
            columns = tuple(self.names()) if self.peek() == "(" else ("value",)
            return Source(alias, call=(name, args), columns=columns)
        return Source(self.alias() or name, table=name)

    def alias(self) -> str | None:
        if self.accept("AS") or (self.peek() and self.peek()[0].isalpha() and self.peek().upper() not in KEYWORDS):
            return self.name()
        return None

    # -- expressions

    def expressions(self) -> list[Expression]:
        found = [self.expression()]
        while self.accept(","):
            found.append(self.expression())
        return found

    def expression(self) -> Expression:
        left = self.conjunction()
        while self.accept("OR"):
            left = ("or", left, self.conjunction())
        return left

    def conjunction(self) -> Expression:
        left = self.comparison()
        while self.accept("AND"):
            left = ("and", left, self.comparison())
        return left

    def comparison(self) -> Expression:
        left = self.sum()
        for sign in ("=", "<>", "<=", ">=", "<", ">"):
            if self.accept(sign):
                return ("op", sign, left, self.sum())
        if self.accept("IN"):
            self.expect("(")
            query = self.select()
            self.expect(")")
            return ("in", left, query)
        return left

    def sum(self) -> Expression:
        left = self.product()
        while self.peek() in ("+", "-"):
            left = ("op", self.next(), left, self.product())
        return left

    def product(self) -> Expression:
        left = self.cast()
        while self.peek() == "*":
            left = ("op", self.next(), left, self.cast())
        return left

    def cast(self) -> Expression:
        value = self.primary()
        while self.peek() in ("::", "->>"):
            if self.next() == "->>":
                value = ("json", value, int(self.next()))
            else:
                kind = self.name() + ("[]" if self.accept("[]") else "")
                value = ("cast", kind, value)
        return value

    def primary(self) -> Expression:
        piece = self.next()
        if piece == "?":
            self.params += 1
            return ("param", self.params - 1)
        if piece.isdigit():
            return ("const", int(piece))
        if piece.startswith("'"):
            return ("const", piece[1:-1].replace("''", "'"))
        if piece == "-":
            return ("op", "-", ("const", 0), self.primary())
        if piece == "*":
            return ("star",)
        if piece == "(":
            if self.peek().upper() == "SELECT":
                inner: Expression = ("scalar", self.select())
            else:
                inner = self.expression()
            self.expect(")")
            return inner
        return self.word(piece)

    def word(self, token: str) -> Expression:
        word = token.upper()
        if word in ("TRUE", "FALSE", "NULL"):
            return ("const", {"TRUE": True, "FALSE": False, "NULL": None}[word])
        if word == "INTERVAL":
            count, unit = self.next().strip("'").split()
            if unit != "second":
                raise Unknown(f"interval of {unit}")
            return ("const", float(count))
        if word == "CAST":
            self.expect("(")
            value = self.expression()
            self.expect("AS")
            kind = self.name()
            self.expect(")")
            return ("cast", kind, value)
        if word == "CASE":
            return self.case()
        if word in KEYWORDS or not re.match(r'["A-Za-z_]', token):
            raise Unknown(f"an expression instead of {token!r}")
        if self.accept("("):
            return self.call(token)
        if self.accept("."):
            return ("column", token.strip('"'), self.name())
        return ("column", None, token.strip('"'))

    def case(self) -> Expression:
        branches = []
        while self.accept("WHEN"):
            condition = self.expression()
            self.expect("THEN")
            branches.append((condition, self.expression()))
        otherwise = self.expression() if self.accept("ELSE") else ("const", None)
        self.expect("END")
        return ("case", tuple(branches), otherwise)

    def call(self, name: str) -> Expression:
        if name == "extract":
            self.expect("EPOCH", "FROM")
        args = [] if self.peek() == ")" else self.expressions()
        self.expect(")")
        return ("call", name, tuple(args))


def parts(expression: tuple[Any, ...]) -> Iterator[Expression]:
    """The expressions an expression is made of; not those of a query in it."""
    for part in expression:
        if isinstance(part, tuple):
            if part and isinstance(part[0], str):
                yield part
            else:
                yield from parts(part)


def aggregated(expression: Expression) -> bool:
    """Whether it holds an aggregate, at its own level."""
    if expression[0] == "call" and expression[1] in AGGREGATES:
        return True
    return any(map(aggregated, parts(expression[1:])))


def conjuncts(expression: Expression | None) -> list[Expression]:
    """The conditions that all have to hold."""
    if expression is None:
        return []
    if expression[0] == "and":
        return [*conjuncts(expression[1]), *conjuncts(expression[2])]
    return [expression]
