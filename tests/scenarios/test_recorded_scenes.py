"""What happens in each scene is what real vLLM 0.27.0 did with the same requests: every state after every operation (`recording.py` recorded them)."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import pytest

from scenarios import load_scenario
from tests.scenarios.recording import RECORDED, STATE_FIELDS, as_operations, moments, recordable_scenes, run_as_recorded, scheduled_in, state_at

SCENES = recordable_scenes()


@cache
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(RECORDED.read_bytes()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("scene", SCENES)
def test_every_state_is_that_of_vllm(scene: str) -> None:
    """Free queue, references, hashes, map, tables, frontiers and progress, after each arrival, schedule() and update."""
    scenario = load_scenario(scene)
    trace = run_as_recorded(scenario)
    golden = recorded()[scene]
    assert json.loads(json.dumps(as_operations(scenario, trace))) == golden["scenario"], "the scene was changed: record it again"
    for (operation, end), step in zip(moments(scenario, trace), golden["steps"][1:], strict=True):
        assert "error" not in (step["result"] or {}), step["result"]
        theirs = {**{name: step["state"][name] for name in STATE_FIELDS}, "extra_hashes": step["state"].get("extra_hashes", {})}
        assert state_at(trace, end) == theirs, operation
        if operation["op"] == "schedule_only":
            assert scheduled_in(trace, end) == step["result"]["scheduled"]
