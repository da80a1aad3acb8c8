"""How a batch is cut into the lanes of `paged_attention_kernel`, how wide their tiles are, and the launches that follow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kernels.configurations import attention_splits, attention_tiles, next_power_of_2
from kernels.launches import CompilerOptions
from kernels.metadata import Derived
from kernels.progress import Progress
from kernels.triton_attention import paged_attention_kernel, reduce_splits_kernel
from kernels.watch import attention_watch, progress_watch
from kernels.witness import Witness

if TYPE_CHECKING:
    from kernels.launch import Launcher

INTERPRETED_ELEMENTS = 1 << 20
"""Largest tile of an interpreted program: the interpreter accepts no more elements than the compiler does."""
INTERPRETED_BLOCK_Q = 64


class BatchSizes(NamedTuple):
    """What decides about a launch besides the lengths. `group`: query heads per KV head; `itemsize`: bytes of a number; `max_keys`: upper bound of the keys
    that a query may see (0 where nobody asks)."""

    num_tokens: int
    num_kv_heads: int
    group: int
    head_dim: int
    itemsize: int
    max_keys: int


class Plan(NamedTuple):
    """The launch of paged_attention that fits a batch; the constants are the kernel's. `programs`: along the first axis of the grid, `splits` along the second;
    `arrays`: of `query_blocks`."""

    programs: int
    splits: int
    lanes: int
    block_q: int
    block_m: int
    tile: int
    one_tile: bool
    head_padded: int
    options: CompilerOptions | None
    arrays: tuple[Tensor, ...]


def launch_attention(
    launcher: Launcher,
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
    witness: Witness | None,
    progress: Progress | None,
) -> None:
    """One launch, and a second one where the keys are split; see triton_attention. Only `out` changes."""
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    num_tokens, num_q_heads = query.shape[:2]
    group = num_q_heads // num_kv_heads
    itemsize = key_cache.element_size()
    max_keys = block_table.shape[1] * block_size if derived.max_seq_len is None else derived.max_seq_len
    if sliding_window is not None:
        max_keys = min(max_keys, sliding_window)
    # Wide lanes are cut by the lengths themselves, whatever bound a layer's window sets.
    sizes = BatchSizes(num_tokens, num_kv_heads, group, head_dim, itemsize, 0 if launcher.wide else max_keys)
    plan = derived.once(("triton plan", launcher.wide, launcher.gpu_tiles, sizes), lambda: make_plan(launcher, query_start_loc, seq_lens, sizes))
    if plan.programs == 0:
        return
    # The interpreter's cast to bfloat16 loses the carry when a mantissa rounds up, so it writes float32 and torch casts.
    query, block_table = rows_contiguous(query), rows_contiguous(block_table)
    target = out
    if not same_strides(query, out) or (launcher.interpreted and out.dtype != torch.float32):
        query = query.contiguous()
        target = torch.empty_like(query, dtype=torch.float32 if launcher.interpreted else out.dtype)
        target.copy_(out)
    grid: tuple[int, ...] = (plan.programs,)
    split = {}
    stored = target
    if plan.splits > 1:
        grid = (plan.programs, plan.splits)
        shape = plan.splits, num_tokens, num_q_heads
        # Layers run one after the other, so that all of a step may use the same memory.
        stored, sums = derived.once(
            ("triton partial results", shape, head_dim, query.device),
            lambda: (query.new_empty(*shape, head_dim, dtype=torch.float32), query.new_empty(*shape, 2, dtype=torch.float32)),
        )
        split = {"partial_ptr": stored, "partial_sums_ptr": sums, "partial_stride": num_tokens * num_q_heads}
    longest = int(seq_lens.max()) if witness is not None or progress is not None else 0
    with (
        attention_watch(witness, launcher.own_account, key_cache, value_cache, stored, math.prod(grid), plan.lanes, longest) as told,
        progress_watch(progress, plan, num_kv_heads, group, longest) as also_told,
    ):
        launcher.launch(
            paged_attention_kernel,
            grid,
            target,
            query,
            key_cache,
            value_cache,
            block_table,
            *plan.arrays,
            scale * math.log2(math.e),
            block_table.stride(0),
            *query.stride()[:2],
            *key_cache.stride()[:3],
            options=plan.options,
            BLOCK_SIZE=block_size,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            HEAD_PADDED=plan.head_padded,
            SLIDING_WINDOW=sliding_window or 0,
            UPCAST=launcher.interpreted and query.dtype != torch.float32,
            SINGLE_QUERY=plan.block_q == 1,
            LANES=plan.lanes,
            BLOCK_M=plan.block_m,
            TILE=plan.tile,
            ONE_TILE=plan.one_tile,
            SPLIT=plan.splits > 1,
            **split,
            **told,
            **also_told,
        )
    if plan.splits > 1:
        launcher.launch(
            reduce_splits_kernel,
            (plan.arrays[0].shape[0], num_q_heads),
            target,
            stored,
            sums,
            plan.arrays[1],
            plan.arrays[2],
            plan.splits,
            num_tokens * num_q_heads,
            *target.stride()[:2],
            NUM_Q_HEADS=num_q_heads,
            HEAD_DIM=head_dim,
            HEAD_PADDED=plan.head_padded,
            SPLITS=next_power_of_2(plan.splits),
        )
    if target is not out:
        out.copy_(target)


def make_plan(launcher: Launcher, query_start_loc: Tensor, seq_lens: Tensor, sizes: BatchSizes) -> Plan:
    """How the batch is cut into lanes, and how wide their tiles are. Never waits for a GPU."""
    if not launcher.wide:
        return _device_plan(launcher, query_start_loc, seq_lens, sizes)
    num_tokens, num_kv_heads, group, head_dim, _, _ = sizes
    head_padded = next_power_of_2(head_dim)
    longest_query, longest = int(query_start_loc.diff().max()), int(seq_lens.max())
    block_m = next_power_of_2(group * max(1, min(longest_query, INTERPRETED_BLOCK_Q)))
    block_q = 1 if longest_query <= 1 else block_m // group
    arrays = query_blocks(query_start_loc, seq_lens, num_tokens, block_q, exact=True)
    num_blocks = arrays[0].shape[0]
    lanes_needed = num_blocks * num_kv_heads
    lanes, tile = next_power_of_2(lanes_needed), next_power_of_2(longest)
    while tile > 64 and lanes * tile * max(block_m, head_padded) > INTERPRETED_ELEMENTS:
        tile //= 2
    while lanes > 1 and lanes * max(tile * max(block_m, head_padded), block_m * head_padded) > INTERPRETED_ELEMENTS:
        lanes //= 2
    programs = -(-lanes_needed // lanes)
    surplus = -(-programs * lanes // num_kv_heads) - num_blocks
    if surplus > 0:  # blocks without queries
        arrays = tuple(torch.nn.functional.pad(array, (0, surplus)) for array in arrays)
    return Plan(programs, 1, lanes, block_q, block_m, tile, tile >= longest, head_padded, None, arrays)


def _device_plan(launcher: Launcher, query_start_loc: Tensor, seq_lens: Tensor, sizes: BatchSizes) -> Plan:
    """One lane per program, with the tiles of `kernels.configurations`."""
    num_tokens, num_kv_heads, group, head_dim, itemsize, max_keys = sizes
    decode = num_tokens <= query_start_loc.shape[0] - 1
    tiles = attention_tiles(itemsize, head_dim, group, decode, hip=torch.version.hip is not None)
    wish = launcher.gpu_tiles
    keys = tiles.keys if wish is None or wish.tile is None else wish.tile
    block_q = 1 if decode else tiles.rows // group
    arrays = query_blocks(query_start_loc, seq_lens, num_tokens, block_q, exact=False)
    programs = arrays[0].shape[0] * num_kv_heads
    splits = 1
    if decode:
        splits = attention_splits(programs, max_keys, tiles.keys, launcher.multiprocessors(seq_lens.device))
        splits = splits if wish is None or wish.splits is None else wish.splits
    options = CompilerOptions(tiles.num_warps, tiles.num_stages)
    return Plan(programs, splits, 1, block_q, tiles.rows, keys, False, max(16, next_power_of_2(head_dim)), options, arrays)


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


def rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself when its last dimension is dense, as the kernels assume; a dense copy otherwise."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether an element has the same offset in both; the stride of a dimension of size 1 means nothing."""
    return all(size <= 1 or stride == other for size, stride, other in zip(a.shape, a.stride(), b.stride(), strict=True))
