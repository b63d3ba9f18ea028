"""Known bugs: sync/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import Edit, Mutant

EFFECTS = "asyncio/test_effects.py::test_"
GOODBYE = "asyncio/test_goodbye.py::test_"
JOINED = "stores/test_joined.py::test_"
LINK_LIFE = "links/test_link_life.py::test_"
ONE_LINE = "links/test_one_line.py::test_"
RACES = "sync/test_races.py::test_"
SOAK = "proof/test_soak.py::test_"
STORES = "stores/test_sync_stores.py::test_"
THREADS = "sync/test_bus.py::TestThreads::test_"
TYPING = "test_typing.py::test_"
WRITING = "sync/test_writing.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="threads-do-not-say-that-the-log-is-beside-the-positions",
        rule="9.12",
        harm="A process that comes late registers its reader in the log before a restore.",
        edits=(
            Edit(
                "ReadingBus.__init__",
                "store = there if options.reader_store is None else options.store",
                "store = options.store",
            ),
        ),
        checks=(THREADS + "9_12_the_store_is_told_whether_the_log_is_beside_the_positions",),
    ),
    Mutant(
        name="an-answered-commit-is-taken-back",
        rule="9.1",
        harm="A time limit strikes between COMMIT's answer and its booking: the fact is announced as none.",
        edits=(
            Edit(
                "BlockingFact._leaves_doubt",
                "        return isinstance(error, CommitUnknown) or not isinstance(error, BusrepError)\n",
                "        return isinstance(error, CommitUnknown)\n",
            ),
        ),
        checks=(RACES + "a_fact_interrupted_after_its_commit_is_never_announced_as_none",),
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
        checks=(SOAK + "a_writer_in_threads_does_not_stay_with_an_old_master",),
    ),
    Mutant(
        name="an-end-that-is-interrupted-before-it-begins-is-none",
        rule="9.1",
        harm="The fact stays open for as long as somebody holds it, and holds back all later ones of its process.",
        edits=(
            Edit(
                "BlockingFact.__exit__",
                """\
        except BaseException:
            if not self._booked and self._session is not None and writing.here(False):
                self._doubt(self._session)  # interrupted before it could begin to end
            raise
