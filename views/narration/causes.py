"""Why it happened: one or two sentences per cause, made from the facts that travel with it."""

from __future__ import annotations

from engine.trace.events import AnyEvent, CauseKind, PrefixLookup
from views.narration.causes_blocks import BLOCK_CAUSES
from views.narration.causes_lookups import LOOKUP_CAUSES, by_group
from views.narration.causes_paper import PAPER_CAUSES, REASONS_IN_THE_PAPER
from views.narration.causes_running import RUNNING_CAUSES
from views.narration.why import Why
from views.narration.words import Words

WHY: dict[CauseKind, Why] = {**RUNNING_CAUSES, **LOOKUP_CAUSES, **BLOCK_CAUSES, **PAPER_CAUSES}


def why(words: Words, event: AnyEvent) -> str:
    """The reason for an event. A lookup in several groups is explained group by group. The paper's engine has reasons of its own."""
    if isinstance(event, PrefixLookup) and event.groups:
        return by_group(words, event)
    if words.is_paper and (reason := REASONS_IN_THE_PAPER.get(event.cause.kind)) and (said := reason(words, event, event.cause.facts)):
        return said
    return WHY[event.cause.kind](words, event, event.cause.facts)
