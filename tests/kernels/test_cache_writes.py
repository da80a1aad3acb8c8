"""reshape_and_cache and copy_blocks, slot by slot against plain Python."""

from __future__ import annotations

import pytest
import torch

import kernels

CPU_BACKENDS = ["torch", "interpret"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.parametrize("backend", CPU_BACKENDS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_each_token_lands_in_its_slot_and_nowhere_else(backend, block_size, dtype):
    """R8.5: a token with slot -1 is padding and writes nothing."""
    num_slots = 16 * block_size
    chosen = torch.randperm(num_slots, generator=torch.Generator().manual_seed(block_size))[:7].tolist()
    chosen[2] = chosen[5] = -1
    key, value = torch.randn(9, 3, 5).to(dtype), torch.randn(9, 3, 5).to(dtype)  # two rows of padding that nobody names
    key_cache, value_cache = torch.randn(16, block_size, 3, 5).to(dtype), torch.randn(16, block_size, 3, 5).to(dtype)
    expected_key, expected_value = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(chosen):
        if slot >= 0:
            expected_key[slot // block_size, slot % block_size] = key[token]
            expected_value[slot // block_size, slot % block_size] = value[token]
    kernels.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor(chosen), backend=backend)
    assert torch.equal(key_cache, expected_key)
    assert torch.equal(value_cache, expected_value)


def test_views_of_a_fused_projection_and_interleaved_caches(backend):
    fused = torch.randn(2, 8, 16)
    both = torch.zeros(4, 2, 4, 2, 16)
    kernels.reshape_and_cache(fused[:, 4:6], fused[:, 6:8], both[:, 0], both[:, 1], torch.tensor([5, 12]), backend=backend)
    assert torch.equal(both[1, 0, 1], fused[0, 4:6])
    assert torch.equal(both[3, 1, 0], fused[1, 6:8])
    assert both.count_nonzero() == 2 * 4 * 16


def test_empty_and_all_padding_write_nothing(backend):
    key_cache, value_cache = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    rows = torch.ones(3, 1, 8)
    kernels.reshape_and_cache(rows[:0], rows[:0], key_cache, value_cache, torch.empty(0, dtype=torch.int64), backend=backend)
    kernels.reshape_and_cache(rows, rows, key_cache, value_cache, torch.full((3,), kernels.PAD_SLOT_ID), backend=backend)
    assert key_cache.count_nonzero() == value_cache.count_nonzero() == 0


def test_write_refuses_what_does_not_fit(backend):
    cache = torch.zeros(2, 4, 1, 8)
    with pytest.raises(ValueError, match="3 tokens"):
        kernels.reshape_and_cache(torch.ones(2, 1, 8), torch.ones(2, 1, 8), cache, cache.clone(), torch.zeros(3).long(), backend=backend)
    with pytest.raises(ValueError, match=r"slot_mapping is torch\.int32"):
        kernels.reshape_and_cache(torch.ones(2, 1, 8), torch.ones(2, 1, 8), cache, cache.clone(), torch.zeros(2).int(), backend=backend)
    half = torch.ones(2, 1, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"torch\.float16.*torch\.float32"):
        kernels.reshape_and_cache(half, half, cache, cache.clone(), torch.zeros(2).long(), backend=backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([[1, 4]], id="copy-on-write"),
        pytest.param([[1, 4], [1, 5], [2, 6]], id="one source, two destinations"),
        pytest.param([[1, 2], [2, 3], [3, 4]], id="chain"),
        pytest.param([[3, 4], [2, 3], [1, 2]], id="chain backwards"),
        pytest.param([[1, 2], [2, 1]], id="swap"),
        pytest.param([[1, 2], [2, 3], [3, 1]], id="ring"),
    ],
)
def test_r6_7_sources_are_read_before_destinations_are_written(backend, pairs, dtype):
    keys = [torch.randn(8, 4, 2, 3).to(dtype) for _ in range(3)]
    values = [torch.randn(8, 4, 2, 3).to(dtype) for _ in range(3)]
    before_keys, before_values = [cache.clone() for cache in keys], [cache.clone() for cache in values]
    kernels.copy_blocks(keys, values, torch.tensor(pairs), backend=backend)
    came_from = list(range(8))
    for source, destination in pairs:
        came_from[destination] = source
    for after, before in zip(keys + values, before_keys + before_values, strict=True):
        for block, origin in enumerate(came_from):
            assert torch.equal(after[block], before[origin])


def test_r6_7_holds_when_the_pages_do_not_fit_one_program(backend):
    """3 pages of 2^19 elements are two interpreted programs: the second may not read what the first wrote."""
    cache = torch.randn(4, 2**10, 2, 2**8)
    before = cache.clone()
    kernels.copy_blocks([cache], [cache.new_zeros(4, 1)], torch.tensor([[0, 1], [1, 2], [2, 3]]), backend=backend)
    assert torch.equal(cache, before[[0, 0, 1, 2]])


def test_layers_may_have_pages_of_different_sizes(backend):
    keys = [torch.randn(4, 2, 2, 3), torch.randn(4, 2, 1, 7)]
    values = [torch.randn(4, 2, 2, 3), torch.randn(4, 2, 1, 7)]
    expected = [cache[1].clone() for cache in keys + values]
    kernels.copy_blocks(keys, values, torch.tensor([[1, 3]]), backend=backend)
    for cache, page in zip(keys + values, expected, strict=True):
        assert torch.equal(cache[3], page)


def test_interleaved_caches_are_copied_without_touching_their_neighbours(backend):
    both = torch.randn(4, 2, 2, 1, 3)
    before = both.clone()
    kernels.copy_blocks([both[:, 0]], [both[:, 1]], torch.tensor([[1, 3]]), backend=backend)
    assert torch.equal(both[3], before[1])
    assert torch.equal(both[:3], before[:3])


def test_no_pairs_and_no_layers_copy_nothing(backend):
    cache = torch.randn(4, 2, 1, 3)
    before = cache.clone()
    kernels.copy_blocks([cache], [cache.clone()], torch.empty(0, 2, dtype=torch.int64), backend=backend)
    kernels.copy_blocks([], [], torch.tensor([[0, 1]]), backend=backend)
    assert torch.equal(cache, before)


def test_copy_refuses_what_does_not_fit(backend):
    cache = torch.zeros(4, 2, 1, 3)
    with pytest.raises(ValueError, match=r"block_pairs is torch\.int32"):
        kernels.copy_blocks([cache], [cache.clone()], torch.tensor([[0, 1]], dtype=torch.int32), backend=backend)
    with pytest.raises(ValueError, match="1 key and 0 value"):
        kernels.copy_blocks([cache], [], torch.tensor([[0, 1]]), backend=backend)
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.copy_blocks([cache.transpose(1, 3)], [cache.transpose(1, 3)], torch.tensor([[0, 1]]), backend=backend)


def test_caches_must_be_dense_in_their_last_dimension(backend):
    cache = torch.zeros(2, 4, 1, 16)[..., ::2]
    with pytest.raises(ValueError, match="stride 1"):
        kernels.reshape_and_cache(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache, cache, torch.zeros(1).long(), backend=backend)
