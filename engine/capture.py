"""Reads the engine's logical state into a `Snapshot`, event by event.

The only place that knows how the core keeps its books and how a frame shows them. Reads, never changes anything. An event tells where to look
(`engine.capture_touched`), the engine tells what is there; parts that did not change are the same objects as in the last snapshot. So a snapshot costs
what the event touched, not what the pool holds.
"""

from __future__ import annotations

from typing import Protocol

from engine.capture_mirrors import FreeQueueMirror, HashMapMirror, parse_key
from engine.capture_requests import RequestsMirror
from engine.capture_touched import EVERYTHING, FREE_QUEUE, KEYS, LISTS, ROWS, TABLES, touched_blocks
from engine.core.block_pool import BlockPool
from engine.core.full_attention_manager import SinkFullAttentionManager
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.errors import EngineError
from engine.trace.events import (
    BlockEvicted,
    BlocksAllocated,
    CauseKind,
    Event,
    KVWritten,
    RequestAdmitted,
    RequestPreempted,
    StepScheduled,
    StepStarted,
    TokenSampled,
    kind_of,
)
from engine.trace.frame import BlockState, Counters, WorkerRow
from engine.trace.recorder import Snapshot
from engine.trace.shared_sequence import SharedSequence
from engine.trace.slot_ledger import SlotLedger

COPY_PIN = "copy"
"""Holder of the references that keep both ends of a queued copy (R6.6)."""
SINK_PIN = "sink"
"""Holder of the blocks that a group with a sink takes for itself (R1.16)."""
STATE_KIND = "mamba"
"""Spec kind of groups that keep one recurrent state per block instead of keys and values per slot."""

Pins = dict[int, tuple[str, ...]]


class WorkerView(Protocol):
    """What a frame shows of whatever runs the model."""

    @property
    def slot_mapping(self) -> tuple[int, ...]: ...

    def rows(self) -> tuple[WorkerRow, ...]: ...


