"""The ledger is a fold over events: what was written, and what can still be reached."""

from __future__ import annotations

from engine.trace.events import BlockEvicted, BlocksAllocated, BlocksCopied, BlocksFreed, Cause, CauseKind, PrefixCacheReset
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
