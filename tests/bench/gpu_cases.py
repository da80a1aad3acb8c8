"""The batches that `tests.bench.gpu` measures, what each of them has to move at least, and its results against float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from kernels import Backend


@dataclass(frozen=True)
class Heads:
    """One attention layer of a model."""

    model: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA = Heads("Llama-3.1-8B", 32, 8, 128)
SMOLLM2 = Heads("SmolLM2-135M", 9, 3, 64)


@dataclass(frozen=True)
class DecodeCase:
    """One decode step: `batch` requests with `context` tokens each, the newest of them its query."""

    heads: Heads
    batch: int
    context: int
    block_size: int
    itemsize: int = 2

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all requests, each read once."""
        return 2 * self.batch * self.context * self.heads.num_kv_heads * self.heads.head_dim * self.itemsize

    @property
    def num_bytes(self) -> int:
        """The least that must move: keys and values, queries in and outputs out, and the block table."""
        queries = self.batch * self.heads.num_q_heads * self.heads.head_dim * self.itemsize
        return self.kv_bytes + 2 * queries + 4 * self.batch * self.blocks_per_request

    @property
    def blocks_per_request(self) -> int:
        return -(-self.context // self.block_size)

    def __str__(self) -> str:
        return f"{self.heads.model}, batch {self.batch}, context {self.context}, blocks of {self.block_size}"


def decode_cases(quick: bool) -> list[DecodeCase]:
    """Smallest first, so that a budget that runs out costs the largest."""
    contexts, batches, sizes = ((1024, 8192), (1, 16), (16,)) if quick else ((1024, 4096, 8192, 16384, 32768), (1, 4, 16, 64), (16, 32))
    cases = [DecodeCase(heads, batch, context, size) for heads in (LLAMA, SMOLLM2) for batch in batches for context in contexts for size in sizes]
    return sorted(cases, key=lambda case: case.num_bytes)


def write_bytes(num_tokens: int, heads: Heads, itemsize: int) -> int:
    """Keys and values of every token, read and written, and its slot (8 bytes)."""
    return num_tokens * (2 * 2 * heads.num_kv_heads * heads.head_dim * itemsize + 8)


def copy_bytes(num_pages: int, block_size: int, heads: Heads, itemsize: int) -> int:
    """Keys and values of every page, read and written, and its pair (16 bytes)."""
    return num_pages * (2 * 2 * block_size * heads.num_kv_heads * heads.head_dim * itemsize + 16)


def page_table(num_reqs: int, blocks_per_request: int, device: str) -> tuple[Tensor, int]:
    """int32 [num_reqs, blocks_per_request]: every block of the pool but block 0, shuffled; and the number of blocks."""
    num_blocks = num_reqs * blocks_per_request + 1
    return (torch.randperm(num_blocks - 1, device=device) + 1).view(num_reqs, blocks_per_request).int(), num_blocks


def random_normal(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device).normal_()


@dataclass(frozen=True)
class DecodeBatch:
    """A decode case in memory: `sets` times its requests, so that launches that take turns find nothing of theirs in the GPU's cache."""

    case: DecodeCase
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    tables: list[Tensor]
    query_start_loc: Tensor
    seq_lens: Tensor
    metadata: list[kernels.AttentionMetadata]

    @property
    def scale(self) -> float:
        return self.case.heads.head_dim**-0.5

    def attend(self, which: int, out: Tensor, backend: Backend | str) -> Tensor:
        """Attention of set `which`."""
        return kernels.paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.tables[which],
            self.query_start_loc,
            self.seq_lens,
            scale=self.scale,
            out=out,
            metadata=self.metadata[which],
            backend=backend,
        )

    def gathered(self, which: int) -> tuple[Tensor, Tensor]:
        """Keys and values of set `which` in logical order: [batch, num_kv_heads, context, head_dim]."""
        table = self.tables[which].long()
        return tuple(  # type: ignore[return-value]
            cache[table].flatten(1, 2)[:, : self.case.context].transpose(1, 2).contiguous() for cache in (self.key_cache, self.value_cache)
        )


def decode_batch(case: DecodeCase, sets: int, dtype: torch.dtype, device: str) -> DecodeBatch:
    """Random queries, keys and values."""
    heads = case.heads
    table, num_blocks = page_table(case.batch * sets, case.blocks_per_request, device)
    caches = [random_normal((num_blocks, case.block_size, heads.num_kv_heads, heads.head_dim), dtype, device) for _ in range(2)]
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    seq_lens = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
    tables = list(table.split(case.batch))
    slots = torch.zeros(case.batch, dtype=torch.int64, device=device)
    metadata = [
        kernels.AttentionMetadata(block_table=its, query_start_loc=starts, seq_lens=seq_lens, slot_mapping=slots, max_seq_len=case.context) for its in tables
    ]
    query = random_normal((case.batch, heads.num_q_heads, heads.head_dim), dtype, device)
    return DecodeBatch(case, query, *caches, tables, starts, seq_lens, metadata)


def attention_error(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    requests: Iterable[int] | None = None,
) -> float:
    """Largest difference of `out` from softmax attention in float64 over the same numbers, request by request (None: all of them), in parts of a request's
    largest number: over a long context random values average to nearly nothing, and so would the difference."""
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = query.shape[1] // num_kv_heads
    starts, largest = query_start_loc.tolist(), 0.0
    for request in range(seq_lens.shape[0]) if requests is None else requests:
        start, end, length = starts[request], starts[request + 1], int(seq_lens[request])
        if start == end:
            continue
        blocks = block_table[request, : -(-length // block_size)].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length].double() for cache in (key_cache, value_cache))
        queries = query[start:end].double().view(end - start, num_kv_heads, group, -1)
        position = torch.arange(length - (end - start), length, device=out.device)[:, None]
        distance = position - torch.arange(length, device=out.device)[None, :]
        hidden = (distance < 0) if sliding_window is None else (distance < 0) | (distance >= sliding_window)
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        expected = torch.einsum("hgqk,khd->qhgd", weights, values).reshape(end - start, num_kv_heads * group, -1)
        largest = max(largest, float((out[start:end].double() - expected).abs().max() / expected.abs().max()))
    return largest
