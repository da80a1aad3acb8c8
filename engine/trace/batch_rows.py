"""The requests of a batch as a frame knows them: which tokens of the batch are whose, and what the manager's tables say of them."""

from __future__ import annotations

from typing import NamedTuple

from engine.trace.events import AttentionComputed
from engine.trace.frame import Frame


class BatchRow(NamedTuple):
    """A request's part of the batch: its tokens start..end-1 have the positions from `position` on. `table`: the manager's, of one group."""

    request_id: str
    start: int
    end: int
    position: int
    table: tuple[int, ...]

    def position_of(self, token: int) -> int:
        return self.position + token - self.start


def rows_of(event: AttentionComputed, frame: Frame, group_id: int) -> list[BatchRow]:
    """The batch's requests in order, which is that of the worker's rows."""
    rows, start = [], 0
    for request_id, query_len, seq_len in zip(event.request_ids, event.query_lens, event.seq_lens, strict=True):
        request = frame.request(request_id)
        table = request.block_ids[group_id] if request is not None else ()
        rows.append(BatchRow(request_id, start, start + query_len, seq_len - query_len, table))
        start += query_len
    return rows
