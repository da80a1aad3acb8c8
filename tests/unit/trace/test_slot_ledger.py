"""The ledger is a fold over events: what was written, and what can still be reached."""

from __future__ import annotations

from engine.trace.events import (
    BlockEvicted,
    BlocksAllocated,
    BlocksCopied,
    BlocksFreed,
    BlocksSkipped,
    BlocksTouched,
    Cause,
    CauseKind,
    CopyQueued,
    KVWritten,
    PrefixCacheReset,
    StateWritten,
)
from engine.trace.slot_ledger import SlotLedger
from tests.unit.trace.frames import write

CAUSE = Cause(CauseKind.NEXT_STEP)
EMPTY = (None, None, None, None)


def ledger() -> SlotLedger:
    made = SlotLedger(num_blocks=4, block_size=4)
    made.apply(write([4, 5, 6, 7, 8], [10, 11, 12, 13, 14]))
    return made


def test_tokens_lie_where_the_slots_say() -> None:
    """R8.4: slot = block * block_size + offset, so slots 4..7 are block 1 and slot 8 is the first of block 2."""
    assert ledger().content == [EMPTY, (10, 11, 12, 13), (14, None, None, None), EMPTY]


def test_a_hashed_block_keeps_its_content_when_freed_and_an_unhashed_one_does_not() -> None:
    made = ledger()
    made.apply(BlocksFreed(cause=CAUSE, block_ids=[2, 1], prepended=[2], appended=[1], still_referenced=[]))
    assert made.content == [EMPTY, (10, 11, 12, 13), EMPTY, EMPTY]


def test_eviction_reallocation_and_reset_forget() -> None:
    for event in (
        BlockEvicted(cause=CAUSE, block_id=1, block_hash="aa:0"),
        BlocksAllocated(cause=CAUSE, block_ids=[1]),
        PrefixCacheReset(cause=CAUSE, ok=True),
    ):
        made = ledger()
        made.apply(event)
        assert made.content[1] == EMPTY
    made = ledger()
    made.apply(PrefixCacheReset(cause=CAUSE, ok=False))
    assert made.content[1] == (10, 11, 12, 13)


def test_all_sources_are_read_before_any_destination_is_written() -> None:
    """R6.7: a swap of two blocks in one call works."""
    made = ledger()
    made.apply(BlocksCopied(cause=CAUSE, source_block_ids=[1, 2], destination_block_ids=[2, 1]))
    assert made.content[1:3] == [(14, None, None, None), (10, 11, 12, 13)]


def test_frames_keep_what_they_were_given() -> None:
    made = ledger()
    before = made.content[2]
    made.apply(write([9], [15]))
    assert before == (14, None, None, None)
    assert made.content[2] == (14, 15, None, None)


def hybrid() -> SlotLedger:
    """Groups of 4 and 2 tokens per block, and one of recurrent states; blocks 1, 2 and 3 are taken by groups 0, 1 and 2."""
    made = SlotLedger(num_blocks=6, block_size=4, group_block_sizes=(4, 2, 0))
    for group_id, block_id in ((0, 1), (1, 2), (2, 3)):
        made.apply(BlocksAllocated(cause=CAUSE, request_id="A", group_id=group_id, block_ids=[block_id]))
    return made


def group_write(group_id: int, slots: list[int], token_ids: list[int]) -> KVWritten:
    return KVWritten(cause=CAUSE, request_id="A", group_id=group_id, slots=slots, token_ids=token_ids, num_layers=1, backend="torch")


def test_a_block_has_the_slots_of_the_group_that_took_it_last() -> None:
    made = hybrid()
    assert [len(c) for c in made.content] == [4, 4, 2, 0, 4, 4]
    made.apply(BlocksFreed(cause=CAUSE, request_id="A", group_id=1, block_ids=[2], prepended=[2], appended=[], still_referenced=[]))
    assert made.content[2] == (None, None)
    made.apply(BlocksAllocated(cause=CAUSE, request_id="A", group_id=0, block_ids=[2]))
    assert made.content[2] == EMPTY


