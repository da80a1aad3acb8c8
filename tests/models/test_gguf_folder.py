"""GGUF to Hugging Face folder: the same logits as the model that was written, the same tokens as the text had bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models import load_model, load_tokenizer
from engine.models.gguf_folder import convert, tensor_name
from tests.models.fakes import write_gguf


@pytest.fixture(scope="module")
def folder(small_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted")
    convert(small_gguf, out)
    return out


def test_logits_are_those_of_the_model_that_was_written(small_llama: Any, folder: Path) -> None:
    """Wrong regrouping of query and key rows, a wrong rotary base or norm epsilon would all show here."""
    loaded = load_model(str(folder))
    ids = torch.tensor([[5, 17, 99, 3, 42, 200, 7, 7, 130, 64, 11, 250]])
    with torch.no_grad():
        expected = small_llama(ids).logits
        actual = loaded.model(ids).logits
    assert torch.equal(actual, expected)


def test_without_undoing_llama_cpps_order_the_logits_would_differ(small_llama: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: the permutation matters for this model."""
    import engine.models.gguf_folder as module

    file = tmp_path / "again.gguf"
    write_gguf(file, {name: tensor.numpy() for name, tensor in small_llama.state_dict().items()}, small_llama.config)
    monkeypatch.setattr(module, "undo_rotary_grouping", lambda weight, num_heads: weight)
    out = tmp_path / "out"
    out.mkdir()
    convert(file, out)
    ids = torch.tensor([[5, 17, 99, 3, 42]])
    with torch.no_grad():
        difference = (load_model(str(out)).model(ids).logits - small_llama(ids).logits).abs().max()
    assert difference > 1e-3


def test_four_bit_weights_are_unpacked_to_within_their_step(small_llama: Any, tmp_path: Path) -> None:
    """Q4_1: 32 numbers share a minimum and a step, 16 levels; the error is at most half a step (plus the float16 rounding of both)."""
    state = {name: tensor.numpy() for name, tensor in small_llama.state_dict().items()}
    file = tmp_path / "packed.gguf"
    write_gguf(file, state, small_llama.config, quantized=True)
    out = tmp_path / "out"
    out.mkdir()
    convert(file, out)
    from safetensors.numpy import load_file

    weights = load_file(out / "model.safetensors")
    assert set(weights) == set(state) - {"lm_head.weight"}
    original = state["model.layers.1.mlp.up_proj.weight"].reshape(-1, 32)
    unpacked = weights["model.layers.1.mlp.up_proj.weight"].reshape(-1, 32)
    step = (original.max(axis=1) - original.min(axis=1)) / 15
    assert (np.abs(unpacked - original).max(axis=1) <= 0.5 * step + 0.01).all()
    assert not np.array_equal(unpacked, original)


def test_the_tokenizer_follows_the_merges_splits_digits_and_knows_its_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert [tokenizer.token_text(token) for token in tokenizer.encode("the the 42")] == ["the", "the", "␣", "4", "2"]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.stop_token_ids == (2,)
    assert tokenizer.vocab_size == 262
    assert tokenizer.decode(tokenizer.encode("Grüße, 你好 <|im_start|> 🎉")) == "Grüße, 你好 <|im_start|> 🎉"


def test_the_noted_fingerprint_is_the_true_one(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "pagewalk.json").unlink()
    noted = json.loads((folder / "pagewalk.json").read_text())["fingerprint"]
    assert load_model(str(copy)).fingerprint == noted == load_model(str(folder)).fingerprint


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_gate_inp.weight", "x"])
def test_a_tensor_of_another_architecture_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no place in a llama"):
        tensor_name(name)
