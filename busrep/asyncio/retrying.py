"""Handlers that keep failing: what is known of each, its log lines, and the pauses between the calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from busrep.core.catchup import Key
from busrep.core.failures import RetryPolicy, Transient, Trouble, Verdict, predicate_of, told
from busrep.settings import Settings

from ..runtime.tasks import wait_until_set

log = logging.getLogger("busrep.reader")


class Retrying:
    """The (stream, writer)s whose handlers fail. Of the bootstrap of a stream the writer is ""."""

    def __init__(self, settings: Settings, transient: Transient) -> None:
        self.policy = RetryPolicy(settings, predicate_of(transient))
        self._settings = settings
        self._troubles: dict[Key, Trouble] = {}
        self._ended = asyncio.Event()

    def failed(
        self, key: Key, after: int, error: BaseException, *, facts: int, patient: bool = True, cancelled: bool = False
    ) -> Verdict:
        """A call failed with what follows ``after``. Logs it, and says what follows; see `RetryPolicy.judge`.

        ``cancelled``: the task that called was. If that is the error, it counts as TimeoutError: the rows of a call
        that was cut off are not at fault.
        """
        now = asyncio.get_running_loop().time()
        if cancelled and isinstance(error, asyncio.CancelledError):
            cause, error = error, TimeoutError("the handler was cancelled")
            error.__cause__ = cause
        trouble = self._troubles.get(key)
        if trouble is None or trouble.after != after:
            trouble = self._troubles[key] = Trouble(after, now)
        verdict = self.policy.judge(trouble, error, now, facts=facts, patient=patient)
        if verdict in (Verdict.AGAIN, Verdict.OUTAGE):
            self._log(key, trouble, error, now)
        return verdict

    def _log(self, key: Key, trouble: Trouble, error: BaseException, now: float) -> None:
        known = error if trouble.logged_at is None else None  # one traceback
        if self.policy.to_log(trouble, now):
            what = "an outage: retrying until it is over" if trouble.outage else "trying again"
            values = (*key, trouble.after, trouble.calls, now - trouble.since, what, trouble.error)
            log.warning("handler of (%s, %s) failed behind %d, %d calls in %.1f s, %s: %s", *values, exc_info=known)

    def seconds(self, key: Key, otherwise: float) -> float:
        """How long to wait before the next call; ``otherwise``, where none has failed."""
        trouble = self._troubles.get(key)
        return otherwise if trouble is None else self.policy.pause(trouble)

    async def pause(self, key: Key) -> None:
        """Wait until the next call is due, or the bus closes."""
        await self.sleep(self.seconds(key, self._settings.retry_max))

    async def sleep(self, seconds: float) -> None:
        """Wait so many seconds, or until the bus closes."""
        await wait_until_set(self._ended, seconds)

    def begin(self, key: Key, after: int) -> None:
        """What follows ``after`` is handled next: what failed before that is over."""
        trouble = self._troubles.get(key)
        if trouble is not None and trouble.after != after:
            self.over(key)

    def over(self, key: Key) -> None:
        """What failed was handled, or nobody calls it again."""
        trouble = self._troubles.pop(key, None)
        if trouble is not None and trouble.logged_at is not None:
            lasted = asyncio.get_running_loop().time() - trouble.since
            log.info("(%s, %s) goes on after %d failed calls in %.1f s", *key, trouble.calls, lasted)

    def end(self) -> None:
        """The bus closes: end all pauses."""
        self._ended.set()

    def statistics(self, working: Iterable[Key]) -> dict[str, dict[str, Any]]:
        """What is being retried, JSON-able. ``working``: the keys that are being handled."""
        now, at_work = asyncio.get_running_loop().time(), set(working)
        found = [(key, trouble) for key, trouble in self._troubles.items() if not key[1] or key in at_work]
        return {f"{key[0]} {key[1]}".rstrip(): told(trouble, now) for key, trouble in found}
