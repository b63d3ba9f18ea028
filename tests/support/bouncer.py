"""PgBouncer, which hands the sessions of a PostgreSQL server from one client to the next."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import psycopg

from busrep.testing.processes import ServerProcess

PROGRAM = os.environ.get("BUSREP_PGBOUNCER") or shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")


@attrs.define(eq=False)
class BouncerServer(ServerProcess):
    """A PgBouncer in front of one database, which lets everybody in who names it.

    ``sessions``: how many of the server's it has, at most; its clients share them, a transaction at a time.
    """

    server: str = attrs.field(kw_only=True)
    """The URL of the database."""
    sessions: int = attrs.field(kw_only=True)

    @property
    def url(self) -> str:
        """Of the same database, through this pooler."""
        parts = urlsplit(self.server)
        return parts._replace(netloc=f"postgres@127.0.0.1:{self.port}").geturl()

    def command(self) -> list[str]:
        """The server; its configuration is written anew, for it names the port."""
        parts = urlsplit(self.server)
        configuration = self.directory / "pgbouncer.ini"
        configuration.write_text(
            f"[databases]\n* = host={parts.hostname} port={parts.port} user={parts.username} "
            f"password={parts.password}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\n"
            f"unix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = {self.sessions}\n"
        )
        assert PROGRAM is not None
        return [PROGRAM, str(configuration)]

    def is_ready(self) -> bool:
        """Whether a question comes through."""
        try:
            with psycopg.connect(self.url, connect_timeout=5) as connection:
                connection.execute("SELECT 1")
        except psycopg.Error:
            return False
        return self.running


def start_bouncer(server: str, *, sessions: int = 3) -> BouncerServer:
    """Start a PgBouncer, and return it once it serves. ``server``: the URL of the database. Raises ConfigError."""
    identity = (65534, 65534) if os.geteuid() == 0 else None  # it refuses to be root
    bouncer = BouncerServer(
        Path(tempfile.mkdtemp(prefix="busrep-bouncer-")), identity, server=server, sessions=sessions
    )
    bouncer.directory.chmod(0o755)
    return bouncer.opened()
