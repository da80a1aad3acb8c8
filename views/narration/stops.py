"""Why a lookup found no more, in a few words: one phrase per reason, to stand behind the name of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from engine.trace.events import Cause, CauseKind, Fact
from views.narration.words import Words, count

Facts: TypeAlias = Mapping[str, Fact]
Stop: TypeAlias = Callable[[Words, Facts], str]


def number(facts: Facts, name: str) -> int:
    """A whole number among the facts, 0 where it is missing."""
    value = facts.get(name)
    return int(value) if isinstance(value, int | float) else 0


def stop_words(words: Words, cause: Cause) -> str:
    """“block 3 is not cached”: no capital, no full stop. Empty for a cause that is not the end of a lookup."""
    say = STOPS.get(cause.kind)
    return say(words, cause.facts) if say else ""


def stop_words_at(words: Words, cause: Cause, index: int) -> str:
    """The phrase for one logical block, where its number stands beside it."""
    return stop_words(words, cause).removeprefix(f"logical block {index} ").removeprefix("is ").removeprefix("was ")


def _not_cached(words: Words, facts: Facts) -> str:
    return f"logical block {number(facts, 'logical_index')} is not cached"


def _block_not_full(words: Words, facts: Facts) -> str:
    size = number(facts, "block_size") or words.block_size(None)
    return f"logical block {number(facts, 'logical_index')} has only {number(facts, 'num_filled')} of {size} tokens"


def _last_token_rule(words: Words, facts: Facts) -> str:
    return "one token must be computed"


def _token_differs(words: Words, facts: Facts) -> str:
    mine, other = words.token(facts.get("token_id")), words.token(facts.get("other_token_id"))
    return f"token {number(facts, 'position')} is {mine}, cached is {other}"


def _extra_keys_differ(words: Words, facts: Facts) -> str:
    return f"logical block {number(facts, 'logical_index')} is cached under other extra keys"


def _parent_missing(words: Words, facts: Facts) -> str:
    return f"logical block {number(facts, 'logical_index')}, further left, is not cached"


def _evicted_earlier(words: Words, facts: Facts) -> str:
    return f"logical block {number(facts, 'logical_index')} was evicted in step {number(facts, 'step')}"


def _alignment(words: Words, facts: Facts) -> str:
    return f"only multiples of {number(facts, 'alignment_tokens')} tokens count"


def _window_tail(words: Words, facts: Facts) -> str:
    needed, found = number(facts, "num_needed"), number(facts, "num_found")
    return f"lacks a run of {count(needed, 'cached block')}{f', {found} found' if found else ''}"


def _chunk_start(words: Words, facts: Facts) -> str:
    return f"{count(number(facts, 'num_tokens'), 'token')} lie in earlier chunks and need no lookup"


def _shortened_by_group(words: Words, facts: Facts) -> str:
    return f"cut to what {words.group(facts.get('by_group')).label} has"


def _eagle_drop(words: Words, facts: Facts) -> str:
    return f"{count(number(facts, 'num_dropped_tokens'), 'token')} given up for the draft head"


STOPS: dict[CauseKind, Stop] = {
    CauseKind.CACHING_DISABLED: lambda words, facts: "prefix caching is off",
    CauseKind.NOT_CACHED: _not_cached,
    CauseKind.PREFIX_TOO_SHORT: lambda words, facts: "no full block to look for",
    CauseKind.BLOCK_NOT_FULL: _block_not_full,
    CauseKind.LAST_TOKEN_RULE: _last_token_rule,
    CauseKind.TOKEN_DIFFERS: _token_differs,
    CauseKind.EXTRA_KEYS_DIFFER: _extra_keys_differ,
    CauseKind.PARENT_MISSING: _parent_missing,
    CauseKind.EVICTED_EARLIER: _evicted_earlier,
    CauseKind.ALIGNMENT: _alignment,
    CauseKind.WINDOW_TAIL: _window_tail,
    CauseKind.NO_STATE: lambda words, facts: "no state of its beginning is cached",
    CauseKind.CHUNK_START: _chunk_start,
    CauseKind.SHORTENED_BY_GROUP: _shortened_by_group,
    CauseKind.EAGLE_DROP: _eagle_drop,
    CauseKind.NOT_USED: lambda words, facts: "cached, but no hit can end behind it",
    CauseKind.NOT_SHARED: lambda words, facts: "encoder states are never shared",
}
