"""The KV-cache groups of a model, from its config.json alone: which layers see a window, which have a state, and how R4.2 groups them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.kv_cache_groups import get_kv_cache_groups
from engine.core.kv_cache_spec import AttentionSpec, FullAttentionSpec, KVCacheGroupSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from engine.errors import InvalidInput
from engine.group_config import GroupConfig
from engine.models.catalog import resolve
from engine.models.config_check import config_problem
from engine.models.mamba_state import MAMBA_MODEL_TYPES, check_block_size, check_cache_mode, mamba_state_shapes, smallest_block_size
from engine.models.tokenizer import read_json

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
FLOAT32_BYTES = 4


def layer_name(index: int) -> str:
    """What layer `index` is called in a group."""
    return f"layers.{index}"


def sliding_window_of(name_or_path: str) -> int | None:
    """The window of the model's sliding-window layers in tokens, None where every layer sees all. Raises InvalidInput."""
    config = _config_of(name_or_path)
    return int(config["sliding_window"]) if SLIDING in layer_types(config) else None


def kv_cache_groups_of(
    name_or_path: str,
    block_size: int,
    sliding_window: int | None = None,
    *,
    mamba_cache_mode: str | None = None,
    enable_prefix_caching: bool = True,
    max_model_len: int | None = None,
) -> tuple[GroupConfig, ...]:
    """The model's groups with blocks of `block_size` tokens, in the order of vLLM; () for a model with full attention only, which has the one default group.

    `sliding_window` replaces the window of the model, in tokens. `mamba_cache_mode` None: `align` with prefix caching, `none` without; `none` has one state per
    request, in a block of `max_model_len` tokens (None: of all the model's positions), R3.42. Raises InvalidInput for a model that is not there, for layers
    of a kind that Pagewalk cannot run, for a window below 1 or given to a model without windows, for a mode that does not go with the model or with prefix
    caching, and for a block that is too small for a state. vLLM: Attention.get_kv_cache_spec, MambaBase.get_kv_cache_spec and get_kv_cache_groups; here:
    from the config instead of from the loaded layers.
    """
    config = _config_of(name_or_path)
    types = layer_types(config)
    unknown = sorted(set(types) - {FULL, SLIDING, LINEAR})
    if unknown or (LINEAR in types and config.get("model_type") not in MAMBA_MODEL_TYPES):
        what = ", ".join(unknown or [LINEAR])
        raise InvalidInput(f"{name_or_path} has layers of the type {what}, which Pagewalk cannot run; bring a model of attention layers only, or a Bamba model")
    if LINEAR in types and set(types) == {LINEAR}:
        raise InvalidInput(f"{name_or_path} has no layer with attention, so there are no keys and values to page; bring a model with some, or take tiny-hybrid")
    if sliding_window is not None:
        check_window(name_or_path, sliding_window, has_windows=SLIDING in types)
    check_cache_mode(name_or_path, mamba_cache_mode, enable_prefix_caching=enable_prefix_caching, has_states=LINEAR in types)
    if set(types) <= {FULL}:
        return ()
    num_kv_heads, head_size = _num_kv_heads(config), _head_size(config)
    full = FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype_bytes=FLOAT32_BYTES)
    spec_of: dict[str, KVCacheSpec] = {FULL: full}
    if SLIDING in types:
        window = sliding_window or int(config["sliding_window"])
        spec_of[SLIDING] = SlidingWindowSpec(
            block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype_bytes=FLOAT32_BYTES, sliding_window=window
        )  # fmt: skip
    if LINEAR in types:
        check_block_size(name_or_path, block_size, smallest_block_size(config, num_kv_heads, head_size))
        mode = mamba_cache_mode or ("align" if enable_prefix_caching else "none")
        size = (max_model_len or int(config["max_position_embeddings"])) if mode == "none" else block_size
        spec_of[LINEAR] = MambaSpec(block_size=size, shapes=mamba_state_shapes(config), dtype_bytes=FLOAT32_BYTES, mamba_cache_mode=mode)
    return tuple(_group_config(group, block_size) for group in get_kv_cache_groups({layer_name(i): spec_of[kind] for i, kind in enumerate(types)}))


