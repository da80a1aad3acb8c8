"""Why the paper's engine did what it did (sections 4.2 to 4.5)."""

from __future__ import annotations

from typing import Any

from engine.trace import events as e
from engine.trace.events import CauseKind
from views.narration.stops import Facts, number
from views.narration.why import Why
from views.narration.words import Words, capital, count, listed, percent, physical

TO_THE_HEAD = "put at the head of the free queue, to be taken next"
TOGETHER = "A request's sequences are swapped in and out as one: all of its blocks or none."


def _shared_block_written(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.BlocksCopied):
        return "The kernel copies whole pages, whatever is in them, before anything of this iteration is written."
    if isinstance(event, e.RowUpdated):
        return "The worker's table names the copy too, from this iteration on."
    before = number(facts, "ref_cnt")
    counts = f" Ref count: {before} → {before - 1}." if before else ""
    new = f", and {event.request_id}'s table names the copy" if getattr(event, "request_id", None) else ""
    return f"Copy-on-write: a block that several sequences share must not change under them. One block is copied{new}.{counts}"


def _parallel_sampling(words: Words, event: Any, facts: Facts) -> str:
    samples = number(facts, "num_samples")
    number_of = "both samples" if samples == 2 else f"all {samples} samples" if samples else "all samples"
    counts = _ref_counts(words, event)
    return f"The prompt is stored once for {number_of}: a fork copies the block table and no keys or values.{counts}"


def _ref_counts(words: Words, event: Any) -> str:
    """“ Ref count of each: 2.” for a fork, or which block has how many."""
    if not isinstance(event, e.SequenceForked | e.BlocksTouched) or not event.block_ids:
        return ""
    sharers: dict[int, list[int]] = {}
    for block_id in event.block_ids:
        if (block := words.block(block_id)) is not None:
            sharers.setdefault(block.ref_cnt, []).append(block_id)
    if len(sharers) == 1:
        return f" {'Its ref count' if len(event.block_ids) == 1 else 'Ref count of each'}: {min(sharers)}."
    counts = [f"{count} for {physical(ids)}" for count, ids in sharers.items()]
    return f" Ref counts: {', '.join(counts)}." if counts else ""


def _beam_survives(words: Words, event: Any, facts: Facts) -> str:
    rank, width = number(facts, "rank") + 1, number(facts, "beam_width")
    of = f"number {rank} of {width}" if width else f"number {rank}"
    if isinstance(event, e.SequenceForked):
        other = f"A better child of {event.parent_id} goes on in {event.parent_id} itself, so this one gets a copy of the block table."
        return f"Its candidate is {of}. {other}{_ref_counts(words, event)}"
    return f"Its candidate is {of} among all candidates of the group."


def _beam_dropped(words: Words, event: Any, facts: Facts) -> str:
    width = number(facts, "beam_width")
    best = f"the best {width}" if width else "the best"
    where = f" {_where_freed(event)}" if isinstance(event, e.BlocksFreed) else ""
    return f"None of its continuations is among {best}.{where}"


def _beam_search(words: Words, event: Any, facts: Facts) -> str:
    candidates = number(facts, "num_candidates") or len(getattr(event, "candidates", []))
    if any(c.forced for c in getattr(event, "candidates", [])):
        return (
            "The scenario dictates which candidates go on; the list goes on with those that the model finds best. A parent may have several children or none."
        )
    among = f"{count(candidates, 'candidate')} of all its sequences are" if candidates else "The candidates of all its sequences are"
    return f"{among} compared by the sum of their log-probabilities; a parent may have several children or none."


def _shared_prefix(words: Words, event: Any, facts: Facts) -> str:
    tokens, prefix = number(facts, "num_tokens"), facts.get("prefix")
    if isinstance(event, e.CopyQueued | e.BlocksCopied):
        return "The prefix ends inside this block. What follows is the request's own, so it goes into a copy."
    which = words.called(str(prefix)) if prefix else "a prefix"
    number_of = f"Its first {count(tokens, 'token')} are" if tokens > 1 else "Its beginning is"
    return f"{number_of} those of {which}, which stays in memory: they need not be computed again.{_ref_counts(words, event)}"


def _prefix_kept(words: Words, event: Any, facts: Facts) -> str:
    tokens = number(facts, "num_tokens")
    number_of = f"its {count(tokens, 'token')}" if tokens else "it"
    if isinstance(event, e.PrefixKept | e.RequestFinished):
        return (
            f"The provider expects many prompts that begin with it, so {number_of} are computed once and kept, as an operating system keeps a shared library."
        )
    return f"The provider computes {number_of} once, before any request comes."


def _one_block_per_sequence(words: Words, event: Any, facts: Facts) -> str:
    sequences, required, free = (number(facts, name) for name in ("num_sequences", "num_required", "num_free"))
    who = f"Its {count(sequences, 'sequence')} need" if sequences > 1 else "It needs"
    needed = f"{who} {count(required, 'block')} for {'their next tokens' if sequences > 1 else 'its next token'}"
    return f"{needed}, and {free} {'is' if free == 1 else 'are'} free. All or nothing: no table was changed."


