"""Launches with a witness: watched pointer by pointer when interpreted, by a buffer that the kernel fills when compiled.

Each function is a context around one operation's launches; it yields the constants and arguments that the kernel needs for it, and adds what was seen to
the witness at the end. Without a witness it does nothing.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from kernels.progress import LaneProgress, LaunchProgress, Progress, RowProgress
from kernels.witness import KernelName, LaunchWitness, ProgramAccess, Witness

Extra = dict[str, Any]
HEADER = 3
"""Columns of an attention witness before its slots: first token of the batch, number of queries, KV head."""
ALIGNMENT = 16


@contextmanager
def attention_watch(
    witness: Witness | None, own_account: bool, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, grid: int, lanes: int, max_keys: int
) -> Iterator[Extra]:
    """Around one launch of `paged_attention_kernel`. `out`: [(splits,) num_tokens, num_q_heads, head_dim], what the kernel itself writes; `grid`: programs;
    `max_keys`: longest request."""
    if witness is None:
        yield {}
    elif own_account:
        columns = -(-(HEADER + max_keys) // ALIGNMENT) * ALIGNMENT
        buffer = torch.full((grid * lanes, columns), -1, dtype=torch.int64, device=out.device)
        yield {"witness_ptr": buffer, "witness_stride": columns, "WITNESS": True}
        programs = [_attention_account(place, lanes, row) for place, row in enumerate(buffer.tolist())]
        witness.launches.append(_launch("paged_attention", key_cache, programs, grid, lanes))
    else:
        with _watched("paged_attention", witness, key_cache, value_cache, tokens_written=out, grid=grid, lanes=lanes, has_lanes=lanes > 1):
            yield {}


@contextmanager
def progress_watch(progress: Progress | None, blocks: QueryBlocks, num_kv_heads: int, group: int, max_keys: int) -> Iterator[Extra]:
    """Around one launch of `paged_attention_kernel`: what its maxima and totals were after each tile."""
    if progress is None:
        yield {}
        return
    unwritten = -1.0  # no total is negative
    programs = blocks.programs * blocks.splits
    tiles = -(-max_keys // blocks.tile)
    buffer = torch.full((programs * blocks.lanes, tiles, blocks.block_m, 2), unwritten, dtype=torch.float32, device=blocks.arrays[0].device)
    yield {"progress_ptr": buffer, "progress_stride": buffer.stride(0), "PROGRESS": True}
    maxima, totals = buffer.cpu().unbind(3)
    arrays = [array.tolist() for array in blocks.arrays]
    lanes = []
    for place in range(buffer.shape[0]):
        block, kv_head = divmod(place // blocks.splits, num_kv_heads)
        if block >= len(arrays[0]) or arrays[2][block] == 0:
            continue
        request, first_token, num_queries, first_position = (array[block] for array in arrays)
        walked = [tile for tile in range(tiles) if float(totals[place, tile, 0]) != unwritten]
        rows = tuple(
            RowProgress(
                first_token + row // group,
                kv_head * group + row % group,
                tuple(maxima[place, walked, row].tolist()),
                tuple(totals[place, walked, row].tolist()),
            )
            for row in range(num_queries * group)
        )
        tokens = tuple(range(first_token, first_token + num_queries))
        program, lane = divmod(place, blocks.lanes)
        lanes.append(LaneProgress(program, lane, request, kv_head, tokens, first_position, program % blocks.splits, tuple(walked), rows))
    progress.launches.append(LaunchProgress(blocks.tile, programs, blocks.lanes, tuple(lanes)))


class QueryBlocks(Protocol):
    """What of a launch's shape its progress is told by."""

    @property
    def programs(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def block_m(self) -> int: ...
    @property
    def tile(self) -> int: ...
    @property
    def arrays(self) -> tuple[torch.Tensor, ...]: ...


@contextmanager
def write_watch(
    witness: Witness | None, own_account: bool, key_cache: torch.Tensor, value_cache: torch.Tensor, key: torch.Tensor, grid: int, lanes: int, num_tokens: int
) -> Iterator[Extra]:
    """Around one launch of `reshape_and_cache_kernel`. `key`: [num_tokens, num_kv_heads, head_dim], what the kernel itself reads."""
    if witness is None:
        yield {}
    elif own_account:
        buffer = torch.full((num_tokens,), -1, dtype=torch.int64, device=key.device)
        yield {"witness_ptr": buffer, "WITNESS": True}
        heads = tuple(range(key_cache.shape[2]))
        programs = [
            ProgramAccess(token // lanes, token % lanes, (token,), heads, key_slots_written=(slot,), value_slots_written=(slot,))
            for token, slot in enumerate(buffer.tolist())
            if slot >= 0
        ]
        witness.launches.append(_launch("reshape_and_cache", key_cache, programs, grid, lanes))
    else:
        with _watched("reshape_and_cache", witness, key_cache, value_cache, tokens_read=key, grid=grid, lanes=lanes):
            yield {}


@contextmanager
def copy_watch(
    witness: Witness | None, own_account: bool, key_cache: torch.Tensor, value_cache: torch.Tensor, num_pages: int, grid: int, lanes: int
) -> Iterator[Callable[[tuple[torch.Tensor, ...]], Extra]]:
    """Around the launches of `copy_pages_kernel` for one layer; what it yields is called with the caches that a launch is for: both, or one of them. `grid`:
    programs of a launch."""
    if witness is None:
        yield lambda caches: {}
    elif own_account:
        buffers = [torch.full((num_pages, 2), -1, dtype=torch.int64, device=key_cache.device) for _ in range(2)]
        apart = []

        def account(caches: tuple[torch.Tensor, ...]) -> Extra:
            if len(caches) > 1:  # one address for a key and its value, so one account of both
                return {"witness_ptr": buffers[0], "WITNESS": True}
            apart.append(caches[0])
            return {"witness_ptr": buffers[caches[0] is value_cache], "WITNESS": True}

        yield account
        if not apart:
            buffers[1] = buffers[0]
        heads, size = tuple(range(key_cache.shape[2])), key_cache.shape[1]
        (keys, values) = ([[_slots_of(block, size) for block in row] for row in buffer.tolist()] for buffer in buffers)
        programs = [
            ProgramAccess(page // lanes, page % lanes, (), heads, keys[page][0], values[page][0], keys[page][1], values[page][1]) for page in range(num_pages)
        ]
        witness.launches.append(_launch("copy_blocks", key_cache, programs, grid, lanes))
    else:
        with _watched("copy_blocks", witness, key_cache, value_cache, grid=grid, lanes=lanes):
            yield lambda caches: {}


def _launch(kernel: KernelName, key_cache: torch.Tensor, programs: Iterable[ProgramAccess], grid: int, lanes: int) -> LaunchWitness:
    touching = (p for p in programs if p.key_slots_read or p.value_slots_read or p.key_slots_written or p.value_slots_written)
    return LaunchWitness(kernel, key_cache.shape[1], tuple(touching), grid, lanes)


def _attention_account(place: int, lanes: int, row: Sequence[int]) -> ProgramAccess:
    """A row of the buffer: the kernel forms one address for a key and its value, so its account is of both."""
    first_token, num_queries, kv_head = row[:HEADER]
    slots = tuple(slot for slot in row[HEADER:] if slot >= 0)
    return ProgramAccess(place // lanes, place % lanes, tuple(range(first_token, first_token + num_queries)), (kv_head,), slots, slots)


def _slots_of(block_id: int, block_size: int) -> tuple[int, ...]:
    return tuple(range(block_id * block_size, (block_id + 1) * block_size)) if block_id >= 0 else ()


@contextmanager
def _watched(
    kernel: KernelName,
    witness: Witness,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    grid: int,
    lanes: int,
    has_lanes: bool = True,
    tokens_read: torch.Tensor | None = None,
    tokens_written: torch.Tensor | None = None,
) -> Iterator[None]:
    from kernels.pointer_trace import WatchedTensor, watching

    caches = [WatchedTensor(cache, (0, 1, 2), exact=2) for cache in (key_cache, value_cache)]
    batch = [WatchedTensor(tensor, (tensor.dim() - 3,), exact=1) for tensor in (tokens_read, tokens_written) if tensor is not None]
    with watching([*caches, *batch], has_lanes):
        yield
    block_size = key_cache.shape[1]
    accesses = [_per_lane(touched) for cache in caches for touched in (cache.reads, cache.writes)]
    places = [{place: indices[0] * block_size + indices[1] for place, indices in access.items()} for access in accesses]
    key_reads, key_writes = ({place: _in_order(its) for place, its in access.items()} for access in places[:2])
    value_reads, value_writes = (
        {place: keys[place] if place in keys and np.array_equal(its, by_place[place]) else _in_order(its) for place, its in access.items()}
        for access, by_place, keys in ((places[2], places[0], key_reads), (places[3], places[1], key_writes))
    )
    heads = {place: np.concatenate([access[place][2] for access in accesses if place in access]) for access in accesses for place in access}
    tokens = {
        place: _in_order(indices[0]) for tensor in batch for place, indices in _per_lane(tensor.reads if tokens_read is not None else tensor.writes).items()
    }
    programs = [
        ProgramAccess(
            *place,
            tokens.get(place, ()),
            tuple(range(int(heads[place].min()), int(heads[place].max()) + 1)),
            key_reads.get(place, ()),
            value_reads.get(place, ()),
            key_writes.get(place, ()),
            value_writes.get(place, ()),
        )
        for place in sorted(heads)
    ]
    witness.launches.append(_launch(kernel, key_cache, programs, grid, lanes))


def _per_lane(touched: Sequence[Any]) -> dict[tuple[int, int], list[np.ndarray[Any, Any]]]:
    """By (program, lane): one array per watched dimension, in the order in which the tiles came."""
    parts: dict[tuple[int, int], list[tuple[np.ndarray[Any, Any], ...]]] = defaultdict(list)
    for tile in touched:  # within a tile, what belongs to a lane lies together
        starts = np.flatnonzero(np.diff(tile.lanes, prepend=-1))
        for start, end in itertools.pairwise([*starts.tolist(), len(tile.lanes)]):
            parts[tile.program, int(tile.lanes[start])].append(tuple(index[start:end] for index in tile.indices))
    return {place: [np.concatenate(arrays) for arrays in zip(*tiles, strict=True)] for place, tiles in parts.items()}


def _in_order(numbers: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Each once, where it comes first."""
    return tuple(dict.fromkeys(numbers.tolist()))
