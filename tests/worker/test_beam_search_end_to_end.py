"""Beam search on the paged cache against transformers' own `generate` on tiny: the same beams, the same scores (the paper, section 4.4)."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from engine.models import load_model
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.worker.kernel_settings import choose_kernel_settings
from tests.worker.harness import TORCH, dynamic_cache_generation, untouched_copy
from tests.worker.paper_engine import PaperEngine

PROMPTS = [
    "Four score and seven years ago our",
    "It was the best of times, it was the",
    "Any other words",
    "We hold these truths to be",
]
END = 0  # tiny's <eos>


@pytest.fixture(scope="module")
def tiny_reference() -> PreTrainedModel:
    return untouched_copy(load_model("tiny").model)


@torch.inference_mode()
def transformers_beams(
    model: PreTrainedModel, prompt: list[int], width: int, max_tokens: int, length_penalty: float, stop: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    """Outputs without padding and score, best first."""
    found = model.generate(
        torch.tensor([prompt]), num_beams=width, num_return_sequences=width, do_sample=False, early_stopping=False, length_penalty=length_penalty,
        max_new_tokens=max_tokens, eos_token_id=list(stop) or None, pad_token_id=END, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    beams = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        outputs = row[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(outputs) if token in stop), len(outputs))
        beams.append((outputs[:end], score))
    return beams


def check_beams(reference: PreTrainedModel, engine: PaperEngine, spec: PaperRequestSpec) -> None:
    for _ in engine.run(spec):
        pass
    assert spec.beam_width is not None
    expected = transformers_beams(reference, list(spec.prompt_token_ids), spec.beam_width, spec.max_tokens, spec.length_penalty, spec.stop_token_ids)
    found = [(sequence.output_token_ids, score) for score, sequence in engine.hypotheses(spec.request_id)]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-3)
    allocator = engine.scheduler.block_manager.gpu_allocator
    assert allocator.num_free_blocks == engine.scheduler.config.num_blocks


@pytest.mark.parametrize("text", PROMPTS)
@pytest.mark.parametrize(("width", "length_penalty"), [(2, 1.0), (3, 1.0), (4, 1.0), (8, 1.0), (4, 0.0), (3, 2.0), (4, -1.0)])
def test_beams_are_those_of_generate(tiny_reference: PreTrainedModel, text: str, width: int, length_penalty: float) -> None:
    loaded = load_model("tiny")
    engine = PaperEngine(loaded.model, PaperConfig(num_blocks=80, block_size=4))
    prompt = tuple(loaded.tokenizer.encode(text))
    check_beams(tiny_reference, engine, PaperRequestSpec("A", prompt, max_tokens=14, beam_width=width, length_penalty=length_penalty, stop_token_ids=(END,)))


@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("text", PROMPTS)
def test_beams_that_end_early_are_those_of_generate(tiny_reference: PreTrainedModel, text: str, width: int) -> None:
    """Stop at what the model would say fourth and sixth, so that beams finish in the middle and the search may be over before max_tokens."""
    loaded = load_model("tiny")
    prompt = loaded.tokenizer.encode(text)
    greedy = dynamic_cache_generation(tiny_reference, prompt, 6)
    stop = tuple(sorted({END, greedy[3], greedy[5]}))
    spec = PaperRequestSpec("A", tuple(prompt), max_tokens=16, beam_width=width, stop_token_ids=stop)
    engine = PaperEngine(loaded.model, PaperConfig(num_blocks=80, block_size=4))
    check_beams(tiny_reference, engine, spec)
    assert any(sequence.num_output_tokens < 16 for _, sequence in engine.hypotheses("A"))


def test_a_forgotten_copy_gives_other_beams(tiny_reference: PreTrainedModel) -> None:
    """The comparison can fail."""
    loaded = load_model("tiny")
    engine = PaperEngine(loaded.model, PaperConfig(num_blocks=80, block_size=4), forget_copies=True)
    for cache in (*engine.runner.kv_cache.key_caches, *engine.runner.kv_cache.value_caches):
        cache.zero_()
    prompt = tuple(loaded.tokenizer.encode(PROMPTS[2]))
    with pytest.raises(AssertionError):
        check_beams(tiny_reference, engine, PaperRequestSpec("A", prompt, max_tokens=14, beam_width=4, stop_token_ids=(END,)))


@pytest.mark.parametrize(("block_size", "kernels"), [(1, "torch"), (3, "torch"), (16, "torch"), (4, None)])
def test_beams_do_not_depend_on_block_size_or_kernel(tiny_reference: PreTrainedModel, block_size: int, kernels: str | None) -> None:
    loaded = load_model("tiny")
    settings = TORCH if kernels else choose_kernel_settings(None, num_layers=loaded.shape["num_layers"])
    engine = PaperEngine(loaded.model, PaperConfig(num_blocks=240 // block_size, block_size=block_size), settings)
    prompt = tuple(loaded.tokenizer.encode(PROMPTS[2]))
    check_beams(tiny_reference, engine, PaperRequestSpec("A", prompt, max_tokens=12, beam_width=4, stop_token_ids=(END,)))
