"""Every event and every cause can be said, and what is said about Figure 6 is what the figure shows (paper, section 4.3; rules R1.5, R1.7, R1.11, R8.4)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.trace import events as e
from engine.trace.events import EVENT_KINDS, AnyEvent, Cause, CauseKind, kind_of
from engine.trace.frame import Frame, Trace
from tests.unit.views.handmade import HASHES, figure_6
from views.narration import Narration, narrate
from views.narration.causes import WHY
from views.narration.sentences import SENTENCES
from views.narration.words import count, listed, percent, slots, visible

SAMPLE_VALUES: dict[str, Any] = {
    "num_blocks": 9, "block_size": 4, "num_prompt_tokens": 7, "num_block_hashes": 1, "token_budget": 64, "num_hit_tokens": 4, "hit_block_ids": [7],
    "max_hit_tokens": 6, "num_new_tokens": 1, "at_gate": False, "block_ids": [7, 1], "left_free_queue": [7], "block_id": 7, "block_hash": HASHES[0],
    "parent_hash": None, "token_ids": [100, 101], "num_computed_tokens": 4, "num_scheduled_tokens": 3, "num_lost_tokens": 8, "token_budget_left": 57,
    "row": 0, "start": 0, "positions": [0, 1], "slots": [28, 29], "num_layers": 4, "backend": "torch", "layers": [0], "agrees_within": 1e-6,
    "query_lens": [3], "seq_lens": [7], "request_ids": ["A"], "token_id": 107, "position": 7, "reason": "length", "prepended": [1], "appended": [7],
    "still_referenced": [], "logical_indices": [0], "source_block_ids": [1], "destination_block_ids": [3], "ok": True, "message": "no room", "num_frames": 20,
    "num_cached_block": 1, "source_block_id": 1, "destination_block_id": 3, "logical_index": 0, "num_tokens": 8,
    "parent_id": "A", "beam_width": 2, "candidates": [e.BeamCandidate("A", 107, -0.5, "A"), e.BeamCandidate("A", 108, None, None, True, True)],
    "gpu_block_ids": [0, 7], "cpu_block_ids": [1, 0],
}  # fmt: skip


def sample_event(kind: str, cause: Cause, request_id: str | None = "A") -> AnyEvent:
    event_type = next(t for t in AnyEvent.__args__ if t.__struct_config__.tag == kind)
    own = [f for f in msgspec.structs.fields(event_type) if f.required and f.name != "cause"]
    values = {f.name: SAMPLE_VALUES[f.name] for f in own}
    if kind == "step_scheduled":
        values["num_scheduled_tokens"] = {"A": 3}
    return event_type(cause=cause, request_id=request_id, **values)


def say(trace: Trace, event: AnyEvent) -> Narration:
    frame: Frame = msgspec.structs.replace(trace.frames[-4], event=event)
    return narrate(trace.header, frame, trace.frames[-5])


def said(trace: Trace, kind: str, nth: int = 0) -> Narration:
    frame = [f for f in trace.frames if kind_of(f.event) == kind][nth]
    return narrate(trace.header, frame, trace.frames[frame.seq - 1] if frame.seq else None)


def test_no_event_kind_and_no_cause_is_without_words() -> None:
    assert set(SENTENCES) == set(EVENT_KINDS)
    assert set(WHY) == set(CauseKind)


@pytest.mark.parametrize("engine", ["v1", "paper"])
@pytest.mark.parametrize("kind", EVENT_KINDS)
def test_any_event_with_any_cause_gives_whole_sentences_even_without_facts(kind: str, engine: str) -> None:
    trace = figure_6()
    trace.header.config["engine"] = engine
    for cause in CauseKind:
        for request_id in ("A", "Z", None):
            narration = say(trace, sample_event(kind, Cause(cause), request_id))
            for text in (narration.text, narration.why):
                assert text
                assert text[0] == text[0].upper()
                assert text.rstrip()[-1] in ".!?"
                assert "{" not in text
            assert narration.kind == kind


def test_r1_5_a_new_block_is_explained_by_the_full_one_and_the_head_of_the_queue() -> None:
    narration = said(figure_6(), "blocks_allocated", 1)
    assert narration.text == "A takes block 3."
    assert narration.why == "Block 1 is full, so “brought” needs a new block. Block 3 was at the head of the free queue."
    assert (narration.symbol, narration.rule) == ("BlockPool.get_new_blocks", "R1.5")


def test_r1_5_the_first_blocks_are_explained_by_the_number_of_prompt_tokens() -> None:
    narration = said(figure_6(), "blocks_allocated")
    assert narration.text == "A takes blocks 7 and 1."
    assert narration.why.startswith("7 tokens need 2 blocks of 4 slots.")


def test_r1_11_a_hash_names_its_tokens_and_its_parent() -> None:
    trace = figure_6()
    assert "“Four score and seven”" in said(trace, "block_cached").why
    assert "starts the chain" in said(trace, "block_cached").why
    second = said(trace, "block_cached", 1)
    assert second.text == "Block 1 gets the hash ed6fa5."
    assert "parent 8d4c7c" in second.why
    assert "follow later" in second.why  # registered before the last slot is written (R7.7)


def test_r8_4_a_slot_is_block_times_size_plus_offset() -> None:
    narration = said(figure_6(), "slots_mapped", 2)
    assert narration.text == "Token 8 “brought” of A → slot 12."
    assert "3 × 4 + 0 = slot 12" in narration.why
    assert said(figure_6(), "slots_mapped").text == "The 7 tokens of A → slots 28 to 31 and 4 to 6."


def test_r1_7_freed_blocks_are_told_where_they_go() -> None:
    why = said(figure_6(), "blocks_freed").why
    assert "Hashed blocks 1 and 7 to the tail" in why
    assert "block 3 without a hash to the head" in why


def test_r1_7_without_prefix_caching_nothing_is_called_hashed() -> None:
    trace = figure_6()
    trace.header.config["enable_prefix_caching"] = False
    event = sample_event("blocks_freed", Cause(CauseKind.REQUEST_FINISHED, {"reason": "length"}))
    event = msgspec.structs.replace(event, block_ids=[3, 1, 7], prepended=[], appended=[3, 1, 7], still_referenced=[])
    assert say(trace, event).why.endswith("Blocks 3, 1 and 7 to the tail, as all blocks without prefix caching.")


def test_forced_tokens_say_so_and_what_the_model_would_have_said() -> None:
    narration = say(figure_6(), sample_event("token_sampled", Cause(CauseKind.FORCED, {"model_token_id": 108})))
    assert "(forced)" in narration.text
    assert "the model would have said “brought”" in narration.why


def test_a_refusal_adds_up_what_is_needed() -> None:
    facts = {"num_required": 1, "num_evictable_hits": 2, "num_watermark": 0, "num_free": 2, "num_reserved": 0}
    why = say(figure_6(), sample_event("allocation_refused", Cause(CauseKind.INSUFFICIENT_BLOCKS, facts))).why
    assert why == "It needs 1 new block + 2 cached blocks that the free queue would lose = 3, and 2 are free. No table was changed."


def test_rows_of_the_worker_are_cleared_added_appended_and_moved_under_their_own_names() -> None:
    trace = figure_6()
    row = {"request_id": "A", "row": 0, "start": 0}
    cleared = say(trace, e.RowUpdated(cause=Cause(CauseKind.LEFT_BATCH), block_ids=[], **row))
    added = say(trace, e.RowUpdated(cause=Cause(CauseKind.ADDED_TO_BATCH), block_ids=[7, 1], **row))
    appended = say(trace, e.RowUpdated(cause=Cause(CauseKind.APPENDED), block_ids=[3], **row))
    moved = say(trace, e.RowUpdated(cause=Cause(CauseKind.ADDED_TO_BATCH, {"from_row": 1}), block_ids=[3], **row))
    assert [n.symbol for n in (cleared, added, appended)] == ["BlockTable.clear_row", "BlockTable.add_row", "BlockTable.append_row"]
    assert moved.symbol == "BlockTable.move_row"


def test_an_error_of_the_engine_is_told_in_its_own_words() -> None:
    narration = say(figure_6(), e.EngineFailed(cause=Cause(CauseKind.ERROR), message="no request can go on: give the scenario a larger num_blocks"))
    assert narration.text == "The run stops here."
    assert narration.why.startswith("No request can go on: give the scenario a larger num_blocks. ")


def test_the_authors_note_stands_at_its_frame_only() -> None:
    trace = figure_6()
    trace.header.scenario["resolved_notes"] = {"3": "Step ① of the figure."}
    notes = [narrate(trace.header, f).note for f in trace.frames]
    assert notes[3] == "Step ① of the figure."
    assert [n for i, n in enumerate(notes) if i != 3] == [None] * (len(notes) - 1)


def test_tokens_without_a_text_and_blank_tokens_are_still_named() -> None:
    trace = figure_6()
    trace.header.vocabulary.clear()
    assert said(trace, "token_sampled").text == "A continues with token 107."
    assert (visible("  "), visible(""), visible("\n"), visible(" and")) == ("␣␣", "∅", "⏎", "and")


def test_lists_and_numbers_read_like_english() -> None:
    assert [listed([]), listed([7]), listed([7, 1]), listed([7, 1, 3])] == ["", "7", "7 and 1", "7, 1 and 3"]
    assert listed(range(1, 21)) == "1, 2, 3, 4, 5 and 15 more"
    assert [slots([12]), slots([28, 29, 30, 31, 4, 5, 6])] == ["slot 12", "slots 28 to 31 and 4 to 6"]
    assert [count(1, "block"), count(0, "block"), count(2, "query", "queries")] == ["1 block", "0 blocks", "2 queries"]
    assert [percent(0.93), percent(0.99999), percent(1.0), percent(0.031), percent(None)] == ["93 %", "over 99.9 %", "100 %", "3.1 %", "an unknown probability"]


def test_a_row_that_moves_and_a_request_that_sits_out_say_so() -> None:
    """R8.2: the rows of a batch leave no gaps; a running request without a token in this step leaves the batch, as in vLLM."""
    trace = figure_6()
    row: dict[str, Any] = {"request_id": "A", "row": 0, "start": 0}
    moved = say(trace, e.RowUpdated(cause=Cause(CauseKind.ADDED_TO_BATCH, {"from_row": 2}), block_ids=[7, 1], **row))
    assert "row 2 moves there" in moved.why
    running = next(f for f in trace.frames if (a := f.request("A")) is not None and a.status == "RUNNING")
    event = e.RowUpdated(cause=Cause(CauseKind.LEFT_BATCH), block_ids=[], **row)
    assert "sits this step out" in narrate(trace.header, msgspec.structs.replace(running, event=event), None).why
