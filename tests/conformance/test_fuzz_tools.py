"""The tools of the comparison with real vLLM: random scenarios, what counts as a difference, and shrinking. None of this needs vLLM."""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.compare import Json, first_difference
from tests.conformance.coverage_report import Coverage
from tests.conformance.fuzz import read, write
from tests.conformance.random_config import block_sizes, hash_block_size, scheduler_block_size
from tests.conformance.random_scenario import FAMILIES, random_scenario
from tests.conformance.shrink import MOST_CANDIDATES, shrink

HERE = Path(__file__).parent

# The format's vocabulary, as README.md and the recorded scenarios have it.
KEYS = {
    *("mode", "num_blocks", "block_size", "groups", "hash_block_size", "scheduler_block_size", "enable_caching", "events", "hash_algo", "use_eagle"),
    *("watermark", "max_model_len", "max_in_flight", "retention_interval", "max_num_seqs", "max_batched_tokens", "long_prefill_threshold", "async"),
    *("policy", "reserve_full_isl", "first_output_token"),
}
OPERATIONS = {
    *("add", "lookup", "start", "run", "done", "decode", "free", "preempt", "step", "copies", "reset", "evict", "cache", "skip", "common"),
    *("abort", "schedule_only", "update_only", "sched", "get", "touch", "hash"),
}
OPTIONS = {
    *("n", "base", "tokens", "salt", "lora", "priority", "arrival", "out_max", "new", "lookahead", "full_fit", "has_scheduled", "token"),
    *("release", "running", "out"),
}
TYPES = {"full", "mla", "swa", "chunked", "mamba", "rswa", "cross", "sink"}


@pytest.fixture(scope="module")
def many() -> list[Json]:
    return [random_scenario(3, number) for number in range(1500)]


# ---------------------------------------------------------------------- scenarios
@pytest.mark.parametrize("family", [None, *FAMILIES])
def test_a_seed_is_one_sequence_of_scenarios(family: str | None) -> None:
    first, again = ([random_scenario(seed, number, 12, family) for number in range(20)] for seed in (5, 5))
    assert first == again
    assert first != [random_scenario(6, number, 12, family) for number in range(20)]
    assert all(len(scenario["ops"]) == 12 for scenario in first)
    assert json.loads(json.dumps(first)) == first


def test_the_whole_format_is_drawn(many: list[Json]) -> None:
    """No key, operation, option or group type of the format is left out, so none can go untested unnoticed."""
    groups = [group for scenario in many for group in scenario.get("groups", [])]
    ops = [op for scenario in many for op in scenario["ops"]]
    assert {key for scenario in many for key in scenario} >= KEYS
    assert {op["op"] for op in ops} == OPERATIONS
    assert {key for op in ops for key in op} >= OPTIONS
    assert {group["type"] for group in groups} == TYPES
    assert {group["mode"] for group in groups if group["type"] == "mamba"} == {"all", "align", "none"}
    assert {len(scenario["groups"]) for scenario in many if "groups" in scenario} == {1, 2, 3, 4}
    assert {scenario.get("retention_interval", "dense") for scenario in many} >= {"dense", 0}
    assert any(group.get("eagle") for group in groups)
    assert any(group.get("spec_blocks") for group in groups)


def test_block_sizes_mostly_fit_together(many: list[Json]) -> None:
    """vLLM asks that the scheduler's block size is a multiple of the hash's and of every group's; a few scenarios try what happens otherwise."""
    odd = [
        scenario
        for scenario in many
        if scheduler_block_size(scenario) % hash_block_size(scenario) or any(scheduler_block_size(scenario) % size for size in block_sizes(scenario))
    ]
    assert len(odd) < len(many) / 50


def test_requests_are_added_before_they_are_used(many: list[Json]) -> None:
    for scenario in many:
        if scenario.get("mode") != "pool":
            added: set[str] = set()
            for op in scenario["ops"]:
                assert op["op"] == "add" or "id" not in op or op["id"] in added
                if op["op"] == "add":
                    assert op["id"] not in added
                    added.add(op["id"])


# ---------------------------------------------------------------------- what counts as a difference
def trace(*steps: Json) -> Json:
    return {"name": "t", "steps": [{"op": "init", "state": {"free": [1], "null_ref": 1}}, *steps]}


def step(result: Any = None, op: str = "sched", **state: Any) -> Json:
    return {"op": {"op": op}, "result": {} if result is None else result, "state": {"free": [1], **state}}


