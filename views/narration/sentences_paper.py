"""What happened in a run of the paper's engine: sequence groups, copy-on-write, beams, swapping. Symbols are those of vLLM's first release, rules the paper's
sections."""

from __future__ import annotations

from engine.trace import events as e
from engine.trace.events import CauseKind
from views.narration.sentence import Sentence
from views.narration.words import Words, capital, count, listed, physical

MANY = 3
"""More sequences than these are counted instead of named."""


def _sequence_forked(words: Words, event: e.SequenceForked) -> str:
    if event.cause.kind is CauseKind.SHARED_PREFIX:
        return f"{event.request_id} begins with {words.called(event.parent_id)}: it shares {physical(event.block_ids)}."
    if not event.block_ids:
        return f"{event.request_id} is forked from {event.parent_id}, which holds no block yet."
    return f"{event.request_id} is forked from {event.parent_id} and shares {physical(event.block_ids)}."


def _beams_chosen(words: Words, event: e.BeamsChosen) -> str:
    kept = [f"{c.sequence_id} {words.token(c.token_id)}" for c in event.candidates if c.sequence_id is not None]
    if not kept:
        return f"No candidate of {event.request_id} goes on."
    ended = [c.sequence_id for c in event.candidates if c.finished and c.sequence_id is not None]
    one, all_end = len(kept) == 1, len(ended) == len(kept)
    what = f"{'is' if one else 'are'} finished" if all_end else f"{'goes' if one else 'go'} on"
    end = f"; {listed(ended)} {'ends' if len(ended) == 1 else 'end'} here" if ended and not all_end else ""
    if any(c.forced for c in event.candidates):
        return f"{count(len(kept), 'candidate')} of {event.request_id} {what} (forced): {listed(kept)}{end}."
    best = f"best candidate of {event.request_id}" if one else f"best {len(kept)} candidates of {event.request_id}"
    return f"The {best} {what}: {listed(kept)}{end}."


def _prefix_kept(words: Words, event: e.PrefixKept) -> str:
    verb = "stays" if len(event.block_ids) == 1 else "stay"
    return f"{capital(words.called(event.request_id))} is computed: {physical(event.block_ids)} {verb} in memory for all requests to come."


def _swapped_out(words: Words, event: e.BlocksSwappedOut) -> str:
    return f"{event.request_id} is swapped out: {_pages(event.gpu_block_ids, 'GPU')} → {_pages(event.cpu_block_ids, 'CPU')}."


def _swapped_in(words: Words, event: e.BlocksSwappedIn) -> str:
    return f"{event.request_id} is swapped in: {_pages(event.cpu_block_ids, 'CPU')} → {_pages(event.gpu_block_ids, 'GPU')}."


def _pages(block_ids: list[int], where: str) -> str:
    return f"{where} {physical(block_ids)}"


# ---------------------------------------------------------------- kinds that V1 has too


def _trace_started(words: Words, event: e.TraceStarted) -> str:
    cpu = len(words.frame.cpu_blocks)
    swap = f", and {count(cpu, 'block')} of swap space in CPU memory" if cpu else ""
    return f"A fresh pool: {count(event.num_blocks, 'free block')} of {count(event.block_size, 'slot')} each{swap}."


def _request_added(words: Words, event: e.RequestAdded) -> str:
    asked, name = words.asked(event.request_id), words.group_name(event.request_id)
    tokens = count(event.num_prompt_tokens, "prompt token")
    if words.is_prefix(event.request_id):
        name = "" if str(event.request_id).lower() == "prefix" else f" {event.request_id}"
        return f"The provider's prefix{name} arrives: {count(event.num_prompt_tokens, 'token')}."
    if width := asked.get("beam_width"):
        return f"{name} arrives with {tokens}, for a beam search of width {width}, and waits."
    if (n := asked.get("n")) and n > 1:
        return f"{name} arrives with {tokens}, wants {n} samples, and waits."
    return f"{name} arrives with {tokens} and waits."


def _step_started(words: Words, event: e.StepStarted) -> str:
    return f"Iteration {words.frame.step}: at most {count(event.token_budget, 'token')}."


def _allocation_refused(words: Words, event: e.AllocationRefused) -> str:
    kind = event.cause.kind
    if kind is CauseKind.PREEMPTED_FIRST:
        return f"{event.request_id} waits: preempted requests come first."
    if kind is CauseKind.PROMPT_TOO_LONG_FOR_STEP:
        return f"{event.request_id} waits: its prompt does not fit into this iteration."
    if any(r.status == "SWAPPED" for r in words.sequences(event.request_id)):
        return f"{event.request_id} stays in the swap space: there is no room for it on the GPU."
    if _is_running(words, event):
        return f"{event.request_id} runs, but there is no block for its next {'token' if event.num_new_tokens == 1 else 'tokens'}."
    return f"{event.request_id} does not fit and waits."


