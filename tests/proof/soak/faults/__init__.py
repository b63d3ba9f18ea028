"""The faults of the soak, one function each: do it, and undo it before returning.

A fault is given the world and its own dice, and tells whether it did what its name says: a COMMIT to cut may not
have passed, a Sentinel may find no replica to promote. What it did not do is not counted.

Faults of different processes and servers overlap; a lock keeps two from the same process's links, and from the same
server.
"""

from __future__ import annotations

from tests.proof.soak.faults import links, postgres_servers, processes, redis_servers, stray_lines, tcp_server
from tests.proof.soak.faults.common import Fault

FAULTS: dict[str, Fault] = {
    **links.FAULTS,
    **processes.FAULTS,
    **redis_servers.FAULTS,
    **postgres_servers.FAULTS,
    **stray_lines.FAULTS,
}
"""All of them, by name."""

OVER_TCP: dict[str, Fault] = {**FAULTS, **tcp_server.FAULTS}
"""And those of a TCP server, when there is one."""


def faults_over(way: str) -> dict[str, Fault]:
    """What can happen to a soak that goes over "redis", "tcp" or "sync"."""
    return OVER_TCP if way == "tcp" else FAULTS
