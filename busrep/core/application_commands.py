"""The commands that carry news of the application, and mean nothing to replication: see `busrep.commands`."""

from __future__ import annotations

import attrs

from . import fields
from .fields import Line


@attrs.frozen
class UserSync(Line):
    """``USER_SYNC instance_id user_id device_id|None start|end last_sync_ms``: a user starts or stops."""

    NAME = b"USER_SYNC"
    instance_id: str = attrs.field(validator=fields.WORD)
    user_id: str = attrs.field(validator=fields.WORD)
    device_id: str | None = attrs.field(validator=fields.DEVICE)
    is_syncing: bool = attrs.field(validator=fields.SWITCH)
    last_sync_ms: int = attrs.field(validator=fields.INT)


@attrs.frozen
class ClearUserSync(Line):
    """``CLEAR_USER_SYNC instance_id``: forget all users of that process."""

    NAME = b"CLEAR_USER_SYNC"
    instance_id: str = attrs.field(validator=fields.WORD)


@attrs.frozen
class FederationAck(Line):
    """``FEDERATION_ACK instance token``: receipt of federation data."""

    NAME = b"FEDERATION_ACK"
    instance: str = attrs.field(validator=fields.WORD)
    token: int = attrs.field(validator=fields.INT)


@attrs.frozen
class RemoteServerUp(Line):
    """``REMOTE_SERVER_UP server``: a remote server may be back."""

    NAME = b"REMOTE_SERVER_UP"
    server: str = attrs.field(validator=fields.WORD)


@attrs.frozen
class UserIp(Line):
    """``USER_IP user_id [access_token, ip, user_agent, device_id|null, last_seen_ms]``; on its own channel."""

    NAME = b"USER_IP"
    JSON_FROM = 1
    user_id: str = attrs.field(validator=fields.WORD)
    access_token: str = attrs.field(validator=fields.STRING)
    ip: str = attrs.field(validator=fields.STRING)
    user_agent: str = attrs.field(validator=fields.STRING)
    device_id: str | None = attrs.field(validator=fields.STRING_OR_NULL)
    last_seen_ms: int = attrs.field(validator=fields.INT)


@attrs.frozen
class LockReleased(Line):
    """``LOCK_RELEASED [instance, lock, key]``."""

    NAME = b"LOCK_RELEASED"
    JSON_FROM = 0
    instance: str = attrs.field(validator=fields.STRING)
    lock: str = attrs.field(validator=fields.STRING)
    key: str = attrs.field(validator=fields.STRING)


@attrs.frozen
class NewActiveTask(Line):
    """``NEW_ACTIVE_TASK task_id``."""

    NAME = b"NEW_ACTIVE_TASK"
    task_id: str = attrs.field(validator=fields.WORD)


@attrs.frozen
class CancelTask(Line):
    """``CANCEL_TASK task_id``."""

    NAME = b"CANCEL_TASK"
    task_id: str = attrs.field(validator=fields.WORD)
