"""``busrep lag``: how far the durable readers are behind the writers."""

from __future__ import annotations

import click

from busrep.cli.db import READERS
from busrep.cli.options import json_option, store_option
from busrep.cli.output import flat, of_readers, print_json, print_records
from busrep.cli.servers import ask, make_store, opened


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

    readers = ask(opened(make_store(store_url)), lambda store: store.status())["readers"]
    found = of_readers(flat(readers, "reader", "stream", "writer"), wanted, "position")
    worst = max((at["lag"] for at in found), default=0)
    if as_json:
        print_json({"worst": worst, "readers": [{name: at[name] for name in READERS} for at in found]})
    else:
        print_records("Lag", READERS, found)
    if limit is not None and worst > limit:
        raise click.exceptions.Exit(1)
