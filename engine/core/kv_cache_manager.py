"""The KV-cache manager: what the scheduler asks for blocks (section 5 of the rules).

Two steps are kept apart on purpose. Looking up (get_computed_blocks) is pure and may be repeated; adopting happens inside allocate_slots, after
the capacity was checked and never halfway (S10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.core.block_pool import BlockPool
from engine.core.coordinator_registry import get_kv_cache_coordinator
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_coordinator import CacheHit, CoordinatorSettings, resolve_block_sizes
from engine.core.kv_cache_spec import KVCacheConfig
from engine.core.kv_events import BlockStored, KVCacheEvent
from engine.core.mamba_manager import MambaManager
from engine.core.prefix_cache_stats import PrefixCacheStats
from engine.core.prefix_history import PrefixHistory
from engine.core.prefix_lookup import explain_lookup
from engine.core.request import Request, RequestStatus
from engine.core.request_check import check_pool
from engine.core.single_type_kv_cache_manager import ids_of
from engine.errors import EngineError, InvalidInput
from engine.trace.events import AllocationRefused, BlocksFreed, Cause, CauseKind, Emit


@dataclass(frozen=True)
class KVCacheBlocks:
    """Blocks per KV-cache group, in logical order. vLLM: KVCacheBlocks."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Their ids per group."""
        return tuple([block.block_id for block in group] for group in self.blocks)

    def is_empty(self) -> bool:
        """Whether no group has any."""
        return not any(self.blocks)


@dataclass(frozen=True)
class ComputedBlocks:
    """Result of a lookup: hit blocks per group, hit tokens, and the junction of hybrids (R4.5)."""

    blocks: KVCacheBlocks
    num_tokens: int
    junction: int = 0


