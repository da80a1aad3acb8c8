"""The free queue (R1.4): order, both ends, the middle, and what it refuses."""

from __future__ import annotations

import pytest

from engine.core.free_queue import FreeKVCacheBlockQueue
from engine.core.kv_cache_block import KVCacheBlock


def make(num_blocks: int) -> tuple[list[KVCacheBlock], FreeKVCacheBlockQueue]:
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
    return blocks, FreeKVCacheBlockQueue(blocks)


def ids(queue: FreeKVCacheBlockQueue) -> list[int]:
    """Head first; walks the links both ways, so a broken back link cannot hide."""
    forward = [block.block_id for block in queue.get_all_free_blocks()]
    backward: list[int] = []
    block = queue.fake_free_list_tail.prev_free_block
    while block is not None and block is not queue.fake_free_list_head:
        backward.append(block.block_id)
        block = block.prev_free_block
    assert backward == forward[::-1]
    assert queue.num_free_blocks == len(forward)
    return forward


def test_begins_in_the_given_order() -> None:
    _, queue = make(4)
    assert ids(queue) == [0, 1, 2, 3]


def test_popleft_takes_the_head_and_unlinks_it() -> None:
    blocks, queue = make(3)
    assert queue.popleft() is blocks[0]
    assert blocks[0].prev_free_block is None
    assert blocks[0].next_free_block is None
    assert ids(queue) == [1, 2]


def test_popleft_n_keeps_the_order_and_can_empty_the_queue() -> None:
    _, queue = make(5)
    assert [block.block_id for block in queue.popleft_n(3)] == [0, 1, 2]
    assert queue.popleft_n(0) == []
    assert ids(queue) == [3, 4]
    queue.popleft_n(2)
    assert ids(queue) == []


@pytest.mark.parametrize("position", [0, 2, 4])
def test_remove_from_anywhere(position: int) -> None:
    blocks, queue = make(5)
    queue.remove(blocks[position])
    assert ids(queue) == [i for i in range(5) if i != position]


def test_removing_twice_is_refused() -> None:
    """R1.4: a block whose links are None is not in the queue."""
    blocks, queue = make(3)
    queue.remove(blocks[1])
    with pytest.raises(RuntimeError, match="block 1 is not in the free queue"):
        queue.remove(blocks[1])
    assert ids(queue) == [0, 2]


def test_taking_more_than_there_are_changes_nothing() -> None:
    _, queue = make(2)
    with pytest.raises(ValueError, match="cannot take 3 blocks"):
        queue.popleft_n(3)
    assert ids(queue) == [0, 1]
    queue.popleft_n(2)
    with pytest.raises(ValueError, match="cannot take 1 block"):
        queue.popleft()


def test_append_goes_to_the_tail_and_prepend_to_the_head_as_a_unit() -> None:
    """R1.7: the first of the prepended blocks becomes the new head, the last of the appended ones the new tail."""
    blocks, queue = make(6)
    taken = queue.popleft_n(4)
    queue.append(taken[0])
    queue.append_n([taken[2], taken[1]])
    queue.append_n([])
    queue.prepend_n([])
    assert ids(queue) == [4, 5, 0, 2, 1]
    queue.remove(blocks[5])
    queue.prepend_n([blocks[3], blocks[5]])
    assert ids(queue) == [3, 5, 4, 0, 2, 1]


def test_both_ends_work_on_an_empty_queue() -> None:
    blocks = [KVCacheBlock(1), KVCacheBlock(2)]
    queue = FreeKVCacheBlockQueue([])
    queue.prepend_n(blocks)
    assert ids(queue) == [1, 2]
    queue.popleft_n(2)
    queue.append_n(blocks)
    assert ids(queue) == [1, 2]


def test_peeking_leaves_everything_in_place() -> None:
    _, queue = make(3)
    assert [block.block_id for block in queue.peek_n(2)] == [0, 1]
    assert [block.block_id for block in queue.peek_n(9)] == [0, 1, 2]
    assert ids(queue) == [0, 1, 2]
