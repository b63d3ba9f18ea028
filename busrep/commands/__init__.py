"""Commands that applications exchange beside rows, and helpers over them.

`Bus.send` takes the commands named here. `presence`, `acks`, `locks` and `remote_servers` keep the state that some of
them change, and send them again where one may have been lost.
"""

from __future__ import annotations

from ..core.application_commands import (
    CancelTask,
    ClearUserSync,
    LockReleased,
    NewActiveTask,
    RemoteServerUp,
    UserIp,
    UserSync,
)

__all__ = ["CancelTask", "ClearUserSync", "LockReleased", "NewActiveTask", "RemoteServerUp", "UserIp", "UserSync"]
