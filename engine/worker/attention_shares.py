"""How much attention the newest token gives to each logical block: computed beside the kernel, from the same query and the same cached keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels import AttentionMetadata

_DIGITS = 8


class AttentionShares(NamedTuple):
    """Of each request's last query token: `blocks`, one row per request, the mean over the query heads of `heads`, which has one row per query head."""

    blocks: list[list[float]]
    heads: list[list[list[float]]]


def attention_shares(
    query: torch.Tensor, key_cache: torch.Tensor, metadata: AttentionMetadata, *, scale: float, sliding_window: int | None = None
) -> AttentionShares:
    """Per request of the batch, the softmax weights of its last query token, added up per logical block, for each query head and on average.

    `query`: [num_tokens, num_q_heads, head_dim]; `key_cache`: [num_blocks, block_size, num_kv_heads, head_dim], in which this step's keys are written.
    Each row has one number per block that holds tokens of the request and sums to 1 within 1e-6 (numbers are rounded to 8 digits). With `sliding_window`
    W only the last W keys are seen; blocks before them get 0. Changes nothing. Source: the paper, section 4.1 (A_ij, summed over a block).
    """
    block_size = key_cache.shape[1]
    weights = [*_last_query_weights(query, key_cache, metadata, scale, sliding_window)]
    return AttentionShares(
        [_per_block(its.mean(0, keepdim=True), block_size)[0] for its in weights],
        [_per_block(its, block_size) for its in weights],
    )


def _last_query_weights(
    query: torch.Tensor, key_cache: torch.Tensor, metadata: AttentionMetadata, scale: float, sliding_window: int | None
) -> Iterator[torch.Tensor]:
    """Float64 [num_q_heads, seq_len] per request, on the CPU."""
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    ends = metadata.query_start_loc[1:].tolist()
    for row, (end, seq_len) in enumerate(zip(ends, metadata.seq_lens.tolist(), strict=True)):
        block_ids = metadata.block_table[row, : -(-seq_len // block_size)].long()
        keys = key_cache[block_ids].reshape(-1, num_kv_heads, head_dim)[:seq_len].to(device="cpu", dtype=torch.float64)
        heads = query[end - 1].to(device="cpu", dtype=torch.float64).reshape(num_kv_heads, -1, head_dim)  # query head h reads KV head h // (heads per KV head)
        scores = torch.einsum("ngd,tnd->ngt", heads, keys) * scale
        if sliding_window is not None and seq_len > sliding_window:
            scores[..., : seq_len - sliding_window] = -torch.inf
        yield scores.softmax(-1).flatten(0, 1)


def _per_block(weights: torch.Tensor, block_size: int) -> list[list[float]]:
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % block_size))
    sums: list[list[float]] = padded.reshape(len(weights), -1, block_size).sum(2).tolist()
    return [[round(share, _DIGITS) for share in row] for row in sums]
