"""Why the scheduler and the worker did what they did, and why a run ended."""

from __future__ import annotations

from typing import Any

from engine.trace import events as e
from engine.trace.events import CauseKind
from views.narration.stops import Facts, number
from views.narration.why import Why
from views.narration.words import Words, count, listed, percent, power_of_ten


def new_state(words: Words, event: e.StateWritten) -> str:
    """Where a state is read and where the new one goes (R3.42, R3.43). vLLM copies a state that moves on into its next block before it computes."""
    layers = f", in each of {count(event.num_layers, 'layer')}" if event.num_layers > 1 else ""
    if event.source_block_id is None:
        return f"A request begins without a state. A state stands for all tokens before it; the table says in which block it is kept{layers}."
    if event.source_block_id == event.block_id:
        return f"The table names the block of the newest state: it is read before the new one is written over it{layers}."
    copied = " vLLM copies it into the new block first and computes there, with the same result." if words.group(event.group_id).label == "Mamba align" else ""
    return f"The table has a block for the tokens that follow, so the old state stays as it is in block {event.source_block_id}{layers}.{copied}"


def _scenario(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.TraceStarted):
        return "No block has an owner or a hash. Block 0 stands for “skipped”; it is never taken and never freed."
    if isinstance(event, e.RequestAdded):
        full = event.num_block_hashes
        if full and len(words.groups) > 1:
            unit = words.hash_block_size
            return f"The scenario sends it now. Its prompt is hashed at once, every {count(unit, 'token')}; it owns no physical block yet."
        verb = "is" if full == 1 else "are"
        nothing = "Its prompt fills no block, so there is nothing to hash" if words.is_caching else "Prefix caching is off, so nothing is hashed"
        done = f"Its {count(full, 'full prompt block')} {verb} hashed at once" if full else nothing
        return f"The scenario sends it now. {done}; it owns no physical block yet."
    if isinstance(event, e.PrefixCacheReset):
        return "The scenario asks for it." if event.ok else "The scenario asks for it, but this is allowed only while nobody uses a block."
    if isinstance(event, e.BlockEvicted):
        return "The scenario takes the hash away, as an eviction would. Counts and the free queue stay as they are."
    what = facts.get("what")
    return f"The scenario says so: {what}." if what else "The scenario says so."


def _next_step(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.StepScheduled):
        left = event.token_budget_left
        return f"{count(left, 'token')} of the budget {'is' if left == 1 else 'are'} left. The counters move on now, before anything is computed."
    return f"The engine loop goes round: {number(facts, 'num_running')} running, {number(facts, 'num_waiting')} waiting."


def _decode(words: Words, event: Any, facts: Facts) -> str:
    return "All tokens but the newest are in the cache, so there is one to compute."


def _prefill(words: Words, event: Any, facts: Facts) -> str:
    new = number(facts, "num_new_tokens")
    return f"{count(new, 'token')} {'is' if new == 1 else 'are'} not computed yet, and the budget is large enough."


def _chunked_by_budget(words: Words, event: Any, facts: Facts) -> str:
    budget = number(facts, "token_budget")
    left = f"only {count(budget, 'token')} of this step's budget {'is' if budget == 1 else 'are'} left"
    return f"It wants {number(facts, 'num_wanted')}, but {left}; the rest follows later."


def _chunked_by_threshold(words: Words, event: Any, facts: Facts) -> str:
    return f"It wants {number(facts, 'num_wanted')}, but a long prompt may take at most {number(facts, 'threshold')} in one step; the rest follows later."


def _chunked_at_block(words: Words, event: Any, facts: Facts) -> str:
    size, now = number(facts, "block_size"), number(facts, "num_new_tokens")
    return f"It wants {number(facts, 'num_wanted')}, but a recurrent state is kept only every {size} tokens, so the step ends there: {now} now, the rest later."


def _chunked_at_prompt_boundary(words: Words, event: Any, facts: Facts) -> str:
    return (
        f"It wants {number(facts, 'num_wanted')}, but the prompt's last hash boundary is after {count(number(facts, 'num_tokens'), 'token')}. "
        "The step ends there, so that the state at that point can be kept."
    )


def _chunked_at_junction(words: Words, event: Any, facts: Facts) -> str:
    return (
        f"It wants {number(facts, 'num_wanted')}, but another group's hit reached {count(number(facts, 'num_tokens'), 'token')}. "
        "The step ends there, so that this state is kept too and the next such prompt finds it."
    )


