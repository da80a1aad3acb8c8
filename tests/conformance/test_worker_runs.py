"""The worker's rows and states beside recorded runs of vLLM's own batch, block tables and Mamba code (worker_oracle.py): R4.2, R8.1 to R8.3, R3.42, R3.43,
A45."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from engine.core.kv_cache_groups import get_kv_cache_groups
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from engine.errors import EngineError
from engine.group_config import group_specs
from engine.models import kv_cache_groups_of
from engine.models.layer_groups import layer_name
from engine.state_steps import state_steps
from engine.worker.block_table import BlockTable, MultiGroupBlockTable
from engine.worker.input_batch import InputBatch
from engine.worker.model_runner import ModelRunner
from tests.conformance.scheduler_driver import SchedulerDriver
from tests.conformance.worker_scenario import GROUP_QUESTIONS, Json, worker_scenario


@lru_cache(maxsize=1)
def record() -> Json:
    found: Json = json.loads(gzip.decompress((Path(__file__).parent / "worker_runs.json.gz").read_bytes()))
    return found


class Rows(ModelRunner):
    """A model runner's rows without a model: only what `_update_states` needs."""

    def __init__(self, scenario: Json, driver: SchedulerDriver) -> None:
        specs = [group.kv_cache_spec for group in driver.config.kv_cache_groups]
        self.state_groups = [index for index, spec in enumerate(specs) if isinstance(spec, MambaSpec)]
        self.block_table = MultiGroupBlockTable(
            block_sizes=[spec.block_size for spec in specs],
            max_num_reqs=scenario["max_num_seqs"],
            max_model_len=scenario["max_model_len"],
            max_num_batched_tokens=1,
            state_groups=self.state_groups,
        )
        self.input_batch = InputBatch(self.block_table, None)
        self.requests = {}

    def step(self, output: Any) -> Json:
        self._update_states(output)
        req_ids = list(self.input_batch.req_ids)
        rows = [
            [{"ids": table.row(index), "behind": sum(map(bool, table.stale_tail(index)))} for table in self.block_table.block_tables]
            for index in range(len(req_ids))
        ]
        said: Json = {"rows": rows, "req_ids": req_ids}
        if req_ids and self.state_groups:
            said["computed"] = [self.requests[name].num_computed_tokens for name in req_ids if name is not None]
            said["ends"] = [computed + output.num_scheduled_tokens[name] for name, computed in zip(req_ids, said["computed"], strict=True)]
        return said


def replayed(run: Json) -> Iterator[tuple[Json, Json]]:
    """(vLLM's step, ours) of a recorded run, through our own scheduler and rows; also that there are equally many."""
    scenario = run["scenario"]
    driver = SchedulerDriver(scenario, "0.27.0")
    rows = Rows(scenario, driver)
    assert [table.width for table in rows.block_table.block_tables] == run["widths"]
    recorded = iter(run["steps"])
    for op in scenario["ops"]:
        if op["op"] != "sched":
            getattr(driver, f"op_{op['op']}")(op)
            continue
        driver.op_schedule_only(op)
        yield next(recorded), rows.step(driver.open_schedules[-1])
        driver.op_update_only(op)
    assert next(recorded, None) is None


def our_states(run: Json, step: Json, group: str, index: int) -> Json:
    """What `state_steps` makes of one request of a step, in the words of the record."""
    spec = run["scenario"]["groups"][int(group)]
    block_size = spec.get("block_size", run["scenario"]["block_size"])
    steps = state_steps(step["rows"][index][int(group)]["ids"], block_size, spec["mode"], step["computed"][index], step["ends"][index])
    return {"source": steps[0].source_block_id, "left_in": [one.block_id for one in steps]}


def test_rows_are_those_of_vllm_in_every_step() -> None:
    """R8.1 to R8.3: who sits in which row, what each group's row says, how wide it is, and that nothing stays behind its end."""
    for run in record()["runs"]:
        for number, (theirs, ours) in enumerate(replayed(run)):
            theirs = {name: value for name, value in theirs.items() if name != "states"}
            assert ours == theirs, (run["scenario"]["name"], number)


def test_states_are_read_and_left_where_vllm_reads_and_leaves_them() -> None:
    """R3.42, R3.43, A45: of every request and group the block that the state comes from and the blocks that states are left in. vLLM's `align` copies a state
    into the next block and goes on there, which is the same source and the same destination."""
    for run in record()["runs"]:
        for number, step in enumerate(run["steps"]):
            for group, states in step.get("states", {}).items():
                for index, theirs in enumerate(states):
                    expected = {"source": theirs["source"], "left_in": theirs["left_in"]}
                    assert our_states(run, step, group, index) == expected, (run["scenario"]["name"], number, step["req_ids"][index])


