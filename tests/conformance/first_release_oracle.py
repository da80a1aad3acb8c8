"""vLLM's first release itself, driven through scenarios (see first_release_scenario), and what it did, iteration by iteration.

    python -m tests.conformance.first_release_oracle --vllm-source DIRECTORY --record tests/conformance/first_release_runs.json.gz

`DIRECTORY` holds the unpacked source distribution of vLLM 0.1.0 (or 0.0.1 or 0.1.1, whose scheduler and block manager are the same); nothing of it is in
this repository. Its LLMEngine, Scheduler, BlockSpaceManager, SequenceGroup and Sequence run as they are; stand-ins take the places of the model's worker,
the tokenizer and the configuration classes, so that neither CUDA nor Ray is needed.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.conformance.first_release_partings import PARTINGS
from tests.conformance.first_release_replay import first_difference
from tests.conformance.first_release_scenario import Json, random_scenario, width_of

STOP = 0


# ---------------------------------------------------------------------- the release, without what needs a GPU
def load(source: Path) -> ModuleType:
    """The module vllm.engine.llm_engine of the release in `source`, with stand-ins around it."""
    root = source / "vllm"
    for name, folder in (("vllm", root), ("vllm.engine", root / "engine"), ("vllm.worker", root / "worker")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    stand_ins = {
        "psutil": [],
        "vllm.config": ["CacheConfig", "ModelConfig", "ParallelConfig", "SchedulerConfig"],
        "vllm.engine.arg_utils": ["EngineArgs"],
        "vllm.engine.ray_utils": ["DeviceID", "initialize_cluster", "ray"],
        "vllm.engine.tokenizer_utils": ["detokenize_incrementally", "get_tokenizer"],
        "vllm.outputs": ["RequestOutput"],
        "vllm.worker.worker": ["Worker"],
    }
    for name, symbols in stand_ins.items():
        module = ModuleType(name)
        for symbol in symbols:
            setattr(module, symbol, SimpleNamespace)
        sys.modules[name] = module
    sys.modules["vllm.engine.tokenizer_utils"].detokenize_incrementally = lambda *args, **kwargs: ("", "")  # type: ignore[attr-defined]
    sys.modules["vllm.outputs"].RequestOutput = SimpleNamespace(from_seq_group=lambda group: group)  # type: ignore[attr-defined]
    return importlib.import_module("vllm.engine.llm_engine")


class FirstRelease:
    """One engine of the release, whose worker dictates the tokens of a scenario."""

    def __init__(self, llm_engine: ModuleType, scenario: Json) -> None:
        config = scenario["config"]
        self.specs = {request["id"]: request for request in scenario["requests"]}
        self.sequence_module = sys.modules["vllm.sequence"]
        self.engine = llm_engine.LLMEngine.__new__(llm_engine.LLMEngine)
        self.engine.cache_config = SimpleNamespace(
            block_size=config["block_size"], num_gpu_blocks=config["num_blocks"], num_cpu_blocks=config["num_cpu_blocks"]
        )
        self.engine.scheduler_config = SimpleNamespace(max_num_seqs=config["max_num_seqs"], max_num_batched_tokens=config["max_num_batched_tokens"])
        self.engine.tokenizer = SimpleNamespace(eos_token_id=STOP)
        self.engine.seq_counter = sys.modules["vllm.utils"].Counter()
        scheduler_class = sys.modules["vllm.core.scheduler"].Scheduler
        self.scheduler = self.engine.scheduler = scheduler_class(self.engine.scheduler_config, self.engine.cache_config, False)
        self.manager = self.scheduler.block_manager = sys.modules["vllm.core.block_manager"].BlockSpaceManager(
            config["block_size"], config["num_blocks"], config["num_cpu_blocks"], watermark=config["watermark"]
        )
        self.engine._run_workers = self._execute
        self.groups: dict[str, Any] = {}
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._watched_schedule
        self.iteration: Json = {}

    def add(self, request: Json) -> None:
        """The request arrives; its arrival time is its place among all."""
        params = sys.modules["vllm.sampling_params"].SamplingParams
        beams = "beams" in request
        sampling = params(n=width_of(request), max_tokens=request["max_tokens"], use_beam_search=beams, temperature=0.0 if beams else 1.0)
        if not beams and width_of(request) == 1:
            sampling.temperature = 0.0
        prompt = list(range(100, 100 + request["num_prompt"]))
        self.engine.add_request(request["id"], "", sampling, prompt, float(len(self.groups)))
        self.groups[request["id"]] = self.scheduler.waiting[-1]

    def step(self) -> Json:
        """One iteration of LLMEngine.step. Returns what was planned and the state after it."""
        self.engine.step()
        return {**self.iteration, "after": self._state()}

    def _watched_schedule(self) -> Any:
        groups, outputs = self._schedule()
        self.iteration = {
            "prompts": [group.request_id for group in groups if group.is_prompt],
            "decodes": [group.request_id for group in groups if not group.is_prompt],
            "swap_out": [[*pair] for pair in outputs.blocks_to_swap_out.items()],
            "swap_in": [[*pair] for pair in outputs.blocks_to_swap_in.items()],
            "copies": [[source, destination] for source, destinations in outputs.blocks_to_copy.items() for destination in destinations],
            "planned": self._state(),
        }
        return groups, outputs

    def _execute(self, method: str, *, seq_group_metadata_list: list[Any], **pairs: Any) -> dict[int, Any]:
        return {answer.seq_id: answer for group in seq_group_metadata_list for answer in self._answers(group)}

    def _answers(self, metadata: Any) -> list[Any]:
        spec, group = self.specs[metadata.request_id], self.groups[metadata.request_id]
        living = group.get_seqs(self.sequence_module.SequenceStatus.RUNNING)
        answers = []
        for place, sequence in enumerate(living):
            number, parent = sequence.get_output_len(), sequence
            if "beams" in spec:
                parent_place, ends = spec["beams"][number][place]
                parent, token = living[parent_place], STOP if ends else 10 + place
            else:
                token = STOP if number + 1 == spec["lengths"][group.seqs.index(sequence)] else 10
            answers.append(self.sequence_module.SequenceOutputs(sequence.seq_id, parent.seq_id, token, {token: 0.0}))
        return answers

    def _state(self) -> Json:
        """Tables of every sequence that goes on, in its group's order; free lists as they stand, the next block to be taken last; reference counts."""
        tables = {}
        for name, group in self.groups.items():
            living = [sequence for sequence in group.seqs if not sequence.is_finished() and sequence.seq_id in self.manager.block_tables]
            if living:
                tables[name] = [[block.block_number for block in self.manager.block_tables[sequence.seq_id]] for sequence in living]
        scheduler, (gpu, cpu) = self.scheduler, (self.manager.gpu_allocator, self.manager.cpu_allocator)
        blocks = {(block.device.name, block.block_number): block for table in self.manager.block_tables.values() for block in table}
        lists = {name: [group.request_id for group in getattr(scheduler, name)] for name in ("waiting", "running", "swapped")}
        return {
            "tables": tables,
            "free": [block.block_number for block in gpu.free_blocks],
            "cpu_free": [block.block_number for block in cpu.free_blocks],
            "refs": sorted([number, block.ref_count] for (device, number), block in blocks.items() if device == "GPU"),
            "cpu_refs": sorted([number, block.ref_count] for (device, number), block in blocks.items() if device == "CPU"),
            **lists,
        }


