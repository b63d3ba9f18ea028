"""Passwords of the commands: from a file or the environment, so that no list of processes shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from click.testing import CliRunner, Result

from busrep.cli.app import cli
from busrep.spark.secrets import with_redis_password, with_store_password
from busrep.testing.servers import RedisServer, start_redis

PASSWORD = "p-a.ss_w0rd"


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORE", "STORE_PASSWORD", "REDIS", "REDIS_PASSWORD", "NAME"):
        monkeypatch.delenv(f"BUSREP_{name}", raising=False)


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    with start_redis(config={"requirepass": PASSWORD}) as server:
        yield server


def bare(server: RedisServer) -> str:
    return f"redis://127.0.0.1:{server.port}"


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, arguments, env=environment)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\nno password\n")
    return str(path)


COMMANDS = [
    ("positions", "--name", "b", "--for", "0.1s", "--json"),
    ("tail", "--name", "b", "--for", "0.1s", "--json"),
    ("serve", "--tcp", "0", "--name", "b", "--for", "0.1s", "--json"),
]


@pytest.mark.servers
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_password_of_redis_comes_from_a_file_or_the_environment(
    command: tuple[str, ...], guarded: RedisServer, file: str
) -> None:
    url = bare(guarded)
    refused = run(*command, "--redis", url)
    assert refused.exit_code == 2
    assert run(*command, "--redis-password-file", file, "--redis", url).exit_code == 0
    assert run(*command, "--redis", url, BUSREP_REDIS_PASSWORD=PASSWORD).exit_code == 0
    assert run(*command, BUSREP_REDIS=url, BUSREP_REDIS_PASSWORD=PASSWORD).exit_code == 0
    assert run(*command, BUSREP_REDIS=guarded.url).exit_code == 0
    # What the URL says itself goes first.
    assert run(*command, BUSREP_REDIS=guarded.url, BUSREP_REDIS_PASSWORD="another").exit_code == 0


@pytest.mark.servers
def test_publish_takes_both(guarded: RedisServer, file: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'x.db'}"
    assert run("db", "init", "--store", store, "--stream", "orders").exit_code == 0
    command = ["publish", "--redis", bare(guarded), "--store", store, "--name", "b", "--stream", "orders", "--json"]
    result = CliRunner().invoke(cli, [*command, "--redis-password-file", file], input='{"a": 1}\n')
    assert (result.exit_code, json.loads(result.stdout)["facts"]) == (0, 1), result.output


@pytest.mark.servers
def test_the_password_of_postgresql_comes_from_a_file_or_the_environment(postgres_url: str, tmp_path: Path) -> None:
    parts = urlsplit(postgres_url)
    url = parts._replace(netloc=f"{parts.username}@{parts.hostname}:{parts.port}").geturl()
    path = tmp_path / "password"
    path.write_text(unquote(parts.password or ""))
    assert run("db", "init", "--store", url, "--password-file", str(path)).exit_code == 0
    assert run("lag", "--store", url, BUSREP_STORE_PASSWORD=path.read_text()).exit_code == 0
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    assert run("lag", "--store", url, "--password-file", str(wrong)).exit_code == 2


def test_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for flag, option in (("--redis-password-file", "--redis"), ("--password-file", "--store")):
        url = "redis://h" if option == "--redis" else "postgresql://h/x"
        command = ["publish", "--name", "b", "--redis", "redis://h", "--store", "postgresql://h/x", option, url]
        for path, reason in ((tmp_path / "none", "cannot be read"), (tmp_path / "empty", "empty")):
            result = run(*command, flag, str(path))
            assert result.exit_code == 2
            assert flag in result.stderr
            assert reason in result.stderr
    assert "needs --redis" in run("serve", "--tcp", "0", "--name", "b", "--redis-password-file", "x").stderr
    assert "is for PostgreSQL" in run("lag", "--store", "sqlite:///x.db", "--password-file", "x").stderr


@pytest.mark.parametrize("command", ["positions", "tail", "publish", "serve"])
def test_help_names_them(command: str) -> None:
    text = " ".join(run(command, "--help").stdout.split())
    for name in ("BUSREP_REDIS", "--redis-password-file", "BUSREP_REDIS_PASSWORD"):
        assert name in text
    if command != "positions":
        for name in ("BUSREP_STORE", "--password-file", "BUSREP_STORE_PASSWORD"):
            assert name in text


def test_any_password_arrives_whole(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    secret = "p:a/s@s w?rd%#ü"
    monkeypatch.setenv("BUSREP_REDIS_PASSWORD", secret)
    monkeypatch.setenv("BUSREP_STORE_PASSWORD", secret)
    assert unquote(urlsplit(with_redis_password("redis://me@h:1/0", None)).password or "") == secret
    assert unquote(urlsplit(with_store_password("postgresql://me@h:1/x", None, "")).password or "") == secret
    assert with_store_password("postgresql://me:own@h/x", None, "") == "postgresql://me:own@h/x"
    assert with_store_password("postgresql://me:own@h/x", file, "") == f"postgresql://me:{PASSWORD}@h/x"
    assert with_store_password("sqlite:///x.db", None, "") == "sqlite:///x.db"
    assert with_redis_password("unix:///run/redis.sock?db=1", file) == f"unix://:{PASSWORD}@/run/redis.sock?db=1"


@pytest.mark.parametrize(
    ("url", "filled"),
    [
        ("redis://u:old@h:1/0", "redis://u:{}@h:1/0"), ("redis://:old@h", "redis://:{}@h"),
        ("redis://u:@h", "redis://u:{}@h"), ("redis://u:o:l:d@h", "redis://u:{}@h"), ("redis://u@h", "redis://u:{}@h"),
        ("unix://u:old@/s", "unix://u:{}@/s"), ("redis://h?db=1&password=old", "redis://:{}@h?db=1"),
        ("redis://h/1?password=old&socket_timeout=5", "redis://:{}@h/1?socket_timeout=5"),
    ],
)  # fmt: skip
def test_a_file_replaces_the_password_of_the_url(url: str, filled: str, file: str) -> None:
    """It used to be appended, and Redis was given both."""
    assert with_redis_password(url, file) == filled.format(PASSWORD)


@pytest.mark.parametrize(
    ("url", "filled"),
    [
        ("rediss://h?ssl_password=k", "rediss://:new@h?ssl_password=k"),
        ("rediss://u@h/1?ssl_password=k&db=2", "rediss://u:new@h/1?ssl_password=k&db=2"),
        ("redis://u:@h", "redis://u:new@h"), ("redis://h?password=", "redis://:new@h"),
        ("redis://h?password=old", None), ("redis://:old@h", None), ("rediss://u:old@h?ssl_password=k", None),
    ],
)  # fmt: skip
def test_only_the_password_of_redis_goes_before_that_of_the_environment(
    url: str, filled: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a key's file kept BUSREP_REDIS_PASSWORD out, without a word."""
    monkeypatch.setenv("BUSREP_REDIS_PASSWORD", "new")
    assert with_redis_password(url, None) == (filled or url)
