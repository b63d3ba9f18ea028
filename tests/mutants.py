"""Known bugs of this kind of system, each as edits of the source: every rule of protocol.md, section 9, left out, and
every loss of the reference system brought back.

The suite must catch all of them; ``python -m tests.mutation`` applies them one at a time and says which check did.
Longer than other files because it is one table: an entry is to be read beside the code that it changes.
"""

from __future__ import annotations

from . import (
    mutants_database,
    mutants_handlers,
    mutants_pipeline,
    mutants_program,
    mutants_reference,
    mutants_servers,
    mutants_trust,
    mutants_wire,
)
from .mutant import SIMULATOR, Edit, Mutant

# Prefixes of tests.
KEPT, HELD, FRESH = (f"test_{name}.py::test_" for name in ("caches", "cached", "freshness"))
R, W, I, B = "test_reader.py::test_", "test_writer.py::test_", "test_ids.py::test_", "test_bus.py::test_"  # noqa: E741
S, L, F = "test_rules.py::test_", "test_stores.py::TestPostgres::test_", "test_faults.py::test_"
LITE, GAPS = "test_stores.py::TestSqlite::test_", "test_mutants_gaps.py::test_"
BEGUN, FAULTS, ONCE, TWINS = (f"test_bootstrap{name}.py::test_" for name in ("", "_faults", "_saving", "_twins"))
PARTS, SHARED = "test_snapshots_store.py::TestSqlite::test_", "test_snapshots_postgres.py::test_"
FILL, SHOT = "test_spark_backfill.py::test_", "test_spark_snapshot.py::test_"
FOLLOWED, PLANNED, SPARK_READ, HEARD = (
    f"test_spark_{name}.py::test_" for name in ("following", "planning", "reading", "listening")
)
REPLAY = "test_spark_replay_ranges.py::test_"
AUDIT = "test_spark_audit.py::test_"
HANDLED = "test_spark_audit_readers.py::test_"
ARCHIVE, OBJECTS = "test_spark_archiving.py::test_", "test_spark_archive_objects.py::test_"
THREADS, RACES = "test_sync_writing.py::test_", "test_sync_races.py::test_"
SINK, AGAIN = "test_spark_sink.py::test_", "test_spark_sink_again.py::test_"

# An emptied queue is still among those to be taken from.
EMPTIED_STAYS_READY = Edit(
    "Reader._empty",
    "        if not progress.queue:\n            self.ready.pop((progress.stream.name, progress.writer), None)\n",
    "",
)

