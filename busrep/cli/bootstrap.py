"""``busrep bootstrap``: load a snapshot from where readers do, and see how theirs are getting on."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import click
from click.core import ParameterSource
from rich.progress import Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text

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
    if only_status:
        _check_alone(context, "--status", "source_url", "out", "target", "overwrite", "part_rows")
        if options["store_url"] is None:
            raise click.UsageError("--status needs --store")
        _status(options["store_url"], options["readers"], options["name"], as_json)
        return
    _check_alone(context, "a load, but with --status", "readers")
    if options["source_url"] is not None and _given(context, "store_url"):
        raise click.UsageError("--store and --source are two places to load from: one is enough")
    del options["readers"]
    plan = BootstrapPlan(**options)
    if plan.store_url is None and plan.source_url is None:
        raise click.UsageError("say where to load from: --store or --source")
    if plan.out is not None and plan.target is not None:
        raise click.UsageError("--out and --to: one at a time")
    if plan.overwrite and plan.out is None:
        raise click.UsageError("--overwrite is for --out")
    found = run(plan.load(quiet=as_json))
    if as_json:
        print_json(found)
    else:
        _print(found)


def _given(context: click.Context, name: str) -> bool:
    """Whether a person wrote it: what the environment says is for all commands."""
    return context.get_parameter_source(name) == ParameterSource.COMMANDLINE


def _check_alone(context: click.Context, what: str, *unfitting: str) -> None:
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in unfitting:
        if _given(context, name):
            raise click.UsageError(f"{flags[name]} does not go with {what}")


@attrs.frozen(kw_only=True)
class BootstrapPlan:
    """What to load, from where, and where to: the options of the command. ``source_url`` comes before ``store_url``."""

    store_url: str | None = attrs.field(repr=False)
    source_url: str | None = attrs.field(repr=False)
    declared: tuple[str, ...]
    name: str | None
    out: Path | None
    target: str | None
    overwrite: bool
    part_rows: int

    async def load(self, *, quiet: bool) -> dict[str, Any]:
        """Do it; what is printed at the end."""
        declared = declared_streams(self.declared)
        name = declared[0].name if self.name is None and len(declared) == 1 else self.name
        if name is None:
            raise ConfigError("say which stream to load: --stream NAME")
        started = time.monotonic()
        async with self._opened(name, declared) as source:
            with contextlib.ExitStack() as stack:
                progress = stack.enter_context(progress_bars(_Rows(), TimeRemainingColumn(), quiet=quiet))
                file = None if self.out is None else stack.enter_context(replacing(self._checked(self.out)))
                tally = Tally(progress, file)
                load = self._to_lines if self.target is None else self._to_parquet
                found = await load(source, name, tally)
        return found | {"seconds": round(time.monotonic() - started, 3)}

    def _opened(self, name: str, declared: list[Stream[Any]]) -> contextlib.AbstractAsyncContextManager[SnapshotSource]:
        if self.source_url is None:
            return with_all_streams(self.store_url or "", declared, name)
        streams = [stream for stream in declared if stream.name == name] or [Stream[Any](name)]
        return opened(open_source(self.source_url, streams))

    def _checked(self, out: Path) -> Path:
        if out.exists() and not (self.overwrite and out.is_file()):
            raise ConfigError(f"{out} is there: name another file, or pass --overwrite to replace a plain file")
        return out

    async def _to_lines(self, source: SnapshotSource, name: str, tally: Tally) -> dict[str, Any]:
        agreement = await source.agree(name, part_rows=self.part_rows)
        try:
            tally.begin(agreement)
            for number in range(len(agreement.parts)):
                await _copy_part(source, agreement, number, tally)
        finally:
            await source.leave(agreement)
        return tally.summary() | {"out": None if self.out is None else str(self.out)}

    async def _to_parquet(self, source: SnapshotSource, name: str, tally: Tally) -> dict[str, Any]:
        from busrep.snapshots.parquet import write_snapshot  # extra

        written = await write_snapshot(source, name, self.target or "", part_rows=self.part_rows, tally=tally)
        return tally.summary() | {"to": written.source}


class Tally:
    """Counts and hashes the rows of a snapshot, shows how many there are, and writes them into a file, if there is
    one."""

    def __init__(self, progress: Progress, file: BinaryIO | None) -> None:
        self._progress, self._file = progress, file
        self._task = progress.add_task("agreeing", total=None, size=0)
        self._agreement: Agreement | None = None
        self._hash = hashlib.sha256()
        self.parts = self.rows = self.bytes = 0

    def begin(self, agreement: Agreement) -> None:
        """What follows are the parts of this one."""
        self._agreement = agreement
        total = agreement.rows if agreement.rows >= 0 else None
        self._progress.reset(self._task, total=total, description=agreement.stream, size=0)

    def write(self, piece: bytes) -> None:
        """More of the part that is under way: whole lines. Raises OSError."""
        if self._file is not None:
            self._file.write(piece)
        self._hash.update(piece)
        self.bytes += len(piece)
        self.rows += piece.count(b"\n")
        self._progress.update(self._task, completed=self.rows, size=self.bytes)

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


class _Rows(ProgressColumn):
    """How many rows and bytes are there, and how many rows come in a second."""

    def render(self, task: Task) -> Text:
        """For one bar."""
        speed = task.finished_speed or task.speed or 0.0
        return Text(f"{task.completed:,.0f} rows, {megabytes(task.fields['size'])}, {speed:,.0f} rows/s")


def megabytes(count: int) -> str:
    """For a person."""
    return f"{count / 1e6:,.1f} MB"


async def _copy_part(source: SnapshotSource, agreement: Agreement, number: int, tally: Tally) -> None:
    before, expected = tally.rows, agreement.parts[number].rows
    async with contextlib.aclosing(source.load(agreement, number)) as pieces:
        async for piece in pieces:
            tally.write(piece)
    rows = tally.rows - before
    if expected >= 0 and rows != expected:
        raise Unavailable(agreement.source or "the snapshot", f"{rows} rows of part {number}, which has {expected}")
    tally.part_ended(rows)


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
