"""Full attention: every token reads all before it, so nothing is ever skipped and a hit must be unbroken from the start (R3.10, R3.11).

Multi-head latent attention is managed the same way; reference sliding window and sink attention differ in one place each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar

from engine.core.block_hash import BlockHash, hashes_at_block_size
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import KVCacheSpec, RSWASpec, SinkFullAttentionSpec
from engine.core.request import Request
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager, by_group
from engine.errors import InvalidInput


class FullAttentionManager(SingleTypeKVCacheManager):
    """Manager of a full-attention group. vLLM: FullAttentionManager."""

    supports_fine_grained_hash_lookup: ClassVar[bool] = True

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Left to right over full blocks, stop at the first that is missing in any group; where hits may end inside a block, on into the first missing one,
        longest entry first. With `drop_eagle_block` one block, or one hash unit, less. Then rounded down to the alignment (R3.10)."""
        block_size = kv_cache_spec.block_size * dcp_world_size
        assert block_pool.hash_block_size is not None
        full_hashes = hashes_at_block_size(block_hashes, block_pool.hash_block_size, block_size)
        find = block_pool.cached_block_hash_to_block.finder(kv_cache_group_ids)
        found: list[tuple[KVCacheBlock, ...]] = []
        for block_hash in islice(full_hashes, max_length // block_size):
            cached = find(block_hash)
            if cached is None:
                break
            found.append(cached)
        num_blocks = len(found)
        hit_length = num_blocks * block_size
        if alignment_tokens < block_size and block_size % alignment_tokens == 0:
            scale = block_size // alignment_tokens
            first = num_blocks * scale
            for index in range(min(first + scale - 1, max_length // alignment_tokens, len(block_hashes)) - 1, first - 1, -1):
                cached = find(block_hashes[index])
                if cached is not None:
                    found.append(cached)
                    hit_length = (index + 1) * alignment_tokens
                    break
        if drop_eagle_block and hit_length:
            hit_length -= min(alignment_tokens, block_size)
        hit_length -= hit_length % alignment_tokens
        del found[-(-hit_length // block_size) :]
        return by_group(found, len(kv_cache_group_ids)), hit_length

    def cache_blocks(self, request: Request, num_tokens: int, retention_interval: int | None = None) -> None:
        """Also register where the prompt's last hash boundary lies, if that is inside a block (R6.3)."""
        SingleTypeKVCacheManager.cache_blocks(self, request, num_tokens, retention_interval)
        hash_block_size = self.block_pool.hash_block_size
        if self.block_size == hash_block_size or hash_block_size is None:
            return
        boundary = request.num_prompt_tokens // hash_block_size * hash_block_size
        if boundary == 0 or boundary > num_tokens or boundary % self.block_size == 0:
            return
        table = self.get_table(request.request_id)
        index = boundary // self.block_size
        if index < len(table):
            frontier = self.num_cached_block.get(request.request_id)
            self.block_pool.cache_partial_block(request, table[index], boundary, self.kv_cache_group_id, self.block_size, frontier)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Leading blocks of the request's table with as many references as there are requests with a table in this group (R3.11)."""
        table = self.get_table(running_request_id)
        num_requests = len(self.req_to_blocks)
        count = 0
        for block in table:
            if block.ref_cnt != num_requests:
                break
            count += 1
        return count


class RSWAManager(FullAttentionManager):
    """Reference sliding window: prompt blocks stay, of the outputs only the window does (R3.50). vLLM: RSWAManager."""

    kv_cache_spec: RSWASpec

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int, num_prompt_tokens: int) -> None:
        """Free the blocks that lie wholly between the prompt's last block and the window."""
        window_start = max(num_prompt_tokens, num_processed_tokens - self.kv_cache_spec.rswa_window)
        first, end = -(-num_prompt_tokens // self.block_size), window_start // self.block_size
        self._remove_blocks_in_range(request_id, first, end, window_start - num_prompt_tokens)


class SinkFullAttentionManager(FullAttentionManager):
    """Full attention with a few blocks of its own for the sink tokens, taken from the queue for good (R1.16).

    vLLM: SinkFullAttentionManager; here: in compat mode building one fails, as it does there. Raises InvalidInput when the pool is too small."""

    kv_cache_spec: SinkFullAttentionSpec

    def __init__(self, kv_cache_spec: SinkFullAttentionSpec, block_pool: BlockPool, kv_cache_group_id: int, **settings: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, kv_cache_group_id, **settings)
        if block_pool.compat is not None:
            raise InvalidInput(f"a sink group cannot be built in vLLM {block_pool.compat}: leave compat out, or use another attention type")
        num_sink_blocks = kv_cache_spec.sink_len // self.block_size
        if num_sink_blocks >= block_pool.get_num_free_blocks():
            raise InvalidInput(
                f"the sink takes {num_sink_blocks} blocks, but the pool has {block_pool.get_num_free_blocks()}: raise num_blocks or shorten the sink"
            )
        self.sink_blocks = block_pool.get_new_blocks(num_sink_blocks)
        block_pool.num_permanent_blocks += num_sink_blocks
