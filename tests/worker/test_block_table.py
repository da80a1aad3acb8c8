"""Rules R8.1-R8.5: the worker's block table. Golden values were recorded on vLLM's own classes and kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import EngineError
from engine.worker.block_table import BlockTable, MultiGroupBlockTable, table_width
from kernels import PAD_SLOT_ID, Backend

BACKENDS = [Backend("torch", "test"), Backend("interpret", "test")]


def make_table(block_size: int = 4, *, max_num_reqs: int = 4, kernel_block_size: int | None = None) -> BlockTable:
    return BlockTable(
        block_size=block_size,
        max_num_reqs=max_num_reqs,
        max_model_len=64,
        max_num_batched_tokens=16,
        kernel_block_size=kernel_block_size,
    )


def slots(table: BlockTable, query_start_loc: list[int], positions: list[int], backend: Backend) -> list[int]:
    num_reqs = len(query_start_loc) - 1
    table.commit_block_table(num_reqs)
    table.compute_slot_mapping(num_reqs, torch.tensor(query_start_loc, dtype=torch.int32), torch.tensor(positions), backend)
    return table.slot_mapping.tolist()


@pytest.mark.parametrize(("num_blocks", "block_size", "width"), [(63, 16, 64), (2, 4, 32), (10, 32, 12), (3, 48, 8)])
def test_r8_1_width_covers_a_multiple_of_128_tokens(num_blocks: int, block_size: int, width: int) -> None:
    assert table_width(num_blocks, block_size) == width


def test_r8_1_the_width_of_a_group_of_states_is_not_rounded() -> None:
    """Blocks of 4 and of 16 tokens, states every 16 tokens or one per request (R3.42)."""
    made = MultiGroupBlockTable(block_sizes=(4, 16, 100), max_num_reqs=2, max_model_len=100, max_num_batched_tokens=8, state_groups=(1, 2))
    assert [table.width for table in made.block_tables] == [32, 7, 1]
    assert table_width(7, 16, holds_states=True) == 7


def test_r8_5_groups_of_states_have_no_slots_and_are_left_untouched() -> None:
    made = MultiGroupBlockTable(block_sizes=(4, 4), max_num_reqs=2, max_model_len=16, max_num_batched_tokens=6, state_groups=(0,))
    made.add_row([[9], [5]], 0)
    made.commit_block_table(1)
    made[0].slot_mapping.fill_(77)
    made.compute_slot_mapping(1, torch.tensor([0, 3], dtype=torch.int32), torch.arange(3), BACKENDS[0])
    assert made[0].slot_mapping.tolist() == [77] * 6
    assert made[1].slot_mapping.tolist() == [20, 21, 22, PAD_SLOT_ID, PAD_SLOT_ID, PAD_SLOT_ID]
    assert made.row(0) == ((9,), (5,))


def test_r8_1_types_and_shapes_and_width_in_kernel_blocks() -> None:
    table = BlockTable(block_size=32, max_num_reqs=3, max_model_len=300, max_num_batched_tokens=7, kernel_block_size=16)
    assert table.width == 24  # ceil(300 / 32) = 10 -> 12 blocks, each of two kernel blocks
    assert table.block_table_np.shape == table.block_table.shape == (3, 24)
    assert table.block_table_np.dtype == np.int32
    assert table.block_table.dtype == torch.int32
    assert table.num_blocks_per_row.dtype == np.int32
    assert table.slot_mapping.dtype == torch.int64
    assert table.slot_mapping.shape == (7,)


def test_r8_2_append_writes_behind_the_length_and_add_does_not_clear_beyond() -> None:
    table = make_table()
    table.add_row([7, 1], 2)
    table.append_row([3], 2)
    assert table.row(2) == [7, 1, 3]
    table.add_row([9], 2)
    assert table.row(2) == [9]
    assert table.block_table_np[2, :4].tolist() == [9, 1, 3, 0]
    table.append_row([], 2)
    assert table.row(2) == [9]


def test_r8_2_clear_zeroes_the_used_part_only() -> None:
    table = make_table()
    table.add_row([7, 1, 3], 0)
    table.add_row([5], 0)
    table.clear_row(0)
    assert table.row(0) == []
    assert table.block_table_np[0, :3].tolist() == [0, 1, 3]


def test_r8_2_move_copies_the_used_part_and_clears_the_source() -> None:
    table = make_table()
    table.add_row([7, 1, 3], 0)
    table.add_row([5, 2], 3)
    table.move_row(3, 0)
    assert table.row(0) == [5, 2]
    assert table.block_table_np[0, :3].tolist() == [5, 2, 3]
    assert table.row(3) == []
    assert table.block_table_np[3, :2].tolist() == [0, 0]
    table.move_row(0, 0)
    assert table.row(0) == [5, 2]


def test_r8_2_swap_exchanges_rows_and_lengths() -> None:
    table = make_table()
    table.add_row([7, 1, 3], 0)
    table.add_row([5, 2], 3)
    table.swap_row(0, 3)
    assert (table.row(0), table.row(3)) == ([5, 2], [7, 1, 3])


def test_r8_2_nothing_reaches_the_device_before_commit_and_then_only_the_first_rows() -> None:
    table = make_table()
    table.add_row([7, 1, 3], 0)
    table.add_row([5, 2], 1)
    assert int(table.block_table.abs().sum()) == 0
    table.commit_block_table(1)
    assert table.block_table[0, :3].tolist() == [7, 1, 3]
    assert table.block_table[1, :2].tolist() == [0, 0]
    table.append_row([6], 0)
    assert table.block_table[0, :4].tolist() == [7, 1, 3, 0]


def test_a_row_that_would_overflow_is_refused_and_unchanged() -> None:
    table = make_table()
    table.add_row(list(range(1, 32)), 0)
    with pytest.raises(EngineError, match="Row 0 of the block table has 32 columns but 33 blocks"):
        table.append_row([40, 41], 0)
    assert table.row(0) == list(range(1, 32))


def test_a_kernel_block_size_must_divide_the_block_size() -> None:
    with pytest.raises(EngineError, match="12 does not divide the KV cache's block size 32"):
        make_table(32, kernel_block_size=12)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_r8_4_slots_of_figure_6(backend: Backend) -> None:
    table = make_table()
    table.add_row([7, 1, 3], 0)
    assert slots(table, [0, 10], list(range(10)), backend) == [28, 29, 30, 31, 4, 5, 6, 7, 12, 13] + [PAD_SLOT_ID] * 6


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_r8_5_slots_are_indexed_by_place_in_the_batch_and_old_ones_are_overwritten(backend: Backend) -> None:
    table = make_table()
    table.slot_mapping.fill_(99)
    table.add_row([7, 1, 3], 0)
    table.add_row([5, 2], 1)
    assert slots(table, [0, 1, 6], [8, 0, 1, 2, 3, 4], backend) == [12, 20, 21, 22, 23, 8] + [PAD_SLOT_ID] * 10


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_r8_4_blocks_split_into_kernel_blocks(backend: Backend) -> None:
    table = make_table(32, kernel_block_size=16)
    table.add_row([2, 5], 0)
    assert table.row(0) == [4, 5, 10, 11]
    assert slots(table, [0, 6], [0, 15, 16, 31, 32, 47], backend)[:6] == [64, 79, 80, 95, 160, 175]
    table.clear_row(0)
    table.append_row([2], 0)
    table.append_row([5], 0)
    assert table.row(0) == [4, 5, 10, 11]


def test_multi_group_table_has_one_table_per_group() -> None:
    tables = MultiGroupBlockTable(block_sizes=(4, 8), max_num_reqs=3, max_model_len=64, max_num_batched_tokens=16)
    tables.add_row(([7, 1, 3], [2, 6]), 0)
    tables.append_row(([4], []), 0)
    tables.add_row(([9], [8]), 2)
    assert tables.row(0) == ((7, 1, 3, 4), (2, 6))
    tables.swap_row(0, 2)
    assert tables.row(0) == ((9,), (8,))
    tables.move_row(2, 0)
    assert (tables.row(0), tables.row(2)) == (((7, 1, 3, 4), (2, 6)), ((), ()))
    tables.commit_block_table(1)
    tables.compute_slot_mapping(1, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([8, 9]), BACKENDS[0])
    assert tables[0].slot_mapping[:3].tolist() == [12, 13, -1]  # block 3 of 4 slots
    assert tables[1].slot_mapping[:3].tolist() == [48, 49, -1]  # block 6 of 8 slots
    tables.clear_row(0)
    assert tables.row(0) == ((), ())
    assert len(tables) == 2


@pytest.mark.parametrize(("kernel_block_size", "expected"), [(4, [7, 3, 5]), (2, [14, 15, 6, 7, 10, 11])])
def test_a_replaced_entry_takes_all_that_follows_along(kernel_block_size: int, expected: list[int]) -> None:
    """Copy-on-write changes an entry in the middle of a batch: columns count the manager's blocks, also where the kernel's are smaller (R8.4)."""
    table = make_table(kernel_block_size=kernel_block_size)
    table.add_row([7, 1, 9, 2], 0)
    table.replace_row([3, 5], 0, 1)
    assert table.row(0) == expected
