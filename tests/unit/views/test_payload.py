"""What the browser gets is the trace: nothing lost, nothing added, nothing that is not plain JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.trace.events import Cause, CauseKind, EngineFailed, kind_of
from engine.trace.frame import Trace
from tests.unit.views.handmade import HASHES, TEXTS, figure_6
from tests.unit.views.sample_traces import copy_run, state_run, window_run
from views.narration import narrate
from views.stage.payload import build_payload, splice


def plain(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def chains(payload: dict[str, Any], sent: dict[str, Any]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = payload["chains"][sent["chains"]]
    return nodes


def frame_of(payload: dict[str, Any], kind: str, nth: int = 0) -> dict[str, Any]:
    return [f for f in payload["frames"] if f["kind"] == kind][nth]


def unfold(payload: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Block indices and free queue of every frame, as the browser puts them together: the first frame is whole, the others tell what changed."""
    blocks: list[int] = []
    queue: list[int] = []
    frames = []
    for sent in payload["frames"]:
        blocks, queue = list(sent.get("blocks", blocks)), list(sent.get("queue", queue))
        for block_id, index in sent.get("changed", []):
            blocks[block_id] = index
        if "queue_splice" in sent:
            first, removed, *inserted = sent["queue_splice"]
            queue[first : first + removed] = inserted
        frames.append((blocks, queue))
    return frames


@pytest.mark.parametrize("run", [figure_6, window_run, copy_run, state_run])
@pytest.mark.parametrize("start", [0, 1, 7, 10_000])
def test_indices_lead_back_to_the_states_of_every_frame(run: Callable[[], Trace], start: int) -> None:
    trace = run()
    payload = build_payload(trace, start=start)
    assert payload["start"] == min(start, len(trace.frames))
    assert len(payload["frames"]) == len(trace.frames) - payload["start"]
    for frame, sent, (blocks, queue) in zip(trace.frames[start:], payload["frames"], unfold(payload), strict=True):
        assert [payload["blocks"][i] for i in blocks] == plain(frame.blocks)
        assert queue == list(frame.free_queue)
        assert [payload["requests"][i] for i in sent["requests"]] == plain(frame.requests)
        assert [payload["rows"][i] for i in sent["rows"]] == plain(frame.rows)
        assert (sent["seq"], sent["step"], sent["op"], sent["op_index"]) == (frame.seq, frame.step, frame.op, frame.op_index)
        assert sent["kind"] == kind_of(frame.event)


def test_a_frame_sends_only_what_changed() -> None:
    frames = build_payload(window_run())["frames"]
    assert "blocks" in frames[0]
    assert "queue" in frames[0]
    assert all("blocks" not in f and "queue" not in f for f in frames[1:])
    lookup = next(f for f in frames if f["kind"] == "prefix_lookup")
    assert "changed" not in lookup
    assert "queue_splice" not in lookup
    skipped = next(f for f in frames if f["kind"] == "blocks_skipped")
    assert sorted(block_id for block_id, _ in skipped["changed"]) == [5, 6]
    assert skipped["queue_splice"] == [15, 0, 6, 5]  # R3.22: 6 before 5, both to the tail


