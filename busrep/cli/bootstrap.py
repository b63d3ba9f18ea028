"""``busrep bootstrap``: load a snapshot from where readers do, and see how theirs are getting on."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import click
from click.core import ParameterSource
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from busrep.cli.options import json_option, store_option, streams_option
from busrep.cli.output import ago, of_readers, print_json, print_table, progress_bars
from busrep.cli.servers import ask, declared_streams, make_store, opened, run, with_all_streams
from busrep.core.snapshots import Agreement, SnapshotSource
from busrep.errors import ConfigError, Unavailable
from busrep.private_files import replacing
from busrep.settings import Settings
from busrep.snapshots.sources import open_source
from busrep.streams import Stream

DEFAULTS = Settings()


@click.command()
@click.option("--status", "only_status", is_flag=True, help="Show the bootstraps that readers have saved in --store.")
@store_option(required=False)
@click.option(
    "--source",
    "source_url",
    metavar="URL",
    help="Load from http://:SECRET@host/prefix, or Parquet at file:///directory or s3://bucket/prefix "
    "[default: the table of --store].",
)
@streams_option()
@click.option("--stream", "name", help="The stream to load; with --status only this one.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows as lines into this file.")
@click.option(
    "--to", "target", metavar="URL", help="Write a Parquet snapshot: file:///directory or s3://bucket/prefix."
)
@click.option("--overwrite", is_flag=True, help="Replace --out if it is there.")
@click.option(
    "--part-rows",
    default=DEFAULTS.snapshot_part_rows,
    show_default=True,
    type=click.IntRange(min=1),
    help="Rows of a part, which is loaded at a time.",
)
@click.option("--reader", "readers", multiple=True, help="With --status: only this reader; may be repeated.")
@json_option()
@click.pass_context
def bootstrap(context: click.Context, /, only_status: bool, as_json: bool, **options: Any) -> None:
    """Load a snapshot of a stream; or, with --status, see how readers are loading theirs.

    Prints the positions at which the snapshot is exact, and the SHA-256 of its rows: the same for each copy of the
    same positions, wherever it comes from. A line of --out is TOKEN WRITER ROW. The file appears when it is whole: of a
    run that was interrupted there is none.
    """
    _check_usage(context, only_status, options)
    if only_status:
        _status(options["store_url"], options["readers"], options["name"], as_json)
        return
    started, out = time.monotonic(), options["out"]
    if out is not None and out.exists() and not (options["overwrite"] and out.is_file()):
        raise ConfigError(f"{out} is there: name another file, or pass --overwrite to replace a plain file")
    declared = declared_streams(options["declared"])
    name = declared[0].name if options["name"] is None and len(declared) == 1 else options["name"]
    if name is None:
        raise ConfigError("say which stream to load: --stream NAME")
    source: contextlib.AbstractAsyncContextManager[SnapshotSource]
    if options["source_url"] is None:
        source = with_all_streams(options["store_url"], declared, name)
    else:
        streams = [stream for stream in declared if stream.name == name] or [Stream[Any](name)]
        source = opened(open_source(options["source_url"], streams))
    with (
        progress_bars(TextColumn("{task.fields[shown]}"), TimeRemainingColumn(), quiet=as_json) as progress,
        contextlib.nullcontext() if out is None else replacing(out) as file,
    ):
        tally = Tally(progress, file)
        place = run(_load(source, name, tally, options["part_rows"], options["target"]))
    found = tally.summary() | (place or {"out": out and str(out)}) | {"seconds": round(time.monotonic() - started, 3)}
    if as_json:
        print_json(found)
    else:
        _print(found)


def _check_usage(context: click.Context, only_status: bool, options: dict[str, Any]) -> None:
    """What a person wrote must fit together; what the environment says is for all commands. Raises UsageError."""
    flags = {one.name: one.opts[0] for one in context.command.params if one.name}
    given = {name for name in flags if context.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    what = "--status" if only_status else "a load, but with --status"
    for name in ("source_url", "out", "target", "overwrite", "part_rows") if only_status else ("readers",):
        if name in given:
            raise click.UsageError(f"{flags[name]} does not go with {what}")
    wrong = {
        "--status needs --store": only_status and options["store_url"] is None,
        "--store and --source are two places to load from: one is enough": given >= {"store_url", "source_url"},
        "say where to load from: --store or --source": options["store_url"] is options["source_url"] is None,
        "--out and --to: one at a time": given >= {"out", "target"},
        "--overwrite is for --out": options["overwrite"] and options["out"] is None,
    }
    for message in (text for text, found in wrong.items() if found):
        raise click.UsageError(message)


async def _load(
    opening: contextlib.AbstractAsyncContextManager[SnapshotSource],
    name: str,
    tally: Tally,
    part_rows: int,
    target: str | None,
) -> dict[str, str]:
    """Copy the snapshot, as Parquet if there is a ``target``; the place it is at then."""
    async with opening as source:
        if target is not None:
            from busrep.snapshots.parquet import write_snapshot  # extra

            written = await write_snapshot(source, name, target, part_rows=part_rows, tally=tally)
            return {"to": written.source}
        agreement = await source.agree(name, part_rows=part_rows)
        try:
            tally.begin(agreement)
            for number, part in enumerate(agreement.parts):
                before = tally.rows
                async with contextlib.aclosing(source.load(agreement, number)) as pieces:
                    async for piece in pieces:
                        tally.write(piece)
                rows = tally.rows - before
                if part.rows not in (-1, rows):
                    text = f"{rows} rows of part {number}, which has {part.rows}"
                    raise Unavailable(agreement.source or "the snapshot", text)
                tally.part_ended(rows)
        finally:
            await source.leave(agreement)
    return {}


class Tally:
    """Counts and hashes the rows of a snapshot, shows how many there are, and writes them into a file, if there is
    one."""

    def __init__(self, progress: Progress, file: BinaryIO | None) -> None:
        self._progress, self._file = progress, file
        self._task = progress.add_task("agreeing", total=None, shown="")
        self._agreement: Agreement | None = None
        self._hash = hashlib.sha256()
        self.parts = self.rows = self.bytes = 0

    def begin(self, agreement: Agreement) -> None:
        """What follows are the parts of this one."""
        self._agreement, self._began = agreement, time.monotonic()
        total = agreement.rows if agreement.rows >= 0 else None
        self._progress.reset(self._task, total=total, description=agreement.stream, shown="")

    def write(self, piece: bytes) -> None:
        """More of the part that is under way: whole lines. Raises OSError."""
        if self._file is not None:
            self._file.write(piece)
        self._hash.update(piece)
        self.bytes += len(piece)
        self.rows += piece.count(b"\n")
        speed = self.rows / max(time.monotonic() - self._began, 0.001)
        shown = f"{self.rows:,} rows, {megabytes(self.bytes)}, {speed:,.0f} rows/s"
        self._progress.update(self._task, completed=self.rows, shown=shown)

    def part_ended(self, _rows: int) -> None:
        """The part is whole."""
        self.parts += 1

    def summary(self) -> dict[str, Any]:
        """What the snapshot is, JSON-able."""
        agreement = self._agreement
        assert agreement is not None  # noqa: S101 - it was begun
        return {
            "stream": agreement.stream,
            "epoch": agreement.epoch,
            "source": agreement.source,
            "positions": dict(agreement.positions),
            "floors": dict(agreement.floors),
            "parts": self.parts,
            "rows": self.rows,
            "bytes": self.bytes,
            "sha256": self._hash.hexdigest(),
        }


def megabytes(count: int) -> str:
    """For a person."""
    return f"{count / 1e6:,.1f} MB"


def _print(found: dict[str, Any]) -> None:
    place = found.get("out") or found.get("to")
    click.echo(
        f"{found['stream']}: {found['rows']:,} rows, {megabytes(found['bytes'])} in {found['parts']} parts, "
        f"{found['seconds']:.1f} s{f': {place}' if place else ''}"
    )
    click.echo(f"epoch  {found['epoch']}\nsha256 {found['sha256']}")
    positions, floors = found["positions"], found["floors"]
    rows = [(writer, position, floors.get(writer, 0)) for writer, position in sorted(positions.items())]
    print_table("Exact at", ("writer", "position", "floor"), rows)


def _status(store_url: str, readers: tuple[str, ...], stream: str | None, as_json: bool) -> None:
    saved = [one.asdict() for one in ask(opened(make_store(store_url)), lambda store: store.bootstraps())]
    chosen = [one for one in of_readers(saved, readers, "bootstrap") if stream in (None, one["stream"])]
    if as_json:
        print_json({"bootstraps": [one | {"percent": percent(one), "alarm": alarm(one)} for one in chosen]})
    elif chosen:
        print_bootstraps([one | {"saved_ago": one["age"]} for one in chosen])
    else:
        click.echo("no reader has saved a bootstrap here")


def percent(one: Mapping[str, Any]) -> float:
    """How much is applied, by rows if their number is known, else by parts."""
    what = "rows" if one["rows_total"] >= 0 else "parts"
    done, total = one[what], one[f"{what}_total"]
    return round(100 * done / total, 1) if total else 100.0


def alarm(one: Mapping[str, Any]) -> bool:
    """Whether the reader loops through full syncs, by the default of ``Settings.full_sync_alarm``."""
    return bool(one["syncs"] > DEFAULTS.full_sync_alarm)


def print_bootstraps(bootstraps: Iterable[Mapping[str, Any]]) -> None:
    """How far readers are with their bootstraps, as a store's status tells it."""
    rows = []
    for one in bootstraps:
        counted = f"{one['rows']:,} of {one['rows_total']:,}" if one["rows_total"] >= 0 else f"{one['rows']:,}"
        parts, done = f"{one['parts']} of {one['parts_total']}", f"{percent(one)} %"
        syncs = f"{one['syncs']} ALARM" if alarm(one) else str(one["syncs"])
        who = one["reader"], one["stream"], one["state"]
        rows.append((*who, parts, counted, done, ago(one["saved_ago"]), syncs, one["reason"]))
    columns = ("reader", "stream", "state", "parts", "rows", "done", "saved", "full syncs in 1 h", "reason")
    print_table("Bootstraps", columns, rows)
