"""USER_SYNC and CLEAR_USER_SYNC: which users are syncing, on which process.

Each process tells what begins and ends on it; what it told may be lost, and it may crash. So the truth is told again:
when somebody asks (REPLICATE: a process that is new, or was cut off), after the own link was down, and every
``refresh`` seconds. What was not told for ``timeout`` seconds is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from busrep.core.application_commands import ClearUserSync, UserSync
from busrep.core.commands import Replicate
from busrep.errors import Closed, ConfigError, Unavailable

from ..asyncio.bus import Bus
from ..asyncio.messages import COMMAND_QUEUE
from ..runtime.tasks import wait_until_set
from .news import call_all, in_background, run_until_closed, see_through

log = logging.getLogger("busrep.presence")

# Seconds. A crashed process's users count for five minutes more, as they do in the reference system, where that was
# found short enough for people; four lost refreshes in a row are needed to forget one who is there, and 1,000 users
# cost 17 lines a second.
REFRESH, TIMEOUT = 60.0, 300.0

# Devices syncing per process, and processes; and bytes of all that others tell, so that nothing on the wire fills
# memory: names may have 255 bytes. They are for some 600,000 devices with names of usual length.
USERS, INSTANCES, MAX_BYTES = 10_000, 100, 256 * 2**20

# What a device costs beside the characters of its names, measured: strings, numbers, its places in two dicts.
DEVICE_BYTES = 430

# Lines told again in one go, and the pause behind them (seconds): 5,000/s, and about a twentieth of what may wait on a
# bus: it goes on when Redis has taken them.
SLICE, SLICE_PAUSE = 500, 0.1

# Commands that wait on the bus for Redis, above which it is not told what begins and ends: the rest is for other news.
# What is told of presence is told again.
MOST_WAITING = COMMAND_QUEUE // 2

# Seconds between two rounds of telling all, at least: a deployment that starts asks with a burst of REPLICATEs.
ROUND_PAUSE = 1.0
# Lines that a flood of REPLICATEs may cost a second, each heard by every process: a long round is not soon told again.
TOLD_AGAIN = 1_000


@attrs.frozen
class PresenceChange:
    """A user began to sync on a process, or does not any more. ``last_sync_ms``: Unix time of the latest sync known."""

    user: str
    instance: str
    is_syncing: bool
    last_sync_ms: int


ChangeHandler = Callable[[PresenceChange], Any]


_Key = tuple[str, str | None]  # a user and a device


def _size(key: _Key) -> int:
    """Bytes that a device costs. Of a text with one wide character each takes four."""
    text = key[0] + (key[1] or "")
    return DEVICE_BYTES + len(text) * (1 if text.isascii() else 4)


@attrs.define
class _Device:
    """A user's device that syncs. ``count``: how many times at once, here. ``heard``: when it was told, elsewhere."""

    last_sync_ms: int
    count: int = 0
    heard: float = 0.0


@attrs.define(eq=False)
class _ProcessUsers:
    """What syncs on one process. ``users``: how many devices of each; ``bytes``: what they cost."""

    devices: dict[_Key, _Device] = attrs.field(factory=dict)
    users: Counter[str] = attrs.field(factory=Counter)
    bytes: int = 0

    def add(self, key: _Key, last_sync_ms: int) -> _Device:
        self.users[key[0]] += 1
        self.bytes += _size(key)
        added = self.devices[key] = _Device(last_sync_ms)
        return added

    def remove(self, key: _Key) -> None:
        del self.devices[key]
        self.bytes -= _size(key)
        self.users[key[0]] -= 1
        if not self.users[key[0]]:
            del self.users[key[0]]


