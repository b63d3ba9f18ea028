"""rediss:// compares the host's name with the certificate's, whatever version of redis-py is installed."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import pytest
from click.testing import CliRunner

import busrep
from busrep.cli.app import cli
from busrep.errors import Unavailable
from busrep.links.redis import redis_pool
from busrep.settings import Settings
from busrep.sync import connect as sync_connect
from busrep.sync.publisher import redis_pool as sync_redis_pool
from busrep.testing.links import FaultyLink
from tests import DATA

# Self-signed, for other.example.
OTHER = DATA / "tls_other.crt"

typing = busrep.Stream("typing", resettable=True)


async def opened(url: str, name: str) -> None:
    async with busrep.connect(url, name=name, streams=[typing], writer="w1"):
        pass


def opened_in_threads(url: str, name: str) -> None:
    with sync_connect(url, name=name, streams=[typing], writer="w1") as bus:
        bus.send(busrep.RemoteServerUp("x"))


@pytest.mark.servers
def test_a_certificate_for_another_name_is_refused(redis_url: str, bus_name: str) -> None:
    """Although its authority is trusted. With the check turned off in the URL it is taken."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(OTHER, DATA / "tls_other.key")

    async def main() -> None:
        async with FaultyLink(redis_url, tls=context) as proxy:
            url = f"{proxy.url}?ssl_ca_certs={OTHER}"
            with pytest.raises(Unavailable, match="(?i)certificate"):
                await opened(url, bus_name)
            with pytest.raises(Unavailable, match="(?i)certificate"):
                await asyncio.to_thread(opened_in_threads, url, bus_name)
            command = ["positions", "--name", bus_name, "--for", "0.1s", "--redis", url]
            refused = await asyncio.to_thread(CliRunner().invoke, cli, command)
            assert refused.exit_code == 2
            assert "certificate" in refused.stderr.lower()
            for wanted in ("ssl_check_hostname=false", "ssl_cert_reqs=none"):
                await opened(f"{url}&{wanted}", bus_name)
                await asyncio.to_thread(opened_in_threads, f"{url}&{wanted}", bus_name)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("query", "checks"),
    [
        ("", ("required", True)),
        ("?db=1", ("required", True)),
        ("?ssl_check_hostname=false", ("required", False)),
        ("?ssl_cert_reqs=none", ("none", False)),
        ("?ssl_cert_reqs=optional", ("optional", True)),
    ],
)
def test_what_the_driver_is_told(query: str, checks: tuple[str, bool]) -> None:
    """redis-py before 6 compared no names unless it was told to."""
    pools: list[Any] = [redis_pool(f"rediss://h{query}"), sync_redis_pool(f"rediss://h{query}", Settings())]
    for pool in pools:
        assert (pool.connection_kwargs["ssl_cert_reqs"], pool.connection_kwargs["ssl_check_hostname"]) == checks
        pool.make_connection()  # the arguments go together
    plain: list[Any] = [redis_pool("redis://h"), sync_redis_pool("redis://h", Settings())]
    assert not any("ssl_check_hostname" in pool.connection_kwargs for pool in plain)