@pytest.mark.parametrize(("old", "new"), [([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [2, 3]), ([2, 3], [9, 2, 3, 8]), ([], [4]), ([4, 4], [4]), ([1, 2], [3, 4, 5])])
def test_a_splice_makes_one_queue_of_the_other(old: list[int], new: list[int]) -> None:
    first, removed, *inserted = splice(old, new)
    assert [*old[:first], *inserted, *old[first + removed :]] == new


def test_states_that_did_not_change_are_sent_once() -> None:
    payload = build_payload(figure_6())
    for table in ("blocks", "requests"):
        rows = [json.dumps(row) for row in payload[table]]
        assert len(rows) == len(set(rows))
    assert len(payload["blocks"]) < 30  # 17 frames of 9 blocks are 153 states


def test_equal_states_of_different_objects_are_sent_once_too() -> None:
    trace = figure_6()
    copied = [msgspec.structs.replace(f, blocks=tuple(msgspec.structs.replace(b) for b in f.blocks)) for f in trace.frames]
    assert build_payload(Trace(trace.header, copied, True)) == build_payload(trace)


def test_it_is_plain_json_and_small() -> None:
    payload = build_payload(figure_6())
    text = json.dumps(payload, allow_nan=False)
    assert json.loads(text) == payload
    assert len(text) < 2_000 * len(payload["frames"])


def test_portions_are_the_whole_in_pieces() -> None:
    trace = figure_6()
    whole, tail = build_payload(trace), build_payload(trace, start=9)
    plain = ("say", "now", "slots", "lookup", "copies", "agreed", "counters")
    assert [[f[k] for k in plain] for f in tail["frames"]] == [[f[k] for k in plain] for f in whole["frames"][9:]]
    assert [chains(tail, f) for f in tail["frames"]] == [chains(whole, f) for f in whole["frames"][9:]]


@pytest.mark.parametrize("start", range(26, 54, 3))
def test_a_portion_that_begins_between_queueing_and_copying_knows_the_copies(start: int) -> None:
    whole, tail = build_payload(copy_run()), build_payload(copy_run(), start=start)
    assert [f["copies"] for f in tail["frames"]] == [f["copies"] for f in whole["frames"][start:]]


def test_each_frame_carries_its_own_narration() -> None:
    trace = figure_6()
    for index, sent in enumerate(build_payload(trace)["frames"]):
        narration = narrate(trace.header, trace.frames[index], trace.frames[index - 1] if index else None)
        assert sent["say"] == {"text": narration.text, "why": narration.why, "symbol": narration.symbol, "rule": narration.rule}


def test_a_badge_for_the_kernel_appears_only_after_a_comparison() -> None:
    frames = build_payload(figure_6())["frames"]
    first = next(i for i, f in enumerate(frames) if f["kind"] == "attention_computed")
    assert all(f["agreed"] is None for f in frames[:first])
    assert all(f["agreed"] == "kernel = reference within 10⁻⁶ (layer 0)" for f in frames[first:])


def test_what_moved_is_told_with_its_origin_and_its_destination() -> None:
    payload = build_payload(figure_6())
    taken = frame_of(payload, "blocks_allocated", 1)["now"]
    assert (taken["blocks"], taken["left_queue"], taken["queue_text"]) == ([3], [3], "popped from the head, given to A")
    freed = frame_of(payload, "blocks_freed")["now"]
    assert freed["joined_queue"] == [3, 1, 7]
    assert freed["queue_text"] == "no hash: put at the head; hashed: put at the tail"


def test_slots_of_figure_6_are_those_of_the_paper() -> None:
    payload = build_payload(figure_6())
    assert [frame_of(payload, "slots_mapped", n)["slots"]["slots"] for n in range(3)] == [[28, 29, 30, 31, 4, 5, 6], [7], [12]]


def test_chains_know_their_parents_and_their_blocks() -> None:
    payload = build_payload(figure_6())
    assert chains(payload, frame_of(payload, "blocks_freed")) == [
        {"hash": HASHES[0], "groups": [[0, [7]]], "parent": None, "lost": False, "known": True, "tokens": ["A", 0, 4]},
        {"hash": HASHES[1], "groups": [[0, [1]]], "parent": HASHES[0], "lost": False, "known": True, "tokens": ["A", 4, 8]},
    ]


def test_one_hash_stands_for_the_blocks_of_all_groups() -> None:
    """R1.10: the key is the hash with the group's number, so the groups of one prefix share a hash and nothing else."""
    payload = build_payload(window_run())
    nodes = chains(payload, payload["frames"][-1])
    assert [n["groups"] for n in nodes] == [[[0, [1]], [1, [5]]], [[0, [2]], [1, [6]]], [[0, [3]], [1, [7]]], [[0, [4]], [1, [8]]]]
    assert [n["parent"] for n in nodes] == [None, *(n["hash"] for n in nodes[:-1])]


def test_a_hash_inside_a_block_hangs_on_the_block_before() -> None:
    """R6.3: A@12 of blocks of 8 tokens follows A@8; it covers 4 tokens more."""
    payload = build_payload(copy_run())
    whole, part = chains(payload, payload["frames"][-1])
    assert (part["parent"], part["lost"], part["tokens"]) == (whole["hash"], False, ["A", 8, 12])


def test_a_chain_with_a_hole_says_so_but_a_state_needs_nothing_before_it() -> None:
    trace = window_run()
    frame = trace.frames[-1]
    left = tuple(entry for entry in frame.hash_map if not entry[0].startswith(frame.hash_map[1][0].split(":")[0]))
    trace.frames.append(msgspec.structs.replace(frame, hash_map=left))
    payload = build_payload(trace)
    first, after, last = chains(payload, payload["frames"][-1])
    assert (after["lost"], after["parent"]) == (True, first["hash"])
    assert (last["lost"], last["parent"]) == (False, after["hash"])
    states = build_payload(state_run())
    (state,) = chains(states, states["frames"][-1])
    assert (state["lost"], state["parent"], state["tokens"]) == (False, None, ["A", 0, 8])


def test_a_copy_is_under_way_from_queueing_to_copying() -> None:
    """R6.4 to R6.7, with the blocks of the recorded run T20."""
    frames = build_payload(copy_run())["frames"]
    assert [f["copies"] for f in frames if f["kind"] == "copy_queued"] == [[[4, 5]], [[3, 6]], [[3, 6], [5, 7]]]
    assert [f["copies"] for f in frames if f["kind"] == "blocks_freed"] == [[[4, 5]], [[3, 6], [5, 7]]]  # let go, but not copied yet (R6.6)
    done = [f for f in frames if f["kind"] == "blocks_copied"]
    assert [(f["copies"], f["now"]["copied"]) for f in done] == [([], [[4, 5]]), ([], [[3, 6], [5, 7]])]
    queued = frame_of(build_payload(copy_run()), "copy_queued")["now"]
    assert (queued["left_queue"], queued["blocks"]) == ([5], [4, 5])


def test_a_lookup_is_sent_group_by_group_with_the_reason_for_its_end() -> None:
    lookup = frame_of(build_payload(window_run()), "prefix_lookup")["lookup"]
    assert lookup == {
        "request": "B", "tokens": 12, "junction": 0,
        "groups": [
            {"group": 0, "tokens": 12, "blocks": [1, 2, 3], "stop": "one token must be computed", "at": 3},
            {"group": 1, "tokens": 12, "blocks": [0, 6, 7], "stop": "logical block 3 has only 2 of 4 tokens", "at": 3},
        ],
    }  # fmt: skip


def test_the_header_names_the_groups() -> None:
    groups = build_payload(copy_run())["header"]["groups"]
    assert [(g["label"], g["block_size"], g["is_state"]) for g in groups] == [("full", 8, False), ("Mamba align", 8, True)]
    assert [g["label"] for g in build_payload(figure_6())["header"]["groups"]] == ["full"]


def test_prompts_with_markup_travel_as_text() -> None:
    trace = figure_6()
    trace.header.vocabulary[100] = "<img src=x onerror=alert(1)>"
    payload = build_payload(trace)
    assert payload["vocabulary"]["100"] == "<img src=x onerror=alert(1)>"
    assert [payload["vocabulary"][str(101 + i)] for i in range(9)] == TEXTS[1:]


def test_notes_of_the_author_are_sent_whole_with_every_portion() -> None:
    trace = figure_6()
    trace.header.scenario["resolved_notes"] = {"2": "Look here."}
    assert build_payload(trace, start=5)["notes"] == {"2": "Look here."}


def test_a_run_that_failed_is_over_and_one_that_can_go_on_is_not() -> None:
    trace = figure_6()
    growing = Trace(trace.header, trace.frames[:5], False)
    assert build_payload(growing)["complete"] is False
    failed = EngineFailed(cause=Cause(CauseKind.ERROR), message="no block is free")
    growing.frames.append(msgspec.structs.replace(trace.frames[5], event=failed))
    assert build_payload(growing)["complete"] is True
    assert build_payload(Trace(trace.header, [], False))["frames"] == []


def test_making_it_needs_neither_streamlit_nor_torch() -> None:
    code = "import sys, views.stage.payload; print([m for m in ('streamlit', 'torch', 'transformers', 'engine.core', 'engine.session') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
