"""Sharing changes nothing: after every iteration each sequence has the logits of an unshared run (the paper, sections 4.4 and 4.5)."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedModel

from engine.core.output import SamplingParams
from engine.models import load_model
from engine.trace.events import BlocksCopied, CauseKind, Event, RowUpdated
from engine.worker.kernel_settings import KernelSettings, choose_kernel_settings
from tests.worker.hand_made_groups import HandMadeGroups, make_sequence_runner, poison, unshared_logits, worst_difference
from tests.worker.harness import INTERPRET, ONE_LAYER, TOLERANCE, TORCH, Driver, make_runner, random_prompt, untouched_copy

FOUR_SCORE = "Four score and seven years ago our"


@pytest.fixture(scope="module")
def tiny_reference() -> PreTrainedModel:
    return untouched_copy(load_model("tiny").model)


def fork_and_force(groups: HandMadeGroups, prompt: list[int], num_samples: int) -> None:
    """Parallel sampling: the prompt computed once, then `num_samples` sequences whose first tokens all differ. The longest goes on writing in the original."""
    groups.add("A1", prompt)
    draws = {f"A{i}": SamplingParams(max_tokens=64, forced_token_ids=(3 + i,)) for i in range(1, num_samples + 1)}
    outputs = groups.step(["A1"], draws={"A1": draws})["A1"]
    assert [token.token_id for token in outputs.sampled] == [3 + i for i in range(1, num_samples + 1)]
    for i in range(2, num_samples + 1):
        groups.fork("A1", f"A{i}")
    for i, token in enumerate(outputs.sampled, 1):
        groups.append(f"A{i}", token.token_id)


@pytest.mark.parametrize("settings", [TORCH, ONE_LAYER, INTERPRET], ids=["torch", "one layer interpreted", "interpret"])
@pytest.mark.parametrize("num_samples", [2, 3, 4])
@pytest.mark.parametrize("prompt_length", [6, 7, 8])
def test_copies_on_write_have_the_logits_of_unshared_runs(
    model: PreTrainedModel, reference: PreTrainedModel, num_samples: int, prompt_length: int, settings: KernelSettings
) -> None:
    """Section 4.4, Figure 8: all but the last writer of the shared partial block copy it; a prompt that fills its blocks needs no copy."""
    runner = make_sequence_runner(model, settings)
    groups = HandMadeGroups(runner, seed=num_samples)
    fork_and_force(groups, random_prompt(prompt_length, seed=1), num_samples)
    for _ in range(6):
        groups.step()
        assert worst_difference(runner, groups.plans[-1], reference) <= TOLERANCE
    copies = [len(plan.copies) for plan in groups.plans]
    assert copies == [0, num_samples - 1 if prompt_length % 4 else 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("num_samples", [2, 3, 4])
def test_a_forgotten_copy_is_seen_in_the_logits(model: PreTrainedModel, reference: PreTrainedModel, num_samples: int) -> None:
    """The check above can fail: without the copy the new block lacks the shared tokens, or has what lay there before."""
    for before in (math.nan, 0.0):
        runner = make_sequence_runner(model)
        for cache in (*runner.kv_cache.key_caches, *runner.kv_cache.value_caches):
            cache.fill_(before)
        groups = HandMadeGroups(runner, forget_copies=True)
        fork_and_force(groups, random_prompt(7, seed=1), num_samples)
        groups.step()
        assert worst_difference(runner, groups.plans[-1], reference) > 0.01


def test_figure_8_on_tiny(tiny_reference: PreTrainedModel) -> None:
    """“fathers” and “mothers” after the same seven tokens, with the default kernels: both samples go on as if they were alone."""
    loaded = load_model("tiny")
    settings = choose_kernel_settings(None, num_layers=loaded.shape["num_layers"])
    runner = make_sequence_runner(loaded.model, settings)
    groups = HandMadeGroups(runner)
    prompt = loaded.tokenizer.encode(FOUR_SCORE)
    assert len(prompt) == 7
    fathers, mothers = (loaded.tokenizer.encode(f"{FOUR_SCORE} {word}")[-1] for word in ("fathers", "mothers"))
    groups.add("A1", prompt)
    groups.step(["A1"], draws={"A1": {"A1": SamplingParams(forced_token_ids=(fathers,)), "A2": SamplingParams(forced_token_ids=(mothers,))}})
    groups.fork("A1", "A2")
    groups.append("A1", fathers)
    groups.append("A2", mothers)
    for _ in range(8):
        groups.step()
        assert worst_difference(runner, groups.plans[-1], tiny_reference) <= TOLERANCE
    assert loaded.tokenizer.decode(groups.sequences["A1"].token_ids[7:]).split()[:3] == ["fathers", "brought", "forth"]


def beam_step(groups: HandMadeGroups, width: int, scores: dict[str, float], born: int) -> tuple[dict[str, float], int]:
    """Take the best continuations: the first survivor of a parent keeps its sequence, further ones fork, parents without one are dropped."""
    outputs = groups.step(list(scores), num_logprobs=2 * width, sample=False)
    ranked = sorted(((scores[parent] + lp, parent, token) for parent, out in outputs.items() for token, lp in out.logprobs.items()), reverse=True)[:width]
    survivors: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for score, parent, token in ranked:
        name = parent
        if parent in survivors:
            born += 1
            name = f"B{born}"
            groups.fork(parent, name)
        survivors[name], tokens[name] = score, token
    for parent in set(scores) - set(survivors):
        groups.drop(parent)
    for name, token in tokens.items():
        groups.append(name, token)
    return survivors, born


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("which", ["random", "tiny"])
def test_beams_have_the_logits_of_unshared_runs(
    model: PreTrainedModel, reference: PreTrainedModel, tiny_reference: PreTrainedModel, which: str, width: int
) -> None:
    """Section 4.4, beam search: sharing changes every iteration, blocks are copied, dropped and handed out again."""
    loaded = load_model("tiny")
    prompt = random_prompt(9, seed=width) if which == "random" else loaded.tokenizer.encode(FOUR_SCORE)
    runner = make_sequence_runner(model if which == "random" else loaded.model)
    groups = HandMadeGroups(runner, seed=width)
    groups.add("B1", prompt)
    scores, born = {"B1": 0.0}, 1
    for _ in range(12):
        scores, born = beam_step(groups, width, scores, born)
        assert worst_difference(runner, groups.plans[-1], reference if which == "random" else tiny_reference) <= TOLERANCE
    assert len(scores) == width
    assert sum(len(plan.copies) for plan in groups.plans) > 0
    assert any(plan.finished for plan in groups.plans)


def test_a_copy_and_its_row_are_reported(model: PreTrainedModel) -> None:
    """R8.2, section 4.4: the row is written from the replaced entry on, and the copy says why."""
    events: list[Event] = []
    groups = HandMadeGroups(make_sequence_runner(model, emit=events.append))
    fork_and_force(groups, random_prompt(7, seed=0), 2)
    events.clear()
    groups.step()
    ((source, destination),) = groups.plans[-1].copies
    rows = [e for e in events if isinstance(e, RowUpdated)]
    assert [(e.request_id, e.row, e.start, e.block_ids, e.cause.kind) for e in rows] == [
        ("A1", 0, 1, [destination], CauseKind.SHARED_BLOCK_WRITTEN),
        ("A2", 1, 0, groups.sequences["A2"].block_ids, CauseKind.ADDED_TO_BATCH),
    ]
    assert rows[0].cause.facts == {"logical_index": 1}
    (copied,) = [e for e in events if isinstance(e, BlocksCopied)]
    assert (copied.cause.kind, copied.source_block_ids, copied.destination_block_ids) == (CauseKind.SHARED_BLOCK_WRITTEN, [source], [destination])
    assert groups.runner.rows()[0].block_ids == (tuple(groups.sequences["A1"].block_ids),)


@pytest.mark.parametrize("others", [False, True], ids=["poisoned", "overwritten by others"])
def test_a_swapped_group_goes_on_as_if_nothing_had_happened(model: PreTrainedModel, reference: PreTrainedModel, others: bool) -> None:
    """Section 4.5: whole pages go to the swap space and come back into other blocks, and sharing is as it was."""
    runner, undisturbed = make_sequence_runner(model), make_sequence_runner(model)
    groups, alone = HandMadeGroups(runner), HandMadeGroups(undisturbed)
    for life in (groups, alone):
        fork_and_force(life, random_prompt(10, seed=3), 3)
        life.step()
    names = list(groups.sequences)
    groups.add("X", random_prompt(5, seed=4))
    freed = groups.swap_out(names)
    assert len(freed) == len(groups.plans[-1].copies) + 3  # two full blocks and three partial ones, each once
    groups.step(["X"])
    poison(runner, freed - set(groups.sequences["X"].block_ids))
    if others:
        groups.free.sort(key=lambda block_id: block_id in freed)  # the next blocks that are handed out
        groups.add("Y", random_prompt(4 * len(freed), seed=5))
        groups.step(["X", "Y"])
        assert freed <= set(groups.sequences["Y"].block_ids) | set(groups.sequences["X"].block_ids)
    groups.swap_in(names)
    for _ in range(5):
        groups.step([*names, "X"])
        alone.step()
        assert worst_difference(runner, groups.plans[-1], reference) <= TOLERANCE
        for name in names:
            assert groups.sequences[name].token_ids == alone.sequences[name].token_ids
    assert runner.rows()[-1].request_id in names  # they left the batch and joined it again behind X


def test_one_group_goes_while_another_comes(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Both in one iteration, the one into the very blocks that the other leaves: pages are swapped out first, then in."""
    runner = make_sequence_runner(model)
    groups = HandMadeGroups(runner)
    groups.add("A", random_prompt(9, seed=1))
    groups.add("B", random_prompt(10, seed=2))
    groups.step()
    groups.swap_out(["B"])
    groups.step()
    left = groups.swap_out(["A"])
    groups.free = sorted(left)
    groups.swap_in(["B"])
    groups.step(["B"])
    plan = groups.plans[-1]
    assert {pair[0] for pair in plan.swap_out} == {pair[1] for pair in plan.swap_in} == left
    assert worst_difference(runner, plan, reference) <= TOLERANCE
    groups.free = [b for b in range(64) if b not in left]
    groups.swap_in(["A"])
    groups.step()
    assert worst_difference(runner, groups.plans[-1], reference) <= TOLERANCE


