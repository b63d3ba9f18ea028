"""Known bugs: handlers and outages. See mutants.py."""

from __future__ import annotations

from .mutant import SIMULATOR, Edit, Mutant

POLICY, RETRIED, ONCE = "test_failures.py::test_", "test_retrying.py::test_", "test_effects.py::test_"
TOLD = "test_health.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="an-outage-is-poison",
        rule="9.12",
        harm="A handler whose database is away for ten seconds puts good facts into the dead letters, or stops.",
        edits=(Edit("RetryPolicy.judge", "        if outage:\n            return Verdict.OUTAGE\n", ""),),
        checks=(
            SIMULATOR,
            RETRIED + "an_outage_of_an_hour_is_no_poison",
            POLICY + "an_outage_lasts_as_long_as_it_lasts",
        ),
    ),
    Mutant(
        name="poison-after-the-retries-alone",
        rule="9.12",
        harm="An outage that looks like an error of the rows sets good facts aside within a second.",
        edits=(
            Edit(
                "RetryPolicy.judge",
                "        late = now - trouble.suspected_since >= self.settings.poison_after\n",
                "        late = True\n",
            ),
        ),
        checks=(RETRIED + "an_unknown_error_of_ten_seconds_sets_no_good_fact_aside",),
    ),
    Mutant(
        name="a-wrapped-error-of-a-connection-is-a-suspicion",
        rule="9.12",
        harm="Handlers that use SQLAlchemy or Django take an outage for poison.",
        edits=(Edit("_causes", "        current = current.__cause__\n", "        return\n"),),
        checks=(POLICY + "errors_of_connections_are_an_outage",),
    ),
    Mutant(
        name="the-pause-of-a-handler-outlives-close",
        rule="9.12",
        harm="A process whose handler's database is away does not stop when it is told to.",
        edits=(Edit("asyncio.reading.Reading.close", "        self.retrying.end()\n", ""),),
        checks=(RETRIED + "close_ends_a_pause_at_once_and_the_rows_come_again",),
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
        checks=(RETRIED + "the_part_of_a_snapshot_waits_for_the_end_of_an_outage",),
    ),
    Mutant(
        name="the-position-is-saved-behind-the-effects",
        rule="9.12",
        harm="A crash between the COMMIT of the effects and the saving of the position applies the effects twice.",
        edits=(
            Edit(
                "asyncio.effects.exactly_once",
                "        await save(effects.connection)\n        await effects.commit()\n",
                "        await effects.commit()\n        await save(effects.connection)\n",
            ),
        ),
        checks=(ONCE + "a_commit_without_an_answer_is_looked_up",),
    ),
    Mutant(
        name="the-position-is-saved-behind-the-effects-of-a-thread",
        rule="9.12",
        harm="The same, with threads.",
        edits=(
            Edit(
                "sync.effects.exactly_once",
                "        save(effects.connection)\n        effects.commit()\n",
                "        effects.commit()\n        save(effects.connection)\n",
            ),
        ),
        checks=(ONCE + "a_commit_without_an_answer_is_looked_up",),
    ),
    Mutant(
        name="a-block-may-end-its-transaction-itself",
        rule="9.12",
        harm="The effects are committed, or rolled back, without the position: they count twice, or never.",
        edits=(
            Edit(
                "asyncio.effects.exactly_once", "        if effects.ended:\n            raise ConfigError(ENDED)\n", ""
            ),
            Edit("sync.effects.exactly_once", "        if effects.ended:\n            raise ConfigError(ENDED)\n", ""),
        ),
        checks=(ONCE + "a_block_that_ends_the_transaction_itself_is_told",),
    ),
    Mutant(
        name="the-reason-for-a-stop-is-not-stored",
        rule="9.12",
        harm="A reader stopped last night, its process is gone: busrep lag shows a reader that is behind, and not why.",
        edits=(Edit("Reading.stop", "        self._note(error, key)\n", ""),),
        checks=(TOLD + "a_stop_is_told_and_stored_beside_the_position_until_it_moves_on",),
    ),
    Mutant(
        name="the-last-save-clears-the-reason-for-a-stop",
        rule="9.12",
        harm="The same, as soon as what was handled before the stop is saved.",
        edits=(
            Edit(
                "Reading._store_notes",
                "        await self._try_save([key for key in self.notes.due if key in self.core.progress], busy=True)"
                "  # it clears them\n",
                "",
            ),
            Edit(
                "Reading._save_together",
                "            self._note(self.stopped[key], key)  # what was handled before it stopped cleared "
                "the reason\n",
                "            pass\n",
            ),
        ),
        checks=(TOLD + "a_stop_is_told_and_stored_beside_the_position_until_it_moves_on",),
    ),
    Mutant(
        name="nobody-is-told-of-a-stop",
        rule="9.12",
        harm="A (stream, writer) stops, and the application that asked to be told is not.",
        edits=(Edit("Reading.stop", "        if key not in self.stopped:\n            self.on_stop(error)\n", ""),),
        checks=(TOLD + "a_stop_is_told_and_stored_beside_the_position_until_it_moves_on",),
    ),
    Mutant(
        name="a-lost-name-is-healthy",
        rule="9.4",
        harm="A process that writes nothing any more says that all is well.",
        edits=(Edit("_reasons", 'if writer is not None and writer["lost"]:', "if False:"),),
        checks=("test_health.py::test_each_reason",),
    ),
    Mutant(
        name="what-another-log-refuses-was-this-position",
        rule="9.17",
        harm="A relay whose target was restored to an older state hears nothing of that writer any more, in silence.",
        edits=(
            Edit(
                "Reading._handle",
                "                    and (batch._tried and (error.stream, error.position) == (key[0], raw.position))\n",
                "",
            ),
        ),
        checks=(RETRIED + "what_the_handler_wrote_elsewhere_was_refused",),
    ),
    Mutant(
        name="any-handler-of-a-stream-may-save",
        rule="9.12",
        harm="The first of two handlers saves, the second fails: the rows are not handed to it again.",
        edits=(Edit("Reading.check_saving", "        if not batch._last:", "        if False:"),),
        checks=(ONCE + "only_the_last_handler_of_a_stream_may_save",),
    ),
    Mutant(
        name="a-loop-that-was-left-is-waited-for",
        rule="9.12",
        harm="Another handler of its stream, which was at work then, gets nothing more of that writer, in silence.",
        edits=(
            Edit("Reading._call_handlers", "            if handler in self._handlers[stream]:", "            if True:"),
        ),
        checks=(RETRIED + "a_loop_that_is_left_while_another_handler_works_keeps_nothing_back",),
    ),
    Mutant(
        name="a-cancelled-commit-is-a-stop",
        rule="9.12",
        harm="close() during a slow COMMIT tells of a handler that stopped for good, and stores that.",
        edits=(
            Edit("heed_cancellation", "        raise asyncio.CancelledError from error\n", "        raise error\n"),
        ),
        checks=(RETRIED + "close_cancels_a_handler_that_makes_another_error_of_it",),
    ),
    Mutant(
        name="a-deadline-of-the-handlers-own-ends-its-worker",
        rule="9.12",
        harm="A handler makes TimeoutError of a task.cancel() of its own: its batch stays in hand, nothing of that "
        "writer is handed out again, and nothing says so.",
        edits=(
            Edit(
                "Reading._call_failed",
                "        if self._closed:\n            heed_cancellation(error)  # it lost its patience\n",
                "        heed_cancellation(error)\n",
            ),
            Edit(
                "Reading._work",
                "                if core.progress[key].queue.handling is not None:\n",
                "                if False:\n",
            ),
        ),
        checks=(
            RETRIED + "a_deadline_of_the_handlers_own_is_an_error_like_any_other",
            ONCE + "a_deadline_of_the_handlers_own_rolls_both_back",
        ),
    ),
    Mutant(
        name="a-deadline-of-the-functions-own-ends-the-bootstrap",
        rule="9.12",
        harm="The function that applies a snapshot's part makes TimeoutError of a task.cancel() of its own: the "
        "bootstrap waits for ever, and nothing says so.",
        edits=(
            Edit(
                "bootstrap_run.Run._do",
                "            if being_cancelled() and (self.owner.closed or work not in machine.under_way):",
                "            if being_cancelled():",
            ),
            Edit(
                "Applying._hand_out",
                "                if self.owner.closed:\n                    heed_cancellation(error)",
                "                if True:\n                    heed_cancellation(error)",
            ),
        ),
        checks=("test_bootstrap_faults.py::test_a_deadline_of_the_functions_own_is_an_error_like_any_other",),
    ),
    Mutant(
        name="a-cancellation-that-is-over-counts-on",
        rule="9.12",
        harm="A handler that got over a cancellation leaves its count up: what is called next in that task takes its "
        "own timeouts and task groups for cancelled ones.",
        edits=(Edit("forget_cancellation", "        task.uncancel()\n", "        break\n"),),
        checks=(RETRIED + "a_deadline_of_the_handlers_own_is_an_error_like_any_other",),
    ),
    Mutant(
        name="a-worker-that-is-cancelled-goes-on-itself",
        rule="9.12",
        harm="A program that ends without close(): asyncio.run() cancels all tasks, and waits for a worker for ever.",
        edits=(
            Edit(
                "Reading._handle",
                "            if self._closed or key in self._cancelled:\n",
                "            if self._closed:\n",
            ),
        ),
        checks=(RETRIED + "a_worker_that_somebody_cancels_ends_and_another_goes_on",),
    ),
    Mutant(
        name="close-cancels-whoever-waits-for-the-name",
        rule="9.5",
        harm="A task of the application's that nobody cancelled gets CancelledError, and ends without a word.",
        edits=(
            Edit(
                "Bus._renew_writing",
                "                raise Closed from None  # only close() ends it\n",
                "                raise\n",
            ),
        ),
        checks=("test_winning_back.py::test_a_caller_is_told_that_the_bus_was_closed_meanwhile",),
    ),
    Mutant(
        name="a-stop-at-the-start-is-not-stored",
        rule="9.12",
        harm="The reader refuses to start in another log, and busrep lag does not say why.",
        edits=(
            Edit(
                "Reading._load_durable",
                "                    self._note(changed, *state.positions)  # of all streams: none of them is loaded\n",
                "",
            ),
        ),
        checks=(TOLD + "a_reader_that_stops_at_its_start_stores_why",),
    ),
    Mutant(
        name="what-stopped-comes-before-what-was-lost",
        rule="9.23",
        harm="Effects that a failover took back are made again after those of later rows.",
        edits=(
            Edit(
                "Reading._look_at_saved",
                "                    if key in core.progress and key not in self._workers and not",
                "                    if key in core.progress and key not in {*self._workers, *self.stopped} and not",
            ),
        ),
        checks=(RETRIED + "effects_that_were_lost_behind_a_stop_come_before_what_stopped_it",),
    ),
    Mutant(
        name="a-stream-that-is-not-followed-is-healthy",
        rule="9.4",
        harm="A reader that hears nothing, for the database is away since its start, says that all is well.",
        edits=(Edit("_reasons", 'reader.get("not_begun", {})', "{}"),),
        checks=(TOLD + "each_reason",),
    ),
    Mutant(
        name="a-position-that-cannot-be-saved-is-healthy",
        rule="9.12",
        harm="A month of rows comes again at the next start, and nobody was told.",
        edits=(Edit("_reasons", 'reader.get("unsavable", {})', "{}"),),
        checks=(TOLD + "each_reason",),
    ),
    Mutant(
        name="a-wrong-call-is-an-outage",
        rule="9.12",
        harm="A handler that reads from a file opened to write is called for ever, and the fact is never set aside.",
        edits=(Edit("_is_outage", "return not mistaken and not", "return not"),),
        checks=(POLICY + "other_errors_are_not",),
    ),
    Mutant(
        name="each-thread-that-asks-first-opens-a-store",
        rule="9.12",
        harm="Connections for batch.transaction() stay open after the bus was closed.",
        edits=(Edit("EffectsStore.begin", "        with self._opening:", "        with contextlib.nullcontext():"),),
        checks=(ONCE + "threads_that_ask_first_at_the_same_time_share_a_store",),
    ),
)
