"""What random scenarios reached in vLLM: counted from its runs, so that a feature nobody reaches shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.conformance.compare import Json, has_error
from tests.conformance.random_config import block_sizes

# What is counted for each type of group.
PER_GROUP = ("scenarios", "stored", "evicted", "hits", "skipped", "copies", "preempted", "refused", "partial keys", "eagle", "retention", "async")


class Coverage:
    """Counts over the scenarios that were added."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.modes: dict[str, Counter[str]] = {}
        self.groups: dict[str, Counter[str]] = {}
        self.operations: dict[str, Counter[str]] = {}
        self.errors: Counter[str] = Counter()

    def add(self, scenario: Json, trace: Json) -> None:
        mode = scenario.get("mode", "manager") + (" async" if scenario.get("async") else "")
        counts = self.modes.setdefault(mode, Counter())
        counts["scenarios"] += 1
        if trace["steps"][-1]["op"] == "BUILD":
            self.errors["BUILD " + trace["steps"][-1]["error"][:100]] += 1
            return
        counts["built"] += 1
        reached: set[str] = set()  # of this scenario, for each kind of group
        groups = scenario.get("groups", [{"type": "full"}])
        kinds = [f"{group['type']} {group.get('mode', 'all')}" if group["type"] == "mamba" else group["type"] for group in groups]
        if mode == "pool":
            kinds = []
        for kind in set(kinds):
            self.groups.setdefault(kind, Counter())["scenarios"] += 1
        sizes = block_sizes(scenario)
        before = trace["steps"][0]["state"]
        for step in trace["steps"][1:]:
            counts["steps"] += 1
            op = step["op"]["op"]
            tally = self.operations.setdefault(op, Counter())
            tally["all"] += 1
            if has_error(step):
                counts["errors"] += 1
                tally["errors"] += 1
                self.errors[f"{op} {step['result']['error'][:80]}"] += 1
            elif isinstance(step.get("result"), dict):
                if "result" in step["result"]:
                    tally["refused"] += 1
                counts.update(_happened(step["result"]))
            for kind, what in _of_groups(step, before, kinds, sizes):
                self.groups[kind][what] += 1
                reached.add(what)
            counts.update(_of_state(step["state"]))
            before = step["state"]
        for key in ("retention_interval", "use_eagle", "async"):
            if scenario.get(key) is not None and scenario[key] is not False:  # an interval of 0 is one
                for kind in set(kinds):
                    self.groups[kind]["retention" if key == "retention_interval" else key.removeprefix("use_")] += 1
        counts.update(f"scenarios with {what}" for what in reached)

    def text(self) -> str:
        lines = []
        for mode, counts in self.modes.items():
            lines.append(f"{mode}: " + ", ".join(f"{what} {number}" for what, number in sorted(counts.items())))
        lines.append("operations (errors, refused): " + ", ".join(f"{op} {c['all']} ({c['errors']}, {c['refused']})" for op, c in self.operations.items()))
        lines.append("group type    " + " ".join(f"{what:>12}" for what in PER_GROUP))
        for kind, counts in sorted(self.groups.items()):
            lines.append(f"{kind:<13} " + " ".join(f"{counts[what]:>12}" for what in PER_GROUP))
        lines += [f"{number:>6}  {error}" for error, number in self.errors.most_common(25)]
        return "\n".join(lines)


def _happened(result: Json) -> Iterator[str]:
    schedule = result.get("schedule", result)
    if result.get("junction"):
        yield "junctions"
    if result.get("retained"):
        yield "retained copies"
    if "running" in schedule:
        for what in ("preempted", "resumed", "copies", "zero"):
            if schedule[what]:
                yield what
        if len(schedule["preempted"]) > 1:
            yield "several preempted"
        if not schedule["scheduled"]:
            yield "empty schedules"
        if any(number > 1 for name, number in schedule["scheduled"].items() if name in schedule["cached"]):
            yield "later chunks"
        if any(number > 0 for number in schedule["common"]):
            yield "common prefixes"
    for reason in result.get("update", result).get("finished", {}).values() if isinstance(result.get("update", result).get("finished"), dict) else ():
        yield f"finished {reason}"


def _of_state(state: Json) -> Iterator[str]:
    if any(isinstance(ids, list) and len(ids) > 1 for ids in state.get("map", {}).values()):
        yield "duplicates"
    if any(state.get("extra_hashes", {}).values()):
        yield "extra keys"
    if any(len(keys) > 1 for keys in state.get("extra_hashes", {}).values()):
        yield "two extra keys"
    if any(event == "AllBlocksCleared" or (isinstance(event, dict) and event["type"] == "AllBlocksCleared") for event in state.get("events", ())):
        yield "resets that worked"


def _of_groups(step: Json, before: Json, kinds: list[str], sizes: list[int]) -> Iterator[tuple[str, str]]:
    """(kind of group, what happened in it) for one step."""
    state, result = step["state"], step.get("result")
    for event in state.get("events", ()):
        if isinstance(event, dict) and event.get("group") is not None and event["hashes"]:
            yield kinds[event["group"]], "stored" if event["type"] == "BlockStored" else "evicted"
    for name, request in state.get("requests", {}).items():
        earlier = before.get("requests", {}).get(name, {"blocks": [[]] * len(kinds)})
        for kind, now, then in zip(kinds, request["blocks"], earlier["blocks"], strict=True):
            if any(block == 0 for block in now) and now.count(0) != then.count(0):
                yield kind, "skipped"
        if request["status"] == "PREEMPTED" and earlier.get("status") == "RUNNING":
            yield from ((kind, "preempted") for kind in kinds)
    for kind, pairs, earlier_pairs in zip(kinds, state.get("pending_copies", ()), before.get("pending_copies", [[]] * len(kinds)), strict=False):
        if len(pairs) > len(earlier_pairs):
            yield kind, "copies"
    for key, tokens in state.get("hash_tokens", {}).items():
        name = state["hash"][key].rpartition("/g")
        group = int(name[2]) if name[1] else 0
        if kinds and before.get("hash_tokens", {}).get(key) != tokens and tokens is not None and tokens % sizes[group]:
            yield kinds[group], "partial keys"
    if not isinstance(result, dict) or has_error(step):
        return
    if "result" in result:
        yield from ((kind, "refused") for kind in kinds)
    for kind, blocks in zip(kinds, result.get("hit_blocks", ()), strict=False):
        if any(blocks):
            yield kind, "hits"
    schedule = result.get("schedule", result)
    if "running" in schedule:
        for new in schedule["new"].values():
            if new["computed"]:
                yield from ((kind, "hits") for kind, blocks in zip(kinds, new["blocks"], strict=True) if any(blocks))
        if schedule["copies"]:
            yield from ((kind, "copies") for kind in kinds if kind == "mamba align")
