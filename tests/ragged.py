"""Ragged batches over a shuffled pool, and a dense attention that shares no code with the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Batch:
    """A ragged batch: the queries of request r are the last query_lens[r] of its seq_lens[r] tokens; keys[r], values[r] hold all of them."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return (self.query, self.key_cache, self.value_cache, self.block_table, self.query_start_loc, self.seq_lens)


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    padding_tokens: int = 0,
    seed: int = 0,
) -> Batch:
    """Every slot that no token owns, and every table entry past a request's blocks, is poison: NaN, and a block that does not exist."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    blocks_needed = [math.ceil(length / block_size) for length in seq_lens]
    num_blocks = sum(blocks_needed) + 2
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    key_cache = torch.full(cache_shape, float("nan"), dtype=dtype)
    value_cache = torch.full(cache_shape, float("nan"), dtype=dtype)
    block_table = torch.full((len(seq_lens) + 1, max(blocks_needed, default=0) + 2), 2**30, dtype=torch.int32)
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    keys, values = [], []
    for request, length in enumerate(seq_lens):
        key, value = random(length, num_kv_heads, head_dim), random(length, num_kv_heads, head_dim)
        keys.append(key)
        values.append(value)
        row = [free.pop() for _ in range(blocks_needed[request])]
        block_table[request, : len(row)] = torch.tensor(row, dtype=torch.int32)
        for position in range(length):
            key_cache[row[position // block_size], position % block_size] = key[position]
            value_cache[row[position // block_size], position % block_size] = value[position]
    query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
    query = random(sum(query_lens) + padding_tokens, num_q_heads, head_dim)
    return Batch(query, key_cache, value_cache, block_table, query_start_loc, torch.tensor(seq_lens, dtype=torch.int32), keys, values)


def dense_attention(batch: Batch, scale: float, sliding_window: int | None = None) -> Tensor:
    """Query by query, head by head, in float64, over the keys in logical order: no cache, no blocks, no mask arithmetic."""
    num_q_heads = batch.query.shape[1]
    result = torch.zeros(batch.query.shape, dtype=torch.float64)
    for request, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        start, end = batch.query_start_loc[request : request + 2].tolist()
        group = num_q_heads // keys.shape[1]
        for token in range(start, end):
            position = keys.shape[0] - (end - token)
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(num_q_heads):
                seen_keys = keys[oldest : position + 1, head // group].double()
                seen_values = values[oldest : position + 1, head // group].double()
                logits = seen_keys @ batch.query[token, head].double() * scale
                result[token, head] = torch.softmax(logits, dim=0) @ seen_values
    return result
