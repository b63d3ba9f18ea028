"""The programs of docs/commands.md run, and print what stands below them; the numbers in its text are the defaults."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from pathlib import Path

import attrs
import pytest

from busrep.asyncio import bus
from busrep.commands import acks, locks, presence, remote_servers
from busrep.core import commands
from tests import ROOT

TEXT = (ROOT / "docs" / "commands.md").read_text()


@attrs.frozen
class Program:
    section: str
    code: str
    prints: str


def programs() -> list[Program]:
    found = []
    for section in TEXT.split("\n## ")[1:]:
        code = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        prints = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        assert len(code) == len(prints) == 1, section.splitlines()[0]
        found.append(Program(section.splitlines()[0], code[0], prints[0]))
    return found


@pytest.mark.servers
@pytest.mark.timeout(30)
@pytest.mark.parametrize("program", programs(), ids=lambda program: program.section)
def test_a_program_prints_what_stands_below_it(
    program: Program, redis_url: str, bus_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = program.code.replace("redis://localhost:6379", redis_url).replace('"shop"', f'"{bus_name}"')
    assert redis_url in code
    assert bus_name in code
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"docs/commands.md, {program.section}", "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == program.prints


def test_the_numbers_named_are_the_defaults() -> None:
    def default(function: object, name: str) -> object:
        return inspect.signature(function).parameters[name].default  # type: ignore[arg-type]

    for function, name, value, named in (
        (presence.Presence, "refresh", 60.0, "`refresh` seconds (60)"),
        (presence.Presence, "timeout", 300.0, "`timeout` seconds (300)"),
        (presence.Presence, "users", 10_000, "`users` (10,000"),
        (presence.Presence, "instances", 100, "`instances` (100"),
        (presence.Presence, "max_bytes", 256 * 2**20, "`max_bytes` (256 MiB"),
        (acks.Retained, "max_bytes", 16 * 2**20, "`max_bytes` (16 MiB)"),
        (acks.Retained, "max_rows", 100_000, "`max_rows` (100,000)"),
        (acks.Acknowledgements, "repeat", 10.0, "`repeat` seconds (10)"),
        (remote_servers.RemoteServers, "period", 10.0, "`period` seconds (10)"),
        (locks.Locks.acquire, "poll", 2.0, "`poll` seconds (2,"),
    ):
        assert default(function, name) == value
        assert named in TEXT
    assert f"Over {bus.COMMAND_QUEUE:,} of them, or {bus.COMMAND_QUEUE_BYTES // 2**20} MiB," in TEXT
    assert f"within {acks.PAUSE:g} s" in TEXT
    assert f"names ({commands.NAME_BYTES} bytes)" in TEXT.replace("\n  ", " ")
    assert f"Names over {commands.NAME_BYTES} bytes" in TEXT
