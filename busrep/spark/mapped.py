"""Functions over Arrow batches on executors, without pandas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def map_in_arrow(frame: DataFrame, function: Callable[[Iterator[Any]], Iterator[Any]], schema: str) -> DataFrame:
    """As `DataFrame.mapInArrow`: ``function`` gets the record batches of a partition, and gives others, of ``schema``.

    Spark's own asks for pandas, which it then does not use.
    """
    from pyspark.sql import DataFrame
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    mapper = UserDefinedFunction(function, returnType=schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column: Any = mapper(*(frame[name] for name in frame.columns))
    source: Any = frame
    return DataFrame(source._jdf.mapInArrow(column._jc, False, None), frame.sparkSession)
