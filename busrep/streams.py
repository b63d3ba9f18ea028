"""Streams: a name, the type of its rows, and where the rows are kept.

A row travels as a compact JSON array of its fields in the order of the class. Rows are checked against the
annotations of the attrs class, both ways, and built through the class, so its converters, validators and
``__attrs_post_init__`` run. A field with a converter is not checked by annotation: the converter says what it
takes.

Schemas change by adding fields with defaults at the end: a reader drops the trailing fields it does not know
and fills missing ones with their defaults.
"""

from __future__ import annotations

import math
import operator
import re
import secrets
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any, Generic, TypeVar, cast, overload

import attrs
import orjson

from busrep.core.commands import NAME_BYTES, json_bytes, refuse_name
from busrep.errors import ConfigError, RowError, UnknownStream

RowT = TypeVar("RowT")

_SQL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*(\.[A-Za-z_][A-Za-z0-9_$]*)?")
# Stands between payloads that are decoded at once, and must be found between the rows: so ``[1],[2`` and
# ``3]`` are not taken for two rows. A number that no payload can know.
_MARK = secrets.randbelow(9 * 10**8) + 10**8
_MARK_BETWEEN = b",%d," % _MARK


class _MismatchError(ValueError):
    """A value that its annotation does not admit."""

    def __init__(self, reason: str, field: str = "") -> None:
        self.reason, self.field = reason, field
        super().__init__(reason)


# --- annotations ---

_Column = Sequence[Any]


@attrs.frozen
class _FieldType:
    """What one annotation admits, checked by exact type (a bool is no int). No types at all: anything.

    ``usual`` is the JSON type of a whole column that needs nothing done, ``read`` all JSON types with what
    turns a column of them into the field's values (None: taken as it is). Columns, because asking hundreds of
    values for their type at a time is cheaper than looking at each. ``write``: the types of the field's
    values with a deeper check.
    """

    text: str
    usual: type | None = None
    read: dict[type, Callable[[_Column], _Column] | None] = attrs.field(factory=dict)
    write: dict[type, Callable[[Any], bool] | None] = attrs.field(factory=dict)

    def column(self, column: _Column) -> _Column:
        """The field's values of a column of JSON values; raises _MismatchError."""
        if not self.read or (self.usual and list(map(type, column)).count(self.usual) == len(column)):
            return column
        seen = set(map(type, column))
        wrong = sorted(found.__name__ for found in seen - self.read.keys())
        if wrong:
            raise _MismatchError(f"{self.text} is needed, not {wrong[0]}")
        for found in seen:
            convert = self.read[found]
            if convert is not None:
                converted = iter(convert([value for value in column if type(value) is found]))
                column = [next(converted) if type(value) is found else value for value in column]
        return column

    def fits(self, value: Any) -> bool:
        """Whether a field may hold this value."""
        if not self.write:
            return True
        if type(value) not in self.write:
            return False
        deeper = self.write[type(value)]
        return deeper is None or deeper(value)


def _floats(column: _Column) -> _Column:
    return list(map(float, column))


def _datetimes(column: _Column) -> _Column:
    try:
        return list(map(datetime.fromisoformat, column))
    except ValueError as error:
        raise _MismatchError(str(error)) from None


def _as_is(text: str, kind: type) -> _FieldType:
    return _FieldType(text, kind, {kind: None}, {kind: None})


_ANY = _FieldType("anything")
_SIMPLE: dict[Any, _FieldType] = {
    Any: _ANY,
    object: _ANY,
    int: _as_is("int", int),
    str: _as_is("str", str),
    bool: _as_is("bool", bool),
    type(None): _as_is("null", type(None)),
    list: _as_is("array", list),
    dict: _as_is("object", dict),
    float: _FieldType("float", float, {float: None, int: _floats}, {float: None, int: None}),
    datetime: _FieldType("ISO 8601 date and time", None, {str: _datetimes}, {datetime: None}),
}


