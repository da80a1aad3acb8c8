"""Recurrent states that really live in pool blocks: `tiny-hybrid` in its two groups against transformers, while what may not be read is spoilt.

Every logits row of every step of every request is compared with a plain forward pass over the whole sequence, and every frame is checked. See `hybrid_engine`.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.core.output import SamplingParams
from engine.models import load_model
from engine.models.tiny_tokenizer import read_passages
from engine.session import RequestSpec, Session, SessionConfig
from engine.trace.codec import encode_json
from engine.trace.events import AttentionComputed, BlocksCopied, KVWritten, RequestAdmitted, RequestPreempted, SlotsMapped, StateWritten
from engine.trace.integrity import check_integrity
from engine.worker.kernel_settings import KernelSettings, choose_kernel_settings
from engine.worker.mamba_mixer import paged_mixer_forward
from kernels import Backend
from tests.worker.harness import TOLERANCE, TORCH, untouched_copy
from tests.worker.hybrid_engine import HybridEngine, cached_generation, worst_difference

PASSAGES = read_passages()
ATTENTION, MAMBA = (0, 2, 4), (1, 3, 5)
MODES = ("align", "all", "none")
INTERPRETED = choose_kernel_settings("torch", "all", num_layers=6, attention_layers=ATTENTION)


def tokens_of(title: str) -> list[int]:
    return load_model("tiny-hybrid").tokenizer.encode(PASSAGES[title])


@cache
def reference() -> PreTrainedModel:
    torch.set_num_threads(1)
    return untouched_copy(load_model("tiny-hybrid").model)


@cache
def continuation(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return cached_generation(reference(), list(prompt), num_tokens)


def make(**settings: Any) -> HybridEngine:
    reference()
    return HybridEngine(load_model("tiny-hybrid").model, **settings)


def assert_same_as_transformers(engine: HybridEngine) -> None:
    assert worst_difference(engine, reference()) <= TOLERANCE
    for request in engine.requests.values():
        assert request.output_token_ids == continuation(tuple(request.prompt_token_ids), request.sampling_params.max_tokens), request.request_id


def speech_and_others(engine: HybridEngine) -> None:
    """A runs over 100 tokens; B comes while A decodes, C begins like A, D has A's prompt once more."""
    speech, tale, whale = tokens_of("gettysburg-address"), tokens_of("a-tale-of-two-cities"), tokens_of("moby-dick")
    engine.add("A", speech[:44], 62)
    engine.run(20)
    engine.add("B", tale[:21], 30)
    engine.run(5)
    engine.add("C", speech[:25] + whale[:8], 25)
    engine.run(11)
    engine.add("D", speech[:44], 12)
    engine.run()
    assert sorted(engine.requests) == ["A", "B", "C", "D"]
    assert engine.requests["A"].num_tokens == 106


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [16, 7, 256], ids=["chunks at block ends", "odd chunks", "one shot"])
def test_every_logit_is_that_of_transformers(mode: str, budget: int) -> None:
    engine = make(mode=mode, budget=budget, num_blocks=120)
    speech_and_others(engine)
    assert_same_as_transformers(engine)
    hits = dict(engine.hits())
    assert (hits["A"], hits["B"]) == (0, 0)
    # C shares 25 tokens with A, D 44, of which the last is computed anyway. Mode align has states only where chunks ended: in one shot A's at 44, and C's at
    # 24, where it leaves A (R3.44, R4.5).
    assert (hits["C"], hits["D"]) == {"all": (24, 40), "none": (0, 0), "align": {16: (16, 32), 7: (24, 40), 256: (0, 24)}[budget]}[mode]


@pytest.mark.parametrize("mode", MODES)
def test_blocks_that_are_given_back_are_spoilt_and_used_by_others_meanwhile(mode: str) -> None:
    engine = make(mode=mode, budget=16, num_blocks={"align": 52, "all": 52, "none": 44}[mode])
    speech_and_others(engine)
    assert_same_as_transformers(engine)
    assert ("B", "A") in engine.inherited
    assert engine.inherited & {("A", "B"), ("A", "C"), ("A", "D"), ("B", "D")}


