"""What a beam search on the paper's engine costs, from the first event to the last frame: `python -m tests.bench.bench_beams`.

The goal: width 4 and 16 iterations on `tiny` recorded in under 3 s with this machine's default kernels (layer 0 interpreted). What the worker takes of it is
counted apart from scheduling and recording. CPU time on one thread, so that a busy machine disturbs little; the first run also warms up.
"""

from __future__ import annotations

import statistics
import time

import torch

from engine.models import load_model
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.scheduler import PaperScheduler
from engine.paper_session import PaperSession
from engine.trace.events import Event, StepStarted
from engine.worker.kernel_settings import choose_kernel_settings
from engine.worker.sequence_runner import SequenceRunner

GOAL_SECONDS = 3.0
PROMPT = "Four score and seven years ago our"
NUM_ITERATIONS = 16


def recorded(width: int, attention_shares: bool) -> tuple[float, int]:
    """Seconds of CPU time and frames of one recording."""
    loaded = load_model("tiny")
    config = PaperConfig(num_blocks=128, block_size=4, attention_shares=attention_shares)
    request = PaperRequestSpec("A", tuple(loaded.tokenizer.encode(PROMPT)), max_tokens=NUM_ITERATIONS, beam_width=width)
    start = time.process_time()
    trace = PaperSession(config, (request,), vocabulary=str, model_name="tiny").run_to_end()
    seconds = time.process_time() - start
    assert sum(isinstance(frame.event, StepStarted) for frame in trace.frames) == NUM_ITERATIONS
    return seconds, len(trace.frames)


def worker_milliseconds(width: int) -> float:
    """Median of what one decode iteration of `width` sequences takes in the worker, events built but not recorded."""
    loaded = load_model("tiny")
    config = PaperConfig(num_blocks=128, block_size=4)
    events: list[Event] = []
    scheduler = PaperScheduler(config, events.append)
    settings = choose_kernel_settings(None, num_layers=loaded.shape["num_layers"])
    runner = SequenceRunner(loaded.model, config=config, max_model_len=256, kernel_settings=settings, emit=events.append)
    scheduler.add_request(PaperRequestSpec("A", tuple(loaded.tokenizer.encode(PROMPT)), max_tokens=NUM_ITERATIONS, beam_width=width))
    times = []
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        start = time.process_time()
        outputs = runner.execute(plan)
        times.append(1000 * (time.process_time() - start))
        scheduler.update_from_output(outputs)
    return statistics.median(times[1:])


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    recorded(2, attention_shares=False)
    print(f"{'beam width':<12}{'recorded s':>12}{'with shares s':>15}{'frames':>8}{'worker ms/iteration':>21}")
    for width in (2, 4, 8):
        seconds, frames = recorded(width, attention_shares=False)
        with_shares, _ = recorded(width, attention_shares=True)
        goal = f"  goal < {GOAL_SECONDS:g} s: {'reached' if seconds < GOAL_SECONDS else 'missed'}" if width == 4 else ""
        print(f"{width:<12}{seconds:>12.2f}{with_shares:>15.2f}{frames:>8}{worker_milliseconds(width):>21.1f}{goal}", flush=True)


if __name__ == "__main__":
    main()
