"""What happened: one short sentence per event kind, with the place in vLLM V1 where it happens and the rule it follows."""

from __future__ import annotations

from engine.trace import events as e
from engine.trace.events import CauseKind
from views.narration.sentence import Sentence
from views.narration.sentences_blocks import BLOCK_SENTENCES
from views.narration.sentences_paper import IN_THE_PAPER, PAPER_SENTENCES, PLACES_IN_THE_PAPER
from views.narration.words import MAX_LISTED, Words, blocks, capital, count, listed, power_of_ten, slots


def _request_added(words: Words, event: e.RequestAdded) -> str:
    return f"{event.request_id} arrives with {count(event.num_prompt_tokens, 'prompt token')} and waits."


def _step_started(words: Words, event: e.StepStarted) -> str:
    return f"Engine step {words.frame.step}: a budget of {count(event.token_budget, 'token')}."


def _allocation_refused(words: Words, event: e.AllocationRefused) -> str:
    request = words.request(event.request_id)
    if request is not None and request.request_id in words.frame.running:
        return f"{event.request_id} runs, but there is no block for its next {'token' if event.num_new_tokens == 1 else 'tokens'}."
    if event.cause.kind is CauseKind.STATE_NOT_WRITTEN:
        return f"{event.request_id} waits for the next step."
    return f"{event.request_id} does not fit{' as a whole' if event.at_gate else ''} and waits."


def _refused_symbol(words: Words, event: e.AllocationRefused) -> str:
    return "MambaManager.get_num_blocks_to_allocate" if event.cause.kind is CauseKind.STATE_NOT_WRITTEN else "KVCacheManager.allocate_slots"


def _refused_rule(words: Words, event: e.AllocationRefused) -> str:
    if event.cause.kind is CauseKind.STATE_NOT_WRITTEN:
        return "R3.41"
    return "R7.4" if event.at_gate else "R5.3"


def _request_admitted(words: Words, event: e.RequestAdmitted) -> str:
    again = " again" if event.resumed else ""
    have = f", {count(event.num_computed_tokens, 'token')} already in the cache" if event.num_computed_tokens else ""
    return f"{event.request_id} is admitted{again}{have}."


def _request_scheduled(words: Words, event: e.RequestScheduled) -> str:
    first = event.num_computed_tokens
    last = first + event.num_scheduled_tokens - 1
    request, who = words.request(event.request_id), capital(words.called(event.request_id)) if words.is_prefix(event.request_id) else event.request_id
    if event.num_scheduled_tokens == 1:
        token = f" {words.token(request.token_ids[first])}" if request is not None and first < len(request.token_ids) else ""
        return f"{who} will compute token {first}{token}."
    return f"{who} will compute tokens {first} to {last}."


def _request_preempted(words: Words, event: e.RequestPreempted) -> str:
    return f"{event.request_id} is preempted and loses {count(event.num_lost_tokens, 'computed token')}."


def _step_scheduled(words: Words, event: e.StepScheduled) -> str:
    shares = [f"{count(n, 'token')} of {words.called(request_id)}" for request_id, n in event.num_scheduled_tokens.items()]
    return f"Planned: {listed(shares)}." if shares else "Planned: nothing can run."


def _row_updated(words: Words, event: e.RowUpdated) -> str:
    if not event.block_ids:
        row = f"Row {event.row} of the worker's block table"
        if words.header.config.get("clear_rows") is False:
            return f"{row} is given up{words.for_group(event.group_id)}: its length is 0 now."
        return f"{row} is cleared{words.for_group(event.group_id)}."
    return f"The worker's row {event.row} gets {blocks(event.block_ids)} from column {event.start} on{words.for_group(event.group_id)}."


def _row_symbol(words: Words, event: e.RowUpdated) -> str:
    if not event.block_ids:
        return "BlockTable.clear_row"
    if "from_row" in event.cause.facts:
        return "BlockTable.move_row"
    return "BlockTable.append_row" if event.cause.kind is CauseKind.APPENDED else "BlockTable.add_row"


def _rank(event: e.SlotsMapped | e.KVWritten) -> str:
    """“ on rank 1” where ranks share the blocks."""
    rank = event.cause.facts.get("dcp_rank")
    return f" on rank {rank}" if isinstance(rank, int) else ""


