"""Whether a test exists, read from the source: nothing is imported, nothing collected."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse((TESTS / file).read_text())


@cache
def words(file: str) -> frozenset[str]:
    """What cases of a file may be named after: its functions and its strings."""
    found = set()
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return frozenset(found)


def _origin(file: str, name: str) -> str | None:
    """The file of tests/ that ``file`` imports a name from."""
    for node in _parsed(file).body:
        if isinstance(node, ast.ImportFrom) and node.module and any(one.name == name for one in node.names):
            folder = Path(file).parent if node.level else Path()
            path = folder / f"{node.module.removeprefix('tests.').replace('.', '/')}.py"
            return path.as_posix() if (TESTS / path).exists() else None
    return None


def _is_written(file: str, names: list[str]) -> bool:
    """Whether ``names``, a function, or a class and a method of its own or of a base, is in a file."""
    found = [one for one in _parsed(file).body if getattr(one, "name", None) == names[0]]
    if not found:
        return (other := _origin(file, names[0])) is not None and _is_written(other, names)
    if len(names) == 1:
        return True
    classes = [one for one in found if isinstance(one, ast.ClassDef)]
    bases = [base.id for one in classes for base in one.bases if isinstance(base, ast.Name)]
    own = any(getattr(each, "name", None) == names[1] for one in classes for each in one.body)
    return own or any(_is_written(file, [base, names[1]]) for base in bases)


def exists(name: str) -> bool:
    """Whether ``file[::[class::]function[[case]]]`` is there. Of a case the run of the mutants makes sure."""
    file, _, names = name.partition("[")[0].partition("::")
    return (TESTS / file).exists() and (not names or _is_written(file, names.split("::")))
