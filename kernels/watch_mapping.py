"""Launches of the slot mapping with a witness: which entries of the block table each program looked up, and which slots it stored for which tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kernels.witness import MappingAccess, MappingWitness, Witness

COLUMNS = 3
"""Of the kernel's own account, per token: row and column of the block table, slot."""


@contextmanager
def mapping_watch(
    witness: Witness | None, own_account: bool, block_table: torch.Tensor, slot_mapping: torch.Tensor, block_size: int, grid: int, lanes: int
) -> Iterator[dict[str, Any]]:
    """Around one launch of `slot_mapping_kernel`; arguments and constants as in `kernels.watch`. `block_table` and `slot_mapping`: what the kernel itself
    works on."""
    if witness is None:
        yield {}
        return
    if own_account:
        unwritten = -2
        buffer = torch.full((slot_mapping.shape[0], COLUMNS), unwritten, dtype=torch.int64, device=slot_mapping.device)
        yield {"witness_ptr": buffer, "WITNESS": True}
        accesses = _by_account(buffer.tolist(), unwritten, grid, lanes)
    else:
        from kernels.pointer_trace import WatchedTensor, watching

        table, mapping = WatchedTensor(block_table, (0, 1), exact=2), WatchedTensor(slot_mapping, (0,), exact=1, keeps_values=True)
        with watching([table, mapping]):
            yield {}
        accesses = _by_pointers(table.reads, mapping.writes, grid)
    programs = tuple(
        MappingAccess(program, lane, tuple(tokens), tuple(slots), tuple(entries), tuple(int(block_table[row, column]) for row, column in entries))
        for (program, lane), (tokens, slots, entries) in sorted(accesses.items())
    )
    witness.mappings.append(MappingWitness(block_size, slot_mapping.shape[0], programs, grid, lanes))


_Accesses = dict[tuple[int, int], tuple[list[int], list[int], dict[tuple[int, int], None]]]


def _by_pointers(reads: Sequence[Any], writes: Sequence[Any], grid: int) -> _Accesses:
    found: _Accesses = defaultdict(lambda: ([], [], {}))
    for touched in reads:
        for lane, row, column in zip(touched.lanes.tolist(), *(index.tolist() for index in touched.indices), strict=True):
            found[touched.program, lane][2][row, column] = None
    for touched in writes:
        last = touched.program == grid - 1  # it pads, one place after the other, and has no lanes
        for lane, token, slot in zip(touched.lanes.tolist(), touched.indices[0].tolist(), touched.values.tolist(), strict=True):
            tokens, slots, _ = found[touched.program, 0 if last else lane]
            tokens.append(token)
            slots.append(slot)
    return found


def _by_account(buffer: Sequence[Sequence[int]], unwritten: int, grid: int, lanes: int) -> _Accesses:
    found: _Accesses = defaultdict(lambda: ([], [], {}))
    for token, (row, column, slot) in enumerate(buffer):
        if slot == unwritten:
            continue
        tokens, slots, entries = found[divmod(row, lanes) if row >= 0 else (grid - 1, 0)]
        tokens.append(token)
        slots.append(slot)
        if column >= 0:
            entries[row, column] = None
    return found