def _swapped(words: Words, event: Any, facts: Facts) -> str:
    needed, free = number(facts, "num_blocks"), number(facts, "num_cpu_free")
    room = f" It needs {count(needed, 'block')} of the swap space, and {free} {'was' if free == 1 else 'were'} free." if needed else ""
    if isinstance(event, e.BlocksSwappedOut):
        shared = (
            f" {capital(physical(event.still_referenced))} others still use: {'it' if len(event.still_referenced) == 1 else 'they'} stay too."
            if event.still_referenced
            else ""
        )
        return f"Its keys and values wait in CPU memory, each shared block once.{room} The GPU blocks are {TO_THE_HEAD}.{shared}"
    return f"There is no block for the next tokens; the last of the running requests gives way and is kept in CPU memory.{room}"


def _swapped_back(words: Words, event: Any, facts: Facts) -> str:
    needed, free = number(facts, "num_blocks"), number(facts, "num_free")
    if isinstance(event, e.RequestAdmitted):
        return "It is back with all its blocks, computes nothing twice, and goes on where it stopped."
    come_back = len(event.gpu_block_ids) if isinstance(event, e.BlocksSwappedIn) else needed
    more = ", those for its next tokens included" if needed > come_back else ""
    room = f"It needs {count(needed, 'block')}{more}, and {free} {'was' if free == 1 else 'were'} free. " if needed else ""
    return f"{room}{TOGETHER} What was shared is shared again."


def _recomputed(words: Words, event: Any, facts: Facts) -> str:
    tokens = number(facts, "num_tokens")
    number_of = f" of {count(tokens, 'token')}" if tokens else ""
    where = f"{_where_freed(event)} " if isinstance(event, e.BlocksFreed) else ""
    return f"{where}Its blocks are dropped. Later its prompt and its outputs are computed again in one piece, as one prompt{number_of}."


def _same_tokens(words: Words, event: Any, facts: Facts) -> str:
    tokens, other = number(facts, "num_tokens"), facts.get("other")
    begin = (
        f"Its first {count(tokens, 'token')} are those of {other}" if tokens and other else "It begins with the same tokens as another sequence of its group"
    )
    return f"{begin}, so full blocks are shared again and need not be computed twice."


def _swap_space_exhausted(words: Words, event: Any, facts: Facts) -> str:
    needed, free = number(facts, "num_blocks"), number(facts, "num_cpu_free")
    there = f"but {free} {'is' if free == 1 else 'are'} free there"
    return f"It would need {count(needed, 'block')} of the swap space, {there}. So its blocks are dropped, and it is computed again later."


def _preempted_first(words: Words, event: Any, facts: Facts) -> str:
    swapped = number(facts, "num_swapped")
    number_of = (
        f"{count(swapped, 'preempted request')} {'waits' if swapped == 1 else 'wait'} to come back" if swapped else "Preempted requests wait to come back"
    )
    return f"First come, first served: {number_of}, and nothing new is admitted before."


def _prompt_too_long(words: Words, event: Any, facts: Facts) -> str:
    tokens, budget = number(facts, "num_tokens"), number(facts, "token_budget")
    return f"A prompt is computed in one piece: {count(tokens, 'token')}, but this iteration has room for {budget} more."


def _beams_finished(words: Words, event: Any, facts: Facts) -> str:
    finished = number(facts, "num_finished")
    number_of = f"{count(finished, 'beam')} {'is' if finished == 1 else 'are'} finished" if finished else "Enough beams are finished"
    where = f" {_where_freed(event)}" if isinstance(event, e.BlocksFreed) else ""
    return f"{number_of}, and no running one can become better than they are.{where}"


def _where_freed(event: Any) -> str:
    """Where its blocks go: a reference less, or to the head of the free queue."""
    gone, shared = [*event.prepended, *event.appended], list(event.still_referenced)
    parts = []
    if gone:
        parts.append(f"{physical(gone)}: nobody refers to {'it' if len(gone) == 1 else 'them'} any more, {TO_THE_HEAD}")
    if shared:
        parts.append(f"{physical(shared)}: one reference less")
    return capital("; ".join(parts)) + "." if parts else "It held no block."


# ---------------------------------------------------------------- causes that V1 has too


def _scenario(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.TraceStarted):
        return "No block has an owner. The paper's pool has no null block: block 0 is a block like any other."
    if isinstance(event, e.RequestAdded):
        return "The scenario sends it now. It owns no physical block yet."
    return ""


def _prepared(words: Words, event: Any, facts: Facts) -> str:
    return "A scene may arrange the free queue between iterations; from then on the engine alone decides."


