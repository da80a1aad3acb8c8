"""Shrinks a scenario to a minimal one that still shows a difference.

Real vLLM takes seconds to start, so candidates are judged in batches: a round proposes every single simplification of the scenario as it stands, then unions of
those that worked, and goes on from the smallest that still differs. `shrinking` hands its batches out, so that several scenarios can share a start.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias

from tests.conformance.compare import Json

# A simplification: what stands at each path afterwards, REMOVED if nothing. Paths count from the scenario as it was before.
Path: TypeAlias = tuple[str | int, ...]
Edit: TypeAlias = dict[Path, Any]
REMOVED: Any = object()

# Which of these scenarios still differ in the way that is looked for.
Judge: TypeAlias = Callable[[list[Json]], list[bool]]

# Keys without which a scenario, a group or an operation means nothing.
ESSENTIAL = {"mode", "num_blocks", "groups", "ops", "name", "type", "window", "chunk", "sink", "op", "id", "ids", "n", "tokens", "token", "label"}
MOST_CANDIDATES = 200


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


def shrink(scenario: Json, judge: Judge, rounds: int = 20, failing_step: int | None = None) -> Json:
    """The smallest scenario found from `scenario` for which `judge` says that it differs; see `shrinking`."""
    steps = shrinking(scenario, rounds, failing_step)
    try:
        candidates = next(steps)
        while True:
            candidates = steps.send(judge(candidates))
    except StopIteration as end:
        found: Json = end.value
        return found


def shrinking(scenario: Json, rounds: int = 20, failing_step: int | None = None) -> Generator[list[Json], list[bool], Json]:
    """Yields candidates, at most MOST_CANDIDATES at a time, wants to be sent which of them differ, and returns the smallest that does.

    Args:
        scenario: one that differs; it stays as it is.
        rounds: how often it may be made simpler; a round is at most two batches.
        failing_step: the step that differs, if known: what comes after it is dropped first.
    """
    best = copy.deepcopy(scenario)
    if failing_step is not None and failing_step < len(best["ops"]):
        shorter = {**best, "ops": best["ops"][: max(1, failing_step)]}
        if (yield [shorter])[0]:
            best = shorter
    for _ in range(rounds):
        edits = _smaller_by(best, _edits(best))
        if not edits:
            return best
        differ = yield [candidate for _, candidate in edits]
        worked = [pair for pair, differs in zip(edits, differ, strict=True) if differs]
        if not worked:
            return best
        unions = _smaller_by(best, _unions([edit for edit, _ in worked]))
        if len(worked) > 1 and unions:
            differ = yield [candidate for _, candidate in unions]
            worked += [pair for pair, differs in zip(unions, differ, strict=True) if differs]
        best = min((candidate for _, candidate in worked), key=size)
    return best


def applied(scenario: Json, edit: Edit) -> Json:
    """The scenario after an edit. What an edit says of something that it also removes does not matter."""
    found = copy.deepcopy(scenario)
    removed = [path for path, value in edit.items() if value is REMOVED]
    for path in sorted(edit, key=len):
        if edit[path] is not REMOVED and not any(path[:length] in removed for length in range(1, len(path))):
            _parent(found, path)[path[-1]] = copy.deepcopy(edit[path])
    for path in sorted(removed, key=lambda path: [(isinstance(part, str), part) for part in path], reverse=True):
        parent = _parent(found, path)
        if isinstance(path[-1], int) or path[-1] in parent:
            del parent[path[-1]]
    return found


def _parent(scenario: Json, path: Path) -> Any:
    place: Any = scenario
    for part in path[:-1]:
        place = place[part]
    return place


def _unions(edits: list[Edit]) -> Iterator[Edit]:
    """All edits at once, then halves, quarters and so on; and the removals of operations alone in the same way."""
    removals = [edit for edit in edits if all(path[0] == "ops" and len(path) == 2 and value is REMOVED for path, value in edit.items())]
    for some in (edits, removals):
        parts = 1
        while parts < len(some):
            length = -(-len(some) // parts)
            for start in range(0, len(some), length):
                union: Edit = {}
                for edit in some[start : start + length]:
                    for path, value in edit.items():
                        if value is REMOVED or path not in union:  # the first edit of a number is the boldest
                            union[path] = value
                yield union
            parts *= 2


def _smaller_by(scenario: Json, edits: Iterator[Edit]) -> list[tuple[Edit, Json]]:
    """Edits that make the scenario smaller, each result once, with that result."""
    found: dict[str, tuple[Edit, Json]] = {}
    for edit in edits:
        try:
            candidate = applied(scenario, edit)
        except (KeyError, IndexError, TypeError):  # of a union, one edit replaced what another one changes
            continue
        if candidate["ops"] and candidate.get("groups") != [] and size(candidate) < size(scenario):
            found.setdefault(json.dumps(candidate, sort_keys=True), (edit, candidate))
        if len(found) == MOST_CANDIDATES:
            break
    return list(found.values())


def _edits(scenario: Json) -> Iterator[Edit]:
    yield from _fewer_operations(scenario)
    yield from _fewer_groups(scenario)
    yield from _fewer_keys(scenario)
    yield from _shorter_prompts(scenario)
    yield from _smaller_numbers(scenario)


def _fewer_operations(scenario: Json) -> Iterator[Edit]:
    ops = scenario["ops"]
    for name in {op["id"]: None for op in ops if op["op"] == "add"}:
        yield {("ops", number): REMOVED for number, op in enumerate(ops) if op.get("id") == name}
    length = len(ops) // 2
    while length:
        for start in range(0, len(ops), length):
            yield {("ops", number): REMOVED for number in range(start, min(start + length, len(ops)))}
        length //= 2
    for number, op in enumerate(ops):
        if len(op.get("ids", ())) > 1:
            yield from ({("ops", number, "ids", place): REMOVED} for place in range(len(op["ids"])))
        if op["op"] == "decode":
            yield {("ops", number): {"op": "run", "id": op["id"], "new": 1}}


def _fewer_groups(scenario: Json) -> Iterator[Edit]:
    groups = scenario.get("groups", [])
    if groups == [{"type": "full"}]:
        yield {("groups",): REMOVED}
    if len(groups) > 1:
        yield from ({("groups", number): REMOVED} for number in range(len(groups)))
    for number, group in enumerate(groups):
        if group["type"] != "full":
            yield {("groups", number): {"type": "full", **{key: group[key] for key in ("block_size", "eagle") if key in group}}}


def _fewer_keys(scenario: Json) -> Iterator[Edit]:
    yield from ({(key,): REMOVED} for key in scenario if key not in ESSENTIAL)
    for number, group in enumerate(scenario.get("groups", [])):
        yield from ({("groups", number, key): REMOVED} for key in group if key not in ESSENTIAL)
    for key in ("salt", "lora", "priority", "arrival", "out", "out_max"):  # from every operation at once
        yield {("ops", number, key): REMOVED for number, op in enumerate(scenario["ops"]) if key in op}
    for number, op in enumerate(scenario["ops"]):
        for key in op:
            if key not in ESSENTIAL or (key == "tokens" and op["op"] == "done"):
                yield {("ops", number, key): REMOVED}


def _shorter_prompts(scenario: Json) -> Iterator[Edit]:
    ops = list(enumerate(scenario["ops"]))
    lengths = sorted({_length(op) for _, op in ops if op["op"] == "add"}, reverse=True)
    for most in sorted({limit for length in lengths for limit in (length // 2, length - 1)}):
        if most > 0:
            yield {path: value for number, op in ops if op["op"] == "add" and _length(op) > most for path, value in _truncated(number, op, most).items()}
    for number, op in ops:
        length = _length(op)
        for most in dict.fromkeys([length // 2, length - 4, length - 1]):
            if (1 if op["op"] == "add" else 0) <= most < length:
                yield _truncated(number, op, most)
        if op["op"] == "add" and "tokens" in op:
            yield {("ops", number, "tokens"): [0] * length}


def _length(op: Json) -> int:
    return len(op["tokens"]) if "tokens" in op else int(op.get("n", 0)) if op["op"] == "add" else 0


def _truncated(number: int, op: Json, most: int) -> Edit:
    return {("ops", number, "tokens"): op["tokens"][:most]} if "tokens" in op else {("ops", number, "n"): most}


def _smaller_numbers(scenario: Json) -> Iterator[Edit]:
    for key, value in scenario.items():
        yield from ({(key,): smaller} for smaller in _smaller(value))
    for number, group in enumerate(scenario.get("groups", [])):
        for key, value in group.items():
            yield from ({("groups", number, key): smaller} for smaller in _smaller(value))
    for number, op in enumerate(scenario["ops"]):
        for key in ("new", "n", "lookahead", "out_max", "base", "encoder"):
            if key in op and not (key == "n" and op["op"] == "add"):
                yield from ({("ops", number, key): smaller} for smaller in _smaller(op[key]))


def _smaller(value: object) -> list[int]:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 1:
        return []
    return sorted(smaller for smaller in {value // 2, value - 4, value - 1} if smaller > 0)
