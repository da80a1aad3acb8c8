"""Sessions of the paper's engine without a model: what the manager decides, against the paper's drawings and sections. Loads no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import InvalidInput
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper_session import PaperSession
from engine.session_config import ActionSpec
from engine.trace import codec
from engine.trace.events import (
    BlocksCopied,
    BlocksSwappedIn,
    BlocksSwappedOut,
    CauseKind,
    CopyQueued,
    EngineFailed,
    KVWritten,
    RecordingStopped,
    SequenceForked,
    TraceStarted,
)
from engine.trace.frame import BlockOwner, Frame, Trace
from engine.trace.shared_sequence import SharedSequence

FIGURE_8 = PaperConfig(num_blocks=9, block_size=4, free_queue_order=(7, 1, 3))
TWO = PaperRequestSpec("A", tuple(range(100, 107)), max_tokens=3, n=2, forced_token_ids=((1, 2, 3), (4, 5, 6)))
BEAMS = PaperRequestSpec("A", (100, 101), max_tokens=2, beam_width=2, forced_beams=(((0, 1), (0, 2)), ((0, 3), (0, 4))))


def session(config: PaperConfig, *requests: PaperRequestSpec, actions: tuple[ActionSpec, ...] = ()) -> PaperSession:
    return PaperSession(config, requests, actions, vocabulary=str)


def one(request_id: str, num_prompt: int, num_outputs: int, *, base: int = 0, **more: object) -> PaperRequestSpec:
    outputs = tuple(range(base + num_prompt, base + num_prompt + num_outputs))
    prompt = tuple(range(base, base + num_prompt))
    return PaperRequestSpec(request_id, prompt, max_tokens=num_outputs, forced_token_ids=(outputs,), **more)  # type: ignore[arg-type]


def events(trace: Trace, kind: type, request_id: str | None = None) -> list[Frame]:
    return [f for f in trace.frames if isinstance(f.event, kind) and request_id in (None, f.event.request_id)]


# ------------------------------------------------------------------ what the frames show
def test_figure_8_block_by_block() -> None:
    """The paper's Figure 8: both samples share blocks 7 and 1; A1 copies block 1 to 3 and writes there, A2 writes in place."""
    trace = session(FIGURE_8, TWO).run_to_end()
    assert trace.complete
    fork = events(trace, SequenceForked)[0]
    assert [(r.request_id, r.sequence_group, r.parent_id, r.block_ids) for r in fork.requests] == [
        ("A1", "A", None, ((7, 1),)),
        ("A2", "A", "A1", ((7, 1),)),
    ]
    assert [fork.blocks[b].ref_cnt for b in (7, 1)] == [2, 2]
    assert fork.blocks[1].owners == (BlockOwner("A1", 0, 1), BlockOwner("A2", 0, 1))
    assert (fork.running, fork.waiting) == (("A1", "A2"), ())
    queued = events(trace, CopyQueued)[0]
    assert (queued.event.source_block_id, queued.event.destination_block_id) == (1, 3)
    assert [(queued.blocks[b].ref_cnt, queued.blocks[b].num_filled) for b in (1, 3)] == [(1, 3), (1, 0)]
    assert events(trace, BlocksCopied)[0].blocks[3].token_ids == (104, 105, 106, None)
    written = events(trace, KVWritten)[2]
    assert written.blocks[3].token_ids == (104, 105, 106, 1)
    assert written.blocks[1].token_ids == (104, 105, 106, 4)
    last = trace.frames[-1]
    assert [r.token_ids[7:] for r in last.requests] == [(1, 2, 3), (4, 5, 6)]
    assert all(r.forced == (7, 8, 9) for r in last.requests)


def test_a_fresh_pool_begins_with_block_0_and_no_block_is_special() -> None:
    """The paper has no null block."""
    trace = session(PaperConfig(num_blocks=3, block_size=4), one("A", 3, 2)).run_to_end()
    first = trace.frames[0]
    assert isinstance(first.event, TraceStarted)
    assert list(first.free_queue) == [0, 1, 2]
    assert not any(block.is_null for block in first.blocks)
    assert [f.event.slots for f in events(trace, KVWritten)] == [[0, 1, 2], [3]]


