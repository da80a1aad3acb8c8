"""How many slots Orca reserves (section 6.1), and what they hold (Figure 3)."""

from __future__ import annotations

import pytest

from engine.errors import EngineError, InvalidInput
from engine.paper.buddy_allocator import BuddyAllocator
from engine.paper.reservation import SlotSplit, reserved_slots, split_of
from engine.paper.workload import WorkloadRequest


def request(prompt_len: int, output_len: int) -> WorkloadRequest:
    return WorkloadRequest(0.0, prompt_len, output_len, "A")


@pytest.mark.parametrize(
    ("prompt_len", "output_len", "num_slots", "split"),
    [
        pytest.param(7, 3, 2048, SlotSplit(7 + 1, 2, 2038), id="A: Four score and seven years ago our | fathers | brought forth"),
        pytest.param(3, 2, 512, SlotSplit(3 + 1, 1, 507), id="B: You only live | once | one slot later"),
    ],
)
def test_figure_3(prompt_len: int, output_len: int, num_slots: int, split: SlotSplit) -> None:
    """Prompt, the token of the current iteration, slots used later, slots never used, as the figure's labels count them."""
    assert split_of(request(prompt_len, output_len), 1, num_slots) == split
    assert split.token_states + split.reserved + split.internal == num_slots


def test_split_over_a_life() -> None:
    """Each iteration turns one reserved slot into a token state; what will never be used stays."""
    splits = [split_of(request(4, 3), generated, 10) for generated in range(4)]
    assert splits == [SlotSplit(4, 3, 3), SlotSplit(5, 2, 3), SlotSplit(6, 1, 3), SlotSplit(7, 0, 3)]


def test_split_refuses_what_cannot_be() -> None:
    with pytest.raises(InvalidInput, match="generates 3 tokens, so that token 4"):
        split_of(request(4, 3), 4, 10)
    with pytest.raises(InvalidInput, match="needs 7 slots in the end, but only 6"):
        split_of(request(4, 3), 1, 6)


@pytest.mark.parametrize(("output_len", "slots"), [(25, 32), (1, 1), (2, 2), (3, 4), (32, 32), (33, 64)])
def test_pow2_reserves_the_next_power_of_two_for_the_output(output_len: int, slots: int) -> None:
    """Section 6.1's example: an output of 25 gets 32 positions. Never twice as many as needed."""
    assert reserved_slots("orca_pow2", request(10, output_len)) == 10 + slots
    assert slots < 2 * output_len


def test_max_and_oracle() -> None:
    assert reserved_slots("orca_max", request(10, 25)) == 2048
    assert reserved_slots("orca_max", request(10, 25), max_model_len=512) == 512
    assert reserved_slots("orca_oracle", request(10, 25)) == 35
    assert reserved_slots("orca_pow2", request(1000, 1000)) == 2024
    assert reserved_slots("orca_pow2", request(1100, 900)) == 2048, "no more than the model has positions"
    with pytest.raises(InvalidInput, match="reserves no slots ahead"):
        reserved_slots("paged", request(10, 25))


def test_the_papers_line_has_seven_chunks_of_2048() -> None:
    """15,728 slots (12 GiB, OPT-13B): seven requests of 2,048 and 1,392 slots that are too few for an eighth, 8.85 % (Figure 2's 8.9, Figure 13's 7.00)."""
    allocator = BuddyAllocator(15_728)
    starts = [allocator.allocate(2048) for _ in range(8)]
    assert starts[0] == 12_288, "the root chunk of 2,048 fits best"
    assert starts[-1] is None
    assert sorted(start for start in starts if start is not None) == [0, 2048, 4096, 6144, 8192, 10_240, 12_288]
    assert allocator.num_free == 1392
    assert [size for _, size in allocator.free_chunks()] == [1024, 256, 64, 32, 16]


def test_buddies_are_split_and_joined() -> None:
    """Knuth: 16 slots; a chunk for 3 is 4 slots, what is split off waits as 4 and 8; freeing it joins everything again."""
    allocator = BuddyAllocator(16)
    assert allocator.allocate(3) == 0
    assert allocator.free_chunks() == [(4, 4), (8, 8)]
    assert allocator.allocate(4) == 4
    allocator.free(0)
    assert allocator.free_chunks() == [(0, 4), (8, 8)], "slots 0-3 and 8-15 touch no free buddy"
    allocator.free(4)
    assert allocator.free_chunks() == [(0, 16)]
    with pytest.raises(EngineError, match="slot 4 is freed"):
        allocator.free(4)
    with pytest.raises(InvalidInput, match="num_slots is 0"):
        BuddyAllocator(0)
