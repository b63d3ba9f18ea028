"""busrep on Spark: the format ``busrep`` to read, follow and write streams, and the jobs of ``busrep pipeline``.

::

    from busrep.spark import session

    spark = session("orders")
    spark.read.format("busrep").options(store="sqlite:////data/busrep.db", stream="orders").load()

`session` makes a Spark session that knows the format, `register` tells one of your own. Needs the extra ``spark``;
importing this package does not.
"""

from __future__ import annotations

from .session import register, session

__all__ = ["register", "session"]
