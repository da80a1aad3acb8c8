"""Every scenario goes through exactly the states that vLLM 0.27.0 went through when it was recorded."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import drive
from tests.conformance.compare import first_difference
from tests.conformance.names import Json

HERE = Path(__file__).parent


def read(name: str) -> list[Json]:
    data = (HERE / name).read_bytes()
    found: list[Json] = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    return found


SCENARIOS = read("scenarios.json")
GOLDEN = {trace["name"]: trace for trace in read("golden_traces.json")}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario["name"].split()[0] for scenario in SCENARIOS])
def test_same_states_as_vllm(scenario: Json) -> None:
    """All 49 hand-written scenarios, also the three that record failures of vLLM itself."""
    golden = GOLDEN[scenario["name"]]
    assert len(golden["steps"]) in (1, len(scenario["ops"]) + 1)
    assert first_difference(drive.run(scenario), golden) is None


def test_random_scenarios_go_through_the_same_states_as_vllm() -> None:
    """200 scenarios of 30 random operations over all group types, modes and policies, recorded with real vLLM 0.27.0 (README.md in this folder)."""
    scenarios, traces = read("random_scenarios.json.gz"), read("random_traces.json.gz")
    assert len(scenarios) == len(traces) == 200
    compared = {scenario["name"]: first_difference(drive.run(scenario), golden) for scenario, golden in zip(scenarios, traces, strict=True)}
    assert {name: difference for name, difference in compared.items() if difference is not None} == {}


def test_command_line_prints_only_json(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps(SCENARIOS[0]), encoding="utf-8")
    done = subprocess.run([sys.executable, str(HERE / "drive.py"), str(file)], capture_output=True, text=True, check=True, cwd=tmp_path)
    (trace,) = json.loads(done.stdout)
    assert trace["name"] == SCENARIOS[0]["name"]
    assert first_difference(trace, GOLDEN[trace["name"]]) is None
