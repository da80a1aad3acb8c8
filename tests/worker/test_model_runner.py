"""The worker against transformers' own DynamicCache: the same logits within 2e-4 in float32 and the same tokens, whatever the blocks and the batch."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from engine.worker.kernel_settings import KernelSettings
from tests.worker.harness import (
    INTERPRET,
    ONE_LAYER,
    TOLERANCE,
    TORCH,
    Driver,
    dynamic_cache_generation,
    dynamic_cache_logits,
    make_runner,
    random_prompt,
)

LENGTHS = {"A": 7, "B": 1, "C": 23, "D": 12, "E": 16}


def assert_same_as_dynamic_cache(driver: Driver, reference: PreTrainedModel, min_outputs: int) -> None:
    """Every logits row that the worker produced, and every token."""
    for req_id, request in driver.requests.items():
        prompt, outputs = request.token_ids[: request.num_prompt_tokens], request.outputs
        assert len(outputs) >= min_outputs
        assert outputs == dynamic_cache_generation(reference, prompt, len(outputs)), req_id
        expected = dynamic_cache_logits(reference, request.token_ids, request.num_prompt_tokens)
        assert float(expected.std()) > 1, "logits too flat for the tolerance to mean anything"
        rows = {position: row for (r, position), row in driver.logits.items() if r == req_id}
        assert len(rows) >= min_outputs
        for position, row in rows.items():
            assert row.dtype == torch.float32
            difference = float((row - expected[position]).abs().max())
            assert difference <= TOLERANCE, f"{req_id} at position {position}: {difference}"


def run_mixed_batches(driver: Driver) -> None:
    """Five ragged requests: whole prompts, chunks of a prompt, single decode tokens, all in the same launches; one is left out of some steps."""
    for req_id, length in LENGTHS.items():
        driver.add(req_id, random_prompt(length, seed=length))
    driver.step({"A": 7, "C": 5})
    driver.step({"A": 1, "C": 9, "B": 1})
    driver.step({"A": 1, "B": 1, "C": 9, "D": 3})
    driver.step({"C": 1, "D": 9, "B": 1, "E": 16})  # A sits out
    for _ in range(5):
        driver.step({"A": 1, "B": 1, "C": 1, "D": 1, "E": 1})
    driver.step({"B": 1, "D": 1})
    driver.step({"C": 1, "A": 1, "B": 1, "D": 1, "E": 1})


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("settings", [TORCH, ONE_LAYER], ids=["torch", "one layer interpreted"])
def test_mixed_prefill_and_decode(model: PreTrainedModel, reference: PreTrainedModel, block_size: int, settings: KernelSettings) -> None:
    driver = Driver(make_runner(model, block_size=block_size, num_blocks=400 if block_size == 1 else 96, kernel_settings=settings), seed=block_size)
    run_mixed_batches(driver)
    assert_same_as_dynamic_cache(driver, reference, min_outputs=7)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_all_layers_through_the_interpreter(model: PreTrainedModel, reference: PreTrainedModel, block_size: int) -> None:
    driver = Driver(make_runner(model, block_size=block_size, num_blocks=400 if block_size == 1 else 96, kernel_settings=INTERPRET), seed=block_size)
    run_mixed_batches(driver)
    assert_same_as_dynamic_cache(driver, reference, min_outputs=7)


@pytest.mark.parametrize("settings", [TORCH, INTERPRET], ids=["torch", "interpret"])
def test_prefix_hits_read_the_other_requests_blocks(model: PreTrainedModel, reference: PreTrainedModel, settings: KernelSettings) -> None:
    driver = Driver(make_runner(model, kernel_settings=settings))
    prompt = random_prompt(11, seed=5)
    driver.add("A", prompt)
    driver.step({"A": 11})
    driver.add("B", [*prompt[:8], 50, 51, 52, 53, 54], shared_with="A", num_shared_blocks=2)
    driver.add("C", prompt, shared_with="A", num_shared_blocks=2)
    shared = driver.requests["A"].block_ids[:2]
    driver.step({"A": 1, "B": 5, "C": 3})
    assert driver.runner.rows()[1].block_ids[0][:2] == tuple(shared)
    for _ in range(4):
        driver.step({"A": 1, "B": 1, "C": 1})
    assert driver.requests["C"].outputs == driver.requests["A"].outputs[:5]
    assert_same_as_dynamic_cache(driver, reference, min_outputs=5)


@pytest.mark.parametrize("settings", [TORCH, INTERPRET], ids=["torch", "interpret"])
def test_preempted_and_resumed_with_another_table(model: PreTrainedModel, reference: PreTrainedModel, settings: KernelSettings) -> None:
    """R7.5: the victim's blocks go to others, its tokens stay, and it is recomputed (in chunks) into new blocks without a second sampling of old tokens."""
    driver = Driver(make_runner(model, num_blocks=24, kernel_settings=settings))
    driver.add("A", random_prompt(9, seed=1))
    driver.add("B", random_prompt(14, seed=2))
    driver.step({"A": 9, "B": 14})
    for _ in range(5):
        driver.step({"A": 1, "B": 1})
    old_blocks = list(driver.requests["B"].block_ids)
    driver.preempt("B")
    driver.add("C", random_prompt(21, seed=3))
    driver.free = [b for b in driver.free if b not in old_blocks] + old_blocks  # C takes B's old blocks first
    driver.step({"A": 1, "C": 21})
    assert set(driver.requests["C"].block_ids) & set(old_blocks)
    assert len(driver.runner.rows()) == 2
    assert driver.step({"A": 1, "C": 1, "B": 8}).sampled["B"] == []
    assert driver.step({"A": 1, "C": 1, "B": 8}).sampled["B"] == []
    assert len(driver.step({"A": 1, "C": 1, "B": 4}).sampled["B"]) == 1
    for _ in range(3):
        driver.step({"A": 1, "C": 1, "B": 1})
    assert driver.requests["B"].block_ids != old_blocks
    assert len(driver.requests["B"].outputs) == 10
    assert_same_as_dynamic_cache(driver, reference, min_outputs=7)


