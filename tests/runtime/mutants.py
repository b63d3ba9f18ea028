"""Known bugs: runtime/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import SIMULATOR, Edit, Mutant

APPENDING = "asyncio/test_appending.py::test_"
SQLITE = "stores/test_stores.py::TestSqlite::test_"
BEAT = "runtime/test_beat.py::test_9_27_"
FACT = "runtime/test_fact.py::test_"
BUS = "asyncio/test_bus.py::test_"
CACHED = "caches/test_cached.py::test_"
ENDED_INSIDE = "asyncio/test_ended_inside.py::test_"
FACT_AFTER_BLOCK = "asyncio/test_fact_after_block.py::test_"
FAILED_NEIGHBOURS = "asyncio/test_failed_neighbours.py::test_"
FAILOVER = "stores/test_failover.py::test_"
GOODBYE = "asyncio/test_goodbye.py::test_"
ONE_LINE = "links/test_one_line.py::test_"
RACES = "sync/test_races.py::test_"
RENEWALS = "runtime/test_renewals.py::test_"
RULES = "test_rules.py::test_"
STRAY_LINES = "asyncio/test_stray_lines.py::test_"
SYNC_CACHED = "caches/test_sync_cached.py::test_"
TRUST = "asyncio/test_trust.py::test_"
UNNUMBERED = "asyncio/test_unnumbered.py::test_"
WINNING_BACK = "asyncio/test_winning_back.py::test_"
WRITING = "sync/test_writing.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="a-writer-without-a-table-is-below-a-claim-of-its-name",
        rule="9.11",
        harm="Behind a restore readers are deaf to a stream in memory whose writer has no other stream any more.",
        edits=(Edit("claim_name", "*(one.incarnation + 1 for one in listed)", ""),),
        checks=("asyncio/test_clock_behind.py::test_a_writer_without_a_table_is_above_a_claim_of_its_name[False]",),
    ),
    Mutant(
        name="two-lives-begin-in-one-millisecond",
        rule="9.11",
        harm="Under a clock set back a writer without a claim has its former life's number: readers go on in that.",
        edits=(Edit("claim_name", "time.time_ns()", "time.time_ns() // 1_000_000"),),
        checks=(
            "runtime/test_renewals.py::test_9_11_two_lives_of_a_writer_without_a_table_differ_within_a_millisecond",
        ),
    ),
    Mutant(
        name="a-transaction-that-is-held-is-asked-after-at-full-pace",
        rule="9.1",
        harm="A transaction that is open for an hour has the table asked 200 times a second.",
        edits=(Edit("fact.next_look", "min(2 * pause, SETTLE_SLOWEST)", "pause"),),
        checks=(FACT + "facts_in_doubt_are_asked_after_ever_more_rarely_while_none_has_ended",),
    ),
    Mutant(
        name="a-transaction-that-is-held-slows-down-the-others",
        rule="9.1",
        harm="Facts of transactions that have ended come up to a second late.",
        edits=(Edit("fact.next_look", "pause is None or left < before", "pause is None"),),
        checks=(FACT + "facts_in_doubt_are_asked_after_ever_more_rarely_while_none_has_ended",),
    ),
    Mutant(
        name="writers-of-one-file-beat-together",
        rule="9.27",
        harm="SQLite gives one turn to write: at each beat all processes wait for one another, and facts for them.",
        edits=(Edit("claims.heartbeat", "    if registry and dialect.server is not None:\n", "    if registry:\n"),),
        checks=(SQLITE + "9_5_finish_fences_then_takes_the_sequence_as_the_final_position",),
    ),
    Mutant(
        name="unknown-commit-completes-the-fact",
        rule="9.1",
        harm="COMMIT lands after the position has stepped over its ID: rows that no reader ever fetches.",
        edits=(
            Edit(
                "FactBase._commit",
                "                if self._sent and self._leaves_doubt(error):\n",
                "                if False:\n",
            ),
        ),
        checks=(
            SIMULATOR,
            RULES + "9_1_no_answer_to_commit_keeps_the_fact_open_until_the_table_decides",
        ),
    ),
    Mutant(
        name="unknown-commit-publishes-what-memory-holds",
        rule="9.1",
        harm="A transaction that was rolled back after all is published: readers see rows that do not exist.",
        edits=(
            Edit(
                "WriterSession.decide",
                """\
            if not self.late_ids.find(one, found):
                self.tear()
            rows = {id: found[one.stream.name, id] for id in one.ids if (one.stream.name, id) in found}
            rows = {id: payloads for id, payloads in rows.items() if one.may_have_written(id, payloads)}
            one.each, one.payloads = None, rows
        if rolled_back and not any(one.payloads for one in durable):
""",
                """\
            pass
        if not durable:
