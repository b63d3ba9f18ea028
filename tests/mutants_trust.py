"""Known bugs: who is believed, and up to where. See mutants.py."""

from __future__ import annotations

from .mutant import Edit, Mutant

T = "test_trust.py::test_"
CORE, FAULTS = "test_core_trust.py::test_", "test_faults.py::test_"
STRAY = "test_stray_lines.py::test_what_a_stranger_says_harms_nobody"
STORES = "test_stores.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="a-line-without-name-is-believed",
        rule="9.16",
        harm="One stray POSITION makes readers step over hundreds of facts, and wait_for returns for them.",
        edits=(
            Edit(
                "Speakers.trusted",
                "            return writer not in self._voices\n",
                "            return writer not in self._voices or epoch in self._voices[writer].announced.values()\n",
            ),
            Edit(
                "Reader._current",
                "        if claim is None or incarnation == claim:\n",
                "        if claim is None or incarnation in (None, claim):\n",
            ),
        ),
        checks=(
            T + "9_16_lines_of_a_native_writer_without_its_name_count_for_nothing",
            STRAY + "[sqlite-redis-asyncio-a position without NAME]",
        ),
    ),
    Mutant(
        name="a-line-without-name-is-believed-of-a-stream-in-memory",
        rule="9.16",
        harm="One stray POSITION makes readers of a stream without a table step over its rows.",
        edits=(
            Edit(
                "Reader._present_life",
                "            if self._speakers.native(progress.writer) and not progress.stream.foreign_writers:\n",
                "            if False:\n",
            ),
        ),
        checks=(T + "9_16_also_of_a_stream_without_a_table_once_it_was_heard_natively",),
    ),
    Mutant(
        name="another-deployment-s-lines-reset-streams-in-memory",
        rule="9.16",
        harm="A deployment with another database, under the same name by mistake, hides the writers of this one.",
        edits=(
            Edit("Reader._present_life", "        if self._of_another_log(progress.writer):\n", "        if False:\n"),
        ),
        checks=(T + "9_16_lines_of_another_deployment_are_ignored_also_of_a_stream_without_a_table",),
    ),
    Mutant(
        name="an-unregistered-writer-is-followed",
        rule="9.18",
        harm="A line of a writer that does not exist is followed by readers, which wait for rows that never come.",
        edits=(
            Edit(
                "Reader._registered",
                "        if stream.foreign_writers and speaking is None:\n            return True\n",
                "        return True\n",
            ),
        ),
        checks=(T + "9_18_an_unregistered_writer_moves_nothing",),
    ),
    Mutant(
        name="who-joins-waits-for-the-look-for-silent-writers",
        rule="9.18",
        harm="The first rows of a new writer come when the registry is read for other reasons, ten seconds later.",
        edits=(Edit("Reader.registry_doubted", "        return bool(self._unconfirmed)\n", "        return False\n"),),
        checks=(
            T + "9_18_the_registry_is_doubted_for_who_names_itself_in_this_log",
            T + "9_18_a_writer_that_joins_is_followed_once_the_registry_lists_it",
        ),
    ),
    Mutant(
        name="an-answer-of-the-registry-is-the-last-word",
        rule="9.18",
        harm="Rows of a writer that joins while the registry is read wait for its next line, which may never come.",
        edits=(
            Edit(
                "Reader.joined",
                "            if answers + 1 < self.settings.silent_after_beats:\n",
                "            if said in found:\n",
            ),
        ),
        checks=(
            CORE + "9_18_an_answer_of_the_registry_may_be_older_than_what_was_heard",
            FAULTS + "a_writer_without_beats_that_joins_while_the_registry_is_read_is_heard",
        ),
    ),
    Mutant(
        name="what-was-said-in-the-log-before-counts-in-the-new-one",
        rule="9.18",
        harm="After a restore a reader steps over an open fact: its writer had said to be further, in the other log.",
        edits=(
            Edit(
                "Reader.rebase",
                "        self._unconfirmed.clear()  # how far they said to be is of the log before\n",
                "",
            ),
        ),
        checks=(CORE + "9_18_what_was_said_in_the_log_before_is_no_word_in_the_new_one",),
    ),
    Mutant(
        name="who-is-nobody-is-asked-for-for-ever",
        rule="9.18",
        harm="One forged line makes every reader read the registry each beat until it is restarted.",
        edits=(
            Edit(
                "Reader.joined",
                "            if answers + 1 < self.settings.silent_after_beats:\n",
                "            if True:\n",
            ),
        ),
        checks=(CORE + "9_18_an_answer_of_the_registry_may_be_older_than_what_was_heard",),
    ),
    Mutant(
        name="what-was-heard-of-who-joined-is-forgotten-with-a-failed-question",
        rule="9.18",
        harm="The database is away for a moment when a writer has joined: its rows wait for its next sign of life.",
        edits=(
            Edit(
                "Reader.joined",
                "                found[said] = end\n",
                "                found[said] = end\n                del self._unconfirmed[said]\n"
                "                continue\n",
            ),
        ),
        checks=(
            CORE + "9_18_a_line_of_a_writer_that_is_not_registered_moves_nothing_and_asks_for_the_registry",
            FAULTS + "a_writer_without_beats_that_joined_is_heard_though_the_sequence_was_away",
        ),
    ),
    Mutant(
        name="one-sequence-that-cannot-be-read-keeps-silent-writers-from-being-looked-after",
        rule="9.18",
        harm="A right that is missing on one sequence: a dead writer is never finished, and its last rows never come.",
        edits=(
            Edit(
                "SilentWriters._confirm",
                "            except BusrepError as error:  # the others are looked",
                "            except KeyError as error:  # the others are looked",
            ),
        ),
        checks=(T + "9_18_a_sequence_that_cannot_be_read_keeps_no_dead_writer_s_rows_back",),
    ),
    Mutant(
        name="what-who-joined-and-died-had-said-is-forgotten",
        rule="9.18",
        harm="The rows of a writer that joins, writes and dies come only once its silence is noticed.",
        edits=(
            Edit(
                "SilentWriters._confirm",
                "                core.learned(stream, writer, min(end, highest))\n",
                "                pass\n",
            ),
        ),
        checks=(T + "9_18_what_a_writer_said_that_joined_and_crashed_is_fetched_once_the_registry_lists_it",),
    ),
    Mutant(
        name="a-writer-follows-whoever-speaks",
        rule="9.18",
        harm="One line of a writer that does not exist: idle writers follow it, and all writes of the stream fail.",
        edits=(
            Edit(
                "Ledger.heard",
                "if speakers.speaking(item.writer) != claim or not speakers.trusted(item.writer, epoch):\n",
                "if claim is None or epoch is None:\n",
            ),
        ),
        checks=(
            T + "9_18_a_writer_follows_registered_writers_alone",
            STRAY + "[sqlite-redis-asyncio-a writer that does not exist]",
        ),
    ),
    Mutant(
        name="a-higher-incarnation-is-believed-without-the-claim",
        rule="9.19",
        harm="A copy of the deployment, on a copy of its database, is taken for the writers of this one.",
        edits=(
            Edit(
                "Reader._current",
                "        if claim is None or incarnation == claim:\n",
                "        if claim is None or (incarnation or 0) >= claim:\n",
            ),
        ),
        checks=(T + "9_19_of_a_registered_writer_the_incarnation_of_its_claim_alone_counts[higher]",),
    ),
    Mutant(
        name="a-former-life-is-believed",
        rule="9.19",
        harm="A process that was replaced, and does not know it yet, goes on being heard beside its successor.",
        edits=(
            Edit(
                "Reader._current",
                "        if claim is None or incarnation == claim:\n",
                "        if claim is None or (incarnation or 0) <= claim:\n",
            ),
        ),
        checks=(T + "9_19_of_a_registered_writer_the_incarnation_of_its_claim_alone_counts[lower]",),
    ),
    Mutant(
        name="a-name-on-the-wire-fences",
        rule="9.19",
        harm="One NAME line stops a live writer; two deployments that share a Redis and a name stop each other.",
        edits=(
            Edit(
                "Bus._command",
                "                if writing.claimed is not None:  # a hint: the claim decides (9.19)\n",
                "                if False:\n",
            ),
        ),
        checks=(
            T + "9_19_a_higher_incarnation_on_the_wire_fences_nobody",
            STRAY + "[sqlite-redis-asyncio-another incarnation]",
        ),
    ),
    Mutant(
        name="each-name-on-the-wire-asks-the-database",
        rule="9.19",
        harm="A flood of forged NAMEs on the channel is a flood of questions to the database.",
        edits=(
            Edit(
                "Bus._doubt_claim",
                "        if writing.fenced is None and now - self._claim_asked_at >= self.settings.heartbeat:\n",
                "        if writing.fenced is None:\n",
            ),
        ),
        checks=(T + "9_19_a_higher_incarnation_on_the_wire_fences_nobody[NAME]",),
    ),
    Mutant(
        name="positions-above-the-sequence-are-stored",
        rule="9.17",
        harm="A position that no sequence reaches is stored: writers refuse to start until 'busrep db restored'.",
        edits=(
            Edit(
                "heartbeat.body",
                "        stored = bounded(positions, sequences)\n",
                "        stored = dict(positions)\n",
            ),
        ),
        checks=(
            STORES + "TestSqlite::test_9_17_no_position_above_the_sequence_is_stored",
            STORES + "TestPostgres::test_9_17_no_position_above_the_sequence_is_stored",
        ),
    ),
    Mutant(
        name="a-page-proves-whatever-was-asked",
        rule="9.17",
        harm="A reader that asks for a page up to a forged position is blind for all rows below it, over restarts.",
        edits=(
            Edit(
                "fetch.body",
                "        proven = max(after, min(upto, position if replica else given))\n",
                "        proven = max(after, min(upto, position if replica else upto))\n",
            ),
        ),
        checks=(
            STORES + "TestSqlite::test_9_17_a_page_proves_no_more_than_the_sequence",
            STORES + "TestPostgres::test_9_17_a_page_proves_no_more_than_the_sequence",
        ),
    ),
    Mutant(
        name="positions-above-the-sequence-are-saved",
        rule="9.17",
        harm="A durable reader that believed a forged line stays blind over restarts.",
        edits=(
            Edit("PostgresDialect.save", "{NO_BOOTSTRAP} AND {bound} ", "{NO_BOOTSTRAP} "),
            Edit("SqliteDialect.save", "{NO_BOOTSTRAP} AND {bound}", "{NO_BOOTSTRAP}"),
        ),
        checks=(
            STORES + "TestSqlite::test_9_17_no_reader_s_position_above_the_sequence_is_saved",
            STORES + "TestPostgres::test_9_17_no_reader_s_position_above_the_sequence_is_saved",
            T + "9_17_a_reader_that_is_above_the_sequence_goes_back_to_what_is_saved",
        ),
    ),
    Mutant(
        name="a-reader-whose-position-is-refused-stays-there",
        rule="9.17",
        harm="What comes below a forged position is never handled, though it is never saved either.",
        edits=(
            Edit(
                "Reading._go_back",
                "            self.core.move_to(stream, writer, saved, error.highest)\n",
                "            pass\n",
            ),
        ),
        checks=(T + "9_17_a_reader_that_is_above_the_sequence_goes_back_to_what_is_saved",),
    ),
    Mutant(
        name="a-forged-incarnation-speaks-for-who-joins",
        rule="9.18",
        harm="What a forged incarnation said of a writer is fetched once that joins: its open fact is stepped over.",
        edits=(
            Edit(
                "Reader.joined",
                "            if self.registry.get(said[:2]) == said[2]:\n",
                "            if said[:2] in self.registry:\n",
            ),
        ),
        checks=(T + "9_18_the_registry_is_doubted_for_who_names_itself_in_this_log",),
    ),
)
