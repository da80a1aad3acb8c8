"""The final state has the field names of the recorded runs of vLLM, and the values: recorded scenarios are run as scenarios of our own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.trace.frame import Trace
from scenarios import open_session, scenario_from_data
from scenarios.final_state import final_state
from tests.scenarios.conftest import WordTokenizer

FOLDER = Path(__file__).parents[1] / "conformance"
NAMES = ("S1", "T4", "T5", "T6", "T21", "T32", "T37", "T38", "T39")
FIELDS = ("free", "num_free", "usage", "ref", "hash", "hash_tokens", "map", "requests")
CONFIG = {
    "block_size": "block_size",
    "num_blocks": "num_blocks",
    "max_batched_tokens": "max_num_batched_tokens",
    "watermark": "watermark",
    "policy": "policy",
}


def recorded() -> dict[str, dict[str, Any]]:
    traces = json.loads((FOLDER / "golden_traces.json").read_text())
    scenarios = {s["name"]: s for s in json.loads((FOLDER / "scenarios.json").read_text())}
    found = {t["name"].split()[0]: {"scenario": scenarios[t["name"]], "steps": t["steps"]} for t in traces}
    return {name: found[name] for name in NAMES}


def as_scenario(golden: dict[str, Any]) -> dict[str, Any]:
    """The recorded operations as requests that arrive, actions, and forced outputs (one more than was recorded where the request goes on)."""
    source = golden["scenario"]
    forced: dict[str, list[int]] = {}
    finished: set[str] = set()
    requests: list[dict[str, Any]] = []
    actions: list[dict[str, Any]] = []
    step = 1
    for entry in golden["steps"][1:]:
        op = entry["op"]
        if op["op"] == "add":
            base = op.get("base", 0)
            requests.append({"id": op["id"], "prompt_token_ids": list(range(base, base + op["n"])), "arrives_at_step": step})
            requests[-1] |= {"priority": op["priority"]} if "priority" in op else {}
        elif op["op"] == "abort":
            actions.append({"at_step": step, "do": "abort", "request": op["id"]})
        elif op["op"] == "sched":
            step += 1
            for request_id, tokens in entry["result"]["update"]["sampled"].items():
                forced.setdefault(request_id, []).extend(tokens)
            finished |= set(entry["result"]["update"]["finished"])
    for request in requests:
        tokens = forced.get(request["id"], [])
        request["force"] = tokens if request["id"] in finished else [*tokens, 9999]
    config = {ours: source[theirs] for theirs, ours in CONFIG.items() if theirs in source}
    return {
        "id": "recorded", "title": source["name"], "source": "vLLM 0.27.0", "goal": "Agree.", "model": "none",
        "config": {"max_num_batched_tokens": 8192, "max_num_seqs": 16, **config}, "requests": requests, "actions": actions,
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_states_after_every_step_are_those_of_vllm(words: WordTokenizer, name: str) -> None:
    golden = recorded()[name]
    trace = open_session(scenario_from_data(as_scenario(golden))).run_to_end()
    step = 0
    for entry in golden["steps"]:
        if entry["op"] == "init" or entry["op"]["op"] != "sched":
            continue
        step += 1
        frames = [f for f in trace.frames if f.step <= step and not (f.step == step and f.op.startswith(("add_request", "abort")))]
        ours = final_state(Trace(trace.header, frames))
        assert {f: ours[f] for f in FIELDS} == {f: entry["state"][f] for f in FIELDS}, f"step {step}"
    assert step >= 1


def test_everything_is_plain_data(words: WordTokenizer) -> None:
    trace = open_session(scenario_from_data(as_scenario(recorded()["S1"]))).run_to_end()
    state = final_state(trace)
    assert json.loads(json.dumps(state)) == state