class KVCacheManager:
    """All groups of one engine behind one door.

    `max_model_len` in tokens. `watermark`: share of the pool kept free when a waiting request is admitted while others run (R5.3 a).
    `hash_block_size` and `scheduler_block_size` default as in resolve_block_sizes, `max_in_flight_tokens` to `max_model_len`, i.e. no bound (R3.4). The
    other settings are explained by CoordinatorSettings. Raises InvalidInput for impossible sizes. vLLM: KVCacheManager.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        hash_block_size: int | None = None,
        scheduler_block_size: int | None = None,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        watermark: float = 0.0,
        retention_interval: int | None = None,
        dcp_world_size: int = 1,
        enable_kv_cache_events: bool = False,
        emit: Emit | None = None,
        compat: str | None = None,
    ) -> None:
        if max_model_len < 1:
            raise InvalidInput(f"max_model_len is {max_model_len}, but it must be at least 1")
        if not 0.0 <= watermark < 1.0:
            raise InvalidInput(f"watermark is {watermark}, but it is a share of the pool: at least 0 and below 1")
        if dcp_world_size < 1:
            raise InvalidInput(f"dcp_world_size is {dcp_world_size}, but there is at least 1 rank")
        self.history = PrefixHistory(emit) if emit is not None else None
        if self.history is not None:
            emit = self.history.emit
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.compat = compat
        scheduler_block_size, hash_block_size = resolve_block_sizes(kv_cache_config, hash_block_size, scheduler_block_size, dcp_world_size)
        self.coordinator = get_kv_cache_coordinator(
            kv_cache_config,
            CoordinatorSettings(
                enable_caching=enable_caching,
                hash_block_size=hash_block_size,
                scheduler_block_size=scheduler_block_size,
                max_model_len=max_model_len,
                max_in_flight_tokens=max_model_len if max_in_flight_tokens is None else max_in_flight_tokens,
                use_eagle=use_eagle,
                retention_interval=retention_interval,
                dcp_world_size=dcp_world_size,
                enable_kv_cache_events=enable_kv_cache_events,
                emit=emit,
                compat=compat,
            ),
        )
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.block_pool: BlockPool = self.coordinator.block_pool
        if compat is None:
            check_pool(self)
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple([() for _ in kv_cache_config.kv_cache_groups]))
        self.prefix_cache_stats = PrefixCacheStats()
        self._emit = emit

    @property
    def usage(self) -> float:
        """Used share of the usable blocks (R1.15)."""
        return self.block_pool.get_usage()

    # ------------------------------------------------------------------ looking up
    def is_lookup_enabled(self, request: Request) -> bool:
        """Whether the prefix cache is asked for this request. vLLM: prefix_cache_lookup_enabled."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The cached prefix that `request` could adopt: at most num_tokens - 1, because one token must run to give logits (R5.1). Changes nothing.

        vLLM: KVCacheManager.get_computed_blocks; here: a named result instead of a tuple."""
        max_hit = request.num_tokens - 1
        if self.is_lookup_enabled(request):
            hit = self.coordinator.find_longest_cache_hit(request.block_hashes, max_hit)
        else:
            hit = CacheHit(tuple([[] for _ in range(self.num_kv_cache_groups)]), 0)
        if self._emit is not None and self.history is not None:
            self._emit(explain_lookup(self.coordinator, request, hit, max_hit, self.history))
        return ComputedBlocks(KVCacheBlocks(hit.blocks) if any(hit.blocks) else self.empty_kv_cache_blocks, hit.num_tokens, hit.junction)

    # ------------------------------------------------------------------ allocating
    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        *,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """Slots for `num_new_tokens` tokens behind the computed and hit ones and those that a KV connector brings (`num_external_computed_tokens`), in the
        order of R5.3. Returns only the new blocks, or None when it does not fit; then no table, reference or hash has changed (except blocks outside a
        window, released all the same).

        Full blocks are registered here, before the model has run (S9). Raises ValueError when there is nothing to allocate for, and InvalidInput for a
        request that is over; both change nothing. vLLM: KVCacheManager.allocate_slots.
        """
        num_external = num_external_computed_tokens
        if num_new_tokens <= 0 and not num_external and (self.compat is None or num_new_tokens == 0):
            raise ValueError(f"num_new_tokens is {num_new_tokens}: there is nothing to allocate for")
        request_id = request.request_id
        coordinator = self.coordinator
        if request.status > RequestStatus.PREEMPTED and self.compat is None:
            raise InvalidInput(f"request {request_id!r} is over ({request.status.name}), so it gets no more blocks: add a new request")
        hit = (new_computed_blocks or self.empty_kv_cache_blocks).blocks
        num_computed_tokens = request.num_computed_tokens + num_new_computed_tokens
        total_computed_tokens = min(num_computed_tokens + num_external, self.max_model_len)
        num_watermark = 0
        if self.watermark_blocks and has_scheduled_reqs and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            num_watermark = self.watermark_blocks
        queue = self.block_pool.free_block_queue

        if full_sequence_must_fit:
            num_tokens = min(request.num_tokens, self.max_model_len)
            num_required = coordinator.get_num_blocks_to_allocate(
                request_id, num_tokens, hit, total_computed_tokens, num_tokens, num_encoder_tokens, True, total_computed_tokens - num_computed_tokens
            )
            if num_required + num_watermark > queue.num_free_blocks:
                self._refuse(request, num_new_tokens, num_new_computed_tokens, hit, True, num_required, num_watermark, 0)
                return None

        num_tokens = total_computed_tokens + num_new_tokens
        num_slots = min(num_tokens + num_lookahead_tokens, self.max_model_len)
        coordinator.remove_skipped_blocks(request_id, max(0, total_computed_tokens - request.num_in_flight_tokens), request.num_prompt_tokens)
        num_required = coordinator.get_num_blocks_to_allocate(
            request_id, num_slots, hit, num_computed_tokens + num_external, num_tokens, num_encoder_tokens, False, num_external
        )
        if num_required + num_watermark > queue.num_free_blocks - reserved_blocks:
            self._refuse(request, num_new_tokens, num_new_computed_tokens, hit, False, num_required, num_watermark, reserved_blocks)
            return None

        if num_external or hit is not self.empty_kv_cache_blocks.blocks:
            coordinator.allocate_new_computed_blocks(request_id, hit, num_computed_tokens, num_external)
        new_blocks = coordinator.allocate_new_blocks(request_id, num_slots, num_tokens, num_encoder_tokens)
        if self.enable_caching and not delay_cache_blocks:
            coordinator.cache_blocks(request, min(num_tokens, request.num_tokens))
        return KVCacheBlocks(new_blocks) if any(new_blocks) else self.empty_kv_cache_blocks

    def _refuse(
        self,
        request: Request,
        num_new_tokens: int,
        num_hit_tokens: int,
        hit: Sequence[Sequence[KVCacheBlock]],
        at_gate: bool,
        num_needed: int,
        num_watermark: int,
        num_reserved: int,
    ) -> None:
        if self._emit is None:
            return
        managers = self.coordinator.single_type_managers
        unwritten = any(isinstance(m, MambaManager) and m.is_state_unwritten(blocks) for m, blocks in zip(managers, hit, strict=True))
        if unwritten:
            cause = Cause(CauseKind.STATE_NOT_WRITTEN, {"num_hit_tokens": num_hit_tokens})
        else:
            num_evictable = sum(m.get_num_evictable_blocks(blocks) for m, blocks in zip(managers, hit, strict=True))
            facts = {
                "num_required": num_needed - num_evictable,
                "num_evictable_hits": num_evictable,
                "num_watermark": num_watermark,
                "num_free": self.block_pool.get_num_free_blocks(),
                "num_reserved": num_reserved,
            }
            cause = Cause(CauseKind.INSUFFICIENT_BLOCKS, dict(facts))
        self._emit(AllocationRefused(cause=cause, request_id=request.request_id, num_new_tokens=num_new_tokens, at_gate=at_gate))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Register what `num_computed_tokens` tokens fill; nothing with caching off. Raises InvalidInput, changing nothing, for a request that is over."""
        if self.compat is None and request.is_finished():
            raise InvalidInput(f"request {request.request_id!r} is over ({request.status.name}), so none of its blocks can be cached: cache before the end")
        if self.enable_caching:
            self.coordinator.cache_blocks(request, num_computed_tokens)

    # ------------------------------------------------------------------ giving back
    def free(self, request: Request, cause: Cause | None = None) -> None:
        """Drop the request's tables (R5.6). Hashes stay, so the blocks can be hit until they are taken again. Raises EngineError, changing nothing, when the
        request is over and was freed before."""
        if self.compat is None and request.is_finished():
            if request.is_freed:
                raise EngineError(f"request {request.request_id!r} is freed twice: it is over and gave its blocks back, so free every request once only")
            self.coordinator.free(request.request_id, cause)
            request.is_freed = True
        else:
            self.coordinator.free(request.request_id, cause)

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int, num_prompt_tokens: int) -> None:
        """Release blocks that attention will never read again (R3.2). Raises EngineError, changing nothing, for a request without a block table."""
        if self.compat is None and not any(request_id in manager.req_to_blocks for manager in self.coordinator.single_type_managers):
            raise EngineError(f"request {request_id!r} has no blocks, so none can be released: it has not begun, was preempted or is over")
        self.coordinator.remove_skipped_blocks(request_id, num_processed_tokens, num_prompt_tokens)

    def take_kv_cache_block_copies(self) -> tuple[list[tuple[int, int]], list[KVCacheBlock]]:
        """Hand over the queued copies as (source, destination) ids, and the blocks that are held for them, source and destination in turn (R6.6). The caller
        gives one reference of each of those back."""
        pairs = [pair for manager in self.coordinator.single_type_managers for pair in manager.take_pending_copies()]
        return [(source.block_id, destination.block_id) for source, destination in pairs], [block for pair in pairs for block in pair]

    def release_copied_blocks(self, retained: Sequence[KVCacheBlock]) -> None:
        """Give back what take_kv_cache_block_copies handed over, in that order: before the worker has copied, because it copies before it writes (R6.6)."""
        freed = self.block_pool.free_blocks(retained)
        if self._emit is not None and retained:
            ids = [block.block_id for block in retained]
            prepended, appended, still_referenced = ids_of(freed)
            cause = Cause(CauseKind.COPY_QUEUED)
            self._emit(BlocksFreed(cause=cause, block_ids=ids, prepended=prepended, appended=appended, still_referenced=still_referenced))

    def take_new_block_ids(self) -> list[int]:
        """Ids of the blocks taken since the last call that the worker zeroes before use."""
        return [block_id for manager in self.coordinator.single_type_managers for block_id in manager.take_new_block_ids()]

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Count an admission (0.27 counts here, not at the lookup, which may be repeated)."""
        if self.is_lookup_enabled(request):
            self.prefix_cache_stats.record(request.num_tokens, num_hits, request.num_preemptions > 0)

    def make_prefix_cache_stats(self) -> PrefixCacheStats:
        """The statistics since the last call; counting begins again."""
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        return stats

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Drop the keys of these blocks (R1.13)."""
        self.block_pool.evict_blocks(block_ids)

    def evict_unwritten_blocks(self, request_id: str, num_computed_tokens: int, cause: Cause) -> None:
        """Drop the keys of the request's blocks that were registered for tokens which, after all, nobody computes.

        Blocks are registered before the model runs (S9). When a request that is already in the plan of a step leaves it again, their keys and values
        will never be written, and a later hit would read rubbish. vLLM: none; here: the scheduler calls it unless it has to do exactly as vLLM does."""
        for manager in self.coordinator.single_type_managers:
            table = manager.req_to_blocks.get(request_id, [])
            unwritten = table[num_computed_tokens // manager.block_size :]
            self.block_pool.evict_blocks([block.block_id for block in unwritten if block.block_hash is not None], cause)

    def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache if nothing is in use; else False (R1.14)."""
        ok = self.block_pool.reset_prefix_cache()
        if ok:
            self.prefix_cache_stats.reset = True
        return ok

    # ------------------------------------------------------------------ questions
    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's whole table per group."""
        return KVCacheBlocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The request's whole table per group, as ids."""
        return self.get_blocks(request_id).get_block_ids()

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Per group the leading blocks that all requests with a table share, read off the table of one of them (R3.11)."""
        return self.coordinator.get_num_common_prefix_blocks(running_request_id)

    def new_step_starts(self, step: int = 0) -> None:
        """Engine step `step` begins; the number only explains evictions."""
        if self.history is not None:
            self.history.step = step
        self.coordinator.new_step_starts()

    def take_events(self) -> list[KVCacheEvent]:
        """Hand over the queued KV events, each BlockStored with its group's spec kind and window (R5.7)."""
        events = self.block_pool.take_events()
        for position, event in enumerate(events):
            if isinstance(event, BlockStored) and event.group_idx is not None:
                spec = self.kv_cache_config.kv_cache_groups[event.group_idx].kv_cache_spec
                events[position] = replace(event, kv_cache_spec_kind=spec.kind, kv_cache_spec_sliding_window=spec.event_sliding_window)
        return events
