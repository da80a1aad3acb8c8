"""The requests as the worker knows them, and the batch: which request sits in which row.

Rows are kept dense: the rows that requests leave are filled first by requests that join and then by moving the last rows down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.core.output import SamplingParams
from engine.row_change import row_change
from engine.trace.events import Cause, CauseKind, Emit, RowUpdated
from engine.trace.frame import WorkerRow
from engine.worker.block_table import MultiGroupBlockTable


@dataclass
class CachedRequestState:
    """What the worker remembers of a request from its first step to its last, whether it is in the batch or not. `block_ids`: full table per group.
    vLLM: CachedRequestState."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    generator: torch.Generator
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, end: int) -> list[int]:
        """The tokens at positions start..end-1."""
        return (self.prompt_token_ids + self.output_token_ids)[start:end]


class InputBatch:
    """Rows of the block table and who sits in them. Every change of a row is emitted after it was made. vLLM: InputBatch."""

    def __init__(self, block_table: MultiGroupBlockTable, emit: Emit | None) -> None:
        self.block_table = block_table
        self.req_ids: list[str | None] = []
        self.req_id_to_index: dict[str, int] = {}
        self._emit = emit

    @property
    def num_reqs(self) -> int:
        """Requests in the batch; after `condense` they sit in rows 0..num_reqs-1."""
        return len(self.req_id_to_index)

    def rows(self) -> tuple[WorkerRow, ...]:
        """The occupied rows, ascending."""
        table = self.block_table
        return tuple(WorkerRow(row, req_id, table.row(row), table.stale_tails(row)) for row, req_id in enumerate(self.req_ids) if req_id is not None)

    def remove_request(self, req_id: str) -> None:
        """Clear the request's row and leave it empty. Nothing happens for a request that is not in the batch."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is None:
            return
        self.req_ids[row] = None
        for group_id in range(len(self.block_table)):
            self.block_table[group_id].clear_row(row)
            self._report(row, 0, [], Cause(CauseKind.LEFT_BATCH), req_id, group_id)

    def add_request(self, request: CachedRequestState) -> None:
        """Write the request's table from the start into the lowest empty row, or behind the last one."""
        self.add_row(request.req_id, request.block_ids)

    def add_row(self, req_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """A table per group, written from the start into the lowest empty row, or behind the last one."""
        row = next((i for i, req_id in enumerate(self.req_ids) if req_id is None), len(self.req_ids))
        if row == len(self.req_ids):
            self.req_ids.append(None)
        self.req_ids[row] = req_id
        self.req_id_to_index[req_id] = row
        for group_id, ids in enumerate(block_ids):
            self.block_table[group_id].add_row(ids, row)
            self._report(row, 0, ids, Cause(CauseKind.ADDED_TO_BATCH), req_id, group_id)

    def append_row(self, req_id: str, new_block_ids: Sequence[Sequence[int]]) -> None:
        """Write new ids behind the row's current length, in every group that has some."""
        row = self.req_id_to_index[req_id]
        for group_id, ids in enumerate(new_block_ids):
            if ids:
                table = self.block_table[group_id]
                start = int(table.num_blocks_per_row[row])
                table.append_row(ids, row)
                self._report(row, start, ids, Cause(CauseKind.APPENDED), req_id, group_id)

    def update_row(self, req_id: str, block_ids: Sequence[int]) -> None:
        """Make the row of group 0 say `block_ids`: append where it only grew, else write from the first entry that differs (copy-on-write put another block
        there). Nothing happens when it says so already."""
        row, table = self.req_id_to_index[req_id], self.block_table[0]
        start, cause = row_change(table.row(row), block_ids)
        if cause is not None:
            table.replace_row(block_ids[start:], row, start)
            self._report(row, start, block_ids[start:], cause, req_id, 0)

    def condense(self) -> None:
        """Fill empty rows by moving the last occupied row into the lowest empty one until the rows are dense. A moved row is reported once, as written
        from the start in its new place, with the fact `from_row`. vLLM: InputBatch.condense."""
        while self.req_ids:
            if self.req_ids[-1] is None:
                self.req_ids.pop()
                continue
            target = next((i for i, req_id in enumerate(self.req_ids) if req_id is None), None)
            if target is None:
                return
            source = len(self.req_ids) - 1
            req_id = self.req_ids.pop()
            assert req_id is not None
            self.req_ids[target] = req_id
            self.req_id_to_index[req_id] = target
            self.block_table.move_row(source, target)
            cause = Cause(CauseKind.ADDED_TO_BATCH, {"from_row": source})
            for group_id, ids in enumerate(self.block_table.row(target)):
                self._report(target, 0, list(ids), cause, req_id, group_id)

    def _report(self, row: int, start: int, block_ids: Sequence[int], cause: Cause, req_id: str, group_id: int) -> None:
        if self._emit is not None:
            self._emit(RowUpdated(cause=cause, request_id=req_id, group_id=group_id, row=row, start=start, block_ids=list(block_ids)))
