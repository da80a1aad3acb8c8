"""The cases of cases.py on this engine: the right result by default, and with `compat` what real vLLM 0.27.0 does.

What the cases expect of vLLM was compared with it by check_cases.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.conformance import drive
from tests.conformance.cases import COMPAT, Case, differences, load_cases

CASES = load_cases()
IDS = [case.name for case in CASES]
MISTAKES = "A06 A16 A49 A51 A54"
"""Reports that 0.27.0 still deserves (S25). A43's wrong unpin is A06 again; A17 is beyond the format: tests/unit/core/test_cases.py."""


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_right_result(case: Case) -> None:
    assert differences(case.name, drive.run(case.scenario, compat=None)["steps"], case.expected) == []


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_vllm_does(case: Case) -> None:
    assert differences(case.name, drive.run(case.scenario, compat=COMPAT)["steps"], case.seen_on_vllm) == []


def test_every_case_has_a_name_of_its_own_and_something_to_show() -> None:
    assert len(set(IDS)) == len(IDS)
    for case in CASES:
        assert case.expected, case.name
        assert {expectation["step"] for expectation in case.expected} <= set(range(len(case.scenario["ops"]) + 1)), case.name
        assert case.source in ("oracle", "rules"), case.name
        assert (case.source == "rules") == (case.compat_expected is not None), case.name


def test_mistakes_are_the_named_ones() -> None:
    assert sorted({case.case for case in CASES if case.compat_expected is not None} - {"A43"}) == MISTAKES.split()


# ---------------------------------------------------------------------- the checks can fail
def _steps() -> list[dict[str, Any]]:
    stored = {"type": "BlockStored", "hashes": ["A@2", "A@4"], "parent": None, "tokens": [0, 1, 2, 3], "group": 0}
    later = {"type": "BlockStored", "hashes": ["A@6"], "parent": "A@4", "tokens": [4, 5], "group": 0}
    return [{"op": "init", "state": {}}, {"op": {"op": "x"}, "result": {"n": None}, "state": {"events": [stored]}}, {"op": {}, "state": {"events": [later]}}]


CHAIN = {"step": 2, "chain": {"hash": "A@6", "group": 0, "tokens": [0, 1, 2, 3, 4, 5]}}


@pytest.mark.parametrize(
    "expectation",
    [
        {"step": 1, "path": ["result", "n"], "value": None},
        {"step": 1, "path": ["result", "m"], "absent": True},
        {"step": 1, "path": ["state", "events", 0, "tokens", 3], "value": 3},
        {"step": 2, "no_event": ["BlockStored", "A@4", 0]},
        CHAIN,
    ],
)
def test_what_is_met_is_no_difference(expectation: dict[str, Any]) -> None:
    assert differences("X", _steps(), [expectation]) == []


@pytest.mark.parametrize(
    ("expectation", "got"),
    [
        ({"step": 1, "path": ["result", "n"], "value": 0}, "expected 0, got null"),
        ({"step": 1, "path": ["result", "m"], "value": None}, 'expected null, got "no such field"'),
        ({"step": 1, "path": ["result", "n"], "absent": True}, 'expected "no such field", got null'),
        ({"step": 1, "path": ["result", "error"], "value": True}, 'expected true, got "no such field"'),
        ({"step": 2, "no_event": ["BlockStored", "A@6", 0]}, "expected [], got [{"),
        ({"step": 1, "chain": CHAIN["chain"]}, "A@6 was not announced"),
        ({"step": 2, "chain": {"hash": "A@4", "group": 1, "tokens": [0, 1, 2, 3]}}, "A@4 was not announced"),
    ],
)
def test_a_difference_names_case_step_field_and_both_values(expectation: dict[str, Any], got: str) -> None:
    (line,) = differences("A00 some case", _steps(), [expectation])
    assert line.startswith(f"A00 some case, step {expectation['step']} ")
    assert got in line


def test_a_chain_breaks_where_nobody_announced_the_parent() -> None:
    steps = copy.deepcopy(_steps())
    steps[1]["state"]["events"][0]["hashes"] = ["A@2", "B@4"]
    (line,) = differences("X", steps, [CHAIN])
    assert "['A@6'] follow A@4, which nobody announced" in line


def test_a_scenario_that_cannot_be_built_is_a_difference() -> None:
    assert differences("X", [{"op": "BUILD", "error": "E: no", "state": {}}], [CHAIN]) == ["X: cannot be built: E: no"]
