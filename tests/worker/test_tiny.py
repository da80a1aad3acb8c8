"""The embedded model through the whole worker: it says by heart what it says by transformers' own cache."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from engine.models import load_model
from engine.trace.events import AttentionComputed
from engine.worker.kernel_settings import choose_kernel_settings
from tests.worker.harness import untouched_copy
from tests.worker.test_end_to_end import Engine

PROMPTS = {
    "A": "Four score and seven years ago our",
    "B": "It was the best of times, it was the",
    "C": "Four score and seven years ago our fathers brought forth",
    "D": "Any other words, e.g. ÄÖ 漢字",
}


@pytest.fixture(scope="module")
def tiny_reference() -> PreTrainedModel:
    return untouched_copy(load_model("tiny").model)


@pytest.mark.parametrize("layers", [(0,), "all"], ids=["one layer interpreted", "all layers interpreted"])
def test_tiny_with_hits_and_preemptions(tiny_reference: PreTrainedModel, layers: tuple[int, ...]) -> None:
    loaded = load_model("tiny")
    settings = choose_kernel_settings("torch", layers, num_layers=loaded.shape["num_layers"])
    prompts = {req_id: loaded.tokenizer.encode(text) for req_id, text in PROMPTS.items()}
    num_blocks = max(-(-(len(p) + 8) // 4) for p in prompts.values()) + 3
    engine = Engine(loaded.model, block_size=4, num_blocks=num_blocks, max_num_batched_tokens=32, settings=settings)
    for req_id, prompt in prompts.items():
        engine.add(req_id, prompt, 8)
    engine.run()
    engine.assert_same_as_dynamic_cache(tiny_reference)
    assert len(engine.finished) == 4
    assert loaded.tokenizer.decode(engine.finished["A"].output_token_ids).split()[:3] == ["fathers", "brought", "forth"]
    bounds = [e.agrees_within for e in engine.of_kind(AttentionComputed)]
    assert all(bound is not None and bound <= 1e-5 for bound in bounds)


def test_float32_is_what_was_compared() -> None:
    assert load_model("tiny").model.dtype == torch.float32
