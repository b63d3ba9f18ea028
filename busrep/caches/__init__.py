"""Caches of function results and their invalidation, without I/O. The buses feed them: asyncio/caching.py."""

from __future__ import annotations

from .cache import invalidations

__all__ = ["invalidations"]
