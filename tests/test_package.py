"""What the package shows: public names, errors, settings, metadata; and what must not be in the tree."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import itertools
import pickle
import pkgutil
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import attrs
import pytest

import busrep
import busrep.errors
import busrep.sync
from busrep.errors import (
    BusrepError,
    ClaimBlocked,
    Closed,
    CommitsLost,
    CommitUnknown,
    ConfigError,
    EpochChanged,
    HandlerFailed,
    MissingExtra,
    NoSnapshots,
    NotAWriter,
    ParseError,
    PositionsAheadOfTable,
    PositionTooOld,
    ReaderMoved,
    RowClassMismatch,
    RowError,
    SchemaError,
    SequenceWentBack,
    SnapshotBusy,
    SnapshotGone,
    StagedRowsGone,
    StatementRefused,
    Unavailable,
    UnknownStream,
    WaitTimeout,
    WriterFenced,
)
from busrep.options import BusOptions, Options, ThreadOptions
from busrep.settings import Settings
from busrep.stores import open_store
from busrep.stores.interface import FactLog, FactSource, ReaderPositions, StoreAdmin, provides
from busrep.streams import Registry

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# -- public names ---------------------------------------------------------------------------------------------

MOST_PUBLIC_NAMES = 25


def test_public_names_are_few_and_sorted() -> None:
    names = busrep.__all__
    assert len(names) <= MOST_PUBLIC_NAMES
    assert len(set(names)) == len(names)
    assert names == sorted(names, key=lambda name: (name.islower(), name))


def test_import_star_gives_just_them() -> None:
    namespace: dict[str, Any] = {}
    exec("from busrep import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(busrep.__all__)


@pytest.mark.parametrize("name", busrep.__all__)
def test_public_names_have_a_docstring(name: str) -> None:
    found = getattr(busrep, name)
    assert (found.__doc__ or "").strip(), name
    assert found.__module__.startswith("busrep")
    if not isinstance(found, type):
        return
    for method, member in vars(found).items():
        if method.startswith("_") or not isinstance(member, types.FunctionType | property | classmethod | staticmethod):
            continue
        documented = member.fget if isinstance(member, property) else member
        assert (documented.__doc__ or "").strip(), f"{name}.{method}"


def test_nothing_public_needs_an_extra() -> None:
    extras = ("busrep.cli", "busrep.spark", "busrep.stores.postgres")
    assert [name for name in busrep.__all__ if getattr(busrep, name).__module__.startswith(extras)] == []


@pytest.mark.parametrize(
    ("connect", "options", "not_there"),
    [(busrep.connect, Options, {"beats"}), (busrep.sync.connect, ThreadOptions, set())],
    ids=["asyncio", "threads"],
)
def test_connect_takes_what_a_bus_is_made_of(connect: Any, options: Any, not_there: set[str]) -> None:
    """The options are declared for type checkers, and once more with their defaults."""
    named = inspect.signature(connect).parameters.keys() - {"redis", "options"}
    declared = get_type_hints(options)
    assert not named & declared.keys()
    fields = attrs.fields_dict(attrs.resolve_types(BusOptions))
    assert named | declared.keys() == fields.keys() - not_there
    assert {name: fields[name].type for name in declared} == declared
    with pytest.raises(TypeError, match="on_posion"):
        connect("redis://localhost", name="shop", on_posion="stop")


def test_the_roles_of_a_store() -> None:
    """Also of one that passes on what it does not have itself."""

    class Wrapped:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

    store = open_store("memory://roles", Registry([]))
    for found in (store, Wrapped(store)):
        assert all(provides(found, role) for role in (FactSource, FactLog, ReaderPositions, StoreAdmin))
    assert not provides(object(), FactSource)


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda file: file.stem)
def test_what_benchmarks_import_exists(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("busrep"):
            found = importlib.import_module(node.module or "")
            assert [one.name for one in node.names if not hasattr(found, one.name)] == [], node.module


def test_ci_runs_every_folder_of_tests() -> None:
    """A folder that neither the test command nor .ci/run names would never be run."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    ci = (ROOT / ".ci" / "run").read_text()
    folders = {f"tests/{file.parent.name}" for file in ROOT.glob("tests/*/test_*.py")}
    assert {"tests/spark", "tests/core"} <= folders
    named = set(options["testpaths"]) | set(re.findall(r"tests/[a-z]+", ci))
    assert folders <= named
    assert "tests/test_*.py" in named


