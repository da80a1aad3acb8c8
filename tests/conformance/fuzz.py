"""Random scenarios through real vLLM and through this engine; a difference is shrunk to a minimal scenario and printed.

    python tests/conformance/fuzz.py --oracle-python PYTHON --oracle-driver tests/conformance/oracle_driver.py --seed 1 --count 300

README.md beside this file says how to set up PYTHON. The exit status is 1 if any scenario differs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conformance.compare import Difference, Json, first_difference
from tests.conformance.coverage_report import Coverage
from tests.conformance.random_scenario import FAMILIES, random_scenario
from tests.conformance.shrink import shrinking

HERE = Path(__file__).resolve().parent


class Runner:
    """A driver program: scenarios in a file, their runs on standard output."""

    def __init__(self, command: list[str], seconds: float) -> None:
        self.command = command
        self.seconds = seconds

    def start(self, scenarios: Path, output: Path) -> subprocess.Popen[bytes]:
        command = [str(scenarios) if part == "{}" else part for part in self.command]
        with output.open("wb") as stream:
            return subprocess.Popen(command, stdout=stream, stderr=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": "0"})

    def finish(self, process: subprocess.Popen[bytes], output: Path) -> list[Json]:
        try:
            _, errors = process.communicate(timeout=self.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise SystemExit(f"{self.command[0]} took longer than {self.seconds:.0f} s: give --seconds, or a smaller --batch") from None
        if process.returncode:
            raise SystemExit(f"{' '.join(self.command)} ended with status {process.returncode}:\n{errors.decode(errors='replace')[-2000:]}")
        found: list[Json] = json.loads(output.read_bytes())
        return found


class Fuzzer:
    """Runs scenarios on both sides at the same time, in batches."""

    def __init__(self, ours: Runner, oracle: Runner, batch: int) -> None:
        self.ours = ours
        self.oracle = oracle
        self.batch = batch

    def run(self, scenarios: list[Json], sides: str = "both") -> list[tuple[Json, Json]]:
        """Our run and vLLM's of every scenario. `sides` can be `oracle`, then ours is the oracle's as well."""
        pairs: list[tuple[Json, Json]] = []
        for start in range(0, len(scenarios), self.batch):
            with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
                file, our_file, their_file = (Path(folder, name) for name in ("scenarios.json", "ours.json", "oracle.json"))
                file.write_text(json.dumps(scenarios[start : start + self.batch]), encoding="utf-8")
                theirs_running = self.oracle.start(file, their_file)
                ours_running = self.ours.start(file, our_file) if sides == "both" else None
                ours = self.ours.finish(ours_running, our_file) if ours_running is not None else None
                theirs = self.oracle.finish(theirs_running, their_file)
            pairs += zip(ours if ours is not None else theirs, theirs, strict=True)
        return pairs

    def differences(self, scenarios: list[Json]) -> list[Difference | None]:
        return [first_difference(ours, theirs) for ours, theirs in self.run(scenarios)]

    def minimal(self, found: list[tuple[Json, Difference]], rounds: int) -> list[tuple[Json, Difference]]:
        """The scenarios shrunk, each to one with a difference of the same kind. They are shrunk side by side: each call of the drivers serves all."""
        running = {number: shrinking(scenario, rounds, difference.step) for number, (scenario, difference) in enumerate(found)}
        smallest = [scenario for scenario, _ in found]
        proposed: dict[int, list[Json]] = {}
        verdicts: dict[int, list[bool] | None] = dict.fromkeys(running)
        while running:
            for number, steps in list(running.items()):
                verdict = verdicts[number]
                try:
                    proposed[number] = next(steps) if verdict is None else steps.send(verdict)
                except StopIteration as end:
                    smallest[number] = end.value
                    del running[number]
                    proposed.pop(number, None)
            differences = iter(self.differences([scenario for batch in proposed.values() for scenario in batch]))
            for number, batch in proposed.items():
                kind = found[number][1].kind
                verdicts[number] = [difference is not None and difference.kind == kind for difference in islice(differences, len(batch))]
            tried = sum(map(len, proposed.values()))
            print(f"  {tried} candidates tried, {len(running)} scenarios still shrinking", file=sys.stderr, flush=True)
        return [(scenario, after or before) for scenario, after, (_, before) in zip(smallest, self.differences(smallest), found, strict=True)]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random scenarios through real vLLM and through this engine.")
    parser.add_argument("--oracle-python", required=True, help="Python of the environment with vLLM 0.27.0")
    parser.add_argument("--oracle-driver", default=str(HERE / "oracle_driver.py"), help="default: oracle_driver.py beside this file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300, help="scenarios")
    parser.add_argument("--operations", type=int, default=30, help="operations of each")
    parser.add_argument("--family", choices=list(FAMILIES), help="only scenarios of this kind")
    parser.add_argument("--scenarios", type=Path, help="compare the scenarios of this file instead of random ones")
    parser.add_argument("--batch", type=int, default=400, help="scenarios in one call of the drivers")
    parser.add_argument("--seconds", type=float, default=900, help="time that one call may take")
    parser.add_argument("--shrink", type=int, default=5, metavar="N", help="differences to shrink; of the others only the first step is printed")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of shrinking, each at most two calls of the drivers")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the scenarios that differ, the shrunk ones first")
    parser.add_argument("--record", type=Path, nargs=2, metavar=("SCENARIOS", "TRACES"), help="write all scenarios and vLLM's runs, compressed if named .gz")
    parser.add_argument("--coverage", action="store_true", help="say what the scenarios reached in vLLM")
    parser.add_argument("--only-oracle", action="store_true", help="do not run this engine: for --coverage and --record")
    return parser.parse_args(words)


def write(path: Path, value: list[Json]) -> None:
    text = "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in value) + "\n]\n"
    # A fixed time, so that the same content gives the same file.
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())


def read(path: Path) -> list[Json]:
    data = path.read_bytes()
    found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found if isinstance(found, list) else [found]


def main() -> int:
    options = arguments()
    ours = Runner([sys.executable, str(HERE / "drive.py"), "{}"], options.seconds)
    oracle = Runner([options.oracle_python, options.oracle_driver, "{}", "--compact"], options.seconds)
    fuzzer = Fuzzer(ours, oracle, options.batch)
    if options.scenarios is not None:
        scenarios = read(options.scenarios)
    else:
        scenarios = [random_scenario(options.seed, number, options.operations, options.family) for number in range(options.count)]
    coverage = Coverage()
    found: list[tuple[Json, Difference]] = []
    traces: list[Json] = []
    for start in range(0, len(scenarios), options.batch):
        part = scenarios[start : start + options.batch]
        for scenario, (our, their) in zip(part, fuzzer.run(part, "oracle" if options.only_oracle else "both"), strict=True):
            coverage.add(scenario, their)
            if options.record is not None:
                traces.append(their)
            difference = first_difference(our, their)
            if difference is not None:
                found.append((scenario, difference))
        print(f"{start + len(part)} of {len(scenarios)} scenarios, {len(found)} differ", file=sys.stderr, flush=True)
    if options.coverage:
        print(coverage.text())
    if options.record is not None:
        write(options.record[0], scenarios)
        write(options.record[1], traces)
    found.sort(key=lambda pair: pair[1].step)
    smallest = fuzzer.minimal(found[: options.shrink], options.rounds) if options.shrink else []
    for (scenario, _), (small, difference) in zip(found, smallest, strict=False):
        print(f"{json.dumps(small)}\n{scenario.get('name')}: {difference}\n")
    for scenario, difference in found[len(smallest) :]:
        print(f"{scenario.get('name')}: {difference}\n")
    kept = [scenario for scenario, _ in (*smallest, *found)]
    if options.keep is not None:
        write(options.keep, kept)
    print(f"{len(scenarios)} scenarios, {sum(len(scenario['ops']) for scenario in scenarios)} operations, {len(found)} differ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
