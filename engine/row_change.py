"""What a worker's row needs to become a sequence's block table. No torch: the worker and the bookkeeping of the paper's engine both ask."""

from __future__ import annotations

from collections.abc import Sequence

from engine.trace.events import Cause, CauseKind


def row_change(row: Sequence[int], block_ids: Sequence[int]) -> tuple[int, Cause | None]:
    """The column from which `row` must be written to say `block_ids`, and why; no cause when it says so already.

    A table that only grew is appended to (R8.2). Where an entry changed while the sequence stayed in the batch, copy-on-write put another block there.
    """
    start = next((i for i, (old, new) in enumerate(zip(row, block_ids, strict=False)) if old != new), min(len(row), len(block_ids)))
    if start == len(row) == len(block_ids):
        return start, None
    if start == len(row):
        return start, Cause(CauseKind.APPENDED)
    return start, Cause(CauseKind.SHARED_BLOCK_WRITTEN, {"logical_index": start})
