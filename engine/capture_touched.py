"""What an event may have changed, by its kind alone: which blocks, and whether tables, the free queue, the prefix cache or the batch must be read again.

This is all that spares a recorder the scan of the whole pool. It only says where to look; what stands there is read from the engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.trace.events import (
    BlockCached,
    BlockEvicted,
    BlocksAllocated,
    BlocksCopied,
    BlocksFreed,
    BlocksSkipped,
    BlocksTouched,
    CopyQueued,
    EngineFailed,
    Event,
    KVWritten,
    PrefixCacheReset,
    RequestAdded,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RowUpdated,
    StateBlocksArranged,
    StateWritten,
    StepScheduled,
    StepStarted,
    TraceStarted,
)

EVERYTHING = (TraceStarted, PrefixCacheReset, EngineFailed)
"""After these the whole state is read again: the first one, one that touches all blocks, and the end of a run that broke off somewhere."""
TABLES = (BlocksTouched, BlocksAllocated, BlocksFreed, BlocksSkipped, StateBlocksArranged, CopyQueued)
"""The block table of the event's request and group changed."""
FREE_QUEUE = (BlocksTouched, BlocksAllocated, BlocksFreed, BlocksSkipped, CopyQueued)
"""Blocks of the event left or joined the free queue."""
KEYS = (BlockEvicted, BlockCached, CopyQueued)
"""Blocks of the event gained or lost keys."""
LISTS = (RequestAdded, RequestAdmitted, RequestPreempted, RequestFinished, StepStarted, StepScheduled)
"""The running and waiting lists changed."""
ROWS = (RowUpdated,)
"""The worker's rows changed."""


def touched_blocks(event: Event, block_size: int) -> Iterable[int]:
    """Ids of the blocks that the event names (0 may stand for null blocks). `block_size`: tokens per block where the event has slots."""
    if isinstance(event, KVWritten):
        return {slot // block_size for slot in event.slots if slot >= 0}
    if isinstance(event, (BlocksTouched, BlocksAllocated, BlocksFreed, BlocksSkipped)):
        return event.block_ids
    if isinstance(event, (BlockEvicted, BlockCached, StateWritten)):
        return (event.block_id,)
    if isinstance(event, CopyQueued):
        return (event.source_block_id, event.destination_block_id)
    if isinstance(event, BlocksCopied):
        return (*event.source_block_ids, *event.destination_block_ids)
    return ()


def touched_requests(event: Event) -> Iterable[str]:
    """Ids of the requests whose progress the event reports."""
    if isinstance(event, StepScheduled):
        return event.num_scheduled_tokens
    return () if event.request_id is None else (event.request_id,)
