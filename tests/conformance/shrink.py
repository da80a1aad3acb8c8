"""Shrinks a scenario to a minimal one that still shows a difference.

Real vLLM takes seconds to start, so candidates are judged in batches: each round proposes every single simplification of the scenario as it stands, and unions
of those that worked in the round before, and goes on with the smallest that still differs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator

from tests.conformance.compare import Json

# Which of these scenarios still differ in the way that is looked for.
Judge = Callable[[list[Json]], list[bool]]

# Keys without which a scenario, a group or an operation still means something.
ESSENTIAL = {"mode", "num_blocks", "groups", "ops", "name", "type", "window", "chunk", "sink", "op", "id", "ids", "n", "tokens", "token", "label"}
MOST_CANDIDATES = 300


def size(scenario: Json) -> tuple[int, ...]:
    """What is made smaller, most important first: operations, groups, keys, tokens, then all numbers."""
    ops, groups = scenario["ops"], scenario.get("groups", [])
    keys = len(scenario) + sum(map(len, groups)) + sum(map(len, ops))
    tokens = sum(len(op.get("tokens", ())) + (op["n"] if op["op"] == "add" and "n" in op else 0) for op in ops)
    return len(ops), len(groups), keys, tokens, sum(_numbers({key: value for key, value in scenario.items() if key != "name"}))


def _numbers(value: object) -> Iterator[int]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)):
        yield abs(int(value))


def shrink(scenario: Json, judge: Judge, rounds: int = 40, failing_step: int | None = None, report: Callable[[str], None] | None = None) -> Json:
    """The smallest scenario found from `scenario` for which `judge` says that it differs.

    Args:
        scenario: one that differs.
        judge: called once a round with at most MOST_CANDIDATES scenarios.
        rounds: calls of `judge` at most.
        failing_step: the step that differs, if known: what comes after it is dropped first.
        report: told after every round how small the scenario is.
    """
    best = copy.deepcopy(scenario)
    if failing_step is not None and failing_step < len(best["ops"]):
        shorter = {**best, "ops": best["ops"][: max(1, failing_step)]}
        if judge([shorter])[0]:
            best = shorter
    removable: list[int] = []  # operations that could be left out one by one in the last round
    for number in range(rounds):
        candidates = _candidates(best, removable)
        if not candidates:
            return best
        verdicts = judge(candidates)
        worked = [candidate for candidate, differs in zip(candidates, verdicts, strict=True) if differs]
        if not worked:
            return best
        before = best
        best = min(worked, key=size)
        removable = _still_removable(before, best, candidates, verdicts)
        if report is not None:
            left = f"{len(best['ops'])} operations, {len(best.get('groups', []))} groups"
            report(f"round {number + 1}: {len(candidates)} tried, {len(worked)} still differ; {left}")
    return best


def _still_removable(before: Json, best: Json, candidates: list[Json], verdicts: list[bool]) -> list[int]:
    """Indices in `best` of operations that could be left out of `before` alone."""
    alone = {
        json.dumps(op)
        for op_number, op in enumerate(before["ops"])
        for candidate, differs in zip(candidates, verdicts, strict=True)
        if differs and candidate["ops"] == before["ops"][:op_number] + before["ops"][op_number + 1 :]
    }
    return [number for number, op in enumerate(best["ops"]) if json.dumps(op) in alone]


def _candidates(scenario: Json, removable: list[int]) -> list[Json]:
    """Simpler scenarios, each once."""
    found: dict[str, Json] = {}
    for candidate in _proposals(scenario, removable):
        if candidate["ops"] and size(candidate) < size(scenario):
            found.setdefault(json.dumps(candidate, sort_keys=True), candidate)
        if len(found) == MOST_CANDIDATES:
            break
    return list(found.values())


def _proposals(scenario: Json, removable: list[int]) -> Iterator[Json]:
    yield from _without_several(scenario, removable)
    yield from _fewer_operations(scenario)
    yield from _fewer_groups(scenario)
    yield from _fewer_keys(scenario)
    yield from _shorter_prompts(scenario)
    yield from _smaller_numbers(scenario)


def _without(scenario: Json, dropped: set[int]) -> Json:
    return {**scenario, "ops": [op for number, op in enumerate(scenario["ops"]) if number not in dropped]}


def _without_several(scenario: Json, removable: list[int]) -> Iterator[Json]:
    parts = 1
    while parts <= len(removable):
        length = -(-len(removable) // parts)
        for start in range(0, len(removable), length):
            yield _without(scenario, set(removable[start : start + length]))
        parts *= 2


def _fewer_operations(scenario: Json) -> Iterator[Json]:
    ops = scenario["ops"]
    for name in {op["id"]: None for op in ops if op["op"] == "add"}:
        yield _without(scenario, {number for number, op in enumerate(ops) if op.get("id") == name})
    length = len(ops) // 2
    while length:
        for start in range(0, len(ops), length):
            yield _without(scenario, set(range(start, min(start + length, len(ops)))))
        length //= 2
    for number, op in enumerate(ops):
        if len(op.get("ids", ())) > 1:
            for dropped in range(len(op["ids"])):
                yield _with_op(scenario, number, {**op, "ids": op["ids"][:dropped] + op["ids"][dropped + 1 :]})
        if op["op"] == "decode":
            yield _with_op(scenario, number, {"op": "run", "id": op["id"], "new": 1})


def _with_op(scenario: Json, number: int, op: Json) -> Json:
    return {**scenario, "ops": [*scenario["ops"][:number], op, *scenario["ops"][number + 1 :]]}


def _with_group(scenario: Json, number: int, group: Json) -> Json:
    return {**scenario, "groups": [*scenario["groups"][:number], group, *scenario["groups"][number + 1 :]]}


def _fewer_groups(scenario: Json) -> Iterator[Json]:
    groups = scenario.get("groups", [])
    for number in range(len(groups) if len(groups) > 1 else 0):
        yield {**scenario, "groups": groups[:number] + groups[number + 1 :]}
    if groups == [{"type": "full"}]:
        yield {key: value for key, value in scenario.items() if key != "groups"}
    for number, group in enumerate(groups):
        if group["type"] != "full":
            plain = {"type": "full", **{key: group[key] for key in ("block_size", "eagle") if key in group}}
            yield _with_group(scenario, number, plain)


def _fewer_keys(scenario: Json) -> Iterator[Json]:
    for key in scenario:
        if key not in ESSENTIAL:
            yield {kept: value for kept, value in scenario.items() if kept != key}
    for number, group in enumerate(scenario.get("groups", [])):
        for key in group:
            if key not in ESSENTIAL:
                yield _with_group(scenario, number, {kept: value for kept, value in group.items() if kept != key})
    for number, op in enumerate(scenario["ops"]):
        for key in op:
            if key not in ESSENTIAL or (key == "tokens" and op["op"] == "done"):
                yield _with_op(scenario, number, {kept: value for kept, value in op.items() if kept != key})
    for key in ("salt", "lora", "priority", "arrival", "out", "out_max"):  # from every operation at once
        yield {**scenario, "ops": [{kept: value for kept, value in op.items() if kept != key} for op in scenario["ops"]]}


def _shorter_prompts(scenario: Json) -> Iterator[Json]:
    lengths = sorted({_length(op) for op in scenario["ops"] if op["op"] == "add"}, reverse=True)
    for most in {limit for length in lengths for limit in (length // 2, length - 1)}:
        if most > 0:
            yield {**scenario, "ops": [_truncated(op, most) if op["op"] == "add" else op for op in scenario["ops"]]}
    for number, op in enumerate(scenario["ops"]):
        length = _length(op)
        shortest = 1 if op["op"] == "add" else 0
        for most in dict.fromkeys([length // 2, length - 4, length - 1]):
            if shortest <= most < length:
                yield _with_op(scenario, number, _truncated(op, most))
        if op["op"] == "add" and "tokens" in op and op["tokens"] != [0] * length:  # the first is told apart by its zeros
            yield _with_op(scenario, number, {**op, "tokens": [0] * length})


def _length(op: Json) -> int:
    return len(op["tokens"]) if "tokens" in op else int(op.get("n", 0)) if op["op"] == "add" else 0


def _truncated(op: Json, most: int) -> Json:
    return {**op, "tokens": op["tokens"][:most]} if "tokens" in op else {**op, "n": min(op["n"], most)}


def _smaller_numbers(scenario: Json) -> Iterator[Json]:
    for key, value in scenario.items():
        if key not in ("ops", "groups", "name"):
            yield from ({**scenario, key: smaller} for smaller in _smaller(value))
    for number, group in enumerate(scenario.get("groups", [])):
        for key, value in group.items():
            yield from (_with_group(scenario, number, {**group, key: smaller}) for smaller in _smaller(value))
    for number, op in enumerate(scenario["ops"]):
        for key in ("new", "n", "lookahead", "out_max", "base", "encoder", "first"):
            if key in op and not (key == "n" and op["op"] == "add"):
                yield from (_with_op(scenario, number, {**op, key: smaller}) for smaller in _smaller(op[key]))


def _smaller(value: object) -> list[int]:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 1:
        return []
    return sorted({value // 2, value - 4, value - 1} - {0, -1, -2, -3})