# ---------------------------------------------------------------------- a run, up to where the two engines part on purpose
def run(llm_engine: ModuleType, scenario: Json, *, to_the_end: bool = False, max_iterations: int = 60) -> Json:
    """All iterations of a scenario, until everybody is done or (unless `to_the_end`) just before something happens that engine/paper does otherwise on purpose;
    `ended` then says what."""
    release = FirstRelease(llm_engine, scenario)
    pending = sorted(scenario["requests"], key=lambda request: request["arrival"])
    iterations: list[Json] = []
    for step in range(1, max_iterations + 1):
        while pending and pending[0]["arrival"] <= step:
            release.add(pending.pop(0))
        for abort in scenario["aborts"]:
            if abort["step"] == step:
                release.engine.abort_request(abort["id"])
        if not release.engine.has_unfinished_requests():
            if not pending:
                return {"ended": None, "iterations": iterations}
            iterations.append({})
            continue
        before = release._state()
        try:
            iteration = release.step()
        except (RuntimeError, ValueError, AssertionError, KeyError, IndexError) as error:
            return {"ended": f"{type(error).__name__}: {error}", "iterations": iterations}
        reason = None if to_the_end else _parting(release, before, iteration)
        if reason is not None:
            return {"ended": reason, "iterations": iterations}
        iterations.append(iteration)
    return {"ended": "stopped", "iterations": iterations}


