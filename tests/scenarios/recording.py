"""Scenes as operations for real vLLM, and our states at the same moments.

`python -m tests.scenarios.recording --oracle-python PYTHON [ID ...]` runs scenes on real vLLM and keeps its states in `recorded_scenes.json.gz`, with which
`test_recorded_scenes.py` compares ours. Without ids all scenes are recorded anew.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.group_config import GroupConfig
from engine.trace.events import RequestAdded, StepScheduled, StepStarted, TokenSampled
from engine.trace.frame import Frame, Trace
from scenarios import Scenario, load_scenario, open_session
from scenarios.final_state import final_state
from scenarios.loader import library_files
from scenarios.model_groups import groups_on
from scenarios.schema import Group

RECORDED = Path(__file__).with_name("recorded_scenes.json.gz")
STATE_FIELDS = ("free", "num_free", "usage", "ref", "hash", "hash_tokens", "map", "requests")
CONFIG = {
    "num_blocks": "num_blocks",
    "block_size": "block_size",
    "enable_prefix_caching": "enable_caching",
    "prefix_caching_hash_algo": "hash_algo",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
    "long_prefill_token_threshold": "long_prefill_threshold",
    "watermark": "watermark",
    "scheduler_reserve_full_isl": "reserve_full_isl",
    "policy": "policy",
    "retention_interval": "retention_interval",
    "use_eagle": "use_eagle",
    "async_scheduling": "async",
}
TYPES = {"sliding_window": "swa", "chunked_local": "chunked"}
GROUP = {
    "block_size": "block_size",
    "sliding_window": "window",
    "attention_chunk_size": "chunk",
    "rswa_window": "window",
    "mamba_cache_mode": "mode",
    "num_speculative_blocks": "spec_blocks",
    "is_eagle_group": "eagle",
}


def recordable_scenes() -> list[str]:
    """Scenes that vLLM can run: those of its own engine."""
    return sorted(scene for scene in library_files() if load_scenario(scene).engine == "v1")


def run_as_recorded(scenario: Scenario) -> Trace:
    """The scene with the mistakes of the release that was recorded."""
    config = scenario.config.model_copy(update={"compat": "0.27.0"})
    return open_session(scenario.model_copy(update={"config": config}), interpreted_layers=()).run_to_end()


def as_operations(scenario: Scenario, trace: Trace) -> dict[str, Any]:
    """The scene as a scenario of the conformance format: what happened in `trace`, with the tokens that were sampled."""
    config = {theirs: value for ours, theirs in CONFIG.items() if (value := getattr(scenario.config, ours)) is not None}
    header = trace.header.config
    config |= {"hash_block_size": header["hash_block_size"], "scheduler_block_size": header["scheduler_block_size"]}
    config |= {"dcp": scenario.config.decode_context_parallel_size, "groups": [_group(g) for g in _groups(scenario)]}
    return {"name": scenario.id, "mode": "scheduler", "events": False, **config, "ops": [op for op, _ in moments(scenario, trace)]}


def _groups(scenario: Scenario) -> Sequence[Group | GroupConfig]:
    """Those that the scene names, those of its model's layers, or one of full attention."""
    return scenario.config.kv_cache_groups or groups_on(scenario, scenario.model) or [Group()]


def _group(group: Group | GroupConfig) -> dict[str, Any]:
    fields = {theirs: value for ours, theirs in GROUP.items() if (value := getattr(group, ours)) is not None}
    return {"type": TYPES.get(group.type, group.type), **fields}


