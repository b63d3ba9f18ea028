"""Known bugs: the reference system. See mutants.py."""

from __future__ import annotations

from .mutant import Edit, Mutant

TAKEN = "test_reference.py::test_an_answer_of_the_reference_system_is_taken"
REFUSED = "test_reference.py::test_an_answer_that_leads_nowhere_is_refused"
BEGINS = "test_reference.py::test_a_reader_begins_where_it_is_told_to"
ONE_LINE = "test_one_line.py::test_"
UNNAMED = "        if incarnation is None and stream.foreign_writers:\n"
PAGED = "test_bootstrap_paging.py::test_"
LATE = "test_late_rows.py::test_"
HTTP_ALONE = "test_reference.py::test_a_reader_over_http_alone_ends_where_a_reader_of_the_channel_does"

MUTANTS: tuple[Mutant, ...] = (
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
        checks=(f"{TAKEN}[limited_above_its_last_row]", HTTP_ALONE),
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
        checks=(f"{TAKEN}[beyond_the_asked_token]", HTTP_ALONE),
    ),
    Mutant(
        name="a-reference-page-counts-beyond-the-question",
        rule="9.25",
        harm="Rows above the asked token are taken before what the channel says of them.",
        edits=(Edit("read_reference_page", "    cut = bisect_right(tokens, asked.upto)\n", "    cut = len(tokens)\n"),),
        checks=(f"{TAKEN}[beyond_the_asked_token]",),
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
        checks=(f"{TAKEN}[one_fact_of_120_rows]", HTTP_ALONE),
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
        checks=(f"{TAKEN}[cut_within_its_last_fact]",),
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
        checks=(f"{REFUSED}[refused_not_forward]",),
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
        checks=("test_reference.py::test_each_writer_is_asked_at_its_own_address", HTTP_ALONE),
    ),
    Mutant(
        name="now-is-zero-of-a-source-without-positions",
        rule="9.25",
        harm="A reader that is to begin now is given all the rows there are.",
        edits=(Edit("Reader._progress_of", "                progress.starts_here = stream.from_now\n", ""),),
        checks=(f"{BEGINS}[now]", f"{BEGINS}[by default]"),
    ),
    Mutant(
        name="a-map-of-starts-is-ignored-without-known-writers",
        rule="9.25",
        harm="A reader that is to begin at given positions is given all the rows there are.",
        edits=(Edit("Reading._load_durable", "        if foreign:  # such", "        if False:  # such"),),
        checks=(f"{BEGINS}[a map]",),
    ),
    Mutant(
        name="where-a-reader-began-is-saved-as-zero",
        rule="9.25",
        harm="A durable reader that began now is given all older rows after its next start.",
        edits=(
            Edit(
                "Reading._to_save",
                "                await self._register(key, progress.began)\n",
                "                await self._register(key, 0)\n",
            ),
        ),
        checks=("test_reference.py::test_a_durable_reader_that_began_now_goes_on_from_there",),
    ),
    Mutant(
        name="streams-in-memory-are-never-fetched",
        rule="9.25",
        harm="Rows that a lost link has cost are reported missed, though their writer has them.",
        edits=(
            Edit(
                "Reading._load",
                '            served = getattr(self._store, "serves_resettable", False)\n',
                "            served = False\n",
            ),
        ),
        checks=("test_reference.py::test_a_resettable_stream_is_fetched_from_its_writer",),
    ),
    Mutant(
        name="positions-of-a-former-life-are-saved",
        rule="9.11",
        harm="A stream in memory that is fetched begins at a position of a writer that is gone.",
        edits=(
            Edit(
                "Followed.durable",
                "        return self.fetchable and not self.resettable\n",
                "        return self.fetchable\n",
            ),
        ),
        checks=("test_reference.py::test_positions_of_a_resettable_stream_are_not_saved",),
    ),
    Mutant(
        name="one-line-messages-are-frames",
        rule="2",
        harm="The reference system takes a frame for its first line, and hears no row.",
        edits=(
            Edit(
                "OutgoingFrame.messages", 'self.data.split(b"\\n") if self.one_line else (self.data,)', "(self.data,)"
            ),
        ),
        checks=(
            f"{ONE_LINE}each_line_is_a_message_without_server_and_name",
            f"{ONE_LINE}whoever_reads_first_lines_alone_gets_every_row[asyncio]",
        ),
    ),
    Mutant(
        name="threads-publish-whole-frames",
        rule="2",
        harm="The reference system takes a frame for its first line, and hears no row of a writer in threads.",
        edits=(
            Edit(
                "Writing._publish_all",
                "data) for frame in frames for data in frame.messages]",
                "frame.data) for frame in frames]",
            ),
        ),
        checks=(f"{ONE_LINE}whoever_reads_first_lines_alone_gets_every_row[threads]",),
    ),
    Mutant(
        name="echoes-without-a-name-are-no-echoes",
        rule="2",
        harm="A writer of single lines takes its link for dead every few beats, and makes it anew.",
        edits=(Edit("Ledger.is_echo", "        if self._settings.one_line_messages:\n", "        if False:\n"),),
        checks=(f"{ONE_LINE}such_a_writer_hears_itself_and_keeps_its_link",),
    ),
    Mutant(
        name="late-rows-pass-for-duplicates",
        rule="3",
        harm="A row that was never handled is counted as one that was.",
        edits=(
            Edit(
                "Reader._below",
                "        late = [] if progress.recent is None else progress.recent.late(tokens)\n",
                "        late: list[int] = []\n",
            ),
        ),
        checks=(
            f"{LATE}a_late_row_is_told_from_a_repeated_one",
            "test_captures.py::test_a_reader_of_the_capture_ends_where_its_database_did",
        ),
    ),
    Mutant(
        name="tokens-are-remembered-without-end",
        rule="3",
        harm="A reader of a foreign writer grows with every row.",
        edits=(Edit("RecentTokens.add", "        while len(known) > RECENT_TOKENS:\n", "        while False:\n"),),
        checks=(f"{LATE}a_bounded_number_of_tokens_is_remembered",),
    ),
    Mutant(
        name="rows-of-a-foreign-writer-are-said-to-be-gone",
        rule="3",
        harm="Nearly every report of lost rows is false, so that no one looks at them.",
        edits=(
            Edit(
                "Reader._miss",
                "        certain = progress.stream.durable or progress.native\n",
                "        certain = True\n",
            ),
        ),
        checks=(f"{LATE}rows_of_a_foreign_writer_may_have_been_missed", f"{LATE}both_are_seen_by_who_runs_it"),
    ),
    Mutant(
        name="a-source-without-snapshots-stops-a-new-reader",
        rule="3",
        harm="A reader stops for good where paging row by row would do.",
        edits=(
            Edit(
                "Run._agree",
                "            if not await self._fetch_instead(error):\n",
                "            if True:\n",
            ),
        ),
        checks=(
            f"{PAGED}a_new_reader_fetches_all_rows_in_place_of_a_snapshot[without a name]",
            f"{PAGED}a_reader_far_behind_goes_on_where_it_was",
            f"{PAGED}the_reference_system_gives_pages_only",
        ),
    ),
    Mutant(
        name="pages-take-the-place-of-pruned-rows",
        rule="9.9",
        harm="A target lacks the rows that were pruned, and nothing says so.",
        edits=(
            Edit(
                "fetch_instead",
                "        begins = {one.writer: positions.get(one.writer, 0) for one in known}\n",
                "        begins = {one.writer: max(positions.get(one.writer, 0), one.floor) for one in known}\n"
                "        positions |= begins\n",
            ),
        ),
        checks=(f"{PAGED}where_rows_were_pruned_only_a_snapshot_will_do",),
    ),
    Mutant(
        name="pages-in-place-of-a-snapshot-begin-at-zero",
        rule="9.12",
        harm="A reader that was far behind is given all that it has handled once more.",
        edits=(
            Edit(
                "fetch_instead",
                "        reading.bootstrapped(name, positions)\n",
                "        reading.bootstrapped(name, {})\n",
            ),
        ),
        checks=(f"{PAGED}a_reader_far_behind_goes_on_where_it_was",),
    ),
    Mutant(
        name="lines-without-a-name-never-count-of-a-registered-writer",
        rule="9.18",
        harm="Readers hear nothing of a writer of single lines, and follow it through the table, seconds late.",
        edits=(Edit("Reader._current", UNNAMED, "        if False:\n"),),
        checks=(
            f"{ONE_LINE}unnamed_lines_of_a_registered_writer_count_where_foreign_writers_are_declared",
            f"{ONE_LINE}whoever_reads_first_lines_alone_gets_every_row[asyncio]",
        ),
    ),
    Mutant(
        name="lines-without-a-name-count-wherever-they-come",
        rule="9.16",
        harm="One forged line moves a native writer's position over rows.",
        edits=(Edit("Reader._current", UNNAMED, "        if incarnation is None:\n"),),
        checks=(f"{ONE_LINE}unnamed_lines_of_a_registered_writer_count_where_foreign_writers_are_declared",),
    ),
    Mutant(
        name="a-writer-of-single-lines-of-any-stream",
        rule="2",
        harm="Readers ignore what the writer says, and its rows come seconds late through the table.",
        edits=(
            Edit(
                "Writer.add_stream",
                "        if self._settings.one_line_messages and not stream.foreign_writers:\n",
                "        if False:\n",
            ),
        ),
        checks=(f"{ONE_LINE}a_writer_of_single_lines_needs_streams_whose_readers_believe_it",),
    ),
    Mutant(
        name="a-writer-of-single-lines-of-streams-in-memory",
        rule="2",
        harm="The answer to a PUBLISH is lost: the message comes again, and resets the stream, whose rows are lost.",
        edits=(
            Edit(
                "Writer.add_stream",
                "        if self._settings.one_line_messages and stream.resettable:\n",
                "        if False:\n",
            ),
        ),
        checks=(f"{ONE_LINE}a_writer_of_single_lines_refuses_streams_in_memory",),
    ),
)
