"""Rows/s from one writer process to several reader processes, until the last of them has the last row.

    python benchmarks/readers.py [--readers 1,2,4,8,16,32] [--rows 20000] [--rounds 3] [--json FILE]

Every reader gets every row. The variants are those of throughput.py, and take turns, each with fresh processes. With
more readers than processors it is the machine that is measured: what a row costs each reader.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys

import setting
from throughput import measure, servers

VARIANTS = ("plain", "memory", "postgres")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=lambda text: [*map(int, text.split(","))], default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    setting.add_json(parser)
    given = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {str(count): {} for count in given.readers}
    with contextlib.ExitStack() as stack:
        redis, stores = servers(stack)
        for number in range(given.rounds):
            for count in given.readers:
                for variant in VARIANTS:
                    rate = measure(redis, given.rows, variant, stores.get(variant), number, count)
                    found[str(count)].setdefault(variant, []).append(rate)
                    print(f"round {number + 1}: {count:3} readers, {variant:10} {rate:>10,.0f} rows/s", file=sys.stderr)
    print(f"{given.rows:,} rows to each reader, medians of {given.rounds}, rows/s")
    print(f"{'readers':>7}" + "".join(f"{variant:>12}" for variant in VARIANTS))
    for count, rates in found.items():
        print(f"{count:>7}" + "".join(f"{statistics.median(rates[variant]):>12,.0f}" for variant in VARIANTS))
    setting.write(given, found)


if __name__ == "__main__":
    main()
