"""Recurrent states: one block holds the state after a prefix, so one block is a hit and all before it are dispensable (R3.40 to R3.44).

In mode ``align`` a request keeps its running state in one block (and further ones for draft tokens), leaves null blocks before it, and copies where it
would otherwise overwrite a state that the cache offers to others (R6.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from engine.core.block_hash import BlockHash, BlockHashWithGroupId, hashes_at_block_size
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import KVCacheSpec, MambaSpec
from engine.core.request import Request
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.errors import EngineError
from engine.trace.events import Cause, CauseKind, StateBlocksArranged


class MambaManager(SingleTypeKVCacheManager):
    """Manager of a group of recurrent states.

    `cached_blocks_this_step`: keys registered since the step began; their states are not written yet, so nobody may adopt them in the same step (R3.41).
    `last_state_block_idx` (mode ``align``): table index of the state that the running state was copied from. vLLM: MambaManager.
    """

    kv_cache_spec: MambaSpec
    supports_fine_grained_hash_lookup: ClassVar[bool] = True

    def __init__(self, kv_cache_spec: MambaSpec, block_pool: BlockPool, kv_cache_group_id: int, **settings: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, kv_cache_group_id, **settings)
        self.block_size = kv_cache_spec.block_size  # every rank of context parallelism has the whole state
        self.mamba_cache_mode = kv_cache_spec.mamba_cache_mode
        self.num_speculative_blocks = kv_cache_spec.num_speculative_blocks
        self.cached_blocks_this_step: set[BlockHashWithGroupId] = set()
        self.last_state_block_idx: dict[str, int] = {}
        self._has_running_state: set[str] = set()
        self._boundary_cached: set[str] = set()
        """Requests whose prompt boundary is registered: from the next step on, their state lies beyond it."""

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
        """Right to left, the first cached state whose end is aligned; before it null blocks. Where hits may end inside a block, every hash boundary is
        asked for (R3.40). Draft heads have no recurrent layers, so nothing is dropped."""
        block_size = kv_cache_spec.block_size
        assert block_pool.hash_block_size is not None
        unit = block_size
        hashes = block_hashes
        if alignment_tokens < block_size and block_size % alignment_tokens == 0:
            unit = alignment_tokens
            num_units = min(max_length // unit, len(block_hashes))
        else:
            hashes = hashes_at_block_size(block_hashes, block_pool.hash_block_size, block_size)
            num_units = max_length // unit
        for index in range(num_units - 1, -1, -1):
            cached = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            hit_length = (index + 1) * unit
            if cached is None or hit_length % alignment_tokens:
                continue
            num_null = index * unit // block_size
            return tuple([[*[block_pool.null_block] * num_null, block] for block in cached]), hit_length
        return tuple([[] for _ in kv_cache_group_ids]), 0

    def is_state_unwritten(self, new_computed_blocks: Sequence[KVCacheBlock]) -> bool:
        """Whether the hit ends with a state that this very step writes (R3.41)."""
        return bool(new_computed_blocks) and new_computed_blocks[-1].block_hash in self.cached_blocks_this_step

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
        """More than the pool has while the hit state is not written; otherwise as for attention with the blocks for draft tokens on top, or in mode
        ``align`` one running state and those (R3.41 to R3.43)."""
        if self.is_state_unwritten(new_computed_blocks):
            return self.block_pool.num_gpu_blocks + 1
        if self.mamba_cache_mode != "align":
            num_tokens += self.block_size * self.num_speculative_blocks
            return super().get_num_blocks_to_allocate(
                request_id,
                num_tokens,
                new_computed_blocks,
                num_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap,
                num_external_computed_tokens,
            )
        num_required = -(-num_tokens_main_model // self.block_size) + self.num_speculative_blocks
        num_new = num_required - len(new_computed_blocks) - len(self.get_table(request_id))
        ends_inside = bool(new_computed_blocks) and (num_computed_tokens - num_external_computed_tokens) % self.block_size != 0
        needs_copy = ends_inside or request_id in self._partial_hits
        if needs_copy:
            num_new = max(num_new, 0) + 1
        if num_new > 0:
            num_new = 1 + needs_copy
            if request_id not in self._has_running_state:
                num_new += self.num_speculative_blocks
        elif self.block_pool.strict:
            num_new = 0  # vLLM lets a negative number lower what the other groups need
        return num_new + self.get_num_evictable_blocks(new_computed_blocks)

    # ------------------------------------------------------------------ taking
    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """In mode ``align``: null blocks up to where the state belongs, last step's blocks for draft tokens moved behind them, then at most one new block
        (first time: one and those for draft tokens). Returns what was appended, and the copy before it if there is one (R3.43, R6.4, R6.5)."""
        if self.mamba_cache_mode != "align":
            return super().allocate_new_blocks(request_id, num_tokens + self.block_size * self.num_speculative_blocks, num_tokens_main_model)
        table = self.req_to_blocks.setdefault(request_id, [])
        num_held = len(table)
        num_required = -(-num_tokens_main_model // self.block_size) + self.num_speculative_blocks
        partial_hit = self._partial_hits.get(request_id)
        if num_required <= num_held and partial_hit is None:
            return []
        runs = request_id in self._has_running_state
        if runs:
            self.last_state_block_idx[request_id] = num_held - 1 - self.num_speculative_blocks
        elif num_held:
            self.last_state_block_idx[request_id] = num_held - 1
        self._arrange(request_id, table, num_required - self.num_speculative_blocks - 1, runs)
        appended = table[num_held:]
        copies: list[KVCacheBlock] = []
        if partial_hit is not None:
            index, source, num_hit_tokens = partial_hit
            if runs:
                self._move_entry_to_copy(request_id, index, source, num_required - len(table))
            else:
                copies = [self._redirect_to_copy(request_id, index, source, num_hit_tokens)]
            del self._partial_hits[request_id]
        self._has_running_state.add(request_id)
        num_new = num_required - len(table)
        if num_new > 0:
            appended += self._append_new_blocks(request_id, table, num_new, num_tokens_main_model, num_required)
        return copies + appended

    def _arrange(self, request_id: str, table: list[KVCacheBlock], num_skipped_blocks: int, runs: bool) -> None:
        """Null blocks up to `num_skipped_blocks` entries, then the blocks for draft tokens from before there to the end."""
        null_block = self.block_pool.null_block
        num_held = len(table)
        table.extend([null_block] * (num_skipped_blocks - num_held))
        num_blocks = len(table)
        moved: list[int] = []
        if runs:
            for index in range(num_held - self.num_speculative_blocks, min(num_held, num_skipped_blocks)):
                table.append(table[index])
                table[index] = null_block
                moved.append(index)
        if self._emit is not None and (num_blocks > num_held or moved):
            self._emit(
                StateBlocksArranged(
                    cause=Cause(CauseKind.ONE_STATE, {"num_speculative_blocks": self.num_speculative_blocks}),
                    request_id=request_id,
                    group_id=self.kv_cache_group_id,
                    num_blocks=num_blocks,
                    moved_from=moved,
                )
            )

    def _move_entry_to_copy(self, request_id: str, index: int, source: KVCacheBlock, num_new: int) -> None:
        """Producer side of copy-on-write (R6.5): the request goes on writing into `source`, because a running request's row at the worker only grows, so
        the cache entry moves to a new block, which nobody holds but the copy."""
        table = self.req_to_blocks[request_id]
        num_tokens = source.block_hash_num_tokens
        destination = self.block_pool.get_new_blocks(1, request_id)[0]
        if index >= len(table) or table[index] is not source:
            if not self.block_pool.strict:
                self.block_pool.get_new_blocks(max(num_new, 0))  # vLLM took all new blocks before it noticed
            raise EngineError(f"block {source.block_id}, which {request_id} registered, is no longer in its table")
        self.block_pool.move_block_hashes(source, destination)
        self.pending_copies.append((source, destination))
        source.ref_cnt += 1
        if destination.block_hash is not None:
            self.cached_blocks_this_step.add(destination.block_hash)
        cause = Cause(CauseKind.OWN_BOUNDARY, {"logical_index": index, "num_tokens": num_tokens})
        self._emit_copy(request_id, source, destination, index, cause)

    # ------------------------------------------------------------------ caching
    def cache_blocks(self, request: Request, num_tokens: int, retention_interval: int | None = None) -> None:
        """Also register the prompt's last hash boundary when the step ends exactly there (R6.3), and remember what this step registers (R3.41)."""
        request_id = request.request_id
        num_cached_before = self.num_cached_block.get(request_id, 0)
        super().cache_blocks(request, num_tokens, retention_interval)
        num_cached_after = self.num_cached_block.get(request_id, 0)
        if self.mamba_cache_mode == "align":
            self._cache_prompt_boundary(request, num_tokens)
        for block in self.req_to_blocks.get(request_id, [])[num_cached_before:num_cached_after]:
            if not block.is_null and block.block_hash is not None:
                self.cached_blocks_this_step.add(block.block_hash)

    def _cache_prompt_boundary(self, request: Request, num_tokens: int) -> None:
        hash_block_size = self.block_pool.hash_block_size
        assert hash_block_size is not None
        if num_tokens % self.block_size == 0 or num_tokens != request.num_prompt_tokens // hash_block_size * hash_block_size:
            return
        if self.block_pool.strict and request.request_id in self._boundary_cached:
            return  # asynchronously, caching stands still while the next step already overwrites the state
        table = self.get_table(request.request_id)
        index = num_tokens // self.block_size
        if index >= len(table) or table[index].is_null:
            return
        is_first = request.request_id not in self.num_cached_block
        self.num_cached_block.setdefault(request.request_id, index)
        key = self.block_pool.cache_partial_block(request, table[index], num_tokens, self.kv_cache_group_id, self.block_size, index)
        if key is not None:
            self._boundary_cached.add(request.request_id)
            self._partial_hits[request.request_id] = (index, table[index], num_tokens)
            self.num_cached_block[request.request_id] = index
            self.cached_blocks_this_step.add(key)
        elif is_first:
            del self.num_cached_block[request.request_id]

    def reachable_block_mask(self, request: Request, start_block: int, end_block: int, retention_interval: int | None) -> list[bool] | None:
        """All states without a retention interval; with one, a state per interval and those where somebody will go on (R3.21)."""
        if retention_interval is None:
            return None
        mask = [False] * (end_block - start_block)
        if retention_interval:
            per_segment = retention_interval // self.block_size
            if per_segment <= 1:
                return None
            for index in range((start_block + per_segment) // per_segment * per_segment - 1, end_block, per_segment):
                mask[index - start_block] = True
        for boundary in self.get_reachable_boundaries(request):
            index = boundary // self.scheduler_block_size * self.scheduler_block_size // self.block_size - 1
            if start_block <= index < end_block:
                mask[index - start_block] = True
        return mask

    def get_num_needed_for_hit(self) -> int:
        """The state that ends at the boundary."""
        return 1

    # ------------------------------------------------------------------ giving back
    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int, num_prompt_tokens: int) -> None:
        """Everything before the state of the last token; in mode ``align`` also the state that the running one was copied from, one step after it was needed
        (R3.43)."""
        super().remove_skipped_blocks(request_id, num_processed_tokens, num_prompt_tokens)
        index = self.last_state_block_idx.get(request_id)
        if index is None or index >= -(-num_processed_tokens // self.block_size) - 1:
            return
        table = self.req_to_blocks[request_id]
        block = table[index]
        if not block.is_null:
            table[index] = self.block_pool.null_block
            self._free_removed(request_id, [index], [block], Cause(CauseKind.STATE_SUPERSEDED, {"logical_index": index}))

    def free(self, request_id: str, cause: Cause | None = None) -> None:
        """Also forget where the request's states were."""
        super().free(request_id, cause)
        self._has_running_state.discard(request_id)
        self._boundary_cached.discard(request_id)
        self.last_state_block_idx.pop(request_id, None)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last: its state is all that is needed (R3.1)."""
        return num_computed_tokens - 1

    def new_step_starts(self) -> None:
        """What the last step registered is written now."""
        self.cached_blocks_this_step.clear()
