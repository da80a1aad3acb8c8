"""What paging wins in throughput on the small model: the same requests, the same KV memory, paged admission beside the three contiguous reservations.

    python -m tests.bench.bench_paged_vs_contiguous [--model NAME] [--requests N]

Every request really runs: prompt and every output token go through the model and the paged KV cache. A contiguous chunk is a block table of consecutive block
ids, given out by a buddy allocator over the same pool. The kernels are therefore the same for all four, and so is the order of service; what differs is how
many requests fit into the memory at a time, and with it how many tokens one pass through the weights computes. Systems of 2023 with contiguous memory also
had faster attention kernels (the paper's Figure 18a); that is not in these numbers. CPU time on one thread, after a warm-up.

Lengths are ShareGPT-like ones divided by 8, for a model length of 256, and the memory is 7.68 times the longest request, as it is in the paper's OPT-13B runs.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from engine.core.output import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput
from engine.models import load_model
from engine.paper.buddy_allocator import BuddyAllocator
from engine.paper.quoted import THROUGHPUT_GAIN
from engine.paper.reservation import SYSTEM_NAMES, SYSTEMS, System, reserved_slots
from engine.paper.workload import WorkloadRequest, like_sharegpt
from engine.worker.kernel_settings import choose_kernel_settings
from engine.worker.model_runner import ModelRunner

SCALE = 8
MAX_MODEL_LEN = 2048 // SCALE
BLOCK_SIZE = 16
NUM_BLOCKS = 15_728 // SCALE // BLOCK_SIZE


@dataclass
class Served:
    """A request while it is served. `tokens`: prompt and outputs so far. `start`: of its chunk, in blocks."""

    request: WorkloadRequest
    tokens: list[int]
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    start: int | None = None
    known: bool = False
    resumed: bool = False
    new_block_ids: list[int] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.request.prompt_len


class Server:
    """First come, first served; prompts whole, in one batch with the decodes. A paged pool that is empty preempts the latest request, which is recomputed."""

    def __init__(self, model: PreTrainedModel, system: System, requests: list[Served]) -> None:
        self.system = system
        self.waiting = deque(requests)
        self.running: list[Served] = []
        self.free_blocks = list(range(NUM_BLOCKS))
        self.buddy = BuddyAllocator(NUM_BLOCKS)
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.num_preemptions = 0
        settings = choose_kernel_settings("torch", (), num_layers=int(model.config.num_hidden_layers))
        most = len(requests)
        self.runner = ModelRunner(
            model,
            num_blocks=NUM_BLOCKS,
            block_sizes=(BLOCK_SIZE,),
            max_num_seqs=most,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=most * MAX_MODEL_LEN,
            kernel_settings=settings,
        )

    def step(self) -> int:
        """One iteration; returns how many requests were in it."""
        preempted = self.grow() if self.system == "paged" else False
        while not preempted and self.waiting and self.place(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        batch = list(self.running)
        cached = CachedRequestData()
        new: list[NewRequestData] = []
        scheduled: dict[str, int] = {}
        for served in batch:
            name = served.request.request_id
            scheduled[name] = len(served.tokens) - served.num_computed
            if not served.known:
                params = SamplingParams(max_tokens=served.request.output_len)
                new.append(NewRequestData(name, list(served.tokens), (list(served.block_ids),), 0, params))
            else:
                cached.req_ids.append(name)
                cached.num_computed_tokens.append(served.num_computed)
                cached.num_output_tokens.append(served.num_outputs)
                blocks = served.block_ids if served.resumed else served.new_block_ids
                cached.new_block_ids.append((list(blocks),) if blocks else None)
                if served.resumed:
                    cached.resumed_req_ids.add(name)
                    cached.all_token_ids[name] = list(served.tokens)
            served.known, served.resumed, served.new_block_ids = True, False, []
        output = self.runner.execute_model(
            SchedulerOutput(new, cached, scheduled, sum(scheduled.values()), [0], self.finished, self.preempted),
        )
        self.finished, self.preempted = set(), set()
        for served in batch:
            served.num_computed = len(served.tokens)
            served.tokens += [token.token_id for token in output.sampled[served.request.request_id]]
            if served.num_outputs == served.request.output_len:
                self.running.remove(served)
                self.finished.add(served.request.request_id)
                self.release(served)
        return len(batch)

    def grow(self) -> bool:
        preempted = False
        for served in list(self.running):
            while served in self.running and len(served.tokens) > len(served.block_ids) * BLOCK_SIZE:
                if self.free_blocks:
                    served.new_block_ids = [self.free_blocks.pop()]
                    served.block_ids += served.new_block_ids
                    continue
                latest = self.running.pop()
                self.release(latest)
                latest.num_computed, latest.resumed, latest.new_block_ids = 0, True, []
                self.waiting.appendleft(latest)
                self.preempted.add(latest.request.request_id)
                self.num_preemptions += 1
                preempted = True
        return preempted

    def place(self, served: Served) -> bool:
        if self.system == "paged":
            needed = -(-len(served.tokens) // BLOCK_SIZE)
            if needed > len(self.free_blocks):
                return False
            served.block_ids = [self.free_blocks.pop() for _ in range(needed)]
            return True
        num_blocks = -(-reserved_slots(self.system, served.request, MAX_MODEL_LEN) // BLOCK_SIZE)
        served.start = self.buddy.allocate(num_blocks)
        if served.start is None:
            return False
        served.block_ids = list(range(served.start, served.start + num_blocks))
        return True

    def release(self, served: Served) -> None:
        if self.system == "paged":
            self.free_blocks += served.block_ids
        elif served.start is not None:
            self.buddy.free(served.start)
        served.block_ids = []


@dataclass
class Measured:
    seconds: float
    batch_sizes: list[int]
    num_preemptions: int
    tokens: dict[str, list[int]]


def run(model: PreTrainedModel, system: System, lengths: list[WorkloadRequest]) -> Measured:
    """Serve all requests; time excludes making the runner."""
    vocab = int(model.config.vocab_size)
    requests = [Served(r, [1 + (7 * i + 13 * k) % (vocab - 1) for k in range(r.prompt_len)]) for i, r in enumerate(lengths)]
    server = Server(model, system, list(requests))
    batch_sizes = []
    begin = time.process_time()
    while server.waiting or server.running:
        batch_sizes.append(server.step())
    seconds = time.process_time() - begin
    return Measured(seconds, batch_sizes, server.num_preemptions, {s.request.request_id: s.tokens for s in requests})


def scaled(num_requests: int) -> list[WorkloadRequest]:
    base = like_sharegpt(num_requests).requests
    return [WorkloadRequest(0.0, max(1, r.prompt_len // SCALE), max(1, r.output_len // SCALE), r.request_id) for r in base]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--requests", type=int, default=120)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(arguments.model).model
    lengths = scaled(arguments.requests)
    num_outputs = sum(r.output_len for r in lengths)
    print(f"{arguments.model}, {len(lengths)} requests, {sum(r.prompt_len for r in lengths):,} prompt and {num_outputs:,} output tokens")
    print(f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens, model length {MAX_MODEL_LEN}, one thread, the same torch kernels for all\n")
    measurements: dict[System, Measured] = {}
    run(model, "paged", lengths[:10])
    for system in SYSTEMS:
        measurements[system] = run(model, system, lengths)
    columns = f"{'mean batch':>10} {'largest':>8} {'iterations':>10} {'preempted':>9} {'seconds':>8} {'tokens/s':>9} {'vLLM gains':>10}"
    print(f"{'system':14} {columns} {'same tokens':>11}")
    paged = measurements["paged"]
    for system, measured in measurements.items():
        sizes = measured.batch_sizes
        same = sum(measured.tokens[name] == tokens for name, tokens in paged.tokens.items()) / len(lengths)
        print(
            f"{SYSTEM_NAMES[system]:14} {sum(sizes) / len(sizes):10.2f} {max(sizes):8} {len(sizes):10} {measured.num_preemptions:9} {measured.seconds:8.2f}"
            f" {num_outputs / measured.seconds:9.0f} {measured.seconds / paged.seconds:9.2f}x {same:11.0%}"
        )
    low, high = THROUGHPUT_GAIN
    print(f"\nThe paper reports {low.value:.0f} to {high.value:.0f} times the throughput of FasterTransformer and Orca")
    print(f"at equal latency ({low.source}, OPT and LLaMA on A100s). That is the paper's number, not ours: a CPU gains less from a larger batch than a GPU.")


if __name__ == "__main__":
    main()
