"""The documentation site: its configuration, its links, and that it loads nothing from elsewhere.

`.ci/run` builds it, with `--strict`.
"""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.docs.markdown import PAGES, README, name_of

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / ".mkdocs.yml").read_text())
    return loaded


def listed(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    return [name for child in children for name in listed(child)]


def test_each_page_is_in_the_navigation_once(site: dict[str, Any]) -> None:
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(listed(site["nav"])) == pages


def test_nothing_is_loaded_from_elsewhere(site: dict[str, Any]) -> None:
    assert site["theme"]["font"] is False
    assert "repo_url" not in site, "each visitor's browser would ask its host for the number of stars"
    assert not re.search(r"https?:", str(site.get("extra_css", [])) + str(site.get("extra_javascript", [])))
    assert "url(" not in (DOCS / "site.css").read_text()


def test_light_and_dark_and_search(site: dict[str, Any]) -> None:
    assert {one["scheme"] for one in site["theme"]["palette"]} == {"default", "slate"}
    assert "search" in site["plugins"]


@pytest.mark.parametrize("page", [page for page in PAGES if page != README], ids=name_of)
def test_links_within_the_docs_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith(("http:", "https:", "#")):
            assert (page.parent / link.partition("#")[0]).is_file(), link


def test_the_reference_names_what_there_is() -> None:
    for page in (DOCS / "reference").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute) or importlib.import_module(name), name


def test_the_specification_has_a_version() -> None:
    text = (DOCS / "protocol.md").read_text()
    assert re.search(r"^\*\*Version \d+\.\d+\*\*", text, re.MULTILINE)
    assert not re.search(r"\[[\d,]+ of [\d,]+\]", text), "figures of the model are in the rationale"


def test_the_states_of_a_reader_are_drawn() -> None:
    """With the very arrows of the page; another diagram, or one with another arrow, becomes a table."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / ".ci" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = (DOCS / "design.md").read_text()
    shown = hooks.on_page_markdown(page)
    picture = re.search(r"<svg.*</svg>", shown)
    assert picture is not None
    assert xml.etree.ElementTree.fromstring(picture[0]).find("defs/marker/path") is not None
    assert "| `stopped` | resumed | `unsynced` |" in shown
    assert "```mermaid" not in shown
    fewer = hooks.on_page_markdown(page.replace("    stopped --> unsynced: resumed\n", ""))
    assert "<svg" not in fewer
    assert "| `stopped` | a bootstrap begins | `bootstrapping` |" in fewer