def _group_config(group: KVCacheGroupSpec, block_size: int) -> GroupConfig:
    spec, layer_names = group.kv_cache_spec, tuple(group.layer_names)
    if isinstance(spec, MambaSpec):
        return GroupConfig(
            type="mamba",
            block_size=None if spec.block_size == block_size else spec.block_size,
            mamba_cache_mode=spec.mamba_cache_mode,
            dtype_bytes=spec.dtype_bytes,
            layer_names=layer_names,
            state_shapes=spec.shapes,
            page_size_padded=spec.page_size_padded,
        )
    assert isinstance(spec, AttentionSpec), "a model's other layers are attention layers"
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    return GroupConfig(
        type="full" if window is None else "sliding_window",
        sliding_window=window,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype_bytes=spec.dtype_bytes,
        layer_names=layer_names,
    )


def has_mamba_layers(name_or_path: str) -> bool:
    """Whether some layer of the model has a recurrent state instead of keys and values. Raises InvalidInput."""
    return LINEAR in layer_types(_config_of(name_or_path))


def attention_layers_of(name_or_path: str) -> tuple[int, ...]:
    """The layers that have keys and values, ascending; the others keep a recurrent state. Raises InvalidInput."""
    return tuple(index for index, kind in enumerate(layer_types(_config_of(name_or_path))) if kind != LINEAR)


def smallest_block_size_of(name_or_path: str) -> int:
    """The fewest tokens per block that the model can have: 1, or as many as a recurrent state takes room. Raises InvalidInput."""
    config = _config_of(name_or_path)
    return smallest_block_size(config, _num_kv_heads(config), _head_size(config)) if LINEAR in layer_types(config) else 1


def check_window(model_name: str, sliding_window: int, *, has_windows: bool) -> None:
    """Raises InvalidInput for a window that cannot be, or not in this model."""
    if sliding_window < 1:
        raise InvalidInput(f"sliding_window is {sliding_window}, but a token sees at least itself; give 1 or more")
    if not has_windows:
        raise InvalidInput(f"sliding_window is {sliding_window}, but every layer of {model_name} sees all tokens; leave it out, or take the model tiny-swa")


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """“full_attention”, “sliding_attention” or “linear_attention” per layer (or what else the config names), in the order of the model.

    Newer configs say it in `layer_types`; of older ones the architecture's own rule is applied, as transformers' config classes do.
    """
    named = config.get("layer_types")
    if named:
        return [str(kind) for kind in named]
    num_layers = int(config.get("num_hidden_layers") or 0)
    if config.get("model_type") == "bamba":
        with_attention = config.get("attn_layer_indices") or []
        return [FULL if index in with_attention else LINEAR for index in range(num_layers)]
    if config.get("sliding_window") is None:
        return [FULL] * num_layers
    kind = str(config.get("model_type") or "")
    if kind == "gemma3_text":
        pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
        return [SLIDING if (index + 1) % pattern else FULL for index in range(num_layers)]
    if kind == "mistral":
        return [SLIDING] * num_layers
    if kind in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        first = int(config.get("max_window_layers", 28))
        return [SLIDING if index >= first else FULL for index in range(num_layers)]
    return [FULL] * num_layers


def _config_of(name_or_path: str) -> dict[str, Any]:
    config = read_json(resolve(name_or_path)[1] / "config.json")
    problem = config_problem(config)
    if problem is not None:
        raise InvalidInput(f"{name_or_path} {problem}")
    if SLIDING in layer_types(config):
        window = config.get("sliding_window")
        if not isinstance(window, int):
            raise InvalidInput(f"{name_or_path} has sliding-window layers, but its config.json says no sliding_window; get its files again")
        if window < 1:
            raise InvalidInput(f"{name_or_path} says the sliding_window {window} in its config.json, but a token sees at least itself; get its files again")
    return config


def _num_kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
