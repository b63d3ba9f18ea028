"""The simulator as a whole: the same seed is the same run, what is wrong is found and shrunk, what is right passes.

CI runs 1,000 seeds beside these (``python -m tests.proof.simulate --seeds 1000``).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from busrep.core.progress import Progress
from busrep.core.reader import Reader
from busrep.runtime.committed import LastCommits
from busrep.stores.plans import Plan
from tests import DATA, ROOT
from tests.proof.sim.run import Scenario, draw, shrink, simulate
from tests.proof.sim.scenario import Event, Role
from tests.proof.simulate import traced

# A seed in which rows travel on the wire: not all do, where the publish queue is nothing.
TELLING = 7

HASHES = """
import hashlib
from tests.proof.sim.run import draw
from tests.proof.simulate import traced
for seed in (3, 11, 47, 132):
    outcome, lines = traced(draw(seed))
    print(seed, hashlib.sha256(chr(10).join(lines).encode()).hexdigest())
"""


def hashes(hash_seed: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", HASHES],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    return found.stdout


def test_a_seed_is_the_same_run_in_every_process() -> None:
    mine = []
    for seed in (3, 11, 47, 132):
        _, lines = traced(draw(seed))
        mine.append(f"{seed} {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}\n")
    assert hashes("1") == hashes("2") == "".join(mine)


def test_the_trace_tells_what_happened() -> None:
    outcome, lines = traced(draw(TELLING))
    text = "\n".join(lines)
    assert outcome.violations == []
    assert outcome.facts > 0
    assert "> RDATA orders" in text
    assert "handled orders" in text
    assert "all faults end" in text
    assert text.index("all faults end") < text.index("settled")


def test_every_kind_of_event_and_role_is_drawn() -> None:
    scenarios = [draw(seed) for seed in range(400)]
    events = {event.kind for scenario in scenarios for event in scenario.events}
    assert events == {
        "write", "publish", "joined", "presence", "wait", "redis_cut", "redis_hole", "redis_refuse", "redis_bad",
        "redis_clients", "redis_down", "redis_failover", "redis_denied", "database_cut", "commit_cut", "database_hole",
        "database_refuse", "database_slow", "database_crash", "restore", "kill", "pause", "restart", "second", "prune",
        "handler_outage", "stranger", "clock", "failover", "restored_at_beginning", "database_flush",
        "database_clock", "sequence_set",
    }  # fmt: skip
    roles = {role.kind for scenario in scenarios for role in scenario.roles}
    assert roles == {"writer", "loose", "strict", "live", "replica", "memory"}


def test_rows_pruned_while_a_reader_starts_are_not_owed_to_it() -> None:
    """One that begins at the oldest row learns from its first page that it is another by now, and handles the rest at
    once: that is no loss, whenever it is looked at."""
    roles = (
        Role("w1", "writer", {"reads": False, "late": 0.0}),
        Role("r2", "live", {"start": "earliest", "slow": 0.2, "late": 1.486}),
    )
    settings = {**draw(9201495).settings, "page_rows": 10, "handler_batch_rows": 1}
    for number in range(30):
        prune = Event(1.5 + number * 0.005, "prune", "", {"keep": 3})
        events = (Event(0.8555, "publish", "w1", {"rows": 10}), prune)
        assert simulate(Scenario(9201495, 4.0, roles, settings, events)).violations == []


def kept(name: str) -> Scenario:
    """A scenario that the simulator found something with."""
    return Scenario.from_json(json.loads((DATA / "scenarios" / f"{name}.json").read_text())["scenario"])


@pytest.mark.parametrize("opened_anew", [False, True])
def test_a_writer_that_misses_no_lost_commit_is_found(monkeypatch: pytest.MonkeyPatch, opened_anew: bool) -> None:
    """Whoever was told of a fact by the bus that it has must know that a failover lost it, however many buses its
    process has had before."""
    before = [Event(0.6, "second", "w1", {"lasting": 0.3})] if opened_anew else []  # which takes the name
    written = Event(3.2, "publish", "w1", {"rows": 2})
    events = (*before, Event(3.0, "failover", "", {"behind": 0.5, "lasting": 0.1}), written)
    role = Role("w1", "writer", {"reads": False, "late": 0.0})
    scenario = Scenario(12079235, 4.0, (role,), draw(12079235).settings, events)
    outcome, lines = traced(scenario)
    assert outcome.violations == []
    assert any("a standby is promoted" in line for line in lines)
    assert any("w1#1     closed" in line and float(line.split()[0]) < 3.0 for line in lines) == opened_anew
    monkeypatch.setattr(LastCommits, "check", lambda *_: None)
    (found,) = simulate(scenario).violations
    assert (found.invariant, "w1#" in found.text) == ("settles", True)
    assert "does not know that its commits are lost" in found.text


def test_a_registration_that_a_failover_lost_excuses_pruning_only_until_the_reader_notices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_that_is_proven(_dialect: Any, _stream: str, _writer: str, position: int, _cap: Any) -> Plan[int]:
        yield from ()
        return position

    unnoticed, noticed = (
        kept(name)
        for name in (
            "pruned-before-a-lost-registration-was-noticed",
            "noticed-a-lost-registration-and-did-not-register",
        )
    )
    monkeypatch.setattr("busrep.stores.facts._readers_bound", all_that_is_proven)
    assert simulate(unnoticed).violations == []
    assert "pruning respects readers" in {one.invariant for one in simulate(noticed).violations}


def test_a_life_that_began_behind_pruned_rows_knows_where_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a later one, whose registration a failover loses, may be told of them."""
    drawn = kept("pruned-before-the-process-before-began")
    _, writer, reader = drawn.roles
    late = attrs.evolve(reader, options={**reader.options, "late": 2.6})
    events = (*drawn.events[:3], Event(2.55, "failover", "", {"behind": 1.0, "lasting": 0.1}))
    scenario = attrs.evolve(drawn, roles=(writer, late), events=events)
    outcome, lines = traced(scenario)
    assert outcome.violations == []
    assert any("a standby is promoted" in line for line in lines)
    begin = Reader.start_at

    def forgetful(self: Reader, stream: str, writer: str, position: int, began: int | None = None) -> None:
        begin(self, stream, writer, position, 0)

    monkeypatch.setattr(Reader, "start_at", forgetful)
    assert {one.invariant for one in simulate(scenario).violations} == {"pruning respects readers", "settles"}


