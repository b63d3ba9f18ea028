"""docs/guides/row-classes.md: each class there fits, or does not, as it says."""

from __future__ import annotations

import asyncio
import re
import shlex
from typing import Any

import pytest

from busrep.errors import RowClassMismatch
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.urls import shown_url
from tests import ROOT
from tests.docs.markdown import blocks_for

PAGE = ROOT / "docs" / "guides" / "row-classes.md"
TEXT = PAGE.read_text()
BLOCKS = [(key, block.code) for key, block in blocks_for(PAGE, "docs/test_row_classes.py")]
MESSAGE = re.search(r"```text\n(the row class of stream .*?)\n```", TEXT, re.S)


def declared(code: str) -> Registry:
    found: dict[str, Any] = {}
    exec(compile(code, "docs/guides/row-classes.md", "exec", dont_inherit=True), found)
    return Registry([found["orders"]])


def test_what_is_tested() -> None:
    assert [key.partition(":")[0] for key, _ in BLOCKS] == ["before", "fits", "does not fit"]


@pytest.mark.servers
@pytest.mark.parametrize("database", ["sqlite_url", "postgres_url"])
def test_the_classes_fit_as_the_page_says(request: pytest.FixtureRequest, database: str) -> None:
    url = request.getfixturevalue(database)

    async def opened(code: str) -> None:
        store = open_store(url, declared(code))
        try:
            await store.open()
        finally:
            await store.close()

    async def main() -> None:
        (_, before), *others = BLOCKS
        await open_store(url, declared(before)).init()
        for mark, code in others:
            if mark == "fits":
                await opened(code)
                continue
            with pytest.raises(RowClassMismatch) as error:
                await opened(code)
            assert error.value.reason == mark.removeprefix("does not fit: ")
            assert MESSAGE is not None
            assert str(error.value).replace(shlex.quote(shown_url(url)), "URL") == MESSAGE[1]

    asyncio.run(main())
