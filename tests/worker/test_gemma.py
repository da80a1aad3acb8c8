"""Gemma 3 270M with its windows of 512 tokens: past the window, with what it let go spoilt and used by another request, against transformers' own cache.

Every page is not-a-number until it is written, and again from the moment its block leaves a window. 15 layers with a window and 3 without make six groups of
three layers (R4.2).
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from engine.core.output import SamplingParams
from engine.core.request import Request
from engine.models import kv_cache_groups_of, load_model
from engine.models.tiny_tokenizer import read_passages
from engine.session import RequestSpec, Session, SessionConfig
from engine.trace.events import AttentionComputed, BlocksAllocated, BlocksSkipped, PrefixLookup, RequestPreempted, RequestScheduled, TokenSampled
from engine.worker.kernel_settings import choose_kernel_settings
from tests.worker.harness import dynamic_cache_generation, untouched_copy
from tests.worker.test_sliding_window import WindowEngine

pytestmark = [pytest.mark.weights("gemma3-270m"), pytest.mark.timeout(600)]

MODEL = "gemma3-270m"
WINDOW = 512
BLOCK_SIZE = 16


@cache
def long_prompt(num_tokens: int) -> list[int]:
    """The passages one after the other."""
    return load_model(MODEL).tokenizer.encode_prompt("\n\n".join(read_passages().values()))[:num_tokens]


@cache
def reference() -> PreTrainedModel:
    torch.set_num_threads(1)
    return untouched_copy(load_model(MODEL).model)


@cache
@torch.inference_mode()
def transformers_way(prompt: tuple[int, ...], num_tokens: int, positions: tuple[int, ...]) -> tuple[list[int], dict[int, torch.Tensor]]:
    """(greedy continuation, logits by position): the prompt in one pass with logits at `positions` only, for a vocabulary of 262,144 is wide; then token by
    token through a DynamicCache, which keeps 512 tokens where a layer has a window."""
    model, past = reference(), DynamicCache(config=reference().config)
    output = model(input_ids=torch.tensor([prompt]), cache=past, use_cache=True, logits_to_keep=torch.tensor(positions))
    logits = dict(zip(positions, output.logits[0], strict=True))
    said = [int(logits[len(prompt) - 1].argmax())]
    while len(said) < num_tokens:
        position = len(prompt) + len(said) - 1
        logits[position] = model(input_ids=torch.tensor([said[-1:]]), cache=past, use_cache=True).logits[0, -1]
        said.append(int(logits[position].argmax()))
    return said, logits


class GemmaEngine(WindowEngine):
    """Scheduler and worker on Gemma's six groups."""

    def __init__(self, num_blocks: int, *, caching: bool, layers: tuple[int, ...] = ()) -> None:
        settings = choose_kernel_settings("torch", layers, num_layers=18)
        super().__init__(num_blocks=num_blocks, budget=256, caching=caching, settings=settings, model=MODEL, block_size=BLOCK_SIZE)

    def assert_same_as_transformers(self) -> None:
        def said(request: Request) -> tuple[list[int], dict[int, torch.Tensor]]:
            prompt = tuple(request.prompt_token_ids)
            in_prompt = tuple(sorted({position for position, _ in self.logits[request.request_id] if position < len(prompt)}))
            return transformers_way(prompt, request.sampling_params.max_tokens, in_prompt)

        self.assert_says(said)


@cache
def long_run() -> GemmaEngine:
    """A: 620 tokens in chunks of 256, then 24 more; once its windows have let go, B comes and lives on what they left. A alone needs 234 of the pool's 238
    blocks before the first window moves (39 in each of six groups), B another 24."""
    run = GemmaEngine(239, caching=False)
    run.add("A", long_prompt(620), 24)
    run.run(3)
    run.add("B", long_prompt(40), 20)
    run.run()
    return run


def test_r4_2_fifteen_layers_with_a_window_and_three_without_are_six_groups_of_three() -> None:
    groups = kv_cache_groups_of(MODEL, BLOCK_SIZE)
    assert [(group.type, group.sliding_window, len(group.layer_names)) for group in groups] == [("sliding_window", WINDOW, 3)] * 5 + [("full", None, 3)]
    assert groups[5].layer_names == ("layers.5", "layers.11", "layers.17")
    assert sorted(name for group in groups for name in group.layer_names) == sorted(f"layers.{layer}" for layer in range(18))


