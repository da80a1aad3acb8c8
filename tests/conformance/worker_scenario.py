"""Scenarios for the worker's rows and states, and layers whose groups are asked for. The same on every machine; needs neither engine nor vLLM."""

from __future__ import annotations

from random import Random
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

KINDS = (("mamba",), ("full", "mamba"), ("full", "mamba"), ("full", "mamba"), ("full", "mamba", "mamba"), ("full", "swa", "mamba"), ("full", "swa"), ("full",))
MODES = ("align", "align", "align", "all", "none")


def worker_scenario(seed: int, number: int) -> Json:
    """Requests that share beginnings, in a pool in which they displace each other, with aborts and resets, on one to three groups; no speculation."""
    random = Random(f"worker {seed}/{number}")
    kinds, mode = random.choice(KINDS), random.choice(MODES)
    size = random.choice([2, 4, 4, 8])
    with_states = "mamba" in kinds
    caching = mode != "none" if with_states else random.random() < 0.7
    longest = random.choice([24, 40, 64])
    groups: list[Json] = []
    for kind in kinds:
        group: Json = {"type": kind}
        if kind == "swa":
            group["window"] = random.choice([size, 2 * size, 2 * size + 1, 3 * size])
        elif kind == "mamba":
            group["mode"] = mode
            if mode == "none":
                group["block_size"] = longest
        groups.append(group)
    scenario: Json = {
        "name": f"worker {seed}/{number}",
        "mode": "scheduler",
        "block_size": size,
        "groups": groups,
        "enable_caching": caching,
        "max_model_len": longest,
        "max_num_seqs": random.choice([2, 3, 4, 6]),
        "max_batched_tokens": random.choice([size, 2 * size + 1, 3 * size, 64]),
        "num_blocks": len(kinds) * random.choice([1, 1, 2, 3]) * (longest // size) + 2,
        "events": False,
    }
    if with_states and caching and mode == "align" and len(kinds) == 2 and random.random() < 0.7:
        scenario["hash_block_size"] = size // 2
    shared = [random.randrange(100) for _ in range(longest)]
    names: list[str] = []
    prompts: list[list[int]] = [[]]
    ops: list[Json] = []
    for _ in range(random.choice([30, 45])):
        choice = random.random()
        if not names or (choice < 0.22 and len(names) < 10):
            common = random.choice([0, size, size + 1, 2 * size, 3 * size, 3 * size - 1, 4 * size + size // 2])
            length = random.randint(1, longest - 6)
            begins = random.choice(prompts) if random.random() < 0.4 else shared[:common]  # a prompt that goes on where another one ends
            length = max(length, min(len(begins) + 1, longest - 6))
            tokens = (begins + [random.randrange(100) for _ in range(longest)])[:length]
            prompts.append(tokens)
            name = f"R{len(names)}"
            names.append(name)
            ops.append({"op": "add", "id": name, "tokens": tokens, "out_max": random.randint(1, min(12, longest - length))})
        elif choice < 0.25:
            ops.append({"op": "abort", "id": random.choice(names)})
        elif choice < 0.27:
            ops.append({"op": "reset", "running": random.random() < 0.7})
        else:
            ops.append({"op": "sched"})
    scenario["ops"] = ops
    return scenario


def _mamba(block_size: int, mode: str, page_size_padded: int | None = None, shapes: Any = ((4, 32, 8), (144, 3))) -> Json:
    return {"type": "mamba", "block_size": block_size, "mode": mode, "shapes": shapes, "page_size_padded": page_size_padded}


def _attention(block_size: int, num_kv_heads: int, head_size: int, sliding_window: int | None = None) -> Json:
    kind = "full" if sliding_window is None else "sliding_window"
    return {"type": kind, "block_size": block_size, "num_kv_heads": num_kv_heads, "head_size": head_size, "sliding_window": sliding_window}


def _tiny_hybrid(block_size: int, mode: str, state_block_size: int) -> Json:
    """As vLLM's platform code leaves it: the state's page is padded to that of `block_size` tokens of 8 heads of 32 numbers, keys and values, 4 bytes each."""
    full, state = _attention(block_size, 8, 32), _mamba(state_block_size, mode, block_size * 2 * 8 * 32 * 4)
    return {"name": f"tiny-hybrid/{block_size}/{mode}", "layers": [full, state] * 3}


def _random_layers(number: int) -> Json:
    random = Random(f"layers {number}")
    size = random.choice([4, 8, 16])
    kinds = [
        _attention(size, 2, 32),
        _attention(size, 2, 32, 8),
        _attention(size, 2, 32, 16),
        _mamba(size, "align", None, ((2, 16, random.choice([1, 2, 4])),)),
    ]
    chosen = random.sample(kinds, random.randint(1, 3))
    return {"name": f"random layers {number}", "layers": [random.choice(chosen) for _ in range(random.randint(1, 30))]}


GROUP_QUESTIONS: list[Json] = [
    *(_tiny_hybrid(size, mode, 1024 if mode == "none" else size) for size in (4, 8, 16) for mode in ("align", "all", "none")),
    *({"name": f"tiny-swa/{size}", "layers": [_attention(size, 2, 32, None if index in (2, 5) else 8) for index in range(6)]} for size in (4, 16)),
    *({"name": f"gemma3-270m/{size}", "layers": [_attention(size, 1, 256, None if index % 6 == 5 else 512) for index in range(18)]} for size in (4, 16)),
    *(_random_layers(number) for number in range(60)),
]
