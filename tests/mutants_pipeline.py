"""Known bugs: the pipeline on Spark. See mutants.py."""

from __future__ import annotations

from .mutant import Edit, Mutant

ROWS, WORKERS, CHECKS = (f"test_spark_{name}.py::test_" for name in ("waiting", "workers", "checks"))

# A writer is looked at again directly before it is finished.
SEEN_AGAIN = Edit(
    "WaitingRows._finish",
    "                if min(one.silent_for for one in now) <= self.lease:\n                    continue\n",
    "",
)

MUTANTS: tuple[Mutant, ...] = (
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
        checks=(f"{ROWS}a_dead_writers_rows_are_counted_and_warned_of_once",),
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
        checks=(f"{ROWS}finish_silent_finishes_the_dead_writer_alone",),
    ),
    Mutant(
        name="pipeline-finishes-a-writer-that-is-seen-again",
        rule="9.5",
        harm="A writer that was paused, and beats again before it is finished, is fenced all the same.",
        edits=(SEEN_AGAIN,),
        checks=(f"{ROWS}a_writer_that_is_seen_again_is_not_finished",),
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
        checks=(f"{ROWS}a_sign_of_life_in_any_stream_counts_for_all",),
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
        checks=(f"{ROWS}an_audit_tells_of_waiting_rows_and_max_behind_makes_them_wrong",),
    ),
    Mutant(
        name="audit-passes-an-archive-that-ends-early",
        rule="9.5",
        harm="An archive job that is dead for a year, or a writer that it never had, is no finding of the audit.",
        edits=(
            Edit("proven_and_not_archived", "if at < log.positions[writer]]", "if at < log.positions[writer] < 0]"),
        ),
        checks=(f"{ROWS}an_archive_that_ends_early_or_lacks_a_writer_is_wrong_with_max_behind",),
    ),
    Mutant(
        name="archive-ends-with-a-slow-worker",
        rule="3",
        harm="On a busy machine each archive job ends with 'Python worker failed to connect back'.",
        edits=(Edit("archiving._wait", "if ours is not None or not is_slow_worker(error):", "if True:"),),
        checks=(f"{WORKERS}a_query_whose_worker_was_slow_is_started_again",),
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
        checks=(f"{WORKERS}a_query_that_never_starts_is_an_error_of_that_name",),
    ),
    Mutant(
        name="spark-job-ends-with-a-slow-worker",
        rule="3",
        harm="On a busy machine an audit, a snapshot or a backfill ends although nothing is wrong with it.",
        edits=(Edit("with_restarts", "            if not is_slow_worker(error):", "            if True:"),),
        checks=(f"{WORKERS}work_is_done_again_while_workers_are_slow", f"{WORKERS}a_job_is_begun_again"),
    ),
    Mutant(
        name="replay-in-memory-is-begun-again",
        rule="3",
        harm="A replay without a target's store sends the rows again that it has sent before a worker was slow.",
        edits=(Edit("replay.run", "if options.to_store is None:", "if False:"),),
        checks=(f"{WORKERS}a_replay_that_notes_nothing_is_not_begun_again",),
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
        checks=(f"{WORKERS}a_home_without_the_zip_of_pyspark",),
    ),
    Mutant(
        name="options-are-checked-after-spark-has-started",
        rule="3",
        harm="A misspelt stream is told after Spark has started: 47 s later, each time.",
        edits=(Edit("Job._work", '        getattr(self.module, "check", lambda _: None)(told)\n', ""),),
        checks=(f"{CHECKS}a_bad_option_is_found_without_spark", f"{CHECKS}a_process_with_a_bad_option_starts_no_java"),
    ),
    Mutant(
        name="converted-fields-arrive-in-quotes",
        rule="3",
        harm="A date or an amount is a text in quotes in Spark's columns: sums and joins are wrong.",
        edits=(
            Edit(
                "columns._field",
                "    made = next((name for one, name in _CONVERTED.items() if declared == [one]), None)\n",
                "    return Field(field.name, _JSON, *_default(field.default, _JSON))\n",
            ),
        ),
        checks=("test_spark_columns.py::test_a_field_with_a_converter_has_its_declared_type",),
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
        checks=("test_spark_columns.py::test_a_field_with_a_converter_has_its_declared_type",),
    ),
    Mutant(
        name="pipeline-screen-hides-waiting-rows",
        rule="9.5",
        harm="Who reads what a job prints does not see that rows of a dead writer are in no archive.",
        edits=(Edit("Job.run", "for line in described(found):", "for line in ():"),),
        checks=("test_cli_pipeline.py::test_rows_that_wait_stand_below_each_report",),
    ),
    Mutant(
        name="sessions-leave-sparks-zip-to-their-workers",
        rule="3",
        harm="Each Python process of Spark compiles pyspark anew, for three times as long, of the ten seconds it has.",
        edits=(Edit("session._made", 'variables["SPARK_HOME"] = str(home)', "pass"),),
        checks=("test_spark_session.py::test_sparks_own_copy_of_pyspark_is_left_out",),
    ),
)
