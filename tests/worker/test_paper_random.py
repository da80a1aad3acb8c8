"""Random crowds of the paper's engine against plain transformers: samples drawn here, beams by `generate`; nothing shared or paged (sections 4.4, 4.5)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.request_check import num_blocks_alone
from engine.trace.events import BlocksCopied, BlocksSwappedIn, RequestPreempted
from tests.worker.harness import VOCAB_SIZE
from tests.worker.paper_engine import PaperEngine


@torch.inference_mode()
def drawn(reference: PreTrainedModel, spec: PaperRequestSpec) -> list[list[int]]:
    """The samples of a request one after the other, each token from the whole sequence without a cache: seed + i draws sample i, one number a token."""
    samples = []
    for i in range(spec.n):
        generator, token_ids = torch.Generator().manual_seed(spec.seed + i), list(spec.prompt_token_ids)
        for _ in range(spec.max_tokens):
            logits = reference(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1].double()
            if spec.temperature == 0:
                token_ids.append(int(logits.argmax()))
            else:
                cumulative = torch.softmax(logits / spec.temperature, 0).cumsum(0)
                draw = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
                token_ids.append(int((cumulative <= draw).sum()))
            if token_ids[-1] in spec.stop_token_ids:
                break
        samples.append(token_ids[len(spec.prompt_token_ids) :])
    return samples


@torch.inference_mode()
def generated(reference: PreTrainedModel, spec: PaperRequestSpec) -> list[list[int]]:
    """The beams of a request, best first."""
    found = reference.generate(
        torch.tensor([spec.prompt_token_ids]), num_beams=spec.beam_width, num_return_sequences=spec.beam_width, do_sample=False, early_stopping=False,
        length_penalty=spec.length_penalty, max_new_tokens=spec.max_tokens, eos_token_id=list(spec.stop_token_ids) or None, pad_token_id=0,
    )  # fmt: skip
    beams = []
    for row in found[:, len(spec.prompt_token_ids) :].tolist():
        end = next((i + 1 for i, token_id in enumerate(row) if token_id in spec.stop_token_ids), len(row))
        beams.append(row[:end])
    return beams


def random_crowd(draw: random.Random, block_size: int) -> tuple[PaperConfig, list[PaperRequestSpec]]:
    """Two prefixes, and requests with and without one: samples, beams and plain ones, in a pool that holds the largest of them and hardly more."""

    def words(longest: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, longest)))

    specs = [PaperRequestSpec(name, words(9), max_tokens=0, is_prefix=True) for name in ("P", "Q")]
    for name in "ABCD":
        prefix = draw.choice([*specs[:2], None])
        kind: dict[str, Any] = draw.choice([
            {"beam_width": draw.randint(2, 5), "length_penalty": draw.choice([0.0, 1.0, 2.0])}, {"n": draw.randint(2, 4), "temperature": 1.5}, {},
        ])  # fmt: skip
        specs.append(
            PaperRequestSpec(
                name, (prefix.prompt_token_ids if prefix else ()) + words(8), prefix_id=prefix.request_id if prefix else None, arrival_step=draw.randint(1, 6),
                max_tokens=draw.randint(1, 10), seed=draw.randrange(99), stop_token_ids=tuple(draw.sample(range(3, VOCAB_SIZE), draw.choice([0, 4]))), **kind,
            )
        )  # fmt: skip
    lengths = {spec.request_id: len(spec.prompt_token_ids) for spec in specs if spec.is_prefix}
    config = PaperConfig(
        num_blocks=10_000, block_size=block_size, max_num_seqs=8, max_num_batched_tokens=32, num_cpu_blocks=draw.choice([2, 100, 100]),
        preemption_mode=draw.choice(["auto", "swap", "recompute"]), watermark=draw.choice([0.0, 0.2]),
    )  # fmt: skip
    kept = sum(-(-length // block_size) for length in lengths.values())
    largest = max(num_blocks_alone(spec, config, lengths.get(spec.prefix_id or "", 0)) for spec in specs)
    return PaperConfig(**{**config.__dict__, "num_blocks": kept + largest + draw.choice([0, 1, 3])}), specs


@pytest.mark.parametrize("block_size", [1, 2, 3, 7])
def test_random_crowds_say_what_plain_transformers_says(model: PreTrainedModel, reference: PreTrainedModel, block_size: int) -> None:
    kinds: set[type] = set()
    for seed in range(10):
        config, specs = random_crowd(random.Random(f"{block_size} {seed}"), block_size)
        engine = PaperEngine(model, config)
        for _ in engine.run(*specs):
            pass
        kinds |= {type(event) for event in engine.events}
        for spec in specs[2:]:
            if spec.beam_width is not None:
                assert [sequence.output_token_ids for _, sequence in engine.hypotheses(spec.request_id)] == generated(reference, spec), (seed, spec)
            else:
                assert engine.outputs(spec.request_id) == drawn(reference, spec), (seed, spec)
        manager = engine.scheduler.block_manager
        assert manager.gpu_allocator.num_free_blocks == config.num_blocks - sum(-(-len(s.prompt_token_ids) // block_size) for s in specs[:2])
        assert manager.cpu_allocator.num_free_blocks == config.num_cpu_blocks
    assert kinds >= {RequestPreempted, BlocksSwappedIn}
    assert block_size == 1 or BlocksCopied in kinds
