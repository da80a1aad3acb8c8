"""Why a lookup in the prefix cache found what it found, and no more."""

from __future__ import annotations

from typing import Any

from engine.trace import events as e
from engine.trace.events import CauseKind
from views.narration.stops import Facts, number, stop_words
from views.narration.why import Why
from views.narration.words import PAGES, Words, count, real


def by_group(words: Words, event: e.PrefixLookup) -> str:
    """Group by group: how many tokens it has and why no more."""
    parts = []
    for found in event.groups:
        stop = stop_words(words, found.cause)
        parts.append(f"{words.group(found.group_id).noun}: {found.num_hit_tokens}{f' ({stop})' if stop else ''}")
    text = "; ".join(parts)
    junction = f" One group alone reaches {event.junction} tokens: a junction." if event.junction else ""
    return f"Tokens that each group has by itself – {text}.{junction}"


def _prefix_cache_hit(words: Words, event: Any, facts: Facts) -> str:
    if isinstance(event, e.BlocksCopied):
        return PAGES
    if isinstance(event, e.BlocksTouched) and not real(event.block_ids):
        return "What lies before is never read again, so null blocks stand for it and nothing had to be looked up."
    from_queue = number(facts, "num_from_queue")
    left = (
        f"{count(from_queue, 'block')} had no owner and {'leaves' if from_queue == 1 else 'leave'} the free queue."
        if from_queue
        else f"The {'block is' if len(real(getattr(event, 'block_ids', []))) == 1 else 'blocks are'} in use already, so nothing leaves the free queue."
    )
    if isinstance(event, e.BlocksTouched) and words.group(event.group_id).is_state:
        hit = count(number(facts, "num_hit_tokens"), "token")
        return f"One checkpoint is restored: the state after {hit} stands for all of them, and the recurrence runs over the suffix alone. {left}"
    return f"The same tokens after the same beginning have the same hash: {count(number(facts, 'num_hit_tokens'), 'token')} need not be computed. {left}"


def _caching_disabled(words: Words, event: Any, facts: Facts) -> str:
    return "Prefix caching is switched off in this run."


def _not_cached(words: Words, event: Any, facts: Facts) -> str:
    index = number(facts, "logical_index")
    return f"The walk along the prompt's blocks stops at logical block {index}: its hash is not in the prefix cache."


def _prefix_too_short(words: Words, event: Any, facts: Facts) -> str:
    size = number(facts, "block_size") or words.block_size(event.group_id)
    return (
        f"Only full blocks of {size} tokens can be found, and one token must always be computed: a prompt of "
        f"{count(number(facts, 'num_tokens'), 'token')} has no block to look for."
    )


def _block_not_full(words: Words, event: Any, facts: Facts) -> str:
    size = number(facts, "block_size") or words.block_size(event.group_id)
    return (
        f"The walk ends at logical block {number(facts, 'logical_index')}: its tokens fill only {number(facts, 'num_filled')} of {size} slots, "
        "and only full blocks are shared."
    )


def _last_token_rule(words: Words, event: Any, facts: Facts) -> str:
    return (
        f"Logical block {number(facts, 'logical_index')} is full too, but at most {count(number(facts, 'max_hit_tokens'), 'token')} may come from "
        "the cache: one token must run to give the next one."
    )


def _token_differs(words: Words, event: Any, facts: Facts) -> str:
    other = facts.get("other_request")
    whose = f"{other} has" if other else "what is cached has"
    return (
        f"The walk stops at logical block {number(facts, 'logical_index')}: token {number(facts, 'position')} is {words.token(facts.get('token_id'))} here, "
        f"while {whose} {words.token(facts.get('other_token_id'))}. One other token, another hash."
    )


def _extra_keys_differ(words: Words, event: Any, facts: Facts) -> str:
    other = facts.get("other_request")
    return (
        f"Logical block {number(facts, 'logical_index')} has the same tokens as a cached block{f' of {other}' if other else ''}, but a salt, an adapter or an "
        "image is hashed with them, and there they differ."
    )


