"""Sessions without a model: what the memory manager decides, against the paper's drawing and the rules. Loads no torch."""

from __future__ import annotations

import pytest

from engine.core.output import SamplingParams
from engine.errors import InvalidInput
from engine.runner import parse_layers
from engine.session import ActionSpec, RequestSpec, Session, SessionConfig
from engine.trace import codec
from engine.trace.events import (
    AllocationRefused,
    BlockEvicted,
    BlocksAllocated,
    BlocksFreed,
    BlocksTouched,
    CauseKind,
    EngineFailed,
    KVWritten,
    PrefixCacheReset,
    PrefixLookup,
    RecordingStopped,
    RequestPreempted,
    SlotsMapped,
)
from engine.trace.frame import Frame, Trace

FIGURE_6 = SessionConfig(num_blocks=9, block_size=4, free_queue_order=(7, 1, 3))


def request(request_id: str, num_prompt: int, num_outputs: int, *, base: int = 0, arrival_step: int = 1, **more: object) -> RequestSpec:
    outputs = tuple(range(base + num_prompt, base + num_prompt + num_outputs))
    params = SamplingParams(max_tokens=num_outputs, forced_token_ids=outputs)
    return RequestSpec(request_id, tuple(range(base, base + num_prompt)), params, arrival_step=arrival_step, **more)  # type: ignore[arg-type]


def session(config: SessionConfig, *requests: RequestSpec, actions: tuple[ActionSpec, ...] = ()) -> Session:
    return Session(config, requests, actions, vocabulary=str)


def events(trace: Trace, kind: type, request_id: str | None = None) -> list[Frame]:
    return [f for f in trace.frames if isinstance(f.event, kind) and request_id in (None, f.event.request_id)]


def test_figure_6_in_paper_order() -> None:
    """The paper's Figure 6: physical blocks 7, 1, 3; slots 28..31, 4..6, then 7, then 12 (rule S24 prepares the pool)."""
    trace = session(FIGURE_6, request("A", 7, 3)).run_to_end()
    assert trace.complete
    assert [f.event.block_ids for f in events(trace, BlocksAllocated, "A")] == [[7, 1], [3]]
    assert [f.event.slots for f in events(trace, SlotsMapped)] == [[28, 29, 30, 31, 4, 5, 6], [7], [12]]
    filled = [(f.blocks[7].num_filled, f.blocks[1].num_filled, f.blocks[3].num_filled) for f in events(trace, KVWritten)]
    assert filled == [(4, 3, 0), (4, 4, 0), (4, 4, 1)]
    last = trace.frames[-1]
    assert list(last.free_queue) == [3, 2, 4, 5, 6, 8, 1, 7]  # R1.7: 3 has no hash and goes to the head; 1 then 7 to the tail (R1.9)
    assert last.requests[0].status == "FINISHED_LENGTH_CAPPED"
    assert last.requests[0].token_ids == tuple(range(10))


def test_a_fresh_pool_gives_1_2_3() -> None:
    """R1.1 and S24: what V1 really does."""
    trace = session(SessionConfig(num_blocks=9, block_size=4), request("A", 7, 3)).run_to_end()
    assert [f.event.block_ids for f in events(trace, BlocksAllocated)] == [[1, 2], [3]]


def test_the_same_prompt_again_hits_one_block_of_four() -> None:
    """S1: hit 4 of 7 tokens, 3 recomputed into a new block, ref_cnt 2 on the first block only."""
    trace = session(SessionConfig(num_blocks=9, block_size=4), request("A", 7, 4), request("B", 7, 2, arrival_step=3)).run_to_end()
    lookup = events(trace, PrefixLookup, "B")[0].event
    assert (lookup.num_hit_tokens, lookup.hit_block_ids, lookup.max_hit_tokens) == (4, [1], 6)
    assert lookup.cause.kind in (CauseKind.BLOCK_NOT_FULL, CauseKind.LAST_TOKEN_RULE)
    touched = events(trace, BlocksTouched, "B")[0]
    assert touched.event.block_ids == [1]
    assert touched.event.left_free_queue == []
    assert [touched.blocks[b].ref_cnt for b in (1, 2)] == [2, 1]
    assert len(events(trace, SlotsMapped, "B")[0].event.positions) == 3


