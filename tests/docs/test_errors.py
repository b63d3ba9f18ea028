"""docs/errors: each error has a page, which names its fields and what to do."""

from __future__ import annotations

import inspect
import re

import pytest

import busrep.errors
from busrep.errors import BusrepError
from busrep.spark import losses
from tests import ROOT
from tests.docs.markdown import section

FOLDER = ROOT / "docs" / "errors"
ERRORS = [
    error
    for error in vars(busrep.errors).values()
    if isinstance(error, type) and issubclass(error, BusrepError) and error is not BusrepError
]
# Arguments that only make the message.
UNSTORED = {"command"}


def test_no_page_is_left_over() -> None:
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"index"}
    assert pages == {error.__name__ for error in ERRORS}
    assert len(pages) > 20


def fields_of(error: type) -> set[str]:
    return set(inspect.signature(error.__init__).parameters) - {"self", "args", "kwargs"} - UNSTORED


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_has_a_page_that_says_what_to_do(error: type[BusrepError]) -> None:
    page = FOLDER / f"{error.__name__}.md"
    text = page.read_text()
    assert text.startswith(f"# {error.__name__}\n")
    for heading in ("## When it is raised", "## What it means for the rows", "## What to do"):
        assert section(page, heading).strip()
    parent = error.__mro__[1]
    table = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert fields_of(error) <= table <= fields_of(error) | fields_of(parent)
    assert parent is BusrepError or f"({parent.__name__}.md)" in text


def test_the_list_has_all_of_them() -> None:
    text = (FOLDER / "index.md").read_text()
    assert set(re.findall(r"\]\((\w+)\.md\)", text)) == {error.__name__ for error in ERRORS}


def test_the_pipeline_names_its_errors_as_they_are_raised() -> None:
    table = section(ROOT / "docs" / "pipeline.md", "## Source")
    raised = [one for one in vars(losses).values() if isinstance(one, type) and one.__module__ == losses.__name__]
    errors = [one for one in raised if issubclass(one, BusrepError)]
    assert len(errors) == 4
    for error in errors:
        assert re.search(rf"`{error.__name__}`, an? `{error.__mro__[1].__name__}`", table), error
