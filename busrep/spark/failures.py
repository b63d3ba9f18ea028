"""What went wrong on Spark, in one line: an exception of Spark's or of Java's carries pages of traces."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import PurePath
from typing import TypeVar

from busrep.errors import BusrepError

Result = TypeVar("Result")
log = logging.getLogger("busrep.spark")

# How often a job is begun, or a query of it, when all that failed was the start of a Python worker.
STARTS = 5

# As Python prints an exception of ours at the end of a trace, which Java quotes: on an executor, or in a planner.
_OURS = re.compile(r"^(?:\S+: )?busrep\.(?:[a-z_]+\.)*[A-Z]\w*: (.+)$", re.MULTILINE)
# The end of a trace of Python's, whose other lines are indented.
_SLOW = re.compile(
    r"Python worker failed to connect back|Timed out while waiting for the Python worker to connect back"
)
_LAST = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)$", re.MULTILINE)


def reason(error: BaseException) -> str:
    """What to tell a person: the message of the busrep error inside, else the first line of Spark's own."""
    text = str(error)
    if ours := _OURS.findall(text):
        return str(ours[-1])
    if last := _LAST.findall(text):
        return str(last[-1])
    java = getattr(error, "java_exception", None)
    lines = (str(java.toString()) if java is not None else text).strip().splitlines()
    first = lines[0] if lines else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class WorkersTooSlow(BusrepError):
    """Spark gave up a Python worker that had not connected to it in time, ``starts`` times in a row. Nothing is wrong
    with the job: started again, it goes on."""

    def __init__(self, starts: int) -> None:
        self.starts = starts
        super().__init__(
            f"Python workers did not start within the ten seconds that Spark gives them, {starts} times: this machine "
            "is too busy. Run the job with fewer cores (--master 'local[1]'), or when the machine has less to do. "
            "Started again, the job goes on"
        )


def is_slow_worker(error: BaseException) -> bool:
    """Whether all that failed is the start of a Python worker, in the time that Spark gives it."""
    return is_sparks(error) and _SLOW.search(str(error)) is not None and not _OURS.search(str(error))


def with_restarts(work: Callable[[], Result]) -> Result:
    """Do work that may be done again, up to `STARTS` times while only the start of a worker fails.

    Raises WorkersTooSlow, and what ``work`` raises.
    """
    for starts in range(1, STARTS + 1):
        try:
            return work()
        except Exception as error:
            if not is_slow_worker(error):
                raise
            if starts == STARTS:
                raise WorkersTooSlow(starts) from error
            warn_of_restart(starts)
    raise AssertionError("unreachable")


def warn_of_restart(starts: int) -> None:
    """Log that a worker was given up, and what is done about it."""
    log.warning(
        "a Python worker did not start in the time that Spark gives it; trying again (%d of %d)", starts, STARTS
    )


def is_sparks(error: BaseException) -> bool:
    """Whether Spark, or the bridge to Java, raised it; a bug in Python code on the driver is neither."""
    return type(error).__module__.partition(".")[0] in ("pyspark", "py4j")


def quiet() -> None:
    """Keep pyspark and py4j from writing exceptions to standard error before they raise them, Ctrl-C among them. Needs
    the extra ``spark``."""
    from pyspark import accumulators
    from pyspark.logger import PySparkLogger

    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_not_py4js)  # py4j logs some of them there

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True
    # Their server prints a trace when Java ends its connection first.
    for name in ("AccumulatorTCPServer", "AccumulatorUnixServer"):
        server = getattr(accumulators, name, None)
        if server is not None:
            server.handle_error = lambda *_: None


def _not_py4js(record: logging.LogRecord) -> bool:
    return "py4j" not in PurePath(record.pathname).parts
