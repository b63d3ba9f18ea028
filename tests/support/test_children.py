"""How a child process of the fault tests, and of ``busrep demo``, ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT

FENCED_AT_WORK = """
import asyncio

from busrep.errors import WriterFenced


async def work(*_):
    async with asyncio.TaskGroup() as group:
        group.create_task(fenced())


async def fenced():
    raise WriterFenced("w1", 7)
"""
CHILD = """
from tests.support.children import run_child

run_child("child", work)
"""
DEMO = """
import os
from multiprocessing import Pipe

from busrep.cli import demo_child

demo_child.work = work
demo_child.live(None, Pipe()[0], os.devnull)
"""


@pytest.mark.parametrize("program", [CHILD, DEMO], ids=["fault tests", "demo"])
def test_a_child_whose_name_was_claimed_says_so_in_its_status(program: str) -> None:
    """Its parent started another process of that name on purpose."""
    arguments = [sys.executable, "-c", FENCED_AT_WORK + program]
    with subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write("{}\n")
        child.stdin.flush()  # and it stays open: a child whose parent is gone ends at once
        errors = child.stderr.read()
        assert child.wait() == 3, errors
