"""What the programs of a launch did to the KV cache, by their own account: which slots each read, which it wrote.

Interpreted launches are watched from outside, load by load and store by store (`kernels.pointer_trace`); compiled ones write it down themselves
(`WITNESS` in the kernels). Neither looks at a block table or a slot mapping, so both can be checked against them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

KernelName = Literal["reshape_and_cache", "paged_attention", "copy_blocks"]


@dataclass(frozen=True)
class ProgramAccess:
    """One lane of one program. Slots are block * block_size + offset, each once, in the order in which the lane came to them.

    `program`: its place in the launch's grid; `lane`: its place within the program, which on a device has only one. `tokens`: places in the batch of the
    tokens whose attention it stored, or whose key it stored. `kv_heads`: KV heads of the cache that it touched, ascending. Keys and values are counted
    apart, because nothing but the kernel makes them the same.
    """

    program: int
    lane: int
    tokens: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    key_slots_read: tuple[int, ...] = ()
    value_slots_read: tuple[int, ...] = ()
    key_slots_written: tuple[int, ...] = ()
    value_slots_written: tuple[int, ...] = ()


@dataclass(frozen=True)
class LaunchWitness:
    """One launch. `programs`: those lanes that touched the caches, in order; None: the torch reference ran, which is no kernel and has no programs.

    `grid`: programs in the launch; `lanes`: lanes of each; `block_size`: of the cache.
    """

    kernel: KernelName
    block_size: int
    programs: tuple[ProgramAccess, ...] | None
    grid: int = 0
    lanes: int = 0


@dataclass(frozen=True)
class MappingAccess:
    """One lane of one program of the slot mapping, which serves one request; the last program of a launch pads the rest.

    `tokens`: places of the slot mapping that it stored to, in its order; `slots`: what it stored there, one per token. `entries_read`: (row, column) of the
    block table where it looked blocks up, each once, in its order; `block_ids`: what stands there.
    """

    program: int
    lane: int
    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    entries_read: tuple[tuple[int, int], ...] = ()
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class MappingWitness:
    """One launch of the slot mapping, as LaunchWitness. `block_size`: of the kernels; `num_places`: of the slot mapping, those behind the batch included."""

    block_size: int
    num_places: int
    programs: tuple[MappingAccess, ...] | None
    grid: int = 0
    lanes: int = 0


@dataclass
class Witness:
    """Give one to an operation, and it adds one launch to it, to `mappings` if it maps slots. Without one, nothing is watched and nothing is slower."""

    launches: list[LaunchWitness] = field(default_factory=list)
    mappings: list[MappingWitness] = field(default_factory=list)
