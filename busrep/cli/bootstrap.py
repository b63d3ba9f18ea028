"""``busrep bootstrap``: load a snapshot from where readers do, and see how theirs are getting on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import click
from click.core import ParameterSource

from busrep.cli.db import ago, declared_streams, make_store, open_with_all_streams, streams_option
from busrep.cli.options import json_option, print_json, print_table, run, store_option
from busrep.cli.snapshot_file import SnapshotDigest, SnapshotFile
from busrep.cli.snapshot_screen import SnapshotScreen, Watched, megabytes
from busrep.core.snapshots import Agreement, BootstrapProgress, SnapshotSource
from busrep.errors import ConfigError, Unavailable
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
@click.option("--overwrite", is_flag=True, help="Begin --out anew, whatever is there.")
@click.option(
    "--part-rows",
    default=DEFAULTS.snapshot_part_rows,
    show_default=True,
    type=click.IntRange(min=1),
    help="Rows of a part: what is loaded again after an interruption.",
)
@click.option("--reader", "readers", multiple=True, help="With --status: only this reader; may be repeated.")
@json_option()
@click.pass_context
def bootstrap(context: click.Context, /, only_status: bool, as_json: bool, **options: Any) -> None:
    """Load a snapshot of a stream; or, with --status, see how readers are loading theirs.

    Prints the positions at which the snapshot is exact, and the SHA-256 of its rows: the same for each copy of the
    same positions, wherever it comes from. A line of --out is TOKEN WRITER ROW; FILE.agreement.json beside it says
    which snapshot it is. A run that was interrupted goes on with the next whole part when it is started again.
    """
    if only_status:
        _check_alone(context, "--status", "source_url", "out", "target", "overwrite", "part_rows")
        if options["store_url"] is None:
            raise click.UsageError("--status needs --store")
        _status(options["store_url"], options["readers"], options["name"], as_json)
        return
    _check_alone(context, "loading a snapshot", "readers")
    plan = BootstrapPlan.of(context, options)
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


# -- loading ---------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class BootstrapPlan:
    """What to load, from where, and where to."""

    store: str | None = attrs.field(repr=False)
    source: str | None = attrs.field(repr=False)
    declared: tuple[str, ...]
    stream: str | None
    out: Path | None
    target: str | None
    overwrite: bool
    part_rows: int

    @classmethod
    def of(cls, context: click.Context, options: dict[str, Any]) -> BootstrapPlan:
        """Raises UsageError for options that do not go together."""
        store, source = options["store_url"], options["source_url"]
        if store is None and source is None:
            raise click.UsageError("say where to load from: --store or --source")
        if source is not None and _given(context, "store_url"):
            raise click.UsageError("--store and --source are two places to load from: one is enough")
        if options["out"] is not None and options["target"] is not None:
            raise click.UsageError("--out and --to: one at a time")
        if options["overwrite"] and options["out"] is None:
            raise click.UsageError("--overwrite is for --out")
        return cls(
            store=store if source is None else None,
            source=source,
            declared=options["declared"],
            stream=options["name"],
            out=options["out"],
            target=options["target"],
            overwrite=options["overwrite"],
            part_rows=options["part_rows"],
        )

    async def load(self, *, quiet: bool) -> dict[str, Any]:
        """Do it; what is printed at the end."""
        declared = declared_streams(self.declared)
        name = self.stream if self.stream is not None else declared[0].name if len(declared) == 1 else None
        if name is None:
            raise ConfigError("say which stream to load: --stream NAME")
        started = time.monotonic()
        async with self._opened(name, declared) as source:
            with SnapshotScreen(quiet=quiet) as screen:
                if self.target is not None:
                    found = await self._to_parquet(source, name, self.target, screen)
                else:
                    found = await self._to_file(source, name, screen)
        return found | {"seconds": round(time.monotonic() - started, 3)}

    @contextlib.asynccontextmanager
    async def _opened(self, name: str, declared: list[Any]) -> AsyncIterator[SnapshotSource]:
        source: SnapshotSource
        if self.source is not None:
            streams = [stream for stream in declared if stream.name == name] or [Stream[Any](name)]
            source = open_source(self.source, streams)
        else:
            assert self.store is not None  # noqa: S101 - of() has looked
            source = await open_with_all_streams(self.store, declared, name)
        try:
            if self.source is not None:
                await source.open()
            yield source
        finally:
            await source.close()

    async def _to_file(self, source: SnapshotSource, name: str, screen: SnapshotScreen) -> dict[str, Any]:
        tally = SnapshotDigest() if self.out is None else SnapshotFile.open(self.out, name, overwrite=self.overwrite)
        with contextlib.closing(tally):
            before = tally.agreement
            agreement = await source.agree(name, part_rows=self.part_rows, again=before)
            try:
                watched = Watched(tally, screen)
                watched.begin(agreement)
                resumed = tally.parts
                for number in range(resumed, len(agreement.parts)):
                    await _copy_part(source, agreement, number, watched)
            finally:
                await source.leave(agreement)
        return summary(tally) | {
            "resumed": resumed,
            "begun_anew": before is not None and not before.same(agreement),
            "out": None if self.out is None else str(self.out),
        }

    async def _to_parquet(
        self, source: SnapshotSource, name: str, target: str, screen: SnapshotScreen
    ) -> dict[str, Any]:
        from busrep.snapshots.parquet import write_snapshot  # extra

        tally = SnapshotDigest()
        written = await write_snapshot(source, name, target, part_rows=self.part_rows, tally=Watched(tally, screen))
        return summary(tally) | {"to": written.source}


async def _copy_part(source: SnapshotSource, agreement: Agreement, number: int, watched: Watched) -> None:
    rows, expected = 0, agreement.parts[number].rows
    async with contextlib.aclosing(source.load(agreement, number)) as pieces:
        async for piece in pieces:
            watched.write(piece)
            rows += piece.count(b"\n")
    if expected >= 0 and rows != expected:
        raise Unavailable(agreement.source or "the snapshot", f"{rows} rows of part {number}, which has {expected}")
    watched.part_ended(rows)


def summary(tally: SnapshotDigest) -> dict[str, Any]:
    """What a snapshot is, JSON-able."""
    agreement = tally.agreement
    assert agreement is not None  # noqa: S101 - it was begun
    return {
        "stream": agreement.stream,
        "epoch": agreement.epoch,
        "source": agreement.source,
        "positions": dict(agreement.positions),
        "floors": dict(agreement.floors),
        "parts": tally.parts,
        "rows": tally.rows,
        "bytes": tally.size,
        "sha256": tally.hash.hexdigest(),
    }


def _print(found: dict[str, Any]) -> None:
    if found.get("begun_anew"):
        click.echo("the snapshot that was begun cannot be had any more: this is another one, from its first part")
    elif found.get("resumed"):
        click.echo(f"gone on with: {found['resumed']} parts were there already")
    place = found.get("out") or found.get("to")
    click.echo(
        f"{found['stream']}: {found['rows']:,} rows, {megabytes(found['bytes'])} in {found['parts']} parts, "
        f"{found['seconds']:.1f} s{f': {place}' if place else ''}"
    )
    click.echo(f"epoch  {found['epoch']}\nsha256 {found['sha256']}")
    positions, floors = found["positions"], found["floors"]
    rows = [(writer, position, floors.get(writer, 0)) for writer, position in sorted(positions.items())]
    print_table("Exact at", ("writer", "position", "floor"), rows)


# -- status ----------------------------------------------------------------------------------------------------------


def _status(store_url: str, readers: tuple[str, ...], stream: str | None, as_json: bool) -> None:
    async def work() -> list[BootstrapProgress]:
        store = make_store(store_url, [])
        await store.open()
        try:
            return await store.bootstraps()
        finally:
            await store.close()

    saved = run(work())
    known = {one.reader for one in saved}
    for name in readers:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"no bootstrap of a reader {name!r} is saved (there are: {listed})")
    chosen = [one for one in saved if (not readers or one.reader in readers) and stream in (None, one.agreement.stream)]
    if as_json:
        print_json({"bootstraps": [one.asdict() | {"percent": percent(one), "alarm": alarm(one)} for one in chosen]})
    elif chosen:
        columns = ("reader", "stream", "state", "parts", "rows", "done", "saved", "full syncs in 1 h", "reason")
        print_table("Bootstraps", columns, [_row(one) for one in chosen])
    else:
        click.echo("no reader has saved a bootstrap here")


def percent(one: BootstrapProgress) -> float:
    """How much is applied, by rows if their number is known, else by parts."""
    done, total = (one.rows, one.agreement.rows) if one.agreement.rows >= 0 else (one.parts, len(one.agreement.parts))
    return round(100 * done / total, 1) if total else 100.0


def alarm(one: BootstrapProgress) -> bool:
    """Whether the reader loops through full syncs, by the default of ``Settings.full_sync_alarm``."""
    return one.syncs > DEFAULTS.full_sync_alarm


def _row(one: BootstrapProgress) -> tuple[object, ...]:
    stream, total = one.agreement.stream, len(one.agreement.parts)
    rows = f"{one.rows:,} of {one.agreement.rows:,}" if one.agreement.rows >= 0 else f"{one.rows:,}"
    syncs = f"{one.syncs} ALARM" if alarm(one) else str(one.syncs)
    parts = f"{one.parts} of {total}"
    done = f"{percent(one)} %"
    return one.reader, stream, one.state, parts, rows, done, ago(one.age), syncs, one.reason
