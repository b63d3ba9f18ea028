"""Which form of the tests was asked for: BUSREP_SPARK, one or several of these words with commas between.

- ``all``: with what takes minutes, which is not part of the suite's short form
- ``cluster``: every session on a standalone cluster of two workers, and not on ``local[2]``
- ``wheel``: with no Java on this machine, from the wheel's
"""

from __future__ import annotations

import os

import pytest

WORDS = frozenset({"all", "cluster", "wheel"})


def asked(word: str) -> bool:
    """Whether that form was asked for."""
    words = set(filter(None, os.environ.get("BUSREP_SPARK", "").split(",")))
    assert words <= WORDS, f"BUSREP_SPARK is one or several of {', '.join(sorted(WORDS))}, with commas between"
    return word in words


long = pytest.mark.skipif(not asked("all"), reason="takes minutes: BUSREP_SPARK=all runs it")
