"""Rows of an archive's files: whether they ascend, and how many are read at a time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from busrep.spark import archive_rows, batches
from busrep.spark.archive_rows import SCHEMA, RowFiles, ascending, hash_into, read_file
from busrep.spark.archive_store import Root

NOON = datetime(2026, 5, 11, 12, tzinfo=UTC)


def rows(places: Sequence[tuple[str, int, int]], text: str = "1") -> Any:
    return pyarrow.RecordBatch.from_pylist(
        [
            {"writer": writer, "token": token, "index": index, "row": text, "committed_at": NOON}
            for writer, token, index in places
        ],
        SCHEMA,
    )


@pytest.mark.parametrize("seed", range(60))
def test_ascending_is_what_a_look_at_each_row_finds(seed: int) -> None:
    dice = random.Random(seed)
    places = [("w", token, index) for token in range(1, 9) for index in range(dice.randint(1, 3))]
    if dice.random() < 0.5:
        at = dice.randrange(len(places))
        places[at] = (dice.choice("wv"), dice.randint(1, 9), dice.randint(0, 2))
    before = {"w": (0, 0)} if dice.random() < 0.5 else {"w": (1, 0)}
    expected, last = len(places), dict(before)
    for number, (writer, *place) in enumerate(places):
        if writer in last and last[writer] >= tuple(place):
            expected = number
            break
        last[writer] = (place[0], place[1])
    found = dict(before)
    assert ascending(rows(places), found) == expected
    if expected in (0, len(places)):
        assert found == last


def test_facts_of_several_rows_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLoop:
        def __call__(self, *_: object, **__: object) -> Any:
            raise AssertionError("row by row")

    monkeypatch.setattr(archive_rows, "enumerate", NoLoop(), raising=False)
    places = [("w", token, index) for token in range(1, 100) for index in range(3)]
    assert ascending(rows(places), {}) == 297
    with pytest.raises(AssertionError, match="row by row"):
        ascending(rows([*places, ("w", 99, 2)]), {})


@pytest.mark.parametrize("size", [10, 10_000])
def test_rows_are_read_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    root = Root(str(tmp_path))
    files = RowFiles(root, "orders", "", 0, 0, 10**6)
    texts = random.Random(1).randbytes(size // 2).hex()
    for at in range(0, 1000, 100):
        files.add(rows([("w", token, 0) for token in range(at + 1, at + 101)], texts))
    (file,) = files.close()
    monkeypatch.setattr(archive_rows, "READ_BYTES", 200_000)
    batches = list(read_file(root, "orders", file))
    assert sum(batch.num_rows for batch in batches) == 1000
    assert max(batch.nbytes for batch in batches) < 450_000
    assert (len(batches) == 1) == (size == 10)


def test_the_hash_is_the_same_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose lines are more than an array of strings holds, 2 GiB, is hashed in pieces."""
    batch = rows([("w", token, 0) for token in range(1, 50)], "x" * 100)
    whole = hashlib.sha256("".join(f"{token} 0 w {'x' * 100}\n" for token in range(1, 50)).encode())
    for limit in (2**27, 3000, 1):
        monkeypatch.setattr(batches, "PIECE_BYTES", limit)
        hashed = hashlib.sha256()
        hash_into(hashed, batch)
        assert hashed.hexdigest() == whole.hexdigest()
    pieces: list[int] = []

    def text_of(piece: Any) -> Any:
        pieces.append(piece.num_rows)
        return real(piece)

    real = archive_rows.text_of
    monkeypatch.setattr(archive_rows, "text_of", text_of)
    hash_into(hashlib.sha256(), batch)
    assert pieces == [1] * 49
