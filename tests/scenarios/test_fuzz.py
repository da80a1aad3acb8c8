"""Whatever somebody types, pastes or uploads: a scenario, or a ScenarioError in sentences. Never anything else."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.errors import InvalidInput
from scenarios import load_scenario, open_session, parse_scenario, scenario_from_data
from scenarios.problems import ScenarioError
from tests.scenarios.conftest import WordTokenizer
from tests.scenarios.test_bad_input import GOOD

SOON = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
scalars = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8) | st.sampled_from(["start", "kv_written", "A", "none"])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.integers(-2, 12), inner, max_size=3), max_leaves=8
)
PATHS: list[tuple[str | int, ...]] = [
    (), ("id",), ("config",), ("config", "num_blocks"), ("config", "free_queue_order"), ("config", "watermark"), ("requests",), ("requests", 0),
    ("requests", 0, "id"), ("requests", 0, "prompt"), ("requests", 0, "force"), ("requests", 0, "max_tokens"), ("actions",), ("notes",),
    ("notes", 0), ("notes", 0, "at"), ("questions",), ("expect",), ("expect", 0), ("expect", 0, "at"), ("expect", 0, "event"),
    ("expect", 0, "block_table"), ("expect", 0, "block_tokens"), ("expect", 0, "ref_cnt"), ("expect", 0, "count"), ("expect", 0, "slot"),
]  # fmt: skip


def good_data() -> dict[str, Any]:
    return parse_scenario(GOOD, "s.yaml").plain()


def complaint(error: InvalidInput, num_lines: int | None = None) -> None:
    """Every line is a sentence with a place, as a person can read it."""
    assert str(error)
    if num_lines is not None and isinstance(error, ScenarioError):
        assert all(p.line is None or 1 <= p.line <= num_lines for p in error.problems)
    for line in str(error).splitlines():
        assert "pydantic" not in line.lower()
        assert "Input should" not in line


@SOON
@given(st.sampled_from(PATHS), values, st.sampled_from(["set", "add"]))
def test_any_value_in_any_place(words: WordTokenizer, path: tuple[str | int, ...], value: Any, how: str) -> None:
    data = good_data()
    here: Any = data
    for part in path[:-1]:
        here = here[part]
    if not path:
        data = {**data, **value} if isinstance(value, dict) else data
    elif how == "add" and isinstance(here.get(path[-1]) if isinstance(here, dict) else None, dict) and isinstance(value, dict):
        here[path[-1]] = {**here[path[-1]], **value}
    else:
        here[path[-1]] = value
    try:
        session = open_session(scenario_from_data(data))
    except InvalidInput as error:
        complaint(error)
    else:
        assert session.trace.frames == []


@SOON
@given(
    st.integers(0, len(GOOD) - 1), st.integers(0, 12), st.text(max_size=6) | st.sampled_from(["\n", "- ", "&a ", "*a", "!t ", "{", "]", ": ", "'", "\t", "?"])
)
def test_any_damage_to_the_text(words: WordTokenizer, start: int, length: int, text: str) -> None:
    damaged = GOOD[:start] + text + GOOD[start + length :]
    try:
        open_session(parse_scenario(damaged, "s.yaml"))
    except ScenarioError as error:
        complaint(error, num_lines=len(damaged.splitlines()) + 1)


@SOON
@given(st.binary(max_size=60))
@example(b"\xff\xfea\x00")
@example(b"%YAML 9.9\n---\na: 1\n")
@example(b"%TAG ! !\n")
@example(b"? a\n: b\n")
@example(b"a: >9\n")
@example(b'a: "\\U00110000"\n')
@example(b"\x00")
def test_any_bytes(data: bytes) -> None:
    try:
        parse_scenario(data, "s.yaml")
    except ScenarioError as error:
        complaint(error)


@SOON
@given(st.text(max_size=30))
@example("../../../etc/passwd")
@example("a\x00.yaml")
@example("x" * 5000 + ".yaml")
@example("\ud800.yaml")
@example(".")
@example("/")
def test_any_name(name: str) -> None:
    try:
        load_scenario(name)
    except InvalidInput as error:
        complaint(error)
