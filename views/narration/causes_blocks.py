"""Why a block was taken, hashed, evicted, copied, or given back."""

from __future__ import annotations

from typing import Any

from engine.trace import events as e
from engine.trace.events import CauseKind
from views.narration.sentences_blocks import ends_inside
from views.narration.stops import Facts, number
from views.narration.why import Why
from views.narration.words import PAGES, Words, blocks, count


def _head_of_free_queue(words: Words, event: Any, facts: Facts) -> str:
    block_ids = list(getattr(event, "block_ids", []))
    held, required, tokens = (number(facts, n) for n in ("num_held", "num_required", "num_tokens"))
    heads = f"{blocks(block_ids).capitalize()} {'was' if len(block_ids) == 1 else 'were'} at the head of the free queue."
    if words.group(event.group_id).is_state:
        return f"A recurrent state takes one block, however many tokens it has seen. {heads}"
    size = words.block_size(event.group_id)
    last_block = _last_held(words, event, held)
    request = words.request(event.request_id)
    first = held * size
    if held and last_block is not None and request is not None and tokens == first + 1 <= len(request.token_ids):
        return f"Block {last_block} is full, so {words.token(request.token_ids[first])} needs a new block. {heads}"
    if held:
        return f"{count(tokens, 'token')} need {count(required, 'block')}, and {event.request_id} holds {held}. {heads}"
    return f"{count(tokens, 'token')} need {count(required, 'block')} of {size} slots. {heads}"


def _last_held(words: Words, event: Any, held: int) -> int | None:
    """The last block that the request held in this group before the event; None if there was none or it is a null block."""
    request, group_id = words.request(event.request_id), event.group_id or 0
    if request is None or group_id >= len(request.block_ids) or not 0 < held <= len(request.block_ids[group_id]):
        return None
    return request.block_ids[group_id][held - 1] or None


def _block_full(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.BlockCached) and words.group(event.group_id).is_state:
        return _state_registered(words, event, facts)
    tokens = f": {words.tokens(event.token_ids)}" if isinstance(event, e.BlockCached) else ""
    block = words.block(event.block_id) if isinstance(event, e.BlockCached) else None
    ahead = " Its last key and value follow later in this step." if block is not None and block.num_filled < len(block.token_ids) else ""
    return f"Logical block {number(facts, 'logical_index')} is full{tokens}.{_chain(event)}{_duplicates(event)}{ahead}"


def _chain(event: Any) -> str:
    parent = getattr(event, "parent_hash", None)
    return f" The hash covers its parent {parent[:6]} too." if parent else " It is the first block, so its hash starts the chain."


def _duplicates(event: Any) -> str:
    duplicates = list(getattr(event, "duplicates", []))
    return f" {blocks(duplicates).capitalize()} {'has' if len(duplicates) == 1 else 'have'} the same content; both are kept." if duplicates else ""


def _state_registered(words: Words, event: e.BlockCached, facts: Facts) -> str:
    """R3.40, R3.41: a state's hash stands for the whole prefix, and may be registered before the state is computed."""
    tokens = event.num_hash_tokens or number(facts, "num_tokens")
    block = words.block(event.block_id)
    written = block is not None and block.num_state_tokens == tokens
    ahead = "" if written else " It is computed later in this step."
    return f"It stands for the state after {count(tokens, 'token')}: whoever begins with these tokens may go on from it.{_duplicates(event)}{ahead}"


def _prompt_boundary(words: Words, event: Any, facts: Facts) -> str:
    tokens, index = count(number(facts, "num_tokens"), "token"), number(facts, "logical_index")
    if isinstance(event, e.BlockCached) and not ends_inside(words, event):
        return f"The prompt's last hash boundary is after {tokens}, where logical block {index} ends.{_duplicates(event)}"
    what = "a state after them" if isinstance(event, e.BlockCached) and words.group(event.group_id).is_state else "what is there"
    where = f"The prompt's last hash boundary is after {tokens}, inside logical block {index}"
    return f"{where}: {what} is registered too, for prompts that begin alike.{_duplicates(event)}"


def _not_reachable(words: Words, event: Any, facts: Facts) -> str:
    needed = number(facts, "num_needed")
    last = "only the last block" if needed == 1 else f"the last {count(needed, 'block')}"
    return (
        f"A hit ends only where blocks of all groups end, and reads {last} before that point. "
        "No hit could ever use these, so they stay out of the prefix cache."
    )


def _null_block(words: Words, event: Any, facts: Facts) -> str:
    return "Null blocks stand there: nothing to register."


def _reallocated(words: Words, event: Any, facts: Facts) -> str:
    who = facts.get("for_request") or event.request_id
    taker = f"{who} needs a block, and this" if who else "A block is needed, and this"
    return f"{taker} one has come to the head of the free queue. What it held cannot be found any more."


def _promoted(words: Words, event: Any, facts: Facts) -> str:
    return f"Logical block {number(facts, 'logical_index')} is full now. A block has one main hash, and that is the longest: the shorter one goes first."


