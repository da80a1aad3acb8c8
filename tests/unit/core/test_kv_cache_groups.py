"""R4.2: the groups that real vLLM 0.27.0 made of the same layers (recorded from its get_kv_cache_groups; fp16, 8 KV heads of 64, blocks of 16)."""

from __future__ import annotations

import pytest

from engine.core.kv_cache_groups import get_kv_cache_groups
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from engine.errors import InvalidInput

FULL = FullAttentionSpec(16, num_kv_heads=8, head_size=64, dtype_bytes=2)


def window(size: int = 512, num_kv_heads: int = 8) -> SlidingWindowSpec:
    return SlidingWindowSpec(16, num_kv_heads=num_kv_heads, head_size=64, dtype_bytes=2, sliding_window=size)


STATE = MambaSpec(16, shapes=((100,),), dtype_bytes=2, mamba_cache_mode="align")

RECORDED: dict[str, tuple[list[KVCacheSpec], list[tuple[list[int], int]]]] = {
    "10 full, 20 window": (
        [FULL if i % 3 == 0 else window() for i in range(30)],
        [(list(range(0, 30, 3)), 16), (list(range(1, 30, 3)), 16), (list(range(2, 30, 3)), 16)],
    ),
    "Gemma 3: 15 window, 3 full": (
        [FULL if i % 6 == 5 else window() for i in range(18)],
        [([0, 6, 12], 16), ([1, 7, 13], 16), ([2, 8, 14], 16), ([3, 9, 15], 16), ([4, 10, 16], 16), ([5, 11, 17], 16)],
    ),
    "12 window, 13 full: padding is cheaper": (
        [window() if i % 2 == 0 and i < 24 else FULL for i in range(25)],
        [(list(range(0, 24, 2)), 16), ([*range(1, 24, 2), 24], 16)],
    ),
    "one type": ([FULL] * 4, [([0, 1, 2, 3], 16)]),
    "2 full, 3 window": ([FULL, window(), FULL, window(), window()], [([0, 2], 16), ([1, 4], 16), ([3], 16)]),
    "half the heads, twice the tokens": ([FULL, window(num_kv_heads=4)] * 2, [([0, 2], 16), ([1, 3], 32)]),
    "states padded": ([FULL, STATE, STATE, FULL], [([0, 3], 16), ([1, 2], 16)]),
    "two windows": ([FULL, window(8), window(16)] * 2, [([0, 3], 16), ([1, 4], 16), ([2, 5], 16)]),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_groups_are_vllm_s(name: str) -> None:
    layers, expected = RECORDED[name]
    groups = get_kv_cache_groups({f"l{i}": spec for i, spec in enumerate(layers)})
    assert [([int(layer[1:]) for layer in group.layer_names], group.kv_cache_spec.block_size) for group in groups] == expected
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {32768}


def test_pages_that_cannot_be_made_equal_are_named() -> None:
    odd = FullAttentionSpec(16, num_kv_heads=3, head_size=64, dtype_bytes=2)
    with pytest.raises(InvalidInput, match=r"layer l1 has pages of 12288 bytes, of which the largest page, 32768 bytes, is no multiple"):
        get_kv_cache_groups({"l0": window(), "l1": odd})
    with pytest.raises(InvalidInput, match="no layer with a KV cache"):
        get_kv_cache_groups({})
