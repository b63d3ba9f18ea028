"""How a command that does one long run ends: with its report, an error, or interrupted."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from busrep.errors import BusrepError

Report = dict[str, Any]
"""What a run comes to, JSON-able; ``ok``: whether it went well."""


def run_command(run: Callable[[], Coroutine[Any, Any, Report]], text_of: Callable[[Report], str], as_json: bool) -> int:
    """Do the run and print its report, as ``text_of`` puts it or as JSON. The exit code: 0 when it went well, 1
    otherwise, 130 when it was interrupted.

    What ``run`` raises when it is called counts as an error of the run. Call it in the main thread.
    """
    # As Ctrl-C: everything that was started is ended.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        report = asyncio.run(run())
    except BusrepError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    print(json.dumps(report, indent=2) if as_json else text_of(report))
    return 0 if report["ok"] else 1
