"""Blocks, tables and references (sections 4.2 to 4.5), above all that nothing fails half-way."""

from __future__ import annotations

import pytest

from engine.errors import EngineError, InvalidInput
from engine.paper.block_allocator import BlockAllocator
from engine.paper.block_space_manager import BlockSpaceManager
from engine.paper.config import PaperRequestSpec
from engine.paper.sequence import Sequence, SequenceGroup, SequenceStatus
from engine.trace.events import Cause, CauseKind

WHY = Cause(CauseKind.SCENARIO)


def group_of(num_prompt: int, n: int = 1, request_id: str = "A") -> SequenceGroup:
    return SequenceGroup(PaperRequestSpec(request_id, tuple(range(num_prompt)), n=n), 0)


def running(manager: BlockSpaceManager, num_prompt: int, n: int = 1, request_id: str = "A") -> SequenceGroup:
    """A group after its prompt phase: forked n times, each sequence with a token of its own that is still to be written."""
    group = group_of(num_prompt, n, request_id)
    manager.allocate(group)
    group.living[0].num_computed_tokens = num_prompt
    for _ in range(1, n):
        child = group.fork(group.living[0])
        group.living.append(child)
        manager.fork(group.living[0], child, WHY)
    for i, sequence in enumerate(group.living):
        sequence.append_token(50 + i, forced=False)
        sequence.status = SequenceStatus.RUNNING
    return group


def state(manager: BlockSpaceManager) -> object:
    """Everything that an operation could change."""
    pools = [([b.ref_cnt for b in a.blocks], a.free_block_ids) for a in (manager.gpu_allocator, manager.cpu_allocator)]
    return pools, {name: [b.block_id for b in table] for name, table in manager.block_tables.items()}


def ref_counts(manager: BlockSpaceManager, sequence: Sequence) -> list[int]:
    return [block.ref_cnt for block in manager.block_tables[sequence.sequence_id]]


# ------------------------------------------------------------------ the allocator


def test_blocks_are_handed_out_from_0_up_and_freed_ones_come_first() -> None:
    """The first release's free list is a stack: what was freed last is taken first."""
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(3)
    assert [block.block_id for block in blocks] == [0, 1, 2]
    assert allocator.free(blocks) == ([2, 1, 0], [])
    assert allocator.free_block_ids == [2, 1, 0, 3]


def test_a_block_that_somebody_still_refers_to_stays() -> None:
    allocator = BlockAllocator(2)
    (block,) = allocator.allocate(1)
    block.ref_cnt += 1
    assert allocator.free([block]) == ([], [0])
    assert allocator.free([block]) == ([0], [])
    with pytest.raises(EngineError, match="nobody refers"):
        allocator.free([block])


def test_a_fresh_queue_begins_as_the_scenario_wants() -> None:
    assert BlockAllocator(5, (3, 1)).free_block_ids == [3, 1, 0, 2, 4]


@pytest.mark.parametrize("order", [(1, 1), (0,), (9,)])
def test_only_free_blocks_can_be_arranged_and_each_once(order: tuple[int, ...]) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(1)
    with pytest.raises(InvalidInput, match="only blocks that are free"):
        allocator.arrange_free_queue(order)
    assert allocator.free_block_ids == [1, 2, 3]


def test_more_than_is_free_is_refused_whole() -> None:
    allocator = BlockAllocator(2)
    with pytest.raises(EngineError, match="3 blocks are wanted, but 2 are free"):
        allocator.allocate(3)
    assert allocator.free_block_ids == [0, 1]


# ------------------------------------------------------------------ forks and copy-on-write (section 4.4)


def test_a_fork_shares_every_block_also_the_partial_last_one_and_takes_none() -> None:
    manager = BlockSpaceManager(4, 8)
    group = running(manager, 7, n=3)
    assert [manager.block_ids(s.sequence_id) for s in group.living] == [(0, 1)] * 3
    assert ref_counts(manager, group.living[0]) == [3, 3]
    assert manager.gpu_allocator.num_free_blocks == 6


