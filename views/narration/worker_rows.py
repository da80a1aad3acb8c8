"""Where a worker's row says something else than the manager's table, column by column, and why that does no harm (R8.2, R8.3).

The manager tells the worker of new blocks only. So a row may name blocks that the manager has given up, may not have heard of a new block yet, and may keep
the end of a longer row behind its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from engine.trace.events import StepScheduled
from engine.trace.frame import Frame, RequestState, WorkerRow
from views.narration.words import Words, capital, count, listed, physical, ranges

GIVEN_UP, NOT_TOLD, LEFT, CHANGED, TAIL = "given_up", "not_told", "left", "changed", "tail"
"""What a difference is: null in the table by now, not in the row yet, a row whose request runs no more, another block in the table, behind the row's end."""


class RowNote(NamedTuple):
    """One difference: the columns `first` to `last` of a request's row in a group, what it is (`kind`), and what there is to say of it."""

    request_id: str
    group_id: int
    first: int
    last: int
    kind: str
    text: str


def row_notes(words: Words, occupants: Mapping[int, Sequence[str]] | None = None) -> list[RowNote]:
    """All differences of a frame, by row, group and column. `occupants`: per row who has sat in it, the last one last (None: nobody knows)."""
    notes: list[RowNote] = []
    for row in words.frame.rows:
        request = words.request(row.request_id)
        if request is None:
            continue
        for group_id, ids in enumerate(row.block_ids):
            table = request.block_ids[group_id] if group_id < len(request.block_ids) else ()
            if table != ids:
                notes += _differences(words, request, group_id, table, ids)
            if row.stale_block_ids and row.stale_block_ids[group_id]:
                notes.append(_tail(words, row, group_id, (occupants or {}).get(row.row, ())))
    return notes


def reads_note(words: Words, request_id: str, block_ids: Sequence[int], layers: Sequence[int], differing: Sequence[int]) -> str:
    """What the kernel's own account says: “In this step the kernel was seen to read …”. `differing`: blocks that the row names and the table does not."""
    where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {listed(layers)}"
    seen = f"In this step the kernel was seen to read {physical(block_ids)} for {request_id} ({where})"
    touched = [block_id for block_id in block_ids if block_id in differing]
    if not differing:
        return f"{seen}."
    return f"{seen}, among them {physical(touched)}, which it should not." if touched else f"{seen}: nothing of what differs."


def state_note(request_id: str, source_block_id: int | None, block_id: int) -> str:
    """The same for a recurrent state."""
    began = f"read from block {source_block_id}" if source_block_id is not None else "begun from nothing"
    return f"In this step {request_id}'s state was {began} and written to block {block_id}."


def first_query(frame: Frame, request: RequestState) -> int:
    """The position of the first token that this step computes for a request, or the next one will: the scheduler counts on before the kernels run."""
    planned = frame.op in ("execute_model", "update_from_output") or isinstance(frame.event, StepScheduled)
    return request.num_computed_tokens - (frame.scheduled.get(request.request_id, 0) if planned else 0)


def _differences(words: Words, request: RequestState, group_id: int, table: Sequence[int], ids: Sequence[int]) -> Iterator[RowNote]:
    """Neighbouring columns with the same kind of difference are told together."""

    def kind_at(column: int) -> str | None:
        if column >= len(ids):
            return NOT_TOLD
        if not table:
            return LEFT
        if column >= len(table):
            return CHANGED
        if table[column] == ids[column]:
            return None
        return GIVEN_UP if not table[column] else CHANGED

    for kind, run in groupby(range(max(len(table), len(ids))), kind_at):
        if kind is None:
            continue
        columns = list(run)
        say = _SAY[kind]
        yield RowNote(request.request_id, group_id, columns[0], columns[-1], kind, say(words, request, group_id, columns, table, ids))


def _given_up(words: Words, request: RequestState, group_id: int, columns: list[int], table: Sequence[int], ids: Sequence[int]) -> str:
    old = [ids[c] for c in columns]
    parts = [
        f"The manager gave {_places(columns)} up (null) and sends the worker nothing: the row still says {ranges(old)} (R8.3).",
        _whose(words, old, request.request_id, group_id),
        _harmless(words, request, group_id, columns),
    ]
    return " ".join(part for part in parts if part)


def _not_told(words: Words, request: RequestState, group_id: int, columns: list[int], table: Sequence[int], ids: Sequence[int]) -> str:
    new = [table[c] for c in columns]
    return f"New in the manager's table: {physical(new)}. The worker hears of {'it' if len(new) == 1 else 'them'} when the step is executed, and appends."


