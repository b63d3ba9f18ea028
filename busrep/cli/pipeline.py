"""``busrep pipeline``: the jobs on Spark. A job's module is loaded when it is asked for, Spark when it is run."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs
import click
import orjson
from click.core import ParameterSource
from rich.progress import TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from busrep.cli.options import DURATION, json_option
from busrep.cli.output import print_json, progress_bars
from busrep.errors import BusrepError, ConfigError
from busrep.private_files import replacing
from busrep.urls import has_secret

if TYPE_CHECKING:
    from busrep.spark.interrupts import Interrupts

# Of a job that found what should not be; an error is 2, as with every command.
NOT_OK = 1

DIED = (
    "Spark's Java has died: it was killed, or was out of memory (--conf spark.driver.memory=4g). "
    "Started again, the job goes on"
)


class Jobs(click.Group):
    """A group whose commands are the modules of `busrep.spark.jobs`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        """The modules' names."""
        from busrep.spark import jobs

        return sorted(found.name for found in pkgutil.iter_modules(jobs.__path__) if not found.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of one job, or None."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return job_command(cmd_name, importlib.import_module(f"busrep.spark.jobs.{cmd_name}"))


@click.group(cls=Jobs)
def pipeline() -> None:
    """Jobs on Spark: archive streams, check, replay, ...

    Each runs on this machine by default, and on a cluster with --master. Needs the extra 'spark'.
    """


def job_command(name: str, module: types.ModuleType) -> click.Command:
    """The command that runs a job's module."""
    hints = get_type_hints(module.Options)
    text = (module.__doc__ or "").strip()

    @click.option(
        "--master",
        metavar="URL",
        help="Where Spark runs: local[*], local[4], spark://host:7077, ... "
        "[default: BUSREP_SPARK_MASTER, else local[*]; under spark-submit: its own]",
    )
    @click.option(
        "--conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark's, spark....; may be repeated."
    )
    @json_option()
    @click.option(
        "--report",
        "report_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the report into this file as JSON, also of a run that failed.",
    )
    @click.pass_context
    def call(context: click.Context, /, conf: tuple[str, ...], **values: Any) -> None:
        # Spark logs a failure with pages of traces, and we tell the reason; -v shows what it says, -vv warnings too.
        level = ("OFF", "ERROR", "WARN")[min(context.find_root().params.get("verbose", 0), 2)]
        told = {"spark.log.level": level} | settings(conf)
        how = {option: values.pop(option) for option in ("master", "as_json", "report_file")}
        Job(name, module, conf=told, **how).run(options(context, module, values))

    command = click.command(name, help=text, short_help=text.partition("\n")[0])(call)
    command.params[:0] = [parameter(field, hints[field.name]) for field in attrs.fields(module.Options)]
    return command


def parameter(field: attrs.Attribute[Any], hint: Any) -> click.Option:
    """The flag of one field of ``Options``."""
    from busrep.spark.job import OPTION, Option

    told: Option = field.metadata[OPTION]
    flag = "--" + field.name.replace("_", "-")
    kind = hint
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = set(get_args(hint)) - {type(None)}
    several = get_origin(kind) is tuple
    if several:
        kind = get_args(kind)[0]
    common: dict[str, Any] = {"help": told.help, "envvar": told.env, "show_envvar": told.env is not None}
    if kind is bool:
        both = f"{flag}/--no-{flag[2:]}" if field.default is True else flag
        return click.Option([both, field.name], is_flag=True, default=bool(field.default), **common)
    if field.default not in (attrs.NOTHING, None, ()):
        common |= {"default": field.default, "show_default": True}
    if several or told.joined:
        common["help"] += " May be repeated."
    if told.joined:
        common["callback"] = lambda _context, _parameter, given: ",".join(given) or None
    if told.duration:
        kind = DURATION
    elif get_origin(kind) is Literal:
        kind = click.Choice(get_args(kind))
    elif kind is Path:
        kind = click.Path(path_type=Path)
    elif told.minimum is not None:
        kind = click.IntRange(min=int(told.minimum)) if kind is int else click.FloatRange(min=told.minimum)
    required, multiple = field.default is attrs.NOTHING, several or told.joined
    return click.Option(
        [flag, field.name], type=kind, metavar=told.metavar, required=required, multiple=multiple, **common
    )


def settings(given: tuple[str, ...]) -> dict[str, str]:
    """--conf NAME=VALUE. Raises UsageError."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise click.UsageError(f"--conf {name}: it is spark.NAME=VALUE")
        found[name] = value
    return found


def options(context: click.Context, module: types.ModuleType, values: dict[str, Any]) -> Any:
    """The job's ``Options``. A password in the store's URL is left out of it: the source will find it elsewhere.

    Raises UsageError; ConfigError for a password where others would see it.
    """
    from busrep.spark import secrets

    check_secrets(context, module, values)
    if values.get("store") is not None:
        values["store"], password = secrets.split(values["store"])
        # That of BUSREP_STORE is found there.
        if password is not None and context.get_parameter_source("store") == ParameterSource.COMMANDLINE:
            os.environ["BUSREP_STORE_PASSWORD"] = password
    try:
        return module.Options(**values)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def check_secrets(context: click.Context, module: types.ModuleType, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a URL with a password in it that Spark's UI and log of events would show: an option of
    Spark's, or of spark-submit's command line, which is Java's. The environment is not shown."""
    from busrep.spark.job import OPTION
    from busrep.spark.session import submitted

    for field in attrs.fields(module.Options):
        told, value = field.metadata[OPTION], values.get(field.name)
        seen = submitted() and context.get_parameter_source(field.name) == ParameterSource.COMMANDLINE
        if isinstance(value, str) and (seen or told.shown) and has_secret(value):
            raise ConfigError(
                f"--{field.name.replace('_', '-')} holds a password, which Spark's UI shows: put it into "
                f"{told.elsewhere}"
            )


@attrs.frozen(kw_only=True)
class Job:
    """One run of a job."""

    name: str = attrs.field(kw_only=False)
    module: types.ModuleType = attrs.field(kw_only=False)
    master: str | None
    conf: Mapping[str, str]
    as_json: bool
    report_file: Path | None

    def run(self, told: Any) -> None:
        """Do it, and report. Raises BusrepError, and Exit for a report that is not ok."""
        from busrep.spark.interrupts import Interrupts

        file = self.report_file
        if file is not None and not os.access(file if _is_special(file) else file.resolve().parent, os.W_OK):
            raise ConfigError(f"--report {file}: its folder is not there, or cannot be written to")
        started = time.monotonic()

        def report(**found: Any) -> dict[str, Any]:
            return {"job": self.name, "ok": True, "seconds": round(time.monotonic() - started, 3)} | found

        try:
            with Interrupts() as interrupts:
                found = report(**self._work(told, interrupts))
        except KeyboardInterrupt:
            write_report(self.report_file, report(ok=False, error="interrupted"))
            click.echo("busrep: interrupted", err=True)
            raise
        except Exception as error:
            told = str(error) if isinstance(error, BusrepError) else f"{type(error).__name__}: {error}"
            write_report(self.report_file, report(ok=False, error=told))
            raise
        from busrep.spark.waiting import described

        try:
            write_report(self.report_file, found)
        finally:  # a disk may be full by now, and the job has run for hours
            if self.as_json:
                print_json(found)
            else:
                click.echo(getattr(self.module, "describe", describe)(found))
                for line in described(found):
                    click.echo(line)
        if not found["ok"]:
            raise click.exceptions.Exit(NOT_OK)

    def _work(self, told: Any, interrupts: Interrupts) -> dict[str, Any]:
        from busrep.spark.failures import WorkersTooSlow, is_slow_worker, is_sparks, quiet, reason
        from busrep.spark.masters import check_master
        from busrep.spark.session import active, check_extra, has_died, session, stop

        check_extra()
        if self.conf.get("spark.log.level") == "OFF":
            quiet()
        if self.master is not None:
            check_master(self.master)
        getattr(self.module, "check", lambda _: None)(told)
        ours = active() is None
        run: Callable[..., dict[str, Any]] = self.module.run
        with stage_bars(self.name, quiet=self.as_json) as progress:
            progress("starting Spark", 0, None)
            try:
                spark = session(f"busrep {self.name}", master=self.master, conf=self.conf)
                interrupts.install()  # pyspark has put its own in its place
                try:
                    return run(spark, told, progress)
                finally:
                    if ours:
                        stop(spark)
            except Exception as error:
                if has_died(error):
                    raise BusrepError(DIED) from error
                if not is_sparks(error):
                    raise
                if is_slow_worker(error):
                    raise WorkersTooSlow(1) from error
                raise BusrepError(reason(error)) from error


@contextlib.contextmanager
def stage_bars(job: str, *, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each stage of a job, on standard error, where that is a terminal. Yields a job's ``progress``."""
    shown = TextColumn("{task.completed:,.0f}{task.fields[of]}")
    lock = threading.Lock()  # Spark calls back in threads of its own
    stages: dict[str, TaskID] = {}

    def progress(stage: str, done: int, total: int | None) -> None:
        of = "" if total is None else f" of {total:,}"
        with lock:
            if stage in stages:
                bars.update(stages[stage], completed=done, total=total, of=of)
                return
            for before in stages.values():  # what comes before is over
                bars.stop_task(before)
            stages[stage] = bars.add_task(f"{job}: {stage}", total=total, completed=done, of=of)

    with progress_bars(shown, TimeElapsedColumn(), TimeRemainingColumn(), quiet=quiet) as bars:
        yield progress


def write_report(file: Path | None, found: Mapping[str, Any]) -> None:
    """Write it as JSON: whoever waits for the file finds it whole. Raises OSError."""
    if file is None:
        return
    content = orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if _is_special(file):
        file.write_bytes(content)
        return
    with replacing(file.resolve()) as written:
        written.write(content)


def _is_special(file: Path) -> bool:
    # A pipe, a terminal, /dev/null: to be written into, and not to be replaced.
    return file.exists() and not file.is_file()


def describe(report: Mapping[str, Any], indent: str = "") -> str:
    """A report for a person: a line for each value, nested ones indented."""
    lines = []
    width = max(map(len, report), default=0)
    for name, value in report.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{name}", describe(value, indent + "  ")]
        else:
            shown = f"{value:,}" if type(value) in (int, float) else str(value)
            lines.append(f"{indent}{name:<{width}}  {shown}")
    return "\n".join(lines)
