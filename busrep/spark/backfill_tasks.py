"""What a backfill's tasks do: they call the user's function, and stage what it gives. They run on executors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from busrep.errors import BusrepError, ConfigError, MissingExtra, RowError
from busrep.spark.options import declared_stream
from busrep.spark.sink import StreamSink, Task
from busrep.spark.sink_options import SinkOptions
from busrep.stores.declared import NOT_THERE, named
from busrep.streams import Stream

try:
    import pyarrow
    from pyspark import TaskContext
except ImportError as missing:
    raise MissingExtra("spark", "busrep on Spark") from missing

Function = Callable[[Any, str, str, int], Iterable[Any]]

# What is staged in one transaction, at least: however many rows the function gives, so many are in memory.
BATCH_ROWS = 10_000
# Of the source's rows: derived facts are in its order, whichever task made them.
ORDER = ("token", "index")


class ChunkSink(StreamSink):
    """The sink of one batch, whose number is its own: not Spark's."""

    def __init__(self, options: SinkOptions, checkpoint: str, number: int, run: str) -> None:
        super().__init__(options, generic=True)
        self._numbered = (number, checkpoint, run)

    def _task(self) -> Task:
        context = TaskContext.get()
        return self.task(0 if context is None else context.partitionId())

    def task(self, part: int) -> Task:
        """A task of this batch."""
        return Task(part, *self._numbered)


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
        return Stream(self.stream) if self.streams is None else declared_stream(self.streams, self.stream)

    def target(self) -> Stream[Any]:
        """Whose rows are made. Raises ConfigError."""
        return Stream(self.into) if self.streams is None else declared_stream(self.streams, self.into)


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


def deriving(derived: Derived, sink: ChunkSink) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A task: stages what its rows become, and gives its attempt's name and how many rows that are."""

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        staged = sink.write(derived_rows(derived, batches))
        columns = [pyarrow.array([staged.attempt]), pyarrow.array([staged.rows], pyarrow.int64())]
        yield pyarrow.RecordBatch.from_arrays(columns, ["attempt", "rows"])

    return write


def derived_rows(derived: Derived, batches: Iterable[Any]) -> Iterator[Any]:
    """Batches of rows that rows become, as the sink takes them: ``row``, with the source's ``token`` and ``index``.

    Raises RowError for a row that does not fit its stream, and where the function raises.
    """
    function, source, target = derived.load(), derived.source(), derived.target()
    made: list[Any] = []
    places: list[tuple[int, int]] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        writers, tokens, indexes, texts = (
            batch.column(name).to_pylist() for name in ("writer", "token", "index", "row")
        )
        rows = _decoded(source, tokens, [text.encode() for text in texts])
        for writer, token, index, row in zip(writers, tokens, indexes, rows, strict=True):
            for one in _called(derived, function, row, writer, token):
                made.append(one)
                places.append((token, index))
                if len(made) >= BATCH_ROWS:
                    yield _batch(derived, target, made, places)
                    made, places = [], []
    if made:
        yield _batch(derived, target, made, places)


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
    except BusrepError:
        raise
    except Exception as error:
        reason = f"{derived.function} failed: {type(error).__name__}: {error}"
        raise RowError(derived.stream, f"token {token}", reason, row) from error


def _batch(derived: Derived, target: Stream[Any], made: list[Any], places: list[tuple[int, int]]) -> Any:
    try:
        payloads = target.encode_all(made)
    except RowError:
        for one, (token, _) in zip(made, places, strict=True):  # which one it is
            try:
                target.encode(one)
            except RowError as error:
                reason = f"{error.reason}; {derived.function} made it of {derived.stream!r}, token {token}"
                raise RowError(target.name, error.field, reason, one) from None
        raise
    tokens, indexes = zip(*places, strict=True)
    columns = [
        pyarrow.array([payload.decode() for payload in payloads], pyarrow.string()),
        pyarrow.array(tokens, pyarrow.int64()),
        pyarrow.array(indexes, pyarrow.int32()),
    ]
    return pyarrow.RecordBatch.from_arrays(columns, ["row", *ORDER])
