"""Catch-up and snapshots over HTTP: `server` answers, `source` and `reference` ask. Needs the extra ``http``."""
