"""The options of the source, read from Spark's map of texts; what is wrong with one is told by its name.

Spark knows no difference of case in names of options, and passes every value as text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import attrs
import orjson

from busrep.errors import ConfigError
from busrep.spark import secrets
from busrep.spark.offsets import positions_in
from busrep.stores.declared import NOT_THERE, declared_in
from busrep.streams import Stream
from busrep.urls import has_secret, shown_url

STORES = "postgresql://user@host/database or sqlite:////absolute/path.db"
# More tasks than this are a mistake: each is a connection to the database.
MOST_PARTITIONS = 10_000

_WORD = re.compile(r"[^ \n,]+")
Reading = TypeVar("Reading", bound=Any)


@attrs.frozen
class Positions:
    """Where to begin or end. ``kind``: ``earliest``, ``latest``, ``map`` or ``time``; ``map``: {writer: token};
    ``time``: microseconds since 1970 in UTC."""

    kind: str
    map: Mapping[str, int] = attrs.field(factory=dict)
    time: int = 0


EARLIEST, LATEST = Positions("earliest"), Positions("latest")


@attrs.frozen(kw_only=True)
class Options:
    """What a query wants of the source. Nothing secret is in it."""

    store: str
    stream: str
    streams: str | None = None
    typed: bool = False
    writers: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    starting: Positions = EARLIEST
    ending: Positions = LATEST
    max_rows: int | None = None
    partitions: int | None = None
    min_partitions: int = 1
    fail_on_data_loss: bool = True
    include_metadata: bool = False
    redis: str | None = None
    name: str | None = None
    password_file: str | None = None
    redis_password_file: str | None = None


# Names of Spark's Kafka source, and what they stand for. failOnDataLoss and minPartitions are no aliases.
ALIASES = {
    "startingOffsets": "startingPositions", "endingOffsets": "endingPositions",
    "maxOffsetsPerTrigger": "maxRowsPerTrigger",
}  # fmt: skip
NAMES = (
    "store", "stream", "streams", "typed", "writers", "columns", "startingPositions", "endingPositions",
    "maxRowsPerTrigger", "partitions", "minPartitions", "failOnDataLoss", "includeMetadata", "redis", "name",
    "passwordFile", "redisPasswordFile", *ALIASES,
)  # fmt: skip
# Which values of Kafka's mean the same here, and what others would mean otherwise.
_OFFSETS = {
    "startingOffsets": (("earliest", "latest"), "the first that is read, -2 the earliest, -1 the latest", "is behind"),
    "endingOffsets": (("latest",), "the first that is not read, -1 the latest", "ends with"),
}


def read_options(given: Mapping[str, str], *, streaming: bool | None = None) -> Options:
    """The options of a query. ``streaming``: of which kind it is, None while that is not known yet.

    Raises ConfigError, which names the option and says what is allowed.
    """
    found = found_in(given)
    _check_names(found, streaming)
    typed = _switch(found, "typed", default="streams" in found)
    include = _switch(found, "includeMetadata", default=False)
    if typed and "streams" not in found:
        raise ConfigError("option 'typed' needs 'streams', MODULE:NAME where the application declares its streams")
    if include and not typed:
        raise ConfigError(
            "option 'includeMetadata' is for typed rows, which need 'streams'; the generic schema has these columns"
        )
    redis = redis_of(found)
    most, least = (number_of(found, one, MOST_PARTITIONS) for one in ("partitions", "minPartitions"))
    if most is not None and least is not None and most < least:
        raise ConfigError(f"option 'minPartitions' is {least}: at most {most}, the option 'partitions', is needed")
    return Options(
        store=store_of(found), stream=word_of(found, "stream"), streams=found.get("streams"), typed=typed,
        writers=words_of(found, "writers"), columns=words_of(found, "columns"),
        starting=_positions(found, "startingPositions", EARLIEST),
        ending=_positions(found, "endingPositions", LATEST),
        max_rows=number_of(found, _as_given(found, "maxRowsPerTrigger"), 2**63 - 1),
        partitions=most, min_partitions=least or 1,
        fail_on_data_loss=_switch(found, "failOnDataLoss", default=True), include_metadata=include,
        redis=redis, name=found.get("name"), password_file=found.get("passwordfile"),
        redis_password_file=found.get("redispasswordfile"),
    )  # fmt: skip


def found_in(given: Mapping[str, str]) -> dict[str, str]:
    """The options that Spark passes, by their names in lower case. Raises ConfigError for those of a table of Spark's
    catalog: Spark passes them when the table is made, in a form of its own, and passes none when it is read."""
    found = {str(name).lower(): str(value) for name, value in given.items()}
    if found and "provider" not in found:
        return found
    raise ConfigError(
        f"option 'store' is missing: {STORES}. A table of Spark's catalog, as CREATE TABLE makes it, passes no options "
        "to a data source in Python: use CREATE TEMPORARY VIEW name USING busrep OPTIONS (...)"
    )


def check_known(found: Mapping[str, str], names: Sequence[str], others: Iterable[str] = ()) -> None:
    """Raises ConfigError for an option that is none of ``names``, nor of ``others``, which are Spark's own."""
    known = {name.lower(): name for name in names}
    for wrong in sorted(found.keys() - known.keys() - set(others)):
        near = difflib.get_close_matches(wrong, known, 1)
        meant = f"; did you mean {known[near[0]]!r}?" if near else "."
        raise ConfigError(f"option {wrong!r} is not known{meant} These are: {', '.join(names)}")


