"""What the browser gets is the trace: nothing lost, nothing added, nothing that is not plain JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.core.output import SamplingParams
from engine.session import GroupConfig, RequestSpec, Session, SessionConfig
from engine.trace.events import AttentionComputed, Cause, CauseKind, EngineFailed, kind_of
from engine.trace.frame import Trace
from tests.unit.views.handmade import TEXTS, figure_6
from tests.unit.views.sample_traces import copy_run, state_run, window_run
from views.narration import narrate
from views.stage.paper_parts import shares_of
from views.stage.payload import build_payload


def plain(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def frame_of(payload: dict[str, Any], kind: str, nth: int = 0) -> dict[str, Any]:
    return [f for f in payload["frames"] if f["kind"] == kind][nth]


Unfolded = tuple[list[int], list[int], dict[str, list[int]]]


def unfold(payload: dict[str, Any]) -> list[Unfolded]:
    """Block indices, free queue and prefix cache of every frame, as the browser puts them together: the first frame is whole, the others tell what changed."""
    blocks: list[int] = []
    queue: list[int] = []
    cache: dict[str, list[int]] = {}
    frames = []
    for sent in payload["frames"]:
        blocks, queue, cache = list(sent.get("blocks", blocks)), list(sent.get("queue", queue)), dict(sent.get("cache", cache))
        for block_id, index in sent.get("changed", []):
            blocks[block_id] = index
        if moved := sent.get("queue_change"):
            queue = [*moved["head"], *(b for b in queue if b not in moved["out"]), *moved["tail"]]
        for key, ids in sent.get("cache_changes", []):
            cache.pop(key, None) if not ids else cache.update({key: ids})
        frames.append((blocks, queue, cache))
    return frames


def session_run() -> Trace:
    """A recorded run with two groups, evictions and a queue that is taken from and given to at both ends."""
    sampling = SamplingParams(max_tokens=6, forced_token_ids=(7, 8, 9, 10, 11, 12))
    groups = (GroupConfig("full"), GroupConfig("sliding_window", sliding_window=8))
    requests = [RequestSpec(f"R{i}", tuple(range(14)) if i % 2 else tuple(range(40, 55)), sampling, arrival_step=1 + 3 * i) for i in range(4)]
    return Session(SessionConfig(num_blocks=17, block_size=4, kv_cache_groups=groups), tuple(requests), model_name="none", vocabulary=str).run_to_end()


def standing(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """What stays until it is sent anew, for every frame; requests and rows as states instead of indices."""
    requests: list[dict[str, Any]] = []
    for row in payload["requests"]:
        more = row.get("more", {})
        whole = {**(requests[row["base"]] if "base" in row else {}), **{k: v for k, v in row.items() if k not in ("base", "more")}}
        requests.append({**whole, **{name: whole[name] + tail for name, tail in more.items()}})
    kept: dict[str, Any] = {}
    frames = []
    for sent in payload["frames"]:
        kept.update({name: sent[name] for name in ("requests", "rows", "running", "waiting", "copies", "agreed", "counters") if name in sent})
        frames.append({**kept, "requests": [requests[i] for i in kept["requests"]], "rows": [payload["rows"][i] for i in kept["rows"]]})
    return frames


@pytest.mark.parametrize("run", [figure_6, window_run, copy_run, state_run, session_run])
@pytest.mark.parametrize("start", [0, 1, 7, 10_000])
def test_indices_lead_back_to_the_states_of_every_frame(run: Callable[[], Trace], start: int) -> None:
    trace = run()
    payload = build_payload(trace, start=start)
    assert payload["start"] == min(start, len(trace.frames))
    assert len(payload["frames"]) == len(trace.frames) - payload["start"]
    for frame, sent, (blocks, queue, cache), kept in zip(trace.frames[start:], payload["frames"], unfold(payload), standing(payload), strict=True):
        assert [payload["blocks"][i] for i in blocks] == plain(tuple(frame.blocks))
        assert queue == list(frame.free_queue)
        assert list(cache.items()) == [(key, list(ids)) for key, ids in frame.hash_map]
        assert kept["requests"] == plain(tuple(frame.requests))
        assert kept["rows"] == plain(frame.rows)
        assert (kept["running"], kept["waiting"], kept["counters"]) == (list(frame.running), list(frame.waiting), plain(frame.counters))
        assert (sent["seq"], sent["step"], sent["op"], sent["op_index"]) == (frame.seq, frame.step, frame.op, frame.op_index)
        assert sent["kind"] == kind_of(frame.event)


@pytest.mark.parametrize("run", [window_run, session_run])
def test_a_frame_sends_only_what_changed(run: Callable[[], Trace]) -> None:
    frames = build_payload(run())["frames"]
    assert {"blocks", "queue", "cache"} <= frames[0].keys()
    assert all(not {"blocks", "queue", "cache"} & f.keys() for f in frames[1:])
    lookup = next(f for f in frames if f["kind"] == "prefix_lookup")
    assert not {"changed", "queue_change", "cache_changes"} & lookup.keys()
    skipped = next(f for f in frames if f["kind"] == "blocks_skipped")
    assert sorted(block_id for block_id, _ in skipped["changed"]) == sorted(skipped["now"]["blocks"])
    assert skipped["queue_change"] == {"out": [], "head": [], "tail": skipped["now"]["joined_queue"]}  # R3.22: the higher index first, all hashed


def test_recorded_and_hand_made_sequences_give_the_same_payload() -> None:
    trace = session_run()
    plain = [msgspec.structs.replace(f, blocks=tuple(f.blocks), free_queue=tuple(f.free_queue), hash_map=tuple(f.hash_map)) for f in trace.frames]
    shared, tuples = build_payload(trace), build_payload(Trace(trace.header, plain, trace.complete))
    assert unfold(shared) == unfold(tuples)


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
    names = ("say", "now", "slots", "lookup", "cache_changes", "queue_change")
    assert [[f.get(k) for k in names] for f in tail["frames"][1:]] == [[f.get(k) for k in names] for f in whole["frames"][10:]]
    assert standing(tail) == standing(whole)[9:]
    assert unfold(tail)[0][1:] == unfold(whole)[9][1:]


@pytest.mark.parametrize("start", range(26, 54, 3))
def test_a_portion_that_begins_between_queueing_and_copying_knows_the_copies(start: int) -> None:
    whole, tail = build_payload(copy_run()), build_payload(copy_run(), start=start)
    assert [f["copies"] for f in standing(tail)] == [f["copies"] for f in standing(whole)[start:]]


def test_each_frame_carries_its_own_narration() -> None:
    trace = figure_6()
    for index, sent in enumerate(build_payload(trace)["frames"]):
        narration = narrate(trace.header, trace.frames[index], trace.frames[index - 1] if index else None)
        assert sent["say"] == {"text": narration.text, "why": narration.why, "symbol": narration.symbol, "rule": narration.rule}


def test_a_badge_for_the_kernel_appears_only_after_a_comparison() -> None:
    payload = build_payload(figure_6())
    frames = payload["frames"]
    first = next(i for i, f in enumerate(frames) if f["kind"] == "attention_computed")
    kept = standing(payload)
    assert all(f["agreed"] is None for f in kept[:first])
    assert all(f["agreed"] == "kernel = reference within 10⁻⁶ (layer 0)" for f in kept[first:])


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


def test_a_copy_is_under_way_from_queueing_to_copying() -> None:
    """R6.4 to R6.7, with the blocks of the recorded run T20."""
    payload = build_payload(copy_run())
    frames = [{**sent, **kept} for sent, kept in zip(payload["frames"], standing(payload), strict=True)]
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
            {"group": 0, "tokens": 12, "blocks": [1, 2, 3], "stop": "one token must be computed", "stops": []},
            {"group": 1, "tokens": 12, "blocks": [0, 6, 7], "stop": "logical block 3 has only 2 of 4 tokens",
             "stops": [[3, 8, "cached, but no hit can end behind it"]]},
        ],
    }  # fmt: skip


def test_a_window_alone_is_found_from_its_null_places_on() -> None:
    """The event names the blocks that would be adopted; the places before them, which stay null, follow from the number of tokens (R3.20)."""
    sampling = SamplingParams(max_tokens=2, forced_token_ids=(7, 8))
    config = SessionConfig(num_blocks=17, block_size=4, kv_cache_groups=(GroupConfig("sliding_window", sliding_window=5),))
    requests = tuple(RequestSpec(name, tuple(range(14)), sampling, arrival_step=step) for name, step in (("A", 1), ("B", 4)))
    payload = build_payload(Session(config, requests, model_name="none", vocabulary=str).run_to_end())
    (found,) = frame_of(payload, "prefix_lookup", 1)["lookup"]["groups"]
    assert (found["tokens"], found["blocks"]) == (12, [0, 0, 3])


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


@pytest.mark.parametrize(("window", "own", "said"), [(3, 8, "window 3, not 8: the text may suffer"), (8, 8, None), (None, 8, None), (None, None, None)])
def test_another_window_than_the_models_own_is_said(window: int | None, own: int | None, said: str | None) -> None:
    trace = figure_6()
    trace.header.config["sliding_window"] = window
    trace.header.model["sliding_window"] = own
    found = build_payload(trace)["header"]["other_window"]
    assert (found and found["text"]) == said
    assert found is None or "trained with a window of 8 tokens" in found["title"]


def test_attention_shares_go_to_the_blocks_of_the_layers_own_group() -> None:
    """Not to those of group 0; places that are null now and got nothing are left out."""
    trace = window_run()
    frame = next(f for f in trace.frames if f.requests and any(0 in table for table in f.requests[0].block_ids))
    request = frame.requests[0]
    group_id = next(g for g, table in enumerate(request.block_ids) if 0 in table)
    table = request.block_ids[group_id]
    shares = [0.0 if block_id == 0 else 0.5 for block_id in table]
    event = AttentionComputed(
        cause=Cause(CauseKind.COMPARED_WITH_REFERENCE), group_id=group_id, backend="torch", layers=[0], agrees_within=1e-6, query_lens=[1],
        seq_lens=[len(request.token_ids)], request_ids=[request.request_id], block_shares=[shares], shares_layer=0,
    )  # fmt: skip
    shown = shares_of(event, frame)
    assert shown is not None
    assert shown["requests"][0]["places"] == [[index, block_id, 0.5] for index, block_id in enumerate(table) if block_id]
    assert shown["requests"][0]["heads"] == []
    heads = [[0.0 if block_id == 0 else share for block_id in table] for share in (0.25, 0.75)]
    by_head = shares_of(msgspec.structs.replace(event, head_shares=[heads]), frame)
    assert by_head is not None
    assert by_head["requests"][0]["heads"] == [[share] * sum(block_id != 0 for block_id in table) for share in (0.25, 0.75)]


def test_a_state_goes_from_the_block_that_was_read_to_the_one_that_was_written() -> None:
    """The ring is on the block that changed; the one that was read is told beside it."""
    nows = [frame["now"] for frame in build_payload(state_run())["frames"] if frame["kind"] == "state_written"]
    assert [now["state"] for now in nows] == [[None, 1, 8], [1, 2, 2], [2, 2, 1]]
    assert [now["blocks"] for now in nows] == [[1], [2], [2]]


def test_making_it_needs_neither_streamlit_nor_torch() -> None:
    code = "import sys, views.stage.payload; print([m for m in ('streamlit', 'torch', 'transformers', 'engine.core', 'engine.session') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
