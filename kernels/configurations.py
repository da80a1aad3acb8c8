"""What a GPU is given for each shape: tiles, warps, stages of the software pipeline, and over how many programs the keys of one query are split.

The numbers were chosen by ahead-of-time compilation, without a GPU: nothing spills, the next tile of keys and values is under way while one is worked on,
and two programs fit on a multiprocessor. `kernels.launch` launches what `kernels.aot` compiles.
"""

from __future__ import annotations

from typing import NamedTuple

PROGRAMS_PER_MULTIPROCESSOR = 2
"""Decoding programs that run side by side there: three by registers and shared memory on an H100, two on an A100."""
TILES_PER_SPLIT = 4
"""A split with fewer tiles would spend more on starting and on being put together than on its keys."""
COPY_BYTES = 4096
"""Of a page, of keys and of values each, that one program copies: twice 16 bytes for each of 128 threads."""


class Tiles(NamedTuple):
    """One program of attention. `rows`: queries times query heads; `keys`: per iteration; the rest is for the compiler."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def attention_tiles(itemsize: int, head_dim: int, group: int, decode: bool, hip: bool = False) -> Tiles:
    """`itemsize`: bytes of a number of the cache; `group`: query heads per KV head; `decode`: no request has more than one query.

    Decoding moves 16 KiB of keys an iteration. In half precision its rows are padded to the 16 that a tensor core's matrix has, which costs nothing while
    memory is what it waits for; float32 runs without tensor cores, so there rows are not padded.
    Five stages: keys and values are addressed through the block table, whose entries are fetched ahead as well, and two tiles of each are kept.
    Where the assembler would rather spill a few bytes than take another register, float32 has other numbers of warps and stages.
    """
    padded = max(32, next_power_of_2(head_dim))
    half = itemsize <= 2
    if decode:
        keys = max(16, min(128 if half and not hip else 64, (8192 if half else 4096) // padded))
        rows = max(16 if half else 1, next_power_of_2(group))
        tiles = Tiles(rows, keys, 4 if rows < 64 and (half or hip or padded <= 128) else 8, 5 if half else 3)
    elif half:
        tiles = Tiles(max(64, next_power_of_2(group)), 64 if padded <= 128 else 32, 4 if padded <= 64 else 8, 3)
    else:
        tiles = Tiles(max(32, next_power_of_2(group)), 32 if padded <= 128 else 16, 4 if padded <= 128 else 8, 3)
    return tiles._replace(num_stages=2) if hip else tiles


def attention_splits(programs: int, max_keys: int, keys: int, multiprocessors: int) -> int:
    """Over how many programs the keys of each lane are split, so that a few long requests occupy the whole GPU. `programs`: without splitting; `max_keys`: an
    upper bound of the keys of a request, `keys`: of them per iteration.

    Programs run in rounds of as many as fit on the GPU at once, and the last round may be nearly empty: taken is the smallest number of splits whose rounds
    are at least 95 % as full as the fullest possible. 1 where the programs fill the GPU anyway.
    """
    slots = multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    most = min(-(-max_keys // keys) // TILES_PER_SPLIT, slots)
    if programs == 0 or programs >= 0.8 * slots or most <= 1:
        return 1
    fullness = [programs * splits / (-(-programs * splits // slots) * slots) for splits in range(1, most + 1)]
    return 1 + next(place for place, full in enumerate(fullness) if full >= 0.95 * max(fullness))


def write_warps(row_bytes: int) -> int:
    """Warps of a program that writes one token's keys (and values) of `row_bytes`, a power of two: 16 bytes for each thread."""
    return max(1, min(8, row_bytes // 512))


def copy_tile(itemsize: int) -> int:
    """Numbers of a page that one program copies."""
    return COPY_BYTES // itemsize


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 1 else 1
