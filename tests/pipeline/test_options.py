from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from busrep.errors import ConfigError
from busrep.spark import sink_options
from busrep.spark.options import ALIASES, EARLIEST, LATEST, NAMES, Options, declared_stream, read_options

STORE = "postgresql://app@db/shop"
LEAST = {"store": STORE, "stream": "orders"}


def options(streaming: bool | None = None, **given: str) -> Options:
    return read_options({**LEAST, **given}, streaming=streaming)


def test_what_is_not_said_has_its_default() -> None:
    found = options()
    assert found == Options(store=STORE, stream="orders")
    assert (found.starting, found.ending, found.fail_on_data_loss, found.typed) == (EARLIEST, LATEST, True, False)


def test_names_have_no_case() -> None:
    assert read_options({"STORE": STORE, "Stream": "orders", "maxrowspertrigger": "5"}).max_rows == 5


def test_all_options_are_read() -> None:
    found = options(
        streams="tests.shop:STREAMS", writers="w1, w2", columns="number", startingPositions='{"w1": 5}',
        endingPositions="2026-01-31T12:00:00.000001+01:00", maxRowsPerTrigger="1000", partitions="3",
        failOnDataLoss="FALSE", includeMetadata="true", redis="redis://db", name="shop", passwordFile="/run/a",
        redisPasswordFile="/run/b",
    )  # fmt: skip
    assert (found.streams, found.typed, found.writers, found.columns) == (
        "tests.shop:STREAMS", True, ("w1", "w2"), ("number",),
    )  # fmt: skip
    assert (found.starting.kind, found.starting.map) == ("map", {"w1": 5})
    assert (found.ending.kind, found.ending.time) == ("time", 1_769_857_200_000_001)
    assert (found.max_rows, found.partitions, found.fail_on_data_loss, found.include_metadata) == (1000, 3, False, True)
    assert (found.redis, found.name, found.password_file, found.redis_password_file) == (
        "redis://db", "shop", "/run/a", "/run/b",
    )  # fmt: skip
    assert not options(streams="tests.shop:STREAMS", typed="false").typed


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("store", "mysql://db", "these forms work: postgresql://"),
        ("store", "memory://x", "these forms work"),
        ("store", "sqlite://x.db", "these forms work"),
        ("store", "", "these forms work"),
        ("stream", "", "one word is needed"),
        ("stream", "a b", "one word is needed"),
        ("writers", "w1,,w2", "separated by commas, each once"),
        ("writers", "", "separated by commas"),
        ("columns", "a,a", "each once"),
        ("startingPositions", "newest", "earliest, latest, a map like"),
        ("startingPositions", "", "it is empty"),
        ("startingPositions", "{", "earliest, latest"),
        ("startingPositions", '{"w1": -1}', "-1 is no position"),
        ("startingPositions", '{"w1": "5"}', "is no position"),
        ("startingPositions", '{"w1": 5.0}', "is no position"),
        ("startingPositions", '{"w1": 9223372036854775808}', "is no position"),
        ("startingPositions", "2026-01-31T12:00:00", "needs its zone"),
        ("endingPositions", "2026-13-01", "must be in 1..12"),
        ("endingPositions", "0001-01-01T00:00:00+14:00", "date value out of range"),
        ("maxRowsPerTrigger", "0", "an integer from 1 to"),
        ("maxRowsPerTrigger", "many", "an integer from 1 to"),
        ("maxRowsPerTrigger", "1.5", "an integer from 1 to"),
        ("partitions", "10001", "an integer from 1 to 10000"),
        ("minPartitions", "0", "an integer from 1 to 10000"),
        ("maxOffsetsPerTrigger", "many", "an integer from 1 to"),
        ("startingOffsets", '{"orders": {"0": 5}}', "an offset is the first that is read"),
        ("startingOffsets", "2026-01-31T12:00:00Z", "earliest or latest is needed"),
        ("startingOffsets", "", "earliest or latest is needed"),
        ("endingOffsets", '{"orders": {"0": -1}}', "an offset is the first that is not read"),
        ("endingOffsets", "earliest", "latest is needed"),
        ("failOnDataLoss", "no", "true or false"),
        ("includeMetadata", "1", "true or false"),
        ("typed", "yes", "true or false"),
    ],
)
def test_a_wrong_value_is_told_by_its_option(name: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(**{name: value})
    assert f"option {name!r}" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["store", "stream"])
def test_what_is_needed_is_asked_for(name: str) -> None:
    with pytest.raises(ConfigError, match=f"option '{name}' is missing"):
        read_options({other: value for other, value in LEAST.items() if other != name})