@pytest.mark.parametrize("mode", MODES)
def test_a_preempted_request_goes_on_from_its_own_cached_state_or_from_nothing(mode: str) -> None:
    engine = make(mode=mode, budget=32, num_blocks={"align": 36, "all": 36, "none": 26}[mode])
    for name, title, length in (("A", "gettysburg-address", 30), ("B", "a-tale-of-two-cities", 21), ("C", "moby-dick", 18)):
        engine.add(name, tokens_of(title)[:length], 30)
    engine.run()
    assert_same_as_transformers(engine)
    assert engine.of_kind(RequestPreempted)
    resumed = [e for e in engine.of_kind(RequestAdmitted) if e.resumed]
    for admitted in resumed:
        at = engine.events.index(admitted)
        first = next(e for e in engine.events[at:] if isinstance(e, StateWritten) and e.request_id == admitted.request_id)
        assert first.num_source_tokens == admitted.num_computed_tokens
        assert (first.source_block_id is None) == (admitted.num_computed_tokens == 0)
    if mode != "none":
        assert any(e.num_computed_tokens for e in resumed)


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_hit_is_one_state_and_only_the_rest_is_computed(mode: str) -> None:
    """R3.40: 45 tokens are known, of which the last must be computed, so eleven blocks are a hit: all of attention's, of the states the last alone."""
    engine = make(mode=mode)
    speech = tokens_of("gettysburg-address")
    engine.add("A", speech[:45], 30)
    engine.run(3)
    source = next(e for e in engine.of_kind(StateWritten) if (e.request_id, e.num_tokens) == ("A", 44))
    engine.add("D", speech[:45], 12)
    engine.step()
    assert engine.hits()[-1] == ("D", 44)
    attention, states = engine.scheduler.kv_cache_manager.get_block_ids("D")
    assert (len([b for b in attention[:11] if b]), [b for b in states[:11] if b]) == (11, [source.block_id])
    written = [e for e in engine.of_kind(StateWritten) if e.request_id == "D"]
    assert [(e.source_block_id, e.num_source_tokens, e.num_tokens) for e in written] == [(source.block_id, 44, 45)]
    engine.run()
    assert_same_as_transformers(engine)


@pytest.mark.parametrize(("block_size", "unit", "length"), [(8, 2, 26), (4, 1, 25)])
def test_a_hit_inside_a_block_goes_on_from_a_copy(block_size: int, unit: int, length: int) -> None:
    """R6.4, R6.5: A's prompt ends inside a block. Its state there is moved to a block of its own, B and C take copies of that, attention's pages too."""
    speech, whale = tokens_of("gettysburg-address"), tokens_of("moby-dick")

    def play(engine: HybridEngine) -> HybridEngine:
        engine.add("A", speech[:length], 40)
        engine.run(2)
        engine.add("B", speech[:length] + whale[:9], 30)
        engine.run(1)
        engine.add("C", [*speech[:length], whale[3]], 20)
        engine.run()
        return engine

    engine = play(make(block_size=block_size, unit=unit))
    assert engine.hits() == [("A", 0), ("B", length), ("C", length)]
    pairs = {(s, d) for e in engine.of_kind(BlocksCopied) for s, d in zip(e.source_block_ids, e.destination_block_ids, strict=True)}
    assert len(pairs) >= 5, "the producer's one, two consumers in two groups"
    assert_same_as_transformers(engine)
    without = play(make(mode="none", block_size=block_size))
    for name, rows in engine.logits.items():
        plain = dict(without.logits[name])
        assert max(float((row - plain[position]).abs().max()) for position, row in rows if position in plain) <= TOLERANCE
        assert engine.requests[name].output_token_ids == without.requests[name].output_token_ids


@pytest.mark.parametrize(("mode", "unit"), [("align", 2), ("all", None), ("none", None)])
def test_attention_layers_through_the_interpreter_with_every_program_watched(mode: str, unit: int | None) -> None:
    """The witnesses of attention, of writes and of the copies of hybrid pages are checked in every frame; only attention layers have any."""
    engine = make(mode=mode, unit=unit, block_size=8 if unit else 4, budget=12, settings=INTERPRETED, kernel_witness=True, num_blocks=60)
    speech = tokens_of("gettysburg-address")
    engine.add("A", speech[:26], 8)
    engine.run(5)
    engine.add("B", speech[:26] + tokens_of("moby-dick")[:5], 6)
    engine.run()
    assert_same_as_transformers(engine)
    computed = engine.of_kind(AttentionComputed)
    assert all(e.layers == [*ATTENTION] and e.agrees_within is not None and e.agrees_within <= 1e-5 for e in computed)
    assert all(e.witness and {layer for launch in e.witness for layer in launch.layers} <= {*ATTENTION} for e in computed)
    assert {e.group_id for e in engine.of_kind(KVWritten)} == {e.group_id for e in engine.of_kind(SlotsMapped)} == {0}  # R8.5
    assert {(e.group_id, e.num_layers, e.backend) for e in engine.of_kind(StateWritten)} == {(1, 3, "torch")}


