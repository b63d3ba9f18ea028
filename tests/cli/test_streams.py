"""--streams of the commands, and what 'db init' finds out before it changes anything."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest
from click.testing import CliRunner, Result

from busrep.cli.app import cli
from busrep.cli.servers import make_store
from busrep.errors import ConfigError
from busrep.stores.declared import declared_in

pytestmark = pytest.mark.servers

SHOP = """
import attrs
from busrep import Stream, Table

@attrs.frozen
class Order:
    number: int
    state: str

class Nothing:
    pass

orders, payments = Stream("orders", Order), Stream("payments", Order)
both = [orders, payments]
number = 5
"""


def busrep(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, args, input=stdin)


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes a module that the commands find in the working directory."""
    monkeypatch.chdir(tmp_path)
    made = []

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        made.append(name)

    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    write("shop_streams", SHOP)
    yield write
    sys.dont_write_bytecode = before
    for name in made:
        sys.modules.pop(name, None)


def listed(store_url: str) -> list[str]:
    found = busrep("db", "status", "--store", store_url, "--json")
    assert found.exit_code == 0, found.output
    return sorted(orjson.loads(found.stdout)["streams"])


def execute(store_url: str, text: str) -> list[Any]:
    connection: Any
    if store_url.startswith("sqlite"):
        connection = sqlite3.connect(store_url.removeprefix("sqlite:///"), isolation_level=None)
    else:
        connection = psycopg.connect(store_url, autocommit=True)
    try:
        cursor = connection.execute(text)
        return list(cursor.fetchall()) if cursor.description else []
    finally:
        connection.close()


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    "options",
    [
        ("--streams", "shop_streams:orders", "--streams", "shop_streams:payments"),
        ("--streams", "shop_streams"),
        ("--streams", "shop_streams:both"),
        ("--streams", "shop_streams:orders,shop_streams:payments"),
    ],
    ids=["repeated", "module", "list", "commas"],
)
def test_all_streams_are_taken(sqlite_url: str, options: tuple[str, ...]) -> None:
    found = busrep("db", "init", "--store", sqlite_url, *options)
    assert found.exit_code == 0, found.output
    assert listed(sqlite_url) == ["orders", "payments"]


def test_the_tables_are_made_once(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(*of: Any) -> Any:
        made.append(of)
        return make_store(*of)

    monkeypatch.setattr("busrep.cli.db.make_store", make)
    assert busrep("db", "init", "--store", sqlite_url, "--stream", "orders").exit_code == 0
    assert len(made) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\ndef :", "failing.py, line 2: invalid syntax"),
        ("x = 1\n\n1 / 0", "failing.py, line 3: ZeroDivisionError: division by zero"),
        ("import json\njson.loads('[')", "failing.py, line 2: JSONDecodeError: "),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("from busrep import Stream\nStream('a b')", "stream name 'a b'"),
        ("raise SystemExit(0)", "failing.py, line 1: SystemExit: 0"),
    ],
)
def test_a_module_that_fails_is_named_with_its_line(
    module: Callable[[str, str], None], sqlite_url: str, text: str, reason: str
) -> None:
    """It used to end in a traceback and status 1: streams that do not fit; or, by its own exit, as if all were well."""
    module("failing", text)
    found = busrep("db", "init", "--check", "--store", sqlite_url, "--streams", "failing:orders")
    assert (found.exit_code, reason in found.stderr) == (2, True), found.output


@pytest.mark.parametrize("where", ["..shop", ".", "", ":orders", "shop_streams.:orders", "\0"])
@pytest.mark.usefixtures("module")
def test_what_is_no_module(sqlite_url: str, where: str) -> None:
    found = busrep("db", "init", "--check", "--store", sqlite_url, "--streams", where)
    assert (found.exit_code, found.stderr.startswith("busrep: --streams")) == (2, True), found.output


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("command", [("db", "status"), ("db", "prune", "--keep", "1"), ("db", "restored", "--yes")])
def test_every_command_of_the_tables_takes_several(sqlite_url: str, command: tuple[str, ...]) -> None:
    assert busrep("db", "init", "--store", sqlite_url, "--streams", "shop_streams").exit_code == 0
    several = ("--streams", "shop_streams:orders", "--streams", "shop_streams:payments")
    found = busrep(*command, "--store", sqlite_url, *several)
    assert found.exit_code == 0, found.output


def test_every_command_with_streams_lets_it_be_repeated() -> None:
    found = []

    def look(group: Any, path: str) -> None:
        for name in group.list_commands(None):
            command = group.get_command(None, name)
            for option in command.params:
                if "--streams" in option.opts:
                    found.append(path + name)
                    assert option.multiple, path + name
            if hasattr(command, "list_commands"):
                look(command, f"{path}{name} ")

    look(cli, "")
    assert {"db init", "tail", "serve", "bootstrap", "pipeline archive"} <= set(found)


def test_several_streams_of_a_pipeline_arrive_as_one_option() -> None:
    from busrep.spark.options import declared_stream

    command: Any = cli.get_command(None, "pipeline").get_command(None, "archive")  # type: ignore[arg-type, union-attr]
    option = next(one for one in command.params if "--streams" in one.opts)
    assert option.callback(None, option, ("tests.shop:orders", "tests.shop:payments")) == (
        "tests.shop:orders,tests.shop:payments"
    )
    assert option.callback(None, option, ()) is None
    for where in ("tests.shop:orders,tests.shop:payments", "tests.shop"):
        assert declared_stream(where, "payments").name == "payments"


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ("shop_streams:number", "shop_streams:number is no Stream nor several of them"),
        ("shop_streams:Nothing", "no Stream"),
        ("shop_streams:nosuch", "nosuch"),
        ("empty", "empty is no Stream"),
        ("nosuchmodule", "nosuchmodule"),
        ("shop_streams,other", "two streams of shop_streams,other are named 'orders'"),
    ],
)
def test_what_is_no_stream_is_an_error(
    module: Callable[[str, str], None], sqlite_url: str, streams: str, message: str
) -> None:
    module("empty", "x = 1")
    module("other", "from busrep import Stream\norders = Stream('orders')")
    found = busrep("db", "init", "--store", sqlite_url, "--streams", streams)
    assert found.exit_code == 2
    assert f"--streams {streams}: " in found.output
    assert message in found.output


