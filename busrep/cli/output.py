"""How the commands print: JSON, tables, times, progress, and errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from busrep.errors import ConfigError

# Columns of a table that does not go to a terminal.
PIPE_WIDTH = 200
# Cells of so many characters and fewer are never folded ("113.3 s ago"), and longer ones not below so many.
WHOLE, FOLDED = 11, 6


def print_json(value: object) -> None:
    """One JSON document on one line of standard output."""
    click.echo(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode())


def say(value: object, text: str, *, as_json: bool) -> None:
    """The value for a script, or the text for a person."""
    if as_json:
        print_json(value)
    else:
        click.echo(text)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for a person; numbers are aligned to the right.

    In a narrow terminal headings break at spaces and long names fold, over as many lines as they need; what is
    short stays whole. If that does not fit either, the terminal wraps the lines, which loses nothing.
    """
    words = {None: "", True: "yes", False: "no"}
    found = [[words[cell] if cell is None or isinstance(cell, bool) else cell for cell in row] for row in rows]
    numeric = [bool(found) and all(isinstance(row[at], (int, float)) for row in found) for at in range(len(columns))]
    cells = [[f"{cell:,}" if type(cell) is int else str(cell) for cell in row] for row in found]
    # Into a pipe or a file: as wide as it needs, for nobody looks at it through a window.
    room = Console().width if sys.stdout.isatty() else PIPE_WIDTH
    for headings in (list(columns), [column.replace(" ", "\n") for column in columns]):
        parts = [[*heading.split("\n"), *(row[at] for row in cells)] for at, heading in enumerate(headings)]
        widest = [max(map(len, column)) for column in parts]
        whole = [number or width <= WHOLE for number, width in zip(numeric, widest, strict=True)]
        needed = 1 + sum(3 + (width if kept else FOLDED) for width, kept in zip(widest, whole, strict=True))
        if needed <= room:
            break
    table = Table(title=title, title_justify="left")
    for heading, number, kept in zip(headings, numeric, whole, strict=True):
        table.add_column(heading, justify="right" if number else "left", no_wrap=kept, overflow="fold")
    for row in cells:
        table.add_row(*row)
    # Names are shown as they are: "[/b]" is no markup, and ":heart:" no picture.
    Console(width=max(needed, room), markup=False, emoji=False).print(table)


def flat(nested: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    """Mappings in mappings as one list of mappings, in which the keys of each level have a name."""
    if not names:
        return [dict(nested)]
    return [{names[0]: key, **one} for key, inner in nested.items() for one in flat(inner, *names[1:])]


def of_readers(records: Sequence[dict[str, Any]], wanted: Sequence[str], what: str) -> list[dict[str, Any]]:
    """The records of some readers, if any are named. Raises ConfigError for one that has none."""
    known = {one["reader"]: None for one in records}
    for name in wanted:
        if name not in known:
            raise ConfigError(f"no {what} of a reader {name!r} is saved (there are: {', '.join(known) or 'none'})")
    return [one for one in records if not wanted or one["reader"] in wanted]


def print_records(title: str, columns: Mapping[str, str], records: Iterable[Mapping[str, Any]]) -> None:
    """A table of mappings; ``columns``: key -> heading. What a key ending in "_ago" names is a time in the past."""
    rows = [[ago(one[key]) if key.endswith("_ago") else one[key] for key in columns] for one in records]
    print_table(title, list(columns.values()), rows)


def ago(seconds: float) -> str:
    """A time in the past, for a person."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.1f} s ago"


def progress_bars(*columns: ProgressColumn, quiet: bool) -> Progress:
    """Bars on standard error, where that is a terminal, unless ``quiet``."""
    console = Console(stderr=True)
    first = TextColumn("{task.description}", markup=False)
    return Progress(first, BarColumn(), *columns, console=console, disable=quiet or not console.is_terminal)


def fail(message: str, status: int = 2) -> NoReturn:
    """End the command with one line on standard error."""
    click.echo(f"busrep: {message}", err=True)
    raise click.exceptions.Exit(status)