def test_644_tokens_with_what_the_windows_left_spoilt_and_used_by_another_request() -> None:
    run = long_run()
    assert sorted(run.finished) == ["A", "B"]
    assert (run.finished["A"].num_tokens, run.finished["B"].num_tokens) == (644, 60)
    assert ("A", "B") in run.inherited, "no block of A's windows went to B"
    assert not any(isinstance(event, RequestPreempted) for event in run.events)
    run.assert_same_as_transformers()


def test_the_prompt_went_through_in_chunks_of_256() -> None:
    chunks = [event.num_scheduled_tokens for event in long_run().events if isinstance(event, RequestScheduled) and event.request_id == "A"]
    assert chunks == [256, 256, 108] + [1] * 23


def test_r3_2_each_window_lets_go_of_all_blocks_before_the_first_token_that_it_still_reads() -> None:
    """R3.1: with n tokens computed the next one reads positions from n - 511 on, so the first (n - 511) // 16 blocks go; the full group keeps all."""
    skipped: dict[int | None, list[int]] = {}
    for event in long_run().events:
        if isinstance(event, BlocksSkipped) and event.request_id == "A":
            skipped.setdefault(event.group_id, []).extend(event.logical_indices)
    num_computed = 642  # before the last step, whose token is the 643rd; the 644th is never computed
    expected = list(range((num_computed - WINDOW + 1) // BLOCK_SIZE))
    assert {group_id: sorted(indices) for group_id, indices in skipped.items()} == dict.fromkeys(range(5), expected)


@pytest.mark.parametrize(("caching", "layers"), [(True, (0, 5)), (False, ())], ids=["caching, layers 0 and 5 through Triton", "no caching"])
def test_a_batch_of_ragged_requests(caching: bool, layers: tuple[int, ...]) -> None:
    """Four requests of different lengths in one batch, one of them with another's prompt; what is left of a block is never read. Layer 0 has a window, layer 5
    has not; where they run through Triton's interpreter they agree with the reference for the same layer."""
    tokenizer = load_model(MODEL).tokenizer
    run = GemmaEngine(96, caching=caching, layers=layers)
    run.add("A", long_prompt(70), 12)
    run.add("B", tokenizer.encode_prompt("It was the best of times"), 17)
    run.run(2)
    run.add("C", long_prompt(70), 6)
    run.add("D", tokenizer.encode_prompt("Ä"), 9)
    run.run()
    assert sorted(run.finished) == ["A", "B", "C", "D"]
    run.assert_same_as_transformers()
    hits = [event.num_hit_tokens for event in run.events if isinstance(event, PrefixLookup) and event.request_id == "C"]
    assert hits == [64 if caching else 0]  # 70 tokens, the last must be computed: four blocks of 16
    bounds = [event.agrees_within for event in run.events if isinstance(event, AttentionComputed)]
    assert {bound is not None and bound <= 1e-4 for bound in bounds} == {bool(layers)}  # values of up to a hundred in float32


def with_window(model: PreTrainedModel, window: int) -> PreTrainedModel:
    """transformers' own Gemma 3 with another window: masks come from the config, some attention functions ask the layer."""
    twin = untouched_copy(model)
    twin.config.sliding_window = window
    for layer in twin.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window = window
    return twin


def test_a_session_with_a_window_of_16_recycles_blocks_within_30_tokens() -> None:
    """Words as transformers says them with that window; the blocks that leave a window serve again."""
    prompt = load_model(MODEL).tokenizer.encode_prompt("Four score and seven years ago our fathers brought forth on this")
    requests = (
        RequestSpec("A", tuple(prompt), SamplingParams(max_tokens=30 - len(prompt))),
        RequestSpec("B", tuple(prompt[:6]), SamplingParams(max_tokens=6), arrival_step=8),
    )
    config = SessionConfig(num_blocks=46, block_size=4, max_num_batched_tokens=64, sliding_window=16, enable_prefix_caching=False)
    session = Session(config, requests, vocabulary=load_model(MODEL).tokenizer.token_text, model_name=MODEL)
    trace = session.run_to_end()
    assert session.error is None
    events = [frame.event for frame in trace.frames]
    reference = with_window(load_model(MODEL).model, 16)
    for request in requests:
        said = [event.token_id for event in events if isinstance(event, TokenSampled) and event.request_id == request.request_id]
        assert said == dynamic_cache_generation(reference, list(request.prompt_token_ids), len(said)), request.request_id
        assert len(said) == request.sampling_params.max_tokens
    left = {block for event in events if isinstance(event, BlocksSkipped) for block in event.block_ids}
    again = [event for event in events if isinstance(event, BlocksAllocated) and left & set(event.block_ids)]
    assert left
    assert {event.request_id for event in again} == {"A", "B"}