def test_a_stream_that_a_module_imports_counts_once(module: Callable[[str, str], None]) -> None:
    module("importing", "from shop_streams import orders, both\nagain = orders")
    assert [stream.name for stream in declared_in("importing,shop_streams")] == ["orders", "payments"]
    with pytest.raises(ConfigError, match="two streams"):
        module("clash", "from busrep import Stream\na, b = Stream('x'), Stream('x')")
        declared_in("clash")


# -- an application's own table ----------------------------------------------------------------------------------------

TABLES = """
from shop_streams import Order
from busrep import Stream, Table
right = Stream("sales", Order, table=Table("sales", columns=("number", "state")))
wrong = Stream("sales", Order, table=Table("sales", columns=("number", "stat")))
index = Stream("sales", Order, table=Table("sales", index="nosuch"))
absent = Stream("sales", Order, table=Table("nowhere"))
"""


@pytest.mark.parametrize("name", ["wrong", "index"])
def test_a_misspelt_column_is_an_error_of_db_init(
    module: Callable[[str, str], None], store_url: str, name: str
) -> None:
    module("tables", TABLES)
    execute(store_url, "CREATE TABLE sales (id bigint, writer text, number bigint, state text)")
    missing = {"wrong": '"stat"', "index": '"nosuch"'}[name]
    for again in range(2):
        found = busrep("db", "init", "--store", store_url, "--streams", f"tables:{name}")
        assert found.exit_code == 2
        assert "it has id, writer, number, state" in found.output
        assert missing in found.output
        if not again:  # nothing was made
            assert busrep("db", "status", "--store", store_url).exit_code == 2
            assert busrep("db", "init", "--store", store_url, "--streams", "tables:right").exit_code == 0
    found = busrep("db", "init", "--store", store_url, "--streams", f"tables:{name}", "--check")
    assert found.exit_code == 1
    assert missing in found.output
    assert busrep("db", "init", "--store", store_url, "--streams", "tables:right", "--check").exit_code == 0


def test_an_absent_table_is_an_error_of_db_init(module: Callable[[str, str], None], store_url: str) -> None:
    module("tables", TABLES)
    for options, status in (((), 2), (("--check",), 1)):
        found = busrep("db", "init", "--store", store_url, "--streams", "tables:absent", *options)
        assert found.exit_code == status
        assert "there is no such table" in found.output
    execute(store_url, "CREATE TABLE nowhere (id bigint, writer text, number bigint, state text)")
    assert busrep("db", "init", "--store", store_url, "--streams", "tables:absent").exit_code == 0


# -- db init --check ---------------------------------------------------------------------------------------------------


def test_check_says_what_does_not_fit_and_changes_nothing(module: Callable[[str, str], None], store_url: str) -> None:
    check = ("db", "init", "--store", store_url, "--check")
    found = busrep(*check, "--streams", "shop_streams")
    assert found.exit_code == 1  # no tables
    assert "busrep db init" in found.output
    assert busrep("db", "init", "--store", store_url, "--streams", "shop_streams:orders").exit_code == 0
    before = execute(store_url, "SELECT stream, fields FROM busrep_streams ORDER BY stream")
    found = busrep(*check, "--streams", "shop_streams")
    assert found.exit_code == 1
    assert "'payments' has no sequence" in found.output
    assert busrep(*check, "--streams", "shop_streams:orders").exit_code == 0
    swapped = SHOP.replace("number: int\n    state: str", "state: str\n    number: int")
    module("swapped", swapped)
    module("longer", SHOP.replace("state: str", 'state: str\n    note: str = ""'))
    found = busrep(*check, "--streams", "swapped:orders")
    assert found.exit_code == 1
    assert "Declared: (state: str, number: int); stored: (number: int, state: str)" in found.output
    assert busrep(*check, "--streams", "longer:orders").exit_code == 0
    assert execute(store_url, "SELECT stream, fields FROM busrep_streams ORDER BY stream") == before
    found = busrep("db", "init", "--store", store_url, "--streams", "swapped:orders")
    assert (found.exit_code, "does not fit" in found.output) == (2, True)
    assert execute(store_url, "SELECT stream, fields FROM busrep_streams ORDER BY stream") == before


def test_redefine_is_said_of_a_declared_stream(module: Callable[[str, str], None], store_url: str) -> None:
    module("swapped", SHOP.replace("number: int\n    state: str", "state: str\n    number: int"))
    init = ("db", "init", "--store", store_url)
    assert busrep(*init, "--streams", "shop_streams").exit_code == 0
    assert busrep(*init, "--streams", "swapped", "--redefine", "nosuch").exit_code == 2
    assert busrep(*init, "--streams", "swapped", "--redefine", "orders", "--check").exit_code == 2
    assert busrep(*init, "--streams", "swapped:orders", "--redefine", "orders").exit_code == 0
    assert busrep(*init, "--streams", "swapped:orders", "--check").exit_code == 0
    assert busrep(*init, "--streams", "swapped:payments", "--check").exit_code == 1
