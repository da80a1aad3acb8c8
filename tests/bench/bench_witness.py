"""What it costs to watch the kernels' programs: `python -m tests.bench.bench_witness` prints CPU milliseconds of a step without and with a witness.

Both run the same tokens in one process on one thread, step about. The last column is what a step's witness adds to a trace's JSON.
"""

from __future__ import annotations

import statistics

import msgspec
import torch
from transformers import PreTrainedModel

from engine.core.output import SamplingParams
from engine.trace.events import AttentionComputed, Event
from engine.worker.kernel_settings import choose_kernel_settings
from engine.worker.model_runner import ModelRunner
from tests.bench.bench_worker import model_or_shape, timed
from tests.worker.harness import Driver

NUM_STEPS = 12
BATCHES = {"1 request, context 64": (1, 64), "4 requests, context 128": (4, 128), "8 requests, context 256": (8, 256)}


def driver_of(model: PreTrainedModel, layers: tuple[int, ...] | str, kernel_witness: bool, batch: int, context: int) -> tuple[Driver, list[Event]]:
    """A worker whose requests wait for their prompts."""
    events: list[Event] = []
    runner = ModelRunner(
        model,
        num_blocks=batch * (context // 16 + 3) + 1,
        block_sizes=(16,),
        max_num_seqs=batch,
        max_model_len=context + NUM_STEPS + 2,
        max_num_batched_tokens=batch * context,
        kernel_settings=choose_kernel_settings("torch", layers, num_layers=int(model.config.num_hidden_layers)),  # type: ignore[arg-type]
        emit=events.append,
        kernel_witness=kernel_witness,
    )
    driver = Driver(runner)
    for i in range(batch):
        driver.add(f"R{i}", [5 + (i + t) % 90 for t in range(context)], SamplingParams(max_tokens=NUM_STEPS + 2))
    return driver, events


def size_of(events: list[Event]) -> int:
    """Bytes of the last step's witness."""
    return next(len(msgspec.json.encode(e.witness)) for e in reversed(events) if isinstance(e, AttentionComputed))


def measure(model: PreTrainedModel, layers: tuple[int, ...] | str, batch: int, context: int) -> list[tuple[str, float, float, int]]:
    """For the prompts in one step and for a decode: name, milliseconds without and with a witness, bytes of the witness."""
    drivers = [driver_of(model, layers, kernel_witness, batch, context) for kernel_witness in (False, True)]
    names = list(drivers[0][0].requests)
    rows = []
    prompts = [timed(lambda d=driver: d.step(dict.fromkeys(names, context))) for driver, _ in drivers]  # type: ignore[misc]
    rows.append(("prompts", *prompts, size_of(drivers[1][1])))
    decodes: list[list[float]] = [[], []]
    for _ in range(NUM_STEPS):
        for (driver, _), times in zip(drivers, decodes, strict=True):
            times.append(timed(lambda d=driver: d.step(dict.fromkeys(names, 1))))  # type: ignore[misc]
    rows.append(("decode", *map(statistics.median, decodes), size_of(drivers[1][1])))
    return rows


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'model':<28}{'interpreted':<13}{'batch':<26}{'step':<9}{'without ms':>11}{'with ms':>9}{'added':>7}{'bytes':>8}")
    for name, choices in (("tiny", [(0,), "all"]), ("smollm2-135m", [(0,), "all"])):
        label, model = model_or_shape(name)
        for layers in choices:
            measure(model, layers, 1, 16)  # types and masks are remembered from the first launches on
            for title, (batch, context) in BATCHES.items():
                for step, without, with_witness, size in measure(model, layers, batch, context):
                    line = f"{label:<28}{'all layers' if layers == 'all' else 'one layer':<13}{title:<26}{step:<9}"
                    print(f"{line}{without:>11.1f}{with_witness:>9.1f}{with_witness - without:>7.1f}{size:>8}", flush=True)


if __name__ == "__main__":
    main()
