"""Known bugs: what the database must have kept. See mutants.py."""

from __future__ import annotations

from .mutant import SIMULATOR, Edit, Mutant

ENDED = "test_sessions_ended.py::test_"
DURABLE = "test_durability.py::test_"
FAILOVER = "test_failover.py::test_"
CLOCK = "test_clock_behind.py::test_"
ERRORS = "test_driver_errors.py::test_"
BACK = "test_winning_back.py::test_"
INSIDE = "test_ended_inside.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="a-session-that-the-server-ended-is-a-bug",
        rule="4",
        harm="A reader stops for good when idle_in_transaction_session_timeout ends its session.",
        edits=(
            Edit("postgres.store.translated", "operational=closed or lost", "operational=lost"),
            Edit("by_state", " or state in SESSION_ENDED:", ":"),
        ),
        checks=(ENDED + "a_session_that_the_server_ended_is_an_outage",),
    ),
    Mutant(
        name="an-unknown-error-at-the-start-ends-a-reader",
        rule="4",
        harm="A reader is dead for good after one error of no known kind.",
        edits=(
            Edit(
                "Reading._begin",
                'self.not_begun[stream.name] = f"{type(error).__name__}: {error}"',
                'self._fail(Unavailable("the store", error))\nreturn',
            ),
        ),
        checks=(ENDED + "a_reader_begins_again_after_an_unknown_error",),
    ),
    Mutant(
        name="a-paused-writer-stays-fenced",
        rule="9.5",
        harm="A process that was paused for longer than its lease writes nothing more until it is restarted.",
        edits=(Edit("asyncio.bus.Bus._begin_writing", "renew=self._renew_writing,", "renew=None,"),),
        checks=(
            BACK + "a_paused_writer_writes_again[deployment]",
            BACK + "an_idle_writer_wins_its_name_back_by_itself",
        ),
    ),
    Mutant(
        name="a-paused-writer-takes-the-name-of-its-successor",
        rule="9.5",
        harm="Two processes of one name fence each other in turns.",
        edits=(
            Edit(
                "asyncio.bus.Bus._begin_writing",
                "timeout=self.settings.claim_timeout, again=again)",
                "timeout=self.settings.claim_timeout)",
            ),
        ),
        checks=(BACK + "the_name_of_another_process_is_not_won_back",),
    ),
    Mutant(
        name="a-fact-in-memory-of-a-fenced-incarnation-is-lost-silently",
        rule="9.11",
        harm="A row of a stream without a table is written while the name is won back, and is published by nobody.",
        edits=(
            Edit("asyncio.writing.Fact._commit", "        if not taken:\n            self._tell_what_is_gone()\n", ""),
        ),
        checks=(BACK + "a_fact_in_memory_that_was_open_meanwhile_says_that_it_is_not_published",),
    ),
    Mutant(
        name="a-caller-who-is-cancelled-tears-the-claim",
        rule="9.5",
        harm="A claim is committed and not noted: the process takes its own name for another's, and stays fenced.",
        edits=(Edit("Bus._renew_writing", "await asyncio.shield(self._winning)", "await self._winning"),),
        checks=(BACK + "a_caller_who_is_cancelled_does_not_tear_the_claim",),
    ),
    Mutant(
        name="facts-are-committed-asynchronously",
        rule="9.22",
        harm="After a crash readers are ahead of the table, and step over the rows that get the same IDs.",
        edits=(
            Edit(
                "lock_claim",
                'f"SELECT {dialect.marker}, {dialect.durable} FROM busrep_writers "',
                "f\"SELECT {dialect.marker}, '' FROM busrep_writers \"",
            ),
        ),
        checks=(
            SIMULATOR,
            DURABLE + "no_fact_is_announced_that_a_crash_takes_back[own-0]",
            DURABLE + "a_fact_s_transaction_is_durable[off-local]",
        ),
    ),
    Mutant(
        name="ids-are-given-asynchronously",
        rule="9.22",
        harm="After a crash the sequence gives IDs again that were announced as empty: readers step over their rows.",
        edits=(
            Edit(
                "PostgresDialect.next_ids",
                """sequence_name(stream)}\\"'), {self.durable}{each}")""",
                """sequence_name(stream)}\\"'){each}")""",
            ),
        ),
        checks=(SIMULATOR,),
    ),
    Mutant(
        name="the-timeline-is-not-looked-at",
        rule="9.23",
        harm="After a failover writers write under IDs that readers have passed: their rows are skipped in silence.",
        edits=(Edit("PostgresDialect.same_server", 'f"{SERVER}) = {SERVER})"', 'f"{SERVER}) = {SERVER} OR TRUE)"'),),
        checks=(
            SIMULATOR,
            FAILOVER + "another_timeline_fences_all_writers_until_they_claim_again",
            FAILOVER + "a_failover_that_loses_commits_skips_no_row",
        ),
    ),
    Mutant(
        name="ids-are-given-again-after-a-failover",
        rule="9.23",
        harm="The new primary gives IDs that readers have passed: their rows are skipped in silence.",
        edits=(Edit("IDS_LEFT_OUT", "IDS_LEFT_OUT = 100_000", "IDS_LEFT_OUT = 1"),),
        checks=(
            SIMULATOR,
            FAILOVER + "a_failover_that_loses_commits_skips_no_row",
        ),
    ),
    Mutant(
        name="a-reader-stops-before-the-failover-is-noted",
        rule="9.23",
        harm="A reader finds its positions ahead of the new primary's sequence, and stops though all is well soon.",
        edits=(
            Edit(
                "claims.sequence",
                'Sql(f"SELECT CASE WHEN {dialect.same_server} THEN {dialect.replica} ELSE TRUE END")',
                'Sql(f"SELECT {dialect.replica}")',
            ),
        ),
        checks=(FAILOVER + "another_timeline_fences_all_writers_until_they_claim_again",),
    ),
    Mutant(
        name="a-reader-cannot-save-and-stops-before-the-failover-is-noted",
        rule="9.23",
        harm="A reader that saves between the promotion and the first claim stops for good, though all is well soon.",
        edits=(Edit("_refuse_above", "        if not here[0][1]:\n", "        if False:\n"),),
        checks=(FAILOVER + "another_timeline_fences_all_writers_until_they_claim_again",),
    ),
    Mutant(
        name="a-failover-fences-nobody-else",
        rule="9.23",
        harm="A writer uses IDs that it got of the new primary before others were left out: their rows are skipped.",
        edits=(
            Edit(
                "_leave_out_ids",
                '"UPDATE busrep_writers SET finished = incarnation, incarnation = incarnation + 1 "\n'
                '            "WHERE coalesce(finished, -1) <> incarnation - 1"',
                '"UPDATE busrep_writers SET incarnation = incarnation WHERE writer IS NULL"',
            ),
        ),
        checks=(FAILOVER + "another_timeline_fences_all_writers_until_they_claim_again",),
    ),
    Mutant(
        name="lost-commits-are-not-looked-for",
        rule="9.23",
        harm="A failover loses facts that were committed and announced, and nothing says so.",
        edits=(
            Edit(
                "Ledger.check_committed",
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
                "Ledger.note_committed",
                "deque(maxlen=COMMITS_CHECKED)).append(max(ids))",
                "deque([0], 1)).append(max(ids + list(self.committed[name])))",
            ),
        ),
        checks=(SIMULATOR, FAILOVER + "a_lost_fact_is_missed_though_a_higher_one_is_there[asyncio]"),
    ),
    Mutant(
        name="two-failovers-leave-out-the-same-ids",
        rule="9.23",
        harm="A second standby that lacks what the first one committed gives the IDs again that were left out there.",
        edits=(
            Edit(
                "claims._failovers",
                "max(1, min(int(later, 16) - int(timeline, 16), FAILOVERS)) if system == same else 1",
                "1",
            ),
        ),
        checks=(
            "test_failover.py::test_how_many_failovers_there_were",
            "test_simulation.py::test_what_the_simulator_found_stays_mended[ids-left-out-by-a-failover-that-was-lost]",
        ),
    ),
    Mutant(
        name="the-fence-s-number-is-a-claim",
        rule="9.23",
        harm="A claim that a failover lost, under a clock that was behind, has the number of the fence: it goes on.",
        edits=(Edit("claims.LIVE", 'LIVE = "coalesce(finished, -1) < 0"', 'LIVE = "incarnation > 0"'),),
        checks=(
            FAILOVER + "a_claim_that_was_lost_does_not_pass_for_the_fence[failover]",
            FAILOVER + "a_claim_that_was_lost_does_not_pass_for_the_fence[restore]",
        ),
    ),
    Mutant(
        name="numbers-of-lost-claims-are-given-again",
        rule="9.23",
        harm="The second of two claims that a failover lost has the number of the name's next one: both hold it.",
        edits=(Edit("CLAIMS_LEFT_OUT", "CLAIMS_LEFT_OUT = 1_000_000", "CLAIMS_LEFT_OUT = 0"),),
        checks=(FAILOVER + "a_claim_that_was_lost_does_not_pass_for_the_fence[failover]",),
    ),
    Mutant(
        name="as-many-incarnations-are-left-out-each-time",
        rule="9.23",
        harm="Two claims from the same row get one number: readers of a stream in memory are deaf to the second.",
        edits=(
            Edit(
                "_win",
                "random.randint(CLAIMS_LEFT_OUT // 1_000, CLAIMS_LEFT_OUT)",
                "CLAIMS_LEFT_OUT // 1_000",
            ),
        ),
        checks=("test_simulation.py::test_what_the_simulator_found_stays_mended[a-lost-incarnation-is-given-again]",),
    ),
    Mutant(
        name="each-try-leaves-out-ids-anew",
        rule="9.23",
        harm="A COMMIT that is not answered leaves out as many IDs again; a failover that loses both gives IDs twice.",
        edits=(Edit("Home.moved_to", "        if self.successor == now:\n", "        if False:\n"),),
        checks=(
            FAILOVER + "what_is_left_out_is_decided_once_for_each_failover",
            FAILOVER + "a_claim_that_fails_after_a_failover_leaves_out_the_same_ids_again",
        ),
    ),
    Mutant(
        name="the-next-failover-forgets-what-the-last-one-chose",
        rule="9.23",
        harm="A failover within a failover leaves out IDs behind those that the first was about to leave out.",
        edits=(Edit("Home.moved_to", "max(highest, self.up_to.get(stream, 0)) + left_out", "highest + left_out"),),
        checks=(FAILOVER + "what_is_left_out_is_decided_once_for_each_failover",),
    ),
    Mutant(
        name="a-restored-log-has-no-server-before-the-first-claim",
        rule="9.23",
        harm="A failover between 'db restored' and the first claim passes unnoticed: IDs are given again.",
        edits=(Edit("restored.body", "{dialect.server or EMPTY} WHERE", "{EMPTY} WHERE"),),
        checks=(
            FAILOVER + "a_restore_that_is_declared_notes_the_server_anew",
            "test_simulation.py::test_what_the_simulator_found_stays_mended[failed-over-before-the-first-claim]",
        ),
    ),
    Mutant(
        name="a-failover-takes-an-idle-writer-s-position-back",
        rule="9.23",
        harm="A writer that only follows wins its name back below where it said it is: its position goes back.",
        edits=(Edit("Claim.resumed", "        if epoch != self.epoch:\n", "        if epoch:\n"),),
        checks=(
            SIMULATOR,
            FAILOVER + "an_idle_writer_s_position_outlives_a_failover[asyncio]",
            FAILOVER + "an_idle_writer_s_position_outlives_a_failover[threads]",
        ),
    ),
    Mutant(
        name="nobody-looks-whether-saved-positions-went-back",
        rule="9.23",
        harm="Effects that a failover took back are missing until the writer's next row.",
        edits=(
            Edit(
                "Reading.look_after_silent",
                "            if not all_known or not await self._look_at_saved():\n",
                "            if True:\n",
            ),
        ),
        checks=(
            FAILOVER + "effects_that_a_failover_took_back_are_made_again[True-False]",
            "test_simulation.py::test_what_the_simulator_found_stays_mended[effects-that-a-failover-took-back]",
        ),
    ),
    Mutant(
        name="a-reader-waits-for-a-step-that-a-failover-has-lost",
        rule="9.23",
        harm="Saved positions that a failover put back into the log before are never of this one: the reader hangs.",
        edits=(
            Edit("Reading._look_at_saved", "        if older and core.new_epoch is None:\n", "        if False:\n"),
        ),
        checks=(
            "test_simulation.py::test_what_the_simulator_found_stays_mended[a-failover-lost-the-step-into-a-new-log]",
        ),
    ),
    Mutant(
        name="a-lost-registration-is-made-anew-where-the-reader-is",
        rule="9.23",
        harm="Effects that a failover took back together with the first saved position are never made again.",
        edits=(
            Edit(
                "Reading._compare_saved",
                "state.positions.get(key, self.core.progress[key].began)",
                "state.positions.get(key, self.core.delivered(*key))",
            ),
        ),
        checks=(FAILOVER + "effects_that_a_failover_took_back_are_made_again[False-False]",),
    ),
    Mutant(
        name="what-a-process-before-saved-is-where-it-began",
        rule="9.23",
        harm="The same, once the reader was restarted.",
        edits=(
            Edit(
                "Reading._load_durable",
                "core.start_at(*key, position, began=starts.get(key, 0))",
                "core.start_at(*key, position)",
            ),
        ),
        checks=(FAILOVER + "effects_are_made_again_that_the_process_before_had_made",),
    ),
    Mutant(
        name="a-handler-goes-on-behind-a-lost-registration",
        rule="9.23",
        harm="The same, where the handler's next transaction finds it out.",
        edits=(
            Edit(
                "Reading._reload",
                "self._register(key, core.progress[key].began)",
                "self._register(key, raw.after)",
            ),
        ),
        checks=(
            "test_effects.py::test_effects_that_were_lost_with_the_registration_are_made_again[sqlite_url-asyncio]",
        ),
    ),
    Mutant(
        name="a-declared-restore-is-a-failover-too",
        rule="9.23",
        harm="After 'db restored' the next claim fences all that have claimed since, and leaves out IDs.",
        edits=(
            Edit(
                "restored.body",
                "            Sql(f\"UPDATE busrep_meta SET value = {dialect.server or EMPTY} WHERE key = 'server'\"),",
                "",
            ),
        ),
        checks=(FAILOVER + "a_restore_that_is_declared_notes_the_server_anew",),
    ),
    Mutant(
        name="a-reader-is-deaf-to-a-clock-that-is-behind",
        rule="9.24",
        harm="A stream without a table is never heard again when its writer restarts under a clock that is behind.",
        edits=(Edit("Reader._outlived", "        if now - progress.lower_since < bound:\n", "        if True:\n"),),
        checks=(
            SIMULATOR,
            CLOCK + "lower_incarnations_alone_for_five_beats_are_a_reset",
            CLOCK + "a_reader_is_not_deaf_to_a_writer_whose_clock_is_behind",
        ),
    ),
    Mutant(
        name="a-zombie-takes-a-stream-back",
        rule="9.24",
        harm="Late lines of a former life reset the stream, though the later life is heard as well.",
        edits=(
            Edit(
                "Reader._present_life",
                "        progress.lower_since = None\n        if known != incarnation:\n",
                "        if known != incarnation:\n",
            ),
        ),
        checks=(CLOCK + "not_while_the_higher_one_is_heard_as_well",),
    ),
    Mutant(
        name="a-writer-stops-for-its-predecessor-s-clock",
        rule="9.24",
        harm="A writer that is started before its predecessor has ended stops, if that one's clock is ahead.",
        edits=(Edit("Bus._outdone", "now - self._named_at <= bound and not writing.has_log(incarnation):", "False:"),),
        checks=(CLOCK + "a_writer_goes_on_above_a_predecessor_that_it_hears[asyncio]",),
    ),
    Mutant(
        name="a-writer-in-threads-stops-for-its-predecessor-s-clock",
        rule="9.24",
        harm="The same, in threads.",
        edits=(Edit("Writing.taken", "elif now <= self._named_until and not has_log:", "elif False:"),),
        checks=(CLOCK + "a_writer_goes_on_above_a_predecessor_that_it_hears[threads]",),
    ),
    Mutant(
        name="a-caller-s-sqlite-connection-stays-as-it-is",
        rule="9.22",
        harm="A power cut takes back facts that were published in a caller's transaction with synchronous = NORMAL.",
        edits=(Edit("require_durable", "        if level >= FULL:\n            return\n", "        return\n"),),
        checks=(
            DURABLE + "a_caller_s_sqlite_connection_is_made_durable[NORMAL]",
            DURABLE + "a_caller_s_transaction_on_sqlite_that_may_be_lost_is_refused[NORMAL]",
        ),
    ),
    Mutant(
        name="positions-are-saved-asynchronously",
        rule="9.22",
        harm="After a crash a reader is set back behind facts for which wait_for has returned.",
        edits=(
            Edit(
                "PostgresDialect.save",
                'f"SELECT stream, writer, {self.durable} FROM hit",',
                '"SELECT stream, writer FROM hit",',
            ),
        ),
        checks=(
            SIMULATOR,
            "test_durable_positions.py::test_no_position_is_saved_that_a_crash_takes_back",
        ),
    ),
    Mutant(
        name="a-name-that-is-won-back-is-another-s-meanwhile",
        rule="9.5",
        harm="While a writer wins its name back its own positions are forgotten, and wait_for waits for its own facts.",
        edits=(
            Edit(
                "Bus._name_lost",
                "return self._writing is not None and self._writing.lost",
                "return self._writing is not None and self._writing.fenced is not None",
            ),
        ),
        checks=(
            "test_simulation.py::test_what_the_simulator_found_stays_mended[own-position-while-the-name-is-won-back]",
        ),
    ),
    Mutant(
        name="a-writer-without-a-claim-goes-above-its-successor-s",
        rule="9.24",
        harm="A stream without a table is heard from the former process, though the name was claimed by another one.",
        edits=(Edit("Bus._outdone", " and not writing.has_log(incarnation):", ":"),),
        checks=(
            "test_rules.py::test_9_11_a_name_that_gets_its_first_stream_with_a_table_is_heard_in_all_of_them[rolling]",
        ),
    ),
    Mutant(
        name="a-fenced-writer-has-handled-its-successor-s-facts",
        rule="9.5",
        harm="wait_for of a fenced process returns for facts of its successor that it has not handled.",
        edits=(
            Edit(
                "asyncio.bus.Bus._is_successors",
                "(writing.lost or writing.is_successors(stream.name, abs(token)))",
                "writing.lost",
            ),
        ),
        checks=("test_faults.py::test_a_fenced_process_goes_on_as_a_reader_of_its_successor",),
    ),
    Mutant(
        name="a-fenced-writer-in-threads-has-handled-its-successor-s-facts",
        rule="9.5",
        harm="wait_for of a fenced process in threads returns for facts of its successor that it has not handled.",
        edits=(
            Edit(
                "Writing.is_successors",
                " or self._guarded(session, lambda: session.is_successors(stream, token))",
                "",
            ),
        ),
        checks=("test_sync_races.py::test_a_fenced_writer_waits_for_what_its_successor_wrote",),
    ),
    Mutant(
        name="whatever-is-raised-at-commit-is-a-refusal",
        rule="9.1",
        harm="A handler of notifications on the caller's connection raises: a committed fact is announced as empty.",
        edits=(
            Edit(
                "ServerTransaction.commit",
                "            if isinstance(error, BusrepError) and not self",
                "            if not self",
            ),
        ),
        checks=(ERRORS + "an_error_of_the_application_s_at_commit_is_no_refusal[asyncio]",),
    ),
    Mutant(
        name="a-replica-decides-what-became-of-a-fact",
        rule="9.1",
        harm="store= leads to a lagging replica for a moment: a committed fact is announced as empty.",
        edits=(
            Edit("claims.check_claim", "    if answers[0][0][0]:\n        raise Unav", "    if 0:\n        raise Unav"),
        ),
        checks=(
            "test_sim_store.py::test_9_9_a_replica_lags_never_goes_back_and_is_not_written",
            "test_replica.py::test_9_1_a_replica_does_not_tell_what_became_of_a_fact",
        ),
    ),
    Mutant(
        name="a-transaction-ended-inside-the-block-goes-unnoticed",
        rule="9.4",
        harm="Code inside the block commits: a row is written without the claim, under a name that somebody else has.",
        edits=(
            Edit("ServerTransaction._check_not_ended", "        if ended:\n", "        if False:\n"),
            Edit(
                "SqliteTransaction.commit",
                "        if not in_transaction(self.connection) or (",
                "        if (",
            ),
        ),
        checks=(
            ERRORS + "a_transaction_that_is_ended_inside_the_block[sqlite-asyncio-ours]",
            ERRORS + "a_transaction_that_is_ended_inside_the_block[postgres-asyncio-ours]",
            ERRORS + "a_transaction_that_is_ended_inside_the_block[postgres-threads-the caller's]",
        ),
    ),
    Mutant(
        name="another-transaction-of-the-caller-s-connection-is-ours",
        rule="9.4",
        harm="The driver begins another transaction after one that was ended inside the block: rows without the claim.",
        edits=(
            Edit(
                "ServerTransaction._check_not_ended",
                "self._idle() or (self._callers and await self._lock() != self.marker)",
                "self._idle()",
            ),
            Edit("last_steps", "    if again:  # a tr", "    if False:  # a tr"),
        ),
        checks=(
            ERRORS + "a_transaction_that_is_ended_inside_the_block[postgres-asyncio-the caller's, and another]",
            ERRORS + "a_transaction_that_is_ended_inside_the_block[sqlite-asyncio-the caller's, and another]",
            ERRORS + "a_transaction_that_is_ended_inside_the_block[sqlite-threads-the caller's, and another]",
        ),
    ),
    Mutant(
        name="what-was-committed-inside-a-block-that-fails-is-forgotten",
        rule="9.1",
        harm="Code in a block commits rows, and then raises: the fact is announced as empty, and its rows are lost.",
        edits=(
            Edit(
                "Fact._rolled_back",
                "            if not known or (transaction.joined",
                "            if (transaction.joined",
            ),
            Edit(
                "Fact._roll_back",
                "            if not known or (transaction.joined",
                "            if (transaction.joined",
            ),
        ),
        checks=(
            INSIDE
            + "what_the_caller_committed_inside_is_published_though_the_block_fails[postgres_url-asyncio-raises]",
            INSIDE
            + "what_the_caller_committed_inside_is_published_though_the_block_fails[postgres_url-threads-raises]",
            INSIDE + "what_a_statement_committed_inside_is_published_though_the_block_fails[sqlite_url-asyncio]",
        ),
    ),
    Mutant(
        name="sqlite3-s-next-transaction-passes-for-the-fact-s",
        rule="9.1",
        harm="A rollback inside the block: a row is published that is in no table, or written under an ID given again.",
        edits=(
            Edit("Mark.stands", '            return bool(self._run(Sql("SELECT 1 FROM', "            return True  # "),
            Edit("Mark.clear", '"DELETE FROM temp.busrep_marks WHERE mark = ?", self._number', '"SELECT 1"'),
        ),
        checks=(
            INSIDE + "what_the_caller_rolled_back_inside_is_not_published[asyncio]",
            INSIDE + "what_the_caller_rolled_back_inside_is_not_published[threads]",
            INSIDE + "a_joined_transaction_that_was_rolled_back_inside_is_refused",
        ),
    ),
    Mutant(
        name="a-joined-fact-s-row-goes-before-its-claim",
        rule="9.4",
        harm="Whoever catches WriterFenced and commits writes a row under the name of its successor.",
        edits=(
            Edit(
                "last_steps",
                "    if again:  # a tr",
                "    if pending:\n        yield tuple(pending)\n    if again:  # a tr",
            ),
            Edit(
                "last_steps",
                "    if pending:\n        yield tuple(pending)\n    if last:\n",
                "    if last:\n",
            ),
        ),
        checks=(INSIDE + "no_row_is_written_in_a_joined_transaction_whose_name_has_a_successor",),
    ),
    Mutant(
        name="begin-waits-for-its-answer-for-ever",
        rule="9.1",
        harm="A pooled connection at whose other end is nobody: write() hangs with its IDs open.",
        edits=(
            Edit(
                "ServerTransaction._lock",
                "self._run(held, settings.fetch_timeout + settings.claim_timeout)",
                "self._run(held)",
            ),
        ),
        checks=(ENDED + "a_fact_s_begin_has_a_deadline",),
    ),
    Mutant(
        name="back-on-the-noted-server-nobody-writes",
        rule="9.23",
        harm="The server that was noted is back before a failover was done: every claim is refused, for good.",
        edits=(Edit("_choose_ids", "now != home.server or home.successor:", "now != home.server:"),),
        checks=(FAILOVER + "back_on_the_noted_server_before_the_failover_was_done",),
    ),
)
