"""TLS to Redis: a TLS end in front of the real server, with a certificate made for the tests alone."""

from __future__ import annotations

import asyncio
import ssl

import pytest

import busrep
from busrep.errors import Unavailable
from busrep.testing.links import FaultyLink
from tests import DATA

CERTIFICATE = DATA / "tls.crt"

typing = busrep.Stream("typing", resettable=True)


@pytest.mark.servers
def test_rediss_urls_are_encrypted_and_verified(redis_url: str, bus_name: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, DATA / "tls.key")

    async def main() -> None:
        async with FaultyLink(redis_url, tls=context) as proxy:
            assert proxy.url.startswith("rediss://")
            trusted = f"{proxy.url}?ssl_ca_certs={CERTIFICATE}"
            got: list[object] = []
            async with (
                busrep.connect(trusted, name=bus_name, streams=[typing], writer="w1") as writer,
                busrep.connect(trusted, name=bus_name, streams=[typing]) as reader,
            ):
                reader.subscribe(typing)(lambda batch: got.extend(batch.rows))
                while reader.statistics()["reader"]["states"].get("typing") != {"w1": "live"}:
                    await asyncio.sleep(0.01)
                async with writer.write(typing) as fact:
                    fact.add(["secret"])
                await reader.wait_for(typing, "w1", fact.id)
            assert got == [["secret"]]
            assert proxy.connections >= 4
            with pytest.raises(Unavailable, match="(?i)certificate"):  # nobody vouches for it
                async with busrep.connect(proxy.url, name=bus_name):
                    pass

    asyncio.run(asyncio.wait_for(main(), 100))
