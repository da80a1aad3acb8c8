"""Scenarios in which engine/paper does on purpose something else than vLLM's first release: one for each row "different" of the table in engine/paper/README.md
that a run can show."""

from __future__ import annotations

from typing import Any

from tests.conformance.first_release_scenario import Json


def _request(name: str, num_prompt: int, *lengths: int, arrival: int = 1, max_tokens: int | None = None) -> Json:
    return {"id": name, "arrival": arrival, "num_prompt": num_prompt, "max_tokens": max_tokens or max(lengths), "lengths": list(lengths)}


def _scenario(*requests: Json, **config: Any) -> Json:
    sizes = {"num_blocks": 8, "block_size": 4, "num_cpu_blocks": 0, "max_num_seqs": 8, "max_num_batched_tokens": 64, "watermark": 0.0}
    counts = config.pop("counts", "ours")
    return {"config": {**sizes, **config}, "requests": list(requests), "aborts": [], "counts": counts}


_BEAMS = [[[0, False], [1, False]], [[0, False], [0, False]], [[0, False], [1, False]], [[0, False], [1, False]]]

PARTINGS: dict[str, Json] = {
    "there is room in the last block": _scenario(_request("A", 1, 3), _request("B", 1, 3), num_blocks=2),
    "alone before the watermark": _scenario(_request("A", 20, 1), num_blocks=5, watermark=0.2),
    "no room in the swap space": _scenario(_request("A", 2, 6), _request("B", 2, 5, 5), num_blocks=5, num_cpu_blocks=1, block_size=2),
    "one sample is left": _scenario(_request("A", 2, 6), _request("B", 2, 2, 5), num_blocks=5, block_size=2),
    "back beside a preemption": _scenario(
        _request("A", 1, 5, 5), _request("B", 6, 8), _request("C", 3, 4, 4), num_blocks=5, num_cpu_blocks=8, counts="one block per sequence"
    ),
    "seats": _scenario(_request("A", 1, 3, 3, 3), _request("B", 1, 3, 3, arrival=2), max_num_seqs=4),
    "a recomputation larger than an iteration": _scenario(_request("A", 2, 6), _request("B", 2, 6), num_blocks=5, block_size=2, max_num_batched_tokens=4),
    "a beam is dropped when another group ends": _scenario(
        _request("A", 1, 2), {"id": "B", "arrival": 1, "num_prompt": 2, "max_tokens": 4, "beams": _BEAMS}, num_blocks=12, block_size=2
    ),
}