def _parting(release: FirstRelease, before: Json, iteration: Json) -> str | None:
    planned, config = iteration["planned"], release.engine.scheduler_config
    preempted = [name for name in before["running"] if name in planned["waiting"] or name in planned["swapped"]]
    recomputed = [name for name in preempted if name in planned["waiting"]]
    if any(len(release.groups[name].seqs) > 1 for name in recomputed):
        return "a group of which one sequence is left is recomputed"
    if preempted and iteration["swap_in"]:
        return "a group comes back beside a preemption"
    if not preempted and not iteration["prompts"] and not iteration["decodes"]:
        return "nobody runs"
    if any(release.groups[name].seqs[0].get_len() > config.max_num_batched_tokens for name in planned["waiting"]):
        return "a recomputation is larger than an iteration"
    ended = False
    for name in [*iteration["decodes"], *iteration["prompts"]]:
        spec, length = release.specs[name], max(sequence.get_output_len() for sequence in release.groups[name].seqs) - 1
        drops = "beams" in spec and name in iteration["decodes"] and len({parent for parent, _ in spec["beams"][length]}) < len(spec["beams"][length])
        if ended and drops:
            return "a beam is dropped in the iteration in which an earlier group ends a sequence"
        ended = ended or len(iteration["after"]["tables"].get(name, [])) < len(planned["tables"][name])
    return None


def symbols(source: Path) -> list[str]:
    """Names of the release's classes, their methods and attributes, its functions, and of its cache kernels: what our docstrings and screens may refer to."""
    names: set[str] = set()
    for path in sorted((source / "vllm").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ClassDef):
                names.add(node.name)
                names |= {f"{node.name}.{name}" for name in _members(node)}
    kernels = re.findall(r'm\.def\(\s*"(\w+)"', (source / "csrc" / "cache.cpp").read_text())
    return sorted(names | {f"cache_ops.{name}" for name in kernels})


def _members(node: ast.ClassDef) -> set[str]:
    stores = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    values = [target.id for n in node.body if isinstance(n, ast.Assign) for target in n.targets if isinstance(target, ast.Name)]
    return {*stores, *values, *(n.name for n in node.body if isinstance(n, ast.FunctionDef))}


def main() -> int:
    """Look for differences in random runs, and record them with the partings and the release's names. The exit status is 1 if there are any."""
    parser = argparse.ArgumentParser(description="Run random scenarios on vLLM's first release, compare engine/paper with it, and record what the release did.")
    parser.add_argument("--vllm-source", type=Path, required=True, help="unpacked source distribution of vLLM 0.1.0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300, help="random scenarios (default 300)")
    parser.add_argument("--record", type=Path, help="file to write, .json.gz: these runs, those of first_release_partings, the release's names")
    arguments = parser.parse_args()
    llm_engine = load(arguments.vllm_source)
    scenarios = [random_scenario(arguments.seed, number) for number in range(arguments.count)]
    runs = [{"scenario": scenario, "run": run(llm_engine, scenario)} for scenario in scenarios]
    found = [line for recorded in runs for line in first_difference(recorded)]
    num_iterations = sum(len(recorded["run"]["iterations"]) for recorded in runs)
    print("\n".join([*found, f"{len(runs)} scenarios, {num_iterations} iterations, {len(found)} differences"]))
    if arguments.record is not None:
        partings = {name: run(llm_engine, scenario, to_the_end=True, max_iterations=8) for name, scenario in PARTINGS.items()}
        record = {"runs": runs, "partings": partings, "symbols": symbols(arguments.vllm_source)}
        text = json.dumps(record, separators=(",", ":"), sort_keys=True)
        arguments.record.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
