"""Drive the engine's block stack through conformance scenarios and print the states it goes through.

    python tests/conformance/drive.py SCENARIOS.json > out.json

Input and output are those of the recorded runs of vLLM beside this file: scenarios.json, golden_traces.json. The engine runs with compat "0.27.0". A
scenario that cannot be built ends with one step BUILD.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.core.compat import VLLM_0_27_0
from tests.conformance.manager_driver import ManagerDriver
from tests.conformance.names import Json
from tests.conformance.pool_driver import PoolDriver
from tests.conformance.scheduler_driver import SchedulerDriver

DRIVERS: dict[str, type[PoolDriver] | type[ManagerDriver]] = {
    "manager": ManagerDriver,
    "scheduler": SchedulerDriver,
    "pool": PoolDriver,
}


def run(scenario: Json, compat: str | None = VLLM_0_27_0) -> Json:
    """One scenario, from the fresh engine through all its operations. With `compat` None the engine does what is right where that release does not."""
    name = scenario.get("name", "?")
    try:
        driver = DRIVERS[scenario.get("mode", "manager")](scenario, compat)
    except Exception as error:
        empty: Json = {"free": [], "ref": {}, "map": {}}
        return {"name": name, "steps": [{"op": "BUILD", "error": f"{type(error).__name__}: {error}", "state": empty}]}
    steps: list[Json] = [{"op": "init", "state": driver.state()}]
    for op in scenario["ops"]:
        try:
            result = getattr(driver, f"op_{op['op']}")(op)
        except Exception as error:  # reported in the result: the run goes on
            result = {"error": f"{type(error).__name__}: {error}"}
        steps.append({"op": op, "result": result, "state": driver.state()})
    return {"name": name, "steps": steps}


def main() -> None:
    scenarios = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    json.dump([run(scenario) for scenario in (scenarios if isinstance(scenarios, list) else [scenarios])], sys.stdout)


if __name__ == "__main__":
    main()
