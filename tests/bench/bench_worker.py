"""Step time of the paged worker beside transformers' own DynamicCache step, for the same tokens of one request: `python -m tests.bench.bench_worker`.

Both sides run the same weights in the same process on one thread, step about, and what is measured is CPU time, so that a busy machine
disturbs little and both sides alike. Where SmolLM2 is not installed, random weights of its shape stand in, which cost the same time. The goal is
for SmolLM2: 1.3 times transformers' step with one interpreted layer. In `tiny` that layer costs as much but the rest of the model costs nearly
nothing, so the ratio says little there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine.core.output import SamplingParams
from engine.errors import PagewalkError
from engine.models import load_model
from engine.trace.events import Event
from engine.worker.kernel_settings import choose_kernel_settings
from engine.worker.model_runner import ModelRunner
from tests.worker.harness import Driver, untouched_copy

GOAL = 1.3
MODELS = ("tiny", "smollm2-135m")
SMOLLM2_SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
SETTINGS: list[tuple[str, tuple[int, ...] | str]] = [("reference only", ()), ("one layer interpreted", (0,)), ("all layers interpreted", "all")]


def model_or_shape(name: str) -> tuple[str, PreTrainedModel]:
    """The installed model, or random weights of its shape. Raises PagewalkError for other models that are not there."""
    try:
        return name, load_model(name).model
    except PagewalkError:
        if name != "smollm2-135m":
            raise
        torch.manual_seed(0)
        return f"{name} (shape only)", LlamaForCausalLM(LlamaConfig(**SMOLLM2_SHAPE)).eval().requires_grad_(False)


def timed(run: Callable[[], object]) -> float:
    """Milliseconds of CPU time of one call; with one thread and a quiet machine the same as on the clock."""
    start = time.process_time()
    run()
    return 1000 * (time.process_time() - start)


def measure(model: PreTrainedModel, reference: PreTrainedModel, layers: tuple[int, ...] | str, num_prompt: int, num_steps: int) -> tuple[float, float, float]:
    """Median milliseconds of a decode step: transformers, ours, and the ratio of the two medians."""
    num_layers = int(model.config.num_hidden_layers)
    settings = choose_kernel_settings("torch", layers, num_layers=num_layers)  # type: ignore[arg-type]
    events: list[Event] = []
    runner = ModelRunner(
        model,
        num_blocks=(num_prompt + num_steps) // 16 + 4,
        block_sizes=(16,),
        max_num_seqs=1,
        max_model_len=num_prompt + num_steps + 2,
        max_num_batched_tokens=num_prompt,
        kernel_settings=settings,
        emit=events.append,
    )
    driver = Driver(runner)
    prompt = [5 + i % 90 for i in range(num_prompt)]
    driver.add("A", prompt, SamplingParams(max_tokens=num_steps + 1))
    driver.step({"A": num_prompt})
    cache = DynamicCache(config=reference.config)

    @torch.inference_mode()
    def transformers_step(inputs: list[int]) -> int:
        logits = reference(input_ids=torch.tensor([inputs]), cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        return int(logits.argmax())

    token_id = transformers_step(prompt)
    theirs, ours = [], []
    for _ in range(num_steps):
        fed = driver.requests["A"].token_ids[-1]
        assert fed == token_id, "the two sides must run the same tokens"
        start = time.process_time()
        token_id = transformers_step([fed])
        theirs.append(1000 * (time.process_time() - start))
        ours.append(timed(lambda: driver.step({"A": 1})))
    return statistics.median(theirs), statistics.median(ours), statistics.median(ours) / statistics.median(theirs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Step time of the paged worker beside transformers' DynamicCache, one request.")
    parser.add_argument("--model", action="append", help="a model's name or folder; may be given several times")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=24, help="decode steps to measure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':<28}{'kernels':<26}{'transformers ms':>16}{'pagewalk ms':>13}{'ratio':>8}")
    for name in arguments.model or MODELS:
        label, model = model_or_shape(name)
        reference = untouched_copy(model)
        for title, layers in SETTINGS:
            theirs, ours, ratio = measure(model, reference, layers, arguments.prompt, arguments.steps)
            goal = f"  goal <= {GOAL}: {'reached' if ratio <= GOAL else 'missed'}" if layers == (0,) and "smollm2" in name else ""
            print(f"{label:<28}{title:<26}{theirs:>16.1f}{ours:>13.1f}{ratio:>8.2f}{goal}", flush=True)


if __name__ == "__main__":
    main()
