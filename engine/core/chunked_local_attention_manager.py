"""Chunked local attention: a token reads only its own chunk, so whatever lies before the current chunk is as good as computed (R3.30)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.block_hash import BlockHash, hashes_at_block_size
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import ChunkedLocalAttentionSpec, KVCacheSpec
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.errors import EngineError


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Manager of a chunked local attention group. vLLM: ChunkedLocalAttentionManager."""

    kv_cache_spec: ChunkedLocalAttentionSpec

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
        """Null blocks up to the start of the chunk in which the hit ends, without looking; from there left to right to the first that is missing.
        Raises EngineError for a draft head and for an alignment other than the block size, neither of which the type can do."""
        assert isinstance(kv_cache_spec, ChunkedLocalAttentionSpec)
        assert block_pool.hash_block_size is not None
        block_size = kv_cache_spec.block_size
        if drop_eagle_block or alignment_tokens != block_size or dcp_world_size > 1:
            raise EngineError(
                f"a chunked local attention group with blocks of {block_size} tokens can neither serve hits in multiples of {alignment_tokens} tokens "
                "unless that is its block size, nor a draft head, nor context parallelism"
            )
        hashes = hashes_at_block_size(block_hashes, block_pool.hash_block_size, block_size)
        chunk_size = kv_cache_spec.attention_chunk_size
        while True:
            chunk_start = max_length // chunk_size * chunk_size
            first = chunk_start // block_size
            hits: tuple[list[KVCacheBlock], ...] = tuple([[block_pool.null_block] * first for _ in kv_cache_group_ids])
            for index in range(first, max_length // block_size):
                cached = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
                if cached is None:
                    break
                for hit, block in zip(hits, cached, strict=True):
                    hit.append(block)
            hit_length = len(hits[0]) * block_size
            if hit_length >= chunk_start or not block_pool.strict:
                return hits, hit_length
            max_length = hit_length  # a chunk that begins inside a block: the hit ends in the chunk before, of which nothing was looked up yet

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Everything before the current chunk (R3.1)."""
        chunk_size = self.kv_cache_spec.attention_chunk_size
        return num_computed_tokens // chunk_size * chunk_size
