"""The backing tables in PostgreSQL. Needs the extra ``postgres``."""