def test_wording_of_errors_and_the_null_blocks_count_do_not_count() -> None:
    ours = trace(step({"error": "InvalidInput: no"}, null_ref=5))
    assert first_difference(ours, trace(step({"error": "KeyError: 'A'"}, null_ref=0))) is None


def test_a_difference_names_step_kind_and_fields() -> None:
    found = first_difference(trace(step(), step(free=[1], ref={3: 1})), trace(step(), step(free=[2], ref={"3": 1})))
    assert found is not None
    assert (found.step, found.kind, found.fields) == (2, "state", ["state.free: ours [1], vLLM [2]"])
    found = first_difference(trace(step({"error": "AssertionError"})), trace(step()))
    assert found is not None
    assert (found.step, found.kind) == (1, "error")
    empty: Json = {"free": [], "ref": {}, "map": {}}
    built, refused = trace(step()), {"name": "t", "steps": [{"op": "BUILD", "error": "no", "state": empty}]}
    found = first_difference(built, refused)
    assert found is not None
    assert found.kind == "build"
    assert first_difference(refused, {**refused, "steps": [{"op": "BUILD", "error": "not", "state": empty}]}) is None


def test_the_order_of_scheduling_counts() -> None:
    ours, theirs = ({"schedule": {"scheduled": scheduled}, "update": {}} for scheduled in ({"A": 1, "B": 2}, {"B": 2, "A": 1}))
    found = first_difference(trace(step(ours)), trace(step(theirs)))
    assert found is not None
    assert found.fields == ['order: ours ["A", "B"], vLLM ["B", "A"]']
    assert first_difference(trace(step(ours)), trace(step(ours))) is None


@pytest.mark.parametrize(("extra", "same"), [(["A@2/g0", "B@2/g0"], True), (["A@2/g0"], False)])
def test_removals_of_two_further_keys_of_one_block_come_in_any_order(extra: list[str], same: bool) -> None:
    def removed(*names: str) -> list[Json]:
        return [{"type": "BlockRemoved", "hashes": [name], "group": 0, "medium": "GPU"} for name in names]

    before = step(extra_hashes={"4": extra})
    ours, theirs = (trace(before, step(events=removed("A@4", *names))) for names in (("A@2", "B@2"), ("B@2", "A@2")))
    assert (first_difference(ours, theirs) is None) == same


# ---------------------------------------------------------------------- shrinking
def test_shrinking_keeps_only_what_the_difference_needs() -> None:
    """The stand-in for a broken engine: wrong if a request of over 4 tokens is preempted before a reset, in a pool of over 2 blocks with a window group."""

    def wrong(scenario: Json) -> bool:
        long = {op["id"] for op in scenario["ops"] if op["op"] == "add" and (op.get("n") or len(op.get("tokens", ()))) > 4}
        numbers = [number for number, op in enumerate(scenario["ops"]) if op["op"] == "preempt" and op["id"] in long]
        resets = [number for number, op in enumerate(scenario["ops"]) if op["op"] == "reset"]
        window = any(group["type"] == "swa" for group in scenario.get("groups", []))
        return bool(numbers and resets and numbers[0] < resets[-1] and window and scenario["num_blocks"] > 2)

    calls: list[int] = []

    def judge(scenarios: list[Json]) -> list[bool]:
        calls.append(len(scenarios))
        return [wrong(scenario) for scenario in scenarios]

    scenario = next(found for number in range(2000) if wrong(found := random_scenario(1, number, 30, "attention")))
    unchanged = copy.deepcopy(scenario)
    smallest = shrink(scenario, judge)
    assert scenario == unchanged
    assert smallest["num_blocks"] == 3
    assert [group["type"] for group in smallest["groups"]] == ["swa"]
    add, preempt, reset = smallest["ops"]
    assert (add["op"], preempt, reset) == ("add", {"op": "preempt", "id": add["id"]}, {"op": "reset"})
    assert (add.get("n") or len(add["tokens"])) == 5
    assert set(smallest) <= {"name", "block_size", "groups", "num_blocks", "ops"}
    assert max(calls) <= MOST_CANDIDATES
    assert len(calls) <= 20  # real vLLM takes seconds for each


