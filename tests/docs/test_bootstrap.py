"""docs/bootstrap.md: what it shows for PostgreSQL runs, and what it names is there."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import re
from typing import Any

import attrs
import click
import psycopg
import pytest

import busrep
from busrep.cli.app import cli
from busrep.core.states import BOOTSTRAP_TRANSITIONS, BootstrapState
from busrep.settings import Settings
from busrep.snapshots.parquet_manifest import read_manifest
from busrep.stores import open_store
from busrep.streams import Registry
from tests import ROOT
from tests.docs.markdown import blocks_for

PAGE = ROOT / "docs" / "bootstrap.md"
TEXT = PAGE.read_text()
TESTED = blocks_for(PAGE, "docs/test_bootstrap.py")


@attrs.frozen
class OrderChanged:
    order: int
    state: str


@pytest.mark.servers
def test_the_function_for_postgres_keeps_the_latest_of_each_key(
    redis_url: str, bus_name: str, postgres_url: str
) -> None:
    orders = busrep.Stream("orders", OrderChanged)
    common: dict[str, Any] = {"name": bus_name, "streams": [orders], "store": postgres_url}

    async def work() -> list[tuple[Any, ...]]:
        await open_store(postgres_url, Registry([orders])).init()
        settings = busrep.Settings(snapshot_part_rows=30)
        async with contextlib.AsyncExitStack() as stack:
            connection = await psycopg.AsyncConnection.connect(postgres_url, autocommit=True)
            db = await stack.enter_async_context(connection)
            await db.execute("CREATE TABLE mirror (number int PRIMARY KEY, state text)")
            await db.execute("INSERT INTO mirror VALUES (-1, 'from before')")
            async with busrep.connect(redis_url, writer="web-1", **common) as web:
                await web.publish(orders, [OrderChanged(number % 40, f"{number}") for number in range(100)])
            bus = await stack.enter_async_context(
                busrep.connect(redis_url, reader="search", settings=settings, **common)
            )
            ((_, block),) = TESTED
            names = {"bus": bus, "db": db, "orders": orders}
            compiled = compile(block.code, "docs/bootstrap.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            waiting = eval(compiled, names)
            if inspect.iscoroutine(waiting):
                await waiting
            await bus.bootstrap(orders)
            assert bus.statistics()["bootstrap"]["orders"]["parts"] == 4
            return await (await db.execute("SELECT number, state FROM mirror ORDER BY number")).fetchall()

    latest = {number % 40: f"{number}" for number in range(100)}
    assert asyncio.run(work()) == sorted(latest.items())


def test_the_states_and_what_leads_where_are_those_of_the_code() -> None:
    section = TEXT.partition("\n## States\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [state.value for state in BootstrapState]
    drawn = re.search(r"```mermaid\n(.*?)```", section, re.DOTALL)
    assert drawn is not None
    assert drawn[1] == diagram()


def diagram() -> str:
    """As the table of transitions has it; what does not change the state is no arrow."""
    lines = ["stateDiagram-v2", f"    [*] --> {BootstrapState.REQUESTED.value}"]
    for before, events in BOOTSTRAP_TRANSITIONS.items():
        arrows: dict[BootstrapState, list[str]] = {}
        for event, after in events.items():
            if after is not before:
                arrows.setdefault(after, []).append(event.value)
        lines += [f"    {before.value} --> {after.value}: {' / '.join(why)}" for after, why in arrows.items()]
    return "\n".join(lines) + "\n"


def test_the_settings_named_exist() -> None:
    section = TEXT.partition("\n## Settings\n")[2].partition("\n## ")[0]
    found = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, re.MULTILINE))
    assert len(found) == 8  # test_pages.py compares them
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", TEXT))
    for name in named & {"handler_retries", "bootstrap_lag", "full_sync_alarm", "snapshot_connections"}:
        assert hasattr(Settings(), name)


def test_the_statistics_named_are_there() -> None:
    from busrep.core.bootstrap import Bootstrap

    known = set(Bootstrap("orders").statistics(0.0)) | {"buffer_bytes"}
    section = TEXT.partition("\n## States\n")[2].partition("<!-- diagram")[0]
    cells = [line.split("|")[3] for line in section.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named >= {"rows", "eta", "buffer_bytes"}
    assert named <= known


def test_the_manifest_of_the_docs_is_one() -> None:
    found = re.search(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    manifest = read_manifest(found[1].encode())
    assert manifest.agreement.positions == json.loads(found[1])["positions"]


def test_every_option_of_the_command_is_in_its_help() -> None:
    shown = click.Context(cli.commands["bootstrap"]).get_help()
    for name in ("--status", "--source", "--out", "--to", "--overwrite", "--part-rows", "--reader", "--json"):
        assert name in shown
