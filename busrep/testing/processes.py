"""A server process of a test: started under its own user, watched until it serves, and never left behind."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import attrs

from busrep.errors import ConfigError

# A server that is not ready after this many seconds counts as broken; a loaded machine needs a few.
START_TIMEOUT = 30.0
# Free ports tried before giving up: another process may take one between our look and the server's bind.
PORT_ATTEMPTS = 5
# Between two looks at a starting server, seconds.
POLL = 0.005
# Lines of the server's log that an error message quotes.
LOG_LINES = 20

# Runs in the child before the server: gives up root, asks the kernel for a signal when the parent dies, and
# becomes the server (same process ID). Not preexec_fn, which may deadlock in a threaded parent.
_LAUNCHER = """
import os, sys
uid, gid, signum, parent = map(int, sys.argv[1:5])
if signum:
    import ctypes  # before root is given up: others may not be able to read this Python's files
    libc = ctypes.CDLL(None)
if uid >= 0:
    os.setgroups([]); os.setgid(gid); os.setuid(uid)
if signum:
    libc.prctl(1, signum, 0, 0, 0)  # after it, because a change of user takes the setting back
    if os.getppid() != parent:
        sys.exit("the parent process is gone")
os.execv(sys.argv[5], sys.argv[5:])
"""


@attrs.define(eq=False)
class ServerProcess:
    """One server that this process starts. ``close()``, or leaving ``with``, stops it and removes its files."""

    directory: Path
    """Where its data and its log are."""
    identity: tuple[int, int] | None = None
    """(uid, gid) that it runs as; None: as this process."""
    port: int = attrs.field(default=0, init=False)
    """The TCP port on 127.0.0.1; 0 before the first start."""
    child: subprocess.Popen[bytes] | None = attrs.field(default=None, init=False)

    death_signal = signal.SIGKILL
    stop_signal = signal.SIGTERM

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running server process. Raises ConfigError when it is stopped."""
        if self.child is None:
            raise ConfigError("the server is not running: call start()")
        return self.child

    @property
    def running(self) -> bool:
        """Whether the server process lives."""
        return self.child is not None and self.child.poll() is None

    @property
    def log(self) -> str:
        """The last lines of what the server wrote to its log."""
        try:
            text = (self.directory / "server.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-LOG_LINES:])

    def command(self) -> list[str]:
        """The command line of the server."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether this very process (not another one on its port) serves requests."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make what it needs before its first start. Raises ConfigError."""

    def opened(self) -> Self:
        """Prepare it, and start it on a free port. Raises ConfigError; nothing of it is left then."""
        atexit.register(self.close)
        try:
            self.prepare()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def start(self) -> None:
        """Start it and return once it serves: on the port that it had, for the first time on a free one. Raises
        ConfigError with the log if it does not serve."""
        first, deadline = self.port == 0, time.monotonic() + START_TIMEOUT
        for attempt in itertools.count(1):
            if first:
                self.port = free_port()
            if self.running or self._try_start(deadline):
                return
            if not self.port_taken() or time.monotonic() > deadline or (first and attempt == PORT_ATTEMPTS):
                raise ConfigError(f"{self.command()[0]} did not start; its log ends:\n{self.log}")
            if not first:  # an outgoing connection may have got the number of our port for a moment
                time.sleep(0.05)

    def _try_start(self, deadline: float) -> bool:
        (self.directory / "server.log").unlink(missing_ok=True)
        self.child = spawn(self.command(), self.directory, self.identity, self.death_signal)
        while self.child.poll() is None and time.monotonic() < deadline:
            if self.is_ready():
                return True
            time.sleep(POLL)
        self.end(signal.SIGKILL)
        return False

    def port_taken(self) -> bool:
        """Whether the log says that another process has the port."""
        return "ddress already in use" in self.log

    def stop(self) -> None:
        """Shut it down in order; its port and directory stay for ``start()``."""
        self.end(self.stop_signal)

    def kill(self) -> None:
        """Kill it at once (SIGKILL)."""
        self.end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop it and start it on the same port."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): connections stay open and nothing answers, as with a half-open link."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen server go on."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop it for good and remove its files. May be called twice."""
        self.stop()
        atexit.unregister(self.close)
        shutil.rmtree(self.directory, ignore_errors=True)

    def end(self, signum: signal.Signals) -> None:
        """Send it a signal and wait until it is gone; SIGKILL after ten seconds."""
        child, self.child = self.child, None
        if child is None:
            return
        if child.poll() is None:
            child.send_signal(signum)
            child.send_signal(signal.SIGCONT)  # a paused server could not see the first one
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def spawn(
    command: Sequence[str], directory: Path, identity: tuple[int, int] | None, death_signal: signal.Signals
) -> subprocess.Popen[bytes]:
    """Start a program, as another user if ``identity`` says so; its output goes to ``server.log``."""
    # The kernel sends the death signal when the *thread* that forked ends; only the main one lasts.
    lasts = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
    told = (*(identity or (-1, -1)), int(death_signal) if lasts else 0, os.getpid())
    # PGDATA, PGPORT and the like would change what our command line says.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    with open(directory / "server.log", "ab") as log:
        return subprocess.Popen(  # noqa: S603 - the command is made here
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, *map(str, told), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
            env={**kept, "LC_ALL": "C"},
            start_new_session=True,
        )
