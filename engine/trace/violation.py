"""A broken invariant, as the checks of this package report it."""

from __future__ import annotations

import msgspec


class Violation(msgspec.Struct, frozen=True):
    """One broken invariant: its name, the sentence to show, and the block it is about (None: the pool as a whole)."""

    invariant: str
    message: str
    block_id: int | None = None
