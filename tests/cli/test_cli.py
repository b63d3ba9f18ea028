"""The commands on real servers: through click's runner where one process is enough, else as real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest
import redis
from click.testing import CliRunner, Result

from busrep.cli.app import cli
from busrep.cli.listen import Lines
from busrep.cli.output import ago
from busrep.stores import open_store
from busrep.streams import Registry, Stream

pytestmark = pytest.mark.servers


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


def busrep(*args: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, args, input=stdin)


def succeeding(*args: str, stdin: bytes | None = None) -> Any:
    result = busrep(*args, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    return orjson.loads(result.stdout)


def process(*args: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "busrep.cli", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.fixture
def foreign_writer(redis_url: str, bus_name: str) -> Iterator[None]:
    """Speaks the protocol by hand: answers REPLICATE with positions, and then writes two rows."""
    client = redis.Redis.from_url(redis_url)
    channel = client.pubsub(ignore_subscribe_messages=True)
    channel.subscribe(bus_name)

    def answer() -> None:
        for message in channel.listen():
            if message["data"] == b"END":
                return
            if message["data"].strip() == b"REPLICATE":
                client.publish(bus_name, b"POSITION events w1 53 53")
                client.publish(bus_name, b"POSITION typing w2 7 7")
                client.publish(bus_name, b'RDATA events w1 54 ["$foo", null]\nRDATA events w1 55 ["$bar", 1]')

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    client.publish(bus_name, b"END")
    thread.join()
    channel.close()
    client.close()


# -- positions and tail --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("foreign_writer")
def test_positions_follows_any_channel(redis_url: str, bus_name: str) -> None:
    found = succeeding("positions", "--redis", redis_url, "--name", bus_name, "--for", "500ms")
    assert found == {"events": {"w1": 55}, "typing": {"w2": 7}}
    shown = busrep("positions", "--redis", redis_url, "--name", bus_name, "--for", "500ms")
    assert shown.exit_code == 0
    assert "events" in shown.stdout
    assert "55" in shown.stdout


@pytest.mark.usefixtures("foreign_writer")
def test_tail_prints_what_passes_the_filters(redis_url: str, bus_name: str) -> None:
    common = ("tail", "--redis", redis_url, "--name", bus_name)
    result = busrep(*common, "--stream", "events", "--command", "rdata", "--lines", "2")
    assert result.stdout.splitlines() == ['< RDATA events w1 54 ["$foo", null]', '< RDATA events w1 55 ["$bar", 1]']
    result = busrep(*common, "--for", "300ms")
    assert "> REPLICATE" in result.stdout.splitlines()
    result = busrep(*common, "--writer", "w2", "--lines", "1", "--json")
    assert orjson.loads(result.stdout) == {"direction": "<", "channel": bus_name, "line": "POSITION typing w2 7 7"}


@pytest.mark.parametrize(
    ("chosen", "passing"),
    [
        ({}, [0, 1, 2, 3]),
        ({"streams": {"events"}}, [0, 1]),
        ({"writers": {"w1"}}, [0, 2]),
        ({"commands": {"RDATA"}}, [1]),
        ({"streams": {"events"}, "writers": {"w1"}}, [0]),
    ],
)
def test_filters(chosen: dict[str, Any], passing: list[int]) -> None:
    lines = ["POSITION events w1 1 1", "RDATA events w2 3 [1]", "NAME w1 7", "REPLICATE"]
    wanted = Lines(**chosen)
    assert [index for index, line in enumerate(lines) if wanted.passes(line)] == passing


def test_tail_ends_with_130_on_ctrl_c(redis_url: str, bus_name: str) -> None:
    with process("tail", "--redis", redis_url, "--name", bus_name) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"> REPLICATE\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=10)
        assert (child.returncode, errors) == (130, b"")


@pytest.mark.usefixtures("foreign_writer")
def test_tail_into_a_closed_pipe_ends(redis_url: str, bus_name: str) -> None:
    command = [sys.executable, "-m", "busrep.cli", "tail", "--redis", redis_url, "--name", bus_name]
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE) as child:
        os.close(writing)
        _, errors = child.communicate(timeout=15)
    assert b"Traceback" not in errors


# -- db, publish, lag ----------------------------------------------------------------------------------------


def published(store_url: str, redis_url: str, bus_name: str, lines: bytes, *options: str) -> Any:
    return succeeding("publish", "--redis", redis_url, "--name", bus_name, "--store", store_url, *options, stdin=lines)


def test_publish_status_lag_prune_restored(redis_url: str, bus_name: str, store_url: str) -> None:
    made = succeeding("db", "init", "--store", store_url, "--stream", "orders", "--stream", "payments")
    assert made["streams"] == ["orders", "payments"]
    assert succeeding("db", "init", "--store", store_url)["epoch"] == made["epoch"]

    lines = (
        b'{"stream":"orders","row":[1,"a"]}\n{"stream":"orders","rows":[[2,"b"],[3,"c"]]}\n\n'
        b'{"stream":"payments","row":{"x":1}}\n{"stream":"orders","row":[4]}'
    )
    done = published(store_url, redis_url, bus_name, lines)
    assert done == {"facts": 4, "rows": 5, "last": {"orders": 3, "payments": 1}}
    done = published(store_url, redis_url, bus_name, b"[5]\n[6]\n", "--stream", "orders", "--writer", "other")
    assert done == {"facts": 2, "rows": 2, "last": {"orders": 5}}

    status = succeeding("db", "status", "--store", store_url)
    assert status["streams"]["orders"]["rows"] == 6
    assert set(status["streams"]["orders"]["writers"]) == {"busrep-publish", "other"}
    assert set(status["streams"]["payments"]["writers"]) == {"busrep-publish"}
    shown = busrep("db", "status", "--store", store_url)
    assert shown.exit_code == 0
    assert "busrep-publish" in shown.stdout

    asyncio.run(save_reader(store_url, {("orders", "busrep-publish"): 1, ("orders", "other"): 5}))
    found = succeeding("lag", "--store", store_url)
    by_writer = {one["writer"]: one["lag"] for one in found["readers"]}
    assert by_writer["other"] == 0
    assert by_writer["busrep-publish"] >= 2
    assert found["worst"] == by_writer["busrep-publish"]
    assert busrep("lag", "--store", store_url, "--max", "1").exit_code == 1
    assert busrep("lag", "--store", store_url, "--max", "1000").exit_code == 0
    assert "billing" in busrep("lag", "--store", store_url, "--reader", "billing").stdout

    pruned = succeeding("db", "prune", "--store", store_url, "--keep", "0")
    assert pruned["floors"]["orders"]["busrep-publish"] == 1  # a reader still needs the rows above
    pruned = succeeding("db", "prune", "--store", store_url, "--keep", "0", "--reader-cap", "0")
    assert pruned["floors"]["orders"]["busrep-publish"] == 3
    assert "nothing" in busrep("db", "prune", "--store", store_url, "--older-than", "1h").stdout

    refused = CliRunner().invoke(cli, ["db", "restored", "--store", store_url], input="n\n")
    assert refused.exit_code == 1
    epoch = succeeding("db", "restored", "--store", store_url, "--yes")["epoch"]
    assert epoch == succeeding("db", "status", "--store", store_url)["epoch"] != made["epoch"]


async def save_reader(store_url: str, positions: dict[tuple[str, str], int]) -> None:
    store = open_store(store_url, Registry([Stream("orders")]))
    await store.open()
    epoch = await store.epoch()
    for (stream, writer), position in positions.items():
        await store.register_reader("billing", {(stream, writer): position}, epoch)
    await store.close()


def test_publish_takes_lines_as_they_come(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    succeeding("db", "init", "--store", sqlite_url, "--stream", "orders", "--stream", "late")
    path = sqlite_url.removeprefix("sqlite:///")

    def facts() -> int:
        with sqlite3.connect(path) as connection:
            found = connection.execute("SELECT count(*) FROM busrep_facts").fetchone()[0]
        connection.close()
        return int(found)

    with process("publish", "--redis", redis_url, "--name", bus_name, "--store", sqlite_url) as child:
        assert child.stdin is not None
        child.stdin.write(b'{"stream":"orders","row":[1]}\n')
        child.stdin.flush()
        until(lambda: facts() == 1)
        child.stdin.write(b'{"stream":"late","row":[2]}\n{"stream":"orders","row":[3]}\n')
        child.stdin.flush()
        until(lambda: facts() == 3)
        output, errors = child.communicate(timeout=15)
        assert child.returncode == 0, errors
        assert b"3 facts, 3 rows" in output


def test_many_lines_are_published_in_bulk(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    succeeding("db", "init", "--store", sqlite_url, "--stream", "orders")
    lines = b"".join(b"[%d]\n" % number for number in range(3_000))
    with process(
        "publish", "--redis", redis_url, "--name", bus_name, "--store", sqlite_url, "--stream", "orders", "--json"
    ) as child:
        output, _ = child.communicate(lines, timeout=30)
    assert json.loads(output) == {"facts": 3_000, "rows": 3_000, "last": {"orders": 3_000}}


def test_a_bad_line_ends_publishing_and_names_itself(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    succeeding("db", "init", "--store", sqlite_url, "--stream", "orders")
    command = ("publish", "--redis", redis_url, "--name", bus_name, "--store", sqlite_url, "--stream", "orders")
    with process(*command) as child:
        assert child.stdin is not None
        child.stdin.write(b"[1]\n[2]\n{nonsense\n[3]\n")
        child.stdin.flush()  # and stays open, as from a terminal
        child.wait(15)
        assert child.returncode == 2
        assert child.stderr is not None
        errors = child.stderr.read()
    assert errors.count(b"\n") == 1
    assert b"line 3" in errors
    published = re.search(rb"nothing from line \d on is published; facts published before it: (\d)", errors)
    assert published is not None
    assert succeeding("db", "status", "--store", sqlite_url)["streams"]["orders"]["rows"] == int(published[1]) < 3


@pytest.mark.parametrize(
    "line",
    ["[1]", '{"row":[1]}', '{"stream":1,"row":[1]}', '{"stream":"orders","rows":[]}', '{"stream":"a","row":1,"x":2}'],
)
def test_lines_of_another_shape(line: str, redis_url: str, bus_name: str, sqlite_url: str) -> None:
    succeeding("db", "init", "--store", sqlite_url, "--stream", "orders")
    args = ("publish", "--redis", redis_url, "--name", bus_name, "--store", sqlite_url)
    result = busrep(*args, stdin=line.encode())
    assert result.exit_code == 2
    assert "line 1 must be" in result.stderr


def test_publish_of_nothing(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    succeeding("db", "init", "--store", sqlite_url, "--stream", "orders")
    assert published(sqlite_url, redis_url, bus_name, b"")["facts"] == 0


def test_streams_with_a_table_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> None:
    (tmp_path / "shop_streams.py").write_text(
        "import attrs\nfrom busrep import Stream, Table\n"
        "@attrs.frozen\nclass Row:\n    what: str\n"
        "STREAMS = [Stream('orders', Row, table=Table('orders_log'))]\nONE = STREAMS[0]\nBAD = 7\n"
    )
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
        connection.execute("CREATE TABLE orders_log (id INTEGER PRIMARY KEY, writer TEXT, what TEXT)")
    connection.close()
    for where in ("shop_streams:STREAMS", "shop_streams:ONE"):
        made = succeeding("db", "init", "--store", sqlite_url, "--streams", where)
        assert made["streams"] == ["orders"]
    result = busrep("db", "restored", "--store", sqlite_url, "--yes")
    assert result.exit_code == 2
    assert "--streams MODULE:NAME" in result.stderr
    assert succeeding("db", "restored", "--store", sqlite_url, "--yes", "--streams", "shop_streams:ONE")["epoch"]
    for bad in ("shop_streams:BAD", "shop_streams:NONE", "no_such_module:X", "no_such_module"):
        result = busrep("db", "init", "--store", sqlite_url, "--streams", bad)
        assert (result.exit_code, "--streams" in result.stderr) == (2, True)
    sys.modules.pop("shop_streams")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s ago"), (150, "2 m ago"), (7_200, "2 h ago"), (864_000, "10 d ago"), (-1, "0.0 s ago")],
)
def test_times_in_the_past(seconds: float, text: str) -> None:
    assert ago(seconds) == text


# -- what goes wrong -----------------------------------------------------------------------------------------


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections: bound, and not listening."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def error_of(*args: str) -> str:
    """What the command says, as a process: one line, no traceback, status 2."""
    with process(*args) as child:
        _, errors = child.communicate(b"", timeout=30)
    text = errors.decode()
    assert child.returncode == 2, text
    assert "Traceback" not in text
    assert len(text.splitlines()) == 1, text
    return text


BAD_REDIS = [
    ("positions", "--name", "x"),
    ("tail", "--name", "x"),
    ("demo", "--json"),
]


@pytest.mark.parametrize("command", BAD_REDIS, ids=lambda command: command[0])
def test_error_redis_is_not_there(command: tuple[str, ...], closed_port: int) -> None:
    text = error_of(*command, "--redis", f"redis://me:secret@127.0.0.1:{closed_port}")
    assert "Redis" in text
    assert str(closed_port) in text
    assert "secret" not in text


@pytest.mark.parametrize("command", BAD_REDIS, ids=lambda command: command[0])
@pytest.mark.parametrize("url", ["http://127.0.0.1", "redis://h:port", "nonsense", "redis://me:secret@h:port"])
def test_error_bad_redis_url(command: tuple[str, ...], url: str) -> None:
    text = error_of(*command, "--redis", url)
    assert "redis://[user:password@]host:port/db" in text
    assert "secret" not in text


STORE_COMMANDS = [
    ("db", "init"),
    ("db", "status"),
    ("db", "restored", "--yes"),
    ("db", "prune", "--keep", "1"),
    ("lag",),
    ("demo", "--json"),
]


@pytest.mark.parametrize("command", STORE_COMMANDS, ids=" ".join)
def test_error_bad_store_url(command: tuple[str, ...]) -> None:
    result = busrep(*command, "--store", "mysql://me:secret@host/x")
    assert result.exit_code == 2
    assert "sqlite:///" in result.stderr
    assert "postgresql://" in result.stderr
    assert "secret" not in result.stderr


@pytest.mark.parametrize("command", STORE_COMMANDS, ids=" ".join)
def test_error_postgres_is_not_there(command: tuple[str, ...], closed_port: int) -> None:
    result = busrep(*command, "--store", f"postgresql://me:secret@127.0.0.1:{closed_port}/x")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "not available" in result.stderr
    assert "secret" not in result.stderr


@pytest.mark.parametrize("command", STORE_COMMANDS[1:5], ids=" ".join)
def test_error_missing_tables(command: tuple[str, ...], store_url: str) -> None:
    result = busrep(*command, "--store", store_url)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "busrep db init" in result.stderr


@pytest.mark.parametrize("command", STORE_COMMANDS[:5], ids=" ".join)
def test_error_newer_schema(command: tuple[str, ...], store_url: str) -> None:
    succeeding("db", "init", "--store", store_url)
    newer = "UPDATE busrep_meta SET value = '99' WHERE key = 'version'"
    if store_url.startswith("sqlite"):
        with sqlite3.connect(store_url.removeprefix("sqlite:///")) as connection:
            connection.execute(newer)
        connection.close()
    else:
        with psycopg.connect(store_url) as server:
            server.execute(newer)
    result = busrep(*command, "--store", store_url)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "upgrade busrep" in result.stderr


def test_error_no_database_file(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, but long enough to be looked at as one " * 20)
    for store in (f"sqlite:///{tmp_path / 'text.db'}", f"sqlite:///{tmp_path / 'no' / 'such' / 'folder.db'}"):
        result = busrep("db", "init", "--store", store)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output


def test_error_unknown_stream_unknown_reader_nothing_to_prune(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    succeeding("db", "init", "--store", sqlite_url)
    args = ("publish", "--redis", redis_url, "--name", bus_name, "--store", sqlite_url, "--stream", "nobody")
    result = busrep(*args, stdin=b"[1]")
    assert (result.exit_code, "busrep db init" in result.stderr) == (2, True)
    result = busrep("lag", "--store", sqlite_url, "--reader", "nobody")
    assert (result.exit_code, "nobody" in result.stderr) == (2, True)
    result = busrep("db", "prune", "--store", sqlite_url)
    assert (result.exit_code, "--older-than" in result.stderr) == (2, True)


def test_error_a_missing_driver_names_its_extra(closed_port: int) -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None; import busrep.cli; "
        f"sys.argv = ['busrep', 'db', 'status', '--store', 'postgresql://127.0.0.1:{closed_port}/x']; "
        "busrep.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "pip install 'busrep[postgres]'" in done.stderr


def test_what_a_person_is_told(redis_url: str, bus_name: str, store_url: str) -> None:
    """The other tests read JSON."""
    store = ("--store", store_url)
    assert ": schema 5, streams: none yet\n" in busrep("db", "init", *store).stdout
    assert ": schema 5, streams: orders\n" in busrep("db", "init", *store, "--stream", "orders").stdout
    publish = ("publish", "--redis", redis_url, "--name", bus_name, *store, "--stream", "orders")
    assert busrep(*publish, stdin=b"").stdout == "published 0 facts, 0 rows\n"
    assert busrep(*publish, stdin=b"[1]\n[2]").stdout == "published 2 facts, 2 rows: orders at 2\n"
    result = busrep(*publish, stdin=b"[3]\n[4,\n[5]")
    assert result.exit_code == 2
    assert "line 2 is not JSON" in result.stderr
    assert "is published; facts published before it: " in result.stderr
    assert "JSON: line 1" not in result.stderr, "the parser counts within the line"
    assert "busrep-publish" in busrep("db", "status", *store).stdout
    assert "Pruned" in busrep("db", "prune", *store, "--keep", "1", "--stream", "orders").stdout
    assert busrep("db", "prune", *store, "--keep", "1").stdout == "nothing to delete\n"
    result = busrep("db", "prune", *store, "--keep", "1", "--stream", "order")
    assert (result.exit_code, result.stderr) == (2, "busrep: no stream 'order' is known here (there are: orders)\n")
    refused = busrep("db", "restored", *store, stdin=b"n\n")
    assert refused.exit_code == 1
    assert "Fence all writers" in refused.stderr
    assert "restart the writers" in busrep("db", "restored", *store, stdin=b"y\n").stdout