""",
            ),
        ),
        checks=(
            SIMULATOR,
            RULES + "9_1_no_answer_to_commit_keeps_the_fact_open_until_the_table_decides[aborted]",
        ),
    ),
    Mutant(
        name="joined-transaction-rolls-back-with-its-block",
        rule="9.1",
        harm="The caller catches the error and commits all the same: rows under an ID that is complete already.",
        edits=(
            Edit(
                "FactBase._roll_back",
                "            if not known or (transaction.joined and transaction.marker is not None):\n",
                "            if not known:\n",
            ),
        ),
        checks=(RULES + "9_1_a_joined_transaction_may_commit_though_the_fact_s_block_failed",),
    ),
    Mutant(
        name="follows-to-what-is-known-after-the-claim-was-read",
        rule="9.2",
        harm="A writer that lost its name meanwhile announces past a fact that its successor holds open.",
        edits=(
            Edit(
                "OtherWriters.beat_stored",
                "self._generators[name].follow(min(highest, ",
                "self._generators[name].follow(min(self._generators[name].open_floor, ",
            ),
        ),
        checks=(RULES + "9_2_what_is_heard_during_a_beat_counts_in_the_next",),
    ),
    Mutant(
        name="a-fenced-writer-goes-on-publishing",
        rule="9.2",
        harm="Two processes chain frames under one name: readers take one's positions for the other's.",
        edits=(Edit("WriterSession.fence", "            self.core.fenced()\n", ""),),
        checks=(RULES + "9_2_a_beat_that_finds_the_claim_gone_ends_all_publishing",),
    ),
    Mutant(
        name="progress-of-others-is-announced-at-once",
        rule="9.2",
        harm="Each row heard makes every writer announce, without a look at its claim: skipped rows, and a storm.",
        edits=(
            Edit(
                "OtherWriters.heard",
                "                self._generators[item.stream].announced(item.new)\n",
                """\
                generator = self._generators[item.stream]
                generator.announced(item.new)
                generator.follow(generator.open_floor)
""",
            ),
        ),
        checks=(RULES + "9_2_a_beat_that_finds_the_claim_gone_ends_all_publishing",),
    ),
    Mutant(
        name="a-beat-stores-the-highest-id",
        rule="9.3",
        harm="The positions table claims what is still open: readers that start now, or follow it, skip those rows.",
        edits=(
            Edit(
                "WriterSession.beat_begins",
                "        positions = {name: self.generators[name].position for name in self._durable}\n",
                "        positions = {name: self.generators[name].highest for name in self._durable}\n",
            ),
        ),
        checks=(
            SIMULATOR,
            RULES + "9_3_a_beat_stores_nothing_above_an_open_fact",
        ),
    ),
    Mutant(
        name="position-moves-before-the-fact-is-handed-over",
        rule="9.6",
        harm="The position moves past a fact of two streams that is not queued yet: announced as empty, and lost.",
        edits=(
            Edit(
                "WriterSession._book",
                "        for one in opened:\n            self.late_ids.redeem(one)\n",
                """\
        if len(opened) > 1:
            for one in opened:
                self.generators[one.stream.name].complete_many(one.ids)
        for one in opened:
            self.late_ids.redeem(one)
""",
            ),
        ),
        checks=(
            SIMULATOR,
            RULES + "9_6_facts_are_handed_over_before_the_position_moves_past_them",
        ),
    ),
    Mutant(
        name="published-although-an-earlier-fact-is-open",
        rule="4",
        harm="When the slower transaction commits its rows lie below what readers have: dropped as duplicates.",
        edits=(
            Edit(
                "WriterSession._book",
                "            (generator.complete_many if one.claimed else generator.abandon)(one.ids)\n",
                """\
            (generator.complete_many if one.claimed else generator.abandon)(one.ids)
            self.core.position_moved(one.stream.name, one.ids[-1])