def test_a_session_is_deterministic_to_the_byte_and_a_branch_repeats_it() -> None:
    def make() -> Session:
        return session(FIGURE_6, request("A", 7, 3), request("B", 6, 2, base=50, arrival_step=2))

    first, second = make(), make()
    assert codec.encode_json(first.run_to_end()) == codec.encode_json(second.run_to_end())
    branch = make().branch(12)
    assert len(branch.trace.frames) > 12
    assert codec.encode_json(branch.run_to_end()) == codec.encode_json(first.trace)


def test_a_branch_can_change_one_thing() -> None:
    base = session(FIGURE_6, request("A", 7, 3))
    other = base.branch(0, free_queue_order=()).run_to_end()
    assert [f.event.block_ids for f in events(other, BlocksAllocated)] == [[1, 2], [3]]


def test_the_first_portion_needs_no_model_and_every_portion_adds_frames() -> None:
    made = session(FIGURE_6, request("A", 7, 3))
    made.advance()
    assert not events(made.trace, KVWritten)
    assert events(made.trace, BlocksAllocated, "A")
    sizes = [len(made.trace.frames)]
    while made.advance():
        sizes.append(len(made.trace.frames))
    assert sizes == sorted(set(sizes)) or made.complete
    assert made.finished
    assert not made.advance()


def test_run_until_records_no_further_than_needed() -> None:
    made = session(FIGURE_6, request("A", 7, 3))
    frame = made.run_until(lambda f: isinstance(f.event, KVWritten))
    assert frame is not None
    assert frame.step == 1
    assert not made.complete
    assert made.run_until(lambda f: False) is None
    assert made.complete


def test_preemption_and_recompute() -> None:
    """R7.5: the last running request loses its blocks and waits in front; R5.1: it then hits what is still cached."""
    config = SessionConfig(num_blocks=6, block_size=4)
    trace = session(config, request("A", 8, 6), request("B", 7, 6, base=100)).run_to_end()
    victim = events(trace, RequestPreempted)
    assert [f.event.request_id for f in victim] == ["B"]
    assert victim[0].waiting == ("B",)
    assert victim[0].request("B").num_computed_tokens == 0  # type: ignore[union-attr]
    assert events(trace, AllocationRefused)
    assert trace.complete
    assert {r.request_id: len(r.token_ids) for r in trace.frames[-1].requests} == {"A": 14, "B": 13}


def test_a_request_that_can_never_fit_is_refused_with_the_sum() -> None:
    """FCFS would wait for it for ever (R7.3); block 0 is the null block, so 3 blocks are 2 usable ones."""
    with pytest.raises(InvalidInput, match=r"3 blocks.*2"):
        session(SessionConfig(num_blocks=3, block_size=4), request("A", 9, 1))


def test_abort_and_reset() -> None:
    """R1.14: refused while a block is in use, granted afterwards; queue order unchanged."""
    actions = (ActionSpec(2, "reset_prefix_cache"), ActionSpec(3, "abort", "A"), ActionSpec(4, "reset_prefix_cache"))
    trace = session(SessionConfig(num_blocks=9, block_size=4), request("A", 7, 20), actions=actions).run_to_end()
    resets = events(trace, PrefixCacheReset)
    assert [f.event.ok for f in resets] == [False, True]
    assert not resets[1].hash_map
    assert trace.frames[-1].requests[0].status == "FINISHED_ABORTED"
    assert trace.complete


def test_freed_blocks_say_where_they_went() -> None:
    """R1.7, R1.9: freed last block first; the unhashed tail goes to the head, hashed ones to the tail."""
    trace = session(FIGURE_6, request("A", 7, 3)).run_to_end()
    freed = events(trace, BlocksFreed, "A")[0].event
    assert (freed.block_ids, freed.prepended, freed.appended, freed.still_referenced) == ([3, 1, 7], [3], [1, 7], [])


def test_a_full_recorder_stops_visibly() -> None:
    made = session(SessionConfig(num_blocks=9, block_size=4, max_frames=10), request("A", 7, 3))
    trace = made.run_to_end()
    assert isinstance(trace.frames[-1].event, RecordingStopped)
    assert len(trace.frames) == 11
    assert not trace.complete


