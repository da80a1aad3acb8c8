"""Preemption (section 4.5): a group gives up its blocks as a whole, to the swap space or to nothing."""

from __future__ import annotations

from collections.abc import Callable

from engine.paper.block_space_manager import BlockSpaceManager
from engine.paper.config import PreemptionMode
from engine.paper.sequence import SequenceGroup, SequenceStatus
from engine.trace.events import Cause, CauseKind, Emit, RequestPreempted


def wants_swap(group: SequenceGroup, mode: PreemptionMode) -> bool:
    """Whether the group is to be swapped if there is room: by the mode, or in mode ``auto`` if it has several sequences, which would be costly to compute
    again. vLLM's first release: Scheduler._preempt."""
    return mode == "swap" or (mode == "auto" and len(group.living) > 1)


def preempt(
    group: SequenceGroup, for_group: SequenceGroup, manager: BlockSpaceManager, mode: PreemptionMode, put_away: Callable[[bool], None], emit: Emit
) -> list[tuple[int, int]]:  # fmt: skip
    """Take all blocks from a running group, all or nothing. `put_away` moves it to the list where it waits, swapped (True) or to be recomputed (False).

    Returns the pairs (GPU block, CPU block) to copy, none when it is recomputed: wanted so, or because the swap space cannot hold the whole group. Its
    sequences keep their tokens; recomputed ones lose their progress. vLLM's first release: Scheduler._preempt_by_swap and _preempt_by_recompute."""
    swap = wants_swap(group, mode)
    by_swap = swap and manager.can_swap_out(group)
    num_blocks, num_cpu_free = manager.num_blocks_to_swap(group), manager.cpu_allocator.num_free_blocks
    num_lost = 0
    for sequence in group.living:
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        if not by_swap:
            num_lost += sequence.num_computed_tokens
            sequence.num_computed_tokens = 0
    put_away(by_swap)
    cause = Cause(CauseKind.LAST_RUNNING, {"for_request": for_group.event_id})
    emit(RequestPreempted(cause=cause, request_id=group.event_id, num_lost_tokens=num_lost))
    if by_swap:
        return manager.swap_out(group, Cause(CauseKind.SWAPPED, {"num_blocks": num_blocks, "num_cpu_free": num_cpu_free}))
    for sequence in group.living:
        if swap:
            cause = Cause(CauseKind.SWAP_SPACE_EXHAUSTED, {"num_blocks": num_blocks, "num_cpu_free": num_cpu_free})
        else:
            cause = Cause(CauseKind.RECOMPUTED, {"num_tokens": sequence.num_tokens})
        manager.free(sequence, cause)
    return []
