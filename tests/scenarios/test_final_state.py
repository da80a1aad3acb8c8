"""The final state has the field names of the recorded runs of vLLM, and the values: recorded scenarios are run as scenarios of our own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.trace.events import StepStarted
from engine.trace.frame import Trace
from scenarios import open_session, scenario_from_data
from scenarios.final_state import final_state
from tests.scenarios.conftest import WordTokenizer

FOLDER = Path(__file__).parents[1] / "conformance"
NAMES = ("S1", "T4", "T5", "T6", "T18", "T20", "T21", "T32", "T36", "T37", "T38", "T39")
FIELDS = ("free", "num_free", "usage", "ref", "hash", "hash_tokens", "map", "requests")
CONFIG = {
    "block_size": "block_size",
    "num_blocks": "num_blocks",
    "max_batched_tokens": "max_num_batched_tokens",
    "watermark": "watermark",
    "policy": "policy",
    "hash_block_size": "hash_block_size",
    "async": "async_scheduling",
}
GROUP = {"type": "type", "block_size": "block_size", "mode": "mamba_cache_mode"}


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
        step += op["op"] in ("sched", "schedule_only")
        update = entry["result"].get("update", entry["result"] if op["op"] == "update_only" else {})
        for request_id, tokens in update.get("sampled", {}).items():
            forced.setdefault(request_id, []).extend(tokens)
        finished |= set(update.get("finished", ()))
    for request in requests:
        tokens = forced.get(request["id"], [])
        request["force"] = tokens if request["id"] in finished else [*tokens, 9999]
    config = {ours: source[theirs] for theirs, ours in CONFIG.items() if theirs in source}
    if "groups" in source:
        config["kv_cache_groups"] = [{ours: group[theirs] for theirs, ours in GROUP.items() if theirs in group} for group in source["groups"]]
    return {
        "id": "recorded", "title": source["name"], "source": "vLLM 0.27.0", "goal": "Agree.", "model": "none",
        "config": {"max_num_batched_tokens": 8192, "max_num_seqs": 16, "compat": "0.27.0", **config}, "requests": requests, "actions": actions,
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_states_after_every_step_are_those_of_vllm(words: WordTokenizer, name: str) -> None:
    """After each schedule() and each update: one and two groups, copies, and two batches in flight (T18)."""
    golden = recorded()[name]
    trace = open_session(scenario_from_data(as_scenario(golden))).run_to_end()
    schedules = [f.op_index for f in trace.frames if isinstance(f.event, StepStarted)]
    in_flight = 2 if golden["scenario"].get("async") else 1
    num_schedules = num_updates = num_compared = 0
    for entry in golden["steps"][1:]:
        op = entry["op"]["op"]
        if op not in ("sched", "schedule_only", "update_only"):
            continue
        num_schedules += op != "update_only"
        num_updates += op != "schedule_only"
        if num_schedules > len(schedules):
            break  # everything is finished, and the recording goes on with empty steps
        if op == "schedule_only":
            last = schedules[num_schedules - 1]
        elif num_updates + in_flight - 1 > num_schedules:
            break  # the recording lets a batch come in early; a session plans the next one first
        else:
            last = schedules[num_updates + in_flight - 2] + 2  # after schedule() come execute_model and update_from_output
        ours = final_state(Trace(trace.header, [f for f in trace.frames if f.op_index <= last]))
        theirs = {f: entry["state"][f] for f in FIELDS}
        assert {f: ours[f] for f in FIELDS} == theirs, f"{op} {num_schedules} {num_updates}"
        assert ours.get("extra_hashes", {}) == entry["state"].get("extra_hashes", {})
        num_compared += 1
    assert num_compared >= min(4, num_schedules)


def test_everything_is_plain_data(words: WordTokenizer) -> None:
    trace = open_session(scenario_from_data(as_scenario(recorded()["S1"]))).run_to_end()
    state = final_state(trace)
    assert json.loads(json.dumps(state)) == state
