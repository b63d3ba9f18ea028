"""A writer in a process of its own, for test_stores.py: `python store_child.py URL WRITER FACTS [hang]`.

Writes facts of one row, every third rolled back, and prints "committed ID" after each commit. With `hang` it stops
there, after its last COMMIT and before it would publish, until it is killed; with `hold`, inside a transaction.
"""

from __future__ import annotations

import asyncio
import sys

from busrep.stores import open_store
from busrep.streams import Registry, Stream


async def main(url: str, writer: str, count: int, then: str) -> None:
    store = open_store(url, Registry([Stream("orders"), Stream("payments")]))
    await store.open()
    claim = await store.claim(writer, ["orders"], timeout=30)
    for at in range(1, count + 1):
        (token,) = await store.reserve("orders", 1)
        transaction = store.transaction(claim)
        await transaction.begin()
        await transaction.insert("orders", [(token, [[token]], [b"[%d]" % token])])
        if at % 3:
            await transaction.commit()
            print("committed", token, flush=True)
        else:
            await transaction.rollback()
    if then == "hold":
        transaction = store.transaction(claim)
        await transaction.begin()
    if then:
        print(then, flush=True)
        await asyncio.Event().wait()
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), "".join(sys.argv[4:])))
