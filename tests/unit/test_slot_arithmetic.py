"""The slot of one token step by step: the recorded numbers of R8.4, cases A22 and A23, and the kernel that computes it for whole batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from engine.errors import InvalidInput
from engine.trace.closeup import SlotArithmetic
from engine.trace.slot_arithmetic import slot_arithmetic


def slots(positions: list[int], row: list[int], **sizes: int) -> list[int]:
    return [slot_arithmetic(position, row, **sizes).slot for position in positions]


def test_r8_4_one_request() -> None:
    assert slots(list(range(10)), [7, 1, 3], block_size=4) == [28, 29, 30, 31, 4, 5, 6, 7, 12, 13]


def test_r8_4_every_step_of_one_token() -> None:
    """Position 9 of row [7, 1, 3] with 4 tokens to a block: 9 = 2*4 + 1, so block 3, and 3*4 + 1 = 13."""
    assert slot_arithmetic(9, [7, 1, 3], block_size=4) == SlotArithmetic(
        position=9, block_size=4, kernel_block_size=4, cp_world_size=1, cp_rank=0, cp_interleave=1, virtual_block_size=4, virtual_block=2, offset=1,
        rank=0, local_offset=1, column=2, block_id=3, kernel_block_id=3, kernel_offset=1, slot=13,
    )  # fmt: skip


def test_r8_4_kernel_blocks_of_half_the_size() -> None:
    """Recorded from the real kernel: blocks of 32 tokens, kernel blocks of 16, row [2, 5] (stored as [4, 5, 10, 11])."""
    assert slots([0, 15, 16, 31, 32, 47], [2, 5], block_size=32, kernel_block_size=16) == [64, 79, 80, 95, 160, 175]
    assert [slot_arithmetic(p, [2, 5], block_size=32, kernel_block_size=16).kernel_block_id for p in (0, 16, 32, 48)] == [4, 5, 10, 11]


def test_a22_a_position_past_the_row_has_no_slot() -> None:
    """Case A22: 32 columns of 4 tokens, the first block is 7; position 130 would be in column 32."""
    row = [7] + [0] * 31
    assert slots([0, 3, 130], row, block_size=4) == [28, 31, -1]
    beyond = slot_arithmetic(130, row, block_size=4)
    assert (beyond.column, beyond.block_id, beyond.kernel_block_id) == (32, None, None)
    assert slots([0], [], block_size=4) == [-1]


def test_a23_smaller_kernel_blocks_leave_the_slot_as_it_is() -> None:
    """Case A23: blocks of 8 tokens, kernel blocks of 4, row [3, 1] (stored as [6, 7, 2, 3])."""
    found = [slot_arithmetic(position, [3, 1], block_size=8, kernel_block_size=4) for position in (0, 4, 8, 15)]
    assert [step.kernel_block_id for step in found] == [6, 7, 2, 3]
    assert [step.block_id for step in found] == [3, 3, 1, 1]
    assert [step.column for step in found] == [0, 1, 2, 3]
    assert [step.slot for step in found] == [24, 28, 8, 15] == slots([0, 4, 8, 15], [3, 1], block_size=8)


@pytest.mark.parametrize(
    ("rank", "interleave", "expected"),
    [
        (0, 1, [28, -1, 29, -1, 30, -1, 31, -1, 4, -1, 5, -1]),
        (1, 1, [-1, 28, -1, 29, -1, 30, -1, 31, -1, 4, -1, 5]),
        (0, 2, [28, 29, -1, -1, 30, 31, -1, -1, 4, 5, -1, -1]),
    ],
)
def test_r8_4_decode_context_parallel(rank: int, interleave: int, expected: list[int]) -> None:
    assert slots(list(range(12)), [7, 1], block_size=4, cp_world_size=2, cp_rank=rank, cp_interleave=interleave) == expected


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], dict[str, int]]:
    kernel_block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    block_size = kernel_block_size * draw(st.integers(1, 4))
    world = draw(st.integers(1, 4))
    sizes = {
        "block_size": block_size,
        "kernel_block_size": kernel_block_size,
        "cp_world_size": world,
        "cp_rank": draw(st.integers(0, world - 1)),
        "cp_interleave": draw(st.sampled_from([i for i in range(1, block_size + 1) if block_size % i == 0])),
    }
    row = draw(st.lists(st.integers(0, 500), min_size=1, max_size=6))
    end = block_size * world * (len(row) + 1)
    return draw(st.lists(st.integers(0, end), min_size=1, max_size=40)), row, sizes


@pytest.mark.parametrize("backend", ["torch", "interpret"])
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_r8_4_is_what_the_kernel_computes(backend: str, case: tuple[list[int], list[int], dict[str, int]]) -> None:
    positions, row, sizes = case
    parts = sizes["block_size"] // sizes["kernel_block_size"]
    table = torch.tensor([[block * parts + i for block in row for i in range(parts)]], dtype=torch.int32)
    mapping = torch.full((len(positions),), 12345, dtype=torch.int64)
    starts = torch.tensor([0, len(positions)], dtype=torch.int32)
    kernels.compute_slot_mapping(starts, torch.tensor(positions), table, mapping, **sizes, backend=backend)
    assert slots(positions, row, **sizes) == mapping.tolist()


@pytest.mark.parametrize(
    ("position", "row", "sizes", "message"),
    [
        (-1, [7], {"block_size": 4}, "Position -1"),
        (0, [7, -1], {"block_size": 4}, "names block -1"),
        (0, [7], {"block_size": 0}, "block size 0"),
        (0, [7], {"block_size": 16, "kernel_block_size": 5}, "5 does not divide the block size 16"),
        (0, [7], {"block_size": 4, "cp_world_size": 2, "cp_rank": 2}, "rank 2 does not exist among 2"),
        (0, [7], {"block_size": 4, "cp_world_size": 2, "cp_interleave": 3}, "interleave 3"),
    ],
)
def test_what_cannot_be_worked_out_is_refused(position: int, row: list[int], sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        slot_arithmetic(position, row, **sizes)
