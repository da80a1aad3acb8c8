"""What happened: one short sentence per event kind, with the place in vLLM V1 where it happens and the rule it follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.trace import events as e
from engine.trace.events import CauseKind
from views.narration.words import Words, blocks, count, listed, power_of_ten, slots


class Sentence(NamedTuple):
    """How to say one kind of event."""

    say: Callable[[Words, Any], str]
    symbol: str | Callable[[Any], str]
    rule: str

    def symbol_of(self, event: Any) -> str:
        """vLLM's name for what this event is; one kind may stand for several of its operations."""
        return self.symbol if isinstance(self.symbol, str) else self.symbol(event)


def _trace_started(words: Words, event: e.TraceStarted) -> str:
    return f"A fresh pool: {count(event.num_blocks - 1, 'free block')} of {count(event.block_size, 'slot')} each, and the null block 0."


def _request_added(words: Words, event: e.RequestAdded) -> str:
    return f"{event.request_id} arrives with {count(event.num_prompt_tokens, 'prompt token')} and waits."


def _step_started(words: Words, event: e.StepStarted) -> str:
    return f"Engine step {words.frame.step}: a budget of {count(event.token_budget, 'token')}."


def _prefix_lookup(words: Words, event: e.PrefixLookup) -> str:
    if not event.num_hit_tokens:
        return f"{event.request_id} finds nothing of its prompt in the prefix cache."
    return f"{event.request_id} finds {count(event.num_hit_tokens, 'token')} in the prefix cache: {blocks(event.hit_block_ids)}."


def _allocation_refused(words: Words, event: e.AllocationRefused) -> str:
    request = words.request(event.request_id)
    if request is not None and request.request_id in words.frame.running:
        return f"{event.request_id} runs, but there is no block for its next {'token' if event.num_new_tokens == 1 else 'tokens'}."
    return f"{event.request_id} does not fit and waits."


def _blocks_touched(words: Words, event: e.BlocksTouched) -> str:
    return f"{event.request_id} adopts cached {blocks(event.block_ids)}."


def _block_evicted(words: Words, event: e.BlockEvicted) -> str:
    return f"Block {event.block_id} loses its hash {event.block_hash[:6]}: it is evicted from the prefix cache."


def _blocks_allocated(words: Words, event: e.BlocksAllocated) -> str:
    if event.cause.kind is CauseKind.PREPARED or event.request_id is None:
        return f"The scenario takes all free blocks, {listed(event.block_ids)}, to lay the queue out anew."
    return f"{event.request_id} takes {blocks(event.block_ids)}."


def _block_cached(words: Words, event: e.BlockCached) -> str:
    return f"Block {event.block_id} gets the hash {event.block_hash[:6]}."


def _request_admitted(words: Words, event: e.RequestAdmitted) -> str:
    again = " again" if event.resumed else ""
    have = f", {count(event.num_computed_tokens, 'token')} already in the cache" if event.num_computed_tokens else ""
    return f"{event.request_id} is admitted{again}{have}."


def _request_scheduled(words: Words, event: e.RequestScheduled) -> str:
    first = event.num_computed_tokens
    last = first + event.num_scheduled_tokens - 1
    request = words.request(event.request_id)
    if event.num_scheduled_tokens == 1:
        token = f" {words.token(request.token_ids[first])}" if request is not None and first < len(request.token_ids) else ""
        return f"{event.request_id} will compute token {first}{token}."
    return f"{event.request_id} will compute tokens {first} to {last}."


def _request_preempted(words: Words, event: e.RequestPreempted) -> str:
    return f"{event.request_id} is preempted and loses {count(event.num_lost_tokens, 'computed token')}."


def _step_scheduled(words: Words, event: e.StepScheduled) -> str:
    shares = [f"{count(n, 'token')} of {request_id}" for request_id, n in event.num_scheduled_tokens.items()]
    return f"Planned: {listed(shares)}." if shares else "Planned: nothing can run."


def _row_updated(words: Words, event: e.RowUpdated) -> str:
    if not event.block_ids:
        return f"Row {event.row} of the worker's block table is cleared."
    return f"The worker's row {event.row} gets {blocks(event.block_ids)} from column {event.start} on."


def _row_symbol(event: e.RowUpdated) -> str:
    if not event.block_ids:
        return "BlockTable.clear_row"
    return "BlockTable.append_row" if event.cause.kind is CauseKind.APPENDED else "BlockTable.add_row"


def _slots_mapped(words: Words, event: e.SlotsMapped) -> str:
    if len(event.slots) == 1:
        return f"Token {event.positions[0]} {words.token(event.token_ids[0])} of {event.request_id} → {slots(event.slots)}."
    return f"The {count(len(event.slots), 'token')} of {event.request_id} → {slots(event.slots)}."


def _kv_written(words: Words, event: e.KVWritten) -> str:
    whose = f"{words.token(event.token_ids[0])}" if len(event.slots) == 1 else count(len(event.slots), "token")
    if event.backend == "none":
        return f"{slots(event.slots).capitalize()} {'counts' if len(event.slots) == 1 else 'count'} as filled: {words.tokens(event.token_ids)}."
    return f"Keys and values of {whose} → {slots(event.slots)}."


