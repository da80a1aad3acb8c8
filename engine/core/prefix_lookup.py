"""Why a prefix lookup stopped where it did: read off after the fact, only when somebody records (R5.1, R3.10, R3.20, R3.30, R3.40).

With several groups each is asked again alone: who could have gone further was shortened by another group, the shortest one says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.core.block_hash import BlockHash, hashes_at_block_size
from engine.core.block_stops import BlockStops
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import ChunkedLocalAttentionSpec, CrossAttentionSpec, MambaSpec, SlidingWindowSpec
from engine.core.prefix_history import PrefixHistory
from engine.core.request import Request
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.trace.events import BlockStop, Cause, CauseKind, GroupLookup, PrefixLookup

if TYPE_CHECKING:
    from engine.core.kv_cache_coordinator import CacheHit, KVCacheCoordinator


def explain_lookup(coordinator: KVCacheCoordinator, request: Request, hit: CacheHit, max_hit_tokens: int, history: PrefixHistory) -> PrefixLookup:
    """The event of a lookup with its causes. Changes nothing."""
    managers = coordinator.single_type_managers
    groups: list[GroupLookup] = []
    cause = Cause(CauseKind.CACHING_DISABLED)
    stops: list[BlockStop] = []
    if coordinator.enable_caching and not request.skip_reading_prefix_cache:
        if len(managers) == 1:
            cause, stops = _Group(coordinator, request, max_hit_tokens, history, managers[0]).explain(hit.num_tokens)
        else:
            groups = _explain_groups(coordinator, request, hit, max_hit_tokens, history)
            cause = min(groups, key=lambda group: group.num_hit_tokens).cause
    return PrefixLookup(
        cause=cause,
        request_id=request.request_id,
        group_id=0 if len(managers) == 1 else None,
        num_hit_tokens=hit.num_tokens,
        hit_block_ids=[block.block_id for blocks in hit.blocks for block in blocks if not block.is_null],
        max_hit_tokens=max_hit_tokens,
        stops=stops,
        groups=groups,
        junction=hit.junction,
    )


def _explain_groups(coordinator: KVCacheCoordinator, request: Request, hit: CacheHit, max_hit_tokens: int, history: PrefixHistory) -> list[GroupLookup]:
    explainers = [_Group(coordinator, request, max_hit_tokens, history, manager) for manager in coordinator.single_type_managers]
    alone = [explainer.find_alone() for explainer in explainers]
    shortest = min(range(len(alone)), key=lambda group_id: alone[group_id])
    found: list[GroupLookup] = []
    for group_id, explainer in enumerate(explainers):
        cause, stops = explainer.explain(alone[group_id])
        if alone[group_id] > hit.num_tokens and group_id != shortest:
            cause = Cause(CauseKind.SHORTENED_BY_GROUP, {"by_group": shortest, "num_hit_tokens": alone[group_id]})
        block_ids = [block.block_id for block in hit.blocks[group_id]]
        found.append(GroupLookup(group_id=group_id, num_hit_tokens=alone[group_id], block_ids=block_ids, cause=cause, stops=stops))
    return found


class _Group:
    """One group's part in one lookup."""

    def __init__(
        self, coordinator: KVCacheCoordinator, request: Request, max_hit_tokens: int, history: PrefixHistory, manager: SingleTypeKVCacheManager
    ) -> None:
        self.pool = coordinator.block_pool
        self.request = request
        self.max_hit_tokens = max_hit_tokens
        self.manager = manager
        self.alignment = coordinator.cache_hit_alignment_tokens
        self.dcp_world_size = coordinator.settings.dcp_world_size
        assert self.pool.hash_block_size is not None
        self.hashes: Sequence[BlockHash] = hashes_at_block_size(request.block_hashes, self.pool.hash_block_size, manager.block_size)
        self.stops = BlockStops(request, self.hashes, manager.block_size, manager.kv_cache_group_id, history)

    def _find(self, drop_eagle_block: bool) -> tuple[list[KVCacheBlock], int]:
        manager = self.manager
        size = 1 if isinstance(manager.kv_cache_spec, MambaSpec) else self.dcp_world_size
        arguments = (self.max_hit_tokens, (manager.kv_cache_group_id,), self.pool, manager.kv_cache_spec, drop_eagle_block, self.alignment, size)
        blocks, num_tokens = manager.find_longest_cache_hit(self.request.block_hashes, *arguments)
        return blocks[0], num_tokens

    def find_alone(self) -> int:
        """How many tokens this group would hit if it were the only one."""
        return 0 if isinstance(self.manager.kv_cache_spec, CrossAttentionSpec) else self._find(self.manager.use_eagle)[1]

    def explain(self, num_hit_tokens: int) -> tuple[Cause, list[BlockStop]]:
        """Why the group has no more than `num_hit_tokens`, and what lies behind."""
        spec, block_size, num_tokens = self.manager.kv_cache_spec, self.manager.block_size, self.request.num_tokens
        if isinstance(spec, CrossAttentionSpec):
            return Cause(CauseKind.NOT_SHARED), []
        if num_tokens < block_size and not num_hit_tokens and self.alignment >= block_size:
            return Cause(CauseKind.PREFIX_TOO_SHORT, {"num_tokens": num_tokens, "block_size": block_size}), []
        first = num_hit_tokens // block_size
        looked_at = range(first, self.max_hit_tokens // block_size)
        stops = self.stops.between(looked_at, self._cached_block, needs_parents=not isinstance(spec, MambaSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec))
        if self.manager.use_eagle and not isinstance(spec, MambaSpec):
            undropped = self._find(False)[1]
            if undropped > num_hit_tokens:
                return Cause(CauseKind.EAGLE_DROP, {"num_dropped_tokens": undropped - num_hit_tokens}), stops
        if not any(stop.block_id is None for stop in stops):
            return self._limit(num_hit_tokens, len(looked_at)), stops
        return self._missing(num_hit_tokens, stops), stops

    def _cached_block(self, index: int) -> KVCacheBlock | None:
        found = self.pool.get_cached_block(self.hashes[index], (self.manager.kv_cache_group_id,))
        return found[0] if found else None

    def _limit(self, num_hit_tokens: int, num_cached_behind: int) -> Cause:
        """Nothing is missing below the limit: the limit itself; or the alignment, when blocks behind the hit are cached."""
        block_size = self.manager.block_size
        if num_cached_behind:
            facts = {"alignment_tokens": self.alignment, "num_cached_tokens": num_hit_tokens + num_cached_behind * block_size}
            return Cause(CauseKind.ALIGNMENT, dict(facts))
        index = self.max_hit_tokens // block_size
        num_filled = self.request.num_tokens - index * block_size
        if num_filled < block_size:
            return Cause(CauseKind.BLOCK_NOT_FULL, {"logical_index": index, "num_filled": num_filled, "block_size": block_size})
        return Cause(CauseKind.LAST_TOKEN_RULE, {"logical_index": index, "max_hit_tokens": self.max_hit_tokens})

    def _missing(self, num_hit_tokens: int, stops: Sequence[BlockStop]) -> Cause:
        """Something is missing below the limit: what that means is the attention type's affair."""
        spec = self.manager.kv_cache_spec
        if isinstance(spec, MambaSpec):
            return Cause(CauseKind.NO_STATE, {"max_hit_tokens": self.max_hit_tokens})
        if isinstance(spec, SlidingWindowSpec):
            longest = run = 0
            for stop in stops:
                run = 0 if stop.block_id is None else run + 1
                longest = max(longest, run)
            return Cause(CauseKind.WINDOW_TAIL, {"num_needed": self.manager.get_num_needed_for_hit(), "num_found": longest})
        if isinstance(spec, ChunkedLocalAttentionSpec):
            chunk = self.max_hit_tokens // spec.attention_chunk_size * spec.attention_chunk_size
            if num_hit_tokens <= chunk:
                return Cause(CauseKind.CHUNK_START, {"num_tokens": num_hit_tokens})
        num_cached_behind = next(position for position, stop in enumerate(stops) if stop.block_id is None)
        if num_cached_behind:
            return self._limit(num_hit_tokens, num_cached_behind)
        return stops[0].cause
