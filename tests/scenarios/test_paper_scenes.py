"""Scenes of the paper's engine: Figures 8, 9 and 10, with and without a model, in the terminal and as files, and what pairs them with V1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.paper_session import PaperSession
from engine.trace.codec import load
from engine.trace.events import BeamsChosen, BlocksCopied, CauseKind, KVWritten, SequenceForked, TokenSampled
from scenarios import RunResult, for_model, load_scenario, open_session, run, scenario_from_data
from scenarios.__main__ import main
from scenarios.final_state import final_state, outputs
from scenarios.loader import library_files
from scenarios.runner import load_vocabulary

PAPER = [scene for scene in sorted(library_files()) if load_scenario(scene).engine == "paper"]
WITH_PAIR = [scene for scene in sorted(library_files()) if load_scenario(scene).pair is not None]
_runs: dict[str, RunResult] = {}


def run_on_tiny(scene: str) -> RunResult:
    if scene not in _runs:
        _runs[scene] = run(scene)
    return _runs[scene]


def tables(result: RunResult, step: int) -> dict[str, tuple[int, ...]]:
    """The block tables at the end of a step's writes."""
    frame = [f for f in result.trace.frames if isinstance(f.event, KVWritten) and f.step == step][-1]
    return {r.request_id: r.block_ids[0] for r in frame.requests if r.block_ids[0]}


@pytest.mark.parametrize("scene", WITH_PAIR)
def test_a_pair_is_a_scene_with_the_other_engine(scene: str) -> None:
    made = load_scenario(scene)
    assert made.pair in library_files()
    assert load_scenario(made.pair).engine != made.engine


def test_the_paper_s_figures_on_the_stage_are_there() -> None:
    assert {"figure-8", "figure-9", "figure-10"} <= set(PAPER)


@pytest.mark.parametrize("scene", PAPER)
def test_a_scene_of_the_paper_opens_the_paper_s_session_and_its_trace_says_so(scene: str) -> None:
    session = open_session(scene)
    assert isinstance(session, PaperSession)
    assert session.trace.header.config["engine"] == "paper"
    assert session.trace.header.scenario["engine"] == "paper"
    assert scenario_from_data(session.trace.header.scenario).plain() == load_scenario(scene).plain()


def test_figure_9_as_drawn() -> None:
    """Kwon et al. 2023, Figure 9: left of the dotted line, and after the selection in which all follow candidates 1 and 2."""
    result = run_on_tiny("figure-9")
    assert sorted(tables(result, 13).values()) == [(0, 1, 3, 5), (0, 1, 3, 6), (0, 1, 3, 7), (0, 2, 4, 8)]
    assert sorted(tables(result, 14).values()) == [(0, 1, 3, 6, 9), (0, 1, 3, 6, 10), (0, 1, 3, 7, 11), (0, 1, 3, 7, 12)]
    assert not any(isinstance(frame.event, BlocksCopied) for frame in result.trace.frames)
    counts = {block.block_id: block.ref_cnt for block in next(f for f in reversed(result.trace.frames) if isinstance(f.event, KVWritten)).blocks}
    assert counts == {0: 4, 1: 4, 2: 0, 3: 4, 4: 0, 5: 0, 6: 2, 7: 2, 8: 0, 9: 1, 10: 1, 11: 1, 12: 1}


def test_figure_9_asks_the_model_what_it_thinks_of_the_dictated_survivors() -> None:
    """Forced candidates have the model's own log-probabilities, and those that it would have liked better stand behind them."""
    chosen = [frame.event for frame in run_on_tiny("figure-9").trace.frames if isinstance(frame.event, BeamsChosen)]
    assert len(chosen) == 14
    for event in chosen:
        assert [candidate.forced for candidate in event.candidates[:4]] == [True] * 4
        assert all(candidate.cumulative_logprob is not None and candidate.cumulative_logprob < 0 for candidate in event.candidates)
        assert [candidate.sequence_id for candidate in event.candidates[4:]] == [None] * (len(event.candidates) - 4)


