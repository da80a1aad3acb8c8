"""The real scheduler drives the real worker: a pool too small for everybody, prefix hits, chunks and preemptions, against transformers' DynamicCache."""

from __future__ import annotations

import random

import pytest
from transformers import PreTrainedModel

from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheGroupSpec
from engine.trace.events import BlockEvicted, PrefixLookup, RequestAdmitted, RequestPreempted
from engine.worker.kernel_settings import KernelSettings
from tests.worker.engine_loop import EngineLoop
from tests.worker.harness import INTERPRET, ONE_LAYER, TORCH, dynamic_cache_generation, dynamic_cache_logits, random_prompt


class Engine(EngineLoop):
    """One group of all layers, with full attention."""

    def __init__(self, model: PreTrainedModel, *, block_size: int, num_blocks: int, max_num_batched_tokens: int, settings: KernelSettings = TORCH) -> None:
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=8)
        layers = [f"layers.{layer}" for layer in range(model.config.num_hidden_layers)]
        super().__init__(
            model,
            [KVCacheGroupSpec(layer_names=layers, kv_cache_spec=spec)],
            num_blocks=num_blocks,
            budget=max_num_batched_tokens,
            max_model_len=(num_blocks - 1) * block_size,
            settings=settings,
        )

    def check_executed(self) -> None:
        """R8.3: nothing is ever nulled with full attention, so rows and tables agree."""
        for row in self.runner.rows():
            assert tuple(list(ids) for ids in row.block_ids) == self.tables(row.request_id)

    def assert_same_as_dynamic_cache(self, reference: PreTrainedModel) -> None:
        self.assert_says(
            lambda request: (
                dynamic_cache_generation(reference, request.prompt_token_ids, request.sampling_params.max_tokens),
                dynamic_cache_logits(reference, request.all_token_ids, request.num_prompt_tokens),
            )
        )

    @property
    def num_hit_tokens(self) -> int:
        return sum(e.num_computed_tokens for e in self.of_kind(RequestAdmitted) if not e.resumed)


@pytest.mark.parametrize("settings", [TORCH, ONE_LAYER, INTERPRET], ids=["torch", "one layer", "interpret"])
def test_a_pool_that_is_too_small_preempts_and_still_says_the_same(model: PreTrainedModel, reference: PreTrainedModel, settings: KernelSettings) -> None:
    engine = Engine(model, block_size=4, num_blocks=13, max_num_batched_tokens=16, settings=settings)
    shared = random_prompt(9, seed=100)
    for req_id, prompt in {"A": shared, "B": random_prompt(13, seed=1), "C": [*shared[:8], 7, 8, 9], "D": random_prompt(6, seed=2)}.items():
        engine.add(req_id, prompt, 14)
    engine.run()
    assert sorted(engine.finished) == ["A", "B", "C", "D"]
    assert len(engine.of_kind(RequestPreempted)) >= 2
    assert engine.of_kind(BlockEvicted)
    assert engine.num_hit_tokens >= 8
    engine.assert_same_as_dynamic_cache(reference)


def test_a_hit_on_blocks_that_the_same_step_still_writes(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """S9: blocks are registered before the forward pass, so a twin that is admitted in the same step reads what that step writes."""
    engine = Engine(model, block_size=4, num_blocks=20, max_num_batched_tokens=64)
    prompt = random_prompt(11, seed=3)
    for req_id in ("A", "B"):
        engine.add(req_id, prompt, 5)
    engine.step()
    lookups = [e.num_hit_tokens for e in engine.of_kind(PrefixLookup)]
    assert lookups == [0, 8]
    assert len(engine.runner.slot_mapping) == 11 + 3
    engine.run()
    engine.assert_same_as_dynamic_cache(reference)


@pytest.mark.parametrize("seed", range(6))
def test_random_crowds(model: PreTrainedModel, reference: PreTrainedModel, seed: int) -> None:
    """Block sizes, pool sizes, budgets, arrivals and shared prefixes at random, with NaN in every slot that was never written."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    prompts: list[list[int]] = []
    for i in range(7):
        prompt = random_prompt(rng.randint(1, 40), seed=1000 * seed + i)
        if prompts and rng.random() < 0.6:
            prompt = rng.choice(prompts)[: rng.randint(1, 40)] + prompt[: rng.randint(1, 8)]
        prompts.append(prompt[:44])
    max_tokens = [rng.randint(1, 16) for _ in prompts]
    longest = max(-(-(len(p) + m) // block_size) for p, m in zip(prompts, max_tokens, strict=True))
    engine = Engine(model, block_size=block_size, num_blocks=longest + rng.randint(2, longest + 2), max_num_batched_tokens=rng.choice([5, 16, 64]))
    for i, (prompt, num_tokens) in enumerate(zip(prompts, max_tokens, strict=True)):
        engine.add(str(i), prompt, num_tokens)
        for _ in range(rng.randint(0, 3)):
            engine.step()
    engine.run()
    assert len(engine.finished) == 7
    engine.assert_same_as_dynamic_cache(reference)


def test_every_block_is_free_and_every_row_empty_at_the_end(model: PreTrainedModel) -> None:
    engine = Engine(model, block_size=4, num_blocks=13, max_num_batched_tokens=16)
    for i in range(4):
        engine.add(str(i), random_prompt(9 + i, seed=i), 9)
    engine.run()
    engine.step()
    assert engine.runner.rows() == ()
    assert engine.runner.requests == {}
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 12
