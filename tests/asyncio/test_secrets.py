"""A password in a URL is shown nowhere: not in an error, its causes, a log, a repr or an output."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner

import busrep
from busrep import Stream
from busrep.cli.app import cli
from busrep.errors import BusrepError, ConfigError
from busrep.snapshots.sources import open_source
from busrep.spark import secrets
from busrep.spark.archive_store import Root
from busrep.spark.options import read_options
from busrep.spark.sink_options import read_options as read_sink_options
from busrep.spark.staging_store import open_staging_store
from busrep.stores import open_store
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from busrep.sync import connect as sync_connect
from busrep.urls import has_secret, hide_secrets, parse_url, shown_url

# Each piece of a password has one of these in it, so that half of a password that is shown is found, too.
MARKS = ("Zq7", "Kw9", "48151", "62342")
# Nothing listens there.
AT = "127.0.0.1:1"

# What stands where the password should, with characters that have a meaning of their own in a URL.
PASSWORDS = (
    "Zq7/Kw9", "48151/62342", "Zq7?Kw9", "48151?x=62342", "Zq7#Kw9", "48151#62342", "Zq7@Kw9", "48151@62342",
    "Zq7%Kw9", "Zq7%zzKw9", "Zq7%00Kw9", "Zq7 Kw9", "Zq7\tKw9", "Zq7[Kw9", "Zq7]Kw9", "Zq7\\Kw9", "Zq7:Kw9", "Zq7℀Kw9",
    "Zq7ü@Kw9", "Zq7Kw9",
)  # fmt: skip


def forms(*schemes: str, rest: str) -> list[str]:
    """With each password; the last ones have slips outside of it."""
    found = [f"{scheme}://me:{password}@{AT}{rest}" for scheme in schemes for password in PASSWORDS]
    for scheme in schemes:
        found += [
            f"{scheme}:/me:Zq7Kw9@{AT}{rest}",
            f"{scheme}:me:Zq7Kw9@{AT}{rest}",
            f"{scheme}//me:Zq7Kw9@{AT}{rest}",
            f"{scheme}://me:Zq7Kw9@{AT}:Kw9{rest}",
            f"{scheme}://me:Zq7Kw9@[::1{rest}",
            f"{scheme}://me:Zq7Kw9",
            f" {scheme}://me:Zq7Kw9@{AT}{rest}",
            f"me:Zq7Kw9@{AT}{rest}",
        ]
    return found


DSNS = ["host=127.0.0.1 port=1 user=me password=Zq7Kw9", "password = 'Zq7 Kw9' host=127.0.0.1 port=1"]
REDIS = [
    *forms("redis", "rediss", rest="/0"), f"redis://Zq7Kw9@{AT}", f"redis://{AT}/0?password=Zq7Kw9",
    f"redis://{AT}/0?password=Zq7#Kw9", "unix:///nowhere.sock?password=Zq7Kw9", f"redis://{AT}/0?db=x&password=Kw9",
]  # fmt: skip
POSTGRES = [
    *forms("postgresql", "postgres", rest="/shop"), *DSNS, f"postgresql://me@{AT}/shop?password=Zq7Kw9",
    f"postgresql://me@{AT}/shop?sslpassword=Zq7Kw9", f"postgresql://me:Zq7Kw9@{AT}/shop?nothing=1",
]  # fmt: skip
OTHERS = ["mysql://me:Zq7Kw9@db/shop", "sqlite://me:Zq7Kw9@db/x", "memory://me:Zq7Kw9@x", "Zq7Kw9"]
TCP = [*forms("tcp", "tcps", rest=""), f"tcp://:Zq7Kw9@{AT}", f"tcps://:Zq7Kw9@{AT}?ca=/nowhere", f"tcp://Zq7Kw9@{AT}"]
HTTP = [*forms("http", "https", rest="/busrep"), f"http://:Zq7Kw9@{AT}/busrep", f"http://{AT}/busrep?secret=Zq7Kw9"]
OBJECTS = [
    *forms("s3", "gs", "gopher", rest="/prefix"), "s3://bucket/prefix?secret_key=Zq7Kw9&region=eu",
    "s3://key:Zq7Kw9@bucket/prefix?region=eu&nothing=1",
]  # fmt: skip

orders = Stream("orders")
online = Stream("online", resettable=True)


async def opened(bus: object) -> None:
    assert not leaks(repr(bus))
    async with asyncio.timeout(60), bus:  # type: ignore[attr-defined]
        pass


def redis_asyncio(url: str) -> None:
    asyncio.run(opened(busrep.connect(url, name="b", streams=[online])))


def redis_threads(url: str) -> None:
    with sync_connect(url, name="b", streams=[online], writer="w") as bus:
        bus.send(busrep.RemoteServerUp("x"))


def redis_of_spark(url: str) -> None:
    given = {
        "store": "sqlite:////nowhere/x.db",
        "stream": "orders",
        "name": "b",
        "redis": url,
        "writer": "w",
        "query": "q",
    }
    with contextlib.suppress(BusrepError):
        read_sink_options(given, job=None)
    source = {name: given[name] for name in ("store", "stream", "name", "redis")}
    read_options(source)


def redis_with_a_file(url: str) -> None:
    secrets.with_redis_password(url, None)


def store_asyncio(url: str) -> None:
    store = open_store(url, Registry([orders]))
    assert not leaks(repr(store))

    async def ask() -> None:
        try:
            await store.open()
        finally:
            await store.close()

    asyncio.run(ask())


def store_threads(url: str) -> None:
    open_blocking_store(url, Registry([orders])).open()


def store_staging(url: str) -> None:
    open_staging_store(url, Registry([orders])).open()


def store_of_connect(url: str) -> None:
    asyncio.run(opened(busrep.connect(f"redis://{AT}", name="b", streams=[orders], store=url, writer="w")))


def store_of_spark(url: str) -> None:
    with contextlib.suppress(BusrepError):
        secrets.resolve(url)
    with contextlib.suppress(BusrepError):
        secrets.split(url)
    read_options({"store": url, "stream": "orders"})


def source_of_connect(url: str) -> None:
    asyncio.run(
        opened(busrep.connect(f"redis://{AT}", name="b", streams=[orders], store="memory://x", snapshot_source=url))
    )


def source_opened(url: str) -> None:
    source = open_source(url, [orders])
    assert not leaks(repr(source))


def archive(url: str) -> None:
    root = Root(url)
    assert not leaks(repr(root), root.shown)


def command(*arguments: str) -> Callable[[str], None]:
    """A command with the URL in place of URL. Its output must not show it."""

    def run(url: str) -> None:
        result = CliRunner().invoke(cli, ["-v", *(url if one == "URL" else one for one in arguments)])
        assert not leaks(result.output, result.stderr)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception

    run.__name__ = "-".join(one for one in arguments if one[0] not in "-/" and one != "URL")
    return run


STORES = ("--store", "URL")
ENTRIES: list[tuple[Callable[[str], None], list[str]]] = [
    (redis_asyncio, REDIS),
    (redis_threads, REDIS),
    (redis_of_spark, REDIS),
    (redis_with_a_file, REDIS),
    (command("positions", "--redis", "URL", "--name", "b", "--for", "0.1s"), REDIS),
    (command("tail", "--redis", "URL", "--name", "b", "--for", "0.1s"), REDIS),
    (command("serve", "--tcp", "0", "--name", "b", "--for", "0.1s", "--redis", "URL"), REDIS),
    (command("demo", "--redis", "URL"), REDIS[-3:] + REDIS[:8]),
    (store_asyncio, [*POSTGRES, *OTHERS[:3]]),
    (store_threads, [*POSTGRES, *OTHERS]),
    (store_staging, [*POSTGRES, *OTHERS]),
    (store_of_connect, [*POSTGRES, *OTHERS, *HTTP]),
    (store_of_spark, [*POSTGRES, *OTHERS]),
    (command("db", "status", *STORES), [*POSTGRES, *OTHERS[:3]]),
    (command("db", "init", *STORES), POSTGRES),
    (command("lag", *STORES), POSTGRES),
    (command("bootstrap", "--stream", "s", "--source", "URL", "--to", "file:///nowhere/x"), HTTP[:24] + OBJECTS[:24]),
    (redis_asyncio, TCP),
    (redis_threads, TCP),
    (source_of_connect, [*HTTP, *OBJECTS]),
    (source_opened, [*HTTP, *OBJECTS, *OTHERS[:3]]),
    (archive, OBJECTS),
    (command("pipeline", "archive", *STORES, "--stream", "s", "--archive", "/nowhere/archive"), POSTGRES[:30] + DSNS),
]  # fmt: skip


def leaks(*texts: str) -> list[str]:
    """Those that show a part of a password. Not the address of an object, which may have any digits."""
    shown = {text: re.sub(r"\bat 0x[0-9a-f]+", "", text) for text in texts}
    return [text for text in texts if any(mark in shown[text] for mark in MARKS)]


def test_an_object_s_address_is_no_leak() -> None:
    assert leaks("<Bus object at 0x7fd0748151d0>", "<Bus at 0x7f, of 48151>") == ["<Bus at 0x7f, of 48151>"]


def told(error: BaseException) -> Iterator[str]:
    """All that an error says, and what it hides: a tool that reports errors may walk to what it came from."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield from (str(one), repr(one), "".join(traceback.format_exception(one)))
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
        waiting += [value for value in vars(one).values() if isinstance(value, BaseException)]


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BUSREP_STORE", "BUSREP_STORE_PASSWORD", "BUSREP_REDIS", "BUSREP_REDIS_PASSWORD", "PGPASSWORD"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "x")  # so that what a command sets is undone
        monkeypatch.delenv(name)
    # A job of the pipeline would start Spark.
    session = importlib.import_module("busrep.spark.session")
    monkeypatch.setattr(session, "session", refuse, raising=False)
    monkeypatch.setattr("busrep.cli.pipeline.Job.run", refuse)


