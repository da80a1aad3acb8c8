"""What a model's config.json must say for Pagewalk to read it: numbers where numbers belong. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "vocab_size")
_STATE_SIZES = ("mamba_n_heads", "mamba_d_state", "mamba_d_conv", "hidden_size", "num_attention_heads", "max_position_embeddings")
"""What the size of a Mamba2 layer's state is worked out from, besides `mamba_expand`."""


def config_problem(config: Mapping[str, Any]) -> str | None:
    """What is wrong with the numbers and lists in a config.json, as the end of a sentence that begins with the model; None: nothing that shows.

    What is absent is right where the architecture has a default of its own. vLLM: ModelConfig, which leaves that to transformers.
    """
    return next(_problems(config), None)


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    for name in _SIZES:
        if config.get(name) is not None and not _is_size(config[name]):
            yield _says(config, name, "a whole number from 1 on")
    types = config.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(isinstance(kind, str) for kind in types)):
        yield _says(config, "layer_types", "a list with the kind of each layer")
    with_attention = config.get("attn_layer_indices")
    if with_attention is not None and not (isinstance(with_attention, list) and all(_is_number(layer) for layer in with_attention)):
        yield _says(config, "attn_layer_indices", "a list with the numbers of the layers that have attention")
    if config.get("model_type") != "bamba":
        return
    for name in _STATE_SIZES:
        if not _is_size(config.get(name)):
            yield _says(config, name, "a whole number from 1 on, which decides how large a recurrent state is")
    expand, head_dim, groups = config.get("mamba_expand"), config.get("mamba_d_head"), config.get("mamba_n_groups")
    if isinstance(expand, bool) or not isinstance(expand, int | float) or not 0 < expand < 1e6:
        yield _says(config, "mamba_expand", "a number above 0, which decides how large a recurrent state is")
    if head_dim not in (None, "auto") and not _is_size(head_dim):
        yield _says(config, "mamba_d_head", "“auto” or a whole number from 1 on")
    if groups is not None and not _is_size(groups):
        yield _says(config, "mamba_n_groups", "a whole number from 1 on")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _says(config: Mapping[str, Any], name: str, wanted: str) -> str:
    value = f"the {name} {str(config[name])[:40]!r}" if config.get(name) is not None else f"no {name}"
    return f"says {value} in its config.json, which must be {wanted}; get its files again"
