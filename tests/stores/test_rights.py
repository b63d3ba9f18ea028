"""The rights that docs/guides/deploy.md grants suffice, and it grants none that nobody needs."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql

import busrep
from busrep import Settings, Stream, Table
from busrep.core.snapshots import AppliedParts
from busrep.errors import Unavailable
from busrep.spark.staging import StagedBatch
from busrep.spark.staging_store import StagingPlace, open_staging_store
from busrep.stores import open_store
from busrep.stores.interface import Appended, AsyncStore
from busrep.streams import Registry
from tests import ROOT
from tests.stores.store_conformance import read, sync, write

pytestmark = pytest.mark.servers

PAGE = (ROOT / "docs" / "guides" / "deploy.md").read_text()
SETTINGS = Settings(heartbeat=0.1, poison_after=0.0, retry_min=0.01, save_every=0.0, handler_retries=0)
orders: Stream[list[object]] = Stream("orders")


def granted() -> list[tuple[str, str, str]]:
    """(right, what on, role), one for each single right."""
    block = re.search(r"```sql\n(GRANT .*?)```", PAGE, re.DOTALL)
    assert block is not None
    found = []
    for line in re.findall(r"^GRANT .*$", block[1], re.MULTILINE):
        rights, on, role = re.fullmatch(r"GRANT (.*) ON (.*) TO (\w+);", line).groups()  # type: ignore[union-attr]
        kind = "SEQUENCE " * on.startswith("SEQUENCE ")
        for table in on.removeprefix("SEQUENCE ").split(", "):
            found += [(right, kind + table, role) for right in rights.split(", ")]
    return found


@pytest.fixture
def roles(postgres_url: str) -> Iterator[dict[str, str]]:
    """URLs of a fresh database, by role: "owner", "writer", "reader"; the last two may nothing yet."""
    head, _, database = postgres_url.rpartition("/")
    host = head.rpartition("@")[2]
    names = {role: f"{role}_{database}" for role in ("writer", "reader")}
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        for name in names.values():
            owner.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(sql.Identifier(name)))
        yield {"owner": postgres_url} | {
            role: f"postgresql://{name}:x@{host}/{database}" for role, name in names.items()
        }
        for name in names.values():
            owner.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


@pytest.fixture
def owner(roles: dict[str, str]) -> Iterator[Callable[[str, tuple[str, str, str]], None]]:
    """Grants ("GRANT {} ON {} TO {}") or revokes one right."""
    with psycopg.connect(roles["owner"], autocommit=True) as server:

        def run(text: str, right: tuple[str, str, str]) -> None:
            what, on, role = right
            server.execute(text.format(what, on, roles[role].split("//")[1].split(":")[0]).encode())

        yield run


@asynccontextmanager
async def opened(url: str, stream: Stream[list[object]] = orders) -> AsyncIterator[AsyncStore]:
    store = open_store(url, Registry([stream]))
    try:
        await store.open()
        yield store
    finally:
        await store.close()


GRANT, REVOKE = "GRANT {} ON {} TO {}", "REVOKE {} ON {} FROM {}"


@sync
async def test_buses_do_with_the_rights_of_the_page(
    roles: dict[str, str], owner: Callable[[str, tuple[str, str, str]], None], redis_url: str, bus_name: str
) -> None:
    await open_store(roles["owner"], Registry([orders])).init()
    for right in granted():
        owner(GRANT, right)

    def bus(role: str, **options: Any) -> busrep.Bus:
        return busrep.connect(
            redis_url, name=bus_name, streams=[orders], store=roles[role], settings=SETTINGS, **options
        )

    handled: list[object] = []
    async with (
        bus("writer", writer="w1") as writer,
        bus("reader", reader="r1", on_poison="dead_letter") as reader,
        bus("reader") as other,
    ):

        @reader.subscribe(orders)
        async def handle(batch: busrep.Batch[list[object]]) -> None:
            if [3] in batch.rows:
                raise ValueError
            handled.extend(row for row in batch.rows if row not in handled)

        for number in range(5):
            async with writer.write(orders) as fact:
                fact.add([number])
        await reader.wait_for(orders, "w1", fact.id)
        await other.wait_for(orders, "w1", fact.id)
    assert handled == [[0], [1], [2], [4]]


async def all_that_a_writer_does(url: str, number: int) -> None:
    async with opened(url) as store:
        with psycopg.connect(url) as connection:  # a failover, as it looks
            try:
                connection.execute("UPDATE busrep_meta SET value = '1/00000001' WHERE key = 'server'")
            except psycopg.errors.InsufficientPrivilege as error:
                raise Unavailable("PostgreSQL", f"{error}; see 'Rights in PostgreSQL'") from error
        claim = await store.claim("w1", ["orders"], timeout=5)
        ids = await write(store, claim, 1)
        appended = Appended({"orders": [(token, [[1]], [b"[1]"]) for token in await store.reserve("orders", 1)]})
        await store.append(claim, appended)
        await store.outcome(claim, appended, [])  # as after a lost answer
        await store.heartbeat(claim, {"orders": ids[-1]})
        await store.known()
        await store.finish("w1", claim.incarnation, timeout=5)


async def all_that_a_reader_does(url: str, number: int) -> None:
    reader = f"r{number}"  # whatever the last one had to leave unfinished
    async with opened(url) as store:
        epoch = await store.epoch()
        await store.known()
        await store.sequence("orders")
        await read(store, "w1", 0, 1)
        await store.register_reader(reader, {("orders", "w1"): 0}, epoch)
        position = (await store.load_reader(reader)).positions["orders", "w1"]
        await store.save_reader(reader, [("orders", "w1", position, position + 1)], epoch)
        await store.reset_reader(reader, {("orders", "w1"): 0}, epoch)
        agreement = await store.agree("orders", part_rows=10)
        await store.leave(agreement)
        id = await store.begin_bootstrap(reader, agreement, syncs=1, reason="new")
        online = AppliedParts(parts=0, applied=0, rows=0, bytes=0, state="online")
        await store.save_bootstrap(reader, "orders", id, online)
        assert [one.state for one in await store.bootstraps(reader)] == ["online"]
        await store.dead_letter(reader, "orders", "w1", [1], [b"[1]"], "no")
        await store.dead_letters(1)


@sync
async def test_each_of_them_is_needed(
    roles: dict[str, str], owner: Callable[[str, tuple[str, str, str]], None]
) -> None:
    await open_store(roles["owner"], Registry([orders])).init()
    work = {"writer": all_that_a_writer_does, "reader": all_that_a_reader_does}
    for right in granted():
        owner(GRANT, right)
    for role, works in work.items():
        await works(roles[role], 0)
    needless = []
    for number, right in enumerate(granted()):
        owner(REVOKE, right)
        try:
            await work[right[2]](roles[right[2]], number)
            needless.append(right)
        except Unavailable as error:
            assert "permission denied for" in str(error)  # noqa: PT017
            assert "Rights in PostgreSQL" in str(error)  # noqa: PT017
        owner(GRANT, right)
    assert needless == []


@pytest.mark.parametrize("when", ["at the start", "later"])
@sync
async def test_rows_that_a_policy_hides_are_not_taken_for_rows_that_are_not_there(
    roles: dict[str, str], owner: Callable[[str, tuple[str, str, str]], None], when: str
) -> None:
    """Row-level security without a policy hides every row. A page without them would pass for the whole of them."""
    await open_store(roles["owner"], Registry([orders])).init()
    for right in granted():
        owner(GRANT, right)
    secured = "ALTER TABLE busrep_facts ENABLE ROW LEVEL SECURITY"
    async with opened(roles["owner"]) as store:
        claim = await store.claim("w1", ["orders"], timeout=5)
        ids = await write(store, claim, 1)
        with psycopg.connect(roles["owner"], autocommit=True) as server:
            if when == "at the start":
                server.execute(secured)
                with pytest.raises(Unavailable, match=r"row-level security .* busrep_facts.*Rights in PostgreSQL"):
                    async with opened(roles["reader"]):
                        pass
            else:
                async with opened(roles["reader"]) as reader:
                    server.execute(secured)
                    with pytest.raises(Unavailable, match=r'row-level security .*"busrep_facts".*Rights in PostgreSQL'):
                        await read(reader, "w1", 0, ids[-1])
        assert len(await read(store, "w1", 0, ids[-1])) == 1  # from the owner nothing is hidden


@sync
async def test_rows_of_an_own_table_that_a_policy_hides(
    roles: dict[str, str], owner: Callable[[str, tuple[str, str, str]], None]
) -> None:
    own: Stream[list[object]] = Stream("history", table=Table("history", columns=("what",)))
    with psycopg.connect(roles["owner"], autocommit=True) as server:
        server.execute("CREATE TABLE history (id bigint, writer text, what text)")
        await open_store(roles["owner"], Registry([own])).init()
        for right in granted():
            if "busrep_seq" not in right[1]:
                owner(GRANT, right)
        async with opened(roles["reader"], own):
            pass
        server.execute("ALTER TABLE history ENABLE ROW LEVEL SECURITY")
        with pytest.raises(Unavailable, match=r"row-level security may hide rows of history from"):
            async with opened(roles["reader"], own):
                pass


# What a sink of Spark needs beside a writer's rights.
SINK = [(right, "busrep_staged", "writer") for right in ("SELECT", "INSERT", "DELETE")] + [
    (right, "busrep_sinks", "writer") for right in ("SELECT", "INSERT", "UPDATE", "DELETE")
]


def all_that_a_sink_does(url: str, number: int) -> None:
    """Stages a batch, makes facts of it, and forgets it."""
    store = open_staging_store(url, Registry([orders]))
    stage = store.stage(StagingPlace(f"q{number}", 0, 0, "a"))
    try:
        stage.add([("", b"[1]")])
    finally:
        stage.close()
    store.open()
    try:
        store.check_backing("orders")
        assert store.done(f"q{number}") is None
        claim = store.claim("w1", ["orders"], timeout=5)
        made = store.commit(claim, "orders", StagedBatch(f"q{number}", 0, "", "run", ["a"], 1, once=True))
        store.heartbeat(claim, {"orders": made.last})
        store.clear(f"q{number}", ["a"])
        store.forget(f"q{number}")
        store.clean()
    finally:
        store.close()


@sync
async def test_each_right_of_a_sink_is_needed(
    roles: dict[str, str], owner: Callable[[str, tuple[str, str, str]], None]
) -> None:
    await open_store(roles["owner"], Registry([orders])).init()
    declared = [("SELECT", "busrep_streams", "writer")]
    for right in [*granted(), *SINK, *declared]:
        owner(GRANT, right)
    all_that_a_sink_does(roles["writer"], 0)
    needless = []
    for number, right in enumerate([*SINK, *declared], 1):
        owner(REVOKE, right)
        try:
            all_that_a_sink_does(roles["writer"], number)
            needless.append(right)
        except Unavailable as error:
            assert "permission denied for" in str(error)  # noqa: PT017
        owner(GRANT, right)
    assert needless == []
