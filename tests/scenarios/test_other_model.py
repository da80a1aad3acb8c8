"""A scene on another model: what depends on its own model's words is neither shown nor expected; the rest still is."""

from __future__ import annotations

import pytest

from engine.errors import InvalidInput
from engine.models import catalog
from scenarios import for_model, load_scenario, other_model, run
from scenarios.__main__ import main
from scenarios.other_model import WORD_FACTS

TINY_BY_PATH = str(catalog.TINY_DIR)
"""The same model under another name: counts as another model, and has the same tokens."""


class Characters:
    """A tokenizer with one token a character."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)


def test_on_its_own_model_a_scene_is_itself() -> None:
    scene = load_scenario("figure-6")
    assert for_model(scene, None) is scene
    assert for_model(scene, "tiny") is scene


def test_words_of_the_own_model_are_left_out_and_numbers_stay() -> None:
    scene = load_scenario("figure-6")
    held = for_model(scene, TINY_BY_PATH)
    assert any(set(e.facts) & set(WORD_FACTS) for e in scene.expect)
    assert not any(set(e.facts) & set(WORD_FACTS) for e in held.expect)
    assert {fact for e in held.expect for fact in e.facts} >= {"block_table", "slots", "num_filled"}
    assert any("“fathers”" in note.say for note in scene.notes)
    assert held.notes
    assert not any("“fathers”" in note.say or "“brought”" in note.say for note in held.notes)


@pytest.mark.parametrize(("scene", "kept"), [("beam-search", False), ("figure-9", True)], ids=["the model decides", "dictated"])
def test_which_beams_survive_is_claimed_only_where_it_is_dictated(scene: str, kept: bool) -> None:
    """The same tokens, but another model finds other candidates better, and other blocks are copied and given back."""
    held = for_model(load_scenario(scene), TINY_BY_PATH)
    assert bool(held.expect) is kept
    assert bool(held.notes) is kept


def test_on_a_model_with_more_groups_nothing_is_claimed_and_too_small_a_pool_is_said() -> None:
    held = for_model(load_scenario("figure-7-v1"), "tiny-swa")
    assert (held.notes, held.corrections, held.expect) == ([], [], [])
    with pytest.raises(InvalidInput, match=r"^request 'A' needs 9 blocks in 3 groups for 7 prompt tokens and max_tokens 5, but the pool has 8 usable blocks: "):
        run("figure-7-v1", model="tiny-swa")


def test_with_another_number_of_prompt_tokens_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = other_model.load_tokenizer
    monkeypatch.setattr(other_model, "load_tokenizer", lambda name: Characters() if name == "by-character" else own(name))
    held = for_model(load_scenario("figure-6"), "by-character")
    assert (held.notes, held.expect) == ([], [])


def test_with_beams_that_another_model_chooses_nothing_is_claimed() -> None:
    """Section 4.4: which beams go on depends on the probabilities, and with them forks, copies and blocks. Dictated ones do not."""
    held = for_model(load_scenario("beam-search"), TINY_BY_PATH)
    assert (held.notes, held.corrections, held.expect) == ([], [], [])
    assert for_model(load_scenario("figure-9"), TINY_BY_PATH).expect


def test_the_command_says_what_it_did_not_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "figure-6", "--model", TINY_BY_PATH]) == 0
    assert "facts were not checked: they are about the words of tiny, for which the scene was written" in capsys.readouterr().out


@pytest.mark.weights
@pytest.mark.parametrize("scene", ["figure-6", "same-prompt-twice"])
def test_scenes_hold_on_a_real_language_model(scene: str) -> None:
    """SmolLM2 has one token for each of these words too, so blocks, slots, hits and counts are the same; what it says is its own."""
    result = run(scene, model="smollm2-135m")
    assert result.error is None
    assert result.failures == []
    assert result.trace.complete
    assert result.trace.header.model["num_layers"] == 30
    said = [result.trace.header.vocabulary[t] for t in result.trace.frames[-1].requests[0].token_ids[7:]]
    assert said[:3] == ["relationship", "was", "a"]
