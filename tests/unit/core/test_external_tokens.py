"""R5.2, R5.3 e: tokens that a KV connector brings behind the local hit. The tables are those of real vLLM 0.27.0 for the same calls, recorded once."""

from __future__ import annotations

import pytest

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from engine.core.request import Request, RequestStatus

FULL, WINDOW, STATES = FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=8), MambaSpec(4, mamba_cache_mode="all")

Recorded = tuple[list[KVCacheSpec], int, int, int, int, int, list[list[int]] | None, list[list[int]], list[int | None], list[int]]

RECORDED: dict[str, Recorded] = {
    # groups, num_blocks, tokens: cached before, from outside, in all -> hit, new blocks, tables, frontiers, what stands in the queue behind fresh blocks
    "full": ([FULL], 30, 8, 8, 20, 8, [[5]], [[1, 2, 3, 4, 5]], [5], []),
    "full, nothing cached": ([FULL], 30, 0, 8, 20, 0, [[3, 4, 5]], [[1, 2, 3, 4, 5]], [5], []),
    "window": ([WINDOW], 30, 9, 12, 28, 8, [[5, 6]], [[0, 0, 0, 3, 4, 5, 6]], [7], [2, 1]),
    "window, nothing cached": ([WINDOW], 30, 0, 16, 24, 0, [[3, 4]], [[0, 0, 1, 2, 3, 4]], [6], []),
    "hybrid": ([FULL, WINDOW], 30, 16, 8, 29, 16, [[13, 14], [15, 16]], [[1, 2, 3, 4, 9, 10, 13, 14], [0, 0, 0, 0, 11, 12, 15, 16]], [7, 7], [8, 7, 6, 5]),
    "states": ([STATES], 30, 9, 8, 20, 8, [[4]], [[0, 0, 0, 3, 4]], [5], [2, 1]),
    "nothing to compute": ([FULL], 30, 0, 8, 8, 0, [[]], [[1, 2]], [2], []),
    "does not fit": ([FULL, WINDOW], 12, 16, 8, 29, 16, None, [[], []], [None, None], [4, 3, 2, 1, 8, 7, 6, 5]),
}


@pytest.mark.parametrize("name", RECORDED)
def test_tables_are_vllm_s(name: str) -> None:
    specs, num_blocks, num_cached, num_external, num_tokens, hit, new_blocks, tables, frontiers, queue_tail = RECORDED[name]
    manager = KVCacheManager(KVCacheConfig(num_blocks, [KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(specs)]), 8192)
    hasher = BlockHasher(4, "sha256_cbor")
    if num_cached:
        first = Request("A", range(num_cached), block_hasher=hasher)
        assert manager.allocate_slots(first, num_cached) is not None
        manager.free(first)
        manager.new_step_starts()
    request = Request("B", range(num_tokens), block_hasher=hasher)
    found = manager.get_computed_blocks(request)
    assert found.num_tokens == hit
    num_new = num_tokens - hit - num_external
    allocated = manager.allocate_slots(request, num_new, hit, found.blocks, num_external_computed_tokens=num_external)
    assert (None if allocated is None else list(allocated.get_block_ids())) == new_blocks
    assert list(manager.get_block_ids("B")) == tables
    assert [m.num_cached_block.get("B") for m in manager.coordinator.single_type_managers] == frontiers
    free = [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]
    used = {block_id for table in tables for block_id in table}
    fresh = [block_id for block_id in range(1, num_blocks) if block_id not in used and block_id not in queue_tail]
    assert free == fresh + queue_tail


def test_blocks_that_are_still_being_loaded_are_not_cached() -> None:
    """R5.3 g: with delay_cache_blocks nothing is registered; the load's end does it (cache_blocks)."""
    manager = KVCacheManager(KVCacheConfig(30, [KVCacheGroupSpec(["l"], FULL)]), 64)
    request = Request("A", range(9), block_hasher=BlockHasher(4, "sha256_cbor"))
    assert manager.allocate_slots(request, 0, num_external_computed_tokens=8, delay_cache_blocks=True) is not None
    assert len(manager.block_pool.cached_block_hash_to_block) == 0
    request.num_computed_tokens, request.status = 8, RequestStatus.RUNNING
    manager.cache_blocks(request, 8)
    assert len(manager.block_pool.cached_block_hash_to_block) == 2
