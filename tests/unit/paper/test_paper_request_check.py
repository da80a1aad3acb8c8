"""What is refused at the door, in one sentence that says how to mend it; and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidInput
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.request_check import check_request, num_blocks_alone, num_blocks_at_least
from engine.paper.scheduler import PaperScheduler
from tests.unit.paper.harness import Driven, request

PREFIX = PaperRequestSpec("P", tuple(range(6)), is_prefix=True)


def spec(request_id: str = "A", num_prompt: int = 4, **more: Any) -> PaperRequestSpec:
    return PaperRequestSpec(request_id, tuple(range(num_prompt)), **{"max_tokens": 2, **more})


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (spec(num_prompt=21), "21 prompt tokens to compute, but a prompt is computed in one piece and an iteration holds 20"),
        (spec(num_prompt=12, max_tokens=30), "needs 11 blocks at one time, but the pool has 10 besides the 2 of kept prefixes: lower max_tokens"),
        (
            spec(n=4, max_tokens=13),
            "needs 13 blocks at one time, but the pool has 10 besides the 2 of kept prefixes: lower max_tokens (13) or the number of samples",
        ),
        (spec(beam_width=4, max_tokens=36), "needs 13 blocks at one time, but the pool has 10"),
        (spec(n=5), "has 5 samples, which run together, but max_num_seqs is 4"),
        (spec(beam_width=5), "has 5 beams, which run together, but max_num_seqs is 4"),
        (spec(prefix_id="Q"), "begins with the prefix 'Q', but there is no such prefix"),
        (spec(prefix_id="B"), "begins with the prefix 'B', but there is no such prefix"),
        (PaperRequestSpec("A", (9, 9, 9), prefix_id="P"), "does not begin with the tokens of prefix 'P'"),
        (spec(num_prompt=6, prefix_id="P"), "is the prefix 'P' and nothing more"),
        (spec(is_prefix=True, n=2), "is a prefix, which is one sequence without outputs"),
        (spec("B"), "there is a request 'B' already"),
        (spec("B1", n=1), "the sequences of 'B' are called B1, B2"),
        (spec("C", n=2), "the sequences of 'C' are called C1, C2, …, so no request can be called 'C7'"),
        (spec(forced_beams=(((0, 1),),)), "has no beam_width"),
        (spec(beam_width=2, forced_beams=(((0, 1),),) * 3), "3 selections, but max_tokens allows 2"),
        (spec(beam_width=2, forced_beams=(((0, 1), (0, 2), (0, 3)),)), "selection 1 must name 1 to 2 different survivors"),
        (spec(beam_width=2, forced_beams=(((0, 1), (0, 1)),)), "selection 1 must name 1 to 2 different survivors"),
        (spec(beam_width=2, forced_beams=(((1, 1),),)), "selection 1 names a parent that is not there; 1 beams live then"),
        (spec(beam_width=2, forced_beams=(((0, 1),), ((1, 1),))), "selection 2 names a parent that is not there; 1 beams live then"),
        (spec(beam_width=2, stop_token_ids=(1,), forced_beams=(((0, 1),), ((0, 2),))), "all survivors of selection 1 end with a stop token"),
    ],
)
def test_refused(refused: PaperRequestSpec, says: str) -> None:
    others = (PREFIX, spec("B", n=2), spec("C7"))
    config = PaperConfig(num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=20)  # two blocks are the prefix's
    with pytest.raises(InvalidInput) as refusal:
        check_request(refused, config, others)
    assert says in str(refusal.value)


def test_too_long_for_the_model() -> None:
    config = PaperConfig(num_blocks=12, block_size=4, max_model_len=6)
    check_request(spec(num_prompt=5), config)
    check_request(spec(num_prompt=6, is_prefix=True), config)
    with pytest.raises(InvalidInput, match="prompt of 6 tokens, but max_model_len is 6"):
        check_request(spec(num_prompt=6), config)


@pytest.mark.parametrize(
    ("asked", "most", "least"),
    [
        (spec(num_prompt=7, max_tokens=1), 2, 2),  # nothing but the prompt
        (spec(num_prompt=7, max_tokens=2), 2, 2),  # 8 tokens are computed, the 9th never
        (spec(num_prompt=7, max_tokens=3), 3, 3),
        (spec(num_prompt=7, max_tokens=1, n=4), 2, 2),  # all end with the first token, before anything is written
        (spec(num_prompt=7, max_tokens=2, n=4), 5, 5),  # one shared, four of their own
        (spec(num_prompt=8, max_tokens=2, n=4), 6, 6),
        (spec(num_prompt=8, max_tokens=9, beam_width=3), 8, 6),  # two for the prompt and 3 × 2, or with all but the last shared 4 + 2
        (spec(num_prompt=8, max_tokens=9, beam_width=3, forced_beams=(((0, 1),),)), 8, 4),
        (spec(num_prompt=7, is_prefix=True), 2, 2),
    ],
)
def test_how_many_blocks_a_group_may_and_must_have(asked: PaperRequestSpec, most: int, least: int) -> None:
    config = PaperConfig(num_blocks=99, block_size=4)
    assert (num_blocks_alone(asked, config), num_blocks_at_least(asked, config)) == (most, least)


@pytest.mark.parametrize(("num_prompt", "max_tokens", "n"), [(7, 3, 1), (7, 2, 4), (8, 2, 4), (5, 6, 3), (4, 1, 4)])
def test_with_so_many_blocks_a_group_runs_alone_without_preemption_and_with_one_less_it_is_refused(num_prompt: int, max_tokens: int, n: int) -> None:
    outputs = tuple(tuple(range(i, i + max_tokens)) for i in range(n))
    asked = request("A", num_prompt, *outputs)
    num_blocks = num_blocks_alone(asked, PaperConfig(99, 4))
    driven = Driven(asked, num_blocks=num_blocks)
    plans = driven.run()
    assert len(plans) == max_tokens
    with pytest.raises(InvalidInput):
        PaperScheduler(PaperConfig(num_blocks - 1, 4)).add_request(asked)


def test_a_refused_request_leaves_no_trace() -> None:
    driven = Driven(spec("B"), num_blocks=4)
    with pytest.raises(InvalidInput):
        driven.scheduler.add_request(spec("B", num_prompt=3))
    assert (driven.names("waiting"), list(driven.scheduler.sequences), len(driven.log.events)) == (["B"], ["B"], 1)


def test_a_prefix_may_not_take_the_blocks_that_others_were_promised() -> None:
    driven = Driven(spec("A", num_prompt=12), num_blocks=5)
    with pytest.raises(InvalidInput, match="request 'A' needs 4 blocks at one time, but the pool has 3 besides the 2 of kept prefixes"):
        driven.scheduler.add_request(PREFIX)
    driven.scheduler.add_request(PaperRequestSpec("Q", (1, 2), is_prefix=True))
    driven.run()
    assert driven.tables() == {"Q": [0]}


def test_aborting_a_prefix_or_nobody() -> None:
    driven = Driven(PREFIX, num_blocks=5)
    with pytest.raises(InvalidInput, match="is a prefix that the provider keeps"):
        driven.scheduler.abort_request("P")
    with pytest.raises(InvalidInput, match="there is no request 'A' to abort"):
        driven.scheduler.abort_request("A")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"temperature": float("nan")}, "request A: temperature is nan, but it must be a number from 0 on"),
        ({"temperature": -1.0}, "request A: temperature is -1.0, but it must be a number from 0 on"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "request A: length_penalty is nan, but it must be a number"),
        ({"beam_width": 2, "length_penalty": float("inf")}, "request A: length_penalty is inf, but it must be a number"),
    ],
)
def test_numbers_that_nothing_can_be_ranked_or_drawn_with(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        spec(**bad)
    assert str(refused.value) == says


def test_an_unknown_way_to_preempt_is_not_taken_for_another() -> None:
    how: Any = "evict"
    with pytest.raises(InvalidInput, match=r"^preemption_mode is 'evict', but it is one of auto, swap, recompute$"):
        PaperConfig(num_blocks=4, block_size=4, preemption_mode=how)
