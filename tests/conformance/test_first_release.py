"""engine/paper beside recorded runs of vLLM 0.1.0: the same tables, counts, free lists, copies, swaps and decisions in every iteration, and something else only
where engine/paper/README.md says so."""

from __future__ import annotations

import copy
import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from engine.trace.events import AllocationRefused, BlocksFreed, CauseKind, RequestPreempted
from tests.conformance.first_release_partings import PARTINGS
from tests.conformance.first_release_replay import Replay, differences, first_difference, normalised
from tests.conformance.first_release_scenario import FAMILIES, Json

ROOT = Path(__file__).parents[2]
RECORD: Json = json.loads(gzip.decompress((Path(__file__).parent / "first_release_runs.json.gz").read_bytes()))
RUNS: list[Json] = RECORD["runs"]


@pytest.mark.parametrize("family", FAMILIES)
def test_same_iterations_as_the_first_release(family: str) -> None:
    """300 random scenarios: who runs and in which order, block tables id by id, reference counts, both free lists in order, copies, swaps, before and after
    the worker."""
    runs = [recorded for recorded in RUNS if recorded["scenario"]["name"].startswith(family)]
    assert len(runs) == 50
    assert [line for recorded in runs for line in first_difference(recorded)] == []


def test_what_was_recorded_reaches_everything() -> None:
    iterations = [iteration for recorded in RUNS for iteration in recorded["run"]["iterations"] if iteration]
    counts = Counter(field for iteration in iterations for field in ("prompts", "decodes", "copies", "swap_out", "swap_in") if iteration[field])
    counts["both"] = sum(bool(iteration["prompts"] and iteration["decodes"]) for iteration in iterations)
    counts["shared"] = sum(any(count > 2 for _, count in iteration["after"]["refs"]) for iteration in iterations)
    for recorded in RUNS:
        running: list[str] = []
        for iteration in filter(None, recorded["run"]["iterations"]):
            counts["recomputed"] += any(name in iteration["planned"]["waiting"] for name in running)
            running = iteration["after"]["running"]
    assert min(counts[what] for what in ("prompts", "decodes", "copies", "swap_out", "swap_in", "both", "shared", "recomputed")) > 50, counts


def test_no_run_is_cut_off_for_another_reason_than_the_known_ones() -> None:
    ends = Counter((recorded["run"]["ended"] or "").split(":")[0] for recorded in RUNS)
    assert set(ends) == {
        "",
        "RuntimeError",  # no room in the swap space
        "a beam is dropped in the iteration in which an earlier group ends a sequence",
        "a group of which one sequence is left is recomputed",
        "nobody runs",  # a group cannot come back, see the partings
    }
    assert ends[""] > len(RUNS) / 2


@pytest.mark.parametrize("field", ["prompts", "decodes", "swap_out", "swap_in", "copies", "tables", "free", "refs", "waiting", "swapped"])
def test_a_difference_is_seen(field: str) -> None:
    """Each field, changed in one recorded iteration, is named."""

    def change(recorded: Json) -> bool:
        for iteration in recorded["run"]["iterations"]:
            place = iteration if field in iteration else iteration.get("after", {})
            if place.get(field):
                place[field] = {} if field == "tables" else place[field][:-1]
                return True
        return False

    recorded = next(changed for changed in map(copy.deepcopy, RUNS) if change(changed))
    assert any(f"/{field}" in line for line in first_difference(recorded))


# ---------------------------------------------------------------------- where we part, on purpose
def both(name: str) -> tuple[Replay, list[Json | None], list[Json | None]]:
    """Our run of a parting, and the release's in our terms; iteration n is entry n - 1."""
    scenario, run = PARTINGS[name], RECORD["partings"][name]
    replay = Replay(scenario)
    theirs = [normalised(iteration, scenario["config"]) for iteration in run["iterations"]]
    ours = [replay.step() for _ in range(12)]
    return replay, ours, theirs


def agreed(ours: list[Json | None], theirs: list[Json | None]) -> int:
    """How many iterations are the same before the first that is not."""
    return next((number for number, pair in enumerate(zip(ours, theirs, strict=False)) if differences(*pair)), len(theirs))


def at(run: list[Json | None], iteration: int) -> Json:
    found = run[iteration - 1]
    assert found is not None
    return found


def test_room_in_the_last_block_is_enough_for_us() -> None:
    """The release wants a free block for every running sequence, whether it will take it or not."""
    _, ours, theirs = both("there is room in the last block")
    assert agreed(ours, theirs) == 1
    assert (at(theirs, 2)["decodes"], at(theirs, 2)["after"]["waiting"]) == (["A"], ["B"])
    assert at(ours, 2)["decodes"] == ["A", "B"]


def test_the_watermark_does_not_stop_a_group_that_is_alone() -> None:
    _, ours, theirs = both("alone before the watermark")
    assert all(iteration is not None and iteration["after"]["waiting"] == ["A"] for iteration in theirs)
    assert len(theirs) == 8
    assert at(ours, 1)["prompts"] == ["A"]


