"""Whether two runs of a scenario went through the same states, and where they part if not.

Compared is everything but three things: of an error only its presence, the null block's reference count not at all, and where a block gives up two or more
further keys, the order in which their removals are reported is free.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """The first step in which two runs differ.

    Attributes:
        step: its number; 0 is the fresh engine, 1 the first operation.
        kind: `build` (only one side could be built, or a step is missing), `error` (only one side failed), or `state`.
        fields: one line for each field that differs: path, ours, theirs.
    """

    step: int
    kind: str
    op: Any
    fields: list[str]

    def __str__(self) -> str:
        return "\n".join([f"step {self.step}, {json.dumps(self.op)}: {self.kind} differs", *(f"  {line}" for line in self.fields)])


def plain(trace: Json) -> Json:
    """As JSON has it: keys are strings, tuples lists."""
    found: Json = json.loads(json.dumps(trace))
    return found


def has_error(step: Json) -> bool:
    result = step.get("result")
    return "error" in step or (isinstance(result, dict) and "error" in result)


def _owners(state: Json) -> dict[tuple[str, Any], str]:
    """Of the blocks with two or more further keys: (hash, group) to block id. A key's group is None where the keys do not show it."""
    owners: dict[tuple[str, Any], str] = {}
    for block, keys in state.get("extra_hashes", {}).items():
        if len(keys) > 1:
            for key in keys:
                name, slash, group = key.rpartition("/g")
                owners[(name, int(group)) if slash else (key, None)] = block
    return owners


def _in_any_order(events: list[Json], before: Json) -> list[Json]:
    """The events with the removals of one block's further keys sorted."""
    owners = _owners(before)
    if not owners:
        return events

    def owner(event: Json) -> str | None:
        if not isinstance(event, dict) or event.get("type") != "BlockRemoved" or len(event["hashes"]) != 1:
            return None
        name = str(event["hashes"][0])
        return owners.get((name, event.get("group"))) or owners.get((name, None))

    ordered: list[Json] = []
    for block, group in groupby(events, owner):
        run = list(group)
        ordered += run if block is None else sorted(run, key=lambda event: str(event["hashes"]))
    return ordered


def comparable(step: Json, before: Json) -> Json:
    """A step (as `plain`) with what is compared of it; `before` is the state before the step."""
    found: Json = {"state": {key: value for key, value in step["state"].items() if key != "null_ref"}}
    if "events" in found["state"]:
        found["state"]["events"] = _in_any_order(found["state"]["events"], before)
    if has_error(step):
        return found | {"error": True}
    result = step.get("result")
    found["result"] = result
    if isinstance(result, dict):
        scheduled = result.get("schedule", result).get("scheduled")
        if isinstance(scheduled, dict):  # the order of scheduling counts
            found["order"] = list(scheduled)
    return found


def _differences(path: str, ours: Any, theirs: Any) -> list[str]:
    if ours == theirs:
        return []
    if isinstance(ours, dict) and isinstance(theirs, dict):
        lines: list[str] = []
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            lines += _differences(f"{path}.{key}" if path else key, ours.get(key, "absent"), theirs.get(key, "absent"))
        return lines
    return [f"{path}: ours {json.dumps(ours)}, vLLM {json.dumps(theirs)}"]


def first_difference(ours: Json, theirs: Json) -> Difference | None:
    """Where our run and vLLM's part, None if nowhere."""
    our_steps, their_steps = plain(ours)["steps"], plain(theirs)["steps"]
    before: Json = {}
    for number, (our, their) in enumerate(zip(our_steps, their_steps, strict=False)):
        op = their["op"] if isinstance(their["op"], dict) else our["op"]
        if (our["op"] == "BUILD") != (their["op"] == "BUILD"):
            lines = [f"{who}: {step.get('error', 'built')}" for who, step in (("ours", our), ("vLLM", their))]
            return Difference(number, "build", op, lines)
        if has_error(our) != has_error(their):
            lines = [f"{who}: {step.get('error') or json.dumps(step.get('result'))}" for who, step in (("ours", our), ("vLLM", their))]
            return Difference(number, "error", op, lines)
        if our["op"] != "BUILD":
            lines = _differences("", comparable(our, before), comparable(their, before))
            if lines:
                return Difference(number, "state", op, lines)
        before = their["state"]
    if len(our_steps) != len(their_steps):
        number = min(len(our_steps), len(their_steps))
        return Difference(number, "build", None, [f"ours has {len(our_steps)} steps, vLLM {len(their_steps)}"])
    return None
