"""What recording costs: time and memory of a run of 2,000 events, and the price of one event at pool sizes 1e3, 1e4 and 1e5.

    python -m tests.bench.bench_recorder

A frame shows the whole pool, but neither making it, nor checking it, nor keeping it may cost the whole pool: the numbers in a row must not grow.
Every run is measured in a process of its own.
"""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

from engine.core.output import SamplingParams
from engine.session import Session
from engine.session_config import RequestSpec, SessionConfig
from engine.trace import codec
from engine.trace.events import Event
from engine.trace.integrity import check_integrity
from engine.trace.running_check import BLOCKS_PER_FRAME

ROOT = Path(__file__).resolve().parents[2]
POOL_SIZES = (1_000, 10_000, 100_000)
BLOCK_SIZE = 16
NUM_REQUESTS = 8
NUM_PROMPT_TOKENS = 512
NUM_SHARED_TOKENS = 256
NUM_EVENTS = 2_000
GOALS = {"seconds": 1.0, "megabytes": 40.0}


def session(num_blocks: int) -> Session:
    """Eight requests whose prompts begin alike, decoding until the recorder is full. No model: only books are kept."""
    requests = tuple(
        RequestSpec(
            f"R{i}",
            tuple((0 if k < NUM_SHARED_TOKENS else 1_000 * (i + 1)) + k for k in range(NUM_PROMPT_TOKENS)),
            SamplingParams(max_tokens=400, forced_token_ids=tuple(range(400))),
            arrival_step=1 + i // 2,
        )
        for i in range(NUM_REQUESTS)
    )
    config = SessionConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=1_024, max_frames=NUM_EVENTS)
    return Session(config, requests, vocabulary=str)


class EmitClock:
    """Times everything that recording adds to the engine: reading the state, checking it, keeping the frame."""

    def __init__(self, made: Session) -> None:
        self.seconds = 0.0
        self._emit = made._recorder.emit
        made._recorder.emit = self  # type: ignore[method-assign,assignment]

    def __call__(self, event: Event) -> None:
        begin = time.process_time()
        self._emit(event)
        self.seconds += time.process_time() - begin


def run(num_blocks: int) -> None:
    """Processor time of a whole run, and of recording alone without the first frame, which reads the whole pool once."""
    made = session(num_blocks)
    clock = EmitClock(made)
    begin = time.process_time()
    made.run_until(lambda frame: True)
    first, clock.seconds = clock.seconds, 0.0
    made.run_to_end()
    total = time.process_time() - begin
    frames = made.trace.frames
    begin = time.process_time()
    assert check_integrity(frames[-1], frames[-2]) == []
    check = time.process_time() - begin
    per_event = clock.seconds / (len(frames) - 1)
    print(f"{total:.3f} {per_event * 1e6:.1f} {first * 1e3:.1f} {check * BLOCKS_PER_FRAME / num_blocks * 1e6:.1f}")


def memory(num_blocks: int) -> None:
    """Memory that the trace keeps and the most that recording it took, by tracemalloc and by resident size (which counts freed memory too)."""
    if len(sys.argv) > 3:
        session(512).run_to_end()  # what is made once
        gc.collect()
        tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = session(num_blocks)
    base = tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0
    made.run_to_end()
    assert len(made.trace.frames) == NUM_EVENTS + 1
    if tracemalloc.is_tracing():
        kept, peak = tracemalloc.get_traced_memory()
        print(f"{(kept - base) / 2**20:.1f} {(peak - base) / 2**20:.1f}")
    else:
        print(f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10:.1f}")


def file_size(num_blocks: int) -> None:
    """The trace as a file, and how long writing and reading take."""
    trace = session(num_blocks).run_to_end()
    begin = time.process_time()
    data = codec.encode_json(trace)
    written = time.process_time()
    codec.decode_json(data)
    print(f"{len(data) / 2**20:.1f} {written - begin:.3f} {time.process_time() - written:.3f}")


def in_own_process(*args: str) -> list[float]:
    """The numbers that a run prints."""
    result = subprocess.run([sys.executable, "-m", "tests.bench.bench_recorder", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return [float(word) for word in result.stdout.split()]


def main() -> None:
    num_blocks = 4_096
    seconds = min(in_own_process("run", str(num_blocks))[0] for _ in range(3))
    (resident,) = in_own_process("memory", str(num_blocks))
    kept, peak = in_own_process("memory", str(num_blocks), "traced")
    size, write, read = in_own_process("file", str(num_blocks))
    print(f"{num_blocks} blocks, {NUM_REQUESTS} requests, {NUM_EVENTS} events, recorder on:")
    print(f"  {seconds:.2f} s for engine and recorder together (goal: under {GOALS['seconds']:.0f} s)")
    print(f"  {kept:.1f} MiB kept, {peak:.1f} MiB at most, {resident:.1f} MiB more resident memory (goal: under {GOALS['megabytes']:.0f} MB)")
    print(f"  {size:.1f} MiB as a file, written in {write:.2f} s, read in {read:.2f} s")
    rows = [[min(column) for column in zip(*(in_own_process("run", str(n)) for _ in range(3)), strict=True)] for n in POOL_SIZES]
    print(f"{'blocks':<34}" + "".join(f"{n:>12,}" for n in POOL_SIZES))
    for title, index in (("recording one event, µs", 1), ("whole-frame checks, µs per event", 3), ("the first frame, ms", 2)):
        print(f"{title:<34}" + "".join(f"{row[index]:>12.1f}" for row in rows))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        {"run": run, "memory": memory, "file": file_size}[sys.argv[1]](int(sys.argv[2]))
    else:
        main()
