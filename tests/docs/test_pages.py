"""README.md and every page of docs/: their Python runs, and the commands, settings and names in them exist."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import io
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import attrs
import click
import pytest

import busrep
from busrep.cli.app import cli
from busrep.options import BusOptions
from busrep.settings import Settings
from tests import ROOT
from tests.docs.markdown import (
    PAGES,
    README,
    Block,
    Servers,
    all_blocks,
    blocks,
    execute,
    files,
    name_of,
    setting,
    shell_lines,
)

# Blocks that nothing runs. Fewer is better; to add one takes a reason in its mark, and a number here.
FRAGMENTS = 1
# Written by a program, or by hand after runs of it: neither has code.
REPORTS = {"docs/mutation.md", "docs/proof.md"}


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's working directory, with the `shop.py` of the README."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shop.py").write_text(files(README)["shop.py"])
    yield tmp_path
    sys.modules.pop("shop", None)


@pytest.mark.servers
@pytest.mark.parametrize("block", all_blocks("run"), ids=lambda block: block.argument)
def test_python_blocks_run_and_do_what_they_say(
    block: Block, shop: Path, redis_url: str, bus_name: str, request: pytest.FixtureRequest
) -> None:
    database = request.getfixturevalue("postgres_url") if hasattr(setting(block), "postgres") else ""
    asyncio.run(execute(block, Servers(redis_url, bus_name, database)))


@pytest.mark.parametrize("block", all_blocks("run"), ids=lambda block: block.argument)
def test_a_block_is_checked_and_not_only_run(block: Block) -> None:
    """Behind the ``yield`` of its setting something is asserted; a block may say that running it is all."""
    code = textwrap.dedent(inspect.getsource(setting(block)))
    _, found, check = code.partition("    yield")
    assert found
    assert "assert " in check or check.strip().startswith("#"), block.argument


@pytest.mark.servers
@pytest.mark.timeout(60)
@pytest.mark.parametrize("block", all_blocks("program"), ids=lambda block: block.id)
def test_a_program_prints_what_stands_below_it(
    block: Block, redis_url: str, bus_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = block.code.replace("redis://localhost:6379", redis_url).replace('"shop"', f'"{bus_name}"')
    assert redis_url in code
    assert bus_name in code
    assert block.prints is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, block.id, "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == block.prints


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_python_is_marked(page: Path) -> None:
    found = list(blocks(page))
    assert len(found) == len(re.findall(r"^ *(?:```|~~~) *(?:\{\.)?py", page.read_text(), re.MULTILINE))


def test_what_is_not_run_is_little_and_compiles() -> None:
    fragments = all_blocks("fragment")
    assert len(fragments) <= FRAGMENTS, [block.id for block in fragments]
    for block in fragments:
        assert len(block.argument.split()) > 3, "a reason"
        compile(block.code, block.id, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_a_module_that_is_said_to_test_a_page_reads_it() -> None:
    for block in all_blocks("tested"):
        module = ROOT / block.argument.partition(" ")[0]
        assert block.page.name in module.read_text(), f"{block.id}: {module}"


def test_files_are_run_by_a_test_of_their_page() -> None:
    """`tests/docs` runs those of the pages that it names, tests/http those of http.md."""
    readers = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    for page in {block.page for block in all_blocks("file")} - {README}:
        assert any(f'"{page.name}"' in text for text in readers), name_of(page)


def test_no_setting_is_left_over() -> None:
    used = {block.argument for block in all_blocks("run")}
    for path in (ROOT / "tests/docs/blocks").glob("[a-z]*.py"):
        module = importlib.import_module(f"tests.docs.blocks.{path.stem}")
        for name, function in vars(module).items():
            if inspect.isasyncgenfunction(function) and function.__module__ == module.__name__:
                assert f"{path.stem}.{name}" in used


# -- commands -------------------------------------------------------------------------------------------------


def busrep_commands(page: Path) -> list[str]:
    """What follows `busrep` in a page's blocks of shell."""
    commands = []
    for line in shell_lines(page):
        for part in re.split(r"\s(?:&&|\|)\s", line):
            words = shlex.split(part, comments=True)
            if words and Path(words[0]).name == "busrep":
                commands.append(shlex.join(words[1:]))
    return commands


COMMANDS = sorted({command for page in PAGES for command in busrep_commands(page)})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_options_exist(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSREP_STORE", "sqlite:///shop.db")  # as a page may have set it before
    words: list[str] = shlex.split(command)
    found: click.Command = cli
    context = click.Context(cli, info_name="busrep")
    while isinstance(found, click.Group):
        name, inner, words = found.resolve_command(context, words)
        assert inner is not None
        found = inner
        context = click.Context(found, parent=context, info_name=name)
    found.make_context(context.info_name, words)  # raises UsageError for an option that is not there


def test_every_command_is_shown() -> None:
    assert {words.split()[0] for words in COMMANDS} == set(cli.commands)


def test_environment_variables_are_read() -> None:
    known = "".join(path.read_text() for path in (ROOT / "busrep").rglob("*.py"))
    for page in PAGES:
        for name in set(re.findall(r"`(BUSREP_\w+)`", page.read_text())):
            assert f'"{name}"' in known, name_of(page)


# -- names and numbers ----------------------------------------------------------------------------------------

PROSE = [page for page in PAGES if name_of(page) not in REPORTS]


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_names_of_the_api_exist(page: Path) -> None:
    """`bus.settle()` and `busrep.Table` in running text and in code."""
    text = page.read_text()
    for name in set(re.findall(r"`bus\.(\w+)", text)):
        assert hasattr(busrep.Bus, name) or hasattr(busrep.sync.Bus, name), name
    for name in set(re.findall(r"\bbusrep\.([A-Z]\w+)", text)):
        assert name in busrep.__all__, name


def test_options_of_connect_that_the_texts_explain_exist() -> None:
    text = "".join(page.read_text() for page in PROSE)
    for name in ("start", "reader_store", "on_epoch_change", "on_poison", "on_too_old", "on_failure", "undeclared"):
        assert name in {field.name for field in attrs.fields(BusOptions)}
        assert re.search(rf"`{name}|\({name}=", text), name


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:busrep|tests|docs|benchmarks)/[\w./-]+|compose\.yaml|LICENSE)`", page.read_text())
    for path in set(named):
        assert "NAME" in path or (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), path


def defaults(page: Path) -> list[tuple[str, str]]:
    """(setting, default) of tables whose head says that they are of settings."""
    found = []
    for table in re.findall(r"^\| setting \| default \|.*\n\|[-| ]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
        found += re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", table, re.MULTILINE)
    return found


@pytest.mark.parametrize(
    ("name", "default"), sorted({row for page in PAGES for row in defaults(page)}), ids=lambda value: value
)
def test_settings_have_the_defaults_named(name: str, default: str) -> None:
    value = getattr(Settings(), name)
    if default in ("False", "True", "none"):
        assert str(value) == default.replace("none", "None")
        return
    if name == "cache_bound":
        assert (default, value) == ("1.25 heartbeats, 2.5 s", None)
        return
    units = {"": 1, "s": 1, "KiB": 2**10, "MiB": 2**20}
    number, _, unit = default.replace(",", "").partition(" ")
    assert value == float(number) * units[unit]


def test_the_important_settings_are_in_a_table() -> None:
    assert sum(len(defaults(page)) > 10 for page in PAGES) == 1


# -- form -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_lines_are_not_too_long(page: Path) -> None:
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        inside = inside != line.startswith("```")
        assert inside or len(line) <= 120 or line.startswith(("|", "    ", "<!-- ")), number