def _parent_missing(words: Words, event: Any, facts: Facts) -> str:
    return (
        f"The walk stops at logical block {number(facts, 'logical_index')}, which is not cached. Blocks further right may be, but a chain of hashes "
        "is followed from its beginning only."
    )


def _evicted_earlier(words: Words, event: Any, facts: Facts) -> str:
    taker = facts.get("for_request")
    return (
        f"Logical block {number(facts, 'logical_index')} was cached once, but in step {number(facts, 'step')} "
        f"{f'{taker} needed its physical block' if taker else 'its physical block was taken'}: the first {count(number(facts, 'num_tokens'), 'token')} "
        "cannot be found any more."
    )


def _alignment(words: Words, event: Any, facts: Facts) -> str:
    unit, cached = number(facts, "alignment_tokens"), number(facts, "num_cached_tokens")
    return f"{count(cached, 'token')} {'is' if cached == 1 else 'are'} cached, but a hit must end where blocks of all groups end, on a multiple of {unit}."


def _window_tail(words: Words, event: Any, facts: Facts) -> str:
    needed, found = number(facts, "num_needed"), number(facts, "num_found")
    return (
        f"The next token reads only its window, so a hit needs the last {count(needed, 'block')} before it in a row. "
        f"The longest run that was found has {count(found, 'block')}."
    )


def _no_state(words: Words, event: Any, facts: Facts) -> str:
    limit = number(facts, "max_hit_tokens")
    return f"A recurrent state stands for one exact prefix. None is cached for a prefix of at most {count(limit, 'token')}, so all must be computed."


def _chunk_start(words: Words, event: Any, facts: Facts) -> str:
    tokens = number(facts, "num_tokens")
    return f"Attention stays inside a chunk: the {count(tokens, 'token')} of earlier chunks count as found without being looked up; null blocks stand for them."


def _shortened_by_group(words: Words, event: Any, facts: Facts) -> str:
    return f"All groups must agree on one length, and {words.group(facts.get('by_group')).label} has only {count(number(facts, 'num_hit_tokens'), 'token')}."


def _eagle_drop(words: Words, event: Any, facts: Facts) -> str:
    return f"The draft head needs the end of the match computed again, so {count(number(facts, 'num_dropped_tokens'), 'token')} of the hit are given up."


def _not_used(words: Words, event: Any, facts: Facts) -> str:
    return f"Logical block {number(facts, 'logical_index')} is cached too, but no hit can end behind it."


def _not_shared(words: Words, event: Any, facts: Facts) -> str:
    return "Keys and values of the encoder's output belong to one request and are never shared."


LOOKUP_CAUSES: dict[CauseKind, Why] = {
    CauseKind.PREFIX_CACHE_HIT: _prefix_cache_hit,
    CauseKind.CACHING_DISABLED: _caching_disabled,
    CauseKind.NOT_CACHED: _not_cached,
    CauseKind.PREFIX_TOO_SHORT: _prefix_too_short,
    CauseKind.BLOCK_NOT_FULL: _block_not_full,
    CauseKind.LAST_TOKEN_RULE: _last_token_rule,
    CauseKind.TOKEN_DIFFERS: _token_differs,
    CauseKind.EXTRA_KEYS_DIFFER: _extra_keys_differ,
    CauseKind.PARENT_MISSING: _parent_missing,
    CauseKind.EVICTED_EARLIER: _evicted_earlier,
    CauseKind.ALIGNMENT: _alignment,
    CauseKind.WINDOW_TAIL: _window_tail,
    CauseKind.NO_STATE: _no_state,
    CauseKind.CHUNK_START: _chunk_start,
    CauseKind.SHORTENED_BY_GROUP: _shortened_by_group,
    CauseKind.EAGLE_DROP: _eagle_drop,
    CauseKind.NOT_USED: _not_used,
    CauseKind.NOT_SHARED: _not_shared,
}
