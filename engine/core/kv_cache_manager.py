"""The KV-cache manager: what the scheduler asks for blocks (section 5 of the rules).

Two steps are kept apart on purpose. Looking up (get_computed_blocks) is pure and may be repeated; adopting happens inside allocate_slots, after
the capacity was checked and never halfway (S10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_coordinator import CacheHit, get_kv_cache_coordinator
from engine.core.kv_cache_spec import KVCacheConfig
from engine.core.kv_events import BlockStored, KVCacheEvent
from engine.core.prefix_lookup import explain_lookup
from engine.core.request import Request, RequestStatus
from engine.errors import InvalidInput
from engine.trace.events import AllocationRefused, Cause, CauseKind, Emit, PrefixLookup


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
    `hash_block_size` defaults to the block size of the only group. Raises InvalidInput for impossible sizes. vLLM: KVCacheManager.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        hash_block_size: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        watermark: float = 0.0,
        enable_kv_cache_events: bool = False,
        emit: Emit | None = None,
        strict: bool = True,
    ) -> None:
        if max_model_len < 1:
            raise InvalidInput(f"max_model_len is {max_model_len}, but it must be at least 1")
        if not 0.0 <= watermark < 1.0:
            raise InvalidInput(f"watermark is {watermark}, but it is a share of the pool: at least 0 and below 1")
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.coordinator = get_kv_cache_coordinator(
            kv_cache_config,
            enable_caching=enable_caching,
            hash_block_size=hash_block_size or kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
            use_eagle=use_eagle,
            enable_kv_cache_events=enable_kv_cache_events,
            emit=emit,
            strict=strict,
        )
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.block_pool: BlockPool = self.coordinator.block_pool
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in kv_cache_config.kv_cache_groups))
        self._emit = emit

    @property
    def usage(self) -> float:
        """Used share of the usable blocks (R1.15)."""
        return self.block_pool.get_usage()

    # ------------------------------------------------------------------ looking up
    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The cached prefix that `request` could adopt: at most num_tokens - 1, because one token must run to give logits (R5.1). Changes nothing.

        vLLM: KVCacheManager.get_computed_blocks; here: a named result instead of a tuple."""
        max_hit = request.num_tokens - 1
        if not self.enable_caching or request.skip_reading_prefix_cache:
            hit = CacheHit(tuple([] for _ in range(self.num_kv_cache_groups)), 0)
        else:
            hit = self.coordinator.find_longest_cache_hit(request.block_hashes, max_hit)
        if self._emit is not None:
            self._emit(
                PrefixLookup(
                    cause=explain_lookup(self.coordinator, request, hit, max_hit),
                    request_id=request.request_id,
                    group_id=0 if self.num_kv_cache_groups == 1 else None,
                    num_hit_tokens=hit.num_tokens,
                    hit_block_ids=[block.block_id for block in hit.blocks[0]],
                    max_hit_tokens=max_hit,
                )
            )
        return ComputedBlocks(KVCacheBlocks(hit.blocks) if hit.num_tokens else self.empty_kv_cache_blocks, hit.num_tokens, hit.junction)

    # ------------------------------------------------------------------ allocating
    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        *,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        num_in_flight_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Slots for `num_new_tokens` tokens behind the computed and hit ones, in the order of R5.3. Returns only the new blocks, or None when it
        does not fit; then no table, reference or hash has changed (except blocks outside a window, released all the same).

        Full blocks are registered here, before the model has run (S9). Raises ValueError when there is nothing to allocate for.
        """
        if num_new_tokens <= 0:
            raise ValueError(f"num_new_tokens is {num_new_tokens}: there is nothing to allocate for")
        request_id = request.request_id
        coordinator = self.coordinator
        hit = (new_computed_blocks or self.empty_kv_cache_blocks).blocks
        num_computed_tokens = request.num_computed_tokens + num_new_computed_tokens
        waiting = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        num_watermark = self.watermark_blocks if has_scheduled_reqs and waiting else 0
        num_free = self.block_pool.free_block_queue.num_free_blocks

        num_evictable = coordinator.get_num_evictable_blocks(hit, num_computed_tokens) if num_new_computed_tokens else 0
        if full_sequence_must_fit:
            num_tokens = min(request.num_tokens, self.max_model_len)
            num_required = coordinator.get_num_new_blocks(request_id, num_tokens, hit, num_computed_tokens, apply_admission_cap=True)
            if num_required + num_evictable + num_watermark > num_free:
                self._refuse(request, num_new_tokens, True, (num_required, num_evictable, num_watermark, num_free, 0))
                return None

        coordinator.remove_skipped_blocks(request_id, max(0, num_computed_tokens - num_in_flight_tokens))
        num_free = self.block_pool.free_block_queue.num_free_blocks
        num_tokens = num_computed_tokens + num_new_tokens
        num_slots = min(num_tokens + num_lookahead_tokens, self.max_model_len)
        num_required = coordinator.get_num_new_blocks(request_id, num_slots, hit, num_computed_tokens)
        if num_required + num_evictable + num_watermark > num_free - reserved_blocks:
            self._refuse(request, num_new_tokens, False, (num_required, num_evictable, num_watermark, num_free, reserved_blocks))
            return None

        if num_new_computed_tokens:
            coordinator.add_local_computed_blocks(request_id, hit, num_computed_tokens)
        new_blocks = coordinator.allocate_new_blocks(request_id, num_slots)
        if self.enable_caching and not delay_cache_blocks:
            coordinator.cache_blocks(request, min(num_tokens, request.num_tokens))
        return KVCacheBlocks(new_blocks) if any(new_blocks) else self.empty_kv_cache_blocks

    def _refuse(self, request: Request, num_new_tokens: int, at_gate: bool, numbers: tuple[int, int, int, int, int]) -> None:
        if self._emit is None:
            return
        names = ("num_required", "num_evictable_hits", "num_watermark", "num_free", "num_reserved")
        self._emit(
            AllocationRefused(
                cause=Cause(CauseKind.INSUFFICIENT_BLOCKS, dict(zip(names, numbers, strict=True))),
                request_id=request.request_id,
                num_new_tokens=num_new_tokens,
                at_gate=at_gate,
            )
        )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Register what `num_computed_tokens` tokens fill; nothing with caching off."""
        if self.enable_caching:
            self.coordinator.cache_blocks(request, num_computed_tokens)

    # ------------------------------------------------------------------ giving back
    def free(self, request: Request, cause: Cause | None = None) -> None:
        """Drop the request's tables (R5.6). Hashes stay, so the blocks can be hit until they are taken again."""
        self.coordinator.free(request.request_id, cause)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Release blocks that attention will never read again (R3.2)."""
        self.coordinator.remove_skipped_blocks(request_id, num_computed_tokens)

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
        return self.block_pool.reset_prefix_cache()

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

    def new_step_starts(self) -> None:
        """A new engine step begins."""
        self.coordinator.new_step_starts()

    def take_events(self) -> list[KVCacheEvent]:
        """Hand over the queued KV events, each BlockStored with its group's spec kind and window (R5.7)."""
        events = self.block_pool.take_events()
        for position, event in enumerate(events):
            if isinstance(event, BlockStored) and event.group_idx is not None:
                spec = self.kv_cache_config.kv_cache_groups[event.group_idx].kv_cache_spec
                events[position] = replace(event, kv_cache_spec_kind=spec.kind, kv_cache_spec_sliding_window=spec.sliding_window)
        return events
