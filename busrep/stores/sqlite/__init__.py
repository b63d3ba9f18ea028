"""The backing tables in an SQLite file."""
