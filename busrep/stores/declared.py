"""What an application declares, by name: MODULE:NAME on a command line, or in an option of Spark's."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from busrep.streams import Stream

# What `named` raises where nothing is.
NOT_THERE = (ImportError, AttributeError, ValueError)


def named(where: str) -> Any:
    """What MODULE:NAME names; the application need not be installed. Raises one of NOT_THERE."""
    module, _, name = where.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        sys.path.remove(os.getcwd())


def streams_of(found: object) -> list[Stream[Any]]:
    """The stream, or the several, that a declaration is; none for anything else."""
    streams = [found] if isinstance(found, Stream) else list(found) if isinstance(found, Iterable) else []
    return streams if all(isinstance(one, Stream) for one in streams) else []
