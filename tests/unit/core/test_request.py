"""Requests: what they refuse, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.output import SamplingParams
from engine.core.request import Request, RequestStatus
from engine.errors import InvalidInput


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "'A' has an empty prompt"),
        ([1, -2], "token -2 at position 1"),
        ([1, 2.0], "2.0 at position 1"),
        (["x"], "'x' at position 0"),
        ([True], "True at position 0"),
        ([3, None], "None at position 1"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Request("A", prompt)


def test_tokens_are_counted_and_the_prompt_is_a_copy() -> None:
    prompt = [5, 6, 7]
    request = Request("A", prompt, SamplingParams(max_tokens=2))
    prompt.append(8)
    request.append_output_token_ids([9])
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (4, 3, 1)
    assert (request.prompt_token_ids, request.output_token_ids) == ([5, 6, 7], [9])
    assert request.max_tokens == 2
    assert request.block_hashes == []


def test_only_what_comes_after_preempted_is_an_end() -> None:
    ends = {status.name for status in RequestStatus if status.is_finished}
    assert ends == {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_ERROR"}
    request = Request("A", [1])
    assert request.get_finished_reason() is None
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert request.get_finished_reason() == "length"
