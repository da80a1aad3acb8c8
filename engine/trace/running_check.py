"""The invariants of `engine.trace.integrity`, frame after frame of one run, at the price of what changed.

It keeps its own recount of the run, moves it on by the differences between neighbouring frames, and applies the rules to the blocks that these
differences concern. What it finds is what `check_integrity` would find, provided the frame before was sound; now and then it looks at a whole frame
all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from engine.trace.frame import BlockState, Frame, RequestState
from engine.trace.integrity import Recount, Violation, check_block, check_integrity, check_names, check_pool, check_swap_space, check_writes, is_pending
from engine.trace.shared_sequence import ABSENT, Absent, SharedSequence
from engine.trace.witness_check import check_witness

T = TypeVar("T")

SMALL_POOL = 32
"""Up to this many blocks every frame is looked at as a whole."""
BLOCKS_PER_FRAME = 8
"""In larger pools a whole frame is looked at once in so many frames that it comes to this many blocks per frame."""


class RunningCheck:
    """Checks the frames of one run in order. Mutates only its own recount."""

    def __init__(self) -> None:
        self._recount: Recount | None = None
        self._requests: dict[str, RequestState] = {}
        self._used: set[int] = set()
        self._pending: set[int] = set()
        self._op = ""
        self._until_full = 0

    def check(self, frame: Frame, previous: Frame | None) -> list[Violation]:
        """Violations in `frame`, given that `previous` is the frame checked before. Looks at all of it when it is the first, when its sequences are
        no `SharedSequence`s, when the pool is small, and from time to time. O(changes · log blocks) otherwise."""
        self._until_full -= 1
        if len(frame.blocks) <= SMALL_POOL or not _shared(frame):
            self._recount = None
            return check_integrity(frame, previous)
        if previous is not None and self._recount is not None and self._until_full > 0 and len(frame.blocks) == len(previous.blocks):
            return self._check_changes(frame, previous, self._recount)
        self._until_full = len(frame.blocks) // BLOCKS_PER_FRAME
        self._begin(frame)
        return check_integrity(frame, previous)

    def _begin(self, frame: Frame) -> None:
        self._recount = Recount(frame)
        self._requests = {request.request_id: request for request in frame.requests}
        self._used = {block.block_id for block in frame.blocks if block.ref_cnt and not block.is_null}
        self._pending = {block.block_id for block in frame.blocks if is_pending(block)}
        self._op = frame.op

    def _check_changes(self, frame: Frame, previous: Frame, recount: Recount) -> list[Violation]:
        concerned: set[int] = set()
        for _, _, block in _changes(frame.blocks, previous.blocks):
            assert block is not ABSENT, "the pool has a fixed size"
            self._note_block(block)
            concerned.add(block.block_id)
        queued = _note_queue(frame, previous, recount)
        keyed = _note_keys(frame, previous, recount)
        concerned.update(queued, keyed, self._note_requests(frame, previous, recount))
        if frame.op != self._op:  # what was pending in one operation may not be so in the next
            concerned.update(self._pending)
            self._op = frame.op
        num_blocks = len(frame.blocks)
        found: list[Violation] = []
        for block_id in sorted(concerned):
            if 0 <= block_id < num_blocks:
                found.extend(check_block(frame.blocks[block_id], recount, self._requests, frame.op))
        found.extend(check_pool(frame, len(self._used), len(recount.null_ids)))
        found.extend(check_names(recount, num_blocks, queued, keyed))
        found.extend(check_swap_space(frame))
        found.extend(check_witness(frame))
        found.extend(check_writes(frame, previous))
        return found

    def _note_block(self, block: BlockState) -> None:
        block_id = block.block_id
        for name, holds in ((self._used, block.ref_cnt != 0 and not block.is_null), (self._pending, is_pending(block))):
            if holds:
                name.add(block_id)
            else:
                name.discard(block_id)

    def _note_requests(self, frame: Frame, previous: Frame, recount: Recount) -> set[int]:
        concerned: set[int] = set()
        for _, before, after in _changes(frame.requests, previous.requests):
            assert after is not ABSENT, "a request that arrived stays"
            self._requests[after.request_id] = after
            old_tables: tuple[tuple[int, ...], ...] = before.block_ids if before is not ABSENT else ()
            if old_tables is after.block_ids:
                continue
            moved: Counter[int] = Counter()
            for group_id, table in enumerate(after.block_ids):
                old = old_tables[group_id] if group_id < len(old_tables) else ()
                if table is old:
                    continue
                if table[: len(old)] == old:
                    moved.update(table[len(old) :])
                else:
                    moved.update(table)
                    moved.subtract(old)
            for block_id, times in moved.items():
                if times and block_id not in recount.null_ids:
                    recount.entries[block_id] += times
                    concerned.add(block_id)
        return concerned


def _shared(frame: Frame) -> bool:
    return all(isinstance(s, SharedSequence) for s in (frame.blocks, frame.free_queue, frame.hash_map, frame.requests))


def _changes(new: Sequence[T], old: Sequence[T]) -> list[tuple[int, T | Absent, T | Absent]]:
    assert isinstance(new, SharedSequence)
    assert isinstance(old, SharedSequence)
    return new.changes_since(old)


def _note_queue(frame: Frame, previous: Frame, recount: Recount) -> list[int]:
    named: set[int] = set()
    for _, before, after in _changes(frame.free_queue, previous.free_queue):
        if before is not ABSENT:
            recount.queued[before] -= 1
            named.add(before)
        if after is not ABSENT:
            recount.queued[after] += 1
            named.add(after)
    return sorted(named)


def _note_keys(frame: Frame, previous: Frame, recount: Recount) -> list[int]:
    changes = _changes(frame.hash_map, previous.hash_map)
    gone = [entry for _, entry, _ in changes if entry is not ABSENT]
    come = [entry for _, _, entry in changes if entry is not ABSENT]
    for key, block_ids in gone:
        for block_id in block_ids:
            recount.keys[block_id].discard(key)
    for key, block_ids in come:
        for block_id in block_ids:
            recount.keys.setdefault(block_id, set()).add(key)
    return sorted({block_id for _, block_ids in (*gone, *come) for block_id in block_ids})
