"""The examples of docs/threads.md that need nothing but busrep, run from top to bottom."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import psycopg
import pytest

from busrep import Stream
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests import ROOT
from tests.docs.markdown import blocks_for

RUN = [block.code for _, block in blocks_for(ROOT / "docs" / "threads.md", "docs/test_sync.py")]


@pytest.mark.servers
def test_the_examples_run(
    redis_url: str, bus_name: str, postgres_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_blocking_store(postgres_url, Registry([Stream("orders")]))
    store.init()
    store.close()
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE stock (number int, state text)")
        connection.execute("INSERT INTO stock VALUES (1, 'new')")
    assert len(RUN) == 4
    names: dict[str, Any] = {"__name__": "example"}
    for block in RUN:
        block = block.replace('"redis://localhost:6379"', repr(redis_url))
        block = block.replace('"postgresql://localhost/shop"', repr(postgres_url)).replace('"shop"', repr(bus_name))
        exec(block, names)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 499
    assert printed[0].startswith("import 1 [OrderChanged(order=1, state='paid')")
    with contextlib.ExitStack() as stack:
        taken = [names["slot"](tmp_path) for _ in range(3)]
        assert [number for number, _ in taken] == [0, 1, 2]
        for _, file in taken[:1] + taken[2:]:
            stack.callback(file.close)
        taken[1][1].close()
        number, file = names["slot"](tmp_path)
        stack.callback(file.close)
        assert number == 1
        with pytest.raises(RuntimeError, match="3 processes"):
            names["slot"](tmp_path, 3)