def test_all_but_the_last_writer_copy() -> None:
    """Three write into one block: two copies; the last finds itself alone and writes in place."""
    manager = BlockSpaceManager(4, 8)
    group = running(manager, 7, n=3)
    assert manager.num_blocks_to_append(group.living) == 2
    assert [manager.append_slot(sequence) for sequence in group.living] == [(1, 2), (1, 3), None]
    assert [manager.block_ids(s.sequence_id) for s in group.living] == [(0, 2), (0, 3), (0, 1)]
    assert ref_counts(manager, group.living[0]) == [3, 1]


def test_a_writer_that_is_not_alone_with_the_block_copies_even_if_it_is_the_only_writer() -> None:
    manager = BlockSpaceManager(4, 8)
    group = running(manager, 7, n=3)
    assert manager.num_blocks_to_append(group.living[:1]) == 1
    assert manager.num_blocks_to_append(group.living[:2]) == 2
    assert manager.append_slot(group.living[0]) == (1, 2)
    assert manager.num_blocks_to_append(group.living[1:]) == 1


def test_at_a_full_block_each_sequence_takes_a_new_one_and_nothing_is_copied() -> None:
    manager = BlockSpaceManager(4, 8)
    group = running(manager, 8, n=2)
    assert manager.num_blocks_to_append(group.living) == 2
    assert [manager.append_slot(sequence) for sequence in group.living] == [None, None]
    assert [manager.block_ids(s.sequence_id) for s in group.living] == [(0, 1, 2), (0, 1, 3)]


@pytest.mark.parametrize(("num_blocks", "fits"), [(3, False), (4, True)])
def test_a_fork_needs_no_room_but_its_copies_do_and_that_is_known_before(num_blocks: int, fits: bool) -> None:
    """Two blocks hold the prompt; of three samples two must copy: one free block is not enough, two are. Whoever goes on all the same changes no table."""
    manager = BlockSpaceManager(4, num_blocks)
    group = running(manager, 7, n=3)
    before = state(manager)
    assert manager.can_append_slots(group) is fits
    assert state(manager) == before
    if not fits:
        manager.append_slot(group.living[0])
        before = state(manager)
        with pytest.raises(EngineError, match="1 blocks are wanted, but 0 are free"):
            manager.append_slot(group.living[1])
        assert state(manager) == before


def test_a_block_that_a_prefix_holds_too_is_copied_by_every_writer() -> None:
    """Section 4.4, shared prefix: the provider's reference writes nothing, so nobody may write in place."""
    manager = BlockSpaceManager(4, 9)
    prefix = group_of(6, request_id="P").sequences[0]
    manager.allocate(prefix.group)
    for name, destination in (("A", 2), ("B", 3)):
        group = SequenceGroup(PaperRequestSpec(name, (*range(6), 77)), 1, prefix)
        assert manager.num_blocks_to_allocate(group) == 1
        assert manager.num_tokens_to_compute(group) == 1
        assert manager.allocate(group) == [(1, destination)]
        assert (group.sequences[0].num_computed_tokens, manager.block_ids(name)) == (6, (0, destination))
    assert ref_counts(manager, prefix) == [3, 1]


def test_an_admission_without_room_changes_nothing() -> None:
    manager = BlockSpaceManager(4, 2)
    group = group_of(9)
    before = state(manager)
    assert not manager.can_allocate(group)
    with pytest.raises(EngineError, match="3 blocks are wanted, but 2 are free"):
        manager.allocate(group)
    assert state(manager) == before