def test_a_waiting_request_stands_there_by_its_own_name_and_one_sequence_is_called_like_it() -> None:
    """`waiting` names requests, `running` sequences; two samples need two seats (max_num_seqs), so B waits."""
    config = PaperConfig(num_blocks=9, block_size=4, max_num_seqs=2)
    trace = session(config, one("B", 3, 2), TWO).run_to_end()
    waits = [f for f in trace.frames if f.waiting and f.running]
    assert {(f.waiting, f.running) for f in waits} == {(("A",), ("B",))}
    states = trace.frames[-1].requests
    assert [(r.request_id, r.sequence_group) for r in states] == [("B", None), ("A1", "A"), ("A2", "A")]


def test_swapped_blocks_show_their_pages_and_come_back_shared() -> None:
    """Section 4.5: a group is swapped as a whole, each shared block once, and its sharing is the same afterwards."""
    config = PaperConfig(num_blocks=5, block_size=4, num_cpu_blocks=6, preemption_mode="swap")
    trace = session(config, one("Z", 8, 6, base=50), TWO).run_to_end()
    assert trace.complete
    out, back = events(trace, BlocksSwappedOut)[0], events(trace, BlocksSwappedIn)[0]
    assert out.swapped == ("A",)
    a1, a2 = (out.request(name) for name in ("A1", "A2"))
    assert a1 is not None
    assert a2 is not None
    assert (a1.status, a1.block_ids, a2.block_ids) == ("SWAPPED", ((),), ((),))
    assert a1.cpu_block_ids[0] == a2.cpu_block_ids[0]
    shared = out.cpu_blocks[a1.cpu_block_ids[0]]
    assert (shared.ref_cnt, shared.token_ids) == (2, (100, 101, 102, 103))
    assert shared.owners == (BlockOwner("A1", 0, 0), BlockOwner("A2", 0, 0))
    assert len(out.cpu_free_queue) == 6 - len(out.event.cpu_block_ids)
    assert back.swapped == ()
    states = [back.request(name) for name in ("A1", "A2")]
    tables = [state.block_ids[0] for state in states if state is not None]
    assert tables[0][0] == tables[1][0]
    assert back.blocks[tables[0][0]].ref_cnt == 2
    assert back.blocks[tables[0][0]].token_ids == (100, 101, 102, 103)
    assert sorted(back.cpu_free_queue) == list(range(6))
    assert all(block.num_filled == 0 for block in back.cpu_blocks)


def test_the_prefix_is_computed_in_step_0_and_its_request_is_a_fork_of_it() -> None:
    """Figure 10: the provider's prefix stays; the request copies its partial last block on write and computes its own tokens only."""
    prefix = PaperRequestSpec("P", (1, 2, 3, 4, 5), max_tokens=0, is_prefix=True)
    request = PaperRequestSpec("A", (1, 2, 3, 4, 5, 6), max_tokens=1, forced_token_ids=((7,),), prefix_id="P")
    trace = session(PaperConfig(num_blocks=6, block_size=4), request, prefix).run_to_end()
    kept = next(f for f in trace.frames if f.requests and f.requests[0].status == "PREFIX_KEPT")
    assert (kept.step, [r.request_id for r in kept.requests]) == (0, ["P"])
    fork = events(trace, SequenceForked)[0]
    assert (fork.step, fork.event.request_id, fork.event.parent_id, fork.event.block_ids) == (1, "A", "P", [0, 1])
    assert fork.requests[1].parent_id == "P"
    assert events(trace, KVWritten, "A")[0].event.token_ids == [6]
    last = trace.frames[-1]
    assert [block.ref_cnt for block in last.blocks] == [1, 1, 0, 0, 0, 0]
    assert last.blocks[1].token_ids == (5, None, None, None)


