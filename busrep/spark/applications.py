"""Tables of the application's, as executors read them: the store knows what their columns mean."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from busrep.errors import MissingExtra, Unavailable
from busrep.spark.planning import Span
from busrep.spark.table import dialect_of, sqlite_path
from busrep.stores.dialect import Backing
from busrep.stores.plans import Control, Row
from busrep.stores.snapshots import LogState, part_of, read_log
from busrep.stores.sqlite.files import connect, run

try:
    import pyarrow
except ImportError as missing:
    raise MissingExtra("spark", "busrep on Spark") from missing

if TYPE_CHECKING:
    from busrep.spark.databases import Columns, Question

# Rows of a batch of SQLite's: each is turned into JSON here, which costs far more than a batch by itself.
ROWS = 1_000


class ApplicationsSqlite:
    """SQLite, a table of the application's: its columns are of any type, and the store knows what they mean."""

    def __init__(self, question: Question, backing: Backing) -> None:
        self._path = sqlite_path(question.url) or ""
        self._backing, self._stream = backing, question.stream
        self.dialect = dialect_of(question.url)
        self._connection = connect(self._path, "rw")

    def begin(self) -> LogState:
        """See `busrep.spark.databases.Database`."""
        plan = read_log(self.dialect, self._stream, Control.SNAPSHOT)
        return run(plan, self._connection, self._path)

    def end(self) -> None:
        """See `busrep.spark.databases.Database`."""
        self._connection.execute("COMMIT")

    def facts(self, span: Span) -> Iterator[Columns]:
        """See `busrep.spark.databases.Database`."""
        question = part_of(self.dialect, self._backing, [span])
        numbering = Numbering()
        try:
            with contextlib.closing(self._connection.execute(question.text, question.params)) as cursor:
                while rows := cursor.fetchmany(ROWS):
                    some: list[Row] = [row[1:] for row in rows]
                    payloads = [payload.decode() for payload in self.dialect.payloads(self._backing, some)]
                    yield numbering.columns([row[0] for row in some], payloads)
        except sqlite3.Error as error:
            raise Unavailable(f"SQLite database {self._path}", error) from error

    def close(self) -> None:
        """See `busrep.spark.databases.Database`."""
        self._connection.close()


class Numbering:
    """The places of rows in their facts, where the table gives them in order only."""

    def __init__(self) -> None:
        self._token, self._place = 0, -1

    def columns(self, tokens: Sequence[int], rows: Sequence[str]) -> Columns:
        """The columns of the next rows."""
        places = []
        for token in tokens:
            self._place = self._place + 1 if token == self._token else 0
            self._token = token
            places.append(self._place)
        return {
            "token": pyarrow.array(tokens, pyarrow.int64()),
            "index": pyarrow.array(places, pyarrow.int32()),
            "row": pyarrow.array(rows, pyarrow.string()),
        }