def _head_of_free_queue(words: Words, event: Any, facts: Facts) -> str:
    block_ids = list(getattr(event, "block_ids", []))
    if not block_ids:
        return ""
    held, tokens, size = number(facts, "num_held"), number(facts, "num_tokens"), words.block_size(0)
    heads = f"{capital(physical(block_ids))} {'was' if len(block_ids) == 1 else 'were'} at the head of the free queue."
    request = words.request(event.request_id)
    if held and request is not None and request.block_ids and held <= len(request.block_ids[0]) and tokens == held * size + 1 <= len(request.token_ids):
        return f"Block {request.block_ids[0][held - 1]} is full, so {words.token(request.token_ids[tokens - 1])} needs a new block. {heads}"
    if not tokens:
        return heads
    needs = f"{count(tokens, 'token')} need {count(-(-tokens // size), 'block')} of {count(size, 'slot')}"
    return f"{needs}, and {event.request_id} holds {held}. {heads}" if held else f"{needs}. {heads}"


def _request_finished(words: Words, event: Any, facts: Facts) -> str:
    return f"The sequence is finished. {_where_freed(event)}" if isinstance(event, e.BlocksFreed) else ""


def _preempted(words: Words, event: Any, facts: Facts) -> str:
    return f"A preempted request gives back everything, all or nothing. {_where_freed(event)}" if isinstance(event, e.BlocksFreed) else ""


def _last_running(words: Words, event: Any, facts: Facts) -> str:
    who = facts.get("for_request")
    need = f"{who} needs more blocks than are free" if who else "There is no free block for the next tokens"
    return f"{need}. Last come, first preempted: the request that arrived last gives way, with all its sequences."


def _insufficient_blocks(words: Words, event: Any, facts: Facts) -> str:
    required, mark, free = (number(facts, name) for name in ("num_required", "num_watermark", "num_free"))
    reserve = f", with {mark} kept as a reserve" if mark else ""
    swapped = {b for r in words.sequences(event.request_id) for b in r.cpu_block_ids}
    more = ", those for its next tokens included" if swapped and required > len(swapped) else ""
    return f"It needs {count(required, 'block')}{more}{reserve}, and {free} {'is' if free == 1 else 'are'} free. All or nothing: no table was changed."


def _compared(words: Words, event: Any, facts: Facts) -> str:
    """Where the attention of the last query goes (section 4.1); nothing if nobody asked for it."""
    if not isinstance(event, e.AttentionComputed) or len(event.block_shares) != 1 or not event.request_ids:
        return ""
    request = words.request(event.request_ids[0])
    if request is None or not request.token_ids:
        return ""
    query = words.token(request.token_ids[min(event.seq_lens[0], len(request.token_ids)) - 1])
    shares = event.block_shares[0]
    parts = [f"{percent(share)} to logical block {i}" for i, share in enumerate(shares)]
    return f"{query} is compared with the keys block by block, wherever the blocks lie. Its attention: {listed(parts)}."


def _left_batch(words: Words, event: Any, facts: Facts) -> str:
    return "The sequence is not in the batch any more: it is finished, was dropped, or gave way."


def _next_step(words: Words, event: Any, facts: Facts) -> str:
    if not isinstance(event, e.StepScheduled):
        return ""
    left = event.token_budget_left
    budget = f"{count(left, 'token')} of the budget {'is' if left == 1 else 'are'} left."
    return f"{budget} The worker swaps and copies blocks first, then computes prompts and single tokens side by side in one batch."


PAPER_CAUSES: dict[CauseKind, Why] = {
    CauseKind.SHARED_BLOCK_WRITTEN: _shared_block_written,
    CauseKind.PARALLEL_SAMPLING: _parallel_sampling,
    CauseKind.BEAM_SURVIVES: _beam_survives,
    CauseKind.BEAM_DROPPED: _beam_dropped,
    CauseKind.BEAM_SEARCH: _beam_search,
    CauseKind.SHARED_PREFIX: _shared_prefix,
    CauseKind.PREFIX_KEPT: _prefix_kept,
    CauseKind.ONE_BLOCK_PER_SEQUENCE: _one_block_per_sequence,
    CauseKind.SWAPPED: _swapped,
    CauseKind.SWAPPED_BACK: _swapped_back,
    CauseKind.RECOMPUTED: _recomputed,
    CauseKind.SAME_TOKENS: _same_tokens,
    CauseKind.SWAP_SPACE_EXHAUSTED: _swap_space_exhausted,
    CauseKind.PREEMPTED_FIRST: _preempted_first,
    CauseKind.PROMPT_TOO_LONG_FOR_STEP: _prompt_too_long,
    CauseKind.BEAMS_FINISHED: _beams_finished,
}
"""Causes that only the paper's engine has."""

REASONS_IN_THE_PAPER: dict[CauseKind, Why] = {
    CauseKind.SCENARIO: _scenario,
    CauseKind.PREPARED: _prepared,
    CauseKind.NEXT_STEP: _next_step,
    CauseKind.HEAD_OF_FREE_QUEUE: _head_of_free_queue,
    CauseKind.REQUEST_FINISHED: _request_finished,
    CauseKind.PREEMPTED: _preempted,
    CauseKind.LEFT_BATCH: _left_batch,
    CauseKind.LAST_RUNNING: _last_running,
    CauseKind.INSUFFICIENT_BLOCKS: _insufficient_blocks,
    CauseKind.COMPARED_WITH_REFERENCE: _compared,
}
"""Causes that V1 has too, in the words of the paper's engine; an empty text leaves it to V1's words."""