def _is_running(words: Words, event: e.AllocationRefused) -> bool:
    return event.request_id in words.frame.running or any(r.status == "RUNNING" for r in words.sequences(event.request_id))


def _refused_symbol(words: Words, event: e.AllocationRefused) -> str:
    if event.cause.kind in (CauseKind.PREEMPTED_FIRST, CauseKind.PROMPT_TOO_LONG_FOR_STEP):
        return "Scheduler._schedule"
    if event.cause.kind is CauseKind.SWAP_SPACE_EXHAUSTED:
        return "BlockSpaceManager.can_swap_out"
    if any(r.status == "SWAPPED" for r in words.sequences(event.request_id)):
        return "BlockSpaceManager.can_swap_in"
    return f"BlockSpaceManager.{'can_append_slot' if _is_running(words, event) else 'can_allocate'}"


def _blocks_allocated(words: Words, event: e.BlocksAllocated) -> str:
    return f"{capital(words.called(event.request_id)) if event.request_id else 'The scenario'} takes {physical(event.block_ids)}."


def _allocated_symbol(words: Words, event: e.BlocksAllocated) -> str:
    before = words.request_before(event.request_id)
    return f"BlockSpaceManager.{'append_slot' if before is not None and before.status == 'RUNNING' else 'allocate'}"


def _request_admitted(words: Words, event: e.RequestAdmitted) -> str:
    if event.resumed:
        return f"{event.request_id} comes back and runs again."
    have = f": {count(event.num_computed_tokens, 'token')} need not be computed" if event.num_computed_tokens else ""
    return f"{capital(words.called(event.request_id))} is admitted{have}."


def _admitted_symbol(words: Words, event: e.RequestAdmitted) -> str:
    return "Scheduler._swap_in" if event.cause.kind is CauseKind.SWAPPED_BACK else "Scheduler._schedule"


def _request_preempted(words: Words, event: e.RequestPreempted) -> str:
    number = len([r for r in words.sequences(event.request_id) if not r.status.startswith("FINISHED")])
    together = f": {'both its sequences' if number == 2 else f'all its {number} sequences'} give way together" if number > 1 else ""
    lost = f" and loses {count(event.num_lost_tokens, 'computed token')}" if event.num_lost_tokens else ""
    return f"{event.request_id} is preempted{lost}{together}."


def _preempted_symbol(words: Words, event: e.RequestPreempted) -> str:
    how = {CauseKind.SWAPPED: "_by_swap", CauseKind.RECOMPUTED: "_by_recompute", CauseKind.SWAP_SPACE_EXHAUSTED: "_by_recompute"}
    return f"Scheduler._preempt{how.get(event.cause.kind, '')}"


def _row_updated(words: Words, event: e.RowUpdated) -> str:
    if not event.block_ids:
        return f"Row {event.row} of the worker's block table is cleared."
    return f"The worker's row {event.row} gets {physical(event.block_ids)} from column {event.start} on."


def _blocks_freed(words: Words, event: e.BlocksFreed) -> str:
    who, gone, shared = event.request_id or "The scenario", event.prepended + event.appended, event.still_referenced
    if event.cause.kind is CauseKind.PREPARED:
        return f"The free queue is laid out: {listed(event.prepended)} come first."
    if not event.block_ids:
        return f"{who} held no block: nothing is given back."
    if gone and shared:
        return f"{who} lets go of {physical(event.block_ids)}: {listed(gone)} {'is' if len(gone) == 1 else 'are'} free now, others still use {listed(shared)}."
    if shared:
        return f"{who} lets go of {physical(shared)}, which others still use."
    return f"{who} gives back {physical(event.block_ids)}."


def _freed_section(words: Words, event: e.BlocksFreed) -> str:
    if event.cause.kind in (CauseKind.BEAM_DROPPED, CauseKind.BEAMS_FINISHED):
        return "§4.4"
    return "§4.5" if event.cause.kind in (CauseKind.PREEMPTED, CauseKind.RECOMPUTED, CauseKind.SWAP_SPACE_EXHAUSTED) else "§4.3"


def _copy_queued(words: Words, event: e.CopyQueued) -> str:
    source, destination, request = event.source_block_id, event.destination_block_id, words.request(event.request_id)
    written = _next_token(words, event)
    what = f"writes {written} into block {source}" if written else f"writes into block {source}"
    before = words.block_before(source)
    others = sorted({o.request_id for o in before.owners} - {event.request_id}) if before is not None else []
    if not others or request is None:
        return f"{event.request_id or 'A sequence'} {what}, which others refer to: it is copied to block {destination} first."
    named = listed(words.called(o) for o in others) if len(others) <= MANY else f"{len(others)} others"
    refer = f"{named} {'refers' if len(others) == 1 else 'refer'} to it too"
    return f"{event.request_id} {what}, but {refer}: it is copied to block {destination} first."


