"""The books of an engine as plain lists and dicts: what the events must account for, read off the engine afresh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core.block_hash import format_key
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, RequestStatus
from engine.core.request_queue import priority_key
from engine.core.scheduler import Scheduler, SchedulingPolicy


@dataclass
class PlainRequest:
    """Where one request stands."""

    status: str
    num_tokens: int
    num_computed_tokens: int


@dataclass
class PlainState:
    """`free`: queue, head first. `refs`: of blocks that have references, the null block apart. `keys`: per block its keys, primary first. `covers`: prefix
    length of its primary key. `cache`: key -> blocks, in order. `tables` and `frontiers`: (request, group) -> block ids, num_cached_block. `copies`: per group
    (source, destination) of copies that are queued. `waiting`: in order of service."""

    free: list[int] = field(default_factory=list)
    refs: dict[int, int] = field(default_factory=dict)
    keys: dict[int, list[str]] = field(default_factory=dict)
    covers: dict[int, int] = field(default_factory=dict)
    cache: list[tuple[str, list[int]]] = field(default_factory=list)
    tables: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    frontiers: dict[tuple[str, int], int] = field(default_factory=dict)
    copies: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    requests: dict[str, PlainRequest] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)


def read_pool(pool: BlockPool) -> PlainState:
    """Queue, references, keys and cache of a pool."""
    keys = {block.block_id: block_keys for block in pool.blocks if (block_keys := list(pool.keys_of(block)))}
    return PlainState(
        free=[block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        refs={block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null},
        keys=keys,
        covers={block.block_id: block.block_hash_num_tokens for block in pool.blocks if block.block_hash_num_tokens is not None},
        cache=[(format_key(key), ids) for key, ids in pool.cached_block_hash_to_block.items()],
    )


def read_manager(manager: KVCacheManager) -> PlainState:
    """Those and tables, frontiers and queued copies of all groups."""
    state = read_pool(manager.block_pool)
    for group in manager.coordinator.single_type_managers:
        group_id = group.kv_cache_group_id
        for request_id, table in group.req_to_blocks.items():
            if table:
                state.tables[request_id, group_id] = [0 if block.is_null else block.block_id for block in table]
        state.frontiers |= {(request_id, group_id): frontier for request_id, frontier in group.num_cached_block.items()}
        if group.pending_copies:
            state.copies[group_id] = [(source.block_id, destination.block_id) for source, destination in group.pending_copies]
    return state


def read_scheduler(scheduler: Scheduler, requests: Iterable[Request], before: PlainState) -> PlainState:
    """Those and the requests. `requests`: all that ever arrived. A request that the step passes over is in neither queue until the step is planned: it
    stands where it stood `before`."""
    state = read_manager(scheduler.kv_cache_manager)
    state.requests = {r.request_id: PlainRequest(r.status.name, r.num_tokens, r.num_computed_tokens) for r in requests}
    state.running = [request.request_id for request in scheduler.running]
    queued = [*scheduler.skipped_waiting, *scheduler.waiting]
    if scheduler.policy is SchedulingPolicy.PRIORITY:
        queued.sort(key=priority_key)
    line = [request.request_id for request in queued]
    waits = {r.request_id for r in scheduler.requests.values() if r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)}
    passed_over = [request_id for request_id in before.waiting if request_id in waits and request_id not in line]
    state.waiting = passed_over + line
    return state