def moments(scenario: Scenario, trace: Trace) -> list[tuple[dict[str, Any], int]]:
    """Each operation with the last frame after it."""
    found: list[tuple[dict[str, Any], int]] = []
    requests = {r.id: r for r in scenario.requests}
    actions = {kind: iter([a for a in sorted(scenario.actions, key=lambda a: a.at_step) if a.do == kind]) for kind in ("evict_blocks", "arrange_free_queue")}
    frames: dict[int, list[Frame]] = {}
    for frame in trace.frames:
        frames.setdefault(frame.op_index, []).append(frame)
    ends = {index: there[-1].seq for index, there in frames.items()}
    num_updates = num_schedules = 0
    for index in range(max(frames) + 1):
        op, events = frames[index][0].op if index in frames else "", [f.event for f in frames.get(index, ())]
        end = max(seq for other, seq in ends.items() if other <= index)
        if op == "prepare":
            found.append(({"op": "prepare", "ids": list(frames[index][-1].free_queue)}, end))
        elif op.startswith("add_request"):
            (added,) = [e for e in events if isinstance(e, RequestAdded)]
            spec = requests[str(added.request_id)]
            state = frames[index][-1].request(spec.id)
            assert state is not None
            more = {"salt": spec.cache_salt, "lora": spec.lora_name, "priority": spec.priority}
            add = {"op": "add", "id": spec.id, "tokens": list(state.token_ids), "out_max": spec.output_limit}
            found.append(({**add, **{k: v for k, v in more.items() if v}}, end))
        elif op.startswith("abort"):
            found.append(({"op": "abort", "id": op.split()[1]}, end))
        elif op == "reset_prefix_cache":
            found.append(({"op": "reset"}, end))
        elif op in actions:
            found.append(({"op": op.split("_")[0], "ids": next(actions[op]).block_ids}, end))
        elif op == "schedule" and isinstance(events[0], StepStarted):
            num_schedules += 1
            found.append(({"op": "schedule_only"}, end))
        # each schedule() is followed by execute_model and, once enough batches are in flight, by an update that may leave no frame
        updates = num_schedules and index - _index_of_last_schedule(frames, index) >= 2 and num_updates < num_schedules
        if updates and op in ("", "update_from_output") and not _waits_for_another(scenario, num_schedules, num_updates, index, frames):
            num_updates += 1
            sampled: dict[str, list[int]] = {}
            for event in events:
                if isinstance(event, TokenSampled):
                    sampled.setdefault(str(event.request_id), []).append(event.token_id)
            found.append(({"op": "update_only", "out": sampled}, end))
    return found


def _index_of_last_schedule(frames: dict[int, list[Frame]], index: int) -> int:
    return max(i for i in range(index + 1) if i in frames and isinstance(frames[i][0].event, StepStarted))


def _waits_for_another(scenario: Scenario, num_schedules: int, num_updates: int, index: int, frames: dict[int, list[Frame]]) -> bool:
    """Whether the batch just planned is the only one in flight and asynchronous scheduling plans another one first."""
    if not scenario.config.async_scheduling or num_schedules - num_updates > 1:
        return False
    return any(i >= index and isinstance(there[0].event, StepStarted) for i, there in frames.items())


def scheduled_in(trace: Trace, end: int) -> dict[str, int]:
    """What the step that ends with frame `end` was to compute."""
    event = trace.frames[end].event
    assert isinstance(event, StepScheduled)
    return dict(event.num_scheduled_tokens)


def state_at(trace: Trace, end: int) -> dict[str, Any]:
    """Our state after frame `end`, in the names of the recordings."""
    state = final_state(Trace(trace.header, trace.frames[: end + 1]))
    return {**{name: state[name] for name in STATE_FIELDS}, "extra_hashes": state.get("extra_hashes", {})}


def main() -> None:
    """Record scenes."""
    parser = argparse.ArgumentParser(description="Run scenes on real vLLM and keep its states.")
    parser.add_argument("--oracle-python", required=True)
    parser.add_argument("ids", nargs="*")
    arguments = parser.parse_args()
    ids = arguments.ids or recordable_scenes()
    operations = []
    for scene in ids:
        scenario = load_scenario(scene)
        operations.append(as_operations(scenario, run_as_recorded(scenario)))
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    script = Path(__file__).with_name("scene_oracle.py")
    done = subprocess.run(
        [arguments.oracle_python, str(script)], input=json.dumps(operations), capture_output=True, text=True, check=True, env=environment, timeout=600
    )
    recorded = json.loads(gzip.decompress(RECORDED.read_bytes())) if RECORDED.exists() and arguments.ids else {}
    for made, result in zip(operations, json.loads(done.stdout), strict=True):
        recorded[made["name"]] = {"scenario": made, "steps": result["steps"]}
    data = json.dumps({scene: recorded[scene] for scene in sorted(recorded)}, separators=(",", ":"))
    RECORDED.write_bytes(gzip.compress(data.encode(), mtime=0))


if __name__ == "__main__":
    main()