def test_beams_carry_their_parents_and_every_candidates_token_has_a_text() -> None:
    trace = session(PaperConfig(num_blocks=9, block_size=4), BEAMS).run_to_end()
    assert {r.request_id: r.parent_id for r in trace.frames[-1].requests} == {"A1": None, "A2": "A1", "A3": "A1"}
    assert {1, 2, 3, 4, 100, 101} <= trace.header.vocabulary.keys()
    assert trace.header.vocabulary[4] == "4"


def test_unchanged_parts_are_the_same_objects_and_files_give_them_back() -> None:
    trace = session(PaperConfig(num_blocks=9, block_size=4, num_cpu_blocks=3), TWO).run_to_end()
    for previous, frame in zip(trace.frames, trace.frames[1:], strict=False):
        assert isinstance(frame.blocks, SharedSequence)
        assert isinstance(frame.cpu_blocks, SharedSequence)
        assert frame.cpu_blocks is previous.cpu_blocks
        assert all(new is old for new, old in zip(frame.blocks, previous.blocks, strict=True) if new == old)
    again = codec.decode_json(codec.encode_json(trace))
    assert again == trace
    assert len(again.frames[-1].cpu_blocks) == 3


# ------------------------------------------------------------------ the same outside as the other session
def test_a_session_is_deterministic_to_the_byte_and_a_branch_repeats_it() -> None:
    first = session(FIGURE_8, TWO)
    assert codec.encode_json(first.run_to_end()) == codec.encode_json(session(FIGURE_8, TWO).run_to_end())
    branch = session(FIGURE_8, TWO).branch(12)
    assert isinstance(branch, PaperSession)
    assert len(branch.trace.frames) > 12
    assert codec.encode_json(branch.run_to_end()) == codec.encode_json(first.trace)
    other = first.branch(0, free_queue_order=()).run_to_end()
    assert other.frames[0].free_queue == tuple(range(9))


def test_the_first_portion_needs_no_model_and_stepping_comes_to_an_end() -> None:
    made = session(FIGURE_8, TWO)
    assert made.advance()
    assert made.trace.frames[-1].requests[0].block_ids == ((7, 1),)
    assert not events(made.trace, KVWritten)
    frame = made.run_until(lambda f: isinstance(f.event, CopyQueued))
    assert frame is not None
    assert not made.complete
    made.run_to_end()
    assert (made.complete, made.finished, made.advance(), made.error) == (True, True, False, None)


def test_a_full_recorder_says_so_in_its_last_frame() -> None:
    made = session(PaperConfig(num_blocks=9, block_size=4, max_frames=10), TWO)
    trace = made.run_to_end()
    assert isinstance(trace.frames[-1].event, RecordingStopped)
    assert (len(trace.frames), trace.complete, made.finished) == (11, False, True)


def test_idle_steps_are_passed_over() -> None:
    trace = session(PaperConfig(num_blocks=4, block_size=4), one("A", 2, 1), one("B", 2, 1, base=9, arrival_step=7)).run_to_end()
    assert [f.step for f in events(trace, KVWritten)] == [1, 7]


# ------------------------------------------------------------------ actions
def test_free_blocks_can_be_put_in_front() -> None:
    """For drawings whose numbers do not follow a stack."""
    trace = session(PaperConfig(num_blocks=6, block_size=4), one("A", 4, 3), actions=(ActionSpec(2, "arrange_free_queue", block_ids=(5, 3)),)).run_to_end()
    arranged = [f for f in trace.frames if f.op == "arrange_free_queue"]
    assert [f.event.cause.kind for f in arranged] == [CauseKind.PREPARED, CauseKind.PREPARED]
    assert [list(f.free_queue) for f in arranged] == [[1, 2, 4], [5, 3, 1, 2, 4]]
    assert arranged[0].blocks[5].pins == ("scenario",)
    assert trace.frames[-1].requests[0].token_ids == tuple(range(7))
    assert events(trace, KVWritten)[-1].event.slots == [21]


