"""Known bugs: core/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import SIMULATOR, Edit, Mutant

AUDIT_READERS = "pipeline/test_audit_readers.py::test_"
BEATS = "core/test_beats.py::test_9_27_"
LINK_LIFE = "links/test_link_life.py::test_"
BOOTSTRAP_CORE = "core/test_bootstrap_core.py::test_"
BUS = "asyncio/test_bus.py::test_"
CAPTURES = "asyncio/test_captures.py::test_"
CLOCK_BEHIND = "asyncio/test_clock_behind.py::test_"
CONFIG_ERRORS = "asyncio/test_config_errors.py::test_"
CORE_TRUST = "core/test_core_trust.py::test_"
DIRECT = "core/test_direct.py::test_"
FAILED_NEIGHBOURS = "asyncio/test_failed_neighbours.py::test_"
FAILURES = "core/test_failures.py::test_"
FAULTS = "asyncio/test_faults.py::test_"
FOUND = "proof/test_simulation.py::test_what_the_simulator_found_stays_mended"
FRAMING = "core/test_framing.py::test_"
HEALTH = "asyncio/test_health.py::test_"
HOSTILE_MESSAGES = "core/test_hostile_messages.py::test_"
FACT = "runtime/test_fact.py::test_"
IDS = "core/test_ids.py::test_"
LATE_ROWS = "core/test_late_rows.py::test_"
MUTANTS_GAPS = "asyncio/test_mutants_gaps.py::test_"
NAMES = "core/test_names.py::test_"
ONE_LINE = "links/test_one_line.py::test_"
PRIVATE_FILES = "stores/test_private_files.py::test_"
READER = "core/test_reader.py::test_"
REFERENCE = "http/test_reference.py::test_"
REPLICATE_RATE = "core/test_replicate_rate.py::test_"
RETRYING = "asyncio/test_retrying.py::test_"
ROW_SHAPES = "stores/test_row_shapes.py::test_"
RULES = "test_rules.py::test_"
SAVED_POSITIONS = "core/test_saved_positions.py::test_"
SECRETS = "asyncio/test_secrets.py::test_"
SNAPSHOT = "pipeline/test_snapshot.py::test_"
STORES_POSTGRES = "stores/test_stores.py::TestPostgres::test_"
STRAY_LINES = "asyncio/test_stray_lines.py::test_"
STREAMS = "core/test_streams.py::test_"
TRUST = "asyncio/test_trust.py::test_"
WRITER = "core/test_writer.py::test_"
WRITING = "sync/test_writing.py::test_"

# An emptied queue is still among those to be taken from.
EMPTIED_STAYS_READY = Edit(
    "ReceivedRows._empty",
    "        if not self.queue:\n            self._intake.ready.pop(self.key, None)\n",
    "",
)

IS_STREAM = '    if not isinstance(stream, Stream):\n        raise ConfigError(\n            f"a busrep'

UNNAMED = "        if incarnation is None and stream.foreign_writers:\n"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="who-cannot-be-asked-says-its-epoch-seldom",
        rule="9.16",
        harm="Readers that come after the last announcement of a process without beats do not believe its facts.",
        edits=(Edit("Writer.__init__", "self._name_line if listens else self._opening", "self._name_line"),),
        checks=(
            WRITER
            + "rules[rule 9.16 a writer that hears no REPLICATE says the epoch in every frame, within the same bounds]",
            WRITING + "a_reader_that_came_after_the_last_announcement_believes_the_next_fact",
        ),
    ),
    Mutant(
        name="follows-past-its-own-open-facts",
        rule="9.2",
        harm="A heartbeat announces the highest ID known while an own fact below it is open: it is skipped.",
        edits=(
            Edit(
                "WriterSession.beat_begins",
                "        noted = {name: self.generators[name].follows_to for name in self._durable}\n",
                "        noted = {}\n"
                "        for name, one in self.generators.items():\n"
                "            noted[name] = one.highest if one.open > 1 else one.open_floor\n",
            ),
            Edit("IdGenerator.follow", "self._move(min(noted, self.open_floor))", "self._move(noted)"),
        ),
        checks=(
            SIMULATOR,
            IDS + "following_never_passes_the_open_floor[rule 9.2]",
        ),
    ),
    Mutant(
        name="follows-past-a-reservation-under-way",
        rule="9.2",
        harm="An ID on its way from the sequence is stepped over by a heartbeat: its fact is lost, or raises.",
        edits=(
            Edit(
                "IdGenerator.open_floor",
                "        known = next(iter(self._tickets)).known if self._tickets else self.highest\n",
                "        known = self.highest\n",
            ),
        ),
        checks=(IDS + "case[G14]",),
    ),
    Mutant(
        name="an-id-that-a-crash-may-take-back-is-known",
        rule="9.22",
        harm="The server crashes, and gives the ID of a joined fact again: each write of the stream is refused.",
        edits=(Edit("IdGenerator.answer", "            if kept:\n", "            if True:\n"),),
        checks=(
            IDS + "9_22_an_id_that_a_crash_may_take_back_is_not_known_before_it_has_rows",
            FACT + "9_22_rolled_back_they_are_no_position_before_they_are_on_the_disk",
        ),
    ),
    Mutant(
        name="a-joined-fact-that-was-rolled-back-is-never-passed",
        rule="9.22",
        harm="An idle writer's position stays below it, whatever it may prove: who waits for it waits in vain.",
        edits=(Edit("IdGenerator.follows_to", "max(self.highest, self._left)", "self.highest"),),
        checks=(
            IDS + "9_22_an_abandoned_id_is_followed_once_a_beat_has_it_on_the_disk",
            FACT + "9_22_rolled_back_they_are_no_position_before_they_are_on_the_disk",
        ),
    ),
    Mutant(
        name="a-fact-that-never-began-moves-the-position",
        rule="9.2",
        harm="A process that was replaced, and has not heard of it, announces past its successor's facts: lost.",
        edits=(Edit("IdGenerator._finish", "            if moves:\n", "            if True:\n"),),
        checks=(
            IDS + "an_abandoned_id_holds_nothing_up_and_moves_nothing[rule 9.2]",
            RULES + "9_2_a_fact_that_never_began_does_not_step_over_a_successor_s",
            WRITING + "9_2_a_fact_that_never_began_does_not_step_over_a_successor_s",
        ),
    ),
    Mutant(
        name="what-waits-behind-a-failed-fact-waits-for-the-next",
        rule="4",
        harm="A fact is committed, and not published: the one before it got no ID, and no other comes.",
        edits=(
            Edit(
                "IdGenerator.give_up",
                "            self._settle()\n",
                "            on_moved, self._on_moved = self._on_moved, None\n"
                "            self._settle()\n"
                "            self._on_moved = on_moved\n",
            ),
        ),
        checks=(
            FAILED_NEIGHBOURS + "a_fact_whose_neighbour_gets_no_id_is_published",
            FAILED_NEIGHBOURS + "a_fact_of_threads_whose_neighbour_gets_no_id_is_published",
        ),
    ),
    Mutant(
        name="a-fenced-writer-completes-its-facts",
        rule="9.2",
        harm="A fact refused by the fence counts as empty: the position moves over rows of the successor.",
        edits=(
            Edit("IdGenerator._finish", "        if self._fenced is not None:\n            return\n", ""),
            Edit("IdGenerator._move", "position > self.position and self._fenced is None", "position > self.position"),
        ),
        checks=(IDS + "writer_fenced_completes_nothing_and_ends_everything[rule 9.2]",),
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
        checks=(
            SIMULATOR,
            IDS + "start[G2]",
        ),
    ),
    Mutant(
        name="no-chain-check",
        rule="9.6",
        harm="A message lost on a live link is lost for good as soon as the next one arrives (case R4).",
        edits=(Edit("Following._position", "        if prev <= self.position:\n", "        if True:\n"),),
        checks=(
            SIMULATOR,
            READER + "case[R4]",
            READER + "case[R5]",
        ),
    ),
    Mutant(
        name="frames-without-a-head",
        rule="9.6",
        harm="As upstream: RDATA carries no predecessor, so nobody can see that a message before it was lost.",
        edits=(Edit("Chain.take", '                    lines.append(b"%b%d %d" % (self.line, at, at))\n', ""),),
        checks=(
            SIMULATOR,
            WRITER + "rules[rule 9.6 the head is where the previous frame ended]",
        ),
    ),
    Mutant(
        name="the-head-is-what-was-confirmed",
        rule="9.6",
        harm="Of several messages in flight a lost one shows nowhere: the next one's head lies before it.",
        edits=(
            Edit(
                "Chain.take",
                "draft.lines, self.ready, self.composed, 0, False\n",
                "draft.lines, self.ready, self.sent, 0, False\n",
            ),
        ),
        checks=(
            SIMULATOR,
            WRITER + "many_rows_in_bounded_frames",
        ),
    ),
    Mutant(
        name="one-head-for-all-streams-of-a-frame",
        rule="9.6",
        harm="In a message with two streams the loss of the second one's rows before it shows nowhere.",
        edits=(
            Edit(
                "Chain.take",
                "                if not headed:\n                    draft",
                "                if not headed and not lines:\n                    draft",
            ),
        ),
        checks=(
            SIMULATOR,
            WRITER + "rules[rule 9.6 each stream has its own head in a shared frame]",
        ),
    ),
    Mutant(
        name="an-unconfirmed-frame-is-dropped",
        rule="9.6",
        harm="After a PUBLISH without an answer its rows are not sent again: those kept in memory only are lost.",
        edits=(
            Edit(
                "Writer.publish_failed",
                "        self._outgoing.restart(failed=True)\n",
                "        self._outgoing.restart(failed=True)\n        self._outgoing.unconfirmed.clear()\n",
            ),
        ),
        checks=(
            SIMULATOR,
            WRITER
            + "rules[rule 9.6 after an unknown outcome: the same frames again, byte for byte, before anything new]",
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
        checks=(WRITER + "rules[rule 9.6 a heartbeat is x x, never ahead of the rows that wait]",),
    ),
    Mutant(
        name="sent-moves-when-composed",
        rule="4",
        harm="positions(), and what a reader of its own stream saves, claim rows that Redis does not have yet.",
        edits=(Edit("Chain._end", "        self.composed = end\n", "        self.composed = self.sent = end\n"),),
        checks=(MUTANTS_GAPS + "4_positions_move_only_when_redis_has_confirmed",),
    ),
    Mutant(
        name="dropped-rows-are-announced-as-none",
        rule="9.6",
        harm="Rows dropped from a full queue are stepped over with 'prev new': readers believe that there are none.",
        edits=(
            Edit(
                "Chain._end",
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
            WRITER + "rules[rule 9.6 new new over dropped rows, late ones too, until the position is past them all]",
        ),
    ),
    Mutant(
        name="the-own-position-is-the-largest-finished-id",
        rule="5",
        harm="The announced position steps over transactions that are still open: their rows are skipped.",
        edits=(
            Edit(
                "IdGenerator._settle",
                "largest_upto(self.open_floor)",
                "largest_upto(self.highest)",
            ),
        ),
        checks=(
            SIMULATOR,
            IDS + "case[G3]",
        ),
    ),
    Mutant(
        name="heartbeats-announce-nothing",
        rule="2",
        harm="The loss of the last message before a pause is found late, and of rows kept in memory only never.",
        edits=(
            Edit(
                "Announcements.tick",
                "        if (beat and not self.rests) or now >= self.next_answer:\n",
                "        if now >= self.next_answer:\n",
            ),
        ),
        checks=(WRITER + "rules[rule 9.6 a heartbeat is x x, never ahead of the rows that wait]",),
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
        checks=(STORES_POSTGRES + "G12_a_jumped_sequence_proves_nothing",),
    ),
    Mutant(
        name="a-page-counts-for-what-was-asked",
        rule="9.9",
        harm="A catch-up of more than a page, or from a source that lags, skips all that the page did not bring.",
        edits=(
            Edit(
                "Following.page",
                "list(page.payloads), page.upto, fetched=True)\n",
                "list(page.payloads), asked.upto, fetched=True)\n",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "case[R3]",
            READER + "rule_9_9_a_page_counts_for_what_it_proves_not_for_what_was_asked",
        ),
    ),
    Mutant(
        name="a-fact-over-the-frame-bound-is-stepped-over",
        rule="9.10",
        harm="A fact too large for a message is announced as no rows: nobody fetches it.",
        edits=(
            Edit(
                "Chain.take",
                "                stepped_over, headed = True, False\n",
                "                headed = False\n",
            ),
        ),
        checks=(WRITER + "rules[rule 9.10 a fact over the frame bound is POSITION id id]",),
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
        checks=(
            SIMULATOR,
            READER + "large_batches_are_cut_at_fact_boundaries_and_small_ones_joined",
        ),
    ),
    Mutant(
        name="frames-without-a-name",
        rule="9.11",
        harm="Rows of a restarted writer are dropped as duplicates of those of its former life.",
        edits=(Edit("Writer._compose", "draft.lines if one_line else [self._head, *draft.lines]", "draft.lines"),),
        checks=(
            SIMULATOR,
            WRITER + "rules[rule 9.11, 9.16 every frame opens with NAME, of resettable streams and of the others]",
        ),
    ),
    Mutant(
        name="a-higher-incarnation-is-no-reset",
        rule="9.11",
        harm="After a writer's restart readers keep what its former life said, and drop what it says now.",
        edits=(
            Edit(
                "Admission._present_life",
                """\
            if known is not None or progress.position:
                progress.reset(0)
""",
                "",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "rule_9_11_a_higher_incarnation_is_always_a_reset_in_any_direction",
        ),
    ),
    Mutant(
        name="a-lower-incarnation-counts",
        rule="9.11",
        harm="A late message of a writer's former life resets its stream: readers forget what is true.",
        edits=(
            Edit(
                "Admission._present_life",
                """\
        if known is not None and incarnation < known and not self._outlived(progress, known, incarnation, now):
            counters.old_incarnations += 1
            return False
""",
                "",
            ),
        ),
        checks=(READER + "rule_9_11_a_lower_incarnation_is_ignored",),
    ),
    Mutant(
        name="a-repeated-frame-is-a-reset",
        rule="9.11",
        harm="A message that Redis delivers twice makes readers forget everything that is kept in memory.",
        edits=(
            Edit(
                "Following._step_back",
                "        if stream.resettable and foreign:\n",
                "        if stream.resettable:\n",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "rule_9_11_a_step_back_within_one_incarnation_is_a_repeated_frame",
        ),
    ),
    Mutant(
        name="a-step-back-is-a-reset-of-any-stream",
        rule="R13",
        harm="A repeated message sends readers of a table's stream back: every row comes a second time.",
        edits=(
            Edit(
                "Following._step_back",
                "        if stream.resettable and foreign:\n",
                "        if self.incarnation is None and not (native and self.stream.resettable):\n",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "case[R13]",
        ),
    ),
    Mutant(
        name="rows-of-the-former-life-after-its-reset",
        rule="9.11",
        harm="A handler told to forget gets the old rows once more afterwards.",
        edits=(
            Edit(
                "Following.reset",
                "        self.restart(position)\n        self.target = self.later = 0\n",
                "        self._forget()\n"
                "        self.position = self.queue.delivered = position\n"
                "        self.target = self.later = 0\n",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "a_reset_while_a_batch_is_being_handled",
        ),
    ),
    Mutant(
        name="what-was-handled-before-a-reset-counts-after-it",
        rule="9.11",
        harm="The position of the old life is saved, and waited for, as one of the new: rows below it are skipped.",
        edits=(
            Edit(
                "Following.reset",
                "        self.restart(position)\n        self.target = self.later = 0\n",
                "        self._forget()\n        self._empty()\n"
                "        self.position = position\n        self.target = self.later = 0\n",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "what_was_handled_before_a_reset_is_no_position_of_the_new_life",
        ),
    ),
    Mutant(
        name="an-emptied-queue-still-asks-to-be-taken-from",
        rule="3",
        harm="A worker is started for nothing, again and again: a processor at 100 %, and a process that hangs.",
        edits=(EMPTIED_STAYS_READY,),
        checks=(READER + "a_queue_that_was_emptied_has_nothing_to_take",),
    ),
    Mutant(
        name="a-bare-step-overtakes-the-handler",
        rule="3",
        harm="A POSITION behind rows that are being handled makes them count as handled: lost in a crash.",
        edits=(
            Edit(
                "DeliveryQueue.put",
                "            elif self._entries or self.handling is not None:\n",
                "            elif self._entries:\n",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "a_position_behind_a_batch_being_handled_waits_for_it",
        ),
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
        checks=(
            SIMULATOR,
            MUTANTS_GAPS + "3_what_was_put_back_stands_before_what_waits",
        ),
    ),
    Mutant(
        name="lines-are-dropped-while-catching-up",
        rule="9.13",
        harm="Rows that arrive during a catch-up are lost, and it ends as live all the same.",
        edits=(Edit("Following._hold", "        self.held.append(item, incarnation)\n", ""),),
        checks=(READER + "rule_9_13_lines_are_held_in_order_while_catching_up_and_follow_the_same_rules",),
    ),
    Mutant(
        name="positions-are-not-held",
        rule="9.13",
        harm="Held rows pass without the heads between them: a message lost during a catch-up is lost for good.",
        edits=(
            Edit(
                "Following._hold",
                "        self.held.append(item, incarnation)\n",
                """\
        if isinstance(item, Position):
            return
        self.held.append(item, incarnation)