def test_a_scenario_is_itself_again_after_json() -> None:
    scenario = draw(17)
    again = Scenario.from_json(json.loads(json.dumps(scenario.as_json())))
    assert again == scenario
    assert traced(again)[1] == traced(scenario)[1]


@pytest.mark.slow
def test_a_bug_is_found_and_shrunk_to_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain check left out: POSITION is taken for granted, as if nothing could be lost on a live link."""
    whole = Progress._position

    def trusting(self: Progress, prev: int, new: int) -> None:
        whole(self, min(prev, self.position) if self.heard else prev, new)

    monkeypatch.setattr(Progress, "_position", trusting)
    for seed in range(200):
        outcome = simulate(seed)
        if outcome.violations:
            break
    else:
        pytest.fail("200 seeds found nothing")
    invariant = outcome.violations[0].invariant
    smaller = shrink(outcome.scenario, invariant, tries=60)
    assert len(smaller.events) < len(outcome.scenario.events)
    assert invariant in {one.invariant for one in simulate(smaller).violations}
    monkeypatch.undo()
    assert simulate(smaller).violations == []


def cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.proof.simulate", *args], capture_output=True, text=True, check=False, cwd=ROOT
    )


def test_the_command_runs_seeds_and_reports() -> None:
    done = cli("--seeds", "6", "--first", "40", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 runs in" in done.stdout
    assert "0 runs with violations" in done.stdout
    report = json.loads(cli("--seeds", "3", "--jobs", "1", "--json").stdout)
    assert report["seeds"] == 3
    assert report["violations"] == []
    assert report["facts"] > 0


def test_the_command_replays_one_seed_and_a_scenario(tmp_path: Path) -> None:
    done = cli("--seed", "3")
    assert done.returncode == 0
    assert "all faults end" in done.stdout
    file = tmp_path / "scenario.json"
    file.write_text(json.dumps(draw(3).as_json()))
    assert cli("--scenario", str(file)).stdout == done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--seeds", "0"], "at least 1"),
        (["--scenario", "/does/not/exist"], "holds no scenario"),
        (["--seed", "x"], "invalid int"),
    ],
)
def test_the_command_says_what_is_wrong_with_its_arguments(args: list[str], says: str) -> None:
    done = cli(*args)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


REGRESSIONS = sorted((DATA / "scenarios").glob("*.json"))


@pytest.mark.parametrize("file", REGRESSIONS, ids=lambda file: file.stem)
def test_what_the_simulator_found_stays_mended(file: Path) -> None:
    """Each file: what was wrong, the seed that showed it, and the scenario shrunk to what it takes."""
    found = json.loads(file.read_text())
    outcome = simulate(Scenario.from_json(found["scenario"]))
    assert outcome.violations == [], found["finding"]


def test_there_are_regressions() -> None:
    assert len(REGRESSIONS) >= 10


@pytest.mark.parametrize("first", [10_000, 20_000])
def test_some_seeds(first: int) -> None:
    for seed in range(first, first + 25):
        assert simulate(seed).violations == [], f"seed {seed}"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
def test_workers_do_not_outlive_a_killed_command() -> None:
    def workers(pid: int) -> list[int]:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]

    def alive(pid: int) -> bool:
        try:
            return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False

    def until(what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    command = [sys.executable, "-m", "tests.proof.simulate", "--seeds", "100000", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as running:
        try:
            until(lambda: len(workers(running.pid)) == 2)
            assert running.stdout is not None
            running.stdout.readline()  # they are at work
            mine = workers(running.pid)
        finally:
            running.kill()
    until(lambda: not any(alive(pid) for pid in mine))
