"""compose.yaml: its form, and its services' commands, run by hand on the tests' own servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_servers_have_healthchecks_and_others_wait_for_them(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"redis", "postgres", "init", "writer", "reader"}
    for name in ("redis", "postgres"):
        check = services[name]["healthcheck"]
        assert check["test"][0] in ("CMD", "CMD-SHELL")
        assert {"interval", "timeout", "retries"} <= set(check)
    for name in ("writer", "reader"):
        conditions = {other: how["condition"] for other, how in services[name]["depends_on"].items()}
        assert conditions == {
            "redis": "service_healthy",
            "postgres": "service_healthy",
            "init": "service_completed_successfully",
        }
    assert services["init"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}


def test_urls_name_the_services(compose: dict[str, Any]) -> None:
    postgres = compose["services"]["postgres"]["environment"]
    for name in ("init", "writer", "reader"):
        environment = compose["services"][name]["environment"]
        assert environment["BUSREP_REDIS"].startswith("redis://redis:")
        user, password, database = (postgres[f"POSTGRES_{what}"] for what in ("USER", "PASSWORD", "DB"))
        assert environment["BUSREP_STORE"] == f"postgresql://{user}:{password}@postgres:5432/{database}"
    named = {key for service in compose["services"].values() for key in service.get("volumes", ())}
    assert {volume.partition(":")[0] for volume in named} == set(compose["volumes"])


def test_what_the_image_copies_exists(compose: dict[str, Any]) -> None:
    build = compose["services"]["writer"]["build"]
    copied = [
        source
        for line in build["dockerfile_inline"].splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    ]
    assert copied
    assert [source for source in copied if not (ROOT / build["context"] / source).exists()] == []


@pytest.mark.servers
def test_the_services_commands(compose: dict[str, Any], redis_url: str, postgres_url: str, bus_name: str) -> None:
    def start(service: str, **more: str) -> subprocess.Popen[str]:
        described = compose["services"][service]
        environment = {**described["environment"], **more}
        environment.update(BUSREP_REDIS=redis_url, BUSREP_STORE=postgres_url, BUSREP_NAME=bus_name)
        program, *args = described["command"]
        command = {"busrep": [sys.executable, "-m", "busrep.cli"], "python": [sys.executable]}[program]
        # The image has docs/examples as examples.
        args = [str(ROOT / "docs" / one) if one.startswith("examples/") else one for one in args]
        return subprocess.Popen(
            [*command, *args],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            text=True,
        )

    with start("init") as init:
        assert init.wait(30) == 0
    with start("reader") as reader:
        with start("writer", ORDERS_COUNT="3", ORDERS_EVERY="0") as writer:
            assert writer.wait(30) == 0
        assert reader.stdout is not None
        seen = [reader.stdout.readline().strip() for _ in range(3)]
        reader.terminate()
    assert seen == [f"order {number} is paid (web-1 {number})" for number in (1, 2, 3)]
