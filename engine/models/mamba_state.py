"""What a Mamba2 layer remembers of a sequence: two tensors of a fixed size, whatever the length, and what room they need in a block. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.kv_cache_spec import ceil_div
from engine.errors import InvalidInput

MAMBA_MODEL_TYPES = ("bamba",)
"""Values of `model_type` in config.json whose “linear_attention” layers are Mamba2 layers as Bamba has them."""


def mamba_state_shapes(config: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one layer's SSM state, [heads, head size, numbers per channel], and of its convolution's state, [channels, last inputs], in elements.

    vLLM: MambaStateShapeCalculator.mamba2_state_shape; here: on one rank, in the order in which they lie in a block (keys' memory, values' memory)."""
    num_heads, state_size, groups = int(config["mamba_n_heads"]), int(config["mamba_d_state"]), int(config.get("mamba_n_groups") or 1)
    width = int(config["mamba_expand"] * config["hidden_size"])
    named = config.get("mamba_d_head", "auto")
    head_dim = width // num_heads if named in (None, "auto") else int(named)
    return (num_heads, head_dim, state_size), (width + 2 * groups * state_size, int(config["mamba_d_conv"]) - 1)


def smallest_block_size(config: Mapping[str, Any], num_kv_heads: int, head_size: int) -> int:
    """The fewest tokens per block whose keys take as much memory as an SSM state and whose values take as much as a convolution's state.

    vLLM compares whole pages, and raises block_size by itself (Platform.update_block_size_for_backend); here: keys and values have memory of their own, and
    the block size is the reader's, so it is refused."""
    ssm, conv = (_num_elements(shape) for shape in mamba_state_shapes(config))
    return ceil_div(max(ssm, conv), num_kv_heads * head_size)


def check_block_size(model_name: str, block_size: int, smallest: int) -> None:
    """Raises InvalidInput when a state does not fit into a block."""
    if block_size < smallest:
        raise InvalidInput(f"block_size is {block_size}, but {state_does_not_fit(model_name, smallest)}")


def state_does_not_fit(model_name: str, smallest: int) -> str:
    """What there is to say of a block that is too small for a state."""
    return f"a block of {model_name} must have room for a recurrent state, which takes as much as {smallest} tokens; give {smallest} or more"


def check_cache_mode(model_name: str, mamba_cache_mode: str | None, *, enable_prefix_caching: bool, has_states: bool) -> None:
    """Raises InvalidInput for a mode given to a model without Mamba layers, and for one that does not go with prefix caching, or with its absence."""
    problem = cache_mode_problem(model_name, mamba_cache_mode, enable_prefix_caching=enable_prefix_caching, has_states=has_states)
    if problem is not None:
        raise InvalidInput(f"mamba_cache_mode is {mamba_cache_mode}, but {problem}")


def cache_mode_problem(model_name: str, mamba_cache_mode: str | None, *, enable_prefix_caching: bool, has_states: bool) -> str | None:
    """What is wrong with the mode, None where nothing is. vLLM: MambaModelConfig.verify_and_update_config, which changes the mode with a warning instead."""
    if mamba_cache_mode is None:
        return None
    if not has_states:
        return f"{model_name} has no Mamba layers; leave it out, or take the model tiny-hybrid"
    if mamba_cache_mode == "none" and enable_prefix_caching:
        return "with prefix caching some states must be kept; choose align or all, or turn enable_prefix_caching off"
    if mamba_cache_mode != "none" and not enable_prefix_caching:
        return "without prefix caching no state is kept for other requests; leave it out, or turn enable_prefix_caching on"
    return None


def _num_elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
