"""What a benchmark ran on and what it found. The settings are read back from the machine, the servers and the files."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import sqlite3
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg
import redis

from busrep.testing.servers import PostgresServer, RedisServer, start_postgres, start_redis

# What decides how much a commit, and a message, cost.
POSTGRES = ("fsync", "synchronous_commit", "full_page_writes", "wal_level", "shared_buffers", "commit_delay")
REDIS = ("appendonly", "save", "client-output-buffer-limit")
LIBRARIES = ("redis", "hiredis", "orjson", "msgspec", "psycopg")
SYNCHRONOUS = ("off", "normal", "full", "extra")

told: list[str] = []


def tell(*lines: str) -> None:
    """Print what is measured on, and keep it for `write`."""
    told.extend(lines)
    print(*lines, sep="\n", flush=True)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option for `write`."""
    parser.add_argument("--json", type=Path, help="write the settings and all figures into this file, too")


def write(given: argparse.Namespace, figures: dict[str, dict[str, Any]]) -> None:
    """Write what was told, asked for and found, for all.py. ``figures``: {title: {contender: [of each round]}}."""
    if given.json is not None:
        options = {name: value for name, value in vars(given).items() if name != "json"}
        given.json.write_text(json.dumps({"told": told, "options": options, "figures": figures}) + "\n")


def compare(
    title: str, found: Mapping[str, Sequence[float]], taken: Mapping[str, Sequence[float]], unit: str
) -> dict[str, Mapping[str, Sequence[float]]]:
    """Print medians of rates, of their ratios to the first contender's, and of what one took of the processor.

    ``found``: {contender: rates of its rounds}; ``taken``: {contender: seconds}. Returns both as `write` takes them.
    """
    base = next(iter(found.values()))
    figures = [
        f"{name} {statistics.median(rates):,.0f} {unit} "
        f"({statistics.median(a / b for a, b in zip(rates, base, strict=True)):.2f}x, "
        f"{1e6 * statistics.median(taken[name]):,.1f} us)"
        for name, rates in found.items()
    ]
    print(f"{title:42}" + "   ".join(figures), flush=True)
    return {title: found, f"{title}, processor": taken}


def percentiles(runs: Sequence[Sequence[float]]) -> list[float]:
    """The 1st to the 99th of each run, medians over the runs; in milliseconds, of delays in seconds."""
    cuts = [statistics.quantiles(run, n=100) for run in runs]
    return [1000 * statistics.median(at) for at in zip(*cuts, strict=True)]


def machine() -> str:
    """Processors, Python and the libraries that the figures depend on."""
    model = "processor unknown"
    if (info := Path("/proc/cpuinfo")).exists():
        model = next((line.partition(": ")[2] for line in info.read_text().splitlines() if "model name" in line), model)
    used = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    libraries = ", ".join(f"{name} {version(name)}" for name in used)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} x {model}; {platform.platform()}; CPython {platform.python_version()}; {libraries}"


def of_postgres(url: str) -> str:
    """A server's version and settings."""
    with psycopg.connect(url) as connection:
        settings = [f"{name} {connection.execute(f'SHOW {name}').fetchone()[0]}" for name in POSTGRES]
        return f"PostgreSQL {connection.info.server_version // 10_000}: {', '.join(settings)}"


def of_redis(url: str) -> str:
    """A server's name, version and settings."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        info = client.info("server")
        settings = [f"{name} {client.config_get(name)[name] or 'none'}" for name in REDIS]
        name, number = info.get("server_name", "redis"), info.get("valkey_version", info["redis_version"])
        return f"{name} {number}: {', '.join(settings)}"


def of_sqlite(connection: sqlite3.Connection) -> str:
    """The modes of one connection, which are its own in part."""
    journal = connection.execute("PRAGMA journal_mode").fetchone()[0]
    synchronous = connection.execute("PRAGMA synchronous").fetchone()[0]
    return f"SQLite {sqlite3.sqlite_version}: journal_mode {journal}, synchronous {SYNCHRONOUS[synchronous]}"


def servers(stack: contextlib.ExitStack, **config: str) -> tuple[RedisServer, PostgresServer]:
    """Start a Redis, and a PostgreSQL with fsync and this ``config``, until the stack ends; print what all of it runs
    on."""
    server = stack.enter_context(start_redis())
    postgres = stack.enter_context(start_postgres(config={"fsync": "on", "full_page_writes": "on", **config}))
    tell(machine(), of_redis(server.url), of_postgres(postgres.url))
    return server, postgres
