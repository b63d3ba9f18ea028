"""What went wrong on Spark, in one line: an exception of Spark's or of Java's carries pages of traces."""

from __future__ import annotations

import logging
import re
from pathlib import PurePath

# As Python prints an exception of ours at the end of a trace, which Java quotes: on an executor, or in a planner.
_OURS = re.compile(r"^(?:\S+: )?busrep\.(?:[a-z_]+\.)*[A-Z]\w*: (.+)$", re.MULTILINE)
# The end of a trace of Python's, whose other lines are indented.
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