@pytest.mark.parametrize("settings", [TORCH, ONE_LAYER, INTERPRET], ids=["torch", "one layer", "interpret"])
def test_nothing_that_was_never_written_is_read(model: PreTrainedModel, reference: PreTrainedModel, settings: KernelSettings) -> None:
    """NaN in every slot: one read beyond a request's own tokens, even one that is masked afterwards, would spread through the softmax."""
    runner = make_runner(model, kernel_settings=settings)
    for cache in (*runner.kv_cache.key_caches, *runner.kv_cache.value_caches):
        cache.fill_(float("nan"))
    driver = Driver(runner)
    run_mixed_batches(driver)
    assert_same_as_dynamic_cache(driver, reference, min_outputs=7)
    written = set()
    for request in driver.requests.values():
        written |= {request.block_ids[p // 4] * 4 + p % 4 for p in range(request.num_computed)}
    for cache in (*runner.kv_cache.key_caches, *runner.kv_cache.value_caches):
        finite = cache.flatten(0, 1).flatten(1).isfinite().all(1)
        assert set(finite.nonzero().flatten().tolist()) == written  # R7.7: the last sampled token's slot is not among them


def test_copied_blocks_carry_keys_and_values(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """R8.6: copies happen before the forward pass. The reader's table names only the copies; the original pages are poisoned afterwards."""
    runner = make_runner(model)
    driver = Driver(runner)
    prompt = random_prompt(10, seed=8)
    driver.add("A", prompt)
    driver.step({"A": 10})
    driver.add("B", prompt)
    copies = [driver.free.pop() for _ in range(3)]
    request = driver.requests["B"]
    request.block_ids, request.num_computed = list(copies), 9
    driver.copies = list(zip(driver.requests["A"].block_ids, copies, strict=True))
    driver.step({"B": 1})
    runner.kv_cache.key_caches[0][driver.requests.pop("A").block_ids] = float("nan")
    for _ in range(3):
        driver.step({"B": 1})
    assert_same_as_dynamic_cache(driver, reference, min_outputs=4)


def test_the_batch_does_not_change_a_seeded_request(model: PreTrainedModel) -> None:
    from engine.core.output import SamplingParams

    params = SamplingParams(temperature=0.8, seed=11)
    alone = Driver(make_runner(model), seed=1)
    alone.add("S", random_prompt(6, seed=4), params)
    alone.step({"S": 6})
    for _ in range(7):
        alone.step({"S": 1})
    crowd = Driver(make_runner(model, block_size=16), seed=2)
    crowd.add("X", random_prompt(13, seed=6), SamplingParams(temperature=1.5, seed=11))
    crowd.add("S", random_prompt(6, seed=4), params)
    crowd.step({"X": 13, "S": 2})
    crowd.step({"X": 1, "S": 4})
    for _ in range(3):
        crowd.step({"X": 1, "S": 1})
    crowd.preempt("S")
    crowd.step({"X": 1, "S": 10})
    for _ in range(3):
        crowd.step({"S": 1, "X": 1})
    assert crowd.requests["S"].outputs == alone.requests["S"].outputs
    assert len(alone.requests["S"].outputs) == 8


def test_sliding_window_layers_reach_the_kernel() -> None:
    """Mistral hands its window to the attention function; transformers' own sliding cache is the reference."""
    from transformers import MistralConfig, MistralForCausalLM

    from tests.worker.harness import VOCAB_SIZE, untouched_copy

    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=256, sliding_window=6, initializer_range=0.3,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    reference = untouched_copy(model)
    driver = Driver(make_runner(model, kernel_settings=ONE_LAYER))
    run_mixed_batches(driver)
    assert_same_as_dynamic_cache(driver, reference, min_outputs=7)