def _left(words: Words, request: RequestState, group_id: int, columns: list[int], table: Sequence[int], ids: Sequence[int]) -> str:
    state = {"PREEMPTED": "preempted", "WAITING": "waiting"}.get(request.status, "finished")
    return f"{request.request_id} is {state} and has no blocks any more. The worker hears of it with the next step; until then its row stays, and is not used."


def _changed(words: Words, request: RequestState, group_id: int, columns: list[int], table: Sequence[int], ids: Sequence[int]) -> str:
    now = [table[c] if c < len(table) else None for c in columns]
    says = listed("nothing" if b is None else b for b in now)
    return f"The manager's table says {says} in {_places(columns)}, the row {ranges([ids[c] for c in columns])}."


_SAY: dict[str, Callable[[Words, RequestState, int, list[int], Sequence[int], Sequence[int]], str]] = {
    GIVEN_UP: _given_up,
    NOT_TOLD: _not_told,
    LEFT: _left,
    CHANGED: _changed,
}


def _tail(words: Words, row: WorkerRow, group_id: int, occupants: Sequence[str]) -> RowNote:
    ids = row.stale_block_ids[group_id]
    length = len(row.block_ids[group_id])
    before = [*dict.fromkeys(name for name in occupants if name != row.request_id)]
    left = f", left by {before[0]} when it sat in row {row.row}" if len(before) == 1 else f", left by {listed(before) or 'others'}, which sat there before"
    named = [block_id for block_id in ids if block_id]
    parts = [
        f"Behind its {count(length, 'entry', 'entries')} the row still says {ranges(named)}{left}: a row that is written anew is not cleared (R8.2).",
        _whose(words, named, row.request_id, group_id),
        "Slots are formed and keys are read only in columns within the length.",
    ]
    return RowNote(row.request_id, group_id, length, length + len(ids) - 1, TAIL, " ".join(part for part in parts if part))


def _places(columns: list[int]) -> str:
    return f"place{'' if len(columns) == 1 else 's'} {ranges(columns)}"


def _whose(words: Words, block_ids: Sequence[int], request_id: str, group_id: int) -> str:
    """Who has these blocks now: “Block 2 belongs to B now; block 1 is free.”"""
    owners: dict[str, list[int]] = {}
    for block_id in block_ids:
        block = words.block(block_id)
        if block is None or not block_id:
            continue
        others = dict.fromkeys(
            owner.request_id if owner.request_id != request_id else f"{request_id} itself"
            for owner in block.owners
            if (owner.request_id, owner.group_id) != (request_id, group_id)
        )
        mine = any((owner.request_id, owner.group_id) == (request_id, group_id) for owner in block.owners)
        state = f"to {listed(others)}" if others else "" if mine else "free"
        if state:
            owners.setdefault(state, []).append(block_id)
    parts = []
    for state, ids in owners.items():
        verb = ("is" if len(ids) == 1 else "are") if state == "free" else ("belongs" if len(ids) == 1 else "belong")
        parts.append(f"block{'' if len(ids) == 1 else 's'} {ranges(ids)} {verb} {state}{'' if state == 'free' else ' now'}")
    return f"{capital('; '.join(parts))}." if parts else ""


def _harmless(words: Words, request: RequestState, group_id: int, columns: list[int]) -> str:
    """Why nobody reads these columns, worked out from the group's window and the next query; nothing where that does not explain it."""
    group, query, size = words.group(group_id), first_query(words.frame, request), words.block_size(group_id)
    if group.is_state:
        if not query:
            return ""
        read = (query - 1) // size
        return f"Harmless: a step reads one state, that in column {read}." if read not in columns else ""
    seen = _first_visible(words, group_id, query, request)
    if seen is None or (columns[-1] + 1) * size > seen:
        return ""
    if group.label.startswith("R-SWA"):
        return f"Harmless: of the outputs, token {query} sees only those from position {seen} on."
    what = "chunk" if group.label.startswith("chunk") else "window"
    return f"Harmless: the {what} of token {query} begins at position {seen}, so the kernel starts in column {seen // size}."


def _first_visible(words: Words, group_id: int, query: int, request: RequestState) -> int | None:
    """The first position that a query sees in a group; of R-SWA the first one behind the prompt. None where it sees everything."""
    named = words.header.config.get("kv_cache_groups") or []
    described = named[group_id] if group_id < len(named) else {}
    window, chunk, outputs = (described.get(name) for name in ("sliding_window", "attention_chunk_size", "rswa_window"))
    if isinstance(window, int):
        return max(0, query - window + 1)
    if isinstance(chunk, int):
        return query // chunk * chunk
    if isinstance(outputs, int):
        return max(request.num_prompt_tokens, query - outputs + 1)
    return None
