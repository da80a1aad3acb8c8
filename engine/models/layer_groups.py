"""The KV-cache groups of a model, from its config.json alone: which layers see a window, and how R4.2 groups them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.kv_cache_groups import get_kv_cache_groups
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from engine.errors import InvalidInput
from engine.group_config import GroupConfig
from engine.models.catalog import resolve
from engine.models.tokenizer import read_json

FULL, SLIDING = "full_attention", "sliding_attention"
FLOAT32_BYTES = 4


def layer_name(index: int) -> str:
    """What layer `index` is called in a group."""
    return f"layers.{index}"


def sliding_window_of(name_or_path: str) -> int | None:
    """The window of the model's sliding-window layers in tokens, None where every layer sees all. Raises InvalidInput."""
    config = _config_of(name_or_path)
    return int(config["sliding_window"]) if SLIDING in layer_types(config) else None


def kv_cache_groups_of(name_or_path: str, block_size: int, sliding_window: int | None = None) -> tuple[GroupConfig, ...]:
    """The model's groups with blocks of `block_size` tokens, in the order of vLLM; () for a model with full attention only, which has the one default group.

    `sliding_window` replaces the window of the model, in tokens. Raises InvalidInput for a model that is not there, for layers that are neither full nor
    sliding-window attention, and for a window below 1 or given to a model without windows. vLLM: Attention.get_kv_cache_spec and get_kv_cache_groups; here:
    from the config instead of from the loaded layers.
    """
    config = _config_of(name_or_path)
    types = layer_types(config)
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise InvalidInput(f"{name_or_path} has layers of the type {', '.join(unknown)}, which Pagewalk cannot run; bring a model of attention layers only")
    if sliding_window is not None:
        check_window(name_or_path, sliding_window, has_windows=SLIDING in types)
    if SLIDING not in types:
        return ()
    window = sliding_window or int(config["sliding_window"])
    shape = {"block_size": block_size, "num_kv_heads": _num_kv_heads(config), "head_size": _head_size(config), "dtype_bytes": FLOAT32_BYTES}
    specs: dict[str, KVCacheSpec] = {
        layer_name(index): SlidingWindowSpec(**shape, sliding_window=window) if kind == SLIDING else FullAttentionSpec(**shape)
        for index, kind in enumerate(types)
    }
    return tuple(
        GroupConfig(
            type="sliding_window" if isinstance(group.kv_cache_spec, SlidingWindowSpec) else "full",
            sliding_window=window if isinstance(group.kv_cache_spec, SlidingWindowSpec) else None,
            num_kv_heads=shape["num_kv_heads"],
            head_size=shape["head_size"],
            dtype_bytes=FLOAT32_BYTES,
            layer_names=tuple(group.layer_names),
        )
        for group in get_kv_cache_groups(specs)
    )


def check_window(model_name: str, sliding_window: int, *, has_windows: bool) -> None:
    """Raises InvalidInput for a window that cannot be, or not in this model."""
    if sliding_window < 1:
        raise InvalidInput(f"sliding_window is {sliding_window}, but a token sees at least itself; give 1 or more")
    if not has_windows:
        raise InvalidInput(f"sliding_window is {sliding_window}, but every layer of {model_name} sees all tokens; leave it out, or take the model tiny-swa")


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """“full_attention” or “sliding_attention” per layer (or what else the config names), in the order of the model.

    Newer configs say it in `layer_types`; of older ones the architecture's own rule is applied, as transformers' config classes do.
    """
    named = config.get("layer_types")
    if named:
        return [str(kind) for kind in named]
    num_layers = int(config.get("num_hidden_layers") or 0)
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
    if SLIDING in layer_types(config) and not isinstance(config.get("sliding_window"), int):
        raise InvalidInput(f"{name_or_path} has sliding-window layers, but its config.json says no sliding_window; get its files again")
    return config


def _num_kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