def test_every_option_is_documented() -> None:
    documented = re.findall(r"^        (\w+): ", (BusOptions.__doc__ or "").split("Raises:")[0], re.MULTILINE)
    assert documented == [field.name for field in attrs.fields(BusOptions)]


def test_names_in_docstrings_of_errors_exist() -> None:
    """``Raises ...Error`` in a public docstring names an error that there is."""
    known = set(all_errors())
    for name in busrep.__all__:
        found = getattr(busrep, name)
        members = [found, *(vars(found).values() if isinstance(found, type) else ())]
        for member in members:
            for raised in re.findall(r"\braises ((?:[A-Z]\w+(?:, | or )?)+)", member.__doc__ or "", re.IGNORECASE):
                assert set(re.findall(r"\w*[a-z]\w*[A-Z]\w*", raised)) <= known, f"{name}: {raised}"


# -- errors ---------------------------------------------------------------------------------------------------

# Errors of one layer, kept beside it: they need not be known to whoever reads errors.py.
ELSEWHERE = {
    "RangePruned": "PositionTooOld of a Spark query, which says what to do there",
    "LogReplaced": "EpochChanged of a Spark query",
    "BadFieldError": "ConfigError of one field of a command, which a reader of lines turns into ParseError",
    "OlderTable": "PositionsAheadOfTable of a Spark query",
    "WriterGone": "ConfigError of a Spark query",
    "Unanswered": "Unavailable of a store's steps, of which it is not known whether they were executed",
    "OutOfOrder": "of a replay, whose rows were read wrongly",
    "WorkersTooSlow": "of Spark, whose Python workers did not start in time",
}


def modules() -> Iterator[types.ModuleType]:
    for found in pkgutil.walk_packages(busrep.__path__, "busrep."):
        if not found.name.endswith(".__main__"):
            yield importlib.import_module(found.name)


def all_errors() -> dict[str, type[BaseException]]:
    """Every public exception class of the package, by name."""
    found: dict[str, type[BaseException]] = {}
    for module in modules():
        for name, member in vars(module).items():
            ours = (
                isinstance(member, type) and issubclass(member, BaseException) and member.__module__ == module.__name__
            )
            if ours and not name.startswith("_"):
                found[name] = member
    return found


def drawn_tree() -> dict[str, str]:
    """Class -> parent, as docs/errors/index.md draws it."""
    page = (ROOT / "docs/errors/index.md").read_text()
    drawn = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert drawn is not None
    tree: dict[str, str] = {}
    above: list[str] = []
    for line in drawn[1].splitlines():
        found = re.match(r"^((?:│   |    )*)(?:[├└]── )?([A-Z]\w+)$", line)
        if found is None:
            continue
        depth = len(found[1]) // 4 + ("── " in line)
        del above[depth:]
        tree[found[2]] = above[-1] if above else "Exception"
        above.append(found[2])
    return tree


def test_errors_stand_in_the_tree() -> None:
    tree = drawn_tree()
    assert len(tree) > 15
    # A signal inside one layer that never leaves it is no error of the package.
    actual = {name: error for name, error in all_errors().items() if issubclass(error, BusrepError)}
    assert set(tree) | set(ELSEWHERE) == set(actual)
    for name, parent in tree.items():
        assert actual[name].__mro__[1].__name__ == parent
        assert getattr(busrep.errors, name) is actual[name]


