"""Streams: a name, the type of its rows, and where the rows are kept.

A row travels as a compact JSON array of its fields in the order of the class; row_types.py says how.

Schemas change by adding fields with defaults at the end: a reader drops the trailing fields it does not know
and fills missing ones with their defaults.
"""

from __future__ import annotations

import contextlib
import gc
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, cast

import attrs
import orjson

from busrep.core.fields import NAME_BYTES, json_bytes, refuse_name
from busrep.errors import ConfigError, RowError, UnknownStream
from busrep.row_types import Fields, MismatchError, RowSchema, plain_value

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    RowT = TypeVar("RowT", default=Any)  # without a row type
else:
    from typing import TypeVar

    RowT = TypeVar("RowT")

_SQL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*(\.[A-Za-z_][A-Za-z0-9_$]*)?")
# Stands between payloads that are decoded at once, and must be found between the rows: so ``[1],[2`` and
# ``3]`` are not taken for two rows. A number that no payload can know.
_MARK = secrets.randbelow(9 * 10**8) + 10**8
_MARK_BETWEEN = b",%d," % _MARK
# By whom the garbage collector is held off, while rows are made.
collector_held: set[object] = set()


@attrs.frozen
class Table:
    """The application's own table behind a stream.

    ``id`` and ``writer`` are its columns for the fact's ID and the writer's name, ``columns`` those of the
    row's fields (by default named as the fields), ``index`` the one that orders the rows of a fact; None
    means that a fact is one row. Names are plain SQL identifiers, ``name`` may have a schema in front.
    Errors: `ConfigError`.
    """

    name: str
    id: str = "id"
    writer: str = "writer"
    columns: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    index: str | None = None

    def __attrs_post_init__(self) -> None:
        columns = [self.id, self.writer, *self.columns, *([] if self.index is None else [self.index])]
        for column in [self.name, *columns]:
            if not (isinstance(column, str) and _SQL_NAME.fullmatch(column)):
                raise ConfigError(f"table {self.name!r}: {column!r} is not a plain SQL name")
        if any("." in column for column in columns) or len(set(columns)) < len(columns):
            raise ConfigError(f"table {self.name!r}: its columns {columns} must differ and have no dot")


