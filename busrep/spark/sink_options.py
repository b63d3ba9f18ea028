"""The options of the sink, read from Spark's map of texts; what is wrong with one is told by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import attrs

from busrep.errors import ConfigError
from busrep.settings import Settings
from busrep.spark import secrets
from busrep.spark.options import check_known, found_in, number_of, redis_of, store_of, stream_of, word_of, words_of
from busrep.spark.table import sqlite_path
from busrep.streams import Stream
from busrep.sync.publisher import redis_pool

NAMES = (
    "store", "stream", "streams", "writer", "query", "firstBatch", "batch", "orderBy", "redis", "name", "passwordFile",
    "redisPasswordFile",
)  # fmt: skip
# Spark's own, which it hands on: nothing of ours.
SPARKS = ("queryname", "checkpointlocation", "path", "outputmode")

# Before the names of jobs that write one batch: no name of a query is taken for one.
JOB = "batch:"

_NAME = re.compile(r"[\x21-\x7e]{1,200}")


@attrs.frozen(kw_only=True)
class SinkOptions:
    """What a query, or a job of one batch, wants of the sink. Can be pickled; secrets are in no text of it.

    ``store`` and ``redis``: URLs with their passwords. ``query``: None: the checkpoint's own identity. ``once``: it is
    of one batch alone, and no other run will name it. ``first_batch``: a query's, whose earlier ones are not to be
    written.
    """

    store: str = attrs.field(repr=False)
    stream: str
    writer: str
    streams: str | None = None
    query: str | None = None
    once: bool = False
    first_batch: int = 0
    order_by: tuple[str, ...] = ()
    redis: str | None = attrs.field(default=None, repr=False)
    name: str | None = None

    def definition(self) -> Stream[Any]:
        """The stream. Raises ConfigError when ``streams`` does not declare it."""
        return stream_of(self.streams, self.stream)


def read_options(given: Mapping[str, str], *, job: str | None) -> SinkOptions:
    """The options of a query, or of a job of one batch that is named ``job`` unless it names itself.

    To be called on the driver, where the passwords are. Raises ConfigError, which names the option.
    """
    found = found_in(given)
    check_known(found, NAMES, SPARKS)
    wrong, right, kind = ("query", "batch", "df.write") if job is not None else ("batch", "query", "df.writeStream")
    if wrong in found:
        raise ConfigError(f"option {wrong!r} is not for {kind}: there {right!r} names what is written once")
    if job is not None and "firstbatch" in found:
        raise ConfigError(f"option 'firstBatch' is not for {kind}, which writes one")
    made = SinkOptions(
        store=_absolute(secrets.resolve(store_of(found), found.get("passwordfile"))), stream=word_of(found, "stream"),
        writer=word_of(found, "writer"), streams=found.get("streams"), query=_query(found, right, job),
        once=job is not None and "batch" not in found, first_batch=number_of(found, "firstBatch", 2**63 - 1) or 0,
        order_by=words_of(found, "orderBy") or (), redis=_bus(found),
        name=word_of(found, "name") if "name" in found else None,
    )  # fmt: skip
    made.definition()  # now, on the driver, and not in some task
    return made


def _bus(found: Mapping[str, str]) -> str | None:
    redis = redis_of(found)
    if redis is None:
        return None
    url = secrets.with_redis_password(redis, found.get("redispasswordfile"))
    redis_pool(url, Settings())  # whether it is a URL; not when the first batch is in the table already
    return url


def _absolute(url: str) -> str:
    path = sqlite_path(url)  # an executor may have another working directory
    return url if path is None else f"sqlite:///{quote(path)}"


def _query(found: Mapping[str, str], option: str, job: str | None) -> str | None:
    value = found.get(option, job)
    if value is None:
        return None
    if not _NAME.fullmatch(value) or value.startswith(JOB):
        raise ConfigError(f"option {option!r} is {value!r}: a name is needed, up to 200 signs of ASCII without spaces")
    return value if job is None else JOB + value
