"""Everything that the text explained here claims can be seen in a scene, and where it errs the scene says so (`claims.py`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from scenarios import Scenario, load_scenario
from scenarios.figures.schema import Expected, FigureScene
from scenarios.loader import library_files, load_scene, scene_files
from scenarios.schema import Selector
from tests.scenarios.claims import CLAIMS, Claim

ROOT = Path(__file__).parents[2]
ALL = [pytest.param(claim, id=f"{section}-{number}") for section, claims in CLAIMS.items() for number, claim in enumerate(claims, 1)]

NUMBERS = {
    "In short": ["int32", "20.4 %", "one block"],
    "The big picture": ["7 tokens", "blocks 0 and 1", "blocks 7 and 1", "4 tokens", "3", "1 slot free", "block 1", "block 3", "three blocks"],
    "Why it exists": ["800 KB", "1.6 GB", "20.4 %", "38.2 %"],
    "The landscape": [],
    "The core idea": [],
    "The symbols": ["16 tokens", "block 0"],
    "1 The block pool": ["block 0", "Figure 5", "Figure 6", "block 3", "ref_cnt becomes 1", "count + 1", "7, 1, 3", "at 0"],
    "2 The logical block table": ["[7, 1]", "[7, 1, 3]"],
    "3 Reference counts": ["55 %", "count is 0", "Figure 7", "7 tokens", "7 and 1", "become 2", "drops to 1", "one copy"],
    "4 Hash-based prefix caching": ["7 tokens", "7 and 1", "one lookup"],
    "5 Groups of hybrid models": ["16", "64", "32", "hit of 16"],
    "6 Recycling": ["4000", "2048", "1952"],
    "7 The worker's table": ["int32", "[7, 1]", "[7, 1, 3]", "0-15", "block 7", "16-31", "block 1"],
    "8 The slot mapping": ["int64", "-1", "block size 16", "7*16 + 0 = 112", "127", "position 16", "1*16 + 0 = 16", "block 1", "block 3", "int32"],
    "Putting it together": [
        "step 1",
        "step 2",
        "step 3",
        "step 4",
        "step 5",
        "step 6",
        "7 tokens",
        "2 blocks",
        "7 and 1",
        "[7, 1, 3]",
        "become 2",
        "ref_cnt 1",
    ],
    "What it buys": ["2-4x", "OPT-13B", "55 %", "one block"],
    "How to read the numbers": ["2023", "one GPU", "OPT-13B"],
    "Where it breaks": ["block size 1", "one block"],
    "One thing to remember": ["one physical block"],
}
"""The sections of the text, in its order, each with its numbers as they must stand in a claim of that section."""

RIGHT = {"S26": "the statement is right, so there is nothing to correct: one lookup per block, as in the scene “eviction-order”"}
"""Rules about statements that do not err, and why no scene corrects them."""


def test_every_section_has_claims_in_the_texts_order() -> None:
    assert list(CLAIMS) == list(NUMBERS)
    assert all(CLAIMS.values())


@pytest.mark.parametrize("section", NUMBERS)
def test_every_number_of_the_text_is_claimed(section: str) -> None:
    said = [claim.says for claim in CLAIMS[section]]
    missing = [n for n in NUMBERS[section] if not any(re.search(rf"(?<![\w.]){re.escape(n)}(?!\w)", text) for text in said)]
    assert missing == []


@pytest.mark.parametrize("claim", ALL)
def test_the_scene_shows_it(claim: Claim) -> None:
    assert claim.scene in scene_files(), f"there is no scene {claim.scene}"
    scene = load_scene(claim.scene)
    assert claim.facts or claim.values or claim.told or claim.errs, "nothing proves it"
    if claim.facts:
        assert isinstance(scene, Scenario)
        assert _is_expected(scene, claim), f"{claim.scene} does not expect {claim.facts} at {claim.at}"
    if claim.values:
        assert isinstance(scene, FigureScene)
        assert {name: _wanted(scene.expect.get(name)) for name in claim.values} == claim.values
    if claim.told is not None:
        assert any(claim.told in note.say for note in scene.notes), f"no note of {claim.scene} says “{claim.told}”"
    if claim.errs is not None:
        assert claim.errs in {correction.rule for correction in scene.corrections}
    if claim.test is not None:
        file, name = claim.test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_every_rule_about_what_one_may_have_read_is_quoted() -> None:
    quoted: dict[str, list[str]] = {}
    for scene in scene_files():
        for correction in load_scene(scene).corrections:
            quoted.setdefault(correction.rule, []).append(scene)
    rules = {f"S{number}" for number in range(1, 27)}
    assert set(quoted) | set(RIGHT) == rules
    assert not set(quoted) & set(RIGHT)
    assert {claim.errs for claims in CLAIMS.values() for claim in claims if claim.errs} == set(quoted)


@pytest.mark.parametrize("scene", [scene for scene in library_files() if load_scenario(scene).corrections])
def test_a_correction_says_what_is_read_and_what_is_right(scene: str) -> None:
    """Whole sentences, and not the same twice in one scene."""
    corrections = load_scenario(scene).corrections
    for text in [c.read for c in corrections] + [c.really for c in corrections]:
        assert text.endswith((".", "!", "?")), text
        assert "\n" not in text
    assert len({c.rule for c in corrections}) == len(corrections)


def _is_expected(scene: Scenario, claim: Claim) -> bool:
    """Whether one of the scene's expectations at such an event demands all the facts."""
    kind, *more = claim.at.split()
    named = {
        "request": next((m for m in more if not re.fullmatch(r"-?\d+|\*", m)), None),
        "nth": next((int(m) for m in more if re.fullmatch(r"-?\d+", m)), None),
    }
    found = [e for e in scene.expect if e.at.kind == kind and _named(e.at, **named)]
    return any(all(_holds(wanted, e.facts.get(fact)) for fact, wanted in claim.facts.items()) for e in found)


def _named(at: Selector, request: str | None, nth: int | None) -> bool:
    return request in (None, at.request) and nth in (None, at.nth)


def _holds(wanted: Any, expected: Any) -> bool:
    """Equal, and of a mapping the named entries."""
    if isinstance(wanted, dict) and isinstance(expected, dict):
        return all(key in expected and _holds(value, expected[key]) for key, value in wanted.items())
    return type(wanted) is type(expected) and bool(wanted == expected)


def _wanted(expected: Any) -> Any:
    return expected.value if isinstance(expected, Expected) else expected
