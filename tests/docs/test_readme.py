"""README.md: its two commands, its programs, and the promises that other texts make about it."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import busrep
from busrep.stores import open_store
from busrep.streams import Registry
from tests import ROOT
from tests.docs.markdown import PAGES, README, Servers, files, name_of, shell_lines

DEMO = "python3 -m venv .venv && .venv/bin/pip install -e '.[demo]' && .venv/bin/busrep demo"
TESTS = "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest -n 4 --dist loadfile"

SQLITE = "sqlite:///shop.db"


FILES = files(README)
TEXT = README.read_text()
SHELL = shell_lines(README)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of the README's reader, with its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    yield tmp_path
    sys.modules.pop("shop", None)


@pytest.mark.servers
def test_the_writer_and_the_reader_run_as_processes(shop: Path, redis_url: str, bus_name: str) -> None:
    for name, code in FILES.items():
        (shop / name).write_text(Servers(redis_url, bus_name).replaced(code))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*command: str) -> None:
        done = subprocess.run(
            [sys.executable, *command], cwd=shop, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr

    (init,) = [line for line in SHELL if line.startswith("busrep db init") and SQLITE in line]
    run("-m", "busrep.cli", *shlex.split(init)[1:])
    said = re.search(r"The reader prints `(.*?)`", TEXT)
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


@pytest.mark.parametrize("name", ["writer.py", "reader.py"])
def test_the_programs_have_about_ten_lines(name: str) -> None:
    assert len([line for line in FILES[name].splitlines() if line.strip()]) <= 11


def test_the_two_commands_stand_there() -> None:
    assert SHELL[:3] == ["pip install busrep", DEMO, TESTS]
    assert {DEMO, TESTS} <= set(shell_lines(ROOT / "docs" / "guides" / "install.md"))


def test_extras_are_listed() -> None:
    extras = PROJECT["optional-dependencies"]
    for page in PAGES:
        for named in re.findall(r"(?:busrep|\.)\[([\w,]+)\]", page.read_text()):
            assert set(named.split(",")) <= extras.keys(), name_of(page)
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "guides" / "install.md").read_text(), re.MULTILINE)
    assert set(listed) == extras.keys()


def test_it_is_a_front_door() -> None:
    assert len(TEXT.splitlines()) <= 200


def test_it_has_what_error_messages_and_people_look_for() -> None:
    headings = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    # busrep/stores/server.py names the second one.
    assert {"Limits", "Rights in PostgreSQL", "Measured", "Documentation"} <= set(headings)
    assert re.search(r"\|.*rows/s.*\|", TEXT)


def target(url: str) -> Path | None:
    """The file in the tree that a URL of the project leads to."""
    site, source = PROJECT["urls"]["Documentation"], f"{PROJECT['urls']['Source']}/blob/main/"
    path, _, anchor = url.partition("#")
    if path.startswith(source):
        return ROOT / path.removeprefix(source)
    if not path.startswith(site):
        return None
    name = path.removeprefix(site).removesuffix("/")
    found = [ROOT / "docs" / one for one in (f"{name}.md", f"{name}/index.md", "index.md" if not name else "")]
    page = next((one for one in found if one.is_file()), None)
    if page is not None and anchor:
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w]+", "-", heading.lower()).strip("-") for heading in headings}, url
    return page


def test_links_are_absolute_and_lead_somewhere() -> None:
    """They have to work on the package's page of a registry, too."""
    links = re.findall(r"\]\(([^)\s]+)\)", TEXT)
    assert len(links) > 25
    for link in links:
        found = target(link)
        assert found is not None, link
        assert found.is_file(), link


def test_the_metadata_is_complete() -> None:
    assert PROJECT["urls"].keys() == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert target(PROJECT["urls"]["Documentation"]) == ROOT / "docs" / "index.md"
    assert target(PROJECT["urls"]["Changelog"]) == ROOT / "CHANGELOG.md"
    assert len(PROJECT["keywords"]) >= 5
    oldest = int(PROJECT["requires-python"].removeprefix(">=3."))
    versions = [f"Programming Language :: Python :: 3.{minor}" for minor in range(oldest, 15)]
    assert [one for one in PROJECT["classifiers"] if " :: 3." in one] == versions
