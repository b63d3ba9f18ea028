"""USER_SYNC and CLEAR_USER_SYNC: which users are syncing, on which process.

Each process tells what begins and ends on it; what it told may be lost, and it may crash. So the truth is told again:
when somebody asks (REPLICATE: a process that is new, or was cut off), after the own link was down, and every
``refresh`` seconds. What was not told for ``timeout`` seconds is over.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from busrep.commands import ClearUserSync, Replicate, UserSync
from busrep.errors import Closed, ConfigError, Unavailable

from .bus import Bus
from .news import run_until_closed, wait_until_set
from .tasks import call

log = logging.getLogger("busrep.presence")

# Seconds. A crashed process's users count for five minutes more, as they do in the reference system, where that was
# found short enough for people; four lost refreshes in a row are needed to forget one who is there, and 1,000 users
# cost 17 lines a second.
REFRESH, TIMEOUT = 60.0, 300.0

# Devices syncing per process, and processes: some 200 MB when all are full, so that nothing on the wire fills memory.
USERS, INSTANCES = 10_000, 100

# Lines told again in one go, and the pause behind them (seconds): 5,000/s, and never more than a twentieth of what may
# wait on a bus.
SLICE, SLICE_PAUSE = 500, 0.1

# Seconds between two rounds of telling all. A deployment that starts asks with a burst of REPLICATEs.
ROUND_PAUSE = 1.0


@attrs.frozen
class PresenceChange:
    """A user began to sync on a process, or does not any more. ``last_sync_ms``: Unix time of the latest sync known."""

    user: str
    instance: str
    is_syncing: bool
    last_sync_ms: int


ChangeHandler = Callable[[PresenceChange], Any]


@attrs.define
class _Device:
    """A user's device that syncs. ``count``: how many times at once, here. ``heard``: when it was told, elsewhere."""

    last_sync_ms: int
    count: int = 0
    heard: float = 0.0


@attrs.define(eq=False)
class _Process:
    """Who syncs on one process: {user: {device: ...}}, no user without a device."""

    users: dict[str, dict[str | None, _Device]] = attrs.field(factory=dict)
    count: int = 0

    def get(self, user: str, device: str | None) -> _Device | None:
        return self.users.get(user, {}).get(device)

    def add(self, user: str, device: str | None, last_sync_ms: int) -> _Device:
        self.count += 1
        added = self.users.setdefault(user, {})[device] = _Device(last_sync_ms)
        return added

    def remove(self, user: str, device: str | None) -> None:
        devices = self.users[user]
        del devices[device]
        self.count -= 1
        if not devices:
            del self.users[user]

    def devices(self) -> list[tuple[str, str | None, _Device]]:
        return [(user, device, one) for user, devices in self.users.items() for device, one in devices.items()]


