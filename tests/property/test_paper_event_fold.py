"""The paper's events tell everything: for each frame, the state before and its event give its state (random sessions, every scene of that engine).

The random sessions run without a model, with samples, beams, prefixes, aborts, small pools and swap spaces of all sizes; each frame is checked by the
ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidInput
from engine.paper_session import PaperConfig, PaperRequestSpec, PaperSession
from engine.session_config import ActionSpec
from engine.trace import codec
from engine.trace.events import KVWritten, kind_of
from engine.trace.frame import Trace
from engine.trace.integrity import check_integrity
from scenarios import load_scenario, open_session
from scenarios.loader import library_files
from tests.property.paper_fold import PaperBooks, fold, read_books

BLOCK_SIZE = 4
PAPER_SCENES = [scene for scene in sorted(library_files()) if load_scenario(scene).engine == "paper"]


def follow(trace: Trace) -> Counter[str]:
    """Compare every frame with what the one before and its event say. Returns how often each kind of event was heard."""
    kinds: Counter[str] = Counter()
    groups = {r.request_id: r.sequence_group or r.request_id for r in trace.frames[-1].requests}
    for previous, frame in zip(trace.frames, trace.frames[1:], strict=False):
        kinds[kind_of(frame.event)] += 1
        told, found = read_books(previous), read_books(frame)
        fold(told, frame.event, groups)
        for part in fields(PaperBooks):
            expected, is_there = getattr(told, part.name), getattr(found, part.name)
            assert expected == is_there, f"frame {frame.seq}, {frame.event}: by the events {part.name} is {expected}, the frame has {is_there}"
    return kinds


@pytest.mark.parametrize("scene", PAPER_SCENES)
def test_every_scene(scene: str) -> None:
    session = open_session(scene, model=None, interpreted_layers=())
    kinds = follow(session.run_to_end())
    assert session.error is None
    assert kinds["request_admitted"]
    assert kinds["blocks_freed"]


@st.composite
def paper_sessions(draw: st.DrawFn) -> tuple[PaperConfig, tuple[PaperRequestSpec, ...], tuple[ActionSpec, ...]]:
    """Few distinct tokens and little room, so that sequences share, copy, give way and come back."""
    config = PaperConfig(
        num_blocks=draw(st.integers(5, 9)),
        block_size=BLOCK_SIZE,
        num_cpu_blocks=draw(st.sampled_from([20, 8, 3, 0])),
        preemption_mode=draw(st.sampled_from(["swap", "auto", "recompute"])),
        max_num_seqs=draw(st.integers(3, 8)),
        max_num_batched_tokens=draw(st.sampled_from([12, 16, 64])),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        free_queue_order=tuple(draw(st.permutations(range(4)))),
    )
    requests: list[PaperRequestSpec] = []
    prefix = tuple(range(draw(st.integers(1, 7)))) if draw(st.booleans()) else ()
    if prefix:
        requests.append(PaperRequestSpec("P", prefix, max_tokens=0, is_prefix=True))
    for index in range(3):
        max_tokens, kind = draw(st.sampled_from([9, 6, 3, 1])), draw(st.sampled_from(["one", "samples", "beams"]))
        n = 1 if kind != "samples" else draw(st.integers(2, 3))
        uses_prefix = bool(prefix) and draw(st.booleans())
        tokens = tuple(draw(st.integers(0, 2)) for _ in range(draw(st.sampled_from([4, 7, 2, 9]))))
        samples = tuple(tuple(draw(st.integers(0, 2)) for _ in range(max_tokens)) for _ in range(n)) if kind != "beams" else ()
        requests.append(
            PaperRequestSpec(
                f"R{'abc'[index]}",
                (*prefix, *tokens) if uses_prefix else tokens,
                arrival_step=draw(st.integers(1, 3)),
                max_tokens=max_tokens,
                n=n,
                beam_width=3 if kind == "beams" else None,
                stop_token_ids=draw(st.sampled_from([(), (), (2,)])) if kind != "beams" else (),
                forced_token_ids=samples,
                forced_beams=_beams(draw, max_tokens) if kind == "beams" else (),
                prefix_id="P" if uses_prefix else None,
            )
        )
    actions = ()
    if draw(st.booleans()):
        name = draw(st.sampled_from([r.request_id for r in requests if not r.is_prefix]))
        actions = (ActionSpec(draw(st.integers(6, 9)), "abort", name),)
    return config, tuple(requests), actions


def _beams(draw: st.DrawFn, num_selections: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    selections, living = [], 1
    for _ in range(num_selections):
        possible = [(parent, token_id) for parent in range(living) for token_id in range(3)]
        selections.append(tuple(draw(st.permutations(possible))[: draw(st.integers(1, 3))]))
        living = len(selections[-1])
    return tuple(selections)


@given(paper_sessions())
def test_random_sessions(made: tuple[PaperConfig, tuple[PaperRequestSpec, ...], tuple[ActionSpec, ...]]) -> None:
    """R1.7 and section 4.5: nothing leaks, nothing shared is overwritten, the swap space included, and a file gives the same trace."""
    config, requests, actions = made
    try:
        session = PaperSession(config, requests, actions, vocabulary=str)
    except InvalidInput:
        return  # refused at the door
    trace = session.run_to_end()
    assert session.error is None or "no request can go on" in str(session.error), session.error
    follow(trace if session.error is None else Trace(trace.header, trace.frames[:-1]))
    for previous, frame in zip([None, *trace.frames], trace.frames, strict=False):
        assert check_integrity(frame, previous) == []
    data = codec.encode_json(trace)
    assert codec.decode_json(data) == trace
    assert codec.encode_json(PaperSession(config, requests, actions, vocabulary=str).run_to_end()) == data
    if session.error is None:
        _everything_is_given_back(config, requests, trace)


def _everything_is_given_back(config: PaperConfig, requests: tuple[PaperRequestSpec, ...], trace: Trace) -> None:
    last = trace.frames[-1]
    kept = sum(-(-len(r.prompt_token_ids) // config.block_size) for r in requests if r.is_prefix)
    assert len(last.free_queue) == config.num_blocks - kept
    assert len(last.cpu_free_queue) == config.num_cpu_blocks
    assert (last.running, last.waiting, last.swapped) == ((), (), ())


@given(paper_sessions())
def test_what_lies_in_a_block_is_what_its_owners_say(made: tuple[PaperConfig, tuple[PaperRequestSpec, ...], tuple[ActionSpec, ...]]) -> None:
    """Sections 4.2 to 4.5 end to end: whatever was forked, copied, swapped or computed again, the slot of position p holds each owner's token p."""
    config, requests, actions = made
    try:
        trace = PaperSession(config, requests, actions, vocabulary=str).run_to_end()
    except InvalidInput:
        return
    for frame in trace.frames:
        if not isinstance(frame.event, KVWritten):
            continue
        for state in frame.requests:
            for position in range(state.num_computed_tokens if state.block_ids[0] else 0):
                slots = frame.blocks[state.block_ids[0][position // BLOCK_SIZE]].token_ids
                assert slots[position % BLOCK_SIZE] in (state.token_ids[position], None)
            first = len(state.token_ids)  # a swapped table begins behind the prefix's full blocks
            for index, block_id in enumerate(state.cpu_block_ids):
                owner = next(o for o in frame.cpu_blocks[block_id].owners if o.request_id == state.request_id)
                for offset, token_id in enumerate(frame.cpu_blocks[block_id].token_ids):
                    position = owner.logical_index * BLOCK_SIZE + offset
                    assert token_id is None or (position < first and token_id == state.token_ids[position]), (index, position)
