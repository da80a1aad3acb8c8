"""Sliding window: a token reads only the last `sliding_window` tokens, so old blocks are given back and a hit needs only a tail (R3.20 to R3.22)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.block_hash import BlockHash, hashes_at_block_size
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import KVCacheSpec, SlidingWindowSpec
from engine.core.request import Request
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager, by_group
from engine.errors import EngineError


def num_contiguous_blocks_for_hit(spec: SlidingWindowSpec, with_eagle_block: bool) -> int:
    """Blocks that cover the window - 1 tokens before a boundary, and one that is dropped again for a draft head (R3.20)."""
    return -(-(spec.sliding_window - 1) // spec.block_size) + with_eagle_block


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Manager of a sliding-window group. vLLM: SlidingWindowManager."""

    kv_cache_spec: SlidingWindowSpec

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
        """Right to left, the first run of cached blocks that is as long as the window needs; what lies left of it stays null. Without one, the run that
        begins at position 0, however short, cut to the alignment (R3.20). Raises EngineError when hits may end inside a block."""
        assert isinstance(kv_cache_spec, SlidingWindowSpec)
        assert block_pool.hash_block_size is not None
        block_size = kv_cache_spec.block_size
        if alignment_tokens % block_size or dcp_world_size > 1:
            raise EngineError(f"hits in multiples of {alignment_tokens} tokens end inside the {block_size}-token blocks of a sliding-window group")
        hashes = hashes_at_block_size(block_hashes, block_pool.hash_block_size, block_size)
        num_needed = num_contiguous_blocks_for_hit(kv_cache_spec, drop_eagle_block)
        num_blocks = max_length // block_size
        find = block_pool.cached_block_hash_to_block.finder(kv_cache_group_ids)
        blocks_per_step = alignment_tokens // block_size
        run: list[tuple[KVCacheBlock, ...]] = []
        start = 0
        for index in range(num_blocks - 1, -1, -1):
            cached = find(hashes[index])
            if cached is None:
                run = []
            # A run ends at a boundary, which is one block earlier when its last block will be dropped.
            elif run or blocks_per_step == 1 or (index + (not drop_eagle_block)) % blocks_per_step == 0:
                run.append(cached)
                if len(run) >= num_needed:
                    start = index
                    num_blocks = index + len(run)
                    break
        else:
            num_blocks = len(run) - len(run) % blocks_per_step
        if drop_eagle_block and num_blocks:
            num_blocks -= 1
            num_blocks -= num_blocks % blocks_per_step
        null_blocks = [block_pool.null_block] * start
        hits = tuple([null_blocks + hit[::-1] for hit in by_group(run, len(kv_cache_group_ids))])
        for hit in hits:
            del hit[num_blocks:]
        return hits, num_blocks * block_size

    def reachable_block_mask(self, request: Request, start_block: int, end_block: int, retention_interval: int | None) -> list[bool] | None:
        """Only tails are worth caching: as many blocks as a hit needs before each boundary, and one more where a draft head drops one (R3.21)."""
        block_size = self.block_size
        num_needed = self.get_num_needed_for_hit()
        shift = int(self.use_eagle)
        interval = self.scheduler_block_size if retention_interval is None else retention_interval
        mask = [False] * (end_block - start_block)
        if interval:
            per_segment = interval // block_size
            if num_needed >= per_segment:
                return None
            for index in range(max(start_block, shift), end_block):
                mask[index - start_block] = (index - shift) % per_segment >= per_segment - num_needed
        if retention_interval is not None:
            for boundary in self.get_reachable_boundaries(request):
                end = boundary // self.scheduler_block_size * self.scheduler_block_size // block_size + shift
                for index in range(max(start_block, end - num_needed), min(end_block, end)):
                    mask[index - start_block] = True
        return mask

    def get_num_needed_for_hit(self) -> int:
        """See num_contiguous_blocks_for_hit."""
        return num_contiguous_blocks_for_hit(self.kv_cache_spec, self.use_eagle)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the window's last `sliding_window` - 1 computed tokens (R3.1)."""
        return max(0, num_computed_tokens - self.kv_cache_spec.sliding_window + 1)
