"""The job ``stats``: statistics of streams as Parquet tables, and one page of HTML with charts.

- `busrep.spark.stats.job`: what the job does; the tables as they are written, and what the database is asked for
- `busrep.spark.stats.tables`: the tables that Spark counts
- `busrep.spark.stats.listen`: latencies, measured while facts are on their way
- `busrep.spark.stats.page`: the page's frame, style and script, and what its numbers mean
- `busrep.spark.stats.sections`: its parts on what was written: rates, writers, sizes, tokens, keys
- `busrep.spark.stats.delays`: its parts on what takes time: latencies, readers, the archive's lag, waiting rows
- `busrep.spark.stats.charts`: the charts, by plotly
- `busrep.spark.stats.words`: numbers, shares, labels and tables as the page writes them
"""
