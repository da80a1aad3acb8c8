"""Reads the paper's engine into a `Snapshot`, event by event.

The only place that knows how its scheduler keeps its books and how a frame shows them. Reads, never changes anything. Pools are small here, so every
snapshot reads everything; parts that are as they were stay the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from engine.capture import WorkerView
from engine.core.kv_cache_block import KVCacheBlock
from engine.paper.config import PaperConfig
from engine.paper.scheduler import PaperScheduler
from engine.paper.sequence import Sequence as PaperSequence
from engine.paper.sequence import SequenceStatus
from engine.trace.events import Event, RequestPreempted, SequenceForked, StepScheduled, StepStarted
from engine.trace.frame import BlockOwner, BlockState, Counters, RequestState, WorkerRow
from engine.trace.recorder import Snapshot
from engine.trace.shared_sequence import SharedSequence
from engine.trace.slot_ledger import SlotLedger, Slots

T = TypeVar("T")
Owners = dict[int, list[BlockOwner]]


class PaperCapture:
    """Callable for the recorder: follows each event in the slot ledger and the counters, then reads the state.

    A frame's `requests` are the sequences, in order of birth over all groups; `running` names sequences, `waiting` and `swapped` name requests. `pins` maps
    block id to the holders of references that stand in no block table; it belongs to the session.
    """

    def __init__(self, scheduler: PaperScheduler, config: PaperConfig, pins: Mapping[int, tuple[str, ...]]) -> None:
        self.worker: WorkerView | None = None
        self._scheduler = scheduler
        self._block_size = config.block_size
        self._pins = pins
        self._ledger = SlotLedger(config.num_blocks, config.block_size, num_cpu_blocks=config.num_cpu_blocks)
        self._empty: Slots = (None,) * config.block_size
        self._blocks: SharedSequence[BlockState] = SharedSequence()
        self._cpu_blocks: SharedSequence[BlockState] = SharedSequence()
        self._requests: SharedSequence[RequestState] = SharedSequence()
        self._free_queue: SharedSequence[int] = SharedSequence()
        self._hash_map: SharedSequence[tuple[str, tuple[int, ...]]] = SharedSequence()
        self._cpu_free_queue: tuple[int, ...] = ()
        self._running: tuple[str, ...] = ()
        self._waiting: tuple[str, ...] = ()
        self._swapped: tuple[str, ...] = ()
        self._rows: tuple[WorkerRow, ...] = ()
        self._parents: dict[str, str] = {}
        self._scheduled: dict[str, int] = {}
        self._counters = Counters()

    def __call__(self, event: Event) -> Snapshot:
        """The state after `event`. Mutates only its own ledger, counters and memory of the last snapshot."""
        self._ledger.apply(event)
        self._count(event)
        self._read()
        return Snapshot(
            blocks=self._blocks,
            free_queue=self._free_queue,
            hash_map=self._hash_map,
            requests=self._requests,
            running=self._running,
            waiting=self._waiting,
            rows=self._rows,
            slot_mapping=self.worker.slot_mapping if self.worker else (),
            scheduled=self._scheduled,
            counters=self._counters,
            cpu_blocks=self._cpu_blocks,
            cpu_free_queue=self._cpu_free_queue,
            swapped=self._swapped,
        )

    def _read(self) -> None:
        scheduler = self._scheduler
        manager = scheduler.block_manager
        owners: Owners = {}
        cpu_owners: Owners = {}
        states = [self._request(sequence, owners, cpu_owners) for sequence in scheduler.sequences.values()]
        self._requests = _updated(self._requests, states)
        gpu, cpu = manager.gpu_allocator, manager.cpu_allocator
        self._blocks = _updated(self._blocks, self._states(gpu.blocks, owners, self._blocks, self._ledger.content, self._pins))
        self._cpu_blocks = _updated(self._cpu_blocks, self._states(cpu.blocks, cpu_owners, self._cpu_blocks, self._ledger.cpu_content, {}))
        free = gpu.free_block_ids
        self._free_queue = self._free_queue if self._free_queue == free else SharedSequence(free)
        self._cpu_free_queue = _same(self._cpu_free_queue, cpu.free_block_ids)
        self._running = _same(self._running, (s.sequence_id for group in scheduler.running for s in group.living))
        self._waiting = _same(self._waiting, (group.request_id for group in scheduler.waiting))
        self._swapped = _same(self._swapped, (group.request_id for group in scheduler.swapped))
        known = {row.row: row for row in self._rows}
        self._rows = _same(self._rows, (known[row.row] if known.get(row.row) == row else row for row in (self.worker.rows() if self.worker else ())))

    # ------------------------------------------------------------------ one sequence
    def _request(self, sequence: PaperSequence, owners: Owners, cpu_owners: Owners) -> RequestState:
        """Its state; enters its table's blocks in `owners`, or in `cpu_owners` while it is swapped out."""
        name, group = sequence.sequence_id, sequence.group
        table = self._scheduler.block_manager.block_ids(name)
        swapped = sequence.status is SequenceStatus.SWAPPED
        first = group.num_prefix_tokens // self._block_size if swapped else 0  # what it shares with the provider's prefix stays on the GPU
        for index, block_id in enumerate(table):
            (cpu_owners if swapped else owners).setdefault(block_id, []).append(BlockOwner(name, 0, first + index))
        return RequestState(
            request_id=name,
            status=sequence.status.name,
            num_prompt_tokens=sequence.num_prompt_tokens,
            token_ids=tuple(sequence.token_ids),
            num_computed_tokens=sequence.num_computed_tokens,
            block_ids=((),) if swapped else (table,),
            block_hashes=(),
            num_cached_block=(),
            num_preemptions=sequence.num_preemptions,
            forced=tuple(sequence.forced),
            sequence_group=group.request_id if group.has_several else None,
            parent_id=self._parents.get(name),
            cpu_block_ids=table if swapped else (),
            cumulative_logprob=sequence.cumulative_logprob,
        )

    # ------------------------------------------------------------------ blocks
    def _states(
        self, blocks: Sequence[KVCacheBlock], owners: Owners, last: Sequence[BlockState], content: Sequence[Slots], pins: Mapping[int, tuple[str, ...]]
    ) -> list[BlockState]:  # fmt: skip
        """The states of a pool's blocks; those in `last` that are still right stay the same objects."""
        states: list[BlockState] = []
        for block in blocks:
            block_id = block.block_id
            known = last[block_id] if last else None
            slots = content[block_id] if block.ref_cnt else self._empty
            held, pinned = tuple(owners.get(block_id, ())), pins.get(block_id, ())
            if known is not None and known.ref_cnt == block.ref_cnt and known.token_ids == slots and known.owners == held and known.pins == pinned:
                states.append(known)
                continue
            states.append(
                BlockState(
                    block_id=block_id, ref_cnt=block.ref_cnt, is_null=False, block_hashes=(), num_hash_tokens=None,
                    num_filled=len(slots) - slots.count(None), token_ids=slots, owners=held, pins=pinned,
                )
            )  # fmt: skip
        return states

    # ------------------------------------------------------------------ what events tell
    def _count(self, event: Event) -> None:
        last = self._counters
        if isinstance(event, SequenceForked) and event.request_id is not None:
            self._parents[event.request_id] = event.parent_id  # a provider's prefix too, when the request is admitted
        elif isinstance(event, StepStarted):
            self._scheduled = {}
            self._counters = Counters(token_budget_left=event.token_budget, num_preemptions=last.num_preemptions)
        elif isinstance(event, StepScheduled):
            self._scheduled = dict(event.num_scheduled_tokens)
            self._counters = Counters(token_budget_left=event.token_budget_left, num_preemptions=last.num_preemptions)
        elif isinstance(event, RequestPreempted):
            self._counters = Counters(token_budget_left=last.token_budget_left, num_preemptions=last.num_preemptions + 1)


def _updated(last: SharedSequence[T], now: Sequence[T]) -> SharedSequence[T]:
    """`now`, sharing with `last` what is equal. A sequence never becomes shorter here."""
    known = len(last)
    changes = {i: value for i, value in enumerate(now) if i >= known or last[i] != value}
    return last.with_changes(changes) if changes else last


def _same(last: tuple[T, ...], now: Iterable[T]) -> tuple[T, ...]:
    made = tuple(now)
    return last if made == last else made
