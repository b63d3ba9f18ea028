"""docs/tutorial.md: its steps, followed from top to bottom, print what stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.docs.markdown import Servers, files, shell_lines
from tests.docs.test_readme import wait_until_saved

PAGE = ROOT / "docs" / "tutorial.md"
TEXT = PAGE.read_text()


@pytest.mark.servers
def test_its_steps(redis_url: str, bus_name: str, tmp_path: Path) -> None:
    for name, code in files(PAGE).items():
        (tmp_path / name).write_text(Servers(redis_url, bus_name).replaced(code))
    options: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True}
    printed = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    shown: list[str] = []
    tokens = iter((1, 3))
    for command in shell_lines(PAGE):
        words = shlex.split(command)[1:]
        if words == ["reader.py"]:
            shown.append(read(words, next(tokens), options))
        elif command.startswith(("busrep db init", "python writer.py")):
            module = ["-m", "busrep.cli"] if command.startswith("busrep") else []
            done = subprocess.run([sys.executable, *module, *words], capture_output=True, timeout=60, **options)
            assert done.returncode == 0, done.stderr
            if not module:
                shown.append(done.stdout)
    written, first, *others, second = shown
    assert [written, first, second] == printed
    assert others == ["committed as 2\n", "committed as 3\n"]


def read(words: list[str], token: int, options: dict[str, Any]) -> str:
    """What the reader prints, up to a token."""
    lines = ""
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options
    ) as reader:
        try:
            assert reader.stdout is not None
            while not re.search(rf"^web-1 {token} ", lines, re.MULTILINE):
                line = reader.stdout.readline()
                assert line
                lines += line
            wait_until_saved(options["cwd"], token)
        finally:
            reader.kill()
    return lines


def test_its_words_are_those_of_the_list() -> None:
    words = (ROOT / "docs" / "words.md").read_text()
    for term in re.findall(r"^\| (\w+) \|", TEXT.partition("## The words so far")[2], re.MULTILINE):
        assert term == "word" or re.search(rf"^\| {term}\b", words, re.MULTILINE), term
