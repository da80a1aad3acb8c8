"""What the worker's tests share: a random llama, transformers' own cache as the reference, and a driver that makes scheduler outputs by hand.

The driver knows nothing of `engine.core`: it picks random physical blocks and follows the plan that a test dictates, so that the worker alone is tested.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine.core.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SamplingParams, SchedulerOutput
from engine.trace.events import Emit
from engine.worker.kernel_settings import KernelSettings
from engine.worker.model_runner import ModelRunner
from kernels import Backend

VOCAB_SIZE = 97
TORCH = KernelSettings(Backend("torch", "test"))
ONE_LAYER = KernelSettings(Backend("torch", "test"), (1,))
INTERPRET = KernelSettings(Backend("interpret", "test"))
TOLERANCE = 2e-4


def random_llama(seed: int = 0) -> LlamaForCausalLM:
    """Three layers, six query heads on two KV heads. Weights are large enough that logits differ by several units, so that 2e-4 means something."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def untouched_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with transformers' own attention and mixers. The layers are copied, their weights are shared."""
    twin = copy.deepcopy(model, {id(weight): weight for weight in (*model.parameters(), *model.buffers())})
    for module in twin.modules():
        vars(module).pop("forward", None)  # a Mamba layer's, where a runner has redirected it
    twin.set_attn_implementation("sdpa")
    return twin


@torch.inference_mode()
def dynamic_cache_logits(model: PreTrainedModel, token_ids: list[int], num_prompt_tokens: int) -> torch.Tensor:
    """transformers' way: the prompt in one pass, then token by token through a DynamicCache. float32 [len(token_ids), vocab], the logits at each position."""
    cache = DynamicCache(config=model.config)
    rows = [model(input_ids=torch.tensor([token_ids[:num_prompt_tokens]]), cache=cache, use_cache=True).logits[0]]
    for token_id in token_ids[num_prompt_tokens:]:
        rows.append(model(input_ids=torch.tensor([[token_id]]), cache=cache, use_cache=True).logits[0])
    return torch.cat(rows)


@torch.inference_mode()
def dynamic_cache_generation(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by transformers' own DynamicCache, token by token."""
    cache = DynamicCache(config=model.config)
    inputs, outputs = prompt, []
    for _ in range(num_tokens):
        logits = model(input_ids=torch.tensor([inputs]), cache=cache, use_cache=True).logits[0, -1]
        outputs.append(int(logits.argmax()))
        inputs = [outputs[-1]]
    return outputs


@dataclass
class _Request:
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    known: bool = False
    resumed: bool = False
    outputs: list[int] = field(default_factory=list)


class Driver:
    """Makes SchedulerOutputs for one KV-cache group, runs them, and remembers every logits row and token that came out."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = runner.block_table[0].block_size
        self.requests: dict[str, _Request] = {}
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        """(request, position of the token that was fed) -> logits"""
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.copies: list[tuple[int, int]] = []
        self._random = random.Random(seed)
        self.free = list(range(1, runner.kv_cache.num_blocks))
        self._random.shuffle(self.free)

    def add(self, req_id: str, prompt: list[int], params: SamplingParams | None = None, shared_with: str | None = None, num_shared_blocks: int = 0) -> None:
        """A request; with `shared_with` its first blocks are another request's and count as computed: a prefix-cache hit."""
        request = _Request(list(prompt), len(prompt), params or SamplingParams())
        if shared_with is not None:
            request.block_ids = self.requests[shared_with].block_ids[:num_shared_blocks]
            request.num_computed = num_shared_blocks * self.block_size
        self.requests[req_id] = request

    def finish(self, req_id: str) -> None:
        """The request is gone with the next step; its blocks can be handed out again."""
        self.free += self.requests.pop(req_id).block_ids
        self.finished.add(req_id)

    def preempt(self, req_id: str) -> None:
        """The request loses its blocks and its progress; the next step that schedules it resumes it with a new table."""
        request = self.requests[req_id]
        self.free = request.block_ids + self.free
        request.block_ids, request.num_computed, request.resumed = [], 0, True
        self.preempted.add(req_id)

    def step(self, scheduled: dict[str, int]) -> ModelRunnerOutput:
        """Run one step with these numbers of tokens and take over what was sampled."""
        new, cached = [], CachedRequestData()
        for req_id, count in scheduled.items():
            request = self.requests[req_id]
            needed = -(-(request.num_computed + count) // self.block_size) - len(request.block_ids)
            taken = [self.free.pop() for _ in range(max(needed, 0))]
            request.block_ids = request.block_ids + taken
            if not request.known:
                new.append(NewRequestData(req_id, list(request.token_ids), (list(request.block_ids),), request.num_computed, request.params))
                request.known = True
                continue
            cached.req_ids.append(req_id)
            cached.num_computed_tokens.append(request.num_computed)
            cached.num_output_tokens.append(len(request.outputs))
            if request.resumed:
                cached.resumed_req_ids.add(req_id)
                cached.all_token_ids[req_id] = list(request.token_ids)
                cached.new_block_ids.append((list(request.block_ids),))
                request.resumed = False
            else:
                cached.new_block_ids.append((taken,) if taken else None)
        output = self.runner.execute_model(
            SchedulerOutput(new, cached, dict(scheduled), sum(scheduled.values()), [0], self.finished, self.preempted, self.copies)
        )
        self.finished, self.preempted, self.copies = set(), set(), []
        for req_id, count in scheduled.items():
            request = self.requests[req_id]
            request.num_computed += count
            self.logits[req_id, request.num_computed - 1] = self.runner.last_logits[req_id]
            sampled = [token.token_id for token in output.sampled[req_id]]
            request.outputs += sampled
            request.token_ids += sampled
        return output


def make_runner(
    model: PreTrainedModel,
    *,
    block_size: int = 4,
    num_blocks: int = 96,
    kernel_settings: KernelSettings = TORCH,
    emit: Emit | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 128,
    attention_shares: bool = False,
    kernel_witness: bool = False,
) -> ModelRunner:
    """A runner with one group and room for the tests' requests."""
    return ModelRunner(
        model,
        num_blocks=num_blocks,
        block_sizes=(block_size,),
        max_num_seqs=max_num_seqs,
        max_model_len=128,
        max_num_batched_tokens=max_num_batched_tokens,
        kernel_settings=kernel_settings,
        emit=emit,
        attention_shares=attention_shares,
        kernel_witness=kernel_witness,
    )


def random_prompt(length: int, seed: int) -> list[int]:
    """`length` token ids of the test model's vocabulary."""
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB_SIZE) for _ in range(length)]
