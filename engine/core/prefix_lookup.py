"""Why a prefix lookup stopped where it did: read off after the fact, only when somebody records (R5.1, R3.10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.request import Request
from engine.trace.events import Cause, CauseKind, PrefixLookup

if TYPE_CHECKING:
    from engine.core.kv_cache_coordinator import CacheHit, KVCacheCoordinator


def explain_lookup(coordinator: KVCacheCoordinator, request: Request, hit: CacheHit, max_hit_tokens: int) -> PrefixLookup:
    """The event of a lookup with its cause. Changes nothing."""
    return PrefixLookup(
        cause=_cause(coordinator, request, hit, max_hit_tokens),
        request_id=request.request_id,
        group_id=0 if len(hit.blocks) == 1 else None,
        num_hit_tokens=hit.num_tokens,
        hit_block_ids=[block.block_id for blocks in hit.blocks for block in blocks if not block.is_null],
        max_hit_tokens=max_hit_tokens,
        junction=hit.junction,
    )


def _cause(coordinator: KVCacheCoordinator, request: Request, hit: CacheHit, max_hit_tokens: int) -> Cause:
    """The cause of the hit's end: the first block that is not cached, a block that is not full, the rule that one token must run, a prompt
    without any full block, or caching switched off. Changes nothing."""
    if not coordinator.enable_caching or request.skip_reading_prefix_cache:
        return Cause(CauseKind.CACHING_DISABLED)
    block_size = coordinator.single_type_managers[0].block_size
    num_tokens = request.num_tokens
    if num_tokens < block_size:
        return Cause(CauseKind.PREFIX_TOO_SHORT, {"num_tokens": num_tokens, "block_size": block_size})
    index = len(hit.blocks[0])
    # Dropped behind the walk's end (EAGLE), a block may still be cached: go on to the one that ended the walk.
    while index < max_hit_tokens // block_size:
        if coordinator.block_pool.get_cached_block(request.block_hashes[index], (0,)) is None:
            return Cause(CauseKind.NOT_CACHED, {"logical_index": index, "num_tokens": (index + 1) * block_size})
        index += 1
    num_filled = num_tokens - index * block_size
    if num_filled < block_size:
        return Cause(CauseKind.BLOCK_NOT_FULL, {"logical_index": index, "num_filled": num_filled, "block_size": block_size})
    return Cause(CauseKind.LAST_TOKEN_RULE, {"logical_index": index, "max_hit_tokens": max_hit_tokens})
