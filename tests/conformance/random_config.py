"""Random configurations for conformance scenarios: groups, block sizes, pool, and the keys that go with them.

Everything is drawn from the given generator alone, so a seed gives the same configuration on every machine. Most configurations are ones that vLLM 0.27.0
accepts; a few are not, because how a configuration is refused is compared, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import TypeVar

from tests.conformance.compare import Json

T = TypeVar("T")


def weighted(random: Random, choices: dict[T, float]) -> T:
    return random.choices(list(choices), list(choices.values()))[0]


def block_size_of(group: Json, scenario: Json) -> int:
    size: int = group.get("block_size", scenario.get("block_size", 16))
    return size


def block_sizes(scenario: Json) -> list[int]:
    return [block_size_of(group, scenario) for group in scenario.get("groups", [{"type": "full"}])]


def hash_block_size(scenario: Json) -> int:
    sizes = block_sizes(scenario)
    size: int = scenario.get("hash_block_size", sizes[0] if len(sizes) == 1 else math.gcd(*sizes))
    return size


def scheduler_block_size(scenario: Json) -> int:
    size: int = scenario.get("scheduler_block_size", math.lcm(*block_sizes(scenario)))
    return size


def align_group(scenario: Json) -> Json | None:
    """The first Mamba group if it runs in align mode: the one that the scheduler's chunks follow."""
    first = next((group for group in scenario.get("groups", []) if group["type"] == "mamba"), None)
    return first if first is not None and first.get("mode", "all") == "align" else None


def random_group(random: Random, kind: str, size: int) -> Json:
    group: Json = {"type": kind}
    if kind == "rswa":
        group["window"] = random.choice([1, 1, 2, 3, size, 2 * size])
    elif kind == "swa":
        group["window"] = random.choice([1, 2, size, size, size + 1, 2 * size, 2 * size, 3 * size, 2 * size + 1, 4 * size, random.randint(1, 4 * size)])
    elif kind == "chunked":
        group["chunk"] = random.choice([size, 2 * size, 2 * size, 3 * size, 4 * size]) if random.random() < 0.9 else random.randint(1, 3 * size)
    elif kind == "mamba":
        group["mode"] = weighted(random, {"align": 0.6, "all": 0.36, "none": 0.04})
        if random.random() < 0.25:
            group["spec_blocks"] = random.choice([1, 1, 2, 3])
    elif kind == "sink":
        group["sink"] = size * random.choice([1, 2])
    return group


def _kinds(random: Random, family: str) -> list[str]:
    count = weighted(random, {1: 0.22, 2: 0.4, 3: 0.26, 4: 0.12})
    if family == "attention":
        return random.choices(["full", "mla", "swa"], [4, 2, 4], k=count)
    if family == "mamba":
        return ["mamba", *random.choices(["full", "mla", "swa", "mamba", "rswa"], [5, 1.5, 1.5, 1.5, 0.3], k=count - 1)]
    first = weighted(random, {"chunked": 0.5, "rswa": 0.34, "cross": 0.14, "sink": 0.02})
    return [first, *random.choices(["full", "mla", "swa", "chunked", "rswa", "mamba"], [5, 1, 2, 2, 2, 0.7], k=count - 1)]


def _sizes(random: Random, kinds: Sequence[str]) -> list[int]:
    base = weighted(random, {1: 0.06, 2: 0.2, 3: 0.06, 4: 0.5, 8: 0.14, 16: 0.04})
    if "rswa" in kinds and random.random() < 0.7:
        base = random.choice([1, 2])
    if len(kinds) == 1 or random.random() < 0.5:
        return [base] * len(kinds)
    factors = [weighted(random, {1: 0.5, 2: 0.36, 3: 0.04, 4: 0.1}) for _ in kinds]
    if "mamba" in kinds and random.random() < 0.7:  # partial hits: a coarse Mamba group over finer attention
        coarse = random.choice([2, 2, 4])
        factors = [coarse if kind == "mamba" else (1 if kind == "swa" else random.choice([1, 1, 2 if coarse == 4 else 1, coarse])) for kind in kinds]
    if "chunked" in kinds:  # its blocks are as long as the granularity of hits, or lookup fails
        largest = max(factors)
        factors = [largest if kind == "chunked" else (factor if largest % factor == 0 else 1) for kind, factor in zip(kinds, factors, strict=True)]
    return [base * factor for factor in factors]


def random_groups(random: Random, family: str, scenario: Json) -> None:
    """Sets block_size, groups, enable_caching and the two derived block sizes."""
    kinds = _kinds(random, family)
    sizes = _sizes(random, kinds)
    groups = [random_group(random, kind, size) for kind, size in zip(kinds, sizes, strict=True)]
    if len(groups) > 2 and random.random() < 0.4:  # two groups of one spec are looked up together
        source, target = random.sample(range(len(groups)), 2)
        groups[target], sizes[target] = dict(groups[source]), sizes[source]
    random_order = list(range(len(groups)))
    random.shuffle(random_order)
    groups, sizes = [groups[index] for index in random_order], [sizes[index] for index in random_order]
    mamba_size = next((size for group, size in zip(groups, sizes, strict=True) if group["type"] == "mamba"), None)
    scenario["block_size"] = mamba_size if mamba_size is not None and random.random() < 0.85 else random.choice(sizes)
    for group, size in zip(groups, sizes, strict=True):
        if size != scenario["block_size"] or random.random() < 0.1:
            group["block_size"] = size
    if groups != [{"type": "full"}] or random.random() < 0.5:
        scenario["groups"] = groups
    kinds = [group["type"] for group in groups]
    none = any(group.get("mode") == "none" for group in groups)
    if random.random() < (0.9 if "cross" in kinds or none else 0.07):
        scenario["enable_caching"] = False
    distinct = {(*sorted(group.items()), size) for group, size in zip(groups, sizes, strict=True)}
    if scenario.get("enable_caching", True) and len(groups) > 1 and len(distinct) == 1 and random.random() < 0.97:
        groups[0]["type"] = "mla" if kinds[0] == "full" else "full"  # a hybrid needs two different specs
        for key in ("window", "chunk", "mode", "spec_blocks"):
            groups[0].pop(key, None)
    _derived_sizes(random, scenario)