def test_what_comes_after_the_failing_step_goes_first() -> None:
    scenario: Json = {"mode": "pool", "num_blocks": 9, "ops": [{"op": "get", "n": 1}, *({"op": "lookup", "label": str(number)} for number in range(40))]}
    sizes: list[int] = []

    def judge(scenarios: list[Json]) -> list[bool]:
        sizes.append(len(scenarios))
        return [candidate["ops"][0]["op"] == "get" for candidate in scenarios]

    smallest = shrink(scenario, judge, failing_step=1)
    assert smallest == {"mode": "pool", "num_blocks": 1, "ops": [{"op": "get", "n": 1}]}
    assert sizes[0] == 1


# ---------------------------------------------------------------------- the program, with a stand-in for real vLLM
STAND_IN = """
import json, sys
sys.path.insert(0, {root!r})
from tests.conformance import drive
runs = [drive.run(scenario) for scenario in json.load(open(sys.argv[1]))]
for run in runs:
    for step in run["steps"][1:]:
        if {broken} and step["op"]["op"] == "reset" and step["result"].get("ok"):
            step["state"]["num_free"] += 1
print(json.dumps(runs))
"""


def fuzz(folder: Path, broken: bool, *words: str) -> subprocess.CompletedProcess[str]:
    driver = folder / "stand_in.py"
    driver.write_text(STAND_IN.format(root=str(HERE.parents[1]), broken=broken), encoding="utf-8")
    command = [sys.executable, str(HERE / "fuzz.py"), "--oracle-python", sys.executable, "--oracle-driver", str(driver), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=250, check=False)


def test_a_difference_is_printed_as_a_minimal_scenario_and_kept(tmp_path: Path) -> None:
    done = fuzz(tmp_path, True, "--family", "pool", "--count", "30", "--shrink", "1", "--keep", "kept.json")
    assert done.returncode == 1, done.stderr
    smallest = json.loads(done.stdout.splitlines()[0])
    assert {key: value for key, value in smallest.items() if key != "name"} == {"mode": "pool", "num_blocks": 2, "ops": [{"op": "reset"}]}
    assert "state.num_free: ours 1, vLLM 2" in done.stdout
    kept = read(tmp_path / "kept.json")
    assert kept[0] == smallest
    assert f"{len(kept) - 1} differ" in done.stdout.splitlines()[-1]
    again = fuzz(tmp_path, True, "--scenarios", "kept.json", "--shrink", "0")
    assert again.returncode == 1
    assert again.stdout.splitlines()[-1].endswith(f"{len(kept)} differ")


def test_no_difference_is_success_and_runs_can_be_recorded(tmp_path: Path) -> None:
    done = fuzz(tmp_path, False, "--family", "pool", "--count", "20", "--record", "scenarios.json.gz", "traces.json.gz", "--coverage")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "20 scenarios, 600 operations, 0 differ"
    scenarios, traces = read(tmp_path / "scenarios.json.gz"), read(tmp_path / "traces.json.gz")
    assert scenarios == [random_scenario(1, number, 30, "pool") for number in range(20)]
    assert [run["name"] for run in traces] == [scenario["name"] for scenario in scenarios]
    assert [len(run["steps"]) for run in traces] == [31] * 20


def test_recorded_files_depend_on_their_content_alone(tmp_path: Path) -> None:
    for name in ("one.json.gz", "two.json.gz"):
        write(tmp_path / name, [{"a": 1}])
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()
    assert json.loads(gzip.decompress((tmp_path / "one.json.gz").read_bytes())) == [{"a": 1}]


# ---------------------------------------------------------------------- coverage
def test_coverage_counts_what_the_recorded_runs_are_about() -> None:
    """The recorded runs of vLLM have names that say what happens in them."""
    scenarios = {scenario["name"]: scenario for scenario in read(HERE / "scenarios.json")}
    counted: dict[str, Coverage] = {}
    for run in read(HERE / "golden_traces.json"):
        counted[run["name"].split()[0]] = coverage = Coverage()
        coverage.add(scenarios[run["name"]], run)
    assert counted["T4"].modes["scheduler"]["preempted"] >= 1
    assert counted["T4"].modes["scheduler"]["resumed"] == 1
    assert counted["T7"].groups["swa"]["skipped"] >= 1
    assert counted["T8"].groups["full"]["hits"] >= 1
    assert counted["T9"].groups["mamba align"]["copies"] >= 1
    assert counted["T29"].modes["manager"]["retained copies"] >= 1
    assert counted["T16"].modes["manager"]["built"] == 0
    assert counted["T42"].groups["swa"]["retention"] == 1
    assert counted["P2"].modes["pool"]["duplicates"] >= 1
    assert "group type" in counted["T4"].text()
