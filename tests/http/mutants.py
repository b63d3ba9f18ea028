"""Known bugs: http/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import Edit, Mutant

PAGES = "http/test_pages.py::test_"
REFERENCE = "http/test_reference.py::test_"
SERVER = "http/test_server.py::test_"
SHARED = "http/test_shared.py::test_"
SNAPSHOTS = "http/test_snapshots.py::test_"
SOURCE = "http/test_source.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="a-registry-is-told-under-another-epoch",
        rule="9.11",
        harm="Of two replicas one has seen a restore: a reader begins at floors of the log before, and rows are lost.",
        edits=(Edit("CatchUp.state", "self._store.known(epoch)", "self._store.known()"),),
        checks=(SERVER + "the_state_is_of_one_log",),
    ),
    Mutant(
        name="a-limited-reference-page-must-end-with-its-last-row",
        rule="9.25",
        harm="Ordinary answers are refused, and the pair stays stale for ever.",
        edits=(
            Edit(
                "read_reference_page",
                "    if upto < asked.after or (limited and upto == asked.after):\n",
                "    if limited and tokens[-1:] != [upto]:\n"
                "        raise ValueError('the page does not end with its last row')\n"
                "    if upto < asked.after or (limited and upto == asked.after):\n",
            ),
        ),
        checks=(
            REFERENCE + "an_answer_of_the_reference_system_is_taken[limited_above_its_last_row]",
            REFERENCE + "a_reader_over_http_alone_ends_where_a_reader_of_the_channel_does",
        ),
    ),
    Mutant(
        name="a-reference-page-that-goes-further-is-refused",
        rule="9.25",
        harm="Ordinary answers are refused, and the pair stays stale for ever.",
        edits=(
            Edit(
                "read_reference_page",
                "    beyond = cut < len(tokens) or upto > asked.upto\n",
                "    beyond = cut < len(tokens) or upto > asked.upto\n"
                "    if beyond:\n"
                "        raise ValueError('it goes beyond the question')\n",
            ),
        ),
        checks=(
            REFERENCE + "an_answer_of_the_reference_system_is_taken[beyond_the_asked_token]",
            REFERENCE + "a_reader_over_http_alone_ends_where_a_reader_of_the_channel_does",
        ),
    ),
    Mutant(
        name="a-reference-page-counts-beyond-the-question",
        rule="9.25",
        harm="Rows above the asked token are taken before what the channel says of them.",
        edits=(Edit("read_reference_page", "    cut = bisect_right(tokens, asked.upto)\n", "    cut = len(tokens)\n"),),
        checks=(REFERENCE + "an_answer_of_the_reference_system_is_taken[beyond_the_asked_token]",),
    ),
    Mutant(
        name="a-reference-page-of-one-fact-is-refused",
        rule="9.25",
        harm="A room that begins with 120 rows stops its stream for ever.",
        edits=(
            Edit(
                "read_reference_page",
                "    if limited and tokens and tokens[0] != tokens[-1] == upto:\n",
                "    if limited and tokens and tokens[-1] == upto:\n",
            ),
        ),
        checks=(
            REFERENCE + "an_answer_of_the_reference_system_is_taken[one_fact_of_120_rows]",
            REFERENCE + "a_reader_over_http_alone_ends_where_a_reader_of_the_channel_does",
        ),
    ),
    Mutant(
        name="the-last-fact-of-a-reference-page-is-taken-cut",
        rule="9.25",
        harm="The rest of a fact that a page cuts is lost, and its token counts as handled.",
        edits=(
            Edit(
                "read_reference_page",
                "    if limited and tokens and tokens[0] != tokens[-1] == upto:\n",
                "    if False:\n",
            ),
        ),
        checks=(REFERENCE + "an_answer_of_the_reference_system_is_taken[cut_within_its_last_fact]",),
    ),
    Mutant(
        name="a-reference-page-that-leads-nowhere-is-taken",
        rule="9.25",
        harm="The same page is asked for again without a pause, for ever.",
        edits=(
            Edit(
                "read_reference_page",
                "    if upto < asked.after or (limited and upto == asked.after):\n",
                "    if upto < asked.after:\n",
            ),
        ),
        checks=(REFERENCE + "an_answer_that_leads_nowhere_is_refused[refused_not_forward]",),
    ),
    Mutant(
        name="one-address-answers-for-every-writer",
        rule="9.25",
        harm="One writer's rows are delivered as another's, and the other's are lost.",
        edits=(
            Edit(
                "ReferenceSource.fetch",
                "        one = self._writers.get(question.writer)\n",
                "        one = next(iter(self._writers.values()))\n",
            ),
        ),
        checks=(
            REFERENCE + "each_writer_is_asked_at_its_own_address",
            REFERENCE + "a_reader_over_http_alone_ends_where_a_reader_of_the_channel_does",
        ),
    ),
    Mutant(
        name="a-part-of-another-snapshot-is-sent",
        rule="9",
        harm="Rows were pruned, or the log was replaced: a reader is given parts of two snapshots for one.",
        edits=(
            Edit("Snapshots._load", "                if not held.same(agreement):\n", "                if False:\n"),
        ),
        checks=(SNAPSHOTS + "a_reader_goes_on_with_a_server_that_was_restarted",),
    ),
    Mutant(
        name="an-agreement-ends-with-the-request-that-began-it",
        rule="9",
        harm="An agreement that takes longer than one request is begun again and again, and never comes.",
        edits=(
            Edit(
                "Shared.get",
                "            return await asyncio.shield(item.task)\n",
                "            return await item.task\n",
            ),
        ),
        checks=(
            SNAPSHOTS + "a_reader_that_hangs_up_leaves_the_work_to_the_others",
            SNAPSHOTS + "a_slow_agreement_outlives_the_requests_that_wait_for_it",
            SHARED + "the_last_who_goes_may_end_the_work[True]",
        ),
    ),
    Mutant(
        name="a-text-is-shared-by-different-snapshots",
        rule="9",
        harm="A reader is given another reader's part, of a snapshot that ends elsewhere.",
        edits=(
            Edit(
                "Snapshots.part",
                "                digest = agreement.digest\n",
                "                digest = agreement.stream\n",
            ),
        ),
        checks=(SNAPSHOTS + "a_kept_part_is_of_the_agreement_that_it_was_loaded_for",),
    ),
    Mutant(
        name="texts-that-are-kept-fill-the-memory",
        rule="9",
        harm="A server keeps the texts of all parts for a minute: of a large snapshot some gigabytes.",
        edits=(Edit("Shared._made", "            if over <= 0:\n", "            if True:\n"),),
        checks=(
            SHARED + "the_oldest_go_first_and_those_that_nobody_asked_for_last",
            SNAPSHOTS + "the_server_s_memory_does_not_grow_with_the_snapshot",
        ),
    ),
    Mutant(
        name="a-timer-keeps-the-text-of-a-part",
        rule="9",
        harm="What had to go is in memory for a minute all the same, unseen by the bound.",
        edits=(
            Edit(
                "Shared._forget",
                "        if item.timer is not None:  # it would keep the thing in memory\n",
                "        if False:  # it would keep the thing in memory\n",
            ),
        ),
        checks=(SHARED + "nothing_is_held_of_what_had_to_go",),
    ),
    Mutant(
        name="a-load-that-nobody-waits-for-goes-on",
        rule="9",
        harm="Clients that hang up leave their loads behind: readers that wait get no place.",
        edits=(Edit("Shared._end", "            item.task.cancel()\n", "            pass\n"),),
        checks=(
            SHARED + "what_is_made_ahead_gives_way_unless_somebody_waits_for_it",
            SNAPSHOTS + "what_nobody_waits_for_any_more_is_not_loaded",
        ),
    ),
    Mutant(
        name="a-load-ahead-hangs-for-ever",
        rule="9",
        harm="A store that hangs with a part loaded ahead: it has the place, and the next part is never loaded ahead.",
        edits=(
            Edit(
                "Shared.make_ahead",
                "            async with asyncio.timeout(SHARED_FOR):",
                "            async with asyncio.timeout(None):",
            ),
        ),
        checks=(SHARED + "what_is_made_ahead_and_takes_too_long_is_given_up",),
    ),
    Mutant(
        name="a-load-ahead-goes-first",
        rule="9",
        harm="A reader waits for a part that nobody has asked for, and its own request ends at the deadline.",
        edits=(Edit("Snapshots._load", "            self._parts.give_up_ahead()\n", "            pass\n"),),
        checks=(SNAPSHOTS + "a_load_ahead_keeps_no_reader_waiting",),
    ),
    Mutant(
        name="a-closed-server-loads-parts",
        rule="9",
        harm="The store is closed below a load that began after the server's close.",
        edits=(Edit("Shared.close", "        self._closed = True\n", ""),),
        checks=(SNAPSHOTS + "nothing_begins_after_the_close", SHARED + "closing_ends_what_is_made"),
    ),
    Mutant(
        name="parts-of-snapshots-fill-the-memory",
        rule="9",
        harm="Clients that take their parts slowly, each another one, make a server run out of memory.",
        edits=(
            Edit(
                "Snapshots.part",
                "            async with self.downloads.taken():\n",
                "            if True:\n",
            ),
        ),
        checks=(SNAPSHOTS + "parts_in_memory_are_bounded_together",),
    ),
    Mutant(
        name="a-state-over-http-names-anything",
        rule="9.20",
        harm="A server lists a writer whose name has a NUL: PostgreSQL refuses its position, which ends the reader.",
        edits=(
            Edit(
                "_known_writer",
                "        if reason := refuse_name(name):",
                '        if reason := None if isinstance(name, str) and name and " " not in name else "is no word":',
            ),
        ),
        checks=(PAGES + "a_state_that_cannot_be_is_refused[a name with a NUL]",),
    ),
    Mutant(
        name="writers-over-http-are-of-whatever-log",
        rule="9",
        harm="A server that has not seen a restore tells of floors, and rows of the new log below them are left out.",
        edits=(
            Edit("HttpSource.known", "        if epoch not in (None, state.epoch):\n", "        if False:\n"),
            Edit(
                "HttpSource.sequence",
                "        return state.sequence if epoch in (None, state.epoch) else None\n",
                "        return state.sequence\n",
            ),
        ),
        checks=(SOURCE + "epoch_and_writers_are_of_one_log_or_not_told",),
    ),
)