def test_blocks_that_are_not_free_cannot_be_put_in_front() -> None:
    made = session(PaperConfig(num_blocks=6, block_size=4), one("A", 4, 3), actions=(ActionSpec(2, "arrange_free_queue", block_ids=(0, 5)),))
    made.run_to_end()
    assert str(made.error) == "arrange_free_queue names the blocks [0, 5], but those in the free queue are [1, 2, 3, 4, 5]; name free blocks, each once"
    assert isinstance(made.trace.frames[-1].event, EngineFailed)


def test_an_aborted_group_gives_everything_back() -> None:
    trace = session(FIGURE_8, TWO, actions=(ActionSpec(3, "abort", "A"),)).run_to_end()
    last = trace.frames[-1]
    assert {r.status for r in last.requests} == {"FINISHED_ABORTED"}
    assert len(last.free_queue) == 9


def test_a_run_that_can_never_go_on_says_why() -> None:
    """Beams are let in when they might fit; these go apart at once, and four blocks are not enough for five tokens of each, however often they are
    recomputed."""
    survivors = (((0, 1), (0, 2), (0, 3), (0, 4)), *[tuple((i, 9) for i in range(4)) for _ in range(5)])
    made = session(PaperConfig(num_blocks=4, block_size=4), PaperRequestSpec("A", (1, 2, 3, 4), max_tokens=6, beam_width=4, forced_beams=survivors))
    made.run_to_end()
    assert str(made.error).startswith("no request can go on: A needs more room for its 4 sequences of up to 5 tokens than the 4 free blocks of 4 ")
    assert isinstance(made.trace.frames[-1].event, EngineFailed)
    assert made.trace.frames[-1].running == ()


# ------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("requests", "sentence"),
    [
        ((), "there are no requests: give the scenario at least one"),
        ((PaperRequestSpec("P", (1,), max_tokens=0, is_prefix=True),), "there are no requests: give the scenario at least one"),
        ((one("A", 2, 1), one("A", 3, 1)), "there is a request 'A' already: give every request its own id"),
        ((PaperRequestSpec("A", (1, 2), max_tokens=2),), "request A has outputs that nothing decides: without a model, force all 2 of each sample"),
        (
            (PaperRequestSpec("A", (1, 2), max_tokens=2, n=2, forced_token_ids=((1, 2), (3,))),),
            "request A has outputs that nothing decides: without a model, force all 2 of each sample",
        ),
        (
            (PaperRequestSpec("A", (1, 2), max_tokens=2, beam_width=2, forced_beams=(((0, 1), (0, 2)),)),),
            "request A has beams that nothing decides: without a model, force the survivors of all 2 iterations",
        ),
        (
            (one("A", 2, 1, prefix_id="P"),),
            "request 'A' begins with the prefix 'P', but there is no such prefix: declare it, or correct the id",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(requests: tuple[PaperRequestSpec, ...], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        session(PaperConfig(num_blocks=9, block_size=4), *requests)
    assert str(caught.value) == sentence


def test_a_prefix_cache_has_nothing_to_reset_here() -> None:
    with pytest.raises(InvalidInput, match=r"^reset_prefix_cache is about a prefix cache, which the paper's engine has not: leave it out$"):
        session(FIGURE_8, TWO, actions=(ActionSpec(2, "reset_prefix_cache"),))


def test_no_torch_is_loaded_without_a_model() -> None:
    code = """
import sys
from engine.paper_session import PaperConfig, PaperRequestSpec, PaperSession
request = PaperRequestSpec("A", (1, 2), max_tokens=1, forced_token_ids=((3,),))
assert PaperSession(PaperConfig(num_blocks=3, block_size=4), (request,), vocabulary=str).run_to_end().complete
print(sorted({"torch", "streamlit", "transformers", "triton"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
