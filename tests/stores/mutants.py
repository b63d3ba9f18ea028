"""Known bugs: stores/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import SIMULATOR, Edit, Mutant

APPENDING = "asyncio/test_appending.py::test_"
DEFERRED = "runtime/test_deferred.py::test_"
BUS = "asyncio/test_bus.py::test_"
CONFIG_ERRORS = "asyncio/test_config_errors.py::test_"
BEATS = "stores/test_beats.py::test_"
DRIVER_ERRORS = "stores/test_driver_errors.py::test_"
DURABILITY = "stores/test_durability.py::test_"
DURABLE_POSITIONS = "stores/test_durable_positions.py::test_"
ENDED_INSIDE = "asyncio/test_ended_inside.py::test_"
FAILOVER = "stores/test_failover.py::test_"
FAULTS = "asyncio/test_faults.py::test_"
FOUND = "proof/test_simulation.py::test_what_the_simulator_found_stays_mended"
MUTANTS_GAPS = "asyncio/test_mutants_gaps.py::test_"
PREPARED = "stores/test_prepared.py::test_"
PRIVATE_FILES = "stores/test_private_files.py::test_"
RACES = "sync/test_races.py::test_"
REPLICA = "stores/test_replica.py::test_"
RIGHTS = "stores/test_rights.py::test_"
ROW_SHAPES = "stores/test_row_shapes.py::test_"
RULES = "test_rules.py::test_"
SAVING_REFUSED = "stores/test_saving_refused.py::test_"
SECRETS = "asyncio/test_secrets.py::test_"
SERVER_SETTINGS = "stores/test_server_settings.py::test_"
SESSIONS_ENDED = "asyncio/test_sessions_ended.py::test_"
SIMULATION = "proof/test_simulation.py::test_"
SIM_STORE = "proof/test_sim_store.py::test_"
SNAPSHOTS_POSTGRES = "stores/test_snapshots_postgres.py::test_"
SNAPSHOTS_STORE_POSTGRES = "stores/test_snapshots_store.py::TestPostgres::test_"
SNAPSHOTS_STORE_SQLITE = "stores/test_snapshots_store.py::TestSqlite::test_"
JOINED = "stores/test_joined.py::test_"
MIGRATION = "stores/test_migration.py::test_"
STORES_POSTGRES = "stores/test_stores.py::TestPostgres::test_"
LATE_COMMITS = "stores/test_late_commits.py::test_"
STORES_SQLITE = "stores/test_stores.py::TestSqlite::test_"
STORE_EDGES = "stores/test_store_edges.py::test_"
STREAMS = "cli/test_streams.py::test_"
SYNC_STORES = "stores/test_sync_stores.py::test_"
TRUST = "asyncio/test_trust.py::test_"
UNNUMBERED = "asyncio/test_unnumbered.py::test_"
WRITING = "sync/test_writing.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="lost-answer-to-commit-is-a-failure",
        rule="9.1",
        harm="A connection that breaks during COMMIT counts as a rollback: committed rows are announced as none.",
        edits=(
            Edit(
                "ServerTransaction.commit",
                "            raise CommitUnknown(self.marker, error) from error\n",
                "            raise\n",
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_1_no_answer_to_commit",
        ),
    ),
    Mutant(
        name="outcome-does-not-wait-for-the-end",
        rule="9.1",
        harm="A transaction still open on the server is taken for rolled back; when it commits its rows are skipped.",
        edits=(Edit("facts.outcomes", "else next(told)[0][0] for", "else next(told)[0][0].replace(OPEN, '') for"),),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_1_outcome_open_committed_and_rolled_back",
        ),
    ),
    Mutant(
        name="outcome-reads-the-rows-first",
        rule="9.1",
        harm="COMMIT between the look at the rows and the look at the transaction: its rows are announced as none.",
        edits=(
            Edit(
                "facts.outcomes",
                "        *(question for question in questions if question is not None),\n"
                "        *(_rows(dialect, backing, held.writer, tokens) for backing, tokens in rows.items()),\n",
                "        *(_rows(dialect, backing, held.writer, tokens) for backing, tokens in rows.items()),\n"
                "        *(question for question in questions if question is not None),\n",
            ),
            Edit(
                "facts.outcomes",
                "    told = iter(answers)\n",
                "    told = iter([*answers[len(rows) : -2], *answers[: len(rows)], *answers[-2:]])\n",
            ),
        ),
        checks=(
            SIMULATOR,
            RULES + "9_1_the_rows_are_read_after_the_transaction_was_seen_to_have_ended",
        ),
    ),
    Mutant(
        name="the-table-decides-though-the-claim-is-gone",
        rule="9.1",
        harm="After a restore a fact in doubt is found missing in another log, and completed in it as empty.",
        edits=(Edit("facts.outcomes", "    check_answered(dialect, held, *told)\n", ""),),
        checks=(STORES_POSTGRES + "9_1_a_cancelled_commit_is_unknown_until_the_table_decides",),
    ),
    Mutant(
        name="commit-of-a-failed-transaction-is-a-commit",
        rule="9.1",
        harm="PostgreSQL answers COMMIT of a failed transaction with ROLLBACK: rows are published that do not exist.",
        edits=(Edit("postgres.steps._committed", '    if status != "COMMIT":\n', "    if status is None:\n"),),
        checks=(STORES_POSTGRES + "9_1_a_commit_that_rolls_back_is_an_error",),
    ),
    Mutant(
        name="the-position-of-a-late-beat-is-stored",
        rule="9.3",
        harm="A beat that comes late takes a stored position back: a successor gives IDs again that were announced.",
        edits=(Edit("claims._beat", "position = {dialect.largest}(position, ?) ", "position = ? "),),
        checks=(STORES_POSTGRES + "9_3_ids_without_rows_are_kept_in_the_positions_table",),
    ),
    Mutant(
        name="the-positions-of-a-late-beat-are-stored",
        rule="9.3",
        harm="The same of a beat of several streams.",
        edits=(Edit("claims._beat", "{dialect.largest}(p.position, ", "coalesce(v.position, "),),
        checks=(STORES_POSTGRES + "9_3_ids_without_rows_are_kept_in_the_positions_table",),
    ),
    Mutant(
        name="sequences-behind-the-first-hundred-bound-nothing",
        rule="9.17",
        harm="A forged position of a writer with many streams is stored, and passes for a proven one.",
        edits=(Edit("claims.heartbeat", "for rows in answers[1:]", "for rows in answers[1:2]"),),
        checks=(BEATS + "a_position_above_its_own_sequence_is_stored_as_that",),
    ),
    Mutant(
        name="an-idle-writer-s-beat-reads-all-positions",
        rule="9",
        harm="With 1,000 writers each beat costs PostgreSQL three times as much.",
        edits=(Edit("claims._beat", "if len(positions) == 1:", "if not positions:"),),
        checks=(BEATS + "a_beat_of_one_position_looks_at_no_other_s",),
    ),
    Mutant(
        name="heartbeat-does-not-look-at-the-claim",
        rule="9.2",
        harm="A process that was paused and replaced goes on storing and announcing positions under its old name.",
        edits=(
            Edit(
                "claims.heartbeat",
                """\
        if not answers[0]:
            raise WriterFenced(claim.writer, claim.incarnation)
        given =\
""",
                "        given =",
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_2_and_9_4_a_fenced_writer_is_told_everywhere",
        ),
    ),
    Mutant(
        name="rows-prove-positions-of-others",
        rule="9.3",
        harm="A reader from now on takes a writer's highest row for its position, and skips what is open below.",
        edits=(
            Edit(
                "claims.known",
                '"SELECT p.stream, p.writer, p.position, p.floor, p.registered, coalesce(w.incarnation, 0), "\n',
                '"SELECT p.stream, p.writer, (SELECT coalesce(max(f.id), p.position) FROM busrep_facts f WHERE "\n'
                '        "f.stream = p.stream AND f.writer = p.writer), p.floor, p.registered, "\n'
                '        "coalesce(w.incarnation, 0), "\n',
            ),
        ),
        checks=(
            SIMULATOR,
            MUTANTS_GAPS + "9_3_rows_of_a_writer_prove_no_position_to_a_reader",
        ),
    ),
    Mutant(
        name="a-sequence-s-last-value-as-it-stands",
        rule="5",
        harm="A sequence never used shows 1: a writer finished before its first fact refuses its own first ID later.",
        edits=(
            Edit(
                "PostgresDialect.sequence",
                '"SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END, p.seqcache',
                '"SELECT s.last_value, p.seqcache',
            ),
        ),
        # Not the simulator: its database does not know this statement.
        checks=(STORES_POSTGRES + "9_5_finish_fences_then_takes_the_sequence_as_the_final_position",),
    ),
    Mutant(
        name="no-fencing-check",
        rule="9.4",
        harm="A process that lost its name commits facts under it that its successor has stepped over.",
        edits=(
            Edit(
                "claims.hold",
                """\
    if not found:
        raise WriterFenced(held.writer, held.incarnation)
    return found[0]
""",
                "    return found[0] if found else (None, '', *(0 for _ in ids))\n",
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_2_and_9_4_a_fenced_writer_is_told_everywhere",
        ),
    ),
    Mutant(
        name="the-claim-is-checked-and-not-locked",
        rule="9.4",
        harm="A transaction that passed the check commits after the successor has read its start: skipped.",
        edits=(
            Edit(
                "NameLocks.share_name",
                "WHEN NOT pg_try_advisory_xact_lock_shared({key}) THEN",
                "WHEN NOT true THEN",
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_4_a_claim_waits_for_the_predecessors_transaction_and_starts_behind_it",
        ),
    ),
    Mutant(
        name="behind-a-waiting-claim-the-row-is-not-locked",
        rule="9.4",
        harm="A fact that begins while a successor waits commits after that one has read its start: skipped.",
        edits=(Edit("claims.hold", "    if found and shared and not answers[0][0][0]:\n", "    if False:\n"),),
        checks=(STORES_POSTGRES + "9_4_who_begins_while_a_successor_waits_holds_it_up",),
    ),
    Mutant(
        name="a-fact-waits-behind-a-claim-that-waits",
        rule="9.4",
        harm="A fact inside another one waits for a claim that waits for the outer one, for ever.",
        edits=(
            Edit(
                "NameLocks.share_name",
                "WHEN NOT pg_try_advisory_xact_lock_shared({key}) THEN",
                "WHEN pg_advisory_xact_lock_shared({key})::text <> '' THEN",
            ),
        ),
        checks=(STORES_POSTGRES + "9_4_facts_may_nest_while_a_successor_waits",),
    ),
    Mutant(
        name="in-one-snapshot-the-name-is-shared",
        rule="9.4",
        harm="A caller's REPEATABLE READ transaction writes under a name that was lost before it took the lock.",
        edits=(
            Edit(
                "NameLocks.share_name",
                "WHEN current_setting('transaction_isolation') <> 'read committed' THEN",
                "WHEN false THEN",
            ),
        ),
        checks=(STORES_POSTGRES + "9_4_a_serialization_failure_of_the_lock_is_a_fence",),
    ),
    Mutant(
        name="processes-of-before-version-5-wait-for-no-name",
        rule="9.4",
        harm="While processes are upgraded a successor of before reads its start while a fact is open: it is skipped.",
        edits=(Edit("schema.VERSIONS", "PERFORM pg_advisory_xact_lock(", "PERFORM ("),),
        checks=(MIGRATION + "9_4_version_5_holds_names_against_processes_of_before[plain]",),
    ),
    Mutant(
        name="a-process-of-before-version-5-waits-with-the-row",
        rule="9.4",
        harm="While processes are upgraded beats of a name that is taken, and who takes it as well, wait for the row.",
        edits=(Edit("schema.VERSIONS", "SET lock_timeout = \"\n        \"'200ms' SET search_path", "SET search_path"),),
        checks=(MIGRATION + "9_4_version_5_holds_names_against_processes_of_before[plain]",),
    ),
    Mutant(
        name="a-process-of-before-version-5-computes-another-key",
        rule="9.4",
        harm="Where its search_path finds another hashtext() a process of before takes a name while a fact is open.",
        edits=(Edit("schema.VERSIONS", "SET search_path = pg_catalog, pg_temp AS", "AS"),),
        checks=(MIGRATION + "9_4_version_5_holds_names_against_processes_of_before[with a hashtext of its own]",),
    ),
    Mutant(
        name="tables-that-were-dropped-cannot-be-made-anew",
        rule="9",
        harm="'db init' fails for good where somebody has dropped the tables, for their function is there still.",
        edits=(Edit("schema.VERSIONS", "CREATE OR REPLACE FUNCTION", "CREATE FUNCTION"),),
        checks=(MIGRATION + "tables_that_were_dropped_are_made_anew",),
    ),
    Mutant(
        name="who-has-taken-all-names-takes-each",
        rule="9.4",
        harm="With many names the server has no room for their locks: a failover, or a restore, fails.",
        edits=(Edit("NameLocks.take_name", "set_config('busrep.takes_name', '1', true)", "'1'"),),
        checks=(MIGRATION + "9_4_who_takes_all_names_takes_one_lock",),
    ),
    Mutant(
        name="a-claim-locks-the-row-before-the-name",
        rule="9.4",
        harm="A fact inside another one waits for the row, which a successor holds that waits for the outer one.",
        edits=(Edit("claims._win", "        *dialect.take_name(writer),\n", ""),),
        checks=(SIMULATOR, STORES_POSTGRES + "9_4_facts_may_nest_while_a_successor_waits"),
    ),
    Mutant(
        name="whoever-finishes-a-name-locks-the-row-before-it",
        rule="9.5",
        harm="While a name is finished whose fact is open its beats wait for the row.",
        edits=(Edit("fencing._fence", "        *dialect.take_name(writer, standing),\n", ""),),
        checks=(SIMULATOR, STORES_POSTGRES + "9_5_a_name_is_won_back_beside_who_finishes_it"),
    ),
    Mutant(
        name="a-late-finish-waits-for-a-successor-s-facts",
        rule="9.5",
        harm="A reader that finishes a name late has all facts of the name's next writer lock its row.",
        edits=(Edit("fencing._fence", "take_name(writer, standing)", "take_name(writer)"),),
        checks=(STORES_POSTGRES + "9_5_a_late_finish_waits_for_no_fact_of_a_successor",),
    ),
    Mutant(
        name="a-name-is-won-back-from-who-claimed-it-meanwhile",
        rule="9.5",
        harm="A process takes its name back from another one, which was told that the name is its own.",
        edits=(Edit("claims._check_again", "(*dialect.take_name(writer, stands), stands)", "(stands,)"),),
        checks=(STORES_POSTGRES + "9_5_a_name_is_not_won_back_from_who_claims_it_meanwhile",),
    ),
    Mutant(
        name="a-failover-takes-names-one-by-one",
        rule="9.23",
        harm="With many names the server has no room for their locks, and nobody writes any more.",
        edits=(
            Edit(
                "fencing._leave_out_ids",
                "        yield dialect.take_name(None)  # waits for open facts, of all writers\n",
                "",
            ),
        ),
        checks=(FAILOVER + "9_4_a_failover_waits_for_open_facts",),
    ),
    Mutant(
        name="a-restore-takes-names-one-by-one",
        rule="9.4",
        harm="With many names the server has no room for their locks, and the restore fails.",
        edits=(
            Edit(
                "fencing.restored",
                "        yield dialect.take_name(None)  # waits for open facts, of all writers\n",
                "",
            ),
        ),
        checks=(STORES_POSTGRES + "9_4_a_restore_waits_for_open_facts",),
    ),
    Mutant(
        name="start-is-read-before-the-claim-is-won",
        rule="9.4",
        harm="What the predecessor commits while the claim waits for it lies below the successor's start, unannounced.",
        edits=(
            Edit(
                "claims.claim",
                "    won = in_transaction(_win(dialect, writer, backings, timeout, now, again))\n",
                """\
    early = yield from in_transaction(held_state(writer, 0, dialect, backings))
    won = in_transaction(_win(dialect, writer, backings, timeout, now, again))
