"""Choosing the next token: greedy, seeded, forced; always the same token for the same request."""

from __future__ import annotations

import math

import pytest
import torch

from engine.core.output import SamplingParams
from engine.errors import InvalidInput
from engine.trace.events import CauseKind
from engine.worker.sampler import check_token_ids, make_generator, sample, top_logprobs

LOGITS = torch.tensor([0.0, math.log(2.0), math.log(5.0), 0.0, 0.0])  # probabilities .1 .2 .5 .1 .1


def draw_many(params: SamplingParams, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    generator = make_generator(params)
    return [sample(logits, params, n, generator).token_id for n in range(count)]


def test_greedy_takes_the_most_probable_token_and_reports_its_probability() -> None:
    params = SamplingParams()
    token = sample(LOGITS, params, 0, make_generator(params))
    assert token.token_id == 2
    assert token.cause.kind is CauseKind.GREEDY
    assert token.cause.facts == {"probability": 0.5}


def test_greedy_breaks_ties_by_the_lowest_id() -> None:
    params = SamplingParams()
    logits = torch.zeros(50_000)
    logits[[777, 778, 40_000]] = 3.0
    assert sample(logits, params, 0, make_generator(params)).token_id == 777


def test_probabilities_are_rounded_to_4_digits() -> None:
    params = SamplingParams()
    assert sample(torch.zeros(3), params, 0, make_generator(params)).cause.facts == {"probability": 0.3333}


def test_seeded_draws_are_reproducible_and_differ_by_seed() -> None:
    one = SamplingParams(temperature=1.0, seed=1)
    assert draw_many(one, 50) == draw_many(one, 50)
    assert draw_many(one, 50) != draw_many(SamplingParams(temperature=1.0, seed=2), 50)


def test_no_seed_is_seed_0() -> None:
    assert draw_many(SamplingParams(temperature=1.0), 50) == draw_many(SamplingParams(temperature=1.0, seed=0), 50)


def test_seeded_draws_follow_the_tempered_distribution() -> None:
    counts = torch.bincount(torch.tensor(draw_many(SamplingParams(temperature=0.5, seed=3), 4000)), minlength=5) / 4000
    expected = torch.tensor([1.0, 4.0, 25.0, 1.0, 1.0]) / 32  # probabilities squared, normalised
    assert float((counts - expected).abs().max()) < 0.025  # three standard deviations of the commonest token


def test_seeded_cause_has_the_probability_at_the_temperature() -> None:
    params = SamplingParams(temperature=0.5, seed=3)
    token = sample(LOGITS, params, 0, make_generator(params))
    assert token.cause.kind is CauseKind.SEEDED
    assert token.cause.facts == {"probability": round([1, 4, 25, 1, 1][token.token_id] / 32, 4), "temperature": 0.5, "seed": 3}


def test_a_token_with_no_probability_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 2.0, -math.inf])
    assert set(draw_many(SamplingParams(temperature=2.0, seed=5), 500, logits)) == {1, 3}


def test_forced_tokens_dictate_and_tell_what_the_model_would_have_said() -> None:
    params = SamplingParams(forced_token_ids=(4, 0))
    generator = make_generator(params)
    tokens = [sample(LOGITS, params, n, generator) for n in range(3)]
    assert [t.token_id for t in tokens] == [4, 0, 2]
    assert [t.cause.kind for t in tokens] == [CauseKind.FORCED, CauseKind.FORCED, CauseKind.GREEDY]
    assert tokens[0].cause.facts == {"model_token_id": 2}


def test_forced_tokens_leave_later_draws_as_they_were() -> None:
    free = draw_many(SamplingParams(temperature=1.0, seed=9), 20)
    forced = draw_many(SamplingParams(temperature=1.0, seed=9, forced_token_ids=(3, 3, 3)), 20)
    assert forced[:3] == [3, 3, 3]
    assert forced[3:] == free[3:]


@pytest.mark.parametrize("bad", [-1, 97])
def test_ids_outside_the_vocabulary_are_named(bad: int) -> None:
    with pytest.raises(InvalidInput, match=rf"Token id {bad} of request A is outside the model's vocabulary of 97 tokens"):
        check_token_ids([5, bad], 97, "A")


def test_the_first_and_last_id_of_the_vocabulary_are_fine() -> None:
    check_token_ids((0, 96), 97, "A")


def test_log_probabilities_of_equals_come_by_token_id() -> None:
    """Natural logarithms; of equals the lower id first, also where the count cuts through them; what is asked for besides comes last, once."""
    found = top_logprobs(LOGITS, 3, (4, 2))
    assert list(found) == [2, 1, 0, 4]
    assert [found[t] for t in found] == pytest.approx([math.log(0.5), math.log(0.2), math.log(0.1), math.log(0.1)])


@pytest.mark.parametrize(("count", "asked", "expected"), [(0, (), []), (0, (3,), [3]), (9, (), [2, 1, 0, 3, 4]), (1, (2,), [2])])
def test_as_many_log_probabilities_as_there_are_tokens(count: int, asked: tuple[int, ...], expected: list[int]) -> None:
    assert list(top_logprobs(LOGITS, count, asked)) == expected


def test_many_equals_keep_their_order() -> None:
    assert list(top_logprobs(torch.zeros(5000), 300)) == list(range(300))
