"""Measure what keeps the package readable: ``python -m tests.bounds`` prints each figure beside its bound.

test_layers.py refuses a figure that is above what `BOUNDS` holds it to. Lower that when a figure got smaller.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import attrs

from tests import ROOT

PACKAGE = ROOT / "busrep"
FUNCTION_LINES, COMPLEXITY = 40, 15
PROSE = (tokenize.STRING, tokenize.COMMENT)  # where rules are cited


@cache
def trees(folder: Path) -> dict[Path, ast.Module]:
    """Every Python file below a folder, parsed."""
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def lines_of(path: Path) -> int:
    """How many lines a file has."""
    return len(path.read_text().splitlines())


def without_spark() -> dict[Path, ast.Module]:
    """The package without the pipeline."""
    return {path: tree for path, tree in trees(PACKAGE).items() if (PACKAGE / "spark") not in path.parents}


def span(node: ast.stmt | ast.expr) -> int:
    """The lines of a definition, its decorators not counted."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    """Every class, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return span(function) - (span(first) if documented else 0)


def wheel_lines() -> int:
    """Lines in the wheel without Spark."""
    return sum(map(lines_of, without_spark()))


def largest_class() -> int:
    """Lines of the largest class."""
    return max(span(node) for tree in trees(PACKAGE).values() for node in classes(tree))


def largest_file() -> int:
    """Lines of the largest file."""
    return max(map(lines_of, trees(PACKAGE)))


def largest_core_file() -> int:
    """Lines of the largest file in core/."""
    return max(map(lines_of, trees(PACKAGE / "core")))


def long_functions() -> int:
    """Functions of more than 40 lines, docstrings not counted."""
    return sum(code_lines(one) > FUNCTION_LINES for tree in trees(PACKAGE).values() for one in functions(tree))


def complex_functions() -> int:
    """Functions of a cyclomatic complexity above 15, as ruff counts it (C901)."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901", "--output-format", "json"]
    setting = f"lint.mccabe.max-complexity={COMPLEXITY}"
    done = subprocess.run([*command, "--config", setting, str(PACKAGE)], capture_output=True, text=True, check=False)
    return len(json.loads(done.stdout))


def private_uses() -> int:
    """``x._y`` in the package, where ``_y`` is another module's."""
    return sum(len(foreign_private(tree)) for tree in trees(PACKAGE).values())


def private_uses_in_tests() -> int:
    """The same in tests/."""
    foreign = private_names_of_busrep()
    texts = [path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))]
    using = [text for text in texts if not foreign.isdisjoint(re.findall(r"\.\s*(_\w+)", text))]  # few are parsed
    return sum(len(foreign_private(ast.parse(text))) for text in using)


def private_names(tree: ast.Module) -> set[str]:
    """The names with an underscore that a module defines: functions, classes, variables, attributes of ``self``."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own.update(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            own.add(node.attr)
    return {name for name in own if name.startswith("_") and not name.startswith("__")}


@cache
def private_names_of_busrep() -> set[str]:
    """Those of all modules. Python's and PySpark's own, such as ``_replace`` and ``_jvm``, are not among them."""
    return set().union(*map(private_names, trees(PACKAGE).values())) - {"_replace"}


def foreign_private(tree: ast.Module) -> list[str]:
    """The private attributes of busrep's that a module uses on another object than ``self`` and nowhere defines."""
    foreign = private_names_of_busrep()
    used = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in foreign]
    own = private_names(tree) if used else set()
    return [name for name in used if name not in own]


def repeated_classes() -> int:
    """Class names that stand for more than one class, Spark apart."""
    found = Counter(node.name for tree in without_spark().values() for node in classes(tree))
    return sum(count > 1 for count in found.values())


def files_of_a_rule() -> int:
    """The most files that cite one rule of protocol.md, section 9."""
    found: Counter[str] = Counter()
    for path in trees(PACKAGE):
        with path.open("rb") as file:
            told = [one.string for one in tokenize.tokenize(file.readline) if one.type in PROSE]
        found.update(set(re.findall(r"(?<![\d.])9\.\d+(?![\d.]\d)", "\n".join(told))))
    return max(found.values())


def most_parameters() -> int:
    """The most parameters of a public function or method, ``self`` not counted."""
    most = 0
    for tree in trees(PACKAGE).values():
        for one in functions(tree):
            if one.name == "__init__" or not one.name.startswith("_"):
                given = [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]
                most = max(most, sum(each.arg not in ("self", "cls") for each in given))
    return most


def import_seconds() -> float:
    """Processor seconds of ``import busrep`` in a new interpreter, the least of five."""
    code = "import time; a = time.process_time(); import busrep; print(time.process_time() - a)"
    run = [subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) for _ in range(5)]
    return round(min(map(float, run)), 2)


def readme_lines() -> int:
    """Lines of the README."""
    return lines_of(ROOT / "README.md")


@attrs.frozen
class Bound:
    """What a figure is to become (``target``), and what test_layers.py accepts until then (``held``; None: all)."""

    figure: Callable[[], float]
    target: float
    held: float | None


BOUNDS = (
    Bound(wheel_lines, 22_000, 33_554),
    Bound(largest_class, 300, 299),
    Bound(largest_file, 400, 388),
    Bound(largest_core_file, 250, 250),
    Bound(long_functions, 0, 0),
    Bound(complex_functions, 5, 0),
    Bound(private_uses, 0, 0),
    Bound(private_uses_in_tests, 100, 67),
    Bound(repeated_classes, 0, 0),
    Bound(files_of_a_rule, 3, 3),
    Bound(most_parameters, 8, 8),
    Bound(import_seconds, 0.25, None),  # depends on the machine
    Bound(readme_lines, 200, 196),
)


def main() -> None:
    """Print a table in Markdown."""
    print("| figure | is | at most |\n|---|---|---|")
    for one in BOUNDS:
        print(f"| {(one.figure.__doc__ or '').rstrip('.')} | {one.figure():,} | {one.target:,} |")


if __name__ == "__main__":
    main()
