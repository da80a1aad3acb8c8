"""State + event = next state, from what the events say of themselves in `engine.trace.events` and nothing else.

Events that move nothing in these books (lookups, refusals, plans, the worker's) leave them as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

from engine.trace.events import (
    AnyEvent,
    BlockCached,
    BlockEvicted,
    BlocksAllocated,
    BlocksFreed,
    BlocksSkipped,
    BlocksTouched,
    CachingSkipped,
    CauseKind,
    CopyQueued,
    PrefixCacheReset,
    RequestAdded,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    StateBlocksArranged,
    StepScheduled,
    TokenSampled,
    TraceStarted,
)
from tests.property.plain_state import PlainRequest, PlainState

END = {"stop": "FINISHED_STOPPED", "length": "FINISHED_LENGTH_CAPPED", "abort": "FINISHED_ABORTED", "error": "FINISHED_ERROR"}
NULL = 0


def fold(state: PlainState, event: AnyEvent) -> PlainState:
    """The state after `event`; `state` stays as it is."""
    after = deepcopy(state)
    apply(after, event)
    return after


def apply(state: PlainState, event: AnyEvent) -> None:
    match event:
        case TraceStarted():
            state.free = [block_id for block_id in range(event.num_blocks) if block_id != NULL]
        case RequestAdded():
            assert event.request_id is not None
            state.requests[event.request_id] = PlainRequest("WAITING", event.num_prompt_tokens, 0)
            state.waiting.insert(len(state.waiting) if event.num_ahead is None else event.num_ahead, event.request_id)
        case RequestAdmitted() | RequestPreempted() | RequestFinished() | StepScheduled() | TokenSampled():
            _request(state, event)
        case BlocksTouched():
            for block_id in event.left_free_queue:
                state.free.remove(block_id)
            _hold(state, event.block_ids)
            if event.request_id is not None:
                state.tables[event.request_id, event.group_id or 0] = [NULL] * event.num_null_blocks + event.block_ids
                _move_frontier(state, event, event.num_cached_block)
        case BlocksAllocated():
            _pop(state, event.block_ids)
            if event.request_id is not None:
                state.tables.setdefault((event.request_id, event.group_id or 0), []).extend(event.block_ids)
        case BlockEvicted():
            _unregister(state, event.block_id, f"{event.block_hash}:{event.group_id}")
        case BlockCached():
            _register(state, event.block_id, f"{event.block_hash}:{event.group_id}", event.num_hash_tokens)
            _move_frontier(state, event, event.num_cached_block)
        case CachingSkipped():
            _move_frontier(state, event, event.num_cached_block)
        case BlocksFreed():
            _let_go(state, event.block_ids, event.prepended, event.appended)
            if event.request_id is not None:
                del state.tables[event.request_id, event.group_id or 0]
                state.frontiers.pop((event.request_id, event.group_id or 0), None)
            elif event.cause.kind is CauseKind.COPY_QUEUED:
                state.copies.clear()
        case BlocksSkipped():
            assert event.request_id is not None
            for index in event.logical_indices:
                state.tables[event.request_id, event.group_id or 0][index] = NULL
            _let_go(state, event.block_ids, event.prepended, event.appended)
        case StateBlocksArranged():
            assert event.request_id is not None
            table = state.tables.setdefault((event.request_id, event.group_id or 0), [])
            table.extend([NULL] * (event.num_blocks - len(table)))
            for index in event.moved_from:
                table.append(table[index])
                table[index] = NULL
        case CopyQueued():
            _copy(state, event)
        case PrefixCacheReset(ok=True):
            state.keys, state.covers, state.cache = {}, {}, []
        case _:
            pass


def _request(state: PlainState, event: RequestAdmitted | RequestPreempted | RequestFinished | StepScheduled | TokenSampled) -> None:
    if isinstance(event, StepScheduled):
        for request_id, num_tokens in event.num_scheduled_tokens.items():
            state.requests[request_id].num_computed_tokens += num_tokens
        return
    assert event.request_id is not None
    request = state.requests[event.request_id]
    if isinstance(event, TokenSampled):
        assert event.position == request.num_tokens
        request.num_tokens += 1
        return
    for line in (state.waiting, state.running):
        if event.request_id in line:
            line.remove(event.request_id)
    if isinstance(event, RequestAdmitted):
        state.running.append(event.request_id)
        request.status, request.num_computed_tokens = "RUNNING", event.num_computed_tokens
    elif isinstance(event, RequestPreempted):
        state.waiting.insert(event.num_ahead, event.request_id)
        assert request.num_computed_tokens == event.num_lost_tokens
        request.status, request.num_computed_tokens = "PREEMPTED", 0
    else:
        request.status = END[event.reason]


def _copy(state: PlainState, event: CopyQueued) -> None:
    assert event.request_id is not None
    source, destination, group_id = event.source_block_id, event.destination_block_id, event.group_id or 0
    _pop(state, [destination])
    state.copies.setdefault(group_id, []).append((source, destination))
    if event.cause.kind is CauseKind.PARTIAL_HIT:
        _hold(state, [destination])  # by the request and by the copy; the source keeps the reference that the table had
        table = state.tables[event.request_id, group_id]
        assert table[event.logical_index] == source
        table[event.logical_index] = destination
        return
    _hold(state, [source])
    covers = state.covers.get(source)
    keys = list(state.keys.get(source, []))
    for key in keys:
        _unregister(state, source, key, any_key=True)
    for key in keys:
        _register(state, destination, key, covers)


# ------------------------------------------------------------------ references and the queue
def _hold(state: PlainState, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        if block_id != NULL:
            state.refs[block_id] = state.refs.get(block_id, 0) + 1


def _pop(state: PlainState, block_ids: list[int]) -> None:
    """From the head of the queue, ref_cnt 0 -> 1."""
    assert state.free[: len(block_ids)] == block_ids
    del state.free[: len(block_ids)]
    assert not any(block_id in state.refs for block_id in block_ids)
    _hold(state, block_ids)


def _let_go(state: PlainState, block_ids: Iterable[int], prepended: list[int], appended: list[int]) -> None:
    for block_id in block_ids:
        if block_id != NULL:
            state.refs[block_id] -= 1
            if not state.refs[block_id]:
                del state.refs[block_id]
    assert not any(block_id in state.refs for block_id in (*prepended, *appended))
    state.free = [*prepended, *state.free, *appended]


# ------------------------------------------------------------------ the prefix cache
def _register(state: PlainState, block_id: int, key: str, num_tokens: int | None) -> None:
    """Primary key if the block has none, else a further one; behind the blocks that are registered under it already."""
    known = state.keys.setdefault(block_id, [])
    known.append(key)
    known[1:] = sorted(known[1:])
    if len(known) == 1 and num_tokens is not None:
        state.covers[block_id] = num_tokens
    for registered, block_ids in state.cache:
        if registered == key:
            block_ids.append(block_id)
            return
    state.cache.append((key, [block_id]))


def _unregister(state: PlainState, block_id: int, key: str, *, any_key: bool = False) -> None:
    """A key that other blocks still have goes to the end of the cache (R1.10)."""
    known = state.keys[block_id]
    assert any_key or key != known[0] or len(known) == 1, "the primary key goes last"
    known.remove(key)
    if not known:
        del state.keys[block_id]
        del state.covers[block_id]
    position = next(i for i, (registered, _) in enumerate(state.cache) if registered == key)
    _, block_ids = state.cache.pop(position)
    block_ids.remove(block_id)
    if block_ids:
        state.cache.append((key, block_ids))


def _move_frontier(state: PlainState, event: BlocksTouched | BlockCached | CachingSkipped, num_cached_block: int | None) -> None:
    if num_cached_block is not None:
        assert event.request_id is not None
        state.frontiers[event.request_id, event.group_id or 0] = num_cached_block
