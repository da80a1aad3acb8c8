"""`tiny-hybrid` lives on its states: without what its Mamba layers remember it does not go on as the text does, although attention still sees every word."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from engine.models import load_model
from engine.models.tiny_tokenizer import read_passages
from tests.worker.harness import untouched_copy

NUM_READ = 24


@cache
def own_copy() -> PreTrainedModel:
    """The model by itself, whatever an engine of this process has made of the shared one."""
    return untouched_copy(load_model("tiny-hybrid").model)


@cache
def passages() -> list[list[int]]:
    tokenizer = load_model("tiny-hybrid").tokenizer
    encoded = [tokenizer.encode(text) for text in read_passages().values()]
    return [ids for ids in encoded if len(ids) > NUM_READ + 1]


def num_wrong(*forgotten: str) -> tuple[int, int]:
    """In how many passages the next word is not the text's, after `NUM_READ` tokens were read, one more is given and the states named `forgotten` were set to
    zero; and of how many."""
    torch.set_num_threads(1)
    wrong = 0
    for ids in passages():
        states: Any = DynamicCache(config=own_copy().config)
        with torch.no_grad():
            own_copy()(torch.tensor([ids[:NUM_READ]]), cache=states, use_cache=True)
            for layer in states.layers:
                for name in forgotten:
                    if hasattr(layer, name):
                        getattr(layer, name)[0].zero_()
            logits = own_copy()(torch.tensor([ids[NUM_READ : NUM_READ + 1]]), cache=states, use_cache=True).logits
        wrong += int(logits[0, -1].argmax()) != ids[NUM_READ + 1]
    return wrong, len(passages())


def test_with_its_states_it_goes_on_with_the_text() -> None:
    wrong, total = num_wrong()
    assert total > 15
    assert wrong == 0


@pytest.mark.parametrize("forgotten", [("recurrent_states",), ("recurrent_states", "conv_states")])
def test_without_its_states_the_next_word_is_lost_in_every_third_passage_or_more(forgotten: tuple[str, ...]) -> None:
    """All keys and values are still there: what is lost was in the states alone."""
    wrong, total = num_wrong(*forgotten)
    assert wrong > total // 3


def test_that_a_faster_package_is_missing_is_not_said_and_everything_else_is() -> None:
    """The layers run on transformers' own functions on purpose; its remark about it would stand in the output of every command."""
    own_copy()
    logger = logging.getLogger("transformers.integrations.hub_kernels")

    def passes(message: str) -> bool:
        return bool(logger.filter(logging.LogRecord(logger.name, logging.WARNING, __file__, 1, message, None, None)))

    assert not passes("`mamba_chunk_scan_combined` is falling back to its reference PyTorch implementation because `mamba-ssm` is not installed.")
    assert passes("A kernel of that name was not found.")
