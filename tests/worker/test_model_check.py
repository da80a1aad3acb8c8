"""Models and sizes that the worker cannot run, each refused in one sentence; and memory that runs out in the middle of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import engine.worker.device as device
from engine.core.output import SamplingParams
from engine.errors import EngineError, InvalidInput
from engine.session import RequestSpec, Session, SessionConfig
from engine.trace.events import EngineFailed, TokenSampled
from engine.worker.model_runner import ModelRunner
from tests.worker.harness import INTERPRET, TORCH, VOCAB_SIZE, Driver, make_runner, random_llama


def windowed_model() -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        layer_types=["sliding_attention", "full_attention"], sliding_window=4, max_position_embeddings=128,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def runner_with(model: Any, layer_groups: list[int], sliding_windows: list[int | None]) -> ModelRunner:
    sizes: dict[str, Any] = {"num_blocks": 8, "block_sizes": (4, 4), "max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 16}
    return ModelRunner(model, kernel_settings=TORCH, layer_groups=layer_groups, sliding_windows=sliding_windows, **sizes)


def test_a_window_for_a_layer_that_sees_all_is_refused() -> None:
    """R3.1: a group that drops blocks behind a window has lost what a full-attention layer still reads."""
    with pytest.raises(InvalidInput, match="Layer 1 of Gemma3ForCausalLM sees all tokens, but its KV-cache group 0 keeps only the last 4; a window goes with"):
        runner_with(windowed_model(), [0, 0], [4, None])
    runner_with(windowed_model(), [0, 1], [4, None])


def test_a_window_of_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a window of 0 tokens, but a token sees at least itself"):
        runner_with(windowed_model(), [0, 1], [0, None])


def test_chunked_attention_is_refused_with_what_is_supported() -> None:
    model = random_llama()
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(EngineError, match="layers of type chunked_attention, which the worker cannot run; it runs full_attention, sliding_attention and Bamba"):
        make_runner(model)


def test_weights_in_a_precision_without_kernels_are_refused() -> None:
    model = random_llama().to(torch.float8_e4m3fn)
    with pytest.raises(InvalidInput, match="weights of LlamaForCausalLM are float8_e4m3fn, but the kernels compute in float32, float16, bfloat16, float64"):
        make_runner(model)


@pytest.mark.parametrize("settings", [TORCH, INTERPRET], ids=["torch", "interpret"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_run(dtype: torch.dtype, settings: Any) -> None:
    driver = Driver(make_runner(random_llama().to(dtype), kernel_settings=settings))
    driver.add("A", [5, 6, 7], SamplingParams(max_tokens=2))
    driver.step({"A": 3})
    driver.step({"A": 1})
    assert driver.runner.kv_cache.key_caches[0].dtype == dtype
    assert all(row.isfinite().all() and row.dtype == torch.float32 for row in driver.logits.values())


def test_one_layer_in_another_precision_is_named() -> None:
    model = random_llama()
    driver = Driver(make_runner(model))
    projection = model.model.layers[1].self_attn.v_proj
    forward = projection.forward
    projection.forward = lambda hidden: forward(hidden).bfloat16()
    driver.add("A", [5, 6, 7])
    with pytest.raises(EngineError, match=r"Layer 1 of LlamaAttention makes values in bfloat16, but the KV cache is float32.*in one precision"):
        driver.step({"A": 3})


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_runs_out_ends_the_run_in_a_sentence(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    """What was recorded before stays, the last frame says what to do."""
    config = SessionConfig(num_blocks=20, block_size=4)
    session = Session(config, (RequestSpec("A", (5, 6, 7), SamplingParams(max_tokens=6)),), vocabulary=str, model_name="tiny", interpreted_layers=())
    assert session.run_until(lambda frame: isinstance(frame.event, TokenSampled)) is not None
    recorded = len(session.trace.frames)

    def fails(*arguments: Any, **named: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr("engine.worker.batch_runner.last_token_logits", fails)
    frames = session.run_to_end().frames
    assert type(session.error) is EngineError
    assert len(frames) > recorded
    assert isinstance(frames[-1].event, EngineFailed)
    assert frames[-1].event.message == str(session.error)
    assert str(session.error).startswith("The machine has no memory left for a step of 1 tokens; give fewer blocks")
    assert not session.complete
    assert not session.advance()


def test_another_fault_of_torch_is_not_taken_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_runner(random_llama()))
    driver.add("A", [5, 6, 7])
    monkeypatch.setattr("engine.worker.batch_runner.last_token_logits", lambda *_, **__: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        driver.step({"A": 3})


def test_a_model_that_does_not_fit_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_llama()

    def full(self: Any, *_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(type(model), "to", full)
    with pytest.raises(InvalidInput, match="LlamaForCausalLM does not fit into the memory of the GPU; run it with the backend torch"):
        device.model_on(model, "cuda")
