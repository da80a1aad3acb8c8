"""The KV-cache groups of a model with Mamba layers, from its config.json (R4.2), and what its states ask of the settings (R2.6, R3.40 to R3.44)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.core.kv_cache_spec import KVCacheGroupSpec, MambaSpec
from engine.core.output import SamplingParams
from engine.errors import InvalidInput
from engine.group_config import describe
from engine.model_groups import layer_groups_of, with_groups_of_model
from engine.models import has_mamba_layers, kv_cache_groups_of, smallest_block_size_of
from engine.models.layer_groups import layer_types
from engine.models.mamba_state import mamba_state_shapes
from engine.models.tiny_tokenizer import TINY_HYBRID_DIR
from engine.session import RequestSpec, Session, SessionConfig


def groups(**settings: Any) -> list[KVCacheGroupSpec]:
    config = SessionConfig(**{"num_blocks": 24, "block_size": 4, **settings})
    return with_groups_of_model(config, "tiny-hybrid").group_specs()


def folder_with(path: Path, **config: Any) -> str:
    """tiny-hybrid's folder without its weights, and with another config where `config` says so."""
    path.mkdir()
    own = json.loads((TINY_HYBRID_DIR / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**own, **config}))
    (path / "tokenizer.json").write_bytes((TINY_HYBRID_DIR / "tokenizer.json").read_bytes())
    (path / "model.safetensors").write_bytes(b"")
    return str(path)


def test_r4_2_three_layers_of_attention_and_three_of_states_are_two_groups() -> None:
    full, mamba = groups()
    assert (full.layer_names, mamba.layer_names) == (["layers.0", "layers.2", "layers.4"], ["layers.1", "layers.3", "layers.5"])
    assert layer_groups_of([full, mamba]) == [0, 1, 0, 1, 0, 1]
    assert [describe(group)["kind"] for group in (full, mamba)] == ["full_attention", "mamba"]


def test_r8_7_a_states_page_is_padded_to_that_of_keys_and_values() -> None:
    """4 tokens * 8 heads * 32 numbers * 2 (keys and values) * 4 bytes are 8192; a state has 1024 + 432 numbers."""
    full, mamba = groups()
    assert (full.kv_cache_spec.page_size_bytes, mamba.kv_cache_spec.page_size_bytes) == (8192, 8192)
    assert isinstance(mamba.kv_cache_spec, MambaSpec)
    assert mamba.kv_cache_spec.shapes == ((4, 32, 8), (144, 3))
    assert [group.kv_cache_spec.page_size_bytes for group in groups(block_size=16)] == [32768, 32768]


def test_the_shapes_of_a_state_are_those_that_transformers_keeps() -> None:
    import torch
    from transformers import BambaConfig, BambaForCausalLM, DynamicCache

    # Sizes that are all different, an automatic head size, and two groups of B and C.
    config = BambaConfig(
        vocab_size=32, hidden_size=48, intermediate_size=32, num_hidden_layers=2, attn_layer_indices=[0], num_attention_heads=3, num_key_value_heads=3,
        mamba_n_heads=6, mamba_d_state=10, mamba_d_conv=5, mamba_expand=2, mamba_n_groups=2, mamba_chunk_size=4,
    )  # fmt: skip
    cache: Any = DynamicCache(config=config)
    with torch.no_grad():
        BambaForCausalLM(config).eval()(torch.arange(1, 9)[None], cache=cache, use_cache=True)
    ssm, conv = mamba_state_shapes(json.loads(config.to_json_string()))
    assert tuple(cache.layers[1].recurrent_states[0].shape[1:]) == ssm == (6, 16, 10)
    assert conv == (96 + 2 * 2 * 10, 4)
    assert cache.layers[1].conv_states[0].shape[1] == conv[0]  # how many inputs it keeps beyond the 4 that are needed is its own affair
    assert layer_types(json.loads(config.to_json_string())) == config.layers_block_type == ["full_attention", "linear_attention"]


def test_r3_42_r3_43_the_mode_follows_prefix_caching_unless_it_is_named() -> None:
    def mode_and_size(**settings: Any) -> tuple[str, int]:
        spec = groups(**settings)[1].kv_cache_spec
        assert isinstance(spec, MambaSpec)
        return spec.mamba_cache_mode, spec.block_size

    assert mode_and_size() == ("align", 4)
    assert mode_and_size(mamba_cache_mode="all") == ("all", 4)
    assert mode_and_size(enable_prefix_caching=False, max_model_len=64) == ("none", 64)
    assert mode_and_size(enable_prefix_caching=False) == ("none", 1024)  # all positions of the model


