"""What a store that can only be read refuses: everything that takes a database of one's own."""

from __future__ import annotations

from typing import Any, NoReturn

from busrep.errors import ConfigError, Unavailable


class ReadOnlyStore:
    """The writing half of an `AsyncStore`, refused. ``where``: what it reads, for errors."""

    read_only = True
    where: str

    async def finish(self, *_: Any, **__: Any) -> NoReturn:
        """See `AsyncStore`; a process with the database has to do that. Raises Unavailable, as a replica does."""
        raise Unavailable(self.where, "it cannot write: a silent writer is finished by a process with the database")

    async def _cannot_write(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: ConfigError."""
        raise ConfigError(f"{self.where} can only be read: writers need the database itself, pass its URL as store=")

    async def _cannot_save(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: ConfigError."""
        raise ConfigError(f"{self.where} can only be read: say with reader_store= where positions are saved")

    def transaction(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: ConfigError."""
        raise ConfigError(f"{self.where} can only be read: writers need the database itself, pass its URL as store=")

    def effects(self) -> NoReturn:
        """Refused: ConfigError."""
        raise ConfigError(f"{self.where} can only be read: say with reader_store= where positions are saved")

    verify = stored_streams = _cannot_write
    init = claim = reserve = outcome = heartbeat = check_claim = prune = restored = status = _cannot_write
    register_reader = load_reader = save_reader = note_stopped = reset_reader = dead_letter = dead_letters = (
        _cannot_save
    )
    begin_bootstrap = save_bootstrap = bootstraps = _cannot_save