@pytest.mark.parametrize(
    "given",
    [{}, {**LEAST, "provider": "busrep", "owner": "root", "option.store": STORE}],
    ids=["read", "made"],
)
def test_a_table_of_sparks_catalog_is_told_what_to_be_instead(given: dict[str, str]) -> None:
    for read in (read_options, functools.partial(sink_options.read_options, job=None)):
        with pytest.raises(ConfigError, match="option 'store' is missing.*use CREATE TEMPORARY VIEW name USING busrep"):
            read(given)


def test_an_unknown_option_is_told_with_what_was_meant() -> None:
    with pytest.raises(ConfigError, match="option 'startingposition' is not known; did you mean 'startingPositions'"):
        options(startingPosition="earliest")
    with pytest.raises(ConfigError, match="'path' is not known") as caught:
        options(path="/tmp/x")
    assert all(name in str(caught.value) for name in NAMES)


def test_kafkas_names_are_taken() -> None:
    found = options(startingOffsets="Latest", maxOffsetsPerTrigger="5", minPartitions="3", failOnDataLoss="false")
    assert (found.starting, found.max_rows, found.min_partitions, found.fail_on_data_loss) == (LATEST, 5, 3, False)
    assert options(startingOffsets="earliest", endingOffsets="latest") == options()


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_not_given_beside_its_option(alias: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"options '{alias}' and '{name}' are one: pass only '{name}'"):
        options(**{alias: "latest", name: "latest"})


@pytest.mark.parametrize(
    ("alias", "name", "place"),
    [("startingOffsets", "startingPositions", "is behind"), ("endingOffsets", "endingPositions", "ends with")],
    ids=["start", "end"],
)
def test_offsets_of_kafka_are_not_taken_for_positions(alias: str, name: str, place: str) -> None:
    for value in ('{"orders": {"0": 55}}', '{"w1": 55}'):
        with pytest.raises(ConfigError) as caught:
            options(**{alias: value})
        assert f"option {alias!r} is {value!r}" in str(caught.value)
        assert f'option {name!r} for others: a map {{"writer": ID}}, what is read {place} this ID' in str(caught.value)


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="'minPartitions' is 4: at most 3, the option 'partitions', is needed"):
        options(partitions="3", minPartitions="4")
    with pytest.raises(ConfigError, match="'endingOffsets' is for spark.read alone"):
        options(True, endingOffsets="latest")
    with pytest.raises(ConfigError, match="'maxOffsetsPerTrigger' is for spark.readStream alone"):
        options(False, maxOffsetsPerTrigger="5")
    with pytest.raises(ConfigError, match="'endingPositions' is for spark.read alone"):
        options(True, endingPositions="latest")
    with pytest.raises(ConfigError, match="'maxRowsPerTrigger' is for spark.readStream alone"):
        options(False, maxRowsPerTrigger="5")
    with pytest.raises(ConfigError, match="'typed' needs 'streams'"):
        options(typed="true")
    for given in ({}, {"streams": "a:b", "typed": "false"}):
        with pytest.raises(ConfigError, match="'includeMetadata' is for typed rows"):
            options(includeMetadata="true", **given)
    for given in ({"redis": "redis://db"}, {"name": "shop"}):
        with pytest.raises(ConfigError, match="'redis' and 'name' go together"):
            options(**given)


@pytest.mark.parametrize("store", ["postgresql://app:hunter2@db/shop", "postgresql://db/shop?user=a&password=hunter2"])
def test_a_password_in_the_store_is_refused_and_not_shown(store: str) -> None:
    with pytest.raises(ConfigError, match=r"password.*BUSREP_STORE_PASSWORD") as caught:
        options(store=store)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://:hunter2@db", "redis://u:hunter2@db/0", "redis://db?password=hunter2"])
def test_a_password_for_redis_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"'redisPasswordFile'.*BUSREP_REDIS_PASSWORD") as caught:
        options(redis=url, name="shop")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "name", "reason"),
    [
        ("nowhere", "orders", "MODULE:NAME is needed"),
        ("no.such.module:X", "orders", "No module named"),
        ("tests.shop:NOTHING", "orders", "has no attribute"),
        ("tests.shop:QUICK", "orders", "is no Stream nor several"),
        ("tests.shop:Order", "orders", "is no Stream nor several"),
        ("tests.shop:STREAMS", "order", "declares these: orders, payments, typing"),
        ("tests.shop:STREAMS", "typing", "lives in its writer's memory"),
    ],
)
def test_streams_that_are_not_declared(where: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        declared_stream(where, name)


def test_streams_are_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_of_this_test.py").write_text("from busrep import Stream\none = Stream('carts')\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    try:
        assert declared_stream("shop_of_this_test:one", "carts").name == "carts"
        assert sys.path == before
    finally:
        sys.modules.pop("shop_of_this_test", None)
