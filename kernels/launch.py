"""How wide each kernel's tiles are, and the arguments it is launched with; the same for the interpreter and for a CUDA device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.triton_attention import paged_attention_kernel
from kernels.triton_cache import copy_pages_kernel, reshape_and_cache_kernel, slot_mapping_kernel

PAD_SLOT_ID = -1
INTERPRETED_ELEMENTS = 1 << 20
"""Largest tile of an interpreted program: the interpreter accepts no more elements than the compiler does."""
INTERPRETED_BLOCK_Q = 64
DEVICE_TILE = 1024
PAST_ANY_REQUEST = 1 << 30


class Launch(Protocol):
    """Runs a kernel: (kernel, grid, *arguments, **constants)."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None: ...


@dataclass(frozen=True)
class Launcher:
    """The four operations on top of one way to run a kernel."""

    run: Launch
    interpreted: bool

    def compute_slot_mapping(
        self,
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
        """On a device num_reqs + 1 programs, as vLLM; interpreted one program for all requests and one for the padding."""
        num_reqs = max(0, query_start_loc.shape[0] - 1)
        if num_reqs == 0:
            slot_mapping.fill_(PAD_SLOT_ID)
            return
        lanes, tile = 1, DEVICE_TILE
        if self.interpreted:
            tile = next_power_of_2(max(int(query_start_loc.diff().max()), slot_mapping.shape[0] - int(query_start_loc[-1]), 1))
            tile = min(tile, INTERPRETED_ELEMENTS)
            lanes = max(1, min(next_power_of_2(num_reqs), INTERPRETED_ELEMENTS // tile))
        self.run(
            slot_mapping_kernel,
            (cdiv(num_reqs, lanes) + 1,),
            query_start_loc.contiguous(),
            positions.contiguous(),
            _rows_contiguous(block_table),
            slot_mapping,
            num_reqs,
            slot_mapping.shape[0],
            block_table.stride(0),
            BLOCK_SIZE=block_size,
            KERNEL_BLOCK_SIZE=kernel_block_size,
            CP_WORLD_SIZE=cp_world_size,
            CP_RANK=cp_rank,
            CP_INTERLEAVE=cp_interleave,
            PAD_SLOT_ID=PAD_SLOT_ID,
            LANES=lanes,
            TILE=tile,
        )

    def reshape_and_cache(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        """On a device one program per token; interpreted as many tokens per program as fit a tile."""
        num_tokens = slot_mapping.shape[0]
        block_size, num_kv_heads, head_dim = key_cache.shape[1:]
        row = next_power_of_2(num_kv_heads * head_dim)
        tokens = 1
        if self.interpreted:
            tokens = max(1, min(next_power_of_2(num_tokens), INTERPRETED_ELEMENTS // row))
        key, value = _rows_contiguous(key), _rows_contiguous(value)
        self.run(
            reshape_and_cache_kernel,
            (cdiv(num_tokens, tokens),),
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping.contiguous(),
            num_tokens,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            BLOCK_SIZE=block_size,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            ROW=row,
            TOKENS=tokens,
        )

    def paged_attention(
        self,
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
    ) -> None:
        """One launch; see triton_attention for lanes and query blocks."""
        block_size, num_kv_heads, head_dim = key_cache.shape[1:]
        group = query.shape[1] // num_kv_heads
        block_m = self._rows_per_lane(query, group, query_start_loc)
        request, start = query_blocks(query_start_loc, query.shape[0], block_m // group)
        if request.shape[0] == 0:
            return
        lanes_needed = request.shape[0] * num_kv_heads
        head_padded = next_power_of_2(head_dim)
        lanes, tile = 1, 64 if head_dim <= 128 else 32
        if self.interpreted:
            tile = next_power_of_2(int(seq_lens.max()))
            lanes = next_power_of_2(lanes_needed)
            while tile > 64 and lanes * tile * max(block_m, head_padded) > INTERPRETED_ELEMENTS:
                tile //= 2
            while lanes > 1 and lanes * tile * max(block_m, head_padded) > INTERPRETED_ELEMENTS:
                lanes //= 2
        else:
            head_padded = max(16, head_padded)
        programs = cdiv(lanes_needed, lanes)
        surplus = cdiv(programs * lanes, num_kv_heads) - request.shape[0]
        if surplus > 0:
            request = torch.nn.functional.pad(request, (0, surplus), value=0)
            start = torch.nn.functional.pad(start, (0, surplus), value=PAST_ANY_REQUEST)
        # The interpreter's cast to bfloat16 loses the carry when a mantissa rounds up, so it writes float32 and torch casts.
        target = torch.empty_like(out, dtype=torch.float32) if self.interpreted and out.dtype != torch.float32 else _rows_contiguous(out)
        if target is not out:
            target.copy_(out)
        query = _rows_contiguous(query)
        self.run(
            paged_attention_kernel,
            (programs,),
            target,
            query,
            key_cache,
            value_cache,
            _rows_contiguous(block_table),
            query_start_loc.contiguous(),
            seq_lens.contiguous(),
            request,
            start,
            scale * math.log2(math.e),
            block_table.stride(0),
            *target.stride()[:2],
            *query.stride()[:2],
            *key_cache.stride()[:3],
            BLOCK_SIZE=block_size,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            HEAD_PADDED=head_padded,
            SLIDING_WINDOW=sliding_window or 0,
            UPCAST=self.interpreted,
            LANES=lanes,
            BLOCK_M=block_m,
            TILE=tile,
        )
        if target is not out:
            out.copy_(target)

    def _rows_per_lane(self, query: Tensor, group: int, query_start_loc: Tensor) -> int:
        if self.interpreted:
            longest = int(query_start_loc.diff().max())
            return next_power_of_2(group * max(1, min(longest, INTERPRETED_BLOCK_Q)))
        all_decodes = query.shape[0] <= query_start_loc.shape[0] - 1
        # More rows reuse each key more often; wider heads leave fewer registers for them.
        rows = 16 if all_decodes else 64 if query.shape[2] <= 128 else 32
        return max(rows, next_power_of_2(group))

    def copy_blocks(self, key_caches: list[Tensor], value_caches: list[Tensor], block_pairs: Tensor) -> None:
        """Per cache: gather the source pages into a buffer, then scatter it, so that no read follows a write (R6.7).

        The detour is not needed for a single pair, nor interpreted when one program holds all pages: it reads all of them before it writes.
        On a device it is needed even then, because the warps of a program do not wait for each other.
        """
        pairs = block_pairs.contiguous()
        num_pages = pairs.shape[0]
        for cache in (*key_caches, *value_caches):
            page_size = cache[0].numel()
            pages, tile = 1, DEVICE_TILE
            if self.interpreted:
                tile = min(next_power_of_2(page_size), INTERPRETED_ELEMENTS)
                pages = max(1, min(next_power_of_2(num_pages), INTERPRETED_ELEMENTS // tile))
            moves = [(cache, cache, True, True)]
            if pages < num_pages:
                buffer = cache.new_empty(num_pages, page_size)
                moves = [(cache, buffer, True, False), (buffer, cache, False, True)]
            for source, destination, gather, scatter in moves:
                self.run(
                    copy_pages_kernel,
                    (cdiv(num_pages, pages), cdiv(page_size, tile)),
                    source,
                    destination,
                    pairs,
                    pairs[:, 1],
                    num_pages,
                    pairs.stride(0),
                    page_size,
                    source.stride(0),
                    destination.stride(0),
                    GATHER=gather,
                    SCATTER=scatter,
                    PAGES=pages,
                    TILE=tile,
                )


def query_blocks(query_start_loc: Tensor, num_tokens: int, block_q: int) -> tuple[Tensor, Tensor]:
    """Cut every request's queries into blocks of `block_q`: int32 (request, first query within the request) per block.

    On a device the number of blocks is bounded, not computed, so that the host never waits for the GPU; a surplus block starts past the end
    of its request and does nothing.
    """
    starts = query_start_loc.long()
    num_reqs = starts.shape[0] - 1
    if query_start_loc.device.type == "cpu":
        counts = (starts.diff() + block_q - 1) // block_q
        first_block = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        request = torch.repeat_interleave(counts)
    else:
        first_block = starts // block_q + torch.arange(num_reqs + 1, device=starts.device)
        index = torch.arange(num_tokens // block_q + num_reqs, device=starts.device)
        request = (torch.searchsorted(first_block, index, right=True) - 1).clamp(max=num_reqs - 1)
    start = (torch.arange(request.shape[0], device=starts.device) - first_block[request]) * block_q
    return request.int(), start.int()


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 1 else 1


def cdiv(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself when its last dimension is dense, as the kernels assume; a dense copy otherwise."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
