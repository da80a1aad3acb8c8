"""Rows of a worker's block table without tensors, for runs without a model: the same operations as `engine.worker.input_batch`, on lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.trace.events import Cause, CauseKind, Emit, RowUpdated
from engine.trace.frame import WorkerRow


@dataclass
class _Row:
    """`memory`: per group what stands in the row; the first `lengths` of it are the request's, what follows was left by somebody before."""

    request_id: str | None
    memory: list[list[int]]
    lengths: list[int]


class PlainRows:
    """Which request sits in which row, and what the rows say. Rows are dense after `condense`. Every change is emitted after it was made.

    `clears_rows`: whether a row that is left becomes zero (R8.2). vLLM: InputBatch with MultiGroupBlockTable; here: lists instead of tensors.
    """

    def __init__(self, num_groups: int, emit: Emit, *, clears_rows: bool = True) -> None:
        self._num_groups = num_groups
        self._emit = emit
        self._clears_rows = clears_rows
        self._rows: list[_Row] = []
        self._index: dict[str, int] = {}
        self._num_used = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._index

    def rows(self) -> tuple[WorkerRow, ...]:
        """The occupied rows, ascending."""
        groups = range(self._num_groups)
        return tuple(
            WorkerRow(row, request_id, tuple(tuple(self.table(request_id, group_id)) for group_id in groups), self._stale(self._rows[row]))
            for row, request_id in sorted((row, request_id) for request_id, row in self._index.items())
        )

    def table(self, request_id: str, group_id: int) -> list[int]:
        """The used part of the request's row in a group."""
        row = self._rows[self._index[request_id]]
        return row.memory[group_id][: row.lengths[group_id]]

    def remove(self, request_id: str) -> None:
        """Clear the request's row and leave it empty (R8.2). Nothing happens for a request that is in none."""
        index = self._index.pop(request_id, None)
        if index is None:
            return
        self._rows[index].request_id = None
        self._clear(self._rows[index])
        for group_id in range(self._num_groups):
            self._report(index, 0, [], Cause(CauseKind.LEFT_BATCH), request_id, group_id)

    def add(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """A table per group, written from the start into the lowest empty row, or behind the last one. What stood further back stays (R8.2)."""
        index = next((i for i, row in enumerate(self._rows[: self._num_used]) if row.request_id is None), self._num_used)
        if index == self._num_used:
            self._num_used += 1
        if index == len(self._rows):
            self._rows.append(_Row(None, [[] for _ in range(self._num_groups)], [0] * self._num_groups))
        row = self._rows[index]
        row.request_id, self._index[request_id] = request_id, index
        for group_id, ids in enumerate(block_ids):
            row.lengths[group_id] = 0
            _append(row, group_id, ids)
            self._report(index, 0, ids, Cause(CauseKind.ADDED_TO_BATCH), request_id, group_id)

    def append(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Write new ids behind the row's current length, in every group that has some (R8.2)."""
        index = self._index[request_id]
        for group_id, ids in enumerate(block_ids):
            if ids:
                start = self._rows[index].lengths[group_id]
                _append(self._rows[index], group_id, ids)
                self._report(index, start, ids, Cause(CauseKind.APPENDED), request_id, group_id)

    def condense(self) -> None:
        """Fill empty rows by moving the last occupied row into the lowest empty one until the rows are dense. A moved row is reported once, as written from the
        start in its new place, with the fact `from_row`."""
        while self._num_used:
            last = self._rows[self._num_used - 1]
            if last.request_id is None:
                self._num_used -= 1
                continue
            target = next((i for i, row in enumerate(self._rows[: self._num_used]) if row.request_id is None), None)
            if target is None:
                return
            source = self._num_used - 1
            self._move(source, target)
            cause = Cause(CauseKind.ADDED_TO_BATCH, {"from_row": source})
            request_id = self._rows[target].request_id
            assert request_id is not None
            for group_id in range(self._num_groups):
                self._report(target, 0, self.table(request_id, group_id), cause, request_id, group_id)

    def _move(self, source: int, target: int) -> None:
        """Copy the used part of `source` over `target`, then clear `source` (R8.2)."""
        old, new = self._rows[source], self._rows[target]
        assert old.request_id is not None
        new.request_id, old.request_id = old.request_id, None
        self._index[new.request_id] = target
        for group_id in range(self._num_groups):
            new.lengths[group_id] = 0
            _append(new, group_id, old.memory[group_id][: old.lengths[group_id]])
        self._clear(old)
        self._num_used -= 1

    def _clear(self, row: _Row) -> None:
        for group_id, length in enumerate(row.lengths):
            if self._clears_rows:
                row.memory[group_id][:length] = [0] * length
            row.lengths[group_id] = 0

    def _stale(self, row: _Row) -> tuple[tuple[int, ...], ...]:
        tails = [memory[length:] for memory, length in zip(row.memory, row.lengths, strict=True)]
        for tail in tails:
            while tail and not tail[-1]:
                tail.pop()
        return tuple(tuple(tail) for tail in tails) if any(tails) else ()

    def _report(self, row: int, start: int, block_ids: Sequence[int], cause: Cause, request_id: str, group_id: int) -> None:
        self._emit(RowUpdated(cause=cause, request_id=request_id, group_id=group_id, row=row, start=start, block_ids=list(block_ids)))


def _append(row: _Row, group_id: int, block_ids: Sequence[int]) -> None:
    start = row.lengths[group_id]
    row.memory[group_id][start : start + len(block_ids)] = block_ids
    row.lengths[group_id] = start + len(block_ids)