@pytest.mark.parametrize(
    ("config", "requests", "text"),
    [
        ({"num_blocks": 1, "block_size": 4}, [request("A", 3, 1)], "block 0 is the null block, so a pool needs at least 2"),
        ({"num_blocks": 9, "block_size": 0}, [request("A", 3, 1)], "block_size is 0, but it must be at least 1"),
        ({"num_blocks": 9, "block_size": 4, "free_queue_order": (7, 7)}, [request("A", 3, 1)], "each block at most once, with ids from 1 to 8"),
        ({"num_blocks": 9, "block_size": 4, "free_queue_order": (0,)}, [request("A", 3, 1)], "each block at most once, with ids from 1 to 8"),
        ({"num_blocks": 9, "block_size": 4}, [], "no requests"),
        ({"num_blocks": 9, "block_size": 4}, [request("A", 3, 1), request("A", 3, 1)], "A is used twice"),
        ({"num_blocks": 9, "block_size": 4}, [RequestSpec("A", (1, 2))], "nothing decides"),
        ({"num_blocks": 3, "block_size": 4}, [request("A", 30, 1)], "8 blocks"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(config: dict[str, object], requests: list[RequestSpec], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        session(SessionConfig(**config), *requests)  # type: ignore[arg-type]


def test_unknown_model_and_backend_name_the_choices() -> None:
    with pytest.raises(InvalidInput, match="no backend “cuda”: choose one of triton, interpret, torch"):
        Session(FIGURE_6, (request("A", 3, 1),), vocabulary=str, backend="cuda")
    with pytest.raises(InvalidInput, match="tiny"):
        Session(FIGURE_6, (request("A", 3, 1),), vocabulary=str, model_name="no-such-model")


def test_no_frame_is_an_engine_failure_in_a_sound_run() -> None:
    trace = session(FIGURE_6, request("A", 7, 3)).run_to_end()
    assert not events(trace, EngineFailed)


def test_a_backend_that_cannot_run_here_is_refused_before_anything_runs() -> None:
    import torch

    if torch.cuda.is_available():
        Session(FIGURE_6, (request("A", 3, 1),), vocabulary=str, model_name="tiny", backend="triton")
        return
    with pytest.raises(InvalidInput, match="Backend 'triton' cannot run here: torch finds no CUDA device; choose one of interpret, torch"):
        Session(FIGURE_6, (request("A", 3, 1),), vocabulary=str, model_name="tiny", backend="triton")


@pytest.mark.parametrize(
    ("text", "layers"), [(None, None), ("", None), ("all", "all"), ("none", ()), ("0", (0,)), (" 2, 0 ", (0, 2)), ("ALL", "all"), ("1,1", (1,))]
)
def test_layers_are_read_as_people_write_them(text: str | None, layers: object) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["first", "-1", "0;1", "1.5", "0,", "²", "99999"])
def test_what_names_no_layers_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="names no layers: write a number like 0"):
        parse_layers(text)


def test_a_layer_that_the_model_does_not_have_is_refused_before_anything_runs() -> None:
    with pytest.raises(InvalidInput, match=r"there is no layer 4 to interpret: the 4 layers of tiny are 0 to 3"):
        Session(FIGURE_6, (request("A", 3, 1),), vocabulary=str, model_name="tiny", interpreted_layers=(4,))


def test_a_lookup_names_the_step_in_which_its_block_was_evicted() -> None:
    """Also behind steps in which nothing ran: A's third block goes in step 20 to C, and B, who comes later, is told so (R3.10)."""
    config = SessionConfig(num_blocks=4, block_size=4)
    requests = (request("A", 9, 1), request("C", 6, 2, base=100, arrival_step=20), request("B", 9, 1, arrival_step=40))
    trace = session(config, *requests).run_to_end()
    found = events(trace, PrefixLookup, "B")[0].event
    assert found.cause.kind is CauseKind.EVICTED_EARLIER
    evicted = {f.step for f in events(trace, BlockEvicted) if f.event.cause.facts.get("for_request") == "C"}
    assert evicted == {20}
    assert (found.cause.facts["step"], found.cause.facts["for_request"]) == (20, "C")