def test_what_was_recorded_reaches_everything() -> None:
    counts: Counter[str] = Counter()
    for run in record()["runs"]:
        mode = next((group["mode"] for group in run["scenario"]["groups"] if group["type"] == "mamba"), "no states")
        seen: set[str] = set()
        before: list[str] = []
        for step in run["steps"]:
            counts[f"steps, {mode}"] += 1
            stays = [name for name in before if name in step["req_ids"]]
            counts["moved"] += any(before.index(name) != step["req_ids"].index(name) for name in stays)
            before = step["req_ids"]
            for states in step.get("states", {}).values():
                for index, state in enumerate(states):
                    name, computed = step["req_ids"][index], step["computed"][index]
                    counts[f"states, {mode}"] += 1
                    counts["from nothing"] += state["source"] is None
                    counts["in place"] += state["source"] == state["left_in"][-1]
                    counts["several at once"] += len(state["left_in"]) > 1
                    counts["copied before"] += state.get("copied", False)
                    counts["after a hit"] += name not in seen and computed > 0
                    counts["after part of a block"] += name not in seen and computed % run["scenario"]["block_size"] > 0
                    counts["computed anew"] += name in seen and computed == 0
                    seen.add(name)
    expected = ("steps, align", "steps, all", "steps, none", "steps, no states", "moved", "from nothing", "in place", "several at once", "copied before")
    assert min(counts[what] for what in expected) > 50, counts
    assert min(counts[what] for what in ("after a hit", "computed anew")) > 20, counts
    assert counts["after part of a block"] >= 5, counts


@pytest.mark.parametrize(
    "column",
    [
        lambda tokens, size, mode: 0 if mode == "none" else (tokens - 1) // 2,  # A45: another group's block size
        lambda tokens, size, mode: 0 if mode == "none" else tokens // size,  # one column too far at a block's end
        lambda tokens, size, mode: (tokens - 1) // size if mode == "all" else 0,
        lambda tokens, size, mode: (tokens - 1) // size - (mode == "all" and tokens % size == 1),
    ],
)
def test_a_wrong_column_is_seen(column: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.state_steps.state_column", column)
    with pytest.raises((AssertionError, EngineError)):
        test_states_are_read_and_left_where_vllm_reads_and_leaves_them()


def test_a_row_that_is_cleared_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """R8.2: V1's runner zeroes a row that is left."""
    monkeypatch.setattr(BlockTable, "clear_row", lambda self, row: self.num_blocks_per_row.__setitem__(row, 0))
    with pytest.raises(AssertionError):
        test_rows_are_those_of_vllm_in_every_step()


def spec_of(layer: Json) -> KVCacheSpec:
    if layer["type"] == "mamba":
        shapes = tuple(map(tuple, layer["shapes"]))
        return MambaSpec(layer["block_size"], shapes=shapes, mamba_cache_mode=layer["mode"], page_size_padded=layer["page_size_padded"])
    if layer["type"] == "full":
        return FullAttentionSpec(layer["block_size"], num_kv_heads=layer["num_kv_heads"], head_size=layer["head_size"], dtype_bytes=4)
    return SlidingWindowSpec(
        layer["block_size"], num_kv_heads=layer["num_kv_heads"], head_size=layer["head_size"], dtype_bytes=4, sliding_window=layer["sliding_window"]
    )


def test_r4_2_groups_are_those_that_vllm_makes_of_the_same_layers() -> None:
    """Order, layers of each group, tokens per block, bytes per page: the models that have several kinds of layers, and random ones."""
    answered = record()["groups"]
    assert [{name: value for name, value in answer.items() if name != "groups"} for answer in answered] == json.loads(json.dumps(GROUP_QUESTIONS))
    for answer in answered:
        groups = get_kv_cache_groups({layer_name(index): spec_of(layer) for index, layer in enumerate(answer["layers"])})
        assert [[group.layer_names, group.kv_cache_spec.block_size, group.kv_cache_spec.page_size_bytes] for group in groups] == answer["groups"], answer[
            "name"
        ]


@pytest.mark.parametrize("answer", [answer for answer in record()["groups"] if answer["name"].startswith("tiny")], ids=lambda answer: str(answer["name"]))
def test_r4_2_the_groups_of_the_models_here_are_those_that_vllm_makes(answer: Json) -> None:
    """From config.json, through the session's own group settings."""
    model, block_size, *mode = answer["name"].split("/")
    caching = mode != ["none"]
    made = kv_cache_groups_of(model, int(block_size), mamba_cache_mode=mode[0] if mode else None, enable_prefix_caching=caching)
    groups = group_specs(made, int(block_size))
    assert [[group.layer_names, group.kv_cache_spec.block_size, group.kv_cache_spec.page_size_bytes] for group in groups] == answer["groups"]


def test_the_recorded_scenarios_are_the_ones_that_are_drawn() -> None:
    for number, run in enumerate(record()["runs"]):
        assert run["scenario"] == worker_scenario(27, number)
