"""How long the kernels take at each block size, measured on this machine: a decode step's attention over the paged cache, and the copy of one block."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import kernels
from engine.errors import InvalidInput

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 32
"""One layer of the `tiny` model."""
MIN_ROUNDS, MAX_ROUNDS, SECONDS = 5, 60, 2.5
"""All block sizes are measured in turn, round after round, so that what else the machine is doing disturbs all of them alike."""


@dataclass(frozen=True)
class BlockSizeCost:
    """Seconds of one launch at a block size: attention of one query per request, and copy-on-write's copy of one block (key and value).

    Of all rounds the fastest counts: what else a machine does can only make a launch slower.
    """

    block_size: int
    attention_seconds: float
    copy_seconds: float


def measure_block_sizes(
    block_sizes: Sequence[int],
    seq_lens: Sequence[int],
    backend: kernels.Backend | str,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[BlockSizeCost, ...]:
    """Measure one layer of `tiny` for a batch of requests with `seq_lens` tokens in the cache each, whose blocks lie scattered over the pool.

    `progress` is told the share that is done, 0 to 1. The contents are random: they do not change the time. Raises InvalidInput for a size or a length below
    1, or an empty batch; kernels.UnknownBackend for a backend that cannot run here. Source: the paper, section 7.2 (Figure 18b), which measures a whole
    serving system on a GPU; here: the two kernels alone.
    """
    if not seq_lens or min(seq_lens) < 1 or not block_sizes or min(block_sizes) < 1:
        raise InvalidInput("a measurement needs block sizes of at least 1 and requests of at least 1 token")
    launches = [_launches(block_size, seq_lens, backend) for block_size in block_sizes]
    best = [[float("inf"), float("inf")] for _ in launches]
    started, rounds = time.perf_counter(), 0
    while rounds <= MIN_ROUNDS or (time.perf_counter() < started + SECONDS and rounds <= MAX_ROUNDS):
        for index, pair in enumerate(launches):
            for which, launch in enumerate(pair):
                began = time.perf_counter()
                launch()
                if rounds:  # the first round fills caches, and does not count
                    best[index][which] = min(best[index][which], time.perf_counter() - began)
            progress(min(1.0, (rounds + (index + 1) / len(launches)) / (MIN_ROUNDS + 1)))
        rounds += 1
    return tuple(BlockSizeCost(size, *seconds) for size, seconds in zip(block_sizes, best, strict=True))


def _launches(block_size: int, seq_lens: Sequence[int], backend: kernels.Backend | str) -> tuple[Callable[[], None], Callable[[], None]]:
    """The attention and the copy at one block size, ready to be launched again and again."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + 2
    scattered = torch.randperm(num_blocks, generator=generator).int()
    table = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32)
    taken = 0
    for row, count in enumerate(counts):
        table[row, :count] = scattered[taken : taken + count]
        taken += count
    keys, values = (torch.randn(num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    query = torch.randn(len(seq_lens), NUM_HEADS, HEAD_DIM, generator=generator)
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
    lengths = torch.tensor(list(seq_lens), dtype=torch.int32)
    pair = torch.tensor([[int(scattered[-2]), int(scattered[-1])]])  # the two blocks that no request has

    def attend() -> None:
        kernels.paged_attention(query, keys, values, table, starts, lengths, scale=HEAD_DIM**-0.5, backend=backend)

    def copy() -> None:
        kernels.copy_blocks([keys], [values], pair, backend=backend)

    return attend, copy
