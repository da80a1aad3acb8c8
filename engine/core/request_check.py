"""Refuse at the door what could only wait for ever: requests that no schedule can serve, pools that can serve nobody.

Blocks are counted as a request holds them that has the pool to itself: what windows, chunks and states give back on the way is not counted twice (R3.2,
R3.4, R3.43, R3.50). Others may delay such a request, but when they are gone it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, lcm
from typing import TYPE_CHECKING

from engine.core.full_attention_manager import SinkFullAttentionManager
from engine.core.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    ceil_div,
)
from engine.core.mamba_manager import MambaManager
from engine.core.request import Request
from engine.core.scheduler_config import SchedulerConfig
from engine.errors import InvalidInput

if TYPE_CHECKING:
    from engine.core.kv_cache_manager import KVCacheManager
    from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


def num_blocks_for(num_tokens: int, kv_cache_config: KVCacheConfig) -> int:
    """Blocks that `num_tokens` tokens of one request take in all groups together when none of them is given back."""
    return sum(-(-num_tokens // group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups)


def num_usable_blocks(manager: KVCacheManager) -> int:
    """Blocks that requests can have: all but the null block and those that sinks hold for good (R1.16)."""
    groups = manager.coordinator.single_type_managers
    return manager.block_pool.num_gpu_blocks - 1 - sum(len(group.sink_blocks) for group in groups if isinstance(group, SinkFullAttentionManager))


def check_pool(manager: KVCacheManager) -> None:
    """Raises InvalidInput for a pool in which not even a request of one token finds a block in every group. Changes nothing."""
    num_needed = sum(_num_held(group, 0, 1, 1) for group in manager.coordinator.single_type_managers)
    num_usable = num_usable_blocks(manager)
    if num_needed > num_usable:
        raise InvalidInput(
            f"num_blocks is {manager.block_pool.num_gpu_blocks}, of which requests can use {num_usable}, but a request of one token takes {num_needed}, at "
            "least one in every KV-cache group: raise num_blocks"
        )


def check_request(request: Request, config: SchedulerConfig, manager: KVCacheManager) -> None:
    """Raises InvalidInput for a request that can never finish here: a prompt that leaves no room below `max_model_len`, a prompt or an output that
    the whole pool cannot hold, a prompt beyond the budget when it may not be cut. Changes nothing.

    The last token needs no slot: its key and value are never computed (R7.7)."""
    request_id, num_prompt = request.request_id, request.num_prompt_tokens
    if num_prompt >= config.max_model_len:
        raise InvalidInput(
            f"request {request_id!r} has a prompt of {num_prompt} tokens, but with max_model_len {config.max_model_len} at most "
            f"{config.max_model_len - 1} can be followed by an output: shorten the prompt or raise max_model_len"
        )
    num_groups = len(manager.kv_cache_config.kv_cache_groups)
    where = f" in {num_groups} groups" if num_groups > 1 else ""
    num_usable = num_usable_blocks(manager)
    num_needed = num_blocks_for_prompt(num_prompt, config, manager, num_usable)
    if num_needed > num_usable:
        raise InvalidInput(
            f"request {request_id!r} needs {num_needed} blocks{where} for its prompt of {num_prompt} tokens, but the pool has {num_usable} usable blocks: "
            "shorten the prompt or raise num_blocks"
        )
    num_tokens = min(num_prompt + request.max_tokens, config.max_model_len)
    num_needed = num_blocks_for_outputs(num_prompt, num_tokens - 1, config, manager, num_usable)
    if num_needed > num_usable:
        raise InvalidInput(
            f"request {request_id!r} needs {num_needed} blocks{where} for {num_prompt} prompt tokens and max_tokens {request.max_tokens}, but the pool has "
            f"{num_usable} usable blocks: lower max_tokens or raise num_blocks"
        )
    if not config.enable_chunked_prefill and num_prompt > config.max_num_batched_tokens:
        raise InvalidInput(
            f"request {request_id!r} has a prompt of {num_prompt} tokens, but without chunked prefill a step holds at most "
            f"{config.max_num_batched_tokens}: raise max_num_batched_tokens or turn chunked prefill on"
        )


# ------------------------------------------------------------------ how much a request holds that is alone
def num_blocks_for_prompt(num_prompt: int, config: SchedulerConfig, manager: KVCacheManager, enough: int) -> int:
    """The most blocks that the prompt's steps ask for at one time, the full-sequence gate included (R7.4), wherever in the prompt a hit lets them begin.
    When a bound that is quick to find is at most `enough`, that bound instead."""
    groups = manager.coordinator.single_type_managers
    for_hits = _num_for_hits(manager)
    bound = for_hits + sum(_num_without_release(group, num_prompt) for group in groups)
    if bound <= enough:
        return bound
    at_gate = sum(_num_at_gate(group, num_prompt) for group in groups) if config.scheduler_reserve_full_isl else 0
    chunk = min(config.max_num_batched_tokens, num_prompt)
    if config.long_prefill_token_threshold:
        chunk = min(chunk, config.long_prefill_token_threshold)
    in_flight = chunk if config.async_scheduling else 0
    in_steps = max(
        sum(_num_held(group, max(0, start - in_flight), min(start + chunk, num_prompt), num_prompt, is_async=config.async_scheduling) for group in groups)
        for start in range(0, num_prompt, _gap_between_starts(manager, chunk))
    )
    return max(at_gate, in_steps) + for_hits


def _gap_between_starts(manager: KVCacheManager, chunk: int) -> int:
    """Every multiple of it may be where a step of `chunk` prompt tokens begins: they follow each other from the start, or from where a hit ends."""
    coordinator = manager.coordinator
    if any(isinstance(group, MambaManager) and group.mamba_cache_mode == "align" for group in coordinator.single_type_managers):
        return 1  # chunks are cut at the ends of states
    return gcd(chunk, coordinator.cache_hit_alignment_tokens) if coordinator.enable_caching else chunk


def num_blocks_for_outputs(num_prompt: int, num_tokens: int, config: SchedulerConfig, manager: KVCacheManager, enough: int) -> int:
    """The same for the steps of one token that bring a request from `num_prompt` to `num_tokens` computed tokens; 0 when there are none."""
    groups = manager.coordinator.single_type_managers
    if num_tokens <= num_prompt:
        return 0
    bound = sum(_num_without_release(group, num_tokens) for group in groups)
    if bound <= enough:
        return bound
    is_async = config.async_scheduling
    in_flight = int(is_async)
    starts: Iterable[int] = range(max(num_prompt, num_tokens - 1 - _period(groups)), num_tokens)
    most = max(sum(_num_held(group, start - in_flight, start + 1, num_prompt, is_async=is_async) for group in groups) for start in starts)
    if is_async:  # the prompt's last chunk is still on its way while the first output is computed
        chunk = min(config.max_num_batched_tokens, num_prompt)
        most = max(most, sum(_num_held(group, num_prompt - chunk, num_prompt + 1, num_prompt, is_async=True) for group in groups))
    return most


def _num_held(group: SingleTypeKVCacheManager, num_processed: int, num_tokens: int, num_prompt: int, *, is_async: bool = False) -> int:
    """Blocks of the group that a request holds in the step that brings it to `num_tokens` computed tokens, of which `num_processed` were over before."""
    spec, size = group.kv_cache_spec, group.block_size
    num_blocks = ceil_div(num_tokens, size)
    if isinstance(spec, CrossAttentionSpec):
        return 0  # sized by the encoder's tokens, of which a request says nothing
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != "align":
            return num_blocks + spec.num_speculative_blocks - max(0, num_processed - 1) // size
        # The state that it goes on from and the one it writes; while steps are on their way, more of the former stay, at most one for each block.
        return (num_blocks if is_async else min(num_blocks, 2)) + spec.num_speculative_blocks
    if isinstance(spec, RSWASpec):
        first = ceil_div(num_prompt, size)
        return num_blocks - max(0, max(num_prompt, num_processed - spec.rswa_window) // size - first)
    return num_blocks - group.get_num_skipped_tokens(num_processed) // size


def _num_without_release(group: SingleTypeKVCacheManager, num_tokens: int) -> int:
    """What _num_held never exceeds."""
    spec = group.kv_cache_spec
    if isinstance(spec, CrossAttentionSpec):
        return 0
    return ceil_div(num_tokens, group.block_size) + (spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0)


def _num_at_gate(group: SingleTypeKVCacheManager, num_tokens: int) -> int:
    """What the full-sequence gate counts for the group (R3.3, R3.4)."""
    num_blocks = _num_without_release(group, num_tokens)
    if isinstance(group, MambaManager) and group.mamba_cache_mode == "align":
        return min(num_blocks, 1 + group.num_speculative_blocks)
    return num_blocks if group.max_admission_blocks is None else min(num_blocks, group.max_admission_blocks)


def _num_for_hits(manager: KVCacheManager) -> int:
    """By how much adopting a hit may need more than computing everything: a running state beside the one that was hit (R3.43), and where hits end inside
    a block one more for the copy in every group that has such blocks (R3.3)."""
    coordinator = manager.coordinator
    if not coordinator.enable_caching:
        return 0
    partial = coordinator.cache_hit_alignment_tokens < coordinator.scheduler_block_size
    groups = coordinator.single_type_managers
    states = sum(isinstance(group, MambaManager) and group.mamba_cache_mode == "align" for group in groups)
    return states + (sum(group.block_size > coordinator.hash_block_size for group in groups) if partial else 0)


def _period(groups: Iterable[SingleTypeKVCacheManager]) -> int:
    """Tokens after which windows, chunks and blocks lie on each other as before; what a request holds never falls from one period to the next."""
    specs: list[tuple[KVCacheSpec, int]] = [(group.kv_cache_spec, group.block_size) for group in groups]
    return lcm(*(size for _, size in specs), *(spec.attention_chunk_size for spec, _ in specs if isinstance(spec, ChunkedLocalAttentionSpec)))
