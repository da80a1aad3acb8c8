"""How much attention the newest token gives to each logical block: computed beside the kernel, from the same query and the same cached keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels import AttentionMetadata

_DIGITS = 8


def block_shares(
    query: torch.Tensor, key_cache: torch.Tensor, metadata: AttentionMetadata, *, scale: float, sliding_window: int | None = None
) -> list[list[float]]:
    """Per request of the batch, the softmax weights of its last query token, averaged over the query heads and added up per logical block.

    `query`: [num_tokens, num_q_heads, head_dim]; `key_cache`: [num_blocks, block_size, num_kv_heads, head_dim], in which this step's keys are written.
    Each row has one number per block that holds tokens of the request and sums to 1 within 1e-6 (numbers are rounded to 8 digits). With `sliding_window`
    W only the last W keys are seen; blocks before them get 0. Changes nothing. Source: the paper, section 4.1 (A_ij, summed over a block).
    """
    block_size = key_cache.shape[1]
    return [
        [round(share, _DIGITS) for share in _per_block(weights, block_size)]
        for weights in _last_query_weights(query, key_cache, metadata, scale, sliding_window)
    ]


def _last_query_weights(
    query: torch.Tensor, key_cache: torch.Tensor, metadata: AttentionMetadata, scale: float, sliding_window: int | None
) -> Iterator[torch.Tensor]:
    """Float64 [seq_len] per request, on the CPU."""
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    ends = metadata.query_start_loc[1:].tolist()
    for row, (end, seq_len) in enumerate(zip(ends, metadata.seq_lens.tolist(), strict=True)):
        block_ids = metadata.block_table[row, : -(-seq_len // block_size)].long()
        keys = key_cache[block_ids].reshape(-1, num_kv_heads, head_dim)[:seq_len].to(device="cpu", dtype=torch.float64)
        heads = query[end - 1].to(device="cpu", dtype=torch.float64).reshape(num_kv_heads, -1, head_dim)  # query head h reads KV head h // (heads per KV head)
        scores = torch.einsum("ngd,tnd->ngt", heads, keys) * scale
        if sliding_window is not None and seq_len > sliding_window:
            scores[..., : seq_len - sliding_window] = -torch.inf
        yield scores.softmax(-1).mean((0, 1))


def _per_block(weights: torch.Tensor, block_size: int) -> list[float]:
    shares: list[float] = torch.nn.functional.pad(weights, (0, -len(weights) % block_size)).reshape(-1, block_size).sum(1).tolist()
    return shares
