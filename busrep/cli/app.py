"""The group of all commands, and what becomes of their errors."""

from __future__ import annotations

import errno
import logging
from typing import Any

import click

from busrep import __version__
from busrep.cli.bench import bench
from busrep.cli.bootstrap import bootstrap
from busrep.cli.db import db, lag
from busrep.cli.demo import demo
from busrep.cli.listen import positions, tail
from busrep.cli.output import fail
from busrep.cli.pipeline import pipeline
from busrep.cli.publish import publish
from busrep.cli.serve import serve
from busrep.errors import BusrepError, Unavailable
from busrep.urls import hide_secrets

# As a shell reports a program that SIGINT ended.
INTERRUPTED = 130


class Commands(click.Group):
    """A click group whose BusrepErrors end in one line and status 2, and whose Ctrl-C in status 130."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BusrepError as error:
            if ctx.params.get("verbose"):
                logging.getLogger("busrep").exception("the command failed")
            text = hide_secrets(str(error))
            # Drivers like to explain over several lines; a server's log in a ConfigError is meant to have them.
            fail(" ".join(text.split()) if isinstance(error, Unavailable) else text)
        except OSError as error:
            if error.errno == errno.EPIPE:  # `busrep tail | head` has seen enough: click ends quietly
                raise
            fail(str(error))  # a full disk, say
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("-v", "--verbose", count=True, help="Log to standard error; twice for every line.")
def cli(verbose: int) -> None:
    """A replication bus over Redis pub/sub that loses nothing."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=level, format="busrep: %(message)s")
    if not verbose:  # a link that fails ends these commands, with an error that says the same
        logging.getLogger("busrep.redis").setLevel(logging.ERROR)


for command in (demo, bench, db, positions, tail, publish, lag, serve, bootstrap, pipeline):
    cli.add_command(command)
