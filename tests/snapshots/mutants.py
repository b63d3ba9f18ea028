"""Known bugs: snapshots/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import Edit, Mutant

BOOTSTRAP_FAULTS = "asyncio/test_bootstrap_faults.py::test_"
SNAPSHOTS = "http/test_snapshots.py::test_"
SNAPSHOT_SOURCES = "snapshots/test_snapshot_sources.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="a-snapshot-is-ahead-of-the-log",
        rule="9",
        harm="A source names positions that are proven nowhere: rows up to there are taken for handled when they come.",
        edits=(Edit("_ahead", "        if position > proven:\n", "        if False:\n"),),
        checks=(SNAPSHOT_SOURCES + "a_reader_loses_nothing_to_a_source_that_is_wrong",),
    ),
    Mutant(
        name="the-last-parts-of-a-snapshot-are-not-missed",
        rule="9",
        harm="A manifest was written without its last part: the reader goes on behind rows that it never got.",
        edits=(Edit("check_log", "        if page.tokens:\n", "        if False:\n"),),
        checks=(SNAPSHOT_SOURCES + "a_reader_loses_nothing_to_a_source_that_is_wrong",),
    ),
    Mutant(
        name="order-is-checked-within-pieces-only",
        rule="9.10",
        harm="Two rows out of order, one at the end of a piece: the application ends at the earlier one.",
        edits=(
            Edit(
                "checked_part",
                "            before = max(0, len(tokens) - 1)",
                "            before = len(tokens)",
            ),
        ),
        checks=(SNAPSHOT_SOURCES + "two_rows_out_of_order_are_found_wherever_pieces_end",),
    ),
    Mutant(
        name="another-part-than-agreed-is-applied",
        rule="9.10",
        harm="A source gives fewer rows than there are in a part: the rest is lost in silence.",
        edits=(Edit("checked_part", "if agreement.parts[number].rows not in (-1, len(tokens)):", "if False:"),),
        checks=(BOOTSTRAP_FAULTS + "a_part_that_is_not_what_was_agreed_on_is_refused",),
    ),
    Mutant(
        name="a-snapshot-over-http-names-anything",
        rule="9.20",
        harm="A server agrees on positions of writers with names of any length, and they are saved.",
        edits=(Edit("check_agreement", "if refuse_name(writer) or not", 'if " " in writer or not'),),
        checks=(SNAPSHOTS + "agreements_that_are_not_believed[a name that no database holds]",),
    ),
)
