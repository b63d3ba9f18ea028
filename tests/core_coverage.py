"""Measure that each core module has 100 % branch coverage by its own tests: ``python -m tests.core_coverage``.

Coverage by the whole suite would hide a core module that only integration tests reach. Modules that share test files
share a run, and two runs go at a time: 20 s on two cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Test files -> the core modules that they cover alone.
OWN_TESTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("core/test_commands", "core/test_core_trust"): ("core/commands", "core/fields", "core/application_commands"),
    ("core/test_framing", "core/test_hostile_messages", "core/test_core_trust"): ("core/framing", "core/row_lines"),
    ("core/test_streams", "core/test_core_trust"): ("streams",),
    ("core/test_ids", "core/test_core_trust"): ("core/ids", "core/runs", "core/starts"),
    ("core/test_reader", "core/test_senders", "core/test_late_rows", "core/test_hostile_messages",
     "asyncio/test_clock_behind", "core/test_core_trust", "core/test_beats"): (
        "core/reader", "core/progress", "core/received", "core/following", "core/followed",
        "core/intake", "core/admission", "core/delivery", "core/catchup",
    ),
    ("core/test_backoff", "core/test_bootstrap_core"): ("core/backoff",),
    ("core/test_saved_positions", "core/test_own_facts"): ("core/handled",),
    ("core/test_bootstrap_core",): (
        "core/bootstrap", "core/bootstrap_work", "core/states",
    ),
    ("core/test_writer", "core/test_replicate_rate", "links/test_one_line", "core/test_core_trust",
     "core/test_beats"): (
        "core/writer", "core/chain", "core/announcements", "core/outgoing",
    ),
    ("test_package", "core/test_core_trust"): ("errors", "settings", "stores/interface"),
}  # fmt: skip


def measure(tests: tuple[str, ...], modules: tuple[str, ...]) -> str:
    """Nothing, or what is missing."""
    files = [str(ROOT / "busrep" / f"{module}.py") for module in modules]
    with tempfile.TemporaryDirectory() as folder:
        data = f"--data-file={folder}/coverage"
        suite = [f"tests/{name}.py" for name in tests]
        pytest = ["-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not servers", *suite]
        include = f"--include={','.join(files)}"
        for arguments in (
            ["run", data, "--branch", include, *pytest],
            ["report", data, "--show-missing", "--skip-covered", "--fail-under=100", include],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "coverage", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
            )
            if done.returncode:
                return done.stdout + done.stderr
    return ""


def main() -> int:
    """0 when all are covered."""
    status = 0
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(measure, OWN_TESTS.keys(), OWN_TESTS.values())
    for (tests, modules), missing in zip(OWN_TESTS.items(), found, strict=True):
        print(f"{', '.join(modules)} by {', '.join(tests)}: {'NOT 100 %' if missing else '100 %'}", flush=True)
        if missing:
            print(missing, flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
