"""What a backfill's tasks do: they call the user's function, and stage what it gives. They run on executors."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from busrep.errors import ConfigError, MissingExtra, RowError
from busrep.spark.options import stream_of
from busrep.spark.sink_options import SinkOptions
from busrep.spark.sink_rows import Encoder
from busrep.spark.staging_store import StagingPlace, open_staging_store
from busrep.stores.declared import NOT_THERE, named
from busrep.stores.dialect import backing_of
from busrep.streams import Registry, Stream

try:
    import pyarrow
    from pyspark import TaskContext
except ImportError as missing:
    raise MissingExtra("spark", "busrep on Spark") from missing

Function = Callable[[Any, str, str, int], Iterable[Any]]

# What is staged in one transaction, at least: however many rows the function gives, so many are in memory.
BATCH_ROWS = 10_000
# What a task gives: the name of its attempt, how many rows it staged, and the tokens that it had rows of.
RESULT = "attempt string, rows bigint, first bigint, last bigint"


@attrs.frozen
class Staging:
    """Where the rows of batch ``number`` are staged. Can be pickled; secrets are in no text of it."""

    options: SinkOptions
    query: str
    number: int

    def write(self, rows: Iterable[list[bytes]], part: int) -> tuple[str, int]:
        """Stage a task's rows, bit by bit; the name of its attempt, and how many. Raises RowError, Unavailable."""
        target = self.options.definition()
        place = StagingPlace(self.query, self.number, part, uuid.uuid4().hex)
        check = Encoder(target, generic=True) if backing_of(target).own else None
        count = 0
        with contextlib.ExitStack() as stack:
            stage = None
            for payloads in rows:
                if check is not None:  # an application's table does not take all that JSON can say
                    check.encode(pyarrow.RecordBatch.from_arrays([_texts(payloads)], ["row"]))
                if stage is None:
                    stage = open_staging_store(self.options.store, Registry([target])).stage(place)
                    stack.callback(stage.close)
                stage.add([("", payload) for payload in payloads])
                count += len(payloads)
        return place.attempt, count


def _texts(payloads: list[bytes]) -> Any:
    return pyarrow.array(payloads, pyarrow.binary()).cast(pyarrow.string())


@attrs.frozen
class Derived:
    """What makes rows: ``function`` is MODULE:FUNCTION, of rows of ``stream``, and its rows are of ``into``, as
    ``streams`` declares both. Can be pickled."""

    function: str
    stream: str
    streams: str | None
    into: str

    def load(self) -> Function:
        """The function. Raises ConfigError."""
        return function_of(self.function)

    def source(self) -> Stream[Any]:
        """Whose rows they are. Raises ConfigError."""
        return stream_of(self.streams, self.stream)

    def target(self) -> Stream[Any]:
        """Whose rows are made. Raises ConfigError."""
        return stream_of(self.streams, self.into)


def function_of(where: str) -> Function:
    """What MODULE:FUNCTION names. Raises ConfigError."""
    try:
        found = named(where)
    except NOT_THERE as error:
        raise ConfigError(
            f"--function is {where!r}: {error}. MODULE:FUNCTION is needed, of a module that the driver and the "
            "executors can import"
        ) from None
    if not callable(found):
        raise ConfigError(f"--function is {where!r}, which cannot be called")
    made: Function = found
    return made


def deriving(derived: Derived, staging: Staging) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A task: stages what its rows become, in their order, and gives `RESULT`."""

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        context: Any = TaskContext.get()
        seen = Seen()
        attempt, rows = staging.write(derived_rows(derived, seen.each(batches)), context.partitionId())
        columns = [pyarrow.array([attempt], pyarrow.string())]
        columns += [pyarrow.array([number], pyarrow.int64()) for number in (rows, seen.first, seen.last)]
        yield pyarrow.RecordBatch.from_arrays(columns, [field.split()[0] for field in RESULT.split(", ")])

    return write


@attrs.define
class Seen:
    """The first and the last token that a task has come to, 0 before any."""

    first: int = 0
    last: int = 0

    def each(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches. Raises RuntimeError when their rows are in another order than that of their tokens."""
        for batch in batches:
            if not batch.num_rows:
                continue
            tokens = batch.column("token").to_pylist()
            self.first = self.first or tokens[0]
            for token in tokens:
                if token < self.last:
                    raise RuntimeError(f"Spark gave token {token} behind {self.last}")
                self.last = token
            yield batch


def derived_rows(derived: Derived, batches: Iterable[Any]) -> Iterator[list[bytes]]:
    """The payloads of the rows that rows become, in their order, some at a time.

    Raises RowError for a row that does not fit its stream, and where the function raises.
    """
    function, source, target = derived.load(), derived.source(), derived.target()
    made: list[Any] = []
    origins: list[int] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        writers, tokens, texts = (batch.column(name).to_pylist() for name in ("writer", "token", "row"))
        rows = _decoded(source, tokens, [text.encode() for text in texts])
        for writer, token, row in zip(writers, tokens, rows, strict=True):
            for one in _called(derived, function, row, writer, token):
                made.append(one)
                origins.append(token)
                if len(made) >= BATCH_ROWS:
                    yield _encoded(derived, target, made, origins)
                    made, origins = [], []
    if made:
        yield _encoded(derived, target, made, origins)


def _decoded(source: Stream[Any], tokens: list[int], payloads: list[bytes]) -> list[Any]:
    try:
        return source.decode(payloads)
    except RowError:
        for token, payload in zip(tokens, payloads, strict=True):  # which one it is
            try:
                source.decode([payload])
            except RowError as error:
                raise RowError(source.name, f"token {token}", error.reason, error.row) from None
        raise


def _called(derived: Derived, function: Function, row: Any, writer: str, token: int) -> Iterator[Any]:
    try:
        found = function(row, derived.stream, writer, token)
        if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
            raise TypeError(f"it gave {type(found).__name__}: an iterable of rows is needed, an empty one for none")
        yield from found
    except Exception as error:
        reason = f"{derived.function} failed: {type(error).__name__}: {error}"
        raise RowError(derived.stream, f"token {token}", reason, row) from error


def _encoded(derived: Derived, target: Stream[Any], made: list[Any], origins: list[int]) -> list[bytes]:
    try:
        return target.encode_all(made)
    except RowError:
        for one, token in zip(made, origins, strict=True):  # which one it is
            try:
                target.encode(one)
            except RowError as error:
                reason = f"{error.reason}; {derived.function} made it of {derived.stream!r}, token {token}"
                raise RowError(target.name, error.field, reason, one) from None
        raise
