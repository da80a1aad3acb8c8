"""How long each operation takes on this machine's CPU: `python tests/bench/bench_kernels.py` prints a table (milliseconds, median of several).

The shapes are those of SmolLM2-135M, one layer: 9 query heads, 3 KV heads of 64, blocks of 16 tokens.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import torch

import kernels

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
BATCHES = {
    "decode, 1 request, context 32": [(1, 32)],
    "decode, 1 request, context 512": [(1, 512)],
    "decode, 4 requests, context 128": [(1, 128)] * 4,
    "decode, 8 requests, context 512": [(1, 512)] * 8,
    "prefill 16": [(16, 16)],
    "prefill 64": [(64, 64)],
    "prefill 256": [(256, 256)],
    "prefill 512": [(512, 512)],
    "prefill 64 + 3 decodes": [(64, 64), (1, 128), (1, 40), (1, 9)],
}


def milliseconds(work: Callable[[], object], repeats: int = 7) -> float:
    work()
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        samples.append((time.perf_counter() - started) * 1000)
    return statistics.median(samples)


def step(requests: list[tuple[int, int]], backend: str) -> list[float]:
    """Slot mapping, KV write, attention and the copy of two blocks, for requests of (query length, sequence length)."""
    blocks = [-(-length // BLOCK_SIZE) for _, length in requests]
    width = max(blocks)
    num_blocks = width * len(requests) + 4
    table = (torch.randperm(num_blocks - 1)[: width * len(requests)] + 1).view(len(requests), width).int()
    starts = torch.tensor([0, *(query_len for query_len, _ in requests)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
    positions = torch.cat([torch.arange(length - query_len, length) for query_len, length in requests])
    num_tokens = positions.numel()
    mapping = torch.empty(num_tokens + 8, dtype=torch.int64)
    cache = torch.randn(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    key, value = torch.randn(2, num_tokens, KV_HEADS, HEAD_DIM)
    query = torch.randn(num_tokens, HEADS, HEAD_DIM)
    pairs = torch.tensor([[1, num_blocks - 1], [2, num_blocks - 2]])
    return [
        milliseconds(lambda: kernels.compute_slot_mapping(starts, positions, table, mapping, block_size=BLOCK_SIZE, backend=backend)),
        milliseconds(lambda: kernels.reshape_and_cache(key, value, cache[0], cache[1], mapping[:num_tokens], backend=backend)),
        milliseconds(lambda: kernels.paged_attention(query, cache[0], cache[1], table, starts, lengths, scale=0.125, backend=backend)),
        milliseconds(lambda: kernels.copy_blocks([cache[0]], [cache[1]], pairs, backend=backend)),
    ]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'batch':34} {'backend':10} {'slots':>8} {'write':>8} {'attention':>10} {'copy 2':>8}")
    for name, requests in BATCHES.items():
        for backend in ("torch", "interpret"):
            slots, write, attention, copy = step(requests, backend)
            print(f"{name:34} {backend:10} {slots:8.2f} {write:8.2f} {attention:10.2f} {copy:8.2f}", flush=True)


if __name__ == "__main__":
    main()