def _derived_sizes(random: Random, scenario: Json) -> None:
    sizes = block_sizes(scenario)
    kinds = {group["type"] for group in scenario.get("groups", [{"type": "full"}])}
    caching = scenario.get("enable_caching", True)
    common = math.gcd(*sizes)
    align = align_group(scenario)
    finer = [size for size in range(1, common + 1) if common % size == 0]
    if len(sizes) == 1:
        if random.random() < (0.06 if caching else 0.2):
            scenario["hash_block_size"] = sizes[0] if caching and random.random() < 0.9 else random.choice([*finer, 2 * sizes[0]])
    elif random.random() < (0.65 if align is not None and len(set(sizes)) == 1 else 0.25):
        scenario["hash_block_size"] = random.choice(finer[:-1] if align is not None and len(finer) > 1 else finer) if random.random() < 0.97 else 2 * common
    if caching and align is not None and block_size_of(align, scenario) > hash_block_size(scenario) and random.random() < 0.9:
        for group in scenario["groups"]:  # window and chunked groups know no hits inside a block
            if group["type"] in ("swa", "chunked"):
                group["block_size"] = hash_block_size(scenario)
        sizes = block_sizes(scenario)
    least = math.lcm(*sizes)
    if random.random() < (0.02 if "chunked" in kinds else 0.18):
        scenario["scheduler_block_size"] = least * random.choice([1, 2, 2, 3, 4])
    if scheduler_block_size(scenario) % hash_block_size(scenario) and random.random() < 0.95:
        scenario.pop("hash_block_size", None)


def random_keys(random: Random, scenario: Json) -> None:
    """The keys that do not change the groups: eagle, retention, algorithm, events, lengths in flight."""
    groups = scenario.get("groups", [])
    kinds = {group["type"] for group in groups} or {"full"}
    if "chunked" not in kinds or random.random() < 0.03:
        if random.random() < 0.15:
            scenario["use_eagle"] = True
        if groups and random.random() < 0.12:
            random.choice(groups)["eagle"] = True
    unit = scheduler_block_size(scenario)
    if kinds & {"swa", "mamba"}:
        if random.random() < 0.3:
            scenario["retention_interval"] = random.choice([0, 0, unit, 2 * unit, 2 * unit, 3 * unit, 4 * unit])
    elif random.random() < 0.01:
        scenario["retention_interval"] = unit
    if random.random() < 0.15:
        scenario["hash_algo"] = "sha256"
    if random.random() < 0.08:
        scenario["events"] = False
    if random.random() < 0.2:
        scenario["watermark"] = random.choice([0.05, 0.1, 0.1, 0.2, 0.3, 0.5])
    if random.random() < (0.5 if kinds & {"swa", "chunked"} else 0.05):
        scenario["max_in_flight"] = random.choice([1, min(block_sizes(scenario)), 4, 8, 16, 32])


def typical_length(random: Random, scenario: Json) -> int:
    """Tokens that the scenario's longer prompts have, some blocks of the coarsest group."""
    longest = max(block_sizes(scenario))
    return max(4, min(int(longest * random.choice([2, 3, 3, 4, 4, 5, 6])), 96))


def blocks_of_group(group: Json, size: int, length: int, computed: int = 0) -> int:
    """Blocks that a request of `length` tokens holds in a group once `computed` of them are done (about)."""
    blocks = -(-length // size)
    kind = group["type"]
    if kind == "swa":
        return blocks - max(0, computed - group["window"] + 1) // size
    if kind == "chunked":
        return blocks - computed // group["chunk"] * group["chunk"] // size
    if kind == "mamba":
        extra: int = group.get("spec_blocks", 0)
        return 1 + extra + (1 if computed else 0) if group.get("mode", "all") == "align" else blocks + extra - max(0, computed - 1) // size
    return 0 if kind == "cross" else blocks


def random_num_blocks(random: Random, scenario: Json, length: int) -> int:
    """Room for about one, two or several requests of this length."""
    groups = scenario.get("groups", [{"type": "full"}])
    demand = sum(blocks_of_group(group, size, length) for group, size in zip(groups, block_sizes(scenario), strict=True))
    sink = sum(group.get("sink", 0) // size for group, size in zip(groups, block_sizes(scenario), strict=True))
    room = random.choice([random.uniform(0.8, 1.4), random.uniform(1.2, 2), random.uniform(1.5, 2.5), random.uniform(1.5, 3), random.uniform(2.5, 5)])
    return max(2, 1 + sink + round(demand * room))


def longest_that_fits(scenario: Json, length: int) -> int:
    """Tokens of the longest request that the pool has room for, at least one; not more than a few times `length`."""
    groups = scenario.get("groups", [{"type": "full"}])
    pairs = list(zip(groups, block_sizes(scenario), strict=True))
    for tokens in range(3 * length, 1, -1):
        if sum(blocks_of_group(group, size, tokens) for group, size in pairs) < scenario["num_blocks"]:
            return tokens
    return 1
