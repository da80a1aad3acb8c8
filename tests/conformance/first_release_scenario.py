"""Random scenarios for vLLM's first release: requests of one sequence, of several samples, of beams; arrivals, aborts, tiny pools with and without swap space.

A scenario is plain JSON. `config`: sizes, named as in PaperConfig. `requests`: `id`, `arrival` (the iteration before which it comes, from 1), `num_prompt`,
`max_tokens`, and either
`lengths`, one number per sample: the output with which a stop token comes, or none if it is max_tokens; or `beams`: for each selection, in the order of the
living beams, [parent, ends]. Selection 0 follows the prompt, where every beam has itself as parent. `aborts`: `id` and `step`. `counts`: whose count of the
blocks that a step needs the engine is run with, "ours" (exact) where both must agree, else "one block per sequence".
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

FAMILIES = ("single", "samples", "beams", "mixed", "blocks of one token", "roomy")


def random_scenario(seed: int, number: int) -> Json:
    """Scenario `number` of `seed`, the same on every machine."""
    rng = random.Random(f"{seed}/{number}")
    family = FAMILIES[number % len(FAMILIES)]
    block_size = 1 if family == "blocks of one token" else rng.choice([2, 3, 4])
    requests = [_request(rng, family, chr(ord("A") + i)) for i in range(rng.randint(3, 7))]
    requests.sort(key=lambda request: request["arrival"])
    for i, request in enumerate(requests):
        request["id"] = chr(ord("A") + i)
    largest = max(_num_blocks_at_most(request, block_size) for request in requests)
    total = sum(_num_blocks_at_most(request, block_size) for request in requests)
    single = family == "single"
    config = {
        "num_blocks": total + 4 if family == "roomy" else largest + rng.randint(0, 3),
        "block_size": block_size,
        "num_cpu_blocks": 0 if single else rng.choice([total, total, total, total, 6]),
        "max_num_seqs": rng.choice([2, 3, 8]) if single else 64,
        "max_num_batched_tokens": rng.choice([24, 32]) if single else 256,
        "watermark": rng.choice([0.0, 0.0, 0.1, 0.25]),
    }
    aborts = [{"id": request["id"], "step": request["arrival"] + rng.randint(0, 6)} for request in requests if rng.random() < 0.1]
    counts = "ours" if family in ("blocks of one token", "roomy") else "one block per sequence"
    return {"name": f"{family} {number}", "config": config, "requests": requests, "aborts": aborts, "counts": counts}


def _request(rng: random.Random, family: str, name: str) -> Json:
    request: Json = {"id": name, "arrival": rng.randint(1, 5), "num_prompt": rng.randint(1, 8), "max_tokens": rng.choice([1, 4, 7, 9, 12])}
    kind = {"single": "single", "samples": "samples", "beams": "beams"}.get(family) or rng.choice(["single", "samples", "beams"])
    if kind == "beams":
        request["beams"] = _beams(rng, rng.randint(2, 4), request["max_tokens"])
    else:
        request["lengths"] = [rng.randint((request["max_tokens"] + 1) // 2, request["max_tokens"]) for _ in range(1 if kind == "single" else rng.randint(2, 4))]
    return request


def _beams(rng: random.Random, width: int, max_tokens: int) -> list[list[list[Any]]]:
    """Whoever has a child keeps its place with one; the places of the others go to further children. At most one child of a parent ends."""
    selections: list[list[list[Any]]] = []
    living = width
    for number in range(max_tokens):
        survivors = rng.sample(range(living), rng.randint(1, living)) if number else list(range(living))
        parents = [place if place in survivors else rng.choice(survivors) for place in range(living)]
        ended: set[int] = set()
        selection: list[list[Any]] = []
        for parent in parents:
            origin = parent if number else 0
            ends = origin not in ended and rng.random() < 0.06
            if ends:
                ended.add(origin)
            selection.append([parent, ends])
        selections.append(selection)
        living -= sum(ends for _, ends in selection)
        if not living:
            break
    return selections


def width_of(request: Json) -> int:
    """Its sequences."""
    return len(request["lengths"]) if "lengths" in request else len(request["beams"][0])


def _num_blocks_at_most(request: Json, block_size: int) -> int:
    """As many as it can ever hold."""
    num_tokens, num_shared = request["num_prompt"] + request["max_tokens"], request["num_prompt"] // block_size
    return num_shared + width_of(request) * (-(-num_tokens // block_size) - num_shared)
