"""Ask real vLLM 0.27.0 about the cases: is what they expect of it what it does, and does it still make the mistakes that they call mistakes?

    python tests/conformance/check_cases.py --oracle-python ~/oracle/bin/python

Prints every difference and a count; exit status 1 when there is a difference. README.md in this folder says how to get an oracle.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conformance.cases import HERE, Json, differences, load_cases


def ask_oracle(scenarios: list[Json], python: str, driver: str) -> list[Json]:
    """The states that real vLLM goes through in each scenario."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(scenarios, file)
        file.flush()
        command = [python, driver, file.name, "--compact"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "0"})
    answers: list[Json] = json.loads(done.stdout)
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare what the cases expect of vLLM 0.27.0 with what it does.")
    parser.add_argument("--oracle-python", required=True, help="Python of the environment with vLLM 0.27.0")
    parser.add_argument("--oracle-driver", default=str(HERE / "oracle_driver.py"), help="default: oracle_driver.py beside this file")
    arguments = parser.parse_args()
    cases = load_cases()
    answers = ask_oracle([case.scenario for case in cases], arguments.oracle_python, arguments.oracle_driver)
    lines: list[str] = []
    for case, answer in zip(cases, answers, strict=True):
        lines += differences(case.name, answer["steps"], case.seen_on_vllm)
        if case.compat_expected is not None and not differences(case.name, answer["steps"], case.expected):
            lines.append(f"{case.name}: called a mistake of vLLM, but vLLM does what is expected here")
    print("\n".join(lines))
    print(f"{len(cases)} scenarios, {sum(len(case.seen_on_vllm) for case in cases)} expectations, {len(lines)} differences")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
