"""What one may have read, values that no source confirms, and prompts of tokens without meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.trace.codec import load
from scenarios import ScenarioError, open_session, parse_scenario, resolve_corrections, run, scenario_from_data, unconfirmed_notes
from scenarios.__main__ import main
from scenarios.other_model import for_model
from tests.scenarios.conftest import NUM_IDS, WordTokenizer

SCENE = """\
id: corrected
title: Corrected
source: a test
goal: See a correction.
model: none
config: {num_blocks: 9, block_size: 4}
requests:
  - {id: A, prompt_length: 7, force: [fathers]}
  - {id: B, prompt_length: 7, force: [fathers], arrives_at_step: 2}
notes:
  - {at: {kind: prefix_lookup, request: B}, say: B looks., unconfirmed: true}
corrections:
  - {at: {kind: prefix_lookup, request: B}, read: B finds block 1., really: B finds nothing., rule: S1}
  - {at: {kind: prefix_lookup, request: B}, read: A lookup takes blocks., really: It changes nothing., rule: S10}
  - {at: {kind: block_evicted}, read: It comes late., really: It never comes., rule: S23}
"""


def test_corrections_and_unconfirmed_notes_travel_in_the_header(words: WordTokenizer) -> None:
    result = run(parse_scenario(SCENE, "s.yaml"))
    lookup = next(f for f in result.trace.frames if type(f.event).__name__ == "PrefixLookup" and f.event.request_id == "B")
    assert resolve_corrections(result.scenario, result.trace.frames) == {
        lookup.seq: [
            {"read": "B finds block 1.", "really": "B finds nothing.", "rule": "S1"},
            {"read": "A lookup takes blocks.", "really": "It changes nothing.", "rule": "S10"},
        ]
    }
    assert unconfirmed_notes(result.scenario, result.trace.frames) == [lookup.seq]
    header = result.trace.header.scenario
    assert header["unconfirmed_notes"] == [lookup.seq]
    assert [c["rule"] for c in header["resolved_corrections"][str(lookup.seq)]] == ["S1", "S10"]
    assert scenario_from_data(header).plain() == {**result.scenario.plain(), "group": None}


def test_the_terminal_tells_them_and_a_file_keeps_them(
    words: WordTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SCENE, encoding="utf-8")
    assert main(["run", "s.yaml", "--trace", "t.json"]) == 0
    ran = capsys.readouterr().out
    assert "│ B looks. (A value in this sentence is confirmed by no source.)\n" in ran
    assert "│ What you may have read: B finds block 1.\n      │ What happens (S1): B finds nothing.\n" in ran
    assert main(["show", "t.json"]) == 0
    assert capsys.readouterr().out in ran
    assert load(Path("t.json")).header.scenario["resolved_corrections"]


def test_a_damaged_header_is_passed_over(words: WordTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from engine.trace.codec import save

    trace = run(parse_scenario(SCENE, "s.yaml")).trace
    trace.header.scenario["resolved_corrections"] = {"x": 1, "3": "no list", "4": [7, {"read": 1}]}
    trace.header.scenario["unconfirmed_notes"] = {"2": 2}
    save(trace, tmp_path / "t.json")
    assert main(["show", str(tmp_path / "t.json")]) == 0
    assert "What you may have read: 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rule: S10", "rule: R10", "s.yaml:14: corrections[1].rule: the text “R10” does not fit; use the name of a rule, as in “S14”"),
        ("read: It comes late., ", "", "s.yaml:15: corrections[2].read: this field is missing; add it"),
        (
            "kind: block_evicted",
            "kind: block_evictd",
            "s.yaml:15: corrections[2].at.kind: there is no event of the kind “block_evictd”; did you mean “block_evicted”?",
        ),
        ("rule: S23}", "rule: S23, why: x}", "s.yaml:15: corrections[2].why: there is no such field here; choose one of at, read, really, rule"),
    ],
)
def test_wrong_corrections(words: WordTokenizer, old: str, new: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(SCENE.replace(old, new), "s.yaml")
    assert str(caught.value) == message


def test_a_correction_that_quotes_other_words_is_left_out_on_another_model() -> None:
    data = open_session("figure-6").trace.header.scenario
    correction = {"at": "start", "rule": "S2", "really": "Something else."}
    scene = scenario_from_data({**data, "corrections": [{**correction, "read": "“fathers” is here."}, {**correction, "read": "“Four score” is here."}]})
    assert [c.read for c in for_model(scene, str(Path(__file__).parents[2] / "engine" / "models" / "tiny")).corrections] == ["“Four score” is here."]


def test_prompts_of_so_many_tokens(words: WordTokenizer) -> None:
    """Distinct as long as the vocabulary lasts, the same every time, no stop token, nothing shared between two requests."""
    data = parse_scenario(SCENE, "s.yaml").plain() | {"notes": [], "corrections": []}
    data["config"] = {"num_blocks": 1300, "block_size": 16, "max_num_batched_tokens": 65536, "max_model_len": 20_000}
    data["requests"] = [{"id": name, "prompt_length": 9_999, "force": ["fathers"]} for name in "AB"]
    last = run(scenario_from_data(data)).trace.frames[-1]
    prompts = {r.request_id: r.token_ids[:9_999] for r in last.requests}
    again = {r.request_id: r.token_ids[:9_999] for r in run(scenario_from_data(data)).trace.frames[-1].requests}
    assert prompts == again
    for prompt in prompts.values():
        assert len(set(prompt)) == 9_999
        assert set(prompt) <= set(range(NUM_IDS)) - set(words.stop_token_ids)
    assert prompts["A"][0] != prompts["B"][0]
    assert len(last.hash_map) == 2 * (9_999 // 16)


def test_a_model_reads_no_tokens_without_meaning() -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(SCENE.replace("model: none", "model: tiny"), "s.yaml")
    assert str(caught.value.problems[0]) == (
        "s.yaml:8: requests[0].prompt_length: tokens that mean nothing are nothing for tiny to read; write a “prompt”, or set “model” to none"
    )
    with pytest.raises(ScenarioError, match=r"requests\[0\]: this request has a prompt and prompt_length; keep one of them"):
        parse_scenario(SCENE.replace("A, prompt_length", "A, prompt: x, prompt_length"), "s.yaml")


def test_a_prompt_longer_than_the_pool(words: WordTokenizer) -> None:
    with pytest.raises(ScenarioError, match=r"requests\[0\]\.prompt_length: a prompt of 700 tokens needs 175 blocks of 4, but the pool has 8 usable blocks"):
        open_session(parse_scenario(SCENE.replace("A, prompt_length: 7", "A, prompt_length: 700"), "s.yaml"))
