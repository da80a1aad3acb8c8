"""What is said about the paper's engine is what its figures show; symbols are those of vLLM's first release, rules the paper's sections (4.3 to 4.5)."""

from __future__ import annotations

import msgspec
import pytest

from engine.trace import events as e
from engine.trace.events import Cause, CauseKind, kind_of
from engine.trace.frame import Trace
from tests.unit.views.paper_runs import beams, figure_5, figure_8, shared_prefix, swapped
from views.narration import Narration, narrate


def said(trace: Trace, kind: str, nth: int = 0) -> Narration:
    frame = [f for f in trace.frames if kind_of(f.event) == kind][nth]
    return narrate(trace.header, frame, trace.frames[frame.seq - 1] if frame.seq else None)


@pytest.fixture(scope="module")
def two_samples() -> Trace:
    return figure_8()


def test_the_pool_has_no_null_block(two_samples: Trace) -> None:
    assert said(two_samples, "trace_started").text == "A fresh pool: 9 free blocks of 4 slots each."
    assert "block 0 is a block like any other" in said(two_samples, "trace_started").why
    assert said(swapped(), "trace_started").text == "A fresh pool: 5 free blocks of 4 slots each, and 6 blocks of swap space in CPU memory."


def test_figure_8_the_prompt_is_shared_then_the_first_writer_copies(two_samples: Trace) -> None:
    fork = said(two_samples, "sequence_forked")
    assert fork.text == "A2 is forked from A1 and shares blocks 7 and 1."
    assert "for both samples" in fork.why
    assert fork.why.endswith("Ref count of each: 2.")
    assert (fork.symbol, fork.rule) == ("BlockSpaceManager.fork", "§4.4")
    copy = said(two_samples, "copy_queued")
    assert copy.text == "A1 writes “fathers” into block 1, but A2 refers to it too: it is copied to block 3 first."
    assert copy.why.endswith("Ref count: 2 → 1.")
    assert (copy.symbol, copy.rule) == ("BlockSpaceManager.append_slot", "§4.4")
    assert said(two_samples, "blocks_copied").text == "Block 1 → 3 copied, all layers at once."


def test_a_freed_block_goes_to_the_head_and_a_shared_one_loses_a_reference(two_samples: Trace) -> None:
    freed = said(two_samples, "blocks_freed")
    assert freed.text == "A1 lets go of blocks 7 and 3: 3 is free now, others still use 7."
    assert freed.why.endswith("Block 3: nobody refers to it any more, put at the head of the free queue, to be taken next; block 7: one reference less.")
    assert (freed.symbol, freed.rule) == ("BlockSpaceManager.free", "§4.3")


def test_beams_name_who_goes_on_who_is_forked_and_who_is_dropped() -> None:
    trace = beams()
    assert said(trace, "beams_chosen").text == "4 candidates of A go on (forced): A1 “fathers”, A2 “mothers”, A3 “brought” and A4 “forth”."
    assert said(trace, "beams_chosen", 7).text.startswith("4 candidates of A are finished (forced): ")  # the eighth output is the last one
    assert said(trace, "beams_chosen", 5).rule == "§4.4"
    fork = said(trace, "sequence_forked", 3)
    assert fork.text.startswith("A5 is forked from A1 and shares blocks ")
    assert fork.why.startswith("Its candidate is number 3 of 4.")
    assert said(trace, "request_finished").text == "A3 is dropped."
    dropped = said(trace, "blocks_freed")
    assert dropped.why.startswith("None of its continuations is among the best 4.")
    assert dropped.rule == "§4.4"


def test_the_best_candidates_are_called_so_where_the_model_decides() -> None:
    trace = beams(2)
    frame = next(f for f in trace.frames if isinstance(f.event, e.BeamsChosen))
    assert isinstance(frame.event, e.BeamsChosen)
    free = [msgspec.structs.replace(c, forced=False) for c in frame.event.candidates]
    narration = narrate(trace.header, msgspec.structs.replace(frame, event=msgspec.structs.replace(frame.event, candidates=free)))
    assert narration.text == "The best 2 candidates of A go on: A1 “fathers” and A2 “mothers”."
    assert narration.symbol == "_sample_from_generation_tokens"


