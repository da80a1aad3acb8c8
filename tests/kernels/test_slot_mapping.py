"""compute_slot_mapping: the recorded numbers of R8.4, the formula in plain Python, and the padding of R8.5."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels

CPU_BACKENDS = ["torch", "interpret"]
pytestmark = pytest.mark.parametrize("backend", CPU_BACKENDS)


def slots(requests: list[list[int]], rows: list[list[int]], backend: str, length: int | None = None, **sizes: int) -> list[int]:
    """requests: the scheduled positions of each; rows: their block tables, padded here to one width with a block that must not be read."""
    width = max(map(len, rows), default=1)
    table = torch.tensor([row + [999] * (width - len(row)) for row in rows], dtype=torch.int32).reshape(len(rows), width)
    query_start_loc = torch.tensor([0, *map(len, requests)]).cumsum(0).int()
    positions = torch.tensor([position for request in requests for position in request], dtype=torch.int64)
    mapping = torch.full((positions.numel() if length is None else length,), 12345, dtype=torch.int64)
    kernels.compute_slot_mapping(query_start_loc, positions, table, mapping, **sizes, backend=backend)
    return mapping.tolist()


def test_r8_4_one_request_and_padding(backend):
    found = slots([list(range(10))], [[7, 1, 3]], backend, length=16, block_size=4)
    assert found == [28, 29, 30, 31, 4, 5, 6, 7, 12, 13, -1, -1, -1, -1, -1, -1]


def test_r8_4_decode_and_prefill_in_one_batch(backend):
    assert slots([[8], [0, 1, 2, 3, 4]], [[7, 1, 3], [5, 2]], backend, block_size=4) == [12, 20, 21, 22, 23, 8]


def test_r8_4_kernel_blocks_smaller_than_the_managers(backend):
    found = slots([[0, 15, 16, 31, 32, 47]], [[4, 5, 10, 11]], backend, block_size=32, kernel_block_size=16)
    assert found == [64, 79, 80, 95, 160, 175]


def test_a22_a_position_past_the_row_has_no_slot(backend):
    """Case A22: block size 4, width 32, a row that begins with block 7; position 130 is in column 32, which is the next request's row."""
    rows = [[7] + [0] * 31, [21] * 32]
    assert slots([[0, 3, 130], [0]], rows, backend, block_size=4) == [28, 31, -1, 84]
    assert slots([[0, 3, 130], [0]], rows, backend, block_size=4, cp_world_size=2, cp_rank=0) == [28, -1, 4 * 0 + 1, 84]


@pytest.mark.parametrize(
    ("rank", "interleave", "expected"),
    [
        (0, 1, [28, -1, 29, -1, 30, -1, 31, -1, 4, -1, 5, -1]),
        (1, 1, [-1, 28, -1, 29, -1, 30, -1, 31, -1, 4, -1, 5]),
        (0, 2, [28, 29, -1, -1, 30, 31, -1, -1, 4, 5, -1, -1]),
    ],
)
def test_r8_4_decode_context_parallel(rank, interleave, expected, backend):
    assert slots([list(range(12))], [[7, 1]], backend, block_size=4, cp_world_size=2, cp_rank=rank, cp_interleave=interleave) == expected


def test_r8_5_no_requests_is_all_padding(backend):
    assert slots([], [], backend, length=5, block_size=4) == [-1] * 5


def test_r8_5_a_request_without_tokens_gets_no_slot(backend):
    assert slots([[], [4], []], [[1, 2], [3, 6], [5, 4]], backend, length=3, block_size=4) == [24, -1, -1]


def test_slots_exceed_32_bits(backend):
    """A slot is int64: block 2^30 of size 16 lies beyond what int32 holds."""
    assert slots([[17]], [[0, 2**30]], backend, block_size=16) == [2**34 + 1]


def formula(position: int, row: list[int], block_size: int, kernel_block_size: int, world: int, rank: int, interleave: int) -> int:
    """R8.4 letter by letter."""
    virtual = block_size * world
    vb, off = divmod(position, virtual)
    if (off // interleave) % world != rank:
        return -1
    lo = off // (world * interleave) * interleave + off % interleave
    return row[vb * (block_size // kernel_block_size) + lo // kernel_block_size] * kernel_block_size + lo % kernel_block_size


@st.composite
def mapping_cases(draw):
    kernel_block_size = draw(st.sampled_from([1, 2, 4, 6]))
    factor = draw(st.integers(1, 3))
    block_size = kernel_block_size * factor
    world = draw(st.integers(1, 3))
    interleave = draw(st.sampled_from([i for i in range(1, block_size + 1) if block_size % i == 0]))
    requests = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)).map(lambda pair: list(range(pair[0], pair[0] + pair[1]))), max_size=5))
    width = 61 // (block_size * world) * factor + factor
    rows = [draw(st.lists(st.integers(0, 500), min_size=width, max_size=width)) for _ in requests]
    return requests, rows, block_size, kernel_block_size, world, draw(st.integers(0, world - 1)), interleave, draw(st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(case=mapping_cases())
def test_r8_4_formula_on_any_batch(backend, case):
    requests, rows, block_size, kernel_block_size, world, rank, interleave, padding = case
    expected = [
        formula(position, row, block_size, kernel_block_size, world, rank, interleave)
        for request, row in zip(requests, rows, strict=True)
        for position in request
    ]
    found = slots(
        requests,
        rows,
        backend,
        length=len(expected) + padding,
        block_size=block_size,
        kernel_block_size=kernel_block_size,
        cp_world_size=world,
        cp_rank=rank,
        cp_interleave=interleave,
    )
    assert found == expected + [-1] * padding


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 0}, "block_size 0"),
        ({"block_size": 16, "kernel_block_size": 5}, "kernel_block_size 5"),
        ({"block_size": 4, "cp_world_size": 2, "cp_rank": 2}, "rank 2 of 2"),
        ({"block_size": 4, "cp_world_size": 2, "cp_interleave": 3}, "interleave 3"),
    ],
)
def test_wrong_sizes_are_named(backend, sizes, message):
    with pytest.raises(ValueError, match=message):
        slots([[0]], [[1]], backend, **sizes)


def test_more_requests_than_rows_is_refused(backend):
    with pytest.raises(ValueError, match="only 1 rows"):
        slots([[0], [0]], [[1]], backend, block_size=4)
