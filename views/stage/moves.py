"""What an event moved: the blocks to ring, how the free queue changed, in words, and the copies that are under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.trace.events import (
    BlocksAllocated,
    BlocksCopied,
    BlocksFreed,
    BlocksSkipped,
    BlocksTouched,
    CauseKind,
    CopyQueued,
    Event,
    PrefixLookup,
    StepStarted,
)
from engine.trace.frame import Frame

Copies = list[list[int]]
"""[source, destination] of every copy that is queued and not done yet."""


def moves_of(event: Event) -> dict[str, Any]:
    """What just moved: `blocks` to ring, `left_queue` and `joined_queue`, `queue_text` to tell it in words, `copied` pairs."""
    now: dict[str, Any] = {"blocks": _touched_blocks(event), "left_queue": [], "joined_queue": [], "queue_text": "", "copied": []}
    if isinstance(event, BlocksAllocated):
        now["left_queue"] = list(event.block_ids)
        now["queue_text"] = f"popped from the head, given to {event.request_id}" if event.request_id else "popped from the head by the scenario"
    elif isinstance(event, BlocksTouched):
        now["left_queue"] = list(event.left_free_queue)
        if event.left_free_queue:
            now["queue_text"] = f"a prefix-cache hit of {event.request_id}, from the middle" if event.request_id else "taken out by the scenario"
    elif isinstance(event, CopyQueued):
        now["left_queue"] = [event.destination_block_id]
        now["queue_text"] = f"popped from the head, for a copy of block {event.source_block_id}"
    elif isinstance(event, BlocksFreed | BlocksSkipped):
        now["joined_queue"] = [*event.prepended, *event.appended]
        now["queue_text"] = _joined(event)
    elif isinstance(event, BlocksCopied):
        now["copied"] = [list(pair) for pair in zip(event.source_block_ids, event.destination_block_ids, strict=True)]
    return now


def _joined(event: BlocksFreed | BlocksSkipped) -> str:
    if event.cause.kind is CauseKind.PREPARED:
        return "arranged by the scenario"
    parts = []
    if event.prepended:
        parts.append("no hash: put at the head")
    if event.appended:
        parts.append("hashed: put at the tail")
    return "; ".join(parts)


def _touched_blocks(event: Event) -> list[int]:
    if isinstance(event, BlocksFreed):
        return [*event.prepended, *event.appended, *event.still_referenced]
    if isinstance(event, PrefixLookup):
        return [block_id for block_id in event.hit_block_ids if block_id]
    names = ("block_ids", "destination_block_ids")
    ids = [block_id for name in names for block_id in getattr(event, name, []) if block_id]
    single = [getattr(event, name, None) for name in ("block_id", "source_block_id", "destination_block_id")]
    return [*ids, *(block_id for block_id in single if block_id is not None)]


def next_copies(copies: Copies, event: Event) -> Copies:
    """The copies under way after `event`: one more when it is queued, none of those that were done; a new step begins without any (R6.6). The same list
    if nothing changed."""
    if isinstance(event, CopyQueued):
        return [*copies, [event.source_block_id, event.destination_block_id]]
    if isinstance(event, BlocksCopied):
        done = set(zip(event.source_block_ids, event.destination_block_ids, strict=True))
        return [pair for pair in copies if tuple(pair) not in done]
    return [] if copies and isinstance(event, StepStarted) else copies


def copies_under_way(frames: Sequence[Frame], end: int) -> Copies:
    """The copies under way before the frame with index `end`."""
    begin = end
    while begin > 0 and not isinstance(frames[begin - 1].event, StepStarted):
        begin -= 1
    copies: Copies = []
    for frame in frames[begin:end]:
        copies = next_copies(copies, frame.event)
    return copies
