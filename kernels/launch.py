"""How wide each kernel's tiles are, and the arguments it is launched with; the same for the interpreter and for a CUDA device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.backend import GpuTiles
from kernels.launches import LaunchShape, recorder
from kernels.metadata import Derived
from kernels.progress import Progress
from kernels.triton_attention import paged_attention_kernel
from kernels.triton_cache import copy_pages_kernel, reshape_and_cache_kernel, slot_mapping_kernel
from kernels.watch import attention_watch, copy_watch, progress_watch, write_watch
from kernels.witness import Witness

PAD_SLOT_ID = -1
INTERPRETED_ELEMENTS = 1 << 20
"""Largest tile of an interpreted program: the interpreter accepts no more elements than the compiler does."""
INTERPRETED_BLOCK_Q = 64
DEVICE_TILE = 1024


class Launch(Protocol):
    """Runs a kernel: (kernel, grid, *arguments, **constants)."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None: ...


@dataclass(frozen=True)
class Launcher:
    """The four operations on top of one way to run a kernel. `own_account`: what a witness is told comes from a buffer that the kernel fills, as compiled
    kernels must; otherwise interpreted launches are watched pointer by pointer. `gpu_tiles`: None: interpreted launches get few and wide programs."""

    run: Launch
    interpreted: bool
    own_account: bool
    gpu_tiles: GpuTiles | None = None

    @property
    def wide(self) -> bool:
        """Few programs of many lanes, as suits the interpreter; otherwise the programs of a GPU."""
        return self.interpreted and self.gpu_tiles is None

    def _run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launches = recorder()
        if launches is not None:
            constexprs = {name: value for name, value in constants.items() if name.isupper()}
            launches.append(LaunchShape(kernel.fn.__name__, grid, constexprs.get("LANES") or constexprs.get("TOKENS") or constexprs["PAGES"], constexprs))
        self.run(kernel, grid, *arguments, **constants)

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
        if self.wide:
            tile = next_power_of_2(max(int(query_start_loc.diff().max()), slot_mapping.shape[0] - int(query_start_loc[-1]), 1))
            tile = min(tile, INTERPRETED_ELEMENTS)
            lanes = max(1, min(next_power_of_2(num_reqs), INTERPRETED_ELEMENTS // tile))
        self._run(
            slot_mapping_kernel,
            (cdiv(num_reqs, lanes) + 1,),
            query_start_loc.contiguous(),
            positions.contiguous(),
            _rows_contiguous(block_table),
            slot_mapping,
            num_reqs,
            slot_mapping.shape[0],
            block_table.stride(0),
            block_table.shape[1],
            BLOCK_SIZE=block_size,
            KERNEL_BLOCK_SIZE=kernel_block_size,
            CP_WORLD_SIZE=cp_world_size,
            CP_RANK=cp_rank,
            CP_INTERLEAVE=cp_interleave,
            PAD_SLOT_ID=PAD_SLOT_ID,
            LANES=lanes,
            TILE=tile,
        )

    def reshape_and_cache(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, derived: Derived, witness: Witness | None = None
    ) -> None:
        """On a device one program per token; interpreted as many tokens per program as fit a tile."""
        num_tokens = slot_mapping.shape[0]
        block_size, num_kv_heads, head_dim = key_cache.shape[1:]
        row = next_power_of_2(num_kv_heads * head_dim)
        tokens = 1
        if self.wide:
            tokens = max(1, min(next_power_of_2(num_tokens), INTERPRETED_ELEMENTS // row))
        key, value = _rows_contiguous(key), _rows_contiguous(value)
        if not _same_strides(key, value):
            key, value = key.contiguous(), value.contiguous()
        grid = cdiv(num_tokens, tokens)
        with write_watch(witness, self.own_account, key_cache, value_cache, key, grid, tokens, num_tokens) as extra:
            self._run(
                reshape_and_cache_kernel,
                (grid,),
                key,
                value,
                key_cache,
                value_cache,
                slot_mapping.contiguous(),
                num_tokens,
                *key.stride()[:2],
                *key_cache.stride()[:3],
                BLOCK_SIZE=block_size,
                NUM_KV_HEADS=num_kv_heads,
                HEAD_DIM=head_dim,
                ROW=row,
                DENSE_SLOTS=key_cache.stride(0) == block_size * key_cache.stride(1),
                DENSE_HEADS=num_kv_heads == 1 or key.stride(1) == key_cache.stride(2) == head_dim,
                TOKENS=tokens,
                EVEN=num_tokens % tokens == 0,
                **extra,
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
        derived: Derived,
        witness: Witness | None = None,
        progress: Progress | None = None,
    ) -> None:
        """One launch; see triton_attention for lanes and query blocks."""
        block_size, num_kv_heads, head_dim = key_cache.shape[1:]
        num_tokens, num_q_heads = query.shape[:2]
        group = num_q_heads // num_kv_heads
        blocks = derived.once(
            ("triton query blocks", self.wide, self.gpu_tiles, num_tokens, num_kv_heads, group, head_dim),
            lambda: self._query_blocks(query_start_loc, seq_lens, num_tokens, num_kv_heads, group, head_dim),
        )
        if blocks.programs == 0:
            return
        # The interpreter's cast to bfloat16 loses the carry when a mantissa rounds up, so it writes float32 and torch casts.
        query = _rows_contiguous(query)
        target = out
        if not _same_strides(query, out) or (self.interpreted and out.dtype != torch.float32):
            query = query.contiguous()
            target = torch.empty_like(query, dtype=torch.float32 if self.interpreted else out.dtype)
            target.copy_(out)
        max_keys = int(seq_lens.max()) if witness is not None or progress is not None else 0
        with (
            attention_watch(witness, self.own_account, key_cache, value_cache, target, blocks.programs, blocks.lanes, max_keys) as extra,
            progress_watch(progress, blocks, num_kv_heads, group, max_keys) as also,
        ):
            self._run(
                paged_attention_kernel,
                (blocks.programs,),
                target,
                query,
                key_cache,
                value_cache,
                _rows_contiguous(block_table),
                *blocks.arrays,
                scale * math.log2(math.e),
                block_table.stride(0),
                *query.stride()[:2],
                *key_cache.stride()[:3],
                BLOCK_SIZE=block_size,
                NUM_KV_HEADS=num_kv_heads,
                GROUP=group,
                HEAD_DIM=head_dim,
                HEAD_PADDED=blocks.head_padded,
                SLIDING_WINDOW=sliding_window or 0,
                UPCAST=self.interpreted and query.dtype != torch.float32,
                SINGLE_QUERY=blocks.block_q == 1,
                LANES=blocks.lanes,
                BLOCK_M=blocks.block_m,
                TILE=blocks.tile,
                ONE_TILE=blocks.one_tile,
                **extra,
                **also,
            )
        if target is not out:
            out.copy_(target)

    def _query_blocks(self, query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, num_kv_heads: int, group: int, head_dim: int) -> _QueryBlocks:
        """How the batch is cut into lanes, and how wide their tiles are."""
        head_padded = next_power_of_2(head_dim)
        one_tile = False
        if self.wide:
            longest = int(query_start_loc.diff().max())
            block_m = next_power_of_2(group * max(1, min(longest, INTERPRETED_BLOCK_Q)))
            block_q = 1 if longest <= 1 else block_m // group
        else:
            head_padded = max(16, head_padded)
            all_decodes = num_tokens <= query_start_loc.shape[0] - 1
            # More rows reuse each key more often; wider heads leave fewer registers for them.
            block_m = max(16 if all_decodes else 64 if head_dim <= 128 else 32, next_power_of_2(group))
            block_q = 1 if all_decodes else block_m // group
        arrays = query_blocks(query_start_loc, seq_lens, num_tokens, block_q, exact=self.wide)
        num_blocks = arrays[0].shape[0]
        lanes_needed = num_blocks * num_kv_heads
        lanes, tile = 1, (self.gpu_tiles and self.gpu_tiles.tile) or (64 if head_dim <= 128 else 32)
        if self.wide and num_blocks:
            tile = next_power_of_2(int(seq_lens.max()))
            lanes = next_power_of_2(lanes_needed)
            while tile > 64 and lanes * tile * max(block_m, head_padded) > INTERPRETED_ELEMENTS:
                tile //= 2
            while lanes > 1 and lanes * tile * max(block_m, head_padded) > INTERPRETED_ELEMENTS:
                lanes //= 2
            one_tile = tile >= int(seq_lens.max())
        programs = cdiv(lanes_needed, lanes)
        surplus = cdiv(programs * lanes, num_kv_heads) - num_blocks
        if surplus > 0:  # blocks without queries
            arrays = tuple(torch.nn.functional.pad(array, (0, surplus)) for array in arrays)
        return _QueryBlocks(programs, lanes, block_q, block_m, tile, one_tile, head_padded, arrays)

    def copy_blocks(self, key_caches: list[Tensor], value_caches: list[Tensor], block_pairs: Tensor, witness: Witness | None = None) -> None:
        """Per cache: gather the source pages into a buffer, then scatter it, so that no read follows a write (R6.7).

        The detour is not needed for a single pair, nor interpreted when one program holds all pages: it reads all of them before it writes.
        On a device it is needed even then, because the warps of a program do not wait for each other.
        """
        pairs = block_pairs.contiguous()
        for key_cache, value_cache in zip(key_caches, value_caches, strict=True):
            pages, _, grid = self._copy_grid(key_cache, pairs.shape[0])
            with copy_watch(witness, self.own_account, key_cache, value_cache, pairs.shape[0], grid[0] * grid[1], pages) as extra_of:
                for cache in (key_cache, value_cache):
                    self._copy_pages(cache, pairs, extra_of(cache))

    def _copy_grid(self, cache: Tensor, num_pages: int) -> tuple[int, int, tuple[int, int]]:
        """Pages per program, elements per program, and the grid."""
        page_size = cache[0].numel()
        pages, tile = 1, DEVICE_TILE
        if self.wide:
            tile = min(next_power_of_2(page_size), INTERPRETED_ELEMENTS)
            pages = max(1, min(next_power_of_2(num_pages), INTERPRETED_ELEMENTS // tile))
        return pages, tile, (cdiv(num_pages, pages), cdiv(page_size, tile))

    def _copy_pages(self, cache: Tensor, pairs: Tensor, extra: dict[str, Any]) -> None:
        num_pages, page_size = pairs.shape[0], cache[0].numel()
        pages, tile, grid = self._copy_grid(cache, num_pages)
        moves = [(cache, cache, True, True)]
        if pages < num_pages:
            buffer = cache.new_empty(num_pages, page_size)
            moves = [(cache, buffer, True, False), (buffer, cache, False, True)]
        for source, destination, gather, scatter in moves:
            self._run(
                copy_pages_kernel,
                grid,
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
                **extra,
            )


class _QueryBlocks(NamedTuple):
    """The launch of paged_attention that fits a batch; the constants are the kernel's."""

    programs: int
    lanes: int
    block_q: int
    block_m: int
    tile: int
    one_tile: bool
    head_padded: int
    arrays: tuple[Tensor, ...]


def query_blocks(query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, block_q: int, exact: bool) -> tuple[Tensor, ...]:
    """Cut every request's queries into blocks of `block_q`. Per block: int32 request, int64 first query within the batch, int32 number of queries
    and int32 position of the first query within the request.

    Unless `exact`, the number of blocks is bounded, not computed, so that the host never waits for a GPU; a surplus block has 0 queries.
    """
    starts = query_start_loc.long()
    query_lens = starts.diff()
    num_reqs = query_lens.shape[0]
    if exact:
        counts = (query_lens + block_q - 1) // block_q
        first_block = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        request = torch.repeat_interleave(counts)
    else:
        # A request of n queries fills at most n // block_q + 1 blocks, and exactly n blocks of one query.
        first_block = starts if block_q == 1 else starts // block_q + torch.arange(num_reqs + 1, device=starts.device)
        index = torch.arange(num_tokens if block_q == 1 else num_tokens // block_q + num_reqs, device=starts.device)
        request = (torch.searchsorted(first_block, index, right=True) - 1).clamp(max=num_reqs - 1)
    start = (torch.arange(request.shape[0], device=starts.device) - first_block[request]) * block_q
    length = (query_lens[request] - start).clamp(0, block_q)
    position = torch.where(length > 0, seq_lens.long()[request] - query_lens[request] + start, 0)
    return request.int(), starts[request] + start, length.int(), position.int()


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 1 else 1


def cdiv(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself when its last dimension is dense, as the kernels assume; a dense copy otherwise."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether an element has the same offset in both; the stride of a dimension of size 1 means nothing."""
    return all(size <= 1 or stride == other for size, stride, other in zip(a.shape, a.stride(), b.stride(), strict=True))
