"""Spark sessions that know the format ``busrep``."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrep.errors import ConfigError, MissingExtra

from .failures import is_sparks, reason
from .masters import check_master, is_loopback, is_standalone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("busrep.spark")

# The first whose streaming sources in Python can bound a batch, and end with what there is.
LEAST_SPARK = (4, 2)
# Seconds until somebody is told that a cluster has given no executor yet, which takes three.
EXECUTOR_WAIT = 15.0
# The thread that waits for them.
WATCHER = "busrep-spark-executors"

# What `conf` can change.
DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.enabled": "false",  # it would listen on a port
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}

# With it there are executors while there is work.
DYNAMIC = "spark.dynamicAllocation.enabled"

_starting = threading.Lock()


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
    with _starting:
        found = active()
        if found is None:
            return _started(app, master, dict(conf))
    if master is not None and found.sparkContext.master != master:
        logger.warning("a session on %s exists already: it is not on %s", found.sparkContext.master, master)
    register(found)
    return found


def _started(app: str, master: str | None, conf: dict[str, str]) -> SparkSession:
    found = _made(app, master, conf)
    try:
        _check_version(found)
        register(found)
    except BaseException:
        stop(found)
        raise
    if is_standalone(found.sparkContext.master or "") and found.conf.get(DYNAMIC, "false") != "true":
        threading.Thread(
            target=_warn_without_executors, args=[found], name="busrep-spark-executors", daemon=True
        ).start()
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


def stop(spark: SparkSession) -> None:
    """End a session, also one whose Java has died."""
    from py4j.protocol import Py4JError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that it has died
        try:
            spark.stop()
        except (Py4JError, OSError) as error:
            logger.debug("Spark did not stop: %s", reason(error))


def cancel() -> None:
    """End what the session of this process is doing, from another thread: it fails there."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is not None:
        context.cancelAllJobs()


def has_died(error: Exception) -> bool:
    """Whether ``error`` says that Spark's Java, which this process has started, is no more."""
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark import SparkContext

    if type(error) not in (Py4JError, Py4JNetworkError) and not isinstance(error, OSError):
        return False
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return False
    try:
        process.wait(1)  # its connections end a little earlier than it does
    except subprocess.TimeoutExpired:
        return False
    return True


def _check_version(spark: SparkSession) -> None:
    import pyspark

    ours, theirs = (tuple(version.split(".")[:2]) for version in (pyspark.__version__, spark.version))
    if ours != theirs:
        home = os.environ.get("SPARK_HOME")
        raise ConfigError(
            f"pyspark is {pyspark.__version__}, and its Java part {spark.version}"
            + (f": SPARK_HOME is {home!r}, unset it, or install the pyspark of that version" if home else "")
        )


def _warn_without_executors(spark: SparkSession) -> None:
    """A cluster whose workers are gone, or are busy, lets a job wait without a word."""
    context = spark.sparkContext
    time.sleep(EXECUTOR_WAIT)
    # A session that has ended meanwhile, with or without its Java, has nothing to be warned of.
    with contextlib.suppress(Exception):
        # The driver is one of them.
        if context._jsc.sc().getExecutorMemoryStatus().size() < 2:
            logger.warning(
                "%s has given no executor in %g s: has it workers, with enough memory and a core that is not in use? "
                "The job waits until it has",
                context.master,
                EXECUTOR_WAIT,
            )


def submitted() -> bool:
    """Whether spark-submit has started this process: its Java, master and settings are given then."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _made(app: str, master: str | None, conf: dict[str, str]) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    from .home import find_home
    from .java import find_java

    if "SPARK_REMOTE" in os.environ:
        raise ConfigError("SPARK_REMOTE is set: make the Spark Connect session yourself, then busrep.spark.register it")
    defaults = dict(DEFAULTS)
    python = None if submitted() else conf.get("spark.pyspark.python")  # spark-submit has put it into the environment
    variables = {"PYSPARK_PYTHON": python or os.environ.get("PYSPARK_PYTHON") or sys.executable}
    master = master or conf.get("spark.master")
    if not submitted():
        master = master or os.environ.get("BUSREP_SPARK_MASTER") or "local[*]"
        if (java := find_java().home) is not None:
            variables["JAVA_HOME"] = str(java)
        if (home := find_home(variables["PYSPARK_PYTHON"], master)) is not None:
            variables["SPARK_HOME"] = str(home)
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