def test_freeing_takes_one_reference_each_and_a_second_time_nothing() -> None:
    manager = BlockSpaceManager(4, 8)
    one, two = running(manager, 7, n=2).living
    manager.append_slot(one)
    manager.free(one, WHY)
    assert manager.gpu_allocator.free_block_ids == [2, 3, 4, 5, 6, 7]
    assert ref_counts(manager, two) == [1, 1]
    manager.free(one, WHY)
    assert ref_counts(manager, two) == [1, 1]
    manager.free(two, WHY)
    assert manager.gpu_allocator.free_block_ids == [1, 0, 2, 3, 4, 5, 6, 7]
    assert manager.block_tables == {}


# ------------------------------------------------------------------ swapping (section 4.5)


def test_there_and_back_sharing_is_as_before() -> None:
    """Each shared block is moved once; a third sequence of another group stays where it is."""
    manager = BlockSpaceManager(4, 8, 5)
    group, other = running(manager, 7, n=2), running(manager, 4, request_id="B")
    for sequence in group.living:
        manager.append_slot(sequence)
    assert [manager.block_ids(s.sequence_id) for s in group.living] == [(0, 3), (0, 1)]
    assert manager.num_blocks_to_swap(group) == 3
    assert manager.swap_out(group, WHY) == [(0, 0), (3, 1), (1, 2)]
    assert [manager.block_ids(s.sequence_id) for s in group.living] == [(0, 1), (0, 2)]
    assert [block.ref_cnt for block in manager.cpu_allocator.blocks] == [2, 1, 1, 0, 0]
    assert {s.status for s in group.living} == {SequenceStatus.SWAPPED}
    assert sorted(manager.gpu_allocator.free_block_ids) == [0, 1, 3, 4, 5, 6, 7]
    assert manager.block_ids("B") == (2,)
    manager.arrange_free_queue((7, 6, 5))
    assert manager.swap_in(group, WHY) == [(0, 7), (1, 6), (2, 5)]
    assert [manager.block_ids(s.sequence_id) for s in group.living] == [(7, 6), (7, 5)]
    assert ref_counts(manager, group.living[0]) == [2, 1]
    assert sorted(manager.cpu_allocator.free_block_ids) == [0, 1, 2, 3, 4]
    assert ref_counts(manager, other.living[0]) == [1]


def test_swap_space_that_is_too_small_for_the_group_takes_none_of_it() -> None:
    manager = BlockSpaceManager(4, 8, 2)
    group = running(manager, 9)
    before = state(manager)
    assert not manager.can_swap_out(group)
    with pytest.raises(EngineError, match="3 blocks, but the swap space has 2 free"):
        manager.swap_out(group, WHY)
    assert state(manager) == before
    assert group.living[0].status is SequenceStatus.RUNNING


def test_a_group_comes_back_only_with_the_slots_of_its_next_tokens() -> None:
    """Two blocks lie in the swap space, and both samples need a copy's room or a new block: 8 tokens are full, so 2 + 2."""
    manager = BlockSpaceManager(4, 4, 4)
    group = running(manager, 8, n=2)
    manager.swap_out(group, WHY)
    assert manager.num_blocks_to_swap_in(group) == 4
    blocker = running(manager, 4, request_id="B")
    before = state(manager)
    assert not manager.can_swap_in(group)
    assert state(manager) == before
    manager.free(blocker.living[0], WHY)
    assert manager.can_swap_in(group)
    manager.swap_in(group, WHY)
    assert manager.can_append_slots(group)


def test_a_swap_in_without_room_changes_nothing() -> None:
    manager = BlockSpaceManager(4, 3, 3)
    group = running(manager, 9)
    manager.swap_out(group, WHY)
    running(manager, 4, request_id="B")
    before = state(manager)
    with pytest.raises(EngineError, match="3 blocks are wanted, but 2 are free"):
        manager.swap_in(group, WHY)
    assert state(manager) == before
    assert group.living[0].status is SequenceStatus.SWAPPED


