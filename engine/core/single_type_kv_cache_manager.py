"""Base of the managers of one KV-cache group: block tables, caching frontiers, adoption, allocation, release (section 3 of the rules).

A manager knows one attention type and nothing of the scheduler or of other groups. Types differ in which tokens they never read again
(get_num_skipped_tokens) and in what counts as a hit (find_longest_cache_hit); the rest is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from engine.core.block_hash import BlockHash
from engine.core.block_pool import BlockPool, FreedBlocks
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import KVCacheSpec
from engine.core.request import Request
from engine.errors import EngineError
from engine.trace.events import BlocksAllocated, BlocksFreed, BlocksSkipped, BlocksTouched, CachingSkipped, Cause, CauseKind, CopyQueued, Emit


class SingleTypeKVCacheManager(ABC):
    """Tables and frontiers of group `kv_cache_group_id`.

    `block_size`: tokens per block as the scheduler counts them, i.e. the spec's times `dcp_world_size`. `scheduler_block_size`: granularity of hits in a
    hybrid, tokens. `max_admission_blocks`: most blocks of one request that the full-sequence gate counts (R3.4). `zero_new_blocks`: remember which
    blocks are new, for the worker to zero. `use_eagle` is set by the coordinator.
    `req_to_blocks`: block table per request, in logical order. `num_cached_block`: how many leading blocks caching has dealt with, absent until the
    first caching or hit. `pending_copies`: (source, destination) pairs, both held until they are taken (R6.6). vLLM: SingleTypeKVCacheManager.
    """

    supports_fine_grained_hash_lookup: ClassVar[bool] = False
    """Whether a hit may end inside one of its blocks (R6.2)."""
    holds_encoder_output: ClassVar[bool] = False
    """Whether its slots are for the encoder's tokens instead of the request's."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        kv_cache_group_id: int,
        *,
        scheduler_block_size: int | None = None,
        dcp_world_size: int = 1,
        max_admission_blocks: int | None = None,
        zero_new_blocks: bool = False,
        emit: Emit | None = None,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.block_size = kv_cache_spec.block_size * dcp_world_size
        self.scheduler_block_size = scheduler_block_size or self.block_size
        self.block_pool = block_pool
        self.kv_cache_group_id = kv_cache_group_id
        self.max_admission_blocks = max_admission_blocks
        self.use_eagle = False
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[str, int] = {}
        self.pending_copies: list[tuple[KVCacheBlock, KVCacheBlock]] = []
        self.new_block_ids: list[int] = []
        self._zero_new_blocks = zero_new_blocks
        self._partial_hits: dict[str, tuple[int, KVCacheBlock, int]] = {}
        """Requests whose table still shares the block inside which their hit ended: its index, the block and the hit's length (R6.4)."""
        self._emit = emit

    def get_table(self, request_id: str) -> list[KVCacheBlock]:
        """The request's block table, the live list; an empty one when it has none. In compat mode asking leaves the empty table behind: vLLM's tables are
        a defaultdict, and where requests with a table are counted (R3.11) that shows."""
        if self.block_pool.strict:
            return self.req_to_blocks.get(request_id, [])
        return self.req_to_blocks.setdefault(request_id, [])

    # ------------------------------------------------------------------ how much is needed
    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """By how much the free queue gets shorter when `num_tokens` slots are to exist: new blocks, hit blocks that nobody uses, and one more when the hit
        ends inside a block (R3.3). `num_computed_tokens` counts the hit and what a KV connector brings; `num_tokens_main_model` leaves out draft tokens.

        Raises EngineError for a hit of a request that runs already."""
        num_required = -(-num_tokens // self.block_size)
        if apply_admission_cap and self.max_admission_blocks is not None:
            num_required = min(num_required, self.max_admission_blocks)
        table = self.req_to_blocks.get(request_id)
        num_held = len(table) if table else 0
        if request_id in self.num_cached_block:
            if new_computed_blocks:
                raise EngineError(f"request {request_id} runs already and cannot adopt further blocks")
            return num_required - num_held if num_required > num_held else 0
        num_skipped = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        num_new = max(num_required - max(num_skipped, len(new_computed_blocks) + num_held), 0)
        if not new_computed_blocks:
            return num_new
        num_evictable = self.get_num_evictable_blocks(new_computed_blocks[max(0, num_skipped - num_held) :])
        return num_new + num_evictable + ((num_computed_tokens - num_external_computed_tokens) % self.block_size != 0)

    @staticmethod
    def get_num_evictable_blocks(blocks: Sequence[KVCacheBlock]) -> int:
        """Hit blocks that nobody uses: adopting them makes the free queue shorter, so they count against the capacity (R5.5)."""
        return sum([1 for block in blocks if block.ref_cnt == 0 and not block.is_null])

    # ------------------------------------------------------------------ taking
    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_computed_tokens: int, num_external_computed_tokens: int = 0
    ) -> None:
        """Adopt a new request's hit blocks: touch those that attention will still read, put null blocks for the others, set the frontier (R3.5).
        `num_computed_tokens`: the hit; `num_external_computed_tokens`: what a KV connector brings behind it."""
        table = self.req_to_blocks.setdefault(request_id, [])
        if table:
            raise EngineError(f"request {request_id} has blocks, so it cannot adopt others before them")
        num_skipped = max(self.get_num_skipped_tokens(num_computed_tokens + num_external_computed_tokens) // self.block_size, 0)
        adopted = new_computed_blocks[num_skipped:]
        left_free_queue = [block.block_id for block in adopted if block.ref_cnt == 0 and not block.is_null] if self._emit is not None else []
        self.block_pool.touch(adopted)
        table.extend([self.block_pool.null_block] * num_skipped)
        table.extend(adopted)
        self.num_cached_block[request_id] = len(table)
        if adopted and num_computed_tokens % self.block_size:
            index = num_computed_tokens // self.block_size
            self._partial_hits[request_id] = (index, adopted[-1], num_computed_tokens)
            self.num_cached_block[request_id] = index
        if self._emit is not None and table:
            self._emit(
                BlocksTouched(
                    cause=Cause(CauseKind.PREFIX_CACHE_HIT, {"num_hit_tokens": num_computed_tokens, "num_from_queue": len(left_free_queue)}),
                    request_id=request_id,
                    group_id=self.kv_cache_group_id,
                    block_ids=[block.block_id for block in adopted],
                    left_free_queue=left_free_queue,
                    num_null_blocks=num_skipped,
                    num_cached_block=self.num_cached_block[request_id],
                )
            )

    def allocate_external_computed_blocks(self, request_id: str, num_computed_tokens: int, num_external_computed_tokens: int) -> None:
        """Blocks for the tokens that a KV connector brings, as far as attention will read them. The hits of all groups are adopted before (R5.3 e)."""
        total = num_computed_tokens + num_external_computed_tokens
        num_skipped = self.get_num_skipped_tokens(total)
        if min(total - max(num_skipped, 0), num_external_computed_tokens) <= 0:
            return
        table = self.req_to_blocks.setdefault(request_id, [])
        num_required = -(-total // self.block_size)
        self._append_new_blocks(request_id, table, num_required - len(table), total, num_required)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Append blocks to the request's table until it has `num_tokens` slots; before that, redirect a hit that ends inside a block to a private copy
        (R6.4). Returns only the new ones, the copy first. The caller has checked the capacity."""
        table = self.req_to_blocks.get(request_id)
        if table is None:
            table = self.req_to_blocks[request_id] = []
        copies: list[KVCacheBlock] = []
        if request_id in self._partial_hits:
            index, source, num_hit_tokens = self._partial_hits.pop(request_id)
            copies = [self._redirect_to_copy(request_id, index, source, num_hit_tokens)]
            self.new_block_ids.append(copies[0].block_id)
        num_required = -(-num_tokens // self.block_size)
        if num_required <= len(table):
            return copies
        new_blocks = self._append_new_blocks(request_id, table, num_required - len(table), num_tokens, num_required)
        return copies + new_blocks if copies else new_blocks

    def _append_new_blocks(self, request_id: str, table: list[KVCacheBlock], num_new: int, num_tokens: int, num_required: int) -> list[KVCacheBlock]:
        num_held, num_free = len(table), self.block_pool.free_block_queue.num_free_blocks
        new_blocks = self.block_pool.get_new_blocks(num_new, request_id)
        table.extend(new_blocks)
        if self._zero_new_blocks:
            self.new_block_ids.extend([block.block_id for block in new_blocks])
        if self._emit is not None and new_blocks:
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

    def _redirect_to_copy(self, request_id: str, index: int, source: KVCacheBlock, num_hit_tokens: int) -> KVCacheBlock:
        """Consumer side of copy-on-write (R6.4): a new block takes the shared one's place. Both stay held until the copy is taken: the source by the
        reference of the hit, the destination by one more than the request's."""
        table = self.req_to_blocks[request_id]
        destination = self.block_pool.get_new_blocks(1, request_id)[0]
        if index >= len(table) or table[index] is not source:
            raise EngineError(f"block {source.block_id} is not where the hit of {request_id} ended")
        destination.ref_cnt += 1
        table[index] = destination
        self.pending_copies.append((source, destination))
        self._emit_copy(request_id, source, destination, index, Cause(CauseKind.PARTIAL_HIT, {"logical_index": index, "num_hit_tokens": num_hit_tokens}))
        return destination

    def _emit_copy(self, request_id: str, source: KVCacheBlock, destination: KVCacheBlock, index: int, cause: Cause) -> None:
        if self._emit is not None:
            self._emit(
                CopyQueued(
                    cause=cause,
                    request_id=request_id,
                    group_id=self.kv_cache_group_id,
                    source_block_id=source.block_id,
                    destination_block_id=destination.block_id,
                    logical_index=index,
                )
            )

    def take_pending_copies(self) -> list[tuple[KVCacheBlock, KVCacheBlock]]:
        """Hand over the queued copies; the caller lets go of both ends (R6.6). vLLM: take_pending_cow_copies."""
        copies, self.pending_copies = self.pending_copies, []
        return copies

    def take_new_block_ids(self) -> list[int]:
        """Ids of the blocks taken since the last call that the worker zeroes before use."""
        ids, self.new_block_ids = self.new_block_ids, []
        return ids

    # ------------------------------------------------------------------ caching
    def cache_blocks(self, request: Request, num_tokens: int, retention_interval: int | None = None) -> None:
        """Register the blocks that `num_tokens` tokens fill and move the frontier (R3.6). `retention_interval`: how sparsely types that need only a tail
        keep one, in tokens; None: at every boundary, 0: only where the prompt's replay or a junction ends (R3.21)."""
        request_id = request.request_id
        num_cached = self.num_cached_block.get(request_id, 0)
        num_full = num_tokens // self.block_size
        if num_cached >= num_full:
            return
        mask = self.reachable_block_mask(request, num_cached, num_full, retention_interval)
        table = self.get_table(request_id)
        frontiers = self.num_cached_block
        self.block_pool.cache_full_blocks(request, table, num_cached, num_full, self.block_size, self.kv_cache_group_id, mask, frontiers)
        self.num_cached_block[request_id] = num_full
        if self._emit is not None:
            self._emit_skipped_caching(request_id, table, num_cached, num_full, mask)

    def _emit_skipped_caching(self, request_id: str, table: Sequence[KVCacheBlock], start: int, end: int, mask: Sequence[bool] | None) -> None:
        assert self._emit is not None
        null = [i for i in range(start, end) if table[i].is_null]
        masked = [i for i in range(start, end) if mask is not None and not mask[i - start] and not table[i].is_null]
        for indices, cause in ((null, Cause(CauseKind.NULL_BLOCK)), (masked, Cause(CauseKind.NOT_REACHABLE, {"num_needed": self.get_num_needed_for_hit()}))):
            if indices:
                self._emit(CachingSkipped(cause=cause, request_id=request_id, group_id=self.kv_cache_group_id, logical_indices=indices, num_cached_block=end))

    def reachable_block_mask(self, request: Request, start_block: int, end_block: int, retention_interval: int | None) -> list[bool] | None:
        """Which of the blocks [start_block, end_block) a hit could ever use; None means all (R3.21)."""
        return None

    def get_num_needed_for_hit(self) -> int:
        """How many blocks before a boundary a hit that ends there looks at. Only types that look at a tail say something here."""
        return 0

    @staticmethod
    def get_reachable_boundaries(request: Request) -> list[int]:
        """Prefix lengths at which somebody will want to go on: the same prompt again, and where another group's longer hit ended (R3.21)."""
        boundaries = [request.num_prompt_tokens - 1]
        if request.shared_prefix_boundary:
            boundaries.append(request.shared_prefix_boundary)
        return boundaries

    # ------------------------------------------------------------------ giving back
    def free(self, request_id: str, cause: Cause | None = None) -> None:
        """Drop the request's table, last block first (R1.9), and its frontier; hashes stay. `cause` travels with the event."""
        table = self.req_to_blocks.get(request_id)
        ordered = table[::-1] if table else []
        null_block = self.block_pool.null_block
        outside_window = ordered and ordered[-1] is null_block  # then there are many of them, and nothing to give back
        freed = self.block_pool.free_blocks([block for block in ordered if block is not null_block] if outside_window else ordered)
        # That raises before anything is forgotten.
        self.req_to_blocks.pop(request_id, None)
        self.num_cached_block.pop(request_id, None)
        self._partial_hits.pop(request_id, None)
        if self._emit is not None and ordered:
            prepended, appended, still_referenced = ids_of(freed)
            self._emit(
                BlocksFreed(
                    cause=cause or Cause(CauseKind.REQUEST_FINISHED),
                    request_id=request_id,
                    group_id=self.kv_cache_group_id,
                    block_ids=[block.block_id for block in ordered],
                    prepended=prepended,
                    appended=appended,
                    still_referenced=still_referenced,
                )
            )

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int, num_prompt_tokens: int) -> None:
        """Null the table entries that attention will never read again and free their blocks, highest index first (R3.2). `num_processed_tokens`: tokens
        whose step is over."""
        num_skipped = self.get_num_skipped_tokens(num_processed_tokens)
        if num_skipped > 0 and self.get_table(request_id):
            self._remove_blocks_in_range(request_id, 0, num_skipped // self.block_size, num_skipped)

    def _remove_blocks_in_range(self, request_id: str, first: int, end: int, num_skipped_tokens: int) -> None:
        """From `end` - 1 down to `first`, stopping at the first null block: before it everything was removed earlier. `num_skipped_tokens` only travels with
        the event."""
        table = self.req_to_blocks.get(request_id)
        if not table:
            return
        null_block = self.block_pool.null_block
        indices: list[int] = []
        removed: list[KVCacheBlock] = []
        for index in range(min(end, len(table)) - 1, first - 1, -1):
            block = table[index]
            if block is null_block:
                break
            indices.append(index)
            removed.append(block)
            table[index] = null_block
        if removed:
            self._free_removed(request_id, indices, removed, Cause(CauseKind.OUTSIDE_WINDOW, {"num_skipped_tokens": num_skipped_tokens}))

    def _free_removed(self, request_id: str, indices: list[int], removed: list[KVCacheBlock], cause: Cause) -> None:
        freed = self.block_pool.free_blocks(removed)
        if self._emit is not None:
            prepended, appended, still_referenced = ids_of(freed)
            self._emit(
                BlocksSkipped(
                    cause=cause,
                    request_id=request_id,
                    group_id=self.kv_cache_group_id,
                    logical_indices=indices,
                    block_ids=[block.block_id for block in removed],
                    prepended=prepended,
                    appended=appended,
                    still_referenced=still_referenced,
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
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The cached blocks that can be adopted, per group, and the hit's length: at most `max_length` tokens, a multiple of `alignment_tokens`.
        Changes nothing.

        `block_hashes`: the request's, per hash block. `kv_cache_group_ids`: groups with this spec, a hit must be in all of them. `drop_eagle_block`: leave
        out the last matched block, which the draft head needs recomputed. Places that need not be read hold null blocks."""


def ids_of(freed: FreedBlocks) -> tuple[list[int], list[int], list[int]]:
    """Block ids of where freed blocks went, as events have them: prepended, appended, still referenced."""
    prepended, appended, still_referenced = ([block.block_id for block in blocks] for blocks in freed)
    return prepended, appended, still_referenced


def by_group(found: Sequence[tuple[KVCacheBlock, ...]], num_groups: int) -> tuple[list[KVCacheBlock], ...]:
    """Lists of blocks per group from what was found per position."""
    return tuple([list(hit) for hit in zip(*found, strict=True)]) if found else tuple([[] for _ in range(num_groups)])