def _attention_computed(words: Words, event: e.AttentionComputed) -> str:
    if len(event.request_ids) == 1:
        queries, seq = event.query_lens[0], event.seq_lens[0]
        return f"Attention: {count(queries, 'query', 'queries')} of {event.request_ids[0]} over {count(seq, 'token')}."
    return f"Attention: {count(sum(event.query_lens), 'query', 'queries')} of {listed(event.request_ids)} in one launch."


def _token_sampled(words: Words, event: e.TokenSampled) -> str:
    forced = " (forced)" if event.cause.kind is CauseKind.FORCED else ""
    return f"{event.request_id} continues with {words.token(event.token_id)}{forced}."


def _request_finished(words: Words, event: e.RequestFinished) -> str:
    return f"{event.request_id} is finished."


def _blocks_freed(words: Words, event: e.BlocksFreed) -> str:
    if event.cause.kind is CauseKind.PREPARED:
        return f"The free queue is laid out: {listed(event.prepended)} come first."
    gone = [*event.prepended, *event.appended]
    who = f"{event.request_id} gives back" if event.request_id else "Given back:"
    if not gone:
        return f"{who} {blocks(event.block_ids)}; others still hold {'it' if len(event.block_ids) == 1 else 'them'}."
    return f"{who} {blocks(event.block_ids)}."


def _blocks_skipped(words: Words, event: e.BlocksSkipped) -> str:
    return f"{event.request_id} lets go of {blocks(event.block_ids)}: the null block takes the place in its table."


def _blocks_copied(words: Words, event: e.BlocksCopied) -> str:
    pairs = [f"{s} → {d}" for s, d in zip(event.source_block_ids, event.destination_block_ids, strict=True)]
    return f"Copied, all layers at once: block {listed(pairs)}."


def _prefix_cache_reset(words: Words, event: e.PrefixCacheReset) -> str:
    return "The prefix cache is emptied: every hash is gone." if event.ok else "The prefix cache is not emptied: blocks are still in use."


def _engine_failed(words: Words, event: e.EngineFailed) -> str:
    return "The run stops here."


def _recording_stopped(words: Words, event: e.RecordingStopped) -> str:
    return f"The recorder is full after {count(event.num_frames, 'frame')}: nothing after this one is kept."


def agreement(event: e.AttentionComputed) -> str | None:
    """“kernel = reference within 10⁻⁶ (layer 0)”, or None when nothing was compared."""
    if event.agrees_within is None:
        return None
    layers = f"layer {event.layers[0]}" if len(event.layers) == 1 else f"{len(event.layers)} layers"
    return f"kernel = reference within {power_of_ten(event.agrees_within)} ({layers})"


SENTENCES: dict[str, Sentence] = {
    "trace_started": Sentence(_trace_started, "BlockPool.__init__", "R1.1"),
    "request_added": Sentence(_request_added, "Scheduler.add_request", "R2.5"),
    "step_started": Sentence(_step_started, "Scheduler.schedule", "R7.1"),
    "prefix_lookup": Sentence(_prefix_lookup, "KVCacheManager.get_computed_blocks", "R5.1"),
    "allocation_refused": Sentence(_allocation_refused, "KVCacheManager.allocate_slots", "R5.3"),
    "blocks_touched": Sentence(_blocks_touched, "BlockPool.touch", "R1.6"),
    "block_evicted": Sentence(_block_evicted, "BlockPool._maybe_evict_cached_block", "R1.5"),
    "blocks_allocated": Sentence(_blocks_allocated, "BlockPool.get_new_blocks", "R1.5"),
    "block_cached": Sentence(_block_cached, "BlockPool.cache_full_blocks", "R1.11"),
    "request_admitted": Sentence(_request_admitted, "Scheduler.schedule", "R7.4"),
    "request_scheduled": Sentence(_request_scheduled, "Scheduler.schedule", "R7.2"),
    "request_preempted": Sentence(_request_preempted, "Scheduler._preempt_request", "R7.5"),
    "step_scheduled": Sentence(_step_scheduled, "Scheduler._update_after_schedule", "R7.1"),
    "row_updated": Sentence(_row_updated, _row_symbol, "R8.2"),
    "slots_mapped": Sentence(_slots_mapped, "BlockTable.compute_slot_mapping", "R8.4"),
    "kv_written": Sentence(_kv_written, "reshape_and_cache_flash", "R8.5"),
    "attention_computed": Sentence(_attention_computed, "unified_attention", "R8.6"),
    "token_sampled": Sentence(_token_sampled, "Scheduler.update_from_output", "R7.8"),
    "request_finished": Sentence(_request_finished, "Scheduler.finish_requests", "R7.8"),
    "blocks_freed": Sentence(_blocks_freed, "BlockPool.free_blocks", "R1.7"),
    "blocks_skipped": Sentence(_blocks_skipped, "SingleTypeKVCacheManager.remove_skipped_blocks", "R3.2"),
    "blocks_copied": Sentence(_blocks_copied, "copy_blocks", "R6.7"),
    "prefix_cache_reset": Sentence(_prefix_cache_reset, "BlockPool.reset_prefix_cache", "R1.14"),
    "engine_failed": Sentence(_engine_failed, "", ""),
    "recording_stopped": Sentence(_recording_stopped, "", ""),
}
