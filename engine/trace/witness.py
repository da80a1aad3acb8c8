"""What the programs of a kernel did to the KV cache, as the kernel itself was seen to do it: nothing here was taken from a block table or a slot mapping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

Run = tuple[int, int]
"""Slots from the first number up to, but without, the second; they lie one behind the other in memory."""

SMALL_POOL = 256
"""Up to this many blocks programs are watched unless the settings say otherwise: a decode step of `tiny` takes 2 milliseconds more for each watched layer."""


def is_wanted(setting: bool | None, num_blocks: int) -> bool:
    """Whether a run watches its kernels: as its settings say, and where they say nothing (None), when its pool is small."""
    return num_blocks <= SMALL_POOL if setting is None else setting


class ProgramWitness(msgspec.Struct, frozen=True, omit_defaults=True):
    """One lane of one program. On a device a program has one lane; interpreted, it carries many at once.

    `program`: its place in the grid; `lane`: within the program. `request_id`: whose tokens `tokens` are, which are places in the batch: those whose
    attention the lane stored, or whose keys it stored. None where they belong to nobody or to several; a copy has no tokens. A lane that writes is given
    together with those behind it that wrote for the same request: `lane` + i wrote `slots_written[i]` for `tokens[i]`. `kv_heads`: those that it touched.
    `block_ids_read`: in the order of the walk; `slots_read`: the runs of slots within that walk, of keys. `value_slots_read`, `value_slots_written`: None
    where they are those of the keys.
    """

    program: int
    lane: int
    request_id: str | None
    tokens: list[int]
    kv_heads: list[int]
    block_ids_read: list[int] = []
    slots_read: list[Run] = []
    slots_written: list[int] = []
    value_slots_read: list[Run] | None = None
    value_slots_written: list[int] | None = None


class LaunchWitness(msgspec.Struct, frozen=True, omit_defaults=True):
    """One launch of `kernel` (`reshape_and_cache`, `paged_attention`, `copy_blocks`), the same in each of `layers`. `grid`: programs; `lanes`: of each
    program; `block_size`: of the cache that it worked on; `sliding_window`: keys that a query may see, None for all."""

    kernel: str
    layers: list[int]
    grid: int
    lanes: int
    block_size: int
    programs: list[ProgramWitness]
    group_id: int = 0
    sliding_window: int | None = None


class MappingProgramWitness(msgspec.Struct, frozen=True, omit_defaults=True):
    """One lane of one program of the slot mapping. `tokens`: the runs of places that it stored to, the batch first and the places behind it after that;
    `request_id`: whose these are, None where they lie behind the batch or belong to several. `slots`: what it stored, one per place; empty where it stored -1
    (no slot, R8.5) everywhere. `rows_read`, `columns_read`, `block_ids_read`: entries of the worker's block table that it looked up, and what stands there."""

    program: int
    lane: int
    request_id: str | None
    tokens: list[Run]
    slots: list[int] = []
    rows_read: list[int] = []
    columns_read: list[int] = []
    block_ids_read: list[int] = []


class MappingWitness(msgspec.Struct, frozen=True, omit_defaults=True):
    """The launch that mapped the batch of KV-cache group `group_id`. `grid`, `lanes`, `block_size` as in LaunchWitness; `num_places`: of the slot mapping."""

    group_id: int
    grid: int
    lanes: int
    block_size: int
    num_places: int
    programs: list[MappingProgramWitness]


def runs_of(slots: Sequence[int]) -> list[Run]:
    """Slots in the order of a walk as runs."""
    runs: list[Run] = []
    start = end = -1
    for slot in slots:
        if slot == end:
            end += 1
            continue
        if end >= 0:
            runs.append((start, end))
        start, end = slot, slot + 1
    return [*runs, (start, end)] if slots else runs


def slots_in(runs: Sequence[Run]) -> Iterator[int]:
    """The slots of `runs_of`, one by one."""
    for start, end in runs:
        yield from range(start, end)
