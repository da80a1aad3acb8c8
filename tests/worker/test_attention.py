"""Redirecting a model's attention: which models can be, and that several engines share one model without knowing of one another."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from engine.errors import EngineError, InvalidInput
from engine.worker.kernel_settings import KernelSettings
from engine.worker.model_runner import ModelRunner
from kernels import Backend
from tests.worker.harness import (
    INTERPRET,
    ONE_LAYER,
    TOLERANCE,
    TORCH,
    VOCAB_SIZE,
    Driver,
    dynamic_cache_generation,
    dynamic_cache_logits,
    make_runner,
    random_llama,
    random_prompt,
    untouched_copy,
)


def generate(driver: Driver, prompt: list[int], num_tokens: int) -> list[int]:
    driver.add("A", prompt)
    driver.step({"A": len(prompt)})
    for _ in range(num_tokens - 1):
        driver.step({"A": 1})
    return driver.requests["A"].outputs


def test_two_engines_take_turns_on_one_model(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    first, second = Driver(make_runner(model, block_size=4), seed=1), Driver(make_runner(model, block_size=16, kernel_settings=ONE_LAYER), seed=2)
    prompts = random_prompt(9, seed=1), random_prompt(13, seed=2)
    for driver, prompt in zip((first, second), prompts, strict=True):
        driver.add("A", prompt)
    first.step({"A": 9})
    second.step({"A": 13})
    for _ in range(6):
        first.step({"A": 1})
        second.step({"A": 1})
    for driver, prompt in zip((first, second), prompts, strict=True):
        assert driver.requests["A"].outputs == dynamic_cache_generation(reference, prompt, 7)


def test_engines_in_threads_share_one_model(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    settings = [TORCH, ONE_LAYER, INTERPRET, TORCH]
    prompts = [random_prompt(5 + 3 * i, seed=i) for i in range(len(settings))]
    outputs: dict[int, list[int]] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(len(settings))

    def work(i: int) -> None:
        try:
            driver = Driver(make_runner(model, kernel_settings=settings[i]), seed=i)
            start.wait()
            outputs[i] = generate(driver, prompts[i], 8)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(settings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert outputs == {i: dynamic_cache_generation(reference, prompt, 8) for i, prompt in enumerate(prompts)}


def test_a_redirected_model_says_why_it_does_not_run_on_its_own(model: PreTrainedModel) -> None:
    make_runner(model)
    with pytest.raises(EngineError, match="runs only inside an engine"):
        model(input_ids=torch.tensor([[5, 6]]))


def test_qwen_with_biases_runs() -> None:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
        max_position_embeddings=256, initializer_range=0.3, use_sliding_window=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    reference = untouched_copy(model)
    prompt = random_prompt(10, seed=7)
    assert generate(Driver(make_runner(model, kernel_settings=ONE_LAYER)), prompt, 6) == dynamic_cache_generation(reference, prompt, 6)


def test_gemma_3_keeps_its_own_scale_and_its_windows() -> None:
    """Scores are scaled by query_pre_attn_scalar, not by the head size; windowed and full layers alternate."""
    torch.manual_seed(2)
    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=256, sliding_window=5, query_pre_attn_scalar=3, initializer_range=0.3,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    reference = untouched_copy(model)
    prompt = random_prompt(17, seed=7)
    driver = Driver(make_runner(model, kernel_settings=INTERPRET))
    driver.add("A", prompt)
    driver.step({"A": 9})
    driver.step({"A": 8})
    for _ in range(7):
        driver.step({"A": 1})
    request = driver.requests["A"]
    assert request.outputs == dynamic_cache_generation(reference, prompt, 8)
    expected = dynamic_cache_logits(reference, request.token_ids, len(prompt))
    for (_, position), row in driver.logits.items():
        assert float((row - expected[position]).abs().max()) <= TOLERANCE


def test_a_model_without_the_attention_interface_is_refused() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(EngineError, match="attention of BloomForCausalLM cannot be redirected"):
        make_runner(model)


def test_a_model_that_caps_its_scores_is_refused() -> None:
    config = Gemma2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    with pytest.raises(EngineError, match="Gemma2ForCausalLM caps its attention scores"):
        make_runner(Gemma2ForCausalLM(config))


def test_a_model_with_layers_that_are_not_attention_is_refused() -> None:
    model = random_llama()
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(EngineError, match="LlamaForCausalLM has layers of type linear_attention"):
        make_runner(model)


def test_a_model_whose_layers_bypass_the_cache_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model: LlamaForCausalLM = random_llama()
    runner = make_runner(model)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)  # type: ignore[assignment]
    driver = Driver(runner)
    driver.add("A", [5, 6])
    with pytest.raises(EngineError, match=r"Only the layers \[0, 2\]"):
        driver.step({"A": 2})


@pytest.mark.parametrize("name", ["max_num_seqs", "max_model_len", "max_num_batched_tokens"])
def test_sizes_below_one_are_refused(model: PreTrainedModel, name: str) -> None:
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 16, name: 0}
    with pytest.raises(InvalidInput, match=f"{name} is 0"):
        ModelRunner(model, num_blocks=8, block_sizes=(4,), kernel_settings=KernelSettings(Backend("torch", "test")), **sizes)


def test_more_positions_than_the_model_knows_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(InvalidInput, match="max_model_len is 257, but the model knows only 256 positions"):
        ModelRunner(model, num_blocks=8, block_sizes=(4,), max_num_seqs=2, max_model_len=257, max_num_batched_tokens=16, kernel_settings=TORCH)


def test_model_and_cache_must_lie_on_the_same_device(model: PreTrainedModel) -> None:
    with pytest.raises(InvalidInput, match="The model lies on cpu, but the KV cache is to lie on cuda:0"):
        ModelRunner(
            model,
            num_blocks=8,
            block_sizes=(4,),
            max_num_seqs=2,
            max_model_len=64,
            max_num_batched_tokens=16,
            kernel_settings=TORCH,
            device="cuda:0",
        )
