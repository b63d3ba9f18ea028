"""Child processes of an orchestrated run, and how they and their parent talk: one JSON object a line, both ways.

The first message tells a child its task (URLs hold passwords, so not on its command line). A child ends when its
parent is gone, however that happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from busrep.errors import WriterFenced

# Longest line a child may send: its statistics.
LINE_BYTES = 4 * 2**20
# Exit status of a writer whose name was claimed by another process: a supervisor starts it again.
FENCED = 3
# Exit status of a child whose parent is gone.
ORPHANED = 4


@attrs.define(eq=False)
class ChildProcess:
    """One child, as its parent sees it. ``latest`` holds the newest value of everything it reported."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    latest: dict[str, Any] = attrs.field(factory=dict)

    @classmethod
    async def start(cls, module: str, name: str, task: Mapping[str, object], log: Path) -> Self:
        """Start ``python -m module`` and tell it its task; ``listen`` must run from now on."""
        root = str(Path(__file__).parent.parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=LINE_BYTES,
                env={**os.environ, "PYTHONPATH": path},
                # Ctrl-C in the terminal is the parent's: it ends the children itself.
                start_new_session=True,
            )
        child = cls(name, process, log)
        child.tell(**task)
        return child

    @property
    def running(self) -> bool:
        """Whether it has not ended; a stopped one (SIGSTOP) runs."""
        return self.process.returncode is None

    def tell(self, **what: object) -> None:
        """Send it a message; one that has just died does not read it."""
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(json.dumps(what).encode() + b"\n")

    async def listen(self) -> int:
        """Take in its reports until it ends; its exit status, negative for a signal."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if line.endswith(b"\n"):  # a killed process may leave half a line
                self.latest.update(json.loads(line))
        return await self.process.wait()

    def signal(self, signum: signal.Signals) -> None:
        """Send it a signal, if it lives."""
        if self.running:
            self.process.send_signal(signum)

    async def kill(self) -> None:
        """SIGKILL, which a stopped one obeys too, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        await self.process.wait()


def end_with_parent() -> None:
    """However the parent ends, this process ends too; on Linux. Call it in the child."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


class Parent:
    """The child's end of the two pipes. Make it on the event loop, in the main thread."""

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        end_with_parent()  # one that is stopped would not see its input end
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        # The file descriptor itself: a buffered reader would be locked by this thread when the process exits.
        rest = b""
        while piece := os.read(0, 65_536):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                loop.call_soon_threadsafe(self._inbox.put_nowait, json.loads(line))
        os._exit(ORPHANED)

    async def hear(self) -> dict[str, Any]:
        """The next message."""
        return await self._inbox.get()

    def tell(self, **what: object) -> None:
        """Send a message."""
        sys.stdout.buffer.write(json.dumps(what).encode() + b"\n")
        sys.stdout.buffer.flush()


def run_child(name: str, work: Callable[[Parent, dict[str, Any]], Awaitable[None]]) -> None:
    """The life of a child process: hear the task, and do the work. Its log, ``name`` among others, is on stderr.

    Exits with status `FENCED` when the work, done in a task group, ends because the writer's name was claimed.
    """

    async def live() -> None:
        parent = Parent()
        await work(parent, await parent.hear())

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    status = 0
    with contextlib.suppress(KeyboardInterrupt):
        try:
            asyncio.run(live())
        except* WriterFenced as fenced:
            logging.getLogger(name).error("%s", fenced.exceptions[0])
            status = FENCED  # CPython 3.11.2 would put an exit from here into a group, which ends in status 1
    sys.exit(status)