""",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "rule_9_13_lines_are_held_in_order_while_catching_up_and_follow_the_same_rules",
        ),
    ),
    Mutant(
        name="live-after-an-overflow",
        rule="9.13",
        harm="Lines dropped for want of room are forgotten: what follows them passes for the next row.",
        edits=(
            Edit(
                "Following.release",
                "        if rest.overflowed:  # what came after the held lines is unknown\n",
                "        if False:\n",
            ),
        ),
        checks=(READER + "rule_9_13_on_overflow_the_newest_are_dropped_and_it_stays_unconnected",),
    ),
    Mutant(
        name="small-lines-are-held-behind-a-dropped-one",
        rule="9.13",
        harm="The end of a fact is kept whose beginning was dropped for want of room: half of it is delivered.",
        edits=(
            Edit(
                "HeldLines.overflows",
                "        return self.overflowed\n",
                "        return full\n",
            ),
        ),
        checks=(RULES + "9_13_after_an_overflow_all_lines_are_dropped_also_small_ones",),
    ),
    Mutant(
        name="rows-held-before-any-position",
        rule="9.13",
        harm="Rows heard during a catch-up that the table began pass for live ones, whatever was lost before them.",
        edits=(
            Edit(
                "Following._hold",
                "        if isinstance(item, Rows) and not (self.heard or self.held):\n",
                "        if False:\n",
            ),
        ),
        checks=(READER + "rows_held_before_any_position_are_not_taken_for_live_ones",),
    ),
    Mutant(
        name="held-lines-outlive-the-link",
        rule="9.13",
        harm="What was held of one link is joined to what comes over the next: rows between them are lost.",
        edits=(
            Edit(
                "FollowedWriters.disconnected",
                "            progress.lose()\n",
                "            if progress.state is not State.BOOTSTRAPPING:\n                progress.lose()\n",
            ),
        ),
        checks=(READER + "a_lost_link_costs_what_is_held_and_not_the_state",),
    ),
    Mutant(
        name="a-writer-first-heard-during-a-bootstrap-is-live",
        rule="9.13",
        harm="Rows of a writer that registered while the snapshot loads are handled before it, and wiped out by it.",
        edits=(
            Edit(
                "FollowedWriters._add",
                "        if stream.name in self.intake.bootstrapping:  #",
                "        if False:  #",
            ),
        ),
        checks=(READER + "rule_9_13_while_a_snapshot_loads_all_lines_are_held_and_follow_it_in_order",),
    ),
    Mutant(
        name="a-bootstrap-goes-on-where-it-heard",
        rule="9.13",
        harm="Rows between the snapshot and the last line heard while it was loading are skipped.",
        edits=(
            Edit(
                "Progress.bootstrapped",
                "        self.position = self.queue.delivered = self.began = position\n",
                "        heard = max(position, self.later, self.held.end)\n"
                "        self.position = self.queue.delivered = self.began = heard\n",
            ),
        ),
        checks=(READER + "rule_9_13_while_a_snapshot_loads_all_lines_are_held_and_follow_it_in_order",),
    ),
    Mutant(
        name="an-old-line-of-a-foreign-writer-is-believed",
        rule="9.13",
        harm="Its line is behind what is known, and counts as heard all the same: what was dropped is skipped.",
        edits=(
            Edit(
                "Following._position",
                "            self._step_back(new)\n            return\n",
                "            self.heard = True\n            self._step_back(new)\n            return\n",
            ),
        ),
        checks=(
            READER
            + "rows_behind_an_old_line_of_a_foreign_writer_are_not_taken_for_all_there_are[while a snapshot loads]",
        ),
    ),
    Mutant(
        name="an-old-line-held-of-a-foreign-writer-is-believed",
        rule="9.13",
        harm="A held line counts before it is looked at: once caught up, rows that came before it are skipped.",
        edits=(
            Edit(
                "Following._hold",
                "        # Unknown what came before these rows: once caught up they would pass for live ones.\n",
                "        self.heard = self.heard or isinstance(item, Position)\n",
            ),
        ),
        checks=(
            READER + "rows_behind_an_old_line_of_a_foreign_writer_are_not_taken_for_all_there_are[while catching up]",
        ),
    ),
    Mutant(
        name="lines-overtake-those-that-wait-for-room",
        rule="9.13",
        harm="Held lines wait for room in the receive queue, later ones do not: the waiting rows are skipped as known.",
        edits=(
            Edit(
                "Following.holding",
                "        return self.state is State.BOOTSTRAPPING or self.catching_up or bool(self.held)\n",
                "        return self.state is State.BOOTSTRAPPING or self.catching_up\n",
            ),
        ),
        checks=(READER + "held_lines_wait_for_room_and_later_ones_behind_them",),
    ),
    Mutant(
        name="held-lines-flood-the-receive-queue",
        rule="3",
        harm="What was held for hours is pushed into the receive queue at once: what has no room is fetched once more.",
        edits=(
            Edit(
                "Following.release",
                " and not self.catching_up and (intake.queue_bytes <= limit or not self.queue.size):\n",
                " and not self.catching_up:\n",
            ),
        ),
        checks=(READER + "held_lines_wait_for_room_and_later_ones_behind_them",),
    ),
    Mutant(
        name="a-queue-full-of-others-keeps-held-lines",
        rule="3",
        harm="Held lines wait until slow handlers of other writers have made room, with nothing of their own in it.",
        edits=(
            Edit(
                "Following.release",
                " and not self.catching_up and (intake.queue_bytes <= limit or not self.queue.size):\n",
                " and not self.catching_up and intake.queue_bytes <= limit:\n",
            ),
        ),
        checks=(READER + "held_lines_do_not_wait_for_a_queue_that_is_full_of_others",),
    ),
    Mutant(
        name="the-buffer-of-each-writer-alone-is-bounded",
        rule="3",
        harm="Held lines of a thousand writers take a thousand times the memory that full_sync_buffer_limit allows.",
        edits=(
            Edit(
                "HeldLines.overflows",
                "            full = self.intake.buffer_bytes + size",
                "            full = self.size + size",
            ),
        ),
        checks=(READER + "the_buffer_of_all_streams_together_is_bounded_and_what_has_no_room_is_fetched",),
    ),
    Mutant(
        name="the-buffer-never-gets-smaller",
        rule="3",
        harm="What was held counts for ever: from some bootstrap on nothing is held any more, and all is fetched.",
        edits=(
            Edit(
                "HeldLines._resize",
                "            self.intake.buffer_bytes += size - self.size\n",
                "            self.intake.buffer_bytes += max(0, size - self.size)\n",
            ),
        ),
        checks=(READER + "a_lost_link_costs_what_is_held_and_not_the_state",),
    ),
    Mutant(
        name="what-the-full-buffer-drops-is-not-due",
        rule="9.13",
        harm="Rows that had no room are fetched only when their writer is heard again, which may be never.",
        edits=(
            Edit(
                "Following._hold",
                "            self.later = max(self.later, end_of(item))\n            return\n",
                "            return\n",
            ),
        ),
        checks=(READER + "the_buffer_of_all_streams_together_is_bounded_and_what_has_no_room_is_fetched",),
    ),
    Mutant(
        name="what-was-held-when-the-link-was-lost-is-not-due",
        rule="9.13",
        harm="Rows held when the link broke during a bootstrap come only when their writer is heard again.",
        edits=(
            Edit(
                "Following._forget",
                "        self.later = max(self.later, self.held.end) if waits else 0\n",
                "        self.later = self.later if waits else 0\n",
            ),
        ),
        checks=(READER + "a_lost_link_costs_what_is_held_and_not_the_state",),
    ),
    Mutant(
        name="what-is-due-after-the-held-lines-is-not-fetched",
        rule="9.13",
        harm="Positions learned while lines were held are forgotten: a dead writer's last rows never come.",
        edits=(
            Edit(
                "Following.release",
                "        if later > self.position:\n            self._gap(later)\n\n",
                "\n",
            ),
        ),
        checks=(READER + "held_lines_wait_for_room_and_later_ones_behind_them",),
    ),
    Mutant(
        name="a-learned-position-replaces-what-is-held",
        rule="9.13",
        harm="Held lines are fetched once more, and live ones are taken in ahead of them.",
        edits=(
            Edit(
                "Progress.learned",
                "        elif self.holding:  # what is held may bring it\n",
                "        elif self.state is State.BOOTSTRAPPING:  # what is held may bring it\n",
            ),
        ),
        checks=(READER + "held_lines_wait_for_room_and_later_ones_behind_them",),
    ),
    Mutant(
        name="what-was-taken-in-before-a-bootstrap-is-handed-out",
        rule="3",
        harm="Rows taken in before the snapshot are handled while it loads, and wiped out by its first part.",
        edits=(
            Edit(
                "Progress.begin_bootstrap",
                "        self.restart(self.queue.delivered)\n",
                "        self._forget()\n",
            ),
        ),
        checks=(READER + "a_bootstrap_drops_what_was_taken_in_and_not_handled",),
    ),
    Mutant(
        name="what-was-known-before-a-bootstrap-is-not-due",
        rule="3",
        harm="Rows between a snapshot and what was handled before it come only when their writer is heard again.",
        edits=(
            Edit(
                "Progress.begin_bootstrap",
                "        self.later = self.due\n",
                "",
            ),
        ),
        checks=(
            READER + "a_snapshot_older_than_what_was_handled_brings_the_rows_behind_it_once_more",
            READER + "a_bootstrap_drops_what_was_taken_in_and_not_handled",
        ),
    ),
    Mutant(
        name="a-bootstrap-skips-what-is-pruned-meanwhile",
        rule="3",
        harm="A page asked for before reports rows as missed that the snapshot brings.",
        edits=(
            Edit(
                "Progress.skip",
                "        if self.state is State.BOOTSTRAPPING:\n            return\n        self.abandon()\n",
                "        self.abandon()\n",
            ),
        ),
        checks=(READER + "rows_that_are_pruned_while_a_snapshot_loads_are_not_missed",),
    ),
    Mutant(
        name="a-bootstrap-forgets-that-it-was-stopped",
        rule="3",
        harm="What an application was told has stopped goes on, and fills the receive queue, for nobody handles it.",
        edits=(
            Edit(
                "Progress.stop",
                "            self.stops = True\n            return\n",
                "            return\n",
            ),
        ),
        checks=(READER + "one_that_is_stopped_while_it_bootstraps_is_stopped_after_it[is over]",),
    ),
    Mutant(
        name="what-is-due-outlives-the-log",
        rule="3",
        harm="After an epoch change a bootstrap waits for positions of the log before: it is never online.",
        edits=(
            Edit(
                "Following.reset",
                "        self.target = self.later = 0\n        self._intake.draining",
                "        self.target = 0\n        self._intake.draining",
            ),
        ),
        checks=(READER + "another_log_while_a_snapshot_loads_voids_what_is_held",),
    ),
    Mutant(
        name="another-log-is-looked-for-below-the-floor",
        rule="3",
        harm="Who bootstraps because its rows were pruned never finds out that the log is another one.",
        edits=(
            Edit(
                "FollowedWriters.log_question",
                "                at = progress.due if progress.state is State.BOOTSTRAPPING else progress.position\n",
                "                at = progress.position\n",
            ),
        ),
        checks=(READER + "while_a_snapshot_loads_the_log_is_looked_at_where_its_rows_are",),
    ),
    Mutant(
        name="online-before-what-was-held-is-delivered",
        rule="3",
        harm="A bootstrap says that it is over while rows that were held when the link broke are still missing.",
        edits=(
            Edit(
                "FollowedWriters.drained",
                "            done = not progress.holding and progress.queue.delivered >= due\n",
                "            done = not progress.holding\n",
            ),
        ),
        checks=(READER + "a_link_lost_while_draining_ends_in_catch_up",),
    ),
    Mutant(
        name="online-while-lines-are-held",
        rule="3",
        harm="A bootstrap says that it is over while its rows are still being caught up with.",
        edits=(
            Edit(
                "FollowedWriters.drained",
                "            done = not progress.holding and progress.queue.delivered >= due\n",
                "            done = progress.queue.delivered >= due\n",
            ),
        ),
        checks=(READER + "it_is_drained_once_nothing_is_held_since",),
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
        checks=(BOOTSTRAP_CORE + "draining_that_fails_is_tried_again_after_a_pause",),
    ),
    Mutant(
        name="a-paced-bootstrap-does-not-rest",
        rule="3",
        harm="snapshot_rate is ignored: a bootstrap takes the processors that the writers' commits need.",
        edits=(Edit("Bootstrap._plan", "due = now >= self.parts.rest_until", "due = True"),),
        checks=(BOOTSTRAP_CORE + "a_bootstrap_of_a_rate_rests_behind_each_part_for_the_rest_of_its_time",),
    ),
    Mutant(
        name="a-full-receive-queue-drops-silently",
        rule="3",
        harm="A handler that lags loses what does not fit in memory, and nothing says so.",
        edits=(
            Edit(
                "Following._rows",
                "            self._gap(lacking)  # fetched when there is room\n",
                "            self.position = lacking\n",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "a_full_receive_queue_drops_to_catch_up_and_loses_nothing",
            BUS + "a_reader_that_lags_falls_back_to_catch_up_within_its_bound",
        ),
    ),
    Mutant(
        name="a-held-batch-survives-a-position",
        rule="9.14",
        harm="Rows of a fact that a catch-up has brought whole are delivered once more, as part of the next fact.",
        edits=(Edit("Following._position", "        self._close_batch()\n", ""),),
        checks=(READER + "rule_9_14_a_position_clears_a_held_batch",),
    ),
    Mutant(
        name="batch-keyed-by-stream-alone",
        rule="R6",
        harm="One writer's rows are delivered as another's, or dropped with another's duplicate.",
        edits=(
            Edit(
                "FollowedWriters._add",
                "        self.progress[progress.key] = progress\n",
                """\
        self.progress[progress.key] = progress
        progress.open = next(other.open for key, other in self.progress.items() if key[0] == stream.name)
""",
            ),
            Edit(
                "ReceivedRows._close_batch",
                """\
            self._intake.counters.rows_dropped += len(self.open)
            self.open, self.open_size = [], 0
""",
                "            self._drop(len(self.open))\n            self.open.clear()\n",
            ),
            Edit(
                "ReceivedRows._take_rows",
                """\
            payloads = self.open + payloads
            self.open, self.open_size = [], 0