MUTANTS: tuple[Mutant, ...] = (
    # --- 9.1: unknown COMMIT
    Mutant(
        name="unknown-commit-completes-the-fact",
        rule="9.1",
        harm="COMMIT lands after the position has stepped over its ID: rows that no reader ever fetches.",
        edits=(
            Edit(
                "asyncio.writing.Fact._commit",
                "            except CommitUnknown:  # the table will tell\n                self._doubt()\n",
                "            except CommitUnknown as error:\n                await self._failed(error)\n",
            ),
        ),
        checks=(SIMULATOR, S + "9_1_no_answer_to_commit_keeps_the_fact_open_until_the_table_decides"),
    ),
    Mutant(
        name="unknown-commit-publishes-what-memory-holds",
        rule="9.1",
        harm="A transaction that was rolled back after all is published: readers see rows that do not exist.",
        edits=(
            Edit(
                "Ledger.decide",
                """\
            one.each = None
            one.payloads = {id: found[one.stream.name, id] for id in one.ids if (one.stream.name, id) in found}
        if not any(one.payloads for one in durable):
""",
                """\
            pass
        if not durable:
""",
            ),
        ),
        checks=(SIMULATOR, S + "9_1_no_answer_to_commit_keeps_the_fact_open_until_the_table_decides[aborted]"),
    ),
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
        checks=(SIMULATOR, L + "9_1_no_answer_to_commit"),
    ),
    Mutant(
        name="outcome-does-not-wait-for-the-end",
        rule="9.1",
        harm="A transaction still open on the server is taken for rolled back; when it commits its rows are skipped.",
        edits=(Edit("facts.outcome", "        if answers[0][0][0]:\n            return None\n", ""),),
        checks=(SIMULATOR, L + "9_1_outcome_open_committed_and_rolled_back"),
    ),
    Mutant(
        name="outcome-reads-the-rows-first",
        rule="9.1",
        harm="COMMIT between the look at the rows and the look at the transaction: its rows are announced as none.",
        edits=(
            Edit(
                "facts.outcome",
                "    question = dialect.outcome(marker)\n",
                "    found = yield from rows_of(dialect, facts, held.writer)\n    question = dialect.outcome(marker)\n",
            ),
            Edit(
                "facts.outcome",
                "    found = yield from rows_of(dialect, facts, held.writer)\n    yield from",
                "    yield from",
            ),
        ),
        checks=(SIMULATOR, S + "9_1_the_rows_are_read_after_the_transaction_was_seen_to_have_ended"),
    ),
    Mutant(
        name="the-table-decides-though-the-claim-is-gone",
        rule="9.1",
        harm="After a restore a fact in doubt is found missing in another log, and completed in it as empty.",
        edits=(
            Edit(
                "facts.outcome", "    yield from check_claim(dialect, held)\n    return found\n", "    return found\n"
            ),
        ),
        checks=(L + "9_1_a_cancelled_commit_is_unknown_until_the_table_decides",),
    ),
    Mutant(
        name="cancellation-tears-commit",
        rule="9.1",
        harm="A web request that is cancelled during COMMIT leaves a fact that is neither open nor complete.",
        edits=(Edit("Writing.finish", "            await asyncio.shield(task)\n", "            await task\n"),),
        checks=(S + "9_1_a_cancelled_caller_does_not_tear_the_commit",),
    ),
    Mutant(
        name="an-exception-completes-after-commit-was-sent",
        rule="9.1",
        harm="As with a lost answer, for whoever uses the ID generator directly.",
        edits=(
            Edit("IdGenerator._leave_block", "        elif error is None or not ids.in_doubt:\n", "        else:\n"),
        ),
        checks=(
            I + "an_exception_after_commit_was_sent_leaves_the_fact_open[rule 9.1]",
            I + "a_cancellation_after_commit_was_sent_leaves_the_fact_open[rule 9.1]",
        ),
    ),
    Mutant(
        name="joined-transaction-rolls-back-with-its-block",
        rule="9.1",
        harm="The caller catches the error and commits all the same: rows under an ID that is complete already.",
        edits=(
            Edit(
                "Fact._rolled_back",
                "            if not known or (transaction.joined and transaction.marker is not None):\n",
                "            if not known:\n",
            ),
        ),
        checks=(S + "9_1_a_joined_transaction_may_commit_though_the_fact_s_block_failed",),
    ),
    Mutant(
        name="commit-of-a-failed-transaction-is-a-commit",
        rule="9.1",
        harm="PostgreSQL answers COMMIT of a failed transaction with ROLLBACK: rows are published that do not exist.",
        edits=(Edit("postgres.store._committed", '    if status != "COMMIT":\n', "    if status is None:\n"),),
        checks=(L + "9_1_commit_of_a_failed_transaction_is_an_error",),
    ),
    Mutant(
        name="nobody-asks-after-facts-in-doubt",
        rule="9.1",
        harm="One lost answer to COMMIT holds back all later facts of this process for ever.",
        edits=(
            Edit(
                "Writing.in_doubt",
                "        self._doubts.append(doubt)\n        self._doubted.set()\n",
                "        self._doubts.append(doubt)\n",
            ),
        ),
        checks=(SIMULATOR, B + "a_joined_transaction_is_seen_to_commit_without_being_told"),
    ),
    # --- 9.2: announcing past one's own commits
    Mutant(
        name="follows-to-what-is-known-after-the-claim-was-read",
        rule="9.2",
        harm="A writer that lost its name meanwhile announces past a fact that its successor holds open.",
        edits=(
            Edit(
                "Ledger.registry_read",
                "                generator.follow(min(noted[name][0], registry.sequences[name]))\n",
                "                generator.follow(min(generator.followable(), registry.sequences[name]))\n",
            ),
        ),
        checks=(S + "9_2_and_9_7_what_is_heard_during_a_beat_counts_in_the_next",),
    ),
    Mutant(
        name="follows-past-its-own-open-facts",
        rule="9.2",
        harm="A heartbeat announces the highest ID known while an own fact below it is open: it is skipped.",
        edits=(
            Edit(
                "IdGenerator",
                "        return self.open_floor\n\n    def follow(",
                "        return self._highest\n\n    def follow(",
            ),
            Edit(
                "IdGenerator.follow", "max(self._position, min(noted, self.open_floor))", "max(self._position, noted)"
            ),
        ),
        checks=(SIMULATOR, I + "following_never_passes_the_open_floor[rule 9.2]"),
    ),
    Mutant(
        name="follows-past-a-reservation-under-way",
        rule="9.2",
        harm="An ID on its way from the sequence is stepped over by a heartbeat: its fact is lost, or raises.",
        edits=(
            Edit(
                "IdGenerator.open_floor",
                "        return (self._keys[0] - 1) // 2 if self._keys else self._highest\n",
                """\
        opened = [key for key, barrier in zip(self._keys, self._barriers, strict=True) if barrier.ticket is not None]
        return (opened[0] - 1) // 2 if opened else self._highest
""",
            ),
        ),
        checks=(I + "case[G14]",),
    ),
    Mutant(
        name="heartbeat-does-not-look-at-the-claim",
        rule="9.2",
        harm="A process that was paused and replaced goes on storing and announcing positions under its old name.",
        edits=(
            Edit(
                "heartbeat.body",
                """\
        if not answers[0]:
            raise WriterFenced(held.writer, held.incarnation)
        given =\
""",
                "        given =",
            ),
        ),
        checks=(SIMULATOR, L + "9_2_and_9_4_a_fenced_writer_is_told_everywhere"),
    ),
    Mutant(
        name="a-fenced-writer-goes-on-publishing",
        rule="9.2",
        harm="Two processes chain frames under one name: readers take one's positions for the other's.",
        edits=(Edit("Ledger.fence", "            self.core.fenced()\n", ""),),
        checks=(S + "9_2_a_beat_that_finds_the_claim_gone_ends_all_publishing",),
    ),
    Mutant(
        name="a-fenced-writer-completes-its-facts",
        rule="9.2",
        harm="A fact refused by the fence counts as empty: the position moves over rows of the successor.",
        edits=(
            Edit(
                "IdGenerator._leave_block",
                "            self.fenced(error)\n        elif error is None",
                "            self.complete_many(ids)\n            self.fenced(error)\n        elif error is None",
            ),
        ),
        checks=(I + "writer_fenced_completes_nothing_and_ends_everything[rule 9.2]",),
    ),
    Mutant(
        name="progress-of-others-is-announced-at-once",
        rule="9.2",
        harm="Each row heard makes every writer announce, without a look at its claim: skipped rows, and a storm.",
        edits=(
            Edit(
                "Ledger.heard",
                "                self.generators[item.stream].announced(item.writer, item.new)\n",
                """\
                generator = self.generators[item.stream]
                generator.announced(item.writer, item.new)
                generator.follow(generator.followable())
                self.core.position_moved(item.stream, generator.position)
""",
            ),
        ),
        checks=(S + "9_2_a_beat_that_finds_the_claim_gone_ends_all_publishing",),
    ),
    # --- 9.3: what rows prove
    Mutant(
        name="a-beat-stores-the-highest-id",
        rule="9.3",
        harm="The positions table claims what is still open: readers that start now, or follow it, skip those rows.",
        edits=(
            Edit(
                "Ledger.noted",
                "        positions = {name: self.generators[name].position for name in self._durable}\n",
                "        positions = {name: self.generators[name].highest for name in self._durable}\n",
            ),
        ),
        checks=(SIMULATOR, S + "9_3_a_beat_stores_nothing_above_an_open_fact"),
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
            GAPS + "9_3_rows_of_a_writer_prove_no_position_to_a_reader",
        ),
    ),
    Mutant(
        name="position-from-the-sequence",
        rule="5",
        harm="A reader that begins now at the sequence's last value skips every fact that is open at that moment.",
        edits=(
            Edit(
                "Reading._load_durable",
                "        positions |= starts\n",
                """\
        if self._start == "now":
            starts = {key: max(at, await store.sequence(name) or 0) for key, at in starts.items()}
        positions |= starts
""",
            ),
        ),
        checks=(SIMULATOR, GAPS + "5_a_reader_from_now_gets_a_fact_that_was_open_when_it_began"),
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
        checks=(L + "9_5_finish_fences_then_takes_the_sequence_as_the_final_position",),
    ),
    Mutant(
        name="start-forgets-the-own-rows",
        rule="9.3",
        harm="Rows committed and not published before a crash lie below the first head of the successor: skipped.",
        edits=(
            Edit(
                "plan_start",
                "start[own] = max(proven[own], sign * rows.get(own, 0)) if own in proven else highest",
                "start[own] = proven[own] if own in proven else highest",
            ),
        ),
        checks=(SIMULATOR, I + "start[G2]"),
    ),
    # --- 9.4: the claim
    Mutant(
        name="no-fencing-check",
        rule="9.4",
        harm="A process that lost its name commits facts under it that its successor has stepped over.",
        edits=(
            Edit(
                "claims.hold",
                """\
    if not answers[0]:
        raise WriterFenced(held.writer, held.incarnation)
    return answers[0][0][0]
""",
                "    return answers[0][0][0] if answers[0] else None\n",
            ),
        ),
        checks=(SIMULATOR, L + "9_2_and_9_4_a_fenced_writer_is_told_everywhere"),
    ),
    Mutant(
        name="the-claim-is-checked-and-not-locked",
        rule="9.4",
        harm="A transaction that passed the check commits after the successor has read its start: skipped.",
        edits=(Edit("PostgresDialect.share", '    share: str = " FOR SHARE"\n', '    share: str = ""\n'),),
        checks=(
            SIMULATOR,
            L + "9_4_a_claim_waits_for_the_predecessors_transaction_and_starts_behind_it",
        ),
    ),
    Mutant(
        name="start-is-read-before-the-claim-is-won",
        rule="9.4",
        harm="What the predecessor commits while the claim waits for it lies below the successor's start, unannounced.",
        edits=(
            Edit(
                "claims.claim",
                "    won = in_transaction(_win(dialect, writer, backings, seconds, now, again))\n",
                """\
    early = yield from in_transaction(_where(writer, 0, dialect, backings))
    won = in_transaction(_win(dialect, writer, backings, seconds, now, again))
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
            Edit("_where", "    if not held:\n", "    if incarnation and not held:\n"),
        ),
        checks=(L + "9_4_a_claim_waits_for_the_predecessors_transaction_and_starts_behind_it",),
    ),
    Mutant(
        name="a-claim-keeps-the-incarnation",
        rule="9.4",
        harm="A new process takes a name that its predecessor still holds: both write and announce under it.",
        edits=(
            Edit(
                "_win",
                "ELSE 0 END, ?) + 1, ",
                "ELSE 0 END, 0 * ?), ",  # the clock alone would make it rise
            ),
        ),
        checks=(
            SIMULATOR,
            L + "9_2_and_9_4_a_fenced_writer_is_told_everywhere",
            LITE + "9_2_and_9_4_a_fenced_writer_is_told_everywhere",
        ),
    ),
    Mutant(
        name="a-claim-waits-for-ever",
        rule="9.4",
        harm="A predecessor's forgotten transaction keeps the service from starting, and nothing says which it is.",
        edits=(
            Edit(
                "PostgresDialect.lock_timeout",
                'f"SET LOCAL lock_timeout = {max(1, int(seconds * 1000))}"',
                '"SET LOCAL lock_timeout = 0"',
            ),
        ),
        checks=(L + "9_4_a_claim_that_waits_too_long_names_the_blocker",),
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
        checks=(L + "9_4_a_serialization_failure_of_the_lock_is_a_fence",),
    ),
    # --- 9.5: finishing a silent writer
    Mutant(
        name="finished-at-its-stored-position",
        rule="9.5",
        harm="The last facts of a process that was killed, committed and never published, reach nobody.",
        edits=(
            Edit(
                "_finals",
                "yield from _final_position(dialect, backings.get(stream), stream, writer, position)\n",
                "position\n",
            ),
        ),
        checks=(SIMULATOR, L + "9_5_finish_fences_then_takes_the_sequence_as_the_final_position"),
    ),
    Mutant(
        name="final-position-read-before-the-fence",
        rule="9.5",
        harm="What the silent writer commits while the fence waits for it lies above its final position: lost.",
        edits=(
            Edit(
                "claims.finish",
                "    fenced = yield from _or_blocked(dialect, writer, in_transaction(_fence(",
                """\
    early: dict[str, int] = {}
    for stream, backing in backings.items():
        early[stream] = yield from _final_position(dialect, backing, stream, writer, 0)
    fenced = yield from _or_blocked(dialect, writer, in_transaction(_fence(""",
            ),
            Edit(
                "claims.finish",
                "    finals = in_transaction(_finals(dialect, backings, writer, fenced, seconds))\n",
                "    finals = in_transaction(_finals(dialect, backings, writer, fenced, seconds, early))\n",
            ),
            Edit(
                "_finals",
                """\
    dialect: Dialect, backings: Mapping[str, Backing], writer: str, incarnation: int, seconds: float
) -> Plan[dict[str, int]]:
    answers = yield (
""",
                """\
    dialect: Dialect, backings: Mapping[str, Backing], writer: str, incarnation: int, seconds: float, early: dict
) -> Plan[dict[str, int]]:
    answers = yield (
""",
            ),
            Edit(
                "_finals",
                "yield from _final_position(dialect, backings.get(stream), stream, writer, position)\n",
                "max(position, early.get(stream, 0))\n",
            ),
        ),
        checks=(S + "9_5_rows_and_sequence_are_read_after_the_fence_was_granted",),
    ),
    Mutant(
        name="final-position-without-the-fence",
        rule="9.5",
        harm="A writer that was merely slow commits below the final position that was taken of it: lost.",
        edits=(
            Edit(
                "_fence",
                '"UPDATE busrep_writers SET incarnation = incarnation + 1, finished = incarnation "\n',
                '"UPDATE busrep_writers SET finished = incarnation "\n',
            ),
            Edit(
                "_fence",
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
            L + "9_5_finish_fences_then_takes_the_sequence_as_the_final_position",
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
        checks=(S + "9_5_nobody_claims_the_name_while_its_final_positions_are_taken",),
    ),
    Mutant(
        name="a-silent-writer-is-never-finished",
        rule="9.5",
        harm="What a killed process committed last stays in the table unseen, and the linear position stands still.",
        edits=(
            Edit(
                "SilentWriters.look",
                '            reading.spawn(self._finish_all(dead), "finish", once=True)\n',
                "            pass\n",
            ),
        ),
        checks=(SIMULATOR, B + "a_silent_writer_is_finished_from_the_table"),
    ),
    Mutant(
        name="whoever-is-not-heard-is-finished",
        rule="9.5",
        harm="A writer cut off from Redis alone loses its name and all its facts fail, though it is healthy.",
        edits=(
            Edit(
                "SilentWriters.look", "if known.registered and silence[known.writer] > bound:", "if known.registered:"
            ),
        ),
        checks=(B + "a_writer_cut_off_from_redis_alone_is_followed_not_fenced",),
    ),
    Mutant(
        name="a-silent-writer-that-lives-is-not-followed",
        rule="9.5",
        harm="Facts of a writer that cannot reach Redis wait until it can, hours perhaps, though the table has them.",
        edits=(
            Edit(
                "SilentWriters.look",
                "            core.learned(known.stream, known.writer, known.position)\n            if heard:\n",
                "            if heard:\n",
            ),
        ),
        checks=(SIMULATOR, B + "a_writer_cut_off_from_redis_alone_is_followed_not_fenced"),
    ),
    # --- 9.6: the chain
    Mutant(
        name="no-chain-check",
        rule="9.6",
        harm="A message lost on a live link is lost for good as soon as the next one arrives (case R4).",
        edits=(Edit("Reader._position", "        if prev <= progress.position:\n", "        if True:\n"),),
        checks=(SIMULATOR, R + "case[R4]", R + "case[R5]"),
    ),
    Mutant(
        name="frames-without-a-head",
        rule="9.6",
        harm="As upstream: RDATA carries no predecessor, so nobody can see that a message before it was lost.",
        edits=(Edit("_Chain.take", '                    lines.append(b"%b%d %d" % (self.line, at, at))\n', ""),),
        checks=(SIMULATOR, W + "rules[rule 9.6 the head is where the previous frame ended]"),
    ),
    Mutant(
        name="the-head-is-what-was-confirmed",
        rule="9.6",
        harm="Of several messages in flight a lost one shows nowhere: the next one's head lies before it.",
        edits=(
            Edit(
                "_Chain.take",
                "draft.lines, self.ready, self.composed, 0, False\n",
                "draft.lines, self.ready, self.sent, 0, False\n",
            ),
        ),
        checks=(SIMULATOR, W + "many_rows_in_bounded_frames"),
    ),
    Mutant(
        name="one-head-for-all-streams-of-a-frame",
        rule="9.6",
        harm="In a message with two streams the loss of the second one's rows before it shows nowhere.",
        edits=(
            Edit(
                "_Chain.take",
                "                if not headed:\n                    draft",
                "                if not headed and not lines:\n                    draft",
            ),
        ),
        checks=(SIMULATOR, W + "rules[rule 9.6 each stream has its own head in a shared frame]"),
    ),
    Mutant(
        name="advance-before-publish",
        rule="9.6",
        harm="A message that Redis did not take counts as sent: rows kept in memory only are lost.",
        edits=(
            Edit(
                "Bus._publish_all",
                "            try:\n                await link.publish(messages)\n",
                """\
            if writing is not None:
                for frame in frames:
                    writing.core.published(frame)
            try:
                await link.publish(messages)
""",
            ),
        ),
        checks=(S + "9_6_after_a_publish_of_unknown_outcome_the_same_frame_goes_out_again[lost]",),
    ),
    Mutant(
        name="an-unconfirmed-frame-is-dropped",
        rule="9.6",
        harm="After a PUBLISH without an answer its rows are not sent again: those kept in memory only are lost.",
        edits=(
            Edit(
                "Writer.publish_failed",
                '        self._in_flight = 0\n        self._counts["publish_failures"] += 1\n',
                """\
        self._in_flight = 0
        self._unconfirmed.clear()
        self._counts["publish_failures"] += 1
""",
            ),
        ),
        checks=(
            SIMULATOR,
            W + "rules[rule 9.6 after an unknown outcome: the same frames again, byte for byte, before anything new]",
        ),
    ),
    Mutant(
        name="announced-ahead-of-queued-rows",
        rule="9.6",
        harm="A heartbeat overtakes rows that wait: readers of a stream kept in memory give them up for missed.",
        edits=(
            Edit(
                "Writer._compose",
                "(chain.line, chain.composed, chain.composed) for chain in roll.chains",
                "(chain.line, chain.position, chain.position) for chain in roll.chains",
            ),
        ),
        checks=(W + "rules[rule 9.6 a heartbeat is x x, never ahead of the rows that wait]",),
    ),
    Mutant(
        name="sent-moves-when-composed",
        rule="4",
        harm="positions(), and what a reader of its own stream saves, claim rows that Redis does not have yet.",
        edits=(Edit("_Chain._end", "        self.composed = end\n", "        self.composed = self.sent = end\n"),),
        checks=(GAPS + "4_positions_move_only_when_redis_has_confirmed",),
    ),
    Mutant(
        name="dropped-rows-are-announced-as-none",
        rule="9.6",
        harm="Rows dropped from a full queue are stepped over with 'prev new': readers believe that there are none.",
        edits=(
            Edit(
                "_Chain._end",
                """\
        if stepped_over:
            draft.lines.append(b"%b%d %d" % (self.line, end, end))
        elif end > at:
            draft.lines.append(b"%b%d %d" % (self.line, at, end))
""",
                """\
        if end > self.composed:
            draft.lines.append(b"%b%d %d" % (self.line, self.composed if stepped_over else at, end))
""",
            ),
        ),
        checks=(
            SIMULATOR,
            W + "rules[rule 9.6 new new over dropped rows, late ones too, until the position is past them all]",
        ),
    ),
    Mutant(
        name="frames-leave-in-any-order",
        rule="9.6",
        harm="Every burst looks like a loss to every reader, and rows kept in memory only are given up for missed.",
        edits=(
            Edit(
                "Bus._publish_all",
                "            for frame in frames:\n                messages",
                "            for frame in reversed(frames):\n                messages",
            ),
        ),
        checks=(S + "9_6_frames_leave_in_the_order_in_which_they_were_composed",),
    ),
    Mutant(
        name="position-moves-before-the-fact-is-handed-over",
        rule="9.6",
        harm="A heartbeat between the two announces past a fact that is not queued yet: it is lost, or raises.",
        edits=(
            Edit(
                "asyncio.writing.Writing.completed",
                "        for one in opened:\n            facts, rows = one.complete(self.core)\n",
                """\
        await stack.aclose()
        await asyncio.sleep(0)
        for one in opened:
            facts, rows = one.complete(self.core)
""",
            ),
        ),
        checks=(SIMULATOR, S + "9_6_facts_are_handed_over_before_the_position_moves_past_them"),
    ),
    Mutant(
        name="published-although-an-earlier-fact-is-open",
        rule="4",
        harm="When the slower transaction commits its rows lie below what readers have: dropped as duplicates.",
        edits=(
            Edit(
                "asyncio.writing.Writing.completed",
                "            self.core.position_moved(name, self.generators[name].position)\n        self._wake()\n",
                """\
            self.core.position_moved(name, max(self.generators[name].position, one.ids[-1]))
        self._wake()
""",
            ),
        ),
        checks=(SIMULATOR, B + "concurrent_facts_are_published_in_the_order_of_their_ids"),
    ),
    Mutant(
        name="the-own-position-is-the-largest-finished-id",
        rule="5",
        harm="The announced position steps over transactions that are still open: their rows are skipped.",
        edits=(
            Edit(
                "IdGenerator._raise_peak",
                "            below.peak = max(below.peak, peak)\n        else:\n            self._position",
                "            below.peak = max(below.peak, peak)\n        if peak:\n            self._position",
            ),
            Edit(
                "IdGenerator._finish",
                "            barrier.peak = max(barrier.peak, high)\n",
                """\
            barrier.peak = max(barrier.peak, high)
            self._position = max(self._position, high)
""",
            ),
        ),
        checks=(SIMULATOR, I + "case[G3]"),
    ),
    Mutant(
        name="a-rollback-leaves-its-id-open",
        rule="4",
        harm="One failed business transaction holds back all later facts of this process for ever.",
        edits=(
            Edit(
                "Fact._rolled_back",
                """\
        for opened in self._opened.values():
            opened.forget()
        await self._writing.completed(""",
                """\
        for opened in self._opened.values():
            opened.forget()
        await asyncio.sleep(0)
        if False:
            await self._writing.completed(""",
            ),
        ),
        checks=(SIMULATOR, B + "a_rolled_back_fact_is_never_seen_and_holds_nothing_up"),
    ),
    Mutant(
        name="a-rollback-is-published",
        rule="4",
        harm="Readers see orders whose transaction was rolled back.",
        edits=(
            Edit(
                "Fact._rolled_back",
                """\
        for opened in self._opened.values():
            opened.forget()
        await""",
                "        await",
            ),
        ),
        checks=(SIMULATOR, B + "a_rolled_back_fact_is_never_seen_and_holds_nothing_up"),
    ),
    Mutant(
        name="heartbeats-announce-nothing",
        rule="2",
        harm="The loss of the last message before a pause is found late, and of rows kept in memory only never.",
        edits=(
            Edit(
                "Writer.tick",
                "        self._begin_announcement(now)\n        self._schedule_beat(now)\n        for chain",
                "        self._schedule_beat(now)\n        for chain",
            ),
        ),
        checks=(W + "rules[rule 9.6 a heartbeat is x x, never ahead of the rows that wait]",),
    ),
    Mutant(
        name="a-database-that-hangs-keeps-the-announcement-back",
        rule="2",
        harm="A writer whose database hangs for some seconds counts as dead.",
        edits=(
            Edit(
                "Bus._keep_beating",
                "                await asyncio.wait({beating}, timeout=heartbeat / 4)\n",
                "                await asyncio.wait({beating})\n",
            ),
        ),
        checks=(F + "a_database_that_hangs_keeps_no_announcement_back",),
    ),
    Mutant(
        name="a-question-waits-for-its-answer-for-ever",
        rule="9",
        harm="A save on a link at whose other end is nobody: no handler is called any more, and nobody says so.",
        edits=(
            Edit(
                "PostgresStore._read",
                "self._run(connection, plan, self.settings.fetch_timeout + wait)\n",
                "self._run(connection, plan)\n",
            ),
        ),
        checks=(F + "a_save_without_an_answer_does_not_deafen_a_reader",),
    ),
    Mutant(
        name="commit-waits-for-its-answer-for-ever",
        rule="9.1",
        harm="A link at whose other end is nobody: the fact never comes into doubt, and its stream stands still.",
        edits=(
            Edit(
                "ServerTransaction.commit",
                "timeout(self.store.settings.fetch_timeout):\n                await asyncio.shield(committing)",
                "timeout(None):\n                await asyncio.shield(committing)",
            ),
        ),
        checks=(F + "the_end_of_a_fact_without_an_answer_holds_up_no_other[COMMIT does not arrive]",),
    ),
    Mutant(
        name="rollback-waits-for-its-answer-for-ever",
        rule="9.1",
        harm="A link at whose other end is nobody: the fact never ends, and its stream stands still.",
        edits=(
            Edit(
                "ServerTransaction.rollback",
                "self._run(_rollback(), self.store.settings.fetch_timeout)",
                "self._run(_rollback())",
            ),
        ),
        checks=(F + "the_end_of_a_fact_without_an_answer_holds_up_no_other[ROLLBACK does not arrive]",),
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
        checks=(L + "connections_without_an_answer_keep_nobody_from_the_others",),
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
        checks=(LITE + "a_fact_that_cannot_begin_leaves_the_file_to_others",),
    ),
    Mutant(
        name="a-cancelled-question-cuts-the-pool",
        rule="9",
        harm="A connection is lost, and whoever it was promised to waits half a minute: a stream is not followed yet.",
        edits=(
            Edit(
                "PostgresStore._read",
                "        finally:\n            self._give_back(pool, connection)\n",
                "        finally:\n            await pool.putconn(connection)\n",
            ),
        ),
        checks=(L + "who_is_cancelled_takes_no_connection_along",),
    ),
    # --- 9.7: linear position
    Mutant(
        name="persisted-upto-from-positions-heard-after-the-registry",
        rule="9.7",
        harm="A writer that registered meanwhile does not count: its open facts lie below what is called complete.",
        edits=(
            Edit(
                "Ledger.registry_read",
                "            generator.registry_read(noted[name][1], registry[name])\n",
                "            generator.registry_read(generator.noted(), registry[name])\n",
            ),
        ),
        checks=(S + "9_2_and_9_7_what_is_heard_during_a_beat_counts_in_the_next",),
    ),
    Mutant(
        name="linear-position-from-positions-read-after-the-registry",
        rule="9.7",
        harm="A linear consumer passes the first fact of a writer that joins at that moment.",
        edits=(
            Edit("asyncio.bus.Bus.linear_position", "        handled = self.positions().get(stream.name, {})\n", ""),
            Edit(
                "asyncio.bus.Bus.linear_position",
                "        known = await self._store.known()\n",
                "        known = await self._store.known()\n        handled = self.positions().get(stream.name, {})\n",
            ),
        ),
        checks=(S + "9_7_a_linear_position_is_of_positions_known_before_the_registry_was_read",),
    ),
    Mutant(
        name="linear-position-of-writers-heard",
        rule="9.7",
        harm="A registered writer that was never heard does not count: its first fact comes below the linear position.",
        edits=(
            Edit(
                "asyncio.bus.Bus.linear_position",
                "            if one.registered or at < one.position:\n",
                "            if (one.registered or at < one.position) and one.writer in handled:\n",
            ),
        ),
        checks=(S + "9_7_a_writer_counts_from_its_registration_though_nobody_has_heard_it",),
    ),
    Mutant(
        name="a-finished-writer-counts-no-more",
        rule="9.7",
        harm="A linear consumer passes the last rows of a killed process before they have been handled.",
        edits=(
            Edit(
                "asyncio.bus.Bus.linear_position",
                "            if one.registered or at < one.position:\n",
                "            if one.registered:\n",
            ),
        ),
        checks=(S + "9_7_a_writer_that_left_counts_until_its_last_rows_were_handled",),
    ),
    Mutant(
        name="a-writer-new-in-the-registry-counts-in-the-next-read",
        rule="9.7",
        harm="persisted_upto passes what a writer has open that registered just before the registry was read.",
        edits=(
            Edit(
                "IdGenerator.registry_read",
                "(max(noted.positions.get(writer, 0), position) for writer, position in writers.items()),\n",
                "(\n                max(noted.positions[writer], position)\n"
                "                for writer, position in writers.items()\n"
                "                if writer in noted.positions\n            ),\n",
            ),
        ),
        checks=(GAPS + "9_7_a_writer_new_in_the_registry_counts_in_that_read",),
    ),
    # --- 9.8: runs of complete IDs
    Mutant(
        name="a-bare-position-completes-its-id",
        rule="9.8",
        harm="A POSITION that followed others marks another writer's open ID as complete.",
        edits=(
            Edit(
                "Ledger.heard",
                "                self.generators[item.stream].announced(item.writer, item.new)\n",
                "                self.generators[item.stream].rows_seen(item.writer, (item.new,))\n",
            ),
        ),
        checks=(
            SIMULATOR,
            S + "9_8_rows_complete_ids_and_bare_positions_do_not",
        ),
    ),
    Mutant(
        name="the-highest-id-from-the-sequence",
        rule="9.8",
        harm="IDs that others hold open, or that a crash jumped over, count as seen when a process starts.",
        edits=(
            Edit(
                "plan_start",
                "    highest = max(last_row, last_proven)\n",
                "    highest = max(last_row, last_proven, sequence)\n",
            ),
        ),
        checks=(L + "G12_a_jumped_sequence_proves_nothing",),
    ),
    Mutant(
        name="a-writer-does-not-hear-the-others",
        rule="9.8",
        harm="An idle writer, and the linear position of everybody with it, lags by a heartbeat more.",
        edits=(Edit("Bus._message", "            self._writing.heard(frame)\n", "            pass\n"),),
        checks=(S + "9_8_a_writer_hears_the_rows_of_the_others",),
    ),
    # --- 9.9: proof of a page
    Mutant(
        name="ceiling-taken-for-proof",
        rule="9.9",
        harm="A page from a lagging replica counts up to what was asked for: rows not replayed yet are skipped.",
        edits=(
            Edit(
                "fetch.body",
                "        proven = max(after, min(upto, position if replica else given))\n",
                "        proven = max(after, min(upto, upto if replica else given))\n",
            ),
        ),
        checks=(SIMULATOR, L + "9_9_a_replica_proves_only_what_its_positions_row_says"),
    ),
    Mutant(
        name="a-row-proves-those-below",
        rule="9.9",
        harm="A replica that shows a row counts as complete below it, though an older transaction is not replayed yet.",
        edits=(
            Edit(
                "fetch.body",
                "        proven = max(after, min(upto, position if replica else given))\n",
                """\
        position = max(position, rows[-1][0] if rows else 0)
        proven = max(after, min(upto, position if replica else given))
""",
            ),
        ),
        checks=(
            SIMULATOR,
            L + "9_9_a_replica_proves_only_what_its_positions_row_says",
            "test_replica.py::test_9_9_a_row_that_is_visible_proves_nothing_about_those_below",
        ),
    ),
    Mutant(
        name="two-statement-page",
        rule="9.9",
        harm="Rows pruned between the look at the floor and the look at the rows are skipped without a word.",
        edits=(Edit("fetch.body", "            Control.SNAPSHOT,\n", "            Control.BEGIN,\n"),),
        checks=(S + "9_9_a_page_is_of_one_snapshot",),
    ),
    Mutant(
        name="a-page-counts-for-what-was-asked",
        rule="9.9",
        harm="A catch-up of more than a page, or from a source that lags, skips all that the page did not bring.",
        edits=(
            Edit(
                "Reader.receive_page",
                "list(page.payloads), page.upto, fetched=True)\n",
                "list(page.payloads), asked.upto, fetched=True)\n",
            ),
        ),
        checks=(SIMULATOR, R + "case[R3]", R + "rule_9_9_a_page_counts_for_what_it_proves_not_for_what_was_asked"),
    ),
    # --- 9.10: pages and facts
    Mutant(
        name="a-full-page-proves-all-that-was-asked",
        rule="9.10",
        harm="Who was away for more than a page of rows gets the first thousand and nothing else.",
        edits=(Edit("fetch.body", "            proven = tokens[-1]\n", ""),),
        checks=(SIMULATOR, L + "9_10_pages_end_on_fact_boundaries_and_hold_a_whole_fact"),
    ),
    Mutant(
        name="a-page-ends-inside-a-fact",
        rule="9.10",
        harm="A fact of several rows that crosses a page's end is delivered in part, and its rest never.",
        edits=(
            Edit(
                "fetch.body",
                "            if whole > 0:\n                del tokens[whole:], rows[whole:]\n",
                "            if whole > 0:\n                del tokens[limit:], rows[limit:]\n",
            ),
        ),
        checks=(SIMULATOR, L + "9_10_pages_end_on_fact_boundaries_and_hold_a_whole_fact"),
    ),
    Mutant(
        name="a-fact-larger-than-a-page-is-cut",
        rule="9.10",
        harm="The rest of a bulk of more rows than a page has never reaches those who fetch it.",
        edits=(Edit("PostgresDialect.page", "ROWS WITH TIES", "ROWS ONLY"),),
        checks=(
            SIMULATOR,
            L + "9_10_pages_end_on_fact_boundaries_and_hold_a_whole_fact",
        ),
    ),
    Mutant(
        name="a-fact-over-the-frame-bound-is-stepped-over",
        rule="9.10",
        harm="A fact too large for a message is announced as no rows: nobody fetches it.",
        edits=(
            Edit(
                "_Chain.take",
                "                stepped_over, headed = True, False\n",
                "                headed = False\n",
            ),
        ),
        checks=(W + "rules[rule 9.10 a fact over the frame bound is POSITION id id]",),
    ),
    Mutant(
        name="advance-mid-batch",
        rule="9.10",
        harm="A handler gets half a fact; after a crash there it begins behind it, and the other half is lost.",
        edits=(
            Edit(
                "DeliveryQueue._cut",
                """\
        while cut > 0 and tokens[cut] == tokens[cut - 1]:
            cut -= 1
""",
                "",
            ),
        ),
        checks=(SIMULATOR, R + "large_batches_are_cut_at_fact_boundaries_and_small_ones_joined"),
    ),
    # --- 9.11: resettable streams
    Mutant(
        name="frames-without-a-name",
        rule="9.11",
        harm="Rows of a restarted writer are dropped as duplicates of those of its former life.",
        edits=(
            Edit(
                "Writer._compose", "        lines = [self._name_line, *draft.lines]\n", "        lines = draft.lines\n"
            ),
        ),
        checks=(
            SIMULATOR,
            W + "rules[rule 9.11, 9.16 every frame opens with NAME, of resettable streams and of the others]",
        ),
    ),
    Mutant(
        name="a-higher-incarnation-is-no-reset",
        rule="9.11",
        harm="After a writer's restart readers keep what its former life said, and drop what it says now.",
        edits=(
            Edit(
                "Reader._present_life",
                """\
            if known is not None or progress.position:
                self._reset(progress, 0)
""",
                "",
            ),
        ),
        checks=(SIMULATOR, R + "rule_9_11_a_higher_incarnation_is_always_a_reset_in_any_direction"),
    ),
    Mutant(
        name="a-lower-incarnation-counts",
        rule="9.11",
        harm="A late message of a writer's former life resets its stream: readers forget what is true.",
        edits=(
            Edit(
                "Reader._present_life",
                """\
        if known is not None and incarnation < known and not self._outlived(progress, known, incarnation, now):
            self.counters.old_incarnations += 1
            return False
""",
                "",
            ),
        ),
        checks=(R + "rule_9_11_a_lower_incarnation_is_ignored",),
    ),
    Mutant(
        name="a-repeated-frame-is-a-reset",
        rule="9.11",
        harm="A message that Redis delivers twice makes readers forget everything that is kept in memory.",
        edits=(
            Edit(
                "Reader._step_back",
                "        if stream.resettable and foreign:\n",
                "        if stream.resettable:\n",
            ),
        ),
        checks=(SIMULATOR, R + "rule_9_11_a_step_back_within_one_incarnation_is_a_repeated_frame"),
    ),
    Mutant(
        name="a-step-back-is-a-reset-of-any-stream",
        rule="R13",
        harm="A repeated message sends readers of a table's stream back: every row comes a second time.",
        edits=(
            Edit(
                "Reader._step_back",
                "        if stream.resettable and foreign:\n",
                "        if progress.incarnation is None and not (native and progress.stream.resettable):\n",
            ),
        ),
        checks=(SIMULATOR, R + "case[R13]"),
    ),
    Mutant(
        name="rows-of-the-former-life-after-its-reset",
        rule="9.11",
        harm="A handler told to forget gets the old rows once more afterwards.",
        edits=(
            Edit(
                "Reader._reset",
                "        self._move_to(progress, position)\n        progress.target = progress.later = 0\n",
                "        self._forget(progress)\n"
                "        progress.position = progress.queue.delivered = position\n"
                "        progress.target = progress.later = 0\n",
            ),
        ),
        checks=(SIMULATOR, R + "a_reset_while_a_batch_is_being_handled"),
    ),
    Mutant(
        name="what-was-handled-before-a-reset-counts-after-it",
        rule="9.11",
        harm="The position of the old life is saved, and waited for, as one of the new: rows below it are skipped.",
        edits=(
            Edit(
                "Reader._reset",
                "        self._move_to(progress, position)\n        progress.target = progress.later = 0\n",
                "        self._forget(progress)\n        self._empty(progress)\n"
                "        progress.position = position\n        progress.target = progress.later = 0\n",
            ),
        ),
        checks=(SIMULATOR, R + "what_was_handled_before_a_reset_is_no_position_of_the_new_life"),
    ),
    Mutant(
        name="an-emptied-queue-still-asks-to-be-taken-from",
        rule="3",
        harm="A worker is started for nothing, again and again: a processor at 100 %, and a process that hangs.",
        edits=(EMPTIED_STAYS_READY,),
        checks=(R + "a_queue_that_was_emptied_has_nothing_to_take",),
    ),
    Mutant(
        name="every-message-of-the-own-name-is-an-echo",
        rule="9.11",
        harm="A process does not hear that its name was taken over, and its local handlers miss the successor's rows.",
        edits=(
            Edit(
                "writing.Ledger.__init__",
                '        self._own_opening = b"NAME %b %d\\n" % (name.encode(), incarnation)\n',
                '        self._own_opening = b"NAME %b" % name.encode()\n',
            ),
        ),
        checks=(S + "9_11_frames_of_the_own_name_by_another_incarnation_are_no_echoes",),
    ),
    # --- 9.12: exactly-once save
    Mutant(
        name="positions-saved-before-handling",
        rule="9.12",
        harm="A reader that crashes while it handles rows begins behind them next time: lost.",
        edits=(
            Edit(
                "Reading._to_save",
                "            position = progress.queue.delivered\n            if key[1] == self._own",
                "            position = progress.position\n            if key[1] == self._own",
            ),
        ),
        checks=(SIMULATOR, S + "what_was_received_and_not_handled_is_neither_saved_nor_waited_for"),
    ),
    Mutant(
        name="saved-outside-the-handler-s-transaction",
        rule="9.12",
        harm="The handler's transaction rolls back, the position does not: its effects are lost.",
        edits=(
            Edit(
                "Reading._save_batch",
                "        await self._store_changes([change], connection)\n",
                "        await self._store_changes([change])\n",
            ),
        ),
        checks=(SIMULATOR, GAPS + "9_12_a_position_saved_in_a_transaction_is_rolled_back_with_it"),
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
        checks=(SIMULATOR, L + "9_12_a_save_hits_the_row_it_left_or_none"),
    ),
    Mutant(
        name="a-save-does-not-look-where-the-row-was",
        rule="9.12",
        harm="Two processes under one reader name both apply every row: money is booked twice.",
        edits=(Edit("PostgresDialect.save", " AND r.position = v.old ", " "),),
        checks=(
            SIMULATOR,
            L + "9_12_a_save_hits_the_row_it_left_or_none",
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
        checks=(L + "9_12_a_save_hits_the_row_it_left_or_none",),
    ),
    Mutant(
        name="no-reload-after-an-unknown-commit",
        rule="9.12",
        harm="A handler whose COMMIT landed without an answer is called again for the same rows until they are poison.",
        edits=(
            Edit(
                "Reading._handle",
                "                if batch._tried or isinstance(error, ReaderMoved):\n",
                "                if False:\n",
            ),
        ),
        checks=(SIMULATOR, F + "a_handler_that_fails_for_good_after_its_commit_is_no_poison"),
    ),
    Mutant(
        name="no-row-at-registration",
        rule="9.12",
        harm="A reader from now on that crashes before its first save begins at a later now: all between is lost.",
        edits=(
            Edit(
                "Reading._load_durable",
                '{(name, ""): 0} | positions, epoch, oldest=oldest)\n',
                "{key: at for key, at in positions.items() if not at}, epoch)\n",
            ),
        ),
        checks=(SIMULATOR, S + "9_12_the_row_to_save_to_is_inserted_at_registration"),
    ),
    Mutant(
        name="a-writer-that-joined-meanwhile-counts-from-now",
        rule="9.12",
        harm="A durable reader misses what a new writer wrote while the reader was down.",
        edits=(Edit("Reading._load_durable", "starts = {key: 0 if before else ", "starts = {key: 0 if False else "),),
        checks=(B + "a_durable_reader_from_now_owes_all_of_a_writer_that_joins_while_it_is_down",),
    ),
    Mutant(
        name="a-failed-batch-counts-as-handled",
        rule="3",
        harm="Rows on which a handler keeps failing are skipped, with a line in a log.",
        edits=(
            Edit(
                "Reading._failed",
                """\
        log.error("%s: stopped", failure, exc_info=error)
        self.stop(key, failure)
        return False
""",
                """\
        log.error("%s: skipped", failure, exc_info=error)
        core.done(*key)
        return True
""",
            ),
        ),
        checks=(
            SIMULATOR,
            B + "a_poison_row_stops_its_writer_loudly_and_the_others_flow",
        ),
    ),
    Mutant(
        name="a-bare-step-overtakes-the-handler",
        rule="3",
        harm="A POSITION behind rows that are being handled makes them count as handled: lost in a crash.",
        edits=(
            Edit(
                "DeliveryQueue._step",
                "        elif self._entries or self.handling is not None:\n",
                "        elif self._entries:\n",
            ),
        ),
        checks=(SIMULATOR, R + "a_position_behind_a_batch_being_handled_waits_for_it"),
    ),
    Mutant(
        name="a-batch-put-back-goes-to-the-end",
        rule="3",
        harm="After a store's hiccup rows are handled out of order, and the saved position skips some.",
        edits=(
            Edit(
                "DeliveryQueue.put_back",
                "            self._entries.appendleft(Chunk(batch.tokens",
                "            self._entries.append(Chunk(batch.tokens",
            ),
        ),
        checks=(SIMULATOR, GAPS + "3_what_was_put_back_stands_before_what_waits"),
    ),
    # --- 9.13: while catching up
    Mutant(
        name="lines-are-dropped-while-catching-up",
        rule="9.13",
        harm="Rows that arrive during a catch-up are lost, and it ends as live all the same.",
        edits=(Edit("Reader._hold", "        progress.held.append((item, incarnation, cost))\n", ""),),
        checks=(R + "rule_9_13_lines_are_held_in_order_while_catching_up_and_follow_the_same_rules",),
    ),
    Mutant(
        name="positions-are-not-held",
        rule="9.13",
        harm="Held rows pass without the heads between them: a message lost during a catch-up is lost for good.",
        edits=(
            Edit(
                "Reader._hold",
                "        progress.held.append((item, incarnation, cost))\n",
                """\
        if isinstance(item, Position):
            return
        progress.held.append((item, incarnation, cost))
""",
            ),
        ),
        checks=(SIMULATOR, R + "rule_9_13_lines_are_held_in_order_while_catching_up_and_follow_the_same_rules"),
    ),
    Mutant(
        name="live-after-an-overflow",
        rule="9.13",
        harm="Lines dropped for want of room are forgotten: what follows them passes for the next row.",
        edits=(
            Edit(
                "Reader._release",
                "        if overflowed:  # what came after the held lines is unknown\n",
                "        if False:\n",
            ),
        ),
        checks=(R + "rule_9_13_on_overflow_the_newest_are_dropped_and_it_stays_unconnected",),
    ),
    Mutant(
        name="small-lines-are-held-behind-a-dropped-one",
        rule="9.13",
        harm="The end of a fact is kept whose beginning was dropped for want of room: half of it is delivered.",
        edits=(
            Edit(
                "Reader._hold",
                "        if progress.overflowed or full:\n",
                "        if full:\n",
            ),
        ),
        checks=(S + "9_13_after_an_overflow_all_lines_are_dropped_also_small_ones",),
    ),
    Mutant(
        name="rows-held-before-any-position",
        rule="9.13",
        harm="Rows heard during a catch-up that the table began pass for live ones, whatever was lost before them.",
        edits=(
            Edit(
                "Reader._hold",
                "        if isinstance(item, Rows) and not (progress.heard or progress.held):\n",
                "        if False:\n",
            ),
        ),
        checks=(R + "rows_held_before_any_position_are_not_taken_for_live_ones",),
    ),
    Mutant(
        name="held-lines-outlive-the-link",
        rule="9.13",
        harm="What was held of one link is joined to what comes over the next: rows between them are lost.",
        edits=(
            Edit(
                "Reader.disconnected",
                "        for progress in self.progress.values():\n            self._lose(progress)\n",
                "        for progress in self.progress.values():\n"
                "            if progress.state is not State.BOOTSTRAPPING:\n                self._lose(progress)\n",
            ),
        ),
        checks=(R + "a_lost_link_costs_what_is_held_and_not_the_state",),
    ),
    Mutant(
        name="a-writer-first-heard-during-a-bootstrap-is-live",
        rule="9.13",
        harm="Rows of a writer that registered while the snapshot loads are handled before it, and wiped out by it.",
        edits=(Edit("Reader._add", "        if stream.name in self._bootstrapping:  #", "        if False:  #"),),
        checks=(R + "rule_9_13_while_a_snapshot_loads_all_lines_are_held_and_follow_it_in_order",),
    ),
    Mutant(
        name="a-bootstrap-goes-on-where-it-heard",
        rule="9.13",
        harm="Rows between the snapshot and the last line heard while it was loading are skipped.",
        edits=(
            Edit(
                "Reader.bootstrapped",
                "            progress.position = progress.queue.delivered = positions.get(progress.writer, 0)\n",
                "            heard = max(positions.get(progress.writer, 0), progress.later, _end_of_held(progress))\n"
                "            progress.position = progress.queue.delivered = heard\n",
            ),
        ),
        checks=(R + "rule_9_13_while_a_snapshot_loads_all_lines_are_held_and_follow_it_in_order",),
    ),
    Mutant(
        name="an-old-line-of-a-foreign-writer-is-believed",
        rule="9.13",
        harm="Its line is behind what is known, and counts as heard all the same: what was dropped is skipped.",
        edits=(
            Edit(
                "Reader._position",
                "            self._step_back(progress, new)\n            return\n",
                "            progress.heard = True\n            self._step_back(progress, new)\n            return\n",
            ),
        ),
        checks=(
            R + "rows_behind_an_old_line_of_a_foreign_writer_are_not_taken_for_all_there_are[while a snapshot loads]",
        ),
    ),
    Mutant(
        name="an-old-line-held-of-a-foreign-writer-is-believed",
        rule="9.13",
        harm="A held line counts before it is looked at: once caught up, rows that came before it are skipped.",
        edits=(
            Edit(
                "Reader._hold",
                "        # Unknown what came before these rows: once caught up they would pass for live ones.\n",
                "        progress.heard = progress.heard or isinstance(item, Position)\n",
            ),
        ),
        checks=(R + "rows_behind_an_old_line_of_a_foreign_writer_are_not_taken_for_all_there_are[while catching up]",),
    ),
    Mutant(
        name="lines-overtake-those-that-wait-for-room",
        rule="9.13",
        harm="Held lines wait for room in the receive queue, later ones do not: the waiting rows are skipped as known.",
        edits=(
            Edit(
                "Progress.holding",
                "        return self.state is State.BOOTSTRAPPING or self.catching_up or bool(self.held)\n",
                "        return self.state is State.BOOTSTRAPPING or self.catching_up\n",
            ),
        ),
        checks=(R + "held_lines_wait_for_room_and_later_ones_behind_them",),
    ),
    Mutant(
        name="held-lines-flood-the-receive-queue",
        rule="3",
        harm="What was held for hours is pushed into the receive queue at once: what has no room is fetched once more.",
        edits=(
            Edit(
                "Reader._release",
                " and not progress.catching_up and (self.queue_bytes <= limit or not progress.queue.size):\n",
                " and not progress.catching_up:\n",
            ),
        ),
        checks=(R + "held_lines_wait_for_room_and_later_ones_behind_them",),
    ),
    Mutant(
        name="a-queue-full-of-others-keeps-held-lines",
        rule="3",
        harm="Held lines wait until slow handlers of other writers have made room, with nothing of their own in it.",
        edits=(
            Edit(
                "Reader._release",
                " and not progress.catching_up and (self.queue_bytes <= limit or not progress.queue.size):\n",
                " and not progress.catching_up and self.queue_bytes <= limit:\n",
            ),
        ),
        checks=(R + "held_lines_do_not_wait_for_a_queue_that_is_full_of_others",),
    ),
    Mutant(
        name="the-buffer-of-each-writer-alone-is-bounded",
        rule="3",
        harm="Held lines of a thousand writers take a thousand times the memory that full_sync_buffer_limit allows.",
        edits=(
            Edit(
                "Reader._hold",
                "            full = self.buffer_bytes + cost > self.settings.full_sync_buffer_limit\n",
                "            full = progress.held_size + cost > self.settings.full_sync_buffer_limit\n",
            ),
        ),
        checks=(R + "the_buffer_of_all_streams_together_is_bounded_and_what_has_no_room_is_fetched",),
    ),
    Mutant(
        name="the-buffer-never-gets-smaller",
        rule="3",
        harm="What was held counts for ever: from some bootstrap on nothing is held any more, and all is fetched.",
        edits=(
            Edit(
                "Reader._hold_size",
                "            self.buffer_bytes += size - progress.held_size\n",
                "            self.buffer_bytes += max(0, size - progress.held_size)\n",
            ),
        ),
        checks=(R + "a_lost_link_costs_what_is_held_and_not_the_state",),
    ),
    Mutant(
        name="what-the-full-buffer-drops-is-not-due",
        rule="9.13",
        harm="Rows that had no room are fetched only when their writer is heard again, which may be never.",
        edits=(
            Edit(
                "Reader._hold",
                "            progress.later = max(progress.later, _end(item))\n            return\n",
                "            return\n",
            ),
        ),
        checks=(R + "the_buffer_of_all_streams_together_is_bounded_and_what_has_no_room_is_fetched",),
    ),
    Mutant(
        name="what-was-held-when-the-link-was-lost-is-not-due",
        rule="9.13",
        harm="Rows held when the link broke during a bootstrap come only when their writer is heard again.",
        edits=(
            Edit(
                "Reader._forget",
                "        progress.later = max(progress.later, _end_of_held(progress)) if waits else 0\n",
                "        progress.later = progress.later if waits else 0\n",
            ),
        ),
        checks=(R + "a_lost_link_costs_what_is_held_and_not_the_state",),
    ),
    Mutant(
        name="what-is-due-after-the-held-lines-is-not-fetched",
        rule="9.13",
        harm="Positions learned while lines were held are forgotten: a dead writer's last rows never come.",
        edits=(
            Edit(
                "Reader._release",
                "        if later > progress.position:\n            self._gap(progress, later)\n\n",
                "\n",
            ),
        ),
        checks=(R + "held_lines_wait_for_room_and_later_ones_behind_them",),
    ),
    Mutant(
        name="a-learned-position-replaces-what-is-held",
        rule="9.13",
        harm="Held lines are fetched once more, and live ones are taken in ahead of them.",
        edits=(
            Edit(
                "Reader.learned",
                "        elif progress.holding:  # what is held may bring it\n",
                "        elif progress.state is State.BOOTSTRAPPING:  # what is held may bring it\n",
            ),
        ),
        checks=(R + "held_lines_wait_for_room_and_later_ones_behind_them",),
    ),
    Mutant(
        name="what-was-taken-in-before-a-bootstrap-is-handed-out",
        rule="3",
        harm="Rows taken in before the snapshot are handled while it loads, and wiped out by its first part.",
        edits=(
            Edit(
                "Reader._begin_bootstrap",
                "        self._move_to(progress, progress.queue.delivered)\n        self._draining.pop(",
                "        self._forget(progress)\n        self._draining.pop(",
            ),
        ),
        checks=(R + "a_bootstrap_drops_what_was_taken_in_and_not_handled",),
    ),
    Mutant(
        name="what-was-known-before-a-bootstrap-is-not-due",
        rule="3",
        harm="Rows between a snapshot and what was handled before it come only when their writer is heard again.",
        edits=(
            Edit(
                "Reader._begin_bootstrap",
                "        progress.later = _due(progress)\n",
                "",
            ),
        ),
        checks=(
            R + "a_snapshot_older_than_what_was_handled_brings_the_rows_behind_it_once_more",
            R + "a_bootstrap_drops_what_was_taken_in_and_not_handled",
        ),
    ),
    Mutant(
        name="a-bootstrap-skips-what-is-pruned-meanwhile",
        rule="3",
        harm="A page asked for before reports rows as missed that the snapshot brings.",
        edits=(
            Edit(
                "Reader.skip",
                "        if progress.state is State.BOOTSTRAPPING:\n"
                "            return\n"
                "        self._abandon(progress)\n",
                "        self._abandon(progress)\n",
            ),
        ),
        checks=(R + "a_bootstrap_that_is_abandoned_goes_on_where_it_was",),
    ),
    Mutant(
        name="a-bootstrap-forgets-that-it-was-stopped",
        rule="3",
        harm="What an application was told has stopped goes on, and fills the receive queue, for nobody handles it.",
        edits=(
            Edit(
                "Reader.stop",
                "            progress.stops = True\n            return\n",
                "            return\n",
            ),
        ),
        checks=(R + "one_that_is_stopped_while_it_bootstraps_is_stopped_after_it[is over]",),
    ),
    Mutant(
        name="what-is-due-outlives-the-log",
        rule="3",
        harm="After an epoch change a bootstrap waits for positions of the log before: it is never online.",
        edits=(
            Edit(
                "Reader._reset",
                "        progress.target = progress.later = 0\n        self._draining",
                "        progress.target = 0\n        self._draining",
            ),
        ),
        checks=(R + "another_log_while_a_snapshot_loads_voids_what_is_held",),
    ),
    Mutant(
        name="another-log-is-looked-for-below-the-floor",
        rule="3",
        harm="Who bootstraps because its rows were pruned never finds out that the log is another one.",
        edits=(
            Edit(
                "Reader._check_epoch",
                "                at = _due(progress) if progress.state is State.BOOTSTRAPPING else progress.position\n",
                "                at = progress.position\n",
            ),
        ),
        checks=(R + "while_a_snapshot_loads_the_log_is_looked_at_where_its_rows_are",),
    ),
    Mutant(
        name="online-before-what-was-held-is-delivered",
        rule="3",
        harm="A bootstrap says that it is over while rows that were held when the link broke are still missing.",
        edits=(
            Edit(
                "Reader.drained",
                "            done = not progress.holding and progress.queue.delivered >= due\n",
                "            done = not progress.holding\n",
            ),
        ),
        checks=(R + "a_link_lost_while_draining_ends_in_catch_up",),
    ),
    Mutant(
        name="online-while-lines-are-held",
        rule="3",
        harm="A bootstrap says that it is over while its rows are still being caught up with.",
        edits=(
            Edit(
                "Reader.drained",
                "            done = not progress.holding and progress.queue.delivered >= due\n",
                "            done = progress.queue.delivered >= due\n",
            ),
        ),
        checks=(R + "it_is_drained_once_nothing_is_held_since",),
    ),
    Mutant(
        name="a-bootstrap-that-begins-anew-is-drained",
        rule="3",
        harm="What the former bootstrap waited for is waited for in the next one, whatever its snapshot holds.",
        edits=(
            Edit(
                "reader.Reader",
                "        self._draining.pop((progress.stream.name, progress.writer), None)\n\n    def bootstrapped",
                "\n    def bootstrapped",
            ),
        ),
        checks=(R + "what_is_abandoned_is_not_waited_for",),
    ),
    Mutant(
        name="draining-that-fails-is-tried-at-once",
        rule="3",
        harm="While the reader's store cannot be read a bootstrap takes all of the processor, and fills the log.",
        edits=(
            Edit(
                "Bootstrap.failed",
                "        elif isinstance(work, Begin | Apply | Drain):\n",
                "        elif isinstance(work, Begin | Apply):\n",
            ),
        ),
        checks=("test_bootstrap_core.py::test_draining_that_fails_is_tried_again_after_a_pause",),
    ),
    Mutant(
        name="a-paced-bootstrap-does-not-rest",
        rule="3",
        harm="snapshot_rate is ignored: a bootstrap takes the processors that the writers' commits need.",
        edits=(Edit("Bootstrap._plan", "if now >= self._rests_until else []", "if now >= 0 else []"),),
        checks=("test_bootstrap_core.py::test_a_bootstrap_of_a_rate_rests_behind_each_part_for_the_rest_of_its_time",),
    ),
    Mutant(
        name="a-full-receive-queue-drops-silently",
        rule="3",
        harm="A handler that lags loses what does not fit in memory, and nothing says so.",
        edits=(
            Edit(
                "Reader._rows",
                "            self._gap(progress, tokens[-1])  # fetched when there is room\n            return\n",
                "            progress.position = tokens[-1]\n            return\n",
            ),
        ),
        checks=(
            SIMULATOR,
            R + "a_full_receive_queue_drops_to_catch_up_and_loses_nothing",
            B + "a_reader_that_lags_falls_back_to_catch_up_within_its_bound",
        ),
    ),
    # --- 9.14: held batches, and the cases of section 3 that go wrong upstream
    Mutant(
        name="a-held-batch-survives-a-position",
        rule="9.14",
        harm="Rows of a fact that a catch-up has brought whole are delivered once more, as part of the next fact.",
        edits=(Edit("Reader._position", "        self._close_batch(progress)  # rule 9.14\n", ""),),
        checks=(R + "rule_9_14_a_position_clears_a_held_batch",),
    ),
    Mutant(
        name="batch-keyed-by-stream-alone",
        rule="R6",
        harm="One writer's rows are delivered as another's, or dropped with another's duplicate.",
        edits=(
            Edit(
                "Reader._add",
                "        self.progress[stream.name, writer] = progress\n",
                """\
        self.progress[stream.name, writer] = progress
        progress.open = next(other.open for key, other in self.progress.items() if key[0] == stream.name)
""",
            ),
            Edit(
                "Reader._close_batch",
                """\
            self.counters.rows_dropped += len(progress.open)
            progress.open, progress.open_size = [], 0
""",
                "            self.counters.rows_dropped += len(progress.open)\n            progress.open.clear()\n",
            ),
            Edit(
                "Reader._rows",
                """\
            payloads = progress.open + payloads
            progress.open, progress.open_size = [], 0
""",
                "            payloads = progress.open + payloads\n            progress.open.clear()\n",
            ),
        ),
        checks=(R + "case[R6]", R + "case[R7]", R + "case[R8]"),
    ),
    Mutant(
        name="connected-mark-per-stream",
        rule="R9",
        harm="The POSITION of one writer connects all: what another wrote before its own POSITION is lost.",
        edits=(
            Edit(
                "Reader._rows",
                "        if progress.state is not State.LIVE:\n            self.counters.rows_dropped",
                """\
        alike = [one.state for key, one in self.progress.items() if key[0] == progress.stream.name]
        if State.LIVE not in alike:
            self.counters.rows_dropped""",
            ),
        ),
        checks=(R + "case[R9]",),
    ),
    Mutant(
        name="rows-count-before-a-position",
        rule="R1",
        harm="The first row after a reconnect is taken for the next one: all that was missed meanwhile is lost.",
        edits=(
            Edit(
                "Reader._rows",
                "        if progress.state is not State.LIVE:\n            self.counters.rows_dropped",
                "        if progress.state is State.STOPPED:\n            self.counters.rows_dropped",
            ),
        ),
        checks=(R + "case[R1]",),
    ),
    Mutant(
        name="duplicates-are-delivered",
        rule="R2",
        harm="A message that arrives twice, or after a fetch that brought it, is handled twice.",
        edits=(Edit("Reader._rows", "        if tokens[0] <= progress.position:\n", "        if False:\n"),),
        checks=(SIMULATOR, R + "case[R2]", R + "case[R15]"),
    ),
    Mutant(
        name="step-over-a-gap-after-retries",
        rule="R10",
        harm="A database that is away for longer than some retries costs every row of that gap.",
        edits=(
            Edit(
                "Reader._retry_later",
                "            self._move(progress, Event.KEEPS_FAILING)\n",
                "            progress.position = progress.target\n            self._caught_up(progress)\n",
            ),
        ),
        checks=(SIMULATOR, R + "a_catch_up_that_keeps_failing_is_stale_and_still_tries"),
    ),
    Mutant(
        name="deaf-after-a-failed-fetch",
        rule="R10",
        harm="One failed fetch, and that writer's stream is silent until the process restarts.",
        edits=(
            Edit(
                "Reader.fetch_failed",
                "        progress.asked, self._fetching, progress.error = None, self._fetching - 1, error\n",
                "        progress.error = error\n",
            ),
        ),
        checks=(SIMULATOR, R + "case[R10]"),
    ),
    Mutant(
        name="a-page-that-was-given-up-counts",
        rule="3",
        harm="A page asked for before a reset or a disconnect is taken in behind what came since.",
        edits=(
            Edit(
                "Reader.receive_page",
                "        if progress.asked is not asked and self._epoch_check is not asked:\n",
                "        if False:\n",
            ),
        ),
        checks=(
            SIMULATOR,
            R + "a_page_that_comes_after_a_disconnect_is_ignored",
        ),
    ),
    Mutant(
        name="replicate-before-subscribe-is-confirmed",
        rule="2",
        harm="The answer passes before the subscription stands: nothing is taken in until somebody announces again.",
        edits=(
            Edit(
                "RedisLink._subscribe_once",
                "                asked = confirmed = 0\n",
                "                asked = confirmed = 0\n                self._on_up()\n",
            ),
            Edit(
                "RedisLink._subscribe_once",
                "            self._on_up()\n            if self._first",
                "            if self._first",
            ),
        ),
        checks=(GAPS + "2_replicate_follows_the_confirmation_of_the_subscription",),
    ),
    Mutant(
        name="connected-marks-outlive-the-link",
        rule="2",
        harm="Behind a reconnect the first row of a foreign writer is taken for the next one.",
        edits=(
            Edit("Reader.connected", "        self.disconnected()\n        silent", "        silent"),
            Edit("Reading.disconnected", "        self.core.disconnected()\n", ""),
        ),
        checks=(S + "9_14_what_follows_a_lost_link_is_not_trusted_before_a_position",),
    ),
    Mutant(
        name="no-announcement-when-the-publisher-returns",
        rule="2",
        harm="Readers learn only a beat later what was published while the connection was down.",
        edits=(
            Edit(
                "Bus._publish_all",
                "                writing.core.connected(asyncio.get_running_loop().time())\n",
                "                pass\n",
            ),
        ),
        checks=(S + "a_writer_announces_itself_when_only_its_publishing_connection_was_lost",),
    ),
    Mutant(
        name="a-dead-link-is-not-noticed",
        rule="9.21",
        harm="A subscription that Redis forgot, or a half-open link, leaves a process deaf until it is restarted.",
        edits=(
            Edit(
                "Bus._check_link",
                "        if not self._link.connected:\n            return\n        if self",
                "        if bound:\n            return\n        if self",
            ),
        ),
        checks=(S + "hearing_nothing_for_five_beats_forces_a_reconnect",),
    ),
    Mutant(
        name="the-rest-of-a-damaged-message-counts",
        rule="R15",
        harm="Behind a line cut in the middle the next row is taken: the damaged one is lost.",
        edits=(
            Edit(
                "_parse_lines",
                "            at = _parse_run(data, at, frame, room, at_once=runs <= RUNS_AT_ONCE)\n",
                """\
            try:
                at = _parse_run(data, at, frame, room, at_once=runs <= RUNS_AT_ONCE)
            except ParseError as error:
                _note(frame, error)
                end = data.find(b"\\n", at)
                at = len(data) if end < 0 else end + 1
""",
            ),
            Edit("_parse_lines", "            if not is_unknown(line):\n                raise\n", ""),
        ),
        checks=("test_framing.py::test_frames[rest is dropped]",),
    ),
    Mutant(
        name="waiters-wake-at-any-writer-s-position",
        rule="R11",
        harm="wait_for returns before the row it waits for was handled: a read after it misses the own write.",
        edits=(
            Edit(
                "Reading._wake",
                "            delivered = self.core.delivered(*key)\n            while waiters",
                """\
            delivered = max(self.core.positions().get(key[0], {0: 0}).values())
            while waiters""",
            ),
        ),
        checks=(SIMULATOR, GAPS + "r11_a_wait_for_one_writer_goes_on_while_another_advances_past_it"),
    ),
    Mutant(
        name="a-wait-that-ran-out-pretends",
        rule="3",
        harm="wait_for returns though the row was not handled: a read after it misses it.",
        edits=(
            Edit(
                "asyncio.reading.Reading.wait_for",
                "            raise WaitTimeout(*key, token, self.core.delivered(*key), timeout) from None\n",
                "            return\n",
            ),
        ),
        checks=(SIMULATOR, B + "r11_waiting_for_one_writer"),
    ),
    # --- 9.15: the sequence
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
        checks=(L + "9_15_the_sequence_is_verified",),
    ),
    Mutant(
        name="an-id-that-is-not-new-is-used",
        rule="9.15",
        harm="After a restore that set the sequence back, facts get IDs that readers have passed: never delivered.",
        edits=(
            Edit(
                "IdGenerator._check",
                """\
        if runs[0][0] <= ticket.known:
            raise SequenceWentBack(self.stream, runs[0][0], ticket.known)
""",
                "",
            ),
            Edit(
                "IdGenerator._check",
                "            if in_use or first <= self._upto or self._complete.overlaps(first, last):\n",
                "            if in_use:\n",
            ),
        ),
        checks=(
            SIMULATOR,
            I + "an_id_that_is_not_new_is_never_used",
            S + "9_15_a_sequence_that_went_back_is_refused_while_running",
        ),
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
        checks=(L + "9_15_a_sequence_behind_the_table_is_repaired",),
    ),
    # --- retention, epochs, the own name
    Mutant(
        name="pruning-does-not-move-the-floor",
        rule="9",
        harm="Who fetches below what was pruned gets a page without those rows, and no word of it.",
        edits=(
            Edit(
                "_prune_batch",
                """\
f"UPDATE busrep_positions SET floor = {dialect.largest}(floor, ?) WHERE stream = ? AND writer = ?",
            (top,""",
                """\
f"UPDATE busrep_positions SET floor = {dialect.largest}(floor, ?) WHERE stream = ? AND writer = ?",
            (0,""",
            ),
        ),
        checks=(L + "pruning_moves_the_floor_and_a_fetch_below_it_is_told",),
    ),
    Mutant(
        name="a-fetch-below-the-floor-is-answered",
        rule="8",
        harm="Who was away for longer than rows are kept goes on without those rows, and no word of it.",
        edits=(Edit("fetch.body", "        if after < floor and after < upto:\n", "        if False:\n"),),
        checks=(L + "pruning_moves_the_floor_and_a_fetch_below_it_is_told",),
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
        checks=(L + "pruning_stops_at_registered_readers_up_to_a_cap",),
    ),
    Mutant(
        name="pages-of-another-log-are-taken-in",
        rule="9",
        harm="After a restore from a backup readers mix rows of two logs, and skip what the new one has below them.",
        edits=(
            Edit(
                "Reader._verify_epoch",
                """\
        if self.new_epoch is None:
            self.counters.epoch_changes += 1
        self.new_epoch = found
        return False
""",
                "        self.epoch = found\n        return True\n",
            ),
        ),
        checks=(SIMULATOR, R + "a_page_of_another_epoch_is_not_delivered"),
    ),
    Mutant(
        name="saved-positions-of-another-log-count",
        rule="9",
        harm="A reader that was down during a restore begins in the middle of the new log: all before it is lost.",
        edits=(
            Edit(
                "Reading._load_durable", "            if state.epoch not in (None, epoch):\n", "            if False:\n"
            ),
        ),
        checks=(S + "saved_positions_of_another_epoch_are_not_gone_on_from",),
    ),
    Mutant(
        name="a-restore-leaves-the-writers-their-names",
        rule="9",
        harm="A process from before the restore goes on writing with IDs of the old log.",
        edits=(
            Edit(
                "restored.body",
                'f"UPDATE busrep_writers SET incarnation = {dialect.largest}(incarnation, ?) + 1", (now,)',
                'f"UPDATE busrep_writers SET incarnation = {dialect.largest}(incarnation, ? * 0)", (now,)',
            ),
            Edit(
                "restored.body",
                '"UPDATE busrep_writers SET finished = 0"',
                '"UPDATE busrep_writers SET finished = finished"',
            ),
        ),
        checks=(L + "restored_changes_the_epoch_and_fences_everybody",),
    ),
    Mutant(
        name="incarnations-begin-anew-after-a-restore",
        rule="9.4",
        harm="A name gets an incarnation a second time: a process from before the restore passes for its successor.",
        edits=(
            Edit("_win", "            (writer, now, won_by, random", "            (writer, 1, won_by, random"),
            Edit("_win", "CLAIMS_LEFT_OUT), now - 1),\n", "CLAIMS_LEFT_OUT), 0),\n"),
        ),
        checks=(SIMULATOR, L + "restored_gives_no_incarnation_out_again"),
    ),
    Mutant(
        name="a-new-epoch-throws-out-what-a-twin-has-saved-in-it",
        rule="9.12",
        harm="Of two processes under one reader name the second to notice a restore sends both back to the beginning.",
        edits=(
            Edit(
                "reset.body",
                '            Sql("DELETE FROM busrep_readers WHERE reader = ? AND epoch <> ?", (reader, epoch)),\n',
                '            Sql("DELETE FROM busrep_readers WHERE reader = ?", (reader,)),\n',
            ),
        ),
        checks=(SIMULATOR, L + "9_12_of_two_that_begin_anew_the_second_keeps_what_the_first_saved"),
    ),
    Mutant(
        name="saved-over-a-position-known-to-be-further",
        rule="9.12",
        harm="A reader that was told that its twin is further handles the same rows a second time.",
        edits=(
            Edit(
                "Reading.check_saving",
                " or self._saved.get(key, batch.after + 1) > batch.after:\n",
                " or key not in self._saved:\n",
            ),
        ),
        checks=(S + "9_12_a_handler_s_save_never_takes_back_what_another_process_saved",),
    ),
    Mutant(
        name="a-refuted-epoch-is-never-asked-about-again",
        rule="9",
        harm="Refuted by a replica that lags, a restore is not noticed: rows of two logs are mixed.",
        edits=(
            Edit(
                "Reader._verify_epoch",
                "                self._epoch_retry_at = now + self.settings.retry_max\n                return False\n",
                '                self._epoch_retry_at = float("inf")\n                return False\n',
            ),
        ),
        checks=(SIMULATOR, R + "a_refuted_epoch_is_asked_about_again_when_it_is_announced_again"),
    ),
    # --- 9.16: who speaks, and of which log
    Mutant(
        name="what-is-said-of-another-log-counts",
        rule="9.16",
        harm="A writer from before a restore announces over IDs that its successor gives out again: skipped.",
        edits=(
            Edit(
                "Reader._current",
                "        if not speakers.trusted(writer, self.epoch):\n",
                "        if False:\n",
            ),
        ),
        checks=(
            SIMULATOR,
            R + "rule_9_16_what_a_writer_of_another_log_says_is_not_taken_for_positions_in_this_one",
            R + "rule_9_16_after_an_epoch_change_writers_of_the_new_log_count_and_those_of_the_old_do_not",
        ),
    ),
    Mutant(
        name="own-facts-hide-those-of-a-predecessor",
        rule="9",
        harm="What a crashed process committed never reaches the handlers of the one that took its place.",
        edits=(
            Edit(
                "Reading.own_counts",
                """\
        return stream not in self._own_from or self.core.delivered(stream, self._own or "") >= self._own_from[stream]
""",
                "        return True\n",
            ),
        ),
        checks=(F + "own_facts_do_not_hide_those_a_predecessor_left",),
    ),
    Mutant(
        name="a-predecessor-s-rows-are-not-fetched",
        rule="9",
        harm="What a crashed process committed never reaches the handlers of the one that took its place.",
        edits=(
            Edit(
                "Reading._learn",
                "            self.core.learned(*key, position)\n",
                "            self.core.learned(*key, 0)\n",
            ),
        ),
        checks=(SIMULATOR, B + "a_reader_that_writes_too_gets_what_its_dead_predecessor_committed"),
    ),
    Mutant(
        name="a-predecessor-s-rows-are-given-up-with-the-link",
        rule="9",
        harm="Redis restarts while they are fetched: nobody announces the own name, so they never come.",
        edits=(
            Edit(
                "Reading._learn_own",
                "        for stream, position in self._own_from.items():\n            self.core.learned(",
                "        for stream, position in {}.items():\n            self.core.learned(",
            ),
        ),
        checks=(F + "a_link_lost_while_a_predecessor_s_rows_are_fetched_does_not_end_that",),
    ),
    Mutant(
        name="the-own-name-with-a-higher-incarnation-is-ignored",
        rule="9",
        harm="A process that was replaced while its database was away goes on publishing under the name.",
        edits=(
            Edit(
                "Bus._command",
                "            elif command.incarnation is not None and command.incarnation > writing.incarnation:\n",
                "            elif False:\n",
            ),
        ),
        checks=(
            "test_trust.py::test_9_19_a_name_that_is_claimed_anew_fences_at_once",
            "test_trust.py::test_9_19_a_writer_without_a_claim_has_nothing_but_the_wire",
        ),
    ),
    Mutant(
        name="a-replicate-while-one-is-answered-gets-nothing",
        rule="9",
        harm="Who asks just after an answer was composed hears nothing, and stays deaf until the next heartbeat.",
        edits=(
            Edit(
                "Writer._compose",
                "            self._announce = False\n            self._to_announce.extend(self._rolls)\n",
                "            self._to_announce.extend(self._rolls)\n        self._announce = False\n",
            ),
            Edit(
                "Writer._compose",
                "        if self._to_announce:\n            roll",
                "        if self._to_announce:\n            self._announce = False\n            roll",
            ),
        ),
        checks=(W + "rules[rule 9 a REPLICATE after an answer was composed gets another]",),
    ),
    Mutant(
        name="invalidations-echo-the-progress-of-others",
        rule="W6",
        harm="On a stream that follows nobody each write makes every process publish: a storm that grows with them.",
        edits=(
            Edit(
                "_Chain.goal",
                "        if self.stream.follows or self.dropped > self.position:\n",
                "        if self.position:\n",
            ),
        ),
        checks=(W + "invalidations_do_not_echo_others",),
    ),
    # --- found by simulation: each was in the source until runs of the simulator, or of the soak, showed it
    Mutant(
        name="save-every-zero-spins",
        rule="5",
        harm="With save_every=0 the task that saves positions never waits: it takes a whole processor.",
        edits=(
            Edit(
                "Reading.keep_saving",
                "await asyncio.sleep(self._settings.save_every or self._settings.heartbeat)",
                "await asyncio.sleep(self._settings.save_every)",
            ),
        ),
        checks=(SIMULATOR, F + "without_a_pause_between_saves_nothing_goes_round_idle"),
    ),
    Mutant(
        name="a-stopped-stream-stays-ready",
        rule="3",
        harm="A stream stops on a poison row while more rows wait: its worker is started over and over, at full load.",
        edits=(
            EMPTIED_STAYS_READY,
            Edit(
                "Reading.pump",
                " and key not in self.stopped and key not in self._cancelled:",
                " and key not in self._cancelled:",
            ),
        ),
        checks=(SIMULATOR, F + "a_stopped_writer_with_rows_waiting_makes_no_tasks"),
    ),
    Mutant(
        name="the-reset-of-a-stopped-stream-spins",
        rule="3",
        harm="A new epoch while a stream is stopped: its worker is started over and over, at full load.",
        edits=(
            Edit(
                "Reading.pump",
                " and key not in self.stopped and key not in self._cancelled:",
                " and key not in self._cancelled:",
            ),
            Edit(
                "Reading._change_epoch",
                """\
                for key in list(self.stopped):  # on a row, or a position, of the log before
                    del self.stopped[key]
                    core.resume(*key)
""",
                "",
            ),
        ),
        checks=(SIMULATOR, F + "a_stopped_writer_with_rows_waiting_makes_no_tasks"),
    ),
    Mutant(
        name="what-stopped-in-the-old-log-stays-stopped",
        rule="9",
        harm="A poison row that a restore took away keeps its stream stopped: rows of the new log wait for ever.",
        edits=(
            Edit(
                "Reading._change_epoch",
                """\
                for key in list(self.stopped):  # on a row, or a position, of the log before
                    del self.stopped[key]
                    core.resume(*key)
""",
                "",
            ),
        ),
        checks=(S + "what_stopped_in_the_old_log_goes_on_in_the_new_one",),
    ),
    Mutant(
        name="a-restored-sequence-stops-for-good",
        rule="9",
        harm="A reader that meets the restored sequence before the new epoch stops, and stays stopped in the new one.",
        edits=(
            Edit(
                "SilentWriters.check_sequences",
                "            if epoch == log_read:\n                self._reading.above_sequence(",
                "            if True:\n                self._reading.above_sequence(",
            ),
            Edit(
                "Reading._change_epoch",
                """\
                for key in list(self.stopped):  # on a row, or a position, of the log before
                    del self.stopped[key]
                    core.resume(*key)
""",
                "",
            ),
        ),
        checks=(S + "a_sequence_of_a_restored_log_stops_nobody_who_has_not_seen_its_epoch",),
    ),
    Mutant(
        name="a-restore-raises-incarnations-by-one",
        rule="9.4",
        harm="After a restore a claim gives out the incarnation that a process from before it holds: both write.",
        edits=(
            Edit(
                "restored.body",
                'incarnation = {dialect.largest}(incarnation, ?) + 1", (now,)),',
                'incarnation = {dialect.largest}(incarnation, ?) + 1", (0,)),',
            ),
            Edit("_win", "random.randint(CLAIMS_LEFT_OUT // 1_000, CLAIMS_LEFT_OUT), now - 1),", "0, 0),"),
        ),
        checks=(L + "restored_gives_no_incarnation_out_again",),
    ),
    Mutant(
        name="writers-of-another-log-are-believed",
        rule="9.16",
        harm="A writer takes IDs of a log that is gone for given out in this one: it announces, and refuses, by them.",
        edits=(
            Edit(
                "Ledger.heard",
                "if speakers.speaking(item.writer) != claim or not speakers.trusted(item.writer, epoch):\n",
                "if speakers.speaking(item.writer) != claim:\n",
            ),
        ),
        checks=(S + "9_16_a_writer_learns_nothing_from_one_of_another_log",),
    ),
    Mutant(
        name="an-epoch-that-nobody-announces-is-not-noticed",
        rule="9",
        harm="A restored log whose writers are all dead is never noticed by a reader that is up.",
        edits=(
            Edit(
                "SilentWriters.look",
                "        core.doubt(await self._store.epoch())  # which nobody may be there to announce\n",
                "",
            ),
        ),
        checks=(S + "a_restore_that_no_writer_lives_to_announce_is_noticed",),
    ),
    Mutant(
        name="a-loop-hands-out-what-it-had-handled",
        rule="4",
        harm="A batch comes again although the next one was asked for, when the loop ends at that moment.",
        edits=(
            Edit(
                "asyncio.reading.Reading.follow",
                "                await asyncio.sleep(0)\n            finally:\n                for stream in streams:",
                "                pass\n            finally:\n                for stream in streams:",
            ),
        ),
        checks=(SIMULATOR, GAPS + "4_a_batch_does_not_come_again_once_the_next_was_asked_for"),
    ),
    Mutant(
        name="a-loop-is-handed-a-batch-of-a-log-that-is-gone",
        rule="4",
        harm="After a new epoch bus.follow() still yields a batch of the old log that had waited for the loop.",
        edits=(
            Edit(
                "asyncio.reading.Reading.follow",
                "                if not self._in_hand((batch.stream.name, batch.writer), batch._raw):",
                "                if False:",
            ),
        ),
        checks=(GAPS + "4_a_batch_of_a_log_that_is_gone_is_not_handed_to_a_loop",),
    ),
    Mutant(
        name="a-reload-takes-back-what-a-handler-saved-meanwhile",
        rule="9.12",
        harm="A timed save that lost reads the saved positions, a handler saves, and its rows are handled again.",
        edits=(
            Edit(
                "Reading._compare_saved",
                "            if self._saved.get(key, 0) > known.get(key, 0):\n",
                "            if False:\n",
            ),
        ),
        checks=(S + "9_12_a_handler_that_saves_while_a_timed_save_reloads_is_not_called_again",),
    ),
    Mutant(
        name="a-registration-slips-into-the-new-log",
        rule="9.12",
        harm="A position of the old log is registered while the new one begins: readers step over facts of it.",
        edits=(
            Edit(
                "Reading._reload",
                """\
            async with self._saving:
                state = await self._reader_store.load_reader(self._name)
                void = key[0]""",
                """\
            if True:
                state = await self._reader_store.load_reader(self._name)
                void = key[0]""",
            ),
        ),
        checks=(GAPS + "9_12_a_registration_of_the_log_before_does_not_slip_into_the_new_one",),
    ),
    Mutant(
        name="where-a-batch-of-the-old-log-began-is-registered",
        rule="9.12",
        harm="A writer that joined before a restore is registered after it, at its old position: facts are skipped.",
        edits=(
            Edit(
                "Reading._registered",
                "                if not self._in_hand(key, raw):  # of a log that is gone by now",
                "                if False:  # of a log that is gone by now",
            ),
        ),
        checks=(GAPS + "9_12_where_a_batch_of_the_log_before_began_is_not_registered_in_the_new_one",),
    ),
    Mutant(
        name="positions-of-several-logs-pass-for-one",
        rule="9.12",
        harm="A position that another process registered in the old log is taken for one of the new log.",
        edits=(
            Edit(
                "load.body",
                "        epoch=MIXED if len(epochs) > 1 else next(iter(epochs), None),\n",
                "        epoch=min(epochs, default=None),\n",
            ),
        ),
        checks=(L + "9_12_positions_of_several_logs_are_of_none",),
    ),
    Mutant(
        name="dropped-facts-are-not-announced-until-something-else-is",
        rule="4",
        harm="A writer that closes waits for what nothing publishes: a processor at 100 %, until it gives up.",
        edits=(
            Edit(
                "Writer._bound",
                "            self._queued_bytes -= largest.drop()\n            self._mark(largest)\n",
                "            self._queued_bytes -= largest.drop()\n",
            ),
        ),
        checks=(W + "what_is_due_is_published_also_when_rows_are_dropped_behind_an_open_fact",),
    ),
    Mutant(
        name="a-lagging-registry-is-taken-for-all-writers",
        rule="9.7",
        harm="A reader on a replica takes a position for linear while a writer that joined has an ID open below it.",
        edits=(Edit("asyncio.bus.Bus.linear_position", "            if lags:\n", "            if False:\n"),),
        checks=(GAPS + "9_7_a_registry_that_lags_bounds_the_linear_position_by_its_own_positions",),
    ),
    Mutant(
        name="the-publisher-stays-with-the-old-master",
        rule="2",
        harm="After a failover a writer publishes to the old master for ever, where nobody hears it.",
        edits=(
            Edit(
                "RedisLink.open_publisher",
                "        if self._publisher is not None and not self._publisher_doubted:\n",
                "        if self._publisher is not None:\n",
            ),
        ),
        checks=("test_soak.py::test_connections_that_ended_up_on_two_masters_find_together",),
    ),
    Mutant(
        name="a-fenced-writer-hands-out-its-own-facts",
        rule="9.2",
        harm="A fenced process that reads, not the first of its name, hands its own facts to its own handlers.",
        edits=(
            Edit(
                "asyncio.reading.Reading.disown",
                """\
        counted = {stream for stream in self.core.followed if self.own_counts(stream)}
        own, self._own = self._own, None
""",
                """\
        own, self._own = self._own, None
        counted = {stream for stream in self.core.followed if self.own_counts(stream)}
""",
            ),
        ),
        checks=(GAPS + "9_2_a_fenced_writer_that_reads_does_not_hand_out_its_own_facts",),
    ),
    Mutant(
        name="a-batch-that-was-given-up-is-handed-out",
        rule="9.12",
        harm="A batch given up while its reader was registered, or between two tries, is handled, and comes again.",
        edits=(
            Edit(
                "Reading._handle",
                """\
            if not self._in_hand(key, raw):  # while it was registered, or paused for: stopped, or of a log that is gone
                return True
""",
                "",
            ),
        ),
        checks=(
            GAPS + "9_12_a_batch_given_up_while_it_is_registered_is_not_handed_to_the_next_loop",
            GAPS + "9_12_a_batch_given_up_between_two_tries_is_not_tried_again",
        ),
    ),
    Mutant(
        name="own-positions-count-before-they-are-known",
        rule="9",
        harm="A process that reads and writes says, and saves, that it is past what its predecessor left unhandled.",
        edits=(
            Edit(
                "Reading.own_counts",
                "        if stream in self._following and stream not in self.core.followed:\n"
                "            return False\n",
                "",
            ),
        ),
        checks=(GAPS + "9_own_positions_count_once_those_of_the_predecessor_are_known",),
    ),
    Mutant(
        name="own-positions-of-the-log-before-count",
        rule="9.16",
        harm="A process whose reading half is in another log already saves its own positions of the one before.",
        edits=(Edit("Reading._change_epoch", "                self._on_epoch(found)\n", ""),),
        checks=(GAPS + "9_16_own_positions_of_the_log_before_are_not_saved_in_the_new_one",),
    ),
    Mutant(
        name="registering-does-not-wait-for-pruning",
        rule="9",
        harm="A reader that registers while its stream is pruned begins below the floor: it stops at once, for good.",
        edits=(
            Edit(
                "register.body",
                "loading = yield (Control.BEGIN, *_unpruned(dialect, positions), Sql(LOADING, (reader,)))\n",
                "loading = yield (Control.BEGIN, Sql(LOADING, (reader,)))\n",
            ),
        ),
        checks=(
            "test_sim_store.py::test_the_simulation_answers_as_postgresql"
            "[a reader that registers waits for who prunes the stream]",
        ),
    ),
    Mutant(
        name="beginning-anew-does-not-wait-for-pruning",
        rule="9",
        harm="A restored log is pruned by positions that are just being replaced: their reader stops at the rows gone.",
        edits=(
            Edit(
                "reset.body",
                "        yield (Control.BEGIN, *_unpruned(dialect, positions))\n",
                "        yield Control.BEGIN\n",
            ),
        ),
        checks=(
            "test_sim_store.py::test_the_simulation_answers_as_postgresql"
            "[a reader that begins anew waits for who prunes the stream]",
        ),
    ),
    Mutant(
        name="begun-at-a-floor-that-was",
        rule="9",
        harm="A reader is registered below a floor that moved since it looked: it stops there after a restart.",
        edits=(
            Edit(
                "register.body",
                "        raised = _raised(positions, floors if here == epoch else {}, oldest)\n",
                "        raised = positions\n",
            ),
        ),
        checks=(L + "a_reader_that_begins_at_the_oldest_row_begins_where_pruning_got_to",),
    ),
    Mutant(
        name="floors-of-another-log-believed",
        rule="9",
        harm="A reader that saves elsewhere begins at the floor of another log: rows are skipped without a word.",
        edits=(
            Edit(
                "reset.body",
                "        raised = _without(_raised(positions, floors if here == epoch else {}, positions), loading)\n",
                "        raised = _without(_raised(positions, floors, positions), loading)\n",
            ),
        ),
        checks=(L + "a_reader_that_begins_at_the_oldest_row_begins_where_pruning_got_to",),
    ),
    Mutant(
        name="begun-anew-at-a-floor-that-was",
        rule="9",
        harm="A reader of a restored log is registered below a floor that moved since it looked: it stops there.",
        edits=(
            Edit(
                "reset.body",
                "        raised = _without(_raised(positions, floors if here == epoch else {}, positions), loading)\n",
                "        raised = _without(positions, loading)\n",
            ),
        ),
        checks=(L + "a_reader_that_begins_at_the_oldest_row_begins_where_pruning_got_to",),
    ),
    Mutant(
        name="a-lagging-replica-s-epoch-replaces-the-log-s-own",
        rule="9.12",
        harm="A process that was told of the epoch before throws out what its twin has saved in this one: rows twice.",
        edits=(
            Edit(
                "reset.body", "        if here != epoch and here in {row[1] for row in held}:\n", "        if False:\n"
            ),
        ),
        checks=(L + "9_12_positions_of_the_log_that_is_kept_here_are_replaced_by_none_of_another",),
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
        checks=(B + "a_savepoint_rolled_back_inside_the_block_does_not_let_go_of_the_claim",),
    ),
    Mutant(
        name="any-transaction-of-the-connection-will-do",
        rule="9.1",
        harm="Rows are inserted in another transaction than the one whose outcome decides of their fact.",
        edits=(
            Edit(
                "ServerTransaction._leave_to_caller",
                "        if await self._lock() != self.marker:\n",
                "        if await self._lock() is None:\n",
            ),
        ),
        checks=(B + "a_transaction_that_ends_inside_the_block_is_told",),
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
        checks=(B + "a_connection_of_another_database_leaves_the_writer_alone",),
    ),
    Mutant(
        name="what-was-pruned-since-is-no-loss",
        rule="9",
        harm="A reader that began at the oldest row steps over rows written and pruned later, without a word.",
        edits=(Edit("Reading._begins_later", " or error.floor > last:", ":"),),
        checks=(S + "9_what_was_written_since_and_pruned_is_no_later_beginning",),
    ),
    Mutant(
        name="other-streams-of-the-name-forgotten",
        rule="9.12",
        harm="After a restore a stream that this process does not follow yet begins from now: all between is lost.",
        edits=(
            Edit(
                "Reading._begin_anew",
                "streams = {*names, *before.streams}\n",
                "streams = {*names}\n",
            ),
        ),
        checks=(S + "9_12_every_stream_of_a_reader_begins_anew_with_the_log",),
    ),
    Mutant(
        name="begins-later-with-rows-in-hand",
        rule="9",
        harm="A reader that has been handed the oldest rows steps over those pruned behind them without a word.",
        edits=(Edit("Reading._handle", "            self._oldest.pop(key, None)\n", ""),),
        checks=(S + "9_rows_pruned_behind_those_in_hand_are_reported",),
    ),
    Mutant(
        name="rows-that-a-twin-has-handled-stop-a-reader",
        rule="9.12",
        harm="Of two processes under one reader name the slower one stops at rows that the other handled, now pruned.",
        edits=(
            Edit(
                "Reading._fetch",
                " and not await self._handled_by_a_twin(error):\n",
                ":\n",
            ),
        ),
        checks=(GAPS + "9_12_rows_that_a_twin_has_handled_and_that_were_pruned_stop_nobody",),
    ),
    # --- threads: what the soak over busrep.sync found, and a review after it
    Mutant(
        name="a-name-won-back-without-an-answer-is-another-s",
        rule="9.4",
        harm="A process that wins its name back, and gets no answer, takes it for another's: it never writes again.",
        edits=(Edit("_win", "    won_by = None if again is None else -again  # below", "    won_by = None  # below"),),
        checks=(
            THREADS + "a_name_won_back_without_an_answer_is_this_process_s_still[once]",
            "test_sync_stores.py::test_a_name_is_won_back_only_while_it_is_nobody_else_s[sqlite]",
        ),
    ),
    Mutant(
        name="a-win-back-without-an-answer-waits-for-the-next-fact",
        rule="9.4",
        harm="Until then readers may finish what was won, and nothing tells any more whose it was: the name is lost.",
        edits=(
            Edit(
                "WinningBack.failed",
                "        elif self._tried:\n            raise error\n",
                "        elif isinstance(error, Unavailable):\n            raise error\n",
            ),
        ),
        checks=(THREADS + "a_name_won_back_without_an_answer_is_this_process_s_still[once]",),
    ),
    Mutant(
        name="a-silent-writer-is-fenced-twice",
        rule="9.5",
        harm="Two readers finish a silent process one after the other: it cannot win its name back.",
        edits=(
            Edit(
                "_fence",
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
        checks=("test_sync_stores.py::test_a_name_is_won_back_though_it_was_finished_by_two[sqlite]",),
    ),
    Mutant(
        name="a-name-finished-while-it-is-won-back-is-lost",
        rule="9.4",
        harm="A process that was stopped between winning its name back and noting so takes it for another's.",
        edits=(
            Edit(
                "WinningBack.failed",
                "            if error.incarnation <= self.again:\n                raise error\n",
                "            raise error\n",
            ),
        ),
        checks=(THREADS + "a_name_that_was_finished_while_it_was_won_back_is_won_back_again",),
    ),
    Mutant(
        name="a-writer-that-does-not-listen-stays-with-an-old-master",
        rule="9",
        harm="After a failover it publishes to a server that passes nothing on: facts come late, through the table.",
        edits=(
            Edit(
                "Publisher.publish",
                "        elif now - self._heard_at > self._deaf_after:\n            self.drop()\n",
                "",
            ),
        ),
        checks=("test_soak.py::test_a_writer_in_threads_does_not_stay_with_an_old_master",),
    ),
    Mutant(
        name="an-answered-commit-is-taken-back",
        rule="9.1",
        harm="A time limit strikes between COMMIT's answer and its booking: the fact is announced as none.",
        edits=(
            Edit(
                "BlockingTransaction.commit",
                "        except BusrepError:\n            self.in_doubt = False\n            raise\n",
                "        except BusrepError:\n            self.in_doubt = False\n            raise\n"
                "        self.in_doubt = False\n",
            ),
        ),
        checks=(RACES + "a_fact_interrupted_after_its_commit_is_never_announced_as_none",),
    ),
    Mutant(
        name="a-doubt-is-noted-twice",
        rule="9.1",
        harm="Interrupted while it is noted, a fact in doubt is completed twice: the next write raises for no reason.",
        edits=(
            Edit(
                "sync.writing.Fact._doubt",
                "        self._booked = True\n        note(doubt)\n",
                "        note(doubt)\n        self._booked = True\n",
            ),
        ),
        checks=(RACES + "a_doubt_that_is_interrupted_while_it_is_noted_is_one_doubt[False]",),
    ),
    Mutant(
        name="an-end-that-is-interrupted-before-it-begins-is-none",
        rule="9.1",
        harm="The fact stays open for as long as somebody holds it, and holds back all later ones of its process.",
        edits=(
            Edit(
                "Fact.__exit__",
                """\
        except BaseException:
            if not self._booked and self._session is not None and writing.here(raising=False):
                self._doubt(self._session)  # interrupted before it could begin to end
            raise
""",
                "",
            ),
        ),
        checks=(RACES + "a_fact_whose_end_is_interrupted_before_it_begins_holds_nothing_up[deployment]",),
    ),
    Mutant(
        name="an-interrupted-thread-keeps-its-turn",
        rule="4",
        harm="On SQLite one Ctrl-C at the wrong moment, and the process never writes again.",
        edits=(
            Edit(
                "BlockingSqliteStore._write",
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
        edits=(
            Edit(
                "BlockingSqliteStore.writing",
                """\
        with translating(self.path):
            if connection.in_transaction:  # of a thread that was interrupted in it
                connection.execute("ROLLBACK")
""",
                "",
            ),
        ),
        checks=(RACES + "on_sqlite_an_interrupted_thread_leaves_no_transaction",),
    ),
    Mutant(
        name="in-threads-own-positions-of-the-log-before-count",
        rule="9.16",
        harm="A process that writes and reads saves its own positions in a restored log, and skips what they cover.",
        edits=(
            Edit(
                "ReadingBus._epoch_changed",
                """\
            if writing.lost is not None:  # now, before anything is saved in the new log
                self._reading.disown()
""",
                "",
            ),
        ),
        checks=(RACES + "own_positions_of_the_log_before_are_not_saved_in_the_new_one",),
    ),
    Mutant(
        name="who-lost-its-name-reads-on-beside-it",
        rule="9",
        harm="A process that lost its name, and begins to read, takes all that its successor writes for its own: lost.",
        edits=(
            Edit(
                "Bus._make_reading_bus",
                "        beside = None if self._writing is None or self._writing.lost is not None else self.writer\n",
                "        beside = self.writer\n",
            ),
            Edit(
                "Bus._begin_reading",
                "        if writing is not None and writing.lost is not None:  # meanwhile\n"
                "            reading.disown()\n",
                "",
            ),
        ),
        checks=(
            RACES + "who_begins_to_read_when_the_name_is_lost_gets_what_the_successor_writes[before]",
            RACES + "who_begins_to_read_when_the_name_is_lost_gets_what_the_successor_writes[while]",
        ),
    ),
    Mutant(
        name="own-facts-begin-where-the-name-was-won-back",
        rule="9",
        harm="A process gets facts of its own from before its name was finished: its handlers do their work twice.",
        edits=(
            Edit(
                "ReadingBus.__init__",
                "            self._reading.own_starts = writing.starts\n",
                "            claim = writing.session.claim\n"
                "            self._reading.own_starts = {} if claim is None else claim.starts\n",
            ),
        ),
        checks=(RACES + "facts_of_an_earlier_incarnation_are_own_facts",),
    ),
    Mutant(
        name="rows-in-memory-go-down-with-their-incarnation",
        rule="9.11",
        harm="A fact of a stream in memory ends after its writer began anew: nobody gets it, and nobody is told.",
        edits=(Edit("Fact._complete", "        if not taken:\n            self._tell_what_is_gone()\n", ""),),
        checks=(RACES + "a_fact_in_memory_whose_incarnation_has_ended_says_that_it_was_not_published",),
    ),
    Mutant(
        name="a-bus-that-others-are-opening-is-closed",
        rule="4",
        harm="Of several threads that write first, at the same time, all but one are told that the bus is closed.",
        edits=(
            Edit(
                "sync.bus.Bus._check_open",
                '        if self._state in ("new", "opening"):\n',
                '        if self._state == "new":\n',
            ),
        ),
        checks=(THREADS + "threads_that_use_it_first_at_once_open_it_once",),
    ),
    Mutant(
        name="who-asks-after-facts-is-told-that-the-name-is-lost",
        rule="9.5",
        harm="bus.settle() says 'restart this process' where its name was only finished, and is won back by itself.",
        edits=(
            Edit(
                "sync.writing.Writing.settle",
                "            self.live()  # perhaps it was finished for its silence alone",
                "            raise  # perhaps it was finished for its silence alone",
            ),
        ),
        checks=(RACES + "who_asks_after_facts_is_told_that_the_name_is_lost_only_if_it_is[finished]",),
    ),
    Mutant(
        name="a-bootstrap-begins-while-rows-are-pruned",
        rule="9",
        harm="What follows a snapshot is pruned by a prune that had not seen its reader: the reader stops, loaded.",
        edits=(
            Edit(
                "begin.body",
                "        yield (Control.BEGIN, Sql(LOCK_STREAM + dialect.exclusive, (stream,)))\n",
                "        yield Control.BEGIN\n",
            ),
        ),
        checks=(SHARED + "a_prune_that_began_before_the_bootstrap_ends_before_it",),
    ),
    Mutant(
        name="a-save-while-a-snapshot-is-loaded",
        rule="9.12",
        harm="A twin's rows are saved as handled, and the target is emptied of them: lost.",
        edits=(Edit("NO_BOOTSTRAP", "b.state NOT IN {LOADED} OR b.id <> v.begun", "b.id <> v.begun"),),
        checks=(L + "9_12_no_position_moves_while_a_snapshot_is_loaded",),
    ),
    Mutant(
        name="a-save-of-what-was-handled-before-a-snapshot",
        rule="9.12",
        harm="The position is what it was, and the rows are gone: a twin loaded a snapshot between two saves. Lost.",
        edits=(Edit("NO_BOOTSTRAP", "b.state NOT IN {LOADED} OR b.id <> v.begun", "b.state NOT IN {LOADED}"),),
        checks=(L + "9_12_no_position_moves_while_a_snapshot_is_loaded",),
    ),
    Mutant(
        name="a-twin-registers-while-a-bootstrap-begins",
        rule="9.12",
        harm="A writer's position that a twin made up stands among those of the snapshot: its rows are skipped.",
        edits=(
            Edit(
                "begin.body",
                "        yield (Control.BEGIN, Sql(LOCK_STREAM + dialect.exclusive, (stream,)))\n",
                "        yield (Control.BEGIN, Sql(LOCK_STREAM + dialect.share, (stream,)))\n",
            ),
        ),
        checks=(SHARED + "a_save_that_comes_while_a_bootstrap_begins_is_refused[READ COMMITTED]",),
    ),
    Mutant(
        name="a-joined-snapshot-is-young-again",
        rule="9",
        harm="Readers that come one after the other all load the oldest state, and the server can clean nothing up.",
        edits=(Edit("PostgresSnapshots._share", "        if joined is not None:\n", "        if False:\n"),),
        checks=(SHARED + "a_snapshot_is_joined_for_a_while_whoever_has_joined_it",),
    ),
    Mutant(
        name="a-bootstrap-begins-below-the-floor",
        rule="9",
        harm="A snapshot is loaded for hours, and at its end what follows it is gone: it begins anew.",
        edits=(Edit("check_begin", "        if floor > position:\n", "        if floor > position and not held:\n"),),
        checks=(PARTS + "it_does_not_begin_when_what_follows_is_pruned",),
    ),
    Mutant(
        name="a-part-is-saved-wherever-it-is",
        rule="9.12",
        harm="Two processes under one name both apply a part, and both commit it.",
        edits=(
            Edit(
                "bootstraps.save",
                "    if not answers[0]:\n        raise ReaderMoved(reader, stream, PARTS, parts)\n",
                "",
            ),
        ),
        checks=(PARTS + "parts_are_saved_one_after_the_other",),
    ),
    Mutant(
        name="a-part-of-a-bootstrap-before-is-saved",
        rule="9.12",
        harm="Begun anew with the same snapshot, on a target emptied since: a part of before counts, and is lost.",
        edits=(
            Edit(
                "bootstraps.save",
                "AND id = ? AND parts = ? RETURNING parts",
                "AND ? <> '' AND parts = ? RETURNING parts",
            ),
        ),
        checks=(PARTS + "a_part_of_a_bootstrap_that_was_begun_anew_is_not_saved",),
    ),
    Mutant(
        name="the-same-snapshot-is-taken-for-the-same-bootstrap",
        rule="9.12",
        harm="A process counts on parts that it applied before another one emptied the target: they are lost.",
        edits=(Edit("Bootstrap.restore", " and self.id in (None, saved.id)\n", "\n"),),
        checks=("test_bootstrap_core.py::test_another_bootstrap_of_the_same_snapshot_is_adopted",),
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
        checks=(PARTS + "of_what_is_pruned_meanwhile_only_the_parts_that_lost_rows_are_gone",),
    ),
    Mutant(
        name="a-snapshot-of-what-is-visible",
        rule="9.3",
        harm="Rows above the positions agreed are in the snapshot, and come once more by catch-up.",
        edits=(Edit("snapshots.spans", "min(part.upto, at)) for writer, at", "part.upto) for writer, at"),),
        checks=(PARTS + "it_is_all_rows_at_its_positions",),
    ),
    Mutant(
        name="a-replica-that-lags-gives-a-snapshot",
        rule="9.9",
        harm="A part is loaded from a replica that does not have all of its rows yet.",
        edits=(Edit("snapshots._reached", "        if log.positions.get(writer, 0) < due:\n", "        if False:\n"),),
        checks=(SHARED + "a_replica_gives_what_it_has_proven",),
    ),
    Mutant(
        name="another-s-snapshot-is-believed",
        rule="9",
        harm="A snapshot's name that is left over is of another by now: rows are missing in what is loaded from it.",
        edits=(
            Edit(
                "PostgresSnapshots._shared",
                "                if log.floors == agreement.floors and snapshots.still(agreement, log):\n",
                "                if log is not None:\n",
            ),
        ),
        checks=(SHARED + "a_name_that_the_server_has_used_again_is_not_believed",),
    ),
    Mutant(
        name="parts-of-other-states",
        rule="9",
        harm="A part is loaded from the table as it is by then: what was pruned meanwhile is missing, and nobody told.",
        edits=(
            Edit(
                "PostgresSnapshots._loader",
                "            await self._import(connection, held.name)\n",
                '            await connection.execute(b"BEGIN")\n',
            ),
        ),
        checks=(SHARED + "what_is_pruned_while_it_is_loaded_is_loaded_all_the_same",),
    ),
    Mutant(
        name="a-copy-that-fails-is-a-short-part",
        rule="9.10",
        harm="The server ends a COPY in its middle: the rest of the part is never applied.",
        edits=(Edit("copy._end", "    if failed is not None:\n        raise _problem(failed)\n", ""),),
        checks=(SHARED + "a_failing_copy_is_no_short_part",),
    ),
    Mutant(
        name="positions-of-a-half-loaded-snapshot-are-believed",
        rule="9.12",
        harm="A reader that was killed while it loaded a snapshot goes on behind it: parts never applied are lost.",
        edits=(
            Edit(
                "Bootstrapping.at_start",
                "        if saved is not None and unfinished(saved):\n            self._hold(name, known)\n",
                "        if False:\n            self._hold(name, known)\n",
            ),
        ),
        checks=(FAULTS + "a_killed_process_goes_on_with_the_next_part[1]",),
    ),
    Mutant(
        name="a-snapshot-is-applied-beside-a-handler",
        rule="9",
        harm="A handler that was at work when a snapshot began writes older rows over newer ones of it.",
        edits=(
            Edit(
                "Applying._quiet",
                "        while any(key[0] == self.name for key in reading.at_work()):\n",
                "        while False:\n",
            ),
        ),
        checks=(FAULTS + "nothing_is_applied_before_the_handlers_have_ended",),
    ),
    Mutant(
        name="a-part-that-was-saved-is-applied-again",
        rule="9.12",
        harm="A function raises behind its COMMIT, and its part is applied twice.",
        edits=(
            Edit(
                "Applying._hand_out",
                " = await self._decided(work) if part._tried or isinstance(error, ReaderMoved) else None\n",
                " = None\n",
            ),
        ),
        checks=(ONCE + "each_part_is_applied_once_whatever_the_function_raises[after_commit-2]",),
    ),
    Mutant(
        name="a-snapshot-is-ahead-of-the-log",
        rule="9",
        harm="A source names positions that are proven nowhere: rows up to there are taken for handled when they come.",
        edits=(Edit("_ahead", "        if position > proven:\n", "        if False:\n"),),
        checks=("test_snapshot_sources.py::test_a_reader_loses_nothing_to_a_source_that_is_wrong",),
    ),
    Mutant(
        name="the-last-parts-of-a-snapshot-are-not-missed",
        rule="9",
        harm="A manifest was written without its last part: the reader goes on behind rows that it never got.",
        edits=(Edit("check_log", "        if page.tokens:\n", "        if False:\n"),),
        checks=("test_snapshot_sources.py::test_a_reader_loses_nothing_to_a_source_that_is_wrong",),
    ),
    Mutant(
        name="a-snapshot-older-than-the-floor-is-applied",
        rule="9",
        harm="A directory written yesterday is loaded, and what followed it is pruned: the reader loads for ever.",
        edits=(
            Edit(
                "Run._check",
                "            if one.stream == self.name and one.floor > at:\n",
                "            if False:\n",
            ),
        ),
        checks=(FAULTS + "a_snapshot_older_than_what_was_pruned_is_refused",),
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
        checks=("test_snapshot_sources.py::test_two_rows_out_of_order_are_found_wherever_pieces_end",),
    ),
    Mutant(
        name="another-part-than-agreed-is-applied",
        rule="9.10",
        harm="A source gives fewer rows than there are in a part: the rest is lost in silence.",
        edits=(Edit("checked_part", "        _check_count(agreement.parts[number], tokens)\n", ""),),
        checks=(FAULTS + "a_part_that_is_not_what_was_agreed_on_is_refused",),
    ),
    Mutant(
        name="own-facts-behind-a-snapshot-are-forgotten",
        rule="9",
        harm="A process empties its target, and what it wrote itself since the snapshot never comes back.",
        edits=(
            Edit(
                "Reading.bootstrapped",
                "            self._own_due[stream] = None\n",
                "            pass\n",
            ),
        ),
        checks=(
            FAULTS + "a_writer_that_bootstraps_its_own_stream_has_its_own_rows_in_it[False]",
            FAULTS + "own_facts_that_are_under_way_when_the_snapshot_is_applied_are_handled_too",
        ),
    ),
    Mutant(
        name="an-earlier-snapshot-is-taken-for-a-new-one",
        rule="9.12",
        harm="A reader below the floor goes on with a snapshot that was over long ago, below the floor.",
        edits=(
            Edit(
                "Run._follow_twin",
                "                self._before = saved.id  # over before this one was asked for\n",
                "                pass\n",
            ),
        ),
        checks=(FAULTS + "an_earlier_snapshot_that_is_over_is_not_taken_for_a_new_one",),
    ),
    Mutant(
        name="what-was-handled-before-a-snapshot-counts-while-it-loads",
        rule="9",
        harm="Who waits for a row is told that it is there, and the target has just been emptied.",
        edits=(
            Edit(
                "Reading._reached",
                "        if self.core.delivered(*key) >= token and not self.bootstrapping.holds(key[0]):\n",
                "        if self.core.delivered(*key) >= token:\n",
            ),
        ),
        checks=(BEGUN + "what_was_handled_is_waited_for_again_while_a_snapshot_loads",),
    ),
    Mutant(
        name="a-twins-snapshot-is-not-joined",
        rule="9.12",
        harm="A process goes on to handle rows while another of its name empties and fills their target.",
        edits=(
            Edit(
                "Bootstrapping.look_at",
                "        for name in [name for name in begun if not self.holds(name)]:\n",
                "        for name in ():\n",
            ),
        ),
        checks=(
            ONCE + "a_process_that_reads_joins_the_snapshot_that_another_of_its_name_begins",
            TWINS + "a_process_waits_until_the_others_snapshot_is_applied",
        ),
    ),
    Mutant(
        name="a-position-is-the-same-whatever-came-between",
        rule="9.12",
        harm="Rows handled before another process emptied their target, and saved after it: lost.",
        edits=(
            Edit(
                "Reading._store_changes",
                'if hasattr(self._reader_store, "bootstraps"):\n',
                "if False:\n",
            ),
        ),
        checks=(TWINS + "a_position_that_is_what_it_was_is_another_after_a_snapshot[0]",),
    ),
    Mutant(
        name="half-a-snapshot-is-drained",
        rule="9.12",
        harm="Behind a snapshot that another process has begun anew rows are handed out, and their target is emptied.",
        edits=(Edit("Run._end_of", "            if self.name in state.loading:\n", "            if False:\n"),),
        checks=(TWINS + "one_that_drains_when_the_other_begins_anew_goes_on_with_that",),
    ),
    # -- caches -----------------------------------------------------------------------------------------------
    Mutant(
        name="a-load-is-kept-though-its-key-was-invalidated",
        rule="6",
        harm="A value that was read before the invalidation is stored after it, and stays for ever.",
        edits=(
            Edit(
                "Cache.end",
                "            if fill.refused or number < feed.number:\n",
                "            if number < feed.number:\n",
            ),
        ),
        checks=(KEPT + "an_invalidation_during_a_load_refuses_what_it_read",),
    ),
    Mutant(
        name="a-load-is-kept-though-rows-were-lost-meanwhile",
        rule="6",
        harm="A value that was read before rows were lost for good is stored after all was cleared, and stays.",
        edits=(
            Edit(
                "Cache.end", "            if fill.refused or number < feed.number:\n", "            if fill.refused:\n"
            ),
        ),
        checks=(KEPT + "whatever_doubts_all_entries_refuses_what_is_being_loaded",),
    ),
    Mutant(
        name="an-interrupted-invalidation-forgets-the-load",
        rule="6",
        harm="Applied again, it does not find the load that is under way: the old value is stored, and stays for ever.",
        edits=(
            Edit(
                "Cache.drop",
                "                fill = self.fills.get(key)\n",
                "                fill = self.fills.pop(key, None)\n",
            ),
        ),
        checks=(KEPT + "an_invalidation_that_is_interrupted_and_comes_again_refuses_what_was_being_loaded",),
    ),
    Mutant(
        name="a-torn-store-is-used-on",
        rule="6",
        harm="After an interrupt in cachetools every later miss of a full cache raises KeyError.",
        edits=(Edit("Cache._changing", "        if self.torn:\n", "        if False:\n"),),
        checks=(KEPT + "a_cache_is_whole_again_after_an_interrupt_at_any_instruction[keep-None]",),
    ),
    Mutant(
        name="a-gap-hides-nothing",
        rule="6",
        harm="Rows are known to be lost, and what they may have invalidated is returned until they are fetched.",
        edits=(Edit("Trust.gap", "            self.barrier = self.number\n", "            pass\n"),),
        checks=(KEPT + "a_gap_makes_everything_unreachable_at_once_and_mending_brings_back_what_was_not_lost",),
    ),
    Mutant(
        name="keys-of-another-kind-are-ignored",
        rule="6",
        harm="Who invalidates with another form of the key invalidates nothing, for ever, and nobody is told.",
        edits=(
            Edit("Cache.drop", "                return True\n        self.clear()\n", "                return True\n"),
        ),
        checks=(KEPT + "keys_of_another_kind_clear_the_cache",),
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
            FRESH + "what_the_table_has_proves_it_once_it_is_applied",
            FRESH + "nothing_older_than_the_bound_is_ever_returned[0]",
        ),
    ),
    Mutant(
        name="the-table-answers-as-of-its-answer",
        rule="6",
        harm="What is committed while the answer is on its way is taken for known: older than the bound by that time.",
        edits=(
            Edit(
                "Caching._ask",
                "                    table.looked(asked, newest.rows)\n",
                "                    table.looked(self.caches.clock(), newest.rows)\n",
            ),
        ),
        checks=(HELD + "an_answer_of_the_table_that_comes_late_counts_as_of_the_question",),
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
        checks=(FRESH + "own_rows_need_not_be_delivered_unless_the_name_is_another_s",),
    ),
    Mutant(
        name="a-commit-without-an-answer-is-trusted",
        rule="9.1",
        harm="It may have landed: the process that wrote it returns the old value until the table has told.",
        edits=(
            Edit(
                "Ledger.commit_sent",
                "                commits.sent(one, time.monotonic())\n",
                "                pass\n",
            ),
        ),
        checks=(HELD + "a_commit_without_an_answer_ends_trust_until_it_is_known",),
    ),
    Mutant(
        name="own-invalidations-wait-for-their-echo",
        rule="6",
        harm="A process does not read its own writes: own lines are ignored, so the old value stays for ever.",
        edits=(
            Edit(
                "Ledger.note_end",
                "                if self.on_invalidations is not None and payloads:\n",
                "                if False:\n",
            ),
        ),
        checks=(HELD + "own_invalidations_are_applied_before_the_fact_returns",),
    ),
    Mutant(
        name="own-invalidations-of-threads-wait-for-their-echo",
        rule="6",
        harm="The same in a process of threads.",
        edits=(
            Edit(
                "Writing._apply",
                "                if payloads:\n                    self._on_invalidations(one.stream.name, payloads)\n",
                "                pass\n",
            ),
        ),
        checks=("test_sync_cached.py::test_the_ways_to_invalidate",),
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
        checks=(LITE + "the_newest_rows_of_all_writers",),
    ),
    Mutant(
        name="pruned-rows-clear-nothing",
        rule="6",
        harm="What the rows invalidated that were pruned before they came is returned for ever.",
        edits=(
            Edit("Caching._follow", "        reading.on_missed(stream.name, lambda *_: feed.clear())\n", ""),
            Edit(
                "Caching.look",
                "core.progress[key].queue.noticed:\n                self._watched[key[0]].feed.clear()\n",
                "False:\n                pass\n",
            ),
        ),
        checks=(HELD + "rows_that_were_pruned_clear_the_caches",),
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
        checks=(FRESH + "announcements_count_as_of_when_they_came_and_the_earliest_writer_s",),
    ),
    # --- the jobs snapshot and backfill
    Mutant(
        name="backfill-takes-an-archive-that-begins-later",
        rule="6",
        harm="Rows before the archive's beginning are read neither there nor in the table: they are never derived.",
        edits=(Edit("backfill_plan.of_archive", "if begins.get(writer, 0) <= one.after", "if 0 <= one.after"),),
        checks=(FILL + "an_archive_that_begins_later_has_nothing_of_a_batch",),
    ),
    Mutant(
        name="backfill-tells-nobody-of-what-is-written",
        rule="9.6",
        harm="Killed between the last COMMIT and its announcement: no start of the job ever shows readers these facts.",
        edits=(Edit("backfilling.run", "        work.tell(done)\n", "        pass\n"),),
        checks=(FILL + "killed_at_each_step[commit-after]",),
    ),
    Mutant(
        name="backfill-believes-sparks-order",
        rule="6",
        harm="Facts of one source writer are written out of its order, and nobody hears of it.",
        edits=(Edit("check_order", "        if first and first <= last:\n", "        if False:\n"),),
        checks=(FILL + "rows_in_another_order_are_refused",),
    ),
    Mutant(
        name="backfill-begins-where-nobody-is",
        rule="6",
        harm="A misspelt writer in --start is passed over, and all rows of the one that was meant are written again.",
        edits=(Edit("backfill_plan.start_of", "sorted(found.keys() - positions.keys())", "sorted(set())"),),
        checks=(FILL + "where_a_table_begins",),
    ),
    Mutant(
        name="snapshots-of-other-rows-are-the-same",
        rule="6",
        harm="A reader that is half through a snapshot goes on with one of another key: rows of neither are whole.",
        edits=(Edit("Agreement.same", "            and self.content == other.content\n", ""),),
        checks=(SHOT + "snapshots_of_other_keys_are_not_the_same",),
    ),
    Mutant(
        name="snapshot-parts-of-any-size",
        rule="6",
        harm="Large rows make a part that no reader takes: the job says that all is well, and nobody can bootstrap.",
        edits=(Edit("PartFiles.add", " or self._bytes + size > PART_BYTES", ""),),
        checks=(SHOT + "parts_of_large_rows_are_small_enough_for_readers",),
    ),
    Mutant(
        name="equal-keys-of-two-spellings",
        rule="6",
        harm="A key that is gone lives on in the snapshot, because its last row has the names in another order.",
        edits=(Edit("same_key", "for name in sorted(value)}", "for name in value}"),),
        checks=(SHOT + "keys_that_are_json_are_the_same_when_they_are_equal",),
    ),
    Mutant(
        name="two-snapshot-jobs-replace-one-another",
        rule="6",
        harm="Of two jobs in a directory the slower one puts its older snapshot in the place of the newer one.",
        edits=(
            Edit(
                "snapshotting.Writing.publish",
                "        if present(self.target, self.options.stream) != replaced:\n",
                "        if False:\n",
            ),
        ),
        checks=(SHOT + "two_jobs_in_one_directory",),
    ),
    # -- the sink of Spark ---------------------------------------------------------------------------------------------
    Mutant(
        name="staged-rows-are-not-counted",
        rule="9.1",
        harm="A crash of the server empties the staging table: the batch counts as written, without rows.",
        edits=(
            Edit(
                "staging._commit",
                "    if count != batch.rows:\n",
                "    if False:\n",
            ),
        ),
        checks=(SINK + "missing_rows_are_noticed[sqlite]",),
    ),
    Mutant(
        name="staged-rows-of-any-attempt",
        rule="4",
        harm="A task that was killed or ran twice writes its rows beside those of the attempt that counts.",
        edits=(
            Edit(
                "SqliteDialect.insert_staged",
                'query = ? AND attempt IN (SELECT value FROM json_each(?))"',
                'query = ? AND ? IS NOT NULL"',
            ),
        ),
        checks=(SINK + "attempts_that_nobody_names_leave_nothing[sqlite]",),
    ),
    Mutant(
        name="a-gap-of-batches",
        rule="9.2",
        harm="The database was restored: the batches that it lost are passed over without a word.",
        edits=(
            Edit(
                "is_done",
                "    if batch.number > found.number + 1:\n",
                "    if False:\n",
            ),
        ),
        checks=(SINK + "numbers_that_mean_another_batch_are_refused[sqlite]",),
    ),
    Mutant(
        name="a-database-of-no-batches",
        rule="9.2",
        harm="The database was restored to before the query, or is another one: what it wrote is missing there.",
        edits=(
            Edit(
                "is_done",
                "        if batch.number > batch.first:\n",
                "        if False:\n",
            ),
        ),
        checks=(AGAIN + "a_database_that_knows_nothing_of_the_batches_before[sqlite-named0]",),
    ),
    Mutant(
        name="a-batch-is-its-number",
        rule="4",
        harm="The checkpoint is an older copy: what came since into the batch of that number is lost.",
        edits=(
            Edit(
                "is_done",
                "    if batch.number == found.number and batch.rows != found.rows:\n",
                "    if False:\n",
            ),
        ),
        checks=(AGAIN + "a_checkpoint_older_than_the_database[sqlite]",),
    ),
    Mutant(
        name="the-next-batch-is-cleared",
        rule="9.4",
        harm="A driver that hangs behind its successor takes what that one has staged.",
        edits=(
            Edit(
                "_clear",
                'WHERE query = ? AND batch <= ?"',
                'WHERE query = ? AND batch >= coalesce(?, 0)"',
            ),
        ),
        checks=(SINK + "what_is_staged_for_the_next_batch_stays[sqlite]",),
    ),
    Mutant(
        name="a-fenced-query-takes-its-name-back",
        rule="9.4",
        harm="Two queries of one writer take the name from each other for ever, and nobody is told.",
        edits=(
            Edit(
                "sink_commit.commit",
                "            again: int | None = found.incarnation\n",
                "            again: int | None = None\n",
            ),
        ),
        checks=(SINK + "a_fenced_query_fails_and_loses_nothing[sqlite]",),
    ),
    Mutant(
        name="the-sink-stays-registered",
        rule="9.7",
        harm="Between two batches it holds back all linear positions, until somebody may take it for dead.",
        edits=(
            Edit(
                "sink_commit._write",
                "                _leave(store, claim, settings)\n",
                "",
            ),
        ),
        checks=(AGAIN + "between_batches_nobody_waits_for_the_writer[sqlite]",),
    ),
    # -- the source of Spark --
    Mutant(
        name="a-batch-of-spark-ends-within-a-fact-too-large",
        rule="9.10",
        harm="A fact of more rows than a micro-batch may have is never read: the query stands still before it.",
        edits=(
            Edit(
                "planning.admitted",
                "    return beyond if beyond == first else beyond - 1\n",
                "    return beyond - 1\n",
            ),
        ),
        checks=(PLANNED + "the_oldest_facts_are_admitted_and_none_is_cut[1-4]",),
    ),
    Mutant(
        name="executors-do-not-look-at-the-floor",
        rule="9",
        harm="Rows that are pruned between planning and reading are missing in a batch that counts as complete.",
        edits=(
            Edit(
                "reading.read",
                "            if log.floors.get(span[0], 0) > span[1]:\n",
                "            if False:\n",
            ),
        ),
        checks=(SPARK_READ + "a_floor_that_has_passed_is_seen_in_the_snapshot_of_the_rows[sqlite]",),
    ),
    Mutant(
        name="executors-do-not-look-at-the-epoch",
        rule="9",
        harm="A batch that was planned before a restore is read from the restored table, other rows under its tokens.",
        edits=(
            Edit(
                "reading.read",
                "        if log.epoch != epoch:\n",
                "        if False:\n",
            ),
        ),
        checks=(SPARK_READ + "another_log_is_not_read[sqlite]",),
    ),
    Mutant(
        name="spark-believes-any-announcement",
        rule="9.3",
        harm="What a writer says of a log that is gone moves the query's position over facts of the one that is read.",
        edits=(
            Edit(
                "Listener._hear",
                " or not self._speakers.trusted(writer, self._epoch):\n",
                ":\n",
            ),
        ),
        checks=(HEARD + "what_was_said_of_a_log_that_is_gone_does_not_count",),
    ),
    Mutant(
        name="available-now-runs-on",
        rule="9",
        harm="A run that is to end with what there is follows busy writers for ever.",
        edits=(
            Edit(
                "Follower._bounded",
                "{writer: min(position, target.at(writer)) for",
                "{writer: position for",
            ),
        ),
        checks=(FOLLOWED + "available_now_ends_with_what_was_there",),
    ),
    Mutant(
        name="a-checkpoint-of-another-stream-is-taken",
        rule="9",
        harm="A query that is given another stream begins at that one's positions: all rows below are lost.",
        edits=(
            Edit(
                "Follower._check_stream",
                "        if offset.stream not in (None, self.options.stream):\n",
                "        if False:\n",
            ),
        ),
        checks=(FOLLOWED + "a_checkpoint_of_another_stream_is_told",),
    ),
    Mutant(
        name="a-table-that-went-back-is-read-on",
        rule="9",
        harm="After a failover that lost transactions tokens come again with other rows, which the query leaves out.",
        edits=(
            Edit(
                "Follower._check_age",
                "                self.losses.older(writer, at, proven)\n",
                "                pass\n",
            ),
        ),
        checks=(FOLLOWED + "a_table_that_is_older_than_the_query_is_an_error",),
    ),
    Mutant(
        name="what-breaks-off-in-arrow-is-no-error-of-ours",
        rule="9",
        harm="A database that goes away within an answer is told as a bare OSError, which nothing knows to try again.",
        edits=(
            Edit(
                "_Adbc._translated",
                "        except (OSError, pyarrow.ArrowException) as error:",
                "        except ZeroDivisionError as error:",
            ),
        ),
        checks=(SPARK_READ + "a_connection_that_is_lost_between_batches_is_an_error",),
    ),
    # -- sessions on Spark, their secrets, and the command ------------------------------------------------------------
    Mutant(
        name="a-master-among-the-settings-is-not-taken",
        rule="9",
        harm="A job that was to run on a cluster runs on this machine, without a word.",
        edits=(Edit("session._made", '    master = master or conf.get("spark.master")\n', ""),),
        checks=("test_spark_session.py::test_where_the_master_comes_from",),
    ),
    Mutant(
        name="a-session-of-the-users-is-stopped-by-a-failure",
        rule="9",
        harm="The queries of an application end because a session of its own could not learn the format.",
        edits=(
            Edit(
                "spark.session",
                "    register(found)\n    return found\n\n\ndef _started",
                "    try:\n        register(found)\n    except BaseException:\n        found.stop()\n        raise\n"
                "    return found\n\n\ndef _started",
            ),
        ),
        checks=("test_spark_session.py::test_a_session_that_was_there_is_not_ended_by_a_failure",),
    ),
    Mutant(
        name="a-password-parameter-stays-in-the-url",
        rule="9",
        harm="Plans, the UI and the log of events show the password of a store's URL.",
        edits=(Edit("secrets._parsed", '_SECRET_PARAMETER.sub("", query).rstrip("&")', 'query.rstrip("&")'),),
        checks=(
            "test_spark_secrets.py::test_a_url_is_split[postgres://db/shop?password=p%26w&sslmode=require-"
            "postgres://db/shop?sslmode=require-p&w]",
        ),
    ),
    Mutant(
        name="a-redis-password-is-appended-to-that-of-the-url",
        rule="9",
        harm="Redis is given two passwords in one and refuses them, until somebody takes the old one out of the URL.",
        edits=(Edit("with_redis_password", "{user.partition(':')[0]}:{quote", "{user}:{quote"),),
        checks=(
            "test_cli_passwords.py::test_a_file_replaces_the_password_of_the_url[redis://u:old@h:1/0-redis://u:{}@h:1/0]",
        ),
    ),
    Mutant(
        name="the-password-of-a-key-stands-for-that-of-redis",
        rule="9",
        harm="BUSREP_REDIS_PASSWORD is ignored without a word where the URL names an encrypted key.",
        edits=(
            Edit(
                "_has_redis_password",
                'any(_SECRET_PARAMETER.findall(parts.query or ""))',
                '"password=" in (parts.query or "")',
            ),
        ),
        checks=(
            "test_cli_passwords.py::test_only_the_password_of_redis_goes_before_that_of_the_environment"
            "[rediss://h?ssl_password=k-rediss://:new@h?ssl_password=k]",
        ),
    ),
    Mutant(
        name="a-password-file-that-all-may-read-is-taken",
        rule="9",
        harm="A password that others may have changed, or read, is used, where libpq would refuse it.",
        edits=(Edit("_from_pgpass", "mode.st_mode & (stat.S_IRWXG | stat.S_IRWXO)", "False"),),
        checks=(
            "test_spark_secrets.py::test_a_pgpass_that_others_read_is_ignored[416]",
            "test_spark_secrets.py::test_a_pgpass_that_others_read_is_ignored[388]",
        ),
    ),
    Mutant(
        name="a-password-on-spark-submits-command-line",
        rule="9",
        harm="The command line of Java has it, and Spark's UI and log of events show that.",
        edits=(Edit("check_secrets", "        seen = submitted() and ", "        seen = False and "),),
        checks=("test_cli_pipeline.py::test_a_password_in_arguments_of_spark_submit_is_refused",),
    ),
    Mutant(
        name="a-password-becomes-an-option-of-sparks",
        rule="9",
        harm="Started with a Redis URL that has one the job goes on until Spark's source refuses it, or shows it.",
        edits=(Edit("check_secrets", "(seen or told.shown)", "seen"),),
        checks=("test_cli_pipeline.py::test_a_password_that_would_become_an_option_of_sparks_is_refused",),
    ),
    Mutant(
        name="ctrl-c-in-a-call-into-java",
        rule="9",
        harm="The connection has half an answer in it: stopping Spark fails, with pages of traces and another status.",
        edits=(Edit("Interrupts._handle", "if not in_java(frame) or ", "if True or "),),
        checks=("test_cli_pipeline.py::test_ctrl_c_waits_for_a_call_into_java",),
    ),
    Mutant(
        name="a-report-takes-the-place-of-a-device",
        rule="9",
        harm="--report /dev/null, of root, makes a file of it, for the whole machine.",
        edits=(Edit("_is_special", "    return file.exists() and not file.is_file()\n", "    return False\n"),),
        checks=("test_cli_pipeline.py::test_what_is_no_plain_file_is_written_into[pipe]",),
    ),
    Mutant(
        name="a-report-that-is-not-ok-ends-well",
        rule="9",
        harm="An audit that has found a loss exits with 0, and the script that asked for it goes on.",
        edits=(Edit("Job.run", "            raise click.exceptions.Exit(NOT_OK)\n", "            pass\n"),),
        checks=("test_cli_pipeline.py::test_reports_and_status[False]",),
    ),
    # -- the audit of an archive --------------------------------------------------------------------------------
    Mutant(
        name="sums-without-the-length-of-a-text",
        rule="6",
        harm="Bytes that moved from one row into the next are not found by the audit.",
        edits=(Edit("audit_sums.lines_of", "        pc.binary_length(row),\n", ""),),
        checks=(AUDIT + "lines_that_stand_behind_one_another",),
    ),
    Mutant(
        name="sums-without-the-time",
        rule="6",
        harm="An archive with other times of commits passes for the same.",
        edits=(
            Edit(
                "audit_sums.lines_of",
                'batch.column("committed_at").cast(pyarrow.int64()),',
                'batch.column("token"),',
            ),
        ),
        checks=(AUDIT + "changed_bytes[committed_at]",),
    ),
    Mutant(
        name="a-range-in-two-tasks-is-hashed-as-a-whole",
        rule="6",
        harm="The audit calls a sound archive different, because files of a range were read by several tasks.",
        edits=(
            Edit(
                "audit_files.planned",
                "file.min_token <= highest or (holder != len(groups) and first == highest // size)",
                "file.min_token <= highest",
            ),
        ),
        checks=(AUDIT + "a_range_of_two_tasks_that_is_not_the_first_of_the_second",),
    ),
    Mutant(
        name="the-end-of-spark-s-log-is-not-looked-at",
        rule="6",
        harm="A writer that the last manifest has lost is not missed: nobody looks for its rows.",
        edits=(Edit("audit_notes._ends", "    if at != archive.upto:\n", "    if False:\n"),),
        checks=(AUDIT + "what_the_last_manifest_says_is_held_against_spark_s_log",),
    ),
    Mutant(
        name="a-difference-that-was-pruned-was-none",
        rule="6",
        harm="Rows that were lost, and pruned before the audit could name them, are called identical.",
        edits=(
            Edit(
                "Audit._compared",
                "        if wrong and not named and not self.findings:\n",
                "        wrong = wrong if named else []\n        if wrong and not named and not self.findings:\n",
            ),
        ),
        checks=(AUDIT + "a_difference_that_is_pruned_before_it_can_be_named",),
    ),
    Mutant(
        name="the-audit-does-not-wait-for-heartbeats",
        rule="6",
        harm="While writers write, the audit calls readers and archives wrong that have positions from the bus.",
        edits=(Edit("caught_up", "        if time.monotonic() > late:\n", "        if True:\n"),),
        checks=(AUDIT + "positions_come_to_the_table_later_than_to_who_hears_them",),
    ),
    Mutant(
        name="tokens-in-a-manifest-are-believed",
        rule="6",
        harm="A manifest by whose tokens a replay leaves out a file passes the audit.",
        edits=(Edit("_added", "if days and (least, most) != (file.min_token, file.max_token):", "if False:"),),
        checks=(AUDIT + "tokens_by_which_others_choose_files[change0]",),
    ),
    # -- replay and stats -----------------------------------------------------------------------------------------
    Mutant(
        name="a-replay-goes-on-behind-a-hole",
        rule="6",
        harm="Rows between what a writer has and where the next replay begins are missing, and nobody is told.",
        edits=(
            Edit(
                "Target._look",
                "        if not begun <= self._at[pair] <= found.number:\n",
                "        if False:\n",
            ),
        ),
        checks=(REPLAY + "a_range_that_is_not_connected_to_what_is_there_is_refused",),
    ),
    Mutant(
        name="a-replay-takes-a-living-writer-s-name",
        rule="6",
        harm="A production writer of the target is fenced, and its facts are mixed with old ones.",
        edits=(
            Edit(
                "Target.open",
                "                if self._look(*pair) is None:\n",
                "                if False:\n",
            ),
        ),
        checks=(REPLAY + "a_writer_of_somebody_else_is_left_alone",),
    ),
    Mutant(
        name="a-replay-that-reconnects-writes-again",
        rule="6",
        harm="After a COMMIT without an answer its facts are there twice.",
        edits=(
            Edit(
                "Target._written",
                "                    facts = [fact for fact in facts if fact.token > self._at[pair]]\n",
                "                    self._at[pair] = 0\n",
            ),
        ),
        checks=("test_spark_replay.py::test_a_commit_without_an_answer_is_looked_up[True]",),
    ),
    Mutant(
        name="a-writer-whose-turn-it-is-again-trusts-its-memory",
        rule="6",
        harm="What another replay has written while its bus was closed is written again.",
        edits=(
            Edit(
                "Target._written",
                "                if failures or writer not in self._buses:\n",
                "                if failures:\n",
            ),
        ),
        checks=(REPLAY + "more_writers_than_can_be_open[sqlite]",),
    ),
    Mutant(
        name="a-replayed-row-is-made-anew",
        rule="6",
        harm="A number with more digits than a float has is another one in the target.",
        edits=(
            Edit(
                "Verbatim.encode",
                '        if row.isascii() and b"\\n" not in row:\n            return row\n',
                "        import orjson\n\n        return orjson.dumps(orjson.loads(row))\n",
            ),
        ),
        checks=("test_spark_replay.py::test_rows_stay_as_they_are",),
    ),
    Mutant(
        name="a-saved-position-covers-what-was-saved-before",
        rule="6",
        harm="Latencies count facts again and again, and grow with the time that was listened.",
        edits=(Edit("stats_listen.latencies", "its[bisect_right(its, after) : bisect", "its[: bisect"),),
        checks=("test_spark_stats_latency.py::test_a_saved_position_covers_the_facts_up_to_it",),
    ),
    Mutant(
        name="names-of-writers-are-markup",
        rule="6",
        harm="A writer's name runs as a script in whose browser the report is opened.",
        edits=(
            Edit(
                "cell",
                "{before}{escape(clipped(text))}</td>",
                "{before}{clipped(text)}</td>",
            ),
        ),
        checks=("test_spark_stats_page.py::test_a_thousand_writers_with_names_from_elsewhere",),
    ),
    # -- the archive and its compaction ---------------------------------------------------------------------------
    Mutant(
        name="a-batch-begins-where-its-checkpoint-does",
        rule="6",
        harm="A machine that another one stood in for comes back: its batch is archived a second time.",
        edits=(
            Edit(
                "StreamArchive.write",
                "        if nonzero(begin) != nonzero(self._upto):\n",
                "        if False:\n",
            ),
        ),
        checks=(ARCHIVE + "a_checkpoint_that_stands_elsewhere_than_the_archive",),
    ),
    Mutant(
        name="a-batch-that-is-there-is-taken-for-ours",
        rule="6",
        harm="Two jobs on one archive: what the second one had in its batch is lost, without a word.",
        edits=(
            Edit(
                "StreamArchive._found",
                "        if same and same[0].upto == nonzero(end.positions):\n",
                "        if same:\n",
            ),
        ),
        checks=(ARCHIVE + "two_jobs_with_checkpoints_of_their_own",),
    ),
    Mutant(
        name="a-put-that-was-done-twice-is-another-s",
        rule="6",
        harm="The answer to a put is lost, its second try finds our manifest: the files that it names are removed.",
        edits=(
            Edit(
                "Root.put",
                "        return done or self.read(name) == content\n",
                "        return done\n",
            ),
        ),
        checks=(
            ARCHIVE + "a_manifest_that_is_there_already_is_ours",
            OBJECTS + "a_put_whose_answer_is_lost",
        ),
    ),
    Mutant(
        name="only-the-newest-compaction-has-an-age",
        rule="6",
        harm="Compacted more often than the grace period is long, an archive keeps all that was ever replaced.",
        edits=(
            Edit(
                "_by_age",
                "        if not any(other.number > one.number for other in newer):\n",
                "        if not any(other.number == archive.compactions for other in newer):\n",
            ),
        ),
        checks=(ARCHIVE + "what_was_replaced_goes_although_a_newer_compaction_is_there",),
    ),
    Mutant(
        name="what-is-being-written-is-garbage",
        rule="6",
        harm="Compaction deletes the files of the batch that an archive job writes meanwhile.",
        edits=(
            Edit(
                "_is_garbage",
                "    return maker is not None and maker[1] <= (",
                "    return maker is not None and maker[1] <= 1 + (",
            ),
        ),
        checks=(ARCHIVE + "a_compaction_deletes_nothing_that_is_being_written",),
    ),
    Mutant(
        name="a-delta-table-keeps-what-was-merged",
        rule="6",
        harm="After a compaction the Delta table has its rows twice.",
        edits=(
            Edit(
                "archive_delta._follow",
                "    added, gone = wanted.keys() - known, known - wanted.keys()\n",
                "    added, gone = wanted.keys() - known, set[str]()\n",
            ),
        ),
        checks=(OBJECTS + "a_compaction_is_no_change_of_a_delta_table",),
    ),
    Mutant(
        name="a-file-that-did-not-arrive-whole-counts",
        rule="6",
        harm="A file of which an object store has a part is named in a manifest, and the batch is done.",
        edits=(Edit("_Writing.close", "        if size != written:\n", "        if False:\n"),),
        checks=(ARCHIVE + "a_file_of_which_a_part_arrived",),
    ),
    # -- the audit of what readers have handled -----------------------------------------------------------------
    Mutant(
        name="a-torn-line-swallows-the-next",
        rule="6",
        harm="A reader that is started again after a crash appends to half a line: its first batch is not noted.",
        edits=(
            Edit(
                "ReaderReport.__init__",
                'self._torn = os.read(self._file, 1) not in (b"", b"\\n")',
                "self._torn = False",
            ),
        ),
        checks=(HANDLED + "a_torn_line",),
    ),
    Mutant(
        name="a-row-handled-late-passes-for-one-in-order",
        rule="6",
        harm="The audit does not find that a reader handled a span behind a later one.",
        edits=(Edit("Comparison._same", "if new and (tokens[0] <= reached or new < len(tokens)):", "if False:"),),
        checks=(HANDLED + "swapped_spans",),
    ),
    Mutant(
        name="what-a-reader-saved-is-not-asked-for",
        rule="6",
        harm="A reader that lost the last rows, and has saved that it handled them, passes the audit.",
        edits=(
            Edit(
                "HandledAudit.run",
                "upto = min(max(one.upto, at.get(key, 0)), log",
                "upto = min(one.upto, log",
            ),
        ),
        checks=(HANDLED + "the_last_span_is_lost_and_its_position_was_saved",),
    ),
    Mutant(
        name="rows-handled-again-are-not-compared",
        rule="6",
        harm="A row that was another one when it was handled again passes the audit.",
        edits=(
            Edit(
                "Comparison._same",
                "(truth.tokens[at:end], truth.indexes[at:end], truth.hashes[at:end]) != (tokens, indexes, hashes)",
                "(truth.tokens[at:end], truth.indexes[at:end]) != (tokens, indexes)",
            ),
        ),
        checks=(HANDLED + "spans_again_after_a_crash",),
    ),
    Mutant(
        name="a-foreign-epoch-is-an-older-one",
        rule="6",
        harm="Lines of another log among those of this one pass the audit.",
        edits=(Edit("HandledAudit._epochs", "one.last > first:", "False:"),),
        checks=(HANDLED + "a_foreign_epoch",),
    ),
)

ALL: tuple[Mutant, ...] = (
    *MUTANTS,
    *mutants_database.MUTANTS,
    *mutants_handlers.MUTANTS,
    *mutants_pipeline.MUTANTS,
    *mutants_program.MUTANTS,
    *mutants_reference.MUTANTS,
    *mutants_servers.MUTANTS,
    *mutants_trust.MUTANTS,
    *mutants_wire.MUTANTS,
)
"""Those of this file and of each other one."""