def test_r2_6_hits_end_on_blocks_and_hashes_may_be_finer() -> None:
    def sizes(**settings: Any) -> tuple[int, int]:
        return with_groups_of_model(SessionConfig(num_blocks=24, block_size=8, **settings), "tiny-hybrid").block_sizes()

    assert sizes() == (8, 8)
    assert sizes(prefix_match_unit=2) == (8, 2)
    with pytest.raises(InvalidInput, match=r"^prefix_match_unit is 3, but it must divide the block size of every group, and 8 is one of them$"):
        sizes(prefix_match_unit=3)


def test_a_finer_unit_is_refused_for_a_model_of_one_group() -> None:
    """Settings that do not know their model yet cannot say so."""
    config = SessionConfig(num_blocks=24, block_size=8, prefix_match_unit=2)
    with pytest.raises(InvalidInput, match=r"^prefix_match_unit is 2, but a single group is hashed by its own blocks of 8 tokens; leave it out$"):
        with_groups_of_model(config, "tiny")


@pytest.mark.parametrize(
    ("changes", "smallest"),
    [
        ({}, 4),  # 4 * 32 * 8 numbers of state, 8 * 32 numbers of keys per token
        ({"mamba_d_state": 9}, 5),
        ({"num_key_value_heads": 2}, 16),
        ({"mamba_d_conv": 12, "mamba_d_state": 1}, 6),  # 130 channels * 11 inputs: the convolution's state is the larger one
    ],
)
def test_the_smallest_block_has_room_for_a_state_beside_keys_and_values(changes: dict[str, Any], smallest: int, tmp_path: Path) -> None:
    model = folder_with(tmp_path / "m", **changes)
    assert smallest_block_size_of(model) == smallest
    assert kv_cache_groups_of(model, smallest)[1].state_shapes == mamba_state_shapes(json.loads((tmp_path / "m" / "config.json").read_text()))
    with pytest.raises(InvalidInput, match=rf"must have room for a recurrent state, which takes as much as {smallest} tokens; give {smallest} or more$"):
        kv_cache_groups_of(model, smallest - 1)


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    def session(model: str, **settings: Any) -> Session:
        config = SessionConfig(**{"num_blocks": 24, "block_size": 4, **settings})
        request = RequestSpec("A", (1, 2, 3), SamplingParams(max_tokens=1, forced_token_ids=(1,)))
        return Session(config, (request,), vocabulary=str, model_name=model)

    with pytest.raises(InvalidInput, match=r"^there is no mamba_cache_mode “some”; choose one of all, align, none$"):
        session("tiny-hybrid", mamba_cache_mode="some")
    with pytest.raises(InvalidInput, match=r"^mamba_cache_mode is all, but tiny has no Mamba layers; leave it out, or take the model tiny-hybrid$"):
        session("tiny", mamba_cache_mode="all")
    with pytest.raises(InvalidInput, match=r"^mamba_cache_mode is all, but without a model there are no Mamba layers to tell it; name a group with this mode$"):
        session("none", mamba_cache_mode="all")
    with pytest.raises(InvalidInput, match=r"^mamba_cache_mode is none, but with prefix caching some states must be kept; choose align or all, or turn"):
        session("tiny-hybrid", mamba_cache_mode="none")
    with pytest.raises(
        InvalidInput, match=r"^mamba_cache_mode is align, but without prefix caching no state is kept for other requests; leave it out, or turn"
    ):
        session("tiny-hybrid", mamba_cache_mode="align", enable_prefix_caching=False)
    with pytest.raises(InvalidInput, match=r"^sliding_window is 4, but every layer of tiny-hybrid sees all tokens; leave it out, or take the model tiny-swa$"):
        session("tiny-hybrid", sliding_window=4)
    other = folder_with(tmp_path / "m", model_type="lfm2", layer_types=["linear_attention", "full_attention"])
    with pytest.raises(InvalidInput, match=r"has layers of the type linear_attention, which Pagewalk cannot run; bring a model of attention layers only, or a"):
        session(other)


def test_only_a_model_with_states_is_said_to_have_some() -> None:
    assert has_mamba_layers("tiny-hybrid")
    assert not has_mamba_layers("tiny")
    assert not has_mamba_layers("tiny-swa")
    assert (smallest_block_size_of("tiny"), smallest_block_size_of("tiny-swa")) == (1, 1)
