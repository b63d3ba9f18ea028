"""Known bugs: lines on the channel, and what they may cost. See mutants.py."""

from __future__ import annotations

from .mutant import Edit, Mutant

HOSTILE = "test_hostile_messages.py::test_"
NAMES = "test_names.py::test_"
SAVING = "test_saving_refused.py::test_"
DRIVER = "test_driver_errors.py::test_"
LIFE, RATE = "test_link_life.py::test_", "test_replicate_rate.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="items-of-a-message-are-not-bounded",
        rule="9.20",
        harm="A message of 2.6 MB of short lines stops every event loop for a minute.",
        edits=(Edit("_Room.take_items", "        if items > self.most_items:", "        if False:"),),
        checks=(HOSTILE + "items_are_bounded[unknown]",),
    ),
    Mutant(
        name="rows-of-a-message-are-not-bounded",
        rule="9.20",
        harm="16 MiB of rows of two bytes cost 14 times as much in memory.",
        edits=(
            Edit(
                "_parse_run", "    most, pieces, end = room.rows_left, [], at", "    most, pieces, end = 2**40, [], at"
            ),
        ),
        checks=(HOSTILE + "rows_are_bounded",),
    ),
    Mutant(
        name="a-long-command-is-one-item",
        rule="9.20",
        harm="Text of one wide character a line takes four times the message, and more with each command.",
        edits=(Edit("_parse_lines", "room.take_items(line, 1 + len(line) // ITEM_BYTES)", "room.take_items(line)"),),
        checks=(HOSTILE + "a_long_command_counts_for_more",),
    ),
    Mutant(
        name="a-command-of-any-length-is-decoded",
        rule="9.20",
        harm="One line of 16 MiB of JSON takes 600 MiB of memory.",
        edits=(Edit("_parse_lines", "            if size > COMMAND_BYTES:", "            if False:"),),
        checks=(HOSTILE + "a_long_command_counts_for_more",),
    ),
    Mutant(
        name="a-cut-message-says-nothing-of-foreign-writers",
        rule="9.20",
        harm="Rows of a foreign writer behind the bound of a message are stepped over by its next row.",
        edits=(Edit("Reader.receive_frame", "        if frame.cut:\n            self._cut()\n", ""),),
        checks=(HOSTILE + "what_a_cut_message_held_of_a_foreign_writer_is_not_stepped_over",),
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
        checks=(HOSTILE + "what_a_cut_message_held_of_a_foreign_writer_is_not_stepped_over",),
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
        checks=(HOSTILE + "a_message_without_a_line_of_a_stream_takes_nothing_from_foreign_writers",),
    ),
    Mutant(
        name="a-cut-message-ends-the-catch-up-of-who-is-not-heard",
        rule="9.20",
        harm="Rows of a predecessor of the own name are not fetched until the link is lost.",
        edits=(Edit("Reader._cut", "            if progress.heard or progress.held:\n", "            if True:\n"),),
        checks=(HOSTILE + "a_cut_message_does_not_end_the_catch_up_of_who_is_not_heard",),
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
        checks=(HOSTILE + "what_is_held_of_a_foreign_writer_is_not_joined_over_a_cut_message",),
    ),
    Mutant(
        name="a-stray-name-makes-a-native-writer",
        rule="9.20",
        harm="One line on the channel takes from a foreign writer what keeps its lost rows from being stepped over.",
        edits=(
            Edit(
                "Reader._line",
                "        progress.native = incarnation is not None\n",
                "        progress.native = self._speakers.native(progress.writer)\n",
            ),
            Edit(
                "Reader._cut",
                "            if progress.native or progress.state is State.STOPPED:\n",
                "            if self._speakers.native(progress.writer) or progress.state is State.STOPPED:\n",
            ),
        ),
        checks=(
            HOSTILE + "what_a_cut_message_held_of_a_foreign_writer_is_not_stepped_over",
            "test_core_trust.py::test_a_stray_name_makes_no_native_writer_of_a_foreign_one",
            "test_core_trust.py::test_a_stray_name_does_not_hide_that_a_foreign_writer_began_anew",
        ),
    ),
    Mutant(
        name="an-incarnation-once-said-hides-a-foreign-writer-that-began-anew",
        rule="R14",
        harm="After one stray line all rows of a foreign writer that restarts are dropped as duplicates, for good.",
        edits=(
            Edit(
                "Reader._step_back",
                "not native and (progress.incarnation is None or stream.foreign_writers)\n",
                "not native and progress.incarnation is None\n",
            ),
        ),
        checks=("test_core_trust.py::test_a_stray_name_does_not_hide_that_a_foreign_writer_began_anew",),
    ),
    Mutant(
        name="pages-of-foreign-writers-name-an-incarnation",
        rule="9.25",
        harm="After one stray line every page of a stream of the reference system is refused: stale for good.",
        edits=(
            Edit(
                "Reader.receive_page",
                "        lives = progress.stream.resettable and not progress.stream.foreign_writers\n",
                "        lives = progress.stream.resettable\n",
            ),
        ),
        checks=("test_core_trust.py::test_pages_of_a_foreign_writer_count_whatever_incarnation_was_said",),
    ),
    Mutant(
        name="tokens-of-before-are-kept-of-a-native-writer",
        rule="3",
        harm="Rows that a native writer repeats are logged as late ones that nobody gets.",
        edits=(
            Edit(
                "Reader._take_in",
                "        if progress.native:\n            progress.recent = None\n        elif tokens:\n",
                "        if tokens and not progress.native:\n",
            ),
        ),
        checks=(
            "test_late_rows.py::test_what_a_native_writer_repeats_is_not_late_though_it_was_first_heard_of_as_any",
        ),
    ),
    Mutant(
        name="each-loss-waits-by-itself",
        rule="9.20",
        harm="While a handler hangs, or its queue is full, every frame of a stream in memory costs memory for good.",
        edits=(Edit("DeliveryQueue.notice", "            notice = self._joined(notice)\n", "            pass\n"),),
        checks=("test_reader.py::test_losses_while_a_handler_hangs_are_one_notice",),
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
        checks=("test_reader.py::test_losses_while_a_handler_hangs_are_one_notice[gaps and steps in turns]",),
    ),
    Mutant(
        name="announcements-of-many-streams-are-cut",
        rule="9.20",
        harm="Streams behind the bound of a message are never announced: the loss of their last frame is never found.",
        edits=(
            Edit(
                "Writer.add_stream",
                "roll.room >= line_bytes and len(roll.chains) < self._settings.message_items - OPENING_ITEMS",
                "roll.room >= line_bytes",
            ),
        ),
        checks=(HOSTILE + "many_streams_are_announced_in_messages_that_pass",),
    ),
    Mutant(
        name="a-frame-has-more-heads-than-readers-take",
        rule="9.20",
        harm="Frames of rows between facts too large are cut by every reader, which fetches what was sent.",
        edits=(Edit("_Chain.take", "                    draft.heads_left -= 1\n", ""),),
        checks=(HOSTILE + "facts_between_facts_too_large_make_frames_that_pass",),
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
        checks=(NAMES + "a_line_with_a_bad_name_is_malformed", NAMES + "a_command_with_a_bad_name_cannot_be_made"),
    ),
    Mutant(
        name="silence-of-others-costs-the-link",
        rule="9.21",
        harm="One line NAME ghost 5, or a writer that closed, makes every other process reconnect every ten seconds.",
        edits=(
            Edit(
                "Bus._check_link",
                "        if now - self._heard_at > bound and self._asked_at > self._heard_at:\n",
                "        core = self._reading.core\n"
                "        if core.last_heard and len(core.silent(now)) == len(core.last_heard):\n",
            ),
        ),
        checks=(LIFE + "a_stray_name_makes_nobody_reconnect",),
    ),
    Mutant(
        name="nobody-asks-into-the-silence",
        rule="9.21",
        harm="A reader alone on its channel does not find out that its subscription is gone.",
        edits=(
            Edit(
                "Bus._check_link",
                "        elif now - self._heard_at > self.settings.heartbeat:\n            self._ask_for_positions()\n",
                "",
            ),
        ),
        checks=(LIFE + "an_idle_reader_finds_out_that_its_subscription_is_gone",),
    ),
    Mutant(
        name="what-is-not-published-counts-as-not-heard",
        rule="9.21",
        harm="A reader that may not publish reconnects every ten seconds while nobody writes.",
        edits=(
            Edit(
                "Bus._check_link",
                "now - self._heard_at > bound and self._asked_at > self._heard_at",
                "now - self._heard_at > bound",
            ),
        ),
        checks=(LIFE + "a_process_that_may_not_publish_keeps_its_link",),
    ),
    Mutant(
        name="a-question-that-its-asker-does-not-hear",
        rule="9.21",
        harm="A reader of a sub-channel alone reconnects every ten seconds while nobody writes.",
        edits=(
            Edit(
                "asyncio.bus.Bus.__init__",
                "dict.fromkeys((name, name if name in channels else channels[0]))",
                "(name,)",
            ),
        ),
        checks=(LIFE + "a_reader_of_a_sub_channel_hears_its_own_question",),
    ),
    Mutant(
        name="a-stray-name-is-looked-for-for-ever",
        rule="9.21",
        harm="One line NAME ghost 5 makes every reader ask the table each beat, until it is restarted.",
        edits=(Edit("SilentWriters.look", "            core.last_heard.pop(writer, None)\n", "            pass\n"),),
        checks=(LIFE + "a_name_in_no_table_is_forgotten_when_it_is_silent",),
    ),
    Mutant(
        name="a-writer-leaves-without-a-word",
        rule="9.21",
        harm="The loss of the last message of a writer without a table is never noticed if it closes after it.",
        edits=(Edit("asyncio.bus.Bus._close", "                self._writing.core.farewell()\n", ""),),
        checks=(LIFE + "a_lost_last_message_of_a_writer_that_closed_is_noticed",),
    ),
    Mutant(
        name="a-writer-of-threads-leaves-without-a-word",
        rule="9.21",
        harm="As with asyncio: the loss of its last message is never noticed.",
        edits=(
            Edit(
                "sync.writing.Writing.close",
                "            self._guarded(self.session, self.session.core.farewell)\n",
                "",
            ),
        ),
        checks=(LIFE + "a_closed_writer_of_threads_announces_its_final_position",),
    ),
    Mutant(
        name="a-writer-that-closes-keeps-its-name",
        rule="9.21",
        harm="Readers log a warning about each writer that closed in order, and linear positions wait for it.",
        edits=(
            Edit("Bus._stop_tasks", "within(timeout, self._writing.leave())", "within(timeout, self._writing.beat())"),
        ),
        checks=(
            "test_goodbye.py::test_nobody_warns_of_a_writer_that_closed[sqlite_url-asyncio-redis]",
            "test_goodbye.py::test_the_final_position_is_behind_what_others_were_given[sqlite_url-asyncio]",
        ),
    ),
    Mutant(
        name="a-writer-of-threads-that-closes-keeps-its-name",
        rule="9.21",
        harm="As with asyncio: it is found silent, with a warning, and linear positions wait for it.",
        edits=(
            Edit("sync.writing.Writing.close", "        self._try(self._leave)\n", "        self._try(self.beat)\n"),
        ),
        checks=(
            "test_goodbye.py::test_nobody_warns_of_a_writer_that_closed[sqlite_url-threads-redis]",
            "test_goodbye.py::test_the_final_position_is_behind_what_others_were_given[sqlite_url-threads]",
        ),
    ),
    Mutant(
        name="what-is-cached-outlives-a-writer-without-a-table",
        rule="9.21",
        harm="The last invalidation of a writer that crashed is lost: what it was about is returned for ever.",
        edits=(
            Edit("Caching._keep_asking", "in () if watched.heard is None else watched.heard.gone(clock()):", "in ():"),
        ),
        checks=("test_goodbye.py::test_nobody_warns_of_a_closed_writer_of_invalidations_in_memory",),
    ),
    Mutant(
        name="a-writer-leaves-while-a-fact-is-in-doubt",
        rule="9.21",
        harm="close() waits for the lock of a transaction that its own caller has to end, and gives up.",
        edits=(
            Edit("Ledger.unfinished", "        return bool(self._doubts) or any(", "        return any("),
            Edit("Ledger.unfinished", "one.open or one.asked for one in", "False for one in"),
        ),
        checks=(
            "test_goodbye.py::test_a_writer_with_a_fact_in_doubt_is_not_finished_by_itself[asyncio]",
            "test_goodbye.py::test_a_writer_with_a_fact_in_doubt_is_not_finished_by_itself[threads]",
        ),
    ),
    Mutant(
        name="each-replicate-is-answered",
        rule="2",
        harm="Each line REPLICATE costs the announcements of all writers, 30 times its bytes.",
        edits=(Edit("Writer.replicate_received", "        if now >= self._answer_from:\n", "        if True:\n"),),
        checks=(RATE + "a_flood_costs_ten_announcements_a_second",),
    ),
    Mutant(
        name="a-replicate-too-soon-is-forgotten",
        rule="2",
        harm="A reader that starts a moment after another waits for the next beat, or for ever where that is lost.",
        edits=(Edit("Writer.replicate_received", "            self._asked = True\n", "            pass\n"),),
        checks=(RATE + "the_ones_that_come_too_soon_get_one_answer_together_later",),
    ),
    Mutant(
        name="an-answer-that-waits-has-no-clock",
        rule="2",
        harm="A REPLICATE that comes too soon is answered by the next beat, seconds later.",
        edits=(
            Edit(
                "Bus._answer",
                "due := writing.core.next_answer) < math.inf",
                "due := writing.core.next_answer) < -math.inf",
            ),
        ),
        checks=(RATE + "one_that_waits_is_answered_though_nothing_else_happens",),
    ),
    Mutant(
        name="one-position-holds-up-all",
        rule="9.20",
        harm="One key that the database refuses stops all saving of a reader: at its restart all rows come again.",
        edits=(
            Edit(
                "Reading._save_together",
                "            for change in changes:  # find out for which of them it does not work\n"
                "                await self._save_together([change])\n",
                "            self._refuse_to_save(changes[0][:2], error)\n",
            ),
            Edit(
                "Reading._save_changes",
                "            [c for c in changes if c[:2] not in self.unsavable],\n"
                "            *([c] for c in changes if c[:2] in self.unsavable),\n",
                "            changes,\n",
            ),
        ),
        checks=(SAVING + "one_position_that_cannot_be_saved_holds_up_no_other",),
    ),
    Mutant(
        name="a-driver-s-error-leaves-the-store",
        rule="9.20",
        harm="close() raises psycopg.DataError, which an application that catches BusrepError does not expect.",
        edits=(Edit("by_state", '    return StatementRefused("PostgreSQL", error)\n', "    return error\n"),),
        checks=(SAVING + "only_busrep_s_errors_leave_a_store",),
    ),
    Mutant(
        name="sqlite3-s-error-leaves-the-store",
        rule="9.20",
        harm="What catches BusrepError does not expect it: a damaged file ends the process with a traceback.",
        edits=(Edit("sqlite.files.translated", "    return StatementRefused(where, error)\n", "    return error\n"),),
        checks=(
            DRIVER + "no_value_makes_a_driver_s_error_leave_a_store[sqlite-asyncio]",
            DRIVER + "a_file_that_is_damaged_full_or_read_only[threads]",
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
            Edit("postgres.store.DRIVER_ERRORS", "(psycopg.Error, UnicodeEncodeError)", "(psycopg.Error,)"),
        ),
        checks=(
            DRIVER + "no_value_makes_a_driver_s_error_leave_a_store[sqlite-threads]",
            DRIVER + "no_value_makes_a_driver_s_error_leave_a_store[postgres-asyncio]",
            DRIVER + "no_value_makes_a_driver_s_error_leave_a_store[postgres-threads]",
        ),
    ),
    Mutant(
        name="the-caller-s-own-error-is-wrapped",
        rule="9.20",
        harm="An application that expects sqlite3.IntegrityError of its own statement does not catch it.",
        edits=(
            Edit(
                "callers",
                "        raise (refused.reason if",
                "        raise refused if True else (refused.reason if",
            ),
        ),
        checks=(
            DRIVER + "the_caller_s_own_statement_raises_the_driver_s_error[sqlite-asyncio]",
            DRIVER + "the_caller_s_own_statement_raises_the_driver_s_error[sqlite-threads]",
        ),
    ),
    Mutant(
        name="a-limit-of-the-server-is-an-outage",
        rule="9.20",
        harm="A value too large for an index is tried again for ever, as if the server were away.",
        edits=(Edit("postgres.store.translated", "        lost = False\n", "        pass\n"),),
        checks=("test_sessions_ended.py::test_any_error_that_closes_the_connection_is_an_outage",),
    ),
    Mutant(
        name="a-write-waits-for-a-store-that-is-gone",
        rule="9.20",
        harm="RuntimeError leaves the API when a bus on SQLite is closed while a write waits for its turn.",
        edits=(
            Edit(
                "SqliteStore._write",
                "        self._role(0)\n        try:\n            await",
                "        thread, connection = self._role(0)\n        try:\n            await",
            ),
            Edit(
                "SqliteStore._write",
                "            thread, connection = self._role(0)  # only now: it may have been closed meanwhile\n",
                "",
            ),
        ),
        checks=(DRIVER + "a_store_that_is_closed_while_a_write_waits",),
    ),
    Mutant(
        name="a-start-is-not-checked",
        rule="9.20",
        harm="A reader that begins at a position beyond 64 bits tries for ever to register.",
        edits=(Edit("asyncio.reading.Reading.__init__", "        _check_start(start)\n", ""),),
        checks=(DRIVER + "a_start_that_no_store_can_keep_is_a_config_error[9223372036854775808]",),
    ),
    Mutant(
        name="a-relay-remembers-names-of-any-length",
        rule="9.20",
        harm="A TCP server keeps 1 MiB for each name, and that for each client that names no incarnation.",
        edits=(Edit("PlainView._remember", "        if max(map(len, key)) > NAME_BYTES or", "        if"),),
        checks=("test_direct.py::test_the_plain_view_remembers_nothing_that_is_too_long[POSITION_long]",),
    ),
    Mutant(
        name="a-relay-counts-names-and-not-their-bytes",
        rule="9.20",
        harm="A thousand clients that name no incarnation make a TCP server keep gigabytes of names.",
        edits=(
            Edit(
                "PlainView._remember",
                "            if self._bytes + size > SAID_BYTES:",
                "            if len(self._said) > 10_000:",
            ),
        ),
        checks=("test_direct.py::test_the_plain_view_remembers_no_more_than_so_many",),
    ),
    Mutant(
        name="a-relay-makes-a-list-of-the-lines",
        rule="9.20",
        harm="16 MiB of short lines cost a relay 300 MB.",
        edits=(
            Edit(
                "TcpServer._from_redis",
                "        if _has_line_over(settings.line_bytes, data):\n",
                '        if max(map(len, data.split(b"\\n"))) > settings.line_bytes:\n',
            ),
            Edit(
                "_has_line_over",
                "    start = 0\n    while len(data)",
                '    return max(map(len, data.split(b"\\n"))) > most\n    start = 0\n    while len(data)',
            ),
        ),
        checks=("test_tcp_relay.py::test_lines_are_measured_without_a_list_of_them",),
    ),
    Mutant(
        name="a-relay-shows-any-number-of-lines",
        rule="9.20",
        harm="One message of short lines costs a relay seconds for each client that names no incarnation.",
        edits=(Edit("Connection.hear", "        elif commands > (most :=", "        elif -commands > (most :="),),
        checks=(
            "test_tcp_relay.py::test_a_message_of_more_lines_than_anybody_takes_is_shown_to_nobody_who_cannot_tell",
        ),
        hangs=True,
    ),
    Mutant(
        name="presence-counts-devices-and-not-their-bytes",
        rule="9.20",
        harm="What strangers tell of users with long names costs each process that listens a gigabyte.",
        edits=(Edit("Presence._has_room", " + size > self._max_bytes:", " + size > 2**60:"),),
        checks=("test_presence.py::test_what_names_on_the_wire_cost_is_bounded",),
    ),
    Mutant(
        name="a-device-that-is-gone-takes-room",
        rule="9.20",
        harm="After some hours no process hears of new users on a busy one.",
        edits=(
            Edit(
                "_Process.remove", "        self.bytes -= devices.pop(device).size\n", "        devices.pop(device)\n"
            ),
        ),
        checks=("test_presence.py::test_what_names_on_the_wire_cost_is_bounded",),
    ),
    Mutant(
        name="commands-that-wait-are-counted-and-not-their-bytes",
        rule="9.20",
        harm="10,000 commands of 64 KiB wait for a Redis that is away: 650 MB.",
        edits=(Edit("asyncio.bus.Bus.send", " + len(line) > COMMAND_QUEUE_BYTES:", " + len(line) > 2**60:"),),
        checks=("test_presence.py::test_commands_that_wait_are_bounded_by_their_bytes",),
    ),
    Mutant(
        name="commands-that-were-published-take-room",
        rule="9.20",
        harm="After 16 MiB of presence a process tells nothing any more.",
        edits=(
            Edit(
                "Bus._publish_all",
                "                self._commands_bytes -= len(self._commands.popleft()[1])\n",
                "                self._commands.popleft()\n",
            ),
        ),
        checks=("test_presence.py::test_commands_that_wait_are_bounded_by_their_bytes",),
    ),
    Mutant(
        name="a-subscriber-is-cancelled-once",
        rule="9.21",
        harm="A driver swallows the cancellation: close() waits for ever, and the process holds on to its name.",
        edits=(
            Edit(
                "RedisLink.close",
                "            await stop([self._task], self._settings.shutdown_timeout)\n",
                "            self._task.cancel()\n            await asyncio.wait([self._task])\n",
            ),
        ),
        checks=(LIFE + "a_subscriber_that_swallows_a_cancellation_does_not_keep_a_bus_open",),
    ),
    Mutant(
        name="what-starts-while-a-bus-closes-goes-on",
        rule="9.5",
        harm="A bus that closes while it wins its name back wins it back again afterwards, from its successor.",
        edits=(
            Edit(
                "Bus._stop_tasks",
                "        await stop([*self._background, *self._tasks], timeout)\n"
                "        await stop([*self._background, *self._tasks], timeout)\n",
                "        await stop([*self._background, *self._tasks], timeout)\n",
            ),
        ),
        checks=(LIFE + "what_a_task_starts_while_it_is_stopped_is_stopped_too",),
    ),
)
