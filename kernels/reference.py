"""The plain torch reference: it defines what each operation means, and it is the default on a CPU.

Attention is computed request by request, and a request reads no slot but its own. Decodes that are alone or short take a shortcut
(`kernels.reference_decodes`), which a test holds against this file's way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import reference_decodes
from kernels.metadata import Derived
from kernels.reference_decodes import Decodes

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
    """Slot of every token of the batch (R8.4), -1 for tokens of other ranks, past the row's end, and for the padding (R8.5)."""
    num_tokens = int(query_start_loc[-1]) if query_start_loc.numel() else 0
    slot_mapping[num_tokens:] = PAD_SLOT_ID
    if num_tokens == 0:
        return
    request = torch.repeat_interleave(query_start_loc.diff().long())
    position = positions[:num_tokens]
    width = block_table.shape[1]
    if cp_world_size == 1:  # the same as below, with every token local
        column = position // kernel_block_size
        block = block_table[request, column.clamp(max=width - 1)].long()
        slot_mapping[:num_tokens] = torch.where(column < width, block * kernel_block_size + position % kernel_block_size, PAD_SLOT_ID)
        return
    virtual_block_size = block_size * cp_world_size
    offset = position % virtual_block_size
    local_offset = offset // (cp_world_size * cp_interleave) * cp_interleave + offset % cp_interleave
    column = position // virtual_block_size * (block_size // kernel_block_size) + local_offset // kernel_block_size
    is_local = (offset // cp_interleave % cp_world_size == cp_rank) & (column < width)
    # A token of another rank may lie past the end of this rank's row, so its column is not looked up.
    block = block_table[request, torch.where(is_local, column, 0)].long()
    slot = block * kernel_block_size + local_offset % kernel_block_size
    slot_mapping[:num_tokens] = torch.where(is_local, slot, PAD_SLOT_ID)


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, derived: Derived) -> None:
    """Write row t of key and value to slot `slot_mapping[t]`; -1 writes nothing."""
    block_size = key_cache.shape[1]
    all_written, token, block, offset = derived.once(("torch written", block_size), lambda: _written(slot_mapping, block_size))
    if all_written and key.shape[0] == value.shape[0] == slot_mapping.shape[0] and key_cache.is_contiguous():
        slots = (-1, *key_cache.shape[2:])
        key_cache.view(slots).index_copy_(0, slot_mapping, key)
        value_cache.view(slots).index_copy_(0, slot_mapping, value)
    else:
        key_cache[block, offset] = key[token]
        value_cache[block, offset] = value[token]


def _written(slot_mapping: Tensor, block_size: int) -> tuple[bool, Tensor, Tensor, Tensor]:
    """Whether every token has a slot; the tokens that have one, with block and offset of each."""
    token = torch.nonzero(slot_mapping >= 0).squeeze(1)
    slot = slot_mapping[token]
    return slot.shape == slot_mapping.shape, token, slot // block_size, slot % block_size


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
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    compute_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    decodes, requests = derived.once(
        ("torch requests", block_size, sliding_window, num_kv_heads * head_dim, query.shape[0]),
        lambda: _joined(_requests(block_table, query_start_loc, seq_lens, block_size, sliding_window), num_kv_heads * head_dim, query.shape[0]),
    )
    if decodes is not None:
        reference_decodes.attend(decodes, query, key_cache, value_cache, scale=scale, out=out)
    for start, end, slots, visible in requests:
        q, k, v = query[start:end].transpose(0, 1).unsqueeze(0), _gather(key_cache, slots), _gather(value_cache, slots)
        if query.dtype != compute_dtype:
            q, k, v = q.to(compute_dtype), k.to(compute_dtype), v.to(compute_dtype)
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
        out[start:end] = result[0].transpose(0, 1)


class _Request(NamedTuple):
    """Queries start..end-1 of the batch see the keys in `slots`; `visible` None: each of them sees all."""

    start: int
    end: int
    slots: Tensor  # int64, in the order of positions
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
        key_position = torch.arange(first_key, seq_len, device=block_table.device)
        slots = block_table[row, key_position // block_size].long() * block_size + key_position % block_size
        visible = None  # a single query is the newest position, so it sees every key that is gathered
        if query_len > 1:
            query_position = torch.arange(first_query, seq_len, device=block_table.device).unsqueeze(1)
            visible = key_position <= query_position
            if sliding_window is not None:
                visible &= key_position > query_position - sliding_window
        requests.append(_Request(start, end, slots, visible))
    return requests


def _joined(requests: list[_Request], numbers_per_token: int, num_tokens: int) -> tuple[Decodes | None, list[_Request]]:
    """The requests of a single query that are worth gathering at once, and the others."""
    single = [request for request in requests if request.visible is None]
    longest = max((len(request.slots) for request in single), default=0)
    if not single or (len(single) > 1 and len(single) * longest * numbers_per_token > reference_decodes.MAX_ELEMENTS):
        return None, requests
    decodes = reference_decodes.join([request.start for request in single], [request.slots for request in single], is_all=len(single) == num_tokens)
    return decodes, [request for request in requests if request.visible is not None]


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Keys or values in the order of `slots`, as a batch of one with the heads first: [1, num_kv_heads, len(slots), head_dim]."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    # A view unless the cache is interleaved with another; then it is copied whole, which is slow but right.
    return cache.reshape(1, num_blocks * block_size, num_kv_heads, head_dim).index_select(1, slots).transpose(1, 2)


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_pairs: Tensor) -> None:
    """Copy whole pages source -> destination in every layer. Indexing on the right copies first, so all sources are read before a write (R6.7)."""
    source, destination = block_pairs[:, 0], block_pairs[:, 1]
    for cache in (*key_caches, *value_caches):
        cache[destination] = cache[source]
