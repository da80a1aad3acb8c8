"""The engine's block stack beside vLLM's own: time per row, and the ratio.

    python -m tests.bench.bench_vs_vllm --oracle-python PATH [--rounds 3] [--repeats 3]

PATH is the Python of an environment with vLLM 0.27.0 (tests/conformance/README.md says how to make one). Both sides run the same program
(`block_stack.py`) alternately, each time in a fresh process; best times are compared. Below the table stands what an operation costs in pools of
1,000, 10,000 and 100,000 blocks here. Exit code 1 if the two sides decided differently.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench import bench_core

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = {"engine": "tests/conformance/bench_adapter.py", "vLLM": "tests/conformance/vllm_bench_adapter.py"}


def run_side(python: str, adapter: str, num_repeats: int) -> dict[str, Any]:
    """One fresh process: the times of each row in seconds, and the digests of its decisions."""
    command = [python, "tests/bench/block_stack.py", adapter, str(num_repeats)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oracle-python", required=True, help="Python of an environment with vLLM 0.27.0")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of each side")
    parser.add_argument("--repeats", type=int, default=3, help="repeats in each process")
    options = parser.parse_args()
    pythons = {"engine": sys.executable, "vLLM": options.oracle_python}
    best: dict[str, dict[str, float]] = {side: {} for side in ADAPTERS}
    decisions: set[str] = set()
    for _ in range(options.rounds):
        for side, adapter in ADAPTERS.items():
            result = run_side(pythons[side], adapter, options.repeats)
            decisions.update(result["decisions"])
            for row, times in result["times"].items():
                best[side][row] = min([best[side].get(row, float("inf")), *times])
    print(f"{'best time, ms':<40}{'engine':>10}{'vLLM':>10}{'ratio':>8}")
    for row, ours in best["engine"].items():
        theirs = best["vLLM"][row]
        print(f"{row:<40}{ours * 1e3:>10.3f}{theirs * 1e3:>10.3f}{ours / theirs:>8.2f}")
    same = len(decisions) == 1
    print(f"\nboth sides decided {'the same' if same else 'DIFFERENTLY'}\n")
    bench_core.main()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
