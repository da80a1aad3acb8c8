"""Base of the managers of one KV-cache group: block tables, caching frontiers, adoption, allocation, release (section 3 of the rules).

A manager knows one attention type and nothing of the scheduler or of other groups. Types differ in which tokens they never read again
(get_num_skipped_tokens) and in what counts as a hit (find_longest_cache_hit); the rest is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.core.block_hash import BlockHash
from engine.core.block_pool import BlockPool, FreedBlocks
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import KVCacheSpec
from engine.core.request import Request
from engine.trace.events import BlocksAllocated, BlocksFreed, BlocksSkipped, BlocksTouched, Cause, CauseKind, Emit


class SingleTypeKVCacheManager(ABC):
    """Tables and frontiers of group `kv_cache_group_id`.

    `req_to_blocks`: block table per request, in logical order. `num_cached_block`: how many leading blocks caching has dealt with, absent until the
    first caching or hit. All block counts are in blocks, all token counts in tokens. vLLM: SingleTypeKVCacheManager.
    """

    def __init__(self, kv_cache_spec: KVCacheSpec, block_pool: BlockPool, kv_cache_group_id: int, *, emit: Emit | None = None) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.block_size = kv_cache_spec.block_size
        self.block_pool = block_pool
        self.kv_cache_group_id = kv_cache_group_id
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[str, int] = {}
        self._emit = emit

    # ------------------------------------------------------------------ how much is needed
    def get_num_new_blocks(self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], total_computed_tokens: int) -> int:
        """Blocks that must come from the head of the queue so that `num_tokens` slots exist (first half of R3.3). `total_computed_tokens` counts hits."""
        num_required = -(-num_tokens // self.block_size)
        num_held = len(self.req_to_blocks.get(request_id, ()))
        if request_id not in self.num_cached_block:
            num_held = max(self.get_num_skipped_tokens(total_computed_tokens) // self.block_size, num_held + len(new_computed_blocks))
        return max(num_required - num_held, 0)

    def get_num_evictable_blocks(self, new_computed_blocks: Sequence[KVCacheBlock], total_computed_tokens: int) -> int:
        """Hit blocks that nobody uses: adopting them makes the free queue shorter, so they count against the capacity (R3.3, R5.5)."""
        num_skipped_blocks = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        return sum(1 for block in new_computed_blocks[num_skipped_blocks:] if block.ref_cnt == 0 and not block.is_null)

    def get_max_admission_blocks(self) -> int | None:
        """What a whole sequence can hold at most at one time (R3.4), None without such a bound."""
        return None

    # ------------------------------------------------------------------ taking
    def add_local_computed_blocks(self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], total_computed_tokens: int) -> None:
        """Adopt a new request's hit blocks: touch those that attention will still read, put null blocks for the others, set the frontier (R3.5)."""
        if request_id in self.num_cached_block:
            assert not new_computed_blocks, f"request {request_id} runs already and cannot adopt further blocks"
            return
        table = self.req_to_blocks.setdefault(request_id, [])
        assert not table, f"request {request_id} has blocks, but no caching frontier"
        num_skipped_blocks = min(self.get_num_skipped_tokens(total_computed_tokens) // self.block_size, len(new_computed_blocks))
        adopted = new_computed_blocks[num_skipped_blocks:]
        left_free_queue = [block.block_id for block in adopted if block.ref_cnt == 0 and not block.is_null] if self._emit is not None else []
        self.block_pool.touch(adopted)
        table.extend([self.block_pool.null_block] * num_skipped_blocks)
        table.extend(adopted)
        self.num_cached_block[request_id] = len(table)
        if self._emit is not None and adopted:
            facts = {"num_hit_tokens": len(table) * self.block_size, "num_from_queue": len(left_free_queue)}
            self._emit(
                BlocksTouched(
                    cause=Cause(CauseKind.PREFIX_CACHE_HIT, dict(facts)),
                    request_id=request_id,
                    group_id=self.kv_cache_group_id,
                    block_ids=[block.block_id for block in adopted],
                    left_free_queue=left_free_queue,
                )
            )

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Append blocks to the request's table until it has `num_tokens` slots; return only the new ones. The caller has checked the capacity."""
        table = self.req_to_blocks.get(request_id)
        if table is None:
            table = self.req_to_blocks[request_id] = []
        num_required = -(-num_tokens // self.block_size)
        num_held = len(table)
        if num_required <= num_held:
            return []
        num_free = self.block_pool.free_block_queue.num_free_blocks
        new_blocks = self.block_pool.get_new_blocks(num_required - num_held, request_id)
        table.extend(new_blocks)
        if self._emit is not None:
            facts = {"num_tokens": num_tokens, "num_required": num_required, "num_held": num_held, "num_free": num_free}
            self._emit(
                BlocksAllocated(
                    cause=Cause(CauseKind.HEAD_OF_FREE_QUEUE, dict(facts)),
                    request_id=request_id,
                    group_id=self.kv_cache_group_id,
                    block_ids=[block.block_id for block in new_blocks],
                )
            )
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register the blocks that `num_tokens` tokens fill and move the frontier (R3.6)."""
        num_cached = self.num_cached_block.get(request.request_id, 0)
        num_full = num_tokens // self.block_size
        if num_cached >= num_full:
            return
        self.block_pool.cache_full_blocks(
            request,
            self.req_to_blocks[request.request_id],
            num_cached,
            num_full,
            self.block_size,
            self.kv_cache_group_id,
            self.get_cache_block_mask(request, num_cached, num_full),
        )
        self.num_cached_block[request.request_id] = num_full

    def get_cache_block_mask(self, request: Request, num_cached_blocks: int, num_full_blocks: int) -> Sequence[bool] | None:
        """Which of these blocks are worth caching; None means all."""
        return None

    # ------------------------------------------------------------------ giving back
    def free(self, request_id: str, cause: Cause | None = None) -> None:
        """Drop the request's table, last block first (R1.9), and its frontier; hashes stay. `cause` travels with the event."""
        table = self.req_to_blocks.pop(request_id, None)
        self.num_cached_block.pop(request_id, None)
        if not table:
            return
        table.reverse()
        freed = self.block_pool.free_blocks(table)
        if self._emit is not None:
            self._emit_freed(request_id, table, freed, cause or Cause(CauseKind.REQUEST_FINISHED))

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Null the table entries that attention will never read again and free their blocks, highest index first (R3.2)."""
        num_skipped_tokens = self.get_num_skipped_tokens(num_computed_tokens)
        if num_skipped_tokens <= 0:
            return
        table = self.req_to_blocks.get(request_id)
        if not table:
            return
        null_block = self.block_pool.null_block
        indices: list[int] = []
        removed: list[KVCacheBlock] = []
        for index in range(min(num_skipped_tokens // self.block_size, len(table)) - 1, -1, -1):
            block = table[index]
            if block.is_null:
                break
            indices.append(index)
            removed.append(block)
            table[index] = null_block
        if not removed:
            return
        freed = self.block_pool.free_blocks(removed)
        if self._emit is not None:
            cause = Cause(CauseKind.OUTSIDE_WINDOW, {"num_skipped_tokens": num_skipped_tokens})
            self._emit(
                BlocksSkipped(
                    cause=cause,
                    request_id=request_id,
                    group_id=self.kv_cache_group_id,
                    logical_indices=indices,
                    block_ids=[block.block_id for block in removed],
                )
            )
            self._emit_freed(request_id, removed, freed, cause)

    def _emit_freed(self, request_id: str, blocks: Sequence[KVCacheBlock], freed: FreedBlocks, cause: Cause) -> None:
        assert self._emit is not None
        self._emit(
            BlocksFreed(
                cause=cause,
                request_id=request_id,
                group_id=self.kv_cache_group_id,
                block_ids=[block.block_id for block in blocks],
                prepended=[block.block_id for block in freed.prepended],
                appended=[block.block_id for block in freed.appended],
                still_referenced=[block.block_id for block in freed.still_referenced],
            )
        )

    def new_step_starts(self) -> None:
        """A new engine step begins. Nothing to do unless a type forbids hits within the step."""
        return

    # ------------------------------------------------------------------ what the types decide
    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many leading tokens the next token will not attend to (R3.1)."""
        return 0

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Leading blocks shared by every request of the group, for cascade attention; 0 where the type cannot use them (R3.11)."""
        return 0

    @classmethod
    @abstractmethod
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
        """The cached blocks that can be adopted, per group; at most `max_length` tokens, a multiple of `alignment_tokens`. Changes nothing.

        `block_hashes`: at the spec's block size. `kv_cache_group_ids`: groups with this spec, a hit must be in all of them.
        """