def _state_not_written(words: Words, event: Any, facts: Facts) -> str:
    tokens = number(facts, "num_hit_tokens")
    which = f"the state after {count(tokens, 'token')}" if tokens else "a state"
    return f"It could go on from {which} that is registered already, but another request computes it in this very step: it can be read from the next step on."


def _fcfs_head(words: Words, event: Any, facts: Facts) -> str:
    required, free = number(facts, "num_required"), number(facts, "num_free")
    return f"First come, first served: it heads the waiting queue, needs {count(required, 'block')}, and {free} {'was' if free == 1 else 'were'} free."


def _priority_head(words: Words, event: Any, facts: Facts) -> str:
    required, free = number(facts, "num_required"), number(facts, "num_free")
    return (
        f"Of all that wait it has the smallest priority number ({facts.get('priority')}); it needs {count(required, 'block')}, and "
        f"{free} {'was' if free == 1 else 'were'} free."
    )


def _insufficient_blocks(words: Words, event: Any, facts: Facts) -> str:
    parts = [count(number(facts, "num_required"), "new block")]
    if hits := number(facts, "num_evictable_hits"):
        parts.append(f"{count(hits, 'cached block')} that the free queue would lose")
    if mark := number(facts, "num_watermark"):
        parts.append(f"{mark} kept as a reserve")
    if reserved := number(facts, "num_reserved"):
        parts.append(f"{reserved} reserved")
    total = f" = {number(facts, 'num_required') + hits + mark + reserved}" if len(parts) > 1 else ""
    free = number(facts, "num_free")
    return f"It needs {' + '.join(parts)}{total}, and {free} {'is' if free == 1 else 'are'} free. No table was changed."


def _last_running(words: Words, event: Any, facts: Facts) -> str:
    return f"{facts.get('for_request')} needs a block and none is free. The last of the running requests gives way and will be computed again."


def _lowest_priority(words: Words, event: Any, facts: Facts) -> str:
    return f"{facts.get('for_request')} needs a block and none is free. This request has the lowest priority ({facts.get('priority')})."


def _added_to_batch(words: Words, event: Any, facts: Facts) -> str:
    if (source := facts.get("from_row")) is not None:
        return f"A row above became empty, so row {source} moves there: the rows of a batch leave no gaps."
    return "The request is new in the batch, so the worker gets its whole block table."


def _appended(words: Words, event: Any, facts: Facts) -> str:
    return "The request is in the batch already, so the worker is told only the new block."


def _left_batch(words: Words, event: Any, facts: Facts) -> str:
    request = words.request(event.request_id)
    if request is not None and request.status == "RUNNING":
        return "The request sits this step out, so its row is cleared; it gets a row again when it is scheduled."
    return "The request has left the batch: it is finished or was preempted."


def _block_table_lookup(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.StateWritten):
        return new_state(words, event)
    here = [(p, slot) for p, slot in zip(event.positions, event.slots, strict=True) if slot >= 0] if isinstance(event, e.SlotsMapped) else []
    if words.num_ranks > 1:
        return _ranks_share_blocks(words, event, here)
    if not here:
        return "The slot is the physical block's number times the block size plus the offset inside the block."
    (position, slot), size = here[-1], words.block_size(event.group_id)
    block, offset = slot // size, slot % size
    return f"Token {position} lies in logical block {position // size}, which is physical block {block}: {block} × {size} + {offset} = slot {slot}."


def _ranks_share_blocks(words: Words, event: Any, here: list[tuple[int, int]]) -> str:
    """R8.4 with context parallelism: the ranks take turns, and a token of another rank has no slot here."""
    whole, size = words.block_size(event.group_id), words.group(event.group_id).block_size
    turns = f"A logical block has {whole} tokens, {size} for each of {words.num_ranks} ranks, which take turns."
    if not here:
        return turns
    position, slot = here[-1]
    return f"{turns} Token {position} lies in physical block {slot // size}: {slot // size} × {size} + {slot % size} = slot {slot} there."


def _slot_mapping(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.StateWritten):
        return new_state(words, event)
    if not isinstance(event, e.KVWritten):
        return "Keys and values go where the slot mapping says."
    if event.backend == "none":
        return "Bookkeeping only: no model runs in this scene, the slots are marked as the slot mapping says."
    return f"One key and one value vector per head, in each of {count(event.num_layers, 'layer')}, exactly where the slot mapping says."


