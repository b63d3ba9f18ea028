"""Decoding: bytes of one frame to typed rows, on one core, beside the least that any reader of such lines would do.

busrep:    `parse_frame` (headers checked, tokens as integers, payloads apart) and `Stream.decode` of its one
           run (types checked, one attrs object a row).
baseline:  ``frame.split(b"\\n")``, ``line.split(b" ", 4)`` on each line to take its header off, and one
           ``orjson.loads`` of all payloads of the frame, joined. It checks nothing and makes plain lists.

A row has five fields and about 120 bytes; a frame is a NAME and a POSITION line and 100 or 450 (a full frame) of RDATA.
Both sides run in one process, in short turns, and are measured in CPU seconds, so that a busy machine slows both
alike; each figure is the median of five rounds, the ratio is the median of the rounds' ratios.

    python benchmarks/decode.py [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import attrs
import orjson
import setting

from busrep.core.framing import Rows, parse_frame
from busrep.streams import Stream

ROUNDS = 5
TURNS = 20
ROWS_PER_ROUND = 100_000
# Rows of this size that a writer puts into one message when more are waiting: Settings.frame_bytes, 64 KiB.
FULL_FRAME = 450
# What the ratio is to become, without msgspec and with it (extra ``fast``).
AIMS = {100: (0.6, 0.8), FULL_FRAME: (0.8, 1.0)}


@attrs.define
class Order:
    number: int
    customer: str
    text: str
    amount: float
    paid: bool


@attrs.frozen
class FrozenOrder:
    number: int
    customer: str
    text: str
    amount: float
    paid: bool


def frame_of(rows: int) -> bytes:
    """One frame as a writer makes it: its name, the chain POSITION and one RDATA line a row."""
    stream = Stream("orders", Order)
    lines = [b"NAME writer-1 7", b"POSITION orders writer-1 1000000 1000000"]
    for i in range(rows):
        row = Order(i * 7919, f"@customer{i:06d}:example.org", f"order {i} " + "x" * 50, i * 1.5, i % 2 == 0)
        lines.append(b"RDATA orders writer-1 %d %b" % (1_000_001 + i, stream.encode(row)))
    return b"\n".join(lines)


def baseline(frame: bytes) -> int:
    parts = [line.split(b" ", 4) for line in frame.split(b"\n")]
    return len(orjson.loads(b"[" + b",".join([part[4] for part in parts[2:]]) + b"]"))


def decoder(stream: Stream[Any]) -> Callable[[bytes], int]:
    def decode(frame: bytes) -> int:
        run = parse_frame(frame, 1 << 24).items[2]
        assert isinstance(run, Rows)
        return len(stream.decode(run.payloads))

    return decode


def rows_per_second(decoders: list[Callable[[bytes], int]], frame: bytes, rows: int) -> list[float]:
    """Of each decoder in one round, of TURNS turns each."""
    repeats = ROWS_PER_ROUND // rows // TURNS
    seconds = [0.0] * len(decoders)
    for _ in range(TURNS):
        for at, decode in enumerate(decoders):
            start = time.process_time()
            for _ in range(repeats):
                assert decode(frame) == rows
            seconds[at] += time.process_time() - start
    return [TURNS * repeats * rows / spent for spent in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    setting.add_json(parser)
    given = parser.parse_args()
    setting.tell(setting.machine())
    found: dict[str, dict[str, Any]] = {}
    streams: dict[str, Stream[Any]] = {"slots": Stream("orders", Order), "frozen slots": Stream("orders", FrozenOrder)}
    print(f"{'rows':>5} {'row type':14}{'baseline':>14}{'busrep':>14}{'ratio':>8}{'aim':>6}   (rows/s)")
    for rows, aims in AIMS.items():
        aim = aims[importlib.util.find_spec("msgspec") is not None]
        frame = frame_of(rows)
        for title, stream in streams.items():
            rounds = [rows_per_second([baseline, decoder(stream)], frame, rows) for _ in range(ROUNDS)]
            plain, ours = zip(*rounds, strict=True)
            ratio = median(mine / base for mine, base in zip(ours, plain, strict=True))
            print(f"{rows:5} {title:14}{median(plain):14,.0f}{median(ours):14,.0f}{ratio:8.2f}{aim:6.1f}")
            found[f"{rows} rows, {title}"] = {"baseline": plain, "busrep": ours}
    setting.write(given, found)


if __name__ == "__main__":
    main()
