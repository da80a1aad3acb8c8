"""The swap space (the paper, section 4.5): whole pages of all layers, both ways, byte by byte."""

from __future__ import annotations

import pytest
import torch

from engine.errors import EngineError
from engine.worker.kv_cache import KVCache, LayerShape
from engine.worker.swap_space import SwapSpace


@pytest.fixture
def kv_cache() -> KVCache:
    cache = KVCache(num_blocks=6, block_sizes=(4,), layers=[LayerShape(2, 8), LayerShape(1, 4)], dtype=torch.float32)
    torch.manual_seed(0)
    for tensor in (*cache.key_caches, *cache.value_caches):
        tensor.normal_()
    return cache


def pages(cache: KVCache, block_id: int) -> list[torch.Tensor]:
    return [tensor[block_id].clone() for tensor in (*cache.key_caches, *cache.value_caches)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_pages_come_back_into_other_blocks(kv_cache: KVCache) -> None:
    swap_space = SwapSpace(kv_cache, num_cpu_blocks=3)
    first, second, untouched = pages(kv_cache, 4), pages(kv_cache, 0), pages(kv_cache, 5)
    swap_space.swap_out([(4, 2), (0, 0)])
    for tensor in (*kv_cache.key_caches, *kv_cache.value_caches):
        tensor[[0, 4]] = torch.nan
    swap_space.swap_in([(2, 0), (0, 1)])
    assert same(pages(kv_cache, 0), first)
    assert same(pages(kv_cache, 1), second)
    assert same(pages(kv_cache, 5), untouched)
    assert all(bool(torch.isnan(tensor[4]).all()) for tensor in kv_cache.key_caches)


def test_the_swap_space_counts_its_own_blocks(kv_cache: KVCache) -> None:
    """One page of 4 tokens: 2 * 4 * (2 * 8 + 1 * 4) numbers of 4 bytes."""
    cache = SwapSpace(kv_cache, num_cpu_blocks=3).cpu_cache
    assert cache is not None
    assert cache.num_bytes == 3 * 2 * 4 * (2 * 8 + 1 * 4) * 4
    assert {tensor.device.type for tensor in cache.key_caches} == {"cpu"}


@pytest.mark.parametrize(
    ("num_cpu_blocks", "direction", "pairs", "message"),
    [
        (0, "swap_out", [(0, 0)], "no swap space; give num_cpu_blocks"),
        (3, "swap_out", [(0, 3)], "Block 3 of the swap space .* 0 to 2"),
        (3, "swap_out", [(6, 0)], "Block 6 of the pool .* 0 to 5"),
        (3, "swap_in", [(3, 0)], "Block 3 of the swap space"),
        (3, "swap_in", [(0, -1)], "Block -1 of the pool"),
        (3, "swap_in", [(0, 1), (1, 1)], "two pages cannot go to one block"),
    ],
)
def test_what_cannot_be_swapped_is_refused_before_anything_is_written(
    kv_cache: KVCache, num_cpu_blocks: int, direction: str, pairs: list[tuple[int, int]], message: str
) -> None:
    swap_space = SwapSpace(kv_cache, num_cpu_blocks)
    before = [page for block_id in range(6) for page in pages(kv_cache, block_id)]
    with pytest.raises(EngineError, match=message):
        getattr(swap_space, direction)(pairs)
    assert same([page for block_id in range(6) for page in pages(kv_cache, block_id)], before)


def test_nothing_to_swap_needs_no_swap_space(kv_cache: KVCache) -> None:
    swap_space = SwapSpace(kv_cache, num_cpu_blocks=0)
    swap_space.swap_out([])
    swap_space.swap_in([])
    assert swap_space.cpu_cache is None