def _slots_mapped(words: Words, event: e.SlotsMapped) -> str:
    here, group = [slot for slot in event.slots if slot >= 0], words.for_group(event.group_id)
    rank = _rank(event)
    where = f"{slots(here)}{group}{rank}" if here else f"no slot{group}{rank or ' of this rank'}"
    if len(event.slots) == 1:
        return f"Token {event.positions[0]} {words.token(event.token_ids[0])} of {event.request_id} → {where}."
    if len(here) < len(event.slots):
        return f"{len(here)} of the {count(len(event.slots), 'token')} of {event.request_id} → {where}."
    return f"The {count(len(event.slots), 'token')} of {words.called(event.request_id)} → {where}."


def _state_written(words: Words, event: e.StateWritten) -> str:
    """R3.43: from which state it was computed, over how many tokens, and where the new one is."""
    whose = f"{event.request_id}'s recurrence" if event.request_id else "The recurrence"
    over = count(event.num_tokens - event.num_source_tokens, "token")
    if event.source_block_id is None:
        return f"{whose} begins from nothing and goes over {over} to the state after {event.num_tokens} in block {event.block_id}."
    source = f"the state after {event.num_source_tokens} in block {event.source_block_id}"
    where = ", in place" if event.source_block_id == event.block_id else f" in block {event.block_id}"
    return f"{whose} goes on from {source} over {over} to the state after {event.num_tokens}{where}."


def _kv_written(words: Words, event: e.KVWritten) -> str:
    whose = f"{words.token(event.token_ids[0])}" if len(event.slots) == 1 else count(len(event.slots), "token")
    if event.backend == "none":
        count_as = f"{'counts' if len(event.slots) == 1 else 'count'} as filled{words.for_group(event.group_id)}{_rank(event)}"
        tokens = f": {words.tokens(event.token_ids)}" if len(event.token_ids) <= MAX_LISTED + 2 else ""
        return f"{slots(event.slots).capitalize()} {count_as}{tokens}."
    return f"Keys and values of {whose} → {slots(event.slots)}{words.for_group(event.group_id)}{_rank(event)}."


def _attention_computed(words: Words, event: e.AttentionComputed) -> str:
    if len(event.request_ids) == 1:
        queries, seq = event.query_lens[0], event.seq_lens[0]
        return f"Attention: {count(queries, 'query', 'queries')} of {words.called(event.request_ids[0])} over {count(seq, 'token')}."
    return f"Attention: {count(sum(event.query_lens), 'query', 'queries')} of {listed(event.request_ids)} in one launch."


def _token_sampled(words: Words, event: e.TokenSampled) -> str:
    forced = " (forced)" if event.cause.kind is CauseKind.FORCED else ""
    return f"{event.request_id} continues with {words.token(event.token_id)}{forced}."


def _request_finished(words: Words, event: e.RequestFinished) -> str:
    return f"{event.request_id} is finished."


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
    **BLOCK_SENTENCES,
    **PAPER_SENTENCES,
    "request_added": Sentence(_request_added, "Scheduler.add_request", "R2.5"),
    "step_started": Sentence(_step_started, "Scheduler.schedule", "R7.1"),
    "allocation_refused": Sentence(_allocation_refused, _refused_symbol, _refused_rule),
    "request_admitted": Sentence(_request_admitted, "Scheduler.schedule", "R7.4"),
    "request_scheduled": Sentence(_request_scheduled, "Scheduler.schedule", "R7.2"),
    "request_preempted": Sentence(_request_preempted, "Scheduler._preempt_request", "R7.5"),
    "step_scheduled": Sentence(_step_scheduled, "Scheduler._update_after_schedule", "R7.1"),
    "row_updated": Sentence(_row_updated, _row_symbol, "R8.2"),
    "slots_mapped": Sentence(_slots_mapped, "BlockTable.compute_slot_mapping", "R8.4"),
    "state_written": Sentence(_state_written, "MambaMixer2.conv_ssm_forward", "R3.40"),
    "kv_written": Sentence(_kv_written, "reshape_and_cache_flash", "R8.5"),
    "attention_computed": Sentence(_attention_computed, "unified_attention", "R8.6"),
    "token_sampled": Sentence(_token_sampled, "Scheduler.update_from_output", "R7.8"),
    "request_finished": Sentence(_request_finished, "Scheduler.finish_requests", "R7.8"),
    "engine_failed": Sentence(_engine_failed, "", ""),
    "recording_stopped": Sentence(_recording_stopped, "", ""),
}


def sentence_of(words: Words, kind: str) -> Sentence:
    """How to say a kind of event: in a run of the paper's engine as its authors would, where they do something else than vLLM V1."""
    if not words.is_paper:
        return SENTENCES[kind]
    if place := PLACES_IN_THE_PAPER.get(kind):
        return Sentence(SENTENCES[kind].say, *place)
    return IN_THE_PAPER.get(kind, SENTENCES[kind])
