"""docs/guides/commands.md: it shows each helper at work, and the numbers in its text are the defaults."""

from __future__ import annotations

import inspect

from busrep.asyncio import messages as publisher
from busrep.commands import acks, locks, presence, remote_servers
from busrep.core.fields import NAME_BYTES
from tests import ROOT
from tests.docs.markdown import blocks

PAGE = ROOT / "docs" / "guides" / "commands.md"
TEXT = PAGE.read_text()


def test_each_section_has_a_program_that_prints_something() -> None:
    sections = TEXT.split("\n## ")[1:]
    programs = [block for block in blocks(PAGE) if block.kind == "program" and block.prints]
    assert len(programs) == len(sections) == TEXT.count("```python")


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
    assert f"Over {publisher.COMMAND_QUEUE:,} of them, or {publisher.COMMAND_QUEUE_BYTES // 2**20} MiB," in TEXT
    assert f"within {acks.PAUSE:g} s" in TEXT
    assert f"names ({NAME_BYTES} bytes)" in TEXT.replace("\n  ", " ")
    assert f"Names over {NAME_BYTES} bytes" in TEXT
