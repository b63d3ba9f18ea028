"""Where the snapshot of a bootstrap comes from, and snapshots in Parquet files; core/bootstrap.py loads one."""
