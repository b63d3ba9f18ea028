"""What an application declares, by name: MODULE:NAME or MODULE on a command line, or in an option of Spark's."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from busrep.errors import BusrepError, ConfigError
from busrep.streams import Stream

# What `named` raises where nothing is.
NOT_THERE = (ImportError, AttributeError, ValueError)


def named(where: str) -> Any:
    """What MODULE:NAME names, or the module MODULE; the application need not be installed. Raises one of NOT_THERE;
    ConfigError for a module that fails while it is imported."""
    module, colon, name = where.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        imported = _imported(module)
        return getattr(imported, name) if colon else imported
    finally:
        sys.path.remove(os.getcwd())


def _imported(module: str) -> ModuleType:
    if not module or module.startswith("."):
        raise ValueError(f"{module!r} is not the whole name of a module")
    try:
        return importlib.import_module(module)
    except (ImportError, BusrepError):
        raise
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # a script that ends itself must not end the command, in good order even
        at = _line_of(error)
        raise ConfigError(f"{at.filename}, line {at.lineno}: {type(error).__name__}: {error}") from error


def _line_of(error: BaseException) -> traceback.FrameSummary:
    """Where it was raised: of the application, if that called something else that raised it."""
    places = sysconfig.get_paths()
    others = ("<", places["stdlib"], places["purelib"], places["platlib"])
    frames = traceback.extract_tb(error.__traceback__)
    return [one for one in frames if not one.filename.startswith(others)][-1]


def declared_in(places: str) -> list[Stream[Any]]:
    """The streams of one place, or of several between commas.

    MODULE:NAME is a stream or several of them; MODULE means all its attributes that are streams. Raises one of
    NOT_THERE; ConfigError for a module that fails, where no streams are, and for two streams of one name.
    """
    found: dict[str, Stream[Any]] = {}
    for where in places.split(","):
        streams = _streams_of(named(where.strip()), attributes=":" not in where)
        if not streams:
            raise ConfigError(f"{where} is no Stream nor several of them")
        for stream in streams:
            if found.setdefault(stream.name, stream) is not stream:
                raise ConfigError(f"two streams of {places} are named {stream.name!r}")
    return list(found.values())


def init_command(store: str, streams: Iterable[Stream[Any]]) -> str:
    """The command that makes the tables for these streams, as it is typed. ``store``: the URL as it may be shown."""
    options: dict[str, None] = {}
    for stream in streams:
        plain = stream.row_type is None and stream.table is None
        options[f"--stream {shlex.quote(stream.name)}" if plain else f"--streams {_place_of(stream)}"] = None
    return " ".join(["busrep db init --store", shlex.quote(store), *options])


def _place_of(stream: Stream[Any]) -> str:
    """Where a stream is an attribute of a module that is imported: MODULE:NAME."""
    for module, imported in list(sys.modules.items()):
        if module != "__main__":
            for name, value in list(getattr(imported, "__dict__", {}).items()):
                if value is stream:
                    return f"{module}:{name}"
    return "MODULE:NAME"


def _streams_of(value: object, *, attributes: bool) -> list[Stream[Any]]:
    if attributes:
        return [one for one in vars(value).values() if isinstance(one, Stream)]
    streams = [value] if isinstance(value, Stream) else list(value) if isinstance(value, Iterable) else []
    return streams if all(isinstance(one, Stream) for one in streams) else []