""",
            ),
        ),
        checks=(
            SIMULATOR,
            BUS + "concurrent_facts_are_published_in_the_order_of_their_ids",
        ),
    ),
    Mutant(
        name="a-rollback-leaves-its-id-open",
        rule="4",
        harm="One failed business transaction holds back all later facts of this process for ever.",
        edits=(
            Edit(
                "FactBase._roll_back",
                "        self._complete(session)\n",
                "        self._booked = True\n",
            ),
        ),
        checks=(
            SIMULATOR,
            BUS + "a_rolled_back_fact_is_never_seen_and_holds_nothing_up",
        ),
    ),
    Mutant(
        name="a-rollback-is-published",
        rule="4",
        harm="Readers see orders whose transaction was rolled back.",
        edits=(
            Edit(
                "FactBase._roll_back",
                "        for opened in self._opened.values():\n            opened.forget()\n",
                "",
            ),
        ),
        checks=(
            SIMULATOR,
            BUS + "a_rolled_back_fact_is_never_seen_and_holds_nothing_up",
        ),
    ),
    Mutant(
        name="every-message-of-the-own-name-is-an-echo",
        rule="9.11",
        harm="A process does not hear that its name was taken over, and its local handlers miss the successor's rows.",
        edits=(
            Edit(
                "OtherWriters.__init__",
                '        self._own_opening = b"NAME %b %d\\n" % (self._name_on_wire, incarnation)\n',
                '        self._own_opening = b"NAME %b" % self._name_on_wire\n',
            ),
        ),
        checks=(RULES + "9_11_frames_of_the_own_name_by_another_incarnation_are_no_echoes",),
    ),
    Mutant(
        name="writers-of-another-log-are-believed",
        rule="9.16",
        harm="A writer takes IDs of a log that is gone for given out in this one: it announces, and refuses, by them.",
        edits=(
            Edit(
                "OtherWriters.heard",
                "if incarnation is None or incarnation != claim or not trusted:",
                "if incarnation is None or incarnation != claim:",
            ),
        ),
        checks=(RULES + "9_16_a_writer_learns_nothing_from_one_of_another_log",),
    ),
    Mutant(
        name="a-win-back-without-an-answer-waits-for-the-next-fact",
        rule="9.4",
        harm="What was won stands idle, and holds linear positions back, until the next fact, perhaps for long.",
        edits=(
            Edit(
                "win_back",
                "            if tried:\n                raise\n",
                "            raise\n",
            ),
        ),
        checks=(WRITING + "a_name_won_back_without_an_answer_is_this_process_s_still[once]",),
    ),
    Mutant(
        name="a-name-finished-while-it-is-won-back-is-lost",
        rule="9.4",
        harm="A process that was stopped between winning its name back and noting so takes it for another's.",
        edits=(
            Edit(
                "win_back",
                "            if error.incarnation <= former.won:\n",
                "            if True:\n",
            ),
        ),
        checks=(WRITING + "a_name_that_was_finished_while_it_was_won_back_is_won_back_again",),
    ),
    Mutant(
        name="a-row-is-inserted-with-another-one-s-payload",
        rule="9.1",
        harm="Behind a row that the application inserts itself, busrep writes that one's payload: the row is lost.",
        edits=(Edit("OpenFacts.add", "if len(rows) < len(payloads):", "if False:"),),
        checks=("runtime/test_fact.py::test_rows_that_the_application_inserts_come_last",),
    ),
    Mutant(
        name="a-row-behind-those-of-all-facts-is-lost",
        rule="9.1",
        harm="A row that is added behind add_each() is in no fact, and nobody is told.",
        edits=(Edit("OpenFacts.add", "self._check_free(self.each)", "self._check_free(None)"),),
        checks=(WRITING + "rows_whose_place_others_would_take_are_an_error[each-add]",),
    ),
    Mutant(
        name="rows-of-all-facts-take-the-place-of-others",
        rule="9.1",
        harm="A row that was added before add_each() is in no fact, and nobody is told.",
        edits=(
            Edit("OpenFacts.add_each", "self._check_free(self.each or self.payloads)", "self._check_free(self.each)"),
        ),
        checks=(WRITING + "rows_whose_place_others_would_take_are_an_error[add-each]",),
    ),
    Mutant(
        name="a-row-of-a-fact-that-is-not-there-goes-to-the-last",
        rule="9.1",
        harm="A wrong place, -1, is taken for the last fact, which gets rows of another one.",
        edits=(Edit("OpenFacts.add", "if not 0 <= at < len(self.ids):", "if at >= len(self.ids):"),),
        checks=(WRITING + "facts_of_several_rows_in_one_transaction",),
    ),
    Mutant(
        name="what-was-won-is-forgotten-in-an-outage",
        rule="9.5",
        harm="A name that was won, and finished before that was known, is lost for good when the database goes away.",
        edits=(Edit("win_back", "max(former.incarnation, outdone, former.won)", "max(former.incarnation, outdone)"),),
        checks=(RENEWALS + "what_was_won_is_remembered_over_an_outage",),
    ),
    Mutant(
        name="a-commit-without-an-answer-is-trusted",
        rule="9.1",
        harm="It may have landed: the process that wrote it returns the old value until the table has told.",
        edits=(
            Edit(
                "WriterSession.commit_sent",
                "                commits.sent(one, time.monotonic())\n",
                "                pass\n",
            ),
        ),
        checks=(CACHED + "a_commit_without_an_answer_ends_trust_until_it_is_known",),
    ),
    Mutant(
        name="own-invalidations-wait-for-their-echo",
        rule="6",
        harm="A process does not read its own writes: own lines are ignored, so the old value stays for ever.",
        edits=(
            Edit(
                "WriterSession.apply_invalidations",
                "        if self.on_invalidations is None:\n            return\n",
                "        return\n",
            ),
        ),
        checks=(
            CACHED + "own_invalidations_are_applied_before_the_fact_returns",
            SYNC_CACHED + "the_ways_to_invalidate",
        ),
    ),
    Mutant(
        name="a-fact-in-memory-of-a-fenced-incarnation-is-lost-silently",
        rule="9.11",
        harm="A row of a stream without a table is written while the name is won back, and is published by nobody.",
        edits=(Edit("FactBase._complete", "        if not taken:\n            self._tell_what_is_gone()\n", ""),),
        checks=(
            WINNING_BACK + "a_fact_in_memory_that_was_open_meanwhile_says_that_it_is_not_published",
            RACES + "a_fact_in_memory_whose_incarnation_has_ended_says_that_it_was_not_published",
        ),
    ),
    Mutant(
        name="lost-commits-are-not-looked-for",
        rule="9.23",
        harm="A failover loses facts that were committed and announced, and nothing says so.",
        edits=(
            Edit(
                "LastCommits.check",
                "if id > floors.get(stream, 0) and (stream, id) not in (found or ()):",
                "if False:",
            ),
        ),
        checks=(
            SIMULATOR,
            FAILOVER + "a_failover_that_loses_commits_skips_no_row",
        ),
    ),
    Mutant(
        name="the-highest-fact-is-looked-for-not-the-last",
        rule="9.23",
        harm="A fact that was committed after one of a higher ID is lost in a failover, and nothing says so.",
        edits=(
            Edit(
                "LastCommits.note",
                "noted[unit] = max(max(ids), noted.pop(unit, 0))",
                "noted[None] = max(max(ids), noted.pop(None, 0))",
            ),
        ),
        checks=(
            SIMULATOR,
            FAILOVER + "a_lost_fact_is_missed_though_a_higher_one_is_there[asyncio]",
        ),
    ),
    Mutant(
        name="nobody-asks-after-a-failed-block-without-beats",
        rule="9.1",
        harm="Without beats one failed block holds up what is committed behind it until the next fact.",
        edits=(Edit("SharedWriter.in_doubt", "            attempt(self._ask_after_all)", "            pass"),),
        checks=(FAILED_NEIGHBOURS + "a_fact_of_threads_whose_neighbour_fails_inside_its_block_is_published",),
    ),
    Mutant(
        name="what-the-block-committed-is-forgotten-when-it-began-again",
        rule="9.1",
        harm="A block sends COMMIT and BEGIN, and fails: its committed rows are announced as none.",
        edits=(
            Edit(
                "ServerTransaction.execute",
                "        self._handed_out = True\n        await self._flush()\n",
                "        await self._flush()\n",
            ),
            Edit("base.SqliteTransaction.execute", "        self._handed_out = True\n", ""),
        ),
        checks=(ENDED_INSIDE + "what_a_statement_committed_inside_is_published_though_the_block_fails",),
    ),
    Mutant(
        name="what-was-committed-inside-a-block-that-fails-is-forgotten",
        rule="9.1",
        harm="Code in a block commits rows, and then raises: the fact is announced as empty, and its rows are lost.",
        edits=(
            Edit(
                "FactBase._roll_back",
                "            if not known or (transaction.joined",
                "            if (transaction.joined",
            ),
        ),
        checks=(
            ENDED_INSIDE
            + "what_the_caller_committed_inside_is_published_though_the_block_fails[postgres_url-asyncio-raises]",
            ENDED_INSIDE
            + "what_the_caller_committed_inside_is_published_though_the_block_fails[postgres_url-threads-raises]",
            ENDED_INSIDE
            + "what_a_statement_committed_inside_is_published_though_the_block_fails[sqlite_url-asyncio-0]",
        ),
    ),
    Mutant(
        name="an-ended-fact-takes-rows",
        rule="4",
        harm="A row that is added after the block is accepted, and lost.",
        edits=(
            Edit("FactContents._check_in_block", "if self._state is FactState.ENDED:", "if False:"),
            Edit("FactContents._check_in_block", "if self._state is not FactState.OPEN:", "if not self._opened:"),
        ),
        checks=(
            FACT_AFTER_BLOCK + "asyncio[sqlite_url]",
            FACT_AFTER_BLOCK + "threads[sqlite_url]",
        ),
    ),
    Mutant(
        name="echoes-without-a-name-are-no-echoes",
        rule="2",
        harm="A writer of single lines takes its link for dead every few beats, and makes it anew.",
        edits=(Edit("OtherWriters.is_echo", "        if self._one_line_messages:\n", "        if False:\n"),),
        checks=(ONE_LINE + "such_a_writer_hears_itself_and_keeps_its_link",),
    ),
    Mutant(
        name="a-writer-follows-whoever-speaks",
        rule="9.18",
        harm="One line of a writer that does not exist: idle writers follow it, and all writes of the stream fail.",
        edits=(
            Edit(
                "OtherWriters.heard",
                "if incarnation is None or incarnation != claim or not trusted:",
                "if self._epoch is None:",
            ),
        ),
        checks=(
            TRUST + "9_18_a_writer_follows_registered_writers_alone",
            STRAY_LINES + "what_a_stranger_says_harms_nobody[sqlite-redis-asyncio-a writer that does not exist]",
        ),
    ),
    Mutant(
        name="a-writer-leaves-while-a-fact-is-in-doubt",
        rule="9.21",
        harm="close() waits for the lock of a transaction that its own caller has to end, and gives up.",
        edits=(
            Edit("WriterSession.unfinished", "        return bool(self.doubts) or any(", "        return any("),
            Edit("WriterSession.unfinished", "one.open or one.asked for one in", "False for one in"),
        ),
        checks=(
            GOODBYE + "a_writer_with_a_fact_in_doubt_is_not_finished_by_itself[asyncio]",
            GOODBYE + "a_writer_with_a_fact_in_doubt_is_not_finished_by_itself[threads]",
        ),
    ),
    Mutant(
        name="a-doubt-is-noted-twice",
        rule="9.1",
        harm="Interrupted while it is noted, a fact in doubt is completed twice: the next write raises for no reason.",
        edits=(
            Edit(
                "FactBase._doubt",
                "        self._booked = True\n        note(doubt)\n",
                "        note(doubt)\n        self._booked = True\n",
            ),
        ),
        checks=(RACES + "a_doubt_that_is_interrupted_while_it_is_noted_is_one_doubt[False]",),
    ),
    Mutant(
        name="a-name-is-won-back-once-a-fact",
        rule="9.19",
        harm="On a machine that is too slow for its beats a fact is told that another process has its writer's name.",
        edits=(Edit("check_renewals", "count > RENEWALS", "count > 1"),),
        checks=(
            RENEWALS + "9_19_a_fact_begins_however_often_its_writer_was_finished[2]",
            RENEWALS + "9_19_the_same_on_an_event_loop[2]",
        ),
    ),
    Mutant(
        name="a-claim-that-was-finished-before-its-end-is-another-s",
        rule="9.5",
        harm="Where COMMIT of a claim takes longer than the lease no process starts: it takes itself for fenced.",
        edits=(Edit("claim_name", "if former is not None or", "if again is None or former is not None or"),),
        checks=(RENEWALS + "9_5_a_process_begins_whose_claim_was_finished_before_it_knew[2]",),
    ),
    Mutant(
        name="a-claim-that-was-taken-is-taken-back",
        rule="9.5",
        harm="Two processes of one name take it from each other, for ever.",
        edits=(Edit("claim_name", "again = error.incarnation\n", "again = None\n"),),
        checks=(RENEWALS + "9_5_a_process_does_not_take_the_name_of_a_later_one",),
    ),
    Mutant(
        name="a-name-is-won-back-for-ever",
        rule="9.19",
        harm="A fact of a writer that is finished again and again never begins, and nothing says why.",
        edits=(Edit("check_renewals", "count > RENEWALS", "count > RENEWALS * 10"),),
        checks=(
            RENEWALS + "who_is_finished_for_ever_is_told_that_it_is_too_slow",
            RENEWALS + "9_19_the_same_on_an_event_loop[6]",
        ),
    ),
    Mutant(
        name="a-block-that-failed-moves-the-position",
        rule="9.2",
        harm="A writer whose name was lost meanwhile announces past a fact of its successor: lost.",
        edits=(
            Edit(
                "FactBase._roll_back",
                "        if transaction is not None and not transaction.claimed:\n            self._without_claim()\n",
                "",
            ),
        ),
        checks=(SIMULATOR, RULES + "9_2_a_fact_that_wrote_nothing_does_not_step_over_a_successor_s[rolled back]"),
    ),
    Mutant(
        name="an-empty-block-moves-the-position",
        rule="9.2",
        harm="The same.",
        edits=(
            Edit(
                "FactBase._commit",
                "            if not transaction.claimed:  # there was nothing to insert\n",
                "            if False:\n",
            ),
        ),
        checks=(SIMULATOR, RULES + "9_2_a_fact_that_wrote_nothing_does_not_step_over_a_successor_s[empty]"),
    ),
    Mutant(
        name="a-beat-that-failed-counts-as-stored",
        rule="9.27",
        harm="Until the fifth beat the table says less than the writer has proven; who reads there waits for it.",
        edits=(
            Edit(
                "WriterSession.beat_begins",
                "        return Beat(positions, noted, whole, self.others.unexplained)\n",
                "        self._stored.update(positions)\n        return Beat(positions, noted, whole, 0)\n",
            ),
        ),
        checks=(BEAT + "what_has_moved_is_stored_until_a_beat_succeeds",),
    ),
    Mutant(
        name="who-is-behind-others-does-not-follow-them",
        rule="9.27",
        harm="The linear position of a stream stands until the fifth beat of each writer that has nothing to write.",
        edits=(
            Edit("WriterSession.beat_begins", "if len(positions) > 1 and not behind and", "if len(positions) > 1 and"),
        ),
        checks=(BEAT + "what_others_wrote_is_followed_at_the_next_beat",),
    ),
    Mutant(
        name="who-joins-waits-for-the-fifth-beat",
        rule="9.27",
        harm="What a new writer writes is not followed for five beats: linear positions stand.",
        edits=(
            Edit(
                "WriterSession.beat_begins",
                "self.others.registry_doubted or self._beats_left <= 0",
                "self._beats_left <= 0",
            ),
        ),
        checks=(BEAT + "a_line_that_the_registry_does_not_explain_has_it_read_at_the_next_beat",),
    ),
    Mutant(
        name="a-writer-of-another-log-has-the-registry-read",
        rule="9.27",
        harm="Who shares the channel makes every writer read all of the registry at each beat.",
        edits=(Edit("OtherWriters.heard", "joined = trusted and incarnation", "joined = incarnation"),),
        checks=(BEAT + "a_line_that_the_registry_does_not_explain_has_it_read_at_the_next_beat",),
    ),
    Mutant(
        name="lines-that-come-during-a-beat-count-as-explained",
        rule="9.27",
        harm="A writer that joined as the registry was being read is followed beats later.",
        edits=(
            Edit(
                "OtherWriters.beat_stored",
                "self._explained = registry.claims, unexplained",
                "self._explained = registry.claims, self.unexplained",
            ),
        ),
        checks=(BEAT + "a_line_that_comes_while_the_registry_is_being_read_has_it_read_again",),
    ),
    Mutant(
        name="a-writer-of-single-lines-is-followed-at-the-fifth-beat",
        rule="9.27",
        harm="The linear position of its stream stands meanwhile.",
        edits=(Edit("OtherWriters.heard", "if joined or (incarnation is None and claim is not None):", "if joined:"),),
        checks=(BEAT + "a_writer_of_single_lines_is_followed_through_the_registry_at_every_beat",),
    ),
    Mutant(
        name="a-joined-fact-that-was-rolled-back-is-a-position",
        rule="9.22",
        harm="Announced before it is on the disk: a crash, and this writer's next row has that ID, and is lost.",
        edits=(
            Edit(
                "LateIds.redeem",
                "                generator.abandon(ids)\n",
                "                generator.complete_many(ids)\n",
            ),
        ),
        checks=(FACT + "9_22_rolled_back_they_are_no_position_before_they_are_on_the_disk",),
    ),
    Mutant(
        name="a-joined-fact-keeps-an-id-that-was-given-again",
        rule="9.22",
        harm="The server has crashed: who is given the ID next is told that the sequence went back.",
        edits=(
            Edit("LateIds.lent", "        self._given_again(one, ids)\n", ""),
            Edit("LateIds.reserved", "        self._given_again(one, ids)\n", ""),
        ),
        checks=(
            FACT + "9_22_an_id_that_is_given_again_shows_that_its_fact_was_rolled_back[joined]",
            FACT + "9_22_an_id_that_is_given_again_shows_that_its_fact_was_rolled_back[reserved]",
        ),
    ),
    Mutant(
        name="any-row-under-its-id-is-a-joined-fact-s",
        rule="9.22",
        harm="After a crash it is published with the row of who has its ID now, which is told that it wrote nothing.",
        edits=(
            Edit(
                "OpenFacts.may_have_written",
                "(self.ticket is not None and not self.late) or self.lent",
                "self.ticket is not None and not self.late",
            ),
        ),
        checks=(FACT + "9_22_rows_of_another_fact_under_its_id_are_not_a_joined_fact_s",),
    ),
    Mutant(
        name="an-answer-that-is-taken-in-late-is-the-newer-one",
        rule="9.22",
        harm="A thread stops, the server crashes, and the committed fact of who was given its ID since is lost.",
        edits=(Edit("LateIds.lent", "if other.lent and other.stream", "if False and other.stream"),),
        checks=(FACT + "9_22_an_answer_that_is_taken_in_late_voids_nobody",),
    ),
    Mutant(
        name="facts-in-doubt-do-not-wait-for-joined-ones",
        rule="9.28",
        harm="A row in doubt passes for a joined fact's, which was rolled back: it is published by nobody.",
        edits=(Edit("LateIds.may_be_others", "(stream, id) in lent for", "False for"),),
        checks=(FACT + "9_28_facts_in_doubt_get_no_id_of_a_joined_fact_that_is_not_told_yet",),
    ),
    Mutant(
        name="known-facts-pass-for-those-in-doubt",
        rule="9.28",
        harm="After each lost answer the name is claimed anew: facts are found that nobody here has in doubt.",
        edits=(Edit("LateIds.find", " and not generator.knows(id))", ")"),),
        checks=(UNNUMBERED + "9_28_of_ids_whose_answer_was_lost_the_table_tells[deployment-written]",),
    ),
    Mutant(
        name="promised-ids-pass-for-those-in-doubt",
        rule="9.28",
        harm="A joined transaction on SQLite passes for rolled back: its rows in memory are lost.",
        edits=(Edit("LateIds.find", "if id not in theirs and", "if"),),
        checks=(WRITING + "9_28_ids_of_a_joined_transaction_are_not_taken_for_them",),
    ),
    Mutant(
        name="a-fact-s-own-ids-count-as-promised",
        rule="9.28",
        harm="A thread is interrupted between the answer and its bookkeeping: readers are led past committed rows.",
        edits=(Edit("LateIds._others", "if other is not one and other", "if other"),),
        checks=(
            "sync/test_writing.py::test_an_exception_while_facts_get_their_ids_loses_nothing[answered-before-Interrupt]",
        ),
    ),
    Mutant(
        name="facts-without-rows-are-not-coming",
        rule="9.28",
        harm="Another thread's publish begins as a doubt is settled: its rows are taken for those in doubt.",
        edits=(Edit("LateIds.are_coming", "one.late and", "one.unnumbered is not None and"),),
        checks=("runtime/test_late_ids.py::test_9_28_facts_that_have_no_rows_yet_are_coming",),
    ),
    Mutant(
        name="ids-come-late-beside-a-doubt",
        rule="9.28",
        harm="A process that always publishes never finds a moment to look after a lost answer: all later facts wait.",
        edits=(
            Edit(
                "WriterSession.ask",
                " and not any(map(asked_above, self.doubts))",
                "",
            ),
        ),
        checks=(UNNUMBERED + "9_28_beside_a_doubt_ids_are_reserved[deployment]",),
    ),
    Mutant(
        name="a-doubt-is-settled-beside-an-answer-on-its-way",
        rule="9.28",
        harm="Rows whose answer is on its way are taken for those in doubt: they are published, and refused then.",
        edits=(Edit("fact.settle", "    if above and guarded(", "    if False and guarded("),),
        checks=(UNNUMBERED + "9_28_nothing_is_asked_while_another_answer_is_on_its_way[deployment]",),
    ),
    Mutant(
        name="of-two-lost-answers-each-finds-as-many-as-it-asked-for",
        rule="9.28",
        harm="The rows of both are found at once, and refused for their number: the name has to be claimed anew.",
        edits=(Edit("LateIds.redeem", "exact=not one.late", "exact=True"),),
        checks=(UNNUMBERED + "9_28_of_two_lost_answers_the_first_that_is_asked_after_tells[deployment]",),
    ),
    Mutant(
        name="what-was-published-without-an-answer-is-forgotten",
        rule="9.28",
        harm="The answer to a publish is lost: its rows are in the table, and readers are led past them.",
        edits=(
            Edit(
                "WriterSession.decide",
                "            if not self.late_ids.find(one, found):\n",
                "            if False:\n",
            ),
        ),
        checks=(SIMULATOR, UNNUMBERED + "9_28_of_ids_whose_answer_was_lost_the_table_tells[deployment-written]"),
    ),
    Mutant(
        name="ids-that-cannot-be-told-apart-are-told",
        rule="9.28",
        harm="Finished facts that were forgotten for their number are published a second time.",
        edits=(Edit("LateIds.find", "return not generator.thinned", "return True"),),
        checks=("runtime/test_late_ids.py::test_9_28_where_finished_ids_were_forgotten_nothing_is_found",),
    ),
    Mutant(
        name="a-torn-session-goes-on",
        rule="9.28",
        harm="A writer whose bookkeeping failed commits, and publishes nothing any more, without a word.",
        edits=(
            Edit(
                "Writing.tear",
                "        self.fence(WriterFenced(self.name, self.incarnation))\n",
                "",
            ),
        ),
        checks=(UNNUMBERED + "a_session_whose_bookkeeping_failed_is_followed_by_another[deployment]",),
    ),
    Mutant(
        name="what-is-committed-and-cannot-be-booked-was-not-written",
        rule="9.28",
        harm="A publish whose rows are in the table is written a second time.",
        edits=(
            Edit(
                "WriterSession.book",
                "                raise CommitUnknown(None, error) from error\n",
                "                raise\n",
            ),
        ),
        checks=(UNNUMBERED + "a_session_whose_bookkeeping_failed_is_followed_by_another[deployment]",),
    ),
    Mutant(
        name="what-was-refused-for-a-finished-name-is-the-callers-to-write-again",
        rule="9.28",
        harm="A process that was silent for a moment refuses what it is told to publish.",
        edits=(Edit("asyncio.bus.Bus.publish", "if not again or error is not fact.not_written:", "if True:"),),
        checks=(UNNUMBERED + "9_28_under_a_name_that_was_finished_it_is_written_anew[deployment]",),
    ),
    Mutant(
        name="an-outcome-that-is-booked-half-way-tears-nothing",
        rule="9.1",
        harm="What follows is booked behind facts that are booked half-way, and that nobody asks after again.",
        edits=(Edit("WriterSession.book", "            self.tear()  #", "            pass  #"),),
        checks=("runtime/test_fact.py::test_9_1_an_outcome_that_is_booked_half_way_tears_the_session",),
    ),
    Mutant(
        name="a-fact-whose-statement-was-not-run-is-written",
        rule="9.26",
        harm="Every process is told of a change that the database does not have.",
        edits=(Edit("DeferredTransaction.begin_now", "self._failed = repr(error)", "pass"),),
        checks=(
            APPENDING + "9_26_a_fact_of_which_a_statement_was_not_run_is_not_written[on_postgres]",
            "runtime/test_deferred.py::test_a_fact_of_which_a_statement_was_not_run_is_not_written[refused]",
        ),
    ),
    Mutant(
        name="an-id-that-was-given-again-is-promised-still",
        rule="9.28",
        harm="A transaction that was rolled back has the name claimed anew, and all other facts wait for that.",
        edits=(Edit("LateIds.redeem", "self._given_again(one, one.ids)", "pass"),),
        checks=(WRITING + "9_28_an_id_that_was_promised_and_given_again_is_the_second_fact_s[after-the same row]",),
    ),
    Mutant(
        name="rows-under-an-id-that-was-promised-are-its-own",
        rule="9.28",
        harm="The rows of a fact whose answer was lost are published as another one's, and the name is claimed anew.",
        edits=(Edit("OpenFacts.may_have_written", "return mine == found", "return True"),),
        checks=(
            WRITING + "9_28_an_id_that_was_promised_and_given_again_is_the_second_fact_s[in doubt, first-another row]",
        ),
    ),
    Mutant(
        name="rows-that-are-being-written-may-be-a-promised-id-s",
        rule="9.28",
        harm="Of two equal rows one was rolled back; the other, which is written, is told to be in doubt.",
        edits=(
            Edit("runtime.fact.settle", "guarded(partial(session.late_ids.may_be_others, doubts, found))", "False"),
        ),
        checks=(
            WRITING + "9_28_an_id_that_was_promised_and_given_again_is_the_second_fact_s"
            "[before it is booked-the same row]",
        ),
    ),
    Mutant(
        name="what-a-void-promise-leaves-is-told-by-no-row",
        rule="9.28",
        harm="Rows in memory of a transaction that was rolled back are published.",
        edits=(Edit("WriterSession.is_told_by_no_row", "if one.written() or one.void", "if one.written()"),),
        checks=(WRITING + "9_28_an_id_that_was_promised_and_given_again_is_the_second_fact_s[after-another row]",),
    ),
    Mutant(
        name="a-writer-that-hears-no-other-beats-in-turns",
        rule="9.27",
        harm="In threads: it follows the others at each fifth beat, and who asks for positions waits for each turn.",
        edits=(
            Edit(
                "WriterSession.beat_begins",
                "not self._hears or self.others.registry_doubted",
                "self.others.registry_doubted",
            ),
        ),
        checks=(
            BEAT + "a_writer_that_hears_no_other_stores_and_reads_everything_at_each_beat",
            RACES + "9_27_a_writer_in_threads_beats_as_a_whole[deployment]",
        ),
    ),
    Mutant(
        name="a-beat-that-comes-late-lets-the-next-one-be-left-out",
        rule="9.27",
        harm="While the database hangs nobody hears of a writer, and nothing else tells that it is alive.",
        edits=(Edit("WriterSession.beat_begins", "        self.core.announcements.stored = False\n", ""),),
        checks=("runtime/test_beat.py::test_9_27_a_beat_counts_as_stored_until_the_next_one_begins",),
    ),
    Mutant(
        name="every-writer-is-the-first-of-the-registry",
        rule="9.27",
        harm="All writers at rest speak at the same beat, and at the others nobody is heard.",
        edits=(Edit("WriterSession.beat_stored", "sum(writer < self.name for writer in writers)", "0"),),
        checks=("runtime/test_beat.py::test_a_writer_knows_how_many_the_registry_lists_as_it_was_read_last",),
    ),
    Mutant(
        name="nobody-counts-the-beats-that-were-stored",
        rule="2",
        harm="One process that starts wakes all others once for each writer.",
        edits=(Edit("WriterSession.beat_stored", "        self.core.announcements.quiet_beats += 1\n", ""),),
        checks=("runtime/test_beat.py::test_a_writer_counts_the_beats_that_were_stored_since_it_published_a_fact",),
    ),
    Mutant(
        name="a-beat-that-reads-no-registry-forgets-the-others",
        rule="2",
        harm="One process that starts wakes all others once for each writer, but at one beat in five.",
        edits=(
            Edit(
                "WriterSession.beat_stored",
                "        if registry.read:\n            writers = ",
                "        if True:\n            writers = ",
            ),
        ),
        checks=("runtime/test_beat.py::test_a_writer_knows_how_many_the_registry_lists_as_it_was_read_last",),
    ),
    Mutant(
        name="who-hears-no-replicate-announces-in-turns",
        rule="9.27",
        harm="In threads: a reader learns where a quiet stream is after dozens of beats, and asks at each of them.",
        edits=(
            Edit(
                "WriterSession.__init__",
                "        self.core.announcements.in_turns &= config.hears\n",
                "",
            ),
        ),
        checks=(RACES + "9_27_a_writer_in_threads_beats_as_a_whole[on_sqlite]",),
    ),
    Mutant(
        name="a-failed-begin-keeps-its-traceback",
        rule="9.1",
        harm="Whoever waits for the fact to be garbage waits for the collector, and its position stands meanwhile.",
        edits=(Edit("DeferredTransaction.begin_now", "self._failed = repr(error)", "self._failed = error"),),
        checks=("runtime/test_deferred.py::test_why_it_could_not_begin_does_not_keep_the_block_that_it_failed_in",),
    ),
    Mutant(
        name="a-process-forked-during-a-decode-collects-no-garbage",
        rule="9.1",
        harm="It grows without end, and a fact that nobody ends is never found.",
        edits=(Edit("Stream.decode", "                collector_held.add(here)\n", "                pass\n"),),
        checks=("sync/test_fork.py::test_a_process_forked_while_rows_are_decoded_collects_garbage",),
    ),
)
