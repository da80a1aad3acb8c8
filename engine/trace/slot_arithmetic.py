"""Where the key and the value of a token lie, worked out on paper: the arithmetic of the slot-mapping kernel, one named number per step (R8.4)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvalidInput
from engine.trace.closeup import SlotArithmetic

PAD_SLOT_ID = -1


def slot_arithmetic(
    position: int,
    row: Sequence[int],
    *,
    block_size: int,
    kernel_block_size: int | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
) -> SlotArithmetic:
    """The slot of the token at `position` of a request, and every number on the way to it.

    row: the request's block ids as the manager gives them out; with `kernel_block_size` (tokens; None: the same as `block_size`) below `block_size` each id b
    is k = block_size / kernel_block_size ids of the kernel, b*k .. b*k + k - 1 (case A23). cp_world_size ranks keep a block together, `cp_interleave` tokens
    in turn; what another rank keeps has slot -1 here, as has a position past the end of the row (case A22), and then nothing is looked up: `block_id` and
    `kernel_block_id` are None. Raises InvalidInput for a negative position or block id and for sizes that do not fit together.
    Source: R8.4; vLLM: BlockTable.compute_slot_mapping, and its kernel, which in 0.27.0 looks up such a position unchecked.
    """
    kernel_size = block_size if kernel_block_size is None else kernel_block_size
    _check(position, row, block_size, kernel_size, cp_world_size, cp_rank, cp_interleave)
    virtual_block_size = block_size * cp_world_size
    virtual_block, offset = divmod(position, virtual_block_size)
    rank = offset // cp_interleave % cp_world_size
    local_offset = offset // (cp_world_size * cp_interleave) * cp_interleave + offset % cp_interleave
    kernel_blocks = block_size // kernel_size
    inner_block, kernel_offset = divmod(local_offset, kernel_size)
    is_here = rank == cp_rank and virtual_block < len(row)
    block_id = row[virtual_block] if is_here else None
    kernel_block_id = None if block_id is None else block_id * kernel_blocks + inner_block
    return SlotArithmetic(
        position=position,
        block_size=block_size,
        kernel_block_size=kernel_size,
        cp_world_size=cp_world_size,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
        virtual_block_size=virtual_block_size,
        virtual_block=virtual_block,
        offset=offset,
        rank=rank,
        local_offset=local_offset,
        column=virtual_block * kernel_blocks + inner_block,
        block_id=block_id,
        kernel_block_id=kernel_block_id,
        kernel_offset=kernel_offset,
        slot=PAD_SLOT_ID if kernel_block_id is None else kernel_block_id * kernel_size + kernel_offset,
    )


def _check(position: int, row: Sequence[int], block_size: int, kernel_block_size: int, cp_world_size: int, cp_rank: int, cp_interleave: int) -> None:
    if position < 0:
        raise InvalidInput(f"Position {position} does not exist: a request's tokens are counted from 0; choose 0 or more.")
    if min(row, default=0) < 0:
        raise InvalidInput(f"The block-table row names block {min(row)}, but block ids are 0 or more; mend the row.")
    if block_size < 1 or kernel_block_size < 1 or block_size % kernel_block_size:
        raise InvalidInput(f"The kernel's block size {kernel_block_size} does not divide the block size {block_size}; choose a divisor, both at least 1.")
    if not 0 <= cp_rank < cp_world_size:
        raise InvalidInput(f"Context-parallel rank {cp_rank} does not exist among {cp_world_size}; the ranks are counted from 0.")
    if cp_interleave < 1 or block_size % cp_interleave:
        raise InvalidInput(f"The interleave {cp_interleave} does not divide the block size {block_size}; choose a divisor of {block_size}.")
