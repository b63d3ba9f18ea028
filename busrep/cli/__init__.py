"""The ``busrep`` command. Needs the extra ``cli`` (click and rich)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from busrep.errors import MissingExtra


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args``, by default this process's.

    Exit status 0; 1: something lost, a reader too far behind; 2: an error.
    """
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError:
        sys.stderr.write(f"busrep: {MissingExtra('cli', 'the busrep command')}\n")
        sys.exit(2)
    try:
        from busrep.cli.app import cli
    except KeyboardInterrupt:  # while all this is loaded
        sys.exit(130)
    cli(args, prog_name="busrep")