class Presence:
    """Who is syncing where, on an open bus; lives as long as the bus.

    ``instance_id``: this process's name, unlike any other live one's. Every ``refresh`` seconds (jittered by ±10 %) the
    own users are told again; what another process did not tell for ``timeout`` seconds is forgotten. All processes
    need the same two. ``users``: most devices per process, ``instances``: most other processes; what goes beyond is
    counted and logged. Raises ConfigError.
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
    ) -> None:
        if not 0 < 2 * refresh <= timeout:
            raise ConfigError(f"timeout={timeout!r} is to be twice refresh={refresh!r} or more: one line may be lost")
        self._clear = ClearUserSync(instance_id)
        self._bus, self.instance_id = bus, instance_id
        self._refresh, self._timeout, self._most_users, self._most_instances = refresh, timeout, users, instances
        self._own = _Process()
        self._others: dict[str, _Process] = {}
        self._handlers: list[ChangeHandler] = []
        self._asked = asyncio.Event()
        self._sending = asyncio.Lock()
        self._cleared = self._closed = False
        self.refused = 0
        """What others told that found no room."""
        bus.on(UserSync)(self._heard)
        bus.on(ClearUserSync)(self._heard_clear)
        bus.on(Replicate)(lambda _: self._asked.set())
        bus.on_connect(self._connected)
        run_until_closed(bus, self._keep_telling(), "presence", self._say_goodbye)

    # -- the own users ----------------------------------------------------------------------------------------

    async def start(self, user: str, device: str | None = None) -> None:
        """A user began to sync here; each start needs its ``stop``.

        Others are told, now or when Redis is back. Raises ConfigError for a name that is empty or holds a space, or
        when ``users`` sync already, and Closed.
        """
        self._check_open()
        now = int(time.time() * 1000)
        command = UserSync(self.instance_id, user, device, True, now)
        own = self._own.get(user, device)
        if own is not None:
            own.count, own.last_sync_ms = own.count + 1, now
            return
        if self._own.count >= self._most_users:
            raise ConfigError(f"{self._most_users} devices sync here already: raise Presence(users=)")
        begins = user not in self._own.users
        self._own.add(user, device, now).count = 1
        await self._try_to_send(command)
        if begins:
            await self._changed(PresenceChange(user, self.instance_id, True, now))

    async def stop(self, user: str, device: str | None = None) -> None:
        """One sync of the user ended; with the last one it is not syncing here any more.

        Raises ConfigError without a start, and Closed.
        """
        self._check_open()
        own = self._own.get(user, device)
        if own is None:
            raise ConfigError(f"stop({user!r}, {device!r}): it did not start, or was stopped as often")
        own.count -= 1
        if own.count:
            return
        self._own.remove(user, device)
        ends = user not in self._own.users
        await self._try_to_send(UserSync(self.instance_id, user, device, False, int(time.time() * 1000)))
        if ends:
            await self._changed(PresenceChange(user, self.instance_id, False, own.last_sync_ms))

    # -- everybody's ------------------------------------------------------------------------------------------

    def syncing(self) -> dict[str, dict[str, int]]:
        """Who syncs now, {user: {instance: last_sync_ms}}, here and elsewhere."""
        found: dict[str, dict[str, int]] = {}
        for instance, process in ((self.instance_id, self._own), *self._others.items()):
            for user, devices in process.users.items():
                found.setdefault(user, {})[instance] = max(one.last_sync_ms for one in devices.values())
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
            "own": self._own.count,
            "others": {instance: process.count for instance, process in self._others.items()},
            "refused": self.refused,
        }

    # -- what others tell -------------------------------------------------------------------------------------

    async def _heard(self, command: UserSync) -> None:
        instance, user, device = command.instance_id, command.user_id, command.device_id
        if instance == self.instance_id:  # the own echo
            return
        if not command.is_syncing:
            await self._forget(instance, [(user, device)])
            return
        process = self._others.get(instance)
        seen = process.get(user, device) if process is not None else None
        begins = process is None or user not in process.users
        if seen is None:
            if not self._has_room(process):
                self._refuse(command)
                return
            process = self._others.setdefault(instance, process or _Process())
            seen = process.add(user, device, command.last_sync_ms)
        seen.last_sync_ms = max(seen.last_sync_ms, command.last_sync_ms)
        seen.heard = asyncio.get_running_loop().time()
        if begins:
            await self._changed(PresenceChange(user, instance, True, command.last_sync_ms))

    async def _heard_clear(self, command: ClearUserSync) -> None:
        instance = command.instance_id
        if instance == self.instance_id:
            # The own echo; or a predecessor ended only now, and made the others forget this process's users.
            if self._own.count:
                self._asked.set()
        elif instance in self._others:
            await self._forget(instance, [(user, device) for user, device, _ in self._others[instance].devices()])

    def _has_room(self, process: _Process | None) -> bool:
        return len(self._others) < self._most_instances if process is None else process.count < self._most_users

    def _refuse(self, command: UserSync) -> None:
        if not self.refused:
            log.warning("no room for presence on %s: raise Presence(users=, instances=)", command.instance_id)
        self.refused += 1

    async def _forget(self, instance: str, gone: Iterable[tuple[str, str | None]]) -> None:
        process = self._others.get(instance)
        if process is None:
            return
        changes = []
        for user, device in gone:
            one = process.get(user, device)
            if one is not None:
                process.remove(user, device)
                if user not in process.users:
                    changes.append(PresenceChange(user, instance, False, one.last_sync_ms))
        if not process.count:
            del self._others[instance]
        for change in changes:
            await self._changed(change)

    async def _changed(self, change: PresenceChange) -> None:
        for handler in list(self._handlers):
            try:
                await call(handler, change)
            except Exception:
                log.exception("a handler of presence failed")

    # -- telling ----------------------------------------------------------------------------------------------

    async def _send(self, command: UserSync | None = None) -> None:
        """Send it, in the order asked for; before the first, what a predecessor of this name left is ended."""
        async with self._sending:
            if not self._cleared:
                await self._bus.send(self._clear)
                self._cleared = True
            if command is not None:
                await self._bus.send(command)

    async def _try_to_send(self, command: UserSync | None = None) -> bool:
        try:
            await self._send(command)
        except Unavailable as error:  # Redis is away, and all is told again when it is back
            log.debug("presence was not told: %s", error)
            return False
        return True

    def _connected(self) -> None:
        self._asked.set()
        # Nothing was heard while the link was down, from nobody: they have one refresh more to be heard again.
        least = asyncio.get_running_loop().time() - self._timeout + self._refresh
        for process in self._others.values():
            for _, _, seen in process.devices():
                seen.heard = max(seen.heard, least)

    async def _keep_telling(self) -> None:
        clock = asyncio.get_running_loop().time
        await self._try_to_send()
        due = self._next_round(clock())
        while True:
            # The silent are forgotten at most a tenth of the timeout late.
            asked = await wait_until_set(self._asked, max(0.0, min(self._timeout / 10, due - clock())))
            await self._forget_the_silent(clock() - self._timeout)
            if asked or clock() >= due:
                self._asked.clear()
                due = self._next_round(clock())
                await self._tell_all()
                await asyncio.sleep(ROUND_PAUSE * (0.5 + random.random() / 2))

    def _next_round(self, now: float) -> float:
        return now + self._refresh * (0.9 + 0.2 * random.random())

    async def _tell_all(self) -> None:
        for at, (user, device, _) in enumerate(self._own.devices(), 1):
            own = self._own.get(user, device)  # it may have ended meanwhile, and that was told
            if own is not None and not await self._try_to_send(
                UserSync(self.instance_id, user, device, True, own.last_sync_ms)
            ):
                return
            if at % SLICE == 0:
                await asyncio.sleep(SLICE_PAUSE)

    async def _forget_the_silent(self, bound: float) -> None:
        for instance, process in list(self._others.items()):
            gone = [(user, device) for user, device, seen in process.devices() if seen.heard <= bound]
            if gone:
                log.info("process %s did not tell of %d devices any more", instance, len(gone))
                await self._forget(instance, gone)

    async def _say_goodbye(self) -> None:
        self._closed = True
        async with self._sending:
            await self._bus.send(self._clear)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed
