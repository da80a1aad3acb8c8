"""Groups as a scenario names them, the sizes that follow from them (R2.6, R8.7), and what is refused."""

from __future__ import annotations

import pytest

from engine.core.kv_cache_spec import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, MLAAttentionSpec, RSWASpec, SlidingWindowSpec
from engine.errors import InvalidInput
from engine.group_config import GroupConfig, describe, group_specs, kv_cache_spec, resolve_kv_cache_block_sizes
from engine.session_config import SessionConfig

FULL = GroupConfig()
SWA = GroupConfig("sliding_window", sliding_window=8)
MAMBA = GroupConfig("mamba", mamba_cache_mode="align", num_speculative_blocks=1)


def test_no_groups_are_one_full_attention_group() -> None:
    (group,) = group_specs((), 4)
    assert (group.layer_names, group.kv_cache_spec, group.is_eagle_group) == (["layers"], FullAttentionSpec(4), False)


@pytest.mark.parametrize(
    ("group", "spec"),
    [
        (GroupConfig("full", block_size=8, num_kv_heads=2, head_size=3, dtype_bytes=2), FullAttentionSpec(8, 2, 3, 2)),
        (GroupConfig("mla", head_size=576, dtype_bytes=2), MLAAttentionSpec(4, 1, 576, 2)),
        (SWA, SlidingWindowSpec(4, sliding_window=8)),
        (GroupConfig("chunked_local", attention_chunk_size=8), ChunkedLocalAttentionSpec(4, attention_chunk_size=8)),
        (GroupConfig("rswa", rswa_window=4), RSWASpec(4, rswa_window=4)),
        (MAMBA, MambaSpec(4, mamba_cache_mode="align", num_speculative_blocks=1)),
    ],
)
def test_each_type_is_its_spec(group: GroupConfig, spec: object) -> None:
    assert kv_cache_spec(group, 4) == spec


def test_a_latent_instead_of_keys_and_values_makes_smaller_pages() -> None:
    """R8.7: keys and values of both, or one latent. 128 heads of 128 elements against DeepSeek-V3's latent of 512 + 64, 2 bytes each, blocks of 4 tokens."""
    full, mla = GroupConfig("full", num_kv_heads=128, head_size=128, dtype_bytes=2), GroupConfig("mla", head_size=576, dtype_bytes=2)
    pages = [describe(group)["page_size_bytes"] for group in group_specs((full, mla), 4)]
    assert pages == [2 * 4 * 128 * 128 * 2, 4 * 576 * 2]


def test_described_as_plain_data() -> None:
    described = SessionConfig(num_blocks=9, block_size=4, kv_cache_groups=(FULL, SWA, MAMBA)).described()
    assert [g["kind"] for g in described["kv_cache_groups"]] == ["full_attention", "sliding_window", "mamba"]
    assert [g["block_size"] for g in described["kv_cache_groups"]] == [4, 4, 4]
    assert described["kv_cache_groups"][1]["sliding_window"] == 8
    assert described["kv_cache_groups"][2]["mamba_cache_mode"] == "align"
    assert [g["layer_names"] for g in described["kv_cache_groups"]] == [["full.0"], ["sliding_window.1"], ["mamba.2"]]
    assert (described["scheduler_block_size"], described["hash_block_size"]) == (4, 4)


@pytest.mark.parametrize(
    ("sizes", "settings", "expected"),
    [
        ([FullAttentionSpec(16)], {}, (16, 16)),
        ([FullAttentionSpec(4)], {"dcp_world_size": 2}, (8, 8)),
        ([FullAttentionSpec(16), SlidingWindowSpec(24, sliding_window=8)], {}, (48, 8)),
        ([FullAttentionSpec(16), SlidingWindowSpec(24, sliding_window=8)], {"hashing": False}, (48, 48)),
        ([FullAttentionSpec(16), SlidingWindowSpec(8, sliding_window=8)], {"prefix_match_unit": 4}, (16, 4)),
        ([FullAttentionSpec(16), MambaSpec(64, mamba_cache_mode="all")], {}, (64, 64)),
        ([FullAttentionSpec(8), MambaSpec(16, mamba_cache_mode="align")], {"dcp_world_size": 2}, (16, 16)),
        ([FullAttentionSpec(16), MambaSpec(16, mamba_cache_mode="align")], {"prefix_match_unit": 4}, (16, 4)),
    ],
)
def test_block_sizes_by_rule(sizes: list[FullAttentionSpec], settings: dict[str, int], expected: tuple[int, int]) -> None:
    """R2.6, with a cache block size of 16: least common multiple and greatest common divisor, or the former for both."""
    assert resolve_kv_cache_block_sizes(sizes, 16, **settings) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"type": "swa"}, "no group of the type “swa”; choose one of full, mla, sliding_window, chunked_local, mamba, rswa"),
        ({"type": "sliding_window"}, "needs sliding_window"),
        ({"type": "sliding_window", "sliding_window": 0}, "sliding_window is 0, but it must be at least 1"),
        ({"type": "chunked_local"}, "needs attention_chunk_size"),
        ({"type": "rswa", "rswa_window": -1}, "rswa_window is -1"),
        ({"type": "mamba"}, "needs mamba_cache_mode"),
        ({"type": "mamba", "mamba_cache_mode": "some"}, "no mamba_cache_mode “some”; choose one of all, align, none"),
        ({"type": "mamba", "mamba_cache_mode": "all", "num_speculative_blocks": -1}, "cannot be negative"),
        ({"type": "mamba", "mamba_cache_mode": "all", "head_size": 4}, "has no head_size"),
        ({"type": "full", "sliding_window": 8}, "has no sliding_window; leave it out, or take the type sliding_window"),
        ({"type": "full", "block_size": 0}, "block_size is 0, but it must be at least 1"),
    ],
)
def test_impossible_groups(fields: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        GroupConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kv_cache_groups": (FULL, SWA), "prefix_match_unit": 3}, "prefix_match_unit is 3, but it must divide the block size of every group, and 4 is one"),
        ({"prefix_match_unit": 2}, "a single group is hashed by its own blocks of 4 tokens"),
        ({"decode_context_parallel_size": 2, "dcp_rank": 2}, "dcp_rank is 2, but with decode_context_parallel_size 2 the ranks are 0 to 1"),
        ({"decode_context_parallel_size": 0}, "decode_context_parallel_size is 0, but it must be at least 1"),
        ({"hash_block_size": 0}, "hash_block_size is 0, but it must be at least 1"),
    ],
)
def test_impossible_settings(fields: dict[str, object], text: str) -> None:
    """Without groups of its own a model's may still come, so a session asks for the sizes when it begins."""
    with pytest.raises(InvalidInput, match=text):
        SessionConfig(num_blocks=9, block_size=4, **fields).block_sizes()  # type: ignore[arg-type]
