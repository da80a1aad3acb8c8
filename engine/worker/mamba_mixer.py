"""Mamba layers over states in pool blocks: what transformers' mixer computes, with each request's state read from one block and written to another.

Projections and norm run over the whole flat batch. The recurrence is transformers' own functions: requests that compute one token and have a state go through
one batched update, all others one by one through the scan over chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.models.bamba.modeling_bamba import (
    BambaMixer,
    causal_conv1d_fn,
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from engine.errors import EngineError
from engine.state_steps import StateStep
from engine.worker.kv_cache import StateShape

if TYPE_CHECKING:
    from engine.worker.attention import ForwardContext

STATE_BACKEND = "torch"
"""What computes states: there is no Triton kernel for it."""


@dataclass(frozen=True)
class StateRequest:
    """One request of the batch in one group of states: its tokens are start..end-1 of the batch, and `steps` says which states they leave behind."""

    start: int
    end: int
    steps: tuple[StateStep, ...]

    @property
    def source_block_id(self) -> int | None:
        return self.steps[0].source_block_id

    @property
    def is_update(self) -> bool:
        """One token on top of a state."""
        return self.end - self.start == 1 and self.source_block_id is not None


class StateMetadata:
    """A batch as one group of states sees it. `updates`: requests with one token and a state, `prefills`: all others, both in the order of the batch.

    On the device, int64: `update_tokens` [num_updates], places in the batch; `sources`, the blocks that are read: those of the updates, then those of the
    prefills that have a state; `destinations`, the blocks that are written, updates first, then step by step. vLLM: Mamba2AttentionMetadata.
    """

    def __init__(self, requests: Sequence[StateRequest], device: torch.device | str = "cpu") -> None:
        self.updates = [request for request in requests if request.is_update]
        self.prefills = [request for request in requests if not request.is_update]
        ordered = [*self.updates, *self.prefills]
        sources = [request.source_block_id for request in ordered if request.source_block_id is not None]
        destinations = [step.block_id for request in ordered for step in request.steps]
        self.update_tokens, self.sources, self.destinations = (
            torch.tensor(values, dtype=torch.int64, device=device) for values in ([request.start for request in self.updates], sources, destinations)
        )


def mixers_of(model: PreTrainedModel) -> Iterator[BambaMixer]:
    """The model's Mamba layers that can run on states in blocks."""
    return (module for module in model.modules() if isinstance(module, BambaMixer))


def state_shapes(model: PreTrainedModel) -> dict[int, StateShape]:
    """What each Mamba layer keeps per request, by layer, in group 0. vLLM: MambaStateShapeCalculator.mamba2_state_shape."""
    return {
        int(mixer.layer_idx): StateShape(
            conv_dim=int(mixer.conv_dim),
            conv_width=int(mixer.conv_kernel_size) - 1,
            num_heads=int(mixer.num_heads),
            head_dim=int(mixer.head_dim),
            state_size=int(mixer.ssm_state_size),
        )
        for mixer in mixers_of(model)
    }


def redirect_mixers(model: PreTrainedModel) -> None:
    """Make every Mamba layer of `model` call `paged_mixer_forward`. Mutates the layers, once; calling it again changes nothing."""
    for mixer in mixers_of(model):
        if "forward" not in vars(mixer):
            mixer.forward = partial(paged_mixer_forward, mixer)