def _check_names(found: Mapping[str, str], streaming: bool | None) -> None:
    check_known(found, NAMES)
    for alias, name in ALIASES.items():
        if alias.lower() in found and name.lower() in found:
            raise ConfigError(f"options {alias!r} and {name!r} are one: pass only {name!r}")
    ending, most = _as_given(found, "endingPositions"), _as_given(found, "maxRowsPerTrigger")
    if streaming and ending.lower() in found:
        raise ConfigError(f"option {ending!r} is for spark.read alone: a stream has no end")
    if streaming is False and most.lower() in found:
        raise ConfigError(f"option {most!r} is for spark.readStream alone: a batch has no triggers")


def _as_given(found: Mapping[str, str], name: str) -> str:
    """The name under which an option is given: its own, or its alias."""
    return next((alias for alias, meant in ALIASES.items() if meant == name and alias.lower() in found), name)


def _positions(found: Mapping[str, str], name: str, default: Positions) -> Positions:
    given = _as_given(found, name)
    if given == name:
        return positions_of(found, name, default)
    value = found[given.lower()].strip()
    words, offset, position = _OFFSETS[given]
    if value.lower() in words:
        return Positions(value.lower())
    raise ConfigError(
        f"option {given!r} is {value[:200]!r}: {' or '.join(words)} is needed. In Kafka a map has "
        f'{{"topic": {{"partition": offset}}}}, and an offset is {offset}. Pass the option {name!r} for others: a map '
        f'{{"writer": ID}}, what is read {position} this ID, or a timestamp'
    )


def store_of(found: Mapping[str, str]) -> str:
    """Option ``store``, checked: without a password. Raises ConfigError."""
    store = found.get("store")
    if store is None:
        raise ConfigError(f"option 'store' is missing: {STORES}")
    secrets.check(store)  # options are shown in plans and logs
    scheme, _, rest = store.partition("://")
    if scheme in ("postgresql", "postgres") or (scheme == "sqlite" and len(rest) > 1 and rest.startswith("/")):
        return store
    raise ConfigError(f"option 'store' is {shown_url(store)!r}; these forms work: {STORES}")


def redis_of(found: Mapping[str, str]) -> str | None:
    """Option ``redis``, checked: without a password. Raises ConfigError, also where one of ``redis`` and ``name`` is
    there alone, and for a password file without ``redis``."""
    url = found.get("redis")
    if url is None and "redispasswordfile" in found:
        raise ConfigError("option 'redisPasswordFile' needs the option 'redis'")
    if url is not None and has_secret(url):
        raise ConfigError(
            "option 'redis' holds a password, which plans and the UI of Spark would show: leave it out there, and pass "
            "the option 'redisPasswordFile' (its first line is the password), or set BUSREP_REDIS_PASSWORD for the "
            "driver"
        )
    if (url is None) != ("name" not in found):
        raise ConfigError("options 'redis' and 'name' go together: the Redis of a bus, and the bus's name there")
    return url


