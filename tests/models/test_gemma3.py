"""Gemma 3 270M as it was pulled. What is expected was written down from transformers' own GGUF loader on the same file (gemma_texts.py)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.models import load_model, load_tokenizer
from engine.models.catalog import GEMMA3, pulled_dir
from engine.models.terms import GEMMA_TERMS
from tests.models.gemma_texts import REFERENCE, digest_of_ids, texts
from tests.worker.harness import untouched_copy

pytestmark = pytest.mark.weights(GEMMA3)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return json.loads(REFERENCE.read_text(encoding="utf-8"))


def test_every_weight_is_bit_for_bit_the_one_of_transformers(reference: dict[str, Any]) -> None:
    """Four kinds of packed blocks and norms that the file keeps one too large: each of the 236 tensors has the same bytes."""
    from safetensors import safe_open

    with safe_open(pulled_dir(GEMMA3) / "model.safetensors", framework="np") as weights:
        names = list(weights.keys())
        assert len(names) == 236
        assert sorted(names) == sorted(reference["tensors"])
        for name in names:
            assert hashlib.sha256(weights.get_tensor(name).tobytes()).hexdigest() == reference["tensors"][name], name


def test_the_config_says_what_transformers_reads_from_the_file(reference: dict[str, Any]) -> None:
    config = AutoConfig.from_pretrained(pulled_dir(GEMMA3), local_files_only=True).to_dict()
    expected = {**reference["config"], "rms_norm_eps": 1e-6}  # the file has the nearest 32-bit number
    assert abs(reference["config"]["rms_norm_eps"] - 1e-6) < 1e-12
    assert {key: config.get(key) for key in expected} == {**expected, "architectures": ["Gemma3ForCausalLM"]}
    assert [index for index, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]


def test_the_tokenizer_reads_every_text_as_that_of_transformers(reference: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(GEMMA3)
    for text, ids in reference["prompts"].items():
        assert tokenizer.encode_prompt(text) == ids, text
    rows = [tokenizer.encode_prompt(text) for text in texts()]
    assert digest_of_ids(rows) == reference["digest_of_all_prompts"]
    assert all(tokenizer.decode(row[1:]) == text.replace("▁", " ") for row, text in zip(rows, texts(), strict=True))


def test_only_a_whole_prompt_begins_with_bos_and_slots_show_what_is_invisible() -> None:
    tokenizer = load_tokenizer(GEMMA3)
    assert tokenizer.encode_prompt("Four score") == [2, *tokenizer.encode("Four score")]
    assert tokenizer.stop_token_ids == (1,)
    assert tokenizer.vocab_size == 262_144
    shown = [tokenizer.token_text(token) for token in tokenizer.encode_prompt("Four score\n\n\tand 42   \x00<b><eos>")]
    assert shown == ["<bos>", "Four", "score", "⏎⏎", "⇥", "and", "␣", "4", "2", "␣␣␣", "<00>", "<b>", "<eos>"]


def test_a_plain_text_goes_on_sensibly() -> None:
    """The same text as with transformers' own loader."""
    torch.set_num_threads(1)
    loaded = load_model(GEMMA3)
    prompt = loaded.tokenizer.encode_prompt("Four score and seven years ago our")
    output = untouched_copy(loaded.model).generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
    text = " father was a young man in the United States of America. He was a man of many talents. He was a man"
    assert loaded.tokenizer.decode(output[len(prompt) :]) == text


def test_the_shape_is_the_published_one() -> None:
    shape = load_model(GEMMA3).shape
    assert (shape["num_layers"], shape["num_q_heads"], shape["num_kv_heads"], shape["head_dim"]) == (18, 4, 1, 256)
    assert shape["num_parameters"] == 268_098_176
    assert shape["max_position_embeddings"] == 32_768


def test_the_terms_lie_beside_the_weights() -> None:
    folder = pulled_dir(GEMMA3)
    assert (folder / "NOTICE.txt").read_text(encoding="utf-8").startswith(GEMMA_TERMS.notice)
    assert "Gemma Terms of Use" in (folder / "GEMMA_TERMS.html").read_text(encoding="utf-8")
