"""What the browser gets of a run of the paper's engine: no null block, beams, attention shares, swap space as differences, corrections."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.trace.events import kind_of
from engine.trace.frame import Trace
from tests.unit.views.handmade import figure_6
from tests.unit.views.paper_runs import SHARES, beams, figure_5, figure_8, shared_prefix, swapped
from views.stage.payload import build_payload


def frame_of(payload: dict[str, Any], kind: str, nth: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = [f for f in payload["frames"] if f["kind"] == kind][nth]
    return found


def unfold_cpu(payload: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Indices of the CPU blocks and the swap space's free queue of every frame, as the browser puts them together."""
    blocks: list[int] = []
    queue: list[int] = []
    frames = []
    for sent in payload["frames"]:
        blocks, queue = list(sent.get("cpu_blocks", blocks)), list(sent.get("cpu_queue", queue))
        for block_id, index in sent.get("cpu_changed", []):
            blocks[block_id] = index
        if moved := sent.get("cpu_queue_change"):
            queue = [*moved["head"], *(b for b in queue if b not in moved["out"]), *moved["tail"]]
        frames.append((blocks, queue))
    return frames


@pytest.mark.parametrize("start", [0, 40])
def test_the_swap_space_of_every_frame_comes_back_from_differences(start: int) -> None:
    trace = swapped()
    payload = build_payload(trace, start=start)
    for frame, (blocks, queue) in zip(trace.frames[start:], unfold_cpu(payload), strict=True):
        assert [payload["blocks"][i] for i in blocks] == json.loads(msgspec.json.encode(tuple(frame.cpu_blocks)))
        assert queue == list(frame.cpu_free_queue)
    assert all("cpu_blocks" not in sent for sent in payload["frames"][1:])


def test_a_swap_names_its_pairs_and_what_joins_and_leaves_the_free_queue() -> None:
    trace = swapped()
    payload = build_payload(trace)
    out, back = (frame_of(payload, kind) for kind in ("blocks_swapped_out", "blocks_swapped_in"))
    event = next(f.event for f in trace.frames if kind_of(f.event) == "blocks_swapped_out")
    assert out["now"]["swapped"] == [list(pair) for pair in zip(event.gpu_block_ids, event.cpu_block_ids, strict=True)]  # type: ignore[union-attr]
    assert (out["now"]["swap"], back["now"]["swap"]) == ("out", "in")
    assert [sent["swapped"] for sent in payload["frames"] if "swapped" in sent] == [[], ["A"], []]
    assert set(back["now"]["left_queue"]) == {gpu for gpu, _ in back["now"]["swapped"]}


def test_block_0_is_a_block_and_the_header_counts_all_blocks() -> None:
    payload = build_payload(shared_prefix())
    header = payload["header"]
    assert (header["null_block"], header["engine"]["label"]) == (None, "paper, 2023")
    assert "8 blocks" in header["about"]
    assert "null" not in header["about"]
    assert frame_of(payload, "blocks_allocated")["now"]["blocks"] == [0, 1]
    assert build_payload(figure_6())["header"]["null_block"] == 0
    assert "8 blocks + null" in build_payload(figure_6())["header"]["about"]


@pytest.mark.parametrize(
    ("make", "parts"), [(figure_8, {"family"}), (swapped, {"family", "swap"}), (figure_5, {"shares"}), (shared_prefix, {"family"}), (figure_6, {"chains"})]
)
def test_the_stage_is_told_which_parts_a_run_needs(make: Callable[[], Trace], parts: set[str]) -> None:
    assert {name for name, needed in build_payload(make())["header"]["parts"].items() if needed} == parts


def test_candidates_travel_best_first_with_their_parents_and_what_becomes_of_them() -> None:
    chosen = frame_of(build_payload(beams()), "beams_chosen", 5)["beams"]
    assert (chosen["group"], chosen["width"]) == ("A", 4)
    assert [(c["parent"], c["sequence"]) for c in chosen["candidates"]] == [("A1", "A1"), ("A2", "A2"), ("A1", "A5"), ("A2", "A6")]
    assert all(c["forced"] for c in chosen["candidates"])


def test_shares_name_the_query_and_the_physical_block_of_each_logical_one() -> None:
    """Figure 5: logical blocks 0, 1, 2 lie in blocks 7, 1 and 3, and together get the whole attention (section 4.1)."""
    shares = frame_of(build_payload(figure_5()), "attention_computed", 2)["shares"]
    (request,) = shares["requests"]
    assert request["places"] == [[0, 7, SHARES[0]], [1, 1, SHARES[1]], [2, 3, SHARES[2]]]
    assert request["position"] == 8
    assert sum(share for _, _, share in request["places"]) == pytest.approx(1)


def test_corrections_and_unconfirmed_notes_travel_by_frame() -> None:
    trace = figure_6()
    correction = {"read": "One thing.", "really": "Another.", "rule": "S1"}
    trace.header.scenario.update(
        {"resolved_corrections": {"3": [correction]}, "resolved_notes": {"4": "A value."}, "unconfirmed_notes": [4], "pair": "figure-6"}
    )
    payload = build_payload(trace, start=5)
    assert payload["corrections"] == {"3": [correction]}
    assert payload["unconfirmed"] == [4]
    assert payload["header"]["pair"] == {"scene": "figure-6", "label": "How the paper does it"}
    assert build_payload(figure_8())["header"]["pair"]["label"] == "How vLLM V1 does it"


@pytest.mark.parametrize("make", [figure_8, beams, swapped, shared_prefix, figure_5])
def test_it_is_plain_data(make: Callable[[], Trace]) -> None:
    payload = build_payload(make())
    assert json.loads(json.dumps(payload)) == payload