def test_copies_of_hybrid_pages_are_witnessed_once_per_memory() -> None:
    engine = make(unit=2, block_size=8, budget=64, settings=KernelSettings(Backend("interpret", "test")), kernel_witness=True, num_blocks=60)
    speech = tokens_of("gettysburg-address")
    engine.add("A", speech[:26], 3)
    engine.run(2)
    engine.add("B", speech[:30], 2)
    engine.run()
    assert_same_as_transformers(engine)
    copied = [e for e in engine.of_kind(BlocksCopied) if len(e.source_block_ids) == 2]
    assert copied
    assert all([(launch.kernel, launch.layers) for launch in e.witness or ()] == [("copy_blocks", [*ATTENTION])] for e in copied)


def test_states_on_the_way_are_those_that_shorter_prompts_leave() -> None:
    """Mode ``all``: the state that a prompt of 19 tokens leaves at 12 is, number by number, that of a prompt of 12 tokens (R3.42)."""
    speech = tokens_of("gettysburg-address")
    long, short = make(mode="all"), make(mode="all")
    long.add("A", speech[:19], 1)
    short.add("A", speech[:12], 1)
    for engine in (long, short):
        engine.step()
    (of_long,), (of_short,) = ([e.block_id for e in engine.of_kind(StateWritten) if e.num_tokens == 12] for engine in (long, short))
    assert [e.num_tokens for e in long.of_kind(StateWritten)] == [4, 8, 12, 16, 19]
    for layer in MAMBA:
        ours, theirs = long.runner.kv_cache, short.runner.kv_cache
        assert float((ours.ssm_states[layer][of_long] - theirs.ssm_states[layer][of_short]).abs().max()) <= 1e-5
        assert float((ours.conv_states[layer][of_long] - theirs.conv_states[layer][of_short]).abs().max()) <= 1e-5


def test_several_runners_share_one_model_from_several_threads() -> None:
    engines = {mode: make(mode=mode, budget=16, num_blocks=120) for mode in MODES}
    for engine in engines.values():
        for name, title in (("A", "gettysburg-address"), ("B", "moby-dick")):
            engine.add(name, tokens_of(title)[:25], 12)
    threads = [threading.Thread(target=engine.run) for engine in engines.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines.values():
        assert_same_as_transformers(engine)
    mixers = [module for module in load_model("tiny-hybrid").model.modules() if "forward" in vars(module)]
    assert [mixer.layer_idx for mixer in mixers] == [*MAMBA]
    assert all(mixer.forward.func is paged_mixer_forward for mixer in mixers)


@pytest.mark.parametrize(
    "settings",
    [{}, {"mamba_cache_mode": "all"}, {"enable_prefix_caching": False}, {"prefix_match_unit": 2, "block_size": 8}],
    ids=["align", "all", "none", "unit"],
)
def test_a_whole_session_is_sound_in_every_frame_and_the_same_twice(settings: dict[str, Any]) -> None:
    speech, tale = tokens_of("gettysburg-address"), tokens_of("a-tale-of-two-cities")
    requests = (
        RequestSpec("A", tuple(speech[:26]), SamplingParams(max_tokens=20)),
        RequestSpec("B", tuple(tale[:9]), SamplingParams(max_tokens=12, temperature=0.8, seed=3), arrival_step=2),
        RequestSpec("C", tuple(speech[:30]), SamplingParams(max_tokens=5), arrival_step=4),
    )
    config = SessionConfig(**{"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 16, **settings})
    sessions = [Session(config, requests, vocabulary=str, model_name="tiny-hybrid", backend="torch", interpreted_layers=(2,)) for _ in range(2)]
    first, second = (session.run_to_end() for session in sessions)
    assert sessions[0].error is None
    assert first.complete
    assert [v for frame, previous in zip(first.frames[1:], first.frames, strict=False) for v in check_integrity(frame, previous)] == []
    assert encode_json(first) == encode_json(second)
    request = first.frames[-1].request("A")
    assert request is not None
    assert list(request.token_ids[26:]) == continuation(tuple(speech[:26]), 20)
    kinds = {type(frame.event) for frame in first.frames}
    assert {StateWritten, KVWritten, AttentionComputed} <= kinds


def test_settings_without_kernels_leave_the_attention_to_torch() -> None:
    engine = make(settings=TORCH)
    engine.add("A", tokens_of("moby-dick")[:9], 3)
    engine.run()
    assert {(e.backend, e.agrees_within) for e in engine.of_kind(AttentionComputed)} == {("torch", None)}
    assert_same_as_transformers(engine)
