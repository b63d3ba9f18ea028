"""Known bugs: asyncio/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import SIMULATOR, Edit, Mutant

BEATS = "asyncio/test_beats.py::test_9_27_"
BOOTSTRAP = "asyncio/test_bootstrap.py::test_"
BOOTSTRAP_FAULTS = "asyncio/test_bootstrap_faults.py::test_"
BOOTSTRAP_PAGING = "asyncio/test_bootstrap_paging.py::test_"
BOOTSTRAP_SAVING = "asyncio/test_bootstrap_saving.py::test_"
BOOTSTRAP_TWINS = "asyncio/test_bootstrap_twins.py::test_"
BUS = "asyncio/test_bus.py::test_"
CACHED = "caches/test_cached.py::test_"
CANCELLED_TASKS = "asyncio/test_cancelled_tasks.py::test_"
CLOCK_BEHIND = "asyncio/test_clock_behind.py::test_"
DRIVER_ERRORS = "stores/test_driver_errors.py::test_"
EFFECTS = "asyncio/test_effects.py::test_"
FACTS_NOBODY_ENDS = "asyncio/test_facts_nobody_ends.py::test_"
FACT_AFTER_BLOCK = "asyncio/test_fact_after_block.py::test_"
FAILED_NEIGHBOURS = "asyncio/test_failed_neighbours.py::test_"
FAILOVER = "stores/test_failover.py::test_"
FAULTS = "asyncio/test_faults.py::test_"
GOODBYE = "asyncio/test_goodbye.py::test_"
HEALTH = "asyncio/test_health.py::test_"
HTTP_BUS = "http/test_bus.py::test_"
JOINED = "stores/test_joined.py::test_"
LINK_LIFE = "links/test_link_life.py::test_"
MUTANTS_GAPS = "asyncio/test_mutants_gaps.py::test_"
PRESENCE = "commands/test_presence.py::test_"
REFERENCE = "http/test_reference.py::test_"
REPLICATE_RATE = "core/test_replicate_rate.py::test_"
RETRYING = "asyncio/test_retrying.py::test_"
RULES = "test_rules.py::test_"
SAVING_REFUSED = "stores/test_saving_refused.py::test_"
SESSIONS_ENDED = "asyncio/test_sessions_ended.py::test_"
SIMULATION = "proof/test_simulation.py::test_"
STRAY_LINES = "asyncio/test_stray_lines.py::test_"
TRUST = "asyncio/test_trust.py::test_"
TWO_SERVERS = "asyncio/test_two_servers.py::test_"
TYPING = "test_typing.py::test_"
WINNING_BACK = "asyncio/test_winning_back.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="cancellation-tears-commit",
        rule="9.1",
        harm="A web request that is cancelled during COMMIT leaves a fact that is neither open nor complete.",
        edits=(Edit("Writing.finish", "            await asyncio.shield(task)\n", "            await task\n"),),
        checks=(RULES + "9_1_a_cancelled_caller_does_not_tear_the_commit",),
    ),
    Mutant(
        name="nobody-asks-after-facts-in-doubt",
        rule="9.1",
        harm="One lost answer to COMMIT holds back all later facts of this process for ever.",
        edits=(
            Edit(
                "Writing.doubted",
                "        self._doubted.set()\n",
                "",
            ),
        ),
        checks=(
            SIMULATOR,
            BUS + "a_joined_transaction_is_seen_to_commit_without_being_told",
        ),
    ),
    Mutant(
        name="each-fact-in-doubt-is-asked-after-at-once",
        rule="9.1",
        harm="A fact in the caller's transaction has the table asked while that is open, in vain.",
        edits=(
            Edit(
                "Writing.keep_settling",
                "                await asyncio.sleep(pause)  # what comes meanwhile is asked after as well\n",
                "",
            ),
        ),
        checks=(JOINED + "9_1_facts_in_doubt_are_asked_after_at_a_pace",),
    ),
    Mutant(
        name="position-from-the-sequence",
        rule="5",
        harm="A reader that begins now at the sequence's last value skips every fact that is open at that moment.",
        edits=(
            Edit(
                "Beginning._load_durable",
                "        positions |= starts\n",
                (
                    '        if self._start == "now":\n'
                    "            highest = await context.store.sequence(name) or 0\n"
                    "            starts = {key: max(at, highest) for key, at in starts.items()}\n"
                    "        positions |= starts\n"
                ),
            ),
        ),
        checks=(
            SIMULATOR,
            MUTANTS_GAPS + "5_a_reader_from_now_gets_a_fact_that_was_open_when_it_began",
        ),
    ),
    Mutant(
        name="a-silent-writer-is-never-finished",
        rule="9.5",
        harm="What a killed process committed last stays in the table unseen, and the linear position stands still.",
        edits=(
            Edit(
                "TableReader.look",
                '            context.spawn(partial(self._finish_all, self._store, dead), "finish", once=True)\n',
                "            pass\n",
            ),
        ),
        checks=(
            SIMULATOR,
            BUS + "a_silent_writer_is_finished_from_the_table",
        ),
    ),
    Mutant(
        name="whoever-is-not-heard-is-finished",
        rule="9.5",
        harm="A writer cut off from Redis alone loses its name and all its facts fail, though it is healthy.",
        edits=(Edit("TableReader.look", "not heard and silence[known.writer] > bound:", "not heard:"),),
        checks=(BUS + "a_writer_cut_off_from_redis_alone_is_followed_not_fenced",),
    ),
    Mutant(
        name="one-row-of-a-writer-tells-of-its-silence",
        rule="9.5",
        harm="The same: a beat touches one row of a writer's, and the row of another stream grows old.",
        edits=(
            Edit(
                "silence_of",
                "min(seconds, silence.get(writer, seconds))",
                "seconds",
            ),
        ),
        checks=("core/test_core_trust.py::test_9_5_a_writer_was_last_heard_of_in_any_of_its_rows",),
    ),
    Mutant(
        name="a-silent-writer-that-lives-is-not-followed",
        rule="9.5",
        harm="Facts of a writer that cannot reach Redis wait until it can, hours perhaps, though the table has them.",
        edits=(
            Edit(
                "TableReader.look",
                "            core.learned(known.stream, known.writer, known.position)\n            if known",
                "            if known",
            ),
        ),
        checks=(
            SIMULATOR,
            BUS + "a_writer_cut_off_from_redis_alone_is_followed_not_fenced",
        ),
    ),
    Mutant(
        name="advance-before-publish",
        rule="9.6",
        harm="A message that Redis did not take counts as sent: rows kept in memory only are lost.",
        edits=(
            Edit(
                "ChannelPublisher._publish_all",
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
        checks=(RULES + "9_6_after_a_publish_of_unknown_outcome_the_same_frame_goes_out_again[lost]",),
    ),
    Mutant(
        name="frames-leave-in-any-order",
        rule="9.6",
        harm="Every burst looks like a loss to every reader, and rows kept in memory only are given up for missed.",
        edits=(
            Edit(
                "ChannelPublisher._publish_all",
                "            for frame in frames:\n                messages",
                "            for frame in reversed(frames):\n                messages",
            ),
        ),
        checks=(RULES + "9_6_frames_leave_in_the_order_in_which_they_were_composed",),
    ),
    Mutant(
        name="a-database-that-hangs-keeps-the-announcement-back",
        rule="2",
        harm="A writer whose database hangs for some seconds counts as dead.",
        edits=(
            Edit(
                "BusLife._keep_beating",
                "                await asyncio.wait({beating}, timeout=heartbeat / 4)\n",
                "                await asyncio.wait({beating})\n",
            ),
        ),
        checks=(LINK_LIFE + "a_driver_that_does_not_let_go_of_a_beat_keeps_no_announcement_back",),
    ),
    Mutant(
        name="linear-position-from-positions-read-after-the-registry",
        rule="9.7",
        harm="A linear consumer passes the first fact of a writer that joins at that moment.",
        edits=(
            Edit(
                "Bus.linear_position",
                "            lags = await",
                "            handled = self.positions().get(stream.name, {})\n            lags = await",
            ),
        ),
        checks=(RULES + "9_7_a_linear_position_is_of_positions_known_before_the_registry_was_read",),
    ),
    Mutant(
        name="linear-position-of-writers-heard",
        rule="9.7",
        harm="A registered writer that was never heard does not count: its first fact comes below the linear position.",
        edits=(
            Edit(
                "asyncio.bus._linear_position",
                "        if one.registered or at < one.position:\n",
                "        if (one.registered or at < one.position) and one.writer in handled:\n",
            ),
        ),
        checks=(RULES + "9_7_a_writer_counts_from_its_registration_though_nobody_has_heard_it",),
    ),
    Mutant(
        name="a-finished-writer-counts-no-more",
        rule="9.7",
        harm="A linear consumer passes the last rows of a killed process before they have been handled.",
        edits=(
            Edit(
                "asyncio.bus._linear_position",
                "        if one.registered or at < one.position:\n",
                "        if one.registered:\n",
            ),
        ),
        checks=(RULES + "9_7_a_writer_that_left_counts_until_its_last_rows_were_handled",),
    ),
    Mutant(
        name="a-writer-does-not-hear-the-others",
        rule="9.8",
        harm="An idle writer, and the linear position of everybody with it, lags by a heartbeat more.",
        edits=(Edit("Receiver.receive", "            writing.others.heard(frame)\n", "            pass\n"),),
        checks=(RULES + "9_8_a_writer_hears_the_rows_of_the_others",),
    ),
    Mutant(
        name="positions-saved-before-handling",
        rule="9.12",
        harm="A reader that crashes while it handles rows begins behind them next time: lost.",
        edits=(
            Edit(
                "PositionSaver._to_save",
                ("            position = progress.queue.delivered\n            if key[1] == context"),
                ("            position = progress.position\n            if key[1] == context"),
            ),
        ),
        checks=(
            SIMULATOR,
            RULES + "what_was_received_and_not_handled_is_neither_saved_nor_waited_for",
        ),
    ),
    Mutant(
        name="saved-outside-the-handler-s-transaction",
        rule="9.12",
        harm="The handler's transaction rolls back, the position does not: its effects are lost.",
        edits=(
            Edit(
                "BatchSaver.save_batch",
                "        await self._context.saver.store_changes([change], connection)\n",
                "        await self._context.saver.store_changes([change])\n",
            ),
        ),
        checks=(
            SIMULATOR,
            MUTANTS_GAPS + "9_12_a_position_saved_in_a_transaction_is_rolled_back_with_it",
        ),
    ),
    Mutant(
        name="no-reload-after-an-unknown-commit",
        rule="9.12",
        harm="A handler whose COMMIT landed without an answer is called again for the same rows until they are poison.",
        edits=(
            Edit(
                "Handlers._handler_failed",
                "        if batch.handling.tried or isinstance(error, ReaderMoved):\n",
                "        if False:\n",
            ),
        ),
        checks=(
            SIMULATOR,
            FAULTS + "a_handler_that_fails_for_good_after_its_commit_is_no_poison",
        ),
    ),
    Mutant(
        name="no-row-at-registration",
        rule="9.12",
        harm="A reader from now on that crashes before its first save begins at a later now: all between is lost.",
        edits=(
            Edit(
                "Beginning._register",
                '{(name, ""): 0} | positions, epoch, oldest)\n',
                "{key: at for key, at in positions.items() if not at}, epoch)\n",
            ),
        ),
        checks=(
            SIMULATOR,
            RULES + "9_12_where_a_reader_from_now_on_begins_is_saved_at_registration",
        ),
    ),
    Mutant(
        name="a-writer-that-joined-meanwhile-counts-from-now",
        rule="9.12",
        harm="A durable reader misses what a new writer wrote while the reader was down.",
        edits=(Edit("Beginning._load_durable", "starts = {key: 0 if before else ", "starts = {key: 0 if False else "),),
        checks=(BUS + "a_durable_reader_from_now_owes_all_of_a_writer_that_joins_while_it_is_down",),
    ),
    Mutant(
        name="a-failed-batch-counts-as-handled",
        rule="3",
        harm="Rows on which a handler keeps failing are skipped, with a line in a log.",
        edits=(
            Edit(
                "Handlers._failed",
                (
                    '        log.error("%s: stopped", failure, exc_info=error)\n'
                    "        self._context.stop(key, failure)\n"
                    "        return False\n"
                ),
                (
                    '        log.error("%s: skipped", failure, exc_info=error)\n'
                    "        core.done(*key)\n"
                    "        return True\n"
                ),
            ),
        ),
        checks=(
            SIMULATOR,
            BUS + "a_poison_row_stops_its_writer_loudly_and_the_others_flow",
        ),
    ),
    Mutant(
        name="no-announcement-when-the-publisher-returns",
        rule="2",
        harm="Readers learn only a beat later what was published while the connection was down.",
        edits=(
            Edit(
                "ChannelPublisher._publish_all",
                "                writing.core.connected(asyncio.get_running_loop().time())\n",
                "                pass\n",
            ),
        ),
        checks=(RULES + "a_writer_announces_itself_when_only_its_publishing_connection_was_lost",),
    ),
    Mutant(
        name="a-dead-link-is-not-noticed",
        rule="9.21",
        harm="A subscription that Redis forgot, or a half-open link, leaves a process deaf until it is restarted.",
        edits=(
            Edit(
                "BusLife._check_link",
                "        if not self.link.connected:\n",
                "        if now:\n",
            ),
        ),
        checks=(RULES + "hearing_nothing_for_five_beats_forces_a_reconnect",),
    ),
    Mutant(
        name="waiters-wake-at-any-writer-s-position",
        rule="R11",
        harm="wait_for returns before the row it waits for was handled: a read after it misses the own write.",
        edits=(
            Edit(
                "ReaderContext.wake",
                "            self.waiters.wake(key, self.core.delivered(*key))\n",
                "            self.waiters.wake(key, max(self.core.positions().get(key[0], {0: 0}).values()))\n",
            ),
        ),
        checks=(
            SIMULATOR,
            MUTANTS_GAPS + "r11_a_wait_for_one_writer_goes_on_while_another_advances_past_it",
        ),
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
        checks=(
            SIMULATOR,
            BUS + "r11_waiting_for_one_writer",
        ),
    ),
    Mutant(
        name="saved-positions-of-another-log-count",
        rule="9",
        harm="A reader that was down during a restore begins in the middle of the new log: all before it is lost.",
        edits=(
            Edit(
                "Beginning._saved_state",
                "            if state.epoch not in (None, epoch):\n",
                "            if False:\n",
            ),
        ),
        checks=(RULES + "saved_positions_of_another_epoch_are_not_gone_on_from",),
    ),
    Mutant(
        name="saved-over-a-position-known-to-be-further",
        rule="9.12",
        harm="A reader that was told that its twin is further handles the same rows a second time.",
        edits=(
            Edit(
                "BatchSaver.begins",
                " or self._saved.at.get(key, batch.after + 1) > batch.after:\n",
                " or key not in self._saved.at:\n",
            ),
        ),
        checks=(RULES + "9_12_a_handler_s_save_never_takes_back_what_another_process_saved",),
    ),
    Mutant(
        name="own-facts-hide-those-of-a-predecessor",
        rule="9",
        harm="What a crashed process committed never reaches the handlers of the one that took its place.",
        edits=(
            Edit(
                "OwnFacts.count_as_handled",
                """\
        return stream not in self._due_upto or (
            self._reader.delivered(stream, self.name or "") >= self._due_upto[stream]
        )
