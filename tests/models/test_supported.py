"""Folders with nothing but a config.json of an architecture that cannot run here: one sentence that says what can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidInput
from engine.models.catalog import resolve
from engine.models.supported import SUPPORTED_ARCHITECTURES, unsupported
from scenarios.__main__ import main


def config_of(kind: str, **more: Any) -> dict[str, Any]:
    """A small config as transformers' own class of that name writes it."""
    import transformers

    config = getattr(transformers, f"{kind}Config")()
    return {**config.to_dict(), **more}


def folder_with(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("kind", "architecture", "reason"),
    [
        ("GPT2", "GPT2LMHeadModel", ""),
        ("Mixtral", "MixtralForCausalLM", ""),
        ("Gemma2", "Gemma2ForCausalLM", "it caps its attention scores"),
        ("GptOss", "GptOssForCausalLM", "it has attention sinks"),
        ("T5", "T5ForConditionalGeneration", "it has an encoder"),
        ("Gemma3", "Gemma3ForConditionalGeneration", "it reads images"),
        ("Mamba2", "Mamba2ForCausalLM", ""),
    ],
)
def test_an_unsupported_architecture_is_named_with_those_that_are_supported(kind: str, architecture: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolve(folder_with(tmp_path, config_of(kind, architectures=[architecture])))
    text = str(caught.value)
    assert f"{tmp_path} has the architecture {architecture}, which Pagewalk cannot run" in text
    assert reason in text
    assert all(name.removesuffix("ForCausalLM") in text for name in SUPPORTED_ARCHITECTURES)
    assert "\n" not in text
    assert text.endswith(".")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "says no architecture in its config.json"),
        ({"architectures": []}, "says no architecture"),
        ({"architectures": "LlamaForCausalLM"}, "says no architecture"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "caps its attention scores"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "lets tokens see later ones"),
    ],
)
def test_what_else_stands_in_the_way_is_said(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=says):
        resolve(folder_with(tmp_path, config))


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_supported_architectures_are_not_refused(architecture: str) -> None:
    assert unsupported({"architectures": [architecture]}) is None


def test_a_supported_folder_without_weights_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"lacks tokenizer\.json and \*\.safetensors"):
        resolve(folder_with(tmp_path, {"architectures": ["LlamaForCausalLM"]}))


def test_the_command_line_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, config_of("GPT2", architectures=["GPT2LMHeadModel"]))
    assert main(["run", "figure-6", "--model", folder]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "GPT2LMHeadModel" in captured.err
    assert "Gemma3" in captured.err
