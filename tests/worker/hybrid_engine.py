"""Scheduler and worker over a model with Mamba layers, with everything spoilt that nobody may read, and small random models to run on it.

Every page is not-a-number until it is written, again when its block is handed out, and as soon as a block is given back that no hit can find: whoever reads a
state or a slot too many says something else than transformers. The recorder checks every invariant after every event.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from transformers import BambaConfig, BambaForCausalLM, DynamicCache, PreTrainedModel

from engine.capture import StateCapture
from engine.core.kv_cache_groups import get_kv_cache_groups
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheGroupSpec, KVCacheSpec, MambaSpec
from engine.group_config import resolve_kv_cache_block_sizes
from engine.trace.events import BlocksAllocated, BlocksFreed, BlocksSkipped, Cause, CauseKind, CopyQueued, Event, RequestAdmitted, TraceStarted
from engine.trace.frame import Trace, TraceHeader
from engine.trace.recorder import Recorder
from engine.worker.kernel_settings import KernelSettings
from engine.worker.kv_cache import StateShape
from engine.worker.mamba_mixer import state_shapes
from tests.worker.engine_loop import EngineLoop
from tests.worker.harness import TOLERANCE, TORCH, VOCAB_SIZE

MAX_MODEL_LEN = 192


@dataclass(frozen=True)
class Size:
    """A small model: its layers as letters, A for attention and M for Mamba, and the sizes of a state."""

    layers: str = "AMAMAM"
    kv_heads: int = 4
    head_dim: int = 8
    n_heads: int = 4
    d_head: int = 8
    d_state: int = 2
    d_conv: int = 4
    n_groups: int = 1
    chunk_size: int = 4


def random_bamba(size: Size, seed: int = 0) -> BambaForCausalLM:
    """Weights large enough that logits differ by several units, decays and steps of all kinds, so that a state matters for many tokens."""
    torch.manual_seed(seed)
    hidden = size.n_heads * size.d_head
    config = BambaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=len(size.layers),
        attn_layer_indices=[i for i, kind in enumerate(size.layers) if kind == "A"],
        num_attention_heads=2 * size.kv_heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        mamba_n_heads=size.n_heads,
        mamba_d_head=size.d_head,
        mamba_d_state=size.d_state,
        mamba_d_conv=size.d_conv,
        mamba_n_groups=size.n_groups,
        mamba_expand=1,
        mamba_chunk_size=size.chunk_size,
        max_position_embeddings=256,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = BambaForCausalLM(config)
    with torch.no_grad():
        for layer, kind in enumerate(size.layers):
            if kind == "M":
                mixer = model.model.layers[layer].mamba
                mixer.A_log.copy_(torch.log(torch.rand(size.n_heads) * 0.5 + 0.02))
                mixer.dt_bias.copy_(torch.randn(size.n_heads) * 0.5)
                mixer.D.copy_(torch.randn(size.n_heads) * 0.3)
                mixer.conv1d.weight.copy_(torch.randn_like(mixer.conv1d.weight) * 0.5)
    return model.eval()


def groups_of(model: PreTrainedModel, block_size: int, mode: str, state_block_size: int | None = None) -> list[KVCacheGroupSpec]:
    """The model's groups as R4.2 makes them. `mode`: of its states; ``none`` has one block for the whole request (R3.42). `state_block_size`: tokens from
    state to state, None for those of an attention block."""
    config = model.config
    states = state_shapes(model)
    full = FullAttentionSpec(block_size, num_kv_heads=config.num_key_value_heads, head_size=config.head_dim)

    def spec_of(layer: int) -> KVCacheSpec:
        shape = states.get(layer)
        if not isinstance(shape, StateShape):
            return full
        return MambaSpec(MAX_MODEL_LEN if mode == "none" else state_block_size or block_size, shapes=(shape.ssm_shape, shape.conv_shape), mamba_cache_mode=mode)

    return get_kv_cache_groups({f"layers.{layer}": spec_of(layer) for layer in range(config.num_hidden_layers)})


class HybridEngine(EngineLoop):
    """`mode`: ``align`` or ``all`` with prefix caching, ``none`` without. `unit`: hits end on multiples of so many tokens (prefix_match_unit)."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        mode: str = "align",
        block_size: int = 4,
        unit: int | None = None,
        state_block_size: int | None = None,
        budget: int = 256,
        num_blocks: int = 96,
        settings: KernelSettings = TORCH,
        max_num_seqs: int = 6,
        kernel_witness: bool = False,
    ) -> None:
        caching = mode != "none"
        groups = groups_of(model, block_size, mode, state_block_size)
        sizes = [group.kv_cache_spec.block_size for group in groups]
        specs = [group.kv_cache_spec for group in groups]
        scheduler_size, hash_size = resolve_kv_cache_block_sizes(specs, state_block_size or block_size, prefix_match_unit=unit, hashing=caching)
        super().__init__(
            model,
            groups,
            num_blocks=num_blocks,
            budget=budget,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            caching=caching,
            settings=settings,
            kernel_witness=kernel_witness,
            hash_block_size=hash_size,
            scheduler_block_size=scheduler_size,
            block_size=state_block_size or block_size,
        )
        self.trace = Trace(TraceHeader({}, {}, {}, {}, {}, 0, {}), [])
        capture = StateCapture(self.scheduler, block_size, self.requests, {})
        capture.worker = self.runner
        self.recorder = Recorder(self.trace, capture, max_frames=100_000)
        self.freed_by: dict[int, str | None] = {}
        self.inherited: set[tuple[str | None, str | None]] = set()
        """(who gave a block back, who got it)."""
        self.emit(TraceStarted(cause=Cause(CauseKind.SCENARIO), num_blocks=num_blocks, block_size=block_size, group_block_sizes=sizes))

    def emit(self, event: Event) -> None:
        super().emit(event)
        self.recorder.emit(event)
        if isinstance(event, BlocksFreed | BlocksSkipped):
            self.freed_by |= dict.fromkeys((*event.prepended, *event.appended), event.request_id)
            self.spoil(event.prepended)  # they have no hash, so that nobody will ask for what is in them
            if not self.caching:
                self.spoil(event.appended)
        elif isinstance(event, BlocksAllocated):
            self.inherited |= {(self.freed_by[b], event.request_id) for b in event.block_ids if b in self.freed_by}
            self.spoil(event.block_ids)
        elif isinstance(event, CopyQueued):
            self.spoil([event.destination_block_id])

    def begin_op(self, op: str) -> None:
        if op == "schedule":
            self.recorder.begin_step()
        self.recorder.begin_op(op)

    def hits(self) -> list[tuple[str | None, int]]:
        """Request and length of each hit with which a request was admitted."""
        return [(e.request_id, e.num_computed_tokens) for e in self.of_kind(RequestAdmitted)]


