"""Servers around a Redis or a PostgreSQL of `busrep.testing.servers`: a Sentinel, a streaming replica."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

import attrs

from busrep.errors import ConfigError
from busrep.testing.servers import PostgresServer, RedisServer, find_redis


@attrs.define(eq=False)
class SentinelServer(RedisServer):
    """A Redis Sentinel that alone decides about one master, whose replicas it finds by itself."""

    service: str = "mymaster"
    """What clients call the master: ``Sentinel([...]).master_for(service)``."""
    settings: dict[str, object] = attrs.field(factory=dict)

    def command(self) -> list[str]:
        """The same program in its other mode; its state lives in its configuration file, which it rewrites."""
        return [*self.program, str(self.directory / "sentinel.conf"), "--sentinel", "--port", str(self.port)]

    def prepare(self) -> None:
        """Write the configuration."""
        lines = "".join(f"{name} {value}\n" for name, value in self.settings.items())
        (self.directory / "sentinel.conf").write_text(lines)


def start_sentinel(master: RedisServer, *, down_after: float = 1.0, failover_timeout: float = 5.0) -> SentinelServer:
    """Start a Sentinel that watches a running server, and return it once it answers.

    A replica is a ``start_redis(config={"replicaof": ["127.0.0.1", master.port]})``, before or after. The master
    counts as down when it has not answered for ``down_after`` seconds; a failover that takes longer than
    ``failover_timeout`` seconds is begun again. Raises ConfigError as ``start_redis`` does.
    """
    server = SentinelServer(Path(tempfile.mkdtemp(prefix="busrep-sentinel-")), program=find_redis())
    server.settings = {
        "bind": "127.0.0.1",
        "dir": server.directory,
        "sentinel monitor": f"{server.service} 127.0.0.1 {master.port} 1",
        "sentinel down-after-milliseconds": f"{server.service} {down_after * 1000:.0f}",
        "sentinel failover-timeout": f"{server.service} {failover_timeout * 1000:.0f}",
    }
    if password := master.config.get("requirepass"):
        server.settings |= {"sentinel auth-pass": f"{server.service} {password}"}
    return server.opened()


@attrs.define(eq=False)
class ReplicaServer(PostgresServer):
    """A streaming replica of ``primary``."""

    primary: PostgresServer = attrs.field(kw_only=True)

    def prepare(self) -> None:
        """Copy the primary. Raises ConfigError with what pg_basebackup said."""
        if self.identity:
            os.chown(self.directory, *self.identity)
        copy = [str(self.programs / "pg_basebackup"), "-D", str(self.data), "-d", self.primary.url]
        copy += ["-X", "stream", "-c", "fast", "-R", "--no-sync"]
        # A slot: without one the primary drops WAL that a replica which is down has not had yet.
        self.run_once([*copy, "-C", "-S", f"replica_{secrets.token_hex(4)}"])


def start_replica(primary: PostgresServer) -> PostgresServer:
    """Start a streaming replica of a running PostgreSQL; it answers questions and refuses writes.

    Stop it before its primary, which otherwise waits for it to have everything. Raises ConfigError where the
    installation has no ``pg_basebackup``, or it does not start.
    """
    if not os.access(primary.programs / "pg_basebackup", os.X_OK):
        raise ConfigError(f"{primary.programs} has no pg_basebackup, which makes replicas")
    return ReplicaServer(
        Path(tempfile.mkdtemp(prefix="busrep-replica-", dir=primary.directory.parent)),
        primary.identity,
        programs=primary.programs,
        password=primary.password,
        config=primary.config,
        primary=primary,
    ).opened()