def _request_finished(words: Words, event: Any, facts: Facts) -> str:
    return f"The request is finished. {where_freed(words, event)}"


def _preempted(words: Words, event: Any, facts: Facts) -> str:
    return f"A preempted request gives back everything. {where_freed(words, event)}"


def where_freed(words: Words, event: Any) -> str:
    if not isinstance(event, e.BlocksFreed | e.BlocksSkipped):
        return "Its blocks are given back."
    parts = []
    if event.appended:
        order = "to be kept longest" if words.is_caching else "as all blocks without prefix caching"
        parts.append(f"{'hashed ' if words.is_caching else ''}{blocks(event.appended)} to the tail, {order}")
    if event.prepended:
        parts.append(f"{blocks(event.prepended)} without a hash to the head, to be reused first")
    if event.still_referenced:
        one = len(event.still_referenced) == 1
        parts.append(f"{blocks(event.still_referenced)} {'stays with its' if one else 'stay with their'} other owners")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else "Nothing returns to the free queue."


def _prepared(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.BlocksFreed):
        if event.appended and not event.prepended:
            return "This order is the scene's own: today's vLLM would have put blocks without a hash first. All hashes stay."
        return (
            "Blocks without a hash go to the head and hashed ones to the tail, each in the order in which they are freed: that is how the scene arranges them."
        )
    return "A scene may arrange the free queue before a step; from then on the engine alone decides."


def _outside_window(words: Words, event: Any, facts: Facts) -> str:
    """R3.1: what is skipped depends on the kind of group; an event of none is told as a window."""
    group = words.group(event.group_id)
    skipped = count(number(facts, "num_skipped_tokens"), "token")
    if group.is_state:
        return f"A newer state exists, so nobody computes with the older one any more. {_where_skipped(words, event)}"
    if group.label.startswith("chunk"):
        return f"The first {skipped} lie in earlier chunks and will not be read again. {_where_skipped(words, event)}"
    return f"The first {skipped} lie outside the attention window and will not be read again. {_where_skipped(words, event)}"


def _state_superseded(words: Words, event: Any, facts: Facts) -> str:
    old = f"the one at logical block {number(facts, 'logical_index')}"
    return f"A newer state has been computed from {old}; nobody computes with it any more. {_where_skipped(words, event)}"


def _where_skipped(words: Words, event: Any) -> str:
    return where_freed(words, event) if isinstance(event, e.BlocksSkipped) and (event.prepended or event.appended or event.still_referenced) else ""


def _copy_queued(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.BlocksCopied):
        return PAGES
    return f"The step is planned, and the worker copies before it writes anything else, so nothing needs to be held longer. {where_freed(words, event)}"


def _partial_hit(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.BlocksCopied):
        return PAGES
    tokens, index = count(number(facts, "num_hit_tokens"), "token"), number(facts, "logical_index")
    who = event.request_id or "It"
    hit = f"The hit of {tokens}" if facts.get("num_hit_tokens") else "The hit"
    return f"{hit} ends inside logical block {index}. {who} will write behind it, which others must not see, so {who} writes into a copy."


def _own_boundary(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.BlocksCopied):
        return PAGES
    tokens, who = count(number(facts, "num_tokens"), "token"), event.request_id or "It"
    return (
        f"The block is registered for the first {tokens}, and {who} is about to write over that. {who} keeps its block, because the worker's table only "
        "grows; all hashes move to the copy."
    )


def _one_state(words: Words, event: Any, facts: Facts) -> str:
    spare = number(facts, "num_speculative_blocks")
    drafts = f" {count(spare, 'further block')} {'is' if spare == 1 else 'are'} for draft tokens." if spare else ""
    return f"Only the newest state is needed, so earlier places hold no block.{drafts}"


BLOCK_CAUSES: dict[CauseKind, Why] = {
    CauseKind.HEAD_OF_FREE_QUEUE: _head_of_free_queue,
    CauseKind.BLOCK_FULL: _block_full,
    CauseKind.PROMPT_BOUNDARY: _prompt_boundary,
    CauseKind.NOT_REACHABLE: _not_reachable,
    CauseKind.NULL_BLOCK: _null_block,
    CauseKind.REALLOCATED: _reallocated,
    CauseKind.PROMOTED: _promoted,
    CauseKind.REQUEST_FINISHED: _request_finished,
    CauseKind.PREEMPTED: _preempted,
    CauseKind.PREPARED: _prepared,
    CauseKind.OUTSIDE_WINDOW: _outside_window,
    CauseKind.STATE_SUPERSEDED: _state_superseded,
    CauseKind.COPY_QUEUED: _copy_queued,
    CauseKind.PARTIAL_HIT: _partial_hit,
    CauseKind.OWN_BOUNDARY: _own_boundary,
    CauseKind.ONE_STATE: _one_state,
}