@torch.inference_mode()
def plain_logits(reference: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """transformers' own forward pass over the whole sequence, nothing cached: float32 [len(token_ids), vocab]."""
    logits: torch.Tensor = reference(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def cached_generation(reference: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by transformers' own cache, token by token. Bamba counts positions from the call's first token, so they are given, as `generate`
    gives them."""
    cache = DynamicCache(config=reference.config)
    inputs, start, outputs = prompt, 0, []
    for _ in range(num_tokens):
        positions = torch.arange(start, start + len(inputs)).unsqueeze(0)
        logits = reference(input_ids=torch.tensor([inputs]), position_ids=positions, cache=cache, use_cache=True).logits[0, -1]
        outputs.append(int(logits.argmax()))
        start, inputs = start + len(inputs), [outputs[-1]]
    return outputs


def worst_difference(engine: HybridEngine, reference: PreTrainedModel) -> float:
    """Largest difference between any logits row of the run and transformers'; infinity for not-a-number. Also checks that the tokens are the likeliest."""
    worst = 0.0
    for req_id, rows in engine.logits.items():
        request = engine.requests[req_id]
        token_ids = list(request.all_token_ids)
        expected = plain_logits(reference, token_ids)
        assert {position for position, _ in rows} >= set(range(request.num_prompt_tokens - 1, len(token_ids) - 1)), req_id
        for position, row in rows:
            difference = float((row - expected[position]).abs().max())
            worst = max(worst, difference if difference == difference else float("inf"))
        if worst <= TOLERANCE:
            likeliest = expected[request.num_prompt_tokens - 1 : -1].argmax(-1).tolist()
            assert request.output_token_ids == likeliest, req_id
    return worst


def tokens(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB_SIZE) for _ in range(length)]
