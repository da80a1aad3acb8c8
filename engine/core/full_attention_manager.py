"""Full attention: every token reads all before it, so nothing is ever skipped and a hit must be unbroken from the start (R3.10, R3.11)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from engine.core.block_hash import BlockHash
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import KVCacheSpec
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


class FullAttentionManager(SingleTypeKVCacheManager):
    """Manager of a full-attention group. vLLM: FullAttentionManager."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Left to right, stop at the first block that is missing in any group. With `use_eagle` the last one is dropped: the draft head needs it
        recomputed. Then rounded down to the alignment (R3.10)."""
        hits: tuple[list[KVCacheBlock], ...] = tuple([] for _ in kv_cache_group_ids)
        block_size = kv_cache_spec.block_size
        for block_hash in islice(block_hashes, max_length // block_size):
            cached = block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            if cached is None:
                break
            for hit, block in zip(hits, cached, strict=True):
                hit.append(block)
        num_blocks = len(hits[0])
        if use_eagle and num_blocks:
            num_blocks -= 1
        while num_blocks and num_blocks * block_size % alignment_tokens:
            num_blocks -= 1
        for hit in hits:
            del hit[num_blocks:]
        return hits

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Leading blocks of the request's table with as many references as there are requests with a table in this group (R3.11)."""
        num_requests = len(self.req_to_blocks)
        count = 0
        for block in self.req_to_blocks.get(running_request_id, ()):
            if block.ref_cnt != num_requests:
                break
            count += 1
        return count
