"""Keys split over several programs (Flash-Decoding), with the programs of a GPU, interpreted, against the dense float64 computation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernels
from kernels import Progress, Witness
from kernels.configurations import PROGRAMS_PER_MULTIPROCESSOR, TILES_PER_SPLIT, attention_splits
from kernels.interpreter import launch
from kernels.launch import Launcher
from kernels.metadata import AttentionMetadata, Derived

LENGTHS = {
    "one key": [1],
    "one request": [45],
    "ragged": [3, 70, 1, 33, 16],
    "shorter than the splits": [2, 5],
}


def in_splits(splits: int, tile: int = 4) -> kernels.Backend:
    return kernels.interpreted_like_gpu(tile=tile, splits=splits)


@pytest.mark.parametrize("sliding_window", [None, 1, 5, 33])
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("name", LENGTHS)
def test_equals_dense_attention(batch_of, dense, name, splits, sliding_window):
    """NaN in every slot that no query may see; splits without keys have a share of nothing."""
    batch = batch_of([1] * len(LENGTHS[name]), LENGTHS[name], num_q_heads=6, num_kv_heads=2)
    out = kernels.paged_attention(*batch.arguments, scale=0.9, sliding_window=sliding_window, backend=in_splits(splits))
    torch.testing.assert_close(out.double(), dense(batch, 0.9, sliding_window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 256), (4, 4, 8), (8, 1, 80)])
def test_head_layouts_in_half_precision(batch_of, dense, num_q_heads, num_kv_heads, head_dim, dtype, tolerance):
    batch = batch_of([1, 1], [70, 19], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    out = kernels.paged_attention(*batch.arguments, scale=head_dim**-0.5, backend=in_splits(3, tile=8))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), dense(batch, head_dim**-0.5), atol=tolerance, rtol=tolerance)


def test_requests_without_a_query_and_padding_are_left_alone(batch_of, dense):
    batch = batch_of([1, 0, 1], [21, 9, 30], padding_tokens=0)
    out = torch.full_like(batch.query, 7.0)
    kernels.paged_attention(*batch.arguments, scale=0.3, out=out, backend=in_splits(3))
    torch.testing.assert_close(out.double(), dense(batch, 0.3), atol=2e-6, rtol=1e-5)
    # Three requests, two of them with queries, and a batch of three rows: the third belongs to nobody.
    wide = torch.cat([batch.query, torch.ones(1, 4, 16)])
    out = torch.full_like(wide, 7.0)
    kernels.paged_attention(wide, *batch.arguments[1:], scale=0.3, out=out, backend=in_splits(3))
    torch.testing.assert_close(out[:2].double(), dense(batch, 0.3), atol=2e-6, rtol=1e-5)
    assert (out[2:] == 7.0).all()


def test_out_of_other_strides(batch_of, dense):
    batch = batch_of([1, 1], [21, 30])
    out = torch.zeros(2, 4, 40)[:, :, :16]
    assert kernels.paged_attention(*batch.arguments, scale=0.3, out=out, backend=in_splits(4)) is out
    torch.testing.assert_close(out.double(), dense(batch, 0.3), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("own_account", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 13])
def test_the_splits_of_a_lane_read_its_keys_once(batch_of, own_account, sliding_window):
    """Together they read what the query sees, in logical order and without a key twice; each begins its softmax afresh."""
    batch = batch_of([1, 1, 1], [70, 1, 33], block_size=16)
    witness, progress = Witness(), Progress()
    tiles = in_splits(3).gpu_tiles
    launcher = Launcher(run=launch, interpreted=True, own_account=own_account, gpu_tiles=tiles)
    out = torch.zeros_like(batch.query)
    launcher.paged_attention(*batch.arguments, scale=0.3, sliding_window=sliding_window, out=out, derived=Derived(), witness=witness, progress=progress)
    (told,), (grown,) = witness.launches, progress.launches
    assert (told.grid, told.lanes) == (grown.grid, grown.lanes_per_program) == (3 * 2 * 3, 1)
    for token, length in enumerate([70, 1, 33]):
        for kv_head in range(2):
            shares = [p for p in told.programs if p.tokens == (token,) and p.kv_heads == (kv_head,)]
            oldest = 0 if sliding_window is None else max(0, length - sliding_window)
            seen = [slot for share in shares for slot in share.key_slots_read]
            assert seen == [int(batch.block_table[token, p // 16]) * 16 + p % 16 for p in range(oldest, length)]
            lanes = [lane for lane in grown.lanes if (lane.request, lane.kv_head) == (token, kv_head)]
            assert [lane.split for lane in lanes] == [0, 1, 2]
            assert [tile for lane in lanes for tile in lane.tiles] == list(range(oldest // 4, (length + 3) // 4))
            assert {share.program for share in shares} == {lane.program for lane in lanes if lane.tiles}
            for lane in lanes:
                for row in lane.rows:  # the largest key of a share weighs 1, and its first tile holds 4 keys at most
                    assert all(1.0 <= total <= 4.0 + 1e-5 for total in row.totals[:1])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    splits=st.integers(2, 9),
    tile=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 7, 30]),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_any_split_of_any_lengths(batch_of, lengths, splits, tile, window, block_size):
    batch = batch_of([1] * len(lengths), lengths, block_size=block_size)
    results = [kernels.paged_attention(*batch.arguments, scale=0.25, sliding_window=window, backend=backend) for backend in ("torch", in_splits(splits, tile))]
    torch.testing.assert_close(results[0], results[1], atol=5e-6, rtol=1e-5)


def splits_of(batch, backend, **arguments) -> int:
    with kernels.recorded_launches() as launches:
        kernels.paged_attention(*batch.arguments, scale=0.3, backend=backend, **arguments)
    grid = launches[0].grid
    assert [launch.kernel for launch in launches[1:]] == ["reduce_splits_kernel"] * (len(grid) > 1)
    return grid[1] if len(grid) > 1 else 1


def test_the_host_splits_by_what_it_knows_without_asking_the_gpu(batch_of):
    """The longest request as the metadata gives it, else the width of the block table; a window bounds both. float32 of size 16: tiles of 64 keys."""
    batch = batch_of([1], [3], block_size=16, num_q_heads=2, num_kv_heads=1)
    batch.block_table = torch.nn.functional.pad(batch.block_table, (0, 32 - batch.block_table.shape[1]))
    backend = kernels.interpreted_like_gpu()
    assert splits_of(batch, backend) == 32 * 16 // 64 // TILES_PER_SPLIT == 2
    assert splits_of(batch, backend, sliding_window=300) == 1
    known = AttentionMetadata(
        block_table=batch.block_table,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        max_seq_len=3,
    )
    assert splits_of(batch, backend, metadata=known) == 1
    assert splits_of(batch, "interpret") == 1
    prefill = batch_of([2], [600], block_size=16, num_q_heads=2, num_kv_heads=1)
    assert splits_of(prefill, backend) == 1


@pytest.mark.parametrize(
    ("programs", "max_keys", "splits"),
    [
        (8, 32768, 32),  # 8 KV heads of one request: 256 programs for the 264 places of 132 multiprocessors
        (8, 1024, 4),  # 16 tiles of 64, at least 4 a split
        (8, 255, 1),
        (64 * 8, 32768, 1),  # enough programs already
        (4 * 8, 32768, 8),  # 256 of 264 places
        (0, 32768, 1),
    ],
)
def test_as_many_splits_as_fill_the_gpu(programs, max_keys, splits):
    assert attention_splits(programs, max_keys, 64, 132) == splits


@given(st.integers(1, 5000), st.integers(1, 200_000), st.sampled_from([16, 32, 64, 128]), st.integers(1, 200))
def test_splits_are_never_too_many(programs, max_keys, keys, multiprocessors):
    splits = attention_splits(programs, max_keys, keys, multiprocessors)
    assert splits >= 1
    assert splits == 1 or splits * TILES_PER_SPLIT * keys <= max_keys + keys * TILES_PER_SPLIT
    assert splits == 1 or programs < multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
