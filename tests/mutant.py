"""What one mutant is: a known bug of this kind of system, as edits of the source, and the checks that catch it."""

from __future__ import annotations

import attrs

SIMULATOR = "simulator"
"""Stands for runs of the simulator, beside names of tests, in ``Mutant.checks``."""


@attrs.frozen
class Edit:
    """In the definition ``where`` stands ``old``, exactly once; ``new`` takes its place.

    ``where``: the end of a dotted name that no other definition of busrep ends with, as "Reader.receive". The file does
    not matter, nor do comments and line breaks of ``old``: see anchors.py.
    """

    where: str
    old: str
    new: str


@attrs.frozen(kw_only=True)
class Mutant:
    """One bug.

    ``rule``: where protocol.md forbids it: "9.4", "3", or a case "R9". ``harm``: what would happen in production.
    ``checks``: what catches it, SIMULATOR first where runs of the simulator do, then tests, all of which fail.
    ``hangs``: it shows in that something never ends, so that a check that runs out of time has caught it.
    """

    name: str
    rule: str
    harm: str
    edits: tuple[Edit, ...]
    checks: tuple[str, ...]
    hangs: bool = False

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests among the checks, ``file::name[case]``."""
        return tuple(check for check in self.checks if check != SIMULATOR)

    @property
    def simulated(self) -> bool:
        """Whether runs of the simulator catch it."""
        return SIMULATOR in self.checks