def test_slots_are_counted_in_the_groups_own_block_size() -> None:
    """R8.4: slot = block * the group's block size + offset; slot 5 of the second group is the second of its block 2."""
    made = hybrid()
    made.apply(group_write(0, [4, 5], [10, 11]))
    made.apply(group_write(1, [4, 5], [20, 21]))
    assert made.content[1:3] == [(10, 11, None, None), (20, 21)]


def test_tokens_of_other_ranks_leave_no_trace() -> None:
    """R8.4: slot -1 is another rank's."""
    made = hybrid()
    made.apply(group_write(0, [4, -1, 5, -1], [10, 11, 12, 13]))
    assert made.content[1] == (10, 12, None, None)
    assert made.content[-1] == EMPTY


def test_skipped_blocks_without_a_hash_are_forgotten() -> None:
    """R3.2, R1.7: a window that moves on frees like a request that ends."""
    made = ledger()
    made.apply(BlocksSkipped(cause=CAUSE, request_id="A", group_id=0, logical_indices=[1, 0], block_ids=[2, 1], prepended=[2], appended=[1]))
    assert made.content[1:3] == [(10, 11, 12, 13), EMPTY]


def test_a_block_in_use_keeps_its_content_when_it_loses_a_key() -> None:
    """R1.11: an entry that ended inside the block gives way to the full block's; the request goes on reading what it wrote."""
    made = hybrid()
    made.apply(group_write(0, [4, 5, 6, 7], [10, 11, 12, 13]))
    made.apply(BlockEvicted(cause=Cause(CauseKind.PROMOTED), group_id=0, block_id=1, block_hash="aa"))
    assert made.content[1] == (10, 11, 12, 13)
    made.apply(BlocksFreed(cause=CAUSE, request_id="A", group_id=0, block_ids=[1], prepended=[], appended=[1], still_referenced=[]))
    made.apply(BlocksTouched(cause=CAUSE, request_id="B", group_id=0, block_ids=[1], left_free_queue=[1]))
    made.apply(BlockEvicted(cause=CAUSE, group_id=0, block_id=1, block_hash="aa"))
    assert made.content[1] == (10, 11, 12, 13)
    made.apply(BlocksFreed(cause=CAUSE, request_id="B", group_id=0, block_ids=[1], prepended=[1], appended=[], still_referenced=[]))
    assert made.content[1] == EMPTY


def test_a_state_lies_where_it_was_written_until_nobody_can_reach_it() -> None:
    """R3.40: one state per block; it is overwritten, forgotten when freed without a hash, kept when hashed."""
    made = hybrid()
    made.apply(StateWritten(cause=CAUSE, request_id="A", group_id=2, block_id=3, num_tokens=4))
    made.apply(StateWritten(cause=CAUSE, request_id="A", group_id=2, block_id=3, num_tokens=5))
    assert made.num_state_tokens == {3: 5}
    hashed = BlocksFreed(cause=CAUSE, request_id="A", group_id=2, block_ids=[3], prepended=[], appended=[3], still_referenced=[])
    made.apply(hashed)
    assert made.num_state_tokens == {3: 5}
    made.apply(BlocksAllocated(cause=CAUSE, request_id="B", group_id=2, block_ids=[3]))
    assert made.num_state_tokens == {}


def test_a_copied_state_goes_with_the_copy_not_with_the_key() -> None:
    """R6.5, R6.7: queueing gives the new block nothing; the worker's copy does."""
    made = hybrid()
    made.apply(StateWritten(cause=CAUSE, request_id="A", group_id=2, block_id=3, num_tokens=12))
    made.apply(CopyQueued(cause=CAUSE, request_id="A", group_id=2, source_block_id=3, destination_block_id=4, logical_index=1))
    assert made.content[4] == ()
    assert made.num_state_tokens == {3: 12}
    made.apply(BlocksCopied(cause=CAUSE, source_block_ids=[3], destination_block_ids=[4]))
    made.apply(StateWritten(cause=CAUSE, request_id="A", group_id=2, block_id=3, num_tokens=13))
    assert made.num_state_tokens == {3: 13, 4: 12}
