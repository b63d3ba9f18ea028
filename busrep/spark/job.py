"""What a job of ``busrep pipeline`` is made of: declared options, progress, a report.

A module ``busrep/spark/jobs/NAME.py`` is the job NAME; nothing else is to be registered. Its docstring is its help. It
has ``Options``, an attrs class whose fields are made by `option` and the other functions here; ``run(spark, options,
progress)``, which returns the report; ``main()``, which is ``submit("NAME")``; and, if it likes, ``describe(report)``,
the report for a person, and ``check(options)``, which raises ConfigError for options that cannot work, before Spark is
started. It can be imported without Spark, so that its help can be read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol

import attrs
from attrs.validators import ge

from busrep.settings import Settings
from busrep.spark.secrets import ADVICE, REDIS_ADVICE
from busrep.urls import has_secret, shown_url

# JSON-able. "ok": False makes the exit status 1; the runner adds "job", "seconds" and, unless it is there, "ok".
Report = dict[str, Any]

# The key of an `Option` in an attrs field's metadata.
OPTION = "busrep.spark.job.option"


# Seconds of silence after which readers of the default settings finish a writer.
LEASE = Settings().heartbeat * Settings().silent_after_beats


class Progress(Protocol):
    """Told how far a job is; from any thread, as often as it likes."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """``done`` of ``total`` (None: not known) of what ``stage`` counts."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Progress that nobody watches."""


@attrs.frozen(kw_only=True)
class Option:
    """What the command line says of one field of a job's ``Options``; the flag is the field's name.

    ``env`` is an environment variable, ``minimum`` the least number. ``duration`` says that a float is written as
    ``500ms``, ``10s`` or ``2m`` and is in seconds. ``elsewhere``: where the password of a URL goes, for it is refused
    in arguments of spark-submit, and always in a URL that is ``shown``: that becomes an option of Spark's. With
    ``joined`` a text may be repeated, and arrives as one with commas between.
    """

    help: str
    metavar: str | None = None
    env: str | None = None
    minimum: int | float | None = None
    duration: bool = False
    elsewhere: str = "the environment"
    shown: bool = False
    joined: bool = False


def option(default: Any = attrs.NOTHING, **told: Any) -> Any:
    """A field of ``Options``; without a default the option is required.

    The field's annotation says what the command line takes: ``str``, ``int``, ``float``, ``Path``, ``bool`` (a flag),
    ``Literal[...]`` (a choice), ``tuple[...]`` of one of these (may be repeated), and each of them ``| None``.
    ``told``: the fields of `Option`.
    """
    return attrs.field(default=default, metadata={OPTION: Option(**told)}, repr=_shown)


def _shown(value: object) -> str:
    return repr(shown_url(value) if isinstance(value, str) and has_secret(value) else value)


def store(default: Any = attrs.NOTHING) -> Any:
    """``--store URL``. Its password does not arrive in ``Options``: the source looks it up by itself."""
    return option(
        default,
        help="The table: sqlite:////path/file.db or postgresql://user@host/database.",
        metavar="URL",
        env="BUSREP_STORE",
        elsewhere=ADVICE,
    )


def password_file() -> Any:
    """``--password-file FILE``."""
    return option(None, help="A file whose first line is the store's password.", metavar="FILE")


def redis(help: str, *, shown: bool = False) -> Any:  # noqa: A002 - as `option` has it
    """``--redis URL``; ``shown``: see `option`. --redis-password-file is a field of its own."""
    advice = f"the file of --redis-password-file, or {REDIS_ADVICE}"
    return option(None, help=help, metavar="URL", elsewhere=advice, shown=shown)


def stream(default: Any = attrs.NOTHING) -> Any:
    """``--stream NAME``: one, or, of a field that is a tuple, several."""
    return option(default, help="The stream's name.", metavar="NAME")


def finish_silent() -> Any:
    """``--finish-silent``."""
    return option(
        False,
        help="First finish writers that are silent for longer than --lease and have committed rows that nothing reads.",
    )


def lease() -> Any:
    """``--lease DURATION``: a float, at least `LEASE`."""
    told = Option(
        help="Seconds without a sign of life after which a writer counts as dead: five heartbeats of the writers.",
        duration=True,
    )
    return attrs.field(default=LEASE, metadata={OPTION: told}, validator=ge(LEASE))


def streams() -> Any:
    """``--streams MODULE:NAME``."""
    return option(
        None,
        help="Where the application declares its streams: needed for typed columns, and for tables of its own. "
        "A module alone means all its streams.",
        metavar="MODULE[:NAME]",
        joined=True,
    )


def submit(name: str) -> None:
    """Run the job as ``busrep pipeline NAME`` does, with the arguments of this process: for spark-submit.

    Needs the extra ``cli`` on the driver, as the command does.
    """
    # spark-submit runs the job's file by its path: beside it lie modules that are nobody's top-level modules.
    here = Path(__file__).parent.resolve()
    sys.path[:] = [entry for entry in sys.path if here not in (Path(entry).resolve(), Path(entry).resolve().parent)]
    from busrep.cli import main

    main(["pipeline", name, *sys.argv[1:]])