def paged_mixer_forward(
    module: BambaMixer,
    hidden_states: torch.Tensor,
    cache: object = None,
    attention_mask: torch.Tensor | None = None,
    forward_context: ForwardContext | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers' mixer signature. `hidden_states` [1, num_tokens, hidden_size]; returns the same shape. Reads all states that the batch needs, then
    computes, then writes all states that it leaves behind, so that nobody reads what this step writes. Mutates the layer's SSM and convolution states.
    Raises EngineError when the model is called without a context. vLLM: MambaMixer2, of which mode ``align`` copies the running state into its next block
    before the forward pass (preprocess_mamba) and updates it there; here it is read from the one block and written to the other, which leaves the same
    numbers in both.
    """
    context = forward_context
    if context is None:
        raise EngineError(
            "This model's Mamba layers keep their states in a paged cache, so it runs only inside an engine; load another copy to call it directly."
        )
    layer = int(module.layer_idx)
    shape = context.kv_cache.state_shape(layer)
    metadata = context.state_metadata[shape.group_id]
    if metadata is None:
        raise EngineError(f"Layer {layer} keeps a recurrent state, but its KV-cache group {shape.group_id} stores keys and values.")
    ssm_states, conv_states = context.kv_cache.ssm_states[layer], context.kv_cache.conv_states[layer]
    projected = module.in_proj(hidden_states)[0]
    gate, inputs, dt = projected.split([module.intermediate_size, module.conv_dim, module.num_heads], dim=-1)
    # index_select copies, so that what is written below is not seen by who reads
    recurrence = _Recurrence(module, inputs, dt, ssm_states.index_select(0, metadata.sources), conv_states.index_select(0, metadata.sources))
    recurrence.update(metadata)
    recurrence.scan(metadata)
    ssm_states.index_copy_(0, metadata.destinations, torch.cat(recurrence.ssm_left).to(ssm_states.dtype))
    conv_states.index_copy_(0, metadata.destinations, torch.cat(recurrence.conv_left).to(conv_states.dtype))
    output: torch.Tensor = module.out_proj(module.norm(recurrence.output, gate).to(hidden_states.dtype))
    context.layers_run.append(layer)
    return output.unsqueeze(0)


class _Recurrence:
    """One layer's convolution and recurrence over a batch. `inputs` [num_tokens, conv_dim], `dt` [num_tokens, num_heads]; `ssm` and `conv`: copies of the
    states that the batch begins with. Fills `output` [num_tokens, intermediate_size] and, in the order of `StateMetadata.destinations`, the states that are
    left."""

    def __init__(self, module: BambaMixer, inputs: torch.Tensor, dt: torch.Tensor, ssm: torch.Tensor, conv: torch.Tensor) -> None:
        self.module, self.inputs, self.dt, self.ssm, self.conv = module, inputs, dt, ssm, conv
        self.A = -torch.exp(module.A_log.float())
        self.weight = module.conv1d.weight.squeeze(1)
        self.output = inputs.new_empty(inputs.shape[0], module.intermediate_size)
        self.ssm_left: list[torch.Tensor] = []
        self.conv_left: list[torch.Tensor] = []

    def update(self, metadata: StateMetadata) -> None:
        """One token each, all at once. The SSM states are changed in place; they are copies."""
        m, count = self.module, len(metadata.updates)
        if not count:
            return
        ssm, conv, tokens = self.ssm[:count], self.conv[:count], metadata.update_tokens
        window = torch.cat([conv, self.inputs[tokens].unsqueeze(2)], dim=2)
        convolved = (window * self.weight).sum(2)  # for one token a grouped convolution costs six times as much
        if m.conv1d.bias is not None:
            convolved = convolved + m.conv1d.bias
        x, b, c = self._split(m.act(convolved))
        heads = (m.num_heads, m.head_dim)
        scanned = mamba2_selective_state_update(
            ssm,
            x.reshape(count, *heads),
            self.dt[tokens].unsqueeze(2).expand(count, *heads),
            self.A[:, None, None].expand(*heads, m.ssm_state_size),
            b,
            c,
            m.D[:, None].expand(heads),
            z=None,
            dt_bias=m.dt_bias[:, None].expand(heads),
            dt_softplus=True,
        )
        self.output[tokens] = scanned.reshape(count, -1)
        self.ssm_left.append(ssm)
        self.conv_left.append(window[:, :, 1:])

    def scan(self, metadata: StateMetadata) -> None:
        """Many tokens, or a first one, request by request; from state to state where several are left behind."""
        place = len(metadata.updates)
        for request in metadata.prefills:
            ssm, conv = None, self.inputs.new_zeros(1, *self.conv.shape[1:])
            if request.source_block_id is not None:
                ssm, conv = self.ssm[place : place + 1], self.conv[place : place + 1]
                place += 1
            self._scan_request(request, ssm, conv)

    def _scan_request(self, request: StateRequest, ssm: torch.Tensor | None, conv: torch.Tensor) -> None:
        m, start = self.module, request.start
        width = conv.shape[2]
        history = torch.cat([conv, self.inputs[start : request.end].T.unsqueeze(0)], dim=2)
        convolved = causal_conv1d_fn(history, self.weight, m.conv1d.bias, activation=m.activation)[0, :, width:].T
        x, b, c = self._split(convolved)
        first = 0
        for step in request.steps:
            end = first + step.num_tokens - step.num_source_tokens
            scanned, ssm = mamba2_chunk_scan(
                x[first:end].reshape(1, -1, m.num_heads, m.head_dim),
                self.dt[None, start + first : start + end],
                self.A,
                b[None, first:end],
                c[None, first:end],
                chunk_size=min(m.chunk_size, end - first),
                D=m.D,
                z=None,
                return_final_states=True,
                dt_bias=m.dt_bias,
                dt_softplus=True,
                initial_states=ssm,
                dt_limit=m.time_step_limit,
            )
            assert ssm is not None
            self.output[start + first : start + end] = scanned[0].flatten(1)
            self.ssm_left.append(ssm)
            self.conv_left.append(history[:, :, end : end + width])
            first = end

    def _split(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs, B and C of the recurrence: [n, intermediate_size] and twice [n, n_groups, ssm_state_size]."""
        m = self.module
        groups = m.n_groups * m.ssm_state_size
        x, b, c = torch.split(convolved, [m.intermediate_size, groups, groups], dim=-1)
        return x, b.reshape(-1, m.n_groups, m.ssm_state_size), c.reshape(-1, m.n_groups, m.ssm_state_size)
