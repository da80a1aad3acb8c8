"""What a model must be like for the worker, and what is said when it is not, or when its memory runs out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from engine.errors import EngineError, InvalidInput

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def check_dtype(model: PreTrainedModel) -> None:
    """Raises InvalidInput for weights in a precision that no kernel computes in."""
    if model.dtype not in SUPPORTED_DTYPES:
        known = ", ".join(map(dtype_name, SUPPORTED_DTYPES))
        raise InvalidInput(f"The weights of {type(model).__name__} are {dtype_name(model.dtype)}, but the kernels compute in {known}; load it in one of these.")


def check_windows(model: PreTrainedModel, layer_groups: Sequence[int], sliding_windows: Sequence[int | None]) -> None:
    """Raises InvalidInput where a layer that sees all tokens is in a group that keeps only a window of them, as far as the model's config tells, and for a
    window below 1."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    for window in sliding_windows:
        if window is not None and window < 1:
            raise InvalidInput(f"A KV-cache group has a window of {window} tokens, but a token sees at least itself; give 1 or more.")
    for layer, (kind, group_id) in enumerate(zip(kinds, layer_groups, strict=False)):
        window = sliding_windows[group_id]
        if kind == "full_attention" and window is not None:
            raise InvalidInput(
                f"Layer {layer} of {type(model).__name__} sees all tokens, but its KV-cache group {group_id} keeps only the last {window}; "
                "a window goes with sliding_attention layers, so put the layer in a group without one."
            )


def check_layer_dtypes(layer: int, module: torch.nn.Module, cache: torch.dtype, **tensors: torch.Tensor) -> None:
    """Raises EngineError when an attention layer makes its queries, keys or values in another precision than the cache has."""
    for name, tensor in tensors.items():
        if tensor.dtype != cache:
            raise EngineError(
                f"Layer {layer} of {type(module).__name__} makes {name} in {dtype_name(tensor.dtype)}, but the KV cache is {dtype_name(cache)}, as the model "
                "says of itself; load all of its weights in one precision."
            )


@contextmanager
def memory_in_words(num_tokens: int, device: torch.device) -> Iterator[None]:
    """Around a forward pass over `num_tokens` tokens: raises EngineError where the device, or the CPU, has no memory left."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU's allocator has no type of its own
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        where = "GPU" if device.type == "cuda" else "machine"
        raise EngineError(
            f"The {where} has no memory left for a step of {num_tokens} tokens; give fewer blocks (num_blocks), smaller steps (max_num_batched_tokens) or a "
            "smaller model."
        ) from error
