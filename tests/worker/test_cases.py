"""Public bug reports about block tables and slots (by their numbers in tests/conformance/cases.py), as far as the worker's tables and kernels go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels
from engine.worker.block_table import BlockTable
from kernels import PAD_SLOT_ID, Backend

BACKENDS = [Backend("torch", "test"), Backend("interpret", "test")]
pytestmark = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
NUM_BLOCKS = 12


def make_table(block_size: int = 4, kernel_block_size: int | None = None) -> BlockTable:
    return BlockTable(block_size=block_size, max_num_reqs=4, max_model_len=64, max_num_batched_tokens=16, kernel_block_size=kernel_block_size)


def slots(table: BlockTable, positions: list[int], backend: Backend) -> list[int]:
    table.commit_block_table(1)
    table.compute_slot_mapping(1, torch.tensor([0, len(positions)], dtype=torch.int32), torch.tensor(positions), backend)
    found: list[int] = table.slot_mapping.tolist()
    return found


def attend(table: BlockTable, caches: tuple[Tensor, Tensor], num_queries: int, seq_len: int, sliding_window: int | None, backend: Backend) -> Tensor:
    """The last `num_queries` tokens of a request of `seq_len` tokens in row 0."""
    table.commit_block_table(1)
    query = torch.randn(num_queries, 2, 8, generator=torch.Generator().manual_seed(1))
    return kernels.paged_attention(
        query,
        *caches,
        table.block_table[:1],
        torch.tensor([0, num_queries], dtype=torch.int32),
        torch.tensor([seq_len], dtype=torch.int32),
        scale=0.35,
        sliding_window=sliding_window,
        backend=backend,
    )


def make_caches(poisoned: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Keys and values of every block; what is `poisoned` belongs to somebody else and must not be read."""
    generator = torch.Generator().manual_seed(0)
    caches = torch.randn(NUM_BLOCKS, 4, 2, 8, generator=generator), torch.randn(NUM_BLOCKS, 4, 2, 8, generator=generator)
    for cache in caches:
        cache[poisoned or []] = float("nan")
    return caches


def test_a12_slots_run_on_over_the_block_boundary(backend: Backend) -> None:
    """A12 (R8.4): positions 0..8 of table [1,2,3] lie one after the other, whichever decode took the third block."""
    table = make_table()
    table.add_row([1, 2], 0)
    assert slots(table, list(range(8)), backend)[:8] == [4, 5, 6, 7, 8, 9, 10, 11]
    table.append_row([3], 0)
    assert slots(table, [8], backend) == [12] + [PAD_SLOT_ID] * 15


def test_a20_a_window_never_reads_what_the_row_still_names(backend: Backend) -> None:
    """A20 (R8.3): the manager's table is [0,0,3,4,5], the worker's row still [1,2,3,4,5], and block 2 belongs to another request by now."""
    stale, fresh = make_table(), make_table()
    stale.add_row([1, 2, 3, 4], 0)
    stale.append_row([5], 0)
    fresh.add_row([0, 0, 3, 4, 5], 0)
    assert stale.row(0) == [1, 2, 3, 4, 5]
    expected = attend(fresh, make_caches(), 1, 17, 8, backend)
    found = attend(stale, make_caches(poisoned=[0, 1, 2]), 1, 17, 8, backend)
    assert torch.equal(found, expected)
    # The window's first key is 17 - 8 = 9, in block 3. Without the window the poison is seen, so the check can fail.
    assert not torch.isfinite(attend(stale, make_caches(poisoned=[0, 1, 2]), 1, 17, None, backend)).any()


def test_a21_the_tail_of_a_row_that_somebody_else_left_is_not_used(backend: Backend) -> None:
    """A21 (R8.2): B's chunk moves into A's row; the columns behind its own three still name A's blocks, and nobody reads or writes them."""
    table = make_table()
    table.add_row([1, 2, 3, 4, 5, 6], 0)
    table.add_row([7, 8, 9], 1)
    table.move_row(1, 0)
    assert table.row(0) == [7, 8, 9]
    assert slots(table, list(range(12)), backend) == [*range(28, 40), *[PAD_SLOT_ID] * 4]
    expected = make_table()
    expected.add_row([7, 8, 9], 0)
    found = attend(table, make_caches(poisoned=[0, 1, 2, 3, 4, 5, 6]), 12, 12, None, backend)
    assert torch.equal(found, attend(expected, make_caches(), 12, 12, None, backend))


def test_a23_smaller_kernel_blocks_change_no_slot(backend: Backend) -> None:
    """A23 (R8.4): manager blocks of 8 in kernel blocks of 4: row [6,7,2,3], and every slot is the manager's."""
    split, whole = make_table(8, kernel_block_size=4), make_table(8)
    for table in (split, whole):
        table.add_row([3, 1], 0)
    assert split.row(0) == [6, 7, 2, 3]
    assert slots(split, [0, 4, 8, 15], backend)[:4] == [24, 28, 8, 15]
    assert slots(whole, [0, 4, 8, 15], backend)[:4] == [3 * 8 + 0, 3 * 8 + 4, 1 * 8 + 0, 1 * 8 + 7]
    assert slots(split, list(range(16)), backend) == slots(whole, list(range(16)), backend)


def test_a50_a_copy_moves_the_whole_page_of_every_layer(backend: Backend) -> None:
    """A50 (R6.7): block 3 holds positions 8..13 of a request (block size 8); after the copy block 5 does, however many bytes a layer has per block."""
    generator = torch.Generator().manual_seed(2)
    widths = [(1, 8), (4, 16), (2, 3)]
    keys = [torch.randn(NUM_BLOCKS, 8, *width, generator=generator) for width in widths]
    values = [torch.randn(NUM_BLOCKS, 8, *width, generator=generator) for width in widths]
    before = [cache.clone() for cache in (*keys, *values)]
    kernels.copy_blocks(keys, values, torch.tensor([[3, 5]]), backend=backend)
    for cache, old in zip((*keys, *values), before, strict=True):
        assert torch.equal(cache[5], old[3])
        others = [block for block in range(NUM_BLOCKS) if block != 5]
        assert torch.equal(cache[others], old[others])
