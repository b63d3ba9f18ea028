"""The README does what it says: its Python runs, its commands and options exist, its settings have those defaults.

How a block is marked, in HTML comments that a reader of the rendered page does not see::

    <!-- file: NAME -->          the block is a file; programs among them run as processes
    <!-- run: PREAMBLE          the block runs after the code of <!-- preamble: PREAMBLE ... -->, and after
    more code -->               what stands here
    <!-- check
    code -->                     runs after the block before it, and asserts what it did

Code may await at its top level. The README's addresses are replaced by those of the test's servers.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
import redis

import busrep
from busrep.cli.app import cli
from busrep.options import BusOptions
from busrep.settings import Settings
from busrep.stores import open_store
from busrep.streams import Registry
from tests import ROOT

README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

DEMO = "python3 -m venv .venv && .venv/bin/pip install -e '.[demo]' && .venv/bin/busrep demo"
TESTS = "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest -n 4 --dist loadfile"

REDIS, SQLITE, POSTGRES = "redis://localhost:6379", "sqlite:///shop.db", "postgresql:///shop"


@attrs.frozen
class Block:
    """A Python block of the README, and what the comments round it say."""

    line: int
    code: str
    file: str | None = None
    preamble: str | None = None
    before: str = ""
    check: str = ""


def blocks() -> Iterator[Block]:
    for found in FENCE.finditer(README):
        if found[1] != "python":
            continue
        line = README.count("\n", 0, found.start()) + 1
        mark = re.search(r"<!-- (file|run): (\S+)\n?(.*?)\s?-->\n\Z", README[: found.start()], re.DOTALL)
        last = README.rfind("<!--", 0, found.start())
        assert mark is not None, f"README line {line}: a Python block without a mark"
        assert "-->\n```" in README[last : found.start() + 3], f"README line {line}: a Python block without a mark"
        kind, name, before = re.match(r"<!-- (file|run): (\S+)\n?(.*?)\s?-->", README[last:], re.DOTALL).groups()  # type: ignore[union-attr]
        check = re.match(r"\n<!-- check\n(.*?)-->", README[found.end() :], re.DOTALL)
        if kind == "file":
            yield Block(line, found[2], file=name)
        else:
            yield Block(line, found[2], preamble=name, before=before, check=check[1] if check else "")


BLOCKS = list(blocks())
FILES = {block.file: block.code for block in BLOCKS if block.file is not None}
FRAGMENTS = [block for block in BLOCKS if block.preamble is not None]
PREAMBLES = dict(re.findall(r"<!-- preamble: (\S+)\n(.*?)-->", README, re.DOTALL))
SHELL = [line for found in FENCE.finditer(README) if found[1] == "sh" for line in found[2].splitlines() if line.strip()]


def replaced(code: str, urls: dict[str, str]) -> str:
    for ours, theirs in urls.items():
        code = code.replace(ours, theirs)
    return code


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of the README's reader, with its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    yield tmp_path
    sys.modules.pop("shop", None)


async def execute(parts: list[str], namespace: dict[str, Any]) -> None:
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        namespace |= {"stack": stack, "contextlib": contextlib, "asyncio": asyncio}
        for code in parts:
            compiled = compile(code, "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            waiting = eval(compiled, namespace)
            if inspect.iscoroutine(waiting):
                await waiting


@pytest.mark.servers
@pytest.mark.parametrize("block", FRAGMENTS, ids=lambda block: f"line_{block.line}_{block.preamble}")
def test_python_blocks_run_and_do_what_they_say(
    block: Block, shop: Path, redis_url: str, bus_name: str, request: pytest.FixtureRequest
) -> None:
    assert block.preamble is not None
    assert block.check, "a block must be checked, not only run"
    code = [PREAMBLES[block.preamble], block.before, block.code, block.check]
    urls = {REDIS: redis_url, 'name="shop"': f'name="{bus_name}"', '"name": "shop"': f'"name": "{bus_name}"'}
    urls["port=8823"] = "port=0"
    if any(POSTGRES in part for part in code):
        urls[POSTGRES] = request.getfixturevalue("postgres_url")
    (shop / "shop.py").write_text(FILES["shop.py"])
    asyncio.run(execute([replaced(part, urls) for part in code], {"__name__": "readme"}))


@pytest.mark.servers
def test_the_writer_and_the_reader_run_as_processes(shop: Path, redis_url: str, bus_name: str) -> None:
    urls = {REDIS: redis_url, 'name="shop"': f'name="{bus_name}"'}
    for name, code in FILES.items():
        (shop / name).write_text(replaced(code, urls))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*command: str) -> None:
        done = subprocess.run(
            [sys.executable, *command], cwd=shop, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr

    (init,) = [line for line in SHELL if line.startswith("busrep db init") and SQLITE in line]
    run("-m", "busrep.cli", *shlex.split(init)[1:])
    said = re.search(r"The reader prints `(.*?)`", README)
    assert said is not None
    token = 0
    for _ in range(2):  # stopped and started again, it goes on where it was
        with subprocess.Popen(
            [sys.executable, "reader.py"],
            cwd=shop, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        ) as reader:  # fmt: skip
            try:
                run("writer.py")
                token += 1
                assert reader.stdout is not None
                line = reader.stdout.readline().strip()
                assert line == said[1].replace("web-1 1", f"web-1 {token}")
                wait_until_saved(shop, token)
            finally:
                reader.kill()


def wait_until_saved(shop: Path, token: int) -> None:
    """Until the durable reader has saved that it handled ``token``: a killed one handles the rest again."""

    async def work() -> None:
        store = open_store(f"sqlite:///{shop / 'shop.db'}", Registry([busrep.Stream("orders")]))
        await store.open()
        try:
            async with asyncio.timeout(20):
                while (await store.load_reader("billing")).positions.get(("orders", "web-1"), 0) < token:
                    await asyncio.sleep(0.05)  # another process saves: there is nothing here to be awaited
        finally:
            await store.close()

    asyncio.run(work())


@pytest.mark.servers
def test_the_rights_named_are_enough(shop: Path, redis_url: str, bus_name: str) -> None:
    rights = re.search(r"needs\s+`([^`]*)`\s+and\s+the\s+channels\s+`(\S+)`\s+and\s+`(\S+)`", README)
    assert rights is not None
    rules = [*rights[1].split(), *(channel.replace("shop", bus_name) for channel in rights.groups()[1:])]
    stream = busrep.Stream("numbers")

    async def work() -> None:
        # The name of the bus serves as the user's: nobody else has it.
        url = redis_url.replace("redis://", f"redis://{bus_name}:secret@")
        common: dict[str, Any] = {"name": bus_name, "streams": [stream], "store": f"memory://{bus_name}"}
        await open_store(common["store"], Registry([stream])).init()
        async with busrep.connect(url, writer="w", **common) as bus, busrep.connect(url, **common) as reading:
            reading.subscribe(stream)(lambda batch: None)
            reading.on(busrep.UserSync)(lambda command: None)
            (token,) = await bus.publish(stream, [1])
            await reading.wait_for(stream, "w", token)

    with redis.Redis.from_url(redis_url) as admin:
        admin.acl_setuser(bus_name, enabled=True, reset=True, passwords=["+secret"])
        admin.execute_command("ACL", "SETUSER", bus_name, "-@all", *rules)
        try:
            asyncio.run(work())
        finally:
            admin.acl_deluser(bus_name)


@pytest.mark.parametrize("name", ["writer.py", "reader.py"])
def test_the_programs_have_about_ten_lines(name: str) -> None:
    assert len([line for line in FILES[name].splitlines() if line.strip()]) <= 11


def test_the_two_commands_stand_there_and_their_extras_exist() -> None:
    assert SHELL[:2] == [DEMO, TESTS]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"\.\[(\w+)\]", README):
        assert named in extras
    sentence = re.search(r"The rest are extras: (.*?)\.\n", README, re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`\s+\(", sentence[1])) == extras.keys() - {"demo", "test"}


def busrep_commands() -> list[str]:
    commands = []
    for line in SHELL:
        for part in re.split(r"\s(?:&&|\|)\s", line):
            words = shlex.split(part)
            if words and Path(words[0]).name == "busrep":
                commands.append(shlex.join(words[1:]))
    return commands


@pytest.mark.parametrize("command", busrep_commands())
def test_commands_and_options_exist(command: str) -> None:
    words: list[str] = shlex.split(command)
    found: click.Command = cli
    context = click.Context(cli, info_name="busrep")
    while isinstance(found, click.Group):
        name, inner, words = found.resolve_command(context, words)
        assert inner is not None
        found = inner
        context = click.Context(found, parent=context, info_name=name)
    found.make_context(context.info_name, words)  # raises UsageError for an option that is not there


def test_every_command_is_mentioned() -> None:
    mentioned = {words.split()[0] for words in busrep_commands()}
    assert mentioned == set(cli.commands)


def test_environment_variables_of_the_readme_are_read() -> None:
    options = "".join((ROOT / "busrep" / path).read_text() for path in ("cli/options.py", "spark/secrets.py"))
    for name in set(re.findall(r"`(BUSREP_\w+)`", README)):
        assert f'"{name}"' in options


def settings_rows() -> list[tuple[str, str]]:
    section = README.partition("## Settings worth knowing")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, re.MULTILINE)


@pytest.mark.parametrize(("name", "default"), settings_rows())
def test_settings_have_the_defaults_named(name: str, default: str) -> None:
    if default in ("False", "True"):
        assert str(getattr(Settings(), name)) == default
        return
    units = {"": 1, "s": 1, "KiB": 2**10, "MiB": 2**20}
    number, _, unit = default.replace(",", "").partition(" ")
    assert getattr(Settings(), name) == float(number) * units[unit]


def test_settings_are_in_the_table() -> None:
    assert len(settings_rows()) > 10


def test_files_named_in_the_readme_exist() -> None:
    for path in set(re.findall(r"`((?:busrep|tests|docs)/[\w./-]+|compose\.yaml|LICENSE)`", README)):
        assert (ROOT / path).exists(), path


def test_names_of_the_api_in_the_text_exist() -> None:
    """`bus.settle()` and `busrep.Table` in running text."""
    for name in set(re.findall(r"`bus\.(\w+)", README)):
        assert hasattr(busrep.Bus, name), name
    for name in set(re.findall(r"\bbusrep\.([A-Z]\w+)", README)):
        assert name in busrep.__all__, name
    for name in ("start", "reader_store", "on_epoch_change", "on_poison", "undeclared"):
        assert name in {field.name for field in attrs.fields(BusOptions)}
        assert name in README


def test_no_number_is_claimed_before_it_was_measured() -> None:
    assert "<!-- benchmark:" in README or re.search(r"\|.*rows/s.*\|", README)


def test_lines_are_not_too_long() -> None:
    inside = False
    for number, line in enumerate(README.splitlines(), 1):
        inside = inside != line.startswith("```")
        assert inside or len(line) <= 130 or line.startswith("|"), number
