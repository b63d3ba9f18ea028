"""Spark sessions that know the format ``busrep``."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrep.errors import ConfigError, MissingExtra, Unavailable

from .failures import is_sparks, reason

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("busrep.spark")

# The first whose streaming sources in Python can bound a batch, and end with what there is.
LEAST_SPARK = (4, 2)
# Seconds for a Spark master to accept a connection; Spark itself would try for a minute.
CONNECT_TIMEOUT = 5.0

# What `conf` can change.
DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.enabled": "false",  # it would listen on a port
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}

_LOCAL = re.compile(r"local(\[(\*|\d+)(, *\d+)?\])?|local-cluster\[.*\]")
_STANDALONE = re.compile(r"spark://([^/,:]+:\d+(?:,[^/,:]+:\d+)*)")
_OTHERS = re.compile(r"yarn|k8s://.+")
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}")


def session(app: str, *, master: str | None = None, conf: Mapping[str, str] = {}) -> SparkSession:
    """A Spark session with the format ``busrep``; ``app`` is its name.

    ``master``: ``local[*]``, ``local[2]``, ``spark://host:port``, ...; None: what spark-submit was told, else
    BUSREP_SPARK_MASTER, else ``local[*]``. ``conf``: Spark's settings, which go before those of `DEFAULTS`. A session
    that exists already is taken as it is. Executors find busrep and the modules that this process finds outside of its
    Python's own folders, where they have the same paths. Ends with ``stop()``.

    Raises MissingExtra; ConfigError for a master that is none, for what Spark refuses, and when there is no Java;
    Unavailable when the master cannot be reached.
    """
    check_extra()
    found = active()
    if found is not None:
        if master is not None and found.sparkContext.master != master:
            logger.warning("a session on %s exists already: it is not on %s", found.sparkContext.master, master)
    else:
        found = _made(app, master, dict(conf))
    try:
        register(found)
    except BaseException:
        found.stop()
        raise
    return found


def register(spark: SparkSession) -> None:
    """Teach a session the format ``busrep``.

    Where busrep is installed, Spark finds the format by itself. Filters reach the table when the session has
    ``spark.sql.python.filterPushdown.enabled``. Raises MissingExtra.
    """
    check_extra()
    from pyspark.errors import AnalysisException

    from .source import BusrepSource

    try:
        spark.dataSource.register(BusrepSource)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
        # Spark has asked the session that is active in this thread, which is another one.
        with _active(spark):
            spark.dataSource.register(BusrepSource)


@contextlib.contextmanager
def _active(spark: SparkSession) -> Iterator[None]:
    sessions: Any = spark._jvm.SparkSession  # type: ignore[union-attr]
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def active() -> SparkSession | None:
    """The session of this process, if there is one."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    # Not public; but without it one cannot ask whether there is a session, in another thread, without making one.
    if SparkContext._active_spark_context is None:
        return None
    return SparkSession.builder.getOrCreate()


def check_extra() -> None:
    """Raises MissingExtra, and ConfigError for a Spark that is too old."""
    try:
        import pyarrow  # noqa: F401
        import pyspark
    except ImportError:
        raise MissingExtra("spark", "busrep on Spark") from None
    version = tuple(int(number) for number in re.findall(r"\d+", pyspark.__version__)[:2])
    if version < LEAST_SPARK:
        least = ".".join(map(str, LEAST_SPARK))
        raise ConfigError(f"pyspark is {pyspark.__version__}, and {least} is needed: pip install 'busrep[spark]'")


def submitted() -> bool:
    """Whether spark-submit has started this process: its Java, master and settings are given then."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _made(app: str, master: str | None, conf: dict[str, str]) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    from .java import find_java

    if "SPARK_REMOTE" in os.environ:
        raise ConfigError("SPARK_REMOTE is set: make the Spark Connect session yourself, then busrep.spark.register it")
    defaults = dict(DEFAULTS)
    variables = {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON") or sys.executable}
    if not submitted():
        master = master or os.environ.get("BUSREP_SPARK_MASTER") or "local[*]"
        if (home := find_java().home) is not None:
            variables["JAVA_HOME"] = str(home)
    if master is not None:
        check_master(master)
        conf["spark.master"] = master
        if is_loopback(master):
            # Nothing of it is for other machines, as it would be by default.
            variables["SPARK_LOCAL_IP"] = "127.0.0.1"
            defaults |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    path = "spark.executorEnv.PYTHONPATH"
    conf[path] = os.pathsep.join([*([conf[path]] if conf.get(path) else []), *modules_path()])
    with _environment(variables):
        try:
            if submitted():
                SparkContext._ensure_initialized()  # the JVM is there, and what it was told goes before our defaults
                told = SparkConf()
                defaults = {name: value for name, value in defaults.items() if not told.contains(name)}
            builder = SparkSession.builder.appName(app).config(map={**defaults, **conf})
            return builder.getOrCreate()
        except Exception as error:
            if not is_sparks(error):
                raise
            raise ConfigError(f"Spark did not start: {reason(error)}") from error


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    # The JVM and its workers inherit it; of this process it is no business.
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def check_master(master: str) -> None:
    """Raises ConfigError for what Spark cannot run on, Unavailable for a standalone master that does not answer."""
    if _LOCAL.fullmatch(master) or _OTHERS.fullmatch(master):
        return
    found = _STANDALONE.fullmatch(master)
    if found is None:
        raise ConfigError(
            f"the Spark master {master!r} is none: local[*], local[4], spark://host:7077, yarn, k8s://..."
        )
    failed: OSError | None = None
    for place in found[1].split(","):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
        except (OSError, OverflowError) as error:
            failed = error if isinstance(error, OSError) else OSError(f"{port} is no port")
        else:
            return
    raise Unavailable(f"the Spark master {master}", failed or "nobody listens")


def is_loopback(master: str) -> bool:
    """Whether the driver, the master and so the executors are all on this machine."""
    found = _STANDALONE.fullmatch(master)
    if found is None:
        return master.startswith("local")
    return all(_LOOPBACK.fullmatch(place.rpartition(":")[0]) for place in found[1].split(","))


def modules_path() -> list[str]:
    """The folders from which this process imports busrep and the application, for the executors' PYTHONPATH."""
    package = Path(__file__).parent.parent
    own = {
        Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    }
    found: dict[str, None] = {}
    # The working directory comes last: what is imported from there is what nobody else has.
    for entry in (str(package.parent), *sys.path, os.getcwd()):
        folder = Path(entry or os.getcwd()).resolve()
        inside = package in (folder, *folder.parents)  # a job's own folder, in which spark-submit has started it
        pythons = folder in own or folder.parent in own or folder.name in ("site-packages", "dist-packages")
        if folder.exists() and folder.suffix != ".zip" and not inside and not pythons:
            found[str(folder)] = None
    return list(found)
