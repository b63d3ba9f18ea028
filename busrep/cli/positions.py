"""``busrep positions``: follow any channel that speaks the protocol, and print where its writers are."""

from __future__ import annotations

import asyncio
from typing import Any

import click

import busrep
from busrep.cli.options import DURATION, json_option, name_option, redis_option
from busrep.cli.output import print_json, print_table
from busrep.cli.servers import run


@click.command()
@redis_option()
@name_option()
@click.option("--for", "seconds", default="5s", show_default=True, type=DURATION, help="How long to listen.")
@json_option()
def positions(redis_url: str, name: str, seconds: float, as_json: bool) -> None:
    """Follow a channel and print the position of each writer.

    Needs no table and no declared streams: it asks the writers where they are, follows them, and prints
    {"stream": {"writer": position}}.
    """

    async def follow() -> tuple[dict[str, dict[str, int]], Any]:
        async with busrep.connect(redis_url, name=name, streams=[], undeclared=True) as bus:
            await asyncio.sleep(seconds)
            return bus.positions(), bus.statistics()["reader"]

    found, reader = run(follow())
    if as_json:
        print_json(found)
        return
    behind = reader["needed_catch_up"]
    print_table(
        f"Positions on {name}",
        ("stream", "writer", "position", "rows were missing"),
        [
            (stream, writer, position, writer in behind.get(stream, ()))
            for stream, writers in sorted(found.items())
            for writer, position in sorted(writers.items())
        ],
    )
    click.echo(f"lines not understood: {reader['parse_errors']}")
