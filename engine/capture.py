"""Reads the engine's logical state into a `Snapshot`.

The only place that knows how the core keeps its books and how a frame shows them. Reads, never changes anything. Parts that did not change since the
last snapshot are the same objects again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.core.block_hash import format_key
from engine.core.block_pool import BlockPool
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.trace.events import (
    BlockEvicted,
    CauseKind,
    Event,
    RequestAdmitted,
    RequestPreempted,
    StepScheduled,
    StepStarted,
    TokenSampled,
)
from engine.trace.frame import BlockOwner, BlockState, Counters, RequestState, WorkerRow
from engine.trace.recorder import Snapshot
from engine.trace.slot_ledger import SlotLedger


class WorkerView(Protocol):
    """What a frame shows of whatever runs the model."""

    @property
    def slot_mapping(self) -> tuple[int, ...]: ...

    def rows(self) -> tuple[WorkerRow, ...]: ...


class StateCapture:
    """Callable for the recorder: follows each event in the slot ledger and the counters, then reads the state.

    `requests` maps request id to Request in order of arrival and outlives the scheduler's own table, so that finished requests stay in the picture;
    `pins` maps block id to the holders of references that stand in no block table. Both belong to the session.
    """

    def __init__(self, scheduler: Scheduler, block_size: int, requests: dict[str, Request], pins: dict[int, tuple[str, ...]]) -> None:
        self.worker: WorkerView | None = None
        self._scheduler = scheduler
        self._pool: BlockPool = scheduler.kv_cache_manager.block_pool
        self._ledger = SlotLedger(len(self._pool.blocks), block_size)
        self._requests = requests
        self._pins = pins
        self._forced: dict[str, tuple[int, ...]] = {}
        self._scheduled: dict[str, int] = {}
        self._counters = Counters()
        self._last_blocks: list[BlockState] = []
        self._last_requests: dict[str, RequestState] = {}

    def __call__(self, event: Event) -> Snapshot:
        """The state after `event`. Mutates only its own ledger, counters and memory of the last snapshot."""
        self._ledger.apply(event)
        self._count(event)
        scheduler = self._scheduler
        self._last_blocks = self._block_states()
        return Snapshot(
            blocks=tuple(self._last_blocks),
            free_queue=tuple(b.block_id for b in self._pool.free_block_queue.get_all_free_blocks()),
            hash_map=self._hash_map(),
            requests=tuple(self._request_state(r) for r in self._requests.values()),
            running=tuple(r.request_id for r in scheduler.running),
            waiting=tuple(r.request_id for r in scheduler.waiting),
            rows=self.worker.rows() if self.worker else (),
            slot_mapping=self.worker.slot_mapping if self.worker else (),
            scheduled=self._scheduled,
            counters=self._counters,
        )

    def _count(self, event: Event) -> None:
        c = self._counters
        if isinstance(event, StepStarted):
            self._scheduled = {}
            self._counters = _replace(c, token_budget_left=event.token_budget)
        elif isinstance(event, StepScheduled):
            self._scheduled = dict(event.num_scheduled_tokens)
            self._counters = _replace(c, token_budget_left=event.token_budget_left)
        elif isinstance(event, RequestAdmitted) and not event.resumed and event.request_id is not None:
            # counted at admission, not at every lookup, and once per request: vLLM 0.27's prefix cache statistics
            num_tokens = self._requests[event.request_id].num_tokens
            self._counters = _replace(c, num_hit_tokens=c.num_hit_tokens + event.num_computed_tokens, num_queried_tokens=c.num_queried_tokens + num_tokens)
        elif isinstance(event, RequestPreempted):
            self._counters = _replace(c, num_preemptions=c.num_preemptions + 1)
        elif isinstance(event, BlockEvicted):
            self._counters = _replace(c, num_evictions=c.num_evictions + 1)
        elif isinstance(event, TokenSampled) and event.cause.kind is CauseKind.FORCED and event.request_id is not None:
            self._forced[event.request_id] = (*self._forced.get(event.request_id, ()), event.position)

    def _block_states(self) -> list[BlockState]:
        owners: dict[int, list[BlockOwner]] = {}
        null_id = self._pool.null_block.block_id
        for group_id, manager in enumerate(self._scheduler.kv_cache_manager.coordinator.single_type_managers):
            for request_id, blocks in manager.req_to_blocks.items():
                for index, block in enumerate(blocks):
                    if block.block_id != null_id:
                        owners.setdefault(block.block_id, []).append(BlockOwner(request_id, group_id, index))
        keys: dict[int, list[str]] = {}
        for key, block_ids in self._hash_map():
            for block_id in block_ids:
                keys.setdefault(block_id, []).append(key)
        states: list[BlockState] = []
        for block in self._pool.blocks:
            block_id = block.block_id
            primary = block.block_hash
            hashes: tuple[str, ...] = ()
            if primary is not None:
                first = format_key(primary)
                hashes = (first, *(k for k in keys.get(block_id, ()) if k != first))
            content = self._ledger.content[block_id]
            state = BlockState(
                block_id=block_id,
                ref_cnt=0 if block.is_null else block.ref_cnt,  # the null block's count means nothing (R1.2)
                is_null=block.is_null,
                block_hashes=hashes,
                num_hash_tokens=block.block_hash_num_tokens if primary is not None else None,
                num_filled=sum(t is not None for t in content),
                token_ids=content,
                owners=tuple(owners.get(block_id, ())),
                pins=self._pins.get(block_id, ()),
            )
            if self._last_blocks and self._last_blocks[block_id] == state:
                state = self._last_blocks[block_id]
            states.append(state)
        return states

    def _hash_map(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        return tuple((format_key(key), tuple(ids)) for key, ids in self._pool.cached_block_hash_to_block.items())

    def _request_state(self, request: Request) -> RequestState:
        request_id = request.request_id
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        state = RequestState(
            request_id=request_id,
            status=request.status.name,
            num_prompt_tokens=request.num_prompt_tokens,
            token_ids=tuple(request.all_token_ids),
            num_computed_tokens=request.num_computed_tokens,
            block_ids=tuple(tuple(b.block_id for b in m.req_to_blocks.get(request_id, ())) for m in managers),
            block_hashes=tuple(h.hex() for h in request.block_hashes),
            num_cached_block=tuple(m.num_cached_block.get(request_id) for m in managers),
            num_preemptions=request.num_preemptions,
            forced=self._forced.get(request_id, ()),
        )
        if self._last_requests.get(request_id) == state:
            return self._last_requests[request_id]
        self._last_requests[request_id] = state
        return state


def _replace(counters: Counters, **changes: int) -> Counters:
    values = {f: getattr(counters, f) for f in Counters.__struct_fields__}
    return Counters(**{**values, **changes})
