"""Where prefill chunks end when recurrent states are kept at block ends (R3.44)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.kv_cache_coordinator import KVCacheCoordinator
from engine.core.kv_cache_spec import KVCacheConfig, MambaSpec
from engine.core.request import Request
from engine.core.scheduler_config import SchedulerConfig
from engine.trace.events import Cause, CauseKind


@dataclass(frozen=True)
class MambaBlockAlignedSplit:
    """Cuts a chunk so that it ends where a state must be kept; lengths in tokens.

    `block_size`: of the model's cache. `hash_block_size`: where it is finer than `scheduler_block_size`, the prompt's last hash boundary is a stop too.
    `max_chunk_tokens`: the longest chunk a step can hold; a block longer than that is crossed in several. `use_eagle`: the last block is recomputed anyway.
    vLLM: Scheduler._mamba_block_aligned_split."""

    block_size: int
    hash_block_size: int
    scheduler_block_size: int
    max_chunk_tokens: int
    use_eagle: bool = False

    def __call__(self, request: Request, num_new_tokens: int, num_computed_tokens: int) -> tuple[int, Cause | None]:
        """How many of `num_new_tokens` tokens, which begin at `num_computed_tokens`, to compute in this step, 0 for none; and why it is fewer. Changes
        nothing."""
        size, start, num_prompt_tokens = self.block_size, num_computed_tokens, request.num_prompt_tokens
        # A resumed request replays its outputs: they count as prefill too.
        prefill_end = max(num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return num_new_tokens, None
        facts = {"num_wanted": num_new_tokens, "block_size": size}
        last_cacheable = request.num_tokens // size * size
        if self.use_eagle:
            last_cacheable = max(last_cacheable - size, 0)
        end = start + num_new_tokens
        kind = CauseKind.CHUNKED_AT_BLOCK
        if end < prefill_end:
            aligned = end // size * size
            if aligned > start or size <= self.max_chunk_tokens:
                end = aligned
        stops = {last_cacheable: CauseKind.CHUNKED_AT_BLOCK}
        if start % size:
            stops.setdefault((start // size + 1) * size, CauseKind.CHUNKED_AT_BLOCK)
        if self.hash_block_size < self.scheduler_block_size:
            boundary = num_prompt_tokens // self.hash_block_size * self.hash_block_size
            if last_cacheable < boundary < num_prompt_tokens:
                stops.setdefault(boundary, CauseKind.CHUNKED_AT_PROMPT_BOUNDARY)
        if start < request.shared_prefix_boundary < end:
            stops.setdefault(start + (request.shared_prefix_boundary - start) // size * size, CauseKind.CHUNKED_AT_JUNCTION)
        inside = [stop for stop in stops if start < stop < end]
        if inside:
            end = min(inside)
            kind = stops[end]
        num_taken = max(end - start, 0)
        if num_taken == num_new_tokens:
            return num_taken, None
        return num_taken, Cause(kind, {**facts, "num_new_tokens": num_taken, "num_tokens": end})


def make_mamba_split(
    kv_cache_config: KVCacheConfig, scheduler_config: SchedulerConfig, coordinator: KVCacheCoordinator, block_size: int | None, use_eagle: bool
) -> MambaBlockAlignedSplit | None:
    """The split for these settings, None when no state is kept in mode ``align``. `block_size` defaults to that of the first group with states."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    mamba = next((spec for spec in specs if isinstance(spec, MambaSpec)), None)
    if mamba is None or mamba.mamba_cache_mode != "align":
        return None
    threshold, longest = scheduler_config.long_prefill_token_threshold, scheduler_config.max_num_batched_tokens
    return MambaBlockAlignedSplit(
        block_size or mamba.block_size,
        coordinator.hash_block_size,
        coordinator.scheduler_block_size,
        min(longest, threshold) if threshold else longest,
        use_eagle,
    )
