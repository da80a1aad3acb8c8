"""Reads the paper's engine into a `Snapshot`, event by event.

The only place that knows how its scheduler keeps its books and how a frame shows them. Reads, never changes anything. Pools are small here, so every
snapshot looks at everything; parts that are as they were stay the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from engine.capture import WorkerView
from engine.capture_mirrors import FreeQueueMirror
from engine.paper.block_allocator import BlockAllocator
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
        self._gpu = _PoolMirror(scheduler.block_manager.gpu_allocator, config.block_size)
        self._cpu = _PoolMirror(scheduler.block_manager.cpu_allocator, config.block_size)
        self._states: dict[str, RequestState] = {}
        self._requests: SharedSequence[RequestState] = SharedSequence()
        self._hash_map: SharedSequence[tuple[str, tuple[int, ...]]] = SharedSequence()
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
            blocks=self._gpu.blocks,
            free_queue=self._gpu.free_queue,
            hash_map=self._hash_map,
            requests=self._requests,
            running=self._running,
            waiting=self._waiting,
            rows=self._rows,
            slot_mapping=self.worker.slot_mapping if self.worker else (),
            scheduled=self._scheduled,
            counters=self._counters,
            cpu_blocks=self._cpu.blocks,
            cpu_free_queue=self._cpu.free_queue,
            swapped=self._swapped,
        )

    def _read(self) -> None:
        scheduler = self._scheduler
        owners: Owners = {}
        cpu_owners: Owners = {}
        changes: dict[int, RequestState] = {}
        for index, sequence in enumerate(scheduler.sequences.values()):
            known = self._states.get(sequence.sequence_id)
            if known is not None and sequence.status.is_finished and known.status == sequence.status.name and not known.block_ids[0]:
                continue  # nothing will ever happen to it
            state = self._request(sequence, owners, cpu_owners)
            if state != known:
                self._states[sequence.sequence_id] = changes[index] = state
        self._requests = self._requests.with_changes(changes) if changes else self._requests
        self._gpu.update(owners, self._ledger.content, self._pins)
        self._cpu.update(cpu_owners, self._ledger.cpu_content, {})
        self._running = _same(self._running, (s.sequence_id for group in scheduler.running for s in group.living))
        self._waiting = _same(self._waiting, (group.request_id for group in scheduler.waiting))
        self._swapped = _same(self._swapped, (group.request_id for group in scheduler.swapped))
        last = {row.row: row for row in self._rows}
        self._rows = _same(self._rows, (last[row.row] if last.get(row.row) == row else row for row in (self.worker.rows() if self.worker else ())))

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


class _PoolMirror:
    """The blocks of one pool and its free queue as frames show them: `blocks` and `free_queue` share with the version before all that did not change."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._empty: Slots = (None,) * block_size
        self._states = [self._state(block_id, 0, self._empty, (), ()) for block_id in range(allocator.num_blocks)]
        self._queue = FreeQueueMirror(allocator.free_block_queue)
        self.blocks: SharedSequence[BlockState] = SharedSequence(self._states)

    @property
    def free_queue(self) -> SharedSequence[int]:
        """Ids of the free blocks, head first."""
        return self._queue.sequence

    def update(self, owners: Owners, content: Sequence[Slots], pins: Mapping[int, tuple[str, ...]]) -> None:
        """Read all blocks; one that nobody refers to shows no tokens. Of the queue only what became free or was taken is read."""
        changes: dict[int, BlockState] = {}
        for block, known in zip(self._allocator.blocks, self._states, strict=True):
            block_id, ref_cnt = block.block_id, block.ref_cnt
            if not ref_cnt and not known.ref_cnt:
                continue
            slots = content[block_id] if ref_cnt else self._empty
            held, pinned = tuple(owners.get(block_id, ())), pins.get(block_id, ())
            if known.ref_cnt != ref_cnt or known.token_ids != slots or known.owners != held or known.pins != pinned:
                changes[block_id] = self._states[block_id] = self._state(block_id, ref_cnt, slots, held, pinned)
        if changes:
            self.blocks = self.blocks.with_changes(changes)
            self._queue.update(self._allocator.free_block_queue, [self._allocator.blocks[block_id] for block_id in changes])

    @staticmethod
    def _state(block_id: int, ref_cnt: int, slots: Slots, owners: tuple[BlockOwner, ...], pins: tuple[str, ...]) -> BlockState:
        num_filled = len(slots) - slots.count(None)
        return BlockState(block_id, ref_cnt, False, (), None, num_filled, slots, owners, pins)


def _same(last: tuple[T, ...], now: Iterable[T]) -> tuple[T, ...]:
    made = tuple(now)
    return last if made == last else made