""",
                "        return True\n",
            ),
        ),
        checks=(FAULTS + "own_facts_do_not_hide_those_a_predecessor_left",),
    ),
    Mutant(
        name="a-predecessor-s-rows-are-not-fetched",
        rule="9",
        harm="What a crashed process committed never reaches the handlers of the one that took its place.",
        edits=(
            Edit(
                "Beginning._learn",
                "            self._core.learned(*key, self._context.own.known(writer))\n",
                "            self._core.learned(*key, 0 * self._context.own.known(writer))\n",
            ),
        ),
        checks=(
            SIMULATOR,
            BUS + "a_reader_that_writes_too_gets_what_its_dead_predecessor_committed",
        ),
    ),
    Mutant(
        name="a-predecessor-s-rows-are-given-up-with-the-link",
        rule="9",
        harm="Redis restarts while they are fetched: nobody announces the own name, so they never come.",
        edits=(
            Edit(
                "OwnFacts.learn",
                "        for stream, position in self._due_upto.items():\n",
                "        for stream, position in {}.items():\n",
            ),
        ),
        checks=(FAULTS + "a_link_lost_while_a_predecessor_s_rows_are_fetched_does_not_end_that",),
    ),
    Mutant(
        name="the-own-name-with-a-higher-incarnation-is-ignored",
        rule="9",
        harm="A process that was replaced while its database was away goes on publishing under the name.",
        edits=(
            Edit(
                "NameWatch.heard",
                "        if incarnation <= session.incarnation:\n",
                "        if True:\n",
            ),
        ),
        checks=(
            TRUST + "9_19_a_name_that_is_claimed_anew_fences_at_once",
            TRUST + "9_19_a_writer_without_a_claim_has_nothing_but_the_wire",
        ),
    ),
    Mutant(
        name="save-every-zero-spins",
        rule="5",
        harm="With save_every=0 the task that saves positions never waits: it takes a whole processor.",
        edits=(
            Edit(
                "PositionSaver.keep_saving",
                "await asyncio.sleep(settings.save_every or settings.heartbeat)",
                "await asyncio.sleep(settings.save_every)",
            ),
        ),
        checks=(
            SIMULATOR,
            FAULTS + "without_a_pause_between_saves_nothing_goes_round_idle",
        ),
    ),
    Mutant(
        name="the-reset-of-a-stopped-stream-spins",
        rule="3",
        harm="A new epoch while a stream is stopped: its worker is started over and over, at full load.",
        edits=(
            Edit(
                "Handlers.hand_out",
                " and key not in self._context.stopped and key not in self._cancelled:",
                " and key not in self._cancelled:",
            ),
            Edit(
                "Beginning._go_over",
                (
                    "                for key in list(context.stopped):  # on a row, or a position, of the log before\n"
                    "                    del context.stopped[key]\n"
                    "                    core.progress[key].resume()\n"
                ),
                "",
            ),
        ),
        checks=(
            SIMULATOR,
            FAULTS + "a_stopped_writer_with_rows_waiting_makes_no_tasks",
        ),
    ),
    Mutant(
        name="what-stopped-in-the-old-log-stays-stopped",
        rule="9",
        harm="A poison row that a restore took away keeps its stream stopped: rows of the new log wait for ever.",
        edits=(
            Edit(
                "Beginning._go_over",
                (
                    "                for key in list(context.stopped):  # on a row, or a position, of the log before\n"
                    "                    del context.stopped[key]\n"
                    "                    core.progress[key].resume()\n"
                ),
                "",
            ),
        ),
        checks=(RULES + "what_stopped_in_the_old_log_goes_on_in_the_new_one",),
    ),
    Mutant(
        name="a-restored-sequence-stops-for-good",
        rule="9",
        harm="A reader that meets the restored sequence before the new epoch stops, and stays stopped in the new one.",
        edits=(
            Edit(
                "TableReader.check_sequences",
                "self._store.sequence(key[0], log_read)",
                "self._store.sequence(key[0])",
            ),
            Edit(
                "Beginning._go_over",
                (
                    "                for key in list(context.stopped):  # on a row, or a position, of the log before\n"
                    "                    del context.stopped[key]\n"
                    "                    core.progress[key].resume()\n"
                ),
                "",
            ),
        ),
        checks=(RULES + "a_sequence_of_a_restored_log_stops_nobody_who_has_not_seen_its_epoch",),
    ),
    Mutant(
        name="an-epoch-that-nobody-announces-is-not-noticed",
        rule="9",
        harm="A restored log whose writers are all dead is never noticed by a reader that is up.",
        edits=(
            Edit(
                "TableReader._registry",
                "core.begins_in(await self._store.epoch())",
                "bool(await self._store.epoch())",
            ),
        ),
        checks=(RULES + "a_restore_that_no_writer_lives_to_announce_is_noticed",),
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
        checks=(
            SIMULATOR,
            MUTANTS_GAPS + "4_a_batch_does_not_come_again_once_the_next_was_asked_for",
        ),
    ),
    Mutant(
        name="a-loop-is-handed-a-batch-of-a-log-that-is-gone",
        rule="4",
        harm="After a new epoch bus.follow() still yields a batch of the old log that had waited for the loop.",
        edits=(
            Edit(
                "asyncio.reading.Reading.follow",
                "                    if self.core.in_hand((batch.stream.name, batch.writer), batch.handling.raw):\n",
                "                    if True:\n",
            ),
        ),
        checks=(MUTANTS_GAPS + "4_a_batch_of_a_log_that_is_gone_is_not_handed_to_a_loop",),
    ),
    Mutant(
        name="a-reload-takes-back-what-a-handler-saved-meanwhile",
        rule="9.12",
        harm="A timed save that lost reads the saved positions, a handler saves, and its rows are handled again.",
        edits=(
            Edit(
                "SavedPositions.compare",
                "            if self.at.get(key, 0) > before.get(key, 0):\n",
                "            if False:\n",
            ),
        ),
        checks=(RULES + "9_12_a_handler_that_saves_while_a_timed_save_reloads_is_not_called_again",),
    ),
    Mutant(
        name="a-registration-slips-into-the-new-log",
        rule="9.12",
        harm="A position of the old log is registered while the new one begins: readers step over facts of it.",
        edits=(
            Edit(
                "BatchSaver.reload",
                (
                    "            async with context.saving:\n"
                    "                state = await context.reader_store.load_reader(context.reader)\n"
                    "                void = key[0]"
                ),
                (
                    "            if True:\n"
                    "                state = await context.reader_store.load_reader(context.reader)\n"
                    "                void = key[0]"
                ),
            ),
        ),
        checks=(MUTANTS_GAPS + "9_12_a_registration_of_the_log_before_does_not_slip_into_the_new_one",),
    ),
    Mutant(
        name="where-a-batch-of-the-old-log-began-is-registered",
        rule="9.12",
        harm="A writer that joined before a restore is registered after it, at its old position: facts are skipped.",
        edits=(
            Edit(
                "BatchSaver.registered",
                "                if not self._core.in_hand(key, raw):  # of a log that is gone",
                "                if False:  # of a log that is gone",
            ),
        ),
        checks=(MUTANTS_GAPS + "9_12_where_a_batch_of_the_log_before_began_is_not_registered_in_the_new_one",),
    ),
    Mutant(
        name="a-lagging-registry-is-taken-for-all-writers",
        rule="9.7",
        harm="A reader on a replica takes a position for linear while a writer that joined has an ID open below it.",
        edits=(Edit("asyncio.bus._linear_position", "        if lags:\n", "        if False:\n"),),
        checks=(MUTANTS_GAPS + "9_7_a_registry_that_lags_bounds_the_linear_position_by_its_own_positions",),
    ),
    Mutant(
        name="a-fenced-writer-hands-out-its-own-facts",
        rule="9.2",
        harm="A fenced process that reads, not the first of its name, hands its own facts to its own handlers.",
        edits=(
            Edit(
                "OwnFacts.disown",
                "            if key[1] == own and handled.get(key[0], 0) > progress.position:\n",
                "            if False:\n",
            ),
        ),
        checks=(MUTANTS_GAPS + "9_2_a_fenced_writer_that_reads_does_not_hand_out_its_own_facts",),
    ),
    Mutant(
        name="a-batch-that-was-given-up-is-handed-out",
        rule="9.12",
        harm="A batch given up while its reader was registered, or between two tries, is handled, and comes again.",
        edits=(
            Edit(
                "Handlers._call_until_handled",
                "            if not core.in_hand(key, raw):\n                return True\n",
                "",
            ),
        ),
        checks=(
            MUTANTS_GAPS + "9_12_a_batch_given_up_while_it_is_registered_is_not_handed_to_the_next_loop",
            MUTANTS_GAPS + "9_12_a_batch_given_up_between_two_tries_is_not_tried_again",
        ),
    ),
    Mutant(
        name="own-positions-count-before-they-are-known",
        rule="9",
        harm="A process that reads and writes says, and saves, that it is past what its predecessor left unhandled.",
        edits=(
            Edit(
                "ReaderContext.own_counts",
                (
                    "        if stream in self.following and stream not in self.core.followed:\n"
                    "            return False\n"
                ),
                "",
            ),
        ),
        checks=(MUTANTS_GAPS + "9_own_positions_count_once_those_of_the_predecessor_are_known",),
    ),
    Mutant(
        name="own-positions-of-the-log-before-count",
        rule="9.16",
        harm="A process whose reading half is in another log already saves its own positions of the one before.",
        edits=(Edit("OwnName.claim", "claimed(writing.epoch, ", "claimed(None, "),),
        checks=(MUTANTS_GAPS + "9_16_own_positions_of_the_log_before_are_not_saved_in_the_new_one",),
    ),
    Mutant(
        name="own-positions-of-the-log-of-the-claim-count",
        rule="9.16",
        harm="Of a process that claims its name before a restore, and reads after it, rows under its name are never "
        "handled.",
        edits=(Edit("OwnFacts.count_as_handled", " or self._elsewhere:", ":"),),
        checks=("core/test_own_facts.py::test_where_own_facts_begin_says_nothing_of_another_log",),
    ),
    Mutant(
        name="own-facts-of-another-log-are-not-due",
        rule="9.16",
        harm="What stands under the own name in a restored log counts as written by this process: it is never handled.",
        edits=(Edit("OwnFacts.known", "{} if self._elsewhere else self._starts", "self._starts"),),
        checks=(MUTANTS_GAPS + "9_16_own_positions_are_not_saved_where_the_reader_begins_in_another_log",),
    ),
    Mutant(
        name="what-was-pruned-since-is-no-loss",
        rule="9",
        harm="A reader that began at the oldest row steps over rows written and pruned later, without a word.",
        edits=(Edit("OldestRows.begins_later", " or error.floor > last:", ":"),),
        checks=(RULES + "9_what_was_written_since_and_pruned_is_no_later_beginning",),
    ),
    Mutant(
        name="other-streams-of-the-name-forgotten",
        rule="9.12",
        harm="After a restore a stream that this process does not follow yet begins from now: all between is lost.",
        edits=(Edit("Beginning._begin_anew", "streams = {*names, *before.streams}\n", "streams = {*names}\n"),),
        checks=(RULES + "9_12_every_stream_of_a_reader_begins_anew_with_the_log",),
    ),
    Mutant(
        name="begins-later-with-rows-in-hand",
        rule="9",
        harm="A reader that has been handed the oldest rows steps over those pruned behind them without a word.",
        edits=(Edit("Handlers._call_until_handled", "self._context.oldest.at.pop(key, None)", "pass"),),
        checks=(RULES + "9_rows_pruned_behind_those_in_hand_are_reported",),
    ),
    Mutant(
        name="rows-that-a-twin-has-handled-stop-a-reader",
        rule="9.12",
        harm="Of two processes under one reader name the slower one stops at rows that the other handled, now pruned.",
        edits=(Edit("TableReader.fetch", " and not await self._context.saver.handled_by_peer(error):\n", ":\n"),),
        checks=(MUTANTS_GAPS + "9_12_rows_that_a_twin_has_handled_and_that_were_pruned_stop_nobody",),
    ),
    Mutant(
        name="positions-of-a-half-loaded-snapshot-are-believed",
        rule="9.12",
        harm="A reader that was killed while it loaded a snapshot goes on behind it: parts never applied are lost.",
        edits=(
            Edit(
                "Bootstrapping.at_start",
                ("        if saved is not None and unfinished(saved):\n            self._context.hold(name, known)\n"),
                ("        if False:\n            self._context.hold(name, known)\n"),
            ),
        ),
        checks=(BOOTSTRAP_FAULTS + "a_killed_process_goes_on_with_the_next_part[1]",),
    ),
    Mutant(
        name="a-snapshot-is-applied-beside-a-handler",
        rule="9",
        harm="A handler that was at work when a snapshot began writes older rows over newer ones of it.",
        edits=(
            Edit("Applying._quiet", "        while self.context.is_at_work(self.name):\n", "        while False:\n"),
        ),
        checks=(BOOTSTRAP_FAULTS + "nothing_is_applied_before_the_handlers_have_ended",),
    ),
    Mutant(
        name="a-part-that-was-saved-is-applied-again",
        rule="9.12",
        harm="A function raises behind its COMMIT, and its part is applied twice.",
        edits=(
            Edit(
                "Applying._hand_out",
                " = await self._decided(work) if part.tried or isinstance(error, ReaderMoved) else None\n",
                " = None\n",
            ),
        ),
        checks=(BOOTSTRAP_SAVING + "each_part_is_applied_once_whatever_the_function_raises[after_commit-2]",),
    ),
    Mutant(
        name="a-snapshot-older-than-the-floor-is-applied",
        rule="9",
        harm="A directory written yesterday is loaded, and what followed it is pruned: the reader loads for ever.",
        edits=(
            Edit(
                "check_fits_log", "            if one.stream == stream and one.floor > at:\n", "            if False:\n"
            ),
        ),
        checks=(BOOTSTRAP_FAULTS + "a_snapshot_older_than_what_was_pruned_is_refused",),
    ),
    Mutant(
        name="own-facts-behind-a-snapshot-are-forgotten",
        rule="9",
        harm="A process empties its target, and what it wrote itself since the snapshot never comes back.",
        edits=(
            Edit(
                "OwnFacts.bootstrapped",
                "            self._behind_snapshot[stream] = None\n",
                "            pass\n",
            ),
        ),
        checks=(
            BOOTSTRAP_FAULTS + "a_writer_that_bootstraps_its_own_stream_has_its_own_rows_in_it[False]",
            BOOTSTRAP_FAULTS + "own_facts_that_are_under_way_when_the_snapshot_is_applied_are_handled_too",
        ),
    ),
    Mutant(
        name="an-earlier-snapshot-is-taken-for-a-new-one",
        rule="9.12",
        harm="A reader below the floor goes on with a snapshot that was over long ago, below the floor.",
        edits=(
            Edit(
                "Run._follow_peer",
                "                self._before = saved.id  # over before this one was asked for\n",
                "                pass\n",
            ),
        ),
        checks=(BOOTSTRAP_FAULTS + "an_earlier_snapshot_that_is_over_is_not_taken_for_a_new_one",),
    ),
    Mutant(
        name="what-was-handled-before-a-snapshot-counts-while-it-loads",
        rule="9",
        harm="Who waits for a row is told that it is there, and the target has just been emptied.",
        edits=(
            Edit(
                "Reading.wait_for",
                "                if self.core.delivered(*key) < token or self.holds(key[0]):\n",
                "                if self.core.delivered(*key) < token:\n",
            ),
        ),
        checks=(BOOTSTRAP + "what_was_handled_is_waited_for_again_while_a_snapshot_loads",),
    ),
    Mutant(
        name="a-twins-snapshot-is-not-joined",
        rule="9.12",
        harm="A process goes on to handle rows while another of its name empties and fills their target.",
        edits=(
            Edit(
                "Bootstrapping.look_at",
                "        for name in [name for name in begun if not context.holds(name)]:\n",
                "        for name in ():\n",
            ),
        ),
        checks=(
            BOOTSTRAP_SAVING + "a_process_that_reads_joins_the_snapshot_that_another_of_its_name_begins",
            BOOTSTRAP_TWINS + "a_process_waits_until_the_others_snapshot_is_applied",
        ),
    ),
    Mutant(
        name="a-position-is-the-same-whatever-came-between",
        rule="9.12",
        harm="Rows handled before another process emptied their target, and saved after it: lost.",
        edits=(Edit("PositionSaver.store_changes", "bootstraps=begun)\n", "bootstraps=None)\n"),),
        checks=(BOOTSTRAP_TWINS + "a_position_that_is_what_it_was_is_another_after_a_snapshot[0]",),
    ),
    Mutant(
        name="half-a-snapshot-is-drained",
        rule="9.12",
        harm="Behind a snapshot that another process has begun anew rows are handed out, and their target is emptied.",
        edits=(Edit("Run._end_of", "            if self.name in state.loading:\n", "            if False:\n"),),
        checks=(BOOTSTRAP_TWINS + "one_that_drains_when_the_other_begins_anew_goes_on_with_that",),
    ),
    Mutant(
        name="the-table-answers-as-of-its-answer",
        rule="6",
        harm="What is committed while the answer is on its way is taken for known: older than the bound by that time.",
        edits=(
            Edit(
                "CacheUpkeep._ask",
                "                    table.looked(asked, newest.rows)\n",
                "                    table.looked(self.caches.clock(), newest.rows)\n",
            ),
        ),
        checks=(CACHED + "an_answer_of_the_table_that_comes_late_counts_as_of_the_question",),
    ),
    Mutant(
        name="pruned-rows-clear-nothing",
        rule="6",
        harm="What the rows invalidated that were pruned before they came is returned for ever.",
        edits=(
            Edit(
                "CacheUpkeep.follow", "reading.handlers.on_notice(Missed, stream.name, lambda *_: feed.clear())\n", ""
            ),
            Edit(
                "CacheUpkeep.look",
                "core.progress[key].queue.noticed:\n                self._watched[key[0]].feed.clear()\n",
                "False:\n                pass\n",
            ),
        ),
        checks=(CACHED + "rows_that_were_pruned_clear_the_caches",),
    ),
    Mutant(
        name="an-unknown-error-at-the-start-ends-a-reader",
        rule="4",
        harm="A reader is dead for good after one error of no known kind.",
        edits=(
            Edit(
                "Beginning.begin",
                'self.not_begun[stream.name] = f"{type(error).__name__}: {error}"',
                ('context.fail(Unavailable("the store", error))\nreturn'),
            ),
        ),
        checks=(SESSIONS_ENDED + "a_reader_begins_again_after_an_unknown_error",),
    ),
    Mutant(
        name="a-paused-writer-stays-fenced",
        rule="9.5",
        harm="A process that was paused for longer than its lease writes nothing more until it is restarted.",
        edits=(Edit("OwnName._begin", "renew=self._renew,", "renew=None,"),),
        checks=(
            WINNING_BACK + "a_paused_writer_writes_again[deployment]",
            WINNING_BACK + "an_idle_writer_wins_its_name_back_by_itself",
        ),
    ),
    Mutant(
        name="a-paused-writer-takes-the-name-of-its-successor",
        rule="9.5",
        harm="Two processes of one name fence each other in turns.",
        edits=(
            Edit(
                "claim_name",
                "timeout=config.settings.claim_timeout, again=again)",
                "timeout=config.settings.claim_timeout)",
            ),
        ),
        checks=(WINNING_BACK + "the_name_of_another_process_is_not_won_back",),
    ),
    Mutant(
        name="a-caller-who-is-cancelled-tears-the-claim",
        rule="9.5",
        harm="A claim is committed and not noted: the process takes its own name for another's, and stays fenced.",
        edits=(Edit("OwnName._renew", "await asyncio.shield(winning)", "await winning"),),
        checks=(WINNING_BACK + "a_caller_who_is_cancelled_does_not_tear_the_claim",),
    ),
    Mutant(
        name="a-claim-that-fails-when-its-callers-have-left-is-told-by-asyncio",
        rule="9.5",
        harm="A beat that took too long leaves a traceback of an exception that was never retrieved, without a name.",
        edits=(
            Edit(
                "OwnName._renew",
                "                winning.add_done_callback(self._tell_not_won_back)\n",
                "",
            ),
        ),
        checks=(WINNING_BACK + "what_fails_when_its_callers_have_left_is_said_once[1]",),
    ),
    Mutant(
        name="each-caller-that-left-has-a-line-for-a-claim-that-fails",
        rule="9.5",
        harm="A service that stops, or whose requests have a deadline, logs one failure a thousand times.",
        edits=(
            Edit(
                "OwnName._renew",
                "                winning.remove_done_callback(self._tell_not_won_back)  # once, however many leave\n",
                "",
            ),
        ),
        checks=(WINNING_BACK + "what_fails_when_its_callers_have_left_is_said_once[3]",),
    ),
    Mutant(
        name="nobody-looks-whether-saved-positions-went-back",
        rule="9.23",
        harm="Effects that a failover took back are missing until the writer's next row.",
        edits=(
            Edit(
                "Reading.look_after_silent",
                "            if not all_known or not await self.saver.look_at_saved():\n",
                "            if True:\n",
            ),
        ),
        checks=(
            FAILOVER + "effects_are_made_again_that_the_process_before_had_made",
            FAILOVER + "effects_that_a_failover_took_back_are_made_again[True-False]",
        ),
    ),
    Mutant(
        name="a-reader-waits-for-a-step-that-a-failover-has-lost",
        rule="9.23",
        harm="Saved positions that a failover put back into the log before are never of this one: the reader hangs.",
        edits=(Edit("PositionSaver.look_at_saved", "        if older:\n", "        if False:\n"),),
        checks=(SIMULATION + "what_the_simulator_found_stays_mended[a-failover-lost-the-step-into-a-new-log]",),
    ),
    Mutant(
        name="a-stream-that-begins-replaces-what-others-have-saved",
        rule="9.23",
        harm="A failover lost the step into a restored log, and rows were pruned: a reader passes over them, untold.",
        edits=(Edit("Beginning._saved_state", "            if context.saved.at:", "            if False:"),),
        checks=(
            MUTANTS_GAPS + "9_23_a_stream_that_begins_finds_that_a_failover_lost_the_step_into_this_log",
            SIMULATION + "what_the_simulator_found_stays_mended[begun-in-a-restored-log-and-lost-by-a-failover]",
        ),
    ),
    Mutant(
        name="a-lost-registration-is-made-anew-where-the-reader-is",
        rule="9.23",
        harm="Effects that a failover took back together with the first saved position are never made again.",
        edits=(
            Edit(
                "PositionSaver._compare_saved",
                "lambda key: core.progress[key].began",
                "lambda key: core.delivered(*key)",
            ),
        ),
        checks=(FAILOVER + "effects_that_a_failover_took_back_are_made_again[False-False]",),
    ),
    Mutant(
        name="who-is-forgotten-begins-without-a-word",
        rule="9.23",
        harm="A failover lost the registration of a reader that was down: it skips what was pruned, silently.",
        edits=(Edit("tell_where_it_begins", "    if behind:\n", "    if False:\n"),),
        checks=(
            RETRYING + "a_reader_that_is_not_registered_says_what_it_does_not_get[earliest]",
            SIMULATION + "what_the_simulator_found_stays_mended[registration-lost-while-the-reader-was-down]",
        ),
    ),
    Mutant(
        name="a-lost-registration-waits-for-the-next-save",
        rule="9.23",
        harm="A reader goes back for rows that a failover made due again, and meanwhile they are pruned: it stops.",
        edits=(Edit("PositionSaver._compare_saved", "        if lost:\n", "        if False:\n"),),
        checks=(
            RETRYING + "a_lost_registration_that_was_noticed_holds_back_pruning_at_once",
            SIMULATION + "what_the_simulator_found_stays_mended[noticed-a-lost-registration-and-did-not-register]",
        ),
    ),
    Mutant(
        name="what-a-process-before-saved-is-where-it-began",
        rule="9.23",
        harm="The same, once the reader was restarted.",
        edits=(
            Edit(
                "Beginning._load_durable",
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
                "BatchSaver.reload",
                "self._context.saver.register(key, core.progress[key].began)",
                "self._context.saver.register(key, raw.after)",
            ),
        ),
        checks=(EFFECTS + "effects_that_were_lost_with_the_registration_are_made_again[sqlite_url-asyncio]",),
    ),
    Mutant(
        name="a-clock-that-was-set-back-keeps-the-dead-alive",
        rule="9.5",
        harm="The database's clock is set back: rows of a dead writer reach nobody until it catches up, in a year.",
        edits=(Edit("TableReader._silence", "self._ahead.get((known.stream, known.writer), 0.0)", "0.0"),),
        checks=(
            "asyncio/test_bus.py::test_a_dead_writer_is_found_though_the_database_s_clock_was_set_back[1 year]",
            "proof/test_simulation.py::test_what_the_simulator_found_stays_mended[a-dead-writer-under-a-clock-set-back]",
        ),
    ),
    Mutant(
        name="a-writer-stops-for-its-predecessor-s-clock",
        rule="9.24",
        harm="A writer that is started before its predecessor has ended stops, if that one's clock is ahead.",
        edits=(Edit("NameWatch.heard", "if session.kept or now - self.since > bound or has_log:", "if True:"),),
        checks=(
            CLOCK_BEHIND + "a_writer_goes_on_above_a_predecessor_that_it_hears[asyncio]",
            CLOCK_BEHIND + "a_writer_goes_on_above_a_predecessor_that_it_hears[threads]",
        ),
    ),
    Mutant(
        name="a-name-that-is-won-back-is-another-s-meanwhile",
        rule="9.5",
        harm="While a writer wins its name back its own positions are forgotten, and wait_for waits for its own facts.",
        edits=(
            Edit(
                "OwnName.lost",
                "return self.writing is not None and self.writing.lost",
                "return self.writing is not None and self.writing.fenced is not None",
            ),
        ),
        checks=(SIMULATION + "what_the_simulator_found_stays_mended[own-position-while-the-name-is-won-back]",),
    ),
    Mutant(
        name="a-writer-without-a-claim-goes-above-its-successor-s",
        rule="9.24",
        harm="A stream without a table is heard from the former process, though the name was claimed by another one.",
        edits=(Edit("NameWatch.heard", " or has_log:", ":"),),
        checks=(RULES + "9_11_a_name_that_gets_its_first_stream_with_a_table_is_heard_in_all_of_them[rolling]",),
    ),
    Mutant(
        name="a-fenced-writer-has-handled-its-successor-s-facts",
        rule="9.5",
        harm="wait_for of a fenced process returns for facts of its successor that it has not handled.",
        edits=(
            Edit(
                "Bus._is_successors",
                "(writing.lost or writing.is_successors(stream.name, abs(token)))",
                "writing.lost",
            ),
        ),
        checks=(FAULTS + "a_process_that_does_not_know_yet_whether_it_lost_its_name_waits_for_its_successor_s_facts",),
    ),
    Mutant(
        name="the-pause-of-a-handler-outlives-close",
        rule="9.12",
        harm="A process whose handler's database is away does not stop when it is told to.",
        edits=(Edit("asyncio.reading.Reading.close", "        self.retrying.end()\n", ""),),
        checks=(RETRYING + "close_ends_a_pause_at_once_and_the_rows_come_again",),
    ),
    Mutant(
        name="the-part-of-a-snapshot-is-poison-in-an-outage",
        rule="9.12",
        harm="A bootstrap whose target is away for a moment stops for good.",
        edits=(
            Edit(
                "Applying._hand_out",
                "                if verdict is Verdict.POISON:\n",
                "                if verdict is not Verdict.AGAIN:\n",
            ),
        ),
        checks=(RETRYING + "the_part_of_a_snapshot_waits_for_the_end_of_an_outage",),
    ),
    Mutant(
        name="the-position-is-saved-behind-the-effects",
        rule="9.12",
        harm="A crash between the COMMIT of the effects and the saving of the position applies the effects twice.",
        edits=(
            Edit(
                "BatchSaver.transaction",
                "            await batch.save(effects.connection)\n            await effects.commit()\n",
                "            await effects.commit()\n            await batch.save(effects.connection)\n",
            ),
        ),
        checks=(EFFECTS + "a_commit_without_an_answer_is_looked_up",),
    ),
    Mutant(
        name="a-block-may-end-its-transaction-itself",
        rule="9.12",
        harm="The effects are committed, or rolled back, without the position: they count twice, or never.",
        edits=(
            Edit(
                "BatchSaver.transaction",
                "            if effects.ended:\n                raise ConfigError(ENDED)\n",
                "",
            ),
            Edit("sync.batch.exactly_once", "        if effects.ended:\n            raise ConfigError(ENDED)\n", ""),
        ),
        checks=(EFFECTS + "a_block_that_ends_the_transaction_itself_is_told",),
    ),
    Mutant(
        name="a-handler-s-transaction-begins-wherever-the-position-is",
        rule="9.12",
        harm="A handler works on a state without the fact before, which another process handles again only then.",
        edits=(Edit("readers.stands", "    if not found[0]:", "    if False:"),),
        checks=(EFFECTS + "a_handler_never_works_on_a_state_without_the_fact_before",),
    ),
    Mutant(
        name="the-reason-for-a-stop-is-not-stored",
        rule="9.12",
        harm="A reader stopped last night, its process is gone: busrep lag shows a reader that is behind, and not why.",
        edits=(Edit("ReaderContext.stop", "        self.note(error, key)\n", ""),),
        checks=(HEALTH + "a_stop_is_told_and_stored_beside_the_position_until_it_moves_on",),
    ),
    Mutant(
        name="the-last-save-clears-the-reason-for-a-stop",
        rule="9.12",
        harm="The same, as soon as what was handled before the stop is saved.",
        edits=(
            Edit(
                "PositionSaver.store_notes",
                "        await self.try_save([key for key in due if key in self._core.progress], busy=True)\n",
                "",
            ),
            Edit(
                "PositionSaver._save_together",
                "            context.note(context.stopped[key], key)\n",
                "            pass\n",
            ),
        ),
        checks=(HEALTH + "a_stop_is_told_and_stored_beside_the_position_until_it_moves_on",),
    ),
    Mutant(
        name="nobody-is-told-of-a-stop",
        rule="9.12",
        harm="A (stream, writer) stops, and the application that asked to be told is not.",
        edits=(
            Edit(
                "ReaderContext.stop",
                ("        if key not in self.stopped:\n            self.tell_failure(error)\n"),
                "",
            ),
        ),
        checks=(HEALTH + "a_stop_is_told_and_stored_beside_the_position_until_it_moves_on",),
    ),
    Mutant(
        name="what-another-log-refuses-was-this-position",
        rule="9.17",
        harm="A relay whose target was restored to an older state hears nothing of that writer any more, in silence.",
        edits=(
            Edit(
                "Handlers._handler_failed",
                "            and (batch.handling.tried and (error.stream, error.position) == (key[0], raw.position))\n",
                "",
            ),
        ),
        checks=(RETRYING + "what_the_handler_wrote_elsewhere_was_refused",),
    ),
    Mutant(
        name="any-handler-of-a-stream-may-save",
        rule="9.12",
        harm="The first of two handlers saves, the second fails: the rows are not handed to it again.",
        edits=(Edit("BatchSaver.begins", "        if not batch.handling.last:", "        if False:"),),
        checks=(EFFECTS + "only_the_last_handler_of_a_stream_may_save",),
    ),
    Mutant(
        name="a-loop-that-was-left-is-waited-for",
        rule="9.12",
        harm="Another handler of its stream, which was at work then, gets nothing more of that writer, in silence.",
        edits=(
            Edit(
                "Handlers._call_handlers", "            if handler in self._handlers[stream]:", "            if True:"
            ),
        ),
        checks=(RETRYING + "a_loop_that_is_left_while_another_handler_works_keeps_nothing_back",),
    ),
    Mutant(
        name="a-cancelled-commit-is-a-stop",
        rule="9.12",
        harm="close() during a slow COMMIT tells of a handler that stopped for good, and stores that.",
        edits=(
            Edit("heed_cancellation", "        raise asyncio.CancelledError from error\n", "        raise error\n"),
        ),
        checks=(RETRYING + "close_cancels_a_handler_that_makes_another_error_of_it",),
    ),
    Mutant(
        name="a-deadline-of-the-handlers-own-ends-its-worker",
        rule="9.12",
        harm="A handler makes TimeoutError of a task.cancel() of its own: its batch stays in hand, nothing of that "
        "writer is handed out again, and nothing says so.",
        edits=(
            Edit(
                "Handlers._call_failed",
                ("        if self._context.closed:\n            heed_cancellation(error)  # it lost its patience\n"),
                "        heed_cancellation(error)\n",
            ),
            Edit(
                "Handlers._was_cancelled",
                "            if self.core.progress[key].queue.handling is not None:\n",
                "            if False:\n",
            ),
        ),
        checks=(
            RETRYING + "a_deadline_of_the_handlers_own_is_an_error_like_any_other",
            EFFECTS + "a_deadline_of_the_handlers_own_rolls_both_back",
        ),
    ),
    Mutant(
        name="what-is-no-exception-leaves-a-reader-deaf",
        rule="9.12",
        harm="A handler calls pytest.fail(): nothing of that writer is handed out any more, and nothing says so.",
        edits=(Edit("Handlers._work", "except BaseException as error:", "except Exception as error:"),),
        checks=(RETRYING + "what_is_raised_and_is_no_exception_stops_a_reader_loudly",),
    ),
    Mutant(
        name="what-is-no-exception-ends-a-bootstrap",
        rule="9.12",
        harm="The function of a snapshot raises what is no Exception: the bootstrap stands still, and nothing says so.",
        edits=(Edit("Run._do", "except BaseException as error:", "except Exception as error:"),),
        checks=(RETRYING + "what_is_raised_and_is_no_exception_does_not_end_a_bootstrap",),
    ),
    Mutant(
        name="a-deadline-of-the-functions-own-ends-the-bootstrap",
        rule="9.12",
        harm="The function that applies a snapshot's part makes TimeoutError of a task.cancel() of its own: the "
        "bootstrap waits for ever, and nothing says so.",
        edits=(
            Edit(
                "bootstrap_run.Run._do",
                "            if being_cancelled() and (self.context.ended or work not in machine.under_way):",
                "            if being_cancelled():",
            ),
            Edit(
                "Applying._hand_out",
                ("                if self.context.ended:\n                    heed_cancellation(error)"),
                ("                if True:\n                    heed_cancellation(error)"),
            ),
        ),
        checks=(BOOTSTRAP_FAULTS + "a_deadline_of_the_functions_own_is_an_error_like_any_other",),
    ),
    Mutant(
        name="a-cancellation-that-is-over-counts-on",
        rule="9.12",
        harm="A handler that got over a cancellation leaves its count up: what is called next in that task takes its "
        "own timeouts and task groups for cancelled ones.",
        edits=(Edit("forget_cancellation", "        task.uncancel()\n", "        break\n"),),
        checks=(RETRYING + "a_deadline_of_the_handlers_own_is_an_error_like_any_other",),
    ),
    Mutant(
        name="a-worker-that-is-cancelled-goes-on-itself",
        rule="9.12",
        harm="A program that ends without close(): asyncio.run() cancels all tasks, and waits for a worker for ever.",
        edits=(
            Edit(
                "Handlers._call_until_handled",
                "            if self._context.closed or key in self._cancelled:\n",
                "            if self._context.closed:\n",
            ),
        ),
        checks=(RETRYING + "a_worker_that_somebody_cancels_ends_and_another_goes_on",),
    ),
    Mutant(
        name="close-cancels-whoever-waits-for-the-name",
        rule="9.5",
        harm="A task of the application's that nobody cancelled gets CancelledError, and ends without a word.",
        edits=(
            Edit(
                "OwnName._renew",
                "                raise Closed from None  # only close() ends it\n",
                "                raise\n",
            ),
        ),
        checks=(WINNING_BACK + "a_caller_is_told_that_the_bus_was_closed_meanwhile",),
    ),
    Mutant(
        name="a-stop-at-the-start-is-not-stored",
        rule="9.12",
        harm="The reader refuses to start in another log, and busrep lag does not say why.",
        edits=(
            Edit(
                "Beginning._saved_state",
                "                context.note(changed, *state.positions)\n",
                "",
            ),
        ),
        checks=(HEALTH + "a_reader_that_stops_at_its_start_stores_why",),
    ),
    Mutant(
        name="what-stopped-comes-before-what-was-lost",
        rule="9.23",
        harm="Effects that a failover took back are made again after those of later rows.",
        edits=(
            Edit(
                "PositionSaver.look_at_saved",
                "key not in context.workers]",
                "key not in context.workers and key not in context.stopped]",
            ),
        ),
        checks=(RETRYING + "effects_that_were_lost_behind_a_stop_come_before_what_stopped_it",),
    ),
    Mutant(
        name="a-fact-ends-with-its-commit",
        rule="4",
        harm="A row that is added while the transaction commits is accepted, and lost.",
        edits=(
            Edit(
                "Fact.__aexit__",
                "        self._state = FactState.ENDED\n        # Neither half",
                "        # Neither half",
            ),
        ),
        checks=(FACT_AFTER_BLOCK + "asyncio_while_the_block_ends",),
    ),
    Mutant(
        name="a-fact-takes-any-row",
        rule="4",
        harm="mypy accepts fact.add() of a row of another class, which fails in production.",
        edits=(Edit("Bus.write", ") -> Fact[RowT]: ...", ") -> Fact[Any]: ..."),),
        checks=(TYPING + "mypy_finds_these_errors_and_no_others",),
    ),
    Mutant(
        name="a-map-of-starts-is-ignored-without-known-writers",
        rule="9.25",
        harm="A reader that is to begin at given positions is given all the rows there are.",
        edits=(Edit("Beginning._load_durable", "        if foreign:  # such", "        if False:  # such"),),
        checks=(REFERENCE + "a_reader_begins_where_it_is_told_to[a map]",),
    ),
    Mutant(
        name="where-a-reader-began-is-saved-as-zero",
        rule="9.25",
        harm="A durable reader that began now is given all older rows after its next start.",
        edits=(
            Edit(
                "PositionSaver._to_save",
                "                await self.register(key, progress.began)\n",
                "                await self.register(key, 0)\n",
            ),
        ),
        checks=(REFERENCE + "a_durable_reader_that_began_now_goes_on_from_there",),
    ),
    Mutant(
        name="streams-in-memory-are-never-fetched",
        rule="9.25",
        harm="Rows that a lost link has cost are reported missed, though their writer has them.",
        edits=(
            Edit(
                "Beginning._load", 'served = getattr(self._context.store, "serves_resettable", False)', "served = False"
            ),
        ),
        checks=(REFERENCE + "a_resettable_stream_is_fetched_from_its_writer",),
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
            BOOTSTRAP_PAGING + "a_new_reader_fetches_all_rows_in_place_of_a_snapshot[without a name]",
            BOOTSTRAP_PAGING + "a_reader_far_behind_goes_on_where_it_was",
            BOOTSTRAP_PAGING + "the_reference_system_gives_pages_only",
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
        checks=(BOOTSTRAP_PAGING + "where_rows_were_pruned_only_a_snapshot_will_do",),
    ),
    Mutant(
        name="pages-in-place-of-a-snapshot-begin-at-zero",
        rule="9.12",
        harm="A reader that was far behind is given all that it has handled once more.",
        edits=(
            Edit(
                "fetch_instead",
                "        context.bootstrapped(name, positions)\n",
                "        context.bootstrapped(name, {})\n",
            ),
        ),
        checks=(BOOTSTRAP_PAGING + "a_reader_far_behind_goes_on_where_it_was",),
    ),
    Mutant(
        name="a-reason-with-another-number-is-another-reason",
        rule="1",
        harm="Whoever may publish fills the disks of all processes with log lines, one for each line that he says.",
        edits=(Edit("Receiver._log_error", "_NUMBER.sub('', error.reason)", "error.reason"),),
        checks=(BUS + "a_flood_of_bad_lines_fills_no_log",),
    ),
    Mutant(
        name="what-was-said-is-waited-for-above-the-sequence",
        rule="9.17",
        harm="One forged line behind a gap: the rows of a live writer come by pages for ever, and late.",
        edits=(Edit("TableReader.look", "        await self._check_targets()\n", ""),),
        checks=(RULES + "what_a_forged_line_said_above_the_sequence_is_not_waited_for",),
    ),
    Mutant(
        name="one-sequence-that-cannot-be-read-keeps-silent-writers-from-being-looked-after",
        rule="9.18",
        harm="A right that is missing on one sequence: a dead writer is never finished, and its last rows never come.",
        edits=(
            Edit(
                "TableReader._confirm",
                "            except BusrepError as error:  # the others are looked",
                "            except KeyError as error:  # the others are looked",
            ),
        ),
        checks=(TRUST + "9_18_a_sequence_that_cannot_be_read_keeps_no_dead_writer_s_rows_back",),
    ),
    Mutant(
        name="what-who-joined-and-died-had-said-is-forgotten",
        rule="9.18",
        harm="The rows of a writer that joins, writes and dies come only once its silence is noticed.",
        edits=(
            Edit(
                "TableReader._confirm",
                "                core.learned(stream, writer, min(end, highest))\n",
                "                pass\n",
            ),
        ),
        checks=(TRUST + "9_18_what_a_writer_said_that_joined_and_crashed_is_fetched_once_the_registry_lists_it",),
    ),
    Mutant(
        name="a-name-on-the-wire-fences",
        rule="9.19",
        harm="One NAME line stops a live writer; two deployments that share a Redis and a name stop each other.",
        edits=(
            Edit(
                "NameWatch.heard",
                "        if session.claim is not None:  # a hint: the claim decides (9.19)\n",
                "        if False:\n",
            ),
        ),
        checks=(
            TRUST + "9_19_a_higher_incarnation_on_the_wire_fences_nobody",
            STRAY_LINES + "what_a_stranger_says_harms_nobody[sqlite-redis-asyncio-another incarnation]",
        ),
    ),
    Mutant(
        name="each-name-on-the-wire-asks-the-database",
        rule="9.19",
        harm="A flood of forged NAMEs on the channel is a flood of questions to the database.",
        edits=(
            Edit(
                "NameWatch.may_ask",
                " or now - self._asked_at < self._settings.heartbeat:",
                ":",
            ),
        ),
        checks=(TRUST + "9_19_a_higher_incarnation_on_the_wire_fences_nobody[NAME]",),
    ),
    Mutant(
        name="a-reader-whose-position-is-refused-stays-there",
        rule="9.17",
        harm="What comes below a forged position is never handled, though it is never saved either.",
        edits=(
            Edit(
                "PositionSaver.go_back",
                "            self._core.progress[stream, writer].go_on_from(saved, error.highest)\n",
                "            pass\n",
            ),
        ),
        checks=(TRUST + "9_17_a_reader_that_is_above_the_sequence_goes_back_to_what_is_saved",),
    ),
    Mutant(
        name="silence-of-others-costs-the-link",
        rule="9.21",
        harm="One line NAME ghost 5, or a writer that closed, makes every other process reconnect every ten seconds.",
        edits=(
            Edit(
                "BusLife._check_link",
                "        if (fault := self.watch.fault(now, announces=announces)) is not None:\n",
                "        core = self.reading.core\n"
                "        fault = self.watch.fault(now, announces=True) if announces else None\n"
                "        if not announces and core.last_heard and len(core.silent(now)) == len(core.last_heard):\n"
                '            fault = "silence"\n'
                "        if fault is not None:\n",
            ),
        ),
        checks=(LINK_LIFE + "a_stray_name_makes_nobody_reconnect",),
    ),
    Mutant(
        name="nobody-asks-into-the-silence",
        rule="9.21",
        harm="A reader alone on its channel does not find out that its subscription is gone.",
        edits=(
            Edit(
                "BusLife._check_link",
                "elif self.watch.asks(now, announces=announces) or",
                "elif",
            ),
        ),
        checks=(LINK_LIFE + "an_idle_reader_finds_out_that_its_subscription_is_gone",),
    ),
    Mutant(
        name="a-reader-asks-between-two-turns",
        rule="9.21",
        harm="In one deployment of some, by the writers' names, a reader asks again and again, and none of them rests.",
        edits=(Edit("LinkWatch.asks", "2 * self.settings.heartbeat", "self.settings.heartbeat"),),
        checks=(LINK_LIFE + "9_21_a_reader_asks_into_a_silence_that_is_longer_than_that_between_two_turns_to_speak",),
    ),
    Mutant(
        name="a-writer-at-rest-misses-its-own-echo",
        rule="9.21",
        harm="In a large deployment each writer with nothing to tell gives its link up every ten seconds.",
        edits=(
            Edit(
                "BusLife._keep_beating",
                "                if not writing.core.announcements.rests:\n",
                "                if True:\n",
            ),
        ),
        checks=(LINK_LIFE + "9_27_writers_at_rest_say_little_and_keep_their_links",),
    ),
    Mutant(
        name="a-writer-at-rest-needs-no-link",
        rule="9.21",
        harm="A writer whose subscription is gone hears nothing, for as long as it has nothing to tell.",
        edits=(Edit("LinkWatch.hears", "now - self.heard_at <= 2 * self.settings.heartbeat", "True"),),
        checks=(LINK_LIFE + "9_21_who_has_heard_nothing_for_two_beats_or_is_not_heard_does_not_rest",),
    ),
    Mutant(
        name="the-latest-announcement-has-time-to-come-back",
        rule="9.21",
        harm="Each beat begins the wait anew: a writer does not find out that nobody hears it.",
        edits=(Edit("LinkWatch.said", "if self.said_at <= self.echo_at:", "if True:"),),
        checks=(LINK_LIFE + "9_21_a_writer_at_rest_finds_out_that_its_subscription_is_gone",),
    ),
    Mutant(
        name="who-rests-is-asked-after-at-each-beat",
        rule="9.27",
        harm="Each reader of a large deployment reads the whole registry every two seconds.",
        edits=(
            Edit(
                "TableReader._misses",
                "self._resting.get(one, -math.inf) >= late for one in silent",
                "one is None for one in silent",
            ),
        ),
        checks=(LINK_LIFE + "9_27_who_rests_is_followed_by_the_table_and_costs_no_more_questions",),
    ),
    Mutant(
        name="who-rests-is-alive-for-good",
        rule="9.27",
        harm="A writer that dies at rest holds linear positions up for up to twenty-four seconds, and not nineteen.",
        edits=(
            Edit(
                "TableReader._misses",
                "self._resting.get(one, -math.inf) >= late for one in silent",
                "one in self._resting for one in silent",
            ),
        ),
        checks=tuple(LINK_LIFE + f"9_27_who_dies_at_rest_is_finished_within_ten_beats[{after}]" for after in range(5)),
    ),
    Mutant(
        name="few-writers-rest-for-their-readers",
        rule="9.5",
        harm="While Redis is away the rows of a small deployment come every ten seconds, and not at each beat.",
        edits=(
            Edit("TableReader._misses", "len(silent) < len(self._core.last_heard)", "True"),
            Edit("TableReader.look", "(registered if rest else ())", "registered"),
            Edit("TableReader.look", "                self._resting.pop(known.writer, None)", "                pass"),
        ),
        checks=(LINK_LIFE + "9_5_who_writes_without_redis_is_followed_by_the_table_at_each_beat[all of few]",),
    ),
    Mutant(
        name="who-writes-without-redis-rests-for-its-readers",
        rule="9.5",
        harm="Of a writer that alone has no Redis the rows come every ten seconds, and not at each beat.",
        edits=(
            Edit("TableReader.look", "                self._resting.pop(known.writer, None)", "                pass"),
        ),
        checks=(LINK_LIFE + "9_5_who_writes_without_redis_is_followed_by_the_table_at_each_beat[one of many]",),
    ),
    Mutant(
        name="a-clock-that-goes-forward-finishes-who-rests",
        rule="9.5",
        harm="All writers at rest are finished at once, and win their names back: caches are dropped, rows told again.",
        edits=(Edit("TableReader.look", "if not rest or now - since >= 1.5 * settings.heartbeat:", "if True:"),),
        checks=(LINK_LIFE + "9_5_a_database_s_clock_that_goes_forward_finishes_nobody_who_rests",),
    ),
    Mutant(
        name="the-registry-read-again-at-once-tells-twice",
        rule="9.5",
        harm="The same, when a writer joins just then: the registry is read again for it.",
        edits=(Edit("TableReader.look", "now - since >= 1.5 * settings.heartbeat", "now > since"),),
        checks=(LINK_LIFE + "9_5_a_database_s_clock_that_goes_forward_finishes_nobody_who_rests",),
    ),
    Mutant(
        name="who-was-never-heard-is-looked-at-with-all-others",
        rule="9.5",
        harm="Where all processes of a large deployment were replaced the last rows of the former ones come 12 s late.",
        edits=(
            Edit(
                "TableReader._misses", "bool(self._overdue) or (bool(silent) and not rest)", "bool(silent) and not rest"
            ),
        ),
        checks=(LINK_LIFE + "9_5_a_dead_writer_that_was_never_heard_is_finished_as_soon_as_one_that_was",),
    ),
    Mutant(
        name="who-was-not-heard-back-rests",
        rule="9.21",
        harm="One lost message costs a writer of a large deployment its link, and all others answer its REPLICATE.",
        edits=(Edit("LinkWatch.hears", " and self.said_at <= self.echo_at", ""),),
        checks=(LINK_LIFE + "9_21_who_was_not_heard_back_once_announces_again_and_keeps_its_link",),
    ),
    Mutant(
        name="what-is-not-published-counts-as-not-heard",
        rule="9.21",
        harm="A reader that may not publish reconnects every ten seconds while nobody writes.",
        edits=(
            Edit(
                "LinkWatch.fault",
                "now - self.heard_at > bound and self.asked_at > self.heard_at",
                "now - self.heard_at > bound",
            ),
        ),
        checks=(LINK_LIFE + "a_process_that_may_not_publish_keeps_its_link",),
    ),
    Mutant(
        name="a-question-that-its-asker-does-not-hear",
        rule="9.21",
        harm="A reader of a sub-channel alone reconnects every ten seconds while nobody writes.",
        edits=(
            Edit(
                "ChannelPublisher.__init__",
                "dict.fromkeys(asking)",
                "asking[:1]",
            ),
        ),
        checks=(LINK_LIFE + "a_reader_of_a_sub_channel_hears_its_own_question",),
    ),
    Mutant(
        name="a-stray-name-is-looked-for-for-ever",
        rule="9.21",
        harm="One line NAME ghost 5 makes every reader ask the table each beat, until it is restarted.",
        edits=(Edit("TableReader.look", "            core.last_heard.pop(writer, None)\n", "            pass\n"),),
        checks=(LINK_LIFE + "a_name_in_no_table_is_forgotten_when_it_is_silent",),
    ),
    Mutant(
        name="a-writer-leaves-without-a-word",
        rule="9.21",
        harm="The loss of the last message of a writer without a table is never noticed if it closes after it.",
        edits=(Edit("BusLife._close", "                self.writing.core.farewell()\n", ""),),
        checks=(LINK_LIFE + "a_lost_last_message_of_a_writer_that_closed_is_noticed",),
    ),
    Mutant(
        name="a-writer-that-closes-keeps-its-name",
        rule="9.21",
        harm="Readers log a warning about each writer that closed in order, and linear positions wait for it.",
        edits=(
            Edit(
                "BusLife._stop_tasks", "within(timeout, self.writing.leave())", "within(timeout, self.writing.beat())"
            ),
        ),
        checks=(
            GOODBYE + "nobody_warns_of_a_writer_that_closed[sqlite_url-asyncio-redis]",
            GOODBYE + "the_final_position_is_behind_what_others_were_given[sqlite_url-asyncio]",
        ),
    ),
    Mutant(
        name="what-is-cached-outlives-a-writer-without-a-table",
        rule="9.21",
        harm="The last invalidation of a writer that crashed is lost: what it was about is returned for ever.",
        edits=(
            Edit("CacheUpkeep._keep_asking", "() if watched.heard is None else watched.heard.gone(clock()):", "():"),
        ),
        checks=(GOODBYE + "nobody_warns_of_a_closed_writer_of_invalidations_in_memory",),
    ),
    Mutant(
        name="an-answer-that-waits-has-no-clock",
        rule="2",
        harm="A REPLICATE that comes too soon is answered by the next beat, seconds later.",
        edits=(
            Edit(
                "Receiver._answer",
                "due := writing.core.announcements.next_answer) < math.inf",
                "due := writing.core.announcements.next_answer) < -math.inf",
            ),
        ),
        checks=(REPLICATE_RATE + "one_that_waits_is_answered_though_nothing_else_happens",),
    ),
    Mutant(
        name="one-position-holds-up-all",
        rule="9.20",
        harm="One key that the database refuses stops all saving of a reader: at its restart all rows come again.",
        edits=(
            Edit(
                "PositionSaver._save_together",
                "            for change in changes:  # find out for which of them it does not work\n"
                "                await self._save_together([change])\n",
                "            self._refuse_to_save(changes[0][:2], error)\n",
            ),
            Edit(
                "PositionSaver._save_changes",
                "            [c for c in changes if c[:2] not in self.unsavable],\n"
                "            *([c] for c in changes if c[:2] in self.unsavable),\n",
                "            changes,\n",
            ),
        ),
        checks=(SAVING_REFUSED + "one_position_that_cannot_be_saved_holds_up_no_other",),
    ),
    Mutant(
        name="a-start-is-not-checked",
        rule="9.20",
        harm="A reader that begins at a position beyond 64 bits tries for ever to register.",
        edits=(Edit("BusOptions.__attrs_post_init__", "        _check_start(self.start)\n", ""),),
        checks=(DRIVER_ERRORS + "a_start_that_no_store_can_keep_is_a_config_error[9223372036854775808]",),
    ),
    Mutant(
        name="commands-that-wait-are-counted-and-not-their-bytes",
        rule="9.20",
        harm="10,000 commands of 64 KiB wait for a Redis that is away: 650 MB.",
        edits=(Edit("ChannelPublisher.send", " + len(line) > COMMAND_QUEUE_BYTES:", " + len(line) > 2**60:"),),
        checks=(PRESENCE + "commands_that_wait_are_bounded_by_their_bytes",),
    ),
    Mutant(
        name="commands-that-were-published-take-room",
        rule="9.20",
        harm="After 16 MiB of presence a process tells nothing any more.",
        edits=(
            Edit(
                "ChannelPublisher._publish_all",
                "                self._commands_bytes -= len(self.commands.popleft()[1])\n",
                "                self.commands.popleft()\n",
            ),
        ),
        checks=(PRESENCE + "commands_that_wait_are_bounded_by_their_bytes",),
    ),
    Mutant(
        name="what-starts-while-a-bus-closes-goes-on",
        rule="9.5",
        harm="A bus that closes while it wins its name back wins it back again afterwards, from its successor.",
        edits=(
            Edit(
                "BusLife._stop_tasks",
                "        await stop([*self.background, *self.tasks], timeout)\n"
                "        await stop([*self.background, *self.tasks], timeout)\n",
                "        await stop([*self.background, *self.tasks], timeout)\n",
            ),
        ),
        checks=(LINK_LIFE + "what_a_task_starts_while_it_is_stopped_is_stopped_too",),
    ),
    Mutant(
        name="a-reader-begins-at-floors-of-another-log",
        rule="9",
        harm="Of two servers behind one address one has not seen a restore: rows below its floors are left out.",
        edits=(
            Edit("Beginning._load_durable", "context.store.known(epoch)", "context.store.known()"),
            Edit("Beginning._go_over", "context.store.known(epoch)", "context.store.known()"),
        ),
        checks=(
            HTTP_BUS + "where_a_reader_begins_is_of_the_log_that_it_reads[known-in the new log]",
            HTTP_BUS + "where_a_reader_begins_is_of_the_log_that_it_reads[known-in the old one]",
        ),
    ),
    Mutant(
        name="what-is-pruned-in-another-log-is-pruned-here",
        rule="9",
        harm="The same, of a page: a reader steps over rows that are there.",
        edits=(
            Edit(
                "TableReader.fetch",
                "            if asked.incarnation is None and error.epoch not in (None, self._core.epoch):\n",
                "            if False:\n",
            ),
        ),
        checks=(
            HTTP_BUS + "where_a_reader_begins_is_of_the_log_that_it_reads[fetch-in the new log]",
            HTTP_BUS + "where_a_reader_begins_is_of_the_log_that_it_reads[fetch-in the old one]",
        ),
    ),
    Mutant(
        name="a-look-at-saved-positions-that-failed-waits-for-the-next-at-all",
        rule="9.23",
        harm="After a failover, and a database that was away for a moment, effects are made again many beats late.",
        edits=(Edit("Reading.look_after_silent", "            self._look_at_all |= all_known\n", ""),),
        checks=(SIMULATION + "what_the_simulator_found_stays_mended[look-at-saved-positions-that-failed]",),
    ),
    Mutant(
        name="a-position-is-registered-beside-those-of-an-older-log",
        rule="9.23",
        harm="After a restore, and a failover that takes it back, effects are skipped that the failover has lost.",
        edits=(Edit("BatchSaver.reload", " and saved_epoch in (None, log_read) and not void", " and not void"),),
        checks=(MUTANTS_GAPS + "9_23_nothing_is_registered_beside_positions_of_an_older_log",),
    ),
    Mutant(
        name="a-registry-of-the-log-before-is-believed",
        rule="9.11",
        harm="A writer's position before a restore steps over a fact that it has open in the restored log.",
        edits=(
            Edit("TableReader._registry", "        if not told:\n", "        if False:\n"),
            Edit("TableReader._registry", "self._store.known(log_read)", "self._store.known()"),
            Edit(
                "TableReader._registry",
                "return everything if core.epoch == log_read else None",
                "return everything",
            ),
        ),
        checks=(TWO_SERVERS + "a_registry_of_the_log_before_tells_nothing_of_this_one",),
    ),
    Mutant(
        name="a-late-registry-is-believed",
        rule="9.11",
        harm="The same, where the answer was slow.",
        edits=(
            Edit(
                "TableReader._registry",
                "return everything if core.epoch == log_read else None",
                "return everything",
            ),
        ),
        checks=(TWO_SERVERS + "a_registry_of_the_log_before_tells_nothing_of_this_one[late]",),
    ),
    Mutant(
        name="a-stream-begins-in-any-log",
        rule="9.11",
        harm="A stream that is followed later begins at floors of the log before a restore: rows below are lost.",
        edits=(Edit("Beginning._epoch", "        if not self._core.begins_in(epoch):\n", "        if False:\n"),),
        checks=(TWO_SERVERS + "a_stream_begins_in_the_log_that_is_read[beside another one]",),
    ),
    Mutant(
        name="a-stream-without-writers-holds-the-log",
        rule="9.11",
        harm="After a restore no further stream begins in a process that has read nothing of the log before.",
        edits=(Edit("FollowedWriters.begins_in", "            self.new_epoch = epoch\n", "            pass\n"),),
        checks=(TWO_SERVERS + "a_log_of_which_nothing_was_read_is_left_without_a_page",),
    ),
    Mutant(
        name="the-linear-position-is-of-two-logs",
        rule="9.7",
        harm="A registry of the log before a restore lacks a writer: the linear position steps over its open fact.",
        edits=(Edit("Bus.linear_position", "self.store.known(log_read)", "self.store.known()"),),
        checks=(TWO_SERVERS + "the_linear_position_is_of_one_log",),
    ),
    Mutant(
        name="rows-in-memory-that-do-not-decode-take-others-along",
        rule="9.20",
        harm="One row of the next version's shape, and all that waited with it is gone without a word.",
        edits=(
            Edit(
                "Handlers._handle",
                "            if raw.fetched or not core.progress[key].stream.fetchable:\n"
                "                return await self._failed(key, raw, error, lost=not raw.fetched)\n",
                "            if raw.fetched or not core.progress[key].stream.fetchable:\n"
                "                core.done(*key)\n"
                "                return True\n",
            ),
        ),
        checks=(RETRYING + "of_rows_in_memory_those_that_do_not_decode_are_missed_alone",),
    ),
    Mutant(
        name="a-look-begins-behind-the-end-of-reading",
        rule="9.21",
        harm="It goes on while the store is closed: over HTTP a connection stays open as long as the process lives.",
        edits=(Edit("Reading.beat", "        if not self.closed:  #", "        if True:  #"),),
        checks=(BUS + "a_beat_behind_the_end_of_reading_looks_for_nothing",),
    ),
    Mutant(
        name="positions-that-were-not-told-are-waited-for",
        rule="9.27",
        harm="A lost answer to REPLICATE leaves a stream unsynced until its turn, for minutes with a thousand streams.",
        edits=(Edit("BusLife._check_link", " or self.reading.core.unheard(now)", ""),),
        checks=(BEATS + "a_lost_answer_to_replicate_is_asked_for_again",),
    ),
    Mutant(
        name="a-task-that-somebody-cancels-is-not-begun-anew",
        rule="2",
        harm="An application cancels all tasks of its loop: the bus beats, saves and reads no more, and is healthy.",
        edits=(Edit("Tasks.spawn", "            if again:\n", "            if False:\n"),),
        checks=(
            CANCELLED_TASKS + "a_question_that_is_cancelled_is_asked_again[fetch-fetch]",
            CANCELLED_TASKS + "a_question_that_is_cancelled_is_asked_again[follow-epoch]",
            CANCELLED_TASKS + "who_cancels_all_tasks_does_not_end_a_bus",
            CANCELLED_TASKS + "a_task_that_fails_is_begun_anew[newest-own_name.applied]",
        ),
        hangs=True,
    ),
    Mutant(
        name="cancelled-tasks-begin-anew-without-a-pause",
        rule="2",
        harm="An application that cancels all tasks over and over fills the disk with lines of the log.",
        edits=(Edit("Tasks.spawn", "loop.call_later(pause_after(in_a_row, self._settings),", "loop.call_later(0.0,"),),
        checks=(CANCELLED_TASKS + "who_cancels_all_tasks_over_and_over_gets_no_flood",),
    ),
    Mutant(
        name="what-close-cancels-begins-anew",
        rule="9.21",
        harm="A bus that is closed beats on, and wins its name back from its successor.",
        edits=(Edit("Tasks.spawn", "            if not self.closed:\n", "            if True:\n"),),
        checks=(CANCELLED_TASKS + "close_is_quiet_and_begins_nothing_anew",),
    ),
    Mutant(
        name="a-worker-cancelled-before-its-first-step-counts-as-at-work",
        rule="9.12",
        harm="Nothing of that writer is handed out any more, and nothing says so.",
        edits=(Edit("Handlers._ended", "        if self._workers.get(key) is worker:\n", "        if False:\n"),),
        checks=(CANCELLED_TASKS + "a_worker_that_is_cancelled_before_its_first_step",),
        hangs=True,
    ),
    Mutant(
        name="a-step-of-a-bootstrap-cancelled-before-it-begins-is-waited-for",
        rule="9",
        harm="The bootstrap stands still for good, and nothing says so.",
        edits=(Edit("Run._ended", "        if self.tasks.get(work) is task and", "        if False and"),),
        checks=(CANCELLED_TASKS + "a_step_of_a_bootstrap_that_is_cancelled_before_it_begins_is_tried_again[load]",),
        hangs=True,
    ),
    Mutant(
        name="a-fact-whose-task-is-garbage-stays-open",
        rule="9.1",
        harm="One task that nobody refers to, collected in another thread, holds back all later facts for ever.",
        edits=(
            Edit(
                "Fact._abandon", "        if self._session is not None and not self._booked:\n", "        if False:\n"
            ),
        ),
        checks=(
            FACTS_NOBODY_ENDS + "the_task_is_garbage[postgres-a statement-another thread]",
            FACTS_NOBODY_ENDS + "what_ends_it_is_cancelled_before_its_first_step[postgres-True]",
        ),
        hangs=True,
    ),
    Mutant(
        name="the-transaction-of-a-fact-that-is-given-up-stays-open",
        rule="9.1",
        harm="It holds a connection, and locks, and is asked after for ever.",
        edits=(
            Edit("Writing.given_up", "            if doubt.transaction is not None:\n", "            if False:\n"),
            Edit("Writing.given_up", "            doubt.transaction = None\n", ""),
        ),
        checks=(FACTS_NOBODY_ENDS + "the_task_is_garbage[postgres-a statement-another thread]",),
        hangs=True,
    ),
    Mutant(
        name="the-collector-gives-up-a-fact-that-a-task-ends",
        rule="9.1",
        harm="It is completed twice: an error ends the beats, and close().",
        edits=(Edit("Fact.__del__", " and not self._ending", ""),),
        checks=(FACTS_NOBODY_ENDS + "the_task_is_garbage[postgres-a statement-the loop's thread]",),
    ),
    Mutant(
        name="who-asks-after-facts-begins-anew-without-them",
        rule="9.1",
        harm="An application cancels a task it does not know: what is in doubt then holds back all later facts.",
        edits=(Edit("Writing.keep_settling", "SETTLE_FIRST if self.doubts else None", "None"),),
        checks=(CANCELLED_TASKS + "facts_in_doubt_are_asked_after_by_who_begins_anew",),
    ),
    Mutant(
        name="a-question-that-is-cancelled-ends-who-asks-all",
        rule="9.1",
        harm="An application cancels a task it does not know: nothing in doubt is settled any more.",
        edits=(
            Edit(
                "Writing.settle",
                'raise Unavailable("the store", trouble)',
                "raise trouble",
            ),
        ),
        checks=(
            "asyncio/test_cancelled_tasks.py::"
            "test_that_one_question_is_cancelled_ends_neither_the_others_nor_who_asks_them",
        ),
    ),
)
