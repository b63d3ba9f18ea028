"""docs/pipeline.md, archive, compact and audit: the programs print what stands below, the commands' options exist."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import attrs
import pytest
from pyspark.sql import SparkSession

from tests.spark.archives import Bench

TEXT = (Path(__file__).parent.parent.parent / "docs" / "pipeline.md").read_text()
SECTIONS = {part.splitlines()[0]: part for part in TEXT.split("\n## ")}


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)


def test_the_programs(spark: SparkSession, tmp_path: Path) -> None:
    bench = Bench(spark, tmp_path)
    bench.write("w1", [(1, "[1]"), (3, "[3]"), (4, "[4]")], upto=4)
    bench.write("w2", [(2, "[2]"), (5, "[5]")], upto=5)
    found: dict[str, Any] = {
        "STORE": bench.url,
        "FOLDER": bench.root.url,
        "lose_a_row": lambda: bench.sql("DELETE FROM busrep_facts WHERE id = 3"),
    }
    for section in ("Archive", "Audit"):
        (code,), (prints,) = blocks(section, "python"), blocks(section, "text")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"docs/pipeline.md, {section}", "exec"), found)
        assert re.sub(r"[\d,]+ bytes", "BYTES bytes", printed.getvalue()) == prints


@pytest.mark.parametrize("section", ["Archive", "Compact", "Audit"])
def test_the_commands_options_exist(section: str) -> None:
    (text,) = blocks(section, "sh")
    commands = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("busrep pipeline")]
    assert commands
    for _, _, name, *arguments in commands:
        known = {field.name for field in attrs.fields(importlib.import_module(f"busrep.spark.jobs.{name}").Options)}
        given = {one[2:].replace("-", "_") for one in arguments if one.startswith("--")}
        assert given <= known | {"report", "json", "master"}
