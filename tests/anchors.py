"""Find a piece of code by the definition that it stands in, so that a move to another file or class loses no mutant.

Code is compared token by token. Comments, line breaks and indentation do not count, within strings they do.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import attrs

IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class AnchorError(Exception):
    """A definition, or a piece of code in it, is not there, or not once."""


@attrs.frozen
class Definition:
    """A module, a class, a function, or an assignment in a module or class body.

    ``name``: dotted, of the module and what stands in it: "asyncio.bus.Bus.close". ``start``, ``end``: offsets of
    characters in the file ``path``; decorators belong to it.
    """

    name: str
    path: Path
    start: int
    end: int


def definitions(path: Path, module: str) -> Iterator[Definition]:
    """Yield those of one file."""
    text = path.read_text()
    lines = _line_starts(text)
    yield Definition(module, path, 0, len(text))

    def below(node: ast.AST, prefix: str) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            names, first = [], getattr(child, "lineno", 0)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names = [child.name]
                first = min([first, *(decorator.lineno for decorator in child.decorator_list)])
            elif isinstance(child, (ast.Assign, ast.AnnAssign)) and isinstance(node, (ast.Module, ast.ClassDef)):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            for name in names:
                yield Definition(f"{prefix}.{name}", path, lines[first - 1], lines[child.end_lineno])  # type: ignore[attr-defined]
            yield from below(child, f"{prefix}.{names[0]}" if names else prefix)

    yield from below(ast.parse(text), module)


@cache
def index(package: Path) -> dict[str, list[Definition]]:
    """Every definition below a folder, under each end of its name: "close", "Bus.close", "bus.Bus.close" and so on."""
    found: dict[str, list[Definition]] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        once: dict[str, Definition] = {}
        for one in definitions(path, ".".join(parts)):
            # Overloads, the setter of a property: from the first to the last.
            first = once.setdefault(one.name, one)
            once[one.name] = attrs.evolve(first, end=max(first.end, one.end))
        for one in once.values():
            words = one.name.split(".")
            for count in range(1, len(words) + 1):
                found.setdefault(".".join(words[-count:]), []).append(one)
    return found


def find(found: dict[str, list[Definition]], where: str) -> Definition:
    """The definition whose name is ``where``, or ends with it. Raises AnchorError unless there is exactly one."""
    given = found.get(where, [])
    if len(whole := [one for one in given if one.name == where]) == 1:
        return whole[0]
    if len(given) != 1:
        raise AnchorError(f"{len(given)} definitions are called {where}: {', '.join(one.name for one in given)}")
    return given[0]


@attrs.frozen
class _Token:
    """Its text, and where it begins and ends."""

    text: str
    start: int
    end: int


def _line_starts(text: str) -> list[int]:
    """The offset of each line, and the length of all."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _tokens(text: str) -> list[_Token]:
    """Those that count. None if there is none, or ``text`` is no code, but part of a string perhaps."""
    starts = _line_starts(text)
    found: list[_Token] = []
    # Within brackets indentation means nothing: a part of a function may begin and end with any.
    reader = io.StringIO("((((((((\n" + text).readline
    try:
        for token in tokenize.generate_tokens(reader):
            if token.type not in IGNORED and (row := token.start[0] - 2) >= 0:
                begin, end = starts[row] + token.start[1], starts[token.end[0] - 2] + token.end[1]
                found.append(_Token(token.string, begin, end))
    except (tokenize.TokenError, SyntaxError):  # the end, where brackets are open; or before that
        rest = text[found[-1].end if found else 0 :].strip()
        if rest and not rest.startswith("#"):
            return []
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _line(text: str, at: int) -> int:
    """Where the line of an offset begins."""
    return text.rfind("\n", 0, at) + 1


def _shifted(text: str, by: int, *, first: bool) -> str:
    """Each line moved to the right, or left; the first only if ``first``."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.strip() and (number or first):
            lines[number] = " " * max(0, _indent(line) + by) + line.lstrip(" ")
    return "\n".join(lines)


def replacement(text: str, old: str, new: str) -> tuple[int, int, str]:
    """Where ``old`` begins and ends in ``text``, and ``new``, indented as what it replaces.

    Raises AnchorError unless ``old`` is there exactly once.
    """
    within, sought = _tokens(text), _tokens(old)
    words = [one.text for one in sought]
    at = [
        here
        for here in range(len(within) - len(words) + 1)
        if [one.text for one in within[here : here + len(words)]] == words
    ]
    if not words or not at:
        if text.count(old) != 1:  # within a string
            raise AnchorError(f"found {text.count(old)} times: {old!r}")
        return text.index(old), text.index(old) + len(old), new
    if len(at) != 1:
        raise AnchorError(f"found {len(at)} times: {old!r}")
    start, end = within[at[0]].start, within[at[0] + len(words) - 1].end
    begin = _line(text, start)
    leads = not text[begin:start].strip()
    if leads:
        shift = start - begin - _indent(old[_line(old, sought[0].start) :])
        start = begin
    else:
        behind = next((one for one in range(1, len(words)) if "\n" in old[sought[one - 1].end : sought[one].start]), 0)
        here, there = _line(text, within[at[0] + behind].start), _line(old, sought[behind].start)
        shift = _indent(text[here:]) - _indent(old[there:]) if behind else 0
    if old.endswith("\n"):  # whole lines
        end = text.find("\n", end) + 1 or len(text)
    return start, end, _shifted(new, shift, first=leads)
