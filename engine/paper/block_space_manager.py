"""Block tables, and how they share blocks (sections 4.2 to 4.5).

Every table entry is one reference of its block. Nothing here fails half-way: a `can_…` question is answered by the same count that the operation then needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from engine.core.kv_cache_block import KVCacheBlock
from engine.errors import EngineError
from engine.paper.block_allocator import BlockAllocator
from engine.paper.sequence import Sequence, SequenceGroup, SequenceStatus
from engine.paper.table_plan import TablePlan, plan_tables
from engine.trace.events import (
    BlocksAllocated,
    BlocksFreed,
    BlocksSwappedIn,
    BlocksSwappedOut,
    BlocksTouched,
    Cause,
    CauseKind,
    CopyQueued,
    Emit,
    Event,
    SequenceForked,
)


class BlockSpaceManager:
    """The two pools and the block table of every sequence.

    `block_tables`: sequence id -> its blocks in logical order; of a swapped sequence its blocks of the CPU pool, which are all but the full blocks of a
    provider's prefix: those stay on the GPU whatever happens, so they are let go and referred to again. `watermark`: share of the pool, in
    whole blocks rounded down, that an admission leaves free. vLLM's first release: BlockSpaceManager; here: sequences of a recomputed group share blocks
    again, copies are counted exactly, and each change is told.
    """

    def __init__(
        self, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int = 0, *, watermark: float = 0.0, free_queue_order: Iterable[int] = (),
        emit: Emit | None = None,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        self.gpu_allocator = BlockAllocator(num_gpu_blocks, free_queue_order)
        self.cpu_allocator = BlockAllocator(num_cpu_blocks)
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.block_tables: dict[str, list[KVCacheBlock]] = {}
        self._emit = emit

    # ------------------------------------------------------------------ admission
    def num_blocks_to_allocate(self, group: SequenceGroup) -> int:
        """Blocks that `allocate` takes for a waiting group."""
        return sum(plan.num_required_blocks for plan in plan_tables(group, self.block_size))

    def num_tokens_to_compute(self, group: SequenceGroup) -> int:
        """Tokens of a waiting group that it does not share with others."""
        return sum(plan.sequence.num_tokens - plan.num_shared_tokens for plan in plan_tables(group, self.block_size))

    def can_allocate(self, group: SequenceGroup, *, num_reserved_blocks: int = 0) -> bool:
        """Whether a waiting group fits and leaves `num_reserved_blocks` free. Changes nothing."""
        return self.gpu_allocator.num_free_blocks >= self.num_blocks_to_allocate(group) + num_reserved_blocks

    def allocate(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Give every living sequence of a waiting group the blocks for all its tokens, shared as `plan_tables` says, and set its num_computed_tokens to the
        shared tokens. Returns the copies to make (source, destination). Raises EngineError, changing nothing, unless can_allocate."""
        plans = plan_tables(group, self.block_size)
        self._require(sum(plan.num_required_blocks for plan in plans))
        return [copy for plan in plans for copy in self._build_table(plan)]

    def _build_table(self, plan: TablePlan) -> list[tuple[int, int]]:
        sequence, source = plan.sequence, plan.source
        table: list[KVCacheBlock] = []
        copies: list[tuple[int, int]] = []
        self.block_tables[sequence.sequence_id] = table
        sequence.num_computed_tokens = plan.num_shared_tokens
        if source is not None:
            table += self._refer_to(self.block_tables[source.sequence_id][: plan.num_shared_blocks])
            shared_ids, num_tokens = [block.block_id for block in table], plan.num_shared_tokens
            if source is sequence.group.prefix:
                cause = Cause(CauseKind.SHARED_PREFIX, {"prefix": source.sequence_id, "num_tokens": num_tokens})
                self._tell(SequenceForked(cause=cause, request_id=sequence.sequence_id, parent_id=source.sequence_id, block_ids=shared_ids))
            else:
                cause = Cause(CauseKind.SAME_TOKENS, {"other": source.sequence_id, "num_tokens": num_tokens})
                self._tell(BlocksTouched(cause=cause, request_id=sequence.sequence_id, block_ids=shared_ids, left_free_queue=[]))
        if plan.copies_last_shared:
            copies.append(self._copy_on_write(sequence, plan.num_shared_blocks - 1))
        if plan.num_new_blocks:
            self._append_blocks(sequence, plan.num_new_blocks, sequence.num_tokens)
        return copies

    # ------------------------------------------------------------------ decoding
    def num_blocks_to_append(self, sequences: SequenceOf[Sequence]) -> int:
        """Blocks that append_slot takes for all of `sequences` together, exactly.

        A sequence whose last block is full takes a new one. Of the w sequences that write into the same block with r references, each copies it as long as
        others refer to it too: min(w, r - 1) copies, because the last writer finds itself alone unless somebody else holds the block. vLLM's first release
        reckons one block per running sequence, which is enough but refuses more."""
        num_new = 0
        num_writers: Counter[KVCacheBlock] = Counter()
        for sequence in sequences:
            table, index = self.block_tables[sequence.sequence_id], self._write_index(sequence)
            if index >= len(table):
                num_new += 1
            else:
                num_writers[table[index]] += 1
        return num_new + sum(min(writers, block.ref_cnt - 1) for block, writers in num_writers.items())

    def can_append_slots(self, group: SequenceGroup) -> bool:
        """Whether the next token of every living sequence of the group can have its slot. Changes nothing. vLLM's first release:
        BlockSpaceManager.can_append_slot; it reckons otherwise, see num_blocks_to_append."""
        return self.gpu_allocator.num_free_blocks >= self.num_blocks_to_append(group.living)

    def append_slot(self, sequence: Sequence) -> tuple[int, int] | None:
        """Make sure that the sequence's last token has a slot of its own to be written to: a new block when the last one is full, a copy when others refer to
        it too (copy-on-write). Returns the copy to make (source, destination), or None. Nothing happens where a prompt or a recomputation is still to be
        computed, which has all its blocks. Raises EngineError, changing nothing, when a block is needed and none is free."""
        table, index = self.block_tables[sequence.sequence_id], self._write_index(sequence)
        if index >= len(table):
            self._require(1)
            self._append_blocks(sequence, 1, sequence.num_tokens)
        elif table[index].ref_cnt > 1:
            self._require(1)
            return self._copy_on_write(sequence, index)
        return None

    def _write_index(self, sequence: Sequence) -> int:
        """The entry of the sequence's table that its last token is written to. Of a swapped one the entries begin behind the prefix's full blocks."""
        skipped = self._num_prefix_blocks(sequence.group) if sequence.status is SequenceStatus.SWAPPED else 0
        return (sequence.num_tokens - 1) // self.block_size - skipped

    def _copy_on_write(self, sequence: Sequence, index: int) -> tuple[int, int]:
        table = self.block_tables[sequence.sequence_id]
        source, ref_cnt = table[index], table[index].ref_cnt
        (table[index],) = (destination,) = self.gpu_allocator.allocate(1)
        source.ref_cnt -= 1
        cause = Cause(CauseKind.SHARED_BLOCK_WRITTEN, {"logical_index": index, "ref_cnt": ref_cnt})
        pair = source.block_id, destination.block_id
        self._tell(CopyQueued(cause=cause, request_id=sequence.sequence_id, source_block_id=pair[0], destination_block_id=pair[1], logical_index=index))
        return pair

    def _append_blocks(self, sequence: Sequence, num_blocks: int, num_tokens: int) -> None:
        table = self.block_tables[sequence.sequence_id]
        facts = {"num_tokens": num_tokens, "num_required": num_blocks, "num_held": len(table), "num_free": self.gpu_allocator.num_free_blocks}
        blocks = self.gpu_allocator.allocate(num_blocks)
        table += blocks
        cause = Cause(CauseKind.HEAD_OF_FREE_QUEUE, dict(facts))
        self._tell(BlocksAllocated(cause=cause, request_id=sequence.sequence_id, block_ids=[block.block_id for block in blocks]))

    # ------------------------------------------------------------------ forks and ends
    def fork(self, parent: Sequence, child: Sequence, cause: Cause) -> None:
        """The child gets the parent's table; every block has one reference more, the partial last one too. Takes no block, so it always has room: what may be
        missing later is room for the copies, and can_append_slots counts those before anything is written."""
        table = self._refer_to(self.block_tables[parent.sequence_id])
        self.block_tables[child.sequence_id] = table
        block_ids = [block.block_id for block in table]
        self._tell(SequenceForked(cause=cause, request_id=child.sequence_id, parent_id=parent.sequence_id, block_ids=block_ids))

    def free(self, sequence: Sequence, cause: Cause) -> None:
        """Give up the sequence's table. Nothing happens without one. Blocks of the swap space go back there without an event: the queue that events are about
        is the GPU's."""
        table = self.block_tables.pop(sequence.sequence_id, [])
        if sequence.status is SequenceStatus.SWAPPED:
            self.cpu_allocator.free(table)
        elif table:
            block_ids = [block.block_id for block in table]
            prepended, still_referenced = self.gpu_allocator.free(table)
            self._tell(
                BlocksFreed(
                    cause=cause, request_id=sequence.sequence_id, block_ids=block_ids, prepended=prepended, appended=[], still_referenced=still_referenced
                )
            )

    # ------------------------------------------------------------------ swapping
    def num_blocks_to_swap(self, group: SequenceGroup) -> int:
        """Blocks of the group, each shared one counted once, without those of a provider's prefix."""
        return len(self._swappable(group))

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Whether the CPU pool holds the whole group. Changes nothing."""
        return self.cpu_allocator.num_free_blocks >= self.num_blocks_to_swap(group)

    def swap_out(self, group: SequenceGroup, cause: Cause) -> list[tuple[int, int]]:
        """Move the whole group to the CPU pool, all or nothing; its living sequences become SWAPPED. Returns the pairs (GPU block, CPU block) to copy. Raises
        EngineError, changing nothing, unless can_swap_out."""
        gpu_blocks = self._swappable(group)
        if len(gpu_blocks) > self.cpu_allocator.num_free_blocks:
            raise EngineError(f"{group.request_id} has {len(gpu_blocks)} blocks, but the swap space has {self.cpu_allocator.num_free_blocks} free")
        cpu_of = dict(zip(gpu_blocks, self.cpu_allocator.allocate(len(gpu_blocks)), strict=True))
        let_go: list[KVCacheBlock] = []
        for sequence in group.living:
            table = self.block_tables[sequence.sequence_id]
            let_go += table
            self.block_tables[sequence.sequence_id] = [cpu_of[block] for block in table[self._num_prefix_blocks(group) :]]
            sequence.status = SequenceStatus.SWAPPED
        _count_references(cpu_of.values(), self.block_tables, group)
        prepended, still_referenced = self.gpu_allocator.free(let_go)
        pairs = [(gpu.block_id, cpu.block_id) for gpu, cpu in cpu_of.items()]
        gpu_ids, cpu_ids = [gpu for gpu, _ in pairs], [cpu for _, cpu in pairs]
        name = group.event_id
        self._tell(
            BlocksSwappedOut(cause=cause, request_id=name, gpu_block_ids=gpu_ids, cpu_block_ids=cpu_ids, prepended=prepended, still_referenced=still_referenced)
        )
        return pairs

    def num_blocks_to_swap_in(self, group: SequenceGroup) -> int:
        """Blocks that a swapped group takes to come back and write its next tokens."""
        return len(self._distinct(group, 0)) + self.num_blocks_to_append(group.living)

    def can_swap_in(self, group: SequenceGroup, *, num_reserved_blocks: int = 0) -> bool:
        """Whether a swapped group fits with the slots of its next tokens and leaves `num_reserved_blocks` free. Changes nothing."""
        return self.gpu_allocator.num_free_blocks >= self.num_blocks_to_swap_in(group) + num_reserved_blocks

    def swap_in(self, group: SequenceGroup, cause: Cause) -> list[tuple[int, int]]:
        """The way back: blocks are shared as they were before, a provider's prefix is referred to again, the living sequences become RUNNING. Returns the pairs
        (CPU block, GPU block) to copy. Raises EngineError, changing nothing, when there is no room."""
        cpu_blocks = self._distinct(group, 0)
        self._require(len(cpu_blocks))
        gpu_of = dict(zip(cpu_blocks, self.gpu_allocator.allocate(len(cpu_blocks)), strict=True))
        prefix = self.block_tables[group.prefix.sequence_id][: self._num_prefix_blocks(group)] if group.prefix is not None else []
        let_go: list[KVCacheBlock] = []
        for sequence in group.living:
            table = self.block_tables[sequence.sequence_id]
            let_go += table
            self.block_tables[sequence.sequence_id] = [*self._refer_to(prefix), *(gpu_of[block] for block in table)]
            sequence.status = SequenceStatus.RUNNING
        _count_references(gpu_of.values(), self.block_tables, group)
        self.cpu_allocator.free(let_go)
        pairs = [(cpu.block_id, gpu.block_id) for cpu, gpu in gpu_of.items()]
        self._tell(
            BlocksSwappedIn(
                cause=cause,
                request_id=group.event_id,
                cpu_block_ids=[cpu for cpu, _ in pairs],
                gpu_block_ids=[gpu for _, gpu in pairs],
                shared_again=[block.block_id for block in prefix],
            )
        )
        return pairs

    def _swappable(self, group: SequenceGroup) -> list[KVCacheBlock]:
        return self._distinct(group, self._num_prefix_blocks(group))

    def _distinct(self, group: SequenceGroup, start: int) -> list[KVCacheBlock]:
        """The blocks of all tables from entry `start` on, in order, each once."""
        return list(dict.fromkeys(block for sequence in group.living for block in self.block_tables[sequence.sequence_id][start:]))

    def _num_prefix_blocks(self, group: SequenceGroup) -> int:
        """Full blocks of the provider's prefix: the first entries of every table of the group."""
        return group.num_prefix_tokens // self.block_size

    # ------------------------------------------------------------------ for scenarios and plumbing
    def arrange_free_queue(self, order: Iterable[int]) -> None:
        """Put these free blocks to the head of the GPU's queue, see BlockAllocator. Tells no event."""
        self.gpu_allocator.arrange_free_queue(order)

    def block_ids(self, sequence_id: str) -> tuple[int, ...]:
        """The sequence's table, of whichever pool, empty when it has none."""
        return tuple(block.block_id for block in self.block_tables.get(sequence_id, ()))

    def _refer_to(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        referred = list(blocks)
        for block in referred:
            block.ref_cnt += 1
        return referred

    def _require(self, num_blocks: int) -> None:
        if num_blocks > self.gpu_allocator.num_free_blocks:
            raise EngineError(f"{num_blocks} blocks are wanted, but {self.gpu_allocator.num_free_blocks} are free: ask whether they fit before taking them")

    def _tell(self, event: Event) -> None:
        if self._emit is not None:
            self._emit(event)


def _count_references(blocks: Iterable[KVCacheBlock], tables: dict[str, list[KVCacheBlock]], group: SequenceGroup) -> None:
    """Set ref_cnt of blocks that just came to the group to the number of table entries that name them."""
    counts = Counter(block for sequence in group.living for block in tables[sequence.sequence_id])
    for block in blocks:
        block.ref_cnt = counts[block]
