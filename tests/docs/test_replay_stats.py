"""docs/pipeline.md, replay and stats: the commands' options exist, and the tables are those that are written."""

from __future__ import annotations

import importlib
import re
import shlex

import attrs
import pytest

from tests import ROOT

pytest.importorskip("pyspark")

from busrep.spark.stats.job import TABLES

TEXT = (ROOT / "docs" / "pipeline.md").read_text()
SECTIONS = {part.splitlines()[0]: part for part in TEXT.split("\n## ")}


@pytest.mark.parametrize(("section", "name"), [("Replay", "replay"), ("Stats", "stats")])
def test_the_options_exist(section: str, name: str) -> None:
    (text,) = re.findall(r"^```sh\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]
    known = {field.name for field in attrs.fields(importlib.import_module(f"busrep.spark.jobs.{name}").Options)}
    given = {
        one[2:].partition(" ")[0].replace("-", "_")
        for one in [*(word for words in commands for word in words), *re.findall(r"`(--[^`]+)`", SECTIONS[section])]
        if one.startswith("--")
    }
    assert all(words[:3] == ["busrep", "pipeline", name] for words in commands)
    assert given <= known
    assert len(given) > 5


def test_the_tables() -> None:
    assert set(re.findall(r"`(\w+)\.parquet`", SECTIONS["Stats"])) == {*TABLES, "latency_samples"}