def _kind_of(annotation: Any) -> _FieldType:
    """The kind of an annotation; raises KeyError for one that has no form in JSON, or not only one."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union([_kind_of(argument) for argument in arguments])
    if origin in (list, tuple) and (origin is list or arguments[1:] == (...,)):
        return _array_of(_kind_of(arguments[0]), origin)
    if origin is tuple:
        return _tuple_of([_kind_of(argument) for argument in arguments])
    if origin is dict and arguments[0] is str:
        return _dict_of(_kind_of(arguments[1]))
    return _SIMPLE[annotation]


def _union(kinds: Sequence[_FieldType]) -> _FieldType:
    if _ANY in kinds:
        return _ANY
    union = _FieldType(" or ".join(kind.text for kind in kinds), kinds[0].usual)
    # float last: in int | float an integer stays one.
    for kind in sorted(kinds, key=lambda kind: kind.text == "float"):
        for found, convert in kind.read.items():
            if found in union.read and convert is not _floats:
                raise KeyError(found)
            union.read.setdefault(found, convert)
        for found, deeper in kind.write.items():
            union.write.setdefault(found, deeper)
    return union


def _array_of(inner: _FieldType, made: type) -> _FieldType:
    def read(column: _Column) -> _Column:
        flat = list(chain.from_iterable(column))
        values = iter(inner.column(flat))
        return [made(islice(values, len(value))) for value in column]

    def fits(value: Any) -> bool:
        return all(map(inner.fits, value))

    return _FieldType(f"array of {inner.text}", None, {list: read}, {made: fits})


def _dict_of(inner: _FieldType) -> _FieldType:
    def read(column: _Column) -> _Column:
        flat = list(chain.from_iterable(value.values() for value in column))
        values = iter(inner.column(flat))
        return [dict(zip(value, islice(values, len(value)), strict=True)) for value in column]

    def fits(value: Any) -> bool:
        return all(map(inner.fits, value.values()))

    return _FieldType(f"object of {inner.text}", None, {dict: read}, {dict: fits})


def _tuple_of(inner: Sequence[_FieldType]) -> _FieldType:
    text = f"array of {len(inner)}"

    def read(column: _Column) -> _Column:
        if set(map(len, column)) != {len(inner)}:
            raise _MismatchError(f"{text} is needed")
        parts = [kind.column(part) for kind, part in zip(inner, zip(*column, strict=True), strict=True)]
        return list(zip(*parts, strict=True))

    def fits(value: Any) -> bool:
        return len(value) == len(inner) and all(kind.fits(part) for kind, part in zip(inner, value, strict=True))

    return _FieldType(text, None, {list: read}, {tuple: fits})


def _plain(value: Any) -> Any:
    """What is written for a value that JSON does not have."""
    if isinstance(value, datetime):
        # In UTC: a database gives the same instant back in the zone of whoever asks, and a row has one form only.
        return (value if value.tzinfo is None else value.astimezone(UTC)).isoformat()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


# --- row classes ---


def _thawed(row_type: type[Any], names: Sequence[str]) -> type[Any] | None:
    """A subclass of a frozen class with slots whose constructor assigns plainly; None where it would not do the same.

    attrs' constructor of a frozen class with slots calls object.__setattr__ for each field, three times the
    cost of plain assignments. The subclass adds no slots, so an object made as one can be given the class
    ``row_type`` itself. Only for classes whose constructor does nothing else: no converters, validators,
    hooks, nor one of their own.
    """
    slots = [slot for base in row_type.__mro__ for slot in base.__dict__.get("__slots__", ())]
    code = getattr(row_type.__init__, "__code__", None)
    if (
        sorted(slots) != sorted([*names, "__weakref__"])
        or row_type.__dictoffset__
        or type(row_type) is not type
        or code is None
        or not code.co_filename.startswith("<attrs generated")
        or row_type.__dict__.get("__setattr__") is None
        or any("__new__" in base.__dict__ for base in row_type.__mro__[:-1])
        or any(hasattr(row_type, hook) for hook in ("__attrs_pre_init__", "__attrs_post_init__"))
        or any(field.validator or field.converter or not field.init for field in attrs.fields(row_type))
        or any("__init_subclass__" in base.__dict__ for base in row_type.__mro__[:-1])
    ):
        return None
    plain: Any = attrs.make_class(row_type.__name__, list(names), slots=True)
    body = {
        "__slots__": (),
        "__init__": plain.__init__,
        "__setattr__": object.__setattr__,
        "__delattr__": object.__delattr__,  # CPython assigns plainly only where both are object's
    }
    return type(row_type.__name__, (row_type,), body)


_PLAIN = (int, float, str, bool)


class _Schema(Generic[RowT]):
    """The fields of a row class: the values of a row, and rows made of values."""

    def __init__(self, stream: str, row_type: type[RowT]) -> None:
        made: Any = row_type
        if not attrs.has(made):
            raise ConfigError(f"stream {stream!r}: the row type {row_type!r} is not an attrs class")
        fields = [field for field in attrs.fields(made) if field.init]
        if not fields:
            raise ConfigError(f"stream {stream!r}: the row type {row_type.__name__} has no fields")
        self.row_type = row_type
        self.names = tuple(field.name for field in fields)
        self.kinds = _kinds_of_fields(stream, row_type, fields)
        self.usual: list[Any] = [kind.usual for kind in self.kinds]
        self.plain = all(kind.usual in _PLAIN and kind.write.get(kind.usual, _PLAIN) is None for kind in self.kinds)
        self.needed = {field.name for field in fields if field.default is attrs.NOTHING}
        self.required = max((i + 1 for i, field in enumerate(fields) if field.default is attrs.NOTHING), default=0)
        self.make: Callable[..., RowT] = row_type
        self.aliases = {field.name: field.alias or field.name for field in fields}
        if any(field.kw_only for field in fields):
            aliases = list(self.aliases.values())
            self.make = lambda *values: row_type(**dict(zip(aliases, values, strict=False)))
        self.thawed = _thawed(row_type, self.names)
        getter = operator.attrgetter(*self.names)
        self.values: Callable[[RowT], Sequence[Any]] = getter if fields[1:] else lambda row: [getter(row)]

    def dump(self, rows: Sequence[RowT]) -> list[bytes] | None:
        """The payloads of rows whose fields are all plain; None if one of them needs a closer look."""
        count = len(rows)
        if list(map(type, rows)).count(self.row_type) != count:
            return None
        values = list(map(self.values, rows))
        for usual, column in zip(self.usual, zip(*values, strict=True), strict=True):
            if list(map(type, column)).count(usual) != count:
                return None
            if usual is float and not all(map(math.isfinite, column)):  # orjson would write null
                return None
        payloads = [orjson.dumps(value) for value in values]
        return payloads if b"".join(payloads).isascii() else None

    def build(self, rows: Sequence[Any]) -> list[RowT]:
        """Row objects of decoded rows; whatever is wrong with one of them raises."""
        if list(map(type, rows)).count(list) != len(rows):
            raise _MismatchError("an array is needed")
        try:
            columns = list(zip(*rows, strict=True))
        except ValueError:
            return self._build_uneven(rows)
        return self._build_columns(columns, len(rows))

    def build_named(self, values: Mapping[str, Any]) -> RowT:
        """A row object of the JSON values of its fields; whatever is wrong with one of them raises."""
        if unknown := values.keys() - set(self.names):
            raise _MismatchError(f"is none of {', '.join(self.names)}", min(unknown))
        for name in self.names:
            if name in self.needed and name not in values:
                raise _MismatchError("is missing", name)
        kinds = dict(zip(self.names, self.kinds, strict=True))
        made: Any = self.row_type
        arguments = {}
        for name, value in values.items():
            try:
                arguments[self.aliases[name]] = kinds[name].column([value])[0]
            except _MismatchError as error:
                raise _MismatchError(error.reason, name) from None
        return cast(RowT, made(**arguments))

    def _build_uneven(self, rows: Sequence[Any]) -> list[RowT]:
        """Rows of several lengths, as two versions of a class wrote them."""
        groups: dict[int, list[int]] = {}
        for at, row in enumerate(rows):
            groups.setdefault(min(len(row), len(self.names)), []).append(at)
        built: list[Any] = [None] * len(rows)
        for length, places in groups.items():
            columns = list(zip(*[rows[at][:length] for at in places], strict=True))
            for at, row in zip(places, self._build_columns(columns, len(places)), strict=True):
                built[at] = row
        return built

    def _build_columns(self, columns: Sequence[_Column], count: int) -> list[RowT]:
        if len(columns) < self.required:
            raise _MismatchError("is missing", self.names[len(columns)])
        if not columns:
            return [self.make() for _ in range(count)]
        checks = zip(columns, self.usual, strict=False)
        if not all(list(map(type, column)).count(usual) == count for column, usual in checks):
            columns = self._read_columns(columns)
        if self.thawed is None or len(columns) < len(self.names):
            return list(map(self.make, *columns[: len(self.names)]))
        made, row_type = list(map(self.thawed, *columns[: len(self.names)])), self.row_type
        for row in made:
            row.__class__ = row_type
        return made

    def _read_columns(self, columns: Sequence[_Column]) -> list[_Column]:
        found = []
        for name, kind, column in zip(self.names, self.kinds, columns, strict=False):
            try:
                found.append(kind.column(column))
            except _MismatchError as error:
                raise _MismatchError(error.reason, name) from None
        return found


def _kinds_of_fields(stream: str, row_type: type[Any], fields: Iterable[attrs.Attribute[Any]]) -> list[_FieldType]:
    try:
        hints = typing.get_type_hints(row_type)
    except NameError as error:
        raise ConfigError(
            f"stream {stream!r}: an annotation of {row_type.__name__} cannot be resolved: {error}"
        ) from None
    kinds = []
    for field in fields:
        annotation = hints.get(field.name, field.type or Any)
        try:
            kinds.append(_ANY if field.converter else _kind_of(annotation))
        except (KeyError, TypeError):
            raise ConfigError(
                f"stream {stream!r}: field {field.name!r} of {row_type.__name__} is annotated {annotation!r}, "
                "which has no form in JSON: give the field a converter"
            ) from None
    return kinds


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
    published on, "" the main one. ``resettable``: kept in the writer's memory only, positions may go back
    (rule 9.11). ``follows``: an idle writer announces the progress of others (W6: False for pure
    invalidations). ``negative``: IDs count down (G17). ``table``: the application's own table instead of the
    generic one. ``foreign_writers``: writers of another system write it too, which are in no registry of busrep's
    and never say an incarnation: their lines are believed (rule 9.18). Errors: `ConfigError`.
    """

    @overload
    def __init__(
        self: Stream[Any], name: str, row_type: None = None, *, channel: str = ..., resettable: bool = ...,
        follows: bool = ..., negative: bool = ..., table: Table | None = ..., foreign_writers: bool = ...,
    ) -> None: ...  # fmt: skip

    @overload
    def __init__(
        self, name: str, row_type: type[RowT], *, channel: str = ..., resettable: bool = ...,
        follows: bool = ..., negative: bool = ..., table: Table | None = ..., foreign_writers: bool = ...,
    ) -> None: ...  # fmt: skip

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
        self._schema = None if row_type is None else _Schema(name, row_type)
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
        return self._dump(values, row, _plain)

    def encode_all(self, rows: Sequence[RowT]) -> list[bytes]:
        """As ``encode``, of many rows: a third of the time where all fields are numbers and texts."""
        schema = self._schema
        if schema is not None and schema.plain and rows:
            try:
                payloads = schema.dump(rows)
            except (TypeError, ValueError):  # the second look names the row and the field
                payloads = None
            if payloads is not None:
                return payloads
        return [self.encode(row) for row in rows]

    def _dump(self, value: object, row: object, default: Callable[[Any], Any] | None) -> bytes:
        try:
            return json_bytes(value, default)
        except ValueError as error:
            raise RowError(self.name, "row", str(error), row) from None

    def decode(self, payloads: Sequence[bytes]) -> list[RowT]:
        """The rows of payloads, all of them or RowError, which names the first bad row by its index, and the
        field.
        """
        if not payloads:
            return []
        try:
            values = orjson.loads(b"[" + _MARK_BETWEEN.join(payloads) + b"]")
            rows = values[::2]
            if len(values) == 2 * len(payloads) - 1 and values[1::2].count(_MARK) == len(payloads) - 1:
                return rows if self._schema is None else self._schema.build(rows)
        except Exception:  # noqa: S110 - converters and validators may raise anything; the second look names it
            pass
        return [self._decode_one(at, payload) for at, payload in enumerate(payloads)]

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
        except _MismatchError as error:
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
    not.
    """

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