def test_a_group_is_preempted_swapped_out_and_in_as_a_whole() -> None:
    trace = swapped()
    assert said(trace, "request_preempted").text == "A is preempted: both its sequences give way together."
    out, back = said(trace, "blocks_swapped_out"), said(trace, "blocks_swapped_in")
    assert out.text.startswith("A is swapped out: GPU blocks ")
    assert out.text.endswith("→ CPU blocks 0 and 1.")  # both samples share both blocks of the prompt
    assert "each shared block once" in out.why
    assert (out.symbol, out.rule) == ("BlockSpaceManager.swap_out", "§4.5")
    assert back.text.startswith("A is swapped in: CPU blocks 0 and 1 → GPU blocks ")
    assert "all of its blocks or none" in back.why
    assert back.symbol == "BlockSpaceManager.swap_in"
    waits = [narrate(trace.header, f).text for f in trace.frames if kind_of(f.event) == "allocation_refused"]
    assert "A stays in the swap space: there is no room for it on the GPU." in waits


def test_a_kept_prefix_is_named_and_its_sharers_copy_its_partial_block() -> None:
    trace = shared_prefix()
    assert said(trace, "prefix_kept").text == "Prefix P is computed: blocks 0 and 1 stay in memory for all requests to come."
    fork = said(trace, "sequence_forked")
    assert fork.text == "A begins with prefix P: it shares blocks 0 and 1."
    assert fork.why == "Its first 5 tokens are those of prefix P, which stays in memory: they need not be computed again. Ref count of each: 2."
    assert said(trace, "copy_queued").text.startswith("A writes “on” into block 1, but prefix P ")


def test_figure_5_tells_where_the_attention_goes() -> None:
    why = said(figure_5(), "attention_computed", 2).why
    assert why.endswith("Its attention: 25 % to logical block 0, 60 % to logical block 1 and 15 % to logical block 2.")
    assert why.startswith("“brought” is compared with the keys block by block")


def test_a_prompt_that_does_not_fit_says_how_much_room_there_is(two_samples: Trace) -> None:
    cause = Cause(CauseKind.PROMPT_TOO_LONG_FOR_STEP, {"num_tokens": 40, "token_budget": 24})
    event = e.AllocationRefused(cause=cause, request_id="B", num_new_tokens=40, at_gate=False)
    narration = narrate(two_samples.header, msgspec.structs.replace(two_samples.frames[1], event=event))
    assert narration.why == "A prompt is computed in one piece: 40 tokens, but this iteration has room for 24 more."


def test_a_swap_space_that_is_too_small_says_so(two_samples: Trace) -> None:
    cause = Cause(CauseKind.SWAP_SPACE_EXHAUSTED, {"num_blocks": 3, "num_cpu_free": 1})
    event = e.RequestPreempted(cause=cause, request_id="A", num_lost_tokens=8)
    narration = narrate(two_samples.header, msgspec.structs.replace(two_samples.frames[-5], event=event))
    assert "3 blocks of the swap space, but 1 is free there" in narration.why
    assert narration.symbol == "Scheduler._preempt_by_recompute"


@pytest.mark.parametrize("make", [figure_8, beams, swapped, shared_prefix])
def test_no_sentence_speaks_of_hashes_or_a_null_block(make: object) -> None:
    trace = make()  # type: ignore[operator]
    previous = None
    for frame in trace.frames:
        narration = narrate(trace.header, frame, previous)
        previous = frame
        words = f"{narration.text} {narration.why}".lower()
        assert "hash" not in words
        assert "null block 0" not in words
        assert narration.rule.startswith("§") or not narration.symbol
