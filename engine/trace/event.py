"""What every event has."""

from __future__ import annotations

import msgspec

from engine.trace.causes import Cause


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all events. `request_id` and `group_id` are None where the event belongs to no single request or KV-cache group."""

    cause: Cause
    request_id: str | None = None
    group_id: int | None = None
