"""What programs of the slot mapping are seen to look up and to store, against R8.4 and R8.5 in plain Python."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import MappingWitness, Witness
from kernels.interpreter import launch
from kernels.launch import Launcher
from kernels.pointer_trace import WatchedTensor, watching

OWN_ACCOUNT = Launcher(run=launch, interpreted=True, own_account=True)
"""The kernels that write down what they do, as compiled ones must, run by the interpreter."""
LIKE_A_GPU = Launcher(run=launch, interpreted=True, own_account=True, gpu_tiles=kernels.GpuTiles())


def mapped(by: str, requests: list[list[int]], rows: list[list[int]], num_places: int, block_size: int, **sizes: int) -> tuple[MappingWitness, list[int]]:
    """requests: the scheduled positions of each; rows: their block tables, all of one width."""
    table = torch.tensor(rows, dtype=torch.int32)
    query_start_loc = torch.tensor([0, *map(len, requests)]).cumsum(0).int()
    positions = torch.tensor([position for request in requests for position in request], dtype=torch.int64)
    mapping, witness = torch.full((num_places,), 12345), Witness()
    if by == "watched":
        kernels.compute_slot_mapping(query_start_loc, positions, table, mapping, block_size=block_size, witness=witness, backend="interpret", **sizes)
    else:
        launcher = OWN_ACCOUNT if by == "own account" else LIKE_A_GPU
        rank = {"cp_world_size": 1, "cp_rank": 0, "cp_interleave": 1, "kernel_block_size": block_size} | sizes
        launcher.compute_slot_mapping(query_start_loc, positions, table, mapping, block_size=block_size, witness=witness, **rank)
    (told,) = witness.mappings
    return told, mapping.tolist()


@pytest.mark.parametrize("by", ["watched", "own account", "like a GPU"])
def test_r8_4_and_r8_5(by):
    """A decode and a prefill: each lane looks up its own row where its tokens lie, and the last program pads."""
    told, mapping = mapped(by, [[8], [0, 1, 2, 3, 4]], [[7, 1, 3], [5, 2, 9]], 8, 4)
    assert mapping == [12, 20, 21, 22, 23, 8, -1, -1]
    assert (told.block_size, told.num_places) == (4, 8)
    seen = [(p.tokens, p.slots, p.entries_read, p.block_ids) for p in told.programs]
    assert seen == [
        ((0,), (12,), ((0, 2),), (3,)),
        ((1, 2, 3, 4, 5), (20, 21, 22, 23, 8), ((1, 0), (1, 1)), (5, 2)),
        ((6, 7), (-1, -1), (), ()),
    ]
    assert told.programs[-1].program == told.grid - 1


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    starts=st.lists(st.integers(0, 20), min_size=5, max_size=5),
    block_size=st.sampled_from([1, 4]),
    behind=st.integers(0, 5),
)
def test_any_batch(lengths, starts, block_size, behind):
    requests = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=False)]
    rows = [[100 * r + column for column in range(30)] for r in range(len(requests))]
    due = [(100 * r + p // block_size) * block_size + p % block_size for r, request in enumerate(requests) for p in request]
    for by in ("watched", "own account"):
        told, mapping = mapped(by, requests, rows, len(due) + behind, block_size)
        stored = {token: slot for program in told.programs for token, slot in zip(program.tokens, program.slots, strict=True)}
        assert [stored[token] for token in range(len(mapping))] == mapping == due + [-1] * behind
        for program in told.programs:
            for (row, column), block_id in zip(program.entries_read, program.block_ids, strict=True):
                assert block_id == 100 * row + column
                assert set(program.tokens) <= {*range(sum(lengths[:row]), sum(lengths[: row + 1]))}


@pytest.mark.parametrize("by", ["watched", "own account"])
def test_tokens_of_another_rank_look_nothing_up(by):
    """R8.4 with two context-parallel ranks: every other token has no slot here, and no entry is read for it."""
    told, mapping = mapped(by, [list(range(12))], [[7, 1]], 12, 4, cp_world_size=2, cp_rank=1)
    assert mapping == [-1, 28, -1, 29, -1, 30, -1, 31, -1, 4, -1, 5]
    (program,) = told.programs
    assert (program.slots, program.entries_read) == (tuple(mapping), ((0, 0), (0, 1)))


@triton.jit
def _stores_elsewhere_kernel(mapping_ptr, tile: tl.constexpr):
    """Stores 10 times each lane's number where the reference would, and the last lane one place further."""
    lane = tl.arange(0, tile)[:, None]
    tl.store(mapping_ptr + lane + (lane == tile - 1).to(tl.int32), lane.to(tl.int64) * 10, mask=lane < tile)


def test_what_is_stored_comes_from_the_store():
    """Not from memory afterwards, where somebody else may have written by then."""
    mapping = torch.zeros(6, dtype=torch.int64)
    watched = WatchedTensor(mapping, (0,), exact=1, keeps_values=True)
    with watching([watched]):
        launch(_stores_elsewhere_kernel, (1,), mapping, tile=4)
    mapping.fill_(0)
    assert [(t.indices[0].tolist(), t.values.tolist()) for t in watched.writes] == [([0, 1, 2, 4], [0, 10, 20, 30])]


def test_the_reference_has_no_programs():
    witness = Witness()
    one = torch.tensor([0, 1], dtype=torch.int32)
    kernels.compute_slot_mapping(one, torch.tensor([0]), one[None], torch.zeros(3, dtype=torch.int64), block_size=4, witness=witness, backend="torch")
    assert witness.mappings == [MappingWitness(4, 3, None)]
