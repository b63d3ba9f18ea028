"""The example service and the code blocks of docs/testing.md pass, run by pytest as their reader would run them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import busrep.testing
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing import fixtures
from busrep.testing.servers import PostgresServer, RedisServer
from tests import ROOT
from tests.docs.markdown import blocks_for

SERVICE = ROOT / "docs/examples/service"
PAGE = ROOT / "docs" / "testing.md"
DOCS = PAGE.read_text()


def run_pytest(folder: Path, **servers: str) -> str:
    """The last line of pytest's output, which it must end well with."""
    environment = {**os.environ, **servers, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-c", os.devnull, "."]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.servers
def test_the_example_service_passes_its_tests(tmp_path: Path, redis_url: str) -> None:
    shutil.copytree(SERVICE, tmp_path / "service", ignore=shutil.ignore_patterns("__pycache__"))
    assert re.match(r"5 passed", run_pytest(tmp_path / "service", BUSREP_TEST_REDIS=redis_url))


@pytest.mark.servers
def test_the_code_in_the_documentation_runs(tmp_path: Path, redis_url: str, postgres_server: PostgresServer) -> None:
    postgres_server.start()
    blocks = [block.code for _, block in blocks_for(PAGE, "docs/test_testing_example.py")]
    (tmp_path / "test_docs.py").write_text("\n\n".join(blocks))
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["busrep.testing.fixtures"]\n')
    tests = sum(len(re.findall(r"^def test_", block, re.MULTILINE)) for block in blocks)
    assert tests > 5
    last = run_pytest(tmp_path, BUSREP_TEST_REDIS=redis_url, BUSREP_TEST_POSTGRES=postgres_server.url)
    assert last.startswith(f"{tests} passed")


@pytest.mark.servers
def test_servers_are_started_where_none_is_named(busrep_redis: str, redis_server: RedisServer) -> None:
    assert busrep_redis == redis_server.url
    assert redis_server.running


def test_a_store_can_be_made_in_a_coroutine(busrep_store: Callable[..., str]) -> None:
    stream = busrep.Stream("numbers")

    async def main() -> None:
        url = busrep_store(stream)
        assert url != busrep_store(stream)
        store = open_store(url, Registry([stream]))
        await store.open()
        assert await store.sequence("numbers") == 0

    asyncio.run(main())


def test_the_documentation_names_all_there_is() -> None:
    for name in busrep.testing.__all__:
        assert re.search(rf"\b{name}\b", DOCS), name
    for name in re.findall(r"^def (\w+)", Path(fixtures.__file__).read_text(), re.MULTILINE):
        assert name.startswith("_") or f"`{name}`" in DOCS, name


def test_public_names_have_a_docstring_and_no_other_is_there() -> None:
    for name in busrep.testing.__all__:
        found = getattr(busrep.testing, name)
        assert (found.__doc__ or "").strip(), name
    assert set(busrep.testing.__all__) <= set(dir(busrep.testing))
    with pytest.raises(AttributeError, match="nothing"):
        _ = busrep.testing.nothing
