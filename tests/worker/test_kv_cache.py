"""Rules R8.7, R6.7 and formula F1: the physical cache and what it costs."""

from __future__ import annotations

import pytest
import torch

from engine.errors import InvalidInput
from engine.worker.kv_cache import KVCache, LayerShape, kv_bytes_per_token, num_blocks_for_memory, page_size_bytes
from kernels import Backend


def make_cache(num_blocks: int = 6, block_sizes: tuple[int, ...] = (4,), num_layers: int = 2) -> KVCache:
    layers = [LayerShape(num_kv_heads=2, head_dim=8, group_id=i % len(block_sizes)) for i in range(num_layers)]
    return KVCache(num_blocks=num_blocks, block_sizes=block_sizes, layers=layers, dtype=torch.float32)


def test_f1_opt_13b_takes_800_kib_per_token() -> None:
    assert kv_bytes_per_token(num_layers=40, num_kv_heads=40, head_dim=128, element_size=2) == 800 * 1024


def test_r8_7_page_and_number_of_blocks() -> None:
    assert page_size_bytes(block_size=16, num_kv_heads=3, head_dim=64, element_size=4) == 16 * 3 * (64 + 64) * 4
    # ten pages of 24,576 bytes in each of 30 layers, and a rest that is no whole block id
    assert num_blocks_for_memory(24_576 * 30 * 10 + 24_576 * 29, 24_576, 30) == 10
    assert num_blocks_for_memory(24_576 * 29, 24_576, 30) == 0


def test_shapes_per_layer_follow_the_groups_block_size_and_bytes_add_up() -> None:
    """Half the heads and twice the tokens make the same page; its memory is shared, so it counts once (R8.7)."""
    layers = [LayerShape(2, 8, 0), LayerShape(1, 8, 1)] * 2
    cache = KVCache(num_blocks=6, block_sizes=(4, 8), layers=layers, dtype=torch.float32)
    assert [tuple(t.shape) for t in cache.key_caches] == [(6, 4, 2, 8), (6, 8, 1, 8)] * 2
    assert [t.shape for t in cache.value_caches] == [t.shape for t in cache.key_caches]
    assert cache.num_bytes == 6 * 2 * page_size_bytes(4, 2, 8, 4)


def test_r8_7_the_nth_layers_of_all_groups_share_one_memory_block_by_block() -> None:
    """Ten layers in three groups of 4, 3 and 3: four memories, the last one for a single layer. A page is the same numbers for every layer in it."""
    layers = [LayerShape(2, 8, i % 3) for i in range(10)]
    cache = KVCache(num_blocks=5, block_sizes=(4, 4, 4), layers=layers, dtype=torch.float32)
    assert cache.storage_of == (0, 0, 0, 1, 1, 1, 2, 2, 2, 3)
    assert cache.num_bytes == 5 * 4 * page_size_bytes(4, 2, 8, 4)
    cache.key_caches[4][3] = 7.0
    assert all(bool((cache.key_caches[layer][3] == 7).all()) for layer in (3, 4, 5))
    assert sum(float(t.sum()) for t in cache.key_caches) == 3 * 7 * 4 * 2 * 8  # seen by three layers, in that block alone
    assert not any(t.any() for t in cache.value_caches)


def test_layers_that_share_memory_need_pages_of_one_size() -> None:
    with pytest.raises(InvalidInput, match=r"Layers 0 and 1 are to share memory, but a block of one takes 64 numbers and of the other 256"):
        make_cache(block_sizes=(4, 16))


@pytest.mark.parametrize("backend", ["torch", "interpret"])
def test_r6_7_a_copy_in_shared_memory_is_made_once(backend: str) -> None:
    """Done once per layer, the second time would read what the first has written: a chain 1 -> 2 -> 3 would end with 1 in 3."""
    cache = make_cache(block_sizes=(4, 4, 4), num_layers=6)
    for tensor in {t.data_ptr(): t for t in (*cache.key_caches, *cache.value_caches)}.values():
        tensor.copy_(torch.arange(6.0).view(6, 1, 1, 1).expand_as(tensor))
    cache.copy_blocks([(1, 2), (2, 3)], Backend(backend, "test"))
    for tensor in (*cache.key_caches, *cache.value_caches):
        assert tensor[:, 0, 0, 0].tolist() == [0, 1, 1, 2, 4, 5]


@pytest.mark.parametrize("backend", ["torch", "interpret"])
def test_r6_7_copies_read_all_sources_before_any_destination_is_written(backend: str) -> None:
    cache = make_cache()
    before = []
    for tensors in (cache.key_caches, cache.value_caches):
        for tensor in tensors:
            tensor.normal_()
            before.append(tensor.clone())
    cache.copy_blocks([(1, 2), (2, 3), (3, 1)], Backend(backend, "test"))  # a ring: one after the other would lose a page
    for tensor, old in zip((*cache.key_caches, *cache.value_caches), before, strict=True):
        assert torch.equal(tensor[[2, 3, 1]], old[[1, 2, 3]])
        assert torch.equal(tensor[[0, 4, 5]], old[[0, 4, 5]])


def test_zeroed_blocks_are_zero_and_no_others() -> None:
    cache = make_cache()
    for tensor in (*cache.key_caches, *cache.value_caches):
        tensor.fill_(1)
    cache.zero_blocks([2, 5])
    for tensor in (*cache.key_caches, *cache.value_caches):
        assert tensor.flatten(1).sum(1).tolist() == [64, 64, 0, 64, 64, 0]


def test_impossible_sizes_are_refused_in_one_sentence() -> None:
    with pytest.raises(InvalidInput, match="num_blocks is 0"):
        make_cache(num_blocks=0)
    with pytest.raises(InvalidInput, match="block_size is -3"):
        make_cache(block_sizes=(-3,))
    with pytest.raises(InvalidInput, match="this machine cannot give; ask for fewer blocks"):
        make_cache(num_blocks=10**12)
