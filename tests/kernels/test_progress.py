"""Online softmax as the kernel tells it, tile by tile, against softmax in float64 over the keys so far (Milakov and Gimelshein, "Online normalizer calculation
for softmax", algorithm 3; here in base 2), and launches with the programs of a GPU."""

from __future__ import annotations

import math

import pytest
import torch

import kernels
from kernels import Progress, Witness
from kernels.progress import NOTHING_SEEN

BATCHES = {
    "one decode": ([1], [23]),
    "chunk after a cached prefix": ([5], [14]),
    "prefill and decode mixed": ([5, 1, 8, 1, 3], [5, 12, 21, 1, 4]),
    "a request without queries": ([2, 0, 1], [6, 5, 9]),
    "longer than one query block": ([70, 1], [75, 40]),
}
BACKENDS = {"interpret": "interpret", "tiles of 4": kernels.interpreted_like_gpu(tile=4), "as on a GPU": kernels.interpreted_like_gpu()}


def expected(batch, request: int, token: int, q_head: int, end: int, scale: float, window: int | None) -> tuple[float, float]:
    """Maximum (base 2) and total of one query over the request's keys before `end`; nothing seen: no total is expected."""
    keys = batch.keys[request]
    position = keys.shape[0] - (int(batch.query_start_loc[request + 1]) - token)
    oldest = 0 if window is None else max(0, position - window + 1)
    seen = keys[oldest : min(position + 1, end), q_head * keys.shape[1] // batch.query.shape[1]].double()
    if len(seen) == 0:
        return NOTHING_SEEN, math.nan
    scores = seen @ batch.query[token, q_head].double() * scale * math.log2(math.e)
    return float(scores.max()), float(torch.exp2(scores - scores.max()).sum())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BATCHES)
def test_maxima_and_totals_after_each_tile(batch_of, dense, name, backend, window):
    batch = batch_of(*BATCHES[name], num_q_heads=6, num_kv_heads=2)
    progress, witness = Progress(), Witness()
    out = kernels.paged_attention(*batch.arguments, scale=0.3, sliding_window=window, progress=progress, witness=witness, backend=BACKENDS[backend])
    torch.testing.assert_close(out.double(), dense(batch, 0.3, window), atol=2e-6, rtol=1e-5)
    (told,) = progress.launches
    assert sorted((row.token, row.q_head) for lane in told.lanes for row in lane.rows) == [
        (t, h) for t in range(int(batch.query_start_loc[-1])) for h in range(6)
    ]
    read = {(p.program, p.lane): p for p in witness.launches[0].programs}
    assert len(read) == len(told.lanes)
    for lane in told.lanes:
        seen = read[lane.program, lane.lane]
        assert (seen.tokens, seen.kv_heads) == (lane.tokens, (lane.kv_head,))
        first_key = 0 if window is None else max(0, lane.first_position - window + 1)
        end_key = lane.first_position + len(lane.tokens)
        assert len(seen.key_slots_read) == end_key - first_key
        assert lane.tiles == tuple(range(first_key // told.tile_size, -(-end_key // told.tile_size)))
        for row in lane.rows:
            for tile, maximum, total in zip(lane.tiles, row.maxima, row.totals, strict=True):
                maximum_so_far, total_so_far = expected(batch, lane.request, row.token, row.q_head, (tile + 1) * told.tile_size, 0.3, window)
                if maximum_so_far == NOTHING_SEEN:
                    assert maximum == pytest.approx(NOTHING_SEEN)
                else:
                    assert maximum == pytest.approx(maximum_so_far, abs=1e-5)
                    assert total == pytest.approx(total_so_far, rel=1e-5)


def test_tiles_as_small_as_wanted(batch_of):
    batch = batch_of([1], [23])
    progress = Progress()
    kernels.paged_attention(*batch.arguments, scale=0.3, progress=progress, backend=kernels.interpreted_like_gpu(tile=4))
    assert [lane.tiles for lane in progress.launches[0].lanes] == [(0, 1, 2, 3, 4, 5)] * 2


def test_the_reference_has_no_tiles(batch_of):
    progress = Progress()
    kernels.paged_attention(*batch_of([1], [7]).arguments, scale=0.3, progress=progress, backend="torch")
    assert progress.launches == [None]


def test_launches_are_recorded_with_grid_and_constants(batch_of):
    """One lane per program and as many query blocks as a GPU's host reserves without waiting for it: n // block_q + 1 per request; interpreted all in one."""
    batch = batch_of([5, 1], [14, 9])
    arrays = {"block_size": 4, "slot_mapping": torch.zeros(6, dtype=torch.int64)}
    like_gpu = kernels.interpreted_like_gpu()
    with kernels.recorded_launches() as launches:
        for backend in ("interpret", like_gpu, "torch"):
            kernels.paged_attention(*batch.arguments, scale=0.3, sliding_window=5, backend=backend)
        kernels.compute_slot_mapping(batch.query_start_loc, torch.arange(6), batch.block_table, **arrays, backend=like_gpu)
        kernels.reshape_and_cache(*[torch.zeros(6, 2, 16)] * 2, batch.key_cache, batch.value_cache, torch.arange(6), backend=like_gpu)
        kernels.copy_blocks([batch.key_cache], [batch.value_cache], torch.tensor([[1, 2]]), backend=like_gpu)
    kernels.paged_attention(*batch.arguments, scale=0.3, backend="interpret")  # nobody asked
    shapes = [(launch.kernel, launch.grid, launch.lanes) for launch in launches]
    assert shapes == [
        ("paged_attention_kernel", (1,), 4),
        ("paged_attention_kernel", (4,), 1),
        ("slot_mapping_kernel", (3,), 1),
        ("reshape_and_cache_kernel", (6,), 1),
        ("copy_pages_kernel", (1, 1), 1),
    ]
    assert launches[1].constants["SLIDING_WINDOW"] == 5
    assert launches[1].constants["GROUP"] == 2


@pytest.mark.parametrize(("wish", "message"), [({"tile": 6}, "tile of 6 keys"), ({"tile": 0}, "tile of 0 keys"), ({"splits": 0}, "0 splits")])
def test_impossible_tiles_are_refused(wish, message):
    with pytest.raises(ValueError, match=message):
        kernels.interpreted_like_gpu(**wish)
