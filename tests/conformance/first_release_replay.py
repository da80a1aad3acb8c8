"""engine/paper through a scenario of first_release_scenario, and what a recorded run of vLLM's first release says, in its terms.

What is normalised, and why, is listed in this folder's README.
"""

from __future__ import annotations

from typing import Any

from engine.core.output import SampledToken
from engine.paper.block_space_manager import BlockSpaceManager
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.scheduler import PaperScheduler
from engine.paper.sequence import SequenceGroup
from engine.paper.step import IterationPlan, ScheduledSequence, SequenceOutput
from engine.trace.events import Cause, CauseKind, Event
from tests.conformance.first_release_scenario import Json, width_of

STOP = 0
FORCED = Cause(CauseKind.FORCED)


class OneBlockPerSequence(BlockSpaceManager):
    """Reckons what a step needs as the first release did: one free block for each sequence of the group."""

    def can_append_slots(self, group: SequenceGroup) -> bool:
        return self.gpu_allocator.num_free_blocks >= len(group.living)

    def can_swap_in(self, group: SequenceGroup, *, num_reserved_blocks: int = 0) -> bool:
        num_blocks = len({block for sequence in group.living for block in self.block_tables[sequence.sequence_id]})
        return self.gpu_allocator.num_free_blocks >= num_blocks + len(group.living) + num_reserved_blocks


class Replay:
    """One PaperScheduler, driven like the release; `events`: everything it told."""

    def __init__(self, scenario: Json) -> None:
        self.scenario = scenario
        self.specs = {request["id"]: request for request in scenario["requests"]}
        self.events: list[Event] = []
        self.scheduler = PaperScheduler(PaperConfig(**scenario["config"]), self.events.append)
        self.manager = self.scheduler.block_manager
        if scenario["counts"] == "one block per sequence":
            self.manager.__class__ = OneBlockPerSequence
        self._step = 0

    def step(self) -> Json | None:
        """Arrivals, aborts, one iteration; None where nobody is there. Returns the same fields as the recorded run, see `normalised`."""
        self._step += 1
        for request in self.scenario["requests"]:
            if request["arrival"] == self._step:
                self.scheduler.add_request(_spec(request))
        for abort in self.scenario["aborts"]:
            if abort["step"] == self._step:
                self.scheduler.abort_request(abort["id"])
        if not self.scheduler.has_unfinished_requests():
            return None
        plan = self.scheduler.schedule()
        decided = self._decisions(plan)
        self.scheduler.update_from_output({sequence.sequence_id: self._answer(sequence) for sequence in plan.sequences})
        return {**decided, "after": self._state(self._groups_with_tables())}

    def _decisions(self, plan: IterationPlan) -> Json:
        scheduled: dict[str, bool] = {}
        for sequence in plan.sequences:
            group = self.scheduler.sequences[sequence.sequence_id].group
            scheduled[group.request_id] = sequence.num_computed_tokens == 0
        prompts = [name for name, is_prompt in scheduled.items() if is_prompt]
        return {
            "prompts": prompts,
            "decodes": [name for name, is_prompt in scheduled.items() if not is_prompt],
            "swap_out": [list(pair) for pair in plan.swap_out],
            "swap_in": [list(pair) for pair in plan.swap_in],
            "copies": sorted(list(pair) for pair in plan.copies),
            "planned": self._state(self._groups_with_tables(), prompts),
        }

    def _groups_with_tables(self) -> list[SequenceGroup]:
        return [group for group in self.scheduler.groups.values() if any(s.sequence_id in self.manager.block_tables for s in group.living)]

    def _state(self, groups: list[SequenceGroup], prompts: list[str] | None = None) -> Json:
        gpu, cpu = self.manager.gpu_allocator, self.manager.cpu_allocator
        state: Json = {
            "tables": {group.request_id: [list(self.manager.block_ids(s.sequence_id)) for s in group.living] for group in groups},
            "free": gpu.free_block_ids,
            "cpu_free": cpu.free_block_ids,
            "waiting": [group.request_id for group in self.scheduler.waiting],
            "running": sorted(group.request_id for group in self.scheduler.running),
            "swapped": sorted(group.request_id for group in self.scheduler.swapped),
        }
        if prompts is None:
            state["refs"] = {block.block_id: block.ref_cnt for block in gpu.blocks if block.ref_cnt}
            state["cpu_refs"] = {block.block_id: block.ref_cnt for block in cpu.blocks if block.ref_cnt}
        return state

    def _answer(self, scheduled: ScheduledSequence) -> SequenceOutput:
        sequence = self.scheduler.sequences[scheduled.sequence_id]
        request = self.specs[sequence.group.request_id]
        if "beams" in request:
            return SequenceOutput()  # the survivors are forced
        places = [self._place(sequence.group, name) for name in scheduled.draw_names]
        ends = [scheduled.num_output_tokens + 1 == request["lengths"][place] for place in places]
        return SequenceOutput(tuple(SampledToken(STOP if end else 10, FORCED) for end in ends))

    @staticmethod
    def _place(group: SequenceGroup, sequence_id: str) -> int:
        return [group.sequence_id(place) for place in range(group.spec.n)].index(sequence_id)


