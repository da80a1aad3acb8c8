"""A scene on another model than the one it was written for.

The memory manager decides by numbers of tokens, so most of a scene stays true. What names words that its own model said does not, and must neither be
shown nor be expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.models import load_tokenizer
from engine.session import NO_MODEL
from scenarios.model_groups import groups_on
from scenarios.resolve import text_tokens
from scenarios.schema import PrefixPart, RequestPart, Scenario

WORD_FACTS = ("tokens", "output_text", "block_tokens", "cpu_block_tokens")
"""Facts about the words of the scene's own model."""

_QUOTED = re.compile(r"“([^”]*)”")
VOCABULARY_WITHOUT_MODEL = "tiny"
"""Whose tokens a scenario uses that runs no model."""


def for_model(scenario: Scenario, model: str | None) -> Scenario:
    """The scene without the facts and notes that hold for its own model only; itself when `model` is that one (or None). Changes nothing.

    With other KV-cache groups or another number of prompt tokens nothing is claimed, because then other blocks fill at other moments; nor where the model
    chooses beams, because then it decides who forks, who copies and who is dropped. Else left out are word facts, notes and corrections that quote what no
    prompt and no forced output contains. Raises InvalidInput for a model that is not there.
    """
    if model is None or model == scenario.model:
        return scenario
    if not scenario.config.kv_cache_groups and groups_on(scenario, model) != groups_on(scenario, scenario.model):
        return scenario.model_copy(update={"notes": [], "corrections": [], "expect": []})
    if _model_chooses_beams(scenario) or _prompt_lengths(scenario, model) != _prompt_lengths(scenario, scenario.model):
        return scenario.model_copy(update={"notes": [], "corrections": [], "expect": []})
    given = " ".join([*(part.prompt or "" for part in _parts(scenario)), *_dictated(scenario)])
    notes = [note for note in scenario.notes if all(quoted in given for quoted in _QUOTED.findall(note.say))]
    corrections = [c for c in scenario.corrections if all(quoted in given for quoted in _QUOTED.findall(f"{c.read} {c.really}"))]
    expect = [e.model_copy(update=dict.fromkeys(WORD_FACTS)) for e in scenario.expect]
    return scenario.model_copy(update={"notes": notes, "corrections": corrections, "expect": [e for e in expect if e.facts]})


def _parts(scenario: Scenario) -> list[PrefixPart | RequestPart]:
    return [*scenario.prefixes, *scenario.requests]


def _dictated(scenario: Scenario) -> Iterator[str]:
    for request in scenario.requests:
        yield from (str(token) for tokens in (request.force, *request.force_samples) for token in tokens)
        yield from (str(choice.token) for selection in request.force_beams for choice in selection)


def _model_chooses_beams(scenario: Scenario) -> bool:
    return any(request.beam_width is not None and len(request.force_beams) < request.output_limit for request in scenario.requests)


def _prompt_lengths(scenario: Scenario, model: str) -> list[int]:
    tokenizer = load_tokenizer(VOCABULARY_WITHOUT_MODEL if model == NO_MODEL else model)
    return [
        len(text_tokens(part, tokenizer)) if part.prompt is not None else getattr(part, "prompt_length", None) or len(part.prompt_token_ids or ())
        for part in _parts(scenario)
    ]