def test_without_room_in_the_swap_space_we_recompute() -> None:
    replay, ours, theirs = both("no room in the swap space")
    assert RECORD["partings"]["no room in the swap space"]["ended"].startswith("RuntimeError: Aborted due to the lack of CPU swap space")
    assert agreed(ours, theirs) == len(theirs) == 2
    assert CauseKind.SWAP_SPACE_EXHAUSTED in {event.cause.kind for event in replay.events if isinstance(event, BlocksFreed)}
    assert not replay.scheduler.has_unfinished_requests()


def test_a_finished_sample_does_not_come_back_with_its_group() -> None:
    """The release gives a table to every sequence of a recomputed group, also to one that had ended."""
    _, ours, theirs = both("one sample is left")
    assert agreed(ours, theirs) == 4
    assert len(at(theirs, 4)["after"]["tables"].get("B", [])) == 0
    assert len(at(theirs, 5)["planned"]["tables"]["B"]) == 1  # normalised: both had the same table
    assert len(at(theirs, 5)["after"]["tables"]["B"]) == 2
    readmitted = next(iteration for iteration in ours if iteration is not None and iteration["prompts"] == ["B"] and iteration is not ours[0])
    assert len(readmitted["after"]["tables"]["B"]) == 1


def test_nobody_comes_back_in_an_iteration_that_preempts() -> None:
    """In the release a swapped group takes the place of one that was just recomputed, and is swapped out again."""
    _, ours, theirs = both("back beside a preemption")
    assert agreed(ours, theirs) == 2
    assert (at(theirs, 3)["after"]["waiting"], at(theirs, 3)["decodes"], bool(at(theirs, 3)["swap_in"])) == (["B"], ["A", "C"], True)
    assert bool(at(theirs, 4)["swap_out"])
    assert (at(ours, 3)["after"]["waiting"], at(ours, 3)["decodes"], at(ours, 3)["swap_in"]) == (["B"], ["A"], [])


def test_seats_are_sequences() -> None:
    """The release counts the groups that run, so five sequences run where four may."""
    _, ours, theirs = both("seats")
    assert agreed(ours, theirs) == 1
    assert sum(len(tables) for tables in at(theirs, 2)["after"]["tables"].values()) == 5
    assert (at(ours, 2)["decodes"], at(ours, 2)["after"]["waiting"]) == (["A"], ["B"])


def test_a_recomputation_may_take_several_iterations() -> None:
    """In the release whoever has become longer than an iteration waits for ever."""
    replay, ours, theirs = both("a recomputation larger than an iteration")
    assert agreed(ours, theirs) == 6
    assert at(theirs, 8)["after"]["waiting"] == ["B"]
    assert (at(theirs, 8)["prompts"], at(theirs, 8)["decodes"]) == ([], [])
    assert at(ours, 7)["prompts"] == ["B"]
    assert not replay.scheduler.has_unfinished_requests()


def test_answers_are_applied_group_after_group() -> None:
    """The release lets go of the dropped beams of all groups, then ends sequences; the blocks are the same, their order in the free list is not."""
    _, ours, theirs = both("a beam is dropped when another group ends")
    assert agreed(ours, theirs) == 1
    assert differences(ours[1], theirs[1]) == [f"/after/free: ours {[3, 0, *range(4, 12)]}, the release's {[0, 3, *range(4, 12)]}"]


def test_partings_are_those_of_the_readme() -> None:
    table = (ROOT / "engine/paper/README.md").read_text().split("Beside vLLM's first release")[1]
    assert set(RECORD["partings"]) == set(PARTINGS)
    assert [name for name in PARTINGS if name not in table] == []


def test_preemptions_are_told_in_the_replays() -> None:
    """The replays hear the same engine that the app shows."""
    recorded = next(recorded for recorded in RUNS if any(iteration and iteration["swap_out"] for iteration in recorded["run"]["iterations"]))
    replay = Replay(recorded["scenario"])
    for _ in recorded["run"]["iterations"]:
        replay.step()
    kinds = {type(event) for event in replay.events}
    assert {RequestPreempted, AllocationRefused} <= kinds


# ---------------------------------------------------------------------- names
def test_names_are_the_releases() -> None:
    """What the screens and docstrings call vLLM's first release has such a name there."""
    known = set(RECORD["symbols"])
    narration = "".join((ROOT / "views/narration" / name).read_text() for name in ("sentences_paper.py", "causes_paper.py"))
    named = set(re.findall(r'"((?:[A-Z]\w+|cache_ops)\.\w+)"', narration))
    named |= {f"BlockSpaceManager.{name}" for name in ("can_append_slot", "can_allocate", "append_slot", "allocate")}
    named |= {f"Scheduler._preempt{how}" for how in ("", "_by_swap", "_by_recompute")}
    for path in [*(ROOT / "engine/paper").glob("*.py"), *(ROOT / "engine/worker").glob("*.py"), *(ROOT / "engine").glob("paper*.py")]:
        for names in re.findall(r"vLLM's first\s+release:\s+([A-Z_][\w.]*(?:(?:, | and )\w[\w.]*)*)", path.read_text()):
            first, *others = re.split(r", | and ", names.rstrip("."))
            named |= {first, *(name if "." in name or name[0].isupper() else f"{first.split('.')[0]}.{name}" for name in others)}
    assert len(named) > 30
    assert sorted(named - known) == []
