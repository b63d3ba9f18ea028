"""Run every benchmark that has a peer, and write what was found into a page, measured.md, with two plots.

    pip install -e '.[bench]'
    python benchmarks/all.py [--quick] [--only NAME] [--folder measured]

``--quick``, with fewer rounds, took 17 minutes on two cores; all of it takes longer. Nothing else should run meanwhile.
The figures of each program are kept in the folder: those that ``--only`` leaves out are taken from there, where they
are.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
from setting import percentiles

HERE = Path(__file__).parent

# Program: its options, and those of ``--quick``.
PROGRAMS: dict[str, tuple[list[str], list[str]]] = {
    "throughput": (["--rows", "100000"], ["--rows", "50000", "--rounds", "3"]),
    "readers": ([], ["--rounds", "1"]),
    "decode": ([], []),
    "facts": ([], ["--seconds", "1", "--rounds", "3"]),
    "latency": ([], ["--seconds", "5"]),
    "joined": ([], ["--rounds", "3"]),
    "catch_up": ([], ["--rows", "100000", "--rounds", "3"]),
    "cache_hit": ([], []),
    "peers": ([], ["--rows", "20000", "--seconds", "5", "--rounds", "2"]),
    "idle": (["--model"], ["--model"]),
    "deployment": (["--beats", "100000"], []),
}


@attrs.frozen
class Line:
    """A line of the table: busrep beside a peer. ``less``: the smaller figure is the better one. ``aim``: of the ratio;
    None: there is none yet."""

    what: str
    program: str
    title: str
    peer: str
    unit: str
    aim: float | None = None
    ours: str = "busrep"
    less: bool = False
    scale: float = 1.0


LINES = (
    Line("live, beside redis-py pub/sub, one row a message", "throughput", "live", "plain", "rows/s", 9, "memory"),
    Line("live, beside arrays of 100 rows, no checks", "throughput", "live", "framed", "rows/s", 0.75, "memory"),
    Line("live, beside raw asyncio and hiredis, 500 rows", "throughput", "live", "raw", "rows/s", 0.5, "memory"),
    Line("the same on uvloop, beside pub/sub", "throughput", "live", "plain", "rows/s", 11, "uvloop"),
    Line("the same, table in PostgreSQL, beside pub/sub", "throughput", "live", "plain", "rows/s", None, "postgres"),
    Line("the same, table in SQLite, beside pub/sub", "throughput", "live", "plain", "rows/s", None, "sqlite"),
    Line("decode frames of 100 rows by msgspec, beside orjson", "decode", "100 rows, slots", "baseline", "rows/s", 0.8),
    Line("decode frames of 450 rows", "decode", "450 rows, slots", "baseline", "rows/s", 1.0),
    *[
        Line(f"single facts{way}, {count} at a time, PostgreSQL", "facts",
             f"PostgreSQL, single facts, {count} at a time", "bare", "facts/s", aim, ours)
        for way, ours in ((", `write`", "busrep"), (", `publish`", "publish"))
        for count, aim in ((1, 0.9), (8, 2.0), (32, 2.0))
    ],
    *[
        Line(f"processor time of one, {way}", "facts", "PostgreSQL, single facts, 1 at a time, processor", "bare", "µs",
             None, ours, less=True, scale=1e6)
        for way, ours in (("`write`", "busrep"), ("`publish`", "publish"))
    ],
    *[
        Line(f"{count} facts a transaction, beside `INSERT ... unnest`", "facts",
             f"PostgreSQL, {count} facts a transaction", "unnest", "facts/s", aim)
        for count, aim in ((10, 0.9), (100, 1.0), (500, 1.1))
    ],
    Line("500 facts a transaction, by COPY", "facts", "PostgreSQL, 500 facts a transaction", "COPY", "facts/s", 0.8),
    *[
        Line(f"SQLite, 1 fact a transaction, `{way}`", "facts", "SQLite, 1 fact a transaction", "bare", "facts/s", 0.9,
             ours)
        for way, ours in (("write", "busrep"), ("publish", "publish"))
    ],
    Line("SQLite, 100 facts a transaction", "facts", "SQLite, 100 facts a transaction", "bare", "facts/s", 0.7),
    *[
        Line(f"a transaction of the caller's with a fact, {name}", "joined", name, "bare", "transactions/s", 0.7)
        for name in ("psycopg", "threads", "sqlalchemy")
    ],
    *[
        Line(f"its processor time, {name}", "joined", f"{name}, processor", "bare", "µs", 1.5, less=True, scale=1e6)
        for name in ("psycopg", "threads", "sqlalchemy")
    ],
    Line("catch-up, PostgreSQL, beside the bare driver", "catch_up", "PostgreSQL", "bare", "rows/s", 1.0),
    Line("catch-up, SQLite", "catch_up", "SQLite", "bare", "rows/s", 0.9),
    Line("a cache hit, beside cachetools", "cache_hit", "hit", "cachetools", "ns", 1.5, less=True, scale=1e9),
    Line("of an async function", "cache_hit", "hit, async", "cachetools", "ns", 1.5, less=True, scale=1e9),
    Line("a cache miss", "cache_hit", "miss", "cachetools", "ns", 1.3, less=True, scale=1e9),
)  # fmt: skip

NAMES = {
    "pub/sub": "Redis pub/sub", "streams": "Redis Streams, a group", "jetstream": "NATS JetStream",
    "faststream": "FastStream on Redis", "notify": "LISTEN/NOTIFY", "outbox": "an outbox, polled every 100 ms",
    "busrep": "busrep",
}  # fmt: skip
IDLE = (
    ("bus", "busrep, 22 processes", "% of a core", 100.0, 5.0), ("postgres", "PostgreSQL", "% of a core", 100.0, None),
    ("redis", "Redis", "% of a core", 100.0, None), ("updated", "rows updated", "/s", 1.0, 20.0),
    ("wal", "WAL", "KiB/s", 1 / 1024, None), ("published", "PUBLISH", "/s", 1.0, None),
    ("connections", "connections of PostgreSQL", "", 1.0, 22.0),
)  # fmt: skip
MODEL = (
    ("deliveries", "1,000 writers of 10 streams, 1,000 processes: messages delivered", "/s", 1.0, 50_000.0),
    ("process", "one of their processes", "% of a core", 100.0, 1.0),
    ("postgres", "their PostgreSQL", "cores", 1.0, 0.5),
)

DEPLOYMENT = {
    "connections": "at most 1 when idle",
    "messages of a join": "at most 4, 13",
    "under an old snapshot, bytes a beat": "at most 105",
    "a beat, under an old snapshot": "at most twice",
    "a beat that reads the registry, under an old snapshot": "at most twice",
    "a beat": "the same",
    "a beat that reads the registry": "the same",
    **{f"multixact members a fact, {count} at a time": "at most 1" for count in (10, 50, 100)},
}

Found = dict[str, dict[str, Any]]


def short(figure: float) -> str:
    """Three digits."""
    digits = 0 if figure >= 100 else 1 if figure >= 10 else 2
    return f"{float(f'{figure:.3g}'):,.{digits}f}"


def table(found: Found) -> list[str]:
    """busrep beside its peers."""
    lines = ["| | peer | busrep | | ratio | aim |", "|---|---|---|---|---|---|"]
    for line in LINES:
        if line.program not in found:
            continue
        figures = found[line.program]["figures"][line.title]
        theirs, ours = figures[line.peer], figures[line.ours]
        ratio = statistics.median(b / a for a, b in zip(theirs, ours, strict=True))
        peer, mine = (short(line.scale * statistics.median(those)) for those in (theirs, ours))
        aim = "" if line.aim is None else f"{'at most' if line.less else 'at least'} {line.aim:g}"
        lines.append(f"| {line.what} | {peer} | {mine} | {line.unit} | {ratio:.2f} | {aim} |")
    return lines


def delays(found: Found) -> list[str]:
    lines = ["| | peer, p50 | p99 | busrep, p50 | p99 | ratio of p50 |", "|---|---|---|---|---|---|"]
    for title, contenders in found["latency"]["figures"].items():
        theirs, ours = percentiles(contenders["bare"]), percentiles(contenders["busrep"])
        shown = [f"{short(cuts[at])} ms" for cuts in (theirs, ours) for at in (49, 98)]
        lines.append(f"| {title} | {' | '.join(shown)} | {ours[49] / theirs[49]:.2f} |")
    return lines


def peers(found: Found) -> list[str]:
    lines = ["| | rows/s | delay p50 | p99 | rows lost |", "|---|---|---|---|---|"]
    rows = float(found["peers"]["options"]["rows"])
    for kind, those in found["peers"]["figures"].items():
        cuts = percentiles(those["delays"])
        rate = short(rows / statistics.median(those["seconds"]))
        lines.append(f"| {NAMES[kind]} | {rate} | {short(cuts[49])} ms | {short(cuts[98])} ms | {those['lost']:,} |")
    return lines


def idle(found: Found) -> list[str]:
    lines = ["| | | aim |", "|---|---|---|"]
    figures = found["idle"]["figures"]
    lines += [idle_line(figures["nothing to do"], *line) for line in IDLE]
    if model := figures.get("1,000 writers of 10 streams"):
        lines += [idle_line(model, *line) for line in MODEL]
    return lines


def idle_line(figures: dict[str, list[float]], name: str, what: str, unit: str, scale: float, aim: float | None) -> str:
    shown = f"{short(scale * figures[name][0])} {unit}".strip()
    return f"| {what} | {shown} | {'' if aim is None else f'at most {aim:g}'} |"


def deployment(found: Found) -> list[str]:
    lines = ["| | | aim |", "|---|---|---|"]
    for title, figures in found["deployment"]["figures"].items():
        shown = ", ".join(f"{name}: {short(values[0])}" for name, values in figures.items())
        lines.append(f"| {title} | {shown} | {DEPLOYMENT.get(title, '')} |")
    return lines


def plots(found: Found, folder: Path) -> None:
    """Rows/s over the number of readers, and the distributions of the delays, as PNG beside the page."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    names = {"plain": "redis-py pub/sub", "memory": "busrep, in memory", "postgres": "busrep, PostgreSQL"}
    if "readers" in found:
        figure, axes = pyplot.subplots(figsize=(7, 4))
        figures = found["readers"]["figures"]
        for variant, name in names.items():
            axes.plot(
                [*map(int, figures)], [statistics.median(one[variant]) for one in figures.values()], "o-", label=name
            )
        axes.set(xscale="log", yscale="log", xlabel="readers", ylabel="rows/s to each reader")
        axes.set_xticks([*map(int, figures)], labels=[*figures])
        axes.legend()
        save(figure, folder / "measured-readers.png")
    if "latency" in found:
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for title, contenders in found["latency"]["figures"].items():
            for kind, style in (("bare", "--"), ("busrep", "-")):
                name = "INSERT, then PUBLISH" if kind == "bare" else "busrep"
                axes.plot(range(1, 100), percentiles(contenders[kind]), style, label=f"{name}, {title}")
        axes.set(yscale="log", xlabel="percentile", ylabel="from due to handler, ms")
        axes.legend()
        save(figure, folder / "measured-latency.png")


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Software": None})


