"""The plain torch reference: it defines what each operation means, and it is the default on a CPU.

A request's result never depends on the other requests of the batch: attention is computed request by request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.metadata import Derived

PAD_SLOT_ID = -1


def compute_slot_mapping(
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    kernel_block_size: int,
    cp_world_size: int,
    cp_rank: int,
    cp_interleave: int,
) -> None:
    """Slot of every token of the batch (R8.4), -1 for tokens of other ranks and for the padding (R8.5)."""
    num_tokens = int(query_start_loc[-1]) if query_start_loc.numel() else 0
    slot_mapping[num_tokens:] = PAD_SLOT_ID
    if num_tokens == 0:
        return
    request = torch.repeat_interleave(query_start_loc.diff().long())
    position = positions[:num_tokens]
    virtual_block_size = block_size * cp_world_size
    offset = position % virtual_block_size
    local_offset = offset // (cp_world_size * cp_interleave) * cp_interleave + offset % cp_interleave
    column = position // virtual_block_size * (block_size // kernel_block_size) + local_offset // kernel_block_size
    is_local = offset // cp_interleave % cp_world_size == cp_rank
    # A token of another rank may lie past the end of this rank's row, so its column is not looked up.
    block = block_table[request, torch.where(is_local, column, 0)].long()
    slot = block * kernel_block_size + local_offset % kernel_block_size
    slot_mapping[:num_tokens] = torch.where(is_local, slot, PAD_SLOT_ID)


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, derived: Derived) -> None:
    """Write row t of key and value to slot `slot_mapping[t]`; -1 writes nothing."""
    block_size = key_cache.shape[1]
    token, block, offset = derived.once(("torch written", block_size), lambda: _written(slot_mapping, block_size))
    if key_cache.stride(0) == block_size * key_cache.stride(1) and token is None:
        num_slots = slot_mapping.shape[0]
        key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key[:num_slots])
        value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value[:num_slots])
    else:
        chosen = slice(slot_mapping.shape[0]) if token is None else token
        key_cache[block, offset] = key[chosen]
        value_cache[block, offset] = value[chosen]


def _written(slot_mapping: Tensor, block_size: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """The tokens that have a slot (None: all of them), with block and offset of each."""
    token = torch.nonzero(slot_mapping >= 0).squeeze(1)
    slot = slot_mapping[token]
    return None if slot.shape == slot_mapping.shape else token, slot // block_size, slot % block_size


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    out: Tensor,
    derived: Derived,
) -> None:
    """Causal softmax(q k^T * scale) v per request, over exactly the slots that its queries may see."""
    block_size = key_cache.shape[1]
    compute_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    requests = derived.once(
        ("torch requests", block_size, sliding_window), lambda: _requests(block_table, query_start_loc, seq_lens, block_size, sliding_window)
    )
    for request in requests:
        result = torch.nn.functional.scaled_dot_product_attention(
            _heads_first(query[request.start : request.end], compute_dtype),
            _heads_first(_gather(key_cache, request), compute_dtype),
            _heads_first(_gather(value_cache, request), compute_dtype),
            attn_mask=request.visible,
            scale=scale,
            enable_gqa=True,
        )
        out[request.start : request.end] = result.squeeze(0).transpose(0, 1)


class _Request(NamedTuple):
    """Queries start..end-1 of the batch see num_keys tokens from first_offset on in `blocks`; `visible` None: each of them sees all."""

    start: int
    end: int
    blocks: Tensor  # int64
    first_offset: int
    num_keys: int
    visible: Tensor | None  # bool [queries, keys]


def _requests(block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_size: int, sliding_window: int | None) -> list[_Request]:
    """The requests that have queries."""
    starts = query_start_loc.tolist()
    requests = []
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        query_len = end - start
        if query_len == 0:
            continue
        first_query = seq_len - query_len
        first_key = 0 if sliding_window is None else max(0, first_query - sliding_window + 1)
        first_block, last_block = first_key // block_size, (seq_len - 1) // block_size
        blocks = block_table[row, first_block : last_block + 1].long()
        visible = None  # a single query is the newest position, so it sees every key that is gathered
        if query_len > 1:
            query_position = torch.arange(first_query, seq_len, device=block_table.device).unsqueeze(1)
            key_position = torch.arange(first_key, seq_len, device=block_table.device).unsqueeze(0)
            visible = key_position <= query_position
            if sliding_window is not None:
                visible &= key_position > query_position - sliding_window
        requests.append(_Request(start, end, blocks, first_key - first_block * block_size, seq_len - first_key, visible))
    return requests


def _gather(cache: Tensor, request: _Request) -> Tensor:
    """The request's keys or values in logical order: [num_keys, num_kv_heads, head_dim]."""
    return cache.index_select(0, request.blocks).flatten(0, 1).narrow(0, request.first_offset, request.num_keys)


def _heads_first(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, heads, head_dim] as a batch of one: [1, heads, tokens, head_dim]."""
    return tokens.to(dtype).transpose(0, 1).unsqueeze(0)


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_pairs: Tensor) -> None:
    """Copy whole pages source -> destination in every layer. Indexing on the right copies first, so all sources are read before a write (R6.7)."""
    source, destination = block_pairs[:, 0], block_pairs[:, 1]
    for cache in (*key_caches, *value_caches):
        cache[destination] = cache[source]
