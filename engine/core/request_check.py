"""Refuse at the door what could only wait for ever: requests that no schedule can serve."""

from __future__ import annotations

from engine.core.kv_cache_spec import KVCacheConfig
from engine.core.request import Request
from engine.core.scheduler_config import SchedulerConfig
from engine.errors import InvalidInput


def num_blocks_for(num_tokens: int, kv_cache_config: KVCacheConfig) -> int:
    """Blocks that `num_tokens` tokens of one request take in all groups together."""
    return sum(-(-num_tokens // group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups)


def check_request(request: Request, config: SchedulerConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises InvalidInput for a request that can never finish here: a prompt that leaves no room below `max_model_len`, a prompt or an output that
    the whole pool cannot hold, a prompt beyond the budget when it may not be cut. Changes nothing.

    The last token needs no slot: its key and value are never computed (R7.7)."""
    request_id, num_prompt = request.request_id, request.num_prompt_tokens
    if num_prompt >= config.max_model_len:
        raise InvalidInput(
            f"request {request_id!r} has a prompt of {num_prompt} tokens, but with max_model_len {config.max_model_len} at most "
            f"{config.max_model_len - 1} can be followed by an output: shorten the prompt or raise max_model_len"
        )
    num_usable = kv_cache_config.num_blocks - 1
    num_needed = num_blocks_for(num_prompt, kv_cache_config)
    if num_needed > num_usable:
        raise InvalidInput(
            f"request {request_id!r} needs {num_needed} blocks for its prompt of {num_prompt} tokens, but the pool has {num_usable} usable blocks: "
            "shorten the prompt or raise num_blocks"
        )
    num_tokens = min(num_prompt + request.max_tokens, config.max_model_len)
    num_needed = num_blocks_for(num_tokens - 1, kv_cache_config)
    if num_needed > num_usable:
        raise InvalidInput(
            f"request {request_id!r} needs {num_needed} blocks for {num_prompt} prompt tokens and max_tokens {request.max_tokens}, but the pool has "
            f"{num_usable} usable blocks: lower max_tokens or raise num_blocks"
        )
    if not config.enable_chunked_prefill and num_prompt > config.max_num_batched_tokens:
        raise InvalidInput(
            f"request {request_id!r} has a prompt of {num_prompt} tokens, but without chunked prefill a step holds at most "
            f"{config.max_num_batched_tokens}: raise max_num_batched_tokens or turn chunked prefill on"
        )
