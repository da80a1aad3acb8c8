"""Runs scenarios: a session from a scenario, its expectations checked, its notes placed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidInput, PagewalkError
from engine.models import Tokenizer, load_tokenizer, max_model_len_of
from engine.paper_session import PaperSession
from engine.session import Session
from engine.session_base import NO_MODEL, InterpretedLayers, SessionBase
from engine.trace.frame import Frame, Trace
from scenarios.expectations import Failure, check_expectations, select
from scenarios.loader import load_scenario
from scenarios.other_model import VOCABULARY_WITHOUT_MODEL, for_model
from scenarios.paper_resolve import paper_config, paper_request_specs
from scenarios.problems import ScenarioError
from scenarios.resolve import action_specs, request_specs, session_config
from scenarios.schema import Scenario


@dataclass(frozen=True)
class RunResult:
    """A finished run: what was recorded, which expectations failed, and the error that ended it (None: it came to its own end; otherwise expectations
    are not checked, because most of what they speak of never happened)."""

    scenario: Scenario
    trace: Trace
    failures: list[Failure]
    error: PagewalkError | None


def open_session(
    scenario: Scenario | str | os.PathLike[str],
    *,
    model: str | None = None,
    backend: str | None = None,
    interpreted_layers: InterpretedLayers = None,
) -> SessionBase[Any, Any]:
    """A session of the scenario's engine that will run it, at its start. A text is the id of a scene or the path of a file; `model` replaces the scenario's
    own.

    Raises InvalidInput for an unknown scene, model or backend and ScenarioError for everything wrong inside the scenario. Loads no weights and no
    torch; the session does when it comes to the first execution of the model.
    """
    scenario = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
    name = model or scenario.model
    try:
        tokenizer = load_vocabulary(name)
        num_positions = None if name == NO_MODEL else max_model_len_of(name)
    except InvalidInput as error:
        if model is not None:
            raise
        raise ScenarioError([scenario.origin.problem(("model",), str(error))]) from None
    how: dict[str, Any] = {
        "vocabulary": tokenizer.token_text, "model_name": name, "backend": backend, "interpreted_layers": interpreted_layers, "scenario": scenario.plain(),
    }  # fmt: skip
    actions = action_specs(scenario)
    if scenario.engine == "paper":
        return PaperSession(paper_config(scenario, num_positions), paper_request_specs(scenario, tokenizer, name, num_positions), actions, **how)
    return Session(session_config(scenario, num_positions), request_specs(scenario, tokenizer, name, num_positions), actions, **how)


def load_vocabulary(model: str) -> Tokenizer:
    """The tokenizer that a scenario for `model` is read with. Raises InvalidInput for an unknown model."""
    return load_tokenizer(VOCABULARY_WITHOUT_MODEL if model == NO_MODEL else model)


def run(
    scenario: Scenario | str | os.PathLike[str],
    *,
    model: str | None = None,
    backend: str | None = None,
    interpreted_layers: InterpretedLayers = None,
) -> RunResult:
    """Run a scenario to its end and check what it expects (of another model than its own, what does not depend on words: `for_model`).
    Arguments and errors as in `open_session`; an engine error is in the result."""
    scenario = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
    session = open_session(scenario, model=model, backend=backend, interpreted_layers=interpreted_layers)
    trace = session.run_to_end()
    held = for_model(scenario, model)
    place_notes(held, trace)
    failures = [] if session.error else check_expectations(held, trace, load_vocabulary(model or scenario.model).decode)
    return RunResult(scenario, trace, failures, session.error)


def resolve_notes(scenario: Scenario, frames: Sequence[Frame]) -> dict[int, str]:
    """Frame number (`seq`) -> the scenario's sentence for it. Notes whose event is not among `frames` (yet) are left out; several at one frame are joined."""
    notes: dict[int, str] = {}
    for note in scenario.notes:
        frame = select(note.at, frames)
        if frame is not None:
            notes[frame.seq] = f"{notes[frame.seq]} {note.say}" if frame.seq in notes else note.say
    return notes


def resolve_corrections(scenario: Scenario, frames: Sequence[Frame]) -> dict[int, list[dict[str, str]]]:
    """Frame number -> the scenario's corrections for it, each as `read`, `really` and `rule`. Left out as notes are."""
    placed: dict[int, list[dict[str, str]]] = {}
    for correction in scenario.corrections:
        frame = select(correction.at, frames)
        if frame is not None:
            placed.setdefault(frame.seq, []).append({"read": correction.read, "really": correction.really, "rule": correction.rule})
    return placed


def unconfirmed_notes(scenario: Scenario, frames: Sequence[Frame]) -> list[int]:
    """Frames with a note that names a value which no source confirms, in order."""
    found = (select(note.at, frames) for note in scenario.notes if note.unconfirmed)
    return sorted({frame.seq for frame in found if frame is not None})


def place_notes(scenario: Scenario, trace: Trace) -> None:
    """Write notes and corrections, by frame, into the trace's header, so that a trace file shows them wherever it is opened: `scenario["resolved_notes"]`,
    `["resolved_corrections"]` and, as a list of frames, `["unconfirmed_notes"]`; the last two only in a scenario that has such."""
    header = trace.header.scenario
    header["resolved_notes"] = {str(seq): text for seq, text in resolve_notes(scenario, trace.frames).items()}
    if scenario.corrections:
        header["resolved_corrections"] = {str(seq): found for seq, found in resolve_corrections(scenario, trace.frames).items()}
    if any(note.unconfirmed for note in scenario.notes):
        header["unconfirmed_notes"] = unconfirmed_notes(scenario, trace.frames)
