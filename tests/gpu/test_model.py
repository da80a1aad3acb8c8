"""A whole model's steps on the GPU, on the compiled kernels: the tokens and logits of the CPU's reference, prefix hits, copies, chunks and a resumed request
included; the same for models whose layers have windows or recurrent states."""

from __future__ import annotations

import pytest

from engine.core.output import SamplingParams
from engine.models import load_model
from engine.session import RequestSpec, Session, SessionConfig
from engine.worker.device import choose_device, model_on
from engine.worker.kernel_settings import KernelSettings
from engine.worker.model_runner import ModelRunner
from kernels import Backend
from tests.worker.harness import Driver

TOLERANCE = 2e-3
"""Of logits in float32: cuBLAS and the CPU's library add in other orders (without TF32, which torch leaves off for products of matrices)."""
PROMPTS = {"A": "Four score and seven years ago our", "B": "It was the best of times, it was the", "C": "Any other words, e.g. ÄÖ 漢字"}


def run(device: str, backend: str) -> Driver:
    """Chunks and decodes mixed, a request that shares another's prefix, a copied page, and one that is preempted and resumed."""
    loaded = load_model("tiny")
    runner = ModelRunner(
        model_on(loaded.model, device),
        num_blocks=96,
        block_sizes=(4,),
        max_num_seqs=8,
        max_model_len=128,
        max_num_batched_tokens=128,
        kernel_settings=KernelSettings(Backend(backend, "test")),
        device=device,
    )
    driver = Driver(runner)
    prompts = {name: loaded.tokenizer.encode(text) for name, text in PROMPTS.items()}
    for name, prompt in prompts.items():
        driver.add(name, prompt, SamplingParams(max_tokens=16))
    driver.step({"A": len(prompts["A"]), "B": 5})
    driver.step({"A": 1, "B": len(prompts["B"]) - 5, "C": len(prompts["C"])})
    driver.add("D", prompts["A"], SamplingParams(max_tokens=16), shared_with="A", num_shared_blocks=1)
    driver.step({"A": 1, "B": 1, "C": 1, "D": len(prompts["A"]) - 4})
    source, target = driver.requests["A"].block_ids[0], driver.free.pop()
    driver.copies = [(source, target)]
    driver.requests["D"].block_ids[0] = target
    driver.preempt("B")
    driver.step({"A": 1, "C": 1})
    driver.step({"A": 1, "B": len(driver.requests["B"].token_ids), "D": 1})
    for _ in range(4):
        driver.step({"A": 1, "B": 1, "C": 1, "D": 1})
    return driver


def test_tokens_and_logits_are_those_of_the_reference() -> None:
    expected, found = run("cpu", "torch"), run("cuda", "triton")
    assert {name: request.outputs for name, request in found.requests.items()} == {name: request.outputs for name, request in expected.requests.items()}
    assert found.logits.keys() == expected.logits.keys()
    for place, logits in expected.logits.items():
        assert float((found.logits[place].cpu() - logits).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("model", ["tiny", "tiny-swa", "tiny-hybrid"])
def test_a_session_says_the_same_on_the_gpu(model: str) -> None:
    """The scheduler included; without a wish for a backend, the GPU and the compiled kernels are taken."""
    assert choose_device(None) == "cuda"
    prompts = {name: tuple(load_model(model).tokenizer.encode(text)) for name, text in PROMPTS.items()}
    requests = tuple(RequestSpec(name, prompt, SamplingParams(max_tokens=12)) for name, prompt in prompts.items())
    said = []
    for backend in ("torch", None):
        config = SessionConfig(num_blocks=64, block_size=4, max_num_batched_tokens=16)
        trace = Session(config, requests, vocabulary=str, model_name=model, backend=backend).run_to_end()
        assert trace.complete
        said.append({request.request_id: request.token_ids for request in trace.frames[-1].requests})
    assert said[0] == said[1]
    assert all(len(tokens) == len(prompts[name]) + 12 for name, tokens in said[0].items())
