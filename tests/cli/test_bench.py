"""`busrep bench`, for a moment: what it measures is there, and what it writes is gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from busrep.cli.app import cli
from busrep.cli.bench import Figure

pytestmark = pytest.mark.servers

FIGURES = [
    "a question to the store",
    "write, 1 at a time",
    "write, 8 at a time",
    "write, 32 at a time",
    "publish, 10 at a time",
    "publish, 100 at a time",
    "publish, 500 at a time",
    "catch up",
    "publish and handle",
    "write to handler, 100 a second",
]
WITH_DELAYS = [FIGURES[0], *FIGURES[1:4], FIGURES[-1]]


def bench(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["bench", "--seconds", "0.1", "--json", *arguments])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def check(figures: list[dict[str, Any]]) -> None:
    assert [one["what"] for one in figures] == FIGURES
    assert all(one["per_second"] > 0 for one in figures)
    assert [one["what"] for one in figures if one["p50_ms"] is not None] == WITH_DELAYS
    assert all(0 < one["p50_ms"] <= one["p99_ms"] for one in figures if one["what"] in WITH_DELAYS)


def test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = bench()
    check(found["figures"])
    assert found["setting"]["SQLite journal_mode"] == "wal"
    assert not list(tmp_path.iterdir())


def test_beside_a_given_file(redis_url: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'shop.db'}"
    check(bench("--redis", redis_url, "--store", store)["figures"])
    assert not list(tmp_path.iterdir())


def test_on_given_servers(redis_url: str, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE shop (n int)")
        found = bench("--redis", redis_url, "--store", postgres_url)
        schemas = connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'bench%'").fetchone()
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        fsync = connection.execute("SHOW fsync").fetchone()
    check(found["figures"])
    assert schemas == (0,)
    assert tables == [("shop",)]
    assert (found["setting"]["PostgreSQL fsync"],) == fsync


def test_for_a_person(redis_url: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "--seconds", "0.1", "--redis", redis_url])
    assert result.exit_code == 0, result.output
    assert f"Redis: {redis_url}" in result.stdout
    assert all(what in result.stdout for what in FIGURES)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--store", "memory://shop"], "--store sqlite:///file.db or postgresql://"),
        (["--store", "nowhere"], "does not work"),
        (["--redis", "http://localhost"], "--redis http://localhost"),
        (["--redis", "redis://127.0.0.1:1"], "Redis at redis://127.0.0.1:1"),
        (["--seconds", "0"], "Invalid value for '--seconds'"),
    ],
)
def test_what_a_user_can_get_wrong_is_told(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(cli, ["bench", *arguments])
    assert result.exit_code == 2
    assert told in result.output
    assert "Traceback" not in result.output


def test_a_figure() -> None:
    """Of 1 to 100 ms the half were at most 50.5."""
    delays = [at / 1000 for at in range(1, 101)]
    assert Figure.of("x", 50, 2.0, delays) == Figure("x", 25.0, 50.5, 99.99)
    assert Figure.of("x", 1, 2.0, [0.1]) == Figure("x", 0.5)