""",
                "            payloads = self.open + payloads\n            self.open.clear()\n",
            ),
        ),
        checks=(
            READER + "case[R6]",
            READER + "case[R7]",
            READER + "case[R8]",
        ),
    ),
    Mutant(
        name="connected-mark-per-stream",
        rule="R9",
        harm="The POSITION of one writer connects all: what another wrote before its own POSITION is lost.",
        edits=(
            Edit(
                "Reader.receive_frame",
                "                    progress.line(item, incarnation)\n",
                """\
                    alike = [one.state for one in self._all_of(item.stream)]
                    if isinstance(item, Rows) and State.LIVE in alike and not progress.holding:
                        progress.state = State.LIVE
                    progress.line(item, incarnation)
""",
            ),
        ),
        checks=(READER + "case[R9]",),
    ),
    Mutant(
        name="rows-count-before-a-position",
        rule="R1",
        harm="The first row after a reconnect is taken for the next one: all that was missed meanwhile is lost.",
        edits=(
            Edit(
                "Following._rows",
                "        if self.state is not State.LIVE:\n",
                "        if self.state is State.STOPPED:\n",
            ),
        ),
        checks=(READER + "case[R1]",),
    ),
    Mutant(
        name="duplicates-are-delivered",
        rule="R2",
        harm="A message that arrives twice, or after a fetch that brought it, is handled twice.",
        edits=(
            Edit(
                "ReceivedRows._take_rows", "        if tokens and tokens[0] <= self.position:\n", "        if False:\n"
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "case[R2]",
            READER + "case[R15]",
        ),
    ),
    Mutant(
        name="step-over-a-gap-after-retries",
        rule="R10",
        harm="A database that is away for longer than some retries costs every row of that gap.",
        edits=(
            Edit(
                "Following._retry_later",
                "            self._move(Event.KEEPS_FAILING)\n",
                "            self.position = self.target\n            self._caught_up()\n",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "a_catch_up_that_keeps_failing_is_stale_and_still_tries",
        ),
    ),
    Mutant(
        name="deaf-after-a-failed-fetch",
        rule="R10",
        harm="One failed fetch, and that writer's stream is silent until the process restarts.",
        edits=(
            Edit(
                "Following.failed",
                "        self._answered()\n",
                "",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "case[R10]",
        ),
    ),
    Mutant(
        name="a-page-that-was-given-up-counts",
        rule="3",
        harm="A page asked for before a reset or a disconnect is taken in behind what came since.",
        edits=(
            Edit(
                "Reader.receive_page",
                "        if progress.asked is not asked and asked is not self._question:\n",
                "        if False:\n",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "a_page_that_comes_after_a_disconnect_is_ignored",
        ),
    ),
    Mutant(
        name="connected-marks-outlive-the-link",
        rule="2",
        harm="Behind a reconnect the first row of a foreign writer is taken for the next one.",
        edits=(
            Edit("Reader.connected", "        self.disconnected()\n        silent", "        silent"),
            Edit("Reading.disconnected", "        self.core.disconnected()\n", ""),
        ),
        checks=(RULES + "9_14_what_follows_a_lost_link_is_not_trusted_before_a_position",),
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
        checks=(FRAMING + "frames[rest is dropped]",),
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
                "            if in_use or self.finished.overlaps(first, last) or self.heard.overlaps(first, last):\n",
                "            if in_use:\n",
            ),
        ),
        checks=(
            SIMULATOR,
            IDS + "an_id_that_is_not_new_is_never_used",
            RULES + "9_15_a_sequence_that_went_back_is_refused_while_running",
        ),
    ),
    Mutant(
        name="pages-of-another-log-are-taken-in",
        rule="9",
        harm="After a restore from a backup readers mix rows of two logs, and skip what the new one has below them.",
        edits=(
            Edit(
                "FollowedWriters.proves",
                """\
            if self.new_epoch is None:
                self.counters.epoch_changes += 1
            self.new_epoch = found
            return False
