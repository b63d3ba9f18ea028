"""What benchmarks/bootstrap.py observes: phases, the commits in them, memory and processors."""

from __future__ import annotations

import array
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import attrs


@attrs.define
class Phase:
    name: str
    begin: float
    end: float = 0.0
    resident: dict[int, list[int]] = attrs.field(factory=dict)
    """Process -> its resident memory, sampled, bytes."""
    busy_before: float = attrs.field(factory=lambda: processor_seconds())
    busy: float = 0.0
    """Processors that were busy on the whole machine, on average."""

    def over(self) -> None:
        """It ends now."""
        self.end = time.monotonic()
        self.busy = (processor_seconds() - self.busy_before) / (self.end - self.begin)

    def growth(self) -> int:
        """The most that a writer's memory grew since the beginning of the phase, bytes."""
        return max(max(found) - found[0] for found in self.resident.values())


def processor_seconds() -> float:
    """Of all processors and all that they did since the machine started, but idling and waiting for disks."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def resident(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def sample(phase: Phase, writers: Sequence[subprocess.Popen[str]]) -> None:
    for one in writers:
        phase.resident.setdefault(one.pid, []).append(resident(one.pid))


def watch(phase: Phase, writers: Sequence[subprocess.Popen[str]], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        sample(phase, writers)
        time.sleep(0.1)


@attrs.frozen
class Commits:
    """Times of all commits of a writer."""

    due: Sequence[float]
    started: Sequence[float]
    ended: Sequence[float]

    @classmethod
    def read(cls, path: Path) -> Commits:
        times = array.array("d", path.read_bytes())
        third = len(times) // 3
        return cls(times[:third], times[third : 2 * third], times[2 * third :])


def percentile(found: Sequence[float], percent: float) -> float:
    ordered = sorted(found)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def latencies(commits: Sequence[Commits], phase: Phase) -> dict[str, float]:
    """Milliseconds, of the commits that were due in the phase."""
    called, late = [], []
    for one in commits:
        for due, started, ended in zip(one.due, one.started, one.ended, strict=True):
            if phase.begin <= due < phase.end:
                called.append(1000 * (ended - started))
                late.append(1000 * (ended - due))
    return {
        "commits": len(called),
        "seconds": round(phase.end - phase.begin, 1),
        **{f"p{percent}": round(percentile(called, percent), 2) for percent in (50, 99)},
        **{f"due_p{percent}": round(percentile(late, percent), 2) for percent in (50, 99)},
        "busy": round(phase.busy, 2),
        "growth_kb": round(phase.growth() / 1024),
    }


def quiet(name: str, writers: Sequence[subprocess.Popen[str]], seconds: float) -> Phase:
    """A phase without a bootstrap."""
    phase = Phase(name, time.monotonic())
    watch(phase, writers, seconds)
    phase.over()
    return phase
