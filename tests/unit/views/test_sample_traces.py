"""The traces that the tests of pictures and sentences are made with are sound, and are what real vLLM 0.27.0 did (recorded runs T8, T20 and T27)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.trace.frame import Frame, Trace
from engine.trace.integrity import check_integrity
from tests.conftest import ROOT
from tests.unit.views.sample_traces import copy_run, state_run, window_run


def recorded(name: str) -> list[dict[str, Any]]:
    runs = json.loads((ROOT / "tests/conformance/golden_traces.json").read_text(encoding="utf-8"))
    return next([step["state"] for step in run["steps"]] for run in runs if run["name"].split()[0] == name)  # type: ignore[no-any-return]


def last_of(trace: Trace, step: int, op: str) -> Frame:
    return [f for f in trace.frames if f.step == step and f.op == op][-1]


@pytest.mark.parametrize("run", [window_run, state_run, copy_run])
def test_every_frame_keeps_the_invariants(run: Callable[[], Trace]) -> None:
    frames = run().frames
    for previous, frame in zip([None, *frames], frames, strict=False):
        assert check_integrity(frame, previous) == []


@pytest.mark.parametrize(
    ("run", "name", "step", "op", "nth"),
    [
        (window_run, "T8", 1, "schedule", 2), (window_run, "T8", 2, "schedule", 4), (window_run, "T8", 2, "update_from_output", 5),
        (window_run, "T8", 3, "schedule", 7), (copy_run, "T20", 1, "schedule", 2), (copy_run, "T20", 2, "schedule", 4), (copy_run, "T20", 3, "schedule", 6),
        (state_run, "T27", 1, "schedule", 2), (state_run, "T27", 2, "update_from_output", 5), (state_run, "T27", 3, "update_from_output", 6),
    ],
)  # fmt: skip
def test_queue_and_tables_are_those_of_the_recorded_run(run: Callable[[], Trace], name: str, step: int, op: str, nth: int) -> None:
    frame, state = last_of(run(), step, op), recorded(name)[nth]
    assert list(frame.free_queue) == state["free"]
    for request_id, request in state["requests"].items():
        made = frame.request(request_id)
        assert made is not None
        assert [list(table) for table in made.block_ids] == request["blocks"]
        assert list(made.num_cached_block) == request["cached"]
    assert {str(b.block_id): b.num_hash_tokens for b in frame.blocks if b.block_hashes} == state["hash_tokens"]
