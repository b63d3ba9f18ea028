"""``busrep lag``: how far the durable readers are behind the writers."""

from __future__ import annotations

from typing import Any

import click

from busrep.cli.db import ago, make_store
from busrep.cli.options import json_option, print_json, print_table, run, store_option
from busrep.errors import ConfigError


@click.command()
@store_option(required=True)
@click.option("--reader", "wanted", multiple=True, help="Only this reader; may be repeated.")
@click.option("--max", "limit", type=click.IntRange(min=0), help="Exit with 1 if a reader is behind by more.")
@json_option()
def lag(store_url: str, wanted: tuple[str, ...], limit: int | None, as_json: bool) -> None:
    """Show how far readers are behind.

    The lag of a reader at a writer is the distance between its saved position and what the writer proved.
    Positions are IDs of the stream's sequence, so it is at least the number of facts not handled yet. Where a
    reader has stopped, the reason stands beside the position.
    """

    async def work() -> dict[str, Any]:
        store = make_store(store_url, [])
        await store.open()
        try:
            return await store.status()
        finally:
            await store.close()

    readers: dict[str, Any] = run(work())["readers"]
    for name in wanted:
        if name not in readers:
            raise ConfigError(f"no reader {name!r} has saved a position (there are: {', '.join(readers) or 'none'})")
    rows = [
        (reader, stream, writer, at["position"], at["lag"], at["saved_ago"], at["stopped"])
        for reader, streams in readers.items()
        if not wanted or reader in wanted
        for stream, writers in streams.items()
        for writer, at in writers.items()
    ]
    worst = max((row[4] for row in rows), default=0)
    if as_json:
        names = ("reader", "stream", "writer", "position", "lag", "saved_ago", "stopped")
        print_json({"worst": worst, "readers": [dict(zip(names, row, strict=True)) for row in rows]})
    else:
        shown = [(*row[:5], ago(row[5]), row[6] or "") for row in rows]
        print_table("Lag", ("reader", "stream", "writer", "position", "behind by", "saved", "stopped"), shown)
    if limit is not None and worst > limit:
        raise click.exceptions.Exit(1)