def test_figure_10_dictates_nothing() -> None:
    """The two answers come from the model, which reads the examples through shared blocks."""
    result = run_on_tiny("figure-10")
    sampled = [frame.event for frame in result.trace.frames if isinstance(frame.event, TokenSampled)]
    assert {event.cause.kind for event in sampled} == {CauseKind.GREEDY}
    said = outputs(result.trace, load_vocabulary("tiny").decode)
    assert (said["A"]["text"], said["B"]["text"]) == ('fromage"', "Je t'amie\"")
    forks = [frame.event for frame in result.trace.frames if isinstance(frame.event, SequenceForked)]
    assert [(fork.request_id, fork.parent_id) for fork in forks] == [("A", "prefix"), ("B", "prefix")]


@pytest.mark.parametrize("scene", ["figure-8", "figure-9"])
def test_the_manager_decides_the_same_without_a_model(scene: str) -> None:
    """What is shared, copied and freed follows from numbers of tokens alone: with everything dictated every expectation holds without a model too."""
    result = run(scenario_from_data({**load_scenario(scene).plain(), "model": "none"}, scene))
    assert result.error is None
    assert [str(failure) for failure in result.failures] == []


def test_another_model_keeps_what_does_not_depend_on_words() -> None:
    made = load_scenario("figure-8")
    other = for_model(made, "none")
    assert len(other.notes) == len(made.notes), "all words that the notes quote are given by the scene"
    assert not any(e.block_tokens or e.tokens for e in other.expect)
    assert run(made, model="none").failures == []


def test_a_run_in_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "figure-8.json.gz"
    assert main(["run", "figure-8", "--trace", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "sequence_forked     A2   parent_id=“A1”  block_ids=[7, 1]" in printed
    assert "A2: 'mothers brought forth' (FINISHED_LENGTH_CAPPED)" in printed
    assert load(file) == run_on_tiny("figure-8").trace
    assert main(["show", str(file)]) == 0
    assert "copy-on-write" in capsys.readouterr().out
    assert main(["check", "figure-8"]) == 0


def test_beams_stand_in_the_terminal_by_their_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "figure-9", "--until", "12"]) == 0
    assert "survivors=“A1+years→A1, A1+days→A2, A1+men→A3, A1+score→A4”" in capsys.readouterr().out


def test_the_final_state_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "figure-10", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)["state"]
    assert state["ref"] == {"0": 1, "1": 1, "2": 1, "3": 1, "4": 1}
    assert (state["num_free"], state["usage"]) == (7, round(5 / 12, 4))
    assert state["requests"]["prefix"]["status"] == "PREFIX_KEPT"


def test_the_final_state_of_a_run_that_stops_while_a_group_is_swapped() -> None:
    requests = [
        {"id": "Z", "prompt_token_ids": [5] * 8, "force": ["fathers"] * 5},
        {"id": "A", "prompt_token_ids": [7] * 7, "n": 2, "force_samples": [["our", "on"], ["on", "our"]]},
    ]
    data = {"id": "s", "title": "t", "source": "s", "goal": "g", "engine": "paper", "model": "none", "requests": requests}
    session = open_session(scenario_from_data({**data, "config": {"num_blocks": 4, "block_size": 4, "num_cpu_blocks": 4}}))
    assert session.run_until(lambda frame: bool(frame.swapped) and bool(frame.cpu_free_queue) and len(frame.cpu_free_queue) < 4) is not None
    frames = [frame for frame in session.trace.frames if frame.swapped and len(frame.cpu_free_queue) < 4]
    trace = session.trace
    trace.frames = trace.frames[: frames[0].seq + 1]
    state = final_state(trace)
    assert state["swapped"] == ["A"]
    assert state["cpu_ref"] == {"0": 2, "1": 2}
    assert state["cpu_free"] == [2, 3]
    assert state["requests"]["A2"]["cpu_blocks"] == [0, 1]
    assert state["requests"]["A2"]["parent"] == "A1"