""",
                "            self.epoch = found\n            return True\n",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "a_page_of_another_epoch_is_not_delivered",
        ),
    ),
    Mutant(
        name="a-refuted-epoch-is-never-asked-about-again",
        rule="9",
        harm="Refuted by a replica that lags, a restore is not noticed: rows of two logs are mixed.",
        edits=(
            Edit(
                "FollowedWriters.proves",
                "        self._settle_doubt(now)\n",
                '        self._settle_doubt(float("inf"))\n',
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "a_refuted_epoch_is_asked_about_again_when_it_is_announced_again",
        ),
    ),
    Mutant(
        name="what-is-said-of-another-log-counts",
        rule="9.16",
        harm="A writer from before a restore announces over IDs that its successor gives out again: skipped.",
        edits=(
            Edit(
                "Admission.counts",
                "        if not self.senders.is_trusted(writer, self._log.epoch):\n",
                "        if False:\n",
            ),
        ),
        checks=(
            SIMULATOR,
            READER + "rule_9_16_what_a_writer_of_another_log_says_is_not_taken_for_positions_in_this_one",
            READER + "rule_9_16_after_an_epoch_change_writers_of_the_new_log_count_and_those_of_the_old_do_not",
        ),
    ),
    Mutant(
        name="a-replicate-while-one-is-answered-gets-nothing",
        rule="9",
        harm="Who asks just after an answer was composed hears nothing, and stays deaf until the next heartbeat.",
        edits=(
            Edit(
                "Announcements.next",
                "            self._asked = self._all = False\n            self._turns = set()\n",
                "            self._turns = set()\n        self._asked = self._all = False\n",
            ),
        ),
        checks=(WRITER + "rules[rule 9 a REPLICATE after an answer was composed gets another]",),
    ),
    Mutant(
        name="invalidations-echo-the-progress-of-others",
        rule="W6",
        harm="On a stream that follows nobody each write makes every process publish: a storm that grows with them.",
        edits=(
            Edit(
                "Chain.goal",
                "        if self.stream.follows or self.dropped > self.position:\n",
                "        if self.position:\n",
            ),
        ),
        checks=(WRITER + "invalidations_do_not_echo_others",),
    ),
    Mutant(
        name="a-stopped-stream-stays-ready",
        rule="3",
        harm="A stream stops on a poison row while more rows wait: its worker is started over and over, at full load.",
        edits=(
            EMPTIED_STAYS_READY,
            Edit(
                "Handlers.hand_out",
                " and key not in self._context.stopped and key not in self._cancelled:",
                " and key not in self._cancelled:",
            ),
        ),
        checks=(
            SIMULATOR,
            FAULTS + "a_stopped_writer_with_rows_waiting_makes_no_tasks",
        ),
    ),
    Mutant(
        name="dropped-facts-are-not-announced-until-something-else-is",
        rule="4",
        harm="A writer that closes waits for what nothing publishes: a processor at 100 %, until it gives up.",
        edits=(
            Edit(
                "Writer._bound",
                "            self.queued_bytes -= largest.drop()\n            self._mark(largest)\n",
                "            self.queued_bytes -= largest.drop()\n",
            ),
        ),
        checks=(WRITER + "what_is_due_is_published_also_when_rows_are_dropped_behind_an_open_fact",),
    ),
    Mutant(
        name="the-same-snapshot-is-taken-for-the-same-bootstrap",
        rule="9.12",
        harm="A process counts on parts that it applied before another one emptied the target: they are lost.",
        edits=(Edit("Bootstrap.restore", " and self.id in (None, saved.id)\n", "\n"),),
        checks=(BOOTSTRAP_CORE + "another_bootstrap_of_the_same_snapshot_is_adopted",),
    ),
    Mutant(
        name="snapshots-of-other-rows-are-the-same",
        rule="6",
        harm="A reader that is half through a snapshot goes on with one of another key: rows of neither are whole.",
        edits=(
            Edit(
                "Agreement.same",
                "self.digest == other.digest",
                "self.digest == attrs.evolve(other, content=self.content).digest",
            ),
        ),
        checks=(SNAPSHOT + "snapshots_of_other_keys_are_not_the_same",),
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
        checks=(AUDIT_READERS + "a_torn_line",),
    ),
    Mutant(
        name="a-reader-is-deaf-to-a-clock-that-is-behind",
        rule="9.24",
        harm="A stream without a table is never heard again when its writer restarts under a clock that is behind.",
        edits=(Edit("Admission._outlived", "        if now - progress.lower_since < bound:\n", "        if True:\n"),),
        checks=(
            SIMULATOR,
            CLOCK_BEHIND + "lower_incarnations_alone_for_five_beats_are_a_reset",
            CLOCK_BEHIND + "a_reader_is_not_deaf_to_a_writer_whose_clock_is_behind",
        ),
    ),
    Mutant(
        name="a-zombie-takes-a-stream-back",
        rule="9.24",
        harm="Late lines of a former life reset the stream, though the later life is heard as well.",
        edits=(
            Edit(
                "Admission._present_life",
                "        progress.lower_since = None\n        if known != incarnation:\n",
                "        if known != incarnation:\n",
            ),
        ),
        checks=(CLOCK_BEHIND + "not_while_the_higher_one_is_heard_as_well",),
    ),
    Mutant(
        name="an-outage-is-poison",
        rule="9.12",
        harm="A handler whose database is away for ten seconds puts good facts into the dead letters, or stops.",
        edits=(Edit("RetryPolicy.judge", "        if outage:\n            return Verdict.OUTAGE\n", ""),),
        checks=(
            SIMULATOR,
            RETRYING + "an_outage_of_an_hour_is_no_poison",
            FAILURES + "an_outage_lasts_as_long_as_it_lasts",
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
        checks=(RETRYING + "an_unknown_error_of_ten_seconds_sets_no_good_fact_aside",),
    ),
    Mutant(
        name="a-wrapped-error-of-a-connection-is-a-suspicion",
        rule="9.12",
        harm="Handlers that use SQLAlchemy or Django take an outage for poison.",
        edits=(Edit("_causes", "        current = current.__cause__\n", "        return\n"),),
        checks=(FAILURES + "errors_of_connections_are_an_outage",),
    ),
    Mutant(
        name="a-lost-name-is-healthy",
        rule="9.4",
        harm="A process that writes nothing any more says that all is well.",
        edits=(Edit("_reasons", 'if writer is not None and writer["lost"]:', "if False:"),),
        checks=(HEALTH + "each_reason",),
    ),
    Mutant(
        name="a-stream-that-is-not-followed-is-healthy",
        rule="9.4",
        harm="A reader that hears nothing, for the database is away since its start, says that all is well.",
        edits=(Edit("_reasons", 'reader.get("not_begun", {})', "{}"),),
        checks=(HEALTH + "each_reason",),
    ),
    Mutant(
        name="a-position-that-cannot-be-saved-is-healthy",
        rule="9.12",
        harm="A month of rows comes again at the next start, and nobody was told.",
        edits=(Edit("_reasons", 'reader.get("unsavable", {})', "{}"),),
        checks=(HEALTH + "each_reason",),
    ),
    Mutant(
        name="a-wrong-call-is-an-outage",
        rule="9.12",
        harm="A handler that reads from a file opened to write is called for ever, and the fact is never set aside.",
        edits=(Edit("_is_outage", "return not mistaken and not", "return not"),),
        checks=(FAILURES + "other_errors_are_not",),
    ),
    Mutant(
        name="db-init-forgets-the-fields",
        rule="3",
        harm="After 'db init --stream orders' nothing is known of the rows any more, and any class is taken.",
        edits=(Edit("fields_to_store", "known if fields is None else dump(", "None if fields is None else dump("),),
        checks=(ROW_SHAPES + "fields_stay_when_tables_are_made_again[sqlite]",),
    ),
    Mutant(
        name="an-older-class-is-refused",
        rule="3",
        harm="During a rolling upgrade the processes that were not replaced yet cannot start again.",
        edits=(
            Edit(
                "shapes.merged",
                "longer = declared if len(declared) > len(stored) else stored",
                "longer = declared if len(declared) > len(stored) else stored[: len(both)]",
            ),
        ),
        checks=(ROW_SHAPES + "what_fits_is_merged",),
    ),
    Mutant(
        name="the-name-of-a-stream-passes-for-one",
        rule="1",
        harm='bus.write("orders") fails with an AttributeError that says nothing of streams.',
        edits=(Edit("checked_stream", IS_STREAM, IS_STREAM.replace("not isinstance(stream, Stream)", "False")),),
        checks=(CONFIG_ERRORS + "a_stream_is_needed_not_its_name",),
    ),
    Mutant(
        name="now-is-zero-of-a-source-without-positions",
        rule="9.25",
        harm="A reader that is to begin now is given all the rows there are.",
        edits=(Edit("Reader._progress_of", "                progress.starts_here = stream.from_now\n", ""),),
        checks=(
            REFERENCE + "a_reader_begins_where_it_is_told_to[now]",
            REFERENCE + "a_reader_begins_where_it_is_told_to[by default]",
        ),
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
        checks=(REFERENCE + "positions_of_a_resettable_stream_are_not_saved",),
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
            ONE_LINE + "each_line_is_a_message_without_server_and_name",
            ONE_LINE + "whoever_reads_first_lines_alone_gets_every_row[asyncio]",
        ),
    ),
    Mutant(
        name="late-rows-pass-for-duplicates",
        rule="3",
        harm="A row that was never handled is counted as one that was.",
        edits=(
            Edit(
                "ReceivedRows._below",
                "        late = [] if self._recent is None else self._recent.late(tokens)\n",
                "        late: list[int] = []\n",
            ),
        ),
        checks=(
            LATE_ROWS + "a_late_row_is_told_from_a_repeated_one",
            CAPTURES + "a_reader_of_the_capture_ends_where_its_database_did",
        ),
    ),
    Mutant(
        name="tokens-are-remembered-without-end",
        rule="3",
        harm="A reader of a foreign writer grows with every row.",
        edits=(Edit("RecentTokens.add", "        while len(known) > RECENT_TOKENS:\n", "        while False:\n"),),
        checks=(LATE_ROWS + "a_bounded_number_of_tokens_is_remembered",),
    ),
    Mutant(
        name="rows-of-a-foreign-writer-are-said-to-be-gone",
        rule="3",
        harm="Nearly every report of lost rows is false, so that no one looks at them.",
        edits=(
            Edit(
                "ReceivedRows._miss",
                "        certain = self.stream.durable or self.native\n",
                "        certain = True\n",
            ),
        ),
        checks=(
            LATE_ROWS + "rows_of_a_foreign_writer_may_have_been_missed",
            LATE_ROWS + "both_are_seen_by_who_runs_it",
        ),
    ),
    Mutant(
        name="lines-without-a-name-never-count-of-a-registered-writer",
        rule="9.18",
        harm="Readers hear nothing of a writer of single lines, and follow it through the table, seconds late.",
        edits=(Edit("Admission.counts", UNNAMED, "        if False:\n"),),
        checks=(
            ONE_LINE + "unnamed_lines_of_a_registered_writer_count_where_foreign_writers_are_declared",
            ONE_LINE + "whoever_reads_first_lines_alone_gets_every_row[asyncio]",
        ),
    ),
    Mutant(
        name="lines-without-a-name-count-wherever-they-come",
        rule="9.16",
        harm="One forged line moves a native writer's position over rows.",
        edits=(Edit("Admission.counts", UNNAMED, "        if incarnation is None:\n"),),
        checks=(ONE_LINE + "unnamed_lines_of_a_registered_writer_count_where_foreign_writers_are_declared",),
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
        checks=(ONE_LINE + "a_writer_of_single_lines_needs_streams_whose_readers_believe_it",),
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
        checks=(ONE_LINE + "a_writer_of_single_lines_refuses_streams_in_memory",),
    ),
    Mutant(
        name="a-url-in-doubt-is-shown",
        rule="2",
        harm="What cannot be taken apart is quoted in the error: postgres:/... with its password.",
        edits=(Edit("shown_url", '        return _scheme_of(url) + "..."\n', "        return url\n"),),
        checks=(SECRETS + "no_entry_shows_a_password[8-store_asyncio]",),
    ),
    Mutant(
        name="an-at-sign-behind-the-host-is-no-doubt",
        rule="2",
        harm="Numbers before a raw '/' in a password are taken for a port, the rest is shown as a path.",
        edits=(Edit("_URL", "(?P<path>(?:[^\\s\\x00-\\x1f\\x7f%?#@]", "(?P<path>(?:[^\\s\\x00-\\x1f\\x7f%?#]"),),
        checks=(SECRETS + "no_entry_shows_a_password[0-redis_asyncio]",),
    ),
    Mutant(
        name="a-file-that-is-replaced-loses-its-mode",
        rule="4",
        harm="A report that a group may read is closed to it with the next one.",
        edits=(Edit("open_successor", "                os.fchmod(handle, mode)\n", "                pass\n"),),
        checks=(
            PRIVATE_FILES + "what_replaces_a_file_has_its_mode[umask-022]",
            PRIVATE_FILES + "reports[umask-022]",
        ),
    ),
    Mutant(
        name="the-folder-of-a-group-is-not-its-own",
        rule="4",
        harm="Services that share a table or an archive lock one another out.",
        edits=(Edit("_rights_of_group", "return mode & 0o070 if mode & stat.S_ISGID else 0", "return 0"),),
        checks=(PRIVATE_FILES + "a_folder_of_a_group_gives_the_group_its_rights[umask-022]",),
    ),
    Mutant(
        name="a-foreign-writer-is-not-waited-for",
        rule="9.17",
        harm="Rows of a foreign writer that were inserted past the sequence are stepped over by its next one.",
        edits=(
            Edit(
                "Following.page",
                "if self.stream.durable and self.native:\n                self._intake.unproven",
                "if self.stream.durable:\n                self._intake.unproven",
            ),
        ),
        checks=(CORE_TRUST + "9_17_a_foreign_writer_is_waited_for",),
    ),
    Mutant(
        name="a-line-behind-the-sequence-that-was-read-is-not-waited-for",
        rule="9.17",
        harm="What a line said while the sequence was read is given up until the next beat.",
        edits=(Edit("Progress.nothing_above", "self.target != asked or asked <= highest:", "asked <= highest:"),),
        checks=(CORE_TRUST + "9_17_what_lies_above_the_sequence_is_not_waited_for",),
    ),
    Mutant(
        name="a-line-without-name-is-believed",
        rule="9.16",
        harm="One stray POSITION makes readers step over hundreds of facts, and wait_for returns for them.",
        edits=(
            Edit(
                "SenderTracker.is_trusted",
                "            return writer not in self._senders\n",
                "            return writer not in self._senders or epoch in self._senders[writer].values()\n",
            ),
            Edit(
                "Admission.counts",
                "        if claim is None or incarnation == claim:\n",
                "        if claim is None or incarnation in (None, claim):\n",
            ),
        ),
        checks=(
            TRUST + "9_16_lines_of_a_native_writer_without_its_name_count_for_nothing",
            STRAY_LINES + "what_a_stranger_says_harms_nobody[sqlite-redis-asyncio-a position without NAME]",
        ),
    ),
    Mutant(
        name="a-line-without-name-is-believed-of-a-stream-in-memory",
        rule="9.16",
        harm="One stray POSITION makes readers of a stream without a table step over its rows.",
        edits=(
            Edit(
                "Admission._present_life",
                "            if self.senders.is_native(progress.writer) and not progress.stream.foreign_writers:\n",
                "            if False:\n",
            ),
        ),
        checks=(TRUST + "9_16_also_of_a_stream_without_a_table_once_it_was_heard_natively",),
    ),
    Mutant(
        name="another-deployment-s-lines-reset-streams-in-memory",
        rule="9.16",
        harm="A deployment with another database, under the same name by mistake, hides the writers of this one.",
        edits=(
            Edit(
                "Admission._present_life",
                "        if self._log.is_another_log(self.senders.epoch_of(progress.writer)):\n",
                "        if False:\n",
            ),
        ),
        checks=(TRUST + "9_16_lines_of_another_deployment_are_ignored_also_of_a_stream_without_a_table",),
    ),
    Mutant(
        name="an-unregistered-writer-is-followed",
        rule="9.18",
        harm="A line of a writer that does not exist is followed by readers, which wait for rows that never come.",
        edits=(
            Edit(
                "Admission.lists",
                "        if stream.foreign_writers and incarnation is None:\n            return True\n",
                "        return True\n",
            ),
        ),
        checks=(TRUST + "9_18_an_unregistered_writer_moves_nothing",),
    ),
    Mutant(
        name="who-joins-waits-for-the-look-for-silent-writers",
        rule="9.18",
        harm="The first rows of a new writer come when the registry is read for other reasons, ten seconds later.",
        edits=(
            Edit("Admission.registry_doubted", "        return bool(self._unconfirmed)\n", "        return False\n"),
        ),
        checks=(
            TRUST + "9_18_the_registry_is_doubted_for_who_names_itself_in_this_log",
            TRUST + "9_18_a_writer_that_joins_is_followed_once_the_registry_lists_it",
        ),
    ),
    Mutant(
        name="an-answer-of-the-registry-is-the-last-word",
        rule="9.18",
        harm="Rows of a writer that joins while the registry is read wait for its next line, which may never come.",
        edits=(
            Edit(
                "Admission.joined",
                "            if answers + 1 < self._intake.settings.silent_after_beats:\n",
                "            if said in found:\n",
            ),
        ),
        checks=(
            CORE_TRUST + "9_18_an_answer_of_the_registry_may_be_older_than_what_was_heard",
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
                "        self.admission.forget_unconfirmed()\n",
                "",
            ),
        ),
        checks=(CORE_TRUST + "9_18_what_was_said_in_the_log_before_is_no_word_in_the_new_one",),
    ),
    Mutant(
        name="who-is-nobody-is-asked-for-for-ever",
        rule="9.18",
        harm="One forged line makes every reader read the registry each beat until it is restarted.",
        edits=(
            Edit(
                "Admission.joined",
                "            if answers + 1 < self._intake.settings.silent_after_beats:\n",
                "            if True:\n",
            ),
        ),
        checks=(CORE_TRUST + "9_18_an_answer_of_the_registry_may_be_older_than_what_was_heard",),
    ),
    Mutant(
        name="what-was-heard-of-who-joined-is-forgotten-with-a-failed-question",
        rule="9.18",
        harm="The database is away for a moment when a writer has joined: its rows wait for its next sign of life.",
        edits=(
            Edit(
                "Admission.joined",
                "                found[said] = end\n",
                "                found[said] = end\n                del self._unconfirmed[said]\n"
                "                continue\n",
            ),
        ),
        checks=(
            CORE_TRUST + "9_18_a_line_of_a_writer_that_is_not_registered_moves_nothing_and_asks_for_the_registry",
            FAULTS + "a_writer_without_beats_that_joined_is_heard_though_the_sequence_was_away",
        ),
    ),
    Mutant(
        name="a-higher-incarnation-is-believed-without-the-claim",
        rule="9.19",
        harm="A copy of the deployment, on a copy of its database, is taken for the writers of this one.",
        edits=(
            Edit(
                "Admission.counts",
                "        if claim is None or incarnation == claim:\n",
                "        if claim is None or (incarnation or 0) >= claim:\n",
            ),
        ),
        checks=(TRUST + "9_19_of_a_registered_writer_the_incarnation_of_its_claim_alone_counts[higher]",),
    ),
    Mutant(
        name="a-former-life-is-believed",
        rule="9.19",
        harm="A process that was replaced, and does not know it yet, goes on being heard beside its successor.",
        edits=(
            Edit(
                "Admission.counts",
                "        if claim is None or incarnation == claim:\n",
                "        if claim is None or (incarnation or 0) <= claim:\n",
            ),
        ),
        checks=(TRUST + "9_19_of_a_registered_writer_the_incarnation_of_its_claim_alone_counts[lower]",),
    ),
    Mutant(
        name="a-forged-incarnation-speaks-for-who-joins",
        rule="9.18",
        harm="What a forged incarnation said of a writer is fetched once that joins: its open fact is stepped over.",
        edits=(
            Edit(
                "Admission.joined",
                "            if self.registry.get(said[:2]) == said[2]:\n",
                "            if said[:2] in self.registry:\n",
            ),
        ),
        checks=(TRUST + "9_18_the_registry_is_doubted_for_who_names_itself_in_this_log",),
    ),
    Mutant(
        name="items-of-a-message-are-not-bounded",
        rule="9.20",
        harm="A message of 2.6 MB of short lines stops every event loop for a minute.",
        edits=(Edit("_Room.take_items", "        if items > self.most_items:", "        if False:"),),
        checks=(HOSTILE_MESSAGES + "items_are_bounded[unknown]",),
    ),
    Mutant(
        name="rows-of-a-message-are-not-bounded",
        rule="9.20",
        harm="16 MiB of rows of two bytes cost 14 times as much in memory.",
        edits=(
            Edit(
                "_parse_run",
                "    most, pieces, end = room.most_rows - room.rows, [], at",
                "    most, pieces, end = 2**40, [], at",
            ),
        ),
        checks=(HOSTILE_MESSAGES + "rows_are_bounded",),
    ),
    Mutant(
        name="a-long-command-is-one-item",
        rule="9.20",
        harm="Text of one wide character a line takes four times the message, and more with each command.",
        edits=(Edit("_parse_lines", "room.take_items(line, 1 + len(line) // ITEM_BYTES)", "room.take_items(line)"),),
        checks=(HOSTILE_MESSAGES + "a_long_command_counts_for_more",),
    ),
    Mutant(
        name="a-command-of-any-length-is-decoded",
        rule="9.20",
        harm="One line of 16 MiB of JSON takes 600 MiB of memory.",
        edits=(Edit("_parse_lines", "            if size > COMMAND_BYTES:", "            if False:"),),
        checks=(HOSTILE_MESSAGES + "a_long_command_counts_for_more",),
    ),
    Mutant(
        name="a-cut-message-says-nothing-of-foreign-writers",
        rule="9.20",
        harm="Rows of a foreign writer behind the bound of a message are stepped over by its next row.",
        edits=(Edit("Reader.receive_frame", "        if frame.cut:\n            self._cut()\n", ""),),
        checks=(HOSTILE_MESSAGES + "what_a_cut_message_held_of_a_foreign_writer_is_not_stepped_over",),
    ),
    Mutant(
        name="a-malformed-message-says-nothing-of-foreign-writers",
        rule="9.20",
        harm="A foreign writer's row that is too long, or not UTF-8, is stepped over by its next row, in silence.",
        edits=(
            Edit(
                "parse_frame",
                '        frame.cut = any(data.startswith(line) or b"\\n" + line in data for line in _OF_STREAMS)\n',
                '        frame.cut = " are allowed" not in str(error) and " is dropped" in str(error)\n',
            ),
        ),
        checks=(HOSTILE_MESSAGES + "what_a_cut_message_held_of_a_foreign_writer_is_not_stepped_over",),
    ),
    Mutant(
        name="any-malformed-line-silences-foreign-writers",
        rule="9.20",
        harm="A command of another system that is malformed here costs rows of streams in memory, each time it comes.",
        edits=(
            Edit(
                "parse_frame",
                '        frame.cut = any(data.startswith(line) or b"\\n" + line in data for line in _OF_STREAMS)\n',
                "        frame.cut = True\n",
            ),
        ),
        checks=(HOSTILE_MESSAGES + "a_message_without_a_line_of_a_stream_takes_nothing_from_foreign_writers",),
    ),
    Mutant(
        name="a-cut-message-ends-the-catch-up-of-who-is-not-heard",
        rule="9.20",
        harm="Rows of a predecessor of the own name are not fetched until the link is lost.",
        edits=(Edit("Reader._cut", "            if progress.heard or progress.held:\n", "            if True:\n"),),
        checks=(HOSTILE_MESSAGES + "a_cut_message_does_not_end_the_catch_up_of_who_is_not_heard",),
    ),
    Mutant(
        name="what-is-held-is-joined-over-a-cut-message",
        rule="9.20",
        harm="A foreign writer's row in a message that was cut while a snapshot loads is stepped over by its next row.",
        edits=(
            Edit(
                "Reader._cut", "            if progress.heard or progress.held:\n", "            if progress.heard:\n"
            ),
        ),
        checks=(HOSTILE_MESSAGES + "what_is_held_of_a_foreign_writer_is_not_joined_over_a_cut_message",),
    ),
    Mutant(
        name="a-stray-name-makes-a-native-writer",
        rule="9.20",
        harm="One line on the channel takes from a foreign writer what keeps its lost rows from being stepped over.",
        edits=(
            Edit(
                "Reader.receive_frame",
                "                    progress.line(item, incarnation)\n",
                "                    named = 0 if senders.is_native(item.writer) else None\n"
                "                    progress.line(item, named if incarnation is None else incarnation)\n",
            ),
            Edit(
                "Reader._cut",
                "            if progress.native or ",
                "            if self.admission.senders.is_native(progress.writer) or ",
            ),
        ),
        checks=(
            HOSTILE_MESSAGES + "what_a_cut_message_held_of_a_foreign_writer_is_not_stepped_over",
            CORE_TRUST + "a_stray_name_makes_no_native_writer_of_a_foreign_one",
            CORE_TRUST + "a_stray_name_does_not_hide_that_a_foreign_writer_began_anew",
        ),
    ),
    Mutant(
        name="an-incarnation-once-said-hides-a-foreign-writer-that-began-anew",
        rule="R14",
        harm="After one stray line all rows of a foreign writer that restarts are dropped as duplicates, for good.",
        edits=(
            Edit(
                "Following._step_back",
                "not native and (self.incarnation is None or stream.foreign_writers)\n",
                "not native and self.incarnation is None\n",
            ),
        ),
        checks=(CORE_TRUST + "a_stray_name_does_not_hide_that_a_foreign_writer_began_anew",),
    ),
    Mutant(
        name="pages-of-foreign-writers-name-an-incarnation",
        rule="9.25",
        harm="After one stray line every page of a stream of the reference system is refused: stale for good.",
        edits=(
            Edit(
                "Following.page",
                "        lives = self.stream.resettable and not self.stream.foreign_writers\n",
                "        lives = self.stream.resettable\n",
            ),
        ),
        checks=(CORE_TRUST + "pages_of_a_foreign_writer_count_whatever_incarnation_was_said",),
    ),
    Mutant(
        name="tokens-of-before-are-kept-of-a-native-writer",
        rule="3",
        harm="Rows that a native writer repeats are logged as late ones that nobody gets.",
        edits=(
            Edit(
                "ReceivedRows._take_in",
                "        if self.native:\n            self._recent = None\n        elif tokens:\n",
                "        if tokens and not self.native:\n",
            ),
        ),
        checks=(LATE_ROWS + "what_a_native_writer_repeats_is_not_late_though_it_was_first_heard_of_as_any",),
    ),
    Mutant(
        name="each-loss-waits-by-itself",
        rule="9.20",
        harm="While a handler hangs, or its queue is full, every frame of a stream in memory costs memory for good.",
        edits=(Edit("DeliveryQueue.notice", "            notice = self._joined(notice)\n", "            pass\n"),),
        checks=(READER + "losses_while_a_handler_hangs_are_one_notice",),
    ),
    Mutant(
        name="a-step-between-two-losses-keeps-them-apart",
        rule="9.20",
        harm="While a handler hangs, each loss with a step without rows behind it costs memory for good.",
        edits=(
            Edit(
                "DeliveryQueue._joined",
                "        if entries and isinstance(before := entries[-1], Missed):\n",
                "        if step is None and entries and isinstance(before := entries[-1], Missed):\n",
            ),
        ),
        checks=(READER + "losses_while_a_handler_hangs_are_one_notice[gaps and steps in turns]",),
    ),
    Mutant(
        name="announcements-of-many-streams-are-cut",
        rule="9.20",
        harm="Streams behind the bound of a message are never announced: the loss of their last frame is never found.",
        edits=(
            Edit(
                "Announcements.add",
                "roll.room >= chain.line_bytes and len(roll.chains) < self._settings.message_items - OPENING_ITEMS",
                "roll.room >= chain.line_bytes",
            ),
        ),
        checks=(HOSTILE_MESSAGES + "many_streams_are_announced_in_messages_that_pass",),
    ),
    Mutant(
        name="a-frame-has-more-heads-than-readers-take",
        rule="9.20",
        harm="Frames of rows between facts too large are cut by every reader, which fetches what was sent.",
        edits=(Edit("Chain.take", "                    draft.heads_left -= 1\n", ""),),
        checks=(HOSTILE_MESSAGES + "facts_between_facts_too_large_make_frames_that_pass",),
    ),
    Mutant(
        name="names-of-any-length",
        rule="9.20",
        harm="10,000 names of 1 MiB from the wire take 10 GiB, and are saved by durable readers.",
        edits=(
            Edit(
                "_refuse_text", "    if len(value) > NAME_BYTES or len(value.encode()) > NAME_BYTES:", "    if False:"
            ),
            Edit("_RUN_HEAD", '([!-~]{1,255}) ([!-~]{1,255}) ")', '([!-~]+) ([!-~]+) ")'),
        ),
        checks=(NAMES + "a_line_with_a_bad_name_is_malformed",),
    ),
    Mutant(
        name="names-with-control-characters",
        rule="9.20",
        harm="A NUL in the name of a writer stops all saving of a durable reader on PostgreSQL.",
        edits=(
            Edit(
                "_refuse_text",
                '    return "holds a control character" if _CONTROL.search(value) else None',
                "    return None",
            ),
        ),
        checks=(
            NAMES + "a_line_with_a_bad_name_is_malformed",
            NAMES + "a_command_with_a_bad_name_cannot_be_made",
        ),
    ),
    Mutant(
        name="each-replicate-is-answered",
        rule="2",
        harm="Each line REPLICATE costs the announcements of all writers, 30 times its bytes.",
        edits=(Edit("Announcements.request", "now >= self._answer_from and not", "not"),),
        checks=(REPLICATE_RATE + "a_flood_costs_four_announcements_in_a_second",),
    ),
    Mutant(
        name="a-restart-of-all-processes-is-answered-ten-times-a-second",
        rule="2",
        harm="A thousand processes that restart together are sent all announcements of all writers ten times a second.",
        edits=(
            Edit(
                "Announcements._begin",
                "            self._interval = min(2 * interval, max(settings.heartbeat, settings.answer_interval))\n",
                "            self._interval = interval\n",
            ),
        ),
        checks=(
            REPLICATE_RATE + "each_answer_doubles_the_time_to_the_next_up_to_a_heartbeat_and_a_pause_sets_it_back",
        ),
    ),
    Mutant(
        name="beats-keep-answers-rare",
        rule="2",
        harm="After a restart of all processes who starts next waits for a heartbeat, for as long as the writers live.",
        edits=(
            Edit(
                "Announcements._begin",
                "            self._answer_from = max(self._answer_from, now + settings.answer_interval)\n",
                "            self._answer_from = max(self._answer_from, now + settings.answer_interval)\n"
                "            self._calm_from = now + 2 * self._interval\n",
            ),
        ),
        checks=(REPLICATE_RATE + "beats_keep_no_interval_up",),
    ),
    Mutant(
        name="a-replicate-too-soon-is-forgotten",
        rule="2",
        harm="A reader that starts a moment after another waits for the next beat, or for ever where that is lost.",
        edits=(Edit("Announcements.request", "            self._waits = True\n", "            pass\n"),),
        checks=(REPLICATE_RATE + "the_ones_that_come_too_soon_get_one_answer_together_later",),
    ),
    Mutant(
        name="each-of-many-answers-at-once",
        rule="2",
        harm="One process that starts wakes all others once for each writer.",
        edits=(Edit("Announcements._answers_with_beats", "self.writers > FEW", "False"),),
        checks=(REPLICATE_RATE + "one_of_many_to_whom_nothing_happens_answers_with_its_beat",),
    ),
    Mutant(
        name="a-timer-answers-for-one-of-many",
        rule="2",
        harm="One process that starts wakes all others once for each writer.",
        edits=(Edit("Announcements.next_answer", "self._waits and not self._answers_with_beats", "self._waits"),),
        checks=(REPLICATE_RATE + "one_of_many_to_whom_nothing_happens_answers_with_its_beat",),
    ),
    Mutant(
        name="two-writers-answer-with-their-beats",
        rule="2",
        harm="In the smallest deployments a reader that comes back waits for a beat, and spares nobody anything.",
        edits=(Edit("Announcements._answers_with_beats", "self.writers > FEW", "self.writers > 0"),),
        checks=(REPLICATE_RATE + "others_answer_at_once[one of two]",),
    ),
    Mutant(
        name="what-a-beat-is-storing-counts-as-stored",
        rule="2",
        harm="Who has read the table a moment before waits for a beat to hear of the rows.",
        edits=(Edit("Announcements._answers_with_beats", "self.quiet_beats > 1", "self.quiet_beats > 0"),),
        checks=(REPLICATE_RATE + "others_answer_at_once[its positions may not be stored yet]",),
    ),
    Mutant(
        name="who-has-just-published-answers-with-its-beat",
        rule="2",
        harm="Who joins behind a fact hears of it with the next beat, for the table does not tell of it yet.",
        edits=(Edit("Announcements.fact_published", "        self.quiet_beats = 0\n", ""),),
        checks=(REPLICATE_RATE + "who_has_published_a_fact_answers_at_once_for_two_beats",),
    ),
    Mutant(
        name="a-fact-goes-out-before-who-asked-was-answered",
        rule="2",
        harm="A process that has just started drops rows of a writer that it has not heard yet, until that one's beat.",
        edits=(Edit("Announcements.fact_published", "if self._waits and self._answers_with_beats:", "if False:"),),
        checks=(
            REPLICATE_RATE + "who_waits_for_the_beat_is_answered_before_the_next_fact",
            REPLICATE_RATE + "a_fact_behind_a_start_is_believed_at_once",
        ),
    ),
    Mutant(
        name="who-follows-others-answers-at-once",
        rule="2",
        harm="While one writer of a stream is at work all others answer whoever joins, one message each.",
        edits=(Edit("Writer.position_moved", "if chain.own > own:", "if True:"),),
        checks=(REPLICATE_RATE + "what_others_wrote_is_nothing_that_it_has_to_tell_at_once",),
    ),
    Mutant(
        name="streams-in-memory-are-told-of-with-the-beat",
        rule="2",
        harm="A reader of a stream that no table has waits for a beat before it takes in a row.",
        edits=(Edit("Announcements._answers_with_beats", " and not self._in_memory", ""),),
        checks=(REPLICATE_RATE + "a_stream_that_no_table_has_is_told_of_at_once",),
    ),
    Mutant(
        name="single-lines-answer-with-their-beat",
        rule="2",
        harm="A foreign reader, which has no table to begin from, waits for a beat when it starts.",
        edits=(Edit("Announcements._answers_with_beats", " and self.in_turns", ""),),
        checks=(REPLICATE_RATE + "a_writer_of_single_lines_answers_at_once",),
    ),
    Mutant(
        name="nobody-rests",
        rule="9.27",
        harm="A thousand writers with nothing to tell send half a million messages a second to one another.",
        edits=(Edit("Announcements.tick", "self.rests = hears and self._may_rest(now)", "self.rests = False"),),
        checks=(
            BEATS + "of_many_writers_at_rest_four_speak_at_each_beat",
            LINK_LIFE + "9_27_writers_at_rest_say_little_and_keep_their_links",
        ),
    ),
    Mutant(
        name="all-that-rest-speak-at-the-same-beat",
        rule="9.27",
        harm="Nobody is heard at fifteen beats of sixteen: readers ask all of them, at each beat.",
        edits=(Edit("Announcements._may_rest", "(turn + self.rank)", "turn"),),
        checks=(BEATS + "of_many_writers_at_rest_four_speak_at_each_beat",),
    ),
    Mutant(
        name="each-that-rests-counts-its-own-beats",
        rule="9.27",
        harm="The turns of writers that began at different times fall together, and at other beats nobody is heard.",
        edits=(Edit("Announcements._may_rest", "self.beats if self._moment is None else", "self.beats if True else"),),
        checks=(BEATS + "writers_that_rest_take_turns_by_the_clock_that_all_see",),
    ),
    Mutant(
        name="a-writer-rests-for-ever",
        rule="9.27",
        harm="Of a thousand writers each speaks every eight minutes: who has not heard one waits for as long.",
        edits=(Edit("turns_of", "min(REST, writers // SPEAKERS)", "writers // SPEAKERS"),),
        checks=(BEATS + "of_many_writers_at_rest_four_speak_at_each_beat",),
    ),
    Mutant(
        name="a-writer-rests-that-the-table-has-not",
        rule="9.27",
        harm="While the database is away nobody hears of a writer, and nothing else tells that it is alive.",
        edits=(Edit("Announcements._may_rest", " or not self.stored", ""),),
        checks=(BEATS + "a_writer_that_has_something_to_tell_does_not_rest[no table has it]",),
    ),
    Mutant(
        name="a-writer-rests-while-somebody-waits",
        rule="2",
        harm="Who comes back waits for half a minute to hear of what a writer wrote meanwhile.",
        edits=(Edit("Announcements._may_rest", " or self._awake", ""),),
        checks=(
            BEATS + "a_writer_that_has_something_to_tell_does_not_rest[somebody asks]",
            BEATS + "whom_somebody_asks_does_not_rest_for_a_round",
        ),
    ),
    Mutant(
        name="whom-somebody-asks-rests-again-at-once",
        rule="9.27",
        harm="A reader of a channel with few writers asks at each beat, and all answer with all their streams.",
        edits=(Edit("Announcements.request", "self._awake = turns_of(self.writers)", "self._awake = 1"),),
        checks=(BEATS + "whom_somebody_asks_does_not_rest_for_a_round",),
    ),
    Mutant(
        name="a-writer-that-was-asked-never-rests-again",
        rule="9.27",
        harm="From the first join on each writer speaks at each beat.",
        edits=(Edit("Announcements.tick", "max(0, self._awake - 1)", "self._awake"),),
        checks=(BEATS + "whom_somebody_asks_does_not_rest_for_a_round",),
    ),
    Mutant(
        name="a-writer-rests-behind-a-fact",
        rule="9.27",
        harm="The loss of the last message before a pause shows after half a minute, and not within a beat.",
        edits=(Edit("Announcements._may_rest", " or not self._answers_with_beats", ""),),
        checks=(
            BEATS + "a_writer_that_has_something_to_tell_does_not_rest[in memory]",
            BEATS + "a_writer_that_has_something_to_tell_does_not_rest[single lines]",
        ),
    ),
    Mutant(
        name="a-writer-rests-when-others-moved-it",
        rule="9.27",
        harm="A linear position that waits for a writer with nothing of its own to tell lags for half a minute.",
        edits=(
            Edit(
                "Announcements._may_rest",
                "not any(chain.moved for roll in self._rolls for chain in roll.chains)",
                "True",
            ),
        ),
        checks=(BEATS + "a_writer_that_has_something_to_tell_does_not_rest[others moved it]",),
    ),
    Mutant(
        name="who-rests-tells-of-fewer-streams",
        rule="9.27",
        harm="The loss of a message and of the announcement behind it shows up to sixteen times as late.",
        edits=(
            Edit("Announcements.tick", "self._settings.quiet_streams * self._unsaid", "self._settings.quiet_streams"),
        ),
        checks=(BEATS + "who_rests_tells_of_as_many_streams_as_if_it_did_not",),
    ),
    Mutant(
        name="a-writer-rests-that-hears-nobody",
        rule="9.21",
        harm="One whose others have no Redis gives its link up every five beats: it says too little to hear itself.",
        edits=(
            Edit(
                "Announcements.tick", "self.rests = hears and self._may_rest(now)", "self.rests = self._may_rest(now)"
            ),
        ),
        checks=(
            BEATS + "a_writer_that_has_something_to_tell_does_not_rest[it hears nobody]",
            LINK_LIFE + "9_21_a_writer_that_hears_nobody_speaks_itself_and_keeps_its_link",
        ),
    ),
    Mutant(
        name="a-relay-remembers-names-of-any-length",
        rule="9.20",
        harm="A TCP server keeps 1 MiB for each name, and that for each client that names no incarnation.",
        edits=(Edit("PlainView._remember", "        if max(map(len, key)) > NAME_BYTES or", "        if"),),
        checks=(DIRECT + "the_plain_view_remembers_nothing_that_is_too_long[POSITION_long]",),
    ),
    Mutant(
        name="a-relay-counts-names-and-not-their-bytes",
        rule="9.20",
        harm="A thousand clients that name no incarnation make a TCP server keep gigabytes of names.",
        edits=(
            Edit(
                "PlainView._remember",
                "            if self._bytes + size > SAID_BYTES:",
                "            if len(self.said) > 10_000:",
            ),
        ),
        checks=(DIRECT + "the_plain_view_remembers_no_more_than_so_many",),
    ),
    Mutant(
        name="who-is-ahead-of-another-process-goes-back-to-it",
        rule="9.12",
        harm="Of two processes under one reader's name one handles rows again that it has handled.",
        edits=(Edit("SavedPositions.reread", "known <= saved <= batch.after", "known == saved <= batch.after"),),
        checks=(SAVED_POSITIONS + "9_12_another_process_that_saved_less_moves_nobody_back",),
    ),
    Mutant(
        name="a-position-that-another-process-saved-is-the-handler-s-failure",
        rule="9.12",
        harm="Of two processes under one reader's name one stops at rows on which no handler failed.",
        edits=(Edit("SavedPositions.reread", "Reread.NOT_SAVED if saved == ", "Reread.NOT_SAVED if True or "),),
        checks=(FOUND + "[a-peer-s-position-fails-a-handler]",),
    ),
    Mutant(
        name="a-position-that-is-known-by-now-is-the-handler-s-failure",
        rule="9.12",
        harm="The same, where a timed save finds that position while the handler is at work.",
        edits=(Edit("SavedPositions.reread", "(known if expected is None else expected)", "known"),),
        checks=(SAVED_POSITIONS + "9_12_what_is_saved_decides",),
    ),
    Mutant(
        name="a-position-that-another-process-saved-counts-as-a-failure",
        rule="9.12",
        harm="Of two processes under one reader's name one stops at rows on which its handler failed less often.",
        edits=(Edit("BatchSaver.reload", "            context.retrying.over(key)\n", ""),),
        checks=("asyncio/test_effects.py::test_a_position_that_another_process_saved_is_no_failure_of_the_handler",),
    ),
    Mutant(
        name="rows-whose-position-another-process-moved-stay-in-hand",
        rule="9.12",
        harm="They are never handled, nor is what follows them.",
        edits=(
            Edit(
                "BatchSaver.reload",
                "            context.retrying.over(key)\n            core.put_back(*key)\n",
                "            context.retrying.over(key)\n",
            ),
        ),
        checks=(FOUND + "[a-peer-s-position-fails-a-handler]",),
    ),
    Mutant(
        name="a-beat-forgets-what-has-moved",
        rule="9.27",
        harm="The loss of a last frame is found when the stream's turn comes, not within a beat.",
        edits=(Edit("Roll.at_beat", "if chain.moved or chain.stream.resettable", "if chain.stream.resettable"),),
        checks=(BEATS + "a_stream_that_moved_is_announced_at_the_next_beat",),
    ),
    Mutant(
        name="streams-in-memory-wait-for-their-turn",
        rule="9.27",
        harm="Nobody can fetch what was lost of them, and caches go by their announcements: they miss at most beats.",
        edits=(Edit("Roll.at_beat", "if chain.moved or chain.stream.resettable", "if chain.moved"),),
        checks=(BEATS + "streams_in_memory_are_announced_at_every_beat",),
    ),
    Mutant(
        name="each-writer-beats-at-a-moment-of-its-own",
        rule="9.27",
        harm="In a deployment that is idle each writer wakes all processes by itself: they cost twice as much.",
        edits=(
            Edit(
                "Announcements.tick", "if self._moment is None else (self._moment - now) % period", "if True else 0.0"
            ),
        ),
        checks=(BEATS + "writers_beat_together_by_a_clock_that_all_see",),
    ),
    Mutant(
        name="a-timer-that-is-early-makes-two-beats-of-one",
        rule="9.27",
        harm="Timers are early now and then: each writer announces twice as often.",
        edits=(Edit("Announcements.tick", "(period if rest < period / 10 else 0)", "0"),),
        checks=(BEATS + "writers_beat_together_by_a_clock_that_all_see",),
    ),
    Mutant(
        name="all-writers-beat-together-however-many-they-are",
        rule="9.27",
        harm="Rows wait behind what a thousand writers say at one moment.",
        edits=(Edit("Announcements.join", "self.writers // TOGETHER + 1", "1"),),
        checks=(BEATS + "writers_of_a_large_deployment_beat_in_groups",),
    ),
    Mutant(
        name="the-same-streams-have-the-turn-for-ever",
        rule="9.27",
        harm="Where a frame and the announcement behind it are lost, a row is never missed.",
        edits=(Edit("Roll.at_beat", "        self.turn = (self.turn + count) % len(chains)\n", ""),),
        checks=(BEATS + "a_beat_announces_streams_in_which_nothing_happened_in_turns",),
    ),
    Mutant(
        name="what-was-dropped-has-not-moved",
        rule="9.27",
        harm="The loss of the line that says so is found when the stream's turn comes.",
        edits=(
            Edit(
                "Chain._end",
                "        self.moved = self.moved or stepped_over or end > self.composed\n",
                "        self.moved = self.moved or bool(draft.lines) and draft.lines[-1].startswith(b'RDATA')\n",
            ),
        ),
        checks=(BEATS + "rows_that_were_dropped_are_announced_at_the_next_beat",),
    ),
    Mutant(
        name="who-comes-back-announces-a-turn",
        rule="9.27",
        harm="Others wait many beats for positions that they cannot ask for: they did not see that it was away.",
        edits=(Edit("Announcements.start", "self.next_beat, self._all = now, True", "self.next_beat = now"),),
        checks=(BEATS + "all_streams_are_announced_to_whoever_asks_after_a_reconnect_and_at_the_end",),
    ),
    Mutant(
        name="the-last-announcement-is-a-turn",
        rule="9.27",
        harm="The final positions of most streams are told by the table alone, five beats later.",
        edits=(Edit("Announcements.farewell", "self._asked = self._all = self.last", "self._asked = self.last"),),
        checks=(BEATS + "all_streams_are_announced_to_whoever_asks_after_a_reconnect_and_at_the_end",),
    ),
    Mutant(
        name="a-replicate-behind-a-beat-is-answered-by-its-turn",
        rule="9.27",
        harm="Who has just joined waits for the turns of all streams.",
        edits=(
            Edit(
                "Announcements.request",
                "        if self._asked:\n            self._all = True\n",
                "        if self._asked:\n            pass\n",
            ),
        ),
        checks=(BEATS + "a_replicate_behind_a_beat_that_is_not_composed_is_answered_with_it",),
    ),
    Mutant(
        name="a-replicate-that-waited-for-a-beat-is-answered-by-its-turn",
        rule="9.27",
        harm="Who has just joined waits for the turns of all streams.",
        edits=(Edit("Announcements.tick", "self._all or self._waits or not", "self._all or not"),),
        checks=(BEATS + "a_replicate_that_waited_for_a_beat_is_answered_whole",),
    ),
    Mutant(
        name="a-turn-that-redis-held-up-is-lost",
        rule="9.27",
        harm="What moved before a beat that could not be published is announced when its turn comes.",
        edits=(
            Edit(
                "Announcements.tick",
                "                self._turns.update(*",
                "                self._turns = set().union(*",
            ),
        ),
        checks=(BEATS + "the_turns_of_a_beat_that_redis_held_up_are_not_lost",),
    ),
    Mutant(
        name="who-has-given-a-stream-up-is-asked-for-it",
        rule="9.27",
        harm="Every beat has all writers announce all their streams, for an answer that never comes.",
        edits=(Edit("Reader.unheard", "            and (registry is None or progress.key in registry)\n", ""),),
        checks=(BEATS + "who_will_not_tell_is_not_asked",),
    ),
    Mutant(
        name="who-has-told-is-asked-while-rows-are-fetched",
        rule="9.27",
        harm="A long catch-up has all writers announce all their streams at each of its reader's beats.",
        edits=(Edit("Reader.unheard", "not (progress.heard or progress.held)", "not progress.heard"),),
        checks=(BEATS + "who_has_told_while_rows_are_fetched_is_not_asked",),
    ),
    Mutant(
        name="with-msgspec-an-integer-may-have-more-than-64-bits",
        rule="1",
        harm="Of two readers of a stream one takes a row, and the other, without the extra, refuses it.",
        edits=(
            Edit("values_reader", "whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]", "whole = int"),
        ),
        checks=(STREAMS + "what_reads_rows_in_one_step_reads_them_as_the_plain_way_does[msgspec-0-4]",),
    ),
    Mutant(
        name="who-hears-nothing-leaves-quiet-streams-out",
        rule="9.27",
        harm="A reader that asked a writer of single lines, or one in threads, waits for the turn of each stream.",
        edits=(Edit("Announcements.tick", "self._waits or not self.in_turns", "self._waits"),),
        checks=(BEATS + "a_writer_that_hears_no_replicate_announces_all_streams_at_each_beat",),
    ),
)