INTRODUCTION = """# Measured

`python benchmarks/all.py` writes this page. Both figures of a line were measured in turns, in one run of its program,
and are medians of several rounds. The ratio is the median of the rounds' ratios, busrep's figure by the peer's. An aim
is what the ratio is to become; it is met or not. Each program says at its top what it does."""


def page(found: Found) -> str:
    told = list(dict.fromkeys(line for one in found.values() for line in one["told"]))
    parts = [INTRODUCTION, "\n".join(["```text", *told, "```"]), "\n".join(["## Beside peers", "", *table(found)])]
    if "latency" in found:
        parts += ["## Delay, from when a fact is due until its handler has it", "\n".join(delays(found))]
        parts.append("![Distributions of the delays](measured-latency.png)")
    if "readers" in found:
        parts += ["## Rows a second, by number of readers", "![Rows a second to each reader](measured-readers.png)"]
    if "peers" in found:
        parts += ["## Other ways to carry rows", "\n".join(peers(found))]
    if "idle" in found:
        parts += [
            "## A deployment in which nothing happens",
            "100 streams, 20 writers, 2 readers.",
            "\n".join(idle(found)),
        ]
    if "deployment" in found:
        parts += [
            "## What a deployment costs its servers",
            "Milliseconds of a beat, and counts: `benchmarks/deployment.py` says of what.",
            "\n".join(deployment(found)),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=PROGRAMS, help="this program; may be repeated")
    parser.add_argument("--folder", type=Path, default=Path("measured"), help="of the figures and the page")
    given = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("the plots need matplotlib: pip install -e '.[bench]'")
    given.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for program in given.only or PROGRAMS:
        options = PROGRAMS[program][given.quick]
        print(f"== {program} {' '.join(options)}", flush=True)
        figures = given.folder / f"{program}.json"
        figures.unlink(missing_ok=True)  # a program that fails shows none of before
        command = [sys.executable, str(HERE / f"{program}.py"), *options, "--json", str(figures)]
        if subprocess.run(command, check=False).returncode:
            failed.append(program)
    kept = {name: given.folder / f"{name}.json" for name in PROGRAMS}
    found = {name: json.loads(path.read_text()) for name, path in kept.items() if path.exists()}
    plots(found, given.folder)
    (given.folder / "measured.md").write_text(page(found))
    print(f"wrote {given.folder / 'measured.md'}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
