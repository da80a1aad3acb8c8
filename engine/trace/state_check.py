"""What a request may do with recurrent states: read its own, of the prefix that it has computed, and write it where nobody else looks.

A block has one state and not slots, so whose state it is follows from the block tables, and of which prefix from what was written last (the slot ledger).
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.trace.events import StateWritten
from engine.trace.frame import BlockState, Frame
from engine.trace.violation import Violation

OWN_PREFIX = "a state grows out of its own request's prefix"
NULL_BLOCK = "the null block holds no state"
OWN_BLOCKS = "a request writes only its own blocks"
NOTHING_SHARED = "nothing shared is overwritten"


def check_state_written(event: StateWritten, frame: Frame, previous: Frame) -> Iterator[Violation]:
    """Violations of a state that was just written; `previous`: the frame before it was. O(owners of two blocks)."""
    yield from _check_source(event, frame, previous)
    before = previous.blocks[event.block_id] if 0 <= event.block_id < len(previous.blocks) else None
    if before is None:
        yield Violation("writes stay inside the pool", f"{event.request_id} writes its state to block {event.block_id}, which the pool does not have")
    elif before.is_null:
        yield Violation(NULL_BLOCK, f"{event.request_id} writes its state after {event.num_tokens} tokens to the null block", before.block_id)
    elif not _owns(event, before):
        text = f"{event.request_id} writes its state to block {before.block_id}, which is not in its block table"
        yield Violation(OWN_BLOCKS, text, before.block_id)
    elif before.ref_cnt > 1 and before.num_state_tokens is not None:
        text = f"{event.request_id} overwrites the state in block {before.block_id}, which {before.ref_cnt} references share"
        yield Violation(NOTHING_SHARED, text, before.block_id)


def _check_source(event: StateWritten, frame: Frame, previous: Frame) -> Iterator[Violation]:
    """The state that was read: of the request's own prefix up to where this step's tokens begin, or up to where the step wrote a state on the way (R3.42)."""
    who, num_source_tokens = event.request_id, event.num_source_tokens
    begin, end = _step(event, frame)
    goes_on = _wrote(event, previous)
    if num_source_tokens != begin and not goes_on:
        text = f"{who} computes its state from the one after {num_source_tokens} tokens, but this step begins after {begin}"
        yield Violation(OWN_PREFIX, text, event.source_block_id)
    if not num_source_tokens < event.num_tokens <= end:
        text = f"{who} says that it has the state after {event.num_tokens} tokens, but this step goes from {num_source_tokens} to {end}"
        yield Violation(OWN_PREFIX, text, event.block_id)
    if event.source_block_id is None:
        if num_source_tokens:
            yield Violation(OWN_PREFIX, f"{who} computes its state after {event.num_tokens} tokens from nothing, but {num_source_tokens} are computed before")
        return
    source = previous.blocks[event.source_block_id] if 0 <= event.source_block_id < len(previous.blocks) else None
    if source is None:
        yield Violation(OWN_PREFIX, f"{who} reads its state from block {event.source_block_id}, which the pool does not have")
    elif source.is_null:
        yield Violation(NULL_BLOCK, f"{who} reads its state after {num_source_tokens} tokens from the null block", source.block_id)
    elif not _owns(event, source):
        yield Violation(OWN_PREFIX, f"{who} reads its state from block {source.block_id}, which is not in its block table", source.block_id)
    elif source.num_state_tokens != num_source_tokens:
        holds = "no state" if source.num_state_tokens is None else f"the one after {source.num_state_tokens}"
        text = f"{who} reads the state after {num_source_tokens} tokens from block {source.block_id}, which has {holds}"
        yield Violation(OWN_PREFIX, text, source.block_id)


def _step(event: StateWritten, frame: Frame) -> tuple[int, int]:
    """Where the tokens begin and end that this step computes for the event's request; the request's counter has moved on before they are (R7.1)."""
    request = frame.request(event.request_id) if event.request_id is not None else None
    end = request.num_computed_tokens if request is not None else 0
    return end - frame.scheduled.get(event.request_id or "", 0), end


def _wrote(event: StateWritten, previous: Frame) -> bool:
    """Whether the source is what the same request wrote just before, in the same step."""
    last = previous.event
    same = isinstance(last, StateWritten) and (last.request_id, last.group_id) == (event.request_id, event.group_id)
    return same and isinstance(last, StateWritten) and (last.block_id, last.num_tokens) == (event.source_block_id, event.num_source_tokens)


def _owns(event: StateWritten, block: BlockState) -> bool:
    return any(owner.request_id == event.request_id and owner.group_id == (event.group_id or 0) for owner in block.owners)
