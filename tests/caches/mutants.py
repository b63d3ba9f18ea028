"""Known bugs: caches/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import Edit, Mutant

CACHES = "caches/test_caches.py::test_"
FRESHNESS = "caches/test_freshness.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    # -- caches -----------------------------------------------------------------------------------------------
    Mutant(
        name="a-load-is-kept-though-its-key-was-invalidated",
        rule="6",
        harm="A value that was read before the invalidation is stored after it, and stays for ever.",
        edits=(
            Edit(
                "Cache.end",
                "            if mark != self._marks[hash(key) % MARKS] or number < feed.number:\n",
                "            if number < feed.number:\n",
            ),
        ),
        checks=(CACHES + "an_invalidation_during_a_load_refuses_what_it_read",),
    ),
    Mutant(
        name="a-load-is-kept-though-rows-were-lost-meanwhile",
        rule="6",
        harm="A value that was read before rows were lost for good is stored after all was cleared, and stays.",
        edits=(
            Edit(
                "Cache.end",
                "            if mark != self._marks[hash(key) % MARKS] or number < feed.number:\n",
                "            if mark != self._marks[hash(key) % MARKS]:\n",
            ),
        ),
        checks=(CACHES + "whatever_doubts_all_entries_refuses_what_is_being_loaded",),
    ),
    Mutant(
        name="an-invalidation-that-comes-again-takes-its-mark-back",
        rule="6",
        harm="Interrupted and applied again, it does not show to a load under way: the old value stays for ever.",
        edits=(
            Edit(
                "Cache.drop",
                "                self._marks[place] = next(self._numbers)\n",
                "                self._marks[place] ^= 1\n",
            ),
        ),
        checks=(CACHES + "an_invalidation_that_is_interrupted_and_comes_again_refuses_what_was_being_loaded",),
    ),
    Mutant(
        name="a-cache-that-is-cleared-keeps-what-is-being-loaded",
        rule="6",
        harm="All of a cache is invalidated, and a value that was read before is stored after it, and stays for ever.",
        edits=(Edit("Cache.clear", "            self._marks = [next(self._numbers)] * MARKS\n", "            pass\n"),),
        checks=(CACHES + "whatever_doubts_all_entries_refuses_what_is_being_loaded",),
    ),
    Mutant(
        name="a-torn-store-is-used-on",
        rule="6",
        harm="After an interrupt in cachetools every later miss of a full cache raises KeyError.",
        edits=(Edit("Cache._changing", "        if self.torn:\n", "        if False:\n"),),
        checks=(CACHES + "a_cache_is_whole_again_after_an_interrupt_at_any_instruction[keep-None]",),
    ),
    Mutant(
        name="a-gap-hides-nothing",
        rule="6",
        harm="Rows are known to be lost, and what they may have invalidated is returned until they are fetched.",
        edits=(Edit("Feed.gap", "            self.barrier = self.number\n", "            pass\n"),),
        checks=(CACHES + "a_gap_makes_everything_unreachable_at_once_and_mending_brings_back_what_was_not_lost",),
    ),
    Mutant(
        name="keys-of-another-kind-are-ignored",
        rule="6",
        harm="Who invalidates with another form of the key invalidates nothing, for ever, and nobody is told.",
        edits=(
            Edit("Cache.drop", "                return True\n        self.clear()\n", "                return True\n"),
        ),
        checks=(CACHES + "keys_of_another_kind_clear_the_cache",),
    ),
    Mutant(
        name="what-the-table-has-need-not-be-applied",
        rule="6",
        harm="A row that was lost is not waited for: what it invalidated is returned until something else shows it.",
        edits=(
            Edit(
                "TableProof.as_of",
                "            delivered(writer) >= newest for writer, newest",
                "            newest >= 0 for writer, newest",
            ),
        ),
        checks=(
            FRESHNESS + "what_the_table_has_proves_it_once_it_is_applied",
            FRESHNESS + "nothing_older_than_the_bound_is_ever_returned[0]",
        ),
    ),
    Mutant(
        name="the-own-name-is-trusted-in-other-hands",
        rule="9.4",
        harm="Another process has claimed the name: what it invalidates is taken for applied here.",
        edits=(
            Edit(
                "TableProof.as_of",
                "if own is not None and member is not None and member.incarnation == own.incarnation else None\n",
                "if own is not None else None\n",
            ),
        ),
        checks=(FRESHNESS + "own_rows_need_not_be_delivered_unless_the_name_is_another_s",),
    ),
    Mutant(
        name="an-announcement-counts-before-its-rows",
        rule="6",
        harm="Of a stream without a table a position proves what it tells of before that is applied.",
        edits=(
            Edit(
                "HeardProof.as_of",
                "            while voice.pending and voice.pending[0][0] <= delivered(writer):\n",
                "            while voice.pending:\n",
            ),
        ),
        checks=(FRESHNESS + "announcements_count_as_of_when_they_came_and_the_earliest_writer_s",),
    ),
)
