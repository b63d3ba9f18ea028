"""Found by Spark, which looks for top-level modules ``pyspark_...``: in the wheel this is one of them."""

import contextlib

from busrep.errors import MissingExtra

# Spark imports this for every format in Python that anybody uses: without the extra, ours alone is not there.
with contextlib.suppress(ImportError, MissingExtra):
    from busrep.spark.source import BusrepSource as DefaultSource

__all__ = ["DefaultSource"]
