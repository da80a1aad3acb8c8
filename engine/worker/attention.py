"""The attention function that transformers calls in every layer: write the step's keys and values by slot, read all of them by block table.

Everything the function needs for one forward pass travels in a `ForwardContext` through the model's keyword arguments. Nothing is kept on the
model or in the module, so that several engines can use one model object at once.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from engine.errors import EngineError
from engine.worker.attention_shares import AttentionShares, attention_shares
from engine.worker.kernel_witness import LayerLaunch
from engine.worker.kv_cache import KVCache, LayerShape, StateShape
from engine.worker.layer_capture import LayerCapture
from engine.worker.mamba_mixer import StateMetadata, mixers_of, redirect_mixers, state_shapes
from engine.worker.model_check import check_layer_dtypes
from kernels import AttentionMetadata, Backend, Witness, paged_attention, reshape_and_cache

ATTENTION_NAME = "pagewalk_paged"
_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_REFERENCE = Backend("torch", "the reference that the Triton kernels are compared with")
_set_lock = threading.Lock()


@dataclass
class ForwardContext:
    """One forward pass over a flattened ragged batch of `num_tokens` tokens of `num_reqs` requests.

    `attention_metadata[g]`, per KV-cache group: block_table int32 [num_reqs, width], slot_mapping int64 [num_tokens], query_start_loc int32
    [num_reqs + 1], seq_lens int32 [num_reqs] (computed tokens plus this step's). `layer_backends`: whose result goes on, per layer;
    `compared_layers`: where it is compared. `shares_layer`: where the attention of the last queries is added up per block (None: nowhere).
    `wants_witness`: whether what each kernel program reads and writes is kept. `capture`: keeps what one layer is given (None: nobody asks).
    `state_metadata[g]`: of a group of recurrent states, whose blocks have no slots; None of other groups. The pass itself fills `layers_run`,
    `max_difference` (None: nothing was compared), `shares` and `launches`. vLLM: ForwardContext.
    """

    kv_cache: KVCache
    attention_metadata: list[AttentionMetadata]
    layer_backends: Sequence[Backend]
    compared_layers: Sequence[int]
    shares_layer: int | None = None
    wants_witness: bool = False
    capture: LayerCapture | None = None
    state_metadata: Sequence[StateMetadata | None] = ()
    layers_run: list[int] = field(default_factory=list)
    max_difference: float | None = None
    shares: AttentionShares = field(default_factory=lambda: AttentionShares([], []))
    launches: list[LayerLaunch] = field(default_factory=list)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    forward_context: ForwardContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature. `query` [1, num_q_heads, num_tokens, head_dim], `key` and `value` [1, num_kv_heads, num_tokens, head_dim];
    returns [1, num_tokens, num_q_heads, head_dim]. Writes the layer's key and value caches. Where the layer's KV-cache group keeps blocks for
    a window, it is that window that counts (a session may give another than the model's own). Raises EngineError for what paged attention
    cannot express (soft-capped scores, attention sinks, other shapes or precisions than the cache's) and when the model is called without a context."""
    context = forward_context
    if context is None:
        raise EngineError("This model's attention reads a paged KV cache, so it runs only inside an engine; load a second copy to call it directly.")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        name = "softcap" if kwargs.get("softcap") is not None else "s_aux"
        raise EngineError(f"{type(module).__name__} asks for {name}, which the paged attention kernel does not compute; choose another model.")
    layer: int = module.layer_idx  # type: ignore[assignment]
    cache = context.kv_cache
    shape = cache.attention_shape(layer)
    window = _window(layer, sliding_window, shape.sliding_window)
    k, v, q = key[0].transpose(0, 1), value[0].transpose(0, 1), query[0].transpose(0, 1)
    key_cache, value_cache = cache.key_caches[layer], cache.value_caches[layer]
    if not q.dtype == k.dtype == v.dtype == key_cache.dtype:
        check_layer_dtypes(layer, module, key_cache.dtype, queries=q, keys=k, values=v)
    metadata = context.attention_metadata[shape.group_id]
    backend = context.layer_backends[layer]
    witness = Witness() if context.wants_witness and backend.name != _REFERENCE.name else None
    scale = shape.head_dim**-0.5 if scaling is None else scaling
    if context.capture is not None:
        context.capture.keep(layer, q, k, v, key_cache, value_cache, metadata, scale=scale, sliding_window=window, group_id=shape.group_id)
    try:
        reshape_and_cache(k, v, key_cache, value_cache, metadata.slot_mapping, metadata=metadata, witness=witness, backend=backend)
    except ValueError as error:
        if k.shape[1:] == key_cache.shape[2:] == v.shape[1:]:
            raise
        raise EngineError(
            f"Layer {layer} of {type(module).__name__} makes keys of shape {list(k.shape[1:])} and values of shape {list(v.shape[1:])} per token, "
            f"but its KV cache stores [{shape.num_kv_heads}, {shape.head_dim}]; choose a llama-like model."
        ) from error
    output = _attend(q, key_cache, value_cache, metadata, scale, window, backend, witness)
    if witness is not None:
        context.launches += [LayerLaunch(layer, shape.group_id, window, launch) for launch in witness.launches]
    if layer in context.compared_layers:
        slots = metadata.slot_mapping
        difference = max(
            _difference(output, _attend(q, key_cache, value_cache, metadata, scale, window, _REFERENCE)),
            _difference(key_cache.flatten(0, 1)[slots], k),
            _difference(value_cache.flatten(0, 1)[slots], v),
        )
        context.max_difference = max(context.max_difference or 0.0, difference)
    if layer == context.shares_layer:
        context.shares = attention_shares(q, key_cache, metadata, scale=scale, sliding_window=window)
    context.layers_run.append(layer)
    return output.unsqueeze(0), None


def _window(layer: int, of_model: int | None, of_group: int | None) -> int | None:
    """The window in tokens that the layer attends to. A group without a window keeps every block, so any layer may run on it."""
    if of_group is None:
        return of_model
    if of_model is None:
        raise EngineError(
            f"Layer {layer} attends to all tokens, but its KV-cache group keeps only the last {of_group}; the model's config.json contradicts its weights."
        )
    return of_group


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    backend: Backend,
    witness: Witness | None = None,
) -> torch.Tensor:
    return paged_attention(
        query,
        key_cache,
        value_cache,
        metadata.block_table,
        metadata.query_start_loc,
        metadata.seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        metadata=metadata,
        witness=witness,
        backend=backend,
    )


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinity when there is a NaN, which max() would lose."""
    largest = float((a.float() - b.float()).abs().max())
    return largest if largest == largest else float("inf")


def redirect_attention(model: PreTrainedModel) -> None:
    """Make `model` call `paged_attention_forward` in every layer with attention and `paged_mixer_forward` in every Mamba layer. Mutates the model's config and
    its Mamba layers, once; calling it again changes nothing.

    Raises EngineError when the model's attention cannot be redirected or does more than the kernel can, and for layers that the worker cannot run.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    supported = _SUPPORTED_LAYER_TYPES | ({"linear_attention"} if next(mixers_of(model), None) is not None else set())
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - supported)
    if unknown:
        raise EngineError(
            f"{name} has layers of type {', '.join(unknown)}, which the worker cannot run; it runs {', '.join(sorted(_SUPPORTED_LAYER_TYPES))} "
            "and Bamba's Mamba2 layers."
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise EngineError(f"{name} caps its attention scores, which the paged attention kernel does not compute; choose another model.")
    with _set_lock:
        if model.config._attn_implementation == ATTENTION_NAME:
            return
        if not model._can_set_attn_implementation():
            raise EngineError(
                f"The attention of {name} cannot be redirected to a paged KV cache, because the model does not call transformers' attention interface; "
                "choose a llama-, qwen- or gemma-like model."
            )
        AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
        redirect_mixers(model)
        model.set_attn_implementation(ATTENTION_NAME)


def attention_layers_of(model: PreTrainedModel) -> tuple[int, ...]:
    """The layers that have attention, ascending; all others are Mamba layers."""
    config = model.config.get_text_config(decoder=True)
    mamba_layers = state_shapes(model)
    return tuple(layer for layer in range(int(config.num_hidden_layers)) if layer not in mamba_layers)


def layer_shapes(
    model: PreTrainedModel, layer_groups: Sequence[int], sliding_windows: Sequence[int | None], state_groups: Collection[int] = ()
) -> list[LayerShape | StateShape]:
    """What each layer of the model stores, from its config: per token, or one state. `layer_groups`: KV-cache group of every layer; `sliding_windows`: per
    group;
    `state_groups`: those that keep recurrent states. Raises EngineError where a layer is in a group of the other kind."""
    config = model.config.get_text_config(decoder=True)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    states = state_shapes(model)
    for layer, group_id in enumerate(layer_groups):
        if (layer in states) != (group_id in state_groups):
            kinds = ("keeps a recurrent state", "keys and values") if layer in states else ("stores keys and values", "recurrent states")
            raise EngineError(
                f"Layer {layer} of {type(model).__name__} {kinds[0]}, but its KV-cache group {group_id} is for {kinds[1]}; "
                "run it in vLLM V1's engine, with the groups of its config."
            )
    return [
        replace(states[layer], group_id=group_id) if layer in states else LayerShape(num_kv_heads, head_dim, group_id, sliding_windows[group_id])
        for layer, group_id in enumerate(layer_groups)
    ]
