"""The code in README.md and docs/: how a block of Python is marked, and what runs it.

A line above each block says what becomes of it. It is an HTML comment, which the rendered page does not show::

    <!-- file: NAME -->           the block is a file; what is written with it runs as a process
    <!-- run: MODULE.NAME -->     NAME in tests/docs/blocks/MODULE.py makes what the block needs, and checks what it did
    <!-- program -->              the block runs as it is, and prints the block of text below it
    <!-- tested: PATH KEY -->     the test module PATH runs it; KEY, which may be missing, is what that module calls it
    <!-- fragment: REASON -->     the block cannot run by itself: it is compiled only

A block of the kind ``run`` may await at its top level. The addresses in it are replaced by those of the test's servers.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

import busrep
from tests import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]

REDIS = "redis://localhost:6379"
POSTGRES = ("postgresql:///shop", "postgresql://localhost/shop")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (file|run|tested|fragment): ([^\n]+) -->|<!-- (program) -->")
PRINTS = re.compile(r"\n+```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@attrs.frozen
class Block:
    """A block of Python, what its mark says, and the text that stands right below it."""

    page: Path
    line: int
    code: str
    kind: str
    argument: str
    prints: str | None

    @property
    def id(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """Raises AssertionError for a block without a mark."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        if found[1] not in ("python", "py", "python3"):
            continue
        line = text.count("\n", 0, found.start()) + 1
        above = text[: found.start()].rstrip("\n").rpartition("\n")[2]
        mark = MARK.fullmatch(above)
        assert mark is not None, f"{name_of(page)}, line {line}: a block of Python without a mark"
        below = PRINTS.match(text, found.end())
        yield Block(page, line, found[2], mark[1] or mark[3], mark[2] or "", below[1] if below else None)


def all_blocks(kind: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.kind == kind]


def files(*pages: Path) -> dict[str, str]:
    """The files that stand on these pages, by name."""
    return {block.argument: block.code for page in pages for block in blocks(page) if block.kind == "file"}


def blocks_for(page: Path, module: str) -> list[tuple[str, Block]]:
    """(key, block) of what a test module runs of a page."""
    found = []
    for block in blocks(page):
        path, _, key = block.argument.partition(" ")
        if block.kind == "tested" and path == f"tests/{module}":
            found.append((key, block))
    return found


def shell_lines(page: Path) -> list[str]:
    """The commands in the page's blocks of shell, a command a line; blocks in lists are indented."""
    lines = []
    for code in re.findall(r"^ *```sh\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL):
        lines += [line.strip() for line in code.replace("\\\n", " ").splitlines() if line.strip()]
    return lines


def section(page: Path, heading: str) -> str:
    """What stands under a heading, up to the next one of its rank."""
    rank = heading.partition(" ")[0]
    _, found, rest = page.read_text().partition(f"\n{heading}\n")
    assert found, f"{name_of(page)} has no {heading!r}"
    return re.split(rf"\n#{{1,{len(rank)}}} ", rest)[0]


@attrs.frozen
class Servers:
    """Where the test's servers are, and the name of its bus. ``postgres`` is an empty database, or not needed."""

    redis: str
    name: str
    postgres: str = ""

    def replaced(self, code: str) -> str:
        """The code with these addresses in place of those that its reader sees."""
        code = code.replace(REDIS, self.redis)
        code = code.replace('name="shop"', f'name="{self.name}"').replace('"name": "shop"', f'"name": "{self.name}"')
        for url in POSTGRES:
            code = code.replace(url, self.postgres)
        return code.replace("port=8823", "port=0")


class Scope(SimpleNamespace):
    """The globals of a block, as attributes. ``stack`` is closed at the end of the test."""

    def __init__(self, servers: Servers, stack: contextlib.AsyncExitStack) -> None:
        super().__init__(__name__="docs", servers=servers, stack=stack)

    async def open(self, **options: Any) -> busrep.Bus:
        """A bus of the test's own, open until its end."""
        bus = busrep.connect(self.servers.redis, name=self.servers.name, **options)
        return await self.stack.enter_async_context(bus)


Setting = Callable[[Scope], AsyncGenerator[None, None]]


def setting(block: Block) -> Setting:
    """What prepares and checks a block of the kind ``run``."""
    module, _, name = block.argument.rpartition(".")
    found: Setting = getattr(importlib.import_module(f"tests.docs.blocks.{module}"), name)
    return found


def on_postgres(function: Setting) -> Setting:
    """Mark a setting that needs a PostgreSQL."""
    function.postgres = True  # type: ignore[attr-defined]
    return function


async def execute(block: Block, servers: Servers) -> None:
    """Run a block between the two halves of its setting."""
    function = setting(block)
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        scope = Scope(servers, stack)
        halves = function(scope)
        await anext(halves)
        code = compile(
            servers.replaced(block.code), block.id, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
        )
        waiting = eval(code, vars(scope))
        if inspect.iscoroutine(waiting):
            await waiting
        with contextlib.suppress(StopAsyncIteration):
            await anext(halves)
            raise AssertionError(f"{block.argument} yields more than once")
