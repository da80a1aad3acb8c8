"""Random operations on the scheduler: it decides by itself, so a scenario is arrivals, steps and disturbances."""

from __future__ import annotations

from random import Random

from tests.conformance.compare import Json
from tests.conformance.random_config import align_group, block_sizes, weighted
from tests.conformance.random_prompts import Prompts


def random_scheduler_keys(random: Random, scenario: Json, length: int) -> None:
    longest = max(block_sizes(scenario))
    scenario.pop("max_in_flight", None)
    if random.random() < 0.6:
        scenario["max_num_seqs"] = random.choice([1, 2, 2, 3, 4, 4, 8])
    if random.random() < 0.55:
        budget = random.choice([longest, longest + 1, 2 * longest, 2 * longest + 1, 3 * longest, length, 2 * length, random.randint(1, 2 * length)])
        if align_group(scenario) is not None and random.random() < 0.8:
            budget = max(budget, longest)
        scenario["max_batched_tokens"] = budget
    if random.random() < 0.25:
        scenario["long_prefill_threshold"] = random.choice([1, 2, longest, longest, longest + 1, 2 * longest, max(1, length // 2)])
    if random.random() < 0.35:
        scenario["policy"] = random.choice(["priority", "priority", "fcfs"])
    if random.random() < 0.35:
        scenario["reserve_full_isl"] = random.random() < 0.2
    if random.random() < 0.2:
        scenario["first_output_token"] = random.choice([0, 1, 5, 100])


class SchedulerOperations:
    """Draws the operations of one scenario in scheduler mode."""

    def __init__(self, random: Random, scenario: Json, prompts: Prompts) -> None:
        self.random = random
        self.scenario = scenario
        self.prompts = prompts
        self.asynchronous: bool = scenario.get("async", False)
        self.deepest = random.choice([1, 2, 2, 3]) if self.asynchronous else random.choice([1, 1, 1, 1, 1, 2])
        chunks = align_group(scenario) is not None or "max_batched_tokens" in scenario or scenario.get("long_prefill_threshold")
        if self.asynchronous and chunks and random.random() < 0.7:  # the driver samples too early if a prompt's chunks are open together
            self.deepest = 1
        self.single = random.random() < (0.85 if self.asynchronous else 0.15)
        self.open = 0
        self.names: list[str] = []
        self.tokens: list[list[int]] = []
        self.steps: dict[str, int] = {}  # since it was added, of requests that were not aborted
        self.ends: dict[str, int] = {}  # steps after which a request alone is done
        self.most = random.choice([3, 5, 8, 12])
        self.longest_output = random.choice([2, 4, 8, 20])
        self.gives = random.random() < (0.35 if not chunks else 0.04 if self.asynchronous else 0.25)
        self.disturbs = random.choice([0.3, 1.0, 2.0])

    def operation(self) -> Json:
        random = self.random
        if not self.names:
            return self.add()
        busy = sum(steps < self.ends[name] for name, steps in self.steps.items())
        arrivals = (4.0 if len(self.names) < 3 else 1.6) if len(self.names) < self.most else 0.2
        if busy < 2:
            arrivals = max(arrivals, 12.0 if busy == 0 else 3.0)
        kind = weighted(random, {"step": 8.0, "add": arrivals, "abort": 0.35 * self.disturbs, "reset": 0.3 * self.disturbs})
        if kind == "add":
            return self.add()
        if kind == "abort":
            name = random.choice(self.names[-4:]) if random.random() < 0.9 else random.choice(self.names)
            self.steps.pop(name, None)
            return {"op": "abort", "id": name}
        if kind == "reset":
            return {"op": "reset", "running": True} if random.random() < 0.6 else random.choice([{"op": "reset"}, {"op": "reset", "running": False}])
        return self.step()

    def step(self) -> Json:
        random = self.random
        if not self.single and random.random() < 0.85:
            self.count()
            return self.outputs({"op": "sched"})
        if self.open and (self.open >= self.deepest or random.random() < 0.5):
            self.open -= 1
            return self.outputs({"op": "update_only"})
        if not self.open and random.random() < 0.004:
            return {"op": "update_only"}
        self.open += 1
        self.count()
        return {"op": "schedule_only"}

    def count(self) -> None:
        for name in self.steps:
            self.steps[name] += 1

    def outputs(self, op: Json) -> Json:
        """Sampled tokens of the operation's own, for requests that should be past their prefill."""
        random = self.random
        ready = [name for name, steps in self.steps.items() if steps >= 2]
        if not self.gives or not ready or random.random() < 0.5:
            return op
        given = {}
        for name in random.sample(ready, random.randint(1, min(2, len(ready)))):
            several = 0.03 if self.asynchronous else 0.3
            given[name] = [random.randrange(10) for _ in range(random.choice([2, 2, 3]) if random.random() < several else 1)]
            if random.random() < 0.03:
                given[name] = []
        return {**op, "out": given}

    def add(self) -> Json:
        random = self.random
        name = f"R{len(self.names)}"
        op, tokens = self.prompts.operation(name, self.tokens)
        if self.tokens and random.random() < 0.12:  # goes on after an answer counted from the start
            first = self.scenario.get("first_output_token", 9001)
            tokens = [*random.choice(self.tokens), *range(first, first + random.randint(1, 4)), random.randrange(10)]
            tokens = tokens[: self.prompts.limit]
            op = {key: value for key, value in op.items() if key not in ("n", "base")} | {"tokens": tokens}
        if random.random() < 0.85:
            op["out_max"] = random.randint(1, self.longest_output)
        if random.random() < (0.8 if self.scenario.get("policy") == "priority" else 0.05):
            op["priority"] = random.randint(0, 3)
        if random.random() < 0.12:
            op["arrival"] = random.choice([0, len(self.names), random.randint(0, 10)])
        if "n" in op and len(self.names) < 2 and random.random() < 0.3:  # what is sampled goes on as other prompts do
            self.scenario["first_output_token"] = op.get("base", 0) + op["n"]
        self.names.append(name)
        self.tokens.append(tokens)
        self.steps[name] = 0
        self.ends[name] = op.get("out_max", 1000) + len(tokens) // self.scenario.get("max_batched_tokens", 8192) + 1
        return op