class StateCapture:
    """Callable for the recorder: follows each event in the slot ledger and the counters, then reads the state.

    `requests` maps request id to Request in order of arrival and outlives the scheduler's own table, so that finished requests stay in the picture;
    `pins` maps block id to the holders of references that stand in no block table. Both belong to the session. With `verify` every snapshot is compared
    with one that was read afresh, and EngineError tells where they differ: for tests, because it costs a scan of the pool per event.
    """

    def __init__(self, scheduler: Scheduler, block_size: int, requests: dict[str, Request], pins: Pins, *, verify: bool = False) -> None:
        self.worker: WorkerView | None = None
        self.verify = verify
        self._scheduler = scheduler
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._pool: BlockPool = scheduler.kv_cache_manager.block_pool
        groups = scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        sizes = [0 if g.kv_cache_spec.kind == STATE_KIND else g.kv_cache_spec.block_size for g in groups]
        self._ledger = SlotLedger(len(self._pool.blocks), block_size, sizes)
        self._requests = requests
        self._pins = pins
        self._forced: dict[str, tuple[int, ...]] = {}
        self._scheduled: dict[str, int] = {}
        self._counters = Counters()
        self._seen_worker: WorkerView | None = None
        self._blocks: SharedSequence[BlockState] = SharedSequence()
        self._rows: tuple[WorkerRow, ...] = ()
        self._running: tuple[str, ...] = ()
        self._waiting: tuple[str, ...] = ()
        self._all_pins: Pins = {}
        self._sink_pins: Pins = {b.block_id: (SINK_PIN,) for m in self._managers if isinstance(m, SinkFullAttentionManager) for b in m.sink_blocks}
        self._request_states = RequestsMirror(requests, self._managers, self._forced)
        self._read_everything()

    def __call__(self, event: Event) -> Snapshot:
        """The state after `event`. Mutates only its own ledger, counters and memory of the last snapshot."""
        self._ledger.apply(event)
        self._count(event)
        if isinstance(event, EVERYTHING):
            self._read_everything()
        else:
            self._read_what_changed(event)
        made = self._snapshot()
        if self.verify:
            self._compare(made, event)
        return made

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            blocks=self._blocks,
            free_queue=self._free_queue.sequence,
            hash_map=self._hash_map.sequence,
            requests=self._request_states.sequence,
            running=self._running,
            waiting=self._waiting,
            rows=self._rows,
            slot_mapping=self.worker.slot_mapping if self.worker else (),
            scheduled=self._scheduled,
            counters=self._counters,
        )

    # ------------------------------------------------------------------ what changed
    def _read_what_changed(self, event: Event) -> None:
        blocks = self._pool.blocks
        touched = set(touched_blocks(event, self._ledger.block_size_of(event) if isinstance(event, KVWritten) else 1))
        null_id = self._pool.null_block.block_id
        touched.discard(null_id)
        if isinstance(event, TABLES):
            touched |= self._read_tables(event)
        if isinstance(event, FREE_QUEUE):
            self._free_queue.update(self._pool.free_block_queue, [blocks[i] for i in touched])
        if isinstance(event, KEYS):
            known = {parse_key(text) for i in touched for text in self._blocks[i].block_hashes}
            self._hash_map.update(self._pool.cached_block_hash_to_block, known.union(*(self._keys(blocks[i]) for i in touched)))
        touched |= self._read_pins()
        changes: dict[int, BlockState] = {}
        for block_id in touched:
            state = self._block_state(blocks[block_id])
            if state != self._blocks[block_id]:
                changes[block_id] = state
        if changes:
            self._blocks = self._blocks.with_changes(changes)
        self._request_states.update(event, self._owners)
        scheduler = self._scheduler
        num_waiting = len(scheduler.skipped_waiting) + len(scheduler.waiting)
        if isinstance(event, LISTS) or len(self._running) != len(scheduler.running) or len(self._waiting) != num_waiting:
            self._read_lists()
        if isinstance(event, ROWS) or self.worker is not self._seen_worker:
            self._read_rows()

    def _read_tables(self, event: Event) -> set[int]:
        request_id, group_id = event.request_id, event.group_id
        if request_id is None:
            return set()
        num_appended = len(event.block_ids) if isinstance(event, BlocksAllocated) else None
        touched: set[int] = set()
        for index, manager in enumerate(self._managers):
            if group_id is None or index == group_id:
                touched |= self._owners.update(request_id, index, manager.req_to_blocks.get(request_id, ()), num_appended)
        return touched

    def _read_pins(self) -> set[int]:
        """References that no table explains: the session's own, sinks, and both ends of every queued copy. Returns the blocks where they changed."""
        now = {**self._sink_pins, **self._pins}
        for manager in self._managers:
            for pair in manager.pending_copies:
                for block in pair:
                    now[block.block_id] = (*now.get(block.block_id, ()), COPY_PIN)
        before, self._all_pins = self._all_pins, now
        return {i for i in now.keys() | before.keys() if now.get(i) != before.get(i)} if now != before else set()

    def _read_lists(self) -> None:
        scheduler = self._scheduler
        running = tuple([r.request_id for r in scheduler.running])
        waiting = tuple([r.request_id for queue in (scheduler.skipped_waiting, scheduler.waiting) for r in queue])  # in order of service by arrival
        self._running = self._running if running == self._running else running
        self._waiting = self._waiting if waiting == self._waiting else waiting

    def _read_rows(self) -> None:
        self._seen_worker = self.worker
        known = {row.row: row for row in self._rows}
        rows = self.worker.rows() if self.worker else ()
        self._rows = tuple([known[row.row] if known.get(row.row) == row else row for row in rows])

    # ------------------------------------------------------------------ everything
    def _read_everything(self) -> None:
        """Read the whole state, whatever was known before; states that are as they were stay the same objects."""
        pool = self._pool
        self._request_states = RequestsMirror(self._requests, self._managers, self._forced, self._request_states.sequence)
        self._owners = self._request_states.read_tables(pool.null_block.block_id)
        self._request_states.read_all(self._owners)
        self._free_queue = FreeQueueMirror(pool.free_block_queue)
        self._hash_map = HashMapMirror(pool.cached_block_hash_to_block)
        self._read_pins()
        states = [self._block_state(block) for block in pool.blocks]
        if len(self._blocks) == len(states):
            self._blocks = self._blocks.with_changes({i: new for i, (old, new) in enumerate(zip(self._blocks, states, strict=True)) if old != new})
        else:
            self._blocks = SharedSequence(states)
        self._read_lists()
        self._read_rows()

    def _compare(self, made: Snapshot, event: Event) -> None:
        other = StateCapture(self._scheduler, self._ledger.block_size, self._requests, self._pins)
        other.worker, other._ledger, other._forced = self.worker, self._ledger, self._forced
        other._scheduled, other._counters = self._scheduled, self._counters
        other._read_everything()
        for name, ours, afresh in zip(Snapshot._fields, made, other._snapshot(), strict=True):
            if ours != afresh:
                raise EngineError(f"after {kind_of(event)} the recorder shows {name} as {ours}, but the engine has {afresh}")

    # ------------------------------------------------------------------ one block
    def _block_state(self, block: KVCacheBlock) -> BlockState:
        block_id = block.block_id
        content = self._ledger.content[block_id]
        return BlockState(
            block_id=block_id,
            ref_cnt=0 if block.is_null else block.ref_cnt,  # the null block's count means nothing (R1.2)
            is_null=block.is_null,
            block_hashes=self._pool.keys_of(block),
            num_hash_tokens=block.block_hash_num_tokens if block.block_hash is not None else None,
            num_filled=len(content) - content.count(None),
            token_ids=content,
            owners=self._owners.owners(block_id),
            pins=self._all_pins.get(block_id, ()),
            num_state_tokens=self._ledger.num_state_tokens.get(block_id),
        )

    def _keys(self, block: KVCacheBlock) -> set[bytes]:
        if block.block_hash is None:
            return set()
        return {block.block_hash, *self._pool.cached_block_hashes_by_block.get(block.block_id, ())}

    # ------------------------------------------------------------------ totals
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


def _replace(counters: Counters, **changes: int) -> Counters:
    values = {f: getattr(counters, f) for f in Counters.__struct_fields__}
    return Counters(**{**values, **changes})
