"""The file of ``--report``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from busrep.errors import ConfigError
from busrep.private_files import open_successor


def check_report_file(file: Path) -> None:
    """Raises ConfigError for one that cannot be written."""
    if not os.access(file if _is_special(file) else file.resolve().parent, os.W_OK):
        raise ConfigError(f"--report {file}: its folder is not there, or cannot be written to")


def write_report(file: Path, found: Mapping[str, Any]) -> None:
    """Write it as JSON: whoever waits for the file finds it whole. Raises OSError."""
    content = orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if _is_special(file):
        file.write_bytes(content)
        return
    file = file.resolve()
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        os.close(open_successor(temporary, file))
        temporary.write_bytes(content)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _is_special(file: Path) -> bool:
    # A pipe, a terminal, /dev/null: to be written into, and not to be replaced.
    return file.exists() and not file.is_file()
