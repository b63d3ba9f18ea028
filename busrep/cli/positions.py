"""``busrep positions``: follow any channel that speaks the protocol, and print where its writers are."""

from __future__ import annotations

import asyncio
from typing import Any

import click

import busrep
from busrep.cli.options import DURATION, json_option, name_option, print_json, print_table, redis_option, run


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
    found, statistics = run(follow(redis_url, name, seconds))
    if as_json:
        print_json(found)
        return
    reader = statistics["reader"]
    behind = reader["needed_catch_up"]
    print_table(
        f"Positions on {name}",
        ("stream", "writer", "position", "rows were missing"),
        [
            (stream, writer, position, "yes" if writer in behind.get(stream, ()) else "no")
            for stream, writers in sorted(found.items())
            for writer, position in sorted(writers.items())
        ],
    )
    click.echo(f"lines not understood: {reader['parse_errors']}")


async def follow(redis_url: str, name: str, seconds: float) -> tuple[dict[str, dict[str, int]], dict[str, Any]]:
    """Follow for so many seconds; the positions, and the bus's statistics."""
    async with busrep.connect(redis_url, name=name, streams=[], undeclared=True) as bus:
        await asyncio.sleep(seconds)
        return bus.positions(), bus.statistics()
