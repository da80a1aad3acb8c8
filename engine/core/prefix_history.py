"""What the prefix cache once held: only for explaining, only while somebody records.

The cache itself forgets. To say *why* a block is no hit ("evicted at step 12 for C", "token 9 differs from A's"), what was registered and what became of it
has to be remembered beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.trace.events import BlockCached, BlockEvicted, CauseKind, Emit, Event, PrefixCacheReset


@dataclass(frozen=True)
class Registration:
    """A block's entry: hex hash and group, the tokens of the block, and who registered it."""

    block_hash: str
    token_ids: tuple[int, ...]
    request_id: str


@dataclass(frozen=True)
class Eviction:
    """When an entry went (engine step) and for which request, None when nobody needed the block."""

    step: int
    for_request: str | None


class PrefixHistory:
    """Follows the events on their way to the recorder. `step`: the engine step under way, kept by the scheduler. vLLM: none."""

    def __init__(self, emit: Emit) -> None:
        self.step = 0
        self._emit = emit
        self._children: dict[tuple[int, str | None], dict[str, Registration]] = {}
        self._evictions: dict[tuple[int, str], Eviction] = {}
        self._cached: dict[tuple[int, str], int] = {}

    def emit(self, event: Event) -> None:
        """Remember what `event` says and pass it on."""
        if isinstance(event, BlockCached):
            self._register(event)
        elif isinstance(event, BlockEvicted):
            for_request = event.cause.facts.get("for_request") if event.cause.kind is CauseKind.REALLOCATED else None
            self._forget((event.group_id or 0, event.block_hash), for_request if isinstance(for_request, str) else None)
        elif isinstance(event, PrefixCacheReset) and event.ok:
            for key in list(self._cached):
                self._cached[key] = 1
                self._forget(key, None)
        self._emit(event)

    def _register(self, event: BlockCached) -> None:
        group_id = event.group_id or 0
        children = self._children.setdefault((group_id, event.parent_hash), {})
        children.setdefault(event.block_hash, Registration(event.block_hash, tuple(event.token_ids), event.request_id or ""))
        key = (group_id, event.block_hash)
        self._cached[key] = self._cached.get(key, 0) + 1
        self._evictions.pop(key, None)

    def _forget(self, key: tuple[int, str], for_request: str | None) -> None:
        remaining = self._cached.get(key, 1) - 1
        if remaining:
            self._cached[key] = remaining
        else:
            self._cached.pop(key, None)
            self._evictions[key] = Eviction(self.step, for_request)

    def eviction_of(self, group_id: int, block_hash: str) -> Eviction | None:
        """How the last block of this hash left the cache; None when it never was there, or is."""
        return self._evictions.get((group_id, block_hash))

    def siblings(self, group_id: int, parent_hash: str | None) -> list[Registration]:
        """Everything that was ever registered behind this prefix, oldest first."""
        return list(self._children.get((group_id, parent_hash), {}).values())