def _compared_with_reference(words: Words, event: Any, facts: Facts) -> str:
    if not isinstance(event, e.AttentionComputed):
        return "The kernel's result was compared with the reference."
    if event.agrees_within is None:
        return "Each query reads its keys and values block by block through the block table."
    layers = f"layer {event.layers[0]}" if len(event.layers) == 1 else f"layers {listed(event.layers)}"
    agree = f"In {layers} kernel and plain reference agree within {power_of_ten(event.agrees_within)}."
    return f"Keys and values are read block by block through the block table. {agree}"


def _greedy(words: Words, event: Any, facts: Facts) -> str:
    return f"The model finds it most probable ({percent(facts.get('probability'))}). Its key and value do not exist yet; a further step would compute them."


def _seeded(words: Words, event: Any, facts: Facts) -> str:
    return (
        f"Drawn with seed {facts.get('seed')} at temperature {facts.get('temperature')}; its probability was {percent(facts.get('probability'))}. "
        "Its key and value do not exist yet."
    )


def _forced(words: Words, event: Any, facts: Facts) -> str:
    said = facts.get("model_token_id")
    own = f"; the model would have said {words.token(said)}" if said is not None and said != getattr(event, "token_id", None) else ""
    same = "; the model would have said the same" if said is not None and not own else ""
    return f"The scenario dictates this token{own}{same}. Its key and value do not exist yet."


def _max_tokens(words: Words, event: Any, facts: Facts) -> str:
    most = number(facts, "max_tokens")
    return f"It has made the {count(most, 'token')} that {'was' if most == 1 else 'were'} asked for."


def _stop_token(words: Words, event: Any, facts: Facts) -> str:
    return f"The model said {words.token(facts.get('token_id'))}, which ends a request."


def _max_model_len(words: Words, event: Any, facts: Facts) -> str:
    return f"It has reached the longest length that the engine allows, {count(number(facts, 'max_model_len'), 'token')}."


def _error(words: Words, event: Any, facts: Facts) -> str:
    rest = "All frames before it can still be looked at."
    message = event.message.strip() if isinstance(event, e.EngineFailed) else ""
    if not message:
        return rest
    end = "" if message.endswith((".", "!", "?")) else "."
    return f"{message[:1].upper()}{message[1:]}{end} {rest}"


def _recorder_full(words: Words, event: Any, facts: Facts) -> str:
    return f"A recording may have at most {count(number(facts, 'max_frames'), 'frame')}, so that a long run cannot fill the memory."


RUNNING_CAUSES: dict[CauseKind, Why] = {
    CauseKind.SCENARIO: _scenario,
    CauseKind.NEXT_STEP: _next_step,
    CauseKind.DECODE: _decode,
    CauseKind.PREFILL: _prefill,
    CauseKind.CHUNKED_BY_BUDGET: _chunked_by_budget,
    CauseKind.CHUNKED_BY_THRESHOLD: _chunked_by_threshold,
    CauseKind.CHUNKED_AT_BLOCK: _chunked_at_block,
    CauseKind.CHUNKED_AT_PROMPT_BOUNDARY: _chunked_at_prompt_boundary,
    CauseKind.CHUNKED_AT_JUNCTION: _chunked_at_junction,
    CauseKind.STATE_NOT_WRITTEN: _state_not_written,
    CauseKind.FCFS_HEAD: _fcfs_head,
    CauseKind.PRIORITY_HEAD: _priority_head,
    CauseKind.INSUFFICIENT_BLOCKS: _insufficient_blocks,
    CauseKind.LAST_RUNNING: _last_running,
    CauseKind.LOWEST_PRIORITY: _lowest_priority,
    CauseKind.ADDED_TO_BATCH: _added_to_batch,
    CauseKind.APPENDED: _appended,
    CauseKind.LEFT_BATCH: _left_batch,
    CauseKind.BLOCK_TABLE_LOOKUP: _block_table_lookup,
    CauseKind.SLOT_MAPPING: _slot_mapping,
    CauseKind.COMPARED_WITH_REFERENCE: _compared_with_reference,
    CauseKind.GREEDY: _greedy,
    CauseKind.SEEDED: _seeded,
    CauseKind.FORCED: _forced,
    CauseKind.MAX_TOKENS: _max_tokens,
    CauseKind.STOP_TOKEN: _stop_token,
    CauseKind.MAX_MODEL_LEN: _max_model_len,
    CauseKind.ERROR: _error,
    CauseKind.RECORDER_FULL: _recorder_full,
}
