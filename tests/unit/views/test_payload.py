"""What the browser gets is the trace: nothing lost, nothing added, nothing that is not plain JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from engine.trace.events import Cause, CauseKind, EngineFailed, kind_of
from engine.trace.frame import Trace
from tests.unit.views.handmade import HASHES, TEXTS, figure_6
from views.narration import narrate
from views.stage.payload import build_payload


def plain(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def frame_of(payload: dict[str, Any], kind: str, nth: int = 0) -> dict[str, Any]:
    return [f for f in payload["frames"] if f["kind"] == kind][nth]


@pytest.mark.parametrize("start", [0, 1, 7, 10_000])
def test_indices_lead_back_to_the_states_of_every_frame(start: int) -> None:
    trace = figure_6()
    payload = build_payload(trace, start=start)
    assert payload["start"] == min(start, len(trace.frames))
    assert len(payload["frames"]) == len(trace.frames) - payload["start"]
    for frame, sent in zip(trace.frames[start:], payload["frames"], strict=True):
        assert [payload["blocks"][i] for i in sent["blocks"]] == plain(frame.blocks)
        assert [payload["requests"][i] for i in sent["requests"]] == plain(frame.requests)
        assert (sent["seq"], sent["step"], sent["op"], sent["op_index"]) == (frame.seq, frame.step, frame.op, frame.op_index)
        assert sent["queue"] == list(frame.free_queue)
        assert sent["kind"] == kind_of(frame.event)


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
    plain = ("say", "queue", "now", "slots", "chains", "agreed", "counters")
    assert [[f[k] for k in plain] for f in tail["frames"]] == [[f[k] for k in plain] for f in whole["frames"][9:]]


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
    assert frame_of(build_payload(figure_6()), "blocks_freed")["chains"] == [
        {"hash": HASHES[0], "parent": None, "known": True, "blocks": [7]},
        {"hash": HASHES[1], "parent": HASHES[0], "known": True, "blocks": [1]},
    ]


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
