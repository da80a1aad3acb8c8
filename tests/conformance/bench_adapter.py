"""A thin layer over the engine's block stack for a benchmark program that compares it with vLLM's own.

Positional arguments only; nothing is kept between calls, nothing is computed in advance.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from engine.core.block_hash import BlockHasher, make_block_hash_with_group_id
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_coordinator import resolve_block_sizes
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import KVCacheConfig, KVCacheGroupSpec
from engine.core.output import SamplingParams
from engine.core.request import Request, RequestStatus
from tests.conformance.manager_driver import make_spec

UNLIMITED = SamplingParams(max_tokens=sys.maxsize)


def make_pool(num_blocks: int, block_size: int, enable_caching: bool) -> BlockPool:
    return BlockPool(num_blocks, enable_caching, block_size)


def register(pool: BlockPool, block: KVCacheBlock, key: bytes) -> None:
    assert pool.hash_block_size is not None
    pool.insert_block_hash(make_block_hash_with_group_id(key, 0), block, pool.hash_block_size)


def hash_prompt(token_ids: list[int], block_size: int) -> list[bytes]:
    return Request("prompt", token_ids, UNLIMITED, block_hasher=BlockHasher(block_size, "sha256_cbor")).block_hashes


class Manager:
    """A manager and the hasher of its requests."""

    def __init__(self, manager: KVCacheManager, hasher: BlockHasher | None) -> None:
        self.manager = manager
        self.hasher = hasher


def make_manager(num_blocks: int, block_size: int, groups: Iterable[dict[str, Any]], max_model_len: int, enable_caching: bool) -> Manager:
    layers = [KVCacheGroupSpec([f"layer{index}"], make_spec(group, block_size), group.get("eagle", False)) for index, group in enumerate(groups)]
    config = KVCacheConfig(num_blocks, layers)
    _, hash_block_size = resolve_block_sizes(config, None, None)
    hasher = BlockHasher(hash_block_size, "sha256_cbor") if enable_caching else None
    return Manager(KVCacheManager(config, max_model_len, enable_caching=enable_caching), hasher)


def add_request(manager: Manager, request_id: str, token_ids: list[int]) -> Request:
    return Request(request_id, token_ids, UNLIMITED, block_hasher=manager.hasher)


def lookup(manager: Manager, request: Request) -> int:
    return manager.manager.get_computed_blocks(request).num_tokens


def prefill(manager: Manager, request: Request, token: int) -> int:
    hit = manager.manager.get_computed_blocks(request)
    request.shared_prefix_boundary = hit.junction
    new = manager.manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit.num_tokens, hit.blocks)
    if new is None:
        raise RuntimeError(f"no room for the prompt of {request.request_id}")
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = request.num_tokens
    request.append_output_token_ids(token)
    return hit.num_tokens


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
