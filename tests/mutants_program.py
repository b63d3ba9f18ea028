"""Known bugs: what a program can get wrong. See mutants.py."""

from __future__ import annotations

from .mutant import Edit, Mutant

LATE = "test_fact_after_block.py::test_"
ROWS, STREAMS = "test_row_shapes.py::test_", "test_cli_streams.py::test_"
TYPING = "test_typing.py::test_"
WRONG = "test_config_errors.py::test_"
PUBLISHED = "test_cli_publish.py::test_"
IS_STREAM = '    if not isinstance(stream, Stream):\n        raise ConfigError(\n            f"a busrep'

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="an-ended-fact-takes-rows",
        rule="4",
        harm="A row that is added after the block is accepted, and lost.",
        edits=(Edit("FactBase._check_in_block", "if self._state is FactState.ENDED:", "if False:"),
               Edit("FactBase._check_in_block", "if self._state is not FactState.OPEN:", "if not self._opened:")),
        checks=(f"{LATE}asyncio[sqlite_url]", f"{LATE}threads[sqlite_url]"),
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
        checks=(f"{LATE}asyncio_while_the_block_ends",),
    ),
    Mutant(
        name="row-classes-are-not-compared",
        rule="3",
        harm="A class with another order of fields fills the wrong fields of each row, without a word.",
        edits=(Edit("schema.check", "    if streams:\n        stored =", "    if False:\n        stored ="),),
        checks=(
            f"{ROWS}open_refuses_another_class_and_takes_a_rolling_upgrade[sqlite]",
            f"{ROWS}buses_of_both_runtimes_refuse_another_class[sqlite_url]",
        ),
    ),
    Mutant(
        name="a-writer-does-not-keep-its-fields",
        rule="3",
        harm="Two writers add different fields in the same place, and readers take one for the other.",
        edits=(Edit("claims.claim", "    yield from record_fields(dialect, backings)\n", ""),),
        checks=(f"{ROWS}a_writer_keeps_its_fields_before_its_first_row[sqlite]",),
    ),
    Mutant(
        name="db-init-forgets-the-fields",
        rule="3",
        harm="After 'db init --stream orders' nothing is known of the rows any more, and any class is taken.",
        edits=(Edit("fields_to_store", "known if fields is None else dump(", "None if fields is None else dump("),),
        checks=(f"{ROWS}fields_stay_when_tables_are_made_again[sqlite]",),
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
        checks=(f"{ROWS}what_fits_is_merged",),
    ),
    Mutant(
        name="the-last-streams-option-wins",
        rule="1",
        harm="'db init --streams a --streams b' makes nothing for a, whose writer then cannot start.",
        edits=(Edit("declared_streams", 'where = ",".join(places)', "where = places[-1]"),),
        checks=(f"{STREAMS}all_streams_are_taken[repeated]",),
    ),
    Mutant(
        name="sqlite-takes-a-misspelt-column-for-a-text",
        rule="1",
        harm="A misspelt column passes 'db init'; a reader gets the column's name as its value.",
        edits=(Edit("schema.check_columns", "    if not missing:\n        try:", "    if True:\n        try:"),),
        checks=(f"{STREAMS}a_misspelt_column_is_an_error_of_db_init[sqlite-wrong]",),
    ),
    Mutant(
        name="publish-does-not-look-at-rows",
        rule="3",
        harm="'busrep publish' commits a row that no reader can decode: each of them stops there.",
        edits=(Edit("RowForms.row", "        if fields is None:\n", "        if True:\n"),),
        checks=(f"{PUBLISHED}rows_are_checked_against_the_stored_fields",),
    ),
    Mutant(
        name="publish-writes-beside-the-streams-own-table",
        rule="3",
        harm="Rows of a stream with a table of its own lie in busrep's, where its readers do not look.",
        edits=(Edit("RowForms.stream", "if self.declared or table is not None:", "if self.declared:"),),
        checks=(f"{PUBLISHED}a_stream_with_a_table_of_its_own_has_to_be_declared",),
    ),
    Mutant(
        name="publish-encodes-rows-only-when-it-writes-them",
        rule="3",
        harm="A row that a converter makes NaN fails when rows before it are committed, and no line is named.",
        edits=(Edit("RowForms.row", "            stream.encode(row)  # a converter", "            # a converter"),),
        checks=(f"{PUBLISHED}what_has_no_form_in_json_is_found_before_anything_is_written[bad0]",),
    ),
    Mutant(
        name="input-that-fails-has-no-end",
        rule="4",
        harm="'busrep publish' waits for ever when its input cannot be read, and says nothing.",
        edits=(Edit("StandardInput._items", "            yield error\n", "            raise\n"),),
        checks=(f"{PUBLISHED}input_that_fails_ends_after_the_lines_before_it",),
        hangs=True,
    ),
    Mutant(
        name="a-fact-takes-any-row",
        rule="4",
        harm="mypy accepts fact.add() of a row of another class, which fails in production.",
        edits=(Edit("asyncio.bus.Bus.write", ") -> Fact[RowT]: ...", ") -> Fact[Any]: ..."),),
        checks=(f"{TYPING}mypy_finds_these_errors_and_no_others",),
    ),
    Mutant(
        name="a-batch-has-any-rows",
        rule="3",
        harm="mypy accepts a field that the rows of a batch do not have.",
        edits=(Edit("sync.bus.Bus.follow", "-> Iterator[Batch[RowT]]: ...", "-> Iterator[Batch[Any]]: ..."),),
        checks=(f"{TYPING}mypy_finds_these_errors_and_no_others",),
    ),
    Mutant(
        name="a-plans-own-error-drags-the-drivers-along",
        rule="1",
        harm="A ConfigError that says all is buried under two tracebacks of the driver.",
        edits=(
            Edit(
                "run_sync",
                "                problem = error\n            # Not while it is being handled here: it would be the "
                "context of all that the plan raises by itself.\n            try:\n"
                "                steps = plan.send(answers) if problem is None else plan.throw(problem)\n"
                "            finally:\n                problem = None  # its traceback leads to this frame\n",
                "                steps = plan.throw(error)\n"
                "            else:\n                steps = plan.send(answers)\n",
            ),
        ),
        checks=(f"{WRONG}an_error_that_a_plan_raises_itself_has_no_context",),
    ),
    Mutant(
        name="the-name-of-a-stream-passes-for-one",
        rule="1",
        harm="bus.write(\"orders\") fails with an AttributeError that says nothing of streams.",
        edits=(Edit("checked_stream", IS_STREAM, IS_STREAM.replace("not isinstance(stream, Stream)", "False")),),
        checks=(f"{WRONG}a_stream_is_needed_not_its_name",),
    ),
)  # fmt: skip
