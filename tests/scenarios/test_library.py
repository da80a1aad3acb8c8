"""Every scene of the library runs and does what it says: on the embedded model, and with its outputs dictated and no model at all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.trace.codec import decode_json, encode_json
from engine.trace.events import CauseKind, TokenSampled
from scenarios import RunResult, ScenarioError, list_scenarios, load_scenario, open_session, resolve_notes, run, scenario_from_data
from scenarios.expectations import select, selector_text
from scenarios.loader import GROUPS, LIBRARY, READING_ORDER, library_files, scene_files
from scenarios.schema import json_schema
from tests.scenarios.conftest import WordTokenizer

SCENES = sorted(library_files())
FIRST_SCENES = ["figure-6", "figure-6-v1", "figure-7", "same-prompt-twice"]
TEXTS = {"Four": ["fathers", "brought", "forth", "on", "this"], "It": [",", "it", "was"]}
"""How the passages go on behind a prompt that begins with this word."""
_on_tiny: dict[str, RunResult] = {}


def run_on_tiny(scene: str) -> RunResult:
    if scene not in _on_tiny:
        _on_tiny[scene] = run(scene)
    return _on_tiny[scene]


def test_the_first_four_scenes_are_there() -> None:
    assert set(FIRST_SCENES) <= set(SCENES)


@pytest.mark.parametrize("scene", SCENES)
def test_scene_holds_on_the_embedded_model(scene: str) -> None:
    result = run_on_tiny(scene)
    assert result.error is None
    assert result.trace.complete
    assert [str(f) for f in result.failures] == []
    assert result.trace.header.model["name"] == result.scenario.model


@pytest.mark.parametrize("scene", FIRST_SCENES)
def test_nothing_is_scripted(scene: str) -> None:
    """The words come from the model: no output of these scenes is forced."""
    sampled = [f.event for f in run_on_tiny(scene).trace.frames if isinstance(f.event, TokenSampled)]
    assert sampled
    assert {event.cause.kind for event in sampled} == {CauseKind.GREEDY}


@pytest.mark.parametrize("scene", SCENES)
def test_twice_gives_the_same_bytes_and_a_file_gives_the_same_trace(scene: str) -> None:
    trace = run_on_tiny(scene).trace
    data = encode_json(trace)
    assert encode_json(run(scene).trace) == data
    assert decode_json(data) == trace


@pytest.mark.parametrize("scene", FIRST_SCENES)
def test_scene_holds_without_a_model(words: WordTokenizer, monkeypatch: pytest.MonkeyPatch, scene: str) -> None:
    """The memory manager's decisions do not depend on what computes: with the passages' words dictated every expectation holds as well."""
    data = load_scenario(scene).plain()
    data["model"] = "none"
    for request in data["requests"]:
        request["force"] = TEXTS[request["prompt"].split()[0]][: request["max_tokens"]]
    monkeypatch.setattr(words, "encode", _EveryWord().encode)
    monkeypatch.setattr(words, "token_text", _EveryWord().token_text)
    result = run(scenario_from_data(data, scene))
    assert result.error is None
    assert [str(f) for f in result.failures] == []


class _EveryWord:
    """Each word is one token, whatever it is."""

    known: list[str] = ["<eos>"]

    def encode(self, text: str) -> list[int]:
        pieces = re.findall(r"\w+|[^\w\s]", text)
        self.known.extend(p for p in dict.fromkeys(pieces) if p not in self.known)
        return [self.known.index(p) for p in pieces]

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def token_text(self, token_id: int) -> str:
        return self.known[token_id]


@pytest.mark.parametrize("scene", SCENES)
def test_every_note_has_its_event(scene: str) -> None:
    result = run_on_tiny(scene)
    missing = [selector_text(n.at) for n in result.scenario.notes if select(n.at, result.trace.frames) is None]
    assert missing == []
    assert len(resolve_notes(result.scenario, result.trace.frames)) == len(result.scenario.notes), "two notes share a frame"


@pytest.mark.parametrize("scene", SCENES)
def test_every_correction_has_its_event(scene: str) -> None:
    result = run_on_tiny(scene)
    assert [selector_text(c.at) for c in result.scenario.corrections if select(c.at, result.trace.frames) is None] == []


@pytest.mark.parametrize("scene", SCENES)
def test_scene_is_complete(scene: str) -> None:
    made = load_scenario(scene)
    assert made.group in GROUPS
    assert made.id == library_files()[scene].stem
    assert len(made.expect) >= 8
    assert len(made.notes) >= 5
    for text in (made.goal, *(n.say for n in made.notes)):
        assert text.endswith((".", "!", "?")), text
        assert "\n" not in text


def test_ids_are_unique_over_the_groups() -> None:
    files = [p for p in LIBRARY.rglob("*") if p.is_file()]
    assert sorted(p.stem for p in files) == sorted(scene_files())
    assert {p.suffix for p in files} == {".yaml"}
    assert {p.parent.name for p in files} <= set(GROUPS)


def test_the_list_is_what_a_gallery_needs() -> None:
    scenes = list_scenarios()
    assert [s.id for s in scenes if s.group == "paper"][:6] == [f"figure-{number}" for number in range(5, 11)]
    assert all(s.title and s.goal and s.source for s in scenes)
    assert [GROUPS.index(s.group) for s in scenes] == sorted(GROUPS.index(s.group) for s in scenes)


def test_the_reading_order_holds_within_a_group() -> None:
    """A name may wait for its scene."""
    ids = list(scene_files())
    assert sorted(set(READING_ORDER)) == sorted(READING_ORDER)
    for group in GROUPS:
        here = [scene for scene in ids if scene_files()[scene].parent.name == group]
        named = [scene for scene in here if scene in READING_ORDER]
        assert here[: len(named)] == named == [scene for scene in READING_ORDER if scene in here]


@pytest.mark.parametrize("scene", SCENES)
def test_scene_fits_the_printed_schema(scene: str) -> None:
    import json

    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(json_schema())
    data = load_scenario(scene).plain()
    del data["group"]
    assert [e.message for e in validator.iter_errors(data)] == []
    data["config"]["num_blocks"] = 0
    data["notes"].append({"at": "no_such_kind", "say": "x"})
    assert len(list(validator.iter_errors(json.loads(json.dumps(data))))) == 2


def test_a_trace_carries_the_scenario_that_made_it() -> None:
    trace = run_on_tiny("figure-6").trace
    again = scenario_from_data(decode_json(encode_json(trace)).header.scenario)
    assert again.plain() == load_scenario("figure-6").plain()
    assert again.group == "paper"
    notes = {int(seq): text for seq, text in trace.header.scenario["resolved_notes"].items()}
    assert notes == resolve_notes(again, trace.frames)


@pytest.mark.parametrize("prompt", ["四个孩子", "أربعة", "чотири", "🙂🙃", "naïve café", "a\tb\n\nc", " ", "<eos>", "שלום e\u0301"])
def test_any_script_can_be_typed(prompt: str) -> None:
    data = load_scenario("figure-6-v1").plain()
    data["requests"] = [{"id": "A", "prompt": prompt, "max_tokens": 1, "ignore_eos": True}]
    data["config"]["num_blocks"] = 33
    data |= {"notes": [], "expect": [{"at": "end", "status": {"A": "FINISHED_LENGTH_CAPPED"}}]}
    result = run(scenario_from_data(data))
    assert result.error is None
    assert result.failures == []


def test_a_request_cannot_be_longer_than_the_model() -> None:
    """tiny has 1024 positions; the pool could hold more."""
    data = load_scenario("figure-6-v1").plain() | {"notes": [], "expect": []}
    data["config"] = {"num_blocks": 400, "block_size": 4}
    data["requests"] = [{"id": "A", "prompt": "Four " * 1020, "max_tokens": 5}]
    with pytest.raises(ScenarioError) as caught:
        open_session(scenario_from_data(data))
    assert str(caught.value) == (
        "the scenario: requests[0].prompt: 1021 prompt tokens and 5 outputs are 1026 tokens, but tiny has 1024 positions; "
        "shorten the prompt or lower max_tokens"
    )
    data["config"]["max_model_len"] = 1025
    with pytest.raises(ScenarioError, match=r"config\.max_model_len: this is 1025, but tiny has 1024 positions; give 1024 or less$"):
        open_session(scenario_from_data(data))
    data["config"]["max_model_len"] = 1024
    assert open_session(scenario_from_data(data)).config.max_model_len == 1024
    del data["config"]["max_model_len"]
    data["requests"][0]["max_tokens"] = 3
    assert open_session(scenario_from_data(data)).config.max_model_len == 1024


def test_opening_a_session_loads_no_torch() -> None:
    code = """
import sys, scenarios
session = scenarios.open_session("figure-6")
session.advance()
assert len(session.trace.frames) > 5
print(sorted({"torch", "streamlit", "transformers", "triton"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_planning_ahead_changes_no_word() -> None:
    """R7.7: with two batches in flight the model computes the same tokens, in one step of planning more."""
    data = load_scenario("figure-7-v1").plain() | {"notes": [], "expect": []}
    data["config"] = data["config"] | {"async_scheduling": True}
    trace = run(scenario_from_data(data), interpreted_layers=()).trace
    assert trace.complete
    assert {r.request_id: r.token_ids for r in trace.frames[-1].requests} == {
        r.request_id: r.token_ids for r in run_on_tiny("figure-7-v1").trace.frames[-1].requests
    }
