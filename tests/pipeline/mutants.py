"""Known bugs: pipeline/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import Edit, Mutant

ARCHIVE_OBJECTS = "pipeline/test_archive_objects.py::test_"
ARCHIVING = "pipeline/test_archiving.py::test_"
AUDIT = "pipeline/test_audit.py::test_"
AUDIT_READERS = "pipeline/test_audit_readers.py::test_"
BACKFILL = "pipeline/test_backfill.py::test_"
COLUMNS = "pipeline/test_columns.py::test_"
FOLLOWING = "pipeline/test_following.py::test_"
KINDS = "pipeline/test_kinds.py::test_"
LISTENING = "pipeline/test_listening.py::test_"
OPTIONS = "pipeline/test_options.py::test_"
PASSWORDS = "cli/test_passwords.py::test_"
PLANNING = "pipeline/test_planning.py::test_"
PRIVATE_FILES = "stores/test_private_files.py::test_"
READING = "pipeline/test_reading.py::test_"
REPLAY = "pipeline/test_replay.py::test_"
REPLAY_RANGES = "pipeline/test_replay_ranges.py::test_"
SECRETS = "pipeline/test_secrets.py::test_"
SESSION = "pipeline/test_session.py::test_"
SINK = "pipeline/test_sink.py::test_"
SINK_AGAIN = "pipeline/test_sink_again.py::test_"
SNAPSHOT = "pipeline/test_snapshot.py::test_"
STATS_LATENCY = "pipeline/test_stats_latency.py::test_"
STATS_PAGE = "pipeline/test_stats_page.py::test_"
WAITING = "pipeline/test_waiting.py::test_"
WORKERS = "pipeline/test_workers.py::test_"

# A writer is looked at again directly before it is finished.
SEEN_AGAIN = Edit(
    "WaitingRows._finish",
    "                if min(one.silent_for for one in now) <= self.lease:\n                    continue\n",
    "",
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="backfill-takes-an-archive-that-begins-later",
        rule="6",
        harm="Rows before the archive's beginning are read neither there nor in the table: they are never derived.",
        edits=(Edit("backfill_plan.of_archive", "if begins.get(writer, 0) <= one.after", "if 0 <= one.after"),),
        checks=(BACKFILL + "an_archive_that_begins_later_has_nothing_of_a_batch",),
    ),
    Mutant(
        name="backfill-tells-nobody-of-what-is-written",
        rule="9.6",
        harm="Killed between the last COMMIT and its announcement: no start of the job ever shows readers these facts.",
        edits=(Edit("backfilling.run", "        work.tell(done)\n", "        pass\n"),),
        checks=(BACKFILL + "killed_at_each_step[commit-after]",),
    ),
    Mutant(
        name="backfill-believes-sparks-order",
        rule="6",
        harm="Facts of one source writer are written out of its order, and nobody hears of it.",
        edits=(Edit("check_order", "        if first and first <= last:\n", "        if False:\n"),),
        checks=(BACKFILL + "rows_in_another_order_are_refused",),
    ),
    Mutant(
        name="backfill-begins-where-nobody-is",
        rule="6",
        harm="A misspelt writer in --start is passed over, and all rows of the one that was meant are written again.",
        edits=(Edit("backfill_plan.start_of", "sorted(found.keys() - positions.keys())", "sorted(set())"),),
        checks=(BACKFILL + "where_a_table_begins",),
    ),
    Mutant(
        name="snapshot-parts-of-any-size",
        rule="6",
        harm="Large rows make a part that no reader takes: the job says that all is well, and nobody can bootstrap.",
        edits=(Edit("PartFiles.add", " or self._bytes + size > PART_BYTES", ""),),
        checks=(SNAPSHOT + "parts_of_large_rows_are_small_enough_for_readers",),
    ),
    Mutant(
        name="equal-keys-of-two-spellings",
        rule="6",
        harm="A key that is gone lives on in the snapshot, because its last row has the names in another order.",
        edits=(Edit("same_key", "for name in sorted(value)}", "for name in value}"),),
        checks=(SNAPSHOT + "keys_that_are_json_are_the_same_when_they_are_equal",),
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
        checks=(SNAPSHOT + "two_jobs_in_one_directory",),
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
        checks=(SINK_AGAIN + "between_batches_nobody_waits_for_the_writer[sqlite]",),
    ),
    Mutant(
        name="a-claim-that-was-finished-before-its-end-ends-the-query",
        rule="9.5",
        harm="A query whose name is finished while it claims it, behind a slow COMMIT, fails as fenced.",
        edits=(
            Edit(
                "sink_commit._write",
                "            if again is not None and error.incarnation <= again:\n                raise\n",
                "            raise\n",
            ),
        ),
        checks=(SINK + "an_answer_that_does_not_come_to_a_claim_of_a_finished_name[sqlite]",),
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
        checks=(PLANNING + "the_oldest_facts_are_admitted_and_none_is_cut[1-4]",),
    ),
    Mutant(
        name="a-map-of-kafkas-offsets-is-taken-for-positions",
        rule="9",
        harm="A query that was one of Kafka's begins behind the row that its map names: a row less, and no error.",
        edits=(
            Edit(
                "options._positions",
                "    if given == name:\n",
                "    if given == name or found[given.lower()][0] == '{':\n",
            ),
            Edit("options._positions", "positions_of(found, name, default)", "positions_of(found, given, default)"),
        ),
        checks=(OPTIONS + "offsets_of_kafka_are_not_taken_for_positions[start]",),
    ),
    Mutant(
        name="a-table-of-sparks-catalog-has-options-of-its-own",
        rule="3",
        harm="CREATE TABLE fails over an option that nobody has given, and no error says what works in SQL.",
        edits=(Edit("options.found_in", 'if found and "provider" not in found:', "if True:"),),
        checks=(OPTIONS + "a_table_of_sparks_catalog_is_told_what_to_be_instead[made]",),
    ),
    Mutant(
        name="a-minimum-of-partitions-is-a-wish",
        rule="3",
        harm="A query that asks for 32 tasks on a cluster has the default's eight, and takes four times as long.",
        edits=(Edit("planning.partitions", "max(wanted, least)", "wanted"),),
        checks=(PLANNING + "there_are_as_many_partitions_as_are_asked_for_at_least",),
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
        checks=(READING + "a_floor_that_has_passed_is_seen_in_the_snapshot_of_the_rows[sqlite]",),
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
        checks=(READING + "another_log_is_not_read[sqlite]",),
    ),
    Mutant(
        name="spark-believes-any-announcement",
        rule="9.3",
        harm="What a writer says of a log that is gone moves the query's position over facts of the one that is read.",
        edits=(
            Edit(
                "Listener._hear",
                " or not self._senders.is_trusted(writer, self._epoch):\n",
                ":\n",
            ),
        ),
        checks=(LISTENING + "what_was_said_of_a_log_that_is_gone_does_not_count",),
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
        checks=(FOLLOWING + "available_now_ends_with_what_was_there",),
    ),
    Mutant(
        name="a-query-that-has-read-all-keeps-its-last-lag",
        rule="9",
        harm="The lag of a query at rest seems to be that of its last batch for ever, and the table is asked for it.",
        edits=(Edit("Follower._next", "        self._begun = self._left = ()\n", ""),),
        checks=(FOLLOWING + "the_lag_is_what_a_batch_finds_and_what_it_leaves",),
    ),
    Mutant(
        name="the-lag-counts-what-the-batch-reads",
        rule="9",
        harm="A query that keeps up seems to be a whole batch behind.",
        edits=(Edit("Follower._next", "ranges(end, available, {}).spans", "found.spans"),),
        checks=(FOLLOWING + "the_lag_is_what_a_batch_finds_and_what_it_leaves",),
    ),
    Mutant(
        name="a-listener-is-not-told-that-a-query-has-ended",
        rule="9",
        harm="A gauge goes on showing the lag of a query that is not there any more.",
        edits=(Edit("LagListener.onQueryTerminated", "self._tell_end(str(event.id))", "pass"),),
        checks=("pipeline/test_lag.py::test_the_listener_tells_each_lag_and_in_the_end_that_there_is_none",),
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
        checks=(FOLLOWING + "a_checkpoint_of_another_stream_is_told",),
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
        checks=(FOLLOWING + "a_table_that_is_older_than_the_query_is_an_error",),
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
        checks=(READING + "a_connection_that_is_lost_between_batches_is_an_error",),
    ),
    # -- sessions on Spark, their secrets, and the command ------------------------------------------------------------
    Mutant(
        name="a-master-among-the-settings-is-not-taken",
        rule="9",
        harm="A job that was to run on a cluster runs on this machine, without a word.",
        edits=(Edit("session._made", '    master = master or conf.get("spark.master")\n', ""),),
        checks=(SESSION + "where_the_master_comes_from",),
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
        checks=(SESSION + "a_session_that_was_there_is_not_ended_by_a_failure",),
    ),
    Mutant(
        name="a-password-parameter-stays-in-the-url",
        rule="9",
        harm="Plans, the UI and the log of events show the password of a store's URL.",
        edits=(Edit("secrets._parsed", '_SECRET_PARAMETER.sub("", query).rstrip("&")', 'query.rstrip("&")'),),
        checks=(
            SECRETS
            + "a_url_is_split[postgres://db/shop?password=p%26w&sslmode=require-postgres://db/shop?sslmode=require-p&w]",
        ),
    ),
    Mutant(
        name="a-redis-password-is-appended-to-that-of-the-url",
        rule="9",
        harm="Redis is given two passwords in one and refuses them, until somebody takes the old one out of the URL.",
        edits=(Edit("with_redis_password", "{user.partition(':')[0]}:{quote", "{user}:{quote"),),
        checks=(PASSWORDS + "a_file_replaces_the_password_of_the_url[redis://u:old@h:1/0-redis://u:{}@h:1/0]",),
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
            PASSWORDS
            + "only_the_password_of_redis_goes_before_that_of_the_environment[rediss://h?ssl_password=k-rediss://:new@h?ssl_password=k]",
        ),
    ),
    Mutant(
        name="a-password-file-that-all-may-read-is-taken",
        rule="9",
        harm="A password that others may have changed, or read, is used, where libpq would refuse it.",
        edits=(Edit("_from_pgpass", "mode.st_mode & (stat.S_IRWXG | stat.S_IRWXO)", "False"),),
        checks=(
            SECRETS + "a_pgpass_that_others_read_is_ignored[416]",
            SECRETS + "a_pgpass_that_others_read_is_ignored[388]",
        ),
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
        checks=(REPLAY_RANGES + "a_range_that_is_not_connected_to_what_is_there_is_refused",),
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
        checks=(REPLAY_RANGES + "a_writer_of_somebody_else_is_left_alone",),
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
        checks=(REPLAY + "a_commit_without_an_answer_is_looked_up[True]",),
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
        checks=(REPLAY_RANGES + "more_writers_than_can_be_open[sqlite]",),
    ),
    Mutant(
        name="a-replay-marks-the-first-fact-of-a-transaction",
        rule="6",
        harm="A replay that goes on writes the other facts of the last transaction again.",
        edits=(Edit("Target.write", "group[-1].token", "group[0].token"),),
        checks=(REPLAY + "facts_of_a_writer_share_a_transaction[sqlite]",),
    ),
    Mutant(
        name="a-replayed-fact-has-a-transaction-of-its-own",
        rule="6",
        harm="Facts of several rows are replayed at some hundred rows a second.",
        edits=(Edit("replay_pace.grouped", "        if held and (rows", "        if held or (rows"),),
        checks=(REPLAY + "facts_of_a_writer_share_a_transaction[sqlite]",),
    ),
    Mutant(
        name="a-replay-s-transactions-have-no-bound",
        rule="6",
        harm="A writer that is late by hours holds its claim, and SQLite's write lock, for as long as a chunk takes.",
        edits=(Edit("replay_pace.grouped", "(rows > GROUP_ROWS or size > GROUP_BYTES)", "False"),),
        checks=(REPLAY + "a_transaction_has_so_many_rows_and_bytes_and_whole_facts",),
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
        checks=(REPLAY + "rows_stay_as_they_are",),
    ),
    Mutant(
        name="a-saved-position-covers-what-was-saved-before",
        rule="6",
        harm="Latencies count facts again and again, and grow with the time that was listened.",
        edits=(Edit("stats.listen.latencies", "its[bisect_right(its, after) : bisect", "its[: bisect"),),
        checks=(STATS_LATENCY + "a_saved_position_covers_the_facts_up_to_it",),
    ),
    Mutant(
        name="names-of-writers-are-markup",
        rule="6",
        harm="A writer's name runs as a script in whose browser the report is opened.",
        edits=(
            Edit(
                "cell",
                '">{escape(clipped(text))}</td>',
                '">{clipped(text)}</td>',
            ),
        ),
        checks=(STATS_PAGE + "a_thousand_writers_with_names_from_elsewhere",),
    ),
    Mutant(
        name="names-in-charts-are-markup",
        rule="6",
        harm="A stream's name becomes a link, or other markup, in the report's charts.",
        edits=(Edit("markup", "return escape(text, quote=False)", "return text"),),
        checks=(STATS_PAGE + "texts_of_the_data_are_no_markup_in_a_chart",),
    ),
    Mutant(
        name="a-page-lets-the-library-send-data-away",
        rule="6",
        harm="The charts have a button that sends the rows' keys to plotly's servers.",
        edits=(Edit("CONFIG", '"showSendToCloud": False', '"showSendToCloud": True'),),
        checks=(STATS_PAGE + "the_page_is_complete_in_itself",),
    ),
    Mutant(
        name="a-page-may-load-from-hosts",
        rule="6",
        harm="What a library's update or a hole in the escaping loads is loaded: the page tells a host who reads it.",
        edits=(Edit("stats.page.page", "default-src 'none'; script-src", "script-src"),),
        checks=(STATS_PAGE + "the_page_is_complete_in_itself",),
    ),
    Mutant(
        name="nearly-all-is-100-per-cent",
        rule="6",
        harm="The page says that all facts have one row, and the largest 40.",
        edits=(Edit("words.share", '    if found >= 99.95:\n        return ">99.9 %"\n', ""),),
        checks=(STATS_PAGE + "only_nothing_is_0_per_cent_and_only_all_is_100[9999-10000->99.9 %]",),
    ),
    Mutant(
        name="two-values-never-hide-each-other",
        rule="6",
        harm="Of two columns the small one cannot be seen, and nothing says that it is there.",
        edits=(Edit("hides", "HIDES * median_low(found)", "HIDES * sum(found) / len(found)"),),
        checks=(STATS_PAGE + "an_axis_is_logarithmic_where_one_value_hides_the_rest[values5-True]",),
    ),
    Mutant(
        name="an-upper-bound-of-rollbacks-passes-for-a-share",
        rule="6",
        harm="Rollbacks of one writer are shown as those of every writer of its stream.",
        edits=(Edit("_unused", "'≤ ' if", "'' if"),),
        checks=(STATS_PAGE + "a_share_of_rollbacks_is_a_bound_where_a_stream_has_several_writers",),
    ),
    Mutant(
        name="the-first-row-behind-passes-for-the-oldest",
        rule="6",
        harm="Rows that wait for the archive for a day are shown as seconds behind.",
        edits=(Edit("_lag_of", 'table.dialect.age("min(committed_at)")', 'table.dialect.age("max(committed_at)")'),),
        checks=(WAITING + "how_far_an_archive_is_behind[sqlite]",),
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
        checks=(ARCHIVING + "a_checkpoint_that_stands_elsewhere_than_the_archive",),
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
        checks=(ARCHIVING + "two_jobs_with_checkpoints_of_their_own",),
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
            ARCHIVING + "a_manifest_that_is_there_already_is_ours",
            ARCHIVE_OBJECTS + "a_put_whose_answer_is_lost",
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
        checks=(ARCHIVING + "what_was_replaced_goes_although_a_newer_compaction_is_there",),
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
        checks=(ARCHIVING + "a_compaction_deletes_nothing_that_is_being_written",),
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
        checks=(ARCHIVE_OBJECTS + "a_compaction_is_no_change_of_a_delta_table",),
    ),
    Mutant(
        name="a-file-that-did-not-arrive-whole-counts",
        rule="6",
        harm="A file of which an object store has a part is named in a manifest, and the batch is done.",
        edits=(Edit("_Writing.close", "        if size != written:\n", "        if False:\n"),),
        checks=(ARCHIVING + "a_file_of_which_a_part_arrived",),
    ),
    Mutant(
        name="a-row-handled-late-passes-for-one-in-order",
        rule="6",
        harm="The audit does not find that a reader handled a span behind a later one.",
        edits=(Edit("Comparison._same", "if new and (tokens[0] <= reached or new < len(tokens)):", "if False:"),),
        checks=(AUDIT_READERS + "swapped_spans",),
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
        checks=(AUDIT_READERS + "the_last_span_is_lost_and_its_position_was_saved",),
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
        checks=(AUDIT_READERS + "spans_again_after_a_crash",),
    ),
    Mutant(
        name="a-foreign-epoch-is-an-older-one",
        rule="6",
        harm="Lines of another log among those of this one pass the audit.",
        edits=(Edit("HandledAudit._epochs", "one.last > first:", "False:"),),
        checks=(AUDIT_READERS + "a_foreign_epoch",),
    ),
    Mutant(
        name="pipeline-silent-about-waiting-rows",
        rule="9.5",
        harm="Committed rows of a writer that has died are archived by no job, and every report calls that well.",
        edits=(
            Edit(
                "TableWriter.is_silent",
                "return self.waiting_rows > 0 and self.silent_for > lease",
                "return False",
            ),
        ),
        checks=(WAITING + "a_dead_writers_rows_are_counted_and_warned_of_once",),
    ),
    Mutant(
        name="pipeline-finishes-living-writers",
        rule="9.5",
        harm="A job with --finish-silent fences a writer that has rows between a COMMIT and its next heartbeat.",
        edits=(
            Edit(
                "TableWriter.is_silent",
                "return self.waiting_rows > 0 and self.silent_for > lease",
                "return self.waiting_rows > 0",
            ),
            SEEN_AGAIN,
        ),
        checks=(WAITING + "finish_silent_finishes_the_dead_writer_alone",),
    ),
    Mutant(
        name="pipeline-finishes-a-writer-that-is-seen-again",
        rule="9.5",
        harm="A writer that was paused, and beats again before it is finished, is fenced all the same.",
        edits=(SEEN_AGAIN,),
        checks=(WAITING + "a_writer_that_is_seen_again_is_not_finished",),
    ),
    Mutant(
        name="pipeline-takes-one-streams-silence-for-death",
        rule="9.5",
        harm="A writer that has given up one of its streams counts as dead, and is fenced.",
        edits=(
            Edit(
                "table_writers",
                'seen = "(SELECT max(q.seen_at) FROM busrep_positions q WHERE q.writer = p.writer)"',
                'seen = "p.seen_at"',
            ),
        ),
        checks=(WAITING + "a_sign_of_life_in_any_stream_counts_for_all",),
    ),
    Mutant(
        name="audit-passes-waiting-rows",
        rule="9.5",
        harm="audit --max-behind says that an archive is identical which lacks rows of a dead writer for a year.",
        edits=(
            Edit(
                "audit_behind.behind",
                "_older(one.waiting_for, one.silent_for, most) if one.waiting_rows else None",
                "None",
            ),
        ),
        checks=(WAITING + "an_audit_tells_of_waiting_rows_and_max_behind_makes_them_wrong",),
    ),
    Mutant(
        name="audit-passes-an-archive-that-ends-early",
        rule="9.5",
        harm="An archive job that is dead for a year, or a writer that it never had, is no finding of the audit.",
        edits=(
            Edit("proven_and_not_archived", "if at < log.positions[writer]]", "if at < log.positions[writer] < 0]"),
        ),
        checks=(WAITING + "an_archive_that_ends_early_or_lacks_a_writer_is_wrong_with_max_behind",),
    ),
    Mutant(
        name="archive-ends-with-a-slow-worker",
        rule="3",
        harm="On a busy machine each archive job ends with 'Python worker failed to connect back'.",
        edits=(Edit("archiving._wait", "if ours is not None or not is_slow_worker(error):", "if True:"),),
        checks=(WORKERS + "a_query_whose_worker_was_slow_is_started_again",),
    ),
    Mutant(
        name="archive-starts-a-query-again-for-ever",
        rule="3",
        harm="A job whose workers never start goes on for ever, and says nothing but warnings.",
        edits=(
            Edit(
                "StartedQuery.failed_to_start",
                "found, self.starts = self.starts, self.starts + 1",
                "found = self.starts",
            ),
        ),
        checks=(WORKERS + "a_query_that_never_starts_is_an_error_of_that_name",),
    ),
    Mutant(
        name="spark-job-ends-with-a-slow-worker",
        rule="3",
        harm="On a busy machine an audit, a snapshot or a backfill ends although nothing is wrong with it.",
        edits=(Edit("with_restarts", "            if not is_slow_worker(error):", "            if True:"),),
        checks=(
            WORKERS + "work_is_done_again_while_workers_are_slow",
            WORKERS + "a_job_is_begun_again",
        ),
    ),
    Mutant(
        name="replay-in-memory-is-begun-again",
        rule="3",
        harm="A replay without a target's store sends the rows again that it has sent before a worker was slow.",
        edits=(Edit("replay.run", "if options.to_store is None:", "if False:"),),
        checks=(WORKERS + "a_replay_that_notes_nothing_is_not_begun_again",),
    ),
    Mutant(
        name="workers-compile-sparks-zip",
        rule="3",
        harm="Each Python process of Spark compiles pyspark anew, for three times as long, of the ten seconds it has.",
        edits=(
            Edit(
                "home.PARTS",
                'PARTS = ("bin", "conf", "data", "jars", "licenses", "sbin")',
                'PARTS = ("bin", "conf", "data", "jars", "licenses", "python", "sbin")',
            ),
        ),
        checks=(WORKERS + "a_home_without_the_zip_of_pyspark",),
    ),
    Mutant(
        name="converted-fields-arrive-in-quotes",
        rule="3",
        harm="A date or an amount is a text in quotes in Spark's columns: sums and joins are wrong.",
        edits=(
            Edit(
                "columns._field",
                "    if not kind.needs_converter or isinstance(field.converter, attrs.Converter):\n",
                "    if True:\n",
            ),
        ),
        checks=(COLUMNS + "a_field_with_a_converter_has_its_declared_type",),
    ),
    Mutant(
        name="the-sink-divides-an-amount-with-each-copy",
        rule="3",
        harm="A converter that makes an amount of cents is called with the amount: the copy has a hundredth of it.",
        edits=(Edit("Encoder._check_converted", "if made != value:", "if False:"),),
        checks=(KINDS + "what_the_class_would_read_otherwise_is_not_written",),
    ),
    Mutant(
        name="true-is-a-number-in-a-struct",
        rule="3",
        harm="A nested object that has true in place of a number arrives with 1 there, as if it were one.",
        edits=(
            Edit(
                "kinds.arrow_value",
                'if not isinstance(value, classes) or (isinstance(value, bool) and kind.name in ("int", "float")):',
                "if not isinstance(value, classes):",
            ),
        ),
        checks=(KINDS + 'a_value_that_does_not_fit_is_told[[["a","2026-05-11",true]]-floor: int is needed, not bool]',),
    ),
    Mutant(
        name="nan-in-an-object-is-written-as-null",
        rule="3",
        harm="A number that JSON does not have arrives as null, deep in a row, and nobody is told.",
        edits=(
            Edit(
                "fields._finite",
                "return all(_finite(getattr(value, field.name)) for",
                "return True or all(_finite(getattr(value, field.name)) for",
            ),
        ),
        checks=(KINDS + "a_struct_is_an_object_in_a_row",),
    ),
    Mutant(
        name="a-tombstone-of-an-enum-is-a-text",
        rule="9",
        harm="The quotes that its JSON has are part of the text: no row has it, and all keys that are gone live on.",
        edits=(Edit("snapshot_tasks._value", " and field.converter is None", ""),),
        checks=(SNAPSHOT + 'a_tombstone_that_no_row_has_is_refused[state=gone-"gone" with the quotes]',),
    ),
    Mutant(
        name="converted-texts-arrive-in-quotes",
        rule="3",
        harm="A text that has a converter arrives with the quotes and escapes of JSON.",
        edits=(
            Edit(
                "_converted",
                "value if value is None or type(value) is str else orjson.dumps(value).decode() for value in values",
                "None if value is None else orjson.dumps(value).decode() for value in values",
            ),
        ),
        checks=(COLUMNS + "a_field_with_a_converter_has_its_declared_type",),
    ),
    Mutant(
        name="sessions-leave-sparks-zip-to-their-workers",
        rule="3",
        harm="Each Python process of Spark compiles pyspark anew, for three times as long, of the ten seconds it has.",
        edits=(Edit("session._made", 'variables["SPARK_HOME"] = str(home)', "pass"),),
        checks=(SESSION + "sparks_own_copy_of_pyspark_is_left_out",),
    ),
    Mutant(
        name="pyarrow-makes-the-parts-of-an-archive",
        rule="4",
        harm="Every user of the machine can read the rows of the archive, where its folder was there before.",
        edits=(Edit("Root.create", "                create_file(self.path(name))\n", ""),),
        checks=(PRIVATE_FILES + "the_files_of_an_archive[umask-022]",),
    ),
    # -- the sink of Spark ---------------------------------------------------------------------------------------------
    Mutant(
        name="staged-rows-are-not-counted",
        rule="9.1",
        harm="A crash of the server empties the staging table: the batch counts as written, without rows.",
        edits=(
            Edit(
                "staging._insert",
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
                "staged_rows._in_sqlite",
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
        checks=(SINK_AGAIN + "a_database_that_knows_nothing_of_the_batches_before[sqlite-named0]",),
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
        checks=(SINK_AGAIN + "a_checkpoint_older_than_the_database[sqlite]",),
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
)
