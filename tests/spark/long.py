"""What takes minutes: not part of the suite's short form."""

from __future__ import annotations

import os

import pytest

long = pytest.mark.skipif(os.environ.get("BUSREP_SPARK") != "all", reason="takes minutes: BUSREP_SPARK=all runs it")