def test_a_recomputed_group_goes_on_as_if_nothing_had_happened(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Section 4.5: prompt and outputs computed as one prompt; the first sequence computes all, the others share its full blocks in the same iteration."""
    hot = [SamplingParams(max_tokens=64, temperature=1.0, seed=seed) for seed in range(3)]
    runner, undisturbed = make_sequence_runner(model), make_sequence_runner(model)
    groups, alone = HandMadeGroups(runner), HandMadeGroups(undisturbed)
    prompt = random_prompt(9, seed=6)
    for life in (groups, alone):
        life.add("A1", prompt, hot[0])
        outputs = life.step(["A1"], draws={"A1": {f"A{i + 1}": params for i, params in enumerate(hot)}})["A1"]
        for i in (1, 2):
            life.fork("A1", f"A{i + 1}", hot[i])
        for i, token in enumerate(outputs.sampled, 1):
            life.append(f"A{i}", token.token_id)
        life.step()
        life.step()
    for name in groups.sequences:
        groups.recompute(name)
    poison(runner, groups.free)
    for name in ("A2", "A3"):
        groups.share_full_blocks("A1", name, num_blocks=2)
    for _ in range(4):
        groups.step()
        alone.step()
        assert worst_difference(runner, groups.plans[-1], reference) <= TOLERANCE
    recomputed = groups.plans[3].sequences
    assert [(s.num_computed_tokens, s.num_scheduled_tokens) for s in recomputed] == [(0, 12), (8, 4), (8, 4)]
    for name in groups.sequences:
        assert groups.sequences[name].token_ids == alone.sequences[name].token_ids


def test_a_prefix_is_computed_without_draws_and_shared(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Figure 10: nothing is sampled from a prefix; a request starts as a fork of it, at the end of its tokens, and copies its partial last block."""
    runner = make_sequence_runner(model)
    groups = HandMadeGroups(runner)
    groups.add("P", random_prompt(10, seed=7))
    assert groups.step(["P"], sample=False)["P"].sampled == ()
    for name in ("A", "B"):
        groups.fork("P", name)
        groups.sequences[name].token_ids += random_prompt(3, seed=ord(name))
        groups.sequences[name].num_prompt_tokens = 13
    for _ in range(4):
        groups.step(["A", "B"])
        assert worst_difference(runner, groups.plans[-1], reference) <= TOLERANCE
    assert len(groups.plans[1].copies) == 2  # the prefix itself keeps the original
    assert [s.num_computed_tokens for s in groups.plans[1].sequences] == [10, 10]


def test_draws_depend_on_nothing_but_seed_and_tokens(model: PreTrainedModel) -> None:
    """A sample drawn alone, among others, after a swap and after a recomputation has the same tokens."""

    def life(company: bool, trouble: str) -> list[int]:
        groups = HandMadeGroups(make_sequence_runner(model), seed=len(trouble))
        if company:
            groups.add("X", random_prompt(11, seed=8), SamplingParams(temperature=0.9, seed=5))
            groups.step()
        groups.add("A", random_prompt(6, seed=9), SamplingParams(max_tokens=64, temperature=1.3, seed=11))
        for iteration in range(12):
            if iteration == 8 and company:
                groups.drop("X")  # somebody else's stream ends
            if iteration == 5 and trouble == "swap":
                groups.swap_out(["A"])
                groups.step([n for n in groups.sequences if n != "A"])
                groups.swap_in(["A"])
            if iteration == 5 and trouble == "recompute":
                groups.recompute("A")
                groups.step([n for n in groups.sequences if n != "A"])
            groups.step()
        return groups.sequences["A"].token_ids[6:]

    alone = life(False, "")
    assert len(set(alone)) > 6  # hot enough to be no greedy run
    assert life(True, "") == life(False, "swap") == life(True, "swap") == life(True, "recompute") == alone


def test_a_stream_goes_on_as_in_v1(model: PreTrainedModel) -> None:
    """The same seed draws the same tokens in both engines: one stream per sequence, one number per token."""
    params = SamplingParams(max_tokens=64, temperature=1.3, seed=11)
    driver = Driver(make_runner(model))
    driver.add("A", random_prompt(6, seed=9), params)
    driver.step({"A": 6})
    groups = HandMadeGroups(make_sequence_runner(model))
    groups.add("A", random_prompt(6, seed=9), params)
    groups.step()
    for _ in range(10):
        driver.step({"A": 1})
        groups.step()
    assert groups.sequences["A"].token_ids == driver.requests["A"].token_ids


def test_a_finished_sequence_takes_its_stream_along(model: PreTrainedModel) -> None:
    """A second sequence of the same name begins its numbers anew."""
    groups = HandMadeGroups(make_sequence_runner(model))
    lives = []
    for _ in range(2):
        groups.add("A", random_prompt(6, seed=9), SamplingParams(max_tokens=64, temperature=1.3, seed=11))
        for _ in range(5):
            groups.step()
        lives.append(groups.sequences["A"].token_ids)
        groups.drop("A")
    assert lives[0] == lives[1]


def test_samples_of_one_prompt_draw_from_streams_of_their_own(model: PreTrainedModel) -> None:
    """Sample i of a group draws what a request of its own with that seed would draw."""
    prompt = random_prompt(6, seed=2)
    draws = {f"A{seed}": SamplingParams(temperature=1.5, seed=seed) for seed in range(4)}
    together = HandMadeGroups(make_sequence_runner(model))
    together.add("A0", prompt)
    drawn = together.step(["A0"], draws={"A0": draws})["A0"].sampled
    for (name, params), token in zip(draws.items(), drawn, strict=True):
        alone = HandMadeGroups(make_sequence_runner(model))
        alone.add(name, prompt, params)
        assert alone.step()[name].sampled == (token,)
    assert len({token.token_id for token in drawn}) > 1


def test_log_probabilities_are_those_of_a_plain_forward_pass(tiny_reference: PreTrainedModel) -> None:
    """Most probable first, then the tokens asked for; against torch.log_softmax over transformers' own logits."""
    loaded = load_model("tiny")
    prompt = loaded.tokenizer.encode("It was the best of")
    groups = HandMadeGroups(make_sequence_runner(loaded.model))
    groups.add("A", prompt)
    logprobs = groups.step(num_logprobs=8, asked=(3000, 17), sample=False)["A"].logprobs
    expected = torch.log_softmax(unshared_logits(tiny_reference, prompt), 0)
    best = expected.topk(8).indices.tolist()
    assert list(logprobs) == [*best, *(t for t in (3000, 17) if t not in best)]
    for token_id, logprob in logprobs.items():
        assert logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