def word_of(found: Mapping[str, str], name: str) -> str:
    """A name, which has to be there. Raises ConfigError."""
    value = found.get(name.lower())
    if value is None:
        raise ConfigError(f"option {name!r} is missing")
    if not _WORD.fullmatch(value):
        raise ConfigError(f"option {name!r} is {value!r}: one word is needed")
    return value


def words_of(found: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    """Names, separated by commas; None when there is no such option. Raises ConfigError."""
    value = found.get(name.lower())
    if value is None:
        return None
    words = tuple(word.strip() for word in value.split(","))
    if not all(_WORD.fullmatch(word) for word in words) or len(set(words)) < len(words):
        raise ConfigError(f"option {name!r} is {value!r}: names are needed, separated by commas, each once")
    return words


def _switch(found: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = found.get(name.lower())
    if value is None:
        return default
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"option {name!r} is {value!r}: true or false is needed")
    return value.lower() == "true"


def number_of(found: Mapping[str, str], name: str, most: int) -> int | None:
    """An integer from 1 to ``most``; None when there is no such option. Raises ConfigError."""
    value = found.get(name.lower())
    if value is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,18}", value.strip()) or int(value) > most:
        raise ConfigError(f"option {name!r} is {value!r}: an integer from 1 to {most} is needed")
    return int(value)


def positions_of(found: Mapping[str, str], name: str, default: Positions) -> Positions:
    """Where to begin or end, of the option ``name``. Raises ConfigError."""
    value = found.get(name.lower(), "").strip()
    if not value:
        if name.lower() in found:
            raise _bad_positions(name, value, "it is empty")
        return default
    if value.lower() in ("earliest", "latest"):
        return Positions(value.lower())
    if value.startswith("{"):
        return Positions("map", map=_position_map(name, value))
    try:
        time = datetime.fromisoformat(value)
        if time.tzinfo is None:
            raise ValueError("a timestamp needs its zone, as in 2026-01-31T12:00:00Z")
        time = time.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise _bad_positions(name, value, str(error)) from None
    # Timestamps are whole microseconds; a float would lose some.
    since = time - datetime(1970, 1, 1, tzinfo=UTC)
    return Positions("time", time=(since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


def _position_map(name: str, value: str) -> dict[str, int]:
    try:
        return positions_in(orjson.loads(value))
    except ValueError as error:
        raise _bad_positions(name, value, str(error)) from None


def _bad_positions(name: str, value: str, reason: str) -> ConfigError:
    return ConfigError(
        f"option {name!r} is {value[:200]!r}: {reason}. earliest, latest, a map like "
        '{"writer": 55}, or a timestamp like 2026-01-31T12:00:00Z is needed'
    )


def given_to(reader: Reading, options: Mapping[str, Any]) -> Reading:
    """Spark's reader with those options that are something."""
    for name, value in options.items():
        if value is not None:
            reader = reader.option(name, value)
    return reader


def stream_of(where: str | None, name: str) -> Stream[Any]:
    """The stream of that name: as MODULE:NAME declares it, or of untyped rows without one. Raises ConfigError."""
    return Stream(name) if where is None else declared_stream(where, name)


def declared_stream(where: str, name: str) -> Stream[Any]:
    """The stream of that name among those that MODULE:NAME, or MODULE, declares. Raises ConfigError."""
    try:
        streams = declared_in(where)
    except ConfigError as error:
        raise ConfigError(f"option 'streams' is {where!r}: {error}") from None
    except NOT_THERE as error:
        raise ConfigError(
            f"option 'streams' is {where!r}: {error}. MODULE:NAME is needed, of a module that the driver and the "
            "executors can import"
        ) from None
    for stream in streams:
        if stream.name == name:
            if stream.resettable:
                raise ConfigError(f"stream {name!r} is resettable: it lives in its writer's memory, and has no table")
            return stream
    names = ", ".join(sorted(stream.name for stream in streams))
    raise ConfigError(f"option 'stream' is {name!r}, but {where} declares these: {names}")
