"""compose.yaml: its form, and its services' commands, run by hand on the tests' own servers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

# What a plain `docker compose up` starts.
PLAIN = {"redis", "postgres", "init", "writer", "reader"}
SPARK = {"spark-master", "spark-worker-1", "spark-worker-2", "pipeline"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_servers_have_healthchecks_and_others_wait_for_them(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {name for name, one in services.items() if "profiles" not in one} == PLAIN
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


@pytest.mark.parametrize("service", ["writer", "spark-master"])
def test_what_the_images_copy_exists(service: str, compose: dict[str, Any]) -> None:
    build = compose["services"][service]["build"]
    copied = [
        source
        for line in build["dockerfile_inline"].splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    ]
    assert copied
    assert [source for source in copied if not (ROOT / build["context"] / source).exists()] == []


# -- Spark -----------------------------------------------------------------------------------------------------------


def test_spark_is_there_on_demand(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {name for name, one in services.items() if one.get("profiles") == ["spark"]} == SPARK
    assert set(services) == PLAIN | SPARK
    # What is started without the profile does not wait for what is not.
    assert not {other for name in PLAIN for other in services[name].get("depends_on", ())} & SPARK
    images = {services[name]["build"]["dockerfile_inline"] for name in SPARK}
    assert len(images) == 1
    assert "busrep.spark.java" in images.pop()


def test_the_cluster_is_where_the_jobs_look_for_it(compose: dict[str, Any]) -> None:
    services = compose["services"]
    master = services["spark-master"]["command"]
    given = dict(zip(master[2::2], master[3::2], strict=True))
    url = f"spark://{given['--host']}:{given['--port']}"
    assert given["--host"] == "spark-master"
    for name in ("spark-worker-1", "spark-worker-2"):
        assert services[name]["command"][-1] == url
        assert services[name]["depends_on"] == {"spark-master": {"condition": "service_healthy"}}
    environment = services["pipeline"]["environment"]
    assert environment["BUSREP_SPARK_MASTER"] == url
    assert environment["BUSREP_STORE"] == services["writer"]["environment"]["BUSREP_STORE"]
    assert set(services["pipeline"]["depends_on"]) >= {"spark-worker-1", "spark-worker-2", "redis", "postgres", "init"}
    # Executors write what the driver lists.
    assert {tuple(services[name]["volumes"]) for name in SPARK} == {("archive:/archive",)}


def test_sparks_commands_exist(compose: dict[str, Any]) -> None:
    services = compose["services"]
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    home = Path(spec.origin).parent
    (jar,) = (home / "jars").glob("spark-core_*.jar")
    with zipfile.ZipFile(jar) as packed:
        classes = set(packed.namelist())
    for name in SPARK - {"pipeline"}:
        program, kind = services[name]["command"][:2]
        assert (home / "bin" / program).exists()
        assert kind.replace(".", "/") + ".class" in classes
    command = [
        sys.executable,
        "-m",
        "busrep.cli",
        services["pipeline"]["entrypoint"][1],
        *services["pipeline"]["command"],
    ]
    assert services["pipeline"]["entrypoint"][0] == "busrep"
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0
    assert "archive" in done.stdout


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
