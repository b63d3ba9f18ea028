"""Known bugs: cli/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import Edit, Mutant

CHECKS = "pipeline/test_checks.py::test_"
PASSWORDS = "cli/test_passwords.py::test_"
PIPELINE = "cli/test_pipeline.py::test_"
PUBLISH = "cli/test_publish.py::test_"
STREAMS = "cli/test_streams.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="a-password-on-spark-submits-command-line",
        rule="9",
        harm="The command line of Java has it, and Spark's UI and log of events show that.",
        edits=(Edit("check_secrets", "        seen = submitted() and ", "        seen = False and "),),
        checks=(PIPELINE + "a_password_in_arguments_of_spark_submit_is_refused",),
    ),
    Mutant(
        name="a-password-becomes-an-option-of-sparks",
        rule="9",
        harm="Started with a Redis URL that has one the job goes on until Spark's source refuses it, or shows it.",
        edits=(Edit("check_secrets", "(seen or told.shown)", "seen"),),
        checks=(PIPELINE + "a_password_that_would_become_an_option_of_sparks_is_refused",),
    ),
    Mutant(
        name="ctrl-c-in-a-call-into-java",
        rule="9",
        harm="The connection has half an answer in it: stopping Spark fails, with pages of traces and another status.",
        edits=(Edit("Interrupts._handle", "if not in_java(frame) or ", "if True or "),),
        checks=(PIPELINE + "ctrl_c_waits_for_a_call_into_java",),
    ),
    Mutant(
        name="a-report-takes-the-place-of-a-device",
        rule="9",
        harm="--report /dev/null, of root, makes a file of it, for the whole machine.",
        edits=(Edit("_is_special", "    return file.exists() and not file.is_file()\n", "    return False\n"),),
        checks=(PIPELINE + "what_is_no_plain_file_is_written_into[pipe]",),
    ),
    Mutant(
        name="a-report-that-is-not-ok-ends-well",
        rule="9",
        harm="An audit that has found a loss exits with 0, and the script that asked for it goes on.",
        edits=(Edit("Job.run", "            raise click.exceptions.Exit(NOT_OK)\n", "            pass\n"),),
        checks=(PIPELINE + "reports_and_status[False]",),
    ),
    Mutant(
        name="options-are-checked-after-spark-has-started",
        rule="3",
        harm="A misspelt stream is told after Spark has started: 47 s later, each time.",
        edits=(Edit("Job._work", '        getattr(self.module, "check", lambda _: None)(told)\n', ""),),
        checks=(
            CHECKS + "a_bad_option_is_found_without_spark",
            CHECKS + "a_process_with_a_bad_option_starts_no_java",
        ),
    ),
    Mutant(
        name="pipeline-screen-hides-waiting-rows",
        rule="9.5",
        harm="Who reads what a job prints does not see that rows of a dead writer are in no archive.",
        edits=(Edit("Job.run", "for line in described(found):", "for line in ():"),),
        checks=(PIPELINE + "rows_that_wait_stand_below_each_report",),
    ),
    Mutant(
        name="the-last-streams-option-wins",
        rule="1",
        harm="'db init --streams a --streams b' makes nothing for a, whose writer then cannot start.",
        edits=(Edit("declared_streams", 'where = ",".join(places)', "where = places[-1]"),),
        checks=(STREAMS + "all_streams_are_taken[repeated]",),
    ),
    Mutant(
        name="publish-does-not-look-at-rows",
        rule="3",
        harm="'busrep publish' commits a row that no reader can decode: each of them stops there.",
        edits=(Edit("RowForms.row", "        if fields is None:\n", "        if True:\n"),),
        checks=(PUBLISH + "rows_are_checked_against_the_stored_fields",),
    ),
    Mutant(
        name="publish-writes-beside-the-streams-own-table",
        rule="3",
        harm="Rows of a stream with a table of its own lie in busrep's, where its readers do not look.",
        edits=(Edit("RowForms.stream", "if self.declared or table is not None:", "if self.declared:"),),
        checks=(PUBLISH + "a_stream_with_a_table_of_its_own_has_to_be_declared",),
    ),
    Mutant(
        name="publish-encodes-rows-only-when-it-writes-them",
        rule="3",
        harm="A row that a converter makes NaN fails when rows before it are committed, and no line is named.",
        edits=(Edit("RowForms.row", "            stream.encode(row)  # a converter", "            # a converter"),),
        checks=(PUBLISH + "what_has_no_form_in_json_is_found_before_anything_is_written[bad0]",),
    ),
    Mutant(
        name="the-last-line-needs-a-newline",
        rule="4",
        harm="'busrep publish' leaves out the last line of a file that does not end with a newline, and says nothing.",
        edits=(Edit("publish.batches", "            lines = [rest]\n", "            lines = []\n"),),
        checks=(PUBLISH + "lines_are_taken_as_they_come_and_counted",),
    ),
    Mutant(
        name="serve-takes-no-password-file",
        rule="2",
        harm="The password of Redis has to stand on the command line of a server, where all users see it.",
        edits=(
            Edit(
                "cli.serve.serve",
                '@common.redis_option(default=None, help="Relay this Redis\'s channel [default: stand alone].")\n',
                '@click.option("--redis", "redis_url", metavar="URL")\n',
            ),
        ),
        checks=(PASSWORDS + "the_password_of_redis_comes_from_a_file_or_the_environment[serve]",),
    ),
)
