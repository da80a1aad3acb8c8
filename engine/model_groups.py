"""From a session's settings and its model to the KV-cache groups of the run (R4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.core.kv_cache_spec import KVCacheGroupSpec
from engine.errors import InvalidInput
from engine.session_base import NO_MODEL
from engine.session_config import SessionConfig


def with_groups_of_model(config: SessionConfig, model_name: str) -> SessionConfig:
    """The settings with the groups of the model's layers as `model_groups`; none for a model with full attention only, and for a run without a model.

    Reads the model's config.json and no weights. Raises InvalidInput for an unknown model, for a `sliding_window`, `mamba_cache_mode` or `block_size` that the
    model cannot take, and for a `prefix_match_unit` that its groups cannot.
    """
    if model_name == NO_MODEL:
        if config.sliding_window is not None:
            raise InvalidInput(f"sliding_window is {config.sliding_window}, but without a model there is no window to replace; name a group with this window")
        if config.mamba_cache_mode is not None:
            mode = config.mamba_cache_mode
            raise InvalidInput(f"mamba_cache_mode is {mode}, but without a model there are no Mamba layers to tell it; name a group with this mode")
        found = replace(config, model_groups=())
    else:
        from engine.models import kv_cache_groups_of

        groups = kv_cache_groups_of(
            model_name,
            config.block_size,
            config.sliding_window,
            mamba_cache_mode=config.mamba_cache_mode,
            enable_prefix_caching=config.enable_prefix_caching,
            max_model_len=config.max_model_len,
        )
        found = replace(config, model_groups=groups)
    found.block_sizes()
    return found


def layer_groups_of(groups: Sequence[KVCacheGroupSpec]) -> list[int]:
    """The group of every layer, in the order of the model, from groups that name the layers “layers.0”, “layers.1” and so on."""
    by_layer = {int(name.rsplit(".", 1)[1]): group_id for group_id, group in enumerate(groups) for name in group.layer_names}
    return [by_layer[layer] for layer in range(len(by_layer))]
