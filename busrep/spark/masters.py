"""Spark masters: what one looks like, whether it answers, and where it is."""

from __future__ import annotations

import re
import socket

from busrep.errors import ConfigError, Unavailable

# Seconds for a Spark master to accept a connection; Spark itself would try for a minute.
CONNECT_TIMEOUT = 5.0

_LOCAL = re.compile(r"local(\[(\*|\d+)(, *\d+)?\])?|local-cluster\[.*\]")
_STANDALONE = re.compile(r"spark://([^/,:]+:\d+(?:,[^/,:]+:\d+)*)")
_OTHERS = re.compile(r"yarn|k8s://.+")
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}")


def check_master(master: str) -> None:
    """Raises ConfigError for what Spark cannot run on, Unavailable for a standalone master that does not answer."""
    if _LOCAL.fullmatch(master) or _OTHERS.fullmatch(master):
        return
    found = _STANDALONE.fullmatch(master)
    if found is None:
        raise ConfigError(
            f"the Spark master {master!r} is none: local[*], local[4], spark://host:7077, yarn, k8s://..."
        )
    failed: OSError | None = None
    for place in found[1].split(","):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
        except (OSError, OverflowError) as error:
            failed = error if isinstance(error, OSError) else OSError(f"{port} is no port")
        else:
            return
    raise Unavailable(f"the Spark master {master}", failed or "nobody listens")


def is_loopback(master: str) -> bool:
    """Whether the driver, the master and so the executors are all on this machine."""
    found = _STANDALONE.fullmatch(master)
    if found is None:
        return master.startswith("local")
    return all(_LOOPBACK.fullmatch(place.rpartition(":")[0]) for place in found[1].split(","))


def is_standalone(master: str) -> bool:
    """Whether it is ``spark://host:port``."""
    return _STANDALONE.fullmatch(master) is not None
