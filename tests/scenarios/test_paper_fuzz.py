"""Whatever stands in a scenario of the paper's engine: a session, or a complaint in sentences with places. Never anything else."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from scenarios import open_session, parse_scenario, scenario_from_data
from scenarios.problems import ScenarioError
from tests.scenarios.conftest import WordTokenizer
from tests.scenarios.test_fuzz import SOON, complaint, values
from tests.scenarios.test_paper_bad_input import GOOD

numbers = st.integers(-2, 20)
beams = st.lists(st.lists(st.fixed_dictionaries({"parent": numbers, "token": st.sampled_from(["our", "on", 3, 99999])}), max_size=4), max_size=4)
samples = st.lists(st.lists(st.sampled_from(["our", "on", 3, "two words"]), max_size=3), max_size=4)
anything = values | numbers | beams | samples | st.sampled_from(["P", "Q", "A1", "swap", {"A1": [0]}, {"B3": "A1"}, ["A"], ["B2"]])
PATHS: list[tuple[str | int, ...]] = [
    ("engine",), ("pair",), ("prefixes",), ("prefixes", 0), ("prefixes", 0, "id"), ("prefixes", 0, "prompt"), ("config", "num_cpu_blocks"),
    ("config", "num_blocks"), ("config", "max_num_seqs"), ("config", "max_num_batched_tokens"), ("config", "max_model_len"), ("config", "preemption_mode"),
    ("config", "free_queue_order"), ("requests", 0, "n"), ("requests", 0, "force_samples"), ("requests", 0, "max_tokens"), ("requests", 0, "prefix"),
    ("requests", 0, "prompt_length"), ("requests", 1, "beam_width"), ("requests", 1, "n"), ("requests", 1, "force_beams"), ("requests", 1, "length_penalty"),
    ("requests", 1, "id"), ("requests", 2, "id"), ("requests", 2, "prefix"), ("actions",), ("expect", 0, "at"), ("expect", 0, "parents"),
    ("expect", 0, "cpu_block_table"), ("expect", 0, "cpu_free_queue"), ("expect", 0, "swapped"), ("expect", 0, "running"),
]  # fmt: skip


@SOON
@given(st.lists(st.tuples(st.sampled_from(PATHS), anything), min_size=1, max_size=3))
def test_any_value_in_any_place(words: WordTokenizer, changes: list[tuple[tuple[str | int, ...], Any]]) -> None:
    """What is let in also runs: to its end, or to one sentence that says why it cannot go on."""
    data = parse_scenario(GOOD, "s.yaml").plain()
    for path, value in changes:
        here: Any = data
        try:
            for part in path[:-1]:
                here = here[part]
            here[path[-1]] = value
        except (LookupError, TypeError):
            continue  # an earlier change took this place away
    try:
        session = open_session(scenario_from_data(data))
    except ScenarioError as error:
        complaint(error)
        return
    session.run_to_end()
    if session.error is not None:
        assert isinstance(session.error, EngineError)
        assert "bug in Pagewalk" not in str(session.error)
        complaint(session.error)  # type: ignore[arg-type]
