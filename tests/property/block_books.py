"""What holds of a block pool and its tables after whatever happened, recounted from scratch (R1.2, R1.4, R1.6, R1.7, R1.10, R1.12, S17)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from engine.core.block_pool import BlockPool
from engine.core.full_attention_manager import SinkFullAttentionManager
from engine.core.kv_cache_manager import KVCacheManager


def check_pool(pool: BlockPool) -> None:
    """Free + used + null is all; queued iff nobody refers to it; the queue is as long as it says; keys and map agree both ways; the null block stays out."""
    queued = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert len(queued) == len(set(queued)) == pool.get_num_free_blocks()
    assert walk_backwards(pool) == queued[::-1]
    used = [block for block in pool.blocks if block.ref_cnt > 0 and not block.is_null]
    assert len(queued) + len(used) + 1 == len(pool.blocks)
    for block in pool.blocks:
        assert (block.block_id in queued) == (block.ref_cnt == 0 and not block.is_null)
        assert (block.prev_free_block is None) == (block.next_free_block is None) == (block.block_id not in queued)
    null = pool.null_block
    assert null.is_null
    assert null.block_hash is None
    assert null.block_id not in queued
    keys = {(key, block.block_id) for block in pool.blocks for key in keys_of(pool, block)}
    registered = [(key, block_id) for key, ids in pool.cached_block_hash_to_block.items() for block_id in ids]
    assert len(registered) == len(set(registered))
    assert set(registered) == keys
    assert all(ids for ids in pool.cached_block_hashes_by_block.values())
    for block in pool.blocks:
        assert (block.block_hash is None) == (block.block_hash_num_tokens is None)


def keys_of(pool: BlockPool, block: Any) -> list[bytes]:
    """All keys that the block believes to have."""
    extra = pool.cached_block_hashes_by_block.get(block.block_id, set())
    assert block.block_hash is not None or not extra, "a block has further keys but no primary one"
    return [] if block.block_hash is None else [block.block_hash, *sorted(extra)]


def walk_backwards(pool: BlockPool) -> list[int]:
    """The free queue from its tail, by the other links."""
    found = []
    block = pool.free_block_queue.fake_free_list_tail.prev_free_block
    while block is not None and block.block_id >= 0:
        found.append(block.block_id)
        block = block.prev_free_block
    return found


def check_tables(manager: KVCacheManager, retained: Iterable[int] = ()) -> None:
    """Every reference is a table entry or a pin: both ends of a copy that is queued, or taken but not let go (`retained`, ids), and blocks of a sink."""
    pool = manager.block_pool
    entries: Counter[int] = Counter(retained)
    for group in manager.coordinator.single_type_managers:
        entries.update(block.block_id for table in group.req_to_blocks.values() for block in table)
        entries.update(block.block_id for pair in group.pending_copies for block in pair)
        if isinstance(group, SinkFullAttentionManager):
            entries.update(block.block_id for block in group.sink_blocks)
        for request_id, frontier in group.num_cached_block.items():
            assert 0 <= frontier <= len(group.req_to_blocks[request_id])
        for table in group.req_to_blocks.values():
            assert all(block is pool.blocks[block.block_id] for block in table)
            real = [block.block_id for block in table if not block.is_null]
            assert len(real) == len(set(real)), "a table names a block twice"
    for block in pool.blocks[1:]:
        assert block.ref_cnt == entries[block.block_id], f"block {block.block_id}: {block.ref_cnt} references, {entries[block.block_id]} reasons"


def check_books(manager: KVCacheManager, retained: Iterable[int] = ()) -> None:
    """Both."""
    check_pool(manager.block_pool)
    check_tables(manager, retained)