def _next_token(words: Words, event: e.CopyQueued) -> str:
    """What is about to be written into the block: its token in quotation marks, or how many."""
    request, size = words.request(event.request_id), words.block_size(0)
    if request is None:
        return ""
    position = max(request.num_computed_tokens, event.logical_index * size)
    number = min(len(request.token_ids), (event.logical_index + 1) * size) - position
    return count(number, "token") if number > 1 else words.token(request.token_ids[position]) if number == 1 else ""


def _blocks_copied(words: Words, event: e.BlocksCopied) -> str:
    pairs = [f"{s} → {d}" for s, d in zip(event.source_block_ids, event.destination_block_ids, strict=True)]
    return capital(f"{'block' if len(pairs) == 1 else 'blocks'} {listed(pairs)} copied, all layers at once.")


def _token_sampled(words: Words, event: e.TokenSampled) -> str:
    forced = " (forced)" if event.cause.kind is CauseKind.FORCED else ""
    return f"{event.request_id} continues with {words.token(event.token_id)}{forced}."


def _request_finished(words: Words, event: e.RequestFinished) -> str:
    if event.cause.kind is CauseKind.BEAM_DROPPED:
        return f"{event.request_id} is dropped."
    return f"{event.request_id} is finished."


def _finished_section(words: Words, event: e.RequestFinished) -> str:
    return "§4.4" if event.cause.kind in (CauseKind.BEAM_DROPPED, CauseKind.BEAMS_FINISHED) else "§4.3"


def _sampled_section(words: Words, event: e.TokenSampled) -> str:
    return "§4.4" if len(words.sequences(event.request_id)) > 1 else "§4.3"


def _blocks_touched(words: Words, event: e.BlocksTouched) -> str:
    if event.cause.kind is CauseKind.PREPARED:
        return f"The scenario takes hold of {physical(event.block_ids)}, to lay the queue out anew."
    other = event.cause.facts.get("other")
    return f"{event.request_id} shares {physical(event.block_ids)}{f' with {other}' if other else ''}."


PAPER_SENTENCES: dict[str, Sentence] = {
    "sequence_forked": Sentence(_sequence_forked, "BlockSpaceManager.fork", "§4.4"),
    "beams_chosen": Sentence(_beams_chosen, "_sample_from_generation_tokens", "§4.4"),
    "prefix_kept": Sentence(_prefix_kept, "", "§4.4"),
    "blocks_swapped_out": Sentence(_swapped_out, "BlockSpaceManager.swap_out", "§4.5"),
    "blocks_swapped_in": Sentence(_swapped_in, "BlockSpaceManager.swap_in", "§4.5"),
}
"""Kinds that only the paper's engine has."""

IN_THE_PAPER: dict[str, Sentence] = {
    "trace_started": Sentence(_trace_started, "BlockAllocator.__init__", "§4.2"),
    "request_added": Sentence(_request_added, "Scheduler.add_seq_group", "§4.5"),
    "step_started": Sentence(_step_started, "Scheduler.schedule", "§4.3"),
    "allocation_refused": Sentence(_allocation_refused, _refused_symbol, "§4.5"),
    "blocks_allocated": Sentence(_blocks_allocated, _allocated_symbol, "§4.3"),
    "blocks_touched": Sentence(_blocks_touched, "BlockSpaceManager.allocate", "§4.5"),
    "request_admitted": Sentence(_request_admitted, _admitted_symbol, "§4.5"),
    "request_preempted": Sentence(_request_preempted, _preempted_symbol, "§4.5"),
    "row_updated": Sentence(_row_updated, "Worker._prepare_inputs", "§4.3"),
    "blocks_freed": Sentence(_blocks_freed, "BlockSpaceManager.free", _freed_section),
    "copy_queued": Sentence(_copy_queued, "BlockSpaceManager.append_slot", "§4.4"),
    "blocks_copied": Sentence(_blocks_copied, "cache_ops.copy_blocks", "§5.1"),
    "token_sampled": Sentence(_token_sampled, "Scheduler.update", _sampled_section),
    "request_finished": Sentence(_request_finished, "Scheduler.free_seq", _finished_section),
}
"""Kinds that V1 has too, as the paper's engine does them."""

PLACES_IN_THE_PAPER: dict[str, tuple[str, str]] = {
    "request_scheduled": ("Scheduler._schedule", "§4.3"),
    "step_scheduled": ("Scheduler.schedule", "§4.3"),
    "slots_mapped": ("Worker._prepare_inputs", "§4.3"),
    "kv_written": ("cache_ops.reshape_and_cache", "§5.1"),
    "attention_computed": ("PagedAttention.forward", "§4.1"),
}
"""Kinds that are said as in V1: the symbol and the section."""
