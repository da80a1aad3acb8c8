"""The operations of `bench_adapter.py` on real vLLM 0.27.0: the other side of the comparison.

Runs only in the oracle's environment (README.md in this folder says how to set it up); nothing else in the repository imports it.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

UNLIMITED = SamplingParams(max_tokens=sys.maxsize, ignore_eos=True)
init_none_hash(sha256_cbor)


def make_pool(num_blocks: int, block_size: int, enable_caching: bool) -> BlockPool:
    return BlockPool(num_blocks, enable_caching, block_size)


def register(pool: BlockPool, block: Any, key: bytes) -> None:
    pool._insert_block_hash(make_block_hash_with_group_id(key, 0), block, num_tokens=pool.hash_block_size)


def hash_prompt(token_ids: list[int], block_size: int) -> list[bytes]:
    return Request("prompt", token_ids, UNLIMITED, None, block_hasher=get_request_block_hasher(block_size, sha256_cbor)).block_hashes


def make_spec(group: dict[str, Any], block_size: int) -> Any:
    size = group.get("block_size", block_size)
    attention = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    kind = group["type"]
    if kind == "full":
        return FullAttentionSpec(**attention)
    if kind == "mla":
        return MLAAttentionSpec(**attention)
    if kind == "swa":
        return SlidingWindowSpec(**attention, sliding_window=group["window"])
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group["chunk"])
    if kind == "rswa":
        return RSWASpec(**attention, rswa_window=group["window"])
    if kind == "cross":
        return CrossAttentionSpec(**attention)
    if kind == "sink":
        return SinkFullAttentionSpec(**attention, sink_len=group["sink"])
    if kind == "mamba":
        return MambaSpec(
            block_size=size,
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode=group.get("mode", "all"),
            num_speculative_blocks=group.get("spec_blocks", 0),
        )
    raise ValueError(f"attention type {kind!r} is not known")


class Manager:
    """A manager and the hasher of its requests."""

    def __init__(self, manager: KVCacheManager, hasher: Any) -> None:
        self.manager = manager
        self.hasher = hasher


def make_manager(num_blocks: int, block_size: int, groups: list[dict[str, Any]], max_model_len: int, enable_caching: bool) -> Manager:
    specs = [make_spec(group, block_size) for group in groups]
    sizes = [spec.block_size for spec in specs]
    hash_block_size = math.gcd(*sizes)
    layers = [KVCacheGroupSpec([f"layer{index}"], spec, is_eagle_group=False) for index, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=layers)
    manager = KVCacheManager(
        config,
        max_model_len=max_model_len,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=hash_block_size,
        enable_caching=enable_caching,
        log_stats=False,
        enable_kv_cache_events=False,
    )
    return Manager(manager, get_request_block_hasher(hash_block_size, sha256_cbor) if enable_caching else None)


def add_request(manager: Manager, request_id: str, token_ids: list[int]) -> Request:
    return Request(request_id, token_ids, UNLIMITED, None, block_hasher=manager.hasher)


def lookup(manager: Manager, request: Request) -> int:
    return int(manager.manager.get_computed_blocks(request)[1])


def prefill(manager: Manager, request: Request, token: int) -> int:
    blocks, num_hit, junction = manager.manager.get_computed_blocks(request)
    request.shared_prefix_boundary = junction
    if manager.manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks) is None:
        raise RuntimeError(f"no room for the prompt of {request.request_id}")
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = request.num_tokens
    request.append_output_token_ids(token)
    return int(num_hit)


def decode_step(manager: Manager, request: Request, token: int) -> None:
    if manager.manager.allocate_slots(request, 1) is None:
        raise RuntimeError(f"no room for the next token of {request.request_id}")
    request.num_computed_tokens += 1
    request.append_output_token_ids(token)


def finish(manager: Manager, request: Request) -> None:
    request.status = RequestStatus.FINISHED_STOPPED
    manager.manager.free(request)


def next_step(manager: Manager) -> None:
    manager.manager.new_step_starts()
