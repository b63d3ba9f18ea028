"""The folder in memory for the files of a test run: who gets one, and what becomes of those of killed runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import scratch

NO_PROCESS = 2**22 + 1  # above Linux's highest process ID


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch, "MEMORY", tmp_path)
    monkeypatch.setattr(scratch, "FREE_BYTES", 0)
    monkeypatch.setattr(scratch, "AVAILABLE_BYTES", 0)
    monkeypatch.delenv("TMPDIR", raising=False)
    return tmp_path


def test_a_run_gets_a_folder_of_its_own_that_a_server_of_another_user_can_read(memory: Path) -> None:
    folder = scratch.memory_folder()
    assert folder is not None
    assert folder.parent == memory
    assert folder.stat().st_mode & 0o777 == 0o755
    assert list(folder.iterdir()) == []
    assert folder != scratch.memory_folder()


def test_tmpdir_has_the_last_word(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    assert scratch.memory_folder() is None


@pytest.mark.parametrize("bound", ["FREE_BYTES", "AVAILABLE_BYTES"])
def test_without_room_the_files_go_to_the_disk(memory: Path, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(scratch, bound, 2**80)
    assert scratch.memory_folder() is None
    assert list(memory.iterdir()) == []


def test_where_no_program_may_run_the_files_go_to_the_disk(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(scratch.subprocess, "run", refused)
    assert scratch.memory_folder() is None
    assert list(memory.iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_what_a_live_one_uses_is_not(memory: Path) -> None:
    left, used = memory / f"{scratch.PREFIX}{NO_PROCESS}-x", memory / f"{scratch.PREFIX}{os.getpid()}-x"
    for each in (left, used):
        each.mkdir()
        (each / "file").touch()
    assert scratch.memory_folder() is not None
    assert not left.exists()
    assert used.exists()