class Presence:
    """Who is syncing where, on an open bus; lives as long as the bus.

    ``instance_id``: this process's name, unlike any other live one's. Every ``refresh`` seconds (jittered by ±10 %) the
    own users are told again; what another process did not tell for ``timeout`` seconds is forgotten. All processes
    need the same two. ``users``: most devices per process, ``instances``: most other processes, ``max_bytes``: of what
    all of them tell; what goes beyond is counted and logged. Names have at most 255 bytes, as all on the wire. Raises
    ConfigError.
    """

    def __init__(
        self,
        bus: Bus,
        instance_id: str,
        *,
        refresh: float = REFRESH,
        timeout: float = TIMEOUT,
        users: int = USERS,
        instances: int = INSTANCES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if not 0 < 2 * refresh <= timeout:
            raise ConfigError(f"timeout={timeout!r} is to be twice refresh={refresh!r} or more: one line may be lost")
        self._clear = ClearUserSync(instance_id)
        self._bus, self.instance_id = bus, instance_id
        self._refresh, self._timeout, self._most_users, self._most_instances = refresh, timeout, users, instances
        self._max_bytes = max_bytes
        self._own = _ProcessUsers()
        self._others: dict[str, _ProcessUsers] = {}
        self._handlers: list[ChangeHandler] = []
        self._asked = asyncio.Event()
        self._patient_until = 0.0
        self._sending = asyncio.Lock()
        self._cleared = self._closed = False
        self.refused = 0
        """What others told that found no room."""
        bus.on(UserSync)(self._heard)
        bus.on(ClearUserSync)(self._heard_clear)
        bus.on(Replicate)(lambda _: self._asked.set())
        bus.on_connect(self._connected)
        run_until_closed(bus, self._keep_telling, "presence", self._say_goodbye)
        run_until_closed(bus, self._keep_forgetting, "presence-forget", lambda: None)

    # -- the own users ----------------------------------------------------------------------------------------

    async def start(self, user: str, device: str | None = None) -> None:
        """A user began to sync here; each start needs its ``stop``.

        Others are told, now or when Redis is back. Cancelled, which it may be while it waits for handlers of
        ``on_change``, it counts for nothing. Raises ConfigError for a name that is empty, too long or holds a space, or
        when ``users`` sync already, and Closed.
        """
        self._check_open()
        now = int(time.time() * 1000)
        command = UserSync(self.instance_id, user, device, True, now)
        own = self._own.devices.get((user, device))
        if own is not None:
            own.count, own.last_sync_ms = own.count + 1, now
            return
        if len(self._own.devices) >= self._most_users:
            raise ConfigError(f"{self._most_users} devices sync here already: raise Presence(users=)")
        begins = user not in self._own.users
        self._own.add((user, device), now).count = 1
        await self._try_to_send(command)
        if begins:
            try:
                await see_through(self._changed([PresenceChange(user, self.instance_id, True, now)]))
            except asyncio.CancelledError:  # whoever does not come out of start() does not stop() either
                with contextlib.suppress(ConfigError):  # but somebody else has
                    in_background(self._changed(await self._end(user, device)))
                raise

    async def stop(self, user: str, device: str | None = None) -> None:
        """One sync of the user ended; with the last one it is not syncing here any more.

        Raises ConfigError without a start, and Closed.
        """
        self._check_open()
        await see_through(self._changed(await self._end(user, device)))

    async def _end(self, user: str, device: str | None) -> list[PresenceChange]:
        own = self._own.devices.get((user, device))
        if own is None:
            raise ConfigError(f"stop({user!r}, {device!r}): it did not start, or was stopped as often")
        own.count -= 1
        if own.count:
            return []
        self._own.remove((user, device))
        ends = user not in self._own.users
        await self._try_to_send(UserSync(self.instance_id, user, device, False, int(time.time() * 1000)))
        return [PresenceChange(user, self.instance_id, False, own.last_sync_ms)] if ends else []

    # -- everybody's ------------------------------------------------------------------------------------------

    def syncing(self) -> dict[str, dict[str, int]]:
        """Who syncs now, {user: {instance: last_sync_ms}}, here and elsewhere."""
        found: dict[str, dict[str, int]] = {}
        for instance, process in ((self.instance_id, self._own), *self._others.items()):
            for (user, _), one in process.devices.items():
                latest = found.setdefault(user, {})
                latest[instance] = max(one.last_sync_ms, latest.get(instance, 0))
        return found

    def on_change(self, handler: ChangeHandler) -> ChangeHandler:
        """Call ``handler`` (async or not) with each `PresenceChange`, this process's own too.

        In order; but a later one does not wait for an async handler of an earlier: `syncing` knows what holds now.
        """
        self._handlers.append(handler)
        return handler

    def statistics(self) -> dict[str, Any]:
        """Levels and counters, JSON-able."""
        return {
            "own": len(self._own.devices),
            "others": {instance: len(process.devices) for instance, process in self._others.items()},
            "refused": self.refused,
        }

    # -- what others tell -------------------------------------------------------------------------------------

    async def _heard(self, command: UserSync) -> None:
        instance, key = command.instance_id, (command.user_id, command.device_id)
        if instance == self.instance_id:  # the own echo
            return
        if not command.is_syncing:
            await self._changed(self._forget(instance, [key]))
            return
        process = self._others.get(instance) or _ProcessUsers()
        begins = command.user_id not in process.users
        seen = process.devices.get(key)
        if seen is None:
            if not self._has_room(instance, _size(key)):
                if not self.refused:
                    log.warning(
                        "no room for presence on %.100s: raise Presence(users=, instances=, max_bytes=)", instance
                    )
                self.refused += 1
                return
            self._others[instance] = process
            seen = process.add(key, command.last_sync_ms)
        seen.last_sync_ms = max(seen.last_sync_ms, command.last_sync_ms)
        seen.heard = asyncio.get_running_loop().time()
        if begins:
            await self._changed([PresenceChange(command.user_id, instance, True, command.last_sync_ms)])

    async def _heard_clear(self, command: ClearUserSync) -> None:
        instance = command.instance_id
        if instance == self.instance_id:
            # The own echo; or a predecessor ended only now, and made the others forget this process's users.
            if self._own.devices:
                self._asked.set()
        elif instance in self._others:
            await self._changed(self._forget(instance, list(self._others[instance].devices)))

    def _has_room(self, instance: str, size: int) -> bool:
        if sum(other.bytes for other in self._others.values()) + size > self._max_bytes:
            return False
        if instance not in self._others:
            return len(self._others) < self._most_instances
        return len(self._others[instance].devices) < self._most_users

    def _forget(self, instance: str, gone: Iterable[_Key]) -> list[PresenceChange]:
        process = self._others.get(instance)
        if process is None:
            return []
        changes = []
        for key in gone:
            one = process.devices.get(key)
            if one is not None:
                process.remove(key)
                if key[0] not in process.users:
                    changes.append(PresenceChange(key[0], instance, False, one.last_sync_ms))
        if not process.devices:
            del self._others[instance]
        return changes

    async def _changed(self, changes: Sequence[PresenceChange]) -> None:
        for change in changes:
            await call_all(self._handlers, change, "presence")

    # -- telling ----------------------------------------------------------------------------------------------

    async def _try_to_send(self, command: UserSync | None = None) -> bool:
        """Send it, in the order asked for; before the first, what a predecessor of this name left is ended."""
        try:
            if (waiting := self._bus.commands_waiting) >= MOST_WAITING:
                raise Unavailable("Redis", f"{waiting} commands are waiting for it")
            async with self._sending:
                if not self._cleared:
                    await self._bus.send(self._clear)
                    self._cleared = True
                if command is not None:
                    await self._bus.send(command)
        except (Closed, Unavailable) as error:  # Redis is away, and all is told again when it is back
            log.debug("presence was not told: %s", error)
            return False
        return True

    def _connected(self) -> None:
        self._asked.set()
        # Nothing was heard while the link was down, from nobody: they have one refresh more to be heard again.
        self._patient_until = asyncio.get_running_loop().time() + self._refresh

    async def _keep_telling(self) -> None:
        clock = asyncio.get_running_loop().time
        await self._try_to_send()
        begun = clock()
        while True:
            due = begun + self._refresh * (0.9 + 0.2 * random.random())
            await wait_until_set(self._asked, max(0.0, due - clock()))
            self._asked.clear()
            begun = clock()
            told = await self._tell_all()
            pause = min(told / TOLD_AGAIN, self._refresh / 2)
            await asyncio.sleep(max(ROUND_PAUSE * (0.5 + random.random() / 2), pause))

    async def _tell_all(self) -> int:
        """Tell of all own devices, until one cannot be told. Gives how many there were until then."""
        at = 0
        for at, key in enumerate(list(self._own.devices), 1):
            own = self._own.devices.get(key)  # it may have ended meanwhile, and that was told
            if own is not None and not await self._try_to_send(
                UserSync(self.instance_id, *key, True, own.last_sync_ms)
            ):
                break
            if at % SLICE == 0:
                while True:
                    await asyncio.sleep(SLICE_PAUSE)
                    if self._bus.commands_waiting < SLICE:
                        break
        return at

    async def _keep_forgetting(self) -> None:
        """The silent are forgotten at most a tenth of the timeout late, whatever becomes of the telling."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._timeout / 10)
            # But where the link is down every other minute, the crashed must not live for ever.
            bound = clock() - self._timeout * (2 if clock() < self._patient_until else 1)
            changes = []
            for instance, process in list(self._others.items()):
                gone = [key for key, seen in process.devices.items() if seen.heard <= bound]
                if gone:
                    log.info("process %s did not tell of %d devices any more", instance, len(gone))
                    changes += self._forget(instance, gone)
            if changes:
                in_background(self._changed(changes))  # a handler that hangs keeps nothing else from being forgotten

    async def _say_goodbye(self) -> None:
        self._closed = True
        async with self._sending:
            await self._bus.send(self._clear)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed
