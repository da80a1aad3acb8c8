"""What is said about groups, null blocks, copies, recurrent states and lookups (rules R3, R4, R6, R8.4), each sentence once; numbers of T8, T20 and T27."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.trace import events as e
from engine.trace.events import AnyEvent, Cause, CauseKind, GroupLookup, kind_of
from engine.trace.frame import Trace, TraceHeader
from tests.unit.views.sample_traces import copy_run, state_run, window_run
from views.narration import Narration, narrate
from views.narration.groups import groups_of, hash_block_size_of
from views.narration.stops import STOPS, stop_words, stop_words_at
from views.narration.words import Words, places


def said(trace: Trace, kind: str, nth: int = 0) -> Narration:
    frame = [f for f in trace.frames if kind_of(f.event) == kind][nth]
    return narrate(trace.header, frame, trace.frames[frame.seq - 1])


def say(event: AnyEvent, trace: Trace | None = None) -> Narration:
    trace = trace or window_run()
    return narrate(trace.header, msgspec.structs.replace(trace.frames[-1], event=event), trace.frames[-2])


def header(**config: Any) -> TraceHeader:
    return TraceHeader({}, {"num_blocks": 9, "block_size": 4, **config}, {"name": "none"}, {"name": "none"}, {}, 0, {})


@pytest.mark.parametrize(
    ("group", "label"),
    [
        ({"kind": "full_attention"}, "full"),
        ({"type": "full"}, "full"),
        ({"kind": "mla_attention"}, "MLA"),
        ({"kind": "sliding_window", "sliding_window": 8}, "window 8"),
        ({"kind": "chunked_local_attention", "attention_chunk_size": 8}, "chunk 8"),
        ({"kind": "mamba", "mamba_cache_mode": "align"}, "Mamba align"),
        ({"kind": "rswa", "rswa_window": 4}, "R-SWA 4"),
        ({"kind": "cross_attention"}, "encoder"),
        ({"kind": "something_new"}, "something new"),
    ],
)
def test_a_group_is_named_after_its_kind_and_what_tells_it_from_others(group: dict[str, Any], label: str) -> None:
    (named,) = groups_of(header(kv_cache_groups=[{"block_size": 8, **group}]))
    assert (named.label, named.block_size, named.is_state) == (label, 8, group.get("kind") == "mamba")
    assert "{" not in named.title


def test_without_named_groups_there_is_one_of_full_attention_and_equal_labels_get_numbers() -> None:
    assert [(g.label, g.block_size) for g in groups_of(header())] == [("full", 4)]
    assert [(g.label, g.block_size) for g in groups_of(header(kv_cache_groups=[]))] == [("full", 4)]
    window = {"kind": "sliding_window", "sliding_window": 8, "block_size": 4}
    assert [g.label for g in groups_of(header(kv_cache_groups=[{"kind": "full_attention"}, window, window]))] == ["full", "window 8 (1)", "window 8 (2)"]
    assert hash_block_size_of(header(kv_cache_groups=[{"kind": "full", "block_size": 12}, {"kind": "mamba", "block_size": 8}])) == 4  # R2.6
    assert hash_block_size_of(header(hash_block_size=2)) == 2


def test_with_one_group_nothing_is_said_about_groups() -> None:
    for frame in state_run().frames:
        assert "Mamba" not in narrate(state_run().header, frame).text


def test_r3_2_a_window_that_moves_on_tells_what_becomes_null_and_where_the_blocks_went() -> None:
    narration = said(window_run(), "blocks_skipped")
    assert narration.text == "A lets go of blocks 6 and 5 for window 8: logical blocks 0 and 1 become null."
    assert narration.why == (
        "The first 9 tokens lie outside the attention window and will not be read again. Hashed blocks 6 and 5 to the tail, to be kept longest."
    )
    assert (narration.symbol, narration.rule) == ("SingleTypeKVCacheManager.remove_skipped_blocks", "R3.2")


def test_a_state_that_is_left_behind_is_not_called_a_window() -> None:
    cause = Cause(CauseKind.OUTSIDE_WINDOW, {"num_skipped_tokens": 11})
    event = e.BlocksSkipped(cause=cause, request_id="A", group_id=1, logical_indices=[0], block_ids=[2], appended=[2])
    narration = say(event, copy_run())
    assert narration.why.startswith("A newer state exists")
    assert narration.symbol == "MambaManager.remove_skipped_blocks"
    superseded = said(state_run(), "blocks_skipped")
    assert superseded.text == "A lets go of block 1: logical block 1 becomes null."
    assert "A newer state has been computed from the one at logical block 1" in superseded.why


def test_r3_20_adopted_blocks_are_named_with_the_places_that_stay_null() -> None:
    assert said(window_run(), "blocks_touched", 1).text == "B adopts cached blocks 6 and 7 for window 8; 1 place before them stays null."
    assert said(copy_run(), "blocks_touched", 1).text == "B adopts cached block 5 for Mamba align; 1 place before it stays null."
    nothing = e.BlocksTouched(cause=Cause(CauseKind.PREFIX_CACHE_HIT), request_id="B", group_id=1, block_ids=[], left_free_queue=[], num_null_blocks=2)
    assert say(nothing).text == "B adopts no block for window 8: its table begins with 2 null blocks."
    assert "nothing had to be looked up" in say(nothing).why


def test_r4_4_a_lookup_is_explained_group_by_group_with_the_junction() -> None:
    """T22: the second group has 28 tokens, so the others are cut to that."""
    full = GroupLookup(0, 32, [1], Cause(CauseKind.SHORTENED_BY_GROUP, {"by_group": 1, "num_hit_tokens": 28}))
    window = GroupLookup(1, 28, [0], Cause(CauseKind.WINDOW_TAIL, {"num_needed": 2, "num_found": 1}))
    cause = Cause(CauseKind.WINDOW_TAIL)
    event = e.PrefixLookup(cause=cause, request_id="B", num_hit_tokens=28, hit_block_ids=[1], max_hit_tokens=32, groups=[full, window], junction=32)
    narration = say(event)
    assert narration.text == "B finds 28 tokens that every group has in the prefix cache."
    assert narration.why == (
        "Tokens that each group has by itself – full attention: 32 (cut to what window 8 has); window 8: 28 (lacks a run of 2 cached blocks, 1 found). "
        "One group alone reaches 32 tokens: a junction."
    )
    assert narration.rule == "R4.4"


@pytest.mark.parametrize(
    ("kind", "facts", "stop", "why"),
    [
        (CauseKind.TOKEN_DIFFERS, {"logical_index": 2, "position": 9, "token_id": 100, "other_token_id": 101, "other_request": "A"},
         "token 9 is “Four”, cached is “score”", "token 9 is “Four” here, while A has “score”"),
        (CauseKind.EXTRA_KEYS_DIFFER, {"logical_index": 0, "other_request": "A"}, "logical block 0 is cached under other extra keys", "cached block of A"),
        (CauseKind.PARENT_MISSING, {"logical_index": 1}, "logical block 1, further left, is not cached", "followed from its beginning only"),
        (CauseKind.EVICTED_EARLIER, {"logical_index": 3, "num_tokens": 16, "step": 5, "for_request": "C"}, "logical block 3 was evicted in step 5",
         "in step 5 C needed its physical block: the first 16 tokens"),
        (CauseKind.ALIGNMENT, {"alignment_tokens": 8, "num_cached_tokens": 12}, "only multiples of 8 tokens count", "12 tokens are cached"),
        (CauseKind.NO_STATE, {"max_hit_tokens": 13}, "no state of its beginning is cached", "at most 13 tokens"),
        (CauseKind.CHUNK_START, {"num_tokens": 8}, "8 tokens lie in earlier chunks and need no lookup", "the 8 tokens of earlier chunks count as found"),
        (CauseKind.EAGLE_DROP, {"num_dropped_tokens": 4}, "4 tokens given up for the draft head", "so 4 tokens of the hit are given up"),
        (CauseKind.NOT_USED, {"logical_index": 3}, "cached, but no hit can end behind it", "cached too"),
        (CauseKind.NOT_SHARED, {}, "encoder states are never shared", "never shared"),
    ],
)  # fmt: skip
def test_every_end_of_a_lookup_has_a_phrase_and_a_sentence(kind: CauseKind, facts: dict[str, Any], stop: str, why: str) -> None:
    trace = window_run()
    words = Words(trace.header, trace.frames[-1], None)
    assert stop_words(words, Cause(kind, facts)) == stop
    event = e.PrefixLookup(cause=Cause(kind, facts), request_id="B", num_hit_tokens=8, hit_block_ids=[1, 2], max_hit_tokens=13)
    assert why in say(event, trace).why


def test_lookups_end_for_these_reasons_and_no_other() -> None:
    trace = window_run()
    words = Words(trace.header, trace.frames[-1], None)
    assert all(stop_words(words, Cause(kind)) for kind in STOPS)
    assert stop_words(words, Cause(CauseKind.BLOCK_FULL)) == ""
    assert stop_words_at(words, Cause(CauseKind.NOT_CACHED, {"logical_index": 2}), 2) == "not cached"


def test_r6_3_a_hash_inside_a_block_says_so() -> None:
    attention, state = said(copy_run(), "block_cached", 2), said(copy_run(), "block_cached", 3)
    assert attention.text.endswith("of the first 12 tokens for full attention: it ends inside the block.")
    assert state.text.endswith("of the first 12 tokens for Mamba align: a state between two block ends.")
    assert "the prompt's last hash boundary is after 12 tokens, inside logical block 1" in attention.why.lower()
    assert {(n.symbol, n.rule) for n in (attention, state)} == {("BlockPool.cache_partial_block", "R6.3")}


def test_r1_11_the_full_blocks_hash_takes_over() -> None:
    digest = "ab" * 32
    narration = say(e.BlockEvicted(cause=Cause(CauseKind.PROMOTED, {"logical_index": 1, "num_tokens": 16}), block_id=3, block_hash=digest))
    assert narration.text == "Block 3 loses its hash ababab: it ended inside the block, and the full block's hash takes over."
    assert (narration.symbol, narration.rule) == ("BlockPool.cache_full_blocks", "R1.11")
    dropped = say(e.BlockEvicted(cause=Cause(CauseKind.SCENARIO, {"what": "evict"}), block_id=3, block_hash=digest))
    assert (dropped.symbol, dropped.rule) == ("BlockPool.evict_blocks", "R1.13")
    assert "Counts and the free queue stay as they are." in dropped.why


def test_r3_21_blocks_that_no_hit_could_use_stay_out_of_the_cache() -> None:
    cause = Cause(CauseKind.NOT_REACHABLE, {"num_needed": 1})
    narration = say(e.CachingSkipped(cause=cause, request_id="A", group_id=1, logical_indices=[0, 2], num_cached_block=4))
    assert narration.text == "Logical blocks 0 and 2 of A get no hash for window 8."
    assert "only the last block before that point" in narration.why
    assert narration.rule == "R3.21"
    null = say(e.CachingSkipped(cause=Cause(CauseKind.NULL_BLOCK), request_id="A", group_id=1, logical_indices=[0], num_cached_block=1))
    assert null.text == "Logical block 0 of A gets no hash for window 8."
    assert null.rule == "R1.11"


def test_r6_4_and_r6_5_a_copy_says_whose_block_is_new() -> None:
    producer, consumer = said(copy_run(), "copy_queued"), said(copy_run(), "copy_queued", 1)
    assert producer.text == "A copy of block 4 is queued for Mamba align: block 5 will keep what is cached."
    assert "registered for the first 12 tokens, and A is about to write over that" in producer.why
    assert (producer.symbol, producer.rule) == ("BlockPool.move_block_hashes", "R6.5")
    assert consumer.text == "A copy of block 3 is queued for full attention: B's table gets block 6 in its place."
    assert consumer.why.startswith("The hit of 12 tokens ends inside logical block 1.")
    assert (consumer.symbol, consumer.rule) == ("SingleTypeKVCacheManager._apply_cow", "R6.4")


def test_r6_6_and_r6_7_both_ends_are_let_go_before_the_copy_is_made() -> None:
    freed, copied = said(copy_run(), "blocks_freed", 1), said(copy_run(), "blocks_copied", 1)
    assert freed.text == "What was held for the copies is let go: blocks 3, 6, 5 and 7."
    assert "blocks 3, 6 and 7 stay with their other owners" in freed.why
    assert freed.rule == "R6.6"
    assert copied.text == "Copied, all layers at once: block 3 → 6 and 5 → 7."
    assert "All sources are read before any destination is written." in copied.why
    assert (copied.symbol, copied.rule) == ("copy_kv_cache_blocks_inplace", "R6.7")


def test_r3_43_a_table_of_states_is_filled_up_with_null() -> None:
    narration = said(state_run(), "state_blocks_arranged")
    assert narration.text == "A's table of states grows to 1 place: a null block fills it up."
    assert (narration.symbol, narration.rule) == ("MambaManager.allocate_new_blocks", "R3.43")
    cause = Cause(CauseKind.ONE_STATE, {"num_speculative_blocks": 1})
    moved = say(e.StateBlocksArranged(cause=cause, request_id="A", group_id=0, num_blocks=4, moved_from=[2]), state_run())
    assert moved.text == "A's table of states grows to 4 places: the block at logical block 2 moves to the end and leaves null behind."
    assert moved.why.endswith("1 further block is for draft tokens.")


def test_a_state_is_said_to_be_written_and_not_to_have_slots() -> None:
    first, _, third = (said(copy_run(), "state_written", n) for n in range(3))
    assert first.text == "A's recurrence begins from nothing and goes over 8 tokens to the state after 8 in block 2."
    assert first.why.startswith("A request begins without a state.")
    assert third.text == "A's recurrence goes on from the state after 12 in block 4 over 2 tokens to the state after 14, in place."
    assert third.why == "The table names the block of the newest state: it is read before the new one is written over it."
    assert said(copy_run(), "blocks_allocated", 1).why.startswith("A recurrent state takes one block")
    assert "the state after 8 tokens" in said(copy_run(), "block_cached", 1).why


def test_r3_43_a_state_that_moves_on_stays_where_it_was() -> None:
    """R3.43: the step after 8 tokens writes to the next block; the worker of vLLM copies the state there before it computes, in the mode “align” alone."""
    moved = said(state_run(), "state_written", 1)
    assert moved.text == "A's recurrence goes on from the state after 8 in block 1 over 2 tokens to the state after 10 in block 2."
    assert moved.why.startswith("The table has a block for the tokens that follow, so the old state stays as it is in block 1. vLLM copies it")
    trace = state_run()
    trace.header.config["kv_cache_groups"] = [{"kind": "mamba", "block_size": 4, "mamba_cache_mode": "all"}]
    assert "vLLM copies" not in said(trace, "state_written", 1).why
    event = e.StateWritten(
        cause=Cause(CauseKind.BLOCK_TABLE_LOOKUP), request_id="A", group_id=0, block_id=2, num_tokens=9, source_block_id=1, num_source_tokens=8, num_layers=3
    )
    assert "in block 1, in each of 3 layers." in say(event, state_run()).why


def test_r3_43_a_hit_on_a_state_restores_one_checkpoint() -> None:
    """B's hit of 12 tokens in copy_run: one state stands for all of them."""
    touched = said(copy_run(), "blocks_touched", 1)
    assert touched.why.startswith(
        "One checkpoint is restored: the state after 12 tokens stands for all of them, and the recurrence runs over the suffix alone."
    )
    assert said(copy_run(), "blocks_touched", 0).why.startswith("The same tokens after the same beginning have the same hash")


def test_r3_41_a_state_that_this_step_computes_makes_a_request_wait() -> None:
    facts = {"num_hit_tokens": 12}
    narration = say(e.AllocationRefused(cause=Cause(CauseKind.STATE_NOT_WRITTEN, facts), request_id="B", num_new_tokens=1, at_gate=False), copy_run())
    assert "the state after 12 tokens that is registered already" in narration.why
    assert narration.rule == "R3.41"


def test_a_refusal_shows_its_whole_sum() -> None:
    facts = {"num_required": 3, "num_evictable_hits": 2, "num_watermark": 1, "num_free": 5, "num_reserved": 0}
    narration = say(e.AllocationRefused(cause=Cause(CauseKind.INSUFFICIENT_BLOCKS, facts), request_id="C", num_new_tokens=9, at_gate=True))
    assert narration.text == "C does not fit as a whole and waits."
    assert narration.why.startswith("It needs 3 new blocks + 2 cached blocks that the free queue would lose + 1 kept as a reserve = 6, and 5 are free.")
    assert narration.rule == "R7.4"


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (CauseKind.CHUNKED_AT_BLOCK, "a recurrent state is kept only every 8 tokens"),
        (CauseKind.CHUNKED_AT_PROMPT_BOUNDARY, "the prompt's last hash boundary is after 12 tokens"),
        (CauseKind.CHUNKED_AT_JUNCTION, "another group's hit reached 12 tokens"),
    ],
)
def test_r3_44_a_shortened_chunk_says_at_what_it_ends(kind: CauseKind, part: str) -> None:
    cause = Cause(kind, {"num_wanted": 14, "num_new_tokens": 8, "block_size": 8, "num_tokens": 12})
    narration = say(e.RequestScheduled(cause=cause, request_id="B", num_scheduled_tokens=8, num_computed_tokens=0), copy_run())
    assert narration.why.startswith("It wants 14, but")
    assert part in narration.why


def test_r8_4_ranks_share_a_block() -> None:
    trace = window_run()
    trace.header.config.clear()
    trace.header.config.update({"num_blocks": 24, "block_size": 4, "decode_context_parallel_size": 2})
    cause = Cause(CauseKind.BLOCK_TABLE_LOOKUP, {"dcp_rank": 1})
    mapped = e.SlotsMapped(cause=cause, request_id="A", group_id=0, positions=[0, 1, 2, 3], slots=[-1, 28, -1, 29], token_ids=[100, 101, 102, 103])
    narration = say(mapped, trace)
    assert narration.text == "2 of the 4 tokens of A → slots 28 to 29 on rank 1."
    assert narration.why == (
        "A logical block has 8 tokens, 4 for each of 2 ranks, which take turns. Token 3 lies in physical block 7: 7 × 4 + 1 = slot 29 there."
    )
    none_here = e.SlotsMapped(cause=cause, request_id="A", group_id=0, positions=[0], slots=[-1], token_ids=[100])
    assert say(none_here, trace).text == "Token 0 “Four” of A → no slot on rank 1."


def test_a_scene_that_arranges_the_queue_says_who_does_it() -> None:
    cause = Cause(CauseKind.PREPARED)
    taken = say(e.BlocksTouched(cause=cause, block_ids=[8, 9], left_free_queue=[8, 9]))
    freed = say(e.BlocksFreed(cause=cause, block_ids=[9, 8], prepended=[9], appended=[8], still_referenced=[]))
    assert taken.text == "The scenario takes hold of blocks 8 and 9, to lay the queue out anew."
    assert freed.text == "The free queue is laid out: 9 come first; 8 come last."
    anew = say(e.BlocksFreed(cause=cause, block_ids=[8, 9], prepended=[], appended=[8, 9], still_referenced=[]))
    assert anew.text == "The free queue is laid out anew: 8 and 9."
    assert anew.why.startswith("This order is the scene's own")


def test_places_are_listed_in_order_and_runs_are_joined() -> None:
    assert [places(p) for p in ([3], [1, 0], [4, 3, 2, 1, 0], [0, 2, 3], [])] == [
        "logical block 3", "logical blocks 0 and 1", "logical blocks 0 to 4", "logical blocks 0, 2 and 3", "no logical block",
    ]  # fmt: skip
