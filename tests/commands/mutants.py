"""Known bugs: commands/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import Edit, Mutant

PRESENCE = "commands/test_presence.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="presence-is-told-as-often-as-asked",
        rule="2",
        harm="Five REPLICATEs a second: a process with 4,000 users says 2,700 lines a second, to all others.",
        edits=(
            Edit("Presence._keep_telling", "pause = min(told / TOLD_AGAIN, self._refresh / 2)", "pause = 0 * told"),
        ),
        checks=(PRESENCE + "a_flood_of_questions_costs_so_many_lines_a_second",),
    ),
    Mutant(
        name="presence-counts-devices-and-not-their-bytes",
        rule="9.20",
        harm="What strangers tell of users with long names costs each process that listens a gigabyte.",
        edits=(Edit("Presence._has_room", " + size > self._max_bytes:", " + size > 2**60:"),),
        checks=(PRESENCE + "what_names_on_the_wire_cost_is_bounded",),
    ),
    Mutant(
        name="a-device-that-is-gone-takes-room",
        rule="9.20",
        harm="After some hours no process hears of new users on a busy one.",
        edits=(
            Edit(
                "_ProcessUsers.remove",
                "        self.bytes -= _size(key)\n",
                "",
            ),
        ),
        checks=(PRESENCE + "what_names_on_the_wire_cost_is_bounded",),
    ),
)
