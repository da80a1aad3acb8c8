"""Why it happened: one or two sentences per cause, made from the facts that travel with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from engine.trace import events as e
from engine.trace.events import CauseKind, Fact
from views.narration.words import Words, blocks, count, listed, percent, power_of_ten

Facts: TypeAlias = Mapping[str, Fact]
Why: TypeAlias = Callable[[Words, Any, Facts], str]


def _number(facts: Facts, name: str) -> int:
    """A whole number among the facts, 0 where it is missing."""
    value = facts.get(name)
    return int(value) if isinstance(value, int | float) else 0


def _scenario(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.TraceStarted):
        return "No block has an owner or a hash. Block 0 stands for “skipped”; it is never taken and never freed."
    if isinstance(event, e.RequestAdded):
        full = event.num_block_hashes
        verb = "is" if full == 1 else "are"
        done = f"Its {count(full, 'full prompt block')} {verb} hashed at once" if full else "Its prompt fills no block, so there is nothing to hash"
        return f"The scenario sends it now. {done}; it owns no physical block yet."
    if isinstance(event, e.PrefixCacheReset):
        return "The scenario asks for it." if event.ok else "The scenario asks for it, but this is allowed only while nobody uses a block."
    what = facts.get("what")
    return f"The scenario says so: {what}." if what else "The scenario says so."


def _next_step(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.StepScheduled):
        left = event.token_budget_left
        return f"{count(left, 'token')} of the budget {'is' if left == 1 else 'are'} left. The counters move on now, before anything is computed."
    return f"The engine loop goes round: {_number(facts, 'num_running')} running, {_number(facts, 'num_waiting')} waiting."


def _head_of_free_queue(words: Words, event: Any, facts: Facts) -> str:
    block_ids = list(getattr(event, "block_ids", []))
    held, required, tokens = (_number(facts, n) for n in ("num_held", "num_required", "num_tokens"))
    heads = f"{blocks(block_ids).capitalize()} {'was' if len(block_ids) == 1 else 'were'} at the head of the free queue."
    request = words.request(event.request_id)
    first = held * words.block_size
    last_block = request.block_ids[0][held - 1] if request is not None and request.block_ids and 0 < held <= len(request.block_ids[0]) else None
    if held and last_block is not None and request is not None and tokens == first + 1 <= len(request.token_ids):
        return f"Block {last_block} is full, so {words.token(request.token_ids[first])} needs a new block. {heads}"
    if held:
        return f"{count(tokens, 'token')} need {count(required, 'block')}, and {event.request_id} holds {held}. {heads}"
    return f"{count(tokens, 'token')} need {count(required, 'block')} of {words.block_size} slots. {heads}"


def _prefix_cache_hit(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.BlocksCopied):
        return "The cached prefix ends inside a block that others may read, so the new owner writes into a copy."
    from_queue = _number(facts, "num_from_queue")
    left = (
        f"{count(from_queue, 'block')} had no owner and {'leaves' if from_queue == 1 else 'leave'} the free queue."
        if from_queue
        else "The blocks are in use already, so nothing leaves the free queue."
    )
    return f"The same tokens after the same beginning have the same hash: {count(_number(facts, 'num_hit_tokens'), 'token')} need not be computed. {left}"


def _caching_disabled(words: Words, event: Any, facts: Facts) -> str:
    return "Prefix caching is switched off in this run."


def _not_cached(words: Words, event: Any, facts: Facts) -> str:
    index = _number(facts, "logical_index")
    return f"The walk along the prompt's blocks stops at logical block {index}: its hash is not in the prefix cache."


def _prefix_too_short(words: Words, event: Any, facts: Facts) -> str:
    size = _number(facts, "block_size") or words.block_size
    return (
        f"Only full blocks of {size} tokens can be found, and one token must always be computed: a prompt of "
        f"{count(_number(facts, 'num_tokens'), 'token')} has no block to look for."
    )


def _block_not_full(words: Words, event: Any, facts: Facts) -> str:
    size = _number(facts, "block_size") or words.block_size
    return (
        f"The walk ends at logical block {_number(facts, 'logical_index')}: its tokens fill only {_number(facts, 'num_filled')} of {size} slots, "
        "and only full blocks are shared."
    )


def _last_token_rule(words: Words, event: Any, facts: Facts) -> str:
    return (
        f"Logical block {_number(facts, 'logical_index')} is full too, but at most {count(_number(facts, 'max_hit_tokens'), 'token')} may come from "
        "the cache: one token must run to give the next one."
    )


def _block_full(words: Words, event: Any, facts: Facts) -> str:
    tokens = f": {words.tokens(event.token_ids)}" if isinstance(event, e.BlockCached) else ""
    parent = getattr(event, "parent_hash", None)
    chain = f" The hash covers its parent {parent[:6]} too." if parent else " It is the first block, so its hash starts the chain."
    duplicates = list(getattr(event, "duplicates", []))
    same = f" {blocks(duplicates).capitalize()} {'has' if len(duplicates) == 1 else 'have'} the same content; both are kept." if duplicates else ""
    block = words.block(event.block_id) if isinstance(event, e.BlockCached) else None
    ahead = " Its last key and value follow later in this step." if block is not None and block.num_filled < words.block_size else ""
    return f"Logical block {_number(facts, 'logical_index')} is full{tokens}.{chain}{same}{ahead}"


def _reallocated(words: Words, event: Any, facts: Facts) -> str:
    who = facts.get("for_request") or event.request_id
    taker = f"{who} needs a block, and this" if who else "A block is needed, and this"
    return f"{taker} one has come to the head of the free queue. What it held cannot be found any more."


def _request_finished(words: Words, event: Any, facts: Facts) -> str:
    return f"The request is finished. {_where_freed(event)}"


def _preempted(words: Words, event: Any, facts: Facts) -> str:
    return f"A preempted request gives back everything. {_where_freed(event)}"


def _where_freed(event: Any) -> str:
    if not isinstance(event, e.BlocksFreed):
        return "Its blocks are given back."
    parts = []
    if event.appended:
        parts.append(f"hashed {blocks(event.appended)} to the tail, to be kept longest")
    if event.prepended:
        parts.append(f"{blocks(event.prepended)} without a hash to the head, to be reused first")
    if event.still_referenced:
        parts.append(f"{blocks(event.still_referenced)} stays with {'its' if len(event.still_referenced) == 1 else 'their'} other owners")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else "Nothing returns to the free queue."


def _prepared(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.BlocksFreed):
        return "Blocks without a hash are put at the head in the order in which they are freed, so this order is what the scene will take."
    return "A scene may choose the order of the free queue before the first request; from then on the engine alone decides."


def _outside_window(words: Words, event: Any, facts: Facts) -> str:
    return f"The first {count(_number(facts, 'num_skipped_tokens'), 'token')} lie outside the attention window and will not be read again."


def _decode(words: Words, event: Any, facts: Facts) -> str:
    return "All tokens but the newest are in the cache, so there is one to compute."


def _prefill(words: Words, event: Any, facts: Facts) -> str:
    number = _number(facts, "num_new_tokens")
    return f"{count(number, 'token')} {'is' if number == 1 else 'are'} not computed yet, and the budget is large enough."


def _chunked_by_budget(words: Words, event: Any, facts: Facts) -> str:
    budget = _number(facts, "token_budget")
    left = f"only {count(budget, 'token')} of this step's budget {'is' if budget == 1 else 'are'} left"
    return f"It wants {_number(facts, 'num_wanted')}, but {left}; the rest follows later."


def _chunked_by_threshold(words: Words, event: Any, facts: Facts) -> str:
    return f"It wants {_number(facts, 'num_wanted')}, but a long prompt may take at most {_number(facts, 'threshold')} in one step; the rest follows later."


def _fcfs_head(words: Words, event: Any, facts: Facts) -> str:
    required, free = _number(facts, "num_required"), _number(facts, "num_free")
    return f"First come, first served: it heads the waiting queue, needs {count(required, 'block')}, and {free} {'was' if free == 1 else 'were'} free."


def _insufficient_blocks(words: Words, event: Any, facts: Facts) -> str:
    parts = [count(_number(facts, "num_required"), "new block")]
    if hits := _number(facts, "num_evictable_hits"):
        parts.append(f"{count(hits, 'cached block')} that the free queue would lose")
    if mark := _number(facts, "num_watermark"):
        parts.append(f"{mark} kept as a reserve")
    if reserved := _number(facts, "num_reserved"):
        parts.append(f"{reserved} reserved")
    free = _number(facts, "num_free")
    return f"It needs {' + '.join(parts)}, and {free} {'is' if free == 1 else 'are'} free. No table was changed."


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
    size = words.block_size
    if isinstance(event, e.SlotsMapped) and event.positions:
        position, slot = event.positions[-1], event.slots[-1]
        block, offset = slot // size, slot % size
        return f"Token {position} lies in logical block {position // size}, which is physical block {block}: {block} × {size} + {offset} = slot {slot}."
    return "The slot is the physical block's number times the block size plus the offset inside the block."


def _slot_mapping(words: Words, event: Any, facts: Facts) -> str:
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
    return f"The model finds it most probable ({percent(facts.get('probability'))}). Its key and value do not exist yet; the next step computes them."


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
    return f"It has made the {count(_number(facts, 'max_tokens'), 'token')} that were asked for."


def _stop_token(words: Words, event: Any, facts: Facts) -> str:
    return f"The model said {words.token(facts.get('token_id'))}, which ends a request."


def _max_model_len(words: Words, event: Any, facts: Facts) -> str:
    return f"It has reached the longest length that the engine allows, {count(_number(facts, 'max_model_len'), 'token')}."


def _error(words: Words, event: Any, facts: Facts) -> str:
    rest = "All frames before it can still be looked at."
    message = event.message.strip() if isinstance(event, e.EngineFailed) else ""
    if not message:
        return rest
    end = "" if message.endswith((".", "!", "?")) else "."
    return f"{message[:1].upper()}{message[1:]}{end} {rest}"


def _recorder_full(words: Words, event: Any, facts: Facts) -> str:
    return f"A recording may have at most {count(_number(facts, 'max_frames'), 'frame')}, so that a long run cannot fill the memory."


WHY: dict[CauseKind, Why] = {
    CauseKind.SCENARIO: _scenario,
    CauseKind.NEXT_STEP: _next_step,
    CauseKind.HEAD_OF_FREE_QUEUE: _head_of_free_queue,
    CauseKind.PREFIX_CACHE_HIT: _prefix_cache_hit,
    CauseKind.CACHING_DISABLED: _caching_disabled,
    CauseKind.NOT_CACHED: _not_cached,
    CauseKind.PREFIX_TOO_SHORT: _prefix_too_short,
    CauseKind.BLOCK_NOT_FULL: _block_not_full,
    CauseKind.LAST_TOKEN_RULE: _last_token_rule,
    CauseKind.BLOCK_FULL: _block_full,
    CauseKind.REALLOCATED: _reallocated,
    CauseKind.REQUEST_FINISHED: _request_finished,
    CauseKind.PREEMPTED: _preempted,
    CauseKind.PREPARED: _prepared,
    CauseKind.OUTSIDE_WINDOW: _outside_window,
    CauseKind.DECODE: _decode,
    CauseKind.PREFILL: _prefill,
    CauseKind.CHUNKED_BY_BUDGET: _chunked_by_budget,
    CauseKind.CHUNKED_BY_THRESHOLD: _chunked_by_threshold,
    CauseKind.FCFS_HEAD: _fcfs_head,
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
