"""What the tests of bad input share: one place of a good scenario is replaced, and what comes out is refused with these problems."""

from __future__ import annotations

from functools import partial

import pytest

from scenarios import open_session, parse_scenario
from scenarios.problems import ScenarioError


def replaced(good: str, old: str, new: str) -> str:
    """`good` with `new` for the one place where `old` stands."""
    assert good.count(old) == 1, f"{old!r} must stand once in the good scenario"
    return good.replace(old, new)


def assert_refused(text: str, beginnings: list[str], *, opens: bool = False) -> None:
    """Reading `text` as ``s.yaml`` gives one problem per beginning, in this order; with `opens` it can be read, and opening its session gives them."""
    refuse = partial(open_session, parse_scenario(text, "s.yaml")) if opens else partial(parse_scenario, text, "s.yaml")
    with pytest.raises(ScenarioError) as caught:
        refuse()
    lines = str(caught.value).split("\n")
    assert len(lines) == len(beginnings) == len(caught.value.problems), lines
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(beginning)


def assert_complains(text: str, beginning: str) -> None:
    """Reading `text` as ``s.yaml`` gives, perhaps among others, a problem that begins like this."""
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, "s.yaml")
    assert any(line.startswith(beginning) for line in str(caught.value).split("\n")), str(caught.value)
