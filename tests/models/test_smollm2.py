"""SmolLM2-135M as it was pulled. The expected texts come from transformers' own GGUF loader on the same file."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from engine.models import load_model, load_tokenizer

pytestmark = pytest.mark.weights


@cache
def own_copy() -> PreTrainedModel:
    """The model by itself: the shared one reads a paged cache as soon as an engine of this process has used it."""
    model = copy.deepcopy(load_model("smollm2-135m").model)
    model.set_attn_implementation("sdpa")
    return model


def continuation(text: str, length: int) -> str:
    torch.set_num_threads(1)
    loaded = load_model("smollm2-135m")
    prompt = loaded.tokenizer.encode(text)
    output = own_copy().generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False, pad_token_id=2)[0].tolist()
    return loaded.tokenizer.decode([token for token in output[len(prompt) :] if token not in loaded.tokenizer.stop_token_ids])


def test_raw_text_goes_on_as_transformers_makes_it() -> None:
    assert continuation("Four score and seven years ago our", 16).startswith(" relationship was a no-no. I was a perfectionist and I was always")


def test_a_chat_is_answered() -> None:
    """The chat template's special tokens are read as such in a text."""
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert continuation(system + question, 12) == "The capital of France is Paris."


def test_the_tokenizer_knows_special_tokens_single_digits_and_any_text() -> None:
    tokenizer = load_tokenizer("smollm2-135m")
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.stop_token_ids == (2,)
    assert tokenizer.vocab_size == 49152
    assert [tokenizer.token_text(token) for token in tokenizer.encode("2048 blocks")] == ["2", "0", "4", "8", "blocks"]
    text = "Grüße,\n\t你好  🎉 <|im_end|> it's 3.14"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_shape_is_the_published_one() -> None:
    shape = load_model("smollm2-135m").shape
    assert (shape["num_layers"], shape["num_q_heads"], shape["num_kv_heads"], shape["head_dim"]) == (30, 9, 3, 64)
    assert shape["num_parameters"] == 134_515_008
    assert shape["max_position_embeddings"] == 8192