def refuse(_job: object, options: object, *_: object, **__: object) -> None:
    assert not leaks(repr(options))
    raise ConfigError("no Spark here")


@pytest.mark.parametrize(
    ("entry", "urls"), ENTRIES, ids=[f"{number}-{entry.__name__}" for number, (entry, _) in enumerate(ENTRIES)]
)
def test_no_entry_shows_a_password(
    entry: Callable[[str], None], urls: list[str], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    found: dict[str, list[str]] = {}
    for url in urls:
        caplog.clear()
        try:
            entry(url)
        except (Exception, BaseExceptionGroup) as error:
            said = [*told(error), *map(str, caplog.messages), caplog.text, *capfd.readouterr()]
            if not isinstance(error, BusrepError):
                said.append(f"{type(error).__name__} instead of an error of busrep: Zq7")
        else:
            said = [caplog.text, *capfd.readouterr()]
        if wrong := leaks(*said):
            lines = [line for text in wrong for line in text.splitlines() if leaks(line)]
            found[url] = list(dict.fromkeys(lines))[:3]
    assert found == {}


def test_a_command_of_its_own_shows_none() -> None:
    """With the log of all of it, and the interpreter's own traceback if there were one."""
    for url, arguments in (
        ("redis://:Zq7/Kw9@127.0.0.1:1", ["positions", "--name", "b", "--redis"]),
        ("postgresql://me:Zq7%Kw9@127.0.0.1:1/shop", ["db", "status", "--store"]),
    ):
        run = [sys.executable, "-m", "busrep.cli", "-vv", *arguments, url]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert not leaks(done.stdout, done.stderr)


@pytest.mark.parametrize("url", sorted({*REDIS, *POSTGRES, *OTHERS, *TCP, *HTTP, *OBJECTS}))
def test_what_is_shown_of_a_url(url: str) -> None:
    assert not leaks(shown_url(url))
    if parse_url(url) is None:
        assert shown_url(url).endswith("...")
    assert not leaks(repr(parse_url(url))) or parse_url(url).user == "Zq7Kw9"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://app:secret@db:6379/0", "redis://app:***@db:6379/0"),
        ("redis://[::1]:6379/0?db=1", "redis://[::1]:6379/0?db=1"),
        ("postgresql://me@h1:1,h2:2,[::1]:3/shop?sslmode=require", "postgresql://me@h1:1,h2:2,[::1]:3/shop?sslmode=require"),
        ("postgresql:///shop?host=/run/postgresql&sslpassword=x", "postgresql:///shop?host=/run/postgresql&sslpassword=***"),
        ("postgresql://%2Frun/shop", "postgresql://%2Frun/shop"),
        ("sqlite:////data/ä@b#c d.db", "sqlite:////data/ä@b#c d.db"),
        ("redis://secret@db", "redis://***@db"),
        ("postgres:/me:secret@db", "postgres:..."),
        ("secret:secret@db", "..."),
        ("secret", "..."),
    ],
)  # fmt: skip
def test_a_url_in_order_is_shown_without_its_password_alone(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("redis://db:6379", False), ("redis://app@db", False), ("redis://:x@db", True), ("redis://:x/y@db", True),
        ("host=db password=x", True), ("me:x@db", True), ("/data/a@b", False), ("sqlite:////data/a:b@c.db", False),
        ("s3://bucket/prefix", False), ("s3://bucket/prefix?secret_key=x", True), ("orders", False),
    ],
)  # fmt: skip
def test_whether_a_text_holds_a_password(text: str, holds: bool) -> None:
    assert has_secret(text) is holds


def test_the_last_guard_of_the_command_line() -> None:
    text = "cannot reach 'postgresql://me:x@db/shop', nor redis://:a/b@c: see https://example.org/a"
    assert hide_secrets(text) == "cannot reach 'postgresql://me:***@db/shop', nor redis://... see https://example.org/a"


def test_objects_that_hold_a_password_do_not_show_it() -> None:
    from busrep.cli.serve import ServePlan

    plan = ServePlan(redis_url="redis://:Zq7@db", store_url="postgresql://me:Kw9@db/x", secret="Zq7")
    assert not leaks(repr(plan))
