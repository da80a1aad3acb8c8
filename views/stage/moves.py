"""What an event moved: the blocks to ring, how the free queue changed, in words, and the copies that are under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.trace.events import (
    BlocksAllocated,
    BlocksCopied,
    BlocksFreed,
    BlocksSkipped,
    BlocksSwappedIn,
    BlocksSwappedOut,
    BlocksTouched,
    CauseKind,
    CopyQueued,
    Event,
    PrefixLookup,
    StateWritten,
    StepStarted,
)
from engine.trace.frame import Frame

Copies = list[list[int]]
"""[source, destination] of every copy that is queued and not done yet."""


def moves_of(event: Event, null_block: int | None = 0, caching: bool = True) -> dict[str, Any]:
    """What just moved: `blocks` to ring, `left_queue` and `joined_queue`, `queue_text` to tell it in words, `copied` pairs; in a run with swap space also
    `swapped`, pairs of a GPU and a CPU block, and `swap`, ``out`` or ``in``. `null_block`: the id that only stands for “skipped”, None where there is none.
    `caching`: whether full blocks bear hashes. A recurrent state that was written gives `state`: the block that was read (None: none), the one that was
    written, and the tokens between the two."""
    touched = [block_id for block_id in _touched_blocks(event) if block_id != null_block]
    now: dict[str, Any] = {"blocks": touched, "left_queue": [], "joined_queue": [], "queue_text": "", "copied": []}
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
        now["queue_text"] = _joined(event, hashed=null_block is not None, caching=caching)
    elif isinstance(event, BlocksSwappedOut):
        now["swapped"], now["swap"] = _pairs(event), "out"
        now["joined_queue"] = list(event.prepended)
        now["queue_text"] = "swapped out: put at the head"
    elif isinstance(event, BlocksSwappedIn):
        now["swapped"], now["swap"] = _pairs(event), "in"
        now["left_queue"] = list(event.gpu_block_ids)
        now["queue_text"] = f"popped from the head, for the blocks of {event.request_id}"
    elif isinstance(event, StateWritten):
        now["blocks"] = [event.block_id]
        now["state"] = [event.source_block_id, event.block_id, event.num_tokens - event.num_source_tokens]
    elif isinstance(event, BlocksCopied):
        now["copied"] = [list(pair) for pair in zip(event.source_block_ids, event.destination_block_ids, strict=True)]
    return now


def _pairs(event: BlocksSwappedOut | BlocksSwappedIn) -> list[list[int]]:
    return [list(pair) for pair in zip(event.gpu_block_ids, event.cpu_block_ids, strict=True)]


def _joined(event: BlocksFreed | BlocksSkipped, hashed: bool, caching: bool) -> str:
    if not hashed:
        return "nobody refers to it: put at the head" if len(event.prepended) == 1 else "nobody refers to them: put at the head" if event.prepended else ""
    if event.cause.kind is CauseKind.PREPARED:
        return "arranged by the scenario"
    parts = []
    if event.prepended:
        parts.append("no hash: put at the head")
    if event.appended:
        parts.append("hashed: put at the tail" if caching else "no prefix caching: put at the tail")
    return "; ".join(parts)


def _touched_blocks(event: Event) -> list[int]:
    if isinstance(event, BlocksFreed):
        return [*event.prepended, *event.appended, *event.still_referenced]
    if isinstance(event, PrefixLookup):
        return list(event.hit_block_ids)
    names = ("block_ids", "destination_block_ids", "gpu_block_ids")
    ids = [block_id for name in names for block_id in getattr(event, name, [])]
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
