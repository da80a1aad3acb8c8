"""The reference's attention for several requests of one query each, gathered at once: what `kernels.reference` does one by one, in fewer calls.

A decode of eight short requests is eight times the same few small operations in every layer, and starting them takes longer than they do. Here the keys of
all requests are gathered in one go, the shorter ones filled up with a slot of their own that is masked, so that no request ever touches another's slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_ELEMENTS = 1 << 18
"""Keys of all requests, in numbers, up to which gathering them at once is faster; beyond that they leave the processor's cache before they are used."""


class Decodes(NamedTuple):
    """Requests with one query each. `rows`: places of the queries in the batch; `slots`: int64 [num_requests * longest], each request's own keys in the order
    of positions, filled up with the first of them; `bias`: float32 [num_requests, 1, 1, longest], minus infinity where they are filled up, None where
    nothing is; `is_all`: there is no other query in the batch, so that the rows are 0, 1, 2 and so on."""

    rows: Tensor
    slots: Tensor
    longest: int
    bias: Tensor | None
    is_all: bool


def join(rows: Sequence[int], slots: Sequence[Tensor], *, is_all: bool = False) -> Decodes:
    """`rows[i]`: the query's place in the batch; `slots[i]`: int64, at least one, what it sees."""
    lengths = [len(its) for its in slots]
    longest = max(lengths)
    filled = [its if len(its) == longest else torch.cat([its, its[:1].expand(longest - len(its))]) for its in slots]
    bias = None
    if min(lengths) < longest:
        length = torch.tensor(lengths, device=slots[0].device)
        hidden = torch.arange(longest, device=length.device) >= length[:, None]
        bias = torch.zeros(hidden.shape, device=length.device).masked_fill_(hidden, -torch.inf)[:, None, None]
    return Decodes(torch.tensor(list(rows), device=slots[0].device), torch.cat(filled), longest, bias, is_all)


def attend(decodes: Decodes, query: Tensor, key_cache: Tensor, value_cache: Tensor, *, scale: float, out: Tensor) -> None:
    """Write the attention of the requests' queries to their rows of `out`; arguments as in `kernels.paged_attention`."""
    num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
    num_queries = len(decodes.rows)
    # The query heads that read one KV head, as if they were queries of one head: [num_requests, num_kv_heads, heads per KV head, head_dim].
    q = (query if decodes.is_all else query.index_select(0, decodes.rows)).reshape(num_queries, num_kv_heads, -1, head_dim)
    by_slot, by_request = (num_blocks * block_size, num_kv_heads, head_dim), (num_queries, decodes.longest, num_kv_heads, head_dim)
    k = key_cache.reshape(by_slot).index_select(0, decodes.slots).view(by_request).transpose(1, 2)
    v = value_cache.reshape(by_slot).index_select(0, decodes.slots).view(by_request).transpose(1, 2)
    if query.dtype not in (torch.float32, torch.float64):
        q, k, v = q.float(), k.float(), v.float()
    bias = decodes.bias if decodes.bias is None or decodes.bias.dtype == q.dtype else decodes.bias.to(q.dtype)
    result = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).reshape(num_queries, -1, head_dim)
    if decodes.is_all:
        out.copy_(result)
    else:
        out[decodes.rows] = result.to(out.dtype)