class Stream(Generic[RowT]):
    """One stream: a name, the type of its rows, how it travels and where it is kept.

    ``row_type``: an attrs class; None: rows are any JSON value. ``channel``: suffix of the sub-channel it is
    published on, "" the main one. ``resettable``: kept in the writer's memory only, positions may go back.
    ``follows``: an idle writer announces the progress of others (W6: False for pure invalidations). ``negative``:
    IDs count down (G17). ``table``: the application's own table instead of the generic one. ``foreign_writers``:
    writers of another system write it too, which are in no registry of busrep's and never say an incarnation: their
    lines are believed (rule 9.18). Errors: `ConfigError`.
    """

    def __init__(
        self, name: str, row_type: type[RowT] | None = None, *, channel: str = "", resettable: bool = False,
        follows: bool = True, negative: bool = False, table: Table | None = None, foreign_writers: bool = False,
    ) -> None:  # fmt: skip
        if (reason := refuse_name(name)) is not None:
            raise ConfigError(
                f"stream name {name!r:.300}: one word of at most {NAME_BYTES} bytes is needed; it {reason}"
            )
        if channel and (reason := refuse_name(channel)) is not None:
            raise ConfigError(f"stream {name!r}: channel suffix {channel!r:.300} {reason}")
        if resettable and table is not None:
            raise ConfigError(f"stream {name!r}: a resettable stream lives in memory and has no table")
        self.name, self.row_type, self.channel = name, row_type, channel
        self.resettable, self.follows, self.negative = resettable, follows, negative
        self.foreign_writers = foreign_writers
        self._schema = None if row_type is None else RowSchema(name, row_type)
        self.table = table if table is None else self._with_columns(table)

    def _with_columns(self, table: Table) -> Table:
        names = () if self._schema is None else self._schema.names
        if not (table.columns or names):
            raise ConfigError(f"stream {self.name!r}: table {table.name!r} needs columns, or the stream a row type")
        if names and table.columns and len(names) != len(table.columns):
            raise ConfigError(f"stream {self.name!r}: {len(names)} fields, but {len(table.columns)} columns")
        return attrs.evolve(table, columns=table.columns or names)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"Stream({self.name!r})"

    @property
    def fields(self) -> Fields | None:
        """The fields of the row class, as a store keeps them; None without a row class."""
        return None if self._schema is None else self._schema.fields

    def encode(self, row: RowT) -> bytes:
        """The row as it travels. Raises RowError for a row of another class, or a value that does not fit."""
        if self._schema is None:
            return self._dump(row, row, None)
        if type(row) is not self.row_type:
            raise RowError(self.name, "row", f"{cast(Any, self.row_type).__name__} is needed", row)
        values = self._schema.values(row)
        for name, kind, value in zip(self._schema.names, self._schema.kinds, values, strict=True):
            if not kind.fits(value):
                raise RowError(self.name, name, f"{kind.text} is needed, not {type(value).__name__}", row)
        return self._dump(values, row, plain_value)

    def encode_all(self, rows: Sequence[RowT]) -> list[bytes]:
        """As ``encode``, of many rows: a third of the time where all fields are numbers and texts."""
        schema = self._schema
        payloads = schema.dump(rows) if schema is not None and schema.plain and rows else None
        return [self.encode(row) for row in rows] if payloads is None else payloads

    def _dump(self, value: object, row: object, default: Callable[[Any], Any] | None) -> bytes:
        try:
            return json_bytes(value, default)
        except ValueError as error:
            raise RowError(self.name, "row", str(error), row) from None

    def decode(self, payloads: Sequence[bytes]) -> list[RowT]:
        """The rows of payloads, all of them or RowError, which names the first bad row by its index, and the
        field."""
        if not payloads:
            return []
        collects, here = gc.isenabled(), object()
        try:
            if collects:
                collector_held.add(here)
            gc.disable()  # what is made here has no cycles: it would go through a frame's rows for each hundred of them
            for decode in (self._decode_typed, self._decode_joined):
                with contextlib.suppress(Exception):  # of converters and validators; the last look names the row
                    if (rows := decode(payloads)) is not None:
                        return rows
            return [self._decode_one(at, payload) for at, payload in enumerate(payloads)]
        finally:
            if collects:
                gc.enable()
                collector_held.discard(here)

    def _decode_typed(self, payloads: Sequence[bytes]) -> list[RowT] | None:
        return None if self._schema is None else self._schema.read(payloads)

    def _decode_joined(self, payloads: Sequence[bytes]) -> list[RowT] | None:
        values = orjson.loads(b"[" + _MARK_BETWEEN.join(payloads) + b"]")
        rows: list[Any] = values[::2]
        if len(values) != 2 * len(payloads) - 1 or values[1::2].count(_MARK) != len(payloads) - 1:
            return None
        return rows if self._schema is None else self._schema.build(rows)

    def decode_named(self, values: Mapping[str, Any]) -> RowT:
        """The row of a JSON object with the values by field name. Raises RowError, which names the field; ConfigError
        for a stream without a row type."""
        schema = self._schema
        if schema is None:
            raise ConfigError(f"stream {self.name!r} has no row type: its rows have no fields by name")
        return self._built(lambda: schema.build_named(values), "row", values)

    def _decode_one(self, at: int, payload: bytes) -> RowT:
        try:
            row = orjson.loads(payload)
        except ValueError as error:
            raise RowError(self.name, f"row {at}", f"not JSON: {error}", payload) from None
        schema = self._schema
        if schema is None:
            return cast(RowT, row)
        return self._built(lambda: schema.build([row])[0], f"row {at}", row)

    def _built(self, build: Callable[[], RowT], what: str, row: object) -> RowT:
        try:
            return build()
        except MismatchError as error:
            where = f"{what}, field {error.field!r}" if error.field else what
            raise RowError(self.name, where, error.reason, row) from None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RowError(self.name, what, reason, row) from error


def checked_stream(stream: Any) -> Stream[Any]:
    """The stream. Raises ConfigError for what is none: the name of one is easily passed instead."""
    if not isinstance(stream, Stream):
        raise ConfigError(
            f"a busrep.Stream is needed, not {stream!r}: pass the object that is in streams= of connect(), as in "
            "orders = busrep.Stream('orders', Order) and bus.write(orders)"
        )
    return stream


class Registry(Iterable[Stream[Any]]):
    """The streams of one bus, by name. Raises ConfigError for two of one name, UnknownStream for one it has
    not."""

    def __init__(self, streams: Iterable[Stream[Any]]) -> None:
        self._streams: dict[str, Stream[Any]] = {}
        for stream in streams:
            if not isinstance(stream, Stream):
                raise ConfigError(f"streams= takes busrep.Stream objects, not {stream!r}")
            if self._streams.setdefault(stream.name, stream) is not stream:
                raise ConfigError(f"two streams are named {stream.name!r}")

    def __getitem__(self, name: str) -> Stream[Any]:
        try:
            return self._streams[name]
        except KeyError:
            raise UnknownStream(name, list(self._streams)) from None

    def of(self, stream: Stream[Any]) -> Stream[Any]:
        """The registered stream of that one's name. Raises ConfigError for what is no Stream, such as its name."""
        return self[checked_stream(stream).name]

    def __contains__(self, name: object) -> bool:
        return name in self._streams

    def __iter__(self) -> Iterator[Stream[Any]]:
        return iter(self._streams.values())

    def __len__(self) -> int:
        return len(self._streams)