""",
                "",
            ),
        ),
        checks=(RACES + "a_fact_whose_end_is_interrupted_before_it_begins_holds_nothing_up[deployment]",),
    ),
    Mutant(
        name="in-threads-own-positions-of-the-log-before-count",
        rule="9.16",
        harm="A process that writes and reads saves its own positions in a restored log, and skips what they cover.",
        edits=(Edit("ReadingBus.__init__", "claimed(writing.session.epoch, ", "claimed(None, "),),
        checks=(RACES + "own_positions_of_the_log_before_are_not_saved_in_the_new_one",),
    ),
    Mutant(
        name="who-lost-its-name-reads-on-beside-it",
        rule="9",
        harm="A process that lost its name, and begins to read, takes all that its successor writes for its own: lost.",
        edits=(
            Edit(
                "BlockingLife._make_reading_bus",
                "self.writing if self.writing is not None and self.writing.lost is None else None",
                "self.writing",
            ),
            Edit(
                "BlockingLife._begin_reading",
                "            if self.writing is not None and self.writing.lost is not None:  # meanwhile\n"
                "                reading.disown()\n",
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
                "            self.reading.own.claimed(writing.session.epoch, writing.starts)\n",
                "            claim = writing.session.claim\n"
                "            starts = {} if claim is None else claim.starts\n"
                "            self.reading.own.claimed(writing.session.epoch, starts)\n",
            ),
        ),
        checks=(RACES + "facts_of_an_earlier_incarnation_are_own_facts",),
    ),
    Mutant(
        name="a-bus-that-others-are-opening-is-closed",
        rule="4",
        harm="Of several threads that write first, at the same time, all but one are told that the bus is closed.",
        edits=(
            Edit(
                "BlockingLife.ensure_open",
                '        if self._state in ("new", "opening"):\n',
                '        if self._state == "new":\n',
            ),
        ),
        checks=(WRITING + "threads_that_use_it_first_at_once_open_it_once",),
    ),
    Mutant(
        name="settle-publishes-only-what-it-asked-after-itself",
        rule="9.1",
        harm="bus.settle() returns although a fact that another thread asked after is not published yet.",
        edits=(
            Edit(
                "SharedWriter.settle",
                "        self.publishing.publish()  # another thread",
                "        # another thread",
            ),
        ),
        checks=(WRITING + "settle_publishes_what_another_thread_asked_after",),
    ),
    Mutant(
        name="who-asks-after-facts-is-told-that-the-name-is-lost",
        rule="9.5",
        harm="bus.settle() says 'restart this process' where its name was only finished, and is won back by itself.",
        edits=(
            Edit(
                "SharedWriter.settle",
                "            self.live()  # perhaps it was finished for its silence alone",
                "            raise  # perhaps it was finished for its silence alone",
            ),
        ),
        checks=(RACES + "who_asks_after_facts_is_told_that_the_name_is_lost_only_if_it_is[finished]",),
    ),
    Mutant(
        name="a-fenced-writer-in-threads-has-handled-its-successor-s-facts",
        rule="9.5",
        harm="wait_for of a fenced process in threads returns for facts of its successor that it has not handled.",
        edits=(
            Edit(
                "SharedWriter.is_successors",
                " or self.ask(lambda session: session.is_successors(stream, token))",
                "",
            ),
        ),
        checks=(RACES + "a_fenced_writer_waits_for_what_its_successor_wrote",),
    ),
    Mutant(
        name="rows-in-memory-alone-count-as-rolled-back",
        rule="9.1",
        harm="What was written to a stream in memory within the caller's transaction is lost; a cache stays stale.",
        edits=(Edit("fact.settle", "    if untold:\n", "    if False:\n"),),
        checks=(WRITING + "rows_in_memory_alone_are_published_with_the_caller_s_transaction",),
    ),
    Mutant(
        name="rows-in-memory-alone-count-as-committed",
        rule="9.1",
        harm="Rows that the caller rolled back are published.",
        edits=(
            Edit("PlannedStore.rolled_back", "== ROLLED_BACK", "== None"),
            Edit("JoinedSqliteTransaction.rolled_back", "        return not await", "        return False and await"),
        ),
        checks=(
            WRITING + "rows_in_memory_alone_are_published_with_the_caller_s_transaction[postgres_url-rollback]",
            WRITING + "rows_in_memory_alone_are_published_with_the_caller_s_transaction[sqlite_url-rollback]",
        ),
    ),
    Mutant(
        name="ids-that-never-came-are-asked-for-for-ever",
        rule="9.2",
        harm="A reservation fails, and a signal comes: no later fact of this process is ever published.",
        edits=(
            Edit(
                "LateIds.redeem",
                "        if one.ticket is None and not one.lent:\n",
                "        if (one.ticket is None and not one.lent) or not one.ids:\n",
            ),
        ),
        checks=(WRITING + "a_reservation_that_failed_is_given_up_whatever_comes",),
    ),
    Mutant(
        name="the-position-is-saved-behind-the-effects-of-a-thread",
        rule="9.12",
        harm="The same, with threads.",
        edits=(
            Edit(
                "sync.batch.exactly_once",
                "        save(effects.connection)\n        effects.commit()\n",
                "        effects.commit()\n        save(effects.connection)\n",
            ),
        ),
        checks=(EFFECTS + "a_commit_without_an_answer_is_looked_up",),
    ),
    Mutant(
        name="each-thread-that-asks-first-opens-a-store",
        rule="9.12",
        harm="Connections for batch.transaction() stay open after the bus was closed.",
        edits=(
            Edit("EffectsStore.transaction", "        with self._opening:", "        with contextlib.nullcontext():"),
        ),
        checks=(EFFECTS + "threads_that_ask_first_at_the_same_time_share_a_store",),
    ),
    Mutant(
        name="a-batch-has-any-rows",
        rule="3",
        harm="mypy accepts a field that the rows of a batch do not have.",
        edits=(
            Edit("BlockingBus.follow", "-> Iterator[BlockingBatch[RowT]]: ...", "-> Iterator[BlockingBatch[Any]]: ..."),
        ),
        checks=(TYPING + "mypy_finds_these_errors_and_no_others",),
    ),
    Mutant(
        name="threads-publish-whole-frames",
        rule="2",
        harm="The reference system takes a frame for its first line, and hears no row of a writer in threads.",
        edits=(
            Edit(
                "Publishing._publish_frames",
                "data) for frame in frames for data in frame.messages]",
                "frame.data) for frame in frames]",
            ),
        ),
        checks=(ONE_LINE + "whoever_reads_first_lines_alone_gets_every_row[threads]",),
    ),
    Mutant(
        name="a-writer-of-threads-leaves-without-a-word",
        rule="9.21",
        harm="As with asyncio: the loss of its last message is never noticed.",
        edits=(
            Edit(
                "Publishing.farewell",
                "            self._shared.ask(lambda session: session.core.farewell())\n",
                "",
            ),
        ),
        checks=(LINK_LIFE + "a_closed_writer_of_threads_announces_its_final_position",),
    ),
    Mutant(
        name="a-writer-of-threads-that-closes-keeps-its-name",
        rule="9.21",
        harm="As with asyncio: it is found silent, with a warning, and linear positions wait for it.",
        edits=(Edit("SharedWriter.close", "        attempt(self._leave)\n", "        attempt(self.beat)\n"),),
        checks=(
            GOODBYE + "nobody_warns_of_a_writer_that_closed[sqlite_url-threads-redis]",
            GOODBYE + "the_final_position_is_behind_what_others_were_given[sqlite_url-threads]",
        ),
    ),
    Mutant(
        name="in-threads-a-question-waits-for-its-answer-for-ever",
        rule="9.1",
        harm="A pooler whose server is gone: beats and settling hang, and the writer publishes nothing any more.",
        edits=(Edit("OwnConnection.wait", "within if timeout is None else timeout", "timeout"),),
        checks=(
            STORES + "postgres_a_link_with_nobody_at_its_other_end_is_given_up",
            WRITING + "an_outcome_that_is_not_told_holds_up_nobody_for_ever",
        ),
        hangs=True,
    ),
    Mutant(
        name="in-threads-commit-waits-for-its-answer-for-ever",
        rule="9.1",
        harm="The same at COMMIT: the thread that writes the fact hangs, and all later facts of its process with it.",
        edits=(
            Edit(
                "ServerTransaction._commit_in_time",
                "self._commit_checked(self.store.settings.fetch_timeout)",
                "self._commit_checked()",
            ),
        ),
        checks=(STORES + "postgres_a_link_with_nobody_at_its_other_end_is_given_up",),
        hangs=True,
    ),
    Mutant(
        name="who-gives-up-waiting-for-a-lock-leaves-a-session-that-waits",
        rule="9.1",
        harm="Each beat behind a locked row leaves one more session, until the server takes no connection any more.",
        edits=(Edit("OwnConnection.wait", "self.cancel_safe(timeout=CANCEL_TIMEOUT)", "pass"),),
        checks=(STORES + "postgres_who_gives_up_waiting_for_a_lock_leaves_no_session_that_waits",),
    ),
    Mutant(
        name="the-application-s-statements-have-busrep-s-deadline",
        rule="9.1",
        harm="A statement of the application's that takes longer than a question may is cut off, with its transaction.",
        edits=(
            Edit(
                "BlockingPostgresStore.run_plan",
                "        finally:\n            connection.within = None\n",
                "        finally:\n            pass\n",
            ),
        ),
        checks=(STORES + "postgres_the_application_s_statements_have_no_deadline",),
    ),
    Mutant(
        name="threads-ask-after-each-fact-in-doubt-at-once",
        rule="9.1",
        harm="A fact in the caller's transaction has the table asked while that is open, in vain.",
        edits=(
            Edit(
                "SharedWriter.look",
                "            time.sleep(SETTLE_FIRST)  # what comes meanwhile is asked after as well\n",
                "            pass\n",
            ),
        ),
        checks=(JOINED + "9_1_threads_ask_after_facts_in_doubt_at_a_pace",),
    ),
    Mutant(
        name="threads-ask-after-each-fact-of-a-transaction",
        rule="9.1",
        harm="A thousand facts in a transaction that is open have the table asked a thousand times, for all each.",
        edits=(
            Edit(
                "SharedWriter._ask_after_all",
                "{one.marker: one for one in session.doubts}.values()",
                "list(session.doubts)",
            ),
        ),
        checks=(JOINED + "9_1_threads_ask_after_facts_in_doubt_at_a_pace",),
    ),
    Mutant(
        name="in-threads-a-transaction-that-is-held-slows-down-the-others",
        rule="9.1",
        harm="Facts of transactions that have ended come up to a second late.",
        edits=(
            Edit("SharedWriter.look", "self._settle_pause if before == self._left else None", "self._settle_pause"),
        ),
        checks=(WRITING + "a_transaction_that_is_held_slows_down_no_other",),
    ),
    Mutant(
        name="facts-in-doubt-wait-for-the-beat",
        rule="9.1",
        harm="While somebody has a row of busrep_positions locked, facts on the caller's connection come late.",
        edits=(
            Edit("BlockingLife._begin_beats", '            Chore(writing.keep_beating, Bell(), "busrep-beat"),\n', ""),
            Edit(
                "SharedWriter.look",
                "        session = self.session\n",
                "        self.keep_beating()\n        session = self.session\n",
            ),
        ),
        checks=(WRITING + "a_beat_that_waits_for_a_row_holds_up_no_fact",),
    ),
    Mutant(
        name="garbage-in-bookkeeping-waits-for-who-settles",
        rule="9.1",
        harm="The garbage collector ends a fact while another thread settles: each waits for the other, for ever.",
        edits=(
            Edit(
                "SharedWriter.in_doubt",
                "if not self.beats and not self._cores.is_mine and self._end_own(doubt):",
                "if self._end_own(doubt) and not self.beats:",
            ),
        ),
        checks=(
            RACES + "a_fact_that_ends_in_the_middle_of_bookkeeping_waits_for_no_other_thread[True]",
            RACES + "a_fact_that_ends_in_the_middle_of_bookkeeping_waits_for_no_other_thread[False]",
        ),
        hangs=True,
    ),
    Mutant(
        name="facts-that-end-behind-close-are-left-to-its-threads",
        rule="9.1",
        harm="A fact that is interrupted when its bus is closed keeps its transaction, and with it the writer's name.",
        edits=(
            Edit(
                "SharedWriter.close",
                "until, self.beats = time.monotonic() + timeout, False",
                "until = time.monotonic() + timeout",
            ),
        ),
        checks=(WRITING + "a_fact_that_is_interrupted_when_the_bus_is_closed_lets_go_of_the_name",),
    ),
    Mutant(
        name="an-error-of-a-known-class-tears-nothing",
        rule="9.1",
        harm="A signal handler raises a ValueError in bookkeeping: an ID stays open, and holds up all behind it.",
        edits=(
            Edit(
                "SharedSession.guarded",
                "            except (SequenceWentBack, WriterFenced):",
                "            except Exception:",
            ),
        ),
        checks=(
            WRITING + "what_interrupts_bookkeeping_may_be_an_error_of_any_class[reserved-ValueError]",
            WRITING + "what_interrupts_bookkeeping_may_be_an_error_of_any_class[reserved-Unavailable]",
        ),
    ),
)
