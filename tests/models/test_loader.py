"""Names and folders become models; whatever is wrong is one sentence."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import InvalidInput
from engine.models import LoadedModel, list_models, load_model, load_tokenizer
from engine.models.tiny_tokenizer import TINY_DIR


def copy_of_tiny(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY_DIR / name, folder / name)
    if config:
        changed = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(changed))
    return folder


def refusal(name: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_model(name)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def test_tiny_is_installed_and_smollm2_says_how_to_get_it(cache: Path) -> None:
    by_name = {info.name: info for info in list_models()}
    smollm2 = by_name["smollm2-135m"]
    for name in ("tiny", "tiny-swa", "tiny-hybrid"):
        assert (by_name[name].installed, by_name[name].how_to_get) == (True, ""), name
    assert not smollm2.installed
    assert smollm2.how_to_get == "python -m engine.models pull smollm2-135m"
    assert str(cache) in smollm2.path


def test_the_model_is_float32_in_eval_mode_without_gradients() -> None:
    loaded = load_model("tiny")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not loaded.model.training


def test_many_threads_get_one_model(tmp_path: Path) -> None:
    folder = str(copy_of_tiny(tmp_path / "model"))
    got: list[LoadedModel] = []
    threads = [threading.Thread(target=lambda: got.append(load_model(folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    assert len({id(loaded) for loaded in got}) == 1
    assert load_model(f"{folder}/../model") is got[0]
    assert got[0].name == "model"


def test_the_fingerprint_belongs_to_the_contents_not_to_the_place(tmp_path: Path) -> None:
    same = load_model(str(copy_of_tiny(tmp_path / "same")))
    assert same.fingerprint == load_model("tiny").fingerprint
    other = copy_of_tiny(tmp_path / "other")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    assert load_model(str(other)).fingerprint != same.fingerprint


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM", "MistralForCausalLM"])
def test_other_llama_like_folders_load(architecture: str, tmp_path: Path) -> None:
    import transformers

    kind = architecture.removesuffix("ForCausalLM")
    config_class = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    vocab_size = load_tokenizer("tiny").vocab_size
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = getattr(transformers, architecture)(config_class(vocab_size=vocab_size, pad_token_id=0, eos_token_id=0, bos_token_id=0, **sizes))
    model.save_pretrained(tmp_path / "model")
    shutil.copy(TINY_DIR / "tokenizer.json", tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"))
    shape = loaded.shape
    assert shape["architecture"] == architecture
    assert (shape["num_layers"], shape["num_q_heads"], shape["num_kv_heads"], shape["head_dim"]) == (2, 2, 1, 16)
    assert loaded.max_model_len == 64
    assert loaded.tokenizer.stop_token_ids == (0,)


def test_an_unknown_name_is_told_the_choices_and_the_pull_command() -> None:
    text = refusal("gpt-17")
    assert "'gpt-17'" in text
    assert "tiny, tiny-swa, tiny-hybrid, smollm2-135m" in text
    assert "python -m engine.models pull smollm2-135m" in text
    assert "There is no model named ''" in refusal("")


def test_a_model_that_is_not_pulled_yet_is_told_the_command(cache: Path) -> None:
    assert "python -m engine.models pull smollm2-135m" in refusal("smollm2-135m")


def test_a_folder_that_lacks_files_is_told_which(tmp_path: Path) -> None:
    assert "lacks config.json and tokenizer.json and *.safetensors" in refusal(str(tmp_path))
    folder = copy_of_tiny(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    assert "lacks tokenizer.json:" in refusal(str(folder))


def test_an_architecture_without_our_kind_of_attention_is_refused_by_name(tmp_path: Path) -> None:
    text = refusal(str(copy_of_tiny(tmp_path / "model", architectures=["GPT2LMHeadModel"])))
    assert "GPT2LMHeadModel" in text
    assert "Llama" in text


@pytest.mark.parametrize(
    ("name", "content"), [("config.json", b"{"), ("tokenizer.json", b"{}"), ("model.safetensors", b"half"), ("tokenizer_config.json", b"\xff")]
)
def test_a_broken_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "model")
    (folder / name).write_bytes(content)
    assert str(folder) in refusal(str(folder))


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    config = transformers.LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(TINY_DIR / "tokenizer.json", folder)
    assert "do not belong together" in refusal(str(folder))
