"""Servers around a Redis or a PostgreSQL of `busrep.testing.servers`: a Sentinel, a streaming replica."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

import attrs

from busrep.errors import ConfigError
from busrep.testing.servers import PostgresServer, RedisServer, redis_program, start_on_a_port


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


def start_sentinel(master: RedisServer, *, down_after: float = 1.0, failover_timeout: float = 5.0) -> SentinelServer:
    """Start a Sentinel that watches a running server, and return it once it answers.

    A replica is a ``start_redis(config={"replicaof": ["127.0.0.1", master.port]})``, before or after. The master
    counts as down when it has not answered for ``down_after`` seconds; a failover that takes longer than
    ``failover_timeout`` seconds is begun again. Raises ConfigError as ``start_redis`` does.
    """
    path = Path(tempfile.mkdtemp(prefix="busrep-sentinel-"))
    server = SentinelServer(0, path, True, program=redis_program())
    with contextlib.ExitStack() as on_error:
        on_error.callback(server.close)
        server.watch(master, down_after, failover_timeout)
        start_on_a_port(server)
        on_error.pop_all()
    return server


def start_replica(primary: PostgresServer) -> PostgresServer:
    """Start a streaming replica of a running PostgreSQL; it answers questions and refuses writes.

    Stop it before its primary, which otherwise waits for it to have everything. Raises ConfigError where the
    installation has no ``pg_basebackup``, or it does not start.
    """
    program = primary.programs / "pg_basebackup"
    if not os.access(program, os.X_OK):
        raise ConfigError(f"{primary.programs} has no pg_basebackup, which makes replicas")
    path = Path(tempfile.mkdtemp(prefix="busrep-replica-", dir=primary.directory.parent))
    server = PostgresServer(
        0, path, True, primary.identity, programs=primary.programs, password=primary.password, config=primary.config
    )
    with contextlib.ExitStack() as on_error:
        on_error.callback(server.close)
        if primary.identity:
            os.chown(path, *primary.identity)
        copy = [
            str(program),
            "-D",
            str(server.data),
            "-d",
            primary.url,
            "-X",
            "stream",
            "-c",
            "fast",
            "-R",
            "--no-sync",
        ]
        # A slot: without one the primary drops WAL that a replica which is down has not had yet.
        server.run_once([*copy, "-C", "-S", f"replica_{secrets.token_hex(4)}"])
        start_on_a_port(server)
        on_error.pop_all()
    return server
