"""Random scenarios in the format of the recorded ones: one per seed and family, the same on every machine."""

from __future__ import annotations

from random import Random

from tests.conformance.compare import Json
from tests.conformance.random_config import longest_that_fits, random_groups, random_keys, random_num_blocks, typical_length, weighted
from tests.conformance.random_manager import ManagerOperations
from tests.conformance.random_pool import random_pool_scenario
from tests.conformance.random_prompts import Prompts
from tests.conformance.random_scheduler import SchedulerOperations, random_scheduler_keys
from tests.conformance.random_twins import plan_twins

# What is drawn, and how often when no family is asked for.
FAMILIES = {"attention": 0.24, "mamba": 0.22, "special": 0.12, "scheduler": 0.22, "async": 0.14, "pool": 0.06}


def random_scenario(seed: int, number: int, operations: int = 30, family: str | None = None) -> Json:
    """Scenario `number` of the sequence that `seed` and `family` stand for.

    Families: `attention` (full, MLA and sliding-window groups), `mamba` (with others), `special` (chunked local, R-SWA, cross, sink, with others), all three on
    the manager; `scheduler` and `async` (any groups on the scheduler); `pool`.
    """
    random = Random(f"{seed}/{family}/{number}")
    chosen = family if family is not None else weighted(random, FAMILIES)
    scenario: Json = {"name": f"random {seed}/{chosen}/{number}"}
    if chosen == "pool":
        return scenario | random_pool_scenario(random, operations)
    on_scheduler = chosen in ("scheduler", "async")
    if on_scheduler:
        scenario["mode"] = "scheduler"
        if chosen == "async":
            scenario["async"] = True
    groups = weighted(random, {"attention": 0.5, "mamba": 0.32, "special": 0.18}) if on_scheduler else chosen
    random_groups(random, groups, scenario)
    random_keys(random, scenario)
    length = typical_length(random, scenario)
    if on_scheduler:
        random_scheduler_keys(random, scenario, length)
    limit = 8192
    if random.random() < 0.2:
        scenario["max_model_len"] = length + random.randint(1, 2 * length)
        limit = scenario["max_model_len"] - 1 if random.random() < 0.97 else scenario["max_model_len"] + 2
    scenario["num_blocks"] = random_num_blocks(random, scenario, length)
    if random.random() < 0.9:
        limit = min(limit, longest_that_fits(scenario, length))
    prompts = Prompts(random, length, limit)
    draw = SchedulerOperations(random, scenario, prompts) if on_scheduler else ManagerOperations(random, scenario, prompts)
    if isinstance(draw, ManagerOperations) and random.random() < 0.3:
        plan_twins(draw)
    scenario["ops"] = [draw.operation() for _ in range(operations)]
    return scenario