def _spec(request: Json) -> PaperRequestSpec:
    common: dict[str, Any] = {
        "request_id": request["id"],
        "prompt_token_ids": tuple(range(100, 100 + request["num_prompt"])),
        "max_tokens": request["max_tokens"],
        "stop_token_ids": (STOP,),
    }
    if "lengths" in request:
        return PaperRequestSpec(n=width_of(request), **common)
    beams = tuple(
        tuple((parent if number else 0, STOP if ends else 10 + place) for place, (parent, ends) in enumerate(selection))
        for number, selection in enumerate(request["beams"])
    )
    return PaperRequestSpec(beam_width=width_of(request), forced_beams=beams, **common)


# ---------------------------------------------------------------------- the release's run in our terms
def normalised(iteration: Json, config: Json) -> Json | None:
    """A recorded iteration with the block ids counted from the other end, free lists turned round, and a prompt's table once for the whole group."""
    if not iteration:
        return None
    last, cpu_last = config["num_blocks"] - 1, config["num_cpu_blocks"] - 1

    def state(recorded: Json, prompts: list[str] | None = None) -> Json:
        on_cpu = set(recorded["swapped"])
        tables = {name: [[(cpu_last if name in on_cpu else last) - block for block in table] for table in group] for name, group in recorded["tables"].items()}
        for name in prompts or []:
            assert all(table == tables[name][0] for table in tables[name])
            tables[name] = tables[name][:1]
        turned: Json = {
            "tables": tables,
            "free": [last - block for block in reversed(recorded["free"])],
            "cpu_free": [cpu_last - block for block in reversed(recorded["cpu_free"])],
            "waiting": recorded["waiting"],
            "running": sorted(recorded["running"]),
            "swapped": sorted(recorded["swapped"]),
        }
        if prompts is None:
            turned["refs"] = {last - block: count for block, count in recorded["refs"]}
            turned["cpu_refs"] = {cpu_last - block: count for block, count in recorded["cpu_refs"]}
        return turned

    return {
        "prompts": iteration["prompts"],
        "decodes": iteration["decodes"],
        "swap_out": [[last - gpu, cpu_last - cpu] for gpu, cpu in iteration["swap_out"]],
        "swap_in": [[cpu_last - cpu, last - gpu] for cpu, gpu in iteration["swap_in"]],
        "copies": sorted([last - source, last - destination] for source, destination in iteration["copies"]),
        "planned": state(iteration["planned"], iteration["prompts"]),
        "after": state(iteration["after"]),
    }


def differences(ours: Json | None, theirs: Json | None, where: str = "") -> list[str]:
    """The fields that differ, with both values."""
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return [] if ours == theirs else [f"{where}: ours {ours}, the release's {theirs}"]
    keys = dict.fromkeys([*ours, *theirs])
    return [line for key in keys for line in differences(ours.get(key), theirs.get(key), f"{where}/{key}")]


def first_difference(recorded: Json) -> list[str]:
    """The fields of the first iteration in which the engine does not do what the release did; `recorded` has `scenario` and `run`."""
    scenario = recorded["scenario"]
    replay = Replay(scenario)
    for number, iteration in enumerate(recorded["run"]["iterations"], start=1):
        found = differences(replay.step(), normalised(iteration, scenario["config"]), f"{scenario['name']}, iteration {number}")
        if found:
            return found
    return []
