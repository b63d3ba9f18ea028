"""What `mypy --strict` accepts of a program that uses busrep, and what it does not: tests/data/typing/sample.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "tests" / "data" / "typing" / "sample.py"


def expected() -> dict[int, str]:
    lines = enumerate(SAMPLE.read_text().splitlines(), 1)
    return {number: line.partition("# E: ")[2] for number, line in lines if "  # E: " in line}


@pytest.mark.slow
@pytest.mark.timeout(600)  # without a cache mypy reads all of busrep, and what it imports
def test_mypy_finds_these_errors_and_no_others() -> None:
    """With the settings of the project, which are strict, in one run."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-pretty", "--hide-error-context", "--no-error-summary", str(SAMPLE)],
        cwd=ROOT, env={**os.environ, "MYPYPATH": str(ROOT)},  # before the caller's, which may be of another tree
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.stderr
    found: dict[int, list[str]] = defaultdict(list)
    for line in done.stdout.splitlines():
        error = re.fullmatch(r"(.*?):(\d+): error: (.*)", line)
        if error is not None:
            assert Path(error[1]).name == SAMPLE.name, line
            found[int(error[2])].append(error[3])
        else:
            assert ": note: " in line, line
    wanted = expected()
    assert len(wanted) > 20
    assert found.keys() == wanted.keys(), done.stdout
    for number, text in wanted.items():
        assert any(text in one for one in found[number]), (number, text, found[number])