@attrs.frozen
class Case:
    """An error, the fields it was made of, what its message names, and the advice it gives."""

    make: type[BusrepError]
    fields: dict[str, Any]
    names: tuple[str, ...] = ()
    advice: str | None = None


CASES = [
    Case(MissingExtra, {"extra": "postgres", "purpose": "this"}, ("this",), "pip install 'busrep[postgres]'"),
    Case(NoSnapshots, {"source": "catch-up from w1"}, ("catch-up from w1",), "pass snapshot_source="),
    Case(ParseError, {"line": b"RDATA x", "field": "token", "reason": "is missing"}, ("RDATA x", "token", "missing")),
    Case(RowError, {"stream": "s1", "field": "f", "reason": "int is needed", "row": [1]}, ("s1", "f:", "int", "[1]")),
    Case(
        RowClassMismatch,
        {"stream": "s1", "reason": "field 1 is another one", "declared": "(a: int)", "stored": "(b: int)"},
        ("'s1'", "field 1 is another one", "Declared: (a: int); stored: (b: int)"),
        "busrep db init --store URL --streams MODULE:NAME --redefine s1",
    ),
    Case(UnknownStream, {"stream": "s1", "known": ("s2", "s3")}, ("'s1'", "s2, s3"), "streams="),
    Case(CommitUnknown, {"marker": 7, "reason": OSError("gone")}, ("OSError: gone",), "look before you write it again"),
    Case(NotAWriter, {"stream": "s1", "writer": "w1"}, ("s1", "w1"), "pass writer="),
    Case(NotAWriter, {"stream": "s1", "writer": None}, ("s1", "without a writer name"), "pass writer="),
    Case(SequenceWentBack, {"stream": "s1", "got": 5, "known": 9}, ("s1", "5", "9"), "Run 'busrep db restored'"),
    Case(WriterFenced, {"writer": "w1", "incarnation": 3}, ("w1", "3"), "Restart this process"),
    Case(
        CommitsLost,
        {"writer": "w1", "incarnation": 3, "stream": "orders", "committed": 9},
        ("w1", "orders", "9"),
        "Run 'busrep db restored'",
    ),
    Case(ClaimBlocked, {"writer": "w1", "blockers": ("pid 7",)}, ("w1", "pid 7"), "end it, and start again"),
    Case(PositionsAheadOfTable, {"stream": "s1", "position": 9, "highest": 5}, ("s1", "9", "5"), "busrep db restored"),
    Case(EpochChanged, {"held": "a" * 32, "found": "b" * 32}, ("a" * 32, "b" * 32)),
    Case(PositionTooOld, {"stream": "s1", "writer": "w1", "position": 3, "floor": 8}, ("s1", "w1", "8"), "Start again"),
    Case(SnapshotGone, {"stream": "s1", "reason": "rows were pruned"}, ("s1", "rows were pruned"), "begins anew"),
    Case(SnapshotBusy, {"what": "the database", "limit": 4}, ("the database", "4 snapshots"), "which is the limit"),
    Case(ReaderMoved, {"reader": "r1", "stream": "s", "writer": "w", "expected": 3}, ("r1", "(s, w)"), "roll back"),
    Case(
        WaitTimeout,
        {"stream": "s1", "writer": "w1", "token": 9, "position": 4, "timeout": 2.5},
        ("s1", "w1", "9", "4", "2.5 s"),
    ),
    Case(
        HandlerFailed,
        {"stream": "s1", "writer": "w1", "token": 9, "error": KeyError("k")},
        ("s1", "w1", "9", "KeyError: 'k'"),
    ),
    Case(
        StatementRefused,
        {"where": "PostgreSQL at db:5432", "reason": ValueError("no NUL")},
        ("PostgreSQL at db:5432", "ValueError: no NUL"),
        "refuses a statement",
    ),
    Case(
        StagedRowsGone,
        {"query": "q", "batch": 7, "found": 3, "expected": 5},
        ("batch 7", "'q'", "3 of 5"),
        "start the query again",
    ),
    Case(SchemaError, {"found": None, "expected": 2}, ("no busrep tables",), "run 'busrep db init'"),
    Case(SchemaError, {"found": 1, "expected": 2}, ("1", "2"), "run 'busrep db init'"),
    Case(SchemaError, {"found": 3, "expected": 2}, ("3", "2"), "upgrade busrep"),
    Case(Unavailable, {"what": "Redis", "reason": "refused"}, ("Redis", "refused")),
    Case(Unavailable, {"what": "Redis", "reason": OSError("no route")}, ("Redis", "OSError: no route")),
    Case(Closed, {}, ("closed",)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__name__)
def test_errors_carry_their_fields_and_say_what_to_do(case: Case) -> None:
    error = case.make(**case.fields)
    for name, value in case.fields.items():
        assert getattr(error, name) == value
    message = str(error)
    for part in (*case.names, *([] if case.advice is None else [case.advice])):
        assert part in message
    assert "\n" not in message
    with pytest.raises(BusrepError):
        raise error
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (case.make, message)
    assert again.__dict__.keys() == error.__dict__.keys()


def test_each_error_has_a_case() -> None:
    assert {case.make.__name__ for case in CASES} | {"BusrepError", "ConfigError"} == set(drawn_tree())


def test_a_wait_that_times_out_is_a_timeout_error() -> None:
    assert issubclass(WaitTimeout, TimeoutError)


def test_a_bad_line_is_quoted_only_in_part() -> None:
    error = ParseError(b"x" * 10_000, "line", "too long")
    assert error.line == b"x" * 200
    assert len(str(error)) < 300


def test_a_large_row_is_quoted_only_in_part() -> None:
    assert len(str(RowError("s", "row", "too large", "x" * 10_000))) < 300
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert "(row list, nested too deep to show)" in str(RowError("s", "row", "nested too deep", deep))


def test_extras_that_errors_name_can_be_installed() -> None:
    named = {
        extra
        for path in (ROOT / "busrep").rglob("*.py")
        for extra in re.findall(r"MissingExtra\(\s*\"(\w+)\"|busrep\[(\w+)\]", path.read_text())
    }
    assert {first or second for first, second in named} - {"extra"} <= PROJECT["optional-dependencies"].keys()


def test_config_errors_take_a_message() -> None:
    assert str(ConfigError("say what to change")) == "say what to change"


# -- settings -------------------------------------------------------------------------------------------------


def documented_settings() -> dict[str, str]:
    """Field -> the string that stands below it."""
    tree = ast.parse((ROOT / "busrep/settings.py").read_text())
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = str(text.value.value)
    return found


@pytest.mark.parametrize("field", attrs.fields(Settings), ids=lambda field: field.name)
def test_settings_are_documented_bounded_and_have_defaults(field: attrs.Attribute[Any]) -> None:
    assert len(documented_settings()[field.name].split()) >= 4
    assert field.default is not attrs.NOTHING
    assert field.validator is not None
    assert field.kw_only
    with pytest.raises(ValueError, match=field.name):
        Settings(**{field.name: -1})


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Settings().heartbeat = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("field", attrs.fields(Settings), ids=lambda field: field.name)
def test_settings_are_used(field: attrs.Attribute[Any]) -> None:
    used = re.compile(rf"\.{field.name}\b")
    sources = [path for path in (ROOT / "busrep").rglob("*.py") if path.name != "settings.py"]
    assert any(used.search(path.read_text()) for path in sources)


# -- the project ----------------------------------------------------------------------------------------------


def test_versions_agree() -> None:
    assert PROJECT["version"] == busrep.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == busrep.__version__


def test_the_license_is_the_unmodified_apache_license() -> None:
    text = (ROOT / "LICENSE").read_bytes()  # as the Apache foundation publishes it, without its first, empty line
    assert hashlib.sha256(text).hexdigest() == "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4"
    assert PROJECT["license"] == "Apache-2.0"


def test_types_are_shipped() -> None:
    assert (ROOT / "busrep/py.typed").exists()


def test_each_module_says_what_it_is_for() -> None:
    assert [module.__name__ for module in modules() if not (module.__doc__ or "").strip()] == []


def test_the_default_installation_is_small() -> None:
    names = {re.split(r"[<>=\[ ]", needed)[0] for needed in PROJECT["dependencies"]}
    assert names == {"redis", "attrs", "orjson"}


# -- what must not be in the tree -----------------------------------------------------------------------------

LOCK_FILES = {
    "poetry.lock", "Pipfile.lock", "pdm.lock", "uv.lock", "pylock.toml", "requirements.txt", "package-lock.json",
    "yarn.lock", "Cargo.lock", "pip.conf", "pip.ini", ".pypirc", ".npmrc",
}  # fmt: skip
# In pieces, so that this file does not hold them.
REGISTRY_HOSTS = re.compile(
    r"pypi\.(?:org|python)|python" r"hosted\.org|index" r"-url|npm" r"js\.|doc" r"ker\.io|gh" r"cr\.io|qu" r"ay\.io"
    r"|arti" r"factory|nexus\.|crates" r"\.io|conda\.an",
    re.IGNORECASE,
)  # fmt: skip
KNOWN_HOSTS = re.compile(
    r"localhost|test(?:\{prefix\})?|ho(?:st[?#]\S*)?|0\.0\.0\.0|127\.0\.0\.1|\[?::1\]?|redis|postgres|host|h|db|x|server|nowhere|[\w.-]*example(?:\.\w+)?|[\w.-]*\.(?:test|invalid)"
    r"|github\.com|busrep\.github\.io|(?:www|arrow)\.apache\.org|www\.sqlite\.org|[^\w]*|\{.*"
)


def tracked_files() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


def texts() -> Iterator[tuple[str, str]]:
    for path in tracked_files():
        try:
            yield path.relative_to(ROOT).as_posix(), path.read_text()
        except UnicodeDecodeError:
            continue


def test_no_registry_host_is_in_the_tree() -> None:
    found = [
        f"{name}: {hit[0]}"
        for name, text in texts()
        for hit in REGISTRY_HOSTS.finditer(text)
        if name != "tests/test_package.py"
    ]
    assert found == []
    assert [path.name for path in tracked_files() if path.name in LOCK_FILES] == []


def test_web_addresses_in_the_tree_are_known() -> None:
    """A host of the machine it was made on would show up here."""
    found = [
        f"{name}: {hit[0]}"
        for name, text in texts()
        for hit in re.finditer(r"https?://(?:[^/@\s\"'`]*@)?([^/:\s\"'`)<>,]+)", text)
        if not KNOWN_HOSTS.fullmatch(hit[1])
    ]
    assert found == []


def test_no_path_of_the_authors_machine_is_in_the_tree() -> None:
    paths = re.compile(r"(?<![\w.])/(?:work|root|opt/venv|home/\w+|Users/\w+|tmp/\w+)/")
    found = [f"{name}: {hit[0]}" for name, text in texts() for hit in paths.finditer(text)]
    assert found == []


def test_nothing_large_or_made_by_tools_is_in_the_tree() -> None:
    made = re.compile(r"(^|/)(__pycache__|\.venv|\.hypothesis|\.mypy_cache|dist|build)/|\.(pyc|db|db-wal|coverage)$")
    names = [path.relative_to(ROOT).as_posix() for path in tracked_files()]
    assert [name for name in names if made.search(name)] == []
    assert [path.name for path in tracked_files() if path.stat().st_size > 3 * 2**20] == []


def test_the_bus_for_asyncio_needs_no_fork() -> None:
    """As on Windows. What others ask the system for they have asked before."""
    program = "import os, random, redis.asyncio, logging, orjson; del os.register_at_fork; import busrep.asyncio"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
