"""One plain sentence for every frame: what happened, why, and where vLLM does it.

The same words are the line above the stage, the list of events, the alternative text of a picture and the printed text. They are made from events
and causes only, so they can be wrong only where the trace is wrong.
"""

from __future__ import annotations

import msgspec

from engine.trace.events import kind_of
from engine.trace.frame import Frame, TraceHeader
from views.narration.causes import why
from views.narration.sentences import sentence_of
from views.narration.words import Words

__all__ = ["Narration", "narrate"]


class Narration(msgspec.Struct, frozen=True):
    """What to say about one frame.

    `text`: what happened, one short sentence. `why`: the reason, one or two sentences, never empty. `symbol`: where vLLM V1 does this (dotted name), or
    vLLM's first release in a run of the paper's engine; empty for what belongs to Pagewalk alone. `rule`: number of the rule of V1's behaviour that it
    follows, or the paper's section, or empty. `kind`: the event's kind.
    `note`: what the scenario's author says about this frame, or None.
    """

    text: str
    why: str
    symbol: str
    rule: str
    kind: str
    note: str | None = None


def narrate(header: TraceHeader, frame: Frame, previous: Frame | None = None) -> Narration:
    """The narration of `frame`. `previous` is the frame before it (None for the first) and lets the sentence name what changed.

    A note of the scenario's author stands in ``header.scenario["resolved_notes"]``, keyed by the frame's seq as text. Changes nothing.
    """
    kind = kind_of(frame.event)
    words = Words(header, frame, previous)
    sentence = sentence_of(words, kind)
    notes = header.scenario.get("resolved_notes")
    note = notes.get(str(frame.seq)) if isinstance(notes, dict) else None
    return Narration(
        text=sentence.say(words, frame.event),
        why=why(words, frame.event),
        symbol=sentence.symbol_of(words, frame.event),
        rule=sentence.rule_of(words, frame.event),
        kind=kind,
        note=note,
    )
