"""How wide each kernel's tiles are, and the arguments it is launched with; the same for the interpreter and for a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.backend import GpuTiles
from kernels.configurations import copy_tile, next_power_of_2, write_warps
from kernels.launch_attention import INTERPRETED_ELEMENTS, launch_attention, rows_contiguous, same_strides
from kernels.launches import CompilerOptions, LaunchShape, recorder
from kernels.metadata import Derived
from kernels.progress import Progress
from kernels.triton_cache import copy_pages_kernel, reshape_and_cache_kernel, slot_mapping_kernel
from kernels.watch import copy_watch, write_watch
from kernels.watch_mapping import mapping_watch
from kernels.witness import Witness

PAD_SLOT_ID = -1
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

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, options: CompilerOptions | None = None, **constants: Any) -> None:
        """Run `kernel` for every program of `grid`, and leave word of it where somebody records launches. Constants are in capitals; lower-case names are
        arguments that not every launch has."""
        launches = recorder()
        if launches is not None:
            constexprs = {name: value for name, value in constants.items() if name.isupper()}
            lanes = next((constexprs[name] for name in ("LANES", "TOKENS", "PAGES") if name in constexprs), 1)
            launches.append(LaunchShape(kernel.fn.__name__, grid, lanes, constexprs, *(options or ())))
        if self.interpreted or options is None:
            self.run(kernel, grid, *arguments, **constants)
        else:
            self.run(kernel, grid, *arguments, num_warps=options.num_warps, num_stages=options.num_stages, **constants)

    def multiprocessors(self, device: torch.device) -> int:
        """Of the GPU that is launched on, or meant."""
        if device.type == "cuda":
            return torch.cuda.get_device_properties(device).multi_processor_count
        return (self.gpu_tiles or GpuTiles()).multiprocessors

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
        witness: Witness | None = None,
    ) -> None:
        """On a device num_reqs + 1 programs, as vLLM; interpreted one program for all requests and one for the padding."""
        num_reqs = max(0, query_start_loc.shape[0] - 1)
        if num_reqs == 0:
            slot_mapping.fill_(PAD_SLOT_ID)
            return
        block_table = rows_contiguous(block_table)
        lanes, tile = 1, DEVICE_TILE
        if self.wide:
            tile = next_power_of_2(max(int(query_start_loc.diff().max()), slot_mapping.shape[0] - int(query_start_loc[-1]), 1))
            tile = min(tile, INTERPRETED_ELEMENTS)
            lanes = max(1, min(next_power_of_2(num_reqs), INTERPRETED_ELEMENTS // tile))
        grid = cdiv(num_reqs, lanes) + 1
        with mapping_watch(witness, self.own_account, block_table, slot_mapping, kernel_block_size, grid, lanes) as extra:
            self.launch(
                slot_mapping_kernel,
                (grid,),
                query_start_loc.contiguous(),
                positions.contiguous(),
                block_table,
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
                **extra,
            )

    def reshape_and_cache(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, derived: Derived, witness: Witness | None = None
    ) -> None:
        """On a device one program per token; interpreted as many tokens per program as fit a tile."""
        num_tokens = slot_mapping.shape[0]
        block_size, num_kv_heads, head_dim = key_cache.shape[1:]
        row = next_power_of_2(num_kv_heads * head_dim)
        tokens, options = 1, CompilerOptions(write_warps(row * key_cache.element_size()))
        if self.wide:
            tokens = max(1, min(next_power_of_2(num_tokens), INTERPRETED_ELEMENTS // row))
        key, value = rows_contiguous(key), rows_contiguous(value)
        if not same_strides(key, value):
            key, value = key.contiguous(), value.contiguous()
        grid = cdiv(num_tokens, tokens)
        with write_watch(witness, self.own_account, key_cache, value_cache, key, grid, tokens, num_tokens) as extra:
            self.launch(
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
                options=None if self.wide else options,
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
        """One launch, and a second one where the keys are split; see kernels.launch_attention."""
        launch_attention(
            self,
            query,
            key_cache,
            value_cache,
            block_table,
            query_start_loc,
            seq_lens,
            scale=scale,
            sliding_window=sliding_window,
            out=out,
            derived=derived,
            witness=witness,
            progress=progress,
        )

    def copy_blocks(self, key_caches: list[Tensor], value_caches: list[Tensor], block_pairs: Tensor, witness: Witness | None = None) -> None:
        """Per layer one launch for keys and values, where their pages are alike. Where a page is both read and written, one that gathers the source pages into
        a buffer and one that scatters it, so that no read follows a write (R6.7).

        Pairs in a GPU's memory are not looked at, which would mean to wait for it, so that they always take the detour. The detour is not needed for a single
        pair, nor interpreted when one program holds all pages: it reads all of them before it writes. On a device it is needed even then, because the warps
        of a program do not wait for each other.
        """
        pairs = block_pairs.contiguous()
        apart = pairs.shape[0] == 1
        if not apart and pairs.device.type == "cpu":
            sources, destinations = pairs.T.tolist()
            apart = set(sources).isdisjoint(destinations)
        pairs = pairs.to(key_caches[0].device, non_blocking=True)
        for key_cache, value_cache in zip(key_caches, value_caches, strict=True):
            alike = key_cache.shape == value_cache.shape and key_cache.stride(0) == value_cache.stride(0) and key_cache.dtype == value_cache.dtype
            pages, _, grid = self._copy_grid(key_cache, pairs.shape[0])
            with copy_watch(witness, self.own_account, key_cache, value_cache, pairs.shape[0], grid[0] * grid[1], pages) as extra_of:
                for caches in [(key_cache, value_cache)] if alike else [(key_cache,), (value_cache,)]:
                    self._copy_pages(caches, pairs, apart, extra_of(caches))

    def _copy_grid(self, cache: Tensor, num_pages: int) -> tuple[int, int, tuple[int, int]]:
        """Pages per program, elements per program, and the grid."""
        page_size = cache[0].numel()
        pages, tile = 1, copy_tile(cache.element_size())
        if self.wide:
            tile = min(next_power_of_2(page_size), INTERPRETED_ELEMENTS)
            pages = max(1, min(next_power_of_2(num_pages), INTERPRETED_ELEMENTS // tile))
        return pages, tile, (cdiv(num_pages, pages), cdiv(page_size, tile))

    def _copy_pages(self, caches: tuple[Tensor, ...], pairs: Tensor, apart: bool, extra: dict[str, Any]) -> None:
        """`caches`: keys and values, or one of the two; `apart`: no page is both source and destination."""
        num_pages, page_size = pairs.shape[0], caches[0][0].numel()
        pages, tile, grid = self._copy_grid(caches[0], num_pages)
        moves = [(caches, caches, True, True)]
        if pages < num_pages and not apart:
            buffers = tuple(cache.new_empty(num_pages, page_size) for cache in caches)
            moves = [(caches, buffers, True, False), (buffers, caches, False, True)]
        for sources, destinations, gather, scatter in moves:
            values: dict[str, Any] = {}
            if len(caches) > 1:
                values = {"value_source_ptr": sources[1], "value_destination_ptr": destinations[1], "VALUES": True}
            self.launch(
                copy_pages_kernel,
                grid,
                sources[0],
                destinations[0],
                pairs,
                pairs[:, 1],
                num_pages,
                pairs.stride(0),
                page_size,
                sources[0].stride(0),
                destinations[0].stride(0),
                GATHER=gather,
                SCATTER=scatter,
                PAGES=pages,
                TILE=tile,
                **values,
                **extra,
            )


def cdiv(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