def test_a_prefix_is_not_swapped_but_let_go_and_referred_to_again() -> None:
    manager = BlockSpaceManager(4, 9, 9)
    prefix = group_of(10, request_id="P").sequences[0]
    manager.allocate(prefix.group)
    group = SequenceGroup(PaperRequestSpec("A", (*range(10), 77)), 1, prefix)
    manager.allocate(group)
    assert manager.block_ids("A") == (0, 1, 3)
    assert manager.swap_out(group, WHY) == [(3, 0)]
    assert (ref_counts(manager, prefix), manager.block_ids("A")) == ([1, 1, 1], (0,))
    assert manager.swap_in(group, WHY) == [(0, 3)]
    assert (ref_counts(manager, prefix), manager.block_ids("A")) == ([2, 2, 1], (0, 1, 3))


@pytest.mark.parametrize(("num_own", "num_slots"), [(4, 2), (3, 1)])
def test_coming_back_beside_a_prefix_the_next_slots_are_counted_too(num_own: int, num_slots: int) -> None:
    """Prefix of 4, own prompt of 4 or 3: two samples need two new blocks, or one copy of the block that they share."""
    manager = BlockSpaceManager(4, 9, 9)
    prefix = group_of(4, request_id="P").sequences[0]
    manager.allocate(prefix.group)
    group = SequenceGroup(PaperRequestSpec("A", tuple(range(4 + num_own)), n=2), 1, prefix)
    manager.allocate(group)
    group.living.append(group.fork(group.living[0]))
    manager.fork(group.living[0], group.living[1], WHY)
    for sequence in group.living:
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.append_token(50, forced=False)
    manager.swap_out(group, WHY)
    assert manager.num_blocks_to_swap_in(group) == 1 + num_slots
    manager.swap_in(group, WHY)
    assert manager.num_blocks_to_append(group.living) == num_slots


def test_a_swapped_sequence_is_freed_in_the_swap_space() -> None:
    manager = BlockSpaceManager(4, 8, 8)
    group = running(manager, 7, n=2)
    manager.swap_out(group, WHY)
    manager.free(group.living[0], WHY)
    assert [block.ref_cnt for block in manager.cpu_allocator.blocks[:2]] == [1, 1]
    manager.free(group.living[1], WHY)
    assert manager.cpu_allocator.num_free_blocks == manager.gpu_allocator.num_free_blocks == 8


# ------------------------------------------------------------------ recomputing a group (section 4.5)


def test_a_recomputed_group_shares_full_blocks_of_equal_tokens_and_nothing_else() -> None:
    """8 prompt tokens, then 21 22 23 | 21 22 24 | 31 …: the second shares the prompt and what it has in common in full blocks, and no partial block."""
    manager = BlockSpaceManager(4, 12)
    group = group_of(8, n=3)
    group.living += [group.fork(group.living[0]), group.fork(group.living[0])]
    outputs = ([21, 22, 23, 24, 25], [21, 22, 23, 24, 26], [21, 32, 33, 34, 35])
    for sequence, tokens in zip(group.living, outputs, strict=True):
        sequence.token_ids += tokens
    assert manager.num_blocks_to_allocate(group) == 4 + 1 + 2
    assert manager.num_tokens_to_compute(group) == 13 + 1 + 5
    manager.allocate(group)
    assert [manager.block_ids(s.sequence_id) for s in group.living] == [(0, 1, 2, 3), (0, 1, 2, 4), (0, 1, 5, 6)]
    assert [s.num_computed_tokens for s in group.living] == [0, 12, 8]


def test_equal_sequences_leave_at_least_the_last_token_to_compute() -> None:
    """Its logits are wanted, so a block that is full with all the tokens there are is computed again."""
    manager = BlockSpaceManager(4, 12)
    group = group_of(7, n=2)
    group.living.append(group.fork(group.living[0]))
    for sequence in group.living:
        sequence.token_ids.append(20)
    manager.allocate(group)
    assert [manager.block_ids(s.sequence_id) for s in group.living] == [(0, 1), (0, 2)]
    assert [s.num_computed_tokens for s in group.living] == [0, 4]