""",
            ),
            Edit(
                "claims.claim",
                "    starts = {name: _start(writer, name, name in registered, found[name]) for name in found}\n",
                """\
    found = {name: (*early[1][name][:3], state[3]) for name, state in found.items()}
    starts = {name: _start(writer, name, name in registered, found[name]) for name in found}
""",
            ),
            Edit("held_state", "    if not held:\n", "    if incarnation and not held:\n"),
        ),
        checks=(STORES_POSTGRES + "9_4_a_claim_waits_for_the_predecessors_transaction_and_starts_behind_it",),
    ),
    Mutant(
        name="a-claim-keeps-the-incarnation",
        rule="9.4",
        harm="A new process takes a name that its predecessor still holds: both write and announce under it.",
        edits=(
            Edit(
                "_win",
                "(busrep_writers.incarnation, ?) + 1, ",
                "(busrep_writers.incarnation, 0 * ?), ",  # the clock alone would make it rise
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_2_and_9_4_a_fenced_writer_is_told_everywhere",
            STORES_SQLITE + "9_2_and_9_4_a_fenced_writer_is_told_everywhere",
        ),
    ),
    Mutant(
        name="a-claim-waits-for-ever",
        rule="9.4",
        harm="A predecessor's forgotten transaction keeps the service from starting, and nothing says which it is.",
        edits=(
            Edit(
                "PostgresDialect.lock_timeout",
                'f"{LOCKS} = {max(1, int(seconds * 1000))}"',
                'f"{LOCKS} = 0"',
            ),
        ),
        checks=(STORES_POSTGRES + "9_4_a_claim_that_waits_too_long_names_the_blocker",),
        hangs=True,
    ),
    Mutant(
        name="a-serialization-failure-is-no-fence",
        rule="9.4",
        harm="In a caller's REPEATABLE READ transaction a lost name shows as a driver's error, to be retried for ever.",
        edits=(
            Edit(
                "ServerTransaction.begin",
                "                await self.store.check_claim(self.claim)\n            raise\n",
                "                pass\n            raise\n",
            ),
        ),
        checks=(STORES_POSTGRES + "9_4_a_serialization_failure_of_the_lock_is_a_fence",),
    ),
    Mutant(
        name="finished-at-its-stored-position",
        rule="9.5",
        harm="The last facts of a process that was killed, committed and never published, reach nobody.",
        edits=(
            Edit(
                "_finals",
                "yield from final_position(dialect, stream, writer, position)\n",
                "position\n",
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_5_finish_fences_then_takes_the_sequence_as_the_final_position",
        ),
    ),
    Mutant(
        name="final-position-read-before-the-fence",
        rule="9.5",
        harm="What the silent writer commits while the fence waits for it lies above its final position: lost.",
        edits=(
            Edit(
                "fencing.finish",
                "    fenced = yield from or_blocked(dialect, writer, in_transaction(_fence(",
                """\
    early: dict[str, int] = {}
    for stream in dialect.backings:
        early[stream] = yield from final_position(dialect, stream, writer, 0)
    fenced = yield from or_blocked(dialect, writer, in_transaction(_fence(""",
            ),
            Edit(
                "fencing.finish",
                "    finals = in_transaction(_finals(dialect, writer, fenced, timeout))\n",
                "    finals = in_transaction(_finals(dialect, writer, fenced, timeout, early))\n",
            ),
            Edit(
                "_finals",
                "incarnation: int, seconds: float) -> Plan",
                "incarnation: int, seconds: float, early: dict) -> Plan",
            ),
            Edit(
                "_finals",
                "yield from final_position(dialect, stream, writer, position)\n",
                "max(position, early.get(stream, 0))\n",
            ),
        ),
        checks=(RULES + "9_5_rows_and_sequence_are_read_after_the_fence_was_granted",),
    ),
    Mutant(
        name="final-position-without-the-fence",
        rule="9.5",
        harm="A writer that was merely slow commits below the final position that was taken of it: lost.",
        edits=(
            Edit(
                "fencing._fence",
                '"UPDATE busrep_writers SET incarnation = incarnation + 1, finished = incarnation "\n',
                '"UPDATE busrep_writers SET finished = incarnation "\n',
            ),
            Edit(
                "fencing._fence",
                "            (writer, incarnation + 1, incarnation, incarnation, incarnation - 1),\n",
                "            (writer, incarnation, incarnation, incarnation, incarnation - 1),\n",
            ),
            Edit(
                "_finals",
                "+ dialect.exclusive,\n            (writer, incarnation + 1, incarnation),\n",
                "+ dialect.exclusive,\n            (writer, incarnation, incarnation),\n",
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_5_finish_fences_then_takes_the_sequence_as_the_final_position",
        ),
    ),
    Mutant(
        name="the-name-is-free-while-it-is-finished",
        rule="9.5",
        harm="A successor claims the name and reserves below the final position that is just being stored.",
        edits=(
            Edit(
                "_finals",
                'incarnation = ? AND finished = ?" + dialect.exclusive,\n',
                'incarnation = ? AND finished = ?",\n',
            ),
        ),
        checks=(RULES + "9_5_nobody_claims_the_name_while_its_final_positions_are_taken",),
    ),
    Mutant(
        name="a-question-waits-for-its-answer-for-ever",
        rule="9",
        harm="A save on a link at whose other end is nobody: no handler is called any more, and nobody says so.",
        edits=(
            Edit(
                "PostgresStore.read",
                "self.run_on(connection, plan, self.settings.fetch_timeout + wait)\n",
                "self.run_on(connection, plan)\n",
            ),
        ),
        checks=(FAULTS + "a_save_without_an_answer_does_not_deafen_a_reader",),
    ),
    Mutant(
        name="commit-waits-for-its-answer-for-ever",
        rule="9.1",
        harm="A link at whose other end is nobody: the fact never comes into doubt, and its stream stands still.",
        edits=(
            Edit(
                "ServerTransaction._commit_in_time",
                "timeout(self.store.settings.fetch_timeout):\n                await asyncio.shield(committing)",
                "timeout(None):\n                await asyncio.shield(committing)",
            ),
        ),
        checks=(FAULTS + "the_end_of_a_fact_without_an_answer_holds_up_no_other[COMMIT does not arrive]",),
    ),
    Mutant(
        name="rollback-waits-for-its-answer-for-ever",
        rule="9.1",
        harm="A link at whose other end is nobody: the fact never ends, and its stream stands still.",
        edits=(
            Edit(
                "ServerTransaction.rollback",
                "self._run(only(Control.ROLLBACK), self.store.settings.fetch_timeout)",
                "self._run(only(Control.ROLLBACK))",
            ),
        ),
        checks=(FAULTS + "the_end_of_a_fact_without_an_answer_holds_up_no_other[ROLLBACK does not arrive]",),
    ),
    Mutant(
        name="dead-connections-are-asked-one-by-one",
        rule="9",
        harm="One that does not answer keeps all the others out of the pool: the database is away until a restart.",
        edits=(
            Edit(
                "PostgresStore.renew",
                "ensure_future(pool.drain())",
                "ensure_future(pool.check())",
            ),
        ),
        checks=(STORES_POSTGRES + "connections_without_an_answer_keep_nobody_from_the_others",),
    ),
    Mutant(
        name="who-gives-up-waits-until-the-server-has-said-so",
        rule="9.1",
        harm="A database that says nothing holds a fact, a beat or a fetch up for ten seconds more than fetch_timeout.",
        edits=(Edit("StoreConnection._end_statement", "timeout=GRACE)", "timeout=2 * CANCEL_TIMEOUT)"),),
        checks=(STORES_POSTGRES + "who_gives_up_is_not_held_up_by_a_server_that_says_nothing",),
    ),
    Mutant(
        name="a-late-commit-is-cancelled",
        rule="9.22",
        harm="A fact is seen and announced without the synchronous standby, and a failover takes it back.",
        edits=(Edit("StoreConnection._end_statement", "if not self.left_alone:", "if True:"),),
        checks=(LATE_COMMITS + "9_22_a_late_commit_waits_for_its_standby[asyncio-write]",),
    ),
    Mutant(
        name="a-late-commit-in-threads-is-cancelled",
        rule="9.22",
        harm="A fact is seen and announced without the synchronous standby, and a failover takes it back.",
        edits=(Edit("OwnConnection.wait", "if not self.left_alone:", "if True:"),),
        checks=(LATE_COMMITS + "9_22_a_late_commit_waits_for_its_standby[threads-publish]",),
    ),
    Mutant(
        name="a-fact-behind-a-lock-leaves-a-session-that-waits",
        rule="9.1",
        harm="Each fact while a table is locked leaves a session, until the server takes no connection any more.",
        edits=(Edit("ServerTransaction._commit_checked", "(self.store.settings.fetch_timeout / 2)", "(1e6)"),),
        checks=(LATE_COMMITS + "a_fact_behind_a_locked_table_leaves_no_session_that_waits[asyncio]",),
    ),
    Mutant(
        name="a-fact-that-does-not-bound-its-locks-is-cancelled",
        rule="9.22",
        harm="A fact is seen and announced without the synchronous standby, and a failover takes it back.",
        edits=(
            Edit(
                "ServerTransaction._commit_checked",
                "[*self.store.dialect.lock_timeout(self.store.settings.fetch_timeout / 2)]",
                "[]",
            ),
        ),
        checks=(LATE_COMMITS + "9_22_a_late_commit_waits_for_its_standby[asyncio-write]",),
    ),
    Mutant(
        name="nothing-that-commits-is-cancelled",
        rule="9.1",
        harm="Each beat behind a locked row leaves one more session, until the server takes no connection any more.",
        edits=(Edit("execute_steps", "bounded and Control.COMMIT", "Control.COMMIT"),),
        checks=(STORES_POSTGRES + "a_question_that_is_cancelled_leaves_no_transaction_open",),
    ),
    Mutant(
        name="a-cancel-that-failed-is-taken-for-one-that-was-told",
        rule="9.1",
        harm="It was sent, and its answer lost: a fact, or a beat, of somebody else's fails for it.",
        edits=(Edit("StoreConnection._end_statement", " and not any(self._telling.result())", ""),),
        checks=(STORES_POSTGRES + "a_connection_does_not_outlive_a_cancel_that_is_on_its_way[True]",),
    ),
    Mutant(
        name="a-cancel-on-its-way-ends-what-is-asked-next",
        rule="9.1",
        harm="A fact, or a beat, fails for another's deadline: its statement runs on the session that was given up.",
        edits=(Edit("StoreConnection._end_statement", "if not told or ", "if "),),
        checks=(STORES_POSTGRES + "a_connection_does_not_outlive_a_cancel_that_is_on_its_way",),
    ),
    Mutant(
        name="who-gives-up-a-question-does-not-tell-the-server",
        rule="9.1",
        harm="Each beat behind a locked row leaves one more session, until the server takes no connection any more.",
        edits=(Edit("StoreConnection._end_statement", "self.cancel_safe(timeout=CANCEL_TIMEOUT)", "asyncio.sleep(0)"),),
        checks=(STORES_POSTGRES + "a_question_that_is_cancelled_leaves_no_transaction_open",),
    ),
    Mutant(
        name="a-fact-that-cannot-begin-keeps-the-write-lock",
        rule="9",
        harm="BEGIN has succeeded, and what comes behind it has not: no process can write until this one is restarted.",
        edits=(
            Edit(
                "SqliteTransaction.begin",
                "            if ours:  # in",
                "            if False:  # in",
            ),
        ),
        checks=(STORES_SQLITE + "a_fact_that_cannot_begin_leaves_the_file_to_others",),
    ),
    Mutant(
        name="a-cancelled-question-cuts-the-pool",
        rule="9",
        harm="A connection is lost, and whoever it was promised to waits half a minute: a stream is not followed yet.",
        edits=(
            Edit(
                "PostgresStore.read",
                "        finally:\n            self._give_back(pool, connection)\n",
                "        finally:\n            await pool.putconn(connection)\n",
            ),
        ),
        checks=(STORES_POSTGRES + "who_is_cancelled_takes_no_connection_along",),
    ),
    Mutant(
        name="a-rollback-that-is-cut-keeps-its-connection",
        rule="9",
        harm="Two deadlines around a handler's transaction, and a connection is lost: after some no handler gets one.",
        edits=(
            Edit(
                "ServerTransaction.rollback",
                "        finally:  # a pool throws away one that is in the middle of a statement\n",
                "        except asyncio.CancelledError:\n            raise\n        else:\n",
            ),
        ),
        checks=(STORES_POSTGRES + "who_is_cut_twice_while_it_begins_takes_no_connection_along",),
    ),
    Mutant(
        name="ceiling-taken-for-proof",
        rule="9.9",
        harm="A page from a lagging replica counts up to what was asked for: rows not replayed yet are skipped.",
        edits=(
            Edit(
                "facts.fetch",
                "        proven = max(after, min(upto, position if replica else given))\n",
                "        proven = max(after, min(upto, upto if replica else given))\n",
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_9_a_replica_proves_only_what_its_positions_row_says",
        ),
    ),
    Mutant(
        name="a-row-proves-those-below",
        rule="9.9",
        harm="A replica that shows a row counts as complete below it, though an older transaction is not replayed yet.",
        edits=(
            Edit(
                "facts.fetch",
                "        proven = max(after, min(upto, position if replica else given))\n",
                """\
        position = max(position, rows[-1][0] if rows else 0)
        proven = max(after, min(upto, position if replica else given))
""",
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_9_a_replica_proves_only_what_its_positions_row_says",
            REPLICA + "9_9_a_row_that_is_visible_proves_nothing_about_those_below",
        ),
    ),
    Mutant(
        name="two-statement-page",
        rule="9.9",
        harm="Rows pruned between the look at the floor and the look at the rows are skipped without a word.",
        edits=(Edit("facts.fetch", "            Control.SNAPSHOT,\n", "            Control.BEGIN,\n"),),
        checks=(RULES + "9_9_a_page_is_of_one_snapshot",),
    ),
    Mutant(
        name="a-full-page-proves-all-that-was-asked",
        rule="9.10",
        harm="Who was away for more than a page of rows gets the first thousand and nothing else.",
        edits=(Edit("facts.fetch", "            proven = tokens[-1]\n", ""),),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_10_pages_end_on_fact_boundaries_and_hold_a_whole_fact",
        ),
    ),
    Mutant(
        name="a-page-ends-inside-a-fact",
        rule="9.10",
        harm="A fact of several rows that crosses a page's end is delivered in part, and its rest never.",
        edits=(
            Edit(
                "facts.fetch",
                "            if whole > 0:\n                del tokens[whole:], rows[whole:]\n",
                "            if whole > 0:\n                del tokens[limit:], rows[limit:]\n",
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_10_pages_end_on_fact_boundaries_and_hold_a_whole_fact",
        ),
    ),
    Mutant(
        name="a-fact-larger-than-a-page-is-cut",
        rule="9.10",
        harm="The rest of a bulk of more rows than a page has never reaches those who fetch it.",
        edits=(Edit("PostgresDialect.page", "ROWS WITH TIES", "ROWS ONLY"),),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_10_pages_end_on_fact_boundaries_and_hold_a_whole_fact",
        ),
    ),
    Mutant(
        name="a-save-that-hits-no-row-is-none",
        rule="9.12",
        harm="Two processes under one reader name both apply every row: money is booked twice.",
        edits=(
            Edit(
                "readers.save",
                "    missed = [change for change in changes if change[:2] not in hit]\n",
                "    missed = [change for change in changes if change[:2] not in hit][:0]\n",
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_12_a_save_hits_the_row_it_left_or_none",
        ),
    ),
    Mutant(
        name="a-save-does-not-look-where-the-row-was",
        rule="9.12",
        harm="Two processes under one reader name both apply every row: money is booked twice.",
        edits=(Edit("PostgresDialect.save", " AND r.position = v.old ", " "),),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_12_a_save_hits_the_row_it_left_or_none",
        ),
    ),
    Mutant(
        name="a-save-does-not-look-at-the-epoch",
        rule="9.12",
        harm="A position of the log before a restore is saved over one of the log after it.",
        edits=(
            Edit(
                "PostgresDialect.save",
                '"WHERE r.reader = ? AND r.epoch = ? AND {NO_BOOTSTRAP} AND',
                '"WHERE r.reader = ? AND (r.epoch = ?) IS NOT NULL AND {NO_BOOTSTRAP} AND',
            ),
        ),
        checks=(STORES_POSTGRES + "9_12_a_save_hits_the_row_it_left_or_none",),
    ),
    Mutant(
        name="the-sequence-is-not-verified",
        rule="9.15",
        harm="A sequence with CACHE gives each session IDs of its own: lower ones come after higher ones were skipped.",
        edits=(
            Edit(
                "claims.verify",
                "        if (cache, bool(cycles), increment) != (1, False, 1):\n",
                "        if not found:\n",
            ),
        ),
        checks=(STORES_POSTGRES + "9_15_the_sequence_is_verified",),
    ),
    Mutant(
        name="a-sequence-behind-the-table-is-not-repaired",
        rule="9.15",
        harm="After a restore every reservation is refused until somebody sets the sequence by hand.",
        edits=(
            Edit(
                "claims.claim",
                "        if start.repair_sequence_to is not None:\n",
                "        if start.repair_sequence_to == -1:\n",
            ),
        ),
        checks=(STORES_POSTGRES + "9_15_a_sequence_behind_the_table_is_repaired",),
    ),
    Mutant(
        name="pruning-does-not-move-the-floor",
        rule="9",
        harm="Who fetches below what was pruned gets a page without those rows, and no word of it.",
        edits=(
            Edit(
                "prune_batch",
                """\
f"UPDATE busrep_positions SET floor = {dialect.largest}(floor, ?) WHERE stream = ? AND writer = ?",
            (top,""",
                """\
f"UPDATE busrep_positions SET floor = {dialect.largest}(floor, ?) WHERE stream = ? AND writer = ?",
            (0,""",
            ),
        ),
        checks=(STORES_POSTGRES + "pruning_moves_the_floor_and_a_fetch_below_it_is_told",),
    ),
    Mutant(
        name="pruning-deletes-the-first-young-row",
        rule="9",
        harm="A row is gone before its time, in whichever batch the first young one is found.",
        edits=(Edit("prune_batch", "young[0][0] - 1", "young[0][0]"),),
        checks=(
            STORE_EDGES + "pruning_by_age_stops_at_the_first_young_row[sqlite]",
            STORE_EDGES + "pruning_by_age_stops_at_the_first_young_row[postgres]",
        ),
    ),
    Mutant(
        name="pruning-looks-at-all-old-rows-for-each-batch",
        rule="9",
        harm="A prune of a large log takes the square of its rows, and its writer cannot beat meanwhile: it is fenced.",
        edits=(
            Edit(
                "prune_batch",
                "        aged = (*params, kept.older_than)\n",
                "        old, of = backing.rows(writer, 0, position)\n        aged = (*of, kept.older_than)\n",
            ),
            Edit("prune_batch", 'f"SELECT id {rows} AND', 'f"SELECT id {old} AND'),
        ),
        checks=(STORE_EDGES + "pruning_looks_at_each_old_row_once",),
    ),
    Mutant(
        name="a-fetch-below-the-floor-is-answered",
        rule="8",
        harm="Who was away for longer than rows are kept goes on without those rows, and no word of it.",
        edits=(Edit("facts.fetch", "        if after < floor and after < upto:\n", "        if False:\n"),),
        checks=(STORES_POSTGRES + "pruning_moves_the_floor_and_a_fetch_below_it_is_told",),
    ),
    Mutant(
        name="pruning-overtakes-registered-readers",
        rule="9",
        harm="Rows are deleted that a reader which is down for the weekend has not handled yet.",
        edits=(
            Edit(
                "_readers_bound",
                "    return int(min([position, *(row[0] for row in held[0])]))\n",
                "    return int(position)\n",
            ),
        ),
        checks=(STORES_POSTGRES + "pruning_stops_at_registered_readers_up_to_a_cap",),
    ),
    Mutant(
        name="a-restore-leaves-the-writers-their-names",
        rule="9",
        harm="A process from before the restore goes on writing with IDs of the old log.",
        edits=(
            Edit(
                "restored.body",
                '"UPDATE busrep_writers SET incarnation = ?, finished = 0", (above + 1,)',
                '"UPDATE busrep_writers SET incarnation = incarnation + 0 * ?", (above + 1,)',
            ),
        ),
        checks=(STORES_POSTGRES + "restored_changes_the_epoch_and_fences_everybody",),
    ),
    Mutant(
        name="incarnations-begin-anew-after-a-restore",
        rule="9.4",
        harm="A name gets an incarnation a second time: a process from before the restore passes for its successor.",
        edits=(
            Edit("_win", "    above = max([now - 1, *(int(value) for (value,) in answers[-1])])\n", "    above = 0\n"),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "restored_gives_no_incarnation_out_again",
        ),
    ),
    Mutant(
        name="a-new-epoch-throws-out-what-a-twin-has-saved-in-it",
        rule="9.12",
        harm="Of two processes under one reader name the second to notice a restore sends both back to the beginning.",
        edits=(
            Edit(
                "readers.reset",
                '            Sql("DELETE FROM busrep_readers WHERE reader = ? AND epoch <> ?", (reader, epoch)),\n',
                '            Sql("DELETE FROM busrep_readers WHERE reader = ?", (reader,)),\n',
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_POSTGRES + "9_12_of_two_that_begin_anew_the_second_keeps_what_the_first_saved",
        ),
    ),
    Mutant(
        name="a-restore-raises-incarnations-by-one",
        rule="9.4",
        harm="After a restore a claim gives out the incarnation that a process from before it holds: both write.",
        edits=(
            Edit(
                "restored.body",
                '"UPDATE busrep_writers SET incarnation = ?, finished = 0", (above + 1,)',
                '"UPDATE busrep_writers SET incarnation = incarnation + 1 + 0 * ?, finished = 0", (above + 1,)',
            ),
            Edit("_win", "(writer, above + 1, won_by, above),", "(writer, above + 1, won_by, 0),"),
        ),
        checks=(STORES_POSTGRES + "restored_gives_no_incarnation_out_again",),
    ),
    Mutant(
        name="positions-of-several-logs-pass-for-one",
        rule="9.12",
        harm="A position that another process registered in the old log is taken for one of the new log.",
        edits=(
            Edit(
                "readers.load",
                "        epoch=MIXED if len(epochs) > 1 else next(iter(epochs), None),\n",
                "        epoch=min(epochs, default=None),\n",
            ),
        ),
        checks=(STORES_POSTGRES + "9_12_positions_of_several_logs_are_of_none",),
    ),
    Mutant(
        name="registering-does-not-wait-for-pruning",
        rule="9",
        harm="A reader that registers while its stream is pruned begins below the floor: it stops at once, for good.",
        edits=(
            Edit(
                "readers.register",
                "loading = yield (*_begin(dialect, positions), Sql(LOADING, (reader,)))\n",
                "loading = yield (Control.BEGIN, Sql(LOADING, (reader,)))\n",
            ),
        ),
        checks=(
            SIM_STORE + "the_simulation_answers_as_postgresql[a reader that registers waits for who prunes the stream]",
        ),
    ),
    Mutant(
        name="beginning-anew-does-not-wait-for-pruning",
        rule="9",
        harm="A restored log is pruned by positions that are just being replaced: their reader stops at the rows gone.",
        edits=(
            Edit(
                "readers.reset",
                "        yield _begin(dialect, positions)\n",
                "        yield Control.BEGIN\n",
            ),
        ),
        checks=(
            SIM_STORE
            + "the_simulation_answers_as_postgresql[a reader that begins anew waits for who prunes the stream]",
        ),
    ),
    Mutant(
        name="begun-at-a-floor-that-was",
        rule="9",
        harm="A reader is registered below a floor that moved since it looked: it stops there after a restart.",
        edits=(
            Edit(
                "readers.register",
                "        raised = _raised(positions, floors if here == epoch else {}, oldest)\n",
                "        raised = positions\n",
            ),
        ),
        checks=(STORES_POSTGRES + "a_reader_that_begins_at_the_oldest_row_begins_where_pruning_got_to",),
    ),
    Mutant(
        name="floors-of-another-log-believed",
        rule="9",
        harm="A reader that saves elsewhere begins at the floor of another log: rows are skipped without a word.",
        edits=(
            Edit(
                "readers.reset",
                "        raised = _without(_raised(positions, floors if here == epoch else {}, positions), loading)\n",
                "        raised = _without(_raised(positions, floors, positions), loading)\n",
            ),
        ),
        checks=(STORES_POSTGRES + "a_reader_that_begins_at_the_oldest_row_begins_where_pruning_got_to",),
    ),
    Mutant(
        name="begun-anew-at-a-floor-that-was",
        rule="9",
        harm="A reader of a restored log is registered below a floor that moved since it looked: it stops there.",
        edits=(
            Edit(
                "readers.reset",
                "        raised = _without(_raised(positions, floors if here == epoch else {}, positions), loading)\n",
                "        raised = _without(positions, loading)\n",
            ),
        ),
        checks=(STORES_POSTGRES + "a_reader_that_begins_at_the_oldest_row_begins_where_pruning_got_to",),
    ),
    Mutant(
        name="a-lagging-replica-s-epoch-replaces-the-log-s-own",
        rule="9.12",
        harm="A process that was told of the epoch before throws out what its twin has saved in this one: rows twice.",
        edits=(
            Edit(
                "readers.reset",
                "(beside_log or here in {row[1] for row in held})",
                "beside_log",
            ),
        ),
        checks=(STORES_POSTGRES + "9_12_positions_of_the_log_that_is_kept_here_are_replaced_by_none_of_another",),
    ),
    Mutant(
        name="registered-in-the-log-before-a-restore",
        rule="9.12",
        harm="A late request registers a reader in a log that is gone: its successor begins the restored one twice.",
        edits=(Edit("readers.register", "        if beside_log and here != epoch:", "        if False:"),),
        checks=(FOUND + "[a-registration-of-the-log-before-comes-late]",),
    ),
    Mutant(
        name="begun-anew-in-the-log-before-a-restore",
        rule="9.12",
        harm="The same, of a process that begins anew in a log that has been restored once more.",
        edits=(Edit("readers.reset", "(beside_log or here in ", "(here in "),),
        checks=(STORES_POSTGRES + "9_12_nobody_registers_in_the_log_before_a_restore",),
    ),
    Mutant(
        name="a-restore-does-not-wait-for-who-registers",
        rule="9.12",
        harm="Who begins in the restored log does not see a reader that is registering in the one before.",
        edits=(
            Edit(
                "restored.body",
                "Sql(LOCK_STREAM + dialect.exclusive, (stream,)) for stream in sorted(dialect.backings)",
                "Sql(LOCK_STREAM, (stream,)) for stream in sorted(dialect.backings)",
            ),
        ),
        checks=(STORES_POSTGRES + "9_12_a_restore_waits_for_who_registers",),
    ),
    Mutant(
        name="streams-locked-in-any-order",
        rule="9.12",
        harm="A reader that registers and 'db restored' wait for each other: the database ends one of them.",
        edits=(
            Edit(
                "readers._begin",
                "sorted({stream for stream, _ in positions})",
                "dict.fromkeys(stream for stream, _ in positions)",
            ),
        ),
        checks=(STORES_POSTGRES + "9_12_who_registers_waits_for_a_restore",),
    ),
    Mutant(
        name="a-joined-fact-s-lock-believed-to-be-there",
        rule="9.4",
        harm="A savepoint rolled back inside the block lets go of the claim: rows under an ID announced as empty.",
        edits=(
            Edit(
                "ServerTransaction.commit",
                "            await self._leave_to_caller()\n",
                "            await self._flush()\n",
            ),
        ),
        checks=(BUS + "a_savepoint_rolled_back_inside_the_block_does_not_let_go_of_the_claim",),
    ),
    Mutant(
        name="any-transaction-of-the-connection-will-do",
        rule="9.1",
        harm="Rows are inserted in another transaction than the one whose outcome decides of their fact.",
        edits=(
            Edit(
                "ServerTransaction._leave_to_caller",
                "        if (await self._lock())[0] != self.marker:\n",
                "        if (await self._lock())[0] is None:\n",
            ),
        ),
        checks=(BUS + "a_transaction_that_ends_inside_the_block_is_told",),
    ),
    Mutant(
        name="a-joined-fact-is-inserted-whoever-has-the-claim",
        rule="9.4",
        harm="A savepoint rolled back inside the block, and a successor: rows below the position that it began at.",
        edits=(
            Edit(
                "NameLocks.while_held",
                "WHERE current_setting('{_noted(held)}', true) = ? AND",
                "WHERE coalesce(true, current_setting('{_noted(held)}', true) = ?) AND",
            ),
        ),
        checks=(BUS + "a_savepoint_rolled_back_inside_the_block_does_not_let_go_of_the_claim",),
    ),
    Mutant(
        name="a-joined-fact-is-inserted-in-any-transaction",
        rule="9.1",
        harm="Rows are inserted in another transaction than the one whose outcome decides of their fact.",
        edits=(Edit("NameLocks.while_held", "true) = ? AND", "true) <> ? AND"),),
        checks=(BUS + "a_transaction_that_ends_inside_the_block_is_told",),
    ),
    Mutant(
        name="what-the-caller-sets-takes-the-disk-from-a-fact",
        rule="9.22",
        harm="With synchronous_commit = off a joined fact is announced, and a crash of the server takes it back.",
        edits=(Edit("NameLocks.while_held", " AND {self.durable} <> ''", ""),),
        checks=(JOINED + "9_22_what_the_caller_sets_does_not_take_the_disk_from_a_fact",),
    ),
    Mutant(
        name="a-transaction-holds-a-name-that-is-another-s",
        rule="9.5",
        harm="A fact of the caller's on a name that was finished: who wins it back waits for the caller, for ever.",
        edits=(
            Edit(
                "NameLocks.share_name",
                "WHEN NOT EXISTS ({stands.text}) THEN",
                "WHEN ? = '' AND ? = 0 THEN",
            ),
        ),
        checks=(JOINED + "9_5_a_name_that_was_finished_is_won_back_for_a_joined_fact",),
    ),
    Mutant(
        name="a-row-that-a-trigger-kept-out-is-passed-over",
        rule="9.1",
        harm="Of two facts one is written, and a trigger keeps the other one out: it is lost, and nobody is told.",
        edits=(
            Edit(
                "ServerTransaction._leave_to_caller",
                "                if all(written):\n",
                "                if any(written):\n",
            ),
        ),
        checks=(JOINED + "a_trigger_that_drops_the_rows_of_one_stream_is_told",),
    ),
    Mutant(
        name="rows-under-an-id-given-again-are-a-rolled-back-fact-s",
        rule="9.22",
        harm="After a crash a joined fact that was rolled back is published with the rows of who has its ID now.",
        edits=(Edit("facts.outcomes", "if state == ROLLED_BACK else", "if False else"),),
        checks=(JOINED + "9_22_of_a_transaction_that_was_rolled_back_no_row_is_its_own",),
    ),
    Mutant(
        name="a-transaction-that-a-crash-took-has-rows",
        rule="9.1",
        harm="The server has forgotten it, and given its ID again: the other fact's rows are published as its own.",
        edits=(
            Edit(
                "ServerStore.outcome",
                "            return {}\n",
                "            return await super().outcome(claim, None, facts_)\n",
            ),
        ),
        checks=(STORES_POSTGRES + "9_1_several_transactions_are_asked_after_at_once",),
    ),
    Mutant(
        name="the-id-of-a-joined-fact-is-another-round-trip",
        rule="9.4",
        harm="Three round trips for a fact in the caller's transaction, where two do.",
        edits=(
            Edit(
                "ServerTransaction._leave_to_caller",
                "                if all(written):\n",
                "                if all(written) and (await self._lock())[0] == self.marker:\n",
            ),
        ),
        checks=(JOINED + "a_joined_fact_costs_its_caller_two_round_trips",),
    ),
    Mutant(
        name="of-an-application-s-table-the-answer-is-believed",
        rule="9.4",
        harm="Rows that a trigger puts into another table are written twice, or a rule has the transaction fail.",
        edits=(
            Edit(
                "ServerTransaction._leave_to_caller",
                "held = [] if self._own else [",
                "held = [",
            ),
        ),
        checks=(
            JOINED + "rows_of_a_table_that_puts_them_elsewhere_are_written_once[by a trigger]",
            JOINED + "rows_of_a_table_that_puts_them_elsewhere_are_written_once[by a rule]",
        ),
    ),
    Mutant(
        name="a-row-that-busrep-s-table-did-not-take-is-a-fact-s",
        rule="9.1",
        harm="A trigger on busrep_facts keeps rows out: what the application told of is published to nobody.",
        edits=(
            Edit(
                "ServerTransaction._leave_to_caller",
                '        raise ConfigError("busrep_facts took no row: ',
                '        assert ("busrep_facts took no row: ',
            ),
        ),
        checks=(JOINED + "a_trigger_of_busrep_s_own_table_that_drops_rows_is_told",),
    ),
    Mutant(
        name="a-claim-not-seen-elsewhere-is-lost",
        rule="9.4",
        harm="One write with a connection of another database, and the process does not write any more.",
        edits=(
            Edit(
                "ServerTransaction._lock",
                "            if self._callers:\n                await self.store",
                "            if False:\n                await self.store",
            ),
        ),
        checks=(BUS + "a_connection_of_another_database_leaves_the_writer_alone",),
    ),
    Mutant(
        name="a-name-won-back-without-an-answer-is-another-s",
        rule="9.4",
        harm="A process that wins its name back, and gets no answer, takes it for another's: it never writes again.",
        edits=(Edit("_win", "    won_by = None if again is None else -again  # below", "    won_by = None  # below"),),
        checks=(
            WRITING + "a_name_won_back_without_an_answer_is_this_process_s_still[once]",
            SYNC_STORES + "a_name_is_won_back_only_while_it_is_nobody_else_s[sqlite]",
        ),
    ),
    Mutant(
        name="who-has-won-a-name-back-that-is-finished-is-forgotten",
        rule="9.5",
        harm="A process that wins its name back without an answer, and is silent then, never writes again.",
        edits=(Edit("fencing._note_winner", "finished < 0 ", "finished = 0 "),),
        checks=(
            WRITING + "a_name_won_back_without_an_answer_is_this_process_s_still[twice, and finished since]",
            SYNC_STORES + "a_name_that_was_won_back_without_an_answer_and_finished_is_won_back_still[sqlite]",
        ),
    ),
    Mutant(
        name="a-failover-forgets-who-has-won-a-name-back",
        rule="9.23",
        harm="A process that won its name back without an answer before a failover, which lost nothing, never writes.",
        edits=(Edit("_leave_out_ids", "                    _note_winner(writer),\n", ""),),
        checks=(FAILOVER + "a_name_won_without_an_answer_before_a_failover_is_its_own_still[False]",),
    ),
    Mutant(
        name="a-failover-fences-the-note-of-who-won-a-name-back",
        rule="9.23",
        harm="The same, where the name was finished once more before the failover.",
        edits=(Edit("_leave_out_ids", "if not writer.endswith(WON):", "if True:"),),
        checks=(FAILOVER + "a_name_won_without_an_answer_before_a_failover_is_its_own_still[True]",),
    ),
    Mutant(
        name="streams-are-not-given-up-behind-the-claim",
        rule="9.5",
        harm="A stream that a successor does not write stays registered: its last rows reach nobody.",
        edits=(Edit("_win", "sorted(registered.difference(backing.stream for backing in backings))", "()"),),
        checks=(
            BUS + "a_stream_that_a_writer_gave_up_while_its_predecessor_lives_is_not_lost",
            BUS + "the_last_rows_of_a_stream_that_a_writer_gave_up_are_not_lost[another with a table]",
        ),
    ),
    Mutant(
        name="streams-are-given-up-where-they-stand",
        rule="9.5",
        harm="The last rows of a stream that a successor does not write, never published, reach nobody.",
        edits=(
            Edit(
                "_give_up",
                "((yield from final_position(dialect, stream, writer, position)), *where)",
                "(position, *where)",
            ),
        ),
        checks=(BUS + "a_stream_that_a_writer_gave_up_while_its_predecessor_lives_is_not_lost",),
    ),
    Mutant(
        name="a-finish-and-a-restore-lock-rows-in-no-order",
        rule="9.5",
        harm="'db restored', or a noticed failover, meets a finish in a deadlock, and fails.",
        edits=(Edit("fencing._fence", "Sql(EPOCH.text + dialect.share)", 'Sql("SELECT 1")'),),
        checks=(STORES_POSTGRES + "9_5_a_finish_waits_for_a_restore_that_is_at_work",),
    ),
    Mutant(
        name="a-silent-writer-is-fenced-twice",
        rule="9.5",
        harm="Two readers finish a silent process one after the other: it cannot win its name back.",
        edits=(
            Edit(
                "fencing._fence",
                """\
            "WHERE writer = ? AND incarnation = ? AND coalesce(finished, -1) <> ?",
            (writer, incarnation, incarnation - 1),
""",
                """\
            "WHERE writer = ? AND incarnation = ?",
            (writer, incarnation),
""",
            ),
        ),
        checks=(SYNC_STORES + "a_name_is_won_back_though_it_was_finished_by_two[sqlite]",),
    ),
    Mutant(
        name="an-interrupted-thread-keeps-its-turn",
        rule="4",
        harm="On SQLite one Ctrl-C at the wrong moment, and the process never writes again.",
        edits=(
            Edit(
                "BlockingSqliteStore.write",
                "            holder.over = True  # an interrupt may come before `leave` begins\n",
                "",
            ),
        ),
        checks=(RACES + "on_sqlite_an_interrupted_thread_keeps_no_turn[False]",),
    ),
    Mutant(
        name="an-interrupted-thread-leaves-its-transaction",
        rule="9.15",
        harm="On SQLite an ID is reserved in what is left of a beat, and taken back with it: it is given out twice.",
        edits=(Edit("FileStore.writing", "return self._cleared(self.role(WRITE))", "return self.role(WRITE)"),),
        checks=(RACES + "on_sqlite_an_interrupted_thread_leaves_no_transaction",),
    ),
    Mutant(
        name="an-interrupted-thread-keeps-sqlite-s-write-lock",
        rule="9.1",
        harm="No other process can write until this one writes again, which it may never do.",
        edits=(
            Edit(
                "BlockingSqliteStore.write",
                "                with contextlib.suppress(BusrepError):\n                    self.writing()\n",
                "                pass\n",
            ),
        ),
        checks=(RACES + "on_sqlite_an_interrupted_thread_leaves_no_transaction",),
    ),
    Mutant(
        name="an-interrupted-thread-leaves-what-it-read",
        rule="9.1",
        harm="On SQLite the table is asked in the state before a fact: it was committed, and is told to be aborted.",
        edits=(Edit("FileStore.read", "self._cleared(connection)", "connection"),),
        checks=(SYNC_STORES + "sqlite_what_is_read_after_an_interrupt_is_of_now",),
    ),
    Mutant(
        name="a-connection-of-bytes-is-taken",
        rule="9.12",
        harm="On SQLite a save on a connection that gives bytes never ends well: another process moved it, it is told.",
        edits=(Edit("base.checked", 'made is not str and not isinstance(made(b""), str)', "False"),),
        checks=(STORES_SQLITE + "9_12_saved_in_the_callers_transaction",),
    ),
    Mutant(
        name="a-path-may-hold-a-nul",
        rule="4",
        harm="A URL with %00 ends in a traceback of the operating system's.",
        edits=(Edit("_FILES", "(?:(?!%00)[", "(?:["),),
        checks=("stores/test_stores.py::test_a_bad_url_says_which_forms_work[sqlite:///a%00b.db]",),
    ),
    Mutant(
        name="a-bootstrap-begins-while-rows-are-pruned",
        rule="9",
        harm="What follows a snapshot is pruned by a prune that had not seen its reader: the reader stops, loaded.",
        edits=(
            Edit(
                "begin_bootstrap.body",
                ", Sql(LOCK_STREAM + dialect.exclusive, (stream,)))\n",
                ",)\n",
            ),
        ),
        checks=(SNAPSHOTS_POSTGRES + "a_prune_that_began_before_the_bootstrap_ends_before_it",),
    ),
    Mutant(
        name="a-save-while-a-snapshot-is-loaded",
        rule="9.12",
        harm="A twin's rows are saved as handled, and the target is emptied of them: lost.",
        edits=(Edit("NO_BOOTSTRAP", "b.state NOT IN {LOADED} OR b.id <> v.begun", "b.id <> v.begun"),),
        checks=(STORES_POSTGRES + "9_12_no_position_moves_while_a_snapshot_is_loaded",),
    ),
    Mutant(
        name="a-save-of-what-was-handled-before-a-snapshot",
        rule="9.12",
        harm="The position is what it was, and the rows are gone: a twin loaded a snapshot between two saves. Lost.",
        edits=(Edit("NO_BOOTSTRAP", "b.state NOT IN {LOADED} OR b.id <> v.begun", "b.state NOT IN {LOADED}"),),
        checks=(STORES_POSTGRES + "9_12_no_position_moves_while_a_snapshot_is_loaded",),
    ),
    Mutant(
        name="a-twin-registers-while-a-bootstrap-begins",
        rule="9.12",
        harm="A writer's position that a twin made up stands among those of the snapshot: its rows are skipped.",
        edits=(
            Edit(
                "begin_bootstrap.body",
                "Sql(LOCK_STREAM + dialect.exclusive, (stream,)))\n",
                "Sql(LOCK_STREAM + dialect.share, (stream,)))\n",
            ),
        ),
        checks=(SNAPSHOTS_POSTGRES + "a_save_that_comes_while_a_bootstrap_begins_is_refused[READ COMMITTED]",),
    ),
    Mutant(
        name="a-bootstrap-begins-below-the-floor",
        rule="9",
        harm="A snapshot is loaded for hours, and at its end what follows it is gone: it begins anew.",
        edits=(Edit("check_begin", "        if floor > position:\n", "        if floor > position and not held:\n"),),
        checks=(SNAPSHOTS_STORE_SQLITE + "it_does_not_begin_when_what_follows_is_pruned",),
    ),
    Mutant(
        name="a-part-is-saved-wherever-it-is",
        rule="9.12",
        harm="Two processes under one name both apply a part, and both commit it.",
        edits=(
            Edit(
                "readers.save_bootstrap",
                "    if not answers[0]:\n        raise ReaderMoved(reader, stream, PARTS, step.parts)\n",
                "",
            ),
        ),
        checks=(SNAPSHOTS_STORE_SQLITE + "parts_are_saved_one_after_the_other",),
    ),
    Mutant(
        name="a-part-of-a-bootstrap-before-is-saved",
        rule="9.12",
        harm="Begun anew with the same snapshot, on a target emptied since: a part of before counts, and is lost.",
        edits=(
            Edit(
                "readers.save_bootstrap",
                "AND id = ? AND parts = ? RETURNING parts",
                "AND ? <> '' AND parts = ? RETURNING parts",
            ),
        ),
        checks=(SNAPSHOTS_STORE_SQLITE + "a_part_of_a_bootstrap_that_was_begun_anew_is_not_saved",),
    ),
    Mutant(
        name="a-part-without-its-pruned-rows",
        rule="9",
        harm="A bootstrap that goes on after a prune lacks rows, and nobody is told.",
        edits=(
            Edit(
                "check_part",
                "        if floor > max(part.after, agreement.floors.get(writer, 0)):\n",
                "        if floor > max(part.upto, agreement.floors.get(writer, 0)):\n",
            ),
        ),
        checks=(SNAPSHOTS_STORE_SQLITE + "of_what_is_pruned_meanwhile_only_the_parts_that_lost_rows_are_gone",),
    ),
    Mutant(
        name="a-snapshot-of-what-is-visible",
        rule="9.3",
        harm="Rows above the positions agreed are in the snapshot, and come once more by catch-up.",
        edits=(Edit("snapshots.spans", "min(part.upto, at)) for writer, at", "part.upto) for writer, at"),),
        checks=(SNAPSHOTS_STORE_SQLITE + "it_is_all_rows_at_its_positions",),
    ),
    Mutant(
        name="a-replica-that-lags-gives-a-snapshot",
        rule="9.9",
        harm="A part is loaded from a replica that does not have all of its rows yet.",
        edits=(Edit("snapshots._reached", "        if log.positions.get(writer, 0) < due:\n", "        if False:\n"),),
        checks=(SNAPSHOTS_POSTGRES + "a_replica_gives_what_it_has_proven",),
    ),
    Mutant(
        name="parts-of-other-states",
        rule="9",
        harm="A part is read in a later state than it was checked in: what was pruned is missing, and nobody told.",
        edits=(
            Edit(
                "snapshots.checked",
                "read_log(dialect, backing.stream, Control.SNAPSHOT)",
                "read_log(dialect, backing.stream, Control.BEGIN)",
            ),
        ),
        checks=(SNAPSHOTS_POSTGRES + "a_part_is_of_the_state_in_which_it_was_checked",),
    ),
    Mutant(
        name="a-row-with-a-line-break-is-two-rows",
        rule="9",
        harm="A row that somebody inserted with a line break in it reaches a reader of a snapshot as two rows.",
        edits=(Edit("text_of_lines", 'text.count("\\n") != len(rows)', "False"),),
        checks=(SNAPSHOTS_STORE_POSTGRES + "a_row_that_breaks_its_line_is_no_row",),
    ),
    Mutant(
        name="deleted-rows-are-not-the-newest",
        rule="6",
        harm="Rows that were pruned before a reader had them are not missed: what they invalidated stays trusted.",
        edits=(
            Edit(
                "claims.newest",
                "    rows = {writer: max(floor, highest or 0) for",
                "    rows = {writer: highest or 0 for",
            ),
        ),
        checks=(STORES_SQLITE + "the_newest_rows_of_all_writers",),
    ),
    Mutant(
        name="a-session-that-the-server-ended-is-a-bug",
        rule="4",
        harm="A reader stops for good when idle_in_transaction_session_timeout ends its session.",
        edits=(
            Edit("postgres.steps.translated", "operational=closed or lost", "operational=lost"),
            Edit("by_state", " or state in SESSION_ENDED:", ":"),
            Edit("ServerStore.run_on", "(Unavailable, StatementRefused) as error", "Unavailable as error"),
        ),
        checks=(SESSIONS_ENDED + "a_session_that_the_server_ended_is_an_outage",),
    ),
    Mutant(
        name="an-id-is-given-before-it-is-on-disk",
        rule="9.22",
        harm="An ID that failed is announced; after a crash a fact gets it again, and readers step over that.",
        edits=(
            Edit(
                "PostgresDialect.next_ids",
                "CASE WHEN pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn() ",
                "CASE WHEN false ",
            ),
        ),
        checks=(DURABILITY + "an_id_that_no_row_holds_is_on_disk_when_it_is_given",),
    ),
    Mutant(
        name="a-connection-that-was-closed-was-rolled-back",
        rule="9.1",
        harm="A block commits, closes its connection (as psycopg's `with` does) and fails: its rows count as none.",
        edits=(
            Edit(
                "ServerTransaction.rollback",
                "self.marker is None or not self._handed_out",
                "self.marker is None or closed or not self._handed_out",
            ),
        ),
        checks=(
            ENDED_INSIDE
            + "what_the_caller_committed_inside_is_published_though_the_block_fails[postgres_url-asyncio-closes it]",
            ENDED_INSIDE
            + "what_the_caller_committed_inside_is_published_though_the_block_fails[postgres_url-threads-closes it]",
        ),
    ),
    Mutant(
        name="facts-are-committed-asynchronously",
        rule="9.22",
        harm="After a crash readers are ahead of the table, and step over the rows that get the same IDs.",
        edits=(
            Edit(
                "lock_claim",
                'f"SELECT {dialect.marker}, {dialect.durable}{given}{noted} FROM busrep_writers "',
                "f\"SELECT {dialect.marker}, ''{given}{noted} FROM busrep_writers \"",
            ),
        ),
        checks=(
            SIMULATOR,
            DURABILITY + "no_fact_is_announced_that_a_crash_takes_back[own-0]",
            DURABILITY + "a_fact_s_transaction_is_durable[off-local]",
        ),
    ),
    Mutant(
        name="ids-are-given-asynchronously",
        rule="9.22",
        harm="After a crash the sequence gives IDs again that were announced as empty: readers step over their rows.",
        edits=(
            Edit(
                "PostgresDialect.next_ids",
                """sequence_name(stream)}\\"'), {self.durable}, \"
            "CASE WHEN pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn() "
            f"THEN pg_logical_emit_message(true, 'busrep', '') IS NULL ELSE false END{each}\"""",
                """sequence_name(stream)}\\"'){each}\"""",
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
        name="a-sequence-that-was-set-keeps-readers-from-saving",
        rule="9.17",
        harm="A reader that handles exactly once stops after ALTER SEQUENCE ... RESTART, until the stream's next ID.",
        edits=(Edit("readers.save", "highest, epoch, given)", "highest, epoch, {})"),),
        checks=(STORES_POSTGRES + "9_17_positions_are_saved_below_a_sequence_that_was_set_and_gave_no_id_since",),
    ),
    Mutant(
        name="a-reader-cannot-save-and-stops-before-the-failover-is-noted",
        rule="9.23",
        harm="A reader that saves between the promotion and the first claim stops for good, though all is well soon.",
        edits=(Edit("_note_given", "                if not here[0][1]:\n", "                if False:\n"),),
        checks=(FAILOVER + "another_timeline_fences_all_writers_until_they_claim_again",),
    ),
    Mutant(
        name="a-failover-fences-nobody-else",
        rule="9.23",
        harm="A writer uses IDs that it got of the new primary before others were left out: their rows are skipped.",
        edits=(
            Edit(
                "_leave_out_ids",
                "if not writer.endswith(WON):",
                "if writer.endswith(WON):",
            ),
        ),
        checks=(FAILOVER + "another_timeline_fences_all_writers_until_they_claim_again",),
    ),
    Mutant(
        name="two-failovers-leave-out-the-same-ids",
        rule="9.23",
        harm="A second standby that lacks what the first one committed gives the IDs again that were left out there.",
        edits=(
            Edit(
                "fencing._failovers",
                "max(1, min(int(later, 16) - int(timeline, 16), FAILOVERS)) if system == same else 1",
                "1",
            ),
        ),
        checks=(
            FAILOVER + "how_many_failovers_there_were",
            SIMULATION + "what_the_simulator_found_stays_mended[ids-left-out-by-a-failover-that-was-lost]",
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
        edits=(
            Edit(
                "leave_out_incarnations",
                "max(max(clock, int(highest)) + INCARNATIONS_LEFT_OUT, int(seconds * PER_SECOND) + DAY) + tie",
                "max(clock, int(highest))",
            ),
        ),
        checks=(FAILOVER + "a_claim_that_was_lost_does_not_pass_for_the_fence[failover]",),
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
        edits=(Edit("restored.body", "{dialect.server or no_server} WHERE", "{no_server} WHERE"),),
        checks=(
            FAILOVER + "a_restore_that_is_declared_notes_the_server_anew",
            SIMULATION + "what_the_simulator_found_stays_mended[failed-over-before-the-first-claim]",
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
        name="claims-that-a-failover-lost-may-be-above-later-ones",
        rule="9.11",
        harm="After a failover a writer's incarnations are lower: readers are deaf to its streams in memory for beats.",
        edits=(Edit("_leave_out_ids", "        yield from leave_out_incarnations(dialect, clock)\n", ""),),
        checks=(FAILOVER + "claims_behind_a_failover_are_above_those_that_it_lost",),
    ),
    Mutant(
        name="a-claim-ahead-that-was-lost-is-above-later-ones",
        rule="9.11",
        harm="Behind a restore or a failover claims are below one that was lost, of a machine whose clock is ahead.",
        edits=(Edit("leave_out_incarnations", " + DAY", ""),),
        checks=(
            FAILOVER + "claims_behind_a_failover_are_above_those_that_it_lost",
            STORES_SQLITE + "9_11_claims_behind_a_restore_are_above_those_that_it_lost",
        ),
    ),
    Mutant(
        name="as-many-incarnations-are-left-out-whatever-was-lost",
        rule="9.11",
        harm="A failover loses the note of the one before: two claims get one number, readers are deaf to the second.",
        edits=(Edit("leave_out_incarnations", "int(seconds * PER_SECOND) + DAY) + tie", "0)"),),
        checks=(
            FAILOVER + "incarnations_rise_whatever_is_taken_back",
            SIMULATION + "what_the_simulator_found_stays_mended[a-lost-incarnation-is-given-again]",
        ),
    ),
    Mutant(
        name="under-a-clock-set-back-as-many-incarnations-are-left-out",
        rule="9.11",
        harm="A restore takes a failover back: two processes have one name under one number, and readers are deaf.",
        edits=(Edit("leave_out_incarnations", " + DAY) + tie", " + DAY)"),),
        checks=(
            FAILOVER + "incarnations_rise_under_a_server_s_clock_that_was_set_back[failover]",
            FAILOVER + "incarnations_rise_under_a_server_s_clock_that_was_set_back[restore]",
            SIMULATION + "what_the_simulator_found_stays_mended[an-incarnation-is-given-again-under-a-clock-set-back]",
        ),
    ),
    Mutant(
        name="a-restore-fences-up-to-a-claim-that-it-lost",
        rule="9.11",
        harm="Whoever had that claim wins the name back, in another log than it reads: its own facts count nowhere.",
        edits=(
            Edit(
                "restored.body",
                '"UPDATE busrep_writers SET incarnation = ?, finished = 0", (above + 1,)',
                '"UPDATE busrep_writers SET incarnation = incarnation + 1 + 0 * ?, finished = 0", (above + 1,)',
            ),
        ),
        checks=(FAILOVER + "a_claim_that_was_lost_does_not_pass_for_the_fence[restore]",),
    ),
    Mutant(
        name="claims-that-a-restore-lost-may-be-above-later-ones",
        rule="9.11",
        harm="The same behind a restore.",
        edits=(
            Edit(
                "restored.body",
                "        above = yield from leave_out_incarnations(dialect, now)\n",
                "        above = now\n",
            ),
        ),
        checks=(
            STORES_SQLITE + "9_11_claims_behind_a_restore_are_above_those_that_it_lost",
            STORES_POSTGRES + "9_11_claims_behind_a_restore_are_above_those_that_it_lost",
        ),
    ),
    Mutant(
        name="a-declared-restore-is-a-failover-too",
        rule="9.23",
        harm="After 'db restored' the next claim fences all that have claimed since, and leaves out IDs.",
        edits=(
            Edit(
                "restored.body",
                '            Sql(f"UPDATE busrep_meta SET value = {dialect.server or no_server} '
                "WHERE key = 'server'\"),",
                "",
            ),
        ),
        checks=(FAILOVER + "a_restore_that_is_declared_notes_the_server_anew",),
    ),
    Mutant(
        name="a-caller-s-sqlite-connection-stays-as-it-is",
        rule="9.22",
        harm="A power cut takes back facts that were published in a caller's transaction with synchronous = NORMAL.",
        edits=(Edit("require_durable", "        if level >= FULL:\n            return\n", "        return\n"),),
        checks=(
            DURABILITY + "a_caller_s_sqlite_connection_is_made_durable[NORMAL]",
            DURABILITY + "a_caller_s_transaction_on_sqlite_that_may_be_lost_is_refused[NORMAL]",
        ),
    ),
    Mutant(
        name="a-reload-makes-a-fact-asynchronous",
        rule="9.22",
        harm="synchronous_commit = off comes by a reload between BEGIN and COMMIT: a crash takes the fact back.",
        edits=(
            Edit(
                "PostgresDialect",
                """\
        "set_config('synchronous_commit', "
        "coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'local'), true)"
""",
                """\
        "CASE WHEN current_setting('synchronous_commit') = 'off' "
        "THEN set_config('synchronous_commit', 'local', true) ELSE '' END"
""",
            ),
        ),
        checks=(DURABILITY + "a_reload_of_the_configuration_inside_a_fact_leaves_it_durable",),
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
            DURABLE_POSITIONS + "no_position_is_saved_that_a_crash_takes_back",
        ),
    ),
    Mutant(
        name="a-bootstrap-is-begun-asynchronously",
        rule="9.22",
        harm="After a crash a reader goes on from its old positions, over a target that was emptied for a snapshot.",
        edits=(Edit("begin_bootstrap.body", "(*begin_durably(dialect), ", "(Control.BEGIN, "),),
        checks=(DURABLE_POSITIONS + "what_a_reader_began_outlives_a_crash[a bootstrap]",),
    ),
    Mutant(
        name="readers-are-registered-asynchronously",
        rule="9.22",
        harm="After a crash a reader that began with the newest rows begins anew: it misses those in between.",
        edits=(Edit("readers._begin", "(*begin_durably(dialect), ", "(Control.BEGIN, "),),
        checks=(
            DURABLE_POSITIONS + "what_a_reader_began_outlives_a_crash[reading]",
            DURABLE_POSITIONS + "what_a_reader_began_outlives_a_crash[reading anew]",
        ),
    ),
    Mutant(
        name="whatever-is-raised-at-commit-is-a-refusal",
        rule="9.1",
        harm="A handler of notifications on the caller's connection raises: a committed fact is announced as empty.",
        edits=(
            Edit(
                "ServerTransaction.commit",
                "            if isinstance(error, BusrepError) and not connection",
                "            if not connection",
            ),
        ),
        checks=(DRIVER_ERRORS + "an_error_of_the_application_s_at_commit_is_no_refusal[asyncio]",),
    ),
    Mutant(
        name="a-replica-decides-what-became-of-a-fact",
        rule="9.1",
        harm="store= leads to a lagging replica for a moment: a committed fact is announced as empty.",
        edits=(
            Edit("claims.check_answered", "    if replica[0][0]:\n        raise Unav", "    if 0:\n        raise Unav"),
        ),
        checks=(
            SIM_STORE + "9_9_a_replica_lags_never_goes_back_and_is_not_written",
            REPLICA + "9_1_a_replica_does_not_tell_what_became_of_a_fact",
        ),
    ),
    Mutant(
        name="a-transaction-ended-inside-the-block-goes-unnoticed",
        rule="9.4",
        harm="Code inside the block commits: a row is written without the claim, under a name that somebody else has.",
        edits=(
            Edit("ServerTransaction._commit_checked", "= not self.connection.closed and self._idle()", "= False"),
            Edit("ServerTransaction._commit_checked", "if self._handed_out and", "if False and"),
            Edit(
                "SqliteTransaction.commit",
                "        if not files.in_transaction(self.connection) or (",
                "        if (",
            ),
        ),
        checks=(
            DRIVER_ERRORS + "a_transaction_that_is_ended_inside_the_block[sqlite-asyncio-ours]",
            DRIVER_ERRORS + "a_transaction_that_is_ended_inside_the_block[postgres-asyncio-ours]",
            DRIVER_ERRORS + "a_transaction_that_is_ended_inside_the_block[postgres-threads-the caller's]",
        ),
    ),
    Mutant(
        name="another-transaction-of-the-caller-s-connection-is-ours",
        rule="9.4",
        harm="The driver begins another transaction after one that was ended inside the block: rows without the claim.",
        edits=(
            Edit(
                "ServerTransaction._commit_checked",
                "if self._handed_out and",
                "if False and",
            ),
            Edit("last_steps", "    if again:  # a tr", "    if False:  # a tr"),
        ),
        checks=(
            DRIVER_ERRORS + "a_transaction_that_is_ended_inside_the_block[postgres-asyncio-the caller's, and another]",
            DRIVER_ERRORS + "a_transaction_that_is_ended_inside_the_block[sqlite-asyncio-the caller's, and another]",
            DRIVER_ERRORS + "a_transaction_that_is_ended_inside_the_block[sqlite-threads-the caller's, and another]",
        ),
    ),
    Mutant(
        name="another-transaction-on-busrep-s-connection-is-the-fact-s",
        rule="9.4",
        harm="A block sends COMMIT and BEGIN, and ends well: its rows go in without the claim, below a successor's.",
        edits=(
            Edit(
                "ServerTransaction._commit_checked",
                "if self._handed_out and",
                "if self._callers and",
            ),
            Edit("base.SqliteTransaction.commit", "again=self._handed_out", "again=self._callers"),
        ),
        checks=(
            DRIVER_ERRORS + "a_transaction_that_is_ended_inside_the_block[postgres-asyncio-ours, and another]",
            DRIVER_ERRORS + "a_transaction_that_is_ended_inside_the_block[sqlite-asyncio-ours, and another]",
            DRIVER_ERRORS + "a_transaction_that_is_ended_inside_the_block[sqlite-threads-ours, and another]",
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
            ENDED_INSIDE + "what_the_caller_rolled_back_inside_is_not_published[asyncio]",
            ENDED_INSIDE + "what_the_caller_rolled_back_inside_is_not_published[threads]",
            ENDED_INSIDE + "a_joined_transaction_that_was_rolled_back_inside_is_refused",
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
        checks=(ENDED_INSIDE + "no_row_is_written_in_a_joined_transaction_whose_name_has_a_successor",),
    ),
    Mutant(
        name="a-doubt-waits-for-the-turn-to-write",
        rule="9.28",
        harm="A thread's long block on SQLite keeps a doubt, and all that is committed behind it, from the readers.",
        edits=(Edit("BlockingSqliteStore.write_appended", "            group.settled = True\n", "            pass\n"),),
        checks=("sync/test_writing.py::test_a_doubt_is_settled_while_another_thread_has_the_turn_to_write",),
    ),
    Mutant(
        name="a-connection-that-was-ended-is-used",
        rule="9.26",
        harm="A server is restarted: a group of facts, written by nobody, is in doubt for all who wrote them.",
        edits=(Edit("PostgresStore._take", "                if alive(connection):\n", "                if True:\n"),),
        checks=(SESSIONS_ENDED + "an_append_takes_no_connection_that_the_server_has_ended",),
    ),
    Mutant(
        name="begin-waits-for-its-answer-for-ever",
        rule="9.1",
        harm="A pooled connection at whose other end is nobody: write() hangs with its IDs open.",
        edits=(
            Edit(
                "ServerTransaction._lock",
                "self._run(self.hold(*begin, ids=ids), self._lock_wait)",
                "self._run(self.hold(*begin, ids=ids))",
            ),
        ),
        checks=(SESSIONS_ENDED + "a_fact_s_begin_has_a_deadline",),
    ),
    Mutant(
        name="back-on-the-noted-server-nobody-writes",
        rule="9.23",
        harm="The server that was noted is back before a failover was done: every claim is refused, for good.",
        edits=(Edit("_choose_ids", "now != home.server or home.successor:", "now != home.server:"),),
        checks=(FAILOVER + "back_on_the_noted_server_before_the_failover_was_done",),
    ),
    Mutant(
        name="row-classes-are-not-compared",
        rule="3",
        harm="A class with another order of fields fills the wrong fields of each row, without a word.",
        edits=(Edit("schema.check", "    if streams:\n        stored =", "    if False:\n        stored ="),),
        checks=(
            ROW_SHAPES + "open_refuses_another_class_and_takes_a_rolling_upgrade[sqlite]",
            ROW_SHAPES + "buses_of_both_runtimes_refuse_another_class[sqlite_url]",
        ),
    ),
    Mutant(
        name="a-writer-does-not-keep-its-fields",
        rule="3",
        harm="Two writers add different fields in the same place, and readers take one for the other.",
        edits=(Edit("claims.claim", "    yield from record_fields(dialect, backings)\n", ""),),
        checks=(ROW_SHAPES + "a_writer_keeps_its_fields_before_its_first_row[sqlite]",),
    ),
    Mutant(
        name="sqlite-takes-a-misspelt-column-for-a-text",
        rule="1",
        harm="A misspelt column passes 'db init'; a reader gets the column's name as its value.",
        edits=(Edit("schema.check_columns", "    if not missing:\n        try:", "    if True:\n        try:"),),
        checks=(STREAMS + "a_misspelt_column_is_an_error_of_db_init[sqlite-wrong]",),
    ),
    Mutant(
        name="a-plans-own-error-drags-the-drivers-along",
        rule="1",
        harm="A ConfigError that says all is buried under two tracebacks of the driver.",
        edits=(
            Edit(
                "run_async",
                "                problem = error\n            # Not while it is being handled here: it would be the "
                "context of all that the plan raises by itself.\n            try:\n"
                "                steps = plan.send(answers) if problem is None else plan.throw(problem)\n"
                "            finally:\n                problem = None  # its traceback leads to this frame\n",
                "                steps = plan.throw(error)\n"
                "            else:\n                steps = plan.send(answers)\n",
            ),
        ),
        checks=(CONFIG_ERRORS + "an_error_that_a_plan_raises_itself_has_no_context",),
    ),
    Mutant(
        name="what-libpq-says-is-quoted",
        rule="2",
        harm="libpq quotes what it could not read, and the chain of errors keeps it for whatever reports errors.",
        edits=(
            Edit(
                "_parameters",
                '    check_url(url, "the PostgreSQL URL", FORM)\n    try:\n'
                "        return dict(psycopg.conninfo.conninfo_to_dict(url))\n",
                "    try:\n        return dict(psycopg.conninfo.conninfo_to_dict(url))\n"
                "    except ZeroDivisionError:\n        pass\n",
            ),
            Edit("split_store_url", '    check_url(url, "the store URL", FORMS)\n', ""),
        ),
        checks=(SECRETS + "no_entry_shows_a_password[8-store_asyncio]",),
    ),
    Mutant(
        name="sqlite-makes-its-own-file",
        rule="4",
        harm="Every user of the machine can read the table, and what is in it but not yet in the file: -wal.",
        edits=(Edit("sqlite.files.connect", "            create_file(path)  # SQLite", "            ...  # SQLite"),),
        checks=(
            PRIVATE_FILES + "a_table_in_sqlite[umask-022]",
            PRIVATE_FILES + "a_table_in_sqlite_of_threads[umask-022]",
        ),
    ),
    Mutant(
        name="a-policy-may-hide-rows-of-a-page",
        rule="9.9",
        harm="Row-level security hides rows from a reader: a page without them passes for all rows, which are lost.",
        edits=(Edit("postgres.dialect", "SET LOCAL row_security = off", "SET LOCAL row_security = on"),),
        checks=(RIGHTS + "rows_that_a_policy_hides_are_not_taken_for_rows_that_are_not_there[later]",),
    ),
    Mutant(
        name="a-policy-may-hide-rows-of-an-own-table",
        rule="9.9",
        harm="A writer that does not see the rows of its table announces what it committed as empty.",
        edits=(Edit("PostgresDialect.check_visible", "to_regclass(value)", "to_regclass('busrep_facts')"),),
        checks=(RIGHTS + "rows_of_an_own_table_that_a_policy_hides",),
    ),
    Mutant(
        name="sqlite-takes-what-does-not-come-back",
        rule="9.9",
        harm="A reader that catches up from an own table gets a text for a list, and a number for a bool.",
        edits=(Edit("_stored_row", "if not _comes_back(value, kind):", "if False:"),),
        checks=(STORE_EDGES + "what_would_not_come_back_from_an_own_table_in_sqlite_is_refused[None-True]",),
    ),
    Mutant(
        name="a-number-is-a-bool-that-came-back",
        rule="9.9",
        harm="A 1 in a field of bools is published as 1, and caught up with as true.",
        edits=(Edit("_comes_back", "type(back) is type(value) and ", ""),),
        checks=(STORE_EDGES + "what_would_not_come_back_from_an_own_table_in_sqlite_is_refused[Switch-1]",),
    ),
    Mutant(
        name="sqlite-opens-fields-it-does-not-tell-apart",
        rule="9.9",
        harm="A field of text or a list is found out with the first list that is written: in production.",
        edits=(Edit("FileStore.__init__", "check_fields(backing, backing.definition.fields or ())", "pass"),),
        checks=(STORE_EDGES + "a_field_of_which_sqlite_does_not_tell_the_type_is_refused_at_once[str | list[str]]",),
    ),
    Mutant(
        name="a-reader-without-the-row-class-reads-texts-for-lists",
        rule="9.9",
        harm="Its rows are others than the writer's: it gets lists live, and their text when it catches up.",
        edits=(Edit("FileStore.open", "kept[name].fields if name in kept else None", "None"),),
        checks=(STORE_EDGES + "a_process_that_would_get_text_for_a_list_is_refused[None]",),
    ),
    Mutant(
        name="init-makes-sequences-in-any-schema",
        rule="9.15",
        harm="'db init' under another search_path makes a second sequence: two writers get the same IDs.",
        edits=(Edit("schema.init", "        yield from dialect.check_schema()\n", ""),),
        checks=(SERVER_SETTINGS + "init_makes_nothing_in_another_schema_than_that_of_the_tables",),
    ),
    Mutant(
        name="a-second-sequence-is-taken-for-the-stream-s",
        rule="9.15",
        harm="A stream has two sequences, and search_path decides which one gives the IDs: two facts get the same.",
        edits=(Edit("PostgresDialect.check_visible", "s.relnamespace <> n.oid", "s.relnamespace = 0"),),
        checks=(SERVER_SETTINGS + "a_second_sequence_of_a_stream_is_refused",),
    ),
    Mutant(
        name="the-database-s-encoding-is-the-store-s",
        rule="9",
        harm="A role or database is set to LATIN1: facts are refused that have other characters; or to none: no claim.",
        edits=(Edit("postgres.store", ', "client_encoding": "utf8"}', "}"),),
        checks=(SERVER_SETTINGS + "text_is_kept_whatever_client_encoding_is_set[LATIN1-threads]",),
    ),
    Mutant(
        name="a-statement-is-utf-8-on-any-connection",
        rule="9",
        harm="On a connection of the caller's in LATIN1 what the application writes is stored as other text.",
        edits=(Edit("PostgresTransaction._execute", "encode(self.connection.info.encoding)", "encode()"),),
        checks=(SERVER_SETTINGS + "the_application_s_statement_is_in_the_encoding_of_its_connection",),
    ),
    Mutant(
        name="text-may-come-as-bytes",
        rule="9",
        harm="On a connection of the caller's in SQL_ASCII a claim, or a saved position, is never what it should be.",
        edits=(Edit("PostgresStore.checked", '.encoding == "ascii"', '.encoding == ""'),),
        checks=(SERVER_SETTINGS + "the_application_s_statement_is_in_the_encoding_of_its_connection",),
    ),
    Mutant(
        name="init-takes-the-lock-of-a-stream-away",
        rule="9.12",
        harm="While 'db init' is at work a reader registers during a prune: rows go that it is about to ask for.",
        edits=(
            Edit(
                "schema.init",
                "            yield dialect.create_sequence(stream), Sql(",
                "            yield dialect.create_sequence(stream)\n"
                '            yield Sql("DELETE FROM busrep_streams WHERE stream = ?", (stream,)), Sql(',
            ),
        ),
        checks=(STORES_POSTGRES + "9_12_who_waits_for_a_stream_s_lock_has_it_when_init_is_through",),
    ),
    Mutant(
        name="a-number-is-read-as-it-is-set",
        rule="9.9",
        harm="extra_float_digits is set to 0: catch-up from an own table gives other numbers than the live rows.",
        edits=(Edit("PostgresDialect.picked", "'extra_float_digits', '1'", "'extra_float_digits', '0'"),),
        checks=(SERVER_SETTINGS + "numbers_of_an_own_table_are_read_in_full",),
    ),
    Mutant(
        name="nobody-looks-after-the-wal-file",
        rule="4",
        harm="The -wal file was deleted: facts are committed to a file that nobody else has, and published.",
        edits=(Edit("FileStore.open", "wal_of(self.path)", "self.path + '-none'"),),
        checks=(STORES_SQLITE + "nothing_is_written_to_a_file_that_is_gone[-wal-file]",),
    ),
    Mutant(
        name="the-wal-file-of-a-link-is-beside-the-link",
        rule="4",
        harm="The same, of a store that was opened by a symbolic link.",
        edits=(Edit("wal_of", "os.path.realpath(path)", "path"),),
        checks=(STORES_SQLITE + "nothing_is_written_to_a_file_that_is_gone[-wal-link]",),
    ),
    Mutant(
        name="a-log-is-looked-at-while-its-folder-is-young",
        rule="4",
        harm="The -wal file was deleted or replaced: facts are committed to one that nobody else has, and published.",
        edits=(Edit("FileStore.check_file", " and names == self._names", ""),),
        checks=(
            STORES_SQLITE + "a_log_is_not_asked_after_while_its_folder_is_as_it_was[deleted]",
            STORES_SQLITE + "a_log_is_not_asked_after_while_its_folder_is_as_it_was[replaced]",
        ),
    ),
    Mutant(
        name="a-folder-is-known-by-itself",
        rule="4",
        harm="The same.",
        edits=(Edit("names_in", ", found.st_ctime_ns", ", 0"),),
        checks=(STORES_SQLITE + "a_log_is_not_asked_after_while_its_folder_is_as_it_was[replaced]",),
    ),
    Mutant(
        name="two-changes-of-a-folder-have-one-time",
        rule="4",
        harm="The same, where the times of a file system are coarse, or the two changes come within one tick.",
        edits=(Edit("names_in", "time.time() - found.st_ctime > COARSEST", "True"),),
        checks=(STORES_SQLITE + "what_was_changed_just_now_may_be_changed_once_more_at_the_same_time",),
    ),
    Mutant(
        name="init-opens-a-file-that-is-there",
        rule="4",
        harm="Closing it drops the locks of the process: another deletes the -wal file that this one goes on writing.",
        edits=(Edit("create_file", "os.O_RDONLY | os.O_EXCL", "os.O_RDONLY"),),
        checks=(PRIVATE_FILES + "init_leaves_the_locks_of_a_connection_that_this_process_has[umask-022]",),
    ),
    Mutant(
        name="positions-above-the-sequence-are-stored",
        rule="9.17",
        harm="A position that no sequence reaches is stored: writers refuse to start until 'busrep db restored'.",
        edits=(
            Edit(
                "claims.heartbeat",
                "        stored = bounded(positions, sequences)\n",
                "        stored = dict(positions)\n",
            ),
        ),
        checks=(
            STORES_SQLITE + "9_17_no_position_above_the_sequence_is_stored",
            STORES_POSTGRES + "9_17_no_position_above_the_sequence_is_stored",
        ),
    ),
    Mutant(
        name="a-page-proves-whatever-was-asked",
        rule="9.17",
        harm="A reader that asks for a page up to a forged position is blind for all rows below it, over restarts.",
        edits=(
            Edit(
                "facts.fetch",
                "        proven = max(after, min(upto, position if replica else given))\n",
                "        proven = max(after, min(upto, position if replica else upto))\n",
            ),
        ),
        checks=(
            STORES_SQLITE + "9_17_a_page_proves_no_more_than_the_sequence",
            STORES_POSTGRES + "9_17_a_page_proves_no_more_than_the_sequence",
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
            STORES_SQLITE + "9_17_no_reader_s_position_above_the_sequence_is_saved",
            STORES_POSTGRES + "9_17_no_reader_s_position_above_the_sequence_is_saved",
            TRUST + "9_17_a_reader_that_is_above_the_sequence_goes_back_to_what_is_saved",
        ),
    ),
    Mutant(
        name="a-driver-s-error-leaves-the-store",
        rule="9.20",
        harm="close() raises psycopg.DataError, which an application that catches BusrepError does not expect.",
        edits=(Edit("by_state", '    return StatementRefused("PostgreSQL", error)\n', "    return error\n"),),
        checks=(SAVING_REFUSED + "only_busrep_s_errors_leave_a_store",),
    ),
    Mutant(
        name="sqlite3-s-error-leaves-the-store",
        rule="9.20",
        harm="What catches BusrepError does not expect it: a damaged file ends the process with a traceback.",
        edits=(Edit("sqlite.files.translated", "    return StatementRefused(where, error)\n", "    return error\n"),),
        checks=(
            DRIVER_ERRORS + "no_value_makes_a_driver_s_error_leave_a_store[sqlite-asyncio]",
            DRIVER_ERRORS + "a_file_that_is_damaged_full_or_read_only[threads]",
        ),
    ),
    Mutant(
        name="python-s-own-error-leaves-the-store",
        rule="9.20",
        harm="An integer above 64 bits raises OverflowError through the API, text without UTF-8 UnicodeEncodeError.",
        edits=(
            Edit(
                "sqlite.files.DRIVER_ERRORS", "(sqlite3.Error, OverflowError, UnicodeEncodeError)", "(sqlite3.Error,)"
            ),
            Edit("postgres.steps.DRIVER_ERRORS", "(psycopg.Error, UnicodeEncodeError)", "(psycopg.Error,)"),
        ),
        checks=(
            DRIVER_ERRORS + "no_value_makes_a_driver_s_error_leave_a_store[sqlite-threads]",
            DRIVER_ERRORS + "no_value_makes_a_driver_s_error_leave_a_store[postgres-asyncio]",
            DRIVER_ERRORS + "no_value_makes_a_driver_s_error_leave_a_store[postgres-threads]",
        ),
    ),
    Mutant(
        name="the-caller-s-own-error-is-wrapped",
        rule="9.20",
        harm="An application that expects sqlite3.IntegrityError of its own statement does not catch it.",
        edits=(
            Edit(
                "files.callers",
                "        raise (refused.reason if",
                "        raise refused if True else (refused.reason if",
            ),
        ),
        checks=(
            DRIVER_ERRORS + "the_caller_s_own_statement_raises_the_driver_s_error[sqlite-asyncio]",
            DRIVER_ERRORS + "the_caller_s_own_statement_raises_the_driver_s_error[sqlite-threads]",
        ),
    ),
    Mutant(
        name="a-limit-of-the-server-is-an-outage",
        rule="9.20",
        harm="A value too large for an index is tried again for ever, as if the server were away.",
        edits=(Edit("postgres.steps.translated", "        lost = False\n", "        pass\n"),),
        checks=(SESSIONS_ENDED + "any_error_that_closes_the_connection_is_an_outage",),
    ),
    Mutant(
        name="a-write-waits-for-a-store-that-is-gone",
        rule="9.20",
        harm="RuntimeError leaves the API when a bus on SQLite is closed while a write waits for its turn.",
        edits=(
            Edit(
                "SqliteStore.write",
                "        holder = Holder()\n",
                "        holder, connection = Holder(), self.writing()\n",
            ),
            Edit(
                "SqliteStore.write",
                "            connection = self.writing()  # only now: it may have been closed meanwhile\n",
                "",
            ),
        ),
        checks=(DRIVER_ERRORS + "a_store_that_is_closed_while_a_write_waits",),
    ),
    Mutant(
        name="writers-are-of-whatever-log-answers",
        rule="9",
        harm="Of several replicas one lags behind a restore: rows of the new log below its floors are left out.",
        edits=(Edit("claims.known", "    if epoch not in (None, found):\n", "    if False:\n"),),
        checks=(
            STORES_SQLITE + "writers_and_sequences_of_another_log_are_not_told",
            STORES_POSTGRES + "writers_and_sequences_of_another_log_are_not_told",
        ),
    ),
    Mutant(
        name="a-sequence-is-of-whatever-log-answers",
        rule="9.17",
        harm="Positions of a log are judged by a sequence of the log before.",
        edits=(Edit("claims.sequence", "    other = epoch not in (None, answers[2][0][0])\n", "    other = False\n"),),
        checks=(
            STORES_SQLITE + "writers_and_sequences_of_another_log_are_not_told",
            STORES_POSTGRES + "writers_and_sequences_of_another_log_are_not_told",
        ),
    ),
    Mutant(
        name="an-id-is-given-without-a-look-at-the-claim",
        rule="9.26",
        harm="A writer that was finished reads an ID that will never be written, and stores it.",
        edits=(Edit("facts.reserve", "    if held is not None and claims == [[]]:\n", "    if False:\n"),),
        checks=(
            APPENDING + "9_26_a_fact_begins_under_a_name_that_is_its_writer_s[deployment]",
            APPENDING + "9_26_a_fact_begins_under_a_name_that_is_its_writer_s[on_postgres]",
        ),
    ),
    Mutant(
        name="statements-are-prepared",
        rule="9.1",
        harm="Behind PgBouncer a question is answered by another client's statement: IDs of another stream.",
        edits=(Edit("OPTIONS", ', "prepare_threshold": None', ""),),
        checks=(
            "stores/test_pgbouncer.py::test_a_session_is_left_as_it_was_found[asyncio]",
            "stores/test_pgbouncer.py::test_a_session_is_left_as_it_was_found[threads]",
        ),
    ),
    Mutant(
        name="statements-are-prepared-in-a-pooler-s-session",
        rule="9.1",
        harm="Behind PgBouncer each second fact fails: its statement was prepared in another session.",
        edits=(Edit("Prepared.prepare", "process != self._process", "process < 0"),),
        checks=(
            "stores/test_pgbouncer.py::test_a_session_is_left_as_it_was_found[asyncio]",
            "stores/test_pgbouncer.py::test_a_session_is_left_as_it_was_found[threads]",
        ),
    ),
    Mutant(
        name="the-name-of-a-statement-that-was-refused-is-used-again",
        rule="9.1",
        harm="After a cancelled question the server has a statement of that name already: each further question fails.",
        edits=(Edit("Prepared.prepare", "next(self._numbers)", "len(self._calls) + 1"),),
        checks=(PREPARED + "what_the_server_refused_to_prepare_is_executed_as_it_is_and_its_name_is_not_used_again",),
    ),
    Mutant(
        name="a-second-connection-takes-turns-with-the-first",
        rule="9",
        harm="An idle process keeps two connections for ever, where it needs one.",
        edits=(Edit("PostgresStore._take", '["pool_available"] < 2', '["pool_available"] < 1'),),
        checks=("test_costs.py::test_questions_one_behind_the_other_keep_one_connection",),
    ),
    Mutant(
        name="a-prepared-statement-that-is-gone-is-the-question-s-fault",
        rule="9.1",
        harm="A fact is refused for good, though it can be written without a prepared statement.",
        edits=(Edit("postgres.steps.execute_steps", "closed=True", "closed=connection.closed"),),
        checks=(PREPARED + "a_session_that_somebody_else_uses_costs_one_question[DEALLOCATE ALL]",),
    ),
    Mutant(
        name="a-prepared-statement-that-is-gone-is-asked-for-for-ever",
        rule="9.1",
        harm="Where somebody else uses the session all further facts of the process fail.",
        edits=(Edit("postgres.steps.execute_steps", "            prepared.give_up()", "            pass"),),
        checks=(PREPARED + "a_session_that_somebody_else_uses_costs_one_question[DISCARD ALL]",),
    ),
    Mutant(
        name="all-processes-give-their-statements-the-same-names",
        rule="9.1",
        harm="Where two processes share a session a question for IDs is answered from another stream's sequence.",
        edits=(Edit("Prepared.__init__", "secrets.token_hex(4)", '"0"'),),
        checks=(PREPARED + "nobody_else_has_these_names",),
    ),
    Mutant(
        name="a-connection-that-prepares-nothing-prepares",
        rule="9.1",
        harm="The application's transaction fails behind a pooler, or another client's statement is executed in it.",
        edits=(Edit("postgres.steps._cursor", " and not issubclass(connection.cursor_factory, QUOTING)", ""),),
        checks=(PREPARED + "on_the_caller_s_connection_the_driver_prepares_as_it_is_set_up[5-ClientCursor]",),
    ),
    Mutant(
        name="without-an-answer-to-prepare-a-fact-is-in-doubt",
        rule="9.26",
        harm="A fact that was never sent passes for one that may be written: nobody may write it again.",
        edits=(Edit("PostgresStore._prepare", "raise Unavailable(self.where, error.reason) from error", "raise"),),
        checks=(PREPARED + "without_an_answer_to_prepare_nothing_is_in_doubt",),
    ),
    Mutant(
        name="a-snapshot-begins-in-a-pooler-s-session",
        rule="9.3",
        harm="A slot for snapshots stays locked when the reader has long gone: no reader can bootstrap any more.",
        edits=(Edit("SWITCHED_OFF", " AND pg_backend_pid() = ?", " AND 0 < ?"),),
        checks=("stores/test_pgbouncer.py::test_a_snapshot_is_refused_where_the_session_is_another",),
    ),
    Mutant(
        name="a-load-that-failed-takes-the-limit-along",
        rule="9",
        harm="Where loads fail, as on a slow database, any number of readers load snapshots at a time.",
        edits=(
            Edit(
                "PostgresSnapshots.load",
                "            if agreement.id in self._connections and agreement.id not in self._slots:\n",
                "            if False:\n",
            ),
        ),
        checks=("stores/test_snapshots_postgres.py::test_loads_that_fail_leave_the_limit_where_it_is",),
    ),
    Mutant(
        name="rows-are-appended-whoever-has-the-claim",
        rule="9.26",
        harm="A writer that was finished writes rows below a position that was announced for it: lost.",
        edits=(
            Edit("PostgresDialect.hold", "WHEN count(*) = 1 THEN", "WHEN count(*) < 2 THEN"),
            Edit(
                "appending._append_held",
                "if not (yield (Control.BEGIN, *locks))[-1]:",
                "if (yield (Control.BEGIN, *locks)) is None:",
            ),
        ),
        checks=(
            SIMULATOR,
            STORES_SQLITE + "9_26_rows_are_appended_while_the_claim_stands",
            STORES_POSTGRES + "9_26_rows_are_appended_while_the_claim_stands",
        ),
    ),
    Mutant(
        name="an-append-that-wrote-nothing-was-one",
        rule="9.26",
        harm="A fact whose writer was finished meanwhile is published, and is in no table.",
        edits=(
            Edit(
                "appending.append",
                "        if NOT_HELD not in str(refused):\n            raise\n",
                "        return None\n",
            ),
        ),
        checks=(SIMULATOR, STORES_SQLITE + "9_26_rows_are_appended_while_the_claim_stands"),
    ),
    Mutant(
        name="a-series-goes-on-after-a-lost-answer",
        rule="9.26",
        harm="The request is under way still: it is executed after the table has told that nothing is there.",
        edits=(Edit("appending.end_series", "series + 1, claim.writer", "series, claim.writer"),),
        checks=(SIMULATOR, APPENDING + "9_26_of_what_got_no_answer_the_table_decides[deployment-not written]"),
    ),
    Mutant(
        name="a-series-ends-beside-what-is-being-written",
        rule="9.26",
        harm="The request is being executed: it commits after the table has told that nothing is there.",
        edits=(Edit("appending.end_series", "exclusive=True", "exclusive=False"),),
        checks=(SIMULATOR, APPENDING + "9_26_a_series_ends_when_nothing_of_it_is_being_written"),
    ),
    Mutant(
        name="what-was-sent-in-a-former-series-counts",
        rule="9.26",
        harm="A fact is published, and is in no table: its rows were sent in a series that had ended.",
        edits=(Edit("PlannedStore.write_appended", "            if found is None:\n", "            if True:\n"),),
        checks=(SIMULATOR, APPENDING + "9_26_a_series_that_another_question_has_ended_is_no_loss[deployment]"),
    ),
    Mutant(
        name="an-append-without-an-answer-was-refused",
        rule="9.26",
        harm="An answer is lost: the fact is committed, and its ID passes for empty.",
        edits=(
            Edit(
                "PlannedStore.write_appended",
                "            raise CommitUnknown(group, error) from error\n",
                "            raise\n",
            ),
        ),
        checks=(SIMULATOR,),
    ),
    Mutant(
        name="one-bad-fact-takes-the-others-along",
        rule="9.26",
        harm="A row that the table refuses fails the facts of other requests.",
        edits=(
            Edit(
                "Appends._send",
                "            if len(batch) > 1 and isinstance",
                "            if len(batch) > 999 and isinstance",
            ),
        ),
        checks=(APPENDING + "a_fact_that_the_table_refuses_fails_alone",),
    ),
    Mutant(
        name="what-the-server-did-not-say-is-a-refusal",
        rule="9.26",
        harm="A signal handler raises while the answer is waited for: rows that are committed are taken for none.",
        edits=(
            Edit(
                "Appends._send",
                "            if len(batch) > 1 and isinstance(error, OF_ONE):",
                "            if len(batch) > 1:",
            ),
            Edit("Appends._send", "        except BusrepError as error:\n", "        except Exception as error:\n"),
        ),
        checks=("stores/test_sharing.py::test_what_the_server_did_not_say_is_no_refusal[names1]",),
    ),
    Mutant(
        name="facts-that-wait-go-in-one-transaction-however-many",
        rule="9.26",
        harm="A transaction of any size, for which all others wait.",
        edits=(
            Edit(
                "Batches._take",
                "while waiting and (not batch or size + self._size(waiting[0][0]) <= most):",
                "while waiting:",
            ),
        ),
        checks=(APPENDING + "a_group_is_bounded[deployment]",),
    ),
    Mutant(
        name="what-got-no-answer-waits-for-all-transactions-of-its-writer",
        rule="9.26",
        harm="A fact that locks the claim's row is open for long: meanwhile nothing of the writer is published.",
        edits=(
            Edit(
                "appending.end_series",
                "        *dialect.lock_series(claim.writer, exclusive=True),\n",
                '        Sql(f"SELECT 1 FROM busrep_writers WHERE {HELD}{dialect.exclusive}", (claim.writer, '
                "claim.incarnation)),\n",
            ),
        ),
        checks=(APPENDING + "9_26_what_got_no_answer_is_asked_after_beside_who_locks_the_row",),
    ),
    Mutant(
        name="each-fact-of-a-group-ends-the-series",
        rule="9.26",
        harm="A lost answer of a group of thousands costs as many transactions, and nothing is published until then.",
        edits=(
            Edit("PlannedStore.outcome", "            if not marker.settled:\n", "            if True:\n"),
            Edit("Writing.settle", "asked.setdefault(doubt.marker, [])", "asked.setdefault(doubt, [])"),
        ),
        checks=(
            APPENDING + "9_26_a_lost_answer_is_asked_after_once[deployment]",
            APPENDING + "9_26_a_lost_answer_is_asked_after_once[on_postgres]",
        ),
    ),
    Mutant(
        name="the-table-is-asked-while-rows-are-under-way",
        rule="9.26",
        harm="The fact passes for one that was not written, and is written then: lost.",
        edits=(Edit("PlannedStore.outcome", "            if marker.under_way:\n", "            if False:\n"),),
        checks=(APPENDING + "9_26_of_a_cancelled_append_the_table_tells_when_it_has_ended[deployment-on its way]",),
    ),
    Mutant(
        name="nobody-goes-on-for-a-task-that-was-cancelled",
        rule="9.26",
        harm="Every later fact of the process waits for ever.",
        edits=(
            Edit(
                "Batches._ended",
                "        if any(not answer.done() for _, answer in self._waiting.get(key, ())):\n",
                "        if False:\n",
            ),
        ),
        checks=("stores/test_sharing.py::test_whoever_waits_when_the_task_alone_is_cancelled_is_told[False]",),
    ),
    Mutant(
        name="who-was-interrupted-before-it-waited-is-sent-all-the-same",
        rule="9.26",
        harm="The fact is told to be unwritten, its ID is stepped over, and its row is committed behind that: lost.",
        edits=(Edit("Batches.ask", "            answer.cancel()\n", "            pass\n"),),
        checks=("stores/test_sharing.py::test_whoever_was_interrupted_before_it_waited_is_in_no_batch",),
    ),
    Mutant(
        name="whom-a-cancelled-batch-left-waits-for-ever",
        rule="9.26",
        harm="Nothing in doubt is settled any more: the writer's positions stand.",
        edits=(Edit("Batches._run", '                fail(batch, Unavailable("the store", error))\n', ""),),
        checks=("stores/test_sharing.py::test_of_a_refused_question_all_are_told_though_one_of_them_is_cancelled",),
        hangs=True,
    ),
    Mutant(
        name="a-group-whose-answer-was-interrupted-counts-as-unsent",
        rule="9.26",
        harm="Committed facts pass for facts that were never sent: written twice by whoever tries again.",
        edits=(
            Edit(
                "Appends._send",
                "            await self.write(claim, group, [appended for (_, appended), _ in batch])\n"
                "            for _, answer in batch:\n"
                "                if not answer.done():\n"
                "                    answer.set_result(None)\n",
                "            await self.write(claim, group, [appended for (_, appended), _ in batch])\n",
            ),
            Edit(
                "Appends._send",
                "            group.under_way = False\n",
                "            group.under_way = False\n"
                "        for _, answer in batch:\n"
                "            if not answer.done():\n"
                "                answer.set_result(None)\n",
            ),
        ),
        checks=(
            "stores/test_sharing.py::test_of_a_group_that_was_written_all_are_told_though_the_telling_is_interrupted",
        ),
    ),
    Mutant(
        name="rows-that-the-application-inserts-need-no-claim",
        rule="9.2",
        harm="They are published by a writer that was finished, under IDs that its successor has stepped over.",
        edits=(
            Edit(
                "FactBase._commit",
                "elif not opened.stream.resettable and opened.written():",
                "elif not opened.stream.resettable and opened.to_insert():",
            ),
        ),
        checks=(
            APPENDING
            + "9_26_rows_that_the_application_inserts_need_the_claim_also_where_no_statement_ran[on_postgres]",
        ),
    ),
    Mutant(
        name="threads-of-a-block-begin-a-transaction-each",
        rule="9.1",
        harm="The statement of one of them is in a transaction that nobody ends, and the fact counts as committed.",
        edits=(Edit("BlockingFact._begin_late", "        with self._beginning:", "        if True:"),),
        checks=(RACES + "two_threads_of_a_block_begin_one_transaction",),
    ),
    Mutant(
        name="connections-that-are-closed-at-once-are-asked-for-without-end",
        rule="9.26",
        harm="A proxy takes connections for a server that is away: write() never returns.",
        edits=(Edit("PostgresStore._take", "                if clock() >= deadline:", "                if False:"),),
        checks=(SESSIONS_ENDED + "connections_that_are_dead_on_arrival_are_told_of",),
        hangs=True,
    ),
    Mutant(
        name="statements-at-a-time-begin-a-transaction-each",
        rule="9.1",
        harm="AttributeError in the block of a fact whose first statements run at the same time.",
        edits=(Edit("Fact._begin_late", "        async with self._beginning:", "        if True:"),),
        checks=(APPENDING + "two_statements_at_a_time_begin_one_transaction[on_postgres]",),
    ),
    Mutant(
        name="facts-of-a-group-are-noted-one-by-one",
        rule="9.23",
        harm="Of the last transactions all but one are forgotten: what a failover took of them is not told.",
        edits=(Edit("LastCommits.note", "marker if isinstance(marker, Group) else object()", "object()"),),
        checks=(
            APPENDING + "9_23_facts_of_one_transaction_are_noted_once[deployment]",
            APPENDING + "9_23_facts_of_one_transaction_are_noted_once[on_postgres]",
        ),
    ),
    Mutant(
        name="a-transaction-that-begins-behind-its-block-stays",
        rule="9.4",
        harm="It holds the claim for ever: nobody can finish the writer, or win its name.",
        edits=(
            Edit("DeferredTransaction._begin", "            if inside and self._over:\n", "            if False:\n"),
        ),
        checks=(
            APPENDING + "a_statement_that_nobody_waits_for_leaves_nothing[on_postgres-fails-1]",
            APPENDING + "a_statement_that_nobody_waits_for_leaves_nothing[on_postgres-ends-1]",
        ),
    ),
    Mutant(
        name="a-statement-behind-the-block-takes-its-transaction-away",
        rule="9.26",
        harm="The block's own transaction is committed by nobody, and holds the claim.",
        edits=(
            Edit(
                "DeferredTransaction._begin", "            if self._begun is transaction:\n", "            if True:\n"
            ),
        ),
        checks=(DEFERRED + "a_statement_that_nobody_waits_for_leaves_the_block_s_own_transaction[block]",),
    ),
    Mutant(
        name="what-was-given-up-is-sent-with-its-half",
        rule="9.26",
        harm="The table has told that the fact was not written, and then it is: lost.",
        edits=(
            Edit(
                "Appends._serve",
                "[one for one in left.pop() if not one[1].done()]",
                "[*left.pop()]",
            ),
        ),
        checks=(
            APPENDING + "9_26_of_a_group_that_is_halved_a_fact_that_was_given_up_is_not_written[deployment]",
            APPENDING + "9_26_of_a_group_that_is_halved_a_fact_that_was_given_up_is_not_written[on_postgres]",
        ),
    ),
    Mutant(
        name="an-answer-under-way-passes-for-an-open-transaction",
        rule="9.26",
        harm="A cache takes invalidations for applied that are committed and not known to this process yet.",
        edits=(Edit("fact.settle", "    if isinstance(marker, Group) and marker.under_way:\n", "    if False:\n"),),
        checks=(APPENDING + "an_answer_that_is_being_waited_for_is_none_of_the_table_s",),
    ),
    Mutant(
        name="a-sequence-that-is-behind-numbers-rows",
        rule="9.28",
        harm="After a backup was put back rows are written at IDs that were announced: readers step over them.",
        edits=(Edit("appending.append", "AND ({given.text}) >= ?", "AND ({given.text}) + 1000 >= ?"),),
        checks=(
            UNNUMBERED + "9_28_a_sequence_that_is_behind_gives_no_id[deployment]",
            STORES_POSTGRES + "9_28_rows_get_their_ids_as_they_are_written",
            STORES_SQLITE + "9_28_rows_get_their_ids_as_they_are_written",
        ),
    ),
    Mutant(
        name="a-sequence-that-is-behind-fails-a-whole-group",
        rule="9.28",
        harm="Facts of other streams are refused for one whose sequence is behind.",
        edits=(Edit("OF_ONE", "(StatementRefused, SequenceWentBack)", "(StatementRefused,)"),),
        checks=(UNNUMBERED + "9_28_a_sequence_that_is_behind_gives_no_id[deployment]",),
    ),
    Mutant(
        name="the-turn-to-write-keeps-its-task",
        rule="9.1",
        harm="A task that nobody else has is never garbage: its fact has SQLite's write lock for ever.",
        edits=(Edit("TaskTurn.owner", "weakref.ref(task)", "task"),),
        checks=("asyncio/test_facts_nobody_ends.py::test_the_task_is_garbage[sqlite-a statement-the loop's thread]",),
        hangs=True,
    ),
    Mutant(
        name="a-late-answer-holds-up-all-other-facts",
        rule="9.26",
        harm="One link with nobody at its other end keeps a whole process from writing for half a minute.",
        edits=(Edit("Batches._is_late", "self._late.add(task)", "pass"),),
        checks=("stores/test_sharing.py::test_a_late_answer_holds_up_no_other",),
        hangs=True,
    ),
    Mutant(
        name="of-transactions-asked-after-together-an-open-one-has-ended",
        rule="9.1",
        harm="A fact of the caller's transaction is announced as empty, and committed a moment later: lost.",
        edits=(Edit("facts.outcomes", "None if state == OPEN else", "None if 0 else"),),
        checks=(SIMULATOR, STORES_POSTGRES + "9_1_several_transactions_are_asked_after_at_once"),
    ),
    Mutant(
        name="of-transactions-asked-after-together-one-unknown-ends-all",
        rule="9.1",
        harm="Beside a transaction that a crash lost an open one has ended: its fact is announced as empty.",
        edits=(Edit("Outcomes._serve", "            if len(batch) == 1:\n", "            if True:\n"),),
        checks=(STORES_POSTGRES + "9_1_several_transactions_are_asked_after_at_once",),
    ),
)
