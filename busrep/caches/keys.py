"""The key under which a call's result is cached: what it consists of, and how it is made of the arguments.

A key is a tuple of parts that have one form in JSON, for it travels in the rows that invalidate it. 1, 1.0 and True are
one key, as they are to a dict; so they are to `functools.lru_cache`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ..core.fields import INT64_MAX, INT64_MIN
from ..errors import ConfigError

Key = tuple[Any, ...]


def check_key(cache: str, key: object) -> Key:
    """A key as it is kept and written. Raises ConfigError for parts that have no one form in JSON."""
    if not isinstance(key, tuple):
        raise ConfigError(f"cache {cache!r}: a key is a tuple of parts, not {key!r}: end key= in a comma, (id,)")
    for part in key:
        kind = type(part)
        if kind is str or kind is bool or part is None:
            fits = kind is not str or _is_text(part)
        elif kind is int:
            fits = INT64_MIN <= part <= INT64_MAX
        else:
            fits = kind is float and math.isfinite(part)
        if not fits:
            raise ConfigError(
                f"cache {cache!r}: {part!r} cannot be part of a key ({kind.__name__}): pass key=, a function of the "
                "arguments that gives a tuple of str, int of 64 bits, bool, None and finite float, such as str(id)"
            )
    return key


def _is_text(part: str) -> bool:
    return part.isascii() or not any("\ud800" <= character <= "\udfff" for character in part)


@attrs.frozen
class Keys:
    """How the arguments of a function become a key. ``parts``: of how many it always consists, if that is known.
    ``plain``: positional arguments alone, if they are all given, are the key."""

    cache: str
    make: Callable[[Sequence[Any], Mapping[str, Any]], Any]
    parts: int | None
    plain: bool

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key:
        """The key. Raises ConfigError, and TypeError for arguments that the function does not take."""
        return check_key(self.cache, self.make(args, kwargs))


def keys_of(cache: str, function: Callable[..., Any], key: Callable[..., Any] | None) -> Keys:
    """The keys of a function: what ``key`` makes of the arguments, else the arguments, defaults filled in.

    Raises ConfigError for a function with ``**kwargs`` and no ``key``: there is no one order of them.
    """
    if key is not None:
        given = key
        return Keys(cache, lambda args, kwargs: given(*args, **kwargs), None, False)
    signature = inspect.signature(function)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        raise ConfigError(f"cache {cache!r}: a function with **kwargs needs key=, a function that gives its key")
    several = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL]
    by_name = inspect.Parameter.KEYWORD_ONLY in kinds.values()
    count = None if several else len(kinds)

    def make(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if len(args) == count and not kwargs and not by_name:
            return args
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        key: list[Any] = []
        for name, value in bound.arguments.items():
            if name in several:
                key += value
            else:
                key.append(value)
        return tuple(key)

    return Keys(cache, make, count, not by_name)
