"""Lines on the channel that nobody of the deployment sent: stray, forged, of another deployment, and garbage.

They are what anybody says who can publish there and copies no writer's NAME. None of them may lose a row, stop a
writer, or reach the table (protocol.md 9.16 to 9.19).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import attrs

ELSEWHERE = "f" * 32
FAR = (2**62, 2**63 - 1)
HIGHEST = 2**62

KINDS = ("position", "rows", "nobody", "name", "incarnation", "deployment", "garbage")


@attrs.frozen
class Scene:
    """What a stranger may know: the deployment's ``name`` and ``epoch``, its ``writers``, and {stream: highest ID}."""

    name: str
    epoch: str
    writers: Sequence[str]
    highest: Mapping[str, int]


def said(kind: str, scene: Scene, dice: random.Random) -> bytes:
    """One message of that kind."""
    stream = dice.choice(sorted(scene.highest))
    near = max(1, scene.highest[stream] + dice.randint(-3, 20))
    return _SAYS[kind](scene, dice, stream, dice.choice(scene.writers), dice.choice([near, near, *FAR]))


def _position(_: Scene, dice: random.Random, stream: str, writer: str, at: int) -> bytes:
    return f"POSITION {stream} {writer} {dice.choice([0, at])} {at}".encode()


def _rows(_: Scene, dice: random.Random, stream: str, writer: str, at: int) -> bytes:
    head = dice.choice(["", f"POSITION {stream} {writer} {at} {at}\n", "NAME nobody 7\n"])
    return f'{head}RDATA {stream} {writer} {at} [1,"stray"]'.encode()


def _nobody(scene: Scene, dice: random.Random, stream: str, _: str, at: int) -> bytes:
    head = dice.choice(["", "NAME nobody 7\n", f"SERVER {scene.name} {scene.epoch}\nNAME nobody 7\n"])
    tail = dice.choice(["", f'\nRDATA {stream} nobody {at} [1,"stray"]'])
    return f"{head}POSITION {stream} nobody {dice.choice([0, at])} {at}{tail}".encode()


def _name(_: Scene, dice: random.Random, __: str, writer: str, ___: int) -> bytes:
    return f"NAME {writer} {dice.choice([1, HIGHEST])}".encode()


def _incarnation(scene: Scene, dice: random.Random, stream: str, writer: str, at: int) -> bytes:
    head = f"SERVER {scene.name} {scene.epoch}\nNAME {writer} {dice.choice([1, HIGHEST])}\n"
    return f"{head}POSITION {stream} {writer} {dice.choice([0, at])} {at}".encode()


def _deployment(scene: Scene, dice: random.Random, stream: str, writer: str, at: int) -> bytes:
    head = dice.choice(["", f"SERVER {scene.name} {ELSEWHERE}\n"])
    return f"{head}NAME {writer} {dice.choice([2, HIGHEST + 1])}\nPOSITION {stream} {writer} 0 {at}".encode()


def _garbage(_: Scene, dice: random.Random, stream: str, __: str, ___: int) -> bytes:
    texts = (b"\xff\x00", b"12345", b"", b"X y\n" * 50, f"POSITION {stream}".encode(), f"RDATA {stream} w1 x".encode())
    return dice.choice(texts)


_SAYS: dict[str, Callable[[Scene, random.Random, str, str, int], bytes]] = {
    "position": _position,
    "rows": _rows,
    "nobody": _nobody,
    "name": _name,
    "incarnation": _incarnation,
    "deployment": _deployment,
    "garbage": _garbage,
}
