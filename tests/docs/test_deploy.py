"""docs/guides/deploy.md: the rights in Redis suffice, units and manifests are well formed and run what there is."""

from __future__ import annotations

import asyncio
import configparser
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import yaml

import busrep
from busrep.cli.app import cli
from busrep.stores import open_store
from busrep.streams import Registry
from tests import ROOT

PAGE = ROOT / "docs" / "guides" / "deploy.md"
EXAMPLES = ROOT / "docs" / "examples"


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.servers
def test_the_rights_in_redis_are_enough(redis_url: str, bus_name: str) -> None:
    rights = re.search(r"needs\s+`([^`]*)`\s+and\s+the\s+channels\s+`(\S+)`\s+and\s+`(\S+)`", PAGE.read_text())
    assert rights is not None
    rules = [*rights[1].split(), *(channel.replace("shop", bus_name) for channel in rights.groups()[1:])]
    stream = busrep.Stream("numbers")

    async def work() -> None:
        # The name of the bus serves as the user's: nobody else has it.
        url = redis_url.replace("redis://", f"redis://{bus_name}:secret@")
        common: dict[str, Any] = {"name": bus_name, "streams": [stream], "store": f"memory://{bus_name}"}
        await open_store(common["store"], Registry([stream])).init()
        async with busrep.connect(url, writer="w", **common) as bus, busrep.connect(url, **common) as reading:
            reading.subscribe(stream)(lambda batch: None)
            reading.on(busrep.UserSync)(lambda command: None)
            (token,) = await bus.publish(stream, [1])
            await reading.wait_for(stream, "w", token)

    with redis.Redis.from_url(redis_url) as admin:
        admin.acl_setuser(bus_name, enabled=True, reset=True, passwords=["+secret"])
        admin.execute_command("ACL", "SETUSER", bus_name, "-@all", *rules)
        try:
            asyncio.run(work())
        finally:
            admin.acl_deluser(bus_name)


def units() -> Iterator[configparser.ConfigParser]:
    for text in fenced("ini"):
        if "[Unit]" in text:
            unit = configparser.ConfigParser(interpolation=None)
            unit.optionxform = str  # type: ignore[assignment, method-assign]
            unit.read_string(text)
            yield unit


def test_the_units_run_the_examples_and_end_them_in_order() -> None:
    found = list(units())
    assert len(found) == 2
    for unit in found:
        service = unit["Service"]
        program = EXAMPLES / shlex.split(service["ExecStart"])[-1].rpartition("/")[2]
        name, _, _ = service["Environment"].partition("=")
        assert f'"{name}"' in program.read_text()
        assert service["KillSignal"] == "SIGINT"
        assert int(service["TimeoutStopSec"]) > busrep.Settings().shutdown_timeout
    environment = next(text for text in fenced("ini") if "[Unit]" not in text)
    names = {line.partition("=")[0] for line in environment.splitlines()}
    assert names >= set(re.findall(r"environ\[\"(\w+)\"\]", (EXAMPLES / "orders_writer.py").read_text()))


def manifests() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for text in fenced("yaml") for one in yaml.safe_load_all(text)}


def test_the_name_of_a_writer_is_that_of_its_pod() -> None:
    web = manifests()["StatefulSet"]
    pod = web["spec"]["template"]
    assert web["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    environment = {one["name"]: one for one in container["env"]}
    assert environment["ORDERS_WRITER"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    text = (EXAMPLES / container["command"][-1]).read_text()
    assert environment.keys() == set(re.findall(r"environ(?:\.get\(|\[)\"(BUSREP_\w+|ORDERS_WRITER)\"", text))
    assert pod["spec"]["terminationGracePeriodSeconds"] > busrep.Settings().shutdown_timeout


def test_a_durable_reader_is_replaced_and_not_doubled() -> None:
    spec = manifests()["Deployment"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    (container,) = spec["template"]["spec"]["containers"]
    assert (EXAMPLES / container["command"][-1]).is_file()


@pytest.mark.parametrize("kind", ["Job", "CronJob"])
def test_the_jobs_run_commands_that_exist(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = manifests()[kind]["spec"]
    (container,) = spec.get("jobTemplate", {"spec": spec})["spec"]["template"]["spec"]["containers"]
    program, group, name, *arguments = container["command"]
    assert (program, group) == ("busrep", "db")
    monkeypatch.setenv("BUSREP_STORE", "sqlite:///shop.db")
    cli.commands["db"].commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
